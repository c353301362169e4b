"""What a vLLM server logged, row by row beside its plan, and why the two differ.

From the inputs alone: what takes the memory, and the pool that is left. And from the pool's bytes as the log gives
them: blocks, tokens and concurrency, which must then be right to the last digit logged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.measure.serverlog.log import Reading, ServerLog
from kvplan.measure.serverlog.request import is_drafting
from kvplan.measure.serverlog.rows import (
    NOT_LOGGED,
    POOL,
    UNITS,
    LogRow,
    activation_peak,
    difference,
    loaded_weights,
    missing,
    sized,
    smallest_kv,
)
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm.overheads import Kind
from kvplan.servers.weights import own_layout

Context = Literal["known", "derived", "unknown"]  # derived: from the concurrency, which is then not predicted

# --- from the inputs alone --------------------------------------------------------------------------------------------


def vllm_rows(log: ServerLog, request: Request, *, context: Context) -> tuple[LogRow, ...]:
    """What takes the memory, and the pool that is left, from the inputs alone."""
    found = plan(request)
    rows = [_weights(log, found), _activations(log, found), _non_torch(log, found), _graphs(log, found)]
    rows.append(_kv_cache(log, found, rows))
    rows += _pool_rows(log, found, rows[-1], context=context)
    return tuple(rows)


def _weights(log: ServerLog, found: Plan) -> LogRow:
    request = found.request
    stages = range(request.args.pipeline_parallel_size)
    predicted = max(loaded_weights(request, found.settings, stage) for stage in stages)
    kind: Kind = "formula" if request.weights_bytes is not None else "exact"
    by_rank = log.by_rank("weights")
    if not by_rank:
        return missing("weights", NOT_LOGGED, predicted, kind)
    logged = next(iter(by_rank.values())) if len(stages) == 1 else max(by_rank.values(), key=lambda one: one.value)
    row = sized("weights", predicted, logged, kind)
    return replace(row, why=_weights_why(log, found, row))


def _weights_why(log: ServerLog, found: Plan, row: LogRow) -> str:
    if row.is_exact:
        return ""
    if "cpu_offload_gb" in log.flags and log.flags["cpu_offload_gb"] not in ("0", "0.0"):
        return f"--cpu-offload-gb {printable(log.flags['cpu_offload_gb'], 10)} keeps a part on the host, not modeled"
    if row.error is not None and row.error < 0 and is_drafting(log):
        return "the draft model that speculates is loaded too"
    if found.request.spec.multimodal and row.error is not None and row.error > 0:
        return "a server without image or audio inputs does not load their towers"
    return ""


def _deciding(log: ServerLog, fact: str) -> Reading | None:
    """The figure of the rank whose pool is smallest, else the first."""
    kv = log.least("available_kv")
    found = log.by_rank(fact)
    return found.get(kv.rank) if kv is not None and kv.rank in found else log.first(fact)


def _activations(log: ServerLog, found: Plan) -> LogRow:
    predicted, kind = activation_peak(found), found.estimates["activations"].kind
    logged, peak, weights = (_deciding(log, fact) for fact in ("activations", "peak_torch", "weights"))
    if logged is not None:
        in_peak = found.request.release.has("consumed_memory") and found.settings.graphs_in_budget
        return sized("activations", predicted, logged, kind, "includes the estimate of CUDA graphs" if in_peak else "")
    if peak is not None and weights is not None:
        why = "logged as the peak of torch, less the weights"
        return LogRow("activations", "bytes", predicted, *difference(peak, weights), kind, why)
    return missing("activations", NOT_LOGGED, predicted, kind)


def _non_torch(log: ServerLog, found: Plan) -> LogRow:
    estimate = found.estimates["non_torch"]
    logged, consumed, weights = (_deciding(log, fact) for fact in ("non_torch", "consumed", "weights"))
    if logged is not None:
        return sized("non_torch", estimate.likely, logged, estimate.kind)
    if consumed is not None and weights is not None:
        own = overheads.loaded(
            found.request.spec, found.settings, found.request.args, own_layout(found.request, found.stage)
        )
        predicted = estimate.likely + found.estimates["buffers"].likely - own.total
        why = "logged as consumed memory, less the weights; holds the buffers allocated after loading"
        return LogRow("non_torch", "bytes", predicted, *difference(consumed, weights), estimate.kind, why)
    return missing("non_torch", NOT_LOGGED, estimate.likely, estimate.kind)


def _graphs(log: ServerLog, found: Plan) -> LogRow:
    estimate = found.estimates["cuda_graphs"]
    actual, estimated = log.first("cuda_graphs"), log.first("cuda_graphs_estimated")
    if actual is None and estimated is None:
        return missing("cuda_graphs", NOT_LOGGED, estimate.likely, estimate.kind)
    if actual is None:
        assert estimated is not None
        return sized("cuda_graphs", estimate.likely, estimated, estimate.kind, "logged as the server's own estimate")
    why = "" if estimated is None else f"the server itself estimated {estimated.text} GiB"
    if actual.value < 0:
        why = "free memory grew while graphs were captured: the figure says nothing of them"
    return sized("cuda_graphs", estimate.likely, actual, estimate.kind, why)


def _kv_cache(log: ServerLog, found: Plan, parts: Sequence[LogRow]) -> LogRow:
    stated = found.request.args.kv_cache_memory_bytes is not None
    kind: Kind = "exact" if stated else "calibrated"
    logged = smallest_kv(log)
    if logged is None:
        return missing("kv_cache", NOT_LOGGED, found.available, kind)
    row = sized("kv_cache", found.available, logged, kind)
    return row if row.is_exact or stated else replace(row, why=_budget_why(log, found, parts, row))


def _budget_why(log: ServerLog, found: Plan, parts: Sequence[LogRow], row: LogRow) -> str:
    """Which part of the budget the pool's error comes from."""
    in_budget = [one for one in parts if one.name != "cuda_graphs" and one.error is not None]
    reasons = []
    if in_budget:
        worst = max(in_budget, key=lambda one: abs(one.error or 0))
        assert row.error is not None
        if worst.error is not None and abs(worst.error) >= 0.4 * abs(row.error):
            reasons.append(f"mostly {worst.name} ({-worst.error / GIB:+.2f} GiB here)")
    estimated = log.first("cuda_graphs_estimated")
    if found.settings.graphs_in_budget and estimated is not None:
        reasons.append(f"the server took its graph estimate of {estimated.text} GiB from the budget")
    activations = next((one for one in parts if one.name == "activations"), None)
    if (
        found.request.spec.multimodal
        and activations is not None
        and activations.logged is None
        and (row.error or 0) > 0
    ):
        reasons.append("the towers' peak on images or video can be GiB above the plan's; the log does not give it")
    step = found.request.gpu.total_memory / 200
    by_digits = "gpu_memory_utilization" not in log.flags and log.first("budget") is None
    if by_digits and log.first("utilization") is not None and not reasons:
        reasons.append(f"the logged utilization has two digits: {step / GIB:.2f} GiB either way")
    return "; ".join(reasons)


def _pool_rows(log: ServerLog, found: Plan, kv: LogRow, *, context: Context) -> list[LogRow]:
    rows = []
    for name, predicted, logged, half in _pool_figures(log, found):
        kind: Kind = kv.kind or "calibrated"
        if logged is None:
            rows.append(missing(name, NOT_LOGGED, predicted, kind))
        elif name == "concurrency" and (why := _context_why(log, found, context=context)):
            rows.append(LogRow(name, UNITS[name], None, logged, half, None, why))
        else:
            row = LogRow(name, UNITS[name], predicted, logged, half, kind)
            rows.append(row if row.is_exact or not kv.error else replace(row, why="follows kv_cache"))
    return rows


def _pool_figures(log: ServerLog, found: Plan) -> Iterable[tuple[str, float, float | None, float]]:
    """(name, predicted, logged, half of the logged figure's last digit)."""
    blocks, tokens = log.least("num_blocks"), log.least("kv_tokens") or log.least("kv_tokens_refused")
    concurrency = log.least("max_concurrency")
    half = 0.0 if concurrency is None else concurrency.half_digit
    capacity = found.capacity
    yield "blocks", capacity.num_blocks, None if blocks is None else blocks.count, 0.0
    yield "tokens", capacity.tokens, None if tokens is None else tokens.count, 0.0
    yield "concurrency", capacity.max_concurrency, None if concurrency is None else concurrency.value, half


def _context_why(log: ServerLog, found: Plan, *, context: Context) -> str:
    asked = log.first("concurrency_context")
    if asked is not None and asked.count != found.capacity.max_model_len:
        return f"logged for {asked.count:,} tokens per request, predicted for {found.capacity.max_model_len:,}"
    if asked is not None or context == "known":
        return ""
    return (
        "the context is derived from it; add --ctx" if context == "derived" else "the context is not known; add --ctx"
    )


# --- given the pool ---------------------------------------------------------------------------------------------------


def vllm_given(log: ServerLog, request: Request, *, context: Context) -> tuple[LogRow, ...]:
    """Blocks, tokens and concurrency of a pool of the logged bytes; else, of the logged blocks, the last two."""
    kv, blocks = smallest_kv(log), log.least("num_blocks")
    if kv is not None and kv.size > 0:
        sizes = [kv.size + spread for spread in (-kv.rounding, 0, kv.rounding)]
        asked = [
            replace(request.args, kv_cache_memory_bytes=max(1, size), num_gpu_blocks_override=None) for size in sizes
        ]
        left_out = ""
    elif blocks is not None and blocks.count > 0:
        asked = [replace(request.args, num_gpu_blocks_override=blocks.count)] * 3
        left_out = "blocks"
    else:
        why = "the pool has no room" if kv is not None else "neither the pool's bytes nor its blocks are in the log"
        return tuple(missing(name, why) for name in POOL)
    found = [plan(replace(request, args=args)) for args in asked]
    low, middle, high = (list(_pool_figures(log, one)) for one in found)
    kind: Kind = "exact" if request.release.is_compared else "formula"
    rows = []
    for (name, least, logged, half), (_, predicted, _, _), (_, most, _, _) in zip(low, middle, high, strict=True):
        if name == left_out:
            continue
        if logged is None:
            rows.append(missing(name, NOT_LOGGED, predicted, kind))
            continue
        if name == "concurrency" and (why := _context_why(log, found[1], context=context)):
            rows.append(LogRow(name, UNITS[name], None, logged, half, None, why))
            continue
        row = LogRow(name, UNITS[name], predicted, logged, half, kind, low=least, high=most)
        rows.append(row if row.is_exact else replace(row, why=_pool_why(log, found[1], row)))
    return tuple(rows)


def _pool_why(log: ServerLog, found: Plan, row: LogRow) -> str:
    """The known reason that explains a pool's difference in full, or nothing."""
    for factor, why in _known_factors(log, found):
        if _fits(row, factor):
            return why
    block, own = log.first("attention_block_size"), found.pool.block_size
    if block is not None and block.count != own:
        return (
            f"the server's attention block is {block.count:,} tokens, here {own:,}: keys and values, or states, have "
            "another dtype there; add --kv-cache-dtype or --mamba-ssm-cache-dtype"
        )
    args = found.request.args
    is_little_more = row.relative is not None and 0 < row.relative < 0.05
    if args.tensor_parallel_size > 1 and is_little_more and len(log.by_rank("available_kv")) < 2:
        return "the smallest rank decides; the log quotes the bytes of one rank"
    return ""


def _known_factors(log: ServerLog, found: Plan) -> Iterable[tuple[float, str]]:
    """(logged / predicted, the reason) of what changes the bytes of a token."""
    layers = found.request.spec.num_layers
    padding = log.first("padding_layers")
    if padding is not None and 0 < padding.count < 1000:
        yield layers / (layers + padding.count), f"the server adds {padding.count} padding layers to {layers}"
    if is_drafting(log):
        yield layers / (layers + 1), f"the draft (MTP) layer keeps KV too: {layers + 1} layers, not {layers}"
    parallel = log.first("context_parallel")
    if parallel is not None and found.request.args.decode_context_parallel_size == 1:
        yield float(parallel.count), f"multiplied by the {parallel.count} ranks of decode context parallelism"


def _fits(row: LogRow, factor: float) -> bool:
    """Whether the factor explains the difference, but for the last block of either."""
    assert row.low is not None
    assert row.high is not None
    assert row.logged is not None
    return row.low * factor * 0.998 - row.rounding <= row.logged <= row.high * factor * 1.002 + row.rounding
