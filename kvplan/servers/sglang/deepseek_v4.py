"""DeepSeek-V4's and V4.1's pools in SGLang: pages of 256 tokens, windows by the page, states by the request.

Source: sglang 0.5.23 srt/model_executor/pool_configurator.py (DSV4PoolConfigurator), srt/mem_cache/
deepseek_v4_memory_pool.py and kernels/ops/attention/dsv4/kv_layout.py; equal to its own answers
(tests/facts/sglang_cases.jsonl). Buffers are counted as the budget is: what they pad is not.
"""

from collections.abc import Iterator

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import CompressedLatent, ModelSpec, WindowLatent
from kvplan.servers.plans.pool import KVSpec
from kvplan.servers.sglang.models import PAGE_OF_V4 as PAGE
from kvplan.servers.sglang.models import is_datacenter_blackwell
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.layout import cdiv, v4_latent_bytes

RINGS = {2: 2, 4: 8, 128: 128}  # compression ratio -> rows of a compressor's inputs, of a request or of a page
INDEX_PAGE = 64  # tokens of a page of V4.1's index keys


def is_narrow(spec: ModelSpec, sm: int, ranks: int) -> bool:
    """True if the default attention backend is flashmla_mega, which attention over several ranks rules out."""
    return spec.is_later_v4 and is_datacenter_blackwell(sm) and ranks == 1


def page_bytes(cache: WindowLatent | CompressedLatent, tokens: int, *, narrow: bool) -> int:
    """A page of so many entries: wholly in 8 bits for flashmla_mega, and the compressed ones of V4.1 in 4."""
    dim = cache.head_dim
    if not narrow:
        unit = dim + cache.qk_rope_head_dim
        return cdiv(tokens * v4_latent_bytes(dim, cache.qk_rope_head_dim), unit) * unit
    row, unit = (dim + dim // 32, dim) if isinstance(cache, WindowLatent) else (dim // 2 + dim // 16, dim // 2)
    return cdiv(tokens * row, unit) * unit


def index_bytes(cache: CompressedLatent) -> int:
    """An index key of one entry: in 8 bits, V4.1's in 4."""
    dim = cache.index_head_dim or 0
    return dim // 2 + dim // 32 if cache.ratio < 4 else dim + dim // 128 * 4


Layers = list[tuple[int, KVSpec]]


def layout(
    spec: ModelSpec, sm: int, ranks: int, requests: int, stages: list[range]
) -> tuple[Layers, Layers, tuple[int, ...]]:
    """(what grows with the tokens, what goes by the windows' pages, bytes beside them by stage)."""
    narrow = is_narrow(spec, sm, ranks)
    return *specs(spec, narrow=narrow), fixed(spec, requests, stages, narrow=narrow)


def specs(spec: ModelSpec, *, narrow: bool) -> tuple[Layers, Layers]:
    """(compressed entries and their index keys, windows with the inputs of compressors that go by their pages)."""
    full: Layers = []
    windows: Layers = []
    for i, cache in latents(spec):
        if isinstance(cache, WindowLatent):
            size = page_bytes(cache, PAGE, narrow=narrow)
            windows.append((i, KVSpec("sliding", PAGE, size, cache.window, shape=("v4 window",))))
            continue
        entries = PAGE // cache.ratio
        full.append((i, KVSpec("latent", PAGE, page_bytes(cache, entries, narrow=narrow), shape=("v4", cache.ratio))))
        if cache.index_head_dim:
            full.append((i, KVSpec("latent", PAGE, entries * index_bytes(cache), shape=("v4 index", cache.ratio))))
        if cache.ratio == 4:
            size = RINGS[4] * 4 * (cache.head_dim + (cache.index_head_dim or 0)) * 4
            windows.append((i, KVSpec("sliding", PAGE, size, windows[-1][1].bound, shape=("v4 state", 4))))
    return full, windows


def latents(spec: ModelSpec) -> Iterator[tuple[int, WindowLatent | CompressedLatent]]:
    for i, caches in enumerate(spec.layers):
        for cache in caches:
            assert isinstance(cache, WindowLatent | CompressedLatent)
            yield i, cache


def fixed(spec: ModelSpec, requests: int, stages: list[range], *, narrow: bool) -> tuple[int, ...]:
    """Bytes of each stage beside its pages: compressors' inputs of every request, and V4.1's pages that none has."""
    totals = [0] * len(stages)
    for i, cache in latents(spec):
        if not isinstance(cache, CompressedLatent) or cache.ratio == 4:
            continue
        size, ring = 0, RINGS.get(cache.ratio, 0)
        if ring:
            rows = cdiv((requests + 1) * ring + ring + 1, ring) * ring
            size += rows * 2 * cache.head_dim * 4
        if cache.ratio < 4:
            entries = PAGE // cache.ratio
            size += page_bytes(cache, entries, narrow=narrow) * cache.ratio + (entries + INDEX_PAGE) * index_bytes(
                cache
            )
        totals = [total + size * (i in stage) for total, stage in zip(totals, stages, strict=True)]
    return tuple(totals)


def check(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject what changes these pools and was not compared."""
    lacks = {
        "--enable-hierarchical-cache": bool(args.enable_hierarchical_cache),
        "--disaggregation-mode": args.disaggregation_mode is not None,
        "drafts": args.speculative_method is not None,
        "--kv-cache-dtype bfloat16": args.kv_cache_dtype in ("bfloat16", "bf16"),
    }
    for what, has in lacks.items():
        if has:
            raise UnsupportedModelError(f"{spec.name}: {what}", "SGLang's pools with it are not modeled", "remove it")
