"""plan(): a model, a GPU and flags -> where the memory goes, how many requests fit, and the command that starts it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.units import GIB, format_bytes
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.planning.users import counter
from kvplan.servers.base import SERVERS, abilities_of, server_of, terms_of
from kvplan.servers.plans.plan import (
    BUDGET_ROWS,
    Budget,
    Concurrency,
    HostRow,
    Place,
    PoolShare,
    Sized,
    UserAnswer,
    check_load,
)
from kvplan.servers.plans.plan import Load as Load
from kvplan.servers.plans.plan import MemoryBreakdown as MemoryBreakdown
from kvplan.servers.plans.plan import Plan as Plan
from kvplan.servers.plans.plan import Request as Request
from kvplan.servers.plans.weights import online_scheme, weight_layout
from kvplan.servers.releases import AS_INSTALLED, Version
from kvplan.servers.words.arguments import ARGUMENTS, DEFAULTS, EngineArgs, flags_of
from kvplan.sizing import weights
from kvplan.sizing.weights import stage_layers, stored_bytes


def place_of(request: Request, answer: Sized, stage: int, *, fits: bool) -> Place:
    """The ranks of a pipeline stage, with no pool if the server does not start."""
    rank = answer.stages[stage]
    loaded = peak = sum(rank.groups.values())
    if online_scheme(request) and request.weights_bytes is None:
        peak = weights.total_weights(request.spec, weight_layout(request, stage, online=False))
    share = answer.shares[stage] if fits else PoolShare(0, 0)
    return Place(
        ranks=request.args.world_size // len(answer.stages),
        memory=breakdown(request, rank, share, load_peak=max(peak, loaded)),
        weight_groups=rank.groups,
        estimates=rank.estimates,
        available=rank.available,
    )


def breakdown(request: Request, stage: Budget, share: PoolShare, *, load_peak: int) -> MemoryBreakdown:
    total = request.gpu.total_memory
    rows = {name: stage.estimates[name].likely for name in BUDGET_ROWS}
    weights = sum(stage.groups.values())
    left = total - weights - sum(rows.values()) - share.size
    context = stage.estimates["context"].likely
    slack = stage.available[1] - share.given_out
    outside_budget = left - context - slack
    return MemoryBreakdown(
        total=total,
        budget=stage.budget,
        weights=weights,
        **rows,
        kv_cache=share.size,
        unused=max(0, left),
        missing=max(0, -left),
        context=context,
        outside_budget=max(0, outside_budget),
        slack=max(0, slack),
        over_budget=max(0, -slack),
        over_gpu=max(0, -outside_budget),
        load_peak=load_peak,
    )


def pool_users(
    load: Load, answer: Sized | Plan, blocks: tuple[int, int], *, fits: bool
) -> tuple[UserAnswer, int | None, int | None]:
    """Users that the pool holds by the load, and with `blocks`, its low and high end; none if it does not start."""
    if not fits:
        none = None if load.lengths is not None else 0
        return UserAnswer(0, 0.0, "does not start"), none, none
    users = counter(answer.pool, answer.settings, answer.capacity, load)
    low, high = (None if load.lengths is not None else users(count).users for count in blocks)
    return users(answer.capacity.num_blocks), low, high


def users_of(request: Request, answer: Sized, *, fits: bool) -> Concurrency:
    """Users by the server's figure and by the load; all zero if the server does not start."""
    capacity = answer.capacity
    pool, low, high = pool_users(request.load, answer, answer.blocks, fits=fits)
    return Concurrency(
        max=capacity.max_concurrency if fits else 0.0,
        low=answer.ends[0] if fits else 0.0,
        high=answer.ends[1] if fits else 0.0,
        pool=pool,
        pool_low=low,
        pool_high=high,
        max_num_seqs=answer.settings.max_num_seqs,
        seqs_low=answer.seqs[0] if answer.seqs is not None else answer.settings.max_num_seqs,
        seqs_high=answer.seqs[1] if answer.seqs is not None else answer.settings.max_num_seqs,
        replicas=request.args.data_parallel_size,
    )


def lack_text(the_plan: Plan) -> str:
    """Why a plan does not fit: its server's reason, or the bytes that are missing."""
    if the_plan.refusal is not None:
        does = "does not fit" if the_plan.refusal.by == "phase" else "does not start:"
        return f"{does} {the_plan.refusal.text}"
    args = the_plan.request.args
    which = "the fullest" if the_plan.slots is not None or args.pipeline_parallel_size > 1 else "each"
    of_gpus = f" on {which} GPU" if args.world_size > 1 else ""
    return f"does not fit, {format_bytes(the_plan.deficit)} short{of_gpus}"


HEADS_ALONE: Final = ("gemma4_assistant", "gemma4_unified_assistant")


def check_stands_alone(spec: ModelSpec) -> None:
    """Reject a draft checkpoint given as a model: it reads the caches of its target."""
    kind = spec.config.get("model_type")
    if kind in HEADS_ALONE:
        raise UnsupportedModelError(spec.name, f"drafts for another model ({kind})", "name it with --draft-model")


def check_vendor(request: Request) -> None:
    """Reject a GPU of a maker that the server has no known rules for, and slices that are to work together."""
    vendor = request.gpu.vendor
    if " MIG " in request.gpu.device_name and request.args.world_size > 1:
        problem = f"is a MIG slice, and NCCL joins none with others ({request.args.world_size} ranks)"
        raise UsageError(f"--gpu {request.gpu.name}", problem, "use one slice for each server", keys=("gpu",))
    check_shared_memory(request)
    if vendor in (*abilities_of(request.release.engine).vendors, "unknown"):
        return
    from kvplan.hardware.vendors import served_by, title  # only for the error

    server = terms_of(request.release.engine).title
    others = [f"--engine {name}" for name in SERVERS if vendor in abilities_of(name).vendors]
    raise UsageError(
        "--gpu", f"{server} is not planned on {title(vendor)} GPUs ({request.gpu.name})",
        f"use {' or '.join(others)}" if others else served_by(vendor), keys=("gpu",),
    )  # fmt: skip


def check_shared_memory(request: Request) -> None:
    """Reject what has no second memory to use, where host and GPU share one."""
    gpu, args = request.gpu, request.args
    if gpu.node_gpus == 1 and args.num_gpus > 1 and abilities_of(request.release.engine).one_machine:
        problem = f"is one GPU with the host's memory: a machine has no second of {args.num_gpus} to spread over"
        raise UsageError(f"--gpu {gpu.name}", problem, "use one rank, or a GPU of which a machine has several",
                         keys=("gpu",))  # fmt: skip


def plan(request: Request) -> Plan:
    """Size a model on a GPU.

    Raises UsageError for contradictory flags, UnsupportedModelError if kvplan cannot size the model.
    """
    server = server_of(request.release.engine)
    check_stands_alone(request.spec)
    check_vendor(request)
    request, notes = server.drafter(request)
    answer = server.size(request)
    capacity = answer.capacity
    refusal = answer.refusal
    if refusal is not None and refusal.by != "unsupported" and not capacity.fits:
        refusal = None  # the KV cache lacks memory, which says more
    fits = capacity.fits and capacity.num_blocks > 0 and refusal is None
    answered = Plan(
        request=request,
        settings=answer.settings,
        pool=answer.pool,
        capacity=capacity,
        places=tuple(place_of(request, answer, stage, fits=fits) for stage in range(len(answer.stages))),
        concurrency=users_of(request, answer, fits=fits),
        blocks_low=answer.blocks[0],
        blocks_high=answer.blocks[1],
        stage=capacity.stage,
        fits=fits,
        deficit=0 if fits else (refusal.deficit if refusal is not None else capacity.deficit),
        refusal=refusal,
        notes=(*request.spec.notes, *notes, *answer.notes),
        encoder=answer.encoder,
        slots=answer.slots,
    )
    return answered if request.colocated is None else beside_others(answered, answer)


def beside_others(alone: Plan, answer: Sized) -> Plan:
    """The plan with its phases; it fails where one does not fit beside what is stated for others."""
    from kvplan.planning import phases  # only for a server that sleeps

    request, colocated = alone.request, alone.request.colocated
    if colocated is None:
        return alone
    if not colocated.level and request.args.enable_sleep_mode:  # an answer's remedy, or an option
        colocated = replace(colocated, level=1)
        request = replace(request, colocated=colocated)
        alone = replace(alone, request=request)
    if not alone.fits:
        if alone.refusal is None or alone.refusal.by != "free_memory":
            return alone
        base = plan(replace(request, memory_in_use=0, colocated=None))
        own = phases.phases(base, colocated) if base.fits else ()
        return replace(alone, refusal=phases.named(alone.refusal, colocated), phases=own)
    whole = replace(alone, phases=phases.phases(alone, colocated))
    if (refusal := phases.refused(whole)) is None:
        return whole
    places = tuple(place_of(request, answer, stage, fits=False) for stage in range(len(answer.stages)))
    return replace(whole, fits=False, deficit=refusal.deficit, refusal=refusal, places=places,
                   concurrency=users_of(request, answer, fits=False))  # fmt: skip


def with_load(base: Plan, load: Load) -> Plan:
    """The plan of the same server under another mean length; its notes are the base's.

    Raise UsageError as plan() does.
    """
    request = replace(base.request, load=load)
    check_load(request, base.settings.max_model_len)
    pool, low, high = pool_users(load, base, (base.blocks_low, base.blocks_high), fits=base.fits)
    return replace(
        base, request=request, concurrency=replace(base.concurrency, pool=pool, pool_low=low, pool_high=high)
    )


# --- how to launch it, and where its figures come from ----------------------------------------------------------------

NOT_MODELED: Final = (
    "memory of the processes (Python, torch, the CUDA libraries and context), tokenized requests, images, NCCL's "
    "buffers"
)
READ_ONCE: Final = (
    "the files, read through the page cache: freed when others need it, but a container's limit counts it"
)
PUBLISHED: Final = "the sizes of published files (tests/sizing/test_disk.py)"


def serve_command(plan: Plan) -> list[str]:
    """Words of the command that starts exactly the planned server, with its environment variables.

    Settings that the plan depends on are pinned even if they are this release's defaults; what a pasted command of
    the same server says besides stands at the end.
    """
    release, repeated = plan.request.release, plan.request.repeated
    variables = assignments(release, plan.request.args)
    others = repeated.words if repeated is not None and repeated.server == release.engine else ()
    return [*variables, *server_of(release.engine).launch().words(plan), *others]


def assignments(release: Version, args: EngineArgs) -> list[str]:
    """`NAME=value` for each variable that a server of this plan is started with, as `environment.applied` reads it."""
    chosen = {name for name, default in AS_INSTALLED.items() if getattr(release, name) != default}
    for name, flag in flags_of(release.engine).items():
        value = getattr(args, name)
        lacks = not flag.printed or (flag.since and not release.has(flag.since))
        if value and value != DEFAULTS[name] and lacks:  # no flag sets it, or none in this release
            chosen.add(name)
    words = []
    for name, variable in server_of(release.engine).pasted().variables.items() if chosen else ():
        if variable.sets not in chosen or not variable.is_read_by(release):
            continue
        if variable.sets in ARGUMENTS:
            value = getattr(args, variable.sets)
            words.append(f"{name}={value / GIB:.9g}" if variable.kind == "gib" else f"{name}={value}")
        elif (value := getattr(release, variable.sets)) is not None:
            words.append(f"{name}={value if variable.kind == 'size' else int(value == (variable.kind == 'on'))}")
    return words


def context_word(words: list[str], flag: str) -> str:
    """Context length in a command, exactly as it follows the server's flag."""
    return words[words.index(flag) + 1]


def host_rows(plan: Plan) -> list[HostRow]:
    """Host memory rows: per rank first, then those that a replica has once."""
    rows = list(server_of(plan.request.release.engine).host(plan))
    stored = plan.request.weights_bytes or stored_bytes(plan.request.spec)
    if stored is not None and plan.slots is None:  # where layers are placed, the file is mapped: a row of its own
        rows.append(HostRow("checkpoint", stored, "replica", READ_ONCE, "kvplan/sizing/weights.py", PUBLISHED))
    return sorted(rows, key=lambda row: row.per != "rank")


def rank_bytes(rows: list[HostRow]) -> int:
    return sum(row.size for row in rows if row.per == "rank")


def kept_rows(plan: Plan) -> list[tuple[HostRow, int]]:
    """Host memory that a server keeps while it runs, each row with the bytes of all its ranks: without the checkpoint,
    which is read once.
    """
    args = plan.request.args
    replicas = 1 if args.enable_dp_attention else args.data_parallel_size
    rows = (row for row in host_rows(plan) if row.name != "checkpoint")
    return [(row, row.size * (args.num_gpus if row.per == "rank" else replicas)) for row in rows]


def stage_of(plan: Plan) -> range:
    """Layers of the plan's rank; with a draft model, which has one stage, its layers too."""
    spec, pp = plan.request.spec, plan.request.args.pipeline_parallel_size
    if plan.request.draft is not None:
        return range(spec.num_layers + plan.request.draft.num_layers)
    how = plan.pool.how
    return stage_layers(spec.num_layers, pp, rest_last=how.rest_last, partition=how.partition)[plan.stage]


# --- several plans ----------------------------------------------------------------------------------------------------

Outcome = tuple[GpuSpec, Plan | KvplanError]
PlanTable = list[Outcome]  # of one context, by GPU


def plan_tables(requests: Sequence[Request], num_gpus: int) -> list[PlanTable]:
    """A table per context: a plan per GPU, or why there is none. If none can be made at all, raise the first reason."""
    outcomes = [outcome(request, alone=num_gpus == 1) for request in requests]
    errors = [reply for _, reply in outcomes if isinstance(reply, KvplanError)]
    if len(errors) == len(outcomes):
        raise errors[0]
    return [outcomes[start : start + num_gpus] for start in range(0, len(outcomes), num_gpus)]


def outcome(request: Request, *, alone: bool) -> Outcome:
    try:
        return request.gpu, plan(request)
    except KvplanError as error:
        if alone:
            raise
        return request.gpu, error


def plans_of(tables: Sequence[PlanTable]) -> list[Plan]:
    return [reply for table in tables for _, reply in table if isinstance(reply, Plan)]


# --- sources of facts and rules ---------------------------------------------------------------------------------------

# How the catalog marks entries that are not a copy of the published config.json.
DERIVED = ("sibling", "dims", "class default", "reconstructed")


def is_published(source: str) -> bool:
    """True if a model's facts are its published (or the user's own) config.json, not a related model's or a table's."""
    return not source.startswith(DERIVED) and "not checked" not in source


def statements(plan: Plan) -> dict[str, tuple[str, str]]:
    """Assumptions about facts and rules without bytes of their own: name -> (text, source)."""
    request, release = plan.request, plan.request.release
    texts = {}
    for name, spec in (("model facts", request.spec), ("draft facts", request.draft)):
        if spec is not None and not is_published(spec.source):
            texts[name] = spec.source.partition(";")[0], spec.source
    if release.is_compared:
        return texts
    text, source = terms_of(release.engine).uncompared
    texts["rules"] = text.format(label=release.label), source.format(label=release.label)
    return texts


# --- bytes per token --------------------------------------------------------------------------------------------------
