"""How ggml lays out the tensors of a graph in one buffer per place, and how large the buffers become.

Source: ggml 0.25.3 (llama.cpp at commit 0c1e57098), ggml-alloc.c: best fit among free blocks, results written over a
source that nobody else reads.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvplan.servers.llamacpp.graph import Tensor

# Operations that may write their result over a source.
IN_PLACE: Final = frozenset({
    "FILL", "SCALE", "ADD", "ADD_ID", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "UNARY", "ROPE", "RMS_NORM", "CLAMP",
    "SOFT_MAX",
})  # fmt: skip
ENDLESS: Final = 1 << 62


class Arena:
    """The address space of one buffer: its free blocks, by offset, and the highest byte in use so far."""

    def __init__(self, alignment: int) -> None:
        self.alignment, self.peak = alignment, 0
        self.free: list[list[int]] = [[0, ENDLESS]]

    def take(self, size: int) -> int:
        """The offset of a new tensor: in the smallest free block that holds it, the last one only at need."""
        size = -(-size // self.alignment) * self.alignment
        best, best_size = len(self.free) - 1, ENDLESS
        for i in range(len(self.free) - 1):
            if size <= self.free[i][1] <= best_size:
                best, best_size = i, self.free[i][1]
        block = self.free[best]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            del self.free[best]
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a tensor's bytes, merged with the free blocks beside it."""
        size = -(-size // self.alignment) * self.alignment
        free = self.free
        for i, block in enumerate(free):
            if block[0] + block[1] == offset:
                block[1] += size
                if i + 1 < len(free) and block[0] + block[1] == free[i + 1][0]:
                    block[1] += free.pop(i + 1)[1]
                return
            if offset + size == block[0]:
                block[0] = offset
                block[1] += size
                if i and free[i - 1][0] + free[i - 1][1] == block[0]:
                    free[i - 1][1] += free.pop(i)[1]
                return
        insort(free, [offset, size])


class Laid(NamedTuple):
    """A graph ready to be laid out: its nodes and leaves with their places, and leaves that stay for good."""

    nodes: Sequence[tuple[Tensor, int]]
    leaves: Sequence[tuple[Tensor, int]]
    outputs: frozenset[int]


class Layout:
    """One pass of ggml's allocator over a graph."""

    def __init__(self, arenas: Sequence[Arena], size: Callable[[int, Tensor], int]) -> None:
        self.arenas, self.size = arenas, size
        self.children: dict[int, int] = {}
        self.views: dict[int, int] = {}
        self.address: dict[int, tuple[int, int]] = {}

    def run(self, graph: Laid) -> None:
        """Lay the graph out; `peak` of each arena says how large its buffer is."""
        for leaf, place in graph.leaves:
            self.allocate(leaf, place, graph.outputs)
        children, views = self.children, self.views
        for node, place in graph.nodes:
            if node.view is not None and node.op != "NONE":
                views[id(node.view)] = views.get(id(node.view), 0) + 1
            if node.input:
                self.allocate(node, place, graph.outputs)
            for source in node.src:
                children[id(source)] = children.get(id(source), 0) + 1
                if source.input:
                    self.allocate(source, place, graph.outputs)
        for node, place in graph.nodes:
            for source in node.src:
                self.allocate(source, place, graph.outputs)
            self.allocate(node, place, graph.outputs)
            for source in node.src:
                self.release(source, graph.outputs)

    def allocate(self, tensor: Tensor, place: int, outputs: frozenset[int]) -> None:
        if tensor.buffer is not None or tensor.view is not None or id(tensor) in self.address:
            return
        if tensor.op in IN_PLACE and self.overwrites(tensor, place, outputs):
            return
        self.address[id(tensor)] = place, self.arenas[place].take(self.size(place, tensor))

    def overwrites(self, tensor: Tensor, place: int, outputs: frozenset[int]) -> bool:
        """Give a tensor the memory of a source that only it reads, if it has one of the same layout."""
        for source in tensor.src:
            base = source if source.view is None else source.view
            # A view has no address of its own here; ggml asks the view, which it never allocates.
            if source.view is not None or id(source) not in self.address or id(base) in outputs:
                continue
            if (source.kind, source.ne, source.nb) != (tensor.kind, tensor.ne, tensor.nb):
                continue
            if self.children.get(id(source)) == 1 and not self.views.get(id(source)):
                where, offset = self.address.pop(id(source))
                self.address[id(tensor)] = where, offset
                self.shrink(where, offset, source, tensor, place)
                return True
        return False

    def shrink(self, where: int, offset: int, source: Tensor, tensor: Tensor, place: int) -> None:
        """Free what a smaller tensor leaves of the memory that it took over."""
        align = self.arenas[where].alignment
        old = -(-self.size(where, source) // align) * align
        new = -(-self.size(where, tensor) // align) * align
        if old > new:
            self.arenas[where].give(offset + new, old - new)

    def release(self, source: Tensor, outputs: frozenset[int]) -> None:
        """Count a source as read; free it, or what it is a view of, after the last time."""
        left = self.children[id(source)] = self.children[id(source)] - 1
        if left or self.views.get(id(source)):
            return
        base = source
        if source.view is not None:
            base = source.view
            self.views[id(base)] = self.views.get(id(base), 0) - 1
            if self.views[id(base)] or self.children.get(id(base), 0):
                return
        if id(base) in self.address and id(base) not in outputs:
            where, offset = self.address.pop(id(base))
            self.arenas[where].give(offset, self.size(where, base))
