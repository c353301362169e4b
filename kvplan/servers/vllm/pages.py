"""Paging of each layer's cache in vLLM (block sizes, the pages of states), and the pool: groups of layers -> bytes per
block, blocks, tokens, concurrency.

Source: vLLM 0.33 v1/kv_cache_interface.py, platforms/interface.py, v1/core/kv_cache_planning.py and kv_cache_utils.py,
re-derived; equal to the server's own capacity code in every compared case (tests/oracles.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import gcd, lcm
from typing import Any, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.plans.pool import (
    Capacity,
    KVGroup,
    KVSpec,
    Paging,
    Pool,
    attention_spec,
    blocks_in,
    largest_context,
    layer_dtypes,
)
from kvplan.servers.releases import Version
from kvplan.servers.vllm import features
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import TARGET_READERS, EngineArgs, Settings
from kvplan.sizing.layout import cdiv, ring_bytes, token_bytes
from kvplan.sizing.weights import stage_layers

FLASH_KDA_ALIGNMENT = 16  # tokens between checkpoints of KDA with a bounded gate
MLA_STATE_BLOCK = 128  # smallest block of a model that combines MLA with states
FLASHINFER_GDN_ALIGNMENT = 64
PLAIN_DELTA_NETS = ("olmo_hybrid",)  # whose class keeps no checkpoints (0.33 layers/mamba/gdn: only Qwen's does)
MAMBA1_CHUNK = 2048  # vLLM config/model.py (get_mamba_chunk_size), if a config names no chunk


def checkpointed(spec: ModelSpec, release: Version) -> frozenset[str]:
    """Kinds of states that, when cached, keep a checkpoint within a prompt."""
    kinds = {
        "gated_delta_net": release.has("delta_net_checkpoints") and spec.model_type not in PLAIN_DELTA_NETS,
        "mamba2": release.has("mamba2_checkpoints"),
        "bounded_kda": release.has("pooled_pages") if spec.is_pooled else release.has("kda_checkpoints"),
    }
    return frozenset(kind for kind, on in kinds.items() if on)


def paging(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> Paging:
    prefix_caching, release = settings.prefix_caching, settings.version
    one_block = spec.has_states and not (prefix_caching and spec.has_attention)
    chunked = ChunkedAttention in spec.cache_kinds
    grouped = release.has("chunked_groups") if chunked else release.has("hybrid_groups")
    if chunked and args.speculative_method in TARGET_READERS:  # vLLM 0.11 to 0.33 config/vllm.py
        grouped = False
    return Paging(
        sm=sm,
        kv_dtype=settings.kv_dtype,
        dtype=settings.dtype,
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        dcp=args.decode_context_parallel_size,
        block_size=args.block_size,
        prefix_caching=prefix_caching,
        flat=features.hybrid_manager_is_off(args, release) or not grouped,
        first_engine=settings.first_engine,
        checkpoints=checkpointed(spec, release),
        every_block=frozenset() if release.has("aligned_states") else frozenset({"mamba1", "mamba2"}),
        spec_tokens=args.num_speculative_tokens,
        ssm_dtype=args.mamba_ssm_cache_dtype,
        conv_dtype=args.mamba_cache_dtype,
        context=settings.max_model_len if one_block else 0,
        encoder=settings.max_num_batched_tokens if CrossAttention in spec.cache_kinds else 0,
        ahead=vllm.sees_ahead(spec, args, release),
        backend=_backend_block(spec, settings, sm),
        partition=args.partition,
    )


def _backend_block(spec: ModelSpec, settings: Settings, sm: int) -> int:
    if settings.backend is None:
        return 0
    from kvplan.servers.vllm import backends  # only with a requested one

    return backends.smallest_block(settings.backend, vllm.head_dims(spec), sm, settings.version)


def usual_block(spec: ModelSpec, how: Paging) -> int:
    """Attention's block size in tokens, unless a user or states need more."""
    usual = vllm.default_block_size(spec, how.kv_dtype, how.sm, ahead=how.ahead)
    if not how.backend:
        return usual
    is_sparse = spec.is_sparse_mla or spec.model_type.startswith("minimax_m3")  # with a backend of its own beside it
    return lcm(how.backend, usual) if is_sparse else how.backend


def backend_notes(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> list[str]:
    """Notes on what the requested attention backend changes."""
    if spec.cache_kinds & {WindowLatent, CompressedLatent}:
        raise UsageError(
            f"attention_backend {settings.backend}", f"its caches for {spec.name} are not modeled", "remove it"
        )
    how = paging(spec, settings, args, sm)
    others = ("state", "ring", "cross")
    blocks = [  # 0 if no layer has attention
        max((paged.block_size for _, paged in layer_specs(spec, item) if paged.kind not in others), default=0)
        for item in (how, replace(how, backend=0))
    ]
    usual = vllm.resolve_kv_dtype(spec, args.kv_cache_dtype, settings.dtype, sm)
    layout = f"attention_backend {settings.backend} keeps {settings.kv_dtype} instead of {usual}"
    changed = spec.is_sparse_mla and usual != settings.kv_dtype and args.kv_cache_dtype != "fp8_e4m3"
    from kvplan.servers.vllm import backends

    note = backends.note(settings.backend, *blocks, layout=changed)
    return [text for text in (note, layout if changed else None) if text]


def state_alignment(state: RecurrentState, sm: int) -> tuple[int, int]:
    """(checkpoint alignment in tokens, checkpoint blocks) of a state whose kind keeps checkpoints."""
    match state.kind:
        case "gated_delta_net":
            flashinfer = 90 <= sm < 110 or 120 <= sm < 130
            return (FLASHINFER_GDN_ALIGNMENT, 1) if flashinfer else (1, 0)
        case "mamba2":
            return 1, 1
        case "bounded_kda":  # FlashKDA: compute capability 9.0, 10.x and 12.x (models/kimi_k3/nvidia/kda.py)
            return (FLASH_KDA_ALIGNMENT, 1) if sm == 90 or sm // 10 in (10, 12) else (1, 0)
        case "mamba1" | "kda" | "short_conv" | "lightning":
            return 1, 0
        case _:
            assert_never(state.kind)


def state_specs(spec: ModelSpec, how: Paging) -> tuple[int, dict[RecurrentState, KVSpec]]:
    """(the attention block size that states force, the spec of each kind of state).

    The attention block is raised until its page covers the state; then the state's page is padded to it.
    """
    states = {c for caches in spec.layers for c in caches if isinstance(c, RecurrentState)}
    sizes = {state: how.state_bytes(state) for state in states}
    attentions = {c for caches in spec.layers for c in caches if not isinstance(c, RecurrentState)}
    if not attentions:  # pure Mamba: prefix caching stays off, one block per request
        return 16, {s: KVSpec("state", how.context, sizes[s], blocks=1, shape=(s,)) for s in states}
    kv_dtype = how.kv_dtype
    if spec.is_pooled:  # its latents alone decide, in plain fp8 even if their pages have 656 bytes per token
        attentions = {cache for cache in attentions if not isinstance(cache, SparseIndexer)}
        kv_dtype = "fp8" if kv_dtype == "fp8_ds_mla" else kv_dtype
    per_token = {token_bytes(cache, kv_dtype, how.tp) for cache in attentions}
    if len(per_token) > 1:
        raise UnsupportedModelError(
            spec.name, "a model with states and attention layers of several shapes is not modeled"
        )
    token = per_token.pop()
    kernel = pooled_block(spec, how.sm)
    smallest = max(16, how.block_size or kernel, how.backend, MLA_STATE_BLOCK if spec.is_mla else 16)
    aligned = {s: state_alignment(s, how.sm) if s.kind in how.checkpoints else (1, 0) for s in states}
    nets = [aligned[s] for s in states if s.kind == "gated_delta_net"]
    aligned |= {s: nets[0] for s in states if s.kind == "short_conv" and nets}  # kept with theirs (qwen4_exp)
    grows = how.prefix_caching and bool({s.kind for s in states} & how.every_block)
    unit = smallest
    if grows:
        unit = lcm(smallest, mamba_chunk(spec))
    elif how.prefix_caching:
        unit = lcm(smallest, *(aligned[s][0] for s in states))
    block = unit * cdiv(max(1, *sizes.values()), unit * token)
    block = kernel * cdiv(block, kernel)
    specs = {}
    for state in states:
        own_block = block if how.prefix_caching else how.context
        fixed = KVSpec("state", own_block, block * token, extra=how.spec_tokens, shape=(state,))
        alignment, num_checkpoints = aligned[state] if how.prefix_caching else (1, -1)
        if how.prefix_caching and num_checkpoints:  # those of a gated delta net are at block ends
            grid = block if state.kind == "gated_delta_net" or nets else alignment
            fixed = replace(fixed, checkpoint_alignment=grid)
        specs[state] = fixed if grows else replace(fixed, blocks=2 + how.spec_tokens + num_checkpoints)
    return block, specs


def pooled_block(spec: ModelSpec, sm: int) -> int:
    """Smallest block in tokens that both a pooled index and its attention support, or 16 for any other model.

    Source: vLLM 0.33 v1/attention/backends/mla/indexer.py (Glm5NextIndexerBackend): 32 or 64 keys, only 64 on 12.x.
    """
    caches = {c for caches in spec.layers for c in caches if isinstance(c, SparseIndexer)}
    pools = [c.pool for c in caches if c.pool > 1 and not c.plain]
    return lcm(*(pool * (64 if sm >= 120 else 32) for pool in pools), 64) if pools else 16


def pooled_specs(cache: LayerCache, block: int, how: Paging) -> list[KVSpec]:
    """A latent, or pooled index keys with the ring of those not pooled yet, as packed in a block.

    Source: vLLM 0.33 models/glm5next/common/attention.py; customize_spec of the backends it chooses.
    """
    if isinstance(cache, LatentAttention):
        token = token_bytes(cache, how.kv_dtype, how.tp)
        rows = 64 if how.sm >= 120 else 32 if how.sm >= 100 else 1  # rows that the kernels read at once
        return [KVSpec("latent", block, block * token, shape=("latent", how.kv_dtype), stride=rows * token)]
    if isinstance(cache, FullAttention):
        token = token_bytes(cache, how.kv_dtype, how.tp)
        return [KVSpec("full", block, block * token, shape=("full", how.kv_dtype))]
    assert isinstance(cache, SparseIndexer)
    entry, pool = cache.key_bytes, cache.pool
    if cache.plain:
        rows = cdiv(pool + how.spec_tokens, pool) * pool
        stated = how.block_size or 16  # checked before states raise it
        if stated % pool or block % rows:
            raise UsageError(
                f"block size {stated}", f"is no multiple of the {rows} tokens of an index key, which vLLM requires",
                f"add --block-size {lcm(16, rows)}", keys=("block_size",),
            )  # fmt: skip
        return [
            KVSpec("latent", block, block // pool * entry, shape=("pooled index", pool)),
            KVSpec("ring", rows, ring_bytes(cache, how.spec_tokens), blocks=1, shape=("ring", pool)),
        ]
    kernel = gcd(64 * pool, block)
    stride = 1 if kernel == block else kernel // pool * entry
    return [
        KVSpec("latent", block, block // pool * entry, shape=("pooled index", pool), stride=stride),
        KVSpec("ring", pool, ring_bytes(cache), blocks=1, shape=("ring", pool)),
    ]


def mamba_chunk(spec: ModelSpec) -> int:
    """Tokens that Mamba's kernel processes at once, from the config. Source: vLLM 0.26 config/model.py."""
    for config in (spec.config, spec.config.get("text_config"), spec.config.get("llm_config")):
        values: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
        for name in ("mamba_chunk_size", "chunk_size"):
            if isinstance(values.get(name), int) and values[name] > 0:
                return int(values[name])
    return MAMBA1_CHUNK


def layer_specs(spec: ModelSpec, how: Paging) -> list[tuple[int, KVSpec]]:
    """Spec of every cache of every layer, in model order."""
    vllm.check_block_size(how.block_size)
    block = how.block_size or usual_block(spec, how)
    if how.first_engine:
        return first_engine_specs(spec, how, block)
    states: dict[RecurrentState, KVSpec] = {}
    if spec.has_states:
        block, states = state_specs(spec, how)
    if spec.is_pooled:
        return [
            (i, item)
            for i, caches in enumerate(spec.layers)
            for c in caches
            for item in ([states[c]] if isinstance(c, RecurrentState) else pooled_specs(c, block, how))
        ]
    dtypes = layer_dtypes(spec, how)
    flat = how.flat and len(spec.cache_kinds) > 1
    paged = partial(attention_spec, block=block, tp=how.tp, flat=flat, encoder=how.encoder, model_type=spec.model_type)
    return [
        (i, states[c] if isinstance(c, RecurrentState) else paged(c, dtype=dtypes[i]))
        for i, caches in enumerate(spec.layers)
        for c in caches
    ]


def draft_specs(spec: ModelSpec, draft: ModelSpec, how: Paging) -> list[tuple[int, KVSpec]]:
    """Spec of every cache of a draft, in blocks of the target's number of tokens."""
    block = state_specs(spec, how)[0] if spec.has_states else how.block_size or usual_block(spec, how)
    return layer_specs(draft, replace(how, block_size=block, backend=0))


V0_ENTRY = 256  # V0 rounds an MLA token's entry up to this many bytes: 576 x 2 to 1,280


def first_engine_specs(spec: ModelSpec, how: Paging, block: int) -> list[tuple[int, KVSpec]]:
    """V0's pool: every attention layer in full, including windows. States were outside it, sized by sequences:
    rejected.

    Source: vLLM 0.7.3 worker/cache_engine.py (one block shape for all layers, `align_cache`); logs of 0.6 to 0.8.
    """
    if spec.cache_kinds & {CrossAttention, RecurrentState}:
        raise UnsupportedModelError(
            spec.name, "its cache under vLLM's first engine is not modeled", "use vllm@0.11 or newer"
        )
    paged = partial(attention_spec, block=block, tp=how.tp, flat=True, encoder=0, model_type=spec.model_type)
    specs = []
    for i, caches in enumerate(spec.layers):
        for cache in caches:
            item = paged(cache, dtype=how.kv_dtype)
            if item.kind == "latent":
                item = replace(item, page=block * cdiv(item.page // block, V0_ENTRY) * V0_ENTRY)
            specs.append((i, item))
    return specs


# --- the pool ---------------------------------------------------------------------------------------------------------

Layers = list[tuple[int, KVSpec]]


def is_uniform(specs: list[KVSpec]) -> bool:
    """True if all layers have one type (whatever the page sizes): all full, one window, one chunk, or all states."""
    kinds = {"full" if s.kind == "latent" else s.kind for s in specs}
    return len(kinds) == 1 and len({(s.bound, s.blocks, s.block_size) for s in specs}) == 1


def unify_pages(layers: Layers, name: str) -> Layers:
    """Make all pages equal: increase the block of a smaller page that divides the largest, pad others."""
    largest = max(s.page for _, s in layers)
    unified = []
    for index, spec in layers:
        if spec.page == largest:
            unified.append((index, spec))
        elif spec.kind != "state" and largest % spec.page == 0:
            ratio = largest // spec.page
            unified.append((index, replace(spec, block_size=spec.block_size * ratio, page=largest)))
        elif spec.kind == "latent":
            raise UnsupportedModelError(name, "its latent pages do not fit the others", "not modeled")
        else:
            unified.append((index, replace(spec, page=largest)))
    return unified


def group_layers(layers: Layers, name: str) -> list[Layers]:
    """Group layers as vLLM does: one group if all layers have one type, else buckets split to about equal size."""
    if is_uniform([spec for _, spec in layers]):
        return [layers]
    buckets: dict[KVSpec, Layers] = {}
    for index, spec in unify_pages(layers, name):
        buckets.setdefault(spec, []).append((index, spec))
    low, high = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = high if high < 1.5 * low else low
    cut: list[Layers] = []
    for bucket in buckets.values():
        count = cdiv(len(bucket), size)
        cut += [bucket[i::count] for i in range(count)]
    return cut


def own_specs(spec: ModelSpec, how: Paging) -> Layers:
    """Spec of every cache of every layer."""
    if not spec.is_compressed_mla:
        return layer_specs(spec, how)
    from kvplan.servers.vllm import deepseek_v4  # not needed for other models

    if not spec.is_later_v4:
        return deepseek_v4.v4_specs(spec, how.block_size or deepseek_v4.V4_BLOCK)
    block = how.block_size or deepseek_v4.later_block(how.sm)
    return deepseek_v4.later_specs(spec, block, how.kv_dtype, how.sm, how.spec_tokens)


def cut_groups(spec: ModelSpec, layers: Layers) -> list[Layers]:
    """Split the layers into groups with a block table each."""
    if not spec.is_compressed_mla and not spec.is_pooled:
        return group_layers(layers, spec.name)
    from kvplan.servers.vllm.packed import packed_groups  # not needed for models with one page size

    return packed_groups(layers)


def block_bytes(groups: list[Layers], stage: range) -> int:
    """Bytes of a block on a stage: its widest group, padded to the stride that every kernel needs.

    Source: vLLM 0.33 v1/core/kv_cache_planning.py (_get_kv_cache_bytes_per_block) and v1/kv_cache_interface.py
    (get_block_stride_alignment).
    """
    widest = max(sum(spec.page for index, spec in group if index in stage) for group in groups)
    step = lcm(*(spec.stride for group in groups for _, spec in group))
    return cdiv(widest, step) * step


@lru_cache(maxsize=4096)
def pool(spec: ModelSpec, how: Paging, draft: ModelSpec | None = None) -> Pool:
    """Pool of a model: its groups, and the bytes of one block on each pipeline stage's ranks.

    draft  a speculative model whose layers join the groups, on the last stage
    """
    layers = own_specs(spec, how)
    if draft is not None:
        if spec.is_compressed_mla != draft.is_compressed_mla:
            raise UnsupportedModelError(spec.name, f"{draft.name} with DeepSeek-V4's packed pool is not modeled")
        own = own_specs(draft, how) if spec.is_compressed_mla else draft_specs(spec, draft, how)
        layers += [(spec.num_layers + index, cache) for index, cache in own]
    if not layers:
        raise UnsupportedModelError(spec.name, "no layer keeps a cache", "there is no KV pool to size")
    cut = cut_groups(spec, layers)
    groups = tuple(KVGroup(tuple(part), tuple(dict.fromkeys(paged for _, paged in part))) for part in cut)
    stages: list[range] = stage_layers(spec.num_layers, how.pp, partition=how.partition)
    if draft is not None:
        stages[-1] = range(stages[-1].start, spec.num_layers + draft.num_layers)
    return Pool(groups, tuple(block_bytes(cut, stage) for stage in stages), how)


def overridden(layout: Pool, args: EngineArgs, available: list[int]) -> list[int]:
    """Bytes of each stage that --num-gpu-blocks-override uses instead of the measured memory."""
    if args.num_gpu_blocks_override is None:
        return available
    return [args.num_gpu_blocks_override * size for size in layout.stage_bytes]


def capacity(layout: Pool, settings: Settings, args: EngineArgs, available: list[int]) -> Capacity:
    """Blocks, tokens and concurrency for `available` KV bytes per rank, one entry per pipeline stage.

    The stage with the least room decides. Source: vLLM 0.33 v1/core/kv_cache_planning.py (get_kv_cache_configs) and
    kv_cache_utils.py (get_max_concurrency_for_kv_cache_config); 0.8 to 0.20 applied an override after the check.
    """
    worst = blocks_in(layout, available)[1]
    stated = overridden(layout, args, available)
    room = stated if settings.version.has("override_before_fit") else available
    null_block = 1 if settings.version.has("null_block") else 0
    context = settings.max_model_len
    if settings.auto_fit:
        context = largest_context(layout, settings, context, blocks_in(layout, room)[0] - null_block)
        if context == 0:
            context = settings.max_model_len
    charged = layout.charged(context, settings)
    cost = layout.stage_bytes[worst]
    deficit = max(
        [(charged + null_block) * each - free for each, free in zip(layout.stage_bytes, room, strict=True) if each]
    )
    fits = deficit <= 0
    blocks = blocks_in(layout, stated)[0]
    concurrency = blocks / charged
    if not settings.version.has("tokens_by_concurrency"):
        tokens = blocks // len(layout.groups) * layout.block_size * layout.dcp
    else:
        tokens = int(concurrency * context)
    return Capacity(
        num_blocks=blocks,
        bytes_per_block=cost,
        stage=worst,
        max_model_len=context,
        blocks_per_request=charged,
        max_concurrency=concurrency,
        tokens=tokens,
        fits=fits,
        deficit=max(0, deficit),
    )
