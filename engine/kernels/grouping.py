"""Rows of a batch sorted by the experts they go to, on their own device."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.integers import next_power_of_2

ROWS_AT_ONCE = 2048  # of a decode step all


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows (token * top_k + choice) sorted by expert, each expert's padded to whole tiles.

    rows          [num_tiles, block_m] int64: row numbers; num_rows where a place is only padding
    tile_experts  [num_tiles] int32: the expert of each tile; -1 for a tile that no expert needs, whose rows are not set
    """

    rows: torch.Tensor
    tile_experts: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def count_rows_kernel(counts_ptr, ids_ptr, num_rows, BLOCK: tl.constexpr):
    """Grid (num_experts,): how many rows each expert has."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_rows, other=-1)
        mine += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(mine, 0))


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def group_rows_kernel(
    rows_ptr,
    tile_experts_ptr,
    ids_ptr,
    counts_ptr,
    num_rows,
    num_tiles,
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Grid (num_experts,): each expert's rows in their order, in its own tiles; EXPERTS is num_experts up to a power
    of two. Without counts all rows are in one BLOCK and are counted here.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    offsets = tl.arange(0, BLOCK)
    if counts_ptr is None:
        all_ids = tl.load(ids_ptr + offsets, mask=offsets < num_rows, other=0).to(tl.int32)
        counts = tl.histogram(all_ids, EXPERTS, mask=offsets < num_rows)
    else:
        counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    last = tl.sum(tl.where(experts <= expert, tiles, 0), 0)
    if expert == num_experts - 1:  # tiles that no expert needs
        for start in range(last, num_tiles, BLOCK):
            tl.store(tile_experts_ptr + start + offsets, -1, mask=start + offsets < num_tiles)
    place = first * BLOCK_M
    if last > first:
        for start in range(0, num_rows, BLOCK):
            ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_rows, other=-1)
            is_mine = (ids == expert).to(tl.int32)
            places = place + tl.cumsum(is_mine, 0) - 1
            tl.store(rows_ptr + places, (start + offsets).to(tl.int64), mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
        in_tile = tl.arange(0, BLOCK_M)
        tl.store(rows_ptr + place + in_tile, num_rows.to(tl.int64), mask=place + in_tile < last * BLOCK_M)
        for start in range(first, last, BLOCK):
            tl.store(tile_experts_ptr + start + offsets, expert, mask=start + offsets < last)


def group_rows(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Grouping:
    """Sort rows by expert on their own device: shapes depend on no value, so the host waits for nothing.

    expert_ids  [num_tokens, top_k] int32 or int64, contiguous, below num_experts
    """
    num_rows, device = expert_ids.numel(), expert_ids.device
    # Every expert that has rows wastes at most block_m - 1 places.
    num_tiles = (num_rows + min(num_experts, num_rows) * (block_m - 1)) // block_m
    rows = torch.empty((num_tiles, block_m), dtype=torch.int64, device=device)
    tile_experts = torch.empty((num_tiles,), dtype=torch.int32, device=device)
    counts = None
    if num_rows > ROWS_AT_ONCE:
        counts = torch.empty((num_experts,), dtype=torch.int32, device=device)
        count_rows_kernel[(num_experts,)](counts, expert_ids, num_rows, BLOCK=ROWS_AT_ONCE, num_warps=4)
    group_rows_kernel[(num_experts,)](
        rows,
        tile_experts,
        expert_ids,
        counts,
        num_rows,
        num_tiles,
        num_experts,
        BLOCK_M=block_m,
        BLOCK=ROWS_AT_ONCE,
        EXPERTS=next_power_of_2(num_experts),
        num_warps=4,
    )
    return Grouping(rows, tile_experts)
