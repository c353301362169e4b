"""A product with fp8 weights in blocks of one scale, widened tile by tile on their way to the tensor cores."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs, dequantize
from engine.kernels.checks import (
    FIRST_FP8_ARCH,
    FLOATS,
    LaunchArgs,
    need,
    need_one_device,
    need_rows,
    need_shape,
    once_per_layout,
)
from engine.kernels.configs import GemmTile
from engine.kernels.integers import cdiv
from engine.kernels.numerics import INTERPRETED, cast, dot, dot_dtype
from engine.kernels.split_product import Split, empty_parts, split_of, sum_parts

FP8 = torch.float8_e4m3fn
ALIGNMENT = 16  # bytes that a thread loads at once: rows of weights begin at multiples of it
LEAST_OUTPUTS, LEAST_INPUTS = 16, 32  # of a tile: fewer fill neither the tensor cores nor a sector of memory

# Tokens from which all weights are widened first, in plain torch, and multiplied by cuBLAS. Worked out, not measured:
# widening moves 29 bytes for each weight (its steps read and write 5, 4, 12 and 6, and the product reads 2), which take
# 9 ps at an H100's 3.35 TB/s, 6 ps at an H200's 4.8 TB/s. A weight's product with a token is 2 of 989e12 operations a
# second: 3 fs for cuBLAS, at 70% of them. A kernel of half that rate, which is a guess, loses 3 fs with each token, as
# much as widening takes with 2000 to 3000 of them. In float32 it is 25 bytes, 5 to 7 ps, and 2 of 67e12 operations
# outside the tensor cores, 37 fs at 80%; at a third of that rate 70 to 100 tokens lose as much.
WIDENED_FROM = {torch.float32: 96, torch.float16: 2048, torch.bfloat16: 2048}


@triton.jit
def widened(values):
    """fp8 as float32, by way of fp16 as the hardware has it: both hold every e4m3 value, and so does bfloat16.

    The interpreter's own cast makes a number of NaN.
    """
    wide = values.to(tl.float16).to(tl.float32)
    if INTERPRETED:
        wide = tl.where((values.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), wide)
    return wide


@triton.jit(do_not_specialize=["num_tokens", "split_tiles"])
def fp8_block_matmul_kernel(
    y_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    split_tiles,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[split] = x @ (values * scales).T, over the inputs of one split.

    Grid (cdiv(num_tokens, BLOCK_M), cdiv(num_outputs, BLOCK_N), splits). A tile of weights lies within one block of
    ROWS x COLUMNS, so that its scale multiplies the sum of the tile.

    split_tiles    tiles of BLOCK_K inputs in a split
    WHOLE_TILES    num_inputs is a multiple of BLOCK_K
    WEIGHTS_FIRST  the product is made transposed: Hopper's tensor cores, which take tiles of 64 rows and more, take the
                   left operand from the registers that weights are widened in
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = (tokens < num_tokens)[:, None]
    first_output = tl.program_id(1).to(tl.int64) * BLOCK_N
    outputs = first_output + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    steps = tl.arange(0, BLOCK_K)
    first = tl.program_id(2) * split_tiles * BLOCK_K
    last = tl.minimum(first + split_tiles * BLOCK_K, num_inputs)
    row_scales_ptr = scales_ptr + first_output // ROWS * tl.cdiv(num_inputs, COLUMNS)

    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHTS_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        scale = tl.load(row_scales_ptr + start // COLUMNS)
        inputs = start + steps
        is_input = (inputs < num_inputs) | WHOLE_TILES
        value_ptrs = values_ptr + outputs[:, None] * num_inputs + inputs[None, :]
        values = tl.load(value_ptrs, mask=is_output[:, None] & is_input[None, :], other=0.0)
        x_ptrs = x_ptr + tokens[:, None] * stride_x + inputs[None, :]
        x = tl.load(x_ptrs, mask=is_token & is_input[None, :], other=0.0)
        if WEIGHTS_FIRST:
            acc += dot(widened(values), tl.trans(x), DOT) * scale
        else:
            acc += dot(x, tl.trans(widened(values)), DOT) * scale
    y_row = tl.program_id(2).to(tl.int64) * num_tokens + tokens
    y_ptrs = y_ptr + y_row[:, None] * num_outputs + outputs[None, :]
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_token & is_output[None, :])


def fp8_block_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """x @ (values * scales).T with one scale for each block of (rows, columns); sums are float32.

    Neither weights nor activations are rounded. Weights are, once and to the dtype of x, where they are widened first:
    on a GPU without fp8, for many tokens, in rows of no multiple of 16, and in blocks that no tile lies within.

    x           [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    values      [outputs, inputs] float8_e4m3fn
    scales      [ceil(outputs / rows), ceil(inputs / columns)] float32
    num_splits  parts of the inputs that are summed apart; None: as many as fill the GPU
    returns     [num_tokens, outputs], dtype of x
    """
    launch = _launch_args(x, values, scales, block, num_splits)
    num_tokens, num_outputs = x.shape[0], values.shape[0]
    if num_tokens == 0:
        return x.new_empty(0, num_outputs)
    if launch is None:
        return dequantize.fp8_block_linear(x, values, scales, block)
    split, args = launch
    parts = empty_parts(x, num_outputs, split.grid[2])
    fp8_block_matmul_kernel[split.grid](parts, x, values, scales, num_tokens, **args)
    return sum_parts(parts, x.dtype)


@once_per_layout
def _launch_args(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], num_splits: int | None
) -> tuple[Split, LaunchArgs] | None:
    """Check the arguments of fp8_block_linear; how it is split, and what its kernel takes beside.

    None: of no tokens, or the weights are to be widened first.
    """
    need_rows("x", x, 2, FLOATS)
    num_tokens, num_inputs = x.shape
    need("values", values.dim() == 2, "of 2 dimensions", values.shape)
    num_outputs = values.shape[0]
    need_shape("values", values, (num_outputs, num_inputs))
    need("values", values.dtype == FP8, "float8_e4m3fn", values.dtype)
    rows, columns = block
    need("block", rows >= 1 and columns >= 1, "of at least 1 x 1", block)
    need_shape("scales", scales, (cdiv(num_outputs, rows), cdiv(num_inputs, columns)))
    need("scales", scales.dtype == torch.float32, "float32", scales.dtype)
    need("num_splits", num_splits is None or num_splits >= 1, "at least 1", num_splits)
    need_one_device(x=x, values=values, scales=scales)
    tile = tile_within(block, values.shape, num_tokens, x.dtype) if num_tokens else None
    if tile is None:
        return None
    split = split_of(x, num_outputs, num_inputs, tile, num_splits)
    return split, {
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "split_tiles": split.tiles,
        "stride_x": x.stride(0),
        "ROWS": rows,
        "COLUMNS": columns,
        "WHOLE_TILES": num_inputs % tile.block_k == 0,
        "WEIGHTS_FIRST": tile.block_m > 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "DOT": dot_dtype(x.dtype, x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def tile_within(block: tuple[int, int], shape: tuple[int, ...], num_tokens: int, dtype: torch.dtype) -> GemmTile | None:
    """A tile all of whose weights have one scale; None where weights are to be widened first."""
    if configs.arch() < FIRST_FP8_ARCH or shape[1] % ALIGNMENT or num_tokens >= WIDENED_FROM[dtype]:
        return None
    tile = configs.fp8_block_tile(configs.arch(), num_tokens, dtype)
    outputs, inputs = (
        side if size >= whole else min(side, size & -size)  # the largest power of two that divides the block
        for side, size, whole in zip((tile.block_n, tile.block_k), block, shape, strict=True)
    )
    if outputs < LEAST_OUTPUTS or inputs < LEAST_INPUTS:
        return None
    return GemmTile(tile.block_m, outputs, inputs, tile.num_warps, tile.num_stages)
