"""The routed experts of a layer as a checkpoint stores them: this rank's share of the matrices, and their biases.

Most checkpoints have each expert's matrices by themselves: each is loaded as a linear layer of its kind is
(engine/quantized.py), into its place among all. gpt-oss has those of all experts in one tensor, Qwen3.5 as published
too, laid out as they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch

from engine import quantized
from engine.kernels.matrices import Matrix, Mxfp4Matrix
from engine.loader import WeightSource
from engine.quantized import ALL, MXFP4_GROUP, Piece
from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import MoeMlp, Scheme

Empty = quantized.Empty


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a sparse layer.

    fused    all experts are in one tensor, gate and up interleaved
    stacked  that of all experts' gates and ups, one after the other, and that of their downs, where there are such
    shared   the shared expert, beside the block; None: within it
    """

    block: str
    router: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: bool = False
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    correction: str = "gate.e_score_correction_bias"
    shared: str | None = None


EXPERT_NAMES: dict[Literal["mixtral", "minimax", "qwen", "gpt_oss", "granite"], ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "minimax": ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2", correction="e_score_correction_bias"),
    "qwen": ExpertNames("mlp", "gate"),
    "gpt_oss": ExpertNames("mlp", "router", fused=True),
    "granite": ExpertNames(
        "block_sparse_moe", "router.layer", stacked=("input_linear.weight", "output_linear.weight"), shared="shared_mlp"
    ),
}


class Memory(Protocol):
    """A Builder: where weights come from, and who remembers them."""

    source: WeightSource

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...

    def buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a layer, of each the inner channels `mine`.

    w13  [experts, 2 * inner, hidden]: gate rows, then up rows; b13 [experts, 2 * inner] where there are biases
    w2   [experts, hidden, inner]; b2 [experts, hidden]
    """

    w13: Matrix
    w2: Matrix
    b13: torch.Tensor | None
    b2: torch.Tensor | None


def load(
    memory: Memory, name: str, facts: MoeMlp, hidden: int, mine: slice, scheme: Scheme | None, method: str
) -> Experts:
    """name: of the experts in the checkpoint; scheme: how they are stored there, None for the model's dtype."""
    names = EXPERT_NAMES[facts.names]
    stacked = [f"{name.removesuffix('experts')}{part}" for part in names.stacked]
    if facts.names == "granite" or (not names.fused and memory.source.dtype_of(stacked[0]) is not None):
        if scheme is not None:
            raise UnsupportedModelError(f"{name}: {scheme.kind} of experts in one tensor; the engine runs none there")
        return Experts(*_stacked(memory, stacked, facts, hidden, mine), None, None)
    if not names.fused:
        return Experts(*_expert_by_expert(memory, name, facts, hidden, mine, scheme, method), None, None)
    match scheme:
        case None:
            matrices: tuple[Matrix, Matrix] = _fused(memory, name, facts, hidden, mine)
        case Scheme(kind="mxfp4"):
            matrices = _fused_mxfp4(memory, name, facts, hidden, mine)
        case _:
            raise UnsupportedModelError(f"{name}: {scheme.kind} of experts in one tensor; the engine runs mxfp4 there")
    return Experts(*matrices, *_fused_biases(memory, name, facts, hidden, mine))


# --- expert by expert -------------------------------------------------------------------------------------------------


class Places:
    """Allocates for all experts what the first one's loader asks for; gives each expert its own part of it."""

    def __init__(self, empty: Empty, num_experts: int) -> None:
        self._empty, self._num_experts = empty, num_experts
        self._wholes: list[torch.Tensor] = []
        self._firsts: list[torch.Tensor] = []  # the first expert's parts of them

    def first(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self._wholes.append(self._empty(self._num_experts, *shape, dtype=dtype))
        self._firsts.append(self._wholes[-1][0])
        return self._firsts[-1]

    def of(self, expert: int) -> Empty:
        """What a loader allocates one expert's tensors with; each asks for the same ones in the same order."""
        if expert == 0:
            return self.first
        parts = iter([whole[expert] for whole in self._wholes])
        return lambda *shape, dtype=None: next(parts)

    @property
    def is_meta(self) -> bool:
        return self._wholes[0].is_meta

    def all_of(self, matrix: Matrix) -> Matrix:
        """The first expert's matrix -> that of all experts."""
        if isinstance(matrix, torch.Tensor):
            return self._whole(matrix)
        tensors = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
        wholes = {name: self._whole(part) for name, part in tensors.items() if isinstance(part, torch.Tensor)}
        return type(matrix)(**{**tensors, **wholes})

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        return next(whole for whole, first in zip(self._wholes, self._firsts, strict=True) if first is part)


def _expert_by_expert(
    memory: Memory, name: str, facts: MoeMlp, hidden: int, mine: slice, scheme: Scheme | None, method: str
) -> tuple[Matrix, Matrix]:
    names, inner = EXPERT_NAMES[facts.names], facts.inner

    def stacked(pieces: Callable[[str], list[Piece]]) -> Matrix:
        places = Places(memory.empty, facts.num_experts)

        def load_one(e: int) -> Matrix:
            return quantized.load(scheme, method, pieces(f"{name}.{e}"), memory.source, places.of(e), memory.buffer)

        first = load_one(0)
        for e in range(1, 1 if places.is_meta else facts.num_experts):  # of tensors without memory the first says all
            load_one(e)
        return places.all_of(first)

    return (
        stacked(
            lambda expert: [Piece(f"{expert}.{part}", inner, hidden, rows=mine) for part in (names.gate, names.up)]
        ),
        stacked(lambda expert: [Piece(f"{expert}.{names.down}", hidden, inner, columns=mine)]),
    )


# --- all experts in one tensor: Qwen3.5, Granite 4 --------------------------------------------------------------------


def _stacked(
    memory: Memory, names: list[str], facts: MoeMlp, hidden: int, mine: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored [outputs, inputs], gate rows before up rows."""
    count, inner, local = facts.num_experts, facts.inner, mine.stop - mine.start
    w13, w2 = memory.empty(count, 2 * local, hidden), memory.empty(count, hidden, local)
    for i, half in enumerate((slice(0, local), slice(local, 2 * local))):
        rows = slice(i * inner + mine.start, i * inner + mine.stop)
        memory.source.fill(w13[:, half], names[0], (count, 2 * inner, hidden), (ALL, rows, ALL))
    memory.source.fill(w2, names[1], (count, hidden, inner), (ALL, ALL, mine))
    return w13, w2


# --- all experts in one tensor: gpt-oss -------------------------------------------------------------------------------


def _halves(mine: slice) -> list[tuple[slice, slice]]:
    """Of gate and of up: its rows among those that are held, and among the checkpoint's, where they take turns."""
    local = mine.stop - mine.start
    return [
        (slice(0, local), slice(2 * mine.start, 2 * mine.stop, 2)),
        (slice(local, 2 * local), slice(2 * mine.start + 1, 2 * mine.stop, 2)),
    ]


def _fused(memory: Memory, name: str, facts: MoeMlp, hidden: int, mine: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored [inputs, outputs]."""
    count, inner, local = facts.num_experts, facts.inner, mine.stop - mine.start
    w13, w2 = memory.empty(count, 2 * local, hidden), memory.empty(count, hidden, local)
    for half, columns in _halves(mine):
        shape, part = (count, hidden, 2 * inner), (ALL, ALL, columns)
        memory.source.fill(w13[:, half].transpose(1, 2), f"{name}.gate_up_proj", shape, part)
    memory.source.fill(w2.transpose(1, 2), f"{name}.down_proj", (count, inner, hidden), (ALL, mine, ALL))
    return w13, w2


def _fused_mxfp4(memory: Memory, name: str, facts: MoeMlp, hidden: int, mine: slice) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
    """As OpenAI publishes gpt-oss: blocks [experts, outputs, groups, 16 bytes], scales [experts, outputs, groups]."""
    count, inner, local = facts.num_experts, facts.inner, mine.stop - mine.start
    quantized.check_groups(Piece(f"{name}.gate_up_proj", 2 * inner, hidden), MXFP4_GROUP)
    quantized.check_groups(Piece(f"{name}.down_proj", hidden, inner, columns=mine), MXFP4_GROUP)
    w13 = quantized.empty_mxfp4(memory.empty, 2 * local, hidden, experts=count)
    w2 = quantized.empty_mxfp4(memory.empty, hidden, local, experts=count)
    for half, rows in _halves(mine):
        _fill_mxfp4(memory.source, w13, f"{name}.gate_up_proj", (count, 2 * inner, hidden), half, (ALL, rows, ALL))
    groups = slice(mine.start // MXFP4_GROUP, mine.stop // MXFP4_GROUP)
    _fill_mxfp4(memory.source, w2, f"{name}.down_proj", (count, hidden, inner), ALL, (ALL, ALL, groups))
    return w13, w2


def _fill_mxfp4(
    source: WeightSource,
    matrix: Mxfp4Matrix,
    name: str,
    shape: tuple[int, int, int],
    rows: slice,
    part: tuple[slice, slice, slice],
) -> None:
    """shape: (experts, outputs, inputs) of the checkpoint; part: of its experts, outputs, and groups of inputs."""
    experts, outputs, inputs = shape
    groups = inputs // MXFP4_GROUP
    values = matrix.values.unflatten(-1, (-1, MXFP4_GROUP // 2))
    source.fill(values[:, rows], f"{name}_blocks", (experts, outputs, groups, MXFP4_GROUP // 2), (*part, ALL))
    source.fill(matrix.scales[:, rows], f"{name}_scales", (experts, outputs, groups), part)
    quantized.check_powers(matrix.scales[:, rows], f"{name}_scales", source)


def _fused_biases(
    memory: Memory, name: str, facts: MoeMlp, hidden: int, mine: slice
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not facts.bias:
        return None, None
    count, inner = facts.num_experts, facts.inner
    b13, b2 = memory.empty(count, 2 * (mine.stop - mine.start)), memory.empty(count, hidden)
    for half, columns in _halves(mine):
        memory.source.fill(b13[:, half], f"{name}.gate_up_proj_bias", (count, 2 * inner), (ALL, columns))
    memory.source.fill(b2, f"{name}.down_proj_bias", (count, hidden))
    return b13, b2
