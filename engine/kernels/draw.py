"""A row's best token, and one that is drawn: where a number falls in the running sum of the row's probabilities.

A row is cut into parts of BLOCK tokens. Programs for all parts find their best, or sum their weights; then one program
per row finds the best of all, or the part that the number falls in and the token in it. The logits are read in the
head's own dtype, and nothing of their size is written. Sums are float64: in float32 a tail of many tokens below 6e-8
would vanish.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.numerics import float_of, ordered

BLOCK = 4096
# What a step brings along lies wherever there was room: no variant of a kernel for every alignment.
UNSPECIALIZED = ("best_ptr", "temperature_ptr", "floors_ptr", "uniforms_ptr")


@triton.jit
def best_of_parts_kernel(keys_ptr, logits_ptr, vocab_size, stride, num_parts, BLOCK: tl.constexpr):
    """Grid (num_rows, num_parts): keys are larger for a larger logit, and for an earlier token of the same one."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    images = ordered(logits.to(tl.float32))
    largest = tl.max(images, 0)
    first = tl.min(tl.where(images == largest, tokens, 0x7FFFFFFF), 0)
    tl.store(keys_ptr + row * num_parts + part, (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first))


@triton.jit
def best_kernel(best_ptr, tokens_ptr, is_bad_ptr, keys_ptr, num_parts, PARTS: tl.constexpr):
    """Grid (num_rows,): the best of a row's parts; PARTS is num_parts up to a power of two."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    keys = tl.load(keys_ptr + row.to(tl.int64) * num_parts + parts, mask=parts < num_parts, other=-(2**63))
    key = tl.max(keys, 0)
    best = float_of((key >> 32).to(tl.int32))
    tl.store(best_ptr + row, best)
    tl.store(tokens_ptr + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(is_bad_ptr + row, (tl.abs(best) < float("inf")) == 0)


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit of each row, the first token that has it, and whether it is no finite number.

    logits   [num_rows, vocab_size] float32, float16 or bfloat16; strided, last dimension contiguous
    returns  [num_rows] float32, NaN for a row that holds one; [num_rows] int64; [num_rows] bool
    """
    _check_logits(logits)
    num_rows, vocab_size = logits.shape
    num_parts = cdiv(vocab_size, BLOCK)
    best = torch.empty((num_rows,), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    is_bad = torch.empty((num_rows,), dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return best, tokens, is_bad
    keys = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    best_of_parts_kernel[(num_rows, num_parts)](
        keys, logits, vocab_size, logits.stride(0), num_parts, BLOCK=BLOCK, num_warps=8
    )
    best_kernel[(num_rows,)](best, tokens, is_bad, keys, num_parts, PARTS=next_power_of_2(num_parts), num_warps=4)
    return best, tokens, is_bad


@once_per_layout
def _check_logits(logits: torch.Tensor) -> None:
    """Check the argument of best_tokens."""
    need_rows("logits", logits, 2, FLOATS)


@triton.jit
def load_weights(logits_ptr, row, first, best, temperature, floor, vocab_size, stride, BLOCK: tl.constexpr):
    """exp((logit - best) / temperature) of BLOCK tokens from `first` on, 0 where that is below the floor; float64."""
    tokens = first + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    # The quotient is rounded as torch does: it is compared with a floor that is such a quotient.
    scaled = tl.div_rn(logits.to(tl.float32) - best, temperature)
    weights = tl.where(scaled >= floor, tl.exp(scaled), 0.0)
    return weights.to(tl.float64)


@triton.jit
def load_row(best_ptr, temperature_ptr, floors_ptr, row):
    """(best logit, temperature, floor) of a row."""
    floor = float("-inf")
    if floors_ptr is not None:
        floor = tl.load(floors_ptr + row)
    return tl.load(best_ptr + row), tl.load(temperature_ptr + row), floor


@triton.jit(do_not_specialize=UNSPECIALIZED[:-1])
def sum_parts_kernel(
    sums_ptr, logits_ptr, best_ptr, temperature_ptr, floors_ptr, vocab_size, stride, num_parts, BLOCK: tl.constexpr
):
    """Grid (num_rows, num_parts): the weights' sum of one part of one row, unless the row is not drawn."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    best, temperature, floor = load_row(best_ptr, temperature_ptr, floors_ptr, row)
    if temperature == 0:
        return
    weights = load_weights(logits_ptr, row, part * BLOCK, best, temperature, floor, vocab_size, stride, BLOCK)
    tl.store(sums_ptr + row * num_parts + part, tl.sum(weights, 0))


@triton.jit
def first_above(weights, before, target, N: tl.constexpr):
    """The first of N whose running sum, begun with `before`, is above the target; else the last that adds to it."""
    places = tl.arange(0, N)
    is_above = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(is_above, places, N), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    return tl.where(first < N, first, last)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def draw_kernel(
    tokens_ptr,
    sums_ptr,
    logits_ptr,
    best_ptr,
    temperature_ptr,
    floors_ptr,
    uniforms_ptr,
    vocab_size,
    stride,
    num_parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (num_rows,): the token that the row's number falls on; PARTS is num_parts up to a power of two."""
    row = tl.program_id(0)
    best, temperature, floor = load_row(best_ptr, temperature_ptr, floors_ptr, row)
    if temperature == 0:
        return
    parts = tl.arange(0, PARTS)
    sums = tl.load(sums_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    target = tl.load(uniforms_ptr + row) * tl.sum(sums, 0)
    part = first_above(sums, 0.0, target, PARTS)
    before = tl.sum(tl.where(parts < part, sums, 0.0), 0)
    weights = load_weights(logits_ptr, row, part * BLOCK, best, temperature, floor, vocab_size, stride, BLOCK)
    tl.store(tokens_ptr + row, (part * BLOCK + first_above(weights, before, target, BLOCK)).to(tl.int64))


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    floors: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token of each row, where its number falls in the running sum of its probabilities.

    logits       [num_rows, vocab_size] float32, float16 or bfloat16; a row that holds nan or inf gets some token
    best         [num_rows] float32, the maxima of the rows
    temperature  [num_rows, 1] float32, not below 0; a row with 0 is not drawn
    uniforms     [num_rows, 1] float64 in [0, 1)
    floors       [num_rows, 1] float32: tokens whose (logit - best) / temperature is below do not come; None: all may
    out          [num_rows] int64: what is returned is written there, and tokens of rows that are not drawn stay; None:
                 a new tensor, in which these are not set
    returns      [num_rows] int64
    """
    _check(logits, best, temperature, uniforms, floors, out)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device) if out is None else out
    num_parts = cdiv(vocab_size, BLOCK)
    if num_rows == 0:
        return tokens
    sums = torch.empty((num_rows, num_parts), dtype=torch.float64, device=logits.device)
    of_rows = (logits, best, temperature, floors)
    sum_parts_kernel[(num_rows, num_parts)](
        sums, *of_rows, vocab_size, logits.stride(0), num_parts, BLOCK=BLOCK, num_warps=4
    )
    draw_kernel[(num_rows,)](
        tokens,
        sums,
        *of_rows,
        uniforms,
        vocab_size,
        logits.stride(0),
        num_parts,
        BLOCK=BLOCK,
        PARTS=next_power_of_2(num_parts),
        num_warps=8,
    )
    return tokens


@once_per_layout
def _check(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    floors: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of draw."""
    need_rows("logits", logits, 2, FLOATS)
    num_rows = logits.shape[0]
    need_shape("best", best, (num_rows,))
    for name, tensor in (("temperature", temperature), ("uniforms", uniforms), ("floors", floors)):
        if tensor is not None:
            need_shape(name, tensor, (num_rows, 1))
    if out is not None:
        need_shape("out", out, (num_rows,))
        need("out", out.dtype == torch.int64, "int64", out.dtype)
    need_one_device(logits=logits, best=best, temperature=temperature, uniforms=uniforms, floors=floors, out=out)
