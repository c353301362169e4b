"""Split-KV decoding: several programs read parts of one long context; this merges their partial outputs."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import math

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.numerics import cast

MAX_SPLITS = 64  # a power of two
MIN_SPLIT_TOKENS = 128  # a shorter part is all start-up
BLOCK_WIDTH = 128


@triton.jit
def reduce_splits_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    NUM_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_seqs * num_heads, cdiv(WIDTH, BLOCK_WIDTH)): weigh each part by its share of the softmax total."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    # A part that saw nothing wrote only its -inf: its partial output is never read.
    seen = (lse > float("-inf"))[:, None] & (columns < WIDTH)[None, :]
    offsets = (row * NUM_SPLITS + splits)[:, None] * WIDTH + columns[None, :]
    partial = tl.load(partial_ptr + offsets, mask=seen, other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * WIDTH + columns, cast(out, out_ptr.dtype.element_ty), mask=columns < WIDTH)


def choose_num_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """How many parts each context is cut into, from shapes that a CUDA graph may freeze: a power of two.

    Enough programs to fill the device three deep; none where the unsplit grid nearly does, because merging costs
    more than a few idle processors. Each number of parts is a kernel of its own, compiled when a step first asks for
    it: powers of two keep them few.

    max_context_len  tokens that a sequence may attend to
    """
    wanted = configs.num_processors(device) * configs.PROGRAMS_PER_PROCESSOR
    if num_programs >= 0.8 * wanted:
        return 1
    most = max(1, min(MAX_SPLITS, max_context_len // MIN_SPLIT_TOKENS))
    last_power = 1 << (most.bit_length() - 1)  # rounded down: no part is shorter than MIN_SPLIT_TOKENS
    needed = math.ceil(wanted / num_programs)
    return min(last_power, 1 << (needed - 1).bit_length())


def scratch(num_seqs: int, num_heads: int, num_splits: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(partial outputs [num_seqs, num_heads, num_splits, width], log-sum-exps [..., num_splits]), float32, unset."""
    shape = (num_seqs, num_heads, num_splits)
    partial = torch.empty((*shape, width), dtype=torch.float32, device=like.device)
    return partial, torch.empty(shape, dtype=torch.float32, device=like.device)


def reduce_splits(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge partial outputs [num_seqs, num_heads, num_splits, width] into out [num_seqs, num_heads, width]."""
    num_seqs, num_heads, num_splits, width = partial.shape
    block_width = min(BLOCK_WIDTH, triton.next_power_of_2(width))
    reduce_splits_kernel[(num_seqs * num_heads, triton.cdiv(width, block_width))](
        out,
        partial,
        lse,
        NUM_SPLITS=num_splits,
        WIDTH=width,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        BLOCK_WIDTH=block_width,
        num_warps=4,
    )
