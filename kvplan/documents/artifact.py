"""A plan as versioned JSON: what every report is written from, and what another tool reads.

Sizes are integer bytes per GPU rank. The memory rows add up to `total`, and `kv_cache` is num_blocks x bytes_per_block,
exactly (of a server whose windows and states have pools of their own, what all its pools take); where the plan does
not fit both are 0 and `deficit` says what is missing. No number is NaN or infinite.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from kvplan.core.units import format_gib
from kvplan.hardware.gpu import TotalKind
from kvplan.models.catalog import model_id
from kvplan.models.quant import scheme_name
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import (
    NOT_MODELED,
    MemoryBreakdown,
    Plan,
    host_rows,
    rank_bytes,
    serve_command,
    stage_of,
    statements,
)
from kvplan.planning.users import blocks_per_user, log_differs, num_gpus, request_blocks
from kvplan.servers.base import Sources, flag_of, server_of, terms_of
from kvplan.servers.plans.plan import BUDGET_ROWS, Kind, SlotCache
from kvplan.servers.plans.weights import online_scheme
from kvplan.sizing import weights

if TYPE_CHECKING:  # the types of the documents cost a command nothing
    from kvplan.documents import plan as typed

# Overheads that are modeled even where their range is a point.
MODELED = ("activations", "cuda_graphs", "non_torch", "context")


def plan_document(plan: Plan) -> typed.PlanDocument:
    """One plan as JSON values (kvplan/plan@1)."""
    memory, kv, concurrency = memory_document(plan), kv_document(plan), concurrency_document(plan)
    words = serve_command(plan)
    return {
        "schema": "kvplan/plan@1",
        "inputs": _inputs(plan),
        "fits": plan.fits,
        "deficit": plan.deficit,
        "refusal": _refusal(plan),
        "memory": memory,
        "places": places_document(plan),
        "kv": kv,
        "concurrency": concurrency,
        "host_memory": _host_memory(plan),
        "host": _host(plan),
        "encoder": None if plan.encoder is None else cast("typed.Encoder", values(plan.encoder)),
        "slots": None if plan.slots is None else slots_document(plan.slots),
        "colocation": _colocation(plan),
        "parameters": _parameters(plan.request.spec),
        "limits": [{"by": by, "text": text} for by, text in limits_of(plan)],
        "fixes": _fixes(plan),
        "assumptions": _assumptions(plan),
        "provenance": _provenance(plan, kv, concurrency),
        "flags": {"argv": words, "command": shlex.join(words)},
        "notes": list(plan.notes),
    }


def plans_document(plans: Sequence[Plan]) -> typed.PlansDocument:
    """Several plans in one document (kvplan/plans@1)."""
    return {"schema": "kvplan/plans@1", "plans": [plan_document(plan) for plan in plans]}


def dumps(document: Mapping[str, object]) -> str:
    """A document as text: two spaces of indent, keys in the order of the schema, no NaN."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=True)


def values(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, not copied."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def picked(record: object, names: str) -> dict[str, Any]:
    """Values of a record by their names."""
    return {name: getattr(record, name) for name in names.split()}


# --- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(plan: Plan) -> typed.Inputs:
    request, gpu = plan.request, plan.request.gpu
    windows_in_full = bool(request.args.disable_hybrid_kv_cache_manager)  # None: not asked for
    return {
        "model": _model(request.spec),
        "engine": request.release.label,
        "gpu": cast("typed.Gpu", picked(gpu, GPU_FACTS)),
        "num_gpus": num_gpus(plan),
        "args": cast(
            "typed.Args",
            values(request.args)
            | {
                "disable_hybrid_kv_cache_manager": windows_in_full,
                "kv_cache_dtype": _own_dtype(plan, request.args.kv_cache_dtype),
            },
        ),
        "settings": _settings(plan),
        "weights_bytes": request.weights_bytes,
        "memory_in_use": request.memory_in_use,
        "draft": None if request.draft is None else _model(request.draft),
        "workload": _workload(plan),
    }


GPU_FACTS: Final = """
    name device_name total_memory total_memory_low total_memory_high total_memory_kind total_memory_source
    nominal_memory compute_capability
"""


def _model(spec: ModelSpec) -> typed.Model:
    return {
        "name": spec.name,
        "id": model_id(spec),
        "architecture": spec.architecture,
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "quantization": spec.quantization.method if spec.quantization else None,
        "scheme": scheme_name(spec.quantization) if spec.quantization else None,
        "num_layers": spec.num_layers,
        "max_model_len": spec.max_model_len,
        "source": spec.source,
    }


SETTINGS: Final = (
    "max_model_len auto_fit max_num_batched_tokens max_num_seqs in_flight_tokens gpu_memory_utilization kv_dtype dtype"
)


def _settings(plan: Plan) -> typed.Settings:
    """The settings in effect; an auto-fitted context is the fitted one. What follows from the release is left out."""
    own = {"max_model_len": plan.capacity.max_model_len, "kv_dtype": _own_dtype(plan, plan.settings.kv_dtype)}
    return cast("typed.Settings", picked(plan.settings, SETTINGS) | own)


def _workload(plan: Plan) -> typed.Workload:
    load = plan.request.load
    return {
        "mean_tokens": load.mean_tokens,
        "lengths": None if load.lengths is None else load.lengths.source,
        "overflow": load.overflow,
        "shared_prefix": load.shared_prefix,
    }


# --- memory, KV, users ------------------------------------------------------------------------------------------------


def memory_document(plan: Plan) -> typed.Memory:
    memory = plan.memory
    document: dict[str, Any] = {
        "total": memory.total,
        "budget": memory.budget,
        **{name: getattr(memory, name) for name in MemoryBreakdown.ROWS},
        "missing": memory.missing,
        "unused_detail": picked(memory, "context outside_budget slack over_budget over_gpu"),
        "in_use": plan.estimates["in_use"].likely,
        "load_peak": memory.load_peak,
        "weight_groups": dict(plan.weight_groups),
        "draft_weights": plan.weight_groups.get("draft", 0),
        "available": plan.available,
        "available_low": plan.available_low,
        "available_high": plan.available_high,
    }
    return cast("typed.Memory", document)


def _colocation(plan: Plan) -> typed.Colocation | None:
    shared = plan.request.colocated
    if shared is None:
        return None
    phases = [cast("typed.Phase", {**values(phase), "server": phase.server}) for phase in plan.phases]
    return {"owner": shared.owner, "sleep_level": cast("Literal[0, 1, 2]", shared.level), "phases": phases}


def slots_document(cache: SlotCache) -> typed.SlotCache:
    places: list[typed.SlotPlace] = [
        {**cast("typed.SlotPlace", values(place)), "total": place.total} for place in cache.places
    ]
    pace = cache.speed
    rates = {
        name: rate and rate._asdict()
        for name, rate in (("empty", pace.empty), ("full", pace.full), ("prompt", pace.prompt))
    }
    speed = cast("typed.SlotSpeed", values(pace) | rates)
    return {**cast("typed.SlotCache", values(cache)), "places": places, "speed": speed}


def gpu_places(plan: Plan, cache: SlotCache) -> list[typed.Place]:
    """Each GPU of a server that places layers; the one with the least room decides."""
    total, gpus = plan.memory.total, [place for place in cache.places if place.free]
    outside = plan.memory.non_torch
    fullest = max((place.total for place in gpus), default=0)
    tightest = next((place.name for place in gpus if place.total == fullest), "")
    return [
        {
            "name": place.name,
            "kind": "gpu",
            "ranks": 1,
            "decides": place.name == tightest,
            "rows": {
                "weights": place.weights,
                "buffers": place.compute,
                "non_torch": outside,
                "kv_cache": place.context,
                "unused": max(0, total - outside - place.total),
            },
            "missing": max(0, place.total + outside - total),
            "total": total,
        }
        for place in gpus
    ]


def places_document(plan: Plan) -> list[typed.Place]:
    """The memory of every stage's ranks, and that of the host."""
    several = len(plan.places) > 1
    on_gpus: list[typed.Place] = (
        gpu_places(plan, plan.slots)
        if plan.slots is not None
        else [
            {
                "name": f"stage {number + 1}" if several else "gpu",
                "kind": "gpu",
                "ranks": place.ranks,
                "decides": number == plan.stage,
                "rows": {name: getattr(place.memory, name) for name in MemoryBreakdown.ROWS},
                "missing": place.memory.missing,
                "total": place.memory.total,
            }
            for number, place in enumerate(plan.places)
        ]
    )
    ranks = sum(place.ranks for place in plan.places)
    rows: Counter[str] = Counter()
    for row in host_rows(plan):
        rows[row.name] += row.size * (ranks if row.per == "rank" else 1)
    host: typed.Place = {
        "name": "host", "kind": "host", "ranks": ranks, "decides": False, "rows": dict(rows), "missing": 0,
        "total": rows.total(),
    }  # fmt: skip
    return [*on_gpus, host]


def _own_dtype(plan: Plan, dtype: str) -> str:
    """The KV cache dtype in the server's own words, as its printed command has it."""
    return terms_of(plan.request.release.engine).own_value("kv_cache_dtype", dtype)


def kv_document(plan: Plan) -> typed.KvCache:
    capacity = plan.capacity
    return {
        "max_model_len": capacity.max_model_len,
        "dtype": _own_dtype(plan, plan.settings.kv_dtype),
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_request": plan.bytes_per_request,
        "state_bytes_per_request": plan.state_bytes,
        "block_size": plan.pool.block_size,
        "bytes_per_block": capacity.bytes_per_block,
        "blocks_per_request": capacity.blocks_per_request,
        "num_blocks": capacity.num_blocks if plan.fits else 0,
        "tokens": capacity.tokens if plan.fits else 0,
        "groups": _groups(plan),
        "request": _request_blocks(plan),
    }


def _request_blocks(plan: Plan) -> typed.RequestBlocks | None:
    blocks = request_blocks(plan)
    if blocks is None:
        return None
    return {
        "fixed": blocks.fixed,
        "windows": blocks.windows,
        "decoding": blocks.decoding,
        "growth_blocks": blocks.growth.numerator,
        "growth_tokens": blocks.growth.denominator,
        "slots": blocks.slots,
        "num_slots": plan.capacity.slots,
        "most_requests": blocks.most_requests,
    }


def _groups(plan: Plan) -> list[typed.Group]:
    here, context = stage_of(plan), plan.capacity.max_model_len
    groups: list[typed.Group] = []
    for group in plan.pool.groups:
        local = [spec for index, spec in group.layers if index in here]
        groups.append(
            {
                "kind": "+".join(dict.fromkeys(spec.kind for spec in group.specs)),
                "num_layers": len({index for index, _ in group.layers}),
                "window": group.first.bound,
                "block_size": group.first.block_size,
                "bytes_per_block": sum(spec.page for spec in local),
                "blocks_per_request": group.charged(context, plan.settings, plan.pool.dcp),
            }
        )
    return groups


def concurrency_document(plan: Plan) -> typed.Concurrency:
    """The users, and the server's own figure. A stated number of blocks has no range; where nothing fits all are 0."""
    answer = plan.concurrency
    document = {
        **picked(answer, "users users_low users_high"),
        "pool_users": answer.pool.users,
        "lower_bound": answer.pool.is_lower_bound,
        **picked(answer, "max_num_seqs replicas max low high"),
        "log_differs": log_differs(plan),
    }
    return cast("typed.Concurrency", document)


ASKED_HOST_ROWS: Final = ("weights", "kv_offloading", "kv_transfer", "adapters")


def _host_memory(plan: Plan) -> typed.HostMemory:
    """What the settings put on the host, of all ranks of a replica, and how many full-context requests its KV holds."""
    ranks, rows = plan.request.args.world_size, host_rows(plan)

    def size(name: str) -> int:
        return sum(row.size * (ranks if row.per == "rank" else 1) for row in rows if row.name == name)

    sizes = {name: size(name) for name in ASKED_HOST_ROWS}
    tokens = sum(row.tokens for row in rows if row.name == "kv_offloading")
    blocks, users = tokens // plan.pool.block_size, tokens // plan.capacity.max_model_len
    document = {"ranks": ranks, **sizes, "total": sum(sizes.values()), "blocks": blocks, "users": users}
    return cast("typed.HostMemory", document)


def _host(plan: Plan) -> typed.Host:
    rows = host_rows(plan)
    return {
        "per_rank": rank_bytes(rows),
        "rows": [
            cast("typed.HostRow", {"name": row.name, "bytes": row.size, **picked(row, "per formula source compared")})
            for row in rows
        ],
        "not_modeled": NOT_MODELED,
    }


@lru_cache(maxsize=1024)
def _counts(spec: ModelSpec) -> tuple[dict[str, int], int]:
    """(parameters by group, parameters that take part in one token): of experts, those the router picks."""
    active = 0
    for weight in spec.weights:
        share = min(spec.experts_per_token, weight.experts) if weight.experts else 1
        active += weight.num_params * share // max(1, weight.experts)
    return dict(weights.num_params(spec)), active


def _parameters(spec: ModelSpec) -> typed.Parameters:
    groups, active = _counts(spec)
    return {"total": sum(groups.values()), "active": active, "groups": dict(groups)}


# --- what limits it, what would help ----------------------------------------------------------------------------------


def _refusal(plan: Plan) -> typed.Refusal | None:
    """Why the server would not start; null where it does."""
    if plan.fits:
        return None
    if plan.refusal is not None:
        return {"by": plan.refusal.by, "text": plan.refusal.text, "flag": plan.refusal.flag or None}
    by, text = next(_shortages(plan))
    return {"by": by, "text": text, "flag": None}


def limits_of(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what limits the plan, in words), the first the tightest."""
    return _bounds(plan) if plan.fits else _shortages(plan)


def _shortages(plan: Plan) -> Iterator[tuple[str, str]]:
    memory, capacity = plan.memory, plan.capacity
    args = plan.request.args
    need = plan.bytes_per_request + capacity.bytes_per_block
    if plan.refusal is not None:
        does = "fails" if plan.refusal.by == "phase" else "does not start:"
        yield plan.refusal.by, f"{terms_of(plan.request.release.engine).title} {does} {plan.refusal.text}"
    elif capacity.num_blocks == args.num_gpu_blocks_override and capacity.num_blocks <= capacity.blocks_per_request:
        yield (
            "num_gpu_blocks_override",
            f"--num-gpu-blocks-override {capacity.num_blocks:,} is less than the {capacity.blocks_per_request + 1:,} "
            f"blocks that one request of {capacity.max_model_len:,} tokens needs, the null block among them",
        )
    elif args.kv_cache_memory_bytes is None and memory.weights > memory.budget:
        text = f"the weights alone ({format_gib(memory.weights)}) exceed the budget of {format_gib(memory.budget)}"
        yield "weights", text
    elif args.max_total_tokens is not None and args.max_total_tokens < capacity.max_model_len:
        yield (
            "max_total_tokens",
            f"--max-total-tokens {args.max_total_tokens:,} is less than a request of {capacity.max_model_len:,} tokens",
        )
    elif plan.request.spec.is_encoder:
        need = memory.weights + sum(plan.estimates[name].likely for name in BUDGET_ROWS)
        yield "budget", f"weights and the peak of a step, {format_gib(need)}, exceed {format_gib(memory.budget)}"
    elif plan.available <= 0:
        text = f"weights and overheads leave nothing of the budget of {format_gib(memory.budget)} for the KV cache"
        yield "budget", text
    else:
        text = (
            f"one request of {capacity.max_model_len:,} tokens needs {format_gib(need)} of KV cache, "
            f"but only {format_gib(plan.available)} is left"
        )
        yield "kv_cache", text
    yield from _stage(plan)


def _bounds(plan: Plan) -> Iterator[tuple[str, str]]:
    answer, settings, args, engine = plan.concurrency, plan.settings, plan.request.args, plan.request.release.engine
    if plan.request.spec.is_encoder and answer.pool.users <= settings.max_num_seqs:
        step = f"{settings.max_num_batched_tokens:,} tokens of whole prompts"
        yield "max_num_batched_tokens", f"a step computes {step}; {flag_of(engine, 'max_num_batched_tokens')} raises it"
        return
    if args.num_gpu_blocks_override is not None:
        yield (
            "num_gpu_blocks_override",
            f"{flag_of(engine, 'num_gpu_blocks_override')} sets the pool to {args.num_gpu_blocks_override:,} blocks",
        )
    elif args.kv_cache_memory_bytes is not None:
        yield (
            "kv_cache_memory_bytes",
            f"{flag_of(engine, 'kv_cache_memory_bytes')} sets the pool to {format_gib(args.kv_cache_memory_bytes)}",
        )
    if plan.slots is not None and answer.pool.users <= settings.max_num_seqs:
        yield "kv_cache", f"the cache holds {capacity_text(plan.slots)}; {flag_of(engine, 'max_model_len')} changes it"
    elif answer.pool.users <= settings.max_num_seqs:
        yield "kv_cache", f"KV memory: each further user takes {_further(plan)}"
    if answer.pool.users > settings.max_num_seqs:
        cure = server_of(engine).seqs_cure(plan.request.spec, args, settings.max_num_seqs)
        yield "max_num_seqs", f"the scheduler runs at most {settings.max_num_seqs:,} requests at once; raise {cure}"
    yield from _stage(plan)


def capacity_text(cache: SlotCache) -> str:
    """What fixed caches hold: "16,384 tokens", "4 times 4,096 tokens"."""
    times = f"{cache.caches} times " if cache.caches > 1 else ""
    return f"{times}{cache.cells:,} tokens"


def _further(plan: Plan) -> str:
    """What one more user takes of the pool while it decodes, and during its prefill if that is more."""
    load, capacity = plan.request.load, plan.capacity
    decoding = blocks_per_user(plan)
    size = f"{format_gib(decoding * capacity.bytes_per_block)} of every GPU"
    if load.lengths is not None:
        return f"up to {size}"
    if load.shared_prefix or load.longest(capacity.max_model_len) < capacity.max_model_len:
        return size
    prefill = capacity.blocks_per_request
    if decoding >= prefill:
        return size
    return f"{size}, up to {format_gib(prefill * capacity.bytes_per_block)} during its prefill"


def _stage(plan: Plan) -> Iterator[tuple[str, str]]:
    pp = plan.request.args.pipeline_parallel_size
    if pp > 1:
        yield (
            "stage",
            f"pipeline stage {plan.stage + 1} of {pp} has the least room and decides for all; its rank is shown",
        )


def _fixes(plan: Plan) -> list[typed.Fix]:
    """The nearest changes that would make it fit; none are sought where it does."""
    if plan.fits:
        return []
    from kvplan.planning.advise import new_fixes

    return [
        {
            "flag": fix.flag,
            "model": fix.plan.request.spec.name,
            "users": fix.plan.concurrency.users,
            "users_low": fix.plan.concurrency.users_low,
            "max_model_len": fix.plan.capacity.max_model_len,
            "gpu": fix.plan.request.gpu.name,
            "num_gpus": num_gpus(fix.plan),
            "command": shlex.join(serve_command(fix.plan)),
        }
        for fix in new_fixes(plan)
    ]


# --- what is modeled, and where each number comes from ---------------------------------------------------------------


def _assumptions(plan: Plan) -> list[typed.Assumption]:
    gpu, stated, rows = plan.request.gpu, plan.weight_groups.get("stated"), list[tuple[Any, ...]]()
    if gpu.total_memory_low < gpu.total_memory_high:
        formula, source = TOTAL_FORMULAS[gpu.total_memory_kind], gpu.total_memory_source
        rows.append(("total", gpu.total_memory_low, gpu.total_memory, gpu.total_memory_high, formula, source))
    if plan.request.weights_bytes is not None:
        rows.append(("weights", stated, stated, stated, *STATED_WEIGHTS))
    for name, estimate in plan.estimates.items():
        if estimate.low < estimate.high or (name in MODELED and estimate.likely):
            rows.append((name, estimate.low, estimate.likely, estimate.high, estimate.formula, estimate.source))
    rows += [(name, None, None, None, *statement) for name, statement in statements(plan).items()]
    names = ("name", "low", "likely", "high", "formula", "source")
    return [cast("typed.Assumption", dict(zip(names, row, strict=True))) for row in rows]


STATED_WEIGHTS: Final = (
    "stated total / (tensor x pipeline ranks): spread evenly", "stated by the user or read from the files' headers"
)  # fmt: skip
TOTAL_FORMULAS = {
    "logged": "from logs and device queries",
    "nominal": "the published size, less what logged GPUs of its kind keep back",
    "given": "as set",
}
TOTAL_KINDS: Final[dict[TotalKind, Kind]] = {"logged": "measured", "nominal": "calibrated", "given": "exact"}

COMPARED = ", equal to the server's own code in every case compared"
ESTIMATED_POOL = ", over what the calibrated rows leave of the budget"
REST_SOURCE = "what the other rows leave of the total"


def _provenance(plan: Plan, kv: typed.KvCache, concurrency: typed.Concurrency) -> dict[str, typed.Origin]:
    """JSON path -> kind and source, for every number of memory, kv and concurrency.

    exact       facts and the server's own arithmetic, compared with it
    formula     arithmetic over something measured, or by rules that were not compared with that release's own code
    calibrated  a constant fitted to servers' logs, or a number that rests on one
    measured    what a device or a server reported
    """
    charge, pool = _ruled(plan, sources(plan).charge), _pool_source(plan)
    origins = {f"memory.{name}": entry for name, entry in _memory_sources(plan, pool)}
    for name, value in kv.items():
        if isinstance(value, int):
            origins[f"kv.{name}"] = pool if name in ("num_blocks", "tokens") else charge
    for name in kv["request"] or ():
        origins[f"kv.request.{name}"] = pool if name in ("num_slots", "most_requests") else charge
    for name, value in kv["groups"][0].items() if kv["groups"] else ():
        if not isinstance(value, str):
            origins[f"kv.groups[*].{name}"] = charge
    for name, value in concurrency.items():
        if value is not None and not isinstance(value, bool | str):
            origins[f"concurrency.{name}"] = _user_source(name, pool, plan)
    if kv["groups"] and all(group["window"] is None for group in kv["groups"]):
        del origins["kv.groups[*].window"]
    return {path: {"kind": kind, "source": source} for path, (kind, source) in origins.items()}


Origin = tuple[Kind, str]  # (kind, source)


def sources(plan: Plan) -> Sources:
    return terms_of(plan.request.release.engine).sources


def _pool_is_given(plan: Plan) -> bool:
    args = plan.request.args
    return args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None


def _pool_source(plan: Plan) -> Origin:
    """Of the number of blocks and what follows from it: exact only for a stated pool."""
    if _pool_is_given(plan):
        return _ruled(plan, sources(plan).pool)
    return "calibrated", sources(plan).pool + ESTIMATED_POOL


def _ruled(plan: Plan, source: str) -> Origin:
    release, described = plan.request.release, sources(plan).described
    if described is None:
        return "formula", source
    if release.is_compared:
        return "exact", source + COMPARED
    return "formula", described.format(label=release.label)


PARTS: Final = ("outside_budget", "slack", "over_budget", "over_gpu")  # of what is unused, beside the context


def _memory_sources(plan: Plan, pool: Origin) -> Iterator[tuple[str, Origin]]:
    gpu = plan.request.gpu
    total_kind = TOTAL_KINDS[gpu.total_memory_kind]
    yield "total", (total_kind, gpu.total_memory_source)
    source = sources(plan).budget
    yield "budget", ("exact" if total_kind == "exact" else "formula", source)
    stated = plan.request.weights_bytes is not None
    read = plan.request.checkpoint is not None and online_scheme(plan.request) is None
    facts = "the sizes that the checkpoint's files state" if read else plan.request.spec.source
    origin: Origin = ("formula", "the stated total, spread evenly") if stated else ("exact", facts)
    for name in ("weights", "draft_weights", "load_peak"):
        yield name, origin
    for group in plan.weight_groups:
        yield f"weight_groups.{group}", origin
    for name, estimate in plan.estimates.items():
        path = "unused_detail.context" if name == "context" else name
        yield path, (estimate.kind, estimate.source)
    yield "kv_cache", pool
    for name in ("unused", "missing", *(f"unused_detail.{part}" for part in PARTS)):
        yield name, ("calibrated", REST_SOURCE)
    available: tuple[Kind, str] = ("exact", flag_of(plan.request.release.engine, "kv_cache_memory_bytes"))
    if plan.request.args.kv_cache_memory_bytes is None:
        available = ("calibrated", source + " less the rows")
    yield from ((name, available) for name in ("available", "available_low", "available_high"))


def _user_source(name: str, pool: Origin, plan: Plan) -> Origin:
    kind = pool[0]
    if name in ("max_num_seqs", "replicas"):
        return _ruled(plan, sources(plan).arguments)
    if "users" in name:  # this is kvplan's own count, which the server does not print
        source = sources(plan).users
        if plan.request.load.lengths is not None:
            source = plan.concurrency.pool.method
        return "formula" if kind == "exact" else kind, source
    return pool
