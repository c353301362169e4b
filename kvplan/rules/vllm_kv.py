"""vLLM's KV pool: layers -> specs -> groups -> bytes per block, blocks, tokens, concurrency.

Source: vLLM 0.33 v1/core/kv_cache_planning.py, kv_cache_utils.py and v1/kv_cache_interface.py, re-derived; equal to the
server's own capacity code on every case compared (tests/oracles.py).
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import lcm
from typing import Literal, assert_never

from kvplan.errors import UnsupportedModelError
from kvplan.layout import cdiv, state_bytes, token_bytes, v4_latent_bytes
from kvplan.rules import vllm
from kvplan.rules.vllm import EngineArgs, Settings
from kvplan.spec import (
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
from kvplan.weights import stage_layers

Kind = Literal["full", "latent", "sliding", "chunked", "state", "cross"]
MLA_STATE_BLOCK = 128  # smallest block of a model that mixes MLA with states
FLASHINFER_GDN_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How one layer's cache is paged.

    block_size  tokens per block; the whole context for a state that is not checkpointed
    page        bytes of one block of this layer on one rank
    bound       the window or chunk, in tokens; None for no bound
    blocks      blocks a state takes per request; None for caches that grow
    shape       what else must agree for two layers to share a group
    """

    kind: Kind
    block_size: int
    page: int
    bound: int | None = None
    blocks: int | None = None
    shape: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KVGroup:
    """Layers that share one block table. `layers` are (layer index, spec), in the order of the model."""

    layers: tuple[tuple[int, KVSpec], ...]
    specs: tuple[KVSpec, ...]  # each distinct one once, the first layer's first

    @property
    def first(self) -> KVSpec:
        return self.specs[0]

    def charged(self, context: int, settings: Settings, dcp: int) -> int:
        """Blocks a request of `context` tokens is charged at admission."""
        return max([charged_blocks(spec, context, settings, dcp) for spec in self.specs])

    def held(self, num_tokens: int, dcp: int) -> int:
        """Blocks a decoding request of `num_tokens` really holds."""
        return max([held_blocks(spec, num_tokens, dcp) for spec in self.specs])

    def shared(self, num_tokens: int, dcp: int) -> int:
        """Whole blocks of a common prefix that requests hold once together: none of windows and states."""
        return num_tokens // (self.first.block_size * dcp) if self.first.kind in ("full", "latent") else 0


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
        case "state":
            assert spec.blocks is not None
            return spec.blocks
        case "cross":
            return cdiv(settings.max_num_batched_tokens, block)
        case _:
            assert_never(spec.kind)


def held_blocks(spec: KVSpec, num_tokens: int, dcp: int) -> int:
    """Blocks held between two decode steps."""
    match spec.kind:
        case "sliding" | "chunked":
            assert spec.bound is not None
            return min(cdiv(num_tokens, spec.block_size), cdiv(spec.bound, spec.block_size) + 1)
        case "state":
            assert spec.blocks is not None
            return spec.blocks
        case _:
            return cdiv(cdiv(num_tokens, dcp), spec.block_size)


@dataclass(frozen=True, slots=True)
class Paging:
    """Everything that decides how a model's caches are paged, and nothing else.

    context  matters to states without prefix caching alone (one block holds it all); 0 otherwise
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
    spec_tokens: int
    ssm_dtype: str | None
    context: int


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A model's KV pool before its size is known.

    stage_bytes  bytes per block on one rank, for each pipeline stage
    """

    groups: tuple[KVGroup, ...]
    stage_bytes: tuple[int, ...]
    how: Paging

    @property
    def dcp(self) -> int:
        return self.how.dcp

    @property
    def block_size(self) -> int:
        return min(group.first.block_size for group in self.groups)

    def charged(self, context: int, settings: Settings) -> int:
        return sum(group.charged(context, settings, self.dcp) for group in self.groups)

    def held(self, num_tokens: int) -> int:
        return sum(group.held(num_tokens, self.dcp) for group in self.groups)

    def shared(self, num_tokens: int) -> int:
        return sum(group.shared(num_tokens, self.dcp) for group in self.groups)


def paging(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> Paging:
    one_block = vllm.has_states(spec) and not (args.enable_prefix_caching and vllm.has_attention(spec))
    return Paging(
        sm=sm,
        kv_dtype=settings.kv_dtype,
        dtype=settings.dtype,
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        dcp=args.decode_context_parallel_size,
        block_size=args.block_size,
        prefix_caching=args.enable_prefix_caching,
        flat=args.disable_hybrid_kv_cache_manager,
        spec_tokens=args.num_speculative_tokens,
        ssm_dtype=args.mamba_ssm_cache_dtype,
        context=settings.max_model_len if one_block else 0,
    )


# --- specs --------------------------------------------------------------------------------------------------------


def attention_spec(cache: LayerCache, block: int, dtype: str, tp: int, *, flat: bool, model_type: str) -> KVSpec:
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
            return KVSpec("cross", block, page, shape=(heads, k, v, dtype))
        case RecurrentState() | WindowLatent() | CompressedLatent():
            raise AssertionError("states and DeepSeek-V4 caches have pages of their own")
        case _:
            assert_never(cache)


def layer_dtypes(spec: ModelSpec, how: Paging) -> list[str]:
    """The KV dtype of each layer: turboquant keeps the first two and last two layers in the model's dtype."""
    dtype, count = how.kv_dtype, spec.num_layers
    if not dtype.startswith("turboquant") or vllm.has_states(spec):
        return [dtype] * count
    kept = {0, 1, count - 2, count - 1}
    return [how.dtype if i in kept else dtype for i in range(count)]


def state_alignment(state: RecurrentState, sm: int) -> tuple[int, int]:
    """(checkpoint alignment in tokens, checkpoint blocks) of a state under prefix caching."""
    match state.kind:
        case "gated_delta_net":
            flashinfer = 90 <= sm < 120
            return (FLASHINFER_GDN_ALIGNMENT, 1) if flashinfer else (1, 0)
        case "mamba2":
            return 1, 1
        case "mamba1" | "kda" | "conv":
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
    per_token = {token_bytes(cache, how.kv_dtype, how.tp) for cache in attentions}
    if len(per_token) > 1:
        raise UnsupportedModelError(f"{spec.name}: states beside attention layers of several shapes are not modelled")
    token = per_token.pop()
    smallest = max(16, how.block_size or 16, MLA_STATE_BLOCK if vllm.is_mla(spec) else 16)
    aligned = {s: state_alignment(s, how.sm) for s in states}
    unit = lcm(smallest, *(aligned[s][0] for s in states)) if how.prefix_caching else smallest
    block = unit * cdiv(max(sizes.values()), unit * token)
    specs = {}
    for state in states:
        checkpoints = 1 + aligned[state][1] if how.prefix_caching else 0
        own_block = block if how.prefix_caching else how.context
        specs[state] = KVSpec(
            "state", own_block, block * token, blocks=1 + how.spec_tokens + checkpoints, shape=(state,)
        )
    return block, specs


def layer_specs(spec: ModelSpec, how: Paging) -> list[tuple[int, KVSpec]]:
    """Every cache of every layer, paged, in the order of the model."""
    vllm.check_block_size(how.block_size)
    block = how.block_size or vllm.default_block_size(spec, how.kv_dtype, how.sm)
    states: dict[RecurrentState, KVSpec] = {}
    if vllm.has_states(spec):
        block, states = state_specs(spec, how)
    dtypes = layer_dtypes(spec, how)
    flat = how.flat and len(vllm.caches_of(spec)) > 1
    paged = partial(attention_spec, block=block, tp=how.tp, flat=flat, model_type=spec.model_type)
    return [
        (i, states[c] if isinstance(c, RecurrentState) else paged(c, dtype=dtypes[i]))
        for i, caches in enumerate(spec.layers)
        for c in caches
    ]


# --- groups -------------------------------------------------------------------------------------------------------


def is_uniform(specs: list[KVSpec]) -> bool:
    """One type of layer throughout (whatever the page sizes): all full, or one window, or one chunk, or all states."""
    kinds = {"full" if s.kind == "latent" else s.kind for s in specs}
    return len(kinds) == 1 and len({(s.bound, s.blocks, s.block_size) for s in specs}) == 1


def unify_pages(layers: list[tuple[int, KVSpec]], name: str) -> list[tuple[int, KVSpec]]:
    """Make all pages equal: a smaller page that divides the largest gets a larger block, others are padded."""
    largest = max(s.page for _, s in layers)
    unified = []
    for index, spec in layers:
        if spec.page == largest:
            unified.append((index, spec))
        elif spec.kind != "state" and largest % spec.page == 0:
            ratio = largest // spec.page
            unified.append((index, replace(spec, block_size=spec.block_size * ratio, page=largest)))
        elif spec.kind == "latent":
            raise UnsupportedModelError(f"{name}: its latent pages do not fit the others; not modelled")
        else:
            unified.append((index, replace(spec, page=largest)))
    return unified


def make_group(layers: list[tuple[int, KVSpec]]) -> KVGroup:
    return KVGroup(tuple(layers), tuple(dict.fromkeys(spec for _, spec in layers)))


def group_layers(layers: list[tuple[int, KVSpec]], name: str) -> tuple[KVGroup, ...]:
    """vLLM's grouping: one group when all layers are of one type, else buckets cut to about equal size."""
    if is_uniform([spec for _, spec in layers]):
        return (make_group(layers),)
    buckets: dict[KVSpec, list[tuple[int, KVSpec]]] = {}
    for index, spec in unify_pages(layers, name):
        buckets.setdefault(spec, []).append((index, spec))
    low, high = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = high if high < 1.5 * low else low
    groups = []
    for bucket in buckets.values():
        count = cdiv(len(bucket), size)
        groups += [make_group(bucket[i::count]) for i in range(count)]
    return tuple(groups)


@lru_cache(maxsize=4096)
def pool(spec: ModelSpec, how: Paging, draft: ModelSpec | None = None) -> Pool:
    """The pool of a model: its groups, and what one block costs on each pipeline stage's ranks.

    draft  a speculative model whose layers join the groups (one pipeline stage only)
    """
    layers = v4_specs(spec) if is_v4(spec) else layer_specs(spec, how)
    if draft is not None and is_v4(spec):
        raise UnsupportedModelError(f"{spec.name}: a draft model beside DeepSeek-V4's packed pool is not modelled")
    if draft is not None:
        layers += [(spec.num_layers + index, cache) for index, cache in layer_specs(draft, how)]
    if not layers:
        raise UnsupportedModelError(f"{spec.name}: no layer keeps a cache; there is no KV pool to size")
    groups = v4_groups(layers) if is_v4(spec) else group_layers(layers, spec.name)
    stages: list[range] = stage_layers(spec.num_layers, how.pp)
    if draft is not None:
        stages = [range(spec.num_layers + draft.num_layers)]
    stage_bytes = tuple(
        max(sum(s.page for index, s in group.layers if index in stage) for group in groups) for stage in stages
    )
    return Pool(groups, stage_bytes, how)


@lru_cache(maxsize=4096)
def rates(spec: ModelSpec, how: Paging, stage: int) -> tuple[int, int]:
    """(bytes one more token adds, bytes of a sequence's states) on a rank of one stage, windows counted as open."""
    dtypes = layer_dtypes(spec, how)
    per_token = states = 0
    for i in stage_layers(spec.num_layers, how.pp)[stage]:
        for cache in spec.layers[i]:
            if isinstance(cache, RecurrentState):
                states += state_bytes(cache, how.dtype, how.tp, spec_tokens=how.spec_tokens, ssm_dtype=how.ssm_dtype)
            else:
                per_token += token_bytes(cache, dtypes[i], how.tp)
    return per_token, states


# --- DeepSeek-V4: small pages side by side ------------------------------------------------------------------------

V4_ALIGNMENT = 576  # every page is a multiple of this
V4_WINDOW_BLOCK, V4_BLOCK = 64, 256
V4_STATE_BLOCK = {4: 4, 128: 8}  # compression ratio -> block of the compressor's state
V4_STATE_WINDOW = {4: 8, 128: 128}


def is_v4(spec: ModelSpec) -> bool:
    return WindowLatent in vllm.caches_of(spec)


def v4_page(size: int) -> int:
    return cdiv(size, V4_ALIGNMENT) * V4_ALIGNMENT


def v4_state(ratio: int, width: int) -> KVSpec:
    """The float32 inputs a compressor has not folded yet: keys and gates, twice as wide where windows overlap."""
    block = V4_STATE_BLOCK[ratio]
    columns = 4 * width if ratio == 4 else 2 * width
    return KVSpec("sliding", block, v4_page(block * columns * 4), V4_STATE_WINDOW[ratio], shape=("v4 state", ratio))


def v4_specs(spec: ModelSpec) -> list[tuple[int, KVSpec]]:
    """A window in every layer; compressed entries, their index keys and the compressors' states where there are any.

    Pages have one size whatever KV dtype is asked for: the server stores these caches in its own layout.
    """
    found: list[tuple[int, KVSpec]] = []
    for i, caches in enumerate(spec.layers):
        for cache in caches:
            match cache:
                case WindowLatent(dim, rope, window):
                    page = v4_page(V4_WINDOW_BLOCK * v4_latent_bytes(dim, rope))
                    found.append((i, KVSpec("sliding", V4_WINDOW_BLOCK, page, window, shape=("v4 window",))))
                case CompressedLatent(dim, rope, ratio, index_dim):
                    entries = V4_BLOCK // ratio
                    page = v4_page(entries * v4_latent_bytes(dim, rope))
                    if index_dim:
                        index = v4_page(entries * (index_dim + 4 * cdiv(index_dim, 128)))
                        found.append((i, KVSpec("latent", V4_BLOCK, index, shape=("v4 index",))))
                        found.append((i, v4_state(ratio, index_dim)))
                    found.append((i, KVSpec("latent", V4_BLOCK, page, shape=("v4", ratio))))
                    found.append((i, v4_state(ratio, dim)))
                case _:
                    raise AssertionError("a DeepSeek-V4 layer keeps no other cache")
    return found


def v4_groups(layers: list[tuple[int, KVSpec]]) -> tuple[KVGroup, ...]:
    """Buckets of one kind, window and block; a bucket of one page size is split to about the size of the mixed ones.

    The size is the one, at least as large as any page repeats in a mixed bucket, that rounds up least over all
    buckets of one page size, the larger of equals. Source: vLLM 0.33 kv_cache_planning.py (packed groups).
    """
    buckets: dict[tuple[object, ...], list[tuple[int, KVSpec]]] = {}
    for index, spec in layers:
        buckets.setdefault((spec.kind, spec.bound, spec.block_size), []).append((index, spec))
    mixed = [b for b in buckets.values() if len({s.page for _, s in b}) > 1]
    plain = [b for b in buckets.values() if len({s.page for _, s in b}) == 1]
    repeats = [sum(s.page == page for _, s in b) for b in mixed for page in {s.page for _, s in b}]
    least = max(repeats, default=1)
    sizes = range(least, max([least, *map(len, plain)]) + 1)
    size = min(sizes, key=lambda d: (sum(cdiv(len(b), d) * d - len(b) for b in plain), -d))
    groups: list[KVGroup] = []
    for bucket in buckets.values():
        count = cdiv(len(bucket), size) if bucket in plain else 1
        groups += [make_group(bucket[i::count]) for i in range(count)]
    return tuple(groups)


# --- capacity -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the pool holds once its size is known.

    stage              the pipeline stage whose memory decides; bytes_per_block is its own
    tokens             "GPU KV cache size" as the server logs it
    max_concurrency    the server's "Maximum concurrency", a float
    blocks_per_request blocks charged to a request of the full context
    fits               the server starts; `deficit` bytes per rank are missing when not
    """

    num_blocks: int
    bytes_per_block: int
    stage: int
    max_model_len: int
    blocks_per_request: int
    max_concurrency: float
    tokens: int
    fits: bool
    deficit: int


def largest_context(layout: Pool, settings: Settings, limit: int, blocks: int) -> int:
    """The largest context, at most `limit`, whose charge leaves the null block free; 0 when not even one token fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.charged(middle, settings) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def blocks_in(layout: Pool, available: list[int]) -> tuple[int, int]:
    """(blocks that every stage can hold, the stage that decides)."""
    if len(available) == 1:
        return max(0, available[0]) // layout.stage_bytes[0], 0
    costs = zip(available, layout.stage_bytes, strict=True)
    return min([(max(0, room) // cost, i) for i, (room, cost) in enumerate(costs) if cost])


def capacity(layout: Pool, settings: Settings, args: EngineArgs, available: list[int]) -> Capacity:
    """Blocks, tokens and concurrency for `available` KV bytes per rank, one entry per pipeline stage.

    The smallest stage decides. Source: vLLM 0.33 v1/core/kv_cache_utils.py (check_enough_kv_cache_memory,
    get_num_blocks, get_max_concurrency_for_kv_cache_config).
    """
    blocks, worst = blocks_in(layout, available)
    context = settings.max_model_len
    if settings.auto_fit:
        context = largest_context(layout, settings, context, blocks - 1)
        if context == 0:
            context = settings.max_model_len
    charged = layout.charged(context, settings)
    cost = layout.stage_bytes[worst]
    deficit = max(
        [(charged + 1) * each - room for each, room in zip(layout.stage_bytes, available, strict=True) if each]
    )
    fits = deficit <= 0
    if args.num_gpu_blocks_override is not None:
        blocks = args.num_gpu_blocks_override
    concurrency = blocks / charged
    if settings.version.tokens_of_group:
        tokens = blocks // len(layout.groups) * layout.block_size
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
