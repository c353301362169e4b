"""Mixture-of-experts MLP: each token's rows go through its own experts' weights, in two grouped matrix products."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.activation import gated_activation
from engine.kernels.checks import FLOATS, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.numerics import cast, dot, dot_dtype
from kvplan.models.spec import Activation

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
    at = tl.arange(0, BLOCK)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < num_rows, other=-1)
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
    at = tl.arange(0, BLOCK)
    if counts_ptr is None:
        all_ids = tl.load(ids_ptr + at, mask=at < num_rows, other=0).to(tl.int32)
        counts = tl.histogram(all_ids, EXPERTS, mask=at < num_rows)
    else:
        counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    last = tl.sum(tl.where(experts <= expert, tiles, 0), 0)
    if expert == num_experts - 1:  # tiles that no expert needs
        for start in range(last, num_tiles, BLOCK):
            tl.store(tile_experts_ptr + start + at, -1, mask=start + at < num_tiles)
    place = first * BLOCK_M
    if last > first:
        for start in range(0, num_rows, BLOCK):
            ids = tl.load(ids_ptr + start + at, mask=start + at < num_rows, other=-1)
            is_mine = (ids == expert).to(tl.int32)
            places = place + tl.cumsum(is_mine, 0) - 1
            tl.store(rows_ptr + places, (start + at).to(tl.int64), mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
        in_tile = tl.arange(0, BLOCK_M)
        tl.store(rows_ptr + place + in_tile, num_rows.to(tl.int64), mask=place + in_tile < last * BLOCK_M)
        for start in range(first, last, BLOCK):
            tl.store(tile_experts_ptr + start + at, expert, mask=start + at < last)


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


@triton.jit(do_not_specialize=["num_rows"])
def grouped_matmul_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    row_weights_ptr,
    rows_ptr,
    tile_experts_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_expert,
    stride_output,
    ROWS_PER_X: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[row] = (x[row // ROWS_PER_X] @ weight[expert].T + bias[expert]) * row_weights[row].

    Grid (num_tiles, cdiv(num_outputs, BLOCK_N)). Tiles of one expert are neighbours in it, so that all but the first
    find the weights in L2.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = (rows < num_rows)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (outputs < num_outputs)[None, :]
    inputs = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + (rows // ROWS_PER_X)[:, None] * stride_x + inputs[None, :]
    weight_ptrs = weight_ptr + expert * stride_expert + outputs[None, :].to(tl.int64) * stride_output + inputs[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        if WHOLE_TILES:
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
            weight = tl.load(weight_ptrs, mask=is_output, other=0.0)
        else:
            left = num_inputs - start
            x = tl.load(x_ptrs, mask=is_row & (inputs < left)[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=is_output & (inputs < left)[:, None], other=0.0)
        acc += dot(x, weight, DOT)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * num_outputs + outputs[None, :], mask=is_output, other=0.0).to(tl.float32)
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    y_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_row & is_output)


def _grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: configs.GemmTile,
) -> torch.Tensor:
    """[num_rows, outputs]: each row of x (or each top_k rows alike) through its expert's weight [outputs, inputs]."""
    _, num_outputs, num_inputs = weight.shape
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    grouped_matmul_kernel[(grouping.rows.shape[0], cdiv(num_outputs, tile.block_n))](
        y,
        x,
        weight,
        bias,
        row_weights,
        grouping.rows,
        grouping.tile_experts,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        *weight.stride()[:2],
        ROWS_PER_X=num_rows // x.shape[0],
        WHOLE_TILES=num_inputs % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        DOT=dot_dtype(x.dtype, weight.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def moe_mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    kind: Activation,
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
) -> torch.Tensor:
    """The weighted sum of each token's experts' gated MLPs.

    x               [num_tokens, hidden] float32, float16 or bfloat16; strided, last dimension contiguous
    w13             [num_experts, 2 * inner, hidden]: gate rows, then up rows; dtype of x, last dimension contiguous
    w2              [num_experts, hidden, inner], likewise; b13 [num_experts, 2 * inner], b2 [num_experts, hidden]
    expert_ids      [num_tokens, top_k] int32 or int64, below num_experts
    expert_weights  [num_tokens, top_k] float32
    kind, limit, alpha  as gated_activation's
    returns         [num_tokens, hidden], dtype of x. Rounded to it: each matrix product, the activation, the sum
    """
    tile = _tile(x, w13, w2, expert_ids, expert_weights, b13, b2)
    num_tokens, hidden = x.shape
    top_k = expert_ids.shape[1]
    num_rows = num_tokens * top_k
    if tile is None:
        return torch.zeros_like(x)
    grouping = group_rows(expert_ids, w2.shape[0], tile.block_m)
    gate_up = _grouped_matmul(x, w13, b13, None, grouping, num_rows, tile)
    activated = gated_activation(gate_up, kind, limit=limit, alpha=alpha)
    rows = _grouped_matmul(activated, w2, b2, expert_weights, grouping, num_rows, tile)
    return rows.view(num_tokens, top_k, hidden).sum(1)  # torch sums in float32, and rounds once


@once_per_layout
def _tile(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
) -> configs.GemmTile | None:
    """Check the arguments of moe_mlp; the tile of its products. None: there are no rows."""
    need_rows("x", x, 2, FLOATS)
    need_rows("w13", w13, 3, (x.dtype,))
    need_rows("w2", w2, 3, (x.dtype,))
    num_tokens, hidden = x.shape
    num_experts, _, inner = w2.shape
    need("w2", w2.shape[1] == hidden, "of {} outputs", w2.shape[1], hidden)
    need(
        "w13", w13.shape == (num_experts, 2 * inner, hidden), "of shape {}", w13.shape, (num_experts, 2 * inner, hidden)
    )
    need(
        "expert_ids",
        expert_ids.dim() == 2 and len(expert_ids) == num_tokens,
        "[{}, top_k]",
        expert_ids.shape,
        num_tokens,
    )
    need("expert_ids", expert_ids.dtype in (torch.int32, torch.int64), "int32 or int64", expert_ids.dtype)
    need_shape("expert_ids", expert_ids, tuple(expert_ids.shape))
    need_shape("expert_weights", expert_weights, tuple(expert_ids.shape))
    need("expert_weights", expert_weights.dtype == torch.float32, "float32", expert_weights.dtype)
    if b13 is not None:
        need_shape("b13", b13, (num_experts, 2 * inner))
    if b2 is not None:
        need_shape("b2", b2, (num_experts, hidden))
    need_one_device(x=x, w13=w13, w2=w2, expert_ids=expert_ids, expert_weights=expert_weights, b13=b13, b2=b2)
    if expert_ids.numel() == 0:
        return None
    return configs.gemm_tile(configs.arch(), expert_ids.numel() // num_experts, x.dtype)
