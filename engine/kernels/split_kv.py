"""Split-KV decoding: what a program does with its item's output, and the merging of partial ones."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from engine.kernels.checks import need
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.numerics import LOG2_E, cast
from engine.kernels.work_list import SplitPlanner, WorkList

BLOCK_SLOTS = 16
BLOCK_WIDTH = 128


@triton.jit
def load_item(items_ptr, index):
    """(sequence, first token, token after the last, slot) of one item; a sequence below 0 is not there."""
    item = items_ptr + index * 4
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


@triton.jit
def store_item(
    out_ptr, partial_ptr, lse_ptr, out, top, total, seq, slot, num_heads, heads, is_head, columns, WIDTH: tl.constexpr
):
    """out [M, DV] float32: to the output where no other item shares it, else to the slot with its log-sum-exp."""
    mask = is_head[:, None] & (columns < WIDTH)[None, :]
    if slot < 0:
        rows = seq.to(tl.int64) * num_heads + heads
        offsets = rows[:, None] * WIDTH + columns[None, :]
        tl.store(out_ptr + offsets, cast(out, out_ptr.dtype.element_ty), mask=mask)
    else:
        rows = slot.to(tl.int64) * num_heads + heads
        tl.store(partial_ptr + rows[:, None] * WIDTH + columns[None, :], out, mask=mask)
        tl.store(lse_ptr + rows, top + tl.log2(total), mask=is_head)


@triton.jit
def merge_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    merges_ptr,
    sinks_ptr,
    num_heads,
    WIDTH: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_merges, num_heads, cdiv(WIDTH, BLOCK_WIDTH)): weigh each part by its share of the softmax total.

    A sink belongs to no part: it joins the total here.
    """
    merge = merges_ptr + tl.program_id(0) * 4
    seq = tl.load(merge)
    if seq < 0:
        return
    first = tl.load(merge + 1)
    end = tl.load(merge + 2)
    head = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)

    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if sinks_ptr is not None:
        top = tl.zeros([1], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_WIDTH], tl.float32)
    for slot in range(first, end, BLOCK_SLOTS):
        slots = slot + tl.arange(0, BLOCK_SLOTS)
        rows = slots.to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + rows, mask=slots < end, other=float("-inf"))
        partial = tl.load(
            partial_ptr + rows[:, None] * WIDTH + columns[None, :],
            mask=(slots < end)[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))  # finite: every part saw a token
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    row = seq.to(tl.int64) * num_heads + head
    tl.store(out_ptr + row * WIDTH + columns, cast(acc / total, out_ptr.dtype.element_ty), mask=columns < WIDTH)


def scratch(work: WorkList, num_heads: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial outputs [num_slots, num_heads, width], log-sum-exps [num_slots, num_heads]), float32, unset."""
    shape = (work.sizes.num_slots, num_heads)
    partial = torch.empty((*shape, width), dtype=torch.float32, device=device)
    return partial, torch.empty(shape, dtype=torch.float32, device=device)


def merge(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, work: WorkList, sinks: torch.Tensor | None = None
) -> None:
    """Write the outputs of sequences that were cut into their rows of out [num_seqs, num_heads, width]."""
    if work.sizes.num_merges == 0:
        return
    _, num_heads, width = out.shape
    block_width = min(BLOCK_WIDTH, next_power_of_2(width))
    merge_kernel[(work.sizes.num_merges, num_heads, cdiv(width, block_width))](
        out,
        partial,
        lse,
        work.merges,
        sinks,
        num_heads,
        WIDTH=width,
        BLOCK_SLOTS=BLOCK_SLOTS,
        BLOCK_WIDTH=block_width,
        num_warps=4,
    )


def need_work(work: WorkList, num_seqs: int, window: int | None, device: torch.device) -> None:
    """Refuse a plan for other sequences or for another window: it would leave out tokens, or outputs."""
    need("work", work.num_seqs == num_seqs, "planned for {} sequences like q", work.num_seqs, num_seqs)
    need("work", work.window == window, "planned for window {}", work.window, window)
    need("work", work.rows.device == device, "on {} like q", work.rows.device, device)


class _Kept(NamedTuple):
    """A launcher's own plan, and what it was made from."""

    version: int
    planner: SplitPlanner
    work: WorkList


_kept = WeakTensorKeyDictionary()  # context_lens -> _Kept


def own_work_list(planner: SplitPlanner, context_lens: torch.Tensor) -> WorkList:
    """A plan for a caller without one. It asks the device for the lengths: for tests and benchmarks, not for steps.

    The plan is kept until somebody writes to these lengths: a second call can be captured in a CUDA graph.
    """
    last: _Kept | None = _kept.get(context_lens)
    version = -1 if context_lens.is_inference() else context_lens._version  # what counts writes, where they are counted
    if last is not None and version >= 0 and last[:2] == (version, planner):
        return last.work
    plan = planner.plan(context_lens.cpu().numpy())
    rows = torch.from_numpy(plan.rows).to(context_lens.device)
    work = WorkList(rows, plan.sizes, len(context_lens), planner.window)
    if version >= 0:
        _kept[context_lens] = _Kept(version, planner, work)
    return work
