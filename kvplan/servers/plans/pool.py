"""KV pools and the pages in them, for any server: block size, bytes of a page, groups of layers, blocks per request.

Source: vLLM 0.33 v1/kv_cache_interface.py, re-derived; equal to the server's own capacity code in every compared case
(tests/oracles.py). SGLang's pages are the same kinds, in pools of its own.
"""

from fractions import Fraction
from functools import lru_cache
from math import floor, gcd, lcm
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan.core.records import dataclass
from kvplan.core.units import MEMORY_PAGE
from kvplan.models import spec as kinds
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.layout import cdiv, state_bytes, token_bytes
from kvplan.sizing.weights import stage_layers

if TYPE_CHECKING:
    from kvplan.servers.plans.plan import Load

Kind = Literal["full", "latent", "sliding", "chunked", "state", "cross", "ring"]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Paging of one layer's cache.

    block_size  tokens per block; the whole context for a state without checkpoints
    page        bytes of one block of this layer on one rank
    bound       the sliding window or chunk, in tokens; None: unbounded
    blocks      blocks per request for a state or an encoder's tokens; None for caches that grow, which add `extra`
    shape       what else must match for two layers to share a group
    stride      this layer's kernel needs packed blocks at multiples of this many bytes
    checkpoint_alignment  a prompt's last chunk can checkpoint a state at multiples of this many tokens; None: nowhere
    """

    kind: Kind
    block_size: int
    page: int
    bound: int | None = None
    blocks: int | None = None
    extra: int = 0
    shape: tuple[object, ...] = ()
    stride: int = 1
    checkpoint_alignment: int | None = None


def charged_blocks(spec: KVSpec, context: int, settings: Settings, dcp: int) -> int:
    """Blocks charged per request: the worst case of a prefill in flight."""
    block, flight = spec.block_size, settings.in_flight_tokens
    match spec.kind:
        case "full" | "latent":
            return cdiv(cdiv(context, dcp), block)
        case "sliding":  # a window may start within a block: one more block
            assert spec.bound is not None
            return cdiv(min(spec.bound - 1 + flight, context), block) + 1
        case "chunked":
            assert spec.bound is not None
            return cdiv(min(spec.bound + flight, context), block)
        case "state" | "cross" | "ring":
            return spec.blocks if spec.blocks is not None else cdiv(context, block) + spec.extra
        case _:
            assert_never(spec.kind)


def blocks_per_token(spec: KVSpec, context: int, dcp: int) -> Fraction:
    """Blocks per additional token of a long request; 0 for what a request takes once, whatever its length."""
    match spec.kind:
        case "full" | "latent":
            return Fraction(1, spec.block_size * dcp)
        case "state" | "cross" | "ring" if spec.blocks is None and spec.block_size < context:
            return Fraction(1, spec.block_size)
        case _:
            return Fraction()


def held_blocks(spec: KVSpec, num_tokens: int, dcp: int) -> int:
    """Blocks held between two decode steps; for a window or chunk, at most those that so many tokens can span."""
    block = spec.block_size
    match spec.kind:
        case "sliding":
            assert spec.bound is not None
            return min(cdiv(num_tokens, block), cdiv(spec.bound - 1, block) + 1)
        case "chunked":
            assert spec.bound is not None
            return min(cdiv(num_tokens, block), cdiv(spec.bound, block) + (spec.bound % block > 1))
        case "state" | "cross" | "ring" if spec.blocks is not None:
            # A cached state is charged more: blocks left over from a step and from the prompt.
            return spec.blocks if spec.kind != "state" else min(spec.blocks, 1 + spec.extra)
        case "state" | "cross" | "ring":
            return cdiv(num_tokens, block) + spec.extra
        case _:
            return cdiv(cdiv(num_tokens, dcp), block)


def moving_blocks(spec: KVSpec, num_tokens: int) -> int:
    """Additional blocks held for the step or two in which a state moves on or a bound crosses a block boundary."""
    match spec.kind:
        case "state" if spec.blocks is not None:
            return int(spec.blocks > 1 + spec.extra and num_tokens > spec.block_size)
        case "sliding" | "chunked":  # one more token is kept while the previous one is in flight
            assert spec.bound is not None
            return int(spec.bound % spec.block_size in (0, 1) and num_tokens > spec.bound)
        case _:
            return 0


def prefilling_blocks(spec: KVSpec, num_tokens: int, context: int, settings: Settings, dcp: int) -> int:
    """Most blocks held until a prompt of `num_tokens` is prefilled, in the largest steps."""
    match spec.kind:
        case "sliding" | "chunked":
            return min(cdiv(num_tokens, spec.block_size), charged_blocks(spec, context, settings, dcp))
        case "state" if spec.blocks is not None and spec.blocks > 1 + spec.extra:
            # One block before the batches in flight and one after each: vLLM frees them when a batch has ended.
            at_once = max(spec.blocks, 1 + spec.extra + settings.batches)
            return min(at_once, spec.extra + cdiv(num_tokens, spec.block_size))
        case _:
            return held_blocks(spec, num_tokens, dcp)


@dataclass(frozen=True, slots=True)
class Paging:
    """Everything that determines how a model's caches are paged.

    flat     windows and chunks are kept in full if a model mixes kinds; always in the first engine
    first_engine  vLLM's V0
    checkpoints   kinds of states that, when cached, keep a checkpoint within a prompt
    every_block   kinds of states that, when cached, keep every block of the context
    context  matters only to states without prefix caching (one block holds all of it); 0 otherwise
    encoder  tokens that cross-attention layers keep per request (a server's whole step); 0 if there are none
    rest_last  layers that do not divide evenly among stages go to the last stages (SGLang)
    ahead    an image's tokens attend bidirectionally
    backend  smallest block, in tokens, of the requested attention backend; 0: the server's choice
    partition  layers of each pipeline stage, if given
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
    conv_dtype: str | None = None

    def state_bytes(self, state: kinds.RecurrentState) -> int:
        """Bytes of one sequence's state in one layer of a rank."""
        return state_bytes(
            state,
            self.dtype,
            self.tp,
            spec_tokens=self.spec_tokens,
            ssm_dtype=self.ssm_dtype,
            conv_dtype=self.conv_dtype,
        )


def attention_spec(
    cache: kinds.LayerCache, block: int, dtype: str, tp: int, *, flat: bool, encoder: int, model_type: str
) -> KVSpec:
    """Spec of a cache that grows with the tokens; `dtype` is this layer's.

    flat  windows and chunks are kept in full (the hybrid manager is off and the model mixes kinds)
    """
    page = block * token_bytes(cache, dtype, tp)
    match cache:
        case kinds.FullAttention(heads, k, v):
            return KVSpec("full", block, page, shape=(heads, k, v, dtype))
        case kinds.SlidingWindow(heads, k, v, window):
            if flat:
                return KVSpec("full", block, page, shape=(heads, k, v, dtype))
            # Cohere 2 attends to the current token in addition to its window.
            bound = window + 1 if model_type == "cohere2" else window
            return KVSpec("sliding", block, page, bound, shape=(heads, k, v, dtype))
        case kinds.ChunkedAttention(heads, k, v, chunk):
            if flat:
                return KVSpec("full", block, page, shape=(heads, k, v, dtype))
            return KVSpec("chunked", block, page, chunk, shape=(heads, k, v, dtype))
        case kinds.LatentAttention(latent, rope):
            return KVSpec("latent", block, page, shape=(latent, rope, dtype))
        case kinds.SparseIndexer(dim):
            return KVSpec("latent", block, page, shape=("indexer", dim))
        case kinds.KeyIndex(dim):
            return KVSpec("full", block, page, shape=("index keys", dim))
        case kinds.CrossAttention(heads, k, v):
            return KVSpec("cross", block, page, blocks=cdiv(encoder, block), shape=(heads, k, v, dtype))
        case kinds.RecurrentState() | kinds.WindowLatent() | kinds.CompressedLatent():
            raise AssertionError("states and DeepSeek-V4 caches have pages of their own")
        case _:
            assert_never(cache)


def layer_dtypes(spec: ModelSpec, how: Paging) -> list[str]:
    """KV dtype of each layer."""
    dtype = how.kv_dtype
    plain = plain_layers(spec) if dtype.startswith("turboquant") else ()
    return [how.dtype if i in plain else dtype for i in range(spec.num_layers)]


def plain_layers(spec: ModelSpec) -> frozenset[int]:
    """Layers that turboquant keeps in the model's dtype: the first two and the last two; with states none, and none of
    a draft head, whose layers are numbered after its target's.

    Source: vLLM 0.33 model_executor/layers/quantization/turboquant/config.py (get_boundary_skip_layers).
    """
    count = spec.num_layers
    return frozenset() if spec.has_states or spec.head else frozenset({0, 1, count - 2, count - 1})


@lru_cache(maxsize=4096)
def rates(spec: ModelSpec, how: Paging, stage: int) -> tuple[int, int]:
    """(bytes per additional token, state bytes per sequence) on a rank of one stage, with windows not yet full."""
    dtypes = layer_dtypes(spec, how)
    per_token = states = 0
    for i in stage_layers(spec.num_layers, how.pp, rest_last=how.rest_last, partition=how.partition)[stage]:
        for cache in spec.layers[i]:
            if isinstance(cache, kinds.RecurrentState):
                states += how.state_bytes(cache)
            else:
                per_token += token_bytes(cache, dtypes[i], how.tp)
    return per_token, states


@dataclass(frozen=True, slots=True, eq=False)
class KVGroup:
    """Layers that share one block table. `layers` are (layer index, spec), in the order of the model."""

    layers: tuple[tuple[int, KVSpec], ...]
    specs: tuple[KVSpec, ...]  # distinct ones, in order of first use

    @property
    def first(self) -> KVSpec:
        return self.specs[0]

    def charged(self, context: int, settings: Settings, dcp: int) -> int:
        """Blocks charged to a request of `context` tokens at admission."""
        return max([charged_blocks(spec, context, settings, dcp) for spec in self.specs])

    def allocated_blocks(self, num_tokens: int, dcp: int) -> int:
        """Blocks actually held by a decoding request of `num_tokens`."""
        return max([held_blocks(spec, num_tokens, dcp) for spec in self.specs])

    def prefilling(self, num_tokens: int, context: int, settings: Settings, dcp: int) -> int:
        """Most blocks held by a request of `num_tokens` until its prompt is prefilled, in the largest steps."""
        taken = [prefilling_blocks(spec, num_tokens, context, settings, dcp) for spec in self.specs]
        return max(self.allocated_blocks(num_tokens, dcp), *taken)

    def moving(self, num_tokens: int) -> int:
        """Additional blocks that a decoding request holds now and then for a step or two."""
        return max([moving_blocks(spec, num_tokens) for spec in self.specs])

    def growth(self, context: int, dcp: int) -> Fraction:
        """Blocks per token of a request so long that its windows are full."""
        return max([blocks_per_token(spec, context, dcp) for spec in self.specs])

    def shared(self, num_tokens: int, dcp: int) -> int:
        """Whole blocks of a common prefix that requests share: none for windows and states."""
        return num_tokens // (self.first.block_size * dcp) if self.first.kind in ("full", "latent") else 0


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

    def rates(self, spec: ModelSpec, stage: int) -> tuple[int, int]:
        """(bytes per additional token, state bytes per sequence) on a rank of one stage."""
        return rates(spec, self.how, stage)

    def draft_rate(self, draft: ModelSpec) -> int:
        """Bytes per additional token of a draft model."""
        return rates(draft, self.how, 0)[0]

    @property
    def block_size(self) -> int:
        return min(group.first.block_size for group in self.groups if group.first.kind != "ring")

    @property
    def hit_tokens(self) -> int:
        """Unit of prefix cache hits, in tokens: every hit is a multiple of it.

        The least common multiple of the groups' blocks; their greatest common divisor if a state's last block can be
        matched in part, which a window's cannot. A state is not sharded over ranks. Source: vLLM 0.33
        v1/core/kv_cache_utils.py (resolve_kv_cache_block_sizes, partial_hash_hits_enabled).
        """
        firsts = [group.first for group in self.groups if group.first.kind != "ring"]
        sizes = [first.block_size * (1 if first.kind == "state" else self.dcp) for first in firsts]
        divisor = gcd(*sizes)
        is_partial = any(first.kind == "state" and first.block_size > divisor - (self.dcp > 1) for first in firsts)
        if is_partial and all(first.bound is None or first.block_size == divisor for first in firsts):
            return divisor
        return lcm(*sizes)

    def charged(self, context: int, settings: Settings) -> int:
        return sum(group.charged(context, settings, self.dcp) for group in self.groups)

    def allocated_blocks(self, num_tokens: int) -> int:
        return sum(group.allocated_blocks(num_tokens, self.dcp) for group in self.groups)

    def in_flight(self, num_tokens: int, context: int, settings: Settings) -> int:
        """Transient blocks in addition to those held by decoding users of `num_tokens`.

        Those of one request in prefill, and of another for the step in which its state moves on.
        """
        more = self.prefilling(num_tokens, context, settings) - self.allocated_blocks(num_tokens)
        return more + sum(group.moving(num_tokens) for group in self.groups)

    def prefilling(self, num_tokens: int, context: int, settings: Settings) -> int:
        return sum(group.prefilling(num_tokens, context, settings, self.dcp) for group in self.groups)

    def shared(self, num_tokens: int) -> int:
        return sum(group.shared(num_tokens, self.dcp) for group in self.groups)

    def growth(self, context: int) -> Fraction:
        """Blocks per token of a request so long that its windows are full."""
        return sum((group.growth(context, self.dcp) for group in self.groups), Fraction())

    def constant_blocks(self, context: int, settings: Settings) -> tuple[int, int, int]:
        """Blocks of a request that do not grow with it: (charged for states, rings and an encoder's tokens; the most
        charged for windows and chunks; the most of both that a decoding request holds).
        """
        fixed = windows = decoding = 0
        for group in self.groups:
            if group.growth(context, self.dcp):
                continue
            charged = group.charged(context, settings, self.dcp)
            decoding += group.allocated_blocks(context, self.dcp)
            if group.first.bound is None:
                fixed += charged
            else:
                windows += charged
        return fixed, windows, decoding


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a pool once its size is known.

    stage              the pipeline stage with the least room; bytes_per_block is its own
    tokens             "GPU KV cache size" as the server logs it
    max_concurrency    the server's "Maximum concurrency", a float
    blocks_per_request blocks charged to a request of the full context
    fits               the server starts; if not, `deficit` bytes per rank are missing
    slots              slots for recurrent states beside the blocks, of which a request takes slots_per_request; else 0
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
    slots: int = 0
    slots_per_request: int = 0


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
    """(blocks that every stage can hold, the stage with the least room)."""
    if len(available) == 1:
        return max(0, available[0]) // layout.stage_bytes[0], 0
    costs = zip(available, layout.stage_bytes, strict=True)
    return min([(max(0, room) // cost, i) for i, (room, cost) in enumerate(costs) if cost])


def prefix_notes(num_tokens: int, settings: Settings, pool: Pool, lookahead: int = 0) -> list[str]:
    """Say how much of a prefix common to all requests the cache can find, if not all of it; empty if there is none.

    lookahead  tokens after a block that its hash covers too, because a drafter's KV depends on them
    """
    if not num_tokens:
        return []
    prefix = f"prefix of {num_tokens:,} token{'' if num_tokens == 1 else 's'}"
    if not settings.prefix_caching:
        return [f"the {prefix} is computed again for every request: prefix caching is off"]
    unit = pool.hit_tokens
    if num_tokens < unit:
        return [f"the {prefix} is shorter than the {unit:,}-token block, so it is never found in the cache"]
    return hit_notes(f"the {prefix}", num_tokens, num_tokens - lookahead, unit)


def prompt_notes(num_tokens: int | None, settings: Settings, pool: Pool, lookahead: int = 0) -> list[str]:
    """Say how much of a repeated prompt the cache can find: its last token is always computed.

    Source: vLLM 0.33 v1/core/kv_cache_manager.py (get_computed_blocks); sglang 0.5.23 managers/schedule_batch.py
    (_compute_max_prefix_len).
    """
    if num_tokens is None or not settings.prefix_caching:
        return []
    what = f"a repeated prompt of {num_tokens:,} tokens"
    return hit_notes(what, num_tokens, num_tokens - max(1, lookahead), pool.hit_tokens)


def cache_notes(load: "Load", settings: Settings, pool: Pool, lookahead: int = 0) -> list[str]:
    """Say how much of a shared prefix and of a repeated prompt the cache can find, as far as they are stated."""
    return [
        *prefix_notes(load.shared_prefix, settings, pool, lookahead),
        *prompt_notes(load.prompt_tokens, settings, pool, lookahead),
    ]


def hit_notes(what: str, num_tokens: int, matched: int, unit: int) -> list[str]:
    match = matched // unit * unit
    if match == num_tokens:
        return []
    rate = f"{floor(1000 * match / num_tokens) / 10:.1f}%"  # never rounded up to more than is found
    return [f"at most {rate} of {what} is found in the prefix cache ({match:,} tokens: blocks of {unit:,})"]


def num_ranks(args: EngineArgs) -> int:
    return args.tensor_parallel_size * args.pipeline_parallel_size


def offloaded_bytes(args: EngineArgs, release: Version, pool: Pool) -> tuple[int, int]:
    """(number of ranks whose copies of a block are kept, total bytes of those copies)."""
    once = release.has("offloaded_region") and is_replicated(pool, args)
    copies = 1 if once else num_ranks(args)
    return copies, copies * pool.stage_bytes[0]


def chunk_bytes(num_bytes: int, release: Version) -> int:
    """Host bytes of an offloaded chunk: whole memory pages in the region that ranks share."""
    return cdiv(num_bytes, MEMORY_PAGE) * MEMORY_PAGE if release.has("offloaded_region") else num_bytes


def is_replicated(pool: Pool, args: EngineArgs) -> bool:
    """True if every rank holds the same bytes of each block (vLLM 0.33 offloading/config.py, replicated_layout)."""
    alone = args.pipeline_parallel_size == 1 and args.decode_context_parallel_size == 1
    latent = all(spec.kind == "latent" for group in pool.groups for spec in group.specs)
    return args.tensor_parallel_size > 1 and alone and latent
