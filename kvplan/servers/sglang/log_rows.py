"""An SGLang server's logged figures, row by row, compared with its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Final

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.units import GIB, format_gib
from kvplan.servers.logs.log import Case, Given, Reading, ServerLog
from kvplan.servers.logs.measurement import WHERE, ComponentRow, Figure, Measurement, Prediction, not_in, reconcile
from kvplan.servers.logs.rows import RUNNING, counted, missing, row_of, sized
from kvplan.servers.plans.plan import Kind, Plan, Request
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.sglang import offload
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang.log_pools import KVPool, first_of, pool_tokens, ranks_by_stage, smallest_pool, states
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.sglang.spread import spread
from kvplan.sizing.allocator import weights_reserved

KEPT_BACK: Final = "part of what SGLang reserves; it measures none"
UNLIKE: Final = GIB // 4  # report free memory that is further than this from the expected range
# Besides weights, loading takes tens of MiB for kernel modules and library workspaces, sometimes 200; a larger
# difference has another cause.
BESIDE_WEIGHTS: Final = GIB // 4
FROM_FREE: Final = "from the free memory {}; --gpu predicts it from the inputs"
STAND_IN: Final = 0.5  # for an unknown fraction when only the layout of the pool is needed


def figures(log: ServerLog, windows: bool | None = None) -> Measurement:
    """What SGLang logs of its memory and pool; windows: whether some layers slide, None: not known."""
    graphs, left = log.first("cuda_graphs"), log.least("free_at_end")
    rest = "" if left is None else f" ({left.text} GiB were left free)"
    pool = smallest_pool(log, log.ranks or ("",), windows=windows)
    kv = missing("kv_cache", not_in(log.called))
    if pool is not None:
        value = None if pool.missing else pool.size
        kv = Figure("kv_cache", "bytes", value, float(pool.rounding), pool.missing)
    running = log.least("max_running")
    listed = (
        sized("weights", log.first("weights"), log.called),
        missing("activations", KEPT_BACK + rest),
        missing("non_torch", KEPT_BACK),
        Figure("cuda_graphs", "bytes", None if graphs is None else graphs.size, note=KEPT_BACK),
        kv,
        missing("blocks", "SGLang counts tokens"),
        counted("tokens", pool_tokens(log, windows=windows), log.called),
        missing("concurrency", "SGLang does not log it"),
        # 0.4 also logs the slot that is never used.
        counted(RUNNING, None if running is None else running.count, log.called, 1.0),
    )
    return Measurement(log.called, listed)


def rows(case: Case) -> tuple[ComponentRow, ...]:
    """Weights as the device's loss of free memory; the pool from the inputs alone if the GPU is known, else from the
    logged free memory, by SGLang's own rule.
    """
    plan = planned(case) if case.gpu_known else _laid_out(case)
    logged = figures(case.log, has_windows(plan))
    by_name = {row.component: row for row in reconcile({}, logged)}
    kv, tokens, running = _pool_rows(case, plan, logged)
    weights = _weights(case.log, case.request)
    return tuple((by_name | {row.component: row for row in (weights, kv, tokens, running)}).values())


def planned(case: Case) -> Plan | str:
    """The plan, or the reason there is none."""
    try:
        return case.planned(case.request)
    except KvplanError as error:
        return str(error)


def _laid_out(case: Case) -> Plan | str:
    """A plan used only for the pool's layout: it must not depend on a GPU's default fraction."""
    request = case.request
    if request.args.mem_fraction_static is None:
        request = replace(request, args=replace(request.args, mem_fraction_static=STAND_IN))
    return planned(replace(case, request=request))


# --- weights ----------------------------------------------------------------------------------------------------------


def _weights(log: ServerLog, request: Request) -> ComponentRow:
    """SGLang logs the loss of free memory: whole segments of torch's allocator. Compare each stage with its own
    rank.
    """
    num_stages = request.args.pipeline_parallel_size
    predicted = [_reserved(request, stage) for stage in range(num_stages)]
    rows = []
    for stage, ranks in ranks_by_stage(log, num_stages).items():
        logged = first_of(log, "weights", ranks)
        if logged is not None:
            row = row_of(log, sized("weights", logged, log.called), Prediction(predicted[stage], "formula"))
            rows.append((stage, replace(row, why=_weights_why(log, row))))
    if not rows:
        return row_of(log, sized("weights", None, log.called), Prediction(max(predicted), "formula"))
    return _worst(rows, num_stages)


def _weights_why(log: ServerLog, row: ComponentRow) -> str:
    if row.is_exact or row.error is None:
        return ""
    if log.flags.get("cpu_offload_gb", "0") not in ("0", "0.0"):
        return f"--cpu-offload-gb {printable(log.flags['cpu_offload_gb'], 10)} keeps a part on the host"
    return "SGLang logs what free memory lost, whatever took it" if abs(row.error) <= BESIDE_WEIGHTS else ""


def _reserved(request: Request, stage: int) -> int:
    request = spread(request)
    layout, spec = own_layout(request, stage), request.spec
    loaded = sum(rank_weights(request, stage).values())  # rejects what cannot be sized
    known = spec.quantization is None or spec.quantization.known
    moved = offload.offloaded(request, stage)
    reserved = weights_reserved(spec, layout) if layout is not None and known else loaded
    return reserved - (0 if moved is None else moved.size - moved.buffers)


def _worst(rows: Sequence[tuple[int, ComponentRow]], num_stages: int) -> ComponentRow:
    """The pipeline stage with the largest error, named in its reason."""
    stage, row = max(rows, key=lambda each: abs(each[1].relative or 0.0))
    if num_stages == 1:
        return row
    which = f"pipeline stage {stage}" + (f", of {len(rows)} the furthest off" if len(rows) > 1 else "")
    return replace(row, why="; ".join(filter(None, (which, row.why))))


# --- the pool ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Pages and requests of a pool: the likely values, and their range given the log's rounding of its inputs."""

    pages: int
    low: int
    high: int
    requests: int
    kind: Kind
    why: str


def layout_of(plan: Plan) -> SglangPool:
    assert isinstance(plan.pool, SglangPool)
    return plan.pool


def kv_bytes(layout: SglangPool, pages: int, stage: int) -> int:
    """Bytes of K and V on a rank of a stage: each pool has one page more than is counted."""
    page = layout.block_size
    windows = (layout.tokens_of_windows(pages) + page) * layout.windows[stage]
    return round((pages + 1) * page * layout.full[stage] + windows)  # of whole pages


def tokens_in(layout: SglangPool, size: float, stage: int) -> int:
    """Tokens of the full pool, in whole pages, whose K and V take so many bytes on a rank of a stage."""
    page = layout.block_size
    counted = size - page * (layout.full[stage] + layout.windows[stage])
    cell = layout.full[stage] + layout.swa_ratio * layout.windows[stage]
    if layout.window_tokens is not None:
        counted, cell = counted - layout.window_tokens * layout.windows[stage], layout.full[stage]
    return max(0, floor(counted / cell) // page * page)


def has_windows(plan: Plan | str) -> bool | None:
    return None if isinstance(plan, str) else any(layout_of(plan).windows)


def _pool_rows(case: Case, plan: Plan | str, logged: Measurement) -> tuple[ComponentRow, ComponentRow, ComponentRow]:
    """The KV cache, its tokens and the most running requests."""
    log, request, gpu_known = case.log, case.request, case.gpu_known
    pools = _pools(log, request, plan)
    share = request.args.mem_fraction_static
    tokens, running = logged["tokens"], logged[RUNNING]
    answer = plan if isinstance(plan, str) else _from_plan(log, plan) if gpu_known else _from_free(log, plan, share)
    if isinstance(answer, str) or isinstance(plan, str):
        size = min((pool.size for _, pool in pools if not pool.missing), default=None)
        figures = (Figure("kv_cache", "bytes", size), tokens, replace(running, rounding=0.0))
        unpredicted = (row_of(log, replace(figure, note=str(answer)), Prediction(None)) for figure in figures)
        kv, of_tokens, of_running = unpredicted
        return kv, of_tokens, of_running
    layout = layout_of(plan)
    kv_row = _kv_row(log, layout, pools, answer, request)
    page = layout.block_size
    follows = "follows kv_cache" if kv_row.is_exact is False else ""
    why = (answer.why if gpu_known else "") or follows
    spread = (answer.low * page, answer.high * page) if answer.low != answer.high else (None, None)
    prediction = Prediction(answer.pages * page, answer.kind, why, *spread)
    of_tokens = _without_reason(row_of(log, tokens, prediction))
    return kv_row, of_tokens, _without_reason(row_of(log, running, Prediction(answer.requests, answer.kind)))


def _without_reason(row: ComponentRow) -> ComponentRow:
    """Drop the reason from a row whose figures agree."""
    if row.measured is None:
        return row
    return replace(row, why="" if row.is_exact or row.component == RUNNING else row.why)


def _pools(log: ServerLog, request: Request, plan: Plan | str) -> list[tuple[int, KVPool]]:
    """The smallest logged pool of each pipeline stage."""
    by_stage = ranks_by_stage(log, request.args.pipeline_parallel_size)
    pools = [(stage, smallest_pool(log, ranks, windows=has_windows(plan))) for stage, ranks in by_stage.items()]
    return [(stage, pool) for stage, pool in pools if pool is not None]


def _kv_row(
    log: ServerLog, layout: SglangPool, pools: Sequence[tuple[int, KVPool]], answer: _Predicted, request: Request
) -> ComponentRow:
    if not pools:
        prediction = Prediction(kv_bytes(layout, answer.pages, 0), answer.kind)
        return row_of(log, sized("kv_cache", None, log.called), prediction)
    rows = []
    for stage, pool in pools:
        low, likely, high = (kv_bytes(layout, pages, stage) for pages in (answer.low, answer.pages, answer.high))
        spread = (low, high) if low != high else (None, None)
        value = None if pool.missing else pool.size
        figure = Figure("kv_cache", "bytes", value, float(pool.rounding), pool.missing)
        rows.append((stage, row_of(log, figure, Prediction(likely, answer.kind, answer.why, *spread))))
    return _worst(rows, request.args.pipeline_parallel_size)


def _from_plan(log: ServerLog, plan: Plan) -> _Predicted | str:
    if plan.available <= 0:
        return "by the plan nothing is left"
    pages = plan.capacity.tokens // plan.pool.block_size
    why = _unlike_free_memory(log, plan)
    return _Predicted(pages, pages, pages, plan.settings.max_num_seqs, "calibrated", why)


def _unlike_free_memory(log: ServerLog, plan: Plan) -> str:
    """Say what the log's free memory tells about a difference: other processes on the GPU, or fewer buffers than
    expected.
    """
    before = _least(log, "free_before_load")
    if before is None:
        return ""
    gpu, context = plan.request.gpu, plan.estimates["context"]
    low, high = gpu.total_memory_low - context.high - UNLIKE, gpu.total_memory_high - context.low + UNLIKE
    if low <= before.size <= high:
        return ""
    expected = (gpu.total_memory - context.likely) / GIB
    return f"{before.text} GiB were free before loading, where {expected:.2f} were expected"


def _least(log: ServerLog, fact: str) -> Reading | None:
    """The smallest of the ranks' figures; each rank's own is its first, as a draft model is loaded later."""
    return min(log.by_rank(fact).values(), key=lambda reading: reading.value, default=None)


def _from_free(log: ServerLog, plan: Plan, share: float | None) -> _Predicted | str:
    """KV and states = free after loading - free before it x (1 - mem_fraction_static); all ranks use the smallest
    result.

    Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py.
    """
    before, after = _least(log, "free_before_load"), _least(log, "free_after_load")
    if before is None or after is None or share is None:
        return _needs(log, before, after, share)
    layout, args = layout_of(plan), plan.request.args
    room, spread = after.size - before.size * (1 - share), after.rounding + before.rounding * (1 - share)
    logged_states = _states_held(log, plan)
    spread += 0 if logged_states is None else logged_states.rounding
    (pages, slots), (low, _), (high, _) = (
        _pages_in(plan, floor(room + by), logged_states) for by in (0, -spread, spread)
    )
    if pages <= 0:
        return f"by the free memory {WHERE[log.called]} nothing is left"
    requests = max(1, sglang_pool.max_requests(layout, plan.settings, args, pages, slots))
    return _Predicted(pages, low, high, requests, "formula", FROM_FREE.format(WHERE[log.called]))


def _needs(log: ServerLog, before: Reading | None, after: Reading | None, share: float | None) -> str:
    """Say which logged memory figure is missing."""
    if log.called == "page":
        return "the free memory it comes from is not on the page; --gpu predicts it from the inputs"
    facts = (('"Load weight begin"', before), ('"Load weight end"', after), ("mem_fraction_static", share))
    return f"needs {', '.join(name for name, there in facts if there is None)} of the log"


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of the recurrent states on a rank of each pipeline stage, and their slots, except the one never used."""

    sizes: tuple[float, ...]
    rounding: int
    slots: int


def _states_held(log: ServerLog, plan: Plan) -> _States | None:
    """Logged states, scaled for stages without a line; None if there are none."""
    by_slot = layout_of(plan).state
    for stage, ranks in ranks_by_stage(log, len(by_slot)).items():
        logged = states(log, ranks)
        if logged is not None and by_slot[stage]:
            size, rounding = logged
            return _States(
                tuple(size * each / by_slot[stage] for each in by_slot), rounding, round(size / by_slot[stage]) - 1
            )
    return None


def _pages_in(plan: Plan, room: int, logged_states: _States | None) -> tuple[int, int]:
    """(pages of the full pool, state slots) that so many bytes of each rank hold, with states as logged."""
    layout, args = layout_of(plan), plan.request.args
    if logged_states is None:
        pages, slots, _ = sglang_pool.pages_in(layout, args, [room] * len(layout.full))
        return pages, slots
    tokens = min(
        sglang_pool.tokens_in(layout, args, floor(room - taken), stage)
        for stage, taken in enumerate(logged_states.sizes)
        if layout.full[stage] or layout.windows[stage]
    )
    return tokens // layout.block_size, logged_states.slots


# --- given the pool ---------------------------------------------------------------------------------------------------


def given_pool(case: Case) -> tuple[int, KVPool] | None:
    """(pipeline stage, its pool) whose bytes are taken as given: those of the first logged stage."""
    pools = _pools(case.log, case.request, _laid_out(case))
    return next(((stage, pool) for stage, pool in pools if not pool.missing), None)


def given(case: Case) -> Given:
    pool = given_pool(case)
    return Given(_given_rows(case, pool), "" if pool is None else format_gib(pool[1].size))


def _given_rows(case: Case, logged: tuple[int, KVPool] | None) -> tuple[ComponentRow, ...]:
    log, plan = case.log, _laid_out(case)
    tokens = counted("tokens", pool_tokens(log, windows=has_windows(plan)), log.called)
    if isinstance(plan, str) or logged is None:
        nothing = f"the pool's bytes are not {WHERE[log.called]}"
        part = next((pool.missing for _, pool in _pools(log, case.request, plan)), nothing)
        why = plan if isinstance(plan, str) else part
        return (row_of(log, replace(tokens, note=why), Prediction(None)),)
    (stage, pool), layout = logged, layout_of(plan)
    predicted, low, high = (tokens_in(layout, pool.size + by, stage) for by in (0, -pool.rounding, pool.rounding))
    if tokens.value is None:
        return (row_of(log, tokens, Prediction(predicted, "formula")),)
    # Servers before 0.4.4 hold one token more than is counted, not a page. A partial page is not counted.
    figure = Figure("tokens", "tokens", tokens.value, float(layout.block_size))
    return (row_of(log, figure, Prediction(predicted, "formula", low=low, high=high)),)
