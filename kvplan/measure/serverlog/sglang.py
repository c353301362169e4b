"""What an SGLang server logged, row by row beside its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Final

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.measure.serverlog.log import Reading, ServerLog
from kvplan.measure.serverlog.pools import KVPool, first_of, pool_tokens, ranks_by_stage, smallest_pool, states
from kvplan.measure.serverlog.request import has_dp_attention
from kvplan.measure.serverlog.rows import NOT_LOGGED, RUNNING, LogRow, missing, sized
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.vllm.overheads import Kind
from kvplan.servers.weights import own_layout, rank_weights
from kvplan.sizing.allocator import weights_reserved

KEPT_BACK: Final = "within what SGLang keeps back; it measures none"
UNLIKE: Final = GIB // 4  # free memory further than this from the expected range is worth a word
# What loading takes beside the weights, modules of kernels and workspaces of libraries, is tens of MiB, at times 200; a
# larger difference has another cause.
BESIDE_WEIGHTS: Final = GIB // 4
FROM_FREE: Final = "from the free memory in the log; --gpu predicts it from the inputs"
DP_ATTENTION: Final = "DP attention is not modeled"
STAND_IN: Final = 0.5  # for a fraction that is not known where only the layout of the pool is asked for


def sglang_rows(log: ServerLog, request: Request, *, gpu_known: bool) -> tuple[LogRow, ...]:
    """Weights as the device lost them; the pool from the inputs alone where the GPU is known, else from the free memory
    that was logged, by SGLang's own rule.
    """
    graphs, left = log.first("cuda_graphs"), log.least("free_at_end")
    kv, tokens, running = _pool_rows(log, request, gpu_known=gpu_known)
    rest = "" if left is None else f" ({left.text} GiB were left free)"
    return (
        _weights(log, request),
        missing("activations", KEPT_BACK + rest),
        missing("non_torch", KEPT_BACK),
        LogRow("cuda_graphs", "bytes", None, None if graphs is None else graphs.size, why=KEPT_BACK),
        kv,
        missing("blocks", "SGLang counts tokens"),
        tokens,
        missing("concurrency", "SGLang does not log it"),
        running,
    )


def planned(log: ServerLog, request: Request) -> Plan | str:
    """The plan, or why there is none."""
    if has_dp_attention(log):
        return DP_ATTENTION
    try:
        return plan(request)
    except KvplanError as error:
        return str(error)


def _laid_out(log: ServerLog, request: Request) -> Plan | str:
    """A plan of which only the pool's layout is asked for: no GPU's default fraction stands in its way."""
    if request.args.mem_fraction_static is None:
        request = replace(request, args=replace(request.args, mem_fraction_static=STAND_IN))
    return planned(log, request)


# --- weights ----------------------------------------------------------------------------------------------------------


def _weights(log: ServerLog, request: Request) -> LogRow:
    """SGLang logs what free memory lost: whole segments of torch's allocator. Each stage beside its own rank."""
    num_stages = request.args.pipeline_parallel_size
    if has_dp_attention(log):
        logged = log.first("weights")
        return LogRow("weights", "bytes", None, None if logged is None else logged.size, why=DP_ATTENTION)
    predicted = [_reserved(request, stage) for stage in range(num_stages)]
    rows = []
    for stage, ranks in ranks_by_stage(log, num_stages).items():
        logged = first_of(log, "weights", ranks)
        if logged is not None:
            row = sized("weights", predicted[stage], logged, "formula")
            rows.append((stage, replace(row, why=_weights_why(log, row))))
    if not rows:
        return missing("weights", NOT_LOGGED, max(predicted), "formula")
    return _worst(rows, num_stages)


def _weights_why(log: ServerLog, row: LogRow) -> str:
    if row.is_exact or row.error is None:
        return ""
    if log.flags.get("cpu_offload_gb", "0") not in ("0", "0.0"):
        return f"--cpu-offload-gb {printable(log.flags['cpu_offload_gb'], 10)} keeps a part on the host, not modeled"
    return "SGLang logs what free memory lost, whatever took it" if abs(row.error) <= BESIDE_WEIGHTS else ""


def _reserved(request: Request, stage: int) -> int:
    layout, spec = own_layout(request, stage), request.spec
    held = sum(rank_weights(request, stage).values())  # refuses what cannot be sized
    known = spec.quantization is None or spec.quantization.known
    return weights_reserved(spec, layout) if layout is not None and known else held


def _worst(rows: Sequence[tuple[int, LogRow]], num_stages: int) -> LogRow:
    """Of the pipeline's stages the one that is furthest off, which its reason names."""
    stage, row = max(rows, key=lambda each: abs(each[1].relative or 0.0))
    if num_stages == 1:
        return row
    which = f"pipeline stage {stage}" + (f", of {len(rows)} the furthest off" if len(rows) > 1 else "")
    return replace(row, why="; ".join(filter(None, (which, row.why))))


# --- the pool ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Pages and requests of a pool: what is likely, and what they may be under the log's rounding of its inputs."""

    pages: int
    low: int
    high: int
    requests: int
    kind: Kind
    why: str


def layout_of(found: Plan) -> SglangPool:
    assert isinstance(found.pool, SglangPool)
    return found.pool


def kv_bytes(layout: SglangPool, pages: int, stage: int) -> int:
    """Bytes of K and V on a rank of a stage: each pool holds a page more than is counted."""
    page = layout.block_size
    windows = (layout.tokens_of_windows(pages) + page) * layout.windows[stage]
    return (pages + 1) * page * layout.full[stage] + windows


def tokens_in(layout: SglangPool, size: float, stage: int) -> int:
    """Tokens of the full pool, whole pages, whose K and V take so many bytes on a rank of a stage."""
    page = layout.block_size
    counted = size - page * (layout.full[stage] + layout.windows[stage])
    cell = layout.full[stage] + layout.swa_ratio * layout.windows[stage]
    if layout.window_tokens is not None:
        counted, cell = counted - layout.window_tokens * layout.windows[stage], layout.full[stage]
    return max(0, floor(counted / cell) // page * page)


def has_windows(found: Plan | str) -> bool | None:
    return None if isinstance(found, str) else any(layout_of(found).windows)


def _pool_rows(log: ServerLog, request: Request, *, gpu_known: bool) -> tuple[LogRow, LogRow, LogRow]:
    """The KV cache, its tokens and the requests that may run."""
    found = planned(log, request) if gpu_known else _laid_out(log, request)
    pools = _pools(log, request, found)
    share = request.args.mem_fraction_static
    counts = pool_tokens(log, windows=has_windows(found)), _count(log.least("max_running"))
    answer = found if isinstance(found, str) else _from_plan(log, found) if gpu_known else _from_free(log, found, share)
    if isinstance(answer, str) or isinstance(found, str):
        kv = min((pool.size for _, pool in pools if not pool.missing), default=None)
        why = str(answer)
        return (
            LogRow("kv_cache", "bytes", None, kv, why=why),
            LogRow("tokens", "tokens", None, counts[0], why=why),
            LogRow(RUNNING, "requests", None, counts[1], why=why),
        )
    layout = layout_of(found)
    kv_row = _kv_row(layout, pools, answer, request)
    page = layout.block_size
    tokens = LogRow("tokens", "tokens", answer.pages * page, counts[0], 0.0, answer.kind)
    if answer.low != answer.high:
        tokens = replace(tokens, low=answer.low * page, high=answer.high * page)
    follows = "follows kv_cache" if kv_row.is_exact is False else ""
    tokens = _explained(tokens, (answer.why if gpu_known else "") or follows)
    # 0.4 logs the slot that it never gives out, too.
    running = LogRow(RUNNING, "requests", answer.requests, counts[1], 1.0, answer.kind)
    return kv_row, tokens, _explained(running, "")


def _explained(row: LogRow, why: str) -> LogRow:
    return replace(row, why=NOT_LOGGED if row.logged is None else "" if row.is_exact else why)


def _count(reading: Reading | None) -> int | None:
    return None if reading is None else reading.count


def _pools(log: ServerLog, request: Request, found: Plan | str) -> list[tuple[int, KVPool]]:
    """The smallest pool of each pipeline stage that the log has."""
    by_stage = ranks_by_stage(log, request.args.pipeline_parallel_size)
    pools = [(stage, smallest_pool(log, ranks, windows=has_windows(found))) for stage, ranks in by_stage.items()]
    return [(stage, pool) for stage, pool in pools if pool is not None]


def _kv_row(layout: SglangPool, pools: Sequence[tuple[int, KVPool]], answer: _Predicted, request: Request) -> LogRow:
    if not pools:
        return missing("kv_cache", NOT_LOGGED, kv_bytes(layout, answer.pages, 0), answer.kind)
    rows = []
    for stage, pool in pools:
        low, likely, high = (kv_bytes(layout, pages, stage) for pages in (answer.low, answer.pages, answer.high))
        row = LogRow("kv_cache", "bytes", likely, pool.size, float(pool.rounding), answer.kind, answer.why)
        row = replace(row, low=low, high=high) if low != high else row
        rows.append((stage, replace(row, logged=None, why=pool.missing) if pool.missing else row))
    return _worst(rows, request.args.pipeline_parallel_size)


def _from_plan(log: ServerLog, found: Plan) -> _Predicted | str:
    if found.available <= 0:
        return "by the plan nothing is left"
    pages = found.capacity.tokens // found.pool.block_size
    why = _unlike_free_memory(log, found)
    return _Predicted(pages, pages, pages, found.settings.max_num_seqs, "calibrated", why)


def _unlike_free_memory(log: ServerLog, found: Plan) -> str:
    """What the log's free memory says of a difference: others on the GPU, or fewer buffers than expected."""
    before = _least(log, "free_before_load")
    if before is None:
        return ""
    gpu, context = found.request.gpu, found.estimates["context"]
    low, high = gpu.total_memory_low - context.high - UNLIKE, gpu.total_memory_high - context.low + UNLIKE
    if low <= before.size <= high:
        return ""
    expected = (gpu.total_memory - context.likely) / GIB
    return f"{before.text} GiB were free before loading, where {expected:.2f} were expected"


def _least(log: ServerLog, fact: str) -> Reading | None:
    """Of the ranks the one with least; each rank's own is its first, as a draft model is loaded later."""
    return min(log.by_rank(fact).values(), key=lambda one: one.value, default=None)


def _from_free(log: ServerLog, found: Plan, share: float | None) -> _Predicted | str:
    """KV and states = free after loading - free before it x (1 - mem_fraction_static); all ranks agree on the least.

    Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py.
    """
    before, after = _least(log, "free_before_load"), _least(log, "free_after_load")
    if before is None or after is None or share is None:
        return _needs(log, before, after, share)
    layout, args = layout_of(found), found.request.args
    room, spread = after.size - before.size * (1 - share), after.rounding + before.rounding * (1 - share)
    held = _states_held(log, found)
    spread += 0 if held is None else held.rounding
    (pages, slots), (low, _), (high, _) = (_pages_in(found, floor(room + by), held) for by in (0, -spread, spread))
    if pages <= 0:
        return "by the free memory in the log nothing is left"
    requests = max(1, sglang_pool.max_requests(layout, found.settings, args, pages, slots))
    return _Predicted(pages, low, high, requests, "formula", FROM_FREE)


def _needs(log: ServerLog, before: Reading | None, after: Reading | None, share: float | None) -> str:
    """What the memory that was found lacks."""
    if log.called == "page":
        return "the free memory it comes from is not on the page; --gpu predicts it from the inputs"
    facts = (('"Load weight begin"', before), ('"Load weight end"', after), ("mem_fraction_static", share))
    return f"needs {', '.join(name for name, there in facts if there is None)} of the log"


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of the recurrent states on a rank of each pipeline stage, and their slots but the one never given out."""

    sizes: tuple[float, ...]
    rounding: int
    slots: int


def _states_held(log: ServerLog, found: Plan) -> _States | None:
    """The states as they were logged, those of a stage without a line in proportion; None where none are."""
    by_slot = layout_of(found).state
    for stage, ranks in ranks_by_stage(log, len(by_slot)).items():
        logged = states(log, ranks)
        if logged is not None and by_slot[stage]:
            size, rounding = logged
            return _States(
                tuple(size * each / by_slot[stage] for each in by_slot), rounding, round(size / by_slot[stage]) - 1
            )
    return None


def _pages_in(found: Plan, room: int, held: _States | None) -> tuple[int, int]:
    """(pages of the full pool, slots of states) that so many bytes of each rank hold, states as they were logged."""
    layout, args = layout_of(found), found.request.args
    if held is None:
        pages, slots, _ = sglang_pool.pages_in(layout, args, [room] * len(layout.full))
        return pages, slots
    tokens = min(
        sglang_pool.tokens_in(layout, args, floor(room - taken), stage)
        for stage, taken in enumerate(held.sizes)
        if layout.full[stage] or layout.windows[stage]
    )
    return tokens // layout.block_size, held.slots


# --- given the pool ---------------------------------------------------------------------------------------------------


def given_pool(log: ServerLog, request: Request) -> tuple[int, KVPool] | None:
    """(pipeline stage, the pool on it) whose bytes are taken as given: those of the first stage that the log has."""
    pools = _pools(log, request, _laid_out(log, request))
    return next(((stage, pool) for stage, pool in pools if not pool.missing), None)


def sglang_given(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
    found, given = _laid_out(log, request), given_pool(log, request)
    if isinstance(found, str) or given is None:
        part = next((pool.missing for _, pool in _pools(log, request, found)), "the pool's bytes are not in the log")
        why = found if isinstance(found, str) else part
        return (LogRow("tokens", "tokens", None, pool_tokens(log, windows=has_windows(found)), why=why),)
    (stage, pool), layout = given, layout_of(found)
    predicted, low, high = (tokens_in(layout, pool.size + by, stage) for by in (0, -pool.rounding, pool.rounding))
    tokens = pool_tokens(log, windows=has_windows(found))
    if tokens is None:
        return (missing("tokens", NOT_LOGGED, predicted, "formula"),)
    # Servers before 0.4.4 hold one token more than is counted, not a page. What is left of a page is not counted.
    return (LogRow("tokens", "tokens", predicted, tokens, float(layout.block_size), "formula", low=low, high=high),)
