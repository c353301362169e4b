"""SGLang's pools: tokens, window tokens and state slots that a rank's memory holds, and the most running requests.

Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py and srt/model_executor/pool_configurator.py. Floating-point
arithmetic is reproduced where SGLang uses it, so that results match to the token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.units import format_gib
from kvplan.models.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.plans.pool import Capacity, KVGroup, KVSpec, Paging, Pool, attention_spec
from kvplan.servers.releases import Version
from kvplan.servers.sglang import drafts
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.classes import class_of, type_of
from kvplan.servers.sglang.drafts import NO_DRAFTS, Drafted
from kvplan.servers.sglang.rules import LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_CONTEXT
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.layout import cdiv, state_bytes, token_bytes
from kvplan.sizing.weights import stage_layers

MAMBA_RATIO, SWA_RATIO = 0.9, 0.8  # mamba_full_memory_ratio, swa_full_tokens_ratio
EVICTION_INTERVAL = 128  # tokens that a request may keep beyond its window before they are freed
FEW_REQUESTS = 32  # up to so many, a server that only decodes holds room for twice as many that are on their way
SPARE_TAILS = 4  # for each request, windows of cached prefixes in V4.1's pool
SPARE_TOKENS = 4  # in a request's row of the token table, beyond the context
STATE_DTYPE, CONVOLUTION_DTYPE = "float32", "bfloat16"  # of states if the config does not say, whatever the model's


@dataclass(frozen=True, slots=True, eq=False)
class SglangPool(Pool):
    """Pages of the full-attention layers; sliding-window layers have their own pool, states have slots.

    A block is a page of the full pool with its part of the window pool.

    full, windows  bytes per token of the full-attention layers, and of the sliding-window layers; by stage. Whole by
                   the page
    swa_ratio      window pool tokens per full pool token
    window_tokens  tokens of the window pool if the number of requests sizes it; None: the ratio does
    window         tokens that a window keeps, as the scheduler counts them; 0 without a window pool
    state          bytes of one slot of recurrent states; by stage
    slot           bytes counted per slot on every stage: those of the stage with the most
    slots_each     slots that a running request may take
    drafted        what drafts add, in bytes per token and in copies of states
    fixed          bytes beside pages and slots; by stage
    requests       the most that run, if that is known before the pool is
    """

    full: tuple[float, ...] = ()
    windows: tuple[float, ...] = ()
    swa_ratio: float = 1.0
    window_tokens: int | None = None
    window: int = 0
    state: tuple[int, ...] = ()
    slot: int = 0
    slots_each: int = 1
    drafted: Drafted = NO_DRAFTS
    fixed: tuple[int, ...] = ()
    requests: int | None = None

    def copies(self, slots: int) -> int:
        """Copies of a slot for drafts: one for each token verified at once, for each request and a spare one."""
        return (min(self.drafted.requests, slots // self.slots_each) + 1) * self.drafted.verified if self.slot else 0

    def tokens_of_windows(self, pages: int) -> int:
        """Tokens of the window pool that goes with so many pages of the full one."""
        page = self.block_size
        if self.window_tokens is not None:
            return self.window_tokens
        return int(pages * page * self.swa_ratio) // page * page

    def in_full_pages(self, per_group: list[int]) -> int:
        """Pages of the full pool that requests take, or the equivalent of their window pages, if more."""
        pages = [
            self._standing_for(count) if group.first.kind == "sliding" else count
            for group, count in zip(self.groups, per_group, strict=True)
        ]
        return max(pages)

    def _standing_for(self, window_pages: int) -> int:
        """The fewest full pages whose window pool has so many pages; 0 if the number of requests sizes the window pool,
        which then holds them all.
        """
        if self.window_tokens is not None:
            return 0
        pages = int(window_pages / self.swa_ratio)
        while self.tokens_of_windows(pages) < window_pages * self.block_size:
            pages += 1
        return pages

    def charged(self, context: int, settings: Settings) -> int:
        return self.in_full_pages([group.charged(context, settings, 1) for group in self.groups])

    def allocated_blocks(self, num_tokens: int) -> int:
        return self.in_full_pages([group.allocated_blocks(num_tokens, 1) for group in self.groups])

    def prefilling(self, num_tokens: int, context: int, settings: Settings) -> int:
        return self.in_full_pages([group.prefilling(num_tokens, context, settings, 1) for group in self.groups])

    def shared(self, num_tokens: int) -> int:
        return num_tokens // self.block_size

    def growth(self, context: int) -> Fraction:
        return Fraction(1, self.block_size)

    def constant_blocks(self, context: int, settings: Settings) -> tuple[int, int, int]:
        """None: windows have a pool of their own, and states have slots."""
        return 0, 0, 0

    def given_out(self, pages: int, slots: int, stage: int) -> int:
        """Bytes that count against the budget: the pages that requests can have, and every slot."""
        windows = self.tokens_of_windows(pages) * self.windows[stage]
        tokens = int(pages * self.block_size * self.full[stage] + windows)
        return tokens + self.fixed[stage] + self.taken_by_states(slots)

    def num_bytes(self, pages: int, slots: int, stage: int) -> int:
        """Bytes of the buffers: each pool has one page more than is counted, the slots one more."""
        page = self.block_size
        full = (pages + 1) * page * self.full[stage]
        windows = (self.tokens_of_windows(pages) + page) * self.windows[stage] if self.windows[stage] else 0
        copies = self.copies(slots)
        return (
            int(full + windows)
            + self.fixed[stage]
            + ((slots + 1 + copies) * self.state[stage] if self.state[stage] else 0)
        )

    def kept_from_requests(self, pages: int, slots: int, stage: int) -> int:
        """Bytes of the buffers that requests cannot use."""
        return self.num_bytes(pages, slots, stage) - self.given_out(pages, slots, stage)

    def taken_by_states(self, slots: int) -> int:
        """Bytes of all slots, including the one that is never used."""
        return (slots + 1 + self.copies(slots)) * self.slot if self.slot else 0


def paging(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> Paging:
    return Paging(
        sm=sm,
        kv_dtype=settings.kv_dtype,
        dtype=CONVOLUTION_DTYPE if spec.has_states else settings.dtype,
        tp=args.attention_ranks,
        pp=args.pipeline_parallel_size,
        dcp=1,
        block_size=sglang_models.page_size(spec, sm, args, settings.version),
        prefix_caching=sglang_models.caches_prefixes(args),
        flat=bool(args.disable_hybrid_kv_cache_manager),
        first_engine=False,
        checkpoints=frozenset(),
        every_block=frozenset(),
        spec_tokens=0,
        ssm_dtype=state_dtype(spec, args),
        context=0,
        encoder=0,
        rest_last=True,
        partition=args.partition,
    )


def state_dtype(spec: ModelSpec, args: EngineArgs) -> str | None:
    """Dtype of states: as requested, else the config's, else float32, or None without states."""
    if not spec.has_states:
        return args.mamba_ssm_cache_dtype
    fixed = {c.ssm_dtype for caches in spec.layers for c in caches if isinstance(c, RecurrentState)} - {None}
    return args.mamba_ssm_cache_dtype or next(iter(fixed), STATE_DTYPE)


E4M3 = ("fp8", "fp8_e4m3")


def allocated(spec: ModelSpec) -> Iterator[tuple[LayerCache, ...]]:
    """Caches that SGLang allocates for each layer: layers that share an earlier layer's KV get buffers nevertheless.

    Raise UnsupportedModelError for layers without a cache that are neither shared nor plain MLPs.
    """
    types, shares = _layer_types(spec), type_of(spec).shares_caches
    kinds = {caches for caches in spec.layers if caches}
    if len({_geometry(caches) for caches in kinds}) == 1 and shares:  # one geometry, whatever the kinds
        only = next(iter(kinds))
        yield from (caches or only for caches in spec.layers)
        return
    by_kind: dict[bool, tuple[LayerCache, ...]] = {}
    for index, caches in enumerate(spec.layers):
        if spec.model_type == "nemotron_h" or caches:
            if types and caches:
                by_kind[types[index] == "full_attention"] = caches
            yield caches
            continue
        if not types or not shares or types[index] not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                spec.name,
                f"layer {index} has no cache of its own; what SGLang allocates for it is not modeled",
                "use vllm",
            )
        yield by_kind[types[index] == "full_attention"]


def _geometry(caches: tuple[LayerCache, ...]) -> tuple[object, ...]:
    return tuple(
        (cache.num_kv_heads, cache.head_dim, cache.head_dim_v)
        if isinstance(cache, FullAttention | SlidingWindow)
        else cache
        for cache in caches
    )


def _layer_types(spec: ModelSpec) -> list[str]:
    text = spec.config.get("text_config")
    types = (text if isinstance(text, dict) else spec.config).get("layer_types")
    return types if isinstance(types, list) and len(types) == spec.num_layers else []


def has_windows(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if sliding-window layers have a separate pool."""
    kinds = spec.cache_kinds
    return (
        bool(kinds & {SlidingWindow, ChunkedAttention, WindowLatent})
        and sglang_models.has_window_pool(spec)
        and not args.disable_hybrid_kv_cache_manager
        and not (args.enable_hierarchical_cache and spec.model_type.startswith("step3p"))  # overrides.py
    )


def window_pool(spec: ModelSpec, settings: Settings, args: EngineArgs, page: int) -> int | None:
    """Tokens of the window pool if --max-running-requests sizes it, which it does without the prefix cache, and for
    DeepSeek-V4.1.
    """
    requests, prefixes = drafts.requests_at_most(args, spec), sglang_models.caches_prefixes(args)
    later = spec.is_later_v4 and args.swa_full_tokens_ratio is None
    if requests is None or not settings.version.has("request_windows"):
        return None
    if not later and (prefixes or spec.is_compressed_mla):
        return None
    if not args.enable_chunked_prefill and args.disaggregation_mode != "decode":
        return None  # a whole prompt may lie in the windows' pool
    window, verified = window_of(spec), args.speculative_num_draft_tokens or 1
    batches = 2 if args.async_scheduling is not False and args.pipeline_parallel_size == 1 else 1
    steps = args.num_speculative_tokens * drafts.branches(args)
    ahead = 2 * max(verified, steps) if drafts.speculates(args) else page
    item = window + EVICTION_INTERVAL * verified + page + ahead
    if args.disaggregation_mode == "decode":  # no chunks of prompts, but windows of requests that are on their way
        waiting = 2 * requests if requests <= FEW_REQUESTS else 0
        return cdiv(item * requests + (window + page) * waiting, page) * page
    spare = SPARE_TAILS * requests * (window + page) if later and prefixes else 0
    return cdiv(item * requests + batches * settings.max_num_batched_tokens + page + spare, page) * page


def window_of(spec: ModelSpec) -> int:
    """Tokens of the largest window, as SGLang counts them, or 0 without one."""
    bounds = [
        cache.chunk if isinstance(cache, ChunkedAttention) else sglang_models.counted_window(spec, cache.window)
        for caches in spec.layers
        for cache in caches
        if isinstance(cache, SlidingWindow | ChunkedAttention | WindowLatent)
    ]
    return max(bounds, default=0)


def pool(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int, draft: ModelSpec | None = None) -> SglangPool:
    """Pools of a model. Raise UnsupportedModelError for caches whose pool in SGLang is not modeled.

    draft  the draft model, if any
    """
    how = paging(spec, settings, args, sm)
    page = how.block_size or 1
    windows = has_windows(spec, args)
    check_pool(spec, settings.version, windows=windows)
    if windows and settings.kv_dtype == "nvfp4":  # counted as a byte per value, and allocated as half of one
        raise UnsupportedModelError(spec.name, "SGLang's pools for windows in 4 bits are not modeled", "use another")
    ratio = args.swa_full_tokens_ratio or class_of(spec).window_ratio or SWA_RATIO
    capped = window_pool(spec, settings, args, page) if windows else None
    item = sglang_models.slots_per_request(spec, sm, args, settings.version)
    backend = args.prefill_attention_backend or args.decode_attention_backend
    if KeyIndex in spec.cache_kinds and sm // 10 == 10 and settings.kv_dtype in E4M3 and backend:
        raise UnsupportedModelError(f"{spec.name}: {backend}", "its fp8 index keys are not modeled", "state no backend")
    if spec.is_compressed_mla:
        from kvplan.servers.sglang import deepseek_v4

        deepseek_v4.check(spec, args)
    layout = _pool(spec, how, windows, ratio, capped, item, drafts.requests_at_most(args, spec))
    return with_draft(layout, spec, draft, args, ratio) if drafts.speculates(args) else layout


def draft_bytes(draft: ModelSpec, how: Paging) -> int:
    """Bytes per token of a draft's own layers."""
    return sum(token_bytes(cache, how.kv_dtype, how.tp) for caches in draft.layers for cache in caches)


def with_draft(
    layout: SglangPool, spec: ModelSpec, draft: ModelSpec | None, args: EngineArgs, ratio: float
) -> SglangPool:
    """Add to the pool what SGLang counts for a draft; only on one pipeline stage."""
    by_kind = [[paged for _, paged in group.layers] for group in layout.groups]
    full, windows = by_kind[0], by_kind[1] if len(by_kind) > 1 else []
    page = layout.block_size
    own = 0 if draft is None else draft_bytes(draft, layout.how)
    more = drafts.drafted(spec, draft, args, full, windows, own, page)
    whole, window = layout.full[0] + more.full, layout.windows[0] + more.windows
    share = 0.0 if layout.window_tokens is not None else ratio
    return replace(
        layout, stage_bytes=(cdiv_float(page * (whole + share * window)),), full=(whole,), windows=(window,),
        drafted=more,
    )  # fmt: skip


def check_pool(spec: ModelSpec, release: Version, *, windows: bool) -> None:
    sglang_models.check_class(spec)
    if spec.has_states and not release.has("state_pools"):
        raise UnsupportedModelError(spec.name, "SGLang 0.4's pools for states are not modeled", "use sglang@0.5")
    if windows and not release.has("window_pools"):
        raise UnsupportedModelError(spec.name, "SGLang 0.4's pools for windows are not modeled", "use sglang@0.5")


def paged_cache(spec: ModelSpec, cache: LayerCache, how: Paging, *, windows: bool) -> KVSpec:
    """A layer's cache in its pool: windows as such if they have a separate pool, all else in full."""
    if isinstance(cache, CrossAttention):
        cache = FullAttention(cache.num_kv_heads, cache.head_dim, cache.head_dim_v)
    if windows and isinstance(cache, ChunkedAttention):
        cache = SlidingWindow(cache.num_kv_heads, cache.head_dim, cache.head_dim_v, cache.chunk)
    page = how.block_size or 1
    if isinstance(cache, SparseIndexer) and cache.pool > 1:  # Qwen4's are plain, in bfloat16
        scaled = cdiv(cache.head_dim + cache.head_dim // 128 * 4, cache.pool)
        return KVSpec("latent", page, page * (cache.head_dim * 2 // cache.pool if cache.plain else scaled))
    paged = attention_spec(
        cache, page, how.kv_dtype, how.tp, flat=not windows, encoder=0, model_type=spec.model_type
    )  # fmt: skip
    # MiniMax-M3's index keys are in the model's dtype, but for fp8 on 9.x and 10.x (mem_cache/memory_pool.py).
    narrow = isinstance(cache, KeyIndex) and how.sm // 10 in (9, 10) and how.kv_dtype in E4M3
    return replace(paged, page=paged.page // 2) if narrow else paged


@lru_cache(maxsize=4096)
def _pool(
    spec: ModelSpec, how: Paging, windows: bool, ratio: float, capped: int | None, slots_each: int, requests: int | None
) -> SglangPool:
    page = how.block_size or 1
    compressed = spec.is_compressed_mla
    stages: list[range] = stage_layers(spec.num_layers, how.pp, rest_last=True, partition=how.partition)
    full: list[tuple[int, KVSpec]] = []
    narrow: list[tuple[int, KVSpec]] = []
    fixed = (0,) * how.pp
    if compressed:
        from kvplan.servers.sglang import deepseek_v4  # few models need it

        full, narrow, fixed = deepseek_v4.layout(spec, how.sm, how.tp, requests or 0, stages)
    states: list[tuple[int, int]] = []
    loops = int(spec.config.get(type_of(spec).loops, 1))
    for index, caches in () if compressed else enumerate(allocated(spec)):
        for cache in caches:
            if isinstance(cache, RecurrentState) and cache.kind == type_of(spec).uncounted:
                continue
            if isinstance(cache, RecurrentState):
                states.append((index, state_bytes(cache, how.dtype, how.tp, ssm_dtype=how.ssm_dtype)))
                continue
            paged = paged_cache(spec, cache, how, windows=windows)
            paged = replace(paged, page=paged.page * loops)
            (narrow if paged.kind == "sliding" else full).append((index, paged))
    if not full:
        raise UnsupportedModelError(spec.name, "no layer keeps all tokens", "SGLang's pool for it is not modeled")
    if how.flat and SlidingWindow in spec.cache_kinds and len({paged.page for _, paged in full}) > 1:
        raise UnsupportedModelError(
            f"{spec.name}: --disable-hybrid-swa-memory",
            "SGLang's one pool for layers of several shapes is not modeled",
            "remove it",
        )
    by_stage = [
        tuple(per_token(sum(item.page for i, item in layers if i in stage), page) for stage in stages)
        for layers in (full, narrow)
    ]
    for stage, (whole, window) in enumerate(zip(*by_stage, strict=True)):
        if narrow and not (whole and window):
            raise UnsupportedModelError(
                spec.name,
                f"pipeline stage {stage} has layers of one kind only",
                "SGLang's pool for it is not modeled",
            )
    share = 0.0 if capped is not None else ratio
    stage_bytes = tuple(cdiv_float(page * (whole + share * window)) for whole, window in zip(*by_stage, strict=True))
    groups = tuple(
        KVGroup(tuple(layers), tuple(dict.fromkeys(paged for _, paged in layers)))
        for layers in (full, narrow)
        if layers
    )
    counts = [sum(i in stage for i, _ in states) for stage in stages]
    slot = int(sum(size for _, size in states) * (max(counts) / max(1, sum(counts))))
    return SglangPool(
        groups, stage_bytes, how, full=by_stage[0], windows=by_stage[1], swa_ratio=ratio, window_tokens=capped,
        window=window_of(spec) if narrow else 0,
        state=tuple(sum(size for i, size in states if i in stage) for stage in stages), slot=slot,
        slots_each=slots_each, requests=requests, fixed=fixed,
    )  # fmt: skip


def per_token(page_bytes: int, page: int) -> float:
    """Bytes per token of a page's, which need not be whole: exact, as a page has a power of two."""
    return page_bytes / page if page_bytes % page else page_bytes // page


def cdiv_float(value: float) -> int:
    return -int(-value // 1)


# --- capacity ---------------------------------------------------------------------------------------------------------


def num_slots(layout: SglangPool, args: EngineArgs, room: int) -> int:
    """Slots for recurrent states: as requested, one per request if states are not cached, else a fraction of the
    memory.
    """
    if not layout.slot:
        return 0
    if args.max_mamba_cache_size is not None:
        return args.max_mamba_cache_size // (args.data_parallel_size if args.enable_dp_attention else 1)
    requests = drafts.requests_at_most(args)
    if not sglang_models.caches_prefixes(args) and requests is not None:
        return requests
    ratio = MAMBA_RATIO if args.mamba_full_memory_ratio is None else args.mamba_full_memory_ratio
    share = room * ratio / (1 + ratio)
    copies = layout.drafted.verified  # of a request's states, which may take several slots
    return max(0, int((share - layout.slot * (1 + copies)) // (layout.slot * (1 + copies / layout.slots_each))))


def pages_in(layout: SglangPool, args: EngineArgs, available: list[int]) -> tuple[int, int, int]:
    """(pages that every stage can hold, slots, the stage with the least room)."""
    room = min(available)  # all ranks use the smallest
    slots = num_slots(layout, args, room)
    room -= layout.taken_by_states(slots)
    pages, stage = min(
        (tokens_in(layout, args, room, stage) // layout.block_size, stage)
        for stage in range(len(available))
        if layout.full[stage] or layout.windows[stage]
    )
    return pages, slots, stage


def tokens_in(layout: SglangPool, args: EngineArgs, room: int, stage: int) -> int:
    """Tokens of the full pool in so many bytes of a stage's rank, limited to the requested number."""
    room -= layout.fixed[stage]
    if layout.window_tokens is not None:
        tokens = int((room - layout.window_tokens * layout.windows[stage]) // layout.full[stage])
    elif layout.windows[stage]:
        tokens = int(room // (layout.full[stage] + layout.swa_ratio * layout.windows[stage]))
    else:
        tokens = int(room // layout.full[stage])
    tokens = max(0, tokens)
    return min(tokens, args.max_total_tokens or tokens)


def max_requests(layout: SglangPool, settings: Settings, args: EngineArgs, pages: int, slots: int) -> int:
    """max_running_requests: 512 per context that the pool holds, between 2,048 and 4,096, limited by state slots."""
    tokens = pages * layout.block_size
    limit = int(tokens / settings.max_model_len * REQUESTS_PER_CONTEXT)
    limit = min(layout.requests or max(min(limit, MOST_REQUESTS), LEAST_REQUESTS), tokens // 2)
    return min(limit, slots // layout.slots_each) if layout.slot else limit


def request_table(settings: Settings, requests: int) -> int:
    """Bytes of the int32 table of each request's tokens; a lower bound: newer releases have one more row."""
    return requests * (settings.max_model_len + SPARE_TOKENS) * 4


def starts(layout: SglangPool, settings: Settings, args: EngineArgs, pages: int, slots: int) -> bool:
    """True if the server starts: it has pages, slots for a request, and a window fits its pool."""
    by_ratio = layout.window and layout.window_tokens is None
    if by_ratio and layout.window + layout.block_size >= layout.tokens_of_windows(pages):
        return False
    return pages > 0 and max_requests(layout, settings, args, pages, slots) > 0


def capacity(layout: SglangPool, settings: Settings, args: EngineArgs, available: list[int]) -> Capacity:
    """Pages, tokens and users for `available` KV bytes per rank, one entry per pipeline stage.

    `num_blocks` counts the page that is never used. A server whose pool is smaller than the context starts and rejects
    longer requests; here it does not fit.
    """
    pages, slots, worst = pages_in(layout, args, available)
    context = settings.max_model_len
    if settings.auto_fit:
        context = _largest_context(layout, settings, context, pages) or context
    charged = layout.charged(context, settings)
    cost = layout.stage_bytes[worst]
    fits = pages >= charged and starts(layout, settings, args, pages, slots)
    return Capacity(
        num_blocks=pages + 1,
        bytes_per_block=cost,
        stage=worst,
        max_model_len=context,
        blocks_per_request=charged,
        max_concurrency=pages / charged,
        tokens=pages * layout.block_size,
        fits=fits,
        deficit=0 if fits else max(1, charged * cost - available[worst]),
        slots=slots,
        slots_per_request=layout.slots_each if slots else 0,
    )


def _largest_context(layout: SglangPool, settings: Settings, limit: int, pages: int) -> int:
    """The largest context, at most `limit`, that fits in the pool once, or 0 if there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.charged(middle, settings) <= pages else (low, middle - 1)
    return low


def pool_notes(layout: SglangPool, spec: ModelSpec, args: EngineArgs, slots: int) -> Iterator[str]:
    """Notes on parts of the pools that no row shows."""
    if layout.slot:
        size = layout.taken_by_states(slots)
        yield (
            f"{format_gib(size)} of the KV cache are {slots:,} slots for recurrent states, "
            f"{layout.slots_each} of which a request may take"
        )
    if layout.window_tokens is not None:
        why = "" if spec.is_later_v4 else "without the prefix cache "
        yield (
            f"{why}--max-running-requests {layout.requests:,} sizes the windows' pool: {layout.window_tokens:,} tokens"
        )
    kinds = spec.cache_kinds
    if spec.is_compressed_mla:
        yield "experts are padded as Triton's kernels do on compute capability 9.0, and as Marlin's do; not compared"
        inputs = f"{format_gib(max(layout.fixed))} of the KV cache are the inputs of compressors"
        yield f"{inputs}, for {layout.requests:,} requests (--max-running-requests)"
    if SlidingWindow in kinds and not layout.window:
        yield "SGLang keeps every token of this model's windows: they are counted in full"
    if CrossAttention in kinds:
        yield "an image's tokens take pages of the same pool, which are not counted per request"
