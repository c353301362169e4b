"""Rotary position embedding, in place."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import (
    FLOATS,
    LaunchArgs,
    need,
    need_one_device,
    need_rows,
    need_shape,
    once_per_layout,
    strides,
)
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import cast


@triton.jit
def load_angles(cos_sin_ptr, positions_ptr, token, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """(cosines, sines) [1, BLOCK_HALF] of a token's position."""
    row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    return tl.load(row + pair, mask=pair < HALF, other=0.0), tl.load(row + HALF + pair, mask=pair < HALF, other=0.0)


@triton.jit
def _rotate_heads(
    x_ptr,
    cos,
    sin,
    stride_head,
    heads,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One token's heads [heads, 2 * HALF], BLOCK_HEADS at a time."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)[:, None]
        mask = (head < heads) & (pair < HALF)
        x = tl.load(x_ptr + head * stride_head + first, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(x_ptr + head * stride_head + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr + head * stride_head + first, cast(x * cos - y * sin, x_ptr.dtype.element_ty), mask=mask)
        tl.store(x_ptr + head * stride_head + second, cast(y * cos + x * sin, x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    positions_ptr,
    num_heads,
    num_kv_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (num_tokens,): one token, all its query and key heads."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angles(cos_sin_ptr, positions_ptr, token, HALF, BLOCK_HALF)
    q_token = q_ptr + token * stride_q_token
    k_token = k_ptr + token * stride_k_token
    _rotate_heads(q_token, cos, sin, stride_q_head, num_heads, INTERLEAVED, HALF, BLOCK_HALF, BLOCK_HEADS)
    _rotate_heads(k_token, cos, sin, stride_k_head, num_kv_heads, INTERLEAVED, HALF, BLOCK_HALF, BLOCK_HEADS)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of each head's elements by their position's angles, in place; returns q and k.

    q            [num_tokens, num_heads, head_dim]; k alike with num_kv_heads; strided, last dimension contiguous
    cos_sin      [max_position, rotary_dim] float32: cosines, then as many sines; rotary_dim <= head_dim, the elements
                 of a head after it stay
    positions    [num_tokens] int32 or int64
    interleaved  False: pairs are (i, i + rotary_dim / 2); True: (2i, 2i + 1)
    """
    args = _launch_args(q, k, cos_sin, positions, interleaved)
    num_tokens, num_heads, _ = q.shape
    if num_tokens > 0:
        rotate_kernel[(num_tokens,)](q, k, cos_sin, positions, num_heads, k.shape[1], **args)
    return q, k


@once_per_layout
def _launch_args(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> LaunchArgs:
    """Check the arguments of rotate; what its kernel takes beside."""
    need_rotation(q, k, cos_sin, positions)
    half = cos_sin.shape[1] // 2
    block_half = next_power_of_2(half)
    most_heads = next_power_of_2(max(q.shape[1], k.shape[1]))
    block_heads = min(most_heads, max(1, configs.ROW_ELEMENTS // block_half))
    return {
        **strides("q", q, "token", "head"),
        **strides("k", k, "token", "head"),
        "INTERLEAVED": interleaved,
        "HALF": half,
        "BLOCK_HALF": block_half,
        "BLOCK_HEADS": block_heads,
        "num_warps": configs.row_warps(block_heads * block_half),
    }


def need_rotation(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """What turning queries and keys asks, whatever else is done to them on the way."""
    need_rows("q", q, 3, FLOATS)
    need_rows("k", k, 3, (q.dtype,))
    num_tokens, _, head_dim = q.shape
    need("k", k.shape[0] == num_tokens, "of {} tokens like q", k.shape[0], num_tokens)
    need("k", k.shape[2] == head_dim, "of head_dim {} like q", k.shape[2], head_dim)
    need_rows("cos_sin", cos_sin, 2, (torch.float32,))
    rotary_dim = cos_sin.shape[1]
    need("cos_sin", rotary_dim % 2 == 0 and rotary_dim <= head_dim, "even and at most {} wide", rotary_dim, head_dim)
    need_shape("cos_sin", cos_sin, (cos_sin.shape[0], rotary_dim))
    need_shape("positions", positions, (num_tokens,))
    need("positions", positions.dtype in (torch.int32, torch.int64), "int32 or int64", positions.dtype)
    need_one_device(q=q, k=k, cos_sin=cos_sin, positions=positions)
