"""A prediction beside what a server logged: which plan its log asks for, and row by row where the two differ and why.

Two comparisons. From the inputs alone: what takes the memory, and the pool that is left. And from the pool's bytes as
the log gives them: blocks, tokens and concurrency, which must then be right to the last digit logged.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Final, Literal

from kvplan import catalog, entries, overheads
from kvplan.command import ARGUMENTS
from kvplan.errors import KvplanError, UsageError
from kvplan.files import printable
from kvplan.gpu import GpuSpec, custom_gpu, gpu, gpu_names, with_memory
from kvplan.overheads import Kind
from kvplan.plan import Plan, Request, own_layout, plan, rank_weights
from kvplan.rules import vllm
from kvplan.rules.vllm import EngineArgs
from kvplan.server_metrics import ServerSetup
from kvplan.serverlog import Reading, ServerLog, arguments
from kvplan.spec import ModelSpec
from kvplan.units import GIB, format_gib

LOG_RECONCILIATION: Final = "kvplan/log-reconciliation@1"

# --- what the log asks for --------------------------------------------------------------------------------------------

# SGLang's name of an argument -> vLLM's.
SGLANG_NAMES: Final = {
    "context_length": "max_model_len",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "max_running_requests": "max_num_seqs",
    "disable_cuda_graph": "enforce_eager",
}
# What a server resolved, under other names.
RESOLVED_NAMES: Final = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}
# Not taken from a log: it says them for any server, asked for or not.
NOT_ASKED: Final = frozenset({"quantization", "max_loras", "max_lora_rank", "num_speculative_tokens"})
SERVER_SIZES: Final = (24 * GIB, 80 * GIB, 192 * GIB)
SAMPLE_GPUS: Final = ("rtx-4090", "l40s", "a100-80g", "h100-80g", "h200", "b200")


def log_of_page(setup: ServerSetup) -> ServerLog:
    """A /metrics page's constants as if they had been logged."""
    readings = tuple(Reading(fact, text, "", 0) for fact, text in setup.facts.items())
    return ServerLog(setup.kind, setup.flags, readings, 1, 1)


def flags_of(log: ServerLog) -> dict[str, str]:
    """Engine arguments by vLLM's names, as text: what was asked for, else what the server says it resolved."""
    said = {RESOLVED_NAMES.get(name, name): text for name, text in log.flags.items() if name in RESOLVED_NAMES}
    said |= {name: text for name, text in log.flags.items() if name not in RESOLVED_NAMES}
    if log.engine == "sglang":
        said = {SGLANG_NAMES.get(name, name): text for name, text in said.items() if name != "gpu_memory_utilization"}
    facts = {
        "max_model_len": log.first("context"),
        "max_num_batched_tokens": log.first("max_batched_tokens"),
        "decode_context_parallel_size": log.first("context_parallel"),
    }
    found = {name: reading.text.replace(",", "") for name, reading in facts.items() if reading is not None}
    if (share := utilization_of(log)) is not None:
        found["gpu_memory_utilization"] = share
    found |= {name: _plain(text) for name, text in said.items() if name in ARGUMENTS and name not in NOT_ASKED}
    served = log.first("concurrency_context")  # what -1 (auto) came to
    if served is not None:
        found["max_model_len"] = served.text.replace(",", "")
    elif "max_seq_len" in log.flags:
        found["max_model_len"] = log.flags["max_seq_len"]
    if said.get("block_size") == "16":  # the default, which older servers list with all others
        del found["block_size"]
    if said.get("quantization") == "fp8":
        found["quantization"] = "fp8"
    if said.get("enable_lora") == "True":
        found |= {name: said[name] for name in ("max_loras", "max_lora_rank") if name in said}
        found.setdefault("max_loras", "1")
    tokens = draft_of(log).get("num_speculative_tokens") or said.get("num_speculative_tokens")
    if tokens is not None:
        found["num_speculative_tokens"] = tokens
    return {name: text for name, text in found.items() if text not in ("auto", "")}


def utilization_of(log: ServerLog) -> str | None:
    """The logged share of the memory; by the budget where that is logged too, as it has two digits more."""
    share, budget, total = (log.first(fact) for fact in ("utilization", "budget", "total_memory"))
    if share is None or budget is None or total is None or not total.size:
        return None if share is None else share.text
    exact = budget.size / total.size
    return f"{exact:.5f}" if abs(exact - share.value) <= 1.1 * share.half_digit else share.text


def _plain(text: str) -> str:
    return text.removeprefix("torch.")


def draft_of(log: ServerLog) -> dict[str, str]:
    """What the log says of speculative decoding; empty where there is none."""
    text = log.flags.get("speculative_config", "")
    found = arguments(re.sub(r"^(?:SpeculativeConfig)?[({]", "", text)) if text else {}
    if "num_spec_tokens" in found:
        found["num_speculative_tokens"] = found["num_spec_tokens"]
    for name in ("speculative_algorithm", "speculative_model"):
        if name in log.flags:
            found.setdefault("method", log.flags[name])
    return found


def engine_of(log: ServerLog) -> str | None:
    """`vllm@0.11`, as --engine takes it; None where the log names no release."""
    return None if log.release is None else f"vllm@{log.release[0]}.{log.release[1]}"


def model_of(log: ServerLog) -> tuple[str | None, str | None]:
    """(the catalog's name of the logged model, a note); the log's own paths are never opened."""
    named = log.model
    if named is None:
        return None, None
    if catalog.find(named) is not None:
        return named, None
    last = re.split(r"[/\\]", named.rstrip("/\\"))[-1]
    cached = re.search(r"models--([\w.-]{1,90})--([\w.-]{1,90})", named)
    candidates = ([f"{cached[1]}/{cached[2]}"] if cached else []) + same_names(last)
    known = list(dict.fromkeys(name for name in (catalog.find(one) for one in candidates) if name is not None))
    if len(known) != 1:
        return None, None
    return known[0], f"the log's model {printable(named, 100)} is taken as {catalog.facts(known[0])['id']}, by its name"


def same_names(last: str) -> list[str]:
    """Every catalog name, id or alias whose part behind the organisation is this, whatever the case."""
    wanted = last.lower()
    found = []
    for name, text in entries.sections(catalog.path()).items():
        head = text[:2000].lower()
        ids = re.findall(r"^  id: (\S+)$", head, re.MULTILINE) + re.findall(
            r"^  aliases: \[([^\]]*)\]", head, re.MULTILINE
        )
        names = [one.strip().strip("'\"") for line in ids for one in line.split(",")]
        if wanted == name.lower() or any(one.rpartition("/")[2] == wanted for one in names):
            found.append(name)
    return found


def gpus_of(log: ServerLog) -> tuple[list[GpuSpec], str | None]:
    """(the GPUs it may have been, a note): by name, else all that report the logged total, else none."""
    logged = log.first("total_memory")
    named = _gpu_named(log)
    if named is not None:
        return [named if logged is None else with_memory(named, logged.size)], None
    if logged is None or logged.size <= 0:
        return [], None
    near = [
        one
        for one in map(gpu, gpu_names())
        if one.total_memory_low - logged.rounding <= logged.size <= one.total_memory_high + logged.rounding
    ]
    if not near:
        text = f"no GPU that kvplan knows reports {logged.text} GiB: only its bytes are known; --gpu NAME says more"
        return [custom_gpu(logged.size)], text
    names = ", ".join(one.name for one in near)
    note = f"{logged.text} GiB is what {names} report{'s' if len(near) == 1 else ''}"
    return [with_memory(one, logged.size) for one in near], note + (
        "" if len(near) == 1 else "; --gpu says which it was"
    )


def _gpu_named(log: ServerLog) -> GpuSpec | None:
    wanted = [reading.text.replace("_", " ").strip().lower() for reading in log.all("gpu")]
    if not wanted:
        return None
    for name in gpu_names():
        if gpu(name).device_name.lower() in wanted:
            return gpu(name)
    return None


def sample_gpus() -> list[GpuSpec]:
    """Where the log says nothing of its GPU: what is the same on all of these can be compared."""
    return [gpu(name) for name in SAMPLE_GPUS]


def check_log(log: ServerLog, args: EngineArgs) -> None:
    """Refuse a log whose ranks the arguments do not explain."""
    workers = [rank for rank in log.ranks if rank != ""]
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    if len(workers) > 1 and ranks == 1:
        shown = ", ".join(printable(rank, 30) for rank in workers[:4])
        raise UsageError(f"log: figures of several ranks ({shown}), but not how the model is split; add --tp")


def check_model(log: ServerLog, spec: ModelSpec) -> None:
    """Refuse a model that is stored otherwise than the log says."""
    said = log.flags.get("quantization")
    if said not in (None, "fp8", "auto") and spec.quantization is None:
        raise UsageError(
            f"log: quantization={printable(said or '', 40)}, but {spec.name} is not quantised; say with --model which "
            "checkpoint was served"
        )


# --- rows -------------------------------------------------------------------------------------------------------------

Unit = Literal["bytes", "blocks", "tokens", "requests"]
PARTS: Final = ("weights", "activations", "non_torch", "cuda_graphs", "kv_cache")
POOL: Final = ("blocks", "tokens", "concurrency")
UNITS: Final[dict[str, Unit]] = {"blocks": "blocks", "tokens": "tokens", "concurrency": "requests"}


@dataclass(frozen=True, slots=True)
class LogRow:
    """A figure, predicted and logged; None where there is none, and then `why` says so.

    low, high  what the prediction may be, where the log's rounding of its inputs leaves it open
    rounding   half of the last digit that was logged
    kind       how it was predicted
    why        the reason for a difference, where it is known, or for a missing figure
    """

    name: str
    unit: Unit
    predicted: float | None
    logged: float | None
    rounding: float = 0.0
    kind: Kind | None = None
    why: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or self.logged is None else self.predicted - self.logged

    @property
    def relative(self) -> float | None:
        """Error over logged; None where the logged figure is 0 and the error is not."""
        if self.error is None or not self.logged:
            return None if self.error else (None if self.error is None else 0.0)
        return self.error / abs(self.logged)

    @property
    def is_exact(self) -> bool | None:
        """Whether the two agree as far as the log's digits go; None where one is missing."""
        if self.predicted is None or self.logged is None:
            return None
        low = self.predicted if self.low is None else self.low
        high = self.predicted if self.high is None else self.high
        return low - self.rounding <= self.logged <= high + self.rounding


@dataclass(frozen=True, slots=True)
class LogReconciliation:
    """The comparison. rows: from the inputs alone; given: from the pool's bytes (or blocks) as they were logged."""

    engine: str
    model: str
    gpus: tuple[GpuSpec, ...]
    args: EngineArgs
    max_model_len: int
    rows: tuple[LogRow, ...]
    given: tuple[LogRow, ...]
    given_from: str
    notes: tuple[str, ...]


def reconcile_log(
    log: ServerLog, requests: Sequence[Request], *, gpu_known: bool, context_known: bool
) -> LogReconciliation:
    """Compare a log with the plan for each GPU it may have been; what depends on which is not compared.

    Raises the error of the first plan where none can be made.
    """
    compared: list[tuple[Request, tuple[LogRow, ...], tuple[LogRow, ...]]] = []
    errors: list[KvplanError] = []
    for request in requests:
        try:
            compared.append((request, *_compare(log, request, context_known=context_known)))
        except KvplanError as error:
            errors.append(error)
    if not compared:
        raise errors[0]
    first = compared[0][0]
    names = [request.gpu.name for request, _, _ in compared]
    given = merged([rows for _, _, rows in compared], names)
    settings = vllm.resolve(first.spec, first.gpu, first.args, first.release)
    return LogReconciliation(
        engine=_engine_label(log, first),
        model=first.spec.name,
        gpus=tuple(request.gpu for request, _, _ in compared) if gpu_known else (),
        args=first.args,
        max_model_len=settings.max_model_len,
        rows=merged([rows for _, rows, _ in compared], names),
        given=given,
        given_from=_given_from(log),
        notes=(*log.notes, *_spread(log)),
    )


def _spread(log: ServerLog) -> list[str]:
    """What is worth saying of ranks that differ."""
    pools = sorted(log.by_rank("available_kv").values(), key=lambda one: one.value)
    if not pools or pools[0].size == pools[-1].size:
        return []
    least, most = pools[0], pools[-1]
    return [f"{len(pools)} ranks have room for {least.text} to {most.text} GiB of KV; the smallest decides for all"]


def merged(several: Sequence[tuple[LogRow, ...]], gpus: Sequence[str]) -> tuple[LogRow, ...]:
    """The rows on which all GPUs agree; the others without a prediction."""
    return tuple(_one(rows, gpus) for rows in zip(*several, strict=True))


def _one(rows: Sequence[LogRow], gpus: Sequence[str]) -> LogRow:
    first = rows[0]
    other = next((i for i, row in enumerate(rows) if row.predicted != first.predicted), None)
    if other is None:
        return first
    said = f"{_figure(first)} on {gpus[0]}, {_figure(rows[other])} on {gpus[other]}"
    why = f"depends on the GPU, which is not known: {said}; add --gpu"
    return replace(first, predicted=None, low=None, high=None, kind=None, why=why)


def _figure(row: LogRow) -> str:
    if row.predicted is None:
        return "nothing"
    if row.unit == "bytes":
        return format_gib(round(row.predicted))
    return f"{row.predicted:,.2f}" if row.unit == "requests" else f"{row.predicted:,.0f}"


def _engine_label(log: ServerLog, request: Request) -> str:
    version = log.text("version")
    if log.engine == "sglang":
        return "sglang" if version is None else f"sglang {version}"
    return request.release.label


def _given_from(log: ServerLog) -> str:
    if log.engine == "sglang" or smallest_kv(log) is not None:
        kv = smallest_kv(log)
        return "" if kv is None else f"{kv.text} GiB" if log.engine == "vllm" else format_gib(round(kv.value * GIB))
    blocks = log.least("num_blocks")
    return "" if blocks is None else f"{blocks.count:,} blocks"


# --- vLLM -------------------------------------------------------------------------------------------------------------


def smallest_kv(log: ServerLog) -> Reading | None:
    """The pool's GiB on the rank with least, which decides how many blocks all have."""
    if log.engine == "sglang":
        key, value = log.first("key_size"), log.first("value_size")
        if key is None:
            return log.least("available_kv")
        if value is None:
            return key
        digits = max(len(key.text.partition(".")[2]), len(value.text.partition(".")[2]))
        return replace(key, fact="available_kv", text=f"{key.value + value.value:.{digits}f}")
    return log.least("available_kv") or log.least("kv_in_use")


def _compare(log: ServerLog, request: Request, *, context_known: bool) -> tuple[tuple[LogRow, ...], tuple[LogRow, ...]]:
    check_log(log, request.args)
    if log.engine == "sglang":
        return _sglang_rows(log, request), _sglang_given(log, request)
    found = plan(request)
    rows = [_weights(log, found), _activations(log, found), _non_torch(log, found), _graphs(log, found)]
    rows.append(_kv_cache(log, found, rows))
    rows += _pool_rows(log, found, rows[-1], context_known=context_known)
    return tuple(rows), _given_rows(log, request, context_known=context_known)


def loaded_weights(request: Request, settings: vllm.Settings, stage: int) -> int:
    """Bytes that a server's "Model loading took" counts: weights and the buffers that come with them."""
    held = sum(rank_weights(request, stage).values())
    return held + overheads.loaded(request.spec, settings, request.args, own_layout(request, stage)).total


def activation_peak(found: Plan) -> int:
    """Bytes that a log of the plan's release calls the activation peak."""
    number, peak = found.request.release.number, found.estimates["activations"].likely
    if number < overheads.V2_RUNNER:
        own = overheads.loaded(
            found.request.spec, found.settings, found.request.args, own_layout(found.request, found.stage)
        )
        return peak + found.estimates["buffers"].likely - own.total
    return peak + (found.estimates["cuda_graphs"].likely if number >= overheads.GRAPHS_IN_PEAK else 0)


def missing(name: str, why: str, predicted: float | None = None, kind: Kind | None = None) -> LogRow:
    return LogRow(name, UNITS.get(name, "bytes"), predicted, None, kind=kind, why=why)


def sized(name: str, predicted: float, logged: Reading, kind: Kind, why: str = "") -> LogRow:
    return LogRow(name, "bytes", predicted, logged.size, logged.rounding, kind, why)


def difference(whole: Reading, part: Reading) -> tuple[int, int]:
    """(bytes, half of the last digit) of one logged size less another."""
    return whole.size - part.size, whole.rounding + part.rounding


NOT_LOGGED: Final = "not in the log"


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
        return f"--cpu-offload-gb {printable(log.flags['cpu_offload_gb'], 10)} keeps a part on the host, not modelled"
    if row.error is not None and row.error < 0 and is_drafting(log):
        return "the draft model that speculates is loaded too"
    if found.request.spec.multimodal and row.error is not None and row.error > 0:
        return "a server without image or audio inputs does not load their towers"
    return ""


def is_drafting(log: ServerLog) -> bool:
    method = draft_of(log).get("method", "")
    return bool(draft_of(log)) and method not in ("ngram", "[ngram]")


def _deciding(log: ServerLog, fact: str) -> Reading | None:
    """The figure of the rank whose pool is smallest, else the first."""
    kv = log.least("available_kv")
    found = log.by_rank(fact)
    return found.get(kv.rank) if kv is not None and kv.rank in found else log.first(fact)


def _activations(log: ServerLog, found: Plan) -> LogRow:
    predicted, kind = activation_peak(found), found.estimates["activations"].kind
    logged, peak, weights = (_deciding(log, fact) for fact in ("activations", "peak_torch", "weights"))
    if logged is not None:
        in_peak = found.request.release.number >= overheads.GRAPHS_IN_PEAK
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
    if found.request.release.graphs_in_budget and estimated is not None:
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


def _pool_rows(log: ServerLog, found: Plan, kv: LogRow, *, context_known: bool) -> list[LogRow]:
    rows = []
    for name, predicted, logged, half in _pool_figures(log, found):
        kind: Kind = kv.kind or "calibrated"
        if logged is None:
            rows.append(missing(name, NOT_LOGGED, predicted, kind))
        elif name == "concurrency" and (why := _context_why(log, found, context_known=context_known)):
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


def _context_why(log: ServerLog, found: Plan, *, context_known: bool) -> str:
    asked = log.first("concurrency_context")
    if asked is not None and asked.count != found.capacity.max_model_len:
        return f"logged for {asked.count:,} tokens per request, predicted for {found.capacity.max_model_len:,}"
    if asked is None and not context_known:
        return "the context is not known; add --ctx"
    return ""


# --- given the pool ---------------------------------------------------------------------------------------------------


def _given_rows(log: ServerLog, request: Request, *, context_known: bool) -> tuple[LogRow, ...]:
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
    kind: Kind = "exact" if request.release.number == vllm.NEWEST else "formula"
    rows = []
    for (name, least, logged, half), (_, predicted, _, _), (_, most, _, _) in zip(low, middle, high, strict=True):
        if name == left_out:
            continue
        if logged is None:
            rows.append(missing(name, NOT_LOGGED, predicted, kind))
            continue
        if name == "concurrency" and (why := _context_why(log, found[1], context_known=context_known)):
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


# --- SGLang -----------------------------------------------------------------------------------------------------------

SGLANG_ONLY: Final = "not modelled for SGLang"


def _sglang_rows(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
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


def _sglang_given(log: ServerLog, request: Request) -> tuple[LogRow, ...]:
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


# --- verdict and data -------------------------------------------------------------------------------------------------


def exceeds(result: LogReconciliation, limit: float) -> list[str]:
    """The rows that are off by more than the limit and by more than the log's own rounding, as `name +3.2 %`."""
    rows = [(row.name, row) for row in result.rows] + [(f"{row.name} of the logged pool", row) for row in result.given]
    return [
        f"{name} {row.predicted:,.6g} against 0" if row.relative is None else f"{name} {row.relative:+.1%}"
        for name, row in rows
        if row.error and not row.is_exact and (row.relative is None or abs(row.relative) > limit)
    ]


def compares_nothing(result: LogReconciliation) -> bool:
    """Whether the log holds no figure that a prediction could be held against."""
    return all(row.error is None for row in (*result.rows, *result.given))


def document(result: LogReconciliation) -> dict[str, Any]:
    """The comparison as JSON values (kvplan/log-reconciliation@1); sizes are bytes of one rank."""
    return {
        "schema": LOG_RECONCILIATION,
        "engine": result.engine,
        "model": result.model,
        "gpus": [one.name for one in result.gpus],
        "total_memory": result.gpus[0].total_memory if result.gpus else None,
        "tensor_parallel_size": result.args.tensor_parallel_size,
        "pipeline_parallel_size": result.args.pipeline_parallel_size,
        "data_parallel_size": result.args.data_parallel_size,
        "max_model_len": result.max_model_len,
        "rows": [_values(row) for row in result.rows],
        "given_from": result.given_from or None,
        "given": [_values(row) for row in result.given],
        "notes": list(result.notes),
    }


def _values(row: LogRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "predicted": row.predicted,
        "low": row.low,
        "high": row.high,
        "logged": row.logged,
        "rounding": row.rounding,
        "error": row.error,
        "relative": row.relative,
        "exact": row.is_exact,
        "kind": row.kind,
        "why": row.why or None,
    }
