"""Attention one KV tile at a time: scores, and the running softmax that never holds a whole row of them.

A row keeps three numbers: `top`, the largest score so far; `total`, the sum of 2^(score - top); `acc`, the sum of
2^(score - top) * value. Scores are in base 2 (times log2 e), because exp2 is what the hardware has.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import triton
import triton.language as tl

from engine.kernels.numerics import LOG2_E, dot, tanh


@triton.jit
def attention_scores(q, k, scale, SOFTCAP: tl.constexpr, DOT: tl.constexpr):
    """Base-2 scores [M, N] of q [M, D] and k [D, N]; SOFTCAP 0 is none."""
    scores = dot(q, k, DOT)
    return tanh(scores * (scale / SOFTCAP)) * (SOFTCAP * LOG2_E) if SOFTCAP > 0 else scores * (scale * LOG2_E)


@triton.jit
def start_rows(sinks_ptr, heads, is_head, holds_sink, M: tl.constexpr, DV: tl.constexpr):
    """(top, total, acc) before any tile. A sink is a score without a value: it counts once, where `holds_sink`."""
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(holds_sink, sinks, top)
        total = tl.where(holds_sink, 1.0, total)
    return top, total, tl.zeros([M, DV], tl.float32)


@triton.jit
def weigh_tile(scores, top, total):
    """(top, total, weights, what acc shrinks by) for one more tile of scores [M, N], -inf where not to be seen."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: 2^-inf, not NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return new_top, total * shrink + tl.sum(weights, 1), weights, shrink[:, None]


@triton.jit
def add_tile(scores, v, top, total, acc, DOT: tl.constexpr):
    """(top, total, acc) after one more tile: its scores and v [N, DV]."""
    top, total, weights, shrink = weigh_tile(scores, top, total)
    return top, total, acc * shrink + dot(weights, v, DOT)


@triton.jit
def add_pairs(scores, pairs, top, total, even, odd, DOT: tl.constexpr):
    """(top, total, acc of even columns, acc of odd ones) after one more tile: its scores and float8 v in pairs.

    pairs [N, DV / 2] uint16: two columns. Tensor cores take values by columns, which shared memory can turn in words
    of 16 bits only: single bytes it would give out one by one, after copies of 8 bytes in place of 16.
    """
    top, total, weights, shrink = weigh_tile(scores, top, total)
    v_even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    v_odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return top, total, even * shrink + dot(weights, v_even, DOT), odd * shrink + dot(weights, v_odd, DOT)


@triton.jit
def finish_rows(total, acc):
    """The attention output [M, DV] in float32; zeros for a row that saw nothing."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]
