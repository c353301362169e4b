"""What an SGLang server logged, row by row beside its plan."""

import re
from dataclasses import replace
from math import ceil, floor
from typing import Final

from kvplan.log_rows import NOT_LOGGED, LogRow, loaded_weights, missing, sized, smallest_kv
from kvplan.plan import Request, plan
from kvplan.rules import vllm
from kvplan.serverlog import Reading, ServerLog

SGLANG_ONLY: Final = "not modelled for SGLang"


def sglang_rows(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
    """Weights by the same arithmetic; the pool by SGLang's own rule, from the free memory it logged.

    Source: sglang 0.5 srt/model_executor: KV = free after loading - free before it x (1 - mem_fraction_static).
    """
    settings = vllm.resolve(request.spec, request.gpu, request.args, request.release)
    stages = range(request.args.pipeline_parallel_size)
    predicted = max(loaded_weights(request, settings, stage) for stage in stages)
    logged = log.first("weights")
    row = missing("weights", NOT_LOGGED, predicted, "exact")
    if logged is not None:
        row = sized("weights", predicted, logged, "formula")
        if not row.is_exact:
            row = replace(row, why="SGLang logs what free memory lost, which is more than the tensors")
    graphs = log.first("cuda_graphs")
    rows = [
        row,
        missing("activations", "SGLang does not log it"),
        missing("non_torch", "SGLang does not log it"),
        LogRow("cuda_graphs", "bytes", None, None if graphs is None else graphs.size, why=SGLANG_ONLY),
    ]
    rows.append(_sglang_kv(log, request))
    tokens = log.least("kv_tokens") or log.least("pool_tokens")
    rows.append(missing("blocks", "SGLang counts tokens"))
    rows.append(_sglang_tokens(rows[4], _sglang_cell(request), tokens))
    rows.append(missing("concurrency", "SGLang does not log it"))
    return tuple(rows)


def _sglang_tokens(kv: LogRow, cell: int | str, logged: Reading | None) -> LogRow:
    count = None if logged is None else logged.count
    if isinstance(cell, str) or kv.predicted is None:
        return LogRow("tokens", "tokens", None, count, why=cell if isinstance(cell, str) else kv.why)
    return LogRow("tokens", "tokens", floor(kv.predicted / cell), count, 0, "formula", "" if logged else NOT_LOGGED)


def _sglang_kv(log: ServerLog, request: Request) -> LogRow:
    before, after = (  # a draft model is loaded after the model itself, by each rank
        min(log.by_rank(fact).values(), key=lambda one: one.value, default=None)
        for fact in ("free_before_load", "free_after_load")
    )
    fraction, logged = log.flags.get("mem_fraction_static"), smallest_kv(log)
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
    return LogRow("kv_cache", "bytes", ceil(predicted), size, rounding, "formula", "" if logged else NOT_LOGGED)


def _sglang_cell(request: Request) -> int | str:
    """Bytes of a token on one rank, or why it is not one number."""
    kinds = {type(cache).__name__ for caches in request.spec.layers for cache in caches}
    if not kinds <= {"FullAttention", "LatentAttention"}:
        return "SGLang splits the pool of a hybrid model by rules of its own, which are not modelled"
    return plan(
        replace(request, args=replace(request.args, kv_cache_memory_bytes=request.gpu.total_memory))
    ).bytes_per_token


def sglang_given(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
    kv, tokens = smallest_kv(log), log.least("kv_tokens") or log.least("pool_tokens")
    cell = _sglang_cell(request)
    if kv is None or isinstance(cell, str):
        return (missing("tokens", cell if isinstance(cell, str) else "the pool's bytes are not in the log"),)
    spread = kv.rounding * (2 if log.first("value_size") else 1)
    predicted, low, high = (floor((kv.size + by) / cell) for by in (0, -spread, spread))
    if tokens is None:
        return (missing("tokens", NOT_LOGGED, predicted, "formula"),)
    page = log.flags.get("page_size", "1")
    padding = int(page) if re.fullmatch("[0-9]{1,4}", page) else 1  # the buffers hold a page more than is counted
    return (LogRow("tokens", "tokens", predicted, tokens.count, float(padding), "formula", low=low, high=high),)
