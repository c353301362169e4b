"""SGLang's memory for its pools, the number of requests they hold, and reasons to run out of memory."""

from collections.abc import Iterator
from dataclasses import replace
from math import floor

from kvplan.core.units import MIB, format_apart
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import BUDGET_ROWS, Budget, Estimate, PoolShare, Refusal, Request, Sized, check_load
from kvplan.servers.plans.pool import Capacity, cache_notes, largest_context
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.sglang import adapters, classes, drafts, exchange, hicache, offload, several_nodes, supported
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang.changes import SOURCE
from kvplan.servers.sglang.classes import type_of
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.sglang.spread import check as check_stages
from kvplan.servers.sglang.spread import spread
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.allocator import weights_reserved
from kvplan.sizing.weights import Layout

KEPT_BACK = "part of what SGLang reserves; it measures none"


def loaded_beside(request: Request, settings: Settings, stage: int, resident: int) -> int:
    """Device memory that loading takes in addition to the weights: SGLang measures whole segments."""
    spec, layout = request.spec, own_layout(request, stage)
    known = spec.quantization is None or spec.quantization.known
    if layout is None or not known:
        return overheads.loaded(spec, settings, request.args, layout).total
    return max(0, weights_reserved(spec, layout) - resident)


def layout(request: Request, spec: ModelSpec) -> Layout:
    """Layout of a model's weights: what is replicated and what is left out."""
    args = request.args
    shared = args.attention_ranks if args.enable_dp_attention else 0  # its ranks share a tower, too
    left_out = vllm.left_out(spec, args, request.release)
    if sglang.resolve_dtype(request.spec, request.gpu.sm, args) not in type_of(spec).tables_on_host:
        left_out -= {"tables"}
    whole_towers = args.mm_encoder_tp_mode == "data" and sglang_models.keeps_towers_whole(spec, args)
    return Layout(
        dtype=sglang.resolve_dtype(request.spec, request.gpu.sm, args),
        left_out=left_out,
        tower_tp=1 if whole_towers else shared,
        dense_tp=1 if args.moe_dense_tp_size and spec.experts_per_token else 0,
        whole_shared=exchange.exchanges(args),
        twice_scaled=sglang_models.keeps_scales_twice(spec, request.gpu.sm, request.release),
    )


def budget_of(request: Request, settings: Settings, stage: int) -> Budget:
    """Bytes left for KV on one stage's rank: a fraction of what was free before loading, less what loading takes.

    Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes).
    """

    request = spread(request)
    gpu, args = request.gpu, request.args
    groups = rank_weights(request, stage)
    resident = sum(groups.values())
    loaded = loaded_beside(request, settings, stage, resident - groups.get("draft", 0))
    moved = offload.offloaded(request, stage)
    if moved is not None:
        groups = {name: size - moved.groups.get(name, 0) for name, size in groups.items()}
        loaded += moved.buffers
        resident = sum(groups.values())
    context = request.measured.get("context", overheads.context(gpu, args))
    in_use = overheads.in_use(gpu, request.memory_in_use)
    none = Estimate(0, 0, 0, KEPT_BACK, SOURCE, "exact")
    graphs = sglang.decode_graphs(request.spec, gpu, args, request.release)
    lora = adapters.lora(request.spec, settings, args, graphs)
    estimates = {
        "buffers": Estimate(
            loaded,
            loaded,
            loaded,
            f"{loaded:,} B: rotary tables, and what torch's segments round up",
            SOURCE,
            "formula",
        ),
        **{name: none for name in BUDGET_ROWS if name != "buffers"},
        "lora": lora,
        "context": context,
        "in_use": in_use,
    }

    def share(total: int, taken: int) -> int:
        return floor((total - taken) * settings.gpu_memory_utilization)

    images = sglang.image_reservation(request.spec, gpu, args, request.release)
    budget = share(gpu.total_memory, context.likely + in_use.likely)
    ends = (
        share(gpu.total_memory_low, context.high + in_use.high),
        budget,
        share(gpu.total_memory_high, context.low + in_use.low),
    )
    low, likely, high = (end - resident - loaded - lora.likely - images for end in ends)
    return Budget(max(0, budget), groups, estimates, (low, likely, high))


def draft_notes(request: Request, pool: SglangPool) -> Iterator[str]:
    """Notes on what drafts change besides their weights and the bytes counted for their layers."""
    args, draft = request.args, request.draft
    if not drafts.speculates(args):
        return
    if args.max_num_seqs is None:
        yield f"with speculative decoding SGLang runs at most {drafts.REQUESTS} requests; --max-num-seqs is higher"
    if draft is not None:
        yield from drafts.dp_attention_notes(request.spec, args)
        counted, real = pool.drafted.full + pool.drafted.windows, sglang_pool.draft_bytes(draft, pool.how)
        if note := drafts.draft_note(draft, counted, real):
            yield note


def replica_notes(args: EngineArgs, replicas: int, ranks: int) -> Iterator[str]:
    if args.enable_dp_attention:
        item = args.attention_ranks
        yield (
            f"DP attention: one server with {replicas} data-parallel ranks of {item} GPU{'' if item == 1 else 's'}, "
            "each with a KV pool and requests of its own. Settings, pools and weights equal SGLang's own classes"
        )
    elif replicas > 1:
        yield sglang.replicas_note(replicas, ranks * args.pipeline_parallel_size)
    if args.num_redundant_experts or args.enable_eplb:
        yield "EPLB: its copies are counted in the weights; its own buffers are part of what SGLang reserves, not sized"


def short_pool_notes(pool: SglangPool, settings: Settings, pages: int) -> Iterator[str]:
    """A pool smaller than the context stops no start: source, SGLang 0.5.23 managers/tp_worker.py (max_req_len)."""
    longest = largest_context(pool, settings, settings.max_model_len, pages)
    if 0 < longest < settings.max_model_len:
        yield f"SGLang starts all the same: it serves requests of up to {longest:,} tokens and refuses longer ones"


def decode_notes(pool: SglangPool, capacity: Capacity) -> Iterator[str]:
    """A prompt may hold more blocks than decodes after it, as windows keep a chunk of it."""
    blocks = pool.allocated_blocks(capacity.max_model_len)
    if blocks < capacity.blocks_per_request:
        yield (
            f"a request of {capacity.max_model_len:,} tokens takes {capacity.blocks_per_request:,} blocks while its "
            f"prompt is computed (windows keep a chunk), {blocks:,} while it decodes"
        )


def size(request: Request) -> Sized:
    drafts.check_context(request)
    if not request.started:
        sglang.check_values(request.spec, request.args, request.release)
    settings = sglang.resolve(request.spec, request.gpu, request.args, request.release)
    replicas, ranks = request.args.data_parallel_size, request.args.tensor_parallel_size
    if not request.args.enable_dp_attention:
        # Replicas are separate servers that share nothing: each is planned on its own.
        request = replace(request, args=replace(request.args, data_parallel_size=1))
    if exchange.exchanges(request.args):  # spreads the experts over all ranks
        request = replace(request, args=replace(request.args, enable_expert_parallel=True))
    args, spec, gpu = request.args, request.spec, request.gpu
    supported.check_sized(request, settings)
    adapters.check(spec, args, request.release, gpu.sm)
    offload.check(spec, args, request.release)
    sglang_models.check_dp_attention(spec, args)
    sglang_models.check_towers(spec, args, request.release)
    check_stages(spec, args, request.release)
    hicache.check(spec, args, drafts=drafts.speculates(args))
    check_load(request, settings.max_model_len)
    pool = sglang_pool.pool(spec, settings, args, gpu.sm, request.draft)
    stages = [budget_of(request, settings, stage) for stage in range(args.pipeline_parallel_size)]
    rooms = [[stage.available[end] for stage in stages] for end in range(3)]
    capacity = sglang_pool.capacity(pool, settings, args, rooms[1])
    pages, slots, worst = sglang_pool.pages_in(pool, args, rooms[1])
    limit = sglang_pool.max_requests(pool, settings, args, pages, slots)
    ends = [sglang_pool.pages_in(pool, args, rooms[end]) for end in (0, 2)]
    low, high = (pages for pages, _, _ in ends)
    fewest, largest = (sglang_pool.max_requests(pool, settings, args, *counts[:2]) for counts in ends)
    reserved = int(sglang.reserved_mib(spec, gpu, args, request.release) * MIB)
    taken = sum(stages[worst].estimates[name].likely for name in ("context", "in_use"))
    kept_back = gpu.total_memory - taken - stages[worst].budget
    images = sglang.image_reservation(spec, gpu, args, request.release)
    shares = tuple(
        PoolShare(pool.num_bytes(pages, slots, stage), pool.given_out(pages, slots, stage))
        for stage in range(len(stages))
    )
    usual = sglang.usual_fraction(spec, gpu, args, request.release)
    refusal = supported.refusal(request, settings) or lacks_reserve(
        settings.gpu_memory_utilization,
        kept_back + images + rooms[1][worst] - shares[worst].given_out,
        pool.kept_from_requests(pages, slots, worst)
        + sglang_pool.request_table(settings, limit)
        + exchange.buffers(spec, args),
        usual,
    )
    notes = [
        *sglang.notes(args, settings, kept_back, reserved, usual, images),
        *sglang_pool.pool_notes(pool, spec, args, slots),
        *draft_notes(request, pool),
        *drafts.context_notes(request, settings.max_model_len),
        *hicache.notes(args),
        *exchange.notes(spec, args),
        *offload.notes(request, worst),
        *sglang_models.tower_notes(spec, args),
        *classes.notes(request),
        *adapters.notes(args),
        *replica_notes(args, replicas, ranks),
        *several_nodes.notes(request),
        *short_pool_notes(pool, settings, pages if refusal is None else 0),
        *decode_notes(pool, capacity),
    ]
    prefix = [] if slots else cache_notes(request.load, settings, pool)  # states are found where chunks ended
    return Sized(
        replace(settings, max_num_seqs=max(1, limit)), pool, stages, capacity, (low + 1, high + 1),
        (low / capacity.blocks_per_request, high / capacity.blocks_per_request),
        shares, (*notes, *prefix), refusal=refusal,
        seqs=(fewest, max(1, largest)),
    )  # fmt: skip


def lacks_reserve(fraction: float, reserved: int, needed: int, usual: float | None) -> Refusal | None:
    """Return a refusal if SGLang's reserve is smaller than what it allocates outside the pool.

    SGLang does not check this: the GPU runs out of memory before the server listens. Source: SGLang 0.5.23
    srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes).

    reserved  bytes that the fraction reserves, and what the pool rounds off
    needed    lower bound of bytes allocated outside the pool, before CUDA graphs and activations
    usual     the fraction from SGLang's own rule of thumb
    """
    if needed <= reserved:
        return None
    needs, has = format_apart(needed, reserved)
    text = (
        f"a fraction of {fraction:g} reserves {has} of the memory free at start-up, but SGLang's request table and "
        f"unusable pages take {needs}, before CUDA graphs and activations"
    )
    values = () if usual is None or usual >= fraction else (floor(1000 * usual) / 1000,)
    return Refusal("kept_back", text, "mem_fraction_static", values, needed - reserved)
