"""Write new tokens' keys and values (or MLA latents) into their slots of the paged cache."""
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
    need_cache,
    need_one_device,
    need_rows,
    need_shape,
    need_unscaled,
    once_per_layout,
    strides,
)
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import cast


@triton.jit
def stored(x, scale, DTYPE: tl.constexpr):
    """float32 x as the cache's dtype, divided by the scale where that is float8."""
    if DTYPE.is_fp8():
        x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
    return cast(x, DTYPE)


@triton.jit
def copy_heads(
    to_ptr,
    from_ptr,
    scale,
    stride_to,
    stride_from,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One token's [HEADS, WIDTH], divided by the scale where the cache is float8."""
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (heads < HEADS) & (columns < WIDTH)
    x = tl.load(from_ptr + heads * stride_from + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_ptr + heads * stride_to + columns, stored(x, scale, to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_scale,
    v_scale,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_new_k_token,
    stride_new_k_head,
    stride_new_v_token,
    stride_new_v_head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (num_tokens,): one token, all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    copy_heads(
        k_cache_ptr + block * stride_k_block + offset * stride_k_slot,
        k_ptr + token * stride_new_k_token,
        k_scale,
        stride_k_head,
        stride_new_k_head,
        HEADS,
        HEAD_DIM,
        BLOCK_HEADS,
        BLOCK_K,
    )
    copy_heads(
        v_cache_ptr + block * stride_v_block + offset * stride_v_slot,
        v_ptr + token * stride_new_v_token,
        v_scale,
        stride_v_head,
        stride_new_v_head,
        HEADS,
        HEAD_DIM_V,
        BLOCK_HEADS,
        BLOCK_V,
    )


@triton.jit
def store_latent_kernel(
    cache_ptr,
    latent_ptr,
    slots_ptr,
    stride_block,
    stride_slot,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_tokens,): one token's row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    copy_heads(cache_ptr + row, latent_ptr + token * stride_token, 1.0, 0, 0, 1, WIDTH, 1, BLOCK_WIDTH)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write each token's keys and values into its slot, in place.

    k             [num_tokens, num_kv_heads, head_dim]; v alike with head_dim_v; strided, last dimension contiguous
    k_cache       [num_blocks, block_size, num_kv_heads, head_dim]; v_cache alike; strided, last dimension contiguous
    slot_mapping  [num_tokens] int64, block_id * block_size + offset; a negative one is skipped
    k_scale       float8_e4m3fn caches only: stored = value / scale, to nearest, saturating at +-448
    """
    args = _launch_args(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    num_tokens = k.shape[0]
    if num_tokens > 0:
        store_kv_kernel[(num_tokens,)](k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale, **args)


@once_per_layout
def _launch_args(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> LaunchArgs:
    """Check the arguments of store_kv; what its kernel takes beside."""
    need_new_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _, num_kv_heads, head_dim = k.shape
    head_dim_v = v.shape[2]
    return {
        **strides("k", k_cache, "block", "slot", "head"),
        **strides("v", v_cache, "block", "slot", "head"),
        **strides("new_k", k, "token", "head"),
        **strides("new_v", v, "token", "head"),
        "BLOCK_SIZE": k_cache.shape[1],
        "HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_HEADS": next_power_of_2(num_kv_heads),
        "BLOCK_K": next_power_of_2(head_dim),
        "BLOCK_V": next_power_of_2(head_dim_v),
        "num_warps": configs.row_warps(num_kv_heads * max(head_dim, head_dim_v)),
    }


def store_latent(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's latent row into its slot, in place.

    latent        [num_tokens, width]; strided, last dimension contiguous
    cache         [num_blocks, block_size, width], not float8; strided, last dimension contiguous
    slot_mapping  [num_tokens] int64, block_id * block_size + offset; a negative one is skipped
    """
    args = _latent_launch_args(latent, cache, slot_mapping)
    num_tokens = latent.shape[0]
    if num_tokens > 0:
        store_latent_kernel[(num_tokens,)](cache, latent, slot_mapping, **args)


@once_per_layout
def _latent_launch_args(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> LaunchArgs:
    """Check the arguments of store_latent; what its kernel takes beside."""
    need_rows("latent", latent, 2, FLOATS)
    need_cache("cache", cache, 3, configs.arch())
    need("cache", cache.dtype in FLOATS, "of one of {}", cache.dtype, FLOATS)
    num_tokens, width = latent.shape
    need("cache", cache.shape[2] == width, "of width {} like latent", cache.shape[2], width)
    need_slots(slot_mapping, num_tokens)
    need_one_device(latent=latent, cache=cache, slot_mapping=slot_mapping)
    return {
        "stride_block": cache.stride(0),
        "stride_slot": cache.stride(1),
        "stride_token": latent.stride(0),
        "BLOCK_SIZE": cache.shape[1],
        "WIDTH": width,
        "BLOCK_WIDTH": next_power_of_2(width),
        "num_warps": configs.row_warps(width),
    }


def need_new_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """What storing keys and values asks, whatever else is done to them on the way."""
    need_rows("k", k, 3, FLOATS)
    need_rows("v", v, 3, FLOATS)
    num_tokens, num_kv_heads, head_dim = k.shape
    head_dim_v = v.shape[2]
    arch = configs.arch()
    need_cache("k_cache", k_cache, 4, arch)
    need_cache("v_cache", v_cache, 4, arch)
    need("v", v.shape[:2] == k.shape[:2], "of {} tokens and heads like k", v.shape, tuple(k.shape[:2]))
    need("k_cache", k_cache.shape[2:] == k.shape[1:], "[..., {}, {}]", k_cache.shape, num_kv_heads, head_dim)
    need("v_cache", v_cache.shape[2:] == v.shape[1:], "[..., {}, {}]", v_cache.shape, num_kv_heads, head_dim_v)
    need("v_cache", v_cache.shape[:2] == k_cache.shape[:2], "of k_cache's blocks", v_cache.shape)
    need("v_cache", v_cache.dtype == k_cache.dtype, "{} like k_cache", v_cache.dtype, k_cache.dtype)
    need_slots(slot_mapping, num_tokens)
    need_unscaled(k_cache.dtype, k_scale, v_scale)
    need_one_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)


def need_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    need_shape("slot_mapping", slot_mapping, (num_tokens,))
    need("slot_mapping", slot_mapping.dtype == torch.int64, "int64", slot_mapping.dtype)
