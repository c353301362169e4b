"""vLLM's KV pool: paged layers -> groups -> bytes per block, blocks, tokens, concurrency.

Source: vLLM 0.33 v1/core/kv_cache_planning.py and kv_cache_utils.py, re-derived;
equal to the server's own capacity code on every case compared (tests/oracles.py).
"""

from dataclasses import replace
from functools import lru_cache
from math import gcd

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.settings import Settings
from kvplan.servers.vllm.deepseek_v4 import is_v4, v4_specs
from kvplan.servers.vllm.packed import block_bytes, packed_groups
from kvplan.servers.vllm.pages import (
    KVSpec,
    Paging,
    charged_blocks,
    draft_specs,
    held_blocks,
    layer_specs,
    moving_blocks,
    prefilling_blocks,
)
from kvplan.sizing.layout import cdiv
from kvplan.sizing.weights import stage_layers


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

    def allocated_blocks(self, num_tokens: int, dcp: int) -> int:
        """Blocks a decoding request of `num_tokens` really holds."""
        return max([held_blocks(spec, num_tokens, dcp) for spec in self.specs])

    def prefilling(self, num_tokens: int, context: int, settings: Settings, dcp: int) -> int:
        """Blocks a request of `num_tokens` takes at most until its prompt is computed, in the largest steps."""
        taken = [prefilling_blocks(spec, num_tokens, context, settings, dcp) for spec in self.specs]
        return max(self.allocated_blocks(num_tokens, dcp), *taken)

    def moving(self, num_tokens: int) -> int:
        """Blocks a decoding request holds beyond that for a step or two now and then."""
        return max([moving_blocks(spec, num_tokens) for spec in self.specs])

    def shared(self, num_tokens: int, dcp: int) -> int:
        """Whole blocks of a common prefix that requests hold once together: none of windows and states."""
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

    @property
    def block_size(self) -> int:
        return min(group.first.block_size for group in self.groups if group.first.kind != "ring")

    @property
    def hit_tokens(self) -> int:
        """Fewest tokens that a hit in the prefix cache has; every hit is a multiple of it.

        vLLM 0.33 v1/core/kv_cache_utils.py (resolve_kv_cache_block_sizes): the greatest common divisor of the groups'
        blocks, or where it finds no parts of blocks their least common multiple. A state is not divided over ranks.
        """
        firsts = [group.first for group in self.groups if group.first.kind != "ring"]
        return gcd(*(first.block_size * (1 if first.kind == "state" else self.dcp) for first in firsts))

    def charged(self, context: int, settings: Settings) -> int:
        return sum(group.charged(context, settings, self.dcp) for group in self.groups)

    def allocated_blocks(self, num_tokens: int) -> int:
        return sum(group.allocated_blocks(num_tokens, self.dcp) for group in self.groups)

    def in_flight(self, num_tokens: int, context: int, settings: Settings) -> int:
        """Blocks beside those that users of `num_tokens` hold decoding.

        What one takes more while its prompt is computed, and another for the step in which its state moves on.
        """
        more = self.prefilling(num_tokens, context, settings) - self.allocated_blocks(num_tokens)
        return more + sum(group.moving(num_tokens) for group in self.groups)

    def prefilling(self, num_tokens: int, context: int, settings: Settings) -> int:
        return sum(group.prefilling(num_tokens, context, settings, self.dcp) for group in self.groups)

    def shared(self, num_tokens: int) -> int:
        return sum(group.shared(num_tokens, self.dcp) for group in self.groups)


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
            raise UnsupportedModelError(name, "its latent pages do not fit the others", "not modeled")
        else:
            unified.append((index, replace(spec, page=largest)))
    return unified


def group_layers(layers: list[tuple[int, KVSpec]], name: str) -> list[list[tuple[int, KVSpec]]]:
    """vLLM's grouping: one group when all layers are of one type, else buckets cut to about equal size."""
    if is_uniform([spec for _, spec in layers]):
        return [layers]
    buckets: dict[KVSpec, list[tuple[int, KVSpec]]] = {}
    for index, spec in unify_pages(layers, name):
        buckets.setdefault(spec, []).append((index, spec))
    low, high = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = high if high < 1.5 * low else low
    cut: list[list[tuple[int, KVSpec]]] = []
    for bucket in buckets.values():
        count = cdiv(len(bucket), size)
        cut += [bucket[i::count] for i in range(count)]
    return cut


@lru_cache(maxsize=4096)
def pool(spec: ModelSpec, how: Paging, draft: ModelSpec | None = None) -> Pool:
    """The pool of a model: its groups, and what one block costs on each pipeline stage's ranks.

    draft  a speculative model whose layers join the groups (one pipeline stage only)
    """
    layers = v4_specs(spec) if is_v4(spec) else layer_specs(spec, how)
    if draft is not None:
        if is_v4(spec) != is_v4(draft):
            raise UnsupportedModelError(spec.name, f"{draft.name} beside DeepSeek-V4's packed pool is not modeled")
        own = v4_specs(draft) if is_v4(spec) else draft_specs(spec, draft, how)
        layers += [(spec.num_layers + index, cache) for index, cache in own]
    if not layers:
        raise UnsupportedModelError(spec.name, "no layer keeps a cache", "there is no KV pool to size")
    packed = is_v4(spec) or spec.is_pooled
    cut = packed_groups(layers) if packed else group_layers(layers, spec.name)
    groups = tuple(KVGroup(tuple(part), tuple(dict.fromkeys(paged for _, paged in part))) for part in cut)
    stages: list[range] = stage_layers(spec.num_layers, how.pp, partition=how.partition)
    if draft is not None:
        stages = [range(spec.num_layers + draft.num_layers)]
    return Pool(groups, tuple(block_bytes(cut, stage) for stage in stages), how)


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


def overridden(layout: Pool, args: EngineArgs, available: list[int]) -> list[int]:
    """The bytes of each stage that --num-gpu-blocks-override puts in place of the memory that was measured."""
    if args.num_gpu_blocks_override is None:
        return available
    return [args.num_gpu_blocks_override * each for each in layout.stage_bytes]


def capacity(layout: Pool, settings: Settings, args: EngineArgs, available: list[int]) -> Capacity:
    """Blocks, tokens and concurrency for `available` KV bytes per rank, one entry per pipeline stage.

    The smallest stage decides. Source: vLLM 0.33 v1/core/kv_cache_planning.py (get_kv_cache_configs) and
    kv_cache_utils.py (get_max_concurrency_for_kv_cache_config); 0.8 to 0.20 took an override after the check.
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
