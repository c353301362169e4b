"""Tensors of a compute graph without their contents: shapes, strides, sources and views, as ggml makes them.

Source: ggml 0.25.3 (llama.cpp at commit 0c1e57098), ggml.c. A shape has the row first, and four dimensions.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

from kvplan.models.ggml_types import BLOCKS, row_bytes

Dims = tuple[int, int, int, int]
VIEWS: Final = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
# Buffers that are no device's: pinned host memory, and the host's own.
PINNED: Final = -1
HOST: Final = -2


def dims(*sizes: int) -> Dims:
    a, b, c, d = (*sizes, 1, 1, 1)[:4]
    return a, b, c, d


def strides(kind: str, ne: Dims) -> Dims:
    """Bytes between elements of each dimension of a tensor without gaps."""
    row = row_bytes(kind, ne[0])
    return BLOCKS[kind][1], row, row * ne[1], row * ne[1] * ne[2]


class Tensor:
    """A node or leaf of the graph.

    view    the tensor whose memory it shares, never a view itself
    buffer  where it already lies: a device's position, PINNED, HOST; None: it has to be allocated
    weight  True for a tensor of the model's file
    input   True for what the server writes before each batch
    """

    op: str
    kind: str
    ne: Dims
    nb: Dims
    src: "list[Tensor]"
    view: "Tensor | None"
    __slots__ = ("buffer", "input", "kind", "name", "nb", "nbytes", "ne", "op", "src", "view", "weight")

    def __init__(self, op: str, kind: str, ne: Dims, src: Sequence["Tensor"] = (), *, nb: Dims | None = None,
                 view: "Tensor | None" = None, buffer: int | None = None, weight: bool = False, name: str = "",
                 is_input: bool = False) -> None:  # fmt: skip
        self.op, self.kind, self.ne, self.src, self.name = op, kind, ne, list(src), name
        self.nb = strides(kind, ne) if nb is None else nb
        self.view = view if view is None or view.view is None else view.view
        self.buffer, self.weight, self.input = buffer, weight, is_input
        self.nbytes = size_of(kind, ne, self.nb)

    @property
    def elements(self) -> int:
        return prod(self.ne)

    @property
    def element_bytes(self) -> int:
        return BLOCKS[self.kind][1]

    @property
    def contiguous(self) -> bool:
        expected = strides(self.kind, self.ne)
        return all(size == 1 or self.nb[i] == expected[i] for i, size in enumerate(self.ne))

    @property
    def contiguous_rows(self) -> bool:
        return self.nb[0] == BLOCKS[self.kind][1]


def size_of(kind: str, ne: Dims, nb: Dims) -> int:
    """Bytes from the first element to behind the last one, gaps included."""
    if min(ne) <= 0:
        return 0
    block, size = BLOCKS[kind]
    first = size + (ne[0] - 1) * nb[0] if block == 1 else ne[0] * nb[0] // block
    return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


class Graph:
    """A compute graph in the order in which its nodes run; methods are ggml's operations."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.outputs: set[int] = set()  # ids of tensors that are read after the graph, so never overwritten
        self._seen: set[int] = set()

    def output(self, tensor: Tensor) -> Tensor:
        self.outputs.add(id(tensor))
        return tensor

    def expand(self, root: Tensor) -> Tensor:
        """Add a tensor and what it is computed from, sources first, from left to right."""
        stack: list[tuple[Tensor, int]] = [] if id(root) in self._seen else [(root, 0)]
        self._seen.add(id(root))
        while stack:
            tensor, position = stack.pop()
            if position < len(tensor.src):
                stack.append((tensor, position + 1))
                source = tensor.src[position]
                if id(source) not in self._seen:
                    self._seen.add(id(source))
                    stack.append((source, 0))
            else:
                (self.leaves if tensor.op == "NONE" else self.nodes).append(tensor)
        return root

    # --- inputs and views ---------------------------------------------------------------------------------------

    def input(self, kind: str, *sizes: int) -> Tensor:
        return Tensor("NONE", kind, dims(*sizes), is_input=True)

    def view(self, a: Tensor, ne: Dims, nb: Sequence[int]) -> Tensor:
        """A window into a tensor; `nb` has the strides after the first, those that are missing are without gaps."""
        steps = [BLOCKS[a.kind][1], *nb]
        while len(steps) < 4:
            steps.append(steps[-1] * ne[len(steps) - 1] if len(steps) > 1 else row_bytes(a.kind, ne[0]))
        return Tensor("VIEW", a.kind, ne, [a], nb=(steps[0], steps[1], steps[2], steps[3]), view=a)

    def like(self, op: str, a: Tensor, src: Sequence[Tensor]) -> Tensor:
        """An operation whose result is written into a tensor."""
        return Tensor(op, a.kind, a.ne, src, nb=a.nb, view=a)

    def reshape(self, a: Tensor, *sizes: int) -> Tensor:
        return Tensor("RESHAPE", a.kind, dims(*sizes), [a], view=a)

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        ne, nb = [0] * 4, [0] * 4
        for i, axis in enumerate(axes):
            ne[axis], nb[axis] = a.ne[i], a.nb[i]
        return Tensor("PERMUTE", a.kind, dims(*ne), [a], nb=dims(*nb), view=a)

    def transpose(self, a: Tensor) -> Tensor:
        ne, nb = (a.ne[1], a.ne[0], *a.ne[2:]), (a.nb[1], a.nb[0], *a.nb[2:])
        return Tensor("TRANSPOSE", a.kind, dims(*ne), [a], nb=dims(*nb), view=a)

    # --- elements -----------------------------------------------------------------------------------------------

    def same(self, op: str, *src: Tensor) -> Tensor:
        """An operation whose result has its first source's type and shape."""
        return Tensor(op, src[0].kind, src[0].ne, src)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.same("ADD", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.same("MUL", a, b)

    def scale(self, a: Tensor) -> Tensor:
        return self.same("SCALE", a)

    def unary(self, a: Tensor, name: str = "") -> Tensor:
        """An activation; `name` says which where the device's pass over the graph asks."""
        return Tensor("UNARY", a.kind, a.ne, [a], name=name)

    def glu(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """A gate times its activation; without a second tensor both are halves of one."""
        if b is not None:
            return self.same("GLU", a, b)
        return Tensor("GLU", a.kind, dims(a.ne[0] // 2, *a.ne[1:]), [a])

    def cont(self, a: Tensor, *sizes: int) -> Tensor:
        return Tensor("CONT", a.kind, dims(*sizes) if sizes else a.ne, [a])

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        return Tensor("CONCAT", a.kind, dims(a.ne[0] + b.ne[0], *a.ne[1:]), [a, b])

    def repeat(self, a: Tensor, *sizes: int) -> Tensor:
        return Tensor("REPEAT", a.kind, dims(*sizes), [a])

    def pad(self, a: Tensor, extra: int) -> Tensor:
        return Tensor("PAD", a.kind, dims(a.ne[0] + extra, *a.ne[1:]), [a])

    def sum_rows(self, a: Tensor) -> Tensor:
        return Tensor("SUM_ROWS", a.kind, dims(1, *a.ne[1:]), [a])

    def copy(self, a: Tensor, to: Tensor) -> Tensor:
        return self.like("CPY", to, [a, to])

    def cast(self, a: Tensor, kind: str) -> Tensor:
        """A copy of another type; it names itself as a source, as ggml's does."""
        result = Tensor("CPY", kind, a.ne, [a])
        result.src.append(result)
        return result

    # --- matrices and attention -----------------------------------------------------------------------------------

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        return Tensor("MUL_MAT", "F32", dims(w.ne[1], x.ne[1], x.ne[2], x.ne[3]), [w, x])

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        return Tensor("MUL_MAT_ID", "F32", dims(w.ne[1], ids.ne[0], x.ne[2]), [w, x, ids])

    def get_rows(self, a: Tensor, rows: Tensor) -> Tensor:
        kind = "I32" if a.kind == "I32" else "F32"
        return Tensor("GET_ROWS", kind, dims(a.ne[0], *rows.ne[:3]), [a, rows])

    def set_rows(self, a: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        return self.like("SET_ROWS", a, [values, rows, a])

    def top_k(self, a: Tensor, k: int) -> Tensor:
        order = Tensor("ARGSORT", "I32", a.ne, [a])
        return self.view(order, dims(k, *a.ne[1:]), order.nb[1:])

    def flash_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        src = [q, k, v, mask] + ([sinks] if sinks is not None else [])
        return Tensor("FLASH_ATTN_EXT", "F32", dims(v.ne[0], q.ne[2], q.ne[1], q.ne[3]), src)

    def soft_max(self, a: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        return self.same("SOFT_MAX", a, *[x for x in (mask, sinks) if x is not None])

    # --- recurrent layers ------------------------------------------------------------------------------------------

    def ssm_conv(self, x: Tensor, kernel: Tensor) -> Tensor:
        return Tensor("SSM_CONV", "F32", dims(kernel.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2]), [x, kernel])

    def ssm_scan(self, state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor) -> Tensor:
        size = x.elements + prod(state.ne[:3]) * ids.ne[0]
        return Tensor("SSM_SCAN", "F32", dims(size), [state, x, dt, a, b, c, ids])

    def delta_net(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor,
                  states: int) -> Tensor:  # fmt: skip
        rows = v.ne[2] * v.ne[3] + v.ne[0] * v.ne[3] * states
        return Tensor("GATED_DELTA_NET", "F32", dims(v.ne[0] * v.ne[1], rows), [q, k, v, gate, beta, state])
