"""llama.cpp's part of --explain: its cells, its places, what --fit leaves."""

from collections.abc import Iterator

from kvplan.core.units import format_gib, plural
from kvplan.servers.base import Explanation
from kvplan.servers.plans.plan import Plan, SlotCache


def explain(plan: Plan) -> Explanation:
    cache = plan.slots
    assert cache is not None
    return Explanation(
        "cells of one token: the cache is allocated whole at the start",
        tuple(_pools(plan, cache)),
        tuple(_budget(plan, cache)),
        (f"{plural(cache.slots, 'slot')} (--parallel); a request of {cache.cells:,} tokens fills its cache",),
    )


def _pools(plan: Plan, cache: SlotCache) -> Iterator[str]:
    whose = "shared by all slots (--kv-unified)" if cache.caches == 1 else "one for each slot"
    yield f"{plural(cache.caches, 'cache')} of {cache.cells:,} cells, {whose}; windows and states come on top"
    yield f"{cache.gpu_layers} of {cache.num_layers} layers on GPUs (--gpu-layers), the output one of them"


def _budget(plan: Plan, cache: SlotCache) -> Iterator[str]:
    context = plan.estimates["context"]
    yield f"total {plan.memory.total:,} B ({format_gib(plan.memory.total)}): {plan.request.gpu.total_memory_source}"
    yield f"- context {context.likely:,} B = {context.formula} [{context.kind}: {context.source}]"
    for place in cache.places:
        yield (
            f"{place.name}: weights {place.weights:,} B + caches {place.context:,} B + compute {place.compute:,} B = "
            f"{place.total:,} B"
        )
    yield f"compute: {plan.estimates['buffers'].formula}"
