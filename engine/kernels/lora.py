"""Products with the small matrices of adapters, each token's own: A x to a few numbers, and B of these added to y.

Tokens are walked in tiles of one adapter each (engine/kernels/lora_rows.py), so that a matrix is read once for a tile;
a tile that nobody needs ends at once, which is what a CUDA graph runs for sequences without adapters.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.lora_rows import LOW_TILE, LoraRows, tile_rows
from engine.kernels.numerics import cast, dot, dot_dtype

# Chosen by what compiles without spills for sm_80 to sm_100; no GPU has timed them.
EXPAND_OUTPUTS, MOST_RANKS = 64, 64
NUM_WARPS, NUM_STAGES = 4, 2


@triton.jit(do_not_specialize=["first_rank"])
def lora_shrink_kernel(
    small_ptr,
    x_ptr,
    a_ptr,
    rows_ptr,
    tile_slots_ptr,
    ranks_ptr,
    num_inputs,
    rank,
    first_rank,
    stride_x,
    LAYERS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """small[row, layer] = a[slot, layer] @ x[row]. Grid (num_tiles, cdiv(rank, BLOCK_N), LAYERS).

    Rows of A past the adapter's own rank are 0: their results are left unset, and never read.
    """
    tile = tl.program_id(0)
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    start = tl.program_id(1) * BLOCK_N
    if first_rank + start >= tl.load(ranks_ptr + slot):
        return
    layer = tl.program_id(2)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = (rows >= 0)[:, None]
    ranks = start + tl.arange(0, BLOCK_N)
    is_rank = (ranks < rank)[None, :]
    inputs = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + rows[:, None] * stride_x + inputs[None, :]
    a_row = (slot * LAYERS + layer) * rank + ranks
    a_ptrs = a_ptr + a_row[None, :] * num_inputs + inputs[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        if WHOLE_TILES:
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
            a = tl.load(a_ptrs, mask=is_rank, other=0.0)
        else:
            left = num_inputs - first
            x = tl.load(x_ptrs, mask=is_row & (inputs < left)[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=is_rank & (inputs < left)[:, None], other=0.0)
        acc += dot(x, a, DOT)
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    small_ptrs = small_ptr + (rows[:, None] * LAYERS + layer) * rank + ranks[None, :]
    tl.store(small_ptrs, acc, mask=is_row & is_rank)


@triton.jit
def lora_expand_kernel(
    y_ptr,
    small_ptr,
    b_ptr,
    starts_ptr,
    rows_ptr,
    tile_slots_ptr,
    ranks_ptr,
    num_outputs,
    rank,
    stride_y,
    LAYERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[row] += b[slot] @ small[row, layer], layer by layer. Grid (num_tiles, cdiv(largest layer, BLOCK_N), LAYERS)."""
    tile = tl.program_id(0)
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    layer = tl.program_id(2)
    outputs = tl.load(starts_ptr + layer) + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(starts_ptr + layer + 1)
    if tl.load(starts_ptr + layer) + tl.program_id(1) * BLOCK_N >= end:
        return
    is_output = (outputs < end)[None, :]
    own_rank = tl.load(ranks_ptr + slot)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = (rows >= 0)[:, None]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, own_rank, BLOCK_K):
        ranks = start + tl.arange(0, BLOCK_K)
        is_rank = ranks < own_rank
        small_ptrs = small_ptr + (rows[:, None] * LAYERS + layer) * rank + ranks[None, :]
        small = tl.load(small_ptrs, mask=is_row & is_rank[None, :], other=0.0)
        b_ptrs = b_ptr + (slot * num_outputs + outputs)[None, :] * rank + ranks[:, None]
        b = tl.load(b_ptrs, mask=is_output & is_rank[:, None], other=0.0)
        acc += dot(small, b, DOT)
    y_ptrs = y_ptr + rows[:, None] * stride_y + outputs[None, :]
    y = tl.load(y_ptrs, mask=is_row & is_output, other=0.0).to(tl.float32)
    tl.store(y_ptrs, cast(y + acc, y_ptr.dtype.element_ty), mask=is_row & is_output)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, rows: LoraRows, *, first_rank: int = 0) -> torch.Tensor:
    """A x of each token's own adapter, in float32; not set for tokens without one, nor past an adapter's rank.

    x           [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    a           [num_slots, layers, rank or this device's share of it, inputs], dtype of x; contiguous
    first_rank  the row of A that is the first in a: rows past an adapter's own rank are 0, and may be left out
    returns     [num_tokens, layers, rank as in a] float32
    """
    num_tokens = len(x)
    args = _shrink_args(x, a, rows.rows, rows.tile_slots, rows.ranks)
    layers, rank = a.shape[1:3]
    small = torch.empty((num_tokens, layers, rank), dtype=torch.float32, device=x.device)
    if num_tokens:
        grid = (rows.num_tiles(num_tokens), cdiv(rank, args["BLOCK_N"]), layers)
        lora_shrink_kernel[grid](
            small, x, a, rows.rows, rows.tile_slots, rows.ranks, first_rank=first_rank, rank=rank, **args
        )
    return small


def lora_expand(
    y: torch.Tensor, small: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, max_outputs: int, rows: LoraRows
) -> None:
    """y += B small of each token's own adapter; `small` is rounded to y's dtype, sums are float32.

    y            [num_tokens, outputs] float32, float16 or bfloat16, changed in place; last dimension contiguous
    small        [num_tokens, layers, rank] float32, contiguous
    b            [num_slots, outputs, rank], dtype of y; contiguous: the layers' outputs one after the other
    starts       [layers + 1] int32: the first output of each; max_outputs: of the largest layer
    """
    num_tokens = len(y)
    args = _expand_args(y, small, b, starts, rows.rows, rows.tile_slots, rows.ranks)
    if num_tokens:
        grid = (rows.num_tiles(num_tokens), cdiv(max_outputs, EXPAND_OUTPUTS), small.shape[1])
        lora_expand_kernel[grid](y, small, b, starts, rows.rows, rows.tile_slots, rows.ranks, **args)


def _rank_tile(rank: int) -> int:
    """Ranks at once: tensor cores take 16 at least."""
    return min(max(16, next_power_of_2(rank)), MOST_RANKS)


@once_per_layout
def _shrink_args(
    x: torch.Tensor, a: torch.Tensor, rows: torch.Tensor, tile_slots: torch.Tensor, ranks: torch.Tensor
) -> LaunchArgs:
    """Check the arguments of lora_shrink; what its kernel takes beside."""
    need_rows("x", x, 2, FLOATS)
    num_tokens, num_inputs = x.shape
    need("a", a.dim() == 4 and a.shape[3] == num_inputs, "[num_slots, layers, rank, {}]", a.shape, num_inputs)
    need_shape("a", a, tuple(a.shape))
    need("a", a.dtype == x.dtype, "{} like x", a.dtype, x.dtype)
    _need_tiles(rows, tile_slots, ranks, len(a))
    need_one_device(x=x, a=a, rows=rows, tile_slots=tile_slots, ranks=ranks)
    block_m = tile_rows(num_tokens)
    block_k = 32 if x.dtype == torch.float32 else 64 if block_m == LOW_TILE else 128
    return {
        "num_inputs": num_inputs,
        "stride_x": x.stride(0),
        "LAYERS": a.shape[1],
        "WHOLE_TILES": num_inputs % block_k == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": _rank_tile(a.shape[2]),
        "BLOCK_K": block_k,
        "DOT": dot_dtype(x.dtype, a.dtype),
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


@once_per_layout
def _expand_args(
    y: torch.Tensor, small: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
    tile_slots: torch.Tensor, ranks: torch.Tensor,
) -> LaunchArgs:  # fmt: skip
    """Check the arguments of lora_expand; what its kernel takes beside."""
    need_rows("y", y, 2, FLOATS)
    num_tokens, num_outputs = y.shape
    need("small", small.dim() == 3 and len(small) == num_tokens, "[{}, layers, rank]", small.shape, num_tokens)
    layers, rank = small.shape[1:]
    need_shape("small", small, (num_tokens, layers, rank))
    need("small", small.dtype == torch.float32, "float32", small.dtype)
    need_shape("b", b, (len(b), num_outputs, rank))
    need("b", b.dtype == y.dtype, "{} like y", b.dtype, y.dtype)
    need_shape("starts", starts, (layers + 1,))
    need("starts", starts.dtype == torch.int32, "int32", starts.dtype)
    _need_tiles(rows, tile_slots, ranks, len(b))
    need_one_device(y=y, small=small, b=b, starts=starts, rows=rows, tile_slots=tile_slots, ranks=ranks)
    return {
        "num_outputs": num_outputs,
        "rank": rank,
        "stride_y": y.stride(0),
        "LAYERS": layers,
        "BLOCK_M": tile_rows(num_tokens),
        "BLOCK_N": EXPAND_OUTPUTS,
        "BLOCK_K": min(_rank_tile(rank), 32),
        "DOT": dot_dtype(y.dtype, b.dtype),
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


def _need_tiles(rows: torch.Tensor, tile_slots: torch.Tensor, ranks: torch.Tensor, num_slots: int) -> None:
    """The tensors of LoraRows, for so many slots."""
    for name, tensor in (("rows", rows), ("tile_slots", tile_slots), ("ranks", ranks)):
        need_shape(name, tensor, (len(tensor),))
        need(name, tensor.dtype == torch.int32, "int32", tensor.dtype)
    need("ranks", len(ranks) == num_slots, "of {} slots", len(ranks), num_slots)
