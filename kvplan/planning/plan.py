"""plan(): a model, a GPU and flags -> where the memory goes and how many requests fit."""

from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.units import format_bytes
from kvplan.models.spec import ModelSpec
from kvplan.planning.users import users_held
from kvplan.servers.base import server_of
from kvplan.servers.plans import BUDGET_ROWS, Budget, Concurrency, Sized, UserAnswer
from kvplan.servers.plans import Load as Load
from kvplan.servers.plans import MemoryBreakdown as MemoryBreakdown
from kvplan.servers.plans import Plan as Plan
from kvplan.servers.plans import Request as Request
from kvplan.servers.weights import online_scheme, weight_layout
from kvplan.sizing import weights


def breakdown(
    request: Request, stage: Budget, kv_cache: int, given_out: int | None, *, load_peak: int
) -> MemoryBreakdown:
    total = request.gpu.total_memory
    rows = {name: stage.estimates[name].likely for name in BUDGET_ROWS}
    weights = sum(stage.groups.values())
    left = total - weights - sum(rows.values()) - kv_cache
    context = stage.estimates["context"].likely
    slack = stage.available[1] - (kv_cache if given_out is None else given_out)
    outside_budget = left - context - slack
    return MemoryBreakdown(
        total=total,
        budget=stage.budget,
        weights=weights,
        **rows,
        kv_cache=kv_cache,
        unused=max(0, left),
        missing=max(0, -left),
        context=context,
        outside_budget=max(0, outside_budget),
        slack=max(0, slack),
        over_budget=max(0, -slack),
        over_gpu=max(0, -outside_budget),
        load_peak=load_peak,
    )


def users_of(request: Request, answer: Sized, *, fits: bool) -> Concurrency:
    """Users by the server's figure and by the load; all zero if the server does not start."""
    load, capacity = request.load, answer.capacity

    def users(num_blocks: int) -> UserAnswer:
        if not fits:
            return UserAnswer(0, 0.0, "does not start")
        return users_held(answer.pool, answer.settings, capacity, load, num_blocks)

    low, high = (None if load.lengths is not None else users(count).users for count in answer.blocks)
    return Concurrency(
        max=capacity.max_concurrency if fits else 0.0,
        low=answer.ends[0] if fits else 0.0,
        high=answer.ends[1] if fits else 0.0,
        pool=users(capacity.num_blocks),
        pool_low=low,
        pool_high=high,
        max_num_seqs=answer.settings.max_num_seqs,
        seqs_low=answer.seqs[0] if answer.seqs is not None else answer.settings.max_num_seqs,
        seqs_high=answer.seqs[1] if answer.seqs is not None else answer.settings.max_num_seqs,
        replicas=request.args.data_parallel_size,
    )


def lack_text(made: Plan) -> str:
    """Why a plan does not fit: its server's reason, or the bytes that are missing."""
    if made.refusal is not None:
        return f"does not start: {made.refusal.text}"
    args = made.request.args
    each = " on each GPU" if args.world_size > 1 else ""
    return f"does not fit, {format_bytes(made.deficit)} short{each}"


HEADS_ALONE: Final = ("gemma4_assistant", "gemma4_unified_assistant")


def check_stands_alone(spec: ModelSpec) -> None:
    """Reject a draft checkpoint given as a model: it reads the caches of its target."""
    kind = spec.config.get("model_type")
    if kind in HEADS_ALONE:
        raise UnsupportedModelError(spec.name, f"drafts for another model ({kind})", "name it with --draft-model")


def plan(request: Request) -> Plan:
    """Size a model on a GPU.

    Raises UsageError for contradictory flags, UnsupportedModelError if kvplan cannot size the model.
    """
    server = server_of(request.release.engine)
    check_stands_alone(request.spec)
    request, notes = server.drafter(request)
    answer = server.size(request)
    capacity = answer.capacity
    refusal = answer.refusal
    if refusal is not None and refusal.by != "unsupported" and not capacity.fits:
        refusal = None  # the KV cache lacks memory, which says more
    fits = capacity.fits and capacity.num_blocks > 0 and refusal is None
    worst = capacity.stage
    stage = answer.stages[worst]
    loaded = sum(stage.groups.values())
    peak = loaded
    if online_scheme(request) and request.weights_bytes is None:
        peak = weights.total_weights(request.spec, weight_layout(request, worst, online=False))
    kv_cache = answer.kv_cache if fits else 0
    return Plan(
        request=request,
        settings=answer.settings,
        pool=answer.pool,
        capacity=capacity,
        memory=breakdown(request, stage, kv_cache, answer.given_out if fits else None, load_peak=max(peak, loaded)),
        weight_groups=stage.groups,
        estimates=stage.estimates,
        concurrency=users_of(request, answer, fits=fits),
        available=stage.available[1],
        available_low=stage.available[0],
        available_high=stage.available[2],
        blocks_low=answer.blocks[0],
        blocks_high=answer.blocks[1],
        stage=worst,
        fits=fits,
        deficit=0 if fits else (refusal.deficit if refusal is not None else capacity.deficit),
        refusal=refusal,
        notes=(*request.spec.notes, *notes, *answer.notes),
        encoder=answer.encoder,
    )
