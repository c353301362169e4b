"""From the projections to attention in one kernel: norms of q and k, their rotation, and the write of k and v.

Apart, these are up to four kernels that read what the one before wrote; for one token per sequence each takes less
time than its launch. Keys go to the cache only: nothing else reads them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import LaunchArgs, need_one_device, need_shape, once_per_layout, strides
from engine.kernels.integers import next_power_of_2
from engine.kernels.norm import times_weight
from engine.kernels.numerics import cast
from engine.kernels.rope import load_angles, need_rotation
from engine.kernels.store_kv import copy_heads, need_new_kv, stored


@triton.jit
def _weighted_head(x, shrink, weight_ptr, columns, mask, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """x * shrink times the weights of its columns, rounded to DTYPE as a norm's output is."""
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return cast(times_weight(x * shrink, weight, UNIT_OFFSET, DTYPE), DTYPE).to(tl.float32)


@triton.jit
def _turn_heads(
    to_ptr,
    from_ptr,
    weight_ptr,
    cos,
    sin,
    eps,
    scale,
    stride_to,
    stride_from,
    heads,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One token's heads [heads, 2 * HALF + REST], BLOCK_HEADS at a time; the last REST elements do not turn.

    Rounded to their own dtype after the norm and after the turn, as if these were kernels of their own.
    """
    DTYPE: tl.constexpr = from_ptr.dtype.element_ty
    STORED: tl.constexpr = to_ptr.dtype.element_ty
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    rest = tl.arange(0, BLOCK_REST)[None, :]
    is_rest = rest < REST
    rest += 2 * HALF
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)[:, None]
        is_head = head < heads
        source = from_ptr + head * stride_from
        target = to_ptr + head * stride_to
        x = tl.load(source + first, mask=is_head & is_pair, other=0.0).to(tl.float32)
        y = tl.load(source + second, mask=is_head & is_pair, other=0.0).to(tl.float32)
        if REST > 0:
            z = tl.load(source + rest, mask=is_head & is_rest, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            squares = tl.sum(x * x + y * y, 1)
            if REST > 0:
                squares += tl.sum(z * z, 1)
            shrink = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
            x = _weighted_head(x, shrink, weight_ptr, first, is_pair, UNIT_OFFSET, DTYPE)
            y = _weighted_head(y, shrink, weight_ptr, second, is_pair, UNIT_OFFSET, DTYPE)
            if REST > 0:
                z = _weighted_head(z, shrink, weight_ptr, rest, is_rest, UNIT_OFFSET, DTYPE)
        a = cast(x * cos - y * sin, DTYPE).to(tl.float32)
        b = cast(y * cos + x * sin, DTYPE).to(tl.float32)
        tl.store(target + first, stored(a, scale, STORED), mask=is_head & is_pair)
        tl.store(target + second, stored(b, scale, STORED), mask=is_head & is_pair)
        if REST > 0:
            tl.store(target + rest, stored(z, scale, STORED), mask=is_head & is_rest)


@triton.jit
def rotate_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_scale,
    v_scale,
    num_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_block,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_block,
    stride_v_slot,
    stride_v_cache_head,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (num_tokens, 2): one token's queries, in place; its keys and values, into their slot."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angles(cos_sin_ptr, positions_ptr, token, HALF, BLOCK_HALF)
    if tl.program_id(1) == 0:
        q = q_ptr + token * stride_q_token
        _turn_heads(
            q,
            q,
            q_norm_ptr,
            cos,
            sin,
            eps,
            1.0,
            stride_q_head,
            stride_q_head,
            num_heads,
            INTERLEAVED,
            UNIT_OFFSET,
            HALF,
            REST,
            BLOCK_HALF,
            BLOCK_REST,
            BLOCK_HEADS,
        )
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            _turn_heads(
                k_cache_ptr + block * stride_k_block + offset * stride_k_slot,
                k_ptr + token * stride_k_token,
                k_norm_ptr,
                cos,
                sin,
                eps,
                k_scale,
                stride_k_cache_head,
                stride_k_head,
                KV_HEADS,
                INTERLEAVED,
                UNIT_OFFSET,
                HALF,
                REST,
                BLOCK_HALF,
                BLOCK_REST,
                BLOCK_HEADS,
            )
            copy_heads(
                v_cache_ptr + block * stride_v_block + offset * stride_v_slot,
                v_ptr + token * stride_v_token,
                v_scale,
                stride_v_cache_head,
                stride_v_head,
                KV_HEADS,
                HEAD_DIM_V,
                BLOCK_KV_HEADS,
                BLOCK_V,
            )


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    unit_offset: bool = False,
) -> torch.Tensor:
    """rms_norm of q and k where they have weights, rotate, store_kv; returns q, changed in place; k and v stay.

    q               [num_tokens, num_heads, head_dim]; k alike with num_kv_heads; v with head_dim_v; strided, last
                    dimension contiguous
    cos_sin         [max_position, rotary_dim] float32, positions [num_tokens], interleaved: as rotate has them
    k_cache         [num_blocks, block_size, num_kv_heads, head_dim], v_cache, slot_mapping and scales: as store_kv
    q_norm, k_norm  [head_dim]; norm_eps and unit_offset as rms_norm has them
    """
    args = _launch_args(
        q, k, v, cos_sin, positions, k_cache, v_cache, slot_mapping, interleaved, k_scale, v_scale, q_norm, k_norm,
        unit_offset,
    )  # fmt: skip
    num_tokens = q.shape[0]
    if num_tokens > 0:
        rotate_and_store_kernel[(num_tokens, 2)](
            q,
            k,
            v,
            k_cache,
            v_cache,
            cos_sin,
            positions,
            slot_mapping,
            q_norm,
            k_norm,
            norm_eps,
            k_scale,
            v_scale,
            **args,
        )
    return q


@once_per_layout
def _launch_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    k_scale: float,
    v_scale: float,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    unit_offset: bool,
) -> LaunchArgs:
    """Check the arguments of rotate_and_store; what its kernel takes beside."""
    need_rotation(q, k, cos_sin, positions)
    need_new_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _, num_heads, head_dim = q.shape
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            need_shape(name, weight, (head_dim,))
    need_one_device(q=q, v=v, q_norm=q_norm, k_norm=k_norm)
    half, num_kv_heads, head_dim_v = cos_sin.shape[1] // 2, k.shape[1], v.shape[2]
    rest = head_dim - 2 * half
    block_half, block_rest = next_power_of_2(half), next_power_of_2(max(1, rest))
    most_heads = next_power_of_2(max(num_heads, num_kv_heads))
    block_heads = min(most_heads, max(1, configs.ROW_ELEMENTS // max(block_half, block_rest)))
    largest = max(block_heads * max(block_half, block_rest), num_kv_heads * head_dim_v)
    return {
        "num_heads": num_heads,
        **strides("q", q, "token", "head"),
        **strides("k", k, "token", "head"),
        **strides("v", v, "token", "head"),
        **strides("k", k_cache, "block", "slot", "cache_head"),
        **strides("v", v_cache, "block", "slot", "cache_head"),
        "INTERLEAVED": interleaved,
        "UNIT_OFFSET": unit_offset,
        "BLOCK_SIZE": k_cache.shape[1],
        "KV_HEADS": num_kv_heads,
        "HALF": half,
        "REST": rest,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": block_rest,
        "BLOCK_HEADS": block_heads,
        "BLOCK_KV_HEADS": next_power_of_2(num_kv_heads),
        "BLOCK_V": next_power_of_2(head_dim_v),
        "num_warps": configs.row_warps(largest),
    }
