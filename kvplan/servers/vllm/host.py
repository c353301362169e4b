"""vLLM's use of host memory, apart from its processes themselves."""

from collections.abc import Iterator
from typing import Final

from kvplan.core.units import GIB, MIB, format_gib
from kvplan.models.spec import CrossAttention
from kvplan.servers.plans.plan import HostRow, Plan
from kvplan.servers.vllm import features, rules
from kvplan.sizing.allocator import pinned

PROCESSOR_CACHE: Final = 4 * GIB  # default of --mm-processor-cache-gb
SWAP_SPACE: Final = 4 * GIB  # default of the first engine's --swap-space
COMMAND_CHUNK, RESPONSE_CHUNK, GROUP_CHUNK = 16 * MIB, 24 * MIB, 4 * MIB
CHUNKS, GROUP_CHUNKS = 10, 6
EXECUTOR: Final = "vLLM 0.33 v1/executor/multiproc_executor.py, distributed/device_communicators/shm_broadcast.py"


def transfer_buffers(plan: Plan) -> Iterator[HostRow]:
    """A copy of the whole pool in each rank, if NIXL sends it from the host (kv_buffer_device)."""
    from kvplan.servers.vllm import connectors  # only with a connector

    connector = connectors.read(plan.request.args, plan.request.release)
    for part in connector.parts if connector is not None else ():
        if part.name.startswith("Nixl") and part.buffer_device == "cpu":
            size = plan.capacity.num_blocks * plan.capacity.bytes_per_block
            yield HostRow(
                "kv_transfer", size, "rank", f"{part.name} with kv_buffer_device cpu: a copy of the KV cache",
                "vLLM 0.33 distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py", "",
            )  # fmt: skip


def processor_cache(plan: Plan) -> Iterator[HostRow]:
    """Processed inputs of an encoder. One copy: with one API server the engine holds them and the API server their
    sizes; with data-parallel ranks each API server holds them, one per rank by default, and the engines none.
    """
    args, spec, release = plan.request.args, plan.request.spec, plan.request.release
    size = PROCESSOR_CACHE if args.mm_processor_cache_gb is None else args.mm_processor_cache_gb
    crosses = any(isinstance(cache, CrossAttention) for layer in spec.layers for cache in layer)
    if not size or crosses or not release.has("processor_cache") or not rules.takes_items(spec, args, release):
        return
    yield HostRow(
        "processor_cache", size, "replica",
        f"processed images, videos and sounds, at most --mm-processor-cache-gb {size / GIB:.9g}; with more API servers "
        "than data-parallel ranks, each holds as much",
        "vLLM 0.33 multimodal/cache/factories.py, lru.py and shm.py", "",
        in_shm=args.mm_processor_cache_type == "shm" and args.data_parallel_size == 1,
    )  # fmt: skip


def rows(plan: Plan) -> Iterator[HostRow]:
    args, capacity = plan.request.args, plan.capacity
    ranks = args.world_size
    if plan.settings.first_engine:
        from kvplan.servers.vllm.tiers import tensor_pages  # only with this engine

        blocks = SWAP_SPACE // capacity.bytes_per_block
        yield HostRow(
            "swap_space", sum(pinned(blocks * page) for page in tensor_pages(plan.pool, capacity.bytes_per_block)),
            "rank",
            f"--swap-space {format_gib(SWAP_SPACE)} by default, in whole blocks: {blocks:,}, each layer's pinned in a "
            "power of two bytes",
            "vLLM 0.6 worker/worker.py (determine_num_available_blocks), worker/cache_engine.py (_allocate_kv_cache)",
            'the "# CPU blocks" of posted logs of Llama-3-8B, Llama-3.1-70B and Qwen2.5 0.5B to 7B: equal',
        )  # fmt: skip
    for feature in features.of(plan.request):
        yield from feature.host(plan)
    if args.kv_transfer_config is not None:
        yield from transfer_buffers(plan)
    if args.max_loras:
        from kvplan.servers.vllm.adapters import adapter_bytes  # only with adapters

        count, adapter = args.max_cpu_loras or args.max_loras, adapter_bytes(plan.request.spec, plan.settings, args)
        yield HostRow(
            "adapters", count * adapter, "rank",
            f"at most {count:,} adapters x {adapter:,} B at rank {args.max_lora_rank}, whole in every process",
            "vLLM 0.33 lora/model_manager.py", "",
        )  # fmt: skip
    yield from processor_cache(plan)
    if ranks > 1 and not plan.settings.first_engine:
        commands = (COMMAND_CHUNK + 1 + ranks) * CHUNKS
        group = (GROUP_CHUNK + args.tensor_parallel_size) * GROUP_CHUNKS if args.tensor_parallel_size > 1 else 0
        responses = ranks * (RESPONSE_CHUNK + 2) * CHUNKS
        yield HostRow(
            "shared_memory", commands + responses + args.pipeline_parallel_size * group, "replica",
            f"queues between processes in /dev/shm: {CHUNKS} x {COMMAND_CHUNK // MIB} MiB of commands, {CHUNKS} x "
            f"{RESPONSE_CHUNK // MIB} MiB of answers of each rank, {GROUP_CHUNKS} x {GROUP_CHUNK // MIB} MiB of each "
            "tensor-parallel group; NCCL's own come on top",
            EXECUTOR, "", in_shm=True,
        )  # fmt: skip
