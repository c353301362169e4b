"""One step's inputs to the layers, as tensors on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from engine.batch import BatchArrays, Ints
from engine.kernels.query_tiles import QueryTiles, cut_queries
from engine.kernels.work_list import SplitPlanner, WorkList
from engine.staging import UploadRing


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
    last_tokens: torch.Tensor  # [num_rows] int64: each sequence's last token of the step, or whose logits are wanted
    groups: tuple[GroupTensors, ...]
    num_decodes: int
    max_query_len: int
    prefill_starts: tuple[int, ...]  # query_start on the host
    prefill_context_lens: tuple[int, ...]
    tiles: QueryTiles | None = None  # of the sequences in prefill; None: the kernels need none, or nobody is
    # [groups, 2, num_seqs] int64: where recurrent states are read and written
    state_slots: torch.Tensor | None = None
    starts_fresh: torch.Tensor | None = None  # [num_seqs] bool, beside it: sequences whose first tokens these are

    @property
    def num_prefills(self) -> int:
        return len(self.prefill_context_lens)


def on_device(array: np.ndarray[Any, Any], device: torch.device, uploads: UploadRing | None = None) -> torch.Tensor:
    """Copy an array to the device, asynchronously on a GPU."""
    host = torch.from_numpy(np.ascontiguousarray(array)) if uploads is None else uploads.stage(array)
    return host.to(device, non_blocking=True)


def all_on_device(
    arrays: list[np.ndarray[Any, Any]], device: torch.device, uploads: UploadRing | None = None
) -> list[torch.Tensor]:
    """Copy arrays to the device; with `uploads`, in one copy."""
    return [on_device(array, device) for array in arrays] if uploads is None else uploads.upload(arrays)


def step_tensors(
    arrays: BatchArrays,
    device: torch.device,
    uploads: UploadRing | None = None,
    planners: tuple[SplitPlanner, ...] = (),
    queries_of_tile: Callable[[int], int] | None = None,
) -> StepTensors:
    """The scheduler's batch on the device; uploads: where its arrays wait for the copy.

    planners         one per KV group, for kernels that want their decode work planned
    queries_of_tile  for kernels that want their prefill planned: queries of a tile, by the most of any sequence
    """
    num_groups, lens = len(arrays.block_tables), arrays.context_lens[: arrays.num_decodes]
    plans = {planner: planner.plan(lens) for planner in set(planners)} if len(lens) else {}
    rows, queries = _tiles(arrays, queries_of_tile)
    sampled = arrays.last_tokens if arrays.logit_tokens is None else arrays.logit_tokens
    sent = iter(
        all_on_device(
            [
                arrays.token_ids, arrays.positions, sampled, *arrays.slot_mapping, arrays.context_lens,
                arrays.query_start, *arrays.block_tables, *(plan.rows for plan in plans.values()), *rows,
            ],
            device,
            uploads,
        )
    )  # fmt: skip
    token_ids, positions, last_tokens = islice(sent, 3)
    slots = list(islice(sent, num_groups))
    context_lens, query_start = islice(sent, 2)
    state_slots, starts_fresh = _states(arrays, device)
    tables = list(islice(sent, num_groups))
    # Groups that see the same tokens have equal planners, and share a list.
    works = {planner: WorkList(next(sent), plan.sizes, len(lens), planner.window) for planner, plan in plans.items()}
    return StepTensors(
        token_ids=token_ids,
        positions=positions,
        context_lens=context_lens,
        query_start=query_start,
        last_tokens=last_tokens,
        groups=tuple(
            GroupTensors(table, slot, work)
            for table, slot, work in zip(
                tables, slots, [works.get(planner) for planner in planners] or [None] * num_groups, strict=True
            )
        ),
        num_decodes=arrays.num_decodes,
        max_query_len=int(arrays.prefill_lens.max(initial=0)),
        prefill_starts=tuple(arrays.query_start.tolist()),
        prefill_context_lens=tuple(arrays.context_lens[arrays.num_decodes :].tolist()),
        tiles=QueryTiles(next(sent), queries) if rows else None,
        state_slots=state_slots,
        starts_fresh=starts_fresh,
    )


def _states(arrays: BatchArrays, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(slots that states are read from and written to, whether each sequence begins anew)."""
    if arrays.state_slots is None:
        return None, None
    query_lens = np.concatenate((np.ones(arrays.num_decodes, np.int64), arrays.prefill_lens))
    return on_device(arrays.state_slots, device), on_device(query_lens == arrays.context_lens, device)


def _tiles(arrays: BatchArrays, queries_of_tile: Callable[[int], int] | None) -> tuple[list[Ints], int]:
    """(the rows of the prefills' tiles, of which there are none where nobody wants any; queries of a tile)."""
    if queries_of_tile is None or arrays.num_decodes == len(arrays.context_lens):
        return [], 0
    lens = arrays.prefill_lens
    queries = queries_of_tile(int(lens.max()))
    return [cut_queries(lens, arrays.context_lens[arrays.num_decodes :], queries)], queries
