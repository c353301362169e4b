"""Paging of each layer's cache in vLLM: block sizes, and the pages of states.

Source: vLLM 0.33 v1/kv_cache_interface.py and platforms/interface.py, re-derived;
equal to the server's own capacity code in every compared case (tests/oracles.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import gcd, lcm
from typing import Any, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.methods import TARGET_READERS
from kvplan.servers.pages import KVSpec, Paging, attention_spec, layer_dtypes
from kvplan.servers.releases import Version
from kvplan.servers.settings import Settings
from kvplan.servers.vllm import backends as vllm_backends
from kvplan.servers.vllm import connectors
from kvplan.servers.vllm import rules as vllm
from kvplan.sizing.layout import cdiv, index_key_bytes, ring_bytes, token_bytes

FLASH_KDA_ALIGNMENT = 16  # tokens between checkpoints of KDA with a bounded gate
MLA_STATE_BLOCK = 128  # smallest block of a model that combines MLA with states
FLASHINFER_GDN_ALIGNMENT = 64
MAMBA1_CHUNK = 2048  # vLLM config/model.py (get_mamba_chunk_size), if a config names no chunk


def checkpointed(spec: ModelSpec, release: Version) -> frozenset[str]:
    """Kinds of states that, when cached, keep a checkpoint within a prompt."""
    kinds = {
        "gated_delta_net": release.has("delta_net_checkpoints"),
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
        flat=connectors.hybrid_manager_is_off(args, release) or not grouped,
        first_engine=settings.first_engine,
        checkpoints=checkpointed(spec, release),
        every_block=frozenset() if release.has("aligned_states") else frozenset({"mamba1", "mamba2"}),
        spec_tokens=args.num_speculative_tokens,
        ssm_dtype=args.mamba_ssm_cache_dtype,
        conv_dtype=args.mamba_cache_dtype,
        context=settings.max_model_len if one_block else 0,
        encoder=settings.max_num_batched_tokens if CrossAttention in spec.cache_kinds else 0,
        ahead=vllm.sees_ahead(spec, args, release),
        backend=vllm_backends.smallest_block(settings.backend, vllm.head_dims(spec), sm, release),
        partition=args.partition,
    )


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
    note = vllm_backends.note(settings.backend, *blocks, layout=changed)
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
        attentions = {cache for cache in attentions if isinstance(cache, LatentAttention)}
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
            grid = block if state.kind == "gated_delta_net" else alignment
            fixed = replace(fixed, checkpoint_alignment=grid)
        specs[state] = fixed if grows else replace(fixed, blocks=2 + how.spec_tokens + num_checkpoints)
    return block, specs


def pooled_block(spec: ModelSpec, sm: int) -> int:
    """Smallest block in tokens that both a pooled index and its attention support, or 16 for any other model.

    Source: vLLM 0.33 v1/attention/backends/mla/indexer.py (Glm5NextIndexerBackend): 32 or 64 keys, only 64 on 12.x.
    """
    pools = [c.pool for caches in spec.layers for c in caches if isinstance(c, SparseIndexer) and c.pool > 1]
    return lcm(*(pool * (64 if sm >= 120 else 32) for pool in pools), 64) if pools else 16


def pooled_specs(cache: LayerCache, block: int, how: Paging) -> list[KVSpec]:
    """A latent, or pooled index keys with the ring of those not pooled yet, as packed in a block.

    Source: vLLM 0.33 models/glm5next/common/attention.py; customize_spec of the backends it chooses.
    """
    if isinstance(cache, LatentAttention):
        token = token_bytes(cache, how.kv_dtype, how.tp)
        rows = 64 if how.sm >= 120 else 32 if how.sm >= 100 else 1  # rows that the kernels read at once
        return [KVSpec("latent", block, block * token, shape=("latent", how.kv_dtype), stride=rows * token)]
    assert isinstance(cache, SparseIndexer)
    entry, pool = index_key_bytes(cache.head_dim), cache.pool
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
