"""Mixture-of-experts MLP: each token's rows go through its own experts' weights, in two grouped matrix products."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs, moe_fp4, moe_fp8
from engine.kernels.activation import gated_activation
from engine.kernels.checks import FLOATS, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.grouping import Grouping, group_rows
from engine.kernels.integers import cdiv
from engine.kernels.matrices import Fp8BlockMatrix, Matrix, Mxfp4Matrix, Nvfp4Matrix, shape_of
from engine.kernels.numerics import cast, dot, dot_dtype
from kvplan.models.spec import Activation


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

    Grid (num_tiles, cdiv(num_outputs, BLOCK_N)). Tiles of one expert are neighbors in it, so that all but the first
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


def grouped_product(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: configs.GemmTile,
) -> torch.Tensor:
    """[num_rows, outputs]: each row of x (or each top_k rows alike) through its expert's matrix, however stored."""
    match matrix:
        case torch.Tensor():
            return _grouped_matmul(x, matrix, bias, row_weights, grouping, num_rows, tile)
        case Fp8BlockMatrix():
            return moe_fp8.grouped_product(x, matrix, bias, row_weights, grouping, num_rows, tile)
        case Mxfp4Matrix() | Nvfp4Matrix():
            return moe_fp4.grouped_product(x, matrix, bias, row_weights, grouping, num_rows, tile)
        case _:
            raise TypeError(f"experts are not run in {type(matrix).__name__}")


def _grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: configs.GemmTile,
) -> torch.Tensor:
    """grouped_product with weight [experts, outputs, inputs] of the dtype of x."""
    _check_plain(x, weight)
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
    w13: Matrix,
    w2: Matrix,
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
    w13             [num_experts, 2 * inner, hidden]: gate rows, then up rows; dtype of x, last dimension contiguous, or
                    as a checkpoint stores it (matrices.py), and then widened in registers and rounded to the dtype of x
    w2              [num_experts, hidden, inner], likewise; b13 [num_experts, 2 * inner], b2 [num_experts, hidden]
    expert_ids      [num_tokens, top_k] int32 or int64, below num_experts
    expert_weights  [num_tokens, top_k] float32
    kind, limit, alpha  as gated_activation's
    returns         [num_tokens, hidden], dtype of x. Rounded to it: each matrix product, the activation, the sum
    """
    shape13, shape2 = shape_of(w13), shape_of(w2)
    tile = _tile(x, shape13, shape2, isinstance(w13, torch.Tensor), expert_ids, expert_weights, b13, b2)
    num_tokens, hidden = x.shape
    top_k = expert_ids.shape[1]
    num_rows = num_tokens * top_k
    if tile is None:
        return torch.zeros_like(x)
    grouping = group_rows(expert_ids, shape2[0], tile.block_m)
    gate_up = grouped_product(x, w13, b13, None, grouping, num_rows, tile)
    activated = gated_activation(gate_up, kind, limit=limit, alpha=alpha)
    rows = grouped_product(activated, w2, b2, expert_weights, grouping, num_rows, tile)
    return rows.view(num_tokens, top_k, hidden).sum(1)  # torch sums in float32, and rounds once


@once_per_layout
def _tile(
    x: torch.Tensor,
    shape13: tuple[int, ...],
    shape2: tuple[int, ...],
    is_plain: bool,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
) -> configs.GemmTile | None:
    """Check the arguments of moe_mlp; the tile of its products. None: there are no rows."""
    need_rows("x", x, 2, FLOATS)
    num_tokens, hidden = x.shape
    need("w2", len(shape2) == 3, "of 3 dimensions", shape2)
    num_experts, _, inner = shape2
    need("w2", shape2[1] == hidden, "of {} outputs", shape2[1], hidden)
    need("w13", shape13 == (num_experts, 2 * inner, hidden), "of shape {}", shape13, (num_experts, 2 * inner, hidden))
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
    need_one_device(x=x, expert_ids=expert_ids, expert_weights=expert_weights, b13=b13, b2=b2)
    if expert_ids.numel() == 0:
        return None
    tile_of = configs.gemm_tile if is_plain else configs.widened_tile
    return tile_of(configs.arch(), expert_ids.numel() // num_experts, x.dtype)


@once_per_layout
def _check_plain(x: torch.Tensor, weight: torch.Tensor) -> None:
    need_rows("weight", weight, 3, (x.dtype,))
    need_one_device(x=x, weight=weight)
