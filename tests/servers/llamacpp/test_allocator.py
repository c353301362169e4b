"""How tensors are laid out in one buffer: worked by hand after ggml-alloc.c (ggml 0.25.3)."""

import pytest

from kvplan.servers.llamacpp.allocator import Arena, Laid, Layout
from kvplan.servers.llamacpp.graph import Graph, Tensor, dims


def arena_of(*blocks: tuple[int, int]) -> Arena:
    arena = Arena(128)
    arena.free = [list(block) for block in blocks]
    return arena


def test_a_tensor_takes_whole_alignments() -> None:
    arena = Arena(128)
    assert (arena.take(1), arena.take(129), arena.take(128)) == (0, 128, 384)
    assert arena.peak == 512


def test_the_smallest_hole_that_holds_it_is_filled() -> None:
    arena = arena_of((0, 1024), (2048, 256), (4096, 512), (8192, 1 << 40))
    assert arena.take(256) == 2048
    assert arena.take(300) == 4096


def test_of_equal_holes_the_later_one_is_filled() -> None:
    assert arena_of((0, 256), (1024, 256), (4096, 1 << 40)).take(256) == 1024


def test_the_end_grows_only_at_need() -> None:
    arena = arena_of((0, 256), (1024, 1 << 40))
    assert arena.take(512) == 1024


def test_freed_bytes_join_their_neighbors() -> None:
    arena = Arena(128)
    first, second, third = arena.take(128), arena.take(128), arena.take(128)
    arena.give(first, 128)
    arena.give(third, 128)
    assert len(arena.free) == 2
    arena.give(second, 128)
    assert [block[0] for block in arena.free] == [0]


def peak(graph: Graph, outputs: frozenset[int] = frozenset()) -> int:
    arena = Arena(128)
    nodes, leaves = [(node, 0) for node in graph.nodes], [(leaf, 0) for leaf in graph.leaves]
    Layout([arena], lambda _place, tensor: tensor.nbytes).run(Laid(nodes, leaves, outputs))
    return arena.peak


def chain(graph: Graph) -> tuple[Tensor, Tensor]:
    x = graph.input("F32", 1024)
    y = graph.unary(x)
    graph.expand(graph.unary(y))
    return x, y


def test_a_result_is_written_over_a_source_that_nobody_else_reads() -> None:
    graph = Graph()
    chain(graph)
    assert peak(graph) == 4096


@pytest.mark.parametrize(("outputs", "expected"), [(0, 8192), (1, 8192)])
def test_an_output_is_not_written_over(outputs: int, expected: int) -> None:
    graph = Graph()
    assert peak(graph, frozenset({id(chain(graph)[outputs])})) == expected


def test_a_source_that_is_read_again_stays() -> None:
    """x -> silu(x) -> silu(x) + x: the sum goes over one of its sources, so two tensors live at once."""
    graph = Graph()
    x = graph.input("F32", 1024)
    graph.expand(graph.add(graph.unary(x), x))
    assert peak(graph) == 8192


def test_a_viewed_tensor_stays_until_its_view_is_read() -> None:
    """A matrix product is not written over its source; its source lives until the view of it has been read."""
    graph = Graph()
    weight = Tensor("NONE", "F32", dims(512, 1024), buffer=0, weight=True)
    x = graph.input("F32", 1024)
    half = graph.view(x, dims(512), ())
    graph.expand(graph.mul_mat(weight, half))
    assert peak(graph) == 4096 + 4096
