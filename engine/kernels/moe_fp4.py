"""Products with 4-bit e2m1 weights whose neighbors share a scale, MXFP4 and NVFP4, widened in registers."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.configs import GemmTile
from engine.kernels.grouping import Grouping
from engine.kernels.integers import cdiv
from engine.kernels.matrices import Mxfp4Matrix, Nvfp4Matrix
from engine.kernels.moe_fp8 import e4m3
from engine.kernels.numerics import cast, dot, dot_dtype

MXFP4_GROUP, NVFP4_GROUP = 32, 16
MOST_PARTS = 3  # of a fused layer: queries, keys and values


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
    part_scales_ptr,
    bias_ptr,
    row_weights_ptr,
    rows_ptr,
    tile_experts_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    first_end,
    second_end,
    ROWS_PER_X: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[row] = (x[row // ROWS_PER_X] @ weight[expert].T + bias[expert]) * row_weights[row].

    Grid (num_tiles, cdiv(num_outputs, BLOCK_N)), as grouped_matmul_kernel's. A byte holds the values of two neighbors
    of a row; GROUP of them share a scale: a power of two, or, where the rows' parts have one too, an e4m3.

    rows_ptr                None: there is one matrix for all rows, in their order
    first_end, second_end   outputs of which the first part ends, and the second
    """
    tile = tl.program_id(0)
    if rows_ptr is None:
        expert = (tile * 0).to(tl.int64)
        rows = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    else:
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
        scales = tl.load(scale_ptrs, mask=is_output & is_group[None, :], other=0)
        scales = e8m0(scales) if part_scales_ptr is None else e4m3(scales)
        values = tl.interleave(e2m1(codes & 15), e2m1(codes >> 4))
        wide = tl.reshape(values, [BLOCK_N, BLOCK_K // GROUP, GROUP]) * scales[:, :, None]
        acc += dot(x, tl.trans(tl.reshape(wide, [BLOCK_N, BLOCK_K])), DOT)
        x_ptrs += BLOCK_K
        value_ptrs += BLOCK_K // 2
        scale_ptrs += BLOCK_K // GROUP
    is_output = (outputs < num_outputs)[None, :]
    if part_scales_ptr is not None:
        part = (outputs >= first_end).to(tl.int32) + (outputs >= second_end).to(tl.int32)
        acc *= tl.load(part_scales_ptr + expert * PARTS + part, mask=outputs < num_outputs, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * num_outputs + outputs[None, :], mask=is_output, other=0.0).to(tl.float32)
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    y_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_row & is_output)


def grouped_product(
    x: torch.Tensor,
    matrix: Mxfp4Matrix | Nvfp4Matrix,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    grouping: Grouping,
    num_rows: int,
    tile: GemmTile,
) -> torch.Tensor:
    """moe.grouped_product with 4-bit weights, which are rounded to the dtype of x."""
    match matrix:
        case Mxfp4Matrix():
            args = _launch_args(x, matrix.values, matrix.scales, None, (), num_rows // x.shape[0], tile)
            scales, part_scales = matrix.scales, None
        case Nvfp4Matrix(part_scales=part_scales, parts=parts):
            args = _launch_args(x, matrix.values, matrix.scales, part_scales, parts, num_rows // x.shape[0], tile)
            scales = matrix.scales.view(torch.uint8)
    num_outputs = matrix.values.shape[1]
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    grouped_fp4_kernel[(grouping.rows.shape[0], cdiv(num_outputs, tile.block_n))](
        y, x, matrix.values, scales, part_scales, bias, row_weights, grouping.rows, grouping.tile_experts, num_rows,
        **args,
    )  # fmt: skip
    return y


def nvfp4_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, part_scales: torch.Tensor, parts: tuple[int, ...]
) -> torch.Tensor:
    """x @ (values * scales * part_scales).T; values * scales are rounded to the dtype of x, which holds them.

    x            [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    values       [outputs, inputs / 2] uint8: the lower four bits of byte i are input 2i, the upper ones input 2i + 1
    scales       [outputs, inputs / 16] float8_e4m3fn
    part_scales  [number of parts] float32, three at most; parts: rows of each
    returns      [num_tokens, outputs], dtype of x
    """
    num_tokens, num_outputs = x.shape[0], values.shape[0]
    y = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    tile = configs.widened_tile(configs.arch(), num_tokens, x.dtype)
    args = _launch_args(x, values[None], scales[None], part_scales[None], parts, 1, tile)
    grouped_fp4_kernel[(cdiv(num_tokens, tile.block_m), cdiv(num_outputs, tile.block_n))](
        y, x, values, scales.view(torch.uint8), part_scales, None, None, None, None, num_tokens, **args
    )
    return y


@once_per_layout
def _launch_args(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    part_scales: torch.Tensor | None,
    parts: tuple[int, ...],
    rows_per_x: int,
    tile: GemmTile,
) -> LaunchArgs:
    """Check the arguments of a product; what its kernel takes beside."""
    need_rows("x", x, 2, FLOATS)
    num_inputs = x.shape[1]
    need("values", values.dim() == 3 and values.dtype == torch.uint8, "uint8 of 3 dimensions", values.dtype)
    experts, num_outputs, _ = values.shape
    group, dtype = (MXFP4_GROUP, torch.uint8) if part_scales is None else (NVFP4_GROUP, torch.float8_e4m3fn)
    need("x", num_inputs % group == 0, "of whole groups of {} inputs", num_inputs, group)
    need_shape("values", values, (experts, num_outputs, num_inputs // 2))
    need_shape("scales", scales, (experts, num_outputs, num_inputs // group))
    need("scales", scales.dtype == dtype, "{}", scales.dtype, dtype)
    if part_scales is not None:
        need_shape("part_scales", part_scales, (experts, len(parts)))
        need("part_scales", part_scales.dtype == torch.float32, "float32", part_scales.dtype)
        need("parts", 1 <= len(parts) <= MOST_PARTS and sum(parts) == num_outputs, "of {} rows", parts, num_outputs)
    need_one_device(x=x, values=values, scales=scales, part_scales=part_scales)
    ends = [sum(parts[: i + 1]) if i + 1 < len(parts) else num_outputs for i in range(2)]
    return {
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "stride_x": x.stride(0),
        "first_end": ends[0],
        "second_end": ends[1],
        "ROWS_PER_X": rows_per_x,
        "PARTS": len(parts),
        "WHOLE_TILES": num_inputs % tile.block_k == 0,
        "GROUP": group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "DOT": dot_dtype(x.dtype, x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
