"""The kernels in Triton: for GPUs of compute capability 8.0 and newer."""

from engine.kernels.activation import gated_activation
from engine.kernels.decode import paged_decode
from engine.kernels.latent import latent_decode
from engine.kernels.moe import moe_mlp
from engine.kernels.norm import rms_norm
from engine.kernels.prefill import paged_prefill
from engine.kernels.rope import rotate
from engine.kernels.store_kv import store_kv, store_latent

__all__ = [
    "gated_activation",
    "latent_decode",
    "moe_mlp",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rotate",
    "store_kv",
    "store_latent",
]
