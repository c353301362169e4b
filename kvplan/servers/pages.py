"""Paging of a layer's cache, for any server: block size, bytes of a page, blocks of a request.

Source: vLLM 0.33 v1/kv_cache_interface.py, re-derived; equal to the server's own capacity code in every compared case
(tests/oracles.py). SGLang's pages are the same kinds, in pools of its own.
"""

from fractions import Fraction
from functools import lru_cache
from typing import Literal, assert_never

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
from kvplan.servers.arguments import Settings
from kvplan.sizing.layout import cdiv, state_bytes, token_bytes
from kvplan.sizing.weights import stage_layers

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

    def state_bytes(self, state: RecurrentState) -> int:
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
    cache: LayerCache, block: int, dtype: str, tp: int, *, flat: bool, encoder: int, model_type: str
) -> KVSpec:
    """Spec of a cache that grows with the tokens; `dtype` is this layer's.

    flat  windows and chunks are kept in full (the hybrid manager is off and the model mixes kinds)
    """
    page = block * token_bytes(cache, dtype, tp)
    match cache:
        case FullAttention(heads, k, v):
            return KVSpec("full", block, page, shape=(heads, k, v, dtype))
        case SlidingWindow(heads, k, v, window):
            if flat:
                return KVSpec("full", block, page, shape=(heads, k, v, dtype))
            # Cohere 2 attends to the current token in addition to its window.
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
            if isinstance(cache, RecurrentState):
                states += how.state_bytes(cache)
            else:
                per_token += token_bytes(cache, dtypes[i], how.tp)
    return per_token, states
