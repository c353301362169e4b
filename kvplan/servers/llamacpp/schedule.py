"""Which device runs each operation, where the graph is split, and what is copied between the places.

Source: ggml 0.25.3 (llama.cpp at commit 0c1e57098), ggml-backend.cpp, `ggml_backend_sched_split_graph`. Places are the
devices in the server's order, then the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvplan.servers.llamacpp.allocator import Laid
from kvplan.servers.llamacpp.fusions import kept_alive
from kvplan.servers.llamacpp.graph import HOST, PINNED, VIEWS, Graph, Tensor
from kvplan.servers.llamacpp.kernels import offloads, supports
from kvplan.servers.llamacpp.settings import Device

# Copies of a batch's inputs if several devices work on several batches at once.
PIPELINE_COPIES: Final = 4
KEPT_SOURCES: Final = 10  # sources of a node at most


@dataclass
class Split:
    """A run of nodes on one place, with the tensors that are copied there first."""

    place: int
    first: int
    end: int = 0
    inputs: list[Tensor] = field(default_factory=list)


class Schedule:
    """The assignment of a graph's tensors to places."""

    def __init__(self, graph: Graph, devices: Sequence[Device], assigned: dict[int, int], *, offload: bool,
                 copies: int = 1) -> None:  # fmt: skip
        self.graph, self.devices, self.offload, self.copies = graph, devices, offload, copies
        self.place: dict[int, int] = dict(assigned)
        self.host = len(devices)
        self.duplicates: dict[tuple[int, int], list[Tensor]] = {}
        self._assign()

    # --- what a place takes -----------------------------------------------------------------------------------------

    def takes(self, place: int, op: Tensor) -> bool:
        """True if a place computes an operation whose sources lie on no other device."""
        if place == self.host:
            return True
        if any(s.buffer is not None and s.buffer >= 0 and s.buffer != place for s in op.src):
            return False
        return supports(self.devices[place], op)

    def reads(self, place: int, buffer: int) -> bool:
        """True if a place reads a kind of buffer without a copy."""
        if place == self.host:
            return buffer in (PINNED, HOST)
        return buffer == place or (buffer == PINNED and self.devices[place].integrated)

    def buffer_of(self, place: int) -> int:
        """The kind of buffer that a place's results lie in."""
        if place == self.host:
            return PINNED if self.devices else HOST
        return place

    def readable(self, tensor: Tensor, place: int) -> bool:
        buffer = tensor.buffer if tensor.view is None else tensor.view.buffer
        if buffer is None:
            where = self.place.get(id(tensor))
            if where is None and tensor.view is not None:
                where = self.place.get(id(tensor.view))
            if where is None:
                return False
            buffer = self.buffer_of(where)
        return self.reads(place, buffer)

    # --- assignment -------------------------------------------------------------------------------------------------

    def by_buffer(self, tensor: Tensor, op: Tensor) -> int | None:
        """The first place that reads where a tensor lies and computes the operation."""
        buffer = tensor.buffer if tensor.view is None else tensor.view.buffer
        if buffer is None:
            return None
        for place in range(self.host + 1):
            if self.reads(place, buffer) and self.takes(place, op):
                return place
        return None

    def initial(self, tensor: Tensor) -> int | None:
        """The place that a tensor's own memory, or the weight that it reads, asks for."""
        if (where := self.by_buffer(tensor, tensor)) is not None:
            return where
        if tensor.input:
            return self.host
        if tensor.op in ("ROPE", "FLASH_ATTN_EXT"):
            return None
        for source in tensor.src:
            if source.weight:
                where = self.by_buffer(source, tensor)
                if self.offload and where == self.host:
                    for place in range(self.host):
                        if self.takes(place, tensor) and offloads(tensor):
                            return place
                return where
        return None

    def _assign(self) -> None:
        for tensor in (*self.graph.leaves, *self.graph.nodes):
            if id(tensor) not in self.place and (where := self.initial(tensor)) is not None:
                self.place[id(tensor)] = where
        nodes = [node for node in self.graph.nodes if node.op not in VIEWS]
        for only_devices in (True, False):
            self._expand(nodes, only_devices)
            self._expand(nodes[::-1], only_devices)
        for node in nodes:
            self._settle(node)
        self._fill()

    def _expand(self, nodes: Sequence[Tensor], only_devices: bool) -> None:
        """Let nodes without a place join the one before them."""
        current: int | None = None
        for node in nodes:
            if (where := self.place.get(id(node))) is not None:
                current = None if only_devices and where == self.host else where
            elif current is not None and self.takes(current, node):
                self.place[id(node)] = current

    def _settle(self, node: Tensor) -> None:
        """Give a node that no neighbor's place computes the place that reads most of its sources."""
        if id(node) in self.place:
            return
        best = -1
        for place in range(self.host + 1):
            if self.takes(place, node):
                known = sum(
                    self.readable(s, place) for s in node.src
                    if id(s) in self.place or (s.view is not None and id(s.view) in self.place)
                )  # fmt: skip
                if known > best:
                    best, self.place[id(node)] = known, place

    def _fill(self) -> None:
        """Give the rest (views, leaves) the place of what they are a view of, or of who reads them."""
        place = self.place
        for node in self.graph.nodes:
            if node.view is not None and id(node) not in place and id(node.view) in place:
                place[id(node)] = place[id(node.view)]
            for source in node.src:
                if id(source) not in place:
                    if source.view is not None:
                        if id(source.view) in place:
                            place[id(source)] = place[id(source.view)]
                    elif id(node) in place:
                        place[id(source)] = place[id(node)]
            if id(node) not in place:
                place[id(node)] = next(p for p in range(self.host + 1) if self.takes(p, node))

    # --- splits and copies ------------------------------------------------------------------------------------------

    def splits(self) -> list[Split]:
        """Split the graph where the place changes, and redirect sources to their copies."""
        nodes, place = self.graph.nodes, self.place
        start = next(i for i, node in enumerate(nodes) if node.op not in VIEWS)
        splits = [Split(place[id(nodes[start])], 0)]
        for i in range(start, len(nodes)):
            node = nodes[i]
            if node.op in VIEWS:
                continue
            split = splits[-1]
            if place[id(node)] != split.place or (split.inputs and self._brings_weights(node, split.place)):
                split.end = i
                split = Split(place[id(node)], i)
                splits.append(split)
            for j, source in enumerate(node.src):
                if place[id(source)] == split.place or self.readable(source, split.place):
                    continue
                key = id(source), split.place
                if key not in self.duplicates:
                    self.duplicates[key] = [duplicate(source) for _ in range(self.copies)]
                    split.inputs.append(source)
                node.src[j] = self.duplicates[key][0]
        splits[-1].end = len(nodes)
        return splits

    def _brings_weights(self, node: Tensor, current: int) -> bool:
        """True if a node reads a weight from elsewhere: a new split lets the last one's copy be overwritten."""
        return any(s.weight and self.place[id(s)] != current and not self.readable(s, current) for s in node.src)

    def laid(self) -> Laid:
        """The graph with its copies, in the order in which the allocator meets it."""
        splits, place = self.splits(), self.place
        outputs = set(self.graph.outputs)
        nodes: list[tuple[Tensor, int]] = []
        for split in splits:
            for source in split.inputs:
                nodes.append((Tensor("NONE", source.kind, source.ne, [source], nb=source.nb, view=source),
                              place[id(source)]))  # fmt: skip
                nodes.append((self.duplicates[id(source), split.place][0], split.place))
            run = self.graph.nodes[split.first : split.end]
            alive = kept_alive(run) if split.place != self.host else {}
            for node in run:
                nodes.append((node, place[id(node)]))
                nodes += [(dependency, split.place) for dependency in dependencies(alive.get(id(node), ()))]
        leaves = list(self._copied_leaves(splits, outputs)) if self.copies > 1 else []
        leaves += [(leaf, place[id(leaf)]) for leaf in self.graph.leaves if id(leaf) in place]
        return Laid(nodes, leaves, frozenset(outputs))

    def _copied_leaves(self, splits: Sequence[Split], outputs: set[int]) -> Iterator[tuple[Tensor, int]]:
        """The inputs and the splits' copies, once per batch in flight; they are never overwritten."""
        for leaf in self.graph.leaves:
            if leaf.input:
                where = self.place[id(leaf)]
                for copy in (leaf, *(duplicate(leaf) for _ in range(self.copies - 1))):
                    outputs.add(id(copy))
                    yield copy, where
        for split in splits:
            for source in split.inputs:
                for copy in self.duplicates[id(source), split.place]:
                    outputs.add(id(copy))
                    yield copy, split.place


def duplicate(source: Tensor) -> Tensor:
    return Tensor("NONE", source.kind, source.ne, nb=source.nb)


def dependencies(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Nodes that compute nothing and read what has to stay."""
    for i in range(0, len(tensors), KEPT_SOURCES):
        group = tensors[i : i + KEPT_SOURCES]
        yield Tensor("NONE", group[0].kind, group[0].ne, group, nb=group[0].nb, view=group[0])
