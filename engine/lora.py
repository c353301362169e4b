"""LoRA adapters in slots on the device: y += scale * B (A x) for the tokens of the requests that name them.

Every linear layer of the decoder's layers, but for experts and what latent attention absorbs, has room for `max_loras`
adapters at the largest rank, whatever they hold; others wait in host memory and take the place of the one that was used
least lately. Layout and sharding as in vLLM 0.33 (lora/layers): of a layer whose outputs are split, B is; of one whose
inputs are, A is; fully sharded, the other matrix too, for a gather or a sum of the small vectors between them.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from engine import quantized
from engine.adapter_config import Shape, check_fit
from engine.adapters import Adapters
from engine.batch import BatchArrays
from engine.kernels.lora_rows import NOBODY, Ints, LoraRows, tiles_of
from engine.layers import ALL, Builder, Linear, SummedLinear
from engine.memory import nbytes
from engine.peft import Adapter, LowRank, read_adapter
from engine.quantized import Piece
from engine.staging import UploadRing
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, UsageError

ABSORBED = ("kv_b_proj",)  # latent attention decodes with this matrix itself, never with its product


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """The adapters' matrices for one linear layer, which may be fused from several, on this rank.

    a       [max_loras, layers, rows of A, inputs]
    b       [max_loras, outputs, max_lora_rank]: the layers one below the other
    starts  [layers + 1] int32: the first output of each
    first_rank  the row of A that this rank holds first; first_output: where in y the outputs of B belong
    """

    pieces: tuple[Piece, ...]
    a: torch.Tensor
    b: torch.Tensor
    starts: torch.Tensor
    counts: tuple[int, ...]  # outputs of each layer here
    first_rank: int
    first_output: int
    is_summed: bool  # over the ranks: the inputs are split
    is_sharded: bool
    tp: TensorParallel
    kernels: ModuleType
    rows: LoraRows

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to y [num_tokens, outputs], in place, what the adapters make of x [num_tokens, inputs]."""
        small = self.kernels.lora_shrink(x, self.a, self.rows, first_rank=self.first_rank)
        if self.is_sharded and self.is_summed:
            small = self.tp.all_reduce(small)
        elif self.is_sharded:
            small = self._gathered(small)
        outputs = slice(self.first_output, self.first_output + self.b.shape[1])
        self.kernels.lora_expand(y[:, outputs], small, self.b, self.starts, max(self.counts), self.rows)

    def _gathered(self, small: torch.Tensor) -> torch.Tensor:
        """[num_tokens, layers, share of the rank] -> [num_tokens, layers, rank]."""
        num_tokens, layers, share = small.shape
        ranks = self.tp.all_gather(small.flatten(1)).view(num_tokens, self.tp.size, layers, share)
        return ranks.transpose(1, 2).reshape(num_tokens, layers, self.tp.size * share)

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter's matrices into a slot; zeros where it has none, or smaller ones."""
        self.a[slot] = 0
        self.b[slot] = 0
        for i, piece in enumerate(self.pieces):
            low = adapter.layers.get(piece.name)
            if low is not None:
                self._load(slot, i, piece, low)

    def _load(self, slot: int, i: int, piece: Piece, low: LowRank) -> None:
        mine = low.a[self.first_rank : self.first_rank + self.a.shape[2], piece.columns]
        self.a[slot, i, : len(mine)] = mine
        start = sum(self.counts[:i])
        outputs = low.b[piece.rows][self.first_output :][: self.counts[i]]
        self.b[slot, start : start + len(outputs), : low.rank] = outputs


@dataclass(frozen=True, slots=True)
class AdaptedLinear(Linear):
    """A linear layer and its adapters."""

    slots: SlotLayer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = Linear.__call__(self, x)
        self.slots.add(y, x)
        return y


@dataclass(frozen=True, slots=True)
class AdaptedSummedLinear(SummedLinear):
    """The same where the inputs are split over the ranks: each adds its part before the sum."""

    slots: SlotLayer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = quantized.product(self.kernels, x, self.weight, None)
        self.slots.add(y, x)
        y = self.tp.all_reduce(y)
        return y if self.bias is None else y + self.bias


@dataclass(slots=True)
class LoraBuilder(Builder):
    """Builds linear layers with room for adapters."""

    adapters: "LoraSlots | None" = None

    def outputs(
        self, rows: list[tuple[str, int, slice]], inputs: int, *, bias: bool = False, quantizable: bool = True
    ) -> Linear:
        linear = Builder.outputs(self, rows, inputs, bias=bias, quantizable=quantizable)
        assert self.adapters is not None
        pieces = [Piece(name, outputs, inputs, part) for name, outputs, part in rows]
        if pieces[0].name.endswith(ABSORBED):
            return linear
        slots = self.adapters.slot_layer(pieces, self, is_summed=False)
        return AdaptedLinear(linear.weight, linear.bias, self.kernels, slots)

    def inputs(self, name: str, outputs: int, inputs: int, part: slice, *, bias: bool = False) -> SummedLinear:
        linear = Builder.inputs(self, name, outputs, inputs, part, bias=bias)
        assert self.adapters is not None
        slots = self.adapters.slot_layer([Piece(name, outputs, inputs, columns=part)], self, is_summed=True)
        return AdaptedSummedLinear(linear.weight, linear.bias, self.kernels, self.tp, slots)


@dataclass(slots=True)
class LoraSlots(Adapters):
    """The adapters of a model on one rank: those that are known, and those that are in the slots."""

    max_loras: int
    max_lora_rank: int
    fully_sharded: bool
    max_num_tokens: int  # of a step
    layers: list[SlotLayer] = field(default_factory=list)
    known: dict[str, Adapter] = field(default_factory=dict)
    slot_of: OrderedDict[str, int] = field(default_factory=OrderedDict)  # the least lately used first
    rows: LoraRows | None = None
    walks_on_host: bool = True  # the kernels do

    def builder(self, plain: Builder) -> Builder:
        self.rows = LoraRows.empty(self.max_num_tokens, self.max_loras, plain.device)
        self.walks_on_host = plain.kernels.LORA_WALKS_ON_HOST
        own = (plain.source, plain.tp, plain.kernels, plain.dtype, plain.device, plain.quantization)
        return LoraBuilder(*own, adapters=self)

    def slot_layer(self, pieces: list[Piece], builder: Builder, *, is_summed: bool) -> SlotLayer:
        """Room for adapters of a layer that a builder makes."""
        assert self.rows is not None
        tp, device, rank = builder.tp, builder.device, self.max_lora_rank
        is_split = is_summed or any(piece.rows != ALL for piece in pieces)
        is_sharded = self.fully_sharded and tp.size > 1 and is_split
        counts = [len(piece.local_rows) for piece in pieces]
        first_rank = first_output = 0
        rank_a = rank
        if is_sharded and is_summed:
            share = tp.share(counts[0], "outputs (fully_sharded_loras)")
            counts, first_output = [share.stop - share.start], share.start
        elif is_sharded:
            share = tp.share(rank, "max_lora_rank (fully_sharded_loras)")
            rank_a, first_rank = share.stop - share.start, share.start
        shape_a = (self.max_loras, len(pieces), rank_a, len(pieces[0].local_columns))
        layer = SlotLayer(
            pieces=tuple(pieces),
            a=torch.zeros(shape_a, dtype=builder.dtype, device=device),
            b=torch.zeros((self.max_loras, sum(counts), rank), dtype=builder.dtype, device=device),
            starts=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32, device=device),
            counts=tuple(counts),
            first_rank=first_rank,
            first_output=first_output,
            is_summed=is_summed,
            is_sharded=is_sharded,
            tp=tp,
            kernels=builder.kernels,
            rows=self.rows,
        )
        self.layers.append(layer)
        return layer

    @property
    def num_bytes(self) -> int:
        assert self.rows is not None
        return nbytes([t for layer in self.layers for t in (layer.a, layer.b, layer.starts)]) + self.rows.num_bytes

    # --- adapters -----------------------------------------------------------------------------------------------

    def add(self, name: str, path: Path) -> None:
        if name in self.known:
            raise UsageError(f"adapter {name!r}: is there already ({self.known[name].path}); choose another name")
        adapter = read_adapter(path)
        self._check(adapter)
        self.known[name] = adapter

    def _check(self, adapter: Adapter) -> None:
        """Refuse what has no place in the slots."""
        layers = {name: Shape(low.rank, low.a.shape[1], len(low.b)) for name, low in adapter.layers.items()}
        model = {piece.name: (piece.inputs, piece.outputs) for layer in self.layers for piece in layer.pieces}
        check_fit(adapter.path, layers, self.max_lora_rank, model)

    def cache_keys(self, name: str) -> tuple[Hashable, ...]:
        adapter = self.known.get(name)
        if adapter is None:
            raise InvalidInputError(f"adapter: {name!r:.60} is not known; add it first, or remove it")
        return (("lora", name, str(adapter.path)),)  # as vLLM's hashes have it

    # --- steps --------------------------------------------------------------------------------------------------

    def begin(self, arrays: BatchArrays, uploads: UploadRing | None = None) -> None:
        assert self.rows is not None
        slots = self._slots_of_tokens(arrays)
        rows, tile_slots, by_slot = tiles_of(slots, len(self.rows.tile_slots))
        for place, values in ((self.rows.rows, rows), (self.rows.tile_slots, tile_slots)):
            if len(values):
                host = torch.from_numpy(values) if uploads is None else uploads.stage(values)
                place[: len(values)].copy_(host, non_blocking=True)
        if self.walks_on_host:
            device = self.rows.rows.device
            self.rows.by_slot = [(slot, torch.from_numpy(mine).to(device, torch.int64)) for slot, mine in by_slot]

    def _slots_of_tokens(self, arrays: BatchArrays) -> Ints:
        """[num_tokens] int32. A step of nobody, as a start measures and compiles with, has an adapter on all tokens
        where the host walks them. Kernels get tiles of nobody: what is compiled next may have fewer tokens.
        """
        num_tokens = len(arrays.token_ids)
        if not arrays.seqs:
            return np.full(num_tokens, 0 if self.walks_on_host else NOBODY, np.int32)
        names = [seq.adapter for seq in arrays.seqs]
        self._activate({name for name in names if name is not None})
        slots = np.array([NOBODY if name is None else self.slot_of[name] for name in names], np.int32)
        lens = np.diff(arrays.last_tokens, prepend=-1)
        return np.repeat(slots, lens)

    def _activate(self, names: set[str]) -> None:
        """Have these in slots; those that nobody has used for longest make room."""
        assert self.rows is not None
        for name in sorted(names):
            slot = self.slot_of.pop(name, None)
            if slot is None:
                slot = self._free_slot(names)
                for layer in self.layers:
                    layer.load(slot, self.known[name])
                self.rows.ranks[slot] = self.known[name].rank
            self.slot_of[name] = slot

    def _free_slot(self, needed: set[str]) -> int:
        if len(self.slot_of) < self.max_loras:
            return len(self.slot_of)
        unused = next(name for name in self.slot_of if name not in needed)
        return self.slot_of.pop(unused)
