"""What an SGLang server logged, row by row beside its plan."""

import re
from dataclasses import replace
from math import ceil, floor
from typing import Final

from kvplan.allocator import weights_reserved
from kvplan.errors import KvplanError
from kvplan.log_rows import NOT_LOGGED, LogRow, missing, sized, smallest_kv
from kvplan.plan import Plan, Request, own_layout, plan, rank_weights
from kvplan.rules.sglang import SglangPool
from kvplan.serverlog import Reading, ServerLog
from kvplan.units import GIB

KEPT_BACK: Final = "within what SGLang keeps back; it measures none"
UNLIKE: Final = GIB // 4  # free memory further than this from the expected range is worth a word


def sglang_rows(log: ServerLog, request: Request, *, gpu_known: bool) -> tuple[LogRow, ...]:
    """Weights as the device lost them; the pool from the inputs alone where the GPU is known, else from the free memory
    that was logged, by SGLang's own rule.
    """
    graphs = log.first("cuda_graphs")
    found = planned(log, request)
    kv, tokens = _pool_rows(log, found, gpu_known=gpu_known)
    return (
        _weights(log, request),
        missing("activations", KEPT_BACK),
        missing("non_torch", KEPT_BACK),
        LogRow("cuda_graphs", "bytes", None, None if graphs is None else graphs.size, why=KEPT_BACK),
        kv,
        missing("blocks", "SGLang counts tokens"),
        tokens,
        missing("concurrency", "SGLang does not log it"),
    )


def planned(log: ServerLog, request: Request) -> Plan | str:
    """The plan, or why there is none."""
    if log.flags.get("enable_dp_attention") == "True":
        return "DP attention is not modelled"
    try:
        return plan(request)
    except KvplanError as error:
        return str(error)


def _weights(log: ServerLog, request: Request) -> LogRow:
    """SGLang logs what free memory lost: whole segments of torch's allocator."""
    predicted = max(_reserved(request, stage) for stage in range(request.args.pipeline_parallel_size))
    logged = log.first("weights")
    if logged is None:
        return missing("weights", NOT_LOGGED, predicted, "formula")
    row = sized("weights", predicted, logged, "formula")
    return row if row.is_exact else replace(row, why="SGLang logs what free memory lost, whatever took it")


def _reserved(request: Request, stage: int) -> int:
    layout, spec = own_layout(request, stage), request.spec
    held = sum(rank_weights(request, stage).values())  # refuses what cannot be sized
    known = spec.quantization is None or spec.quantization.known
    return weights_reserved(spec, layout) if layout is not None and known else held


def _pool_rows(log: ServerLog, found: Plan | str, *, gpu_known: bool) -> tuple[LogRow, LogRow]:
    """The KV cache and its tokens."""
    kv, tokens = smallest_kv(log), log.least("kv_tokens") or log.least("pool_tokens")
    size, count = None if kv is None else kv.size, None if tokens is None else tokens.count
    cell = cell_of(found)
    if isinstance(found, str) or isinstance(cell, str):
        why = found if isinstance(found, str) else cell
        return LogRow("kv_cache", "bytes", None, size, why=str(why)), missing_count(count, str(why))
    if not gpu_known:
        row = _by_free_memory(log, kv)
        if row.predicted is None:
            return row, missing_count(count, row.why)
        return row, LogRow("tokens", "tokens", floor(row.predicted / cell), count, 0, "formula", _not_logged(tokens))
    if found.available <= 0:
        return LogRow("kv_cache", "bytes", None, size, why="by the plan nothing is left"), missing_count(count, "")
    held, page = found.capacity.tokens, found.pool.block_size
    why, rounding = _unlike_free_memory(log, found), 2 * kv.rounding if kv else 0.0
    return (
        LogRow("kv_cache", "bytes", (held + page) * cell, size, rounding, "calibrated", why if kv else NOT_LOGGED),
        LogRow("tokens", "tokens", held, count, 0, "calibrated", why if tokens else NOT_LOGGED),
    )


def missing_count(count: int | None, why: str) -> LogRow:
    return LogRow("tokens", "tokens", None, count, why=why)


def _not_logged(reading: Reading | None) -> str:
    return "" if reading is not None else NOT_LOGGED


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


def _by_free_memory(log: ServerLog, logged: Reading | None) -> LogRow:
    """KV = free after loading - free before it x (1 - mem_fraction_static). Source: sglang 0.5 srt/mem_cache."""
    before, after = _least(log, "free_before_load"), _least(log, "free_after_load")
    fraction = log.flags.get("mem_fraction_static")
    size = None if logged is None else logged.size
    share = float(fraction) if fraction and re.fullmatch(r"0?\.[0-9]{1,18}|1\.0{0,3}", fraction) else None
    if before is None or after is None or share is None:
        needed = [
            name
            for name, there in (
                ('"Load weight begin"', before), ('"Load weight end"', after), ("mem_fraction_static", share)
            )
            if there is None
        ]  # fmt: skip
        return LogRow("kv_cache", "bytes", None, size, why=f"needs {', '.join(needed)} of the log")
    predicted = after.size - before.size * (1 - share)
    rounding = (logged.rounding * 2 if logged else 0) + after.rounding + before.rounding
    why = "from the free memory in the log; --gpu predicts it from the inputs" if logged else NOT_LOGGED
    return LogRow("kv_cache", "bytes", ceil(predicted), size, rounding, "formula", why)


def cell_of(found: Plan | str) -> int | str:
    """Bytes of a token in the pool whose K and V sizes are logged, or why it is not one number."""
    if isinstance(found, str):
        return found
    pool = found.pool
    assert isinstance(pool, SglangPool)
    if pool.windows[found.stage]:
        return "the log's K and V sizes are of two pools, which are not told apart"
    return pool.full[found.stage]


def sglang_given(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
    kv, tokens = smallest_kv(log), log.least("kv_tokens") or log.least("pool_tokens")
    cell = cell_of(planned(log, request))
    if kv is None or isinstance(cell, str):
        return (missing("tokens", cell if isinstance(cell, str) else "the pool's bytes are not in the log"),)
    spread = kv.rounding * (2 if log.first("value_size") else 1)
    predicted, low, high = (floor((kv.size + by) / cell) for by in (0, -spread, spread))
    if tokens is None:
        return (missing("tokens", NOT_LOGGED, predicted, "formula"),)
    page = log.flags.get("page_size", "1")
    padding = int(page) if re.fullmatch("[0-9]{1,4}", page) else 1  # the buffers hold a page more than is counted
    return (LogRow("tokens", "tokens", predicted, tokens.count, float(padding), "formula", low=low, high=high),)
