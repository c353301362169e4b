"""SGLang's use of host memory, apart from its processes themselves."""

from collections.abc import Iterator

from kvplan.servers.plans.plan import HostRow, Plan
from kvplan.servers.sglang import adapters, hicache, offload
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.vllm.offload import pinned_row

SLEEP = "sglang 0.5.23 srt/model_executor/model_runner.py (memory_saver_adapter, enable_cpu_backup)"
COMPARED = "sglang 0.5.23's own host pool (tests/servers/sglang/test_hicache.py): equal"


def rows(plan: Plan) -> Iterator[HostRow]:
    args, release = plan.request.args, plan.request.release
    if args.max_loras:
        count = args.max_cpu_loras or args.max_loras
        size = adapters.adapter_bytes(plan.request.spec, plan.settings, args)
        bound = "at most " if args.max_cpu_loras else ""
        open_end = "" if args.max_cpu_loras else ", and as much for each further one (--max-loaded-loras bounds them)"
        how = f"{bound}{count:,} adapters x {size:,} B at rank {args.max_lora_rank}, whole in every process{open_end}"
        yield HostRow("adapters", count * size, "rank", how, "sglang 0.5.23 srt/lora/lora.py", "")
    moved = offload.offloaded(plan.request, plan.stage)
    if moved is not None:
        yield pinned_row(moved, offload.SOURCE, offload.COMPARED)
    shared = plan.request.colocated
    if shared is not None and shared.level == 1 and not shared.keeps:
        how = "the weights while it sleeps, pinned by torch_memory_saver in their own size (enable_weights_cpu_backup)"
        yield HostRow("weights", plan.memory.weights, "rank", how, SLEEP, "")
    if not args.enable_hierarchical_cache or not isinstance(plan.pool, SglangPool):
        return
    ratio = args.hicache_ratio or hicache.RATIO
    size_text = f"--hicache-size {args.hicache_size} GB" if args.hicache_size else f"{ratio:g} x its tokens"
    for index, pool in enumerate(hicache.host_pools(plan.pool, args, release, plan.capacity.num_blocks - 1)):
        how = f"hierarchical cache, {pool.name} pool: {size_text}: {pool.tokens:,} tokens, pinned"
        known = COMPARED if release.is_compared else ""
        yield HostRow("kv_offloading", pool.size, "rank", how, hicache.SOURCE, known, 0 if index else pool.tokens)
