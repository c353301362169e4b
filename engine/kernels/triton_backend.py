"""The kernels in Triton: for GPUs of compute capability 8.0 and newer."""

import torch

from engine.kernels import configs
from engine.kernels.activation import gated_activation
from engine.kernels.checks import FLOATS, is_block_size, need_supported
from engine.kernels.decode import decode_planner, paged_decode
from engine.kernels.draw import best_tokens, draw
from engine.kernels.fp8 import fp8_linear
from engine.kernels.fp8_block import fp8_block_linear
from engine.kernels.int4 import int4_linear
from engine.kernels.latent import latent_decode, latent_planner
from engine.kernels.lora import lora_expand, lora_shrink
from engine.kernels.moe import moe_mlp
from engine.kernels.moe_fp4 import nvfp4_linear
from engine.kernels.norm import rms_norm
from engine.kernels.nucleus import nucleus_floors
from engine.kernels.numerics import INTERPRETED
from engine.kernels.prefill import paged_prefill, queries_of_tile
from engine.kernels.rope import rotate
from engine.kernels.rope_store import rotate_and_store
from engine.kernels.route import route
from engine.kernels.store_kv import store_kv, store_latent

__all__ = [
    "INTERPRETED",
    "IS_PLANNED",
    "LORA_WALKS_ON_HOST",
    "best_tokens",
    "decode_planner",
    "draw",
    "for_sampling",
    "fp8_block_linear",
    "fp8_linear",
    "gated_activation",
    "int4_linear",
    "latent_decode",
    "latent_planner",
    "lora_expand",
    "lora_shrink",
    "moe_mlp",
    "nucleus_floors",
    "nvfp4_linear",
    "paged_decode",
    "paged_prefill",
    "queries_of_tile",
    "rms_norm",
    "rotate",
    "rotate_and_store",
    "route",
    "store_kv",
    "store_latent",
    "unsupported",
]

IS_PLANNED = True  # decode and prefill take what is planned on the host
LORA_WALKS_ON_HOST = False  # each token's slot is read on the device


def for_sampling(logits: torch.Tensor) -> torch.Tensor:
    """The head's logits: these kernels widen what they read."""
    return logits


def unsupported(
    head_dim: int | None,
    num_heads_per_kv: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Why these kernels cannot run a model on the current GPU, in a phrase; None where they can.

    head_dim          of keys or of values, whichever is larger; None for a model that stores latents (MLA)
    num_heads_per_kv  query heads that share a KV head on one rank; latents are shared by any number
    dtype             of weights and activations
    kv_dtype          of the cache; None: dtype

    Raises EnvironmentProblem for a GPU without tiles, or without the dtype of the cache.
    """
    arch, stored = configs.arch(), kv_dtype or dtype
    if dtype not in FLOATS:
        return f"{_name(dtype)} (they compute in {', '.join(map(_name, FLOATS))})"
    need_supported("kv_cache_dtype", stored, arch)
    if not is_block_size(block_size):
        return f"block size {block_size} (they read 16, 32, 64, ...)"
    if head_dim is None:
        return None
    if head_dim > configs.MAX_HEAD_DIM:
        return f"head_dim {head_dim} (at most {configs.MAX_HEAD_DIM})"
    max_heads = configs.max_heads_per_kv(arch, head_dim, stored, dtype)
    if num_heads_per_kv > max_heads:
        where = " in float32" if dtype == torch.float32 else ""
        return f"{num_heads_per_kv} query heads per KV head{where} (at most {max_heads})"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
