"""vLLM's KV pool: paged layers -> groups -> bytes per block, blocks, tokens, concurrency.

Source: vLLM 0.33 v1/core/kv_cache_planning.py and kv_cache_utils.py, re-derived;
equal to the server's own capacity code in every compared case (tests/oracles.py).
"""

from dataclasses import replace
from functools import lru_cache
from math import lcm

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.pages import KVSpec, Paging
from kvplan.servers.pool import Capacity, KVGroup, Pool, blocks_in, largest_context
from kvplan.servers.settings import Settings
from kvplan.servers.vllm.pages import draft_specs, layer_specs
from kvplan.sizing.layout import cdiv
from kvplan.sizing.weights import stage_layers

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
    from kvplan.servers.vllm.deepseek_v4 import V4_BLOCK, v4_specs  # not needed for other models

    return v4_specs(spec, how.block_size or V4_BLOCK)


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
    return [args.num_gpu_blocks_override * each for each in layout.stage_bytes]


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
