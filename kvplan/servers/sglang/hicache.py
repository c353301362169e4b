"""SGLang's hierarchical cache: host memory to which finished KV is copied, with a pool for each GPU pool.

Source: sglang 0.5.23 srt/mem_cache/pool_host/base.py (HostKVCache), hybrid_cache/hybrid_pool_assembler.py
(_split_hicache_size), arg_groups/hicache_hook.py and kv_cache_hook.py, re-derived.
"""

from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.words.arguments import EngineArgs

FLAG: Final = "--enable-hierarchical-cache"
RATIO: Final = 2.0  # hicache_ratio if neither it nor a size is given
GB: Final = 1e9  # unit of --hicache-size
SOURCE: Final = "sglang 0.5.23 srt/mem_cache/pool_host/base.py"


@dataclass(frozen=True, slots=True)
class HostPool:
    """Host memory of a rank for one of its GPU pools."""

    name: str
    tokens: int
    size: int


def check(spec: ModelSpec, args: EngineArgs, *, drafts: bool) -> None:
    """Reject what SGLang rejects in combination with it, and host pools that are not modeled."""
    if not args.enable_hierarchical_cache:
        return
    if not sglang_models.caches_prefixes(args):
        raise UsageError(
            FLAG, "enable-hierarchical-cache and disable-radix-cache are mutually exclusive", "use only one"
        )
    lacks = {"recurrent states": spec.has_states, "its sparse index": spec.is_sparse_mla, "drafts": drafts}
    for what, has in lacks.items():
        if has:
            raise UnsupportedModelError(spec.name, f"the host's copies of {what} are not modeled", f"remove {FLAG}")


def host_pools(layout: SglangPool, args: EngineArgs, release: Version, pages: int) -> list[HostPool]:
    """Host pools of one rank on the stage with the most of each: all stages use the smallest token count."""
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
        more = 1 if release.has("padded_host_pools") else 0  # padding page
        pool_tokens = (target // page + more) * page
        pools.append(HostPool(name, pool_tokens, round(pool_tokens * cell)))
    return pools


def notes(args: EngineArgs) -> list[str]:
    """Notes on the basis of the sizes."""
    if not args.enable_hierarchical_cache or args.hicache_size or args.hicache_ratio:
        return []
    return [
        f"{FLAG}: the host's pools are {RATIO:g} x the GPU's at most: SGLang makes them smaller where less is free "
        "of 80% of the host's memory, which is not modeled; --hicache-ratio or --hicache-size says what it takes"
    ]
