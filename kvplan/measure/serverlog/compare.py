"""A prediction compared with a server's log: rows for every GPU it may have been, and the verdict."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplan.asked.log import UnplannedLog, check_log, flags_of
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.plan import plan
from kvplan.servers.base import logs_of, server_of
from kvplan.servers.logs.log import Case, Context, Given, Reading, ServerLog
from kvplan.servers.logs.measurement import ComponentRow, Prediction, compared, reconcile
from kvplan.servers.plans.plan import Request
from kvplan.servers.words.arguments import EngineArgs

LOG_RECONCILIATION: Final = "kvplan/log-reconciliation@1"


@dataclass(frozen=True, slots=True)
class LogReconciliation:
    """The comparison. rows: from the inputs only; given: from the logged bytes (or blocks) of the pool.

    machine, total_memory  in place of a listed GPU: the log's own words, and bytes
    unplanned              why there is no plan to compare with; "" if there is one
    allowed                where no GPU is named: those whose range has the logged KV cache, nearest first, and their
                           rows from the inputs
    """

    engine: str
    model: str
    gpus: tuple[GpuSpec, ...]
    args: EngineArgs
    max_model_len: int | None
    rows: tuple[ComponentRow, ...]
    given: tuple[ComponentRow, ...]
    given_from: str
    notes: tuple[str, ...]
    machine: str = ""
    total_memory: int | None = None
    unplanned: str = ""
    allowed: tuple[tuple[str, tuple[ComponentRow, ...]], ...] = ()

    @property
    def named(self) -> list[tuple[str, ComponentRow]]:
        """Every row with its name in a sentence."""
        of_pool = ((f"{row.component} of the logged pool", row) for row in self.given)
        return [*((row.component, row) for row in self.rows), *of_pool]

    @property
    def compared(self) -> list[ComponentRow]:
        """Rows whose prediction could be compared with a logged figure."""
        return compared([*self.rows, *self.given])


def reconcile_log(
    log: ServerLog, requests: Sequence[Request], *, gpu_known: bool, context: Context
) -> LogReconciliation:
    """Compare a log with the plan for each GPU it may have been; rows that depend on the GPU are not compared.

    Raises the error of the first plan if none can be made.
    """
    plans: list[tuple[Request, tuple[ComponentRow, ...], Given]] = []
    errors: list[KvplanError] = []
    for request in requests:
        try:
            rows, of_pool = _compare(log, request, context=context, gpu_known=gpu_known)
            plans.append((request, rows, of_pool))
        except KvplanError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    first = plans[0][0]
    names = [request.gpu.name for request, _, _ in plans]
    given = merged([tables.rows for _, _, tables in plans], names)
    settings = server_of(first.release.engine).settings(first)
    return LogReconciliation(
        engine=logs_of(log.engine).label(log, first),
        model=first.spec.name,
        gpus=tuple(request.gpu for request, _, _ in plans) if gpu_known else (),
        args=first.args,
        max_model_len=settings.max_model_len,
        rows=merged([rows for _, rows, _ in plans], names),
        given=given,
        given_from=plans[0][2].pool,
        notes=(*log.notes, *_spread(log, first.args.data_parallel_size)),
    )


def allowed_gpus(
    log: ServerLog, requests: Sequence[Request], context: Context
) -> tuple[tuple[str, tuple[ComponentRow, ...]], ...]:
    """GPUs on which the logged KV cache lies in the plan's range, nearest first, with their rows from the inputs.

    Empty if the log has no size of it.
    """
    logged = min(log.by_rank("available_kv").values(), key=lambda reading: reading.size, default=None)
    if logged is None:
        return ()
    allowed = []
    for request in requests:
        try:
            answer = plan(request)
        except KvplanError:
            continue
        card = request.gpu
        low = answer.available_low - (card.total_memory - card.total_memory_low)  # boards differ in what they report
        high = answer.available_high + card.total_memory_high - card.total_memory
        if low - logged.rounding <= logged.size <= high + logged.rounding:
            allowed.append((card.total_memory_kind == "nominal", abs(answer.available - logged.size), request))
    nearest = sorted(allowed, key=lambda entry: entry[:2])  # those with a known total first
    return tuple(
        (request.gpu.name, _compare(log, request, context=context, gpu_known=True)[0]) for *_, request in nearest
    )


RANKS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def unplanned(log: ServerLog, problem: UnplannedLog) -> LogReconciliation:
    """The log's figures without a plan to compare them with."""
    logged = logs_of(log.engine).figures(log)
    nothing = {figure.component: Prediction(None, why="no plan to compare with") for figure in logged.figures}
    stated, version = flags_of(log), log.text("version")
    ranks: dict[str, Any] = {
        name: int(stated[name]) for name in RANKS if re.fullmatch("[1-9][0-9]{0,2}", stated.get(name, ""))
    }
    context = log.first("concurrency_context") or log.first("context")
    return LogReconciliation(
        engine=" ".join(filter(None, (log.engine, printable(version or "", 60)))),
        model=printable(log.model or "a model without a name", 120),
        gpus=(),
        args=EngineArgs(**ranks),
        max_model_len=None if context is None else context.count or None,
        rows=reconcile(nothing, logged),
        given=(),
        given_from="",
        notes=(*log.notes, str(problem)),
        unplanned=str(problem),
    )


def _spread(log: ServerLog, num_replicas: int) -> list[str]:
    """Notes on ranks that differ: the ranks of one replica are limited by the smallest."""
    replicas: dict[str, list[Reading]] = {}
    for rank, reading in log.by_rank("available_kv").items():
        match = re.search(r"\bDP[0-9]+|(?<=_)DP[0-9]+", rank) if num_replicas > 1 else None
        replicas.setdefault(match[0] if match else "", []).append(reading)
    notes = []
    for name, readings in replicas.items():
        least, greatest = (pick(readings, key=lambda row: row.value) for pick in (min, max))
        if least.size < greatest.size:
            of = f" of replica {name}" if name else ""
            does = "decides for all" if name or num_replicas == 1 else "is compared"
            notes.append(
                f"{len(readings)} ranks{of} have {least.text} to {greatest.text} GiB for KV; the smallest {does}"
            )
    pools = sorted(
        (min(replica, key=lambda row: row.value) for replica in replicas.values()), key=lambda row: row.value
    )
    if len(pools) > 1:
        room = f"{pools[0].text} to {pools[-1].text} GiB" if pools[0].size < pools[-1].size else f"{pools[0].text} GiB"
        which = "; the smallest is compared" if pools[0].size < pools[-1].size else ""
        notes.append(f"{len(pools)} replicas have a pool of their own each, of {room}{which}")
    return notes


def merged(several: Sequence[tuple[ComponentRow, ...]], gpus: Sequence[str]) -> tuple[ComponentRow, ...]:
    """Merge rows of several GPUs: if the GPUs disagree, the row has no prediction."""
    return tuple(_one(rows, gpus) for rows in zip(*several, strict=True))


def _one(rows: Sequence[ComponentRow], gpus: Sequence[str]) -> ComponentRow:
    first = rows[0]
    other = next((i for i, row in enumerate(rows) if row.predicted != first.predicted), None)
    if other is None:
        return first
    values = f"{_figure(first)} on {gpus[0]}, {_figure(rows[other])} on {gpus[other]}"
    why = f"depends on the GPU: {values}; add --gpu"
    return replace(first, predicted=None, low=None, high=None, kind=None, why=why)


def _figure(row: ComponentRow) -> str:
    if row.predicted is None:
        return "nothing"
    if row.unit == "bytes":
        return format_gib(round(row.predicted))
    return f"{row.predicted:,.2f}" if row.component == "concurrency" else f"{row.predicted:,.0f}"


def _compare(
    log: ServerLog, request: Request, *, context: Context, gpu_known: bool
) -> tuple[tuple[ComponentRow, ...], Given]:
    check_log(log, request.args)
    if log.engine != request.release.engine:
        raise UsageError(f"--engine {request.release.label}", f"the {log.called} is one of {log.engine}", "remove it")
    table, case = logs_of(log.engine), Case(log, request, plan, gpu_known, context)
    return table.rows(case), table.given(case)


# --- verdict and data -----------------------------------------------------------------------------------------------


def document(result: LogReconciliation) -> dict[str, Any]:
    """Format the comparison as JSON values (kvplan/log-reconciliation@1); sizes are bytes of one rank."""
    return {
        "schema": LOG_RECONCILIATION,
        "engine": result.engine,
        "model": result.model,
        "gpus": [gpu.name for gpu in result.gpus],
        "total_memory": result.gpus[0].total_memory if result.gpus else result.total_memory,
        "tensor_parallel_size": result.args.tensor_parallel_size,
        "pipeline_parallel_size": result.args.pipeline_parallel_size,
        "data_parallel_size": result.args.data_parallel_size,
        "max_model_len": result.max_model_len,
        "rows": [_values(row) for row in result.rows],
        "allowed": [{"gpu": name, "rows": [_values(row) for row in rows]} for name, rows in result.allowed],
        "given_from": result.given_from or None,
        "given": [_values(row) for row in result.given],
        "notes": list(result.notes),
    }


def _values(row: ComponentRow) -> dict[str, Any]:
    own = {"name": row.component, "logged": row.measured, "exact": row.is_exact, "why": row.why or None}
    return {name: own[name] if name in own else getattr(row, name) for name in ROW}


ROW: Final = (
    "name", "unit", "predicted", "low", "high", "logged", "rounding", "error", "relative", "exact", "kind", "why",
)  # fmt: skip
