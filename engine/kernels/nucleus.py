"""The smallest logit that top_k and top_p keep of a row, found by a search instead of a sort.

Logits become integers of the same order, and a program for each row halves the range that the smallest kept one lies
in, twice in each pass over the row, which stays in L2: 8 passes for logits of 16 bits and 16 for float32, for top_k and
for top_p each. A pass counts the tokens above three thresholds, or sums their weights in float64. What comes out does
not depend on other rows, nor on how a sort breaks ties.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, LaunchArgs, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.numerics import float_of, ordered

BLOCK = 4096
LOWEST = tl.constexpr(-0x7F800001)  # what `ordered` makes of -inf
# Low bits of a float32 that are 0 where it was a 16-bit float.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def scaled(logits, best, temperature):
    """(logits - best) / temperature, rounded as torch does."""
    return tl.div_rn(logits - best, temperature)


@triton.jit
def weight_above(
    row_ptr, best, temperature, a, b, c, vocab_size, COUNT: tl.constexpr, SPARE: tl.constexpr, N: tl.constexpr
):
    """The number of tokens above each of three thresholds, or the sum of their weights."""
    a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    lanes = tl.arange(0, N)
    DTYPE: tl.constexpr = tl.int32 if COUNT else tl.float64
    above_a = tl.zeros([N], DTYPE)
    above_b = tl.zeros([N], DTYPE)
    above_c = tl.zeros([N], DTYPE)
    for start in range(0, vocab_size, N):
        # Past the end is -inf: no threshold is below it, but the one under which all weights lie, and it weighs 0.
        logits = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab_size, other=float("-inf")).to(tl.float32)
        images = ordered(logits) >> SPARE
        if COUNT:
            above_a += (images > a).to(tl.int32)
            above_b += (images > b).to(tl.int32)
            above_c += (images > c).to(tl.int32)
        else:
            weights = tl.exp(scaled(logits, best, temperature))
            above_a += tl.where(images > a, weights, 0.0).to(tl.float64)
            above_b += tl.where(images > b, weights, 0.0).to(tl.float64)
            above_c += tl.where(images > c, weights, 0.0).to(tl.float64)
    return tl.sum(above_a, 0), tl.sum(above_b, 0), tl.sum(above_c, 0)


@triton.jit
def lowest_with_less_above(
    row_ptr,
    best,
    temperature,
    low,
    high,
    nothing,
    target,
    vocab_size,
    COUNT: tl.constexpr,
    SPARE: tl.constexpr,
    N: tl.constexpr,
):
    """(the smallest threshold above `low` that has less than the target above it, what it has); at most `high`.

    It is some token's own: one less has a token more above it. `high` has `nothing` above it.
    """
    above = nothing
    while high - low > 1:
        span = high - low
        a = low + tl.maximum(span // 4, 1)
        b = low + tl.maximum(span // 2, 1)
        c = low + tl.maximum(span * 3 // 4, 1)
        above_a, above_b, above_c = weight_above(row_ptr, best, temperature, a, b, c, vocab_size, COUNT, SPARE, N)
        # Comparisons with NaN are false, so the range shrinks to its end.
        low = tl.where(above_a < target, low, tl.where(above_b < target, a, tl.where(above_c < target, b, c)))
        above = tl.where(
            above_a < target, above_a, tl.where(above_b < target, above_b, tl.where(above_c < target, above_c, above))
        )
        high = tl.where(above_a < target, a, tl.where(above_b < target, b, tl.where(above_c < target, c, high)))
    return high, above


@triton.jit
def logit_of(image, SPARE: tl.constexpr):
    """The float32 that this is the image of, without its spare bits."""
    spare = tl.where(image < 0, (1 << SPARE) - 1, 0)
    return float_of(((image << SPARE) | spare).to(tl.int32))


UNSPECIALIZED = ("best_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def nucleus_floors_kernel(
    floors_ptr,
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    stride,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    if (top_k >= vocab_size) & (top_p >= 1):
        tl.store(floors_ptr + row, float("-inf"))
        return
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    best = tl.load(best_ptr + row)
    temperature = tl.load(temperature_ptr + row)

    top = (ordered(best) >> SPARE).to(tl.int64)
    none = tl.full((), (LOWEST >> SPARE) - 1, tl.int64)  # below every token
    zero = top_k * 0
    least = none
    num_above = top_k
    below = none
    if top_k < vocab_size:
        least, num_above = lowest_with_less_above(
            row_ptr, best, temperature, none, top, zero, top_k, vocab_size, True, SPARE, BLOCK
        )
        below = least - 1
    if top_p < 1:
        total, _, _ = weight_above(row_ptr, best, temperature, least, least, least, vocab_size, False, SPARE, BLOCK)
        # Of the tokens that are as good as the last of top_k, as many count as it has room for.
        weight = tl.exp(scaled(logit_of(least, SPARE), best, temperature)).to(tl.float64)
        total += tl.where(num_above < top_k, (top_k - num_above) * weight, 0.0)
        least, _ = lowest_with_less_above(
            row_ptr, best, temperature, below, top, total * 0, top_p * total, vocab_size, False, SPARE, BLOCK
        )
    tl.store(floors_ptr + row, scaled(logit_of(least, SPARE), best, temperature))


def nucleus_floors(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    num_sorted: int,
) -> torch.Tensor:
    """The smallest (logit - best) / temperature that top_k and then top_p keep; equal ones stay together.

    top_p is the share of what top_k left: a token is kept while those above it have less.

    logits       [num_rows, vocab_size] float32, float16 or bfloat16; a row that holds nan or inf gets some floor
    best         [num_rows] float32, the maxima of the rows
    temperature  [num_rows, 1] float32, above 0 where a row is cut
    top_k        [num_rows, 1] int64, 1..vocab_size
    top_p        [num_rows, 1] float64, above 0; from 1 on it keeps all
    num_sorted   the largest top_k of a row that is cut, for kernels that sort
    returns      [num_rows, 1] float32; -inf where top_k and top_p keep all
    """
    args = _launch_args(logits, best, temperature, top_k, top_p)
    num_rows = logits.shape[0]
    floors = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        nucleus_floors_kernel[(num_rows,)](floors, logits, best, temperature, top_k, top_p, **args)
    return floors


@once_per_layout
def _launch_args(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> LaunchArgs:
    """Check the arguments of nucleus_floors; what its kernel takes beside."""
    need_rows("logits", logits, 2, FLOATS)
    num_rows, vocab_size = logits.shape
    need_shape("best", best, (num_rows,))
    for name, tensor in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        need_shape(name, tensor, (num_rows, 1))
    need_one_device(logits=logits, best=best, temperature=temperature, top_k=top_k, top_p=top_p)
    return {
        "vocab_size": vocab_size,
        "stride": logits.stride(0),
        "SPARE": SPARE_BITS[logits.dtype],
        "BLOCK": BLOCK,
        "num_warps": 16,
    }
