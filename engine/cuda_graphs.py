"""Decode steps recorded once per batch size and replayed: the host then launches one graph instead of every kernel."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine.batch import BatchArrays, Ints
from engine.kernels.work_list import COLUMNS, Planner, WorkList
from engine.memory import device_memory
from engine.staging import Outbox
from engine.step import GroupTensors, StepTensors

# Batch sizes that are captured; a batch runs in the next larger one, its last rows not there.
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def sizes_for(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes that batches of up to max_num_seqs need; larger batches than the largest run without a graph."""
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
        outbox: Outbox,
        planners: tuple[Planner, ...] = (),
    ) -> None:
        """hidden: [largest size, hidden_size], where every graph leaves its result; outbox: where inputs lie before.

        planners: one per KV group, for kernels that want their decode work planned
        """
        self.forward, self.hidden, self.outbox, self.planners = forward, hidden, outbox, planners
        largest, device = max(sizes), hidden.device

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids, self.positions = (zeros(largest, dtype=torch.int64) for _ in range(2))
        self.context_lens = zeros(largest, dtype=torch.int32)  # 0: a row that is not there
        self.groups = tuple(
            GroupTensors(zeros(largest, max_blocks, dtype=torch.int32), zeros(largest, dtype=torch.int64) - 1)
            for _ in range(num_groups)
        )
        self.work_rows = {
            planner: zeros(planner.capacity(largest).num_rows, COLUMNS, dtype=torch.int32) for planner in set(planners)
        }
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.replays: dict[int, Callable[[], None]] = {}
        self.num_bytes: dict[int, int] = {}  # what capturing each size took of the device
        for size in sorted(sizes, reverse=True):  # largest first: the smaller ones reuse its memory
            before = device_memory(device)[0]
            self._plan(np.zeros(0, np.int32), size)
            self.replays[size] = capture(partial(self._run, size), pool)
            self.num_bytes[size] = max(0, before - device_memory(device)[0])

    def __call__(self, arrays: BatchArrays) -> torch.Tensor | None:
        """Hidden states [num_seqs, hidden_size] of a step that only decodes, valid until the next; None: no graph."""
        num_seqs = len(arrays.context_lens)
        size = min((size for size in self.replays if size >= num_seqs), default=None)
        if size is None or arrays.num_decodes != num_seqs:
            return None
        self._write(arrays, num_seqs, size)
        self.replays[size]()
        return self.hidden[:num_seqs]

    def _write(self, arrays: BatchArrays, n: int, size: int) -> None:
        """Put a step's numbers into the first n rows and mark the others of this size as not there."""
        put = self.outbox.put
        for ours, news in (
            (self.token_ids, arrays.token_ids),
            (self.positions, arrays.positions),
            (self.context_lens, arrays.context_lens),
        ):
            ours[:n].copy_(put(news), non_blocking=True)
        self.context_lens[n:size] = 0
        for group, table, slots in zip(self.groups, arrays.block_tables, arrays.slot_mapping, strict=True):
            group.block_tables[:n, : table.shape[1]].copy_(put(table), non_blocking=True)
            group.slot_mapping[:n].copy_(put(slots), non_blocking=True)
            group.slot_mapping[n:size] = -1
        self._plan(arrays.context_lens, size)

    def _plan(self, context_lens: Ints, size: int) -> None:
        """Plan the work of these sequences and of empty ones behind them, which come out as zeros."""
        for planner, ours in self.work_rows.items():
            rows = planner.padded_plan(context_lens, size).rows
            ours[: len(rows)].copy_(self.outbox.put(rows), non_blocking=True)

    def _run(self, size: int) -> None:
        self.hidden[:size].copy_(self.forward(self._step(size)))

    def _step(self, size: int) -> StepTensors:
        """The first `size` rows as a step."""
        device = self.hidden.device
        works: list[WorkList | None] = [self._work(planner, size) for planner in self.planners]
        return StepTensors(
            token_ids=self.token_ids[:size],
            positions=self.positions[:size],
            context_lens=self.context_lens[:size],
            query_start=torch.zeros(1, dtype=torch.int32, device=device),
            last_tokens=torch.arange(size, device=device),
            groups=tuple(
                GroupTensors(group.block_tables[:size], group.slot_mapping[:size], work)
                for group, work in zip(self.groups, works or [None] * len(self.groups), strict=True)
            ),
            num_decodes=size,
            max_query_len=0,
            prefill_starts=(0,),
            prefill_context_lens=(),
        )

    def _work(self, planner: Planner, size: int) -> WorkList:
        sizes = planner.capacity(size)
        return WorkList(self.work_rows[planner][: sizes.num_rows], sizes, size, planner.window)


def capture(run: Callable[[], None], pool: object) -> Callable[[], None]:
    """Record what run() launches on the GPU; returns what launches it again."""
    run()  # compiles kernels and lets libraries allocate before the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type] # what graph_pool_handle() gives
        run()
    return graph.replay
