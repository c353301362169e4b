"""DeepSeek-V4's caches: small pages of many kinds, packed side by side in one block; and those of V4.1.

Source: vLLM 0.33 models/deepseek_v41 (attention.py, compressor.py, sparse_mla.py) and v1/core/kv_cache_planning.py
(packed groups), re-derived; equal to the server's own capacity code in every compared case (tests/oracles.py).
"""

from math import lcm

from kvplan.models.spec import CompressedLatent, ModelSpec, WindowLatent
from kvplan.servers.plans.pool import KVSpec
from kvplan.sizing.layout import cdiv, v4_latent_bytes

V4_ALIGNMENT = 576  # every page size is a multiple of this
V4_WINDOW_BLOCK, V4_BLOCK = 64, 256
V4_STATE_BLOCK = {4: 4, 128: 8}  # compression ratio -> block of the compressor's state
V4_STATE_WINDOW = {4: 8, 128: 128}


def v4_page(size: int) -> int:
    return cdiv(size, V4_ALIGNMENT) * V4_ALIGNMENT


def v4_state(ratio: int, width: int) -> KVSpec:
    """A compressor's float32 inputs not yet compressed: keys and gates, twice as wide if windows overlap."""
    block = V4_STATE_BLOCK[ratio]
    columns = 4 * width if ratio == 4 else 2 * width
    return KVSpec("sliding", block, v4_page(block * columns * 4), V4_STATE_WINDOW[ratio], shape=("v4 state", ratio))


def v4_specs(spec: ModelSpec, block: int = V4_BLOCK) -> list[tuple[int, KVSpec]]:
    """A window in every layer; compressed entries, their index keys and the compressors' states if there are any.

    Page sizes do not depend on the requested KV dtype: the server stores these caches in its own layout.

    block  tokens of a block of compressed entries
    """
    specs: list[tuple[int, KVSpec]] = []
    for i, caches in enumerate(spec.layers):
        for cache in caches:
            match cache:
                case WindowLatent(dim, rope, window):
                    page = v4_page(V4_WINDOW_BLOCK * v4_latent_bytes(dim, rope))
                    specs.append((i, KVSpec("sliding", V4_WINDOW_BLOCK, page, window, shape=("v4 window",))))
                case CompressedLatent(dim, rope, ratio, index_dim):
                    entries = block // ratio
                    page = v4_page(entries * v4_latent_bytes(dim, rope))
                    if index_dim:
                        index = v4_page(entries * (index_dim + 4 * cdiv(index_dim, 128)))
                        specs.append((i, KVSpec("latent", block, index, shape=("v4 index",))))
                        specs.append((i, v4_state(ratio, index_dim)))
                    specs.append((i, KVSpec("latent", block, page, shape=("v4", ratio))))
                    specs.append((i, v4_state(ratio, dim)))
                case _:
                    raise AssertionError("a DeepSeek-V4 layer keeps no other cache")
    return specs


# --- V4.1 -------------------------------------------------------------------------------------------------------------

WINDOW_BLOCK = 32
NVFP4 = "nvfp4_ds_mla"  # compressed entries in 4 bits, and a scale for 16 values


def reads_narrow(sm: int) -> bool:
    """True on GPUs whose kernels read latents that are wholly in 8 bits, and compressed ones in 4."""
    return 100 <= sm < 110


def later_block(sm: int) -> int:
    """Tokens of a block of compressed entries that the kernels read."""
    return 64 if 90 <= sm < 100 else 128


def later_specs(spec: ModelSpec, block: int, kv_dtype: str, sm: int, spec_tokens: int) -> list[tuple[int, KVSpec]]:
    """A window in every layer; where a layer compresses, entries, their index keys, and the tokens not compressed yet.

    Kernels that read wholly narrow latents take them as rows of the whole cache: a block is a multiple of both rows.
    """
    specs: list[tuple[int, KVSpec]] = []
    narrow, kernel = reads_narrow(sm), later_block(sm)
    alignment = 512 if narrow else V4_ALIGNMENT

    def page(size: int) -> int:
        return cdiv(size, alignment) * alignment

    for i, caches in enumerate(spec.layers):
        for cache in caches:
            assert isinstance(cache, WindowLatent | CompressedLatent)
            dim, rope = cache.head_dim, cache.qk_rope_head_dim
            row = dim + dim // 32 if narrow else v4_latent_bytes(dim, rope)
            entry = dim // 2 + dim // 16 if kv_dtype == NVFP4 else row
            if isinstance(cache, WindowLatent):
                window, stride = page(WINDOW_BLOCK * row), lcm(row, entry) if narrow else 1
                latent = KVSpec("sliding", WINDOW_BLOCK, window, cache.window, shape=("v4.1 window",), stride=stride)
                specs.append((i, latent))
                continue
            sizes = {"v4.1": entry}
            if cache.index_head_dim:
                sizes["v4.1 index"] = cache.index_head_dim + 4 * cdiv(cache.index_head_dim, 128)
            for name, size in sizes.items():
                whole, part = (page(tokens // cache.ratio * size) for tokens in (block, kernel))
                stride = 1 if block == kernel else part
                specs.append((i, KVSpec("latent", block, whole, shape=(name, cache.ratio), stride=stride)))
            if cache.ratio > 1:
                rows = max(8, 1 << (spec_tokens + 1).bit_length())
                specs.append((i, KVSpec("ring", rows, rows * 2 * dim * 4, blocks=1, shape=("v4.1 ring",))))
    return specs
