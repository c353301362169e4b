"""Experts' products with 4-bit e2m1 weights whose neighbours share a scale, widened in registers tile by tile."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.configs import GemmTile
from engine.kernels.grouping import Grouping
from engine.kernels.integers import cdiv
from engine.kernels.matrices import Mxfp4Matrix
from engine.kernels.numerics import cast, dot, dot_dtype

MXFP4_GROUP = 32


@triton.jit
def e2m1(codes):
    """Codes below 16 as float32: a sign, two bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    As the bits of a float16 they mean 2^-14 of it, also those below its least normal number.
    """
    codes = codes.to(tl.uint16)
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(powers):
    """Bytes as float32: 2 to the power of the byte less 127, and 255 is no number."""
    bits = powers.to(tl.int32) << 23
    bits = tl.where(powers == 0, 0x00400000, bits)
    bits = tl.where(powers == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_fp4_kernel(
    y_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    row_weights_ptr,
    rows_ptr,
    tile_experts_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    ROWS_PER_X: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[row] = (x[row // ROWS_PER_X] @ weight[expert].T + bias[expert]) * row_weights[row].

    Grid (num_tiles, cdiv(num_outputs, BLOCK_N)), as grouped_matmul_kernel's. A byte holds the values of two neighbours
    of a row; GROUP of them share a scale.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = (rows < num_rows)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (outputs < num_outputs)[:, None]
    inputs = tl.arange(0, BLOCK_K)
    pairs = tl.arange(0, BLOCK_K // 2)
    groups = tl.arange(0, BLOCK_K // GROUP)

    matrix_row = (expert * num_outputs + outputs.to(tl.int64))[:, None]
    x_ptrs = x_ptr + (rows // ROWS_PER_X)[:, None] * stride_x + inputs[None, :]
    value_ptrs = values_ptr + matrix_row * (num_inputs // 2) + pairs[None, :]
    scale_ptrs = scales_ptr + matrix_row * (num_inputs // GROUP) + groups[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        left = num_inputs - start
        is_input = (inputs < left) | WHOLE_TILES
        is_pair = (2 * pairs < left) | WHOLE_TILES
        is_group = (GROUP * groups < left) | WHOLE_TILES
        x = tl.load(x_ptrs, mask=is_row & is_input[None, :], other=0.0)
        codes = tl.load(value_ptrs, mask=is_output & is_pair[None, :], other=0)
        scales = e8m0(tl.load(scale_ptrs, mask=is_output & is_group[None, :], other=0))
        values = tl.interleave(e2m1(codes & 15), e2m1(codes >> 4))
        wide = tl.reshape(values, [BLOCK_N, BLOCK_K // GROUP, GROUP]) * scales[:, :, None]
        acc += dot(x, tl.trans(tl.reshape(wide, [BLOCK_N, BLOCK_K])), DOT)
        x_ptrs += BLOCK_K
        value_ptrs += BLOCK_K // 2
        scale_ptrs += BLOCK_K // GROUP
    is_output = (outputs < num_outputs)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * num_outputs + outputs[None, :], mask=is_output, other=0.0).to(tl.float32)
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    y_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_row & is_output)


def grouped_product(
    x: torch.Tensor,
    matrix: Mxfp4Matrix,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: GemmTile,
) -> torch.Tensor:
    """moe.grouped_product with 4-bit weights, which are rounded to the dtype of x."""
    args = _launch_args(x, matrix.values, matrix.scales, MXFP4_GROUP, num_rows // x.shape[0], tile)
    num_outputs = matrix.values.shape[1]
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    grouped_fp4_kernel[(grouping.rows.shape[0], cdiv(num_outputs, tile.block_n))](
        y, x, matrix.values, matrix.scales, bias, row_weights, grouping.rows, grouping.tile_experts, num_rows, **args
    )
    return y


@once_per_layout
def _launch_args(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, group: int, rows_per_x: int, tile: GemmTile
) -> LaunchArgs:
    """Check the arguments of a product; what its kernel takes beside."""
    need_rows("x", x, 2, FLOATS)
    num_inputs = x.shape[1]
    need("values", values.dim() == 3 and values.dtype == torch.uint8, "uint8 of 3 dimensions", values.dtype)
    experts, num_outputs, _ = values.shape
    need("x", num_inputs % group == 0, "of whole groups of {} inputs", num_inputs, group)
    need_shape("values", values, (experts, num_outputs, num_inputs // 2))
    need_shape("scales", scales, (experts, num_outputs, num_inputs // group))
    need("scales", scales.dtype == torch.uint8, "uint8", scales.dtype)
    need_one_device(x=x, values=values, scales=scales)
    return {
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "stride_x": x.stride(0),
        "ROWS_PER_X": rows_per_x,
        "WHOLE_TILES": num_inputs % tile.block_k == 0,
        "GROUP": group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "DOT": dot_dtype(x.dtype, x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
