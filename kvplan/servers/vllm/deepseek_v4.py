"""DeepSeek-V4's caches: small pages of many kinds, packed side by side in one block.

Source: vLLM 0.33 v1/core/kv_cache_planning.py (packed groups), re-derived;
equal to the server's own capacity code in every compared case (tests/oracles.py).
"""

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
