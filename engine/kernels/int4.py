"""A product with 4-bit weights, which become 16-bit ones tile by tile on their way to the tensor cores."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from dataclasses import replace

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.matrices import SHORTEST_RUN, nibble_run
from engine.kernels.numerics import cast, dot, dot_dtype
from engine.kernels.split_product import Split, empty_parts, split_of, sum_parts

NIBBLES = tl.constexpr(8)  # 4-bit values in a word


@triton.jit(do_not_specialize=["num_tokens", "split_tiles"])
def int4_matmul_kernel(
    y_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    num_tokens,
    num_outputs,
    num_words,
    group_size,
    split_tiles,
    stride_x,
    RUN: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
):
    """y[split] = x @ ((values - zeros) * scales), over the inputs of one split.

    Grid (cdiv(num_tokens, BLOCK_M), cdiv(num_outputs, BLOCK_N), splits). A tile of words is read once and makes eight
    tiles of weights, each of neighboring inputs.

    split_tiles     tiles of words in a split: a product with BLOCK_R, so that loads are known to begin on a boundary
    RUN             nibble_run() of these words, which BLOCK_R divides; 0: it is all of them, and no groups fit
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (rows < num_tokens)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    shifts = 4 * (outputs % NIBBLES)[None, :]
    columns = tl.program_id(1) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)  # of zeros
    is_column = columns < num_outputs // NIBBLES
    steps = tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * split_tiles * BLOCK_R
    last = tl.minimum(first + split_tiles * BLOCK_R, num_words)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_R):
        is_word = (start + steps < num_words) | (RUN > 0)
        word_ptrs = words_ptr + (start + steps)[:, None] * num_outputs + outputs[None, :]
        words = tl.load(word_ptrs, mask=is_word[:, None] & is_output[None, :], other=0)
        if RUN == 0:
            first_input = start
        elif RUN == BLOCK_R:
            first_input = start * NIBBLES
        else:  # the words of a run are not all in this tile
            first_input = start + (NIBBLES - 1) * (start // RUN * RUN)
        for j in tl.static_range(8):
            inputs = first_input + j * (RUN if RUN > 0 else num_words) + steps
            x_ptrs = x_ptr + rows[:, None] * stride_x + inputs[None, :]
            x = tl.load(x_ptrs, mask=is_row & is_word[None, :], other=0.0)
            if RUN == 0:
                groups = (inputs // group_size)[:, None]
                mask = is_word[:, None] & is_output[None, :]
                scale = tl.load(scales_ptr + groups * num_outputs + outputs[None, :], mask=mask, other=0.0)
                zero_ptrs = zeros_ptr + groups * (num_outputs // NIBBLES) + (outputs // NIBBLES)[None, :]
                zero = (tl.load(zero_ptrs, mask=mask, other=0) >> shifts) & 15
            elif j % RUNS_PER_GROUP == 0 or (8 % RUNS_PER_GROUP > 0 and RUNS_PER_GROUP % 8 > 0):
                group = (first_input // RUN + j) // RUNS_PER_GROUP
                scale = tl.load(scales_ptr + group * num_outputs + outputs, mask=is_output, other=0.0)[None, :]
                packed = tl.load(zeros_ptr + group * (num_outputs // NIBBLES) + columns, mask=is_column, other=0)
                zero = tl.reshape(tl.broadcast_to(packed[:, None], [BLOCK_N // 8, 8]), [1, BLOCK_N]) >> shifts & 15
            weight = (((words >> (4 * j)) & 15) - zero).to(tl.float32) * scale.to(tl.float32)
            acc += dot(x, weight, DOT)
    y_row = tl.program_id(2).to(tl.int64) * num_tokens + rows
    y_ptrs = y_ptr + y_row[:, None] * num_outputs + outputs[None, :]
    tl.store(y_ptrs, cast(acc, y_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


def int4_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, num_splits: int | None = None
) -> torch.Tensor:
    """x @ ((values - zeros) * scales); weights are rounded to the dtype of x, sums are float32.

    x           [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    words       [inputs / 8, outputs] int32, in Int4Matrix's order
    scales      [groups, outputs] float16 or bfloat16; a group is inputs / groups neighbors
    zeros       [groups, outputs / 8] int32: bits 4j to 4j + 3 of column c are output 8c + j's
    num_splits  parts of the inputs that are summed apart; None: as many as fill the GPU
    returns     [num_tokens, outputs], dtype of x
    """
    launch = _launch_args(x, words, scales, zeros, num_splits)
    num_tokens, num_outputs = x.shape[0], words.shape[1]
    if launch is None:
        return x.new_empty(0, num_outputs)
    split, args = launch
    parts = empty_parts(x, num_outputs, split.grid[2])
    int4_matmul_kernel[split.grid](parts, x, words, scales, zeros, num_tokens, **args)
    return sum_parts(parts, x.dtype)


@once_per_layout
def _launch_args(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, num_splits: int | None
) -> tuple[Split, LaunchArgs] | None:
    """Check the arguments of int4_linear; how it is split, and what its kernel takes beside. None: of no tokens."""
    need_rows("x", x, 2, FLOATS)
    num_tokens, num_inputs = x.shape
    need("words", words.dim() == 2 and 8 * words.shape[0] == num_inputs, "[{} / 8, outputs]", words.shape, num_inputs)
    num_words, num_outputs = words.shape
    need_shape("words", words, (num_words, num_outputs))
    need("words", words.dtype == torch.int32 and num_outputs % 8 == 0, "int32, of 8n outputs", words.dtype)
    num_groups = scales.shape[0]
    need_shape("scales", scales, (num_groups, num_outputs))
    need("scales", scales.dtype in (torch.float16, torch.bfloat16), "of 16 bits", scales.dtype)
    need(
        "scales",
        num_groups > 0 and num_inputs % num_groups == 0,
        "of whole groups of {} inputs",
        num_groups,
        num_inputs,
    )
    need_shape("zeros", zeros, (num_groups, num_outputs // 8))
    need("zeros", zeros.dtype == torch.int32, "int32", zeros.dtype)
    need("num_splits", num_splits is None or num_splits >= 1, "at least 1", num_splits)
    need_one_device(x=x, words=words, scales=scales, zeros=zeros)
    if num_tokens == 0:
        return None
    group_size, arch = num_inputs // num_groups, configs.arch()
    tile = configs.int4_tile(arch, num_tokens, x.dtype)
    run = nibble_run(num_words, group_size)
    if run % SHORTEST_RUN == 0 and group_size % run == 0:
        tile = replace(tile, block_k=min(tile.block_k, run))
    else:  # a scale for each weight is loaded, which the smallest tile without a pipeline has room for
        run, tile = 0, replace(configs.int4_tile(arch, 1, x.dtype), block_k=32, num_stages=1, num_warps=8)
    split = split_of(x, num_outputs, num_words, tile, num_splits)
    return split, {
        "num_outputs": num_outputs,
        "num_words": num_words,
        "group_size": group_size,
        "split_tiles": split.tiles,
        "stride_x": x.stride(0),
        "RUN": run,
        "RUNS_PER_GROUP": group_size // run if run else 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_k,
        "DOT": dot_dtype(x.dtype, x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        # Three programs have 168 registers a thread; left to itself ptxas stops at 128, where splits need 130.
        "maxnreg": 168 if run and tile.block_m == 16 else None,
    }
