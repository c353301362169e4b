"""What one step hands to the layers, as tensors on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.batch import BatchArrays, Ints
from engine.kernels.query_tiles import QueryTiles, cut_queries
from engine.kernels.work_list import Planner, WorkList
from engine.staging import Outbox


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """One KV group's view of the step."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; 0 past a sequence's last block
    slot_mapping: torch.Tensor  # [num_tokens] int64; negative for padding
    work: WorkList | None = None  # of the sequences that decode; None: the kernels need none, or nobody decodes


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The step's sequences in order: first num_decodes with one token each, then those in prefill."""

    token_ids: torch.Tensor  # [num_tokens] int64; ~row: what that row of the step before sampled
    positions: torch.Tensor  # [num_tokens] int64
    context_lens: torch.Tensor  # [num_seqs] int32, this step included
    query_start: torch.Tensor  # [num_prefills + 1] int32, counted from the first prefill token
    last_tokens: torch.Tensor  # [num_seqs] int64: each sequence's last token of the step, whose logits are wanted
    groups: tuple[GroupTensors, ...]
    num_decodes: int
    max_query_len: int
    prefill_starts: tuple[int, ...]  # query_start on the host
    prefill_context_lens: tuple[int, ...]
    tiles: QueryTiles | None = None  # of the sequences in prefill; None: the kernels need none, or nobody is

    @property
    def num_prefills(self) -> int:
        return len(self.prefill_context_lens)


def on_device(array: np.ndarray[Any, Any], device: torch.device, outbox: Outbox | None = None) -> torch.Tensor:
    """An array as a tensor; to a GPU it travels while the host goes on."""
    host = torch.from_numpy(np.ascontiguousarray(array)) if outbox is None else outbox.put(array)
    return host.to(device, non_blocking=True)


def step_tensors(
    arrays: BatchArrays,
    device: torch.device,
    outbox: Outbox | None = None,
    planners: tuple[Planner, ...] = (),
    queries_of_tile: Callable[[int], int] | None = None,
) -> StepTensors:
    """The scheduler's batch on the device; outbox: where its arrays wait for the copy.

    planners         one per KV group, for kernels that want their decode work planned
    queries_of_tile  for kernels that want their prefill planned: queries of a tile, by the most of any sequence
    """
    lens = arrays.context_lens[: arrays.num_decodes]
    works = _work_lists(planners, lens, device, outbox) or [None] * len(arrays.block_tables)
    return StepTensors(
        token_ids=on_device(arrays.token_ids, device, outbox),
        positions=on_device(arrays.positions, device, outbox),
        context_lens=on_device(arrays.context_lens, device, outbox),
        query_start=on_device(arrays.query_start, device, outbox),
        last_tokens=on_device(arrays.last_tokens, device, outbox),
        groups=tuple(
            GroupTensors(on_device(table, device, outbox), on_device(slots, device, outbox), work)
            for table, slots, work in zip(arrays.block_tables, arrays.slot_mapping, works, strict=True)
        ),
        num_decodes=arrays.num_decodes,
        max_query_len=int(arrays.prefill_lens.max(initial=0)),
        prefill_starts=tuple(arrays.query_start.tolist()),
        prefill_context_lens=tuple(arrays.context_lens[arrays.num_decodes :].tolist()),
        tiles=_tiles(arrays, device, outbox, queries_of_tile),
    )


def _tiles(
    arrays: BatchArrays, device: torch.device, outbox: Outbox | None, queries_of_tile: Callable[[int], int] | None
) -> QueryTiles | None:
    if queries_of_tile is None or arrays.num_decodes == len(arrays.context_lens):
        return None
    lens = arrays.prefill_lens
    queries = queries_of_tile(int(lens.max()))
    rows = cut_queries(lens, arrays.context_lens[arrays.num_decodes :], queries)
    return QueryTiles(on_device(rows, device, outbox), queries)


def _work_lists(
    planners: tuple[Planner, ...], context_lens: Ints, device: torch.device, outbox: Outbox | None
) -> list[WorkList | None]:
    """One per KV group; groups that see the same tokens have equal planners, and share a list."""
    if len(context_lens) == 0:
        return []
    plans = {planner: planner.plan(context_lens) for planner in set(planners)}
    works = {
        planner: WorkList(on_device(plan.rows, device, outbox), plan.sizes, len(context_lens), planner.window)
        for planner, plan in plans.items()
    }
    return [works[planner] for planner in planners]
