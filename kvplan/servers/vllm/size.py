"""vLLM's memory for its KV cache, the number of requests that fit, and reasons not to start."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, floor
from typing import Literal

from kvplan.core.errors import UsageError
from kvplan.core.units import format_apart, format_gib
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import (
    BUDGET_ROWS,
    Budget,
    Estimate,
    Plan,
    PoolShare,
    Refusal,
    Request,
    Sized,
    check_load,
)
from kvplan.servers.plans.pool import Capacity, Pool, blocks_in, cache_notes
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.releases import Version
from kvplan.servers.vllm import activations, classes, features, overheads, supported
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import LOOKING_AHEAD, READS_NEXT, EngineArgs, Settings
from kvplan.sizing.weights import Layout


def layout(request: Request, spec: ModelSpec) -> Layout:
    """Layout of a model's weights: what is replicated, padded and left out."""
    args, release = request.args, request.release
    return Layout(
        dtype=vllm.resolve_dtype(request.spec, args.dtype, request.gpu.sm),
        left_out=vllm.left_out(spec, args, release),
        whole_towers=args.mm_encoder_tp_mode == "data",
        expert_units=_expert_units(request, spec),
        expert_kernel=vllm.expert_backend(args.moe_backend),
        whole_shared=vllm.keeps_shared_whole(spec, args, release),
        dense_tp=1 if _keeps_dense_whole(request, spec) else 0,
        wide_scales=0 < request.gpu.sm < vllm.FP8_IN_TRITON and release.has("fp8_blocks_by_marlin"),
    )


def _expert_units(request: Request, spec: ModelSpec) -> tuple[tuple[str, int, int], ...]:
    if not spec.experts_per_token:
        return ()
    from kvplan.servers.vllm import expert_kernels  # with its table

    return expert_kernels.units(request, spec)


def _keeps_dense_whole(request: Request, spec: ModelSpec) -> bool:
    by_flag = bool(request.args.moe_dense_tp_size and spec.experts_per_token)
    return by_flag or vllm.keeps_dense_whole(spec, request.args, request.release)


def budget_of(request: Request, settings: Settings, stage: int) -> Budget:
    """Bytes left for KV on one stage's rank. Source: vLLM 0.33 v1/worker/gpu_worker.py."""
    gpu, spec, args, release = request.gpu, request.spec, request.args, request.release
    budget = ceil(gpu.total_memory * settings.gpu_memory_utilization)
    groups = rank_weights(request, stage)
    for feature in features.of(request):
        moved = feature.moved(request, stage)
        groups = {name: size - moved.get(name, 0) for name, size in groups.items()}
    estimates = {
        "buffers": overheads.buffers(spec, settings, args, own_layout(request, stage), stage=stage, gpu=gpu),
        "activations": activations.activations(spec, settings, args, release, gpu, stage=stage),
        "cuda_graphs": overheads.cuda_graphs(spec, settings, args, release, sm=gpu.sm, amd=gpu.vendor == "amd"),
        "non_torch": overheads.non_torch(spec, settings, args, gpu, weights=sum(groups.values())),
        "lora": features.adapters(request, settings, stage),
        "context": overheads.context(gpu, args),
        "in_use": overheads.in_use(gpu, request.memory_in_use),
        **request.measured,
    }
    for feature in features.of(request):
        estimates["buffers"] = feature.buffers(estimates["buffers"], request, settings, stage)
    if request.draft is not None:
        estimates["buffers"] = overheads.with_draft(estimates["buffers"], request.draft, settings, args)
    fixed = sum(groups.values())
    if args.kv_cache_memory_bytes is not None:
        stated = args.kv_cache_memory_bytes
        return Budget(budget, groups, estimates, (stated, stated, stated))
    rows = [estimates[name] for name in BUDGET_ROWS]
    if not settings.graphs_in_budget:  # the graphs are in addition to the budget, not part of it
        rows.remove(estimates["cuda_graphs"])
    if counts_whole_gpu(settings, release):
        rows += [estimates["context"], estimates["in_use"]]
    low_total = ceil(gpu.total_memory_low * settings.gpu_memory_utilization)
    high_total = ceil(gpu.total_memory_high * settings.gpu_memory_utilization)
    return Budget(
        budget,
        groups,
        estimates,
        (
            low_total - fixed - sum(row.high for row in rows),
            budget - fixed - sum(row.likely for row in rows),
            high_total - fixed - sum(row.low for row in rows),
        ),
    )


def counts_whole_gpu(settings: Settings, release: Version) -> bool:
    """True if all that is in use on the GPU counts against the budget, its CUDA context and other processes too."""
    if settings.first_engine:
        return release.has("whole_gpu_counted") and not release.has("increase_counted")
    return not release.has("others_apart")


def gate(plan: Plan, end: Literal["low", "likely"]) -> Refusal | None:
    """Check the free memory as vLLM does before it loads."""
    return lacks_free_memory(plan.request, plan.settings, plan.estimates, end)


def lacks_free_memory(
    request: Request, settings: Settings, estimates: Mapping[str, Estimate], end: Literal["low", "likely"]
) -> Refusal | None:
    """Return a refusal if too little memory is free before loading; "low": if other processes hold the most they
    may.
    """
    if settings.first_engine or not request.release.has("start_gate"):
        return None
    in_use, total = estimates["in_use"], request.gpu.total_memory
    room = total - estimates["context"].likely
    others = in_use.high if end == "low" else in_use.likely
    return free_memory(total, settings.gpu_memory_utilization, room - others, room - in_use.high, others)


def free_memory(total: int, utilization: float, free: int, least_free: int, in_use: int) -> Refusal | None:
    """Return a refusal if less memory is free than vLLM may use: it does not start then. Source: vLLM 0.33
    v1/worker/utils.py (request_memory).

    free        bytes of `total` left by the CUDA context and `in_use` bytes of the host and other processes
    least_free  the same if those hold the most they may
    """
    needed = ceil(total * utilization)
    if needed <= free:
        return None
    others = f"; other processes use {format_gib(in_use)}" if in_use else ""
    wants, has = format_apart(needed, max(0, free))
    text = f"it needs {wants} free ({utilization:g} of {format_gib(total)}) but only {has} is free{others}"
    shares = dict.fromkeys(floor(100 * room / total) / 100 for room in (free, least_free) if 100 * room >= total)
    return Refusal("free_memory", text, "gpu_memory_utilization", tuple(shares), needed - free)


def gated(request: Request, answer: Sized) -> Sized:
    """The result after what vLLM refuses for a model of any kind: a combination, then too little free memory, which it
    checks before it loads.

    Source: vLLM 0.33 v1/worker/gpu_worker.py (init_device).
    """
    settings, estimates = answer.settings, answer.stages[0].estimates
    if (unsupported := supported.refusal(request, settings)) is not None:
        return replace(answer, refusal=unsupported)
    if lacks_free_memory(request, settings, estimates, "low") is None:
        return answer
    refusal = lacks_free_memory(request, settings, estimates, "likely") or answer.refusal
    return replace(answer, blocks=(0, answer.blocks[1]), ends=(0.0, answer.ends[1]), refusal=refusal)


def needs_state_blocks(request: Request) -> bool:
    """True if every sequence that the server may run needs a block from the start."""
    return request.release.has("state_blocks") and request.spec.has_states and overheads.captures_full(request.args)


def state_blocks(max_num_seqs: int, num_blocks: int, least_blocks: int, bytes_per_block: int) -> Refusal | None:
    """Return a refusal if sequences outnumber blocks, which vLLM rejects with recurrent states and CUDA graphs. Source:
    vLLM 0.33 config/compilation.py (resolve_cudagraph_mode_and_sizes).
    """
    if max_num_seqs <= num_blocks:
        return None
    text = f"each of {max_num_seqs:,} sequences needs a block for its state, but the pool has {num_blocks:,}"
    counts = dict.fromkeys(count for count in (num_blocks, least_blocks) if count > 0)
    return Refusal("state_blocks", text, "max_num_seqs", tuple(counts), (max_num_seqs - num_blocks) * bytes_per_block)


def stating_argument(args: EngineArgs) -> str | None:
    """The argument that sets the pool size, or None if memory determines it."""
    stating = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
    return next((name for name in stating if getattr(args, name) is not None), None)


def rest_of_gpu(stage: Budget, end: Literal["low", "likely"]) -> int:
    """Bytes of a GPU outside the pool: weights and estimated components, at that end of their range."""
    rows = [stage.estimates[name] for name in BUDGET_ROWS]
    return sum(stage.groups.values()) + sum(row.low if end == "low" else row.likely for row in rows)


def stated_pool(request: Request, stage: Budget, capacity: Capacity) -> Refusal | None:
    """Return a refusal if a pool of explicit size, which is allocated without further checks, exceeds the GPU."""
    argument = stating_argument(request.args)
    if argument is None:
        return None
    stated, total = capacity.num_blocks * capacity.bytes_per_block, request.gpu.total_memory
    unit = capacity.bytes_per_block if argument == "num_gpu_blocks_override" else 1
    room = total - rest_of_gpu(stage, "likely")
    if stated <= request.gpu.total_memory_high - rest_of_gpu(stage, "low"):
        return None
    takes, left = format_apart(stated, max(0, room))
    text = f"the stated pool needs {takes}, but only {left} is free"
    return Refusal("stated_pool", text, argument, (room // unit,) if room >= unit else (), stated - room)


def start_notes(
    request: Request, settings: Settings, capacity: Capacity, stage: Budget, of_items: Iterable[str]
) -> list[str]:
    """Reasons why a server with enough room might not start, or not hold what was requested."""
    args = request.args
    notes = classes.notes(request) + vllm.mm_notes(request.spec, args, request.release)
    notes += of_items
    if settings.backend is not None:
        notes += vllm_pages.backend_notes(request.spec, settings, args, request.gpu.sm)
    unnamed = stage.groups.get("other", 0)
    if args.tensor_parallel_size > 1 and 100 * unnamed > sum(stage.groups.values()):
        notes.append(
            f"{unnamed:,} bytes of the files' tensors have names that kvplan cannot split: counted whole on every rank"
        )
    is_stated = stating_argument(args) is not None
    stated, others = capacity.num_blocks * capacity.bytes_per_block, rest_of_gpu(stage, "likely")
    if stated + others > request.gpu.total_memory and is_stated and stated_pool(request, stage, capacity) is None:
        notes.append(
            f"the pool that was stated takes {stated:,} bytes and the rest {others:,}: more than the GPU's "
            f"{request.gpu.total_memory:,}"
        )
    wide = overheads.wide_by_graphs(stage.estimates, stage.available, in_budget=settings.graphs_in_budget)
    if wide is not None and not is_stated:
        notes.append(wide)
    if args.num_gpus > request.gpu.node_gpus:
        from kvplan.servers.vllm import several_nodes

        notes += several_nodes.notes(request)
    return notes


def size(request: Request) -> Sized:
    """vLLM's result; the default batch is lowered until it starts if there are fewer state blocks than sequences."""
    if request.spec.is_encoder:
        from kvplan.servers.vllm import encoder_only  # not needed for generative models

        return gated(replace(request, spec=encoder_only.as_attending(request.spec)), encoder_only.size(request))
    return sure_start(request, largest_batch(request))


def sure_start(request: Request, answer: Sized) -> Sized:
    """The result with an empty pool at the low end of the range if there is no block for each sequence there."""
    if not needs_state_blocks(request) or answer.settings.max_num_seqs <= answer.blocks[0]:
        return answer
    return replace(answer, blocks=(0, answer.blocks[1]), ends=(0.0, answer.ends[1]))


def largest_batch(request: Request) -> Sized:
    """The result that starts with the requested batch; if none is given, with the largest one that does."""
    answer = started(request)
    refusal, limit = answer.refusal, answer.settings.max_num_seqs
    if request.args.max_num_seqs is not None or refusal is None or refusal.by != "state_blocks":
        return answer
    holds, fails, best = 0, limit, answer
    while fails - holds > 1:  # a smaller batch leaves more room
        middle = (holds + fails) // 2
        tried = started(replace(request, args=replace(request.args, max_num_seqs=middle)))
        if surely_starts(tried, middle):
            holds, best = middle, tried
        else:
            fails = middle
    if not holds:
        return answer
    note = (
        f"no --max-num-seqs: using {holds:,}, the most with which it starts; the default is {limit:,}: {refusal.text}"
    )
    return replace(best, notes=(*best.notes, note))


def surely_starts(answer: Sized, max_num_seqs: int) -> bool:
    """True if every sequence has its state block, even at the worst end of the estimates if it fits there."""
    low, likely = answer.blocks[0], answer.capacity.num_blocks
    blocks = low if low > answer.capacity.blocks_per_request else likely
    return answer.refusal is None and answer.capacity.fits and max_num_seqs <= blocks


def bounded_by_draft(request: Request, settings: Settings) -> Settings:
    """Limit the context to that of an independent draft model.

    Raise UsageError if a step has no room for a token and its drafts.
    """
    draft, args = request.draft, request.args
    ahead = args.num_speculative_tokens + (args.speculative_method in ("dflash",))
    if (draft is not None or args.speculative_method in LOOKING_AHEAD) and settings.max_num_batched_tokens <= ahead:
        problem = f"leaves no room in a step for anything but {ahead} draft tokens"
        raise UsageError(f"max_num_batched_tokens {settings.max_num_batched_tokens:,}", problem, "raise it")
    if draft is None:
        return settings
    from kvplan.servers.vllm.drafts import context_with_draft  # only with a draft

    return replace(settings, max_model_len=context_with_draft(request, settings))


def draft_notes(request: Request, settings: Settings) -> list[str]:
    """Notes on what a draft changes besides its weights and its cache."""
    draft, args, notes = request.draft, request.args, []
    context = args.max_model_len if isinstance(args.max_model_len, int) else request.spec.max_model_len
    if draft is not None and settings.max_model_len < context:
        notes.append(f"the context is {settings.max_model_len:,} tokens, the limit of the draft {draft.name}")
    if args.speculative_method in ("dflash", "dspark"):
        queries = args.num_speculative_tokens + (args.speculative_method == "dflash")
        limit = settings.max_num_batched_tokens // queries
        if limit < settings.max_num_seqs:
            notes.append(
                f"{args.speculative_method} drafts {queries} tokens a request at once: {limit:,} requests decode "
                f"at a time at most, by max_num_batched_tokens {settings.max_num_batched_tokens:,}"
            )
    shared = draft is not None and any(weight.shared for weight in draft.weights)
    if draft is not None and shared and draft.head != "mtp" and not draft.is_part_of(request.spec):
        notes.append(
            f"{draft.name} shares the model's embedding{'' if draft.head == 'eagle3' else ' and output head'}, as vLLM "
            "does where its checkpoint has no other"
        )
    return notes


def check_interleave(args: EngineArgs, pool: Pool) -> None:
    """Check the interleave size as vLLM 0.33 config/vllm.py (validate_block_size) does."""
    tokens, block = args.cp_kv_cache_interleave_size or 1, pool.block_size
    if args.decode_context_parallel_size > 1 and block % tokens:
        raise UsageError(
            f"cp_kv_cache_interleave_size {tokens}",
            f"Block_size({block}) should be greater than or equal to and divisible by it",
            f"use a divisor of {block}",
        )


def prompt_notes(request: Request) -> tuple[str, ...]:
    """Notes on ranks that divide prompts. Reject what does not go with them."""
    from kvplan.servers.vllm import context_parallel  # only here: an estimate without them loads no more modules

    context_parallel.check(request.spec, request.args, request.release)
    return tuple(context_parallel.notes(request.args))


def started(request: Request) -> Sized:
    args, spec = request.args, request.spec
    settings = vllm.resolve(spec, request.gpu, args, request.release)
    supported.check_architecture(spec, request.release, request.gpu.sm)
    supported.check_sized(request, settings)
    requested = tuple(features.of(request))
    for feature in requested:
        feature.check(request)
    vllm.check_parallel(spec, args, flat=features.hybrid_manager_is_off(args, request.release))
    divided = prompt_notes(request) if args.prefill_context_parallel_size > 1 else ()
    settings = bounded_by_draft(request, settings)
    items = features.items(request, settings)
    check_load(request, settings.max_model_len)
    pool = vllm_pages.pool(spec, vllm_pages.paging(spec, settings, args, request.gpu.sm), request.draft)
    stages = [budget_of(request, settings, stage) for stage in range(args.pipeline_parallel_size)]
    capacity = vllm_pages.capacity(pool, settings, args, [stage.available[1] for stage in stages])
    check_interleave(args, pool)
    for feature in requested:
        feature.check_pool(request, pool, settings)
    low, high = (blocks_in(pool, [stage.available[end] for stage in stages])[0] for end in (0, 2))
    if args.num_gpu_blocks_override is not None:
        low = high = capacity.num_blocks
    refusal = None
    if capacity.fits and needs_state_blocks(request):
        refusal = state_blocks(settings.max_num_seqs, capacity.num_blocks, low, capacity.bytes_per_block)
    if refusal is None and capacity.fits:
        refusal = items.refusal
    if refusal is None and capacity.fits:
        refusal = stated_pool(request, stages[capacity.stage], capacity)
    shares = tuple(PoolShare(*(2 * [capacity.num_blocks * size])) for size in pool.stage_bytes)
    sized = Sized(
        settings, pool, stages, capacity, (low, high),
        (low / capacity.blocks_per_request, high / capacity.blocks_per_request), shares,
        (
            *start_notes(request, settings, capacity, stages[capacity.stage], items.notes),
            *(note for feature in requested for note in feature.notes(request, capacity.stage)),
            *draft_notes(request, settings),
            *divided,
            *cache_notes(request.load, settings, pool, 1 if args.speculative_method in READS_NEXT else 0),
        ),
        refusal=refusal,
        encoder=items.budget,
    )  # fmt: skip
    return gated(request, sized)
