"""Which experts each token goes to and with which weights: one program per token."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from typing import Literal

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, LaunchArgs, need, need_one_device, need_rows, need_shape, once_per_layout
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import float_of, ordered

MAX_EXPERTS = 512
USED = tl.constexpr(-(2**63))  # the key of what is not to be chosen, now or again


@triton.jit
def keys_of(scores, ids):
    """int64, larger for a larger score, and of equal ones for the smaller id; NaN is above all."""
    return (ordered(scores).to(tl.int64) << 32) | (0x7FFFFFFF - ids)


@triton.jit
def id_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def score_of(key):
    return float_of((key >> 32).to(tl.int32))


@triton.jit
def kept_groups(choice, ids, is_expert, CORRECTED: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr):
    """Which rows of choice [GROUPS, width] are the best: by their best score, or by their two best together."""
    keys = tl.where(is_expert, keys_of(choice, ids), USED)
    first = tl.max(keys, 1)
    score = score_of(first)
    if CORRECTED:
        second = tl.max(tl.where(keys == first[:, None], USED, keys), 1)
        score += score_of(second)
    groups = tl.arange(0, GROUPS)
    left = tl.where(first != USED, keys_of(score, groups), USED)
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(left == tl.max(left, 0), USED, left)
    return (first != USED) & (left == USED)


@triton.jit
def route_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    correction_ptr,
    scale,
    num_experts,
    stride,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Grid (num_tokens,). Experts lie in [GROUPS, WIDTH], CHOICES is TOP_K: all up to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    width = num_experts // NUM_GROUPS
    groups, columns = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    is_expert = (groups < NUM_GROUPS) & (columns < width)
    ids = groups * width + columns
    logits = tl.load(logits_ptr + token * stride + ids, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.div_rn(1.0, 1 + tl.exp(-logits))
    else:
        weights = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = tl.div_rn(weights, tl.sum(tl.sum(weights, 1), 0))
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + ids, mask=is_expert, other=0.0)
    if NUM_GROUPS > 1:
        is_open = kept_groups(choice, ids, is_expert, correction_ptr is not None, TOP_GROUPS, GROUPS)
        choice = tl.where(is_open[:, None], choice, float("-inf"))

    keys = tl.where(is_expert, keys_of(choice, ids), USED)
    places = tl.arange(0, CHOICES)
    chosen_ids = tl.zeros([CHOICES], tl.int32)
    chosen = tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.max(keys, 1), 0)
        is_best = keys == best
        chosen_ids = tl.where(places == i, id_of(best), chosen_ids)
        chosen = tl.where(places == i, tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1), 0), chosen)
        keys = tl.where(is_best, USED, keys)
    if RENORMALIZE:
        chosen = tl.div_rn(chosen, tl.sum(chosen, 0) + 1e-20)
    mask = places < TOP_K
    tl.store(ids_ptr + token * TOP_K + places, chosen_ids.to(tl.int64), mask=mask)
    tl.store(weights_ptr + token * TOP_K + places, chosen * scale, mask=mask)


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token, the best first and of equal ones the first, and their weights.

    logits      [num_tokens, num_experts] float32, float16 or bfloat16; strided, last dimension contiguous; at most 512
                experts. Where one is nan, some experts come, all different
    correction  [num_experts] float32, added to the scores for choosing and not for weighing
    scoring     of all logits, in float32
    groups      experts come from the top_groups best of so many groups: by their best expert, or, where there is a
                correction, by the sum of their two best
    renormalize, scale  the weights are divided by their sum (and 1e-20), then multiplied by scale
    returns     [num_tokens, top_k] int64, and float32 alike
    """
    args = _launch_args(logits, correction, top_k, scoring, groups, top_groups, renormalize)
    num_tokens = logits.shape[0]
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        route_kernel[(num_tokens,)](ids, weights, logits, correction, float(scale), **args)
    return ids, weights


@once_per_layout
def _launch_args(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    scoring: str,
    groups: int,
    top_groups: int,
    renormalize: bool,
) -> LaunchArgs:
    """Check the arguments of route; what its kernel takes beside."""
    need_rows("logits", logits, 2, FLOATS)
    _, num_experts = logits.shape
    need("logits", num_experts <= MAX_EXPERTS, "of at most {} experts", num_experts, MAX_EXPERTS)
    need("groups", groups >= 1 and num_experts % groups == 0, "a divisor of {} experts", groups, num_experts)
    need("top_groups", 1 <= top_groups <= groups, "1 to {}", top_groups, groups)
    max_experts = num_experts // groups * top_groups
    need("top_k", 1 <= top_k <= max_experts, "1 to {}", top_k, max_experts)
    need("scoring", scoring in ("softmax", "sigmoid"), "softmax or sigmoid", scoring)
    if correction is not None:
        need_shape("correction", correction, (num_experts,))
        need("groups", groups == 1 or num_experts >= 2 * groups, "of two experts and more", groups)
    need_one_device(logits=logits, correction=correction)
    return {
        "num_experts": num_experts,
        "stride": logits.stride(0),
        "SIGMOID": scoring == "sigmoid",
        "RENORMALIZE": renormalize,
        "NUM_GROUPS": groups,
        "TOP_GROUPS": top_groups,
        "TOP_K": top_k,
        "GROUPS": next_power_of_2(groups),
        "WIDTH": next_power_of_2(num_experts // groups),
        "CHOICES": next_power_of_2(top_k),
        "num_warps": 1,
    }
