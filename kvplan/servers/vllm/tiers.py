"""Host memory in which vLLM's KV connectors keep blocks.

Source: vLLM 0.33 v1/kv_offload, v1/simple_kv_offload, distributed/kv_transfer/kv_connector/v1/offloading/config.py,
re-derived; equal to the server's own classes in every compared case (tests/servers/vllm/test_connectors.py).
"""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, zip_longest
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import GIB, plural
from kvplan.servers.plans.plan import HostRow, Plan, Request
from kvplan.servers.plans.pool import Pool, chunk_bytes, num_ranks, offloaded_bytes
from kvplan.servers.releases import Version
from kvplan.servers.vllm import connectors
from kvplan.servers.vllm.connectors import LMCACHE, NATIVE, SIMPLE, Connector, read
from kvplan.servers.vllm.features import Feature
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.allocator import pinned
from kvplan.sizing.layout import cdiv

SIMPLE_BYTES: Final = 8 * GIB  # default of SimpleCPUOffloadConnector
LMCACHE_BYTES: Final = 5 * GIB  # default of LMCache's max_local_cpu_size
LMCACHE_CHUNK: Final = 256  # tokens that it stores together


@dataclass(frozen=True, slots=True)
class Tier:
    """Host memory in which a connector keeps blocks.

    name    the connector's
    size    bytes that a replica takes, all its ranks together
    tokens  capacity in tokens, for requests of the full context
    how     how the size is determined
    in_shm  it lies in /dev/shm
    """

    name: str
    size: int
    tokens: int
    how: str
    in_shm: bool = False


def of_plan(plan: Plan) -> Iterator[Tier]:
    settings, capacity = plan.settings, plan.capacity
    context, release = capacity.max_model_len, plan.request.release
    yield from tiers(plan.request.args, release, plan.pool, context, settings)


def check_pool(request: Request, pool: Pool, settings: Settings) -> None:
    """Reject sizes that vLLM rejects."""
    deque(tiers(request.args, request.release, pool, 1, settings), 0)


SOURCES: Final = {
    NATIVE: "vLLM 0.33 v1/kv_offload/cpu/spec.py",
    SIMPLE: "vLLM 0.33 v1/simple_kv_offload/manager.py",
    LMCACHE: "LMCache's documentation (max_local_cpu_size); LMCache/LMCache#2901",
}
COMPARED: Final = "vLLM 0.33's own classes (tests/servers/vllm/test_connectors.py): equal"


def host_rows(plan: Plan) -> Iterator[HostRow]:
    for tier in of_plan(plan):
        known = COMPARED if tier.name in (NATIVE, SIMPLE) and plan.request.release.is_compared else ""
        how, source = f"{tier.name}: {tier.how}", SOURCES[tier.name]
        yield HostRow("kv_offloading", tier.size, "replica", how, source, known, tier.tokens, tier.in_shm)


FEATURE: Final = Feature(
    check=lambda request: connectors.check(request.spec, request.args, request.release),
    check_pool=check_pool,
    notes=lambda request, stage: connectors.notes(request.spec, request.args, request.release),
    host=host_rows,
)


def tiers(args: EngineArgs, release: Version, pool: Pool, context: int, settings: Settings) -> Iterator[Tier]:
    """Host memory of each connector whose own config gives a size, for requests of `context` tokens at most.

    Raise UsageError for a size that vLLM rejects.
    """
    connector = read(args, release)
    for part in connector.parts if connector is not None else ():
        if part.name == NATIVE:
            yield _native(part, args, release, pool, context, settings)
        elif part.name == SIMPLE and settings.prefix_caching:
            yield _simple(part, args, pool, context)
        elif part.name == LMCACHE:
            yield _lmcache(part, args, pool)


def _native(part: Connector, args: EngineArgs, release: Version, pool: Pool, context: int, settings: Settings) -> Tier:
    """Follow vLLM 0.33 v1/kv_offload/cpu/spec.py: chunks of several blocks of all ranks, rounded up to memory pages; a
    latent that every rank holds is stored once. Before that region, torch pinned each tensor of each rank.
    """
    kinds = {group.first.kind for group in pool.groups}
    if "state" in kinds and len(kinds) > 1 and not settings.prefix_caching:
        raise UsageError(
            part.option,
            "tokens_per_block is not divisible by tokens_per_hash where states are not cached",
            "Hybrid models need --enable-prefix-caching to align block sizes",
        )
    blocks = chunk_blocks(part, [tokens for tokens, _ in reach(pool)])
    copies, bare = offloaded_bytes(args, release, pool)
    chunk = chunk_bytes(blocks * bare, release)
    stated = part.count("cpu_bytes_to_use") or 0
    chunks = stated // chunk
    of_ranks = f"of {plural(copies, 'rank')}" if copies == num_ranks(args) else "kept once"
    how = f"{stated:,} B requested, in chunks of {plural(blocks, 'block')} {of_ranks}: {chunks:,} x {chunk:,} B"
    tokens, in_shm = chunks * context // chunks_each(pool, context, blocks), release.has("offloaded_region")
    if in_shm:
        return Tier(part.name, chunks * chunk, tokens, f"{how}, in /dev/shm", in_shm)
    pages = [
        pinned(chunks * blocks * page)
        for size in pool.stage_bytes
        for page in ([size] if _is_joint(pool, settings) else tensor_pages(pool, size))
    ]
    how += f", pinned in powers of two bytes: {len(pages):,} tensors in each tensor-parallel rank"
    return Tier(part.name, args.tensor_parallel_size * sum(pages), tokens, how)


def _is_joint(pool: Pool, settings: Settings) -> bool:
    """True if layers that are all alike share one tensor, which model runner V1 makes for this connector.

    Source: vLLM 0.12 to 0.26 v1/worker/kv_connector_model_runner_mixin.py (use_uniform_kv_cache).
    """
    specs = {spec for group in pool.groups for spec in group.specs}
    return not settings.runner_v2 and len(pool.groups) == len(specs) == 1 and "state" not in {s.kind for s in specs}


def tensor_pages(pool: Pool, num_bytes: int) -> list[int]:
    """Page of a block in each tensor of a rank whose blocks take `num_bytes`: one tensor for a layer of each group, or
    one for all where the layers' pages lie side by side.
    """
    by_layer = zip_longest(*([spec.page for _, spec in group.layers] for group in pool.groups), fillvalue=0)
    pages = list(map(max, by_layer))
    sums = list(accumulate(pages))
    return pages[: sums.index(num_bytes) + 1] if num_bytes in sums else [num_bytes]


def _simple(part: Connector, args: EngineArgs, pool: Pool, context: int) -> Tier:
    """Follow vLLM 0.33 v1/simple_kv_offload/manager.py (_derive_cpu_config)."""
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    total = part.count("cpu_bytes_to_use")
    of_rank = part.count("cpu_bytes_to_use_per_rank")
    room = of_rank if of_rank is not None else (SIMPLE_BYTES if total is None else total) // ranks
    limit = room // pool.stage_bytes[0]
    stated = part.count("num_cpu_blocks")
    if stated is not None and not 0 < stated <= limit:
        problem = f"num_cpu_blocks={stated} must be between 1 and local offload capacity {limit}"
        raise UsageError(part.option, problem, "use one of these")
    blocks = max(1, limit) if stated is None else stated
    size = blocks * sum(pool.stage_bytes) * args.tensor_parallel_size
    how = f"{blocks:,} blocks on each of {plural(ranks, 'rank')}, of {room:,} B each, pinned"
    return Tier(part.name, size, blocks * context // chunks_each(pool, context, 1), how)


def _lmcache(part: Connector, args: EngineArgs, pool: Pool) -> Tier:
    """LMCache's buffer, one in every rank's process (LMCache/LMCache#2901), made of whole chunks."""
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    own = LMCACHE_BYTES if args.lmcache_max_local_cpu_size is None else args.lmcache_max_local_cpu_size
    stated = part.extra.get("lmcache.max_local_cpu_size", own / GIB)
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated < 2**20:
        problem = f"lmcache.max_local_cpu_size is not a number of GiB ({printable(str(stated), 40)!r})"
        raise UsageError(part.option, problem, "write one")
    size = int(stated * GIB)
    chunk = sum(cdiv(LMCACHE_CHUNK, group.first.block_size) for group in pool.groups) * max(pool.stage_bytes)
    how = f"{stated:g} GiB in each of {plural(ranks, 'rank')}, pinned; chunks of {LMCACHE_CHUNK} tokens"
    return Tier(part.name, size * ranks, size // chunk * LMCACHE_CHUNK, how)


def reach(pool: Pool) -> Iterator[tuple[int, int | None]]:
    """For each group with prefix caching: (tokens of a block on all ranks, how far back attention reaches)."""
    for group in pool.groups:
        first = group.first
        if first.kind in ("ring", "cross"):
            continue
        sharded = 1 if first.kind == "state" else pool.dcp
        yield first.block_size * sharded, 1 if first.kind == "state" else first.bound


def chunks_each(pool: Pool, context: int, blocks: int) -> int:
    """Chunks in a tier for a request of the full context (cpu/common.py, _kv_cache_size_tokens)."""
    count = 0
    for tokens, bound in reach(pool):
        whole = cdiv(context, tokens * blocks)
        count += whole if bound is None else min(whole, cdiv(bound, tokens * blocks))
    return max(1, count)


def chunk_blocks(connector: Connector, block_sizes: list[int]) -> int:
    """GPU blocks that are offloaded together. Raise UsageError for a size that vLLM rejects."""
    blocks = connector.count("blocks_per_chunk")
    tokens = connector.count("block_size")
    if tokens is None:
        return blocks or 1
    if len(set(block_sizes)) > 1:
        raise UsageError(
            connector.option, "block_size is given and the groups of the KV cache have several", "give blocks_per_chunk"
        )
    if not tokens or tokens % block_sizes[0]:
        raise UsageError(
            connector.option,
            f"'block_size'={tokens} in kv_connector_extra_config must be a multiple of the GPU KV cache block size "
            f"({block_sizes[0]} tokens)",
            f"use {cdiv(max(1, tokens), block_sizes[0]) * block_sizes[0]}",
        )
    return tokens // block_sizes[0]
