"""The least time of a kernel on a GPU: its launch, and its bytes or its arithmetic, whichever takes longer.

Measured times are kept as factors on this (kvplan/simulate/kernels/tables.py), so that between measured shapes, and on
GPUs that were not measured, a kernel keeps the efficiency of its nearest neighbor.
"""

from math import log
from typing import Final, NamedTuple

from kvplan.hardware.gpu import GpuSpec

LAUNCH: Final = 2e-6  # seconds of the shortest kernel in a CUDA graph, as measured on every GPU of the tables
ELEMENT: Final = 2  # bytes of an activation
IN_BLOCKS: Final = "fp8_block in whole blocks"  # experts of DeepGEMM's contiguous kernel
BLOCK: Final = 128  # tokens of such a block
# Bytes of a weight with its scales, by number format.
BYTES: Final = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "mxfp4_mxfp8": 0.53125,
    "int4": 0.53125,
    "wide8": 1.0,  # 8 bits that are widened to 16 before they are multiplied
}
NARROW: Final = {
    "fp8": ("fp8_flops", "int8_flops"),
    "fp8_block": ("fp8_flops", "int8_flops"),
    "int8": ("int8_flops", "fp8_flops"),
    "nvfp4": ("fp4_flops", "fp8_flops"),
    "mxfp4_mxfp8": ("fp8_flops",),
}


def peak(gpu: GpuSpec, form: str) -> float:
    """FLOP/s at which numbers of a format are multiplied; those of 16 bits where the GPU states no other."""
    for name in NARROW.get(form, ()):
        rate: int | None = getattr(gpu, name)
        if rate is not None:
            return rate
    rate = gpu.bf16_flops or gpu.fp16_flops
    assert rate is not None
    return rate


def roof(gpu: GpuSpec, size: float, flops: float, form: str = "bfloat16") -> float:
    """Seconds of a kernel that moves `size` bytes and multiplies at the rate of a format."""
    assert gpu.memory_bandwidth is not None
    return LAUNCH + max(size / gpu.memory_bandwidth, flops / peak(gpu, form))


def gemm(gpu: GpuSpec, form: str, tokens: float, outputs: float, inputs: float) -> float:
    """A linear layer."""
    size = BYTES[form] * outputs * inputs + ELEMENT * tokens * (outputs + inputs)
    return roof(gpu, size, 2.0 * tokens * outputs * inputs, form)


class Experts(NamedTuple):
    """A layer's experts: an expert's width before it is sharded, and the ranks that share each expert, and all."""

    hidden: int
    inter: int
    topk: int
    experts: int
    tp: int = 1
    ep: int = 1


def experts(gpu: GpuSpec, form: str, tokens: float, shape: Experts) -> float:
    """The experts of a rank: sort, two grouped multiplications, activation, sum.

    Of a rank's experts those are read that one of the tokens is routed to, if they are all equally likely.
    """
    width = shape.inter / shape.tp
    touched = shape.experts / shape.ep * (1 - (1 - shape.topk / shape.experts) ** tokens)
    pairs = tokens * shape.topk / shape.ep
    size = 3 * shape.hidden * width * touched * BYTES[form] + ELEMENT * pairs * (2 * shape.hidden + 3 * width)
    return roof(gpu, size, 6.0 * pairs * shape.hidden * width, form)


class Heads(NamedTuple):
    """Attention of one rank; window: 0 if every token is read; kv_bytes: of a stored number."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    kv_bytes: int = 2


def decode(gpu: GpuSpec, count: float, context: float, shape: Heads) -> float:
    """Attention of `count` sequences that compute one token each."""
    reach = min(context, shape.window) if shape.window else context
    size = (
        count * reach * 2 * shape.kv_heads * shape.dim * shape.kv_bytes + 2 * ELEMENT * count * shape.heads * shape.dim
    )
    return roof(gpu, size, 4.0 * count * reach * shape.heads * shape.dim)


def prefill(gpu: GpuSpec, tokens: float, pairs: float, shape: Heads) -> float:
    """Attention of prompt tokens to `pairs` (query, key) pairs."""
    size = 2.0 * ELEMENT * tokens * shape.dim * (shape.heads + shape.kv_heads)
    return roof(gpu, size, 4.0 * pairs * shape.heads * shape.dim)


def own_pairs(tokens: float, window: int = 0) -> float:
    """(query, key) pairs of a prompt that begins with these tokens."""
    return tokens * tokens / 2 if not window or tokens <= window else window * (tokens - window / 2)


LATENT: Final = 576  # elements of a token's latent and rope key (DeepSeek)


def latent_decode(gpu: GpuSpec, count: float, context: float, heads: float, kv_bytes: int) -> float:
    """Attention over latents (MLA) without decompression."""
    return roof(gpu, count * context * LATENT * kv_bytes, 2.0 * count * context * heads * (2 * LATENT - 64))


def latent_prefill(gpu: GpuSpec, tokens: float, pairs: float, heads: int) -> float:
    """Attention of prompts over decompressed keys (192) and values (128)."""
    return roof(gpu, 2.0 * ELEMENT * tokens * heads * (192 + 128), 2.0 * pairs * heads * (192 + 128))


def between(low: float, high: float, value: float) -> float:
    """Where a value lies between two others on a logarithmic scale, from 0 to 1."""
    return 0.0 if high <= low else min(1.0, max(0.0, log(value / low) / log(high / low)))
