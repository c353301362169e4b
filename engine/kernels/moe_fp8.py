"""Experts' products with fp8 weights in blocks of one scale, widened in registers tile by tile."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import FIRST_FP8_ARCH as FIRST_FP8_ARCH  # a test pretends that no GPU has fp8
from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.configs import GemmTile
from engine.kernels.fp8_block import widened
from engine.kernels.grouping import Grouping
from engine.kernels.integers import cdiv
from engine.kernels.matrices import Fp8BlockMatrix
from engine.kernels.numerics import cast, dot, dot_dtype

FP8 = torch.float8_e4m3fn
LEAST_INPUTS = 16  # of a tile: what tensor cores multiply at once


@triton.jit
def e4m3(codes):
    """Bytes as float32: a sign, four bits of exponent, three of mantissa, and 127 is no number.

    As the bits of a float16 they mean 2^-8 of it, also those below its least normal number: no GPU is too old.
    """
    codes = codes.to(tl.uint16)
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_fp8_kernel(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[row] = (x[row // ROWS_PER_X] @ weight[expert].T + bias[expert]) * row_weights[row].

    Grid (num_tiles, cdiv(num_outputs, BLOCK_N)), as grouped_matmul_kernel's. Weights are bytes where a GPU does not
    know fp8. A tile's inputs lie within one block's COLUMNS, so that the sums of an output are multiplied by its scale.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = (rows < num_rows)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, BLOCK_K)

    matrix_row = expert * num_outputs + outputs.to(tl.int64)
    x_ptrs = x_ptr + (rows // ROWS_PER_X)[:, None] * stride_x + inputs[None, :]
    value_ptrs = values_ptr + matrix_row[:, None] * num_inputs + inputs[None, :]
    scale_row = expert * tl.cdiv(num_outputs, ROWS) + outputs // ROWS
    scale_ptrs = scales_ptr + scale_row * tl.cdiv(num_inputs, COLUMNS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        is_input = ((inputs < num_inputs - start) | WHOLE_TILES)[None, :]
        x = tl.load(x_ptrs, mask=is_row & is_input, other=0.0)
        if values_ptr.dtype.element_ty == tl.uint8:
            weight = e4m3(tl.load(value_ptrs, mask=is_output[:, None] & is_input, other=0))
        else:
            weight = widened(tl.load(value_ptrs, mask=is_output[:, None] & is_input, other=0.0))
        scale = tl.load(scale_ptrs + start // COLUMNS, mask=is_output, other=0.0)
        acc += dot(x, tl.trans(weight), DOT) * scale[None, :]
        x_ptrs += BLOCK_K
        value_ptrs += BLOCK_K
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + expert * num_outputs + outputs, mask=is_output, other=0.0)
        acc += offset.to(tl.float32)[None, :]
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    y_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


def grouped_product(
    x: torch.Tensor,
    matrix: Fp8BlockMatrix,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: GemmTile,
) -> torch.Tensor:
    """moe.grouped_product with fp8 weights, which are not rounded; each tile's sums are multiplied by their scale."""
    args = _launch_args(x, matrix.values, matrix.scales, matrix.block, num_rows // x.shape[0], tile)
    values = matrix.values if configs.arch() >= FIRST_FP8_ARCH else matrix.values.view(torch.uint8)
    num_outputs = values.shape[1]
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    grouped_fp8_kernel[(grouping.rows.shape[0], cdiv(num_outputs, tile.block_n))](
        y, x, values, matrix.scales, bias, row_weights, grouping.rows, grouping.tile_experts, num_rows, **args
    )
    return y


@once_per_layout
def _launch_args(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], rows_per_x: int, tile: GemmTile
) -> LaunchArgs:
    """Check the arguments of a product; what its kernel takes beside."""
    need_rows("x", x, 2, FLOATS)
    num_inputs = x.shape[1]
    need("values", values.dim() == 3 and values.dtype == FP8, "float8_e4m3fn of 3 dimensions", values.dtype)
    experts, num_outputs, _ = values.shape
    rows, columns = block
    need_shape("values", values, (experts, num_outputs, num_inputs))
    need_shape("scales", scales, (experts, cdiv(num_outputs, rows), cdiv(num_inputs, columns)))
    need("scales", scales.dtype == torch.float32, "float32", scales.dtype)
    need_one_device(x=x, values=values, scales=scales)
    # One scale for each tile of inputs: the largest power of two that divides a block, where there are several.
    block_k = tile.block_k if columns >= num_inputs else min(tile.block_k, columns & -columns)
    need("block", block_k >= LEAST_INPUTS, "of a multiple of {} inputs", block, LEAST_INPUTS)
    return {
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "stride_x": x.stride(0),
        "ROWS_PER_X": rows_per_x,
        "ROWS": rows,
        "COLUMNS": columns,
        "WHOLE_TILES": num_inputs % block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "DOT": dot_dtype(x.dtype, x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
