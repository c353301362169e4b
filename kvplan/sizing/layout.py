"""Cache bytes of a layer on one rank: per token, or per sequence for recurrent states.

Source: vLLM 0.33 v1/kv_cache_interface.py; each number equals the server's own capacity code in every compared case.
"""

from typing import assert_never

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    Part,
    RecurrentState,
    Sharing,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
DS_MLA_ROPE = 64  # elements of a rope key in vLLM's fp8_ds_mla layout
TURBOQUANT_BITS = {"turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3)}
KV_DTYPES = (
    "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "int8_per_token_head",
    "fp8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "turboquant_k8v4",
    *TURBOQUANT_BITS,
)  # fmt: skip
DTYPES = ("auto", "bfloat16", "float16", "float32")
SHORT_DTYPES = {"half": "float16", "float": "float32"}


def check_dtype(stated: str) -> None:
    if SHORT_DTYPES.get(stated, stated) not in DTYPES:
        raise UsageError(
            f"--dtype '{printable(stated, 40)}'", "is not one that servers compute in", f"use {', '.join(DTYPES)}"
        )


def check_kv_dtype(stated: str) -> None:
    if stated not in KV_DTYPES:
        raise UsageError(f"--kv-cache-dtype {stated!r}", "is unknown to kvplan", f"use one of {', '.join(KV_DTYPES)}")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def even_up(value: int) -> int:
    return value + value % 2


def cell_bytes(dtype: str, k_dim: int, v_dim: int) -> int:
    """Bytes of one token of one KV head: K and V together, scales included.

    dtype  a KV cache dtype other than auto
    """
    match dtype:
        case "float32":
            return (k_dim + v_dim) * 4
        case "bfloat16" | "float16":
            return (k_dim + v_dim) * 2
        case "fp8" | "fp8_e4m3" | "fp8_e5m2":
            return k_dim + v_dim
        case "int8_per_token_head" | "fp8_per_token_head":  # one fp32 scale for K, one for V
            return k_dim + v_dim + 8
        case "int4_per_token_head":
            return k_dim // 2 + v_dim // 2 + 8
        case "nvfp4" | "nvfp4_4over6":  # 4-bit values and one fp8 scale per 16
            return k_dim // 2 + k_dim // 16 + v_dim // 2 + v_dim // 16
        case "turboquant_k8v4":  # fp8 keys, 4-bit values with fp16 scale and zero
            return even_up(k_dim + cdiv(4 * v_dim, 8) + 4)
        case _ if dtype in TURBOQUANT_BITS:
            k_bits, v_bits = TURBOQUANT_BITS[dtype]
            return even_up(cdiv(k_bits * k_dim, 8) + 2 + cdiv(v_bits * v_dim, 8) + 4)
    raise UsageError(
        f"kv_cache_dtype {dtype!r}", "does not fit this model's attention", f"known are {', '.join(KV_DTYPES)}"
    )


def latent_bytes(dtype: str, latent: int, rope: int) -> int:
    """Bytes of one token of an MLA layer: the latent and the rope key, replicated on every rank."""
    match dtype:
        case "fp8_ds_mla":  # 512 fp8 + 4 fp32 scales + 64 bf16 rope, which is reserved even without a rope key
            return latent + 4 * cdiv(latent, 128) + 2 * (rope or DS_MLA_ROPE)
        case "nvfp4_ds_mla":  # 512 at 4 bits + an fp8 scale per 16, 64 in fp8: 352 for DeepSeek
            return latent // 2 + latent // 16 + rope
        case "bfloat16" | "float16" | "float32" | "fp8" | "fp8_e4m3" | "fp8_e5m2":
            return cell_bytes(dtype, latent + rope, 0)
    raise UsageError(f"kv_cache_dtype {dtype!r}", "an MLA model has no such cache", "use auto, bfloat16 or fp8")


def local_units(part: Part, tp: int) -> int:
    """Units of a state's part on one rank."""
    if part.sharing is Sharing.GROUPS:
        return cdiv(part.units, tp)
    if part.units % tp:
        problem = f"does not divide the {part.units} heads of a recurrent state"
        raise UsageError(f"tensor_parallel_size {tp}", problem, "use a divisor")
    return part.units // tp


def local_kv_heads(heads: int, tp: int) -> int:
    """KV heads on one rank; replicated if there are more ranks than heads."""
    if heads % tp and tp % heads:
        raise UsageError(
            f"tensor_parallel_size {tp}",
            f"{heads} KV heads can neither be split nor repeated evenly",
            "use a divisor or a multiple",
        )
    return max(1, heads // tp)


def state_bytes(
    state: RecurrentState, dtype: str, tp: int, *, spec_tokens: int = 0, ssm_dtype: str | None = None,
    conv_dtype: str | None = None,
) -> int:  # fmt: skip
    """Bytes of one sequence's state in one layer: the convolution's columns and the recurrence.

    conv_dtype, ssm_dtype  their dtypes where the user gives them; None or "auto": those of the model
    """
    conv_dtype, ssm_dtype = (stated_dtype(name, value) for name, value in (
        ("mamba_cache_dtype", conv_dtype), ("mamba_ssm_cache_dtype", ssm_dtype)
    ))  # fmt: skip
    dtype = conv_dtype or dtype
    drafted = 0 if state.kind == "mamba1" else spec_tokens  # vLLM 0.33 layers/mamba/mamba_utils.py (mamba1_state_shape)
    columns = state.conv_kernel - 1 + drafted
    channels = sum(local_units(part, tp) * part.width for part in state.convolution)
    recurrence = local_units(Part(state.heads), tp) * state.head_shape[0] * state.head_shape[1] if state.heads else 0
    return columns * channels * ELEMENT_BYTES[dtype] + recurrence * ELEMENT_BYTES[ssm_dtype or state.ssm_dtype or dtype]


def stated_dtype(name: str, dtype: str | None) -> str | None:
    """The dtype that an argument gives; None: the server decides."""
    if dtype not in (None, "auto", *ELEMENT_BYTES):
        raise UsageError(f"{name} {dtype!r}", f"is not one of {', '.join(ELEMENT_BYTES)}", "use one of them")
    return None if dtype == "auto" else dtype


def token_bytes(cache: LayerCache, dtype: str, tp: int) -> int:
    """Bytes per token of one layer's cache on one rank; 0 for a state of constant size."""
    match cache:
        case (
            FullAttention(heads, k, v)
            | SlidingWindow(heads, k, v)
            | ChunkedAttention(heads, k, v)
            | CrossAttention(heads, k, v)
        ):
            return local_kv_heads(heads, tp) * cell_bytes(dtype, k, v)
        case LatentAttention(latent, rope):
            return latent_bytes(dtype, latent, rope)
        case SparseIndexer():
            return cdiv(cache.key_bytes, cache.pool)
        case KeyIndex(dim):
            return dim * 2
        case WindowLatent(dim, rope):
            return v4_latent_bytes(dim, rope)
        case CompressedLatent(dim, rope, ratio, index_dim):
            entry = v4_latent_bytes(dim, rope) + (index_dim + 4 * cdiv(index_dim, 128) if index_dim else 0)
            return cdiv(entry, ratio)
        case RecurrentState():
            return 0
        case _:
            assert_never(cache)


def ring_bytes(cache: LayerCache, spec_tokens: int = 0) -> int:
    """Bytes of a request's bfloat16 keys, and gates, that an indexer has not pooled yet."""
    if not isinstance(cache, SparseIndexer) or cache.pool == 1:
        return 0
    if not cache.plain:
        return cache.pool * 2 * cache.head_dim * 2
    rows = cdiv(cache.pool + spec_tokens, cache.pool) * cache.pool
    return rows * (2 * cache.head_dim + cache.positions)


def v4_latent_bytes(head_dim: int, rope: int) -> int:
    """Bytes of DeepSeek-V4's vector: rope part in bfloat16, the rest in fp8, a scale byte per 64, padded to 8:
    584 for 512.
    """
    plain = head_dim - rope
    return plain + 2 * rope + cdiv(cdiv(plain, 64), 8) * 8


def bytes_per_token(spec: ModelSpec, dtype: str, tp: int = 1) -> int:
    """KV bytes per additional token on one rank, with no window full yet in any layer."""
    return sum(token_bytes(cache, dtype, tp) for caches in spec.layers for cache in caches)


def constant_bytes(spec: ModelSpec, dtype: str, tp: int = 1) -> int:
    """State bytes per sequence on one rank, independent of its length."""
    return sum(
        state_bytes(cache, dtype, tp) for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)
    )
