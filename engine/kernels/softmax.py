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
def add_tile(scores, v, top, total, acc, DOT: tl.constexpr):
    """(top, total, acc) after one more tile: scores [M, N], -inf where not to be seen, and v [N, DV]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: 2^-inf, not NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    acc = acc * shrink[:, None] + dot(weights, v, DOT)
    return new_top, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def finish_rows(total, acc):
    """The attention output [M, DV] in float32; zeros for a row that saw nothing."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]
