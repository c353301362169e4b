"""How vLLM pages each layer's cache: block size, bytes per page, blocks per request.

Source: vLLM 0.33 v1/kv_cache_interface.py and platforms/interface.py, re-derived;
equal to the server's own capacity code on every case compared (tests/oracles.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import gcd, lcm
from typing import Any, Literal, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.releases import Version
from kvplan.servers.settings import Settings
from kvplan.servers.vllm import backends as vllm_backends
from kvplan.servers.vllm import connectors
from kvplan.servers.vllm import rules as vllm
from kvplan.sizing.layout import cdiv, index_key_bytes, ring_bytes, state_bytes, token_bytes
from kvplan.sizing.weights import stage_layers

Kind = Literal["full", "latent", "sliding", "chunked", "state", "cross", "ring"]
FLASH_KDA_ALIGNMENT = 16  # tokens between checkpoints of KDA with a bounded gate
MLA_STATE_BLOCK = 128  # smallest block of a model that mixes MLA with states
FLASHINFER_GDN_ALIGNMENT = 64
MAMBA1_CHUNK = 2048  # vLLM config/model.py (get_mamba_chunk_size), where a config names no chunk


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How one layer's cache is paged.

    block_size  tokens per block; the whole context for a state that is not checkpointed
    page        bytes of one block of this layer on one rank
    bound       the window or chunk, in tokens; None for no bound
    blocks      blocks a state, or an encoder's tokens, take per request; None for caches that grow, `extra` beside
    shape       what else must agree for two layers to share a group
    stride      bytes that packed blocks must be a multiple of apart for this layer's kernel
    """

    kind: Kind
    block_size: int
    page: int
    bound: int | None = None
    blocks: int | None = None
    extra: int = 0
    shape: tuple[object, ...] = ()
    stride: int = 1


def charged_blocks(spec: KVSpec, context: int, settings: Settings, dcp: int) -> int:
    """Blocks charged per request, the worst case of a prefill in flight."""
    block, flight = spec.block_size, settings.in_flight_tokens
    match spec.kind:
        case "full" | "latent":
            return cdiv(cdiv(context, dcp), block)
        case "sliding":  # a window need not start on a block boundary: one more block
            assert spec.bound is not None
            return cdiv(min(spec.bound - 1 + flight, context), block) + 1
        case "chunked":
            assert spec.bound is not None
            return cdiv(min(spec.bound + flight, context), block)
        case "state" | "cross" | "ring":
            return spec.blocks if spec.blocks is not None else cdiv(context, block) + spec.extra
        case _:
            assert_never(spec.kind)


def held_blocks(spec: KVSpec, num_tokens: int, dcp: int) -> int:
    """Blocks held between two decode steps: of a window or chunk, at most those that so many tokens lie in."""
    block = spec.block_size
    match spec.kind:
        case "sliding":
            assert spec.bound is not None
            return min(cdiv(num_tokens, block), cdiv(spec.bound - 1, block) + 1)
        case "chunked":
            assert spec.bound is not None
            return min(cdiv(num_tokens, block), cdiv(spec.bound, block) + (spec.bound % block > 1))
        case "state" | "cross" | "ring" if spec.blocks is not None:
            # A cached state is charged more: what a step leaves behind, and what a prompt does.
            return spec.blocks if spec.kind != "state" else min(spec.blocks, 1 + spec.extra)
        case "state" | "cross" | "ring":
            return cdiv(num_tokens, block) + spec.extra
        case _:
            return cdiv(cdiv(num_tokens, dcp), block)


def moving_blocks(spec: KVSpec, num_tokens: int) -> int:
    """Blocks held beyond those for the step or two in which the state moves on, or a bound passes a block's end."""
    match spec.kind:
        case "state" if spec.blocks is not None:
            return int(spec.blocks > 1 + spec.extra and num_tokens > spec.block_size)
        case "sliding" | "chunked":  # one more token is kept while the one before is in flight
            assert spec.bound is not None
            return int(spec.bound % spec.block_size in (0, 1) and num_tokens > spec.bound)
        case _:
            return 0


def prefilling_blocks(spec: KVSpec, num_tokens: int, context: int, settings: Settings, dcp: int) -> int:
    """Blocks held at most until a prompt of `num_tokens` is computed, in the largest steps."""
    match spec.kind:
        case "sliding" | "chunked":
            return min(cdiv(num_tokens, spec.block_size), charged_blocks(spec, context, settings, dcp))
        case "state" if spec.blocks is not None and spec.blocks > 1 + spec.extra:
            # The one before the batches in flight and the one after each: vLLM frees when a batch has ended.
            at_once = max(spec.blocks, 1 + spec.extra + settings.batches)
            return min(at_once, spec.extra + cdiv(num_tokens, spec.block_size))
        case _:
            return held_blocks(spec, num_tokens, dcp)


@dataclass(frozen=True, slots=True)
class Paging:
    """Everything that decides how a model's caches are paged, and nothing else.

    flat     windows and chunks are kept in full where a model mixes kinds; in the first engine in every model
    first_engine  vLLM's V0
    checkpoints   kinds of states that keep a checkpoint within a prompt when they are cached
    every_block   kinds of states of which every block of the context is kept when they are cached
    context  matters to states without prefix caching alone (one block holds it all); 0 otherwise
    encoder  tokens that cross-attention layers keep per request (a server's whole step); 0 where there are none
    rest_last  layers that stages cannot share evenly go to the last stages (SGLang)
    ahead    an image's tokens attend to each other both ways
    backend  tokens of the smallest block of the attention backend that was asked for; 0: the server's choice
    partition  layers of each pipeline stage, where they are stated
    """

    sm: int
    kv_dtype: str
    dtype: str
    tp: int
    pp: int
    dcp: int
    block_size: int | None
    prefix_caching: bool
    flat: bool
    first_engine: bool
    checkpoints: frozenset[str]
    every_block: frozenset[str]
    spec_tokens: int
    ssm_dtype: str | None
    context: int
    encoder: int
    rest_last: bool = False
    ahead: bool = False
    backend: int = 0
    partition: tuple[int, ...] = ()


def checkpointed(release: Version) -> frozenset[str]:
    """Kinds of states that keep a checkpoint within a prompt when they are cached."""
    kinds = {
        "gated_delta_net": release.has("delta_net_checkpoints"),
        "mamba2": release.has("mamba2_checkpoints"),
        "bounded_kda": release.has("kda_checkpoints"),
    }
    return frozenset(kind for kind, on in kinds.items() if on)


def paging(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> Paging:
    prefix_caching, release = settings.prefix_caching, settings.version
    one_block = spec.has_states and not (prefix_caching and spec.has_attention)
    chunked = ChunkedAttention in spec.cache_kinds
    grouped = release.has("chunked_groups") if chunked else release.has("hybrid_groups")
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
        checkpoints=checkpointed(release),
        every_block=frozenset() if release.has("aligned_states") else frozenset({"mamba1", "mamba2"}),
        spec_tokens=args.num_speculative_tokens,
        ssm_dtype=args.mamba_ssm_cache_dtype,
        context=settings.max_model_len if one_block else 0,
        encoder=settings.max_num_batched_tokens if CrossAttention in spec.cache_kinds else 0,
        ahead=vllm.sees_ahead(spec, args, release),
        backend=vllm_backends.smallest_block(settings.backend, vllm.head_dims(spec), sm, release),
        partition=args.partition,
    )


def usual_block(spec: ModelSpec, how: Paging) -> int:
    """Tokens of the block that attention takes where neither a user nor states ask for more."""
    usual = vllm.default_block_size(spec, how.kv_dtype, how.sm, ahead=how.ahead)
    if not how.backend:
        return usual
    return lcm(how.backend, 64) if spec.is_sparse_mla else how.backend


def backend_notes(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> list[str]:
    """What the attention backend that was asked for changes."""
    if spec.cache_kinds & {WindowLatent, CompressedLatent}:
        raise UsageError(
            f"attention_backend {settings.backend}", f"its caches for {spec.name} are not modeled", "leave it out"
        )
    how = paging(spec, settings, args, sm)
    others = ("state", "ring", "cross")
    blocks = [  # 0 where no layer has attention
        max((paged.block_size for _, paged in layer_specs(spec, each) if paged.kind not in others), default=0)
        for each in (how, replace(how, backend=0))
    ]
    usual = vllm.resolve_kv_dtype(spec, args.kv_cache_dtype, settings.dtype, sm)
    note = vllm_backends.note(settings.backend, *blocks)
    layout = f"attention_backend {settings.backend}: keeps {settings.kv_dtype} in place of {usual}"
    changed = spec.is_sparse_mla and usual != settings.kv_dtype and args.kv_cache_dtype != "fp8_e4m3"
    return [text for text in (note, layout if changed else None) if text]


def attention_spec(
    cache: LayerCache, block: int, dtype: str, tp: int, *, flat: bool, encoder: int, model_type: str
) -> KVSpec:
    """The spec of a cache that grows with the tokens; `dtype` is this layer's.

    flat  windows and chunks are kept in full (the hybrid manager is off and the model mixes kinds)
    """
    page = block * token_bytes(cache, dtype, tp)
    match cache:
        case FullAttention(heads, k, v):
            return KVSpec("full", block, page, shape=(heads, k, v, dtype))
        case SlidingWindow(heads, k, v, window):
            if flat:
                return KVSpec("full", block, page, shape=(heads, k, v, dtype))
            # Cohere 2 attends to the current token beside its window.
            bound = window + 1 if model_type == "cohere2" else window
            return KVSpec("sliding", block, page, bound, shape=(heads, k, v, dtype))
        case ChunkedAttention(heads, k, v, chunk):
            if flat:
                return KVSpec("full", block, page, shape=(heads, k, v, dtype))
            return KVSpec("chunked", block, page, chunk, shape=(heads, k, v, dtype))
        case LatentAttention(latent, rope):
            return KVSpec("latent", block, page, shape=(latent, rope, dtype))
        case SparseIndexer(dim):
            return KVSpec("latent", block, page, shape=("indexer", dim))
        case KeyIndex(dim):
            return KVSpec("full", block, page, shape=("index keys", dim))
        case CrossAttention(heads, k, v):
            return KVSpec("cross", block, page, blocks=cdiv(encoder, block), shape=(heads, k, v, dtype))
        case RecurrentState() | WindowLatent() | CompressedLatent():
            raise AssertionError("states and DeepSeek-V4 caches have pages of their own")
        case _:
            assert_never(cache)


def layer_dtypes(spec: ModelSpec, how: Paging) -> list[str]:
    """The KV dtype of each layer: turboquant keeps the first two and last two layers in the model's dtype."""
    dtype, count = how.kv_dtype, spec.num_layers
    if not dtype.startswith("turboquant") or spec.has_states:
        return [dtype] * count
    plain_layers = {0, 1, count - 2, count - 1}
    return [how.dtype if i in plain_layers else dtype for i in range(count)]


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
    sizes = {s: state_bytes(s, how.dtype, how.tp, spec_tokens=how.spec_tokens, ssm_dtype=how.ssm_dtype) for s in states}
    attentions = {c for caches in spec.layers for c in caches if not isinstance(c, RecurrentState)}
    if not attentions:  # pure Mamba: prefix caching stays off, one block per request
        return 16, {s: KVSpec("state", how.context, sizes[s], blocks=1, shape=(s,)) for s in states}
    kv_dtype = how.kv_dtype
    if spec.is_pooled:  # its latents alone decide, in plain fp8 even where their pages are 656 bytes a token
        attentions = {cache for cache in attentions if isinstance(cache, LatentAttention)}
        kv_dtype = "fp8" if kv_dtype == "fp8_ds_mla" else kv_dtype
    per_token = {token_bytes(cache, kv_dtype, how.tp) for cache in attentions}
    if len(per_token) > 1:
        raise UnsupportedModelError(spec.name, "states beside attention layers of several shapes are not modeled")
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
        checkpoints = 1 + aligned[state][1] if how.prefix_caching else 0
        specs[state] = fixed if grows else replace(fixed, blocks=1 + how.spec_tokens + checkpoints)
    return block, specs


def pooled_block(spec: ModelSpec, sm: int) -> int:
    """Tokens of the smallest block that a pooled index and its attention both take; 16 for any other model.

    Source: vLLM 0.33 v1/attention/backends/mla/indexer.py (Glm5NextIndexerBackend): 32 or 64 keys, 64 alone on 12.x.
    """
    pools = [c.pool for caches in spec.layers for c in caches if isinstance(c, SparseIndexer) and c.pool > 1]
    return lcm(*(pool * (64 if sm >= 120 else 32) for pool in pools), 64) if pools else 16


def pooled_specs(cache: LayerCache, block: int, how: Paging) -> list[KVSpec]:
    """A latent, or pooled index keys with the ring of those that are not pooled yet, as they lie packed in a block.

    Source: vLLM 0.33 models/glm5next/common/attention.py; customize_spec of the backends it chooses.
    """
    if isinstance(cache, LatentAttention):
        token = token_bytes(cache, how.kv_dtype, how.tp)
        rows = 64 if how.sm >= 120 else 32 if how.sm >= 100 else 1  # what the kernels read at once
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
    """Tokens that Mamba's kernel takes at once, by the config. Source: vLLM 0.26 config/model.py."""
    for config in (spec.config, spec.config.get("text_config"), spec.config.get("llm_config")):
        values: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
        for name in ("mamba_chunk_size", "chunk_size"):
            if isinstance(values.get(name), int) and values[name] > 0:
                return int(values[name])
    return MAMBA1_CHUNK


def layer_specs(spec: ModelSpec, how: Paging) -> list[tuple[int, KVSpec]]:
    """Every cache of every layer, paged, in the order of the model."""
    vllm.check_block_size(how.block_size)
    block = how.block_size or usual_block(spec, how)
    if how.first_engine:
        return first_engine_specs(spec, how, block)
    states: dict[RecurrentState, KVSpec] = {}
    if spec.has_states:
        block, states = state_specs(spec, how)
    if spec.is_pooled:
        return [
            (i, each)
            for i, caches in enumerate(spec.layers)
            for c in caches
            for each in ([states[c]] if isinstance(c, RecurrentState) else pooled_specs(c, block, how))
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
    """Every cache of a draft, in blocks of as many tokens as those of its target."""
    block = state_specs(spec, how)[0] if spec.has_states else how.block_size or usual_block(spec, how)
    return layer_specs(draft, replace(how, block_size=block, backend=0))


V0_ENTRY = 256  # V0 rounds an MLA token's entry up to this many bytes: 576 x 2 to 1,280


def first_engine_specs(spec: ModelSpec, how: Paging, block: int) -> list[tuple[int, KVSpec]]:
    """V0's pool: every attention layer in full, windows too. States lay outside it, sized by the sequences: refused.

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
            each = paged(cache, dtype=how.kv_dtype)
            if each.kind == "latent":
                each = replace(each, page=block * cdiv(each.page // block, V0_ENTRY) * V0_ENTRY)
            specs.append((i, each))
    return specs


@lru_cache(maxsize=4096)
def rates(spec: ModelSpec, how: Paging, stage: int) -> tuple[int, int]:
    """(bytes one more token adds, bytes of a sequence's states) on a rank of one stage, windows counted as open."""
    dtypes = layer_dtypes(spec, how)
    per_token = states = 0
    for i in stage_layers(spec.num_layers, how.pp, rest_last=how.rest_last, partition=how.partition)[stage]:
        for cache in spec.layers[i]:
            if isinstance(cache, RecurrentState):
                states += state_bytes(cache, how.dtype, how.tp, spec_tokens=how.spec_tokens, ssm_dtype=how.ssm_dtype)
            else:
                per_token += token_bytes(cache, dtypes[i], how.tp)
    return per_token, states
