"""SGLang's hierarchical cache: host memory that finished KV is copied to, a pool for each of the GPU's.

Source: sglang 0.5.23 srt/mem_cache/pool_host/base.py (HostKVCache), hybrid_cache/hybrid_pool_assembler.py
(_split_hicache_size), arg_groups/hicache_hook.py and kv_cache_hook.py, re-derived.
"""

from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.releases import Version
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.pool import SglangPool

FLAG: Final = "--enable-hierarchical-cache"
RATIO: Final = 2.0  # hicache_ratio where neither it nor a size is given
GB: Final = 1e9  # of --hicache-size
SOURCE: Final = "sglang 0.5.23 srt/mem_cache/pool_host/base.py"


@dataclass(frozen=True, slots=True)
class HostPool:
    """Host memory of a rank beside one of its pools."""

    name: str
    tokens: int
    size: int


def check(spec: ModelSpec, args: EngineArgs, *, drafts: bool) -> None:
    """Refuse what SGLang refuses beside it, and host pools that are not modeled."""
    if not args.enable_hierarchical_cache:
        return
    if not sglang_models.caches_prefixes(args):
        raise UsageError(
            FLAG, "enable-hierarchical-cache and disable-radix-cache are mutually exclusive", "leave one out"
        )
    lacks = {"recurrent states": spec.has_states, "its sparse index": spec.is_sparse_mla, "drafts": drafts}
    for what, has in lacks.items():
        if has:
            raise UnsupportedModelError(spec.name, f"the host's copies of {what} are not modeled", f"leave {FLAG} out")


def host_pools(layout: SglangPool, args: EngineArgs, release: Version, pages: int) -> list[HostPool]:
    """The host's pools of one rank of the stage that has most of each: all stages agree on the fewest tokens."""
    page = layout.block_size
    sides = [("full", pages * page, max(layout.full))]
    if max(layout.windows):
        sides.append(("windows", layout.tokens_of_windows(pages), max(layout.windows)))
    sides = [side for side in sides if side[2]]
    on_gpu = [(tokens + page) * cell for _, tokens, cell in sides]
    pools = []
    for (name, tokens, cell), own in zip(sides, on_gpu, strict=True):
        if args.hicache_size:
            share = args.hicache_size * own / sum(on_gpu) if len(sides) > 1 else args.hicache_size
            target = int(share * GB // cell)
        else:
            target = int(tokens * (args.hicache_ratio or RATIO))
        more = 1 if release.has("padded_host_pools") else 0  # a page that pads it
        pool_tokens = (target // page + more) * page
        pools.append(HostPool(name, pool_tokens, pool_tokens * cell))
    return pools


def notes(args: EngineArgs) -> list[str]:
    """What the sizes rest on."""
    if not args.enable_hierarchical_cache or args.hicache_size or args.hicache_ratio:
        return []
    return [
        f"{FLAG}: the host's pools are {RATIO:g} x the GPU's at most: SGLang makes them smaller where less is free "
        "of 80 % of the host's memory, which is not modeled; --hicache-ratio or --hicache-size says what it takes"
    ]
