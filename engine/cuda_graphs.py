"""Decode steps recorded once per batch size and replayed: the host then launches one graph instead of every kernel."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.batch import BatchArrays
from engine.kernels.work_list import COLUMNS, SplitPlanner, WorkList
from engine.memory import device_memory, nbytes, reserved
from engine.staging import Layout, UploadRing
from engine.step import GroupTensors, StepTensors

# Batch sizes that are captured; a batch runs in the next larger one, its last rows not there.
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def sizes_for(max_num_seqs: int) -> tuple[int, ...]:
    """Capture sizes for batches of up to max_num_seqs; larger batches run without a graph."""
    largest = next((size for size in SIZES if size >= max_num_seqs), SIZES[-1])
    return tuple(size for size in SIZES if size <= largest)


class DecodeGraphs:
    """One graph per size over the same tensors: inputs and results of the largest, of which the others use the front.

    forward maps a step to the hidden states of its tokens; what follows (head, sampling) runs outside.
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], torch.Tensor],
        sizes: tuple[int, ...],
        num_groups: int,
        max_blocks: int,
        hidden: torch.Tensor,
        uploads: UploadRing,
        planners: tuple[SplitPlanner, ...] = (),
    ) -> None:
        """hidden: [largest size, hidden_size], where every graph leaves its result; uploads: where inputs lie before.

        planners: one per KV group, for kernels that want their decode work planned
        """
        self.forward, self.hidden, self.uploads, self.planners = forward, hidden, uploads, planners
        largest, device = max(sizes), hidden.device

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.own_planners = list(dict.fromkeys(planners))  # groups that see the same tokens have equal ones
        self.layouts = {size: self._layout(size, num_groups) for size in sizes}
        self.inputs = zeros(self.layouts[largest].num_bytes, dtype=torch.uint8)
        self.block_tables = [zeros(largest, max_blocks, dtype=torch.int32) for _ in range(num_groups)]
        self.query_start = zeros(1, dtype=torch.int32)  # nobody is in prefill
        self.last_tokens = torch.arange(largest, device=device)
        self.replays: dict[int, Callable[[], None]] = {}
        self.num_bytes: dict[int, int] = {}  # what capturing each size took of the device
        self.reserved_bytes = 0  # of that, what lies in torch's own pool
        largest_first = sorted(sizes, reverse=True)  # the smaller ones reuse the memory of the largest
        for size in largest_first:  # kernels are compiled and loaded: libraries have other ones for other sizes
            self._write(_nobody(num_groups), size)
            self._run(size)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        with no_garbage_collection():
            if device.type == "cuda":  # what was collected is given back before anything is measured
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
            reserved_before = reserved(device)
            for size in largest_first:
                before = device_memory(device)[0]
                self.replays[size] = capture(partial(self._run, size), pool)
                self.num_bytes[size] = max(0, before - device_memory(device)[0])
        self.reserved_bytes = reserved(device) - reserved_before

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tensors that all graphs read and write."""
        return nbytes([self.inputs, self.query_start, self.last_tokens, self.hidden, *self.block_tables])

    def __call__(self, arrays: BatchArrays) -> torch.Tensor | None:
        """Hidden states [num_seqs, hidden_size] of a step that only decodes, valid until the next; None: no graph."""
        num_seqs = len(arrays.context_lens)
        size = min((size for size in self.replays if size >= num_seqs), default=None)
        if size is None or arrays.num_decodes != num_seqs:
            return None
        self._write(arrays, size)
        self.replays[size]()
        return self.hidden[:num_seqs]

    def _layout(self, size: int, num_groups: int) -> Layout:
        """Token ids, positions, lengths, slots of each group, and the work of each planner."""
        slots = [((size,), "int64")] * num_groups
        works = [((planner.capacity(size).num_rows, COLUMNS), "int32") for planner in self.own_planners]
        return Layout.of(((size,), "int64"), ((size,), "int64"), ((size,), "int32"), *slots, *works)

    def _write(self, arrays: BatchArrays, size: int) -> None:
        """Copy a step's inputs to the device, all but the block tables in one copy.

        Rows behind them are not there: no tokens, and a slot that nothing is written to.
        """
        layout, num_groups = self.layouts[size], len(self.block_tables)
        memory, (token_ids, positions, context_lens, *more) = self.uploads.reserve(layout)
        _fill(token_ids, arrays.token_ids, 0)
        _fill(positions, arrays.positions, 0)
        _fill(context_lens, arrays.context_lens, 0)
        for place, slots in zip(more[:num_groups], arrays.slot_mapping, strict=True):
            _fill(place, slots, -1)
        for place, planner in zip(more[num_groups:], self.own_planners, strict=True):
            place[...] = planner.padded_plan(arrays.context_lens, size).rows
        self.inputs[: layout.num_bytes].copy_(memory, non_blocking=True)
        for ours, table in zip(self.block_tables, arrays.block_tables, strict=True):
            ours[: len(table), : table.shape[1]].copy_(self.uploads.stage(table), non_blocking=True)

    def _run(self, size: int) -> None:
        self.hidden[:size].copy_(self.forward(self._step(size)))

    def _step(self, size: int) -> StepTensors:
        """The first `size` rows as a step."""
        layout, num_groups = self.layouts[size], len(self.block_tables)
        token_ids, positions, context_lens, *more = layout.tensors(self.inputs[: layout.num_bytes])
        rows = dict(zip(self.own_planners, more[num_groups:], strict=True))
        works: list[WorkList | None] = [
            WorkList(rows[planner], planner.capacity(size), size, planner.window) for planner in self.planners
        ]
        return StepTensors(
            token_ids=token_ids,
            positions=positions,
            context_lens=context_lens,
            query_start=self.query_start,
            last_tokens=self.last_tokens[:size],
            groups=tuple(
                GroupTensors(tables[:size], slots, work)
                for tables, slots, work in zip(
                    self.block_tables, more[:num_groups], works or [None] * num_groups, strict=True
                )
            ),
            num_decodes=size,
            max_query_len=0,
            prefill_starts=(0,),
            prefill_context_lens=(),
        )


def _fill(place: np.ndarray[Any, Any], values: np.ndarray[Any, Any], filler: int) -> None:
    """The values, padded with filler."""
    place[: len(values)] = values
    place[len(values) :] = filler


def _nobody(num_groups: int) -> BatchArrays:
    """An empty step."""
    longs, ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return BatchArrays(
        seqs=[], num_decodes=0, token_ids=longs, positions=longs, context_lens=ints, query_start=ints,
        last_tokens=longs, block_tables=(ints[:, None],) * num_groups, slot_mapping=(longs,) * num_groups,
    )  # fmt: skip


def capture(run: Callable[[], None], pool: object) -> Callable[[], None]:
    """Record the kernels that run() launches (it has run before); returns a function that replays them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type] # what graph_pool_handle() gives
        run()
    return graph.replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, not inside `with`: freeing may call the driver and break the capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
