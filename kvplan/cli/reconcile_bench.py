"""`kvplan reconcile --bench`: compare one result of a load generator with a simulation of its load."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.cli.bench import load_of, plan_of, results_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.table import Table
from kvplan.documents.bench_reconciliation import BenchReconciliationDocument
from kvplan.measure.bench_results import BenchResult
from kvplan.planning.plan import Plan
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import line
from kvplan.report.page import heading
from kvplan.report.simulate_text import duration, span
from kvplan.simulate import ranges
from kvplan.simulate.bench_load import Figures, figures
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.steptime import step_time

if TYPE_CHECKING:
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

NAMES: Mapping[str, str] = {
    "ttft": "time to first token", "tpot": "time per output token", "latency": "whole request",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure: prediction with its range, and measurement; seconds, or tokens per second."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float
    is_rate: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high


def reconcile_bench(options: ReconcileOptions, reports: Sequence[output.ReportFile] = ()) -> int:
    """Simulate the load, compare, print."""
    assert options.bench is not None
    results = results_of([options.bench])
    if len(results) != 1:
        raise UsageError("--bench", f"holds {len(results)} results", "name a file of one; `kvplan calibrate` takes all")
    if options.max_error is not None:
        raise UsageError("--max-error", "applies only to memory, not to times", "remove it")
    result = results[0]
    if options.model is None and options.from_command is None and result.model is not None:
        options = replace(options, model=result.model)
    plan = plan_of(options, result, "reconcile")
    predicted = figures(plan, step_time(plan, Shares(), options.calibration), load_of(result, plan, None, None))
    stated = ranges.modeled(plan) if options.calibration is None else ranges.calibrated()
    rows = list(compared(result, predicted, stated.of(waits=predicted.waits)))
    output.answer(answer(plan, result, rows), options.format, options.color, reports)
    return 0


def compared(result: BenchResult, figures: Figures, stated: ranges.Ranges) -> Iterator[BenchRow]:
    """Yield a row for each figure that both sides have."""
    for metric, name in NAMES.items():
        for statistic in ("mean", "p50", "p90", "p99"):
            key = f"{metric}_{statistic}"
            if key in figures.times and result.times.get(key):
                value = figures.times[key] / 1000
                yield BenchRow(f"{name}, {statistic}", value, *stated.time(metric, value), result.times[key] / 1000)
    if result.output_tokens_per_s:
        value = figures.output_tokens_per_s
        low, high = stated.rate(value, arrivals=None)  # fixed arrivals, too: the longest response ends a run
        yield BenchRow("output tokens per second", value, low, high, result.output_tokens_per_s, is_rate=True)


HEADERS = ("figure", "predicted", "range", "measured", "error", "in range")


def cells(row: BenchRow) -> tuple[str, ...]:
    error, inside = f"{row.error:+.1%}", "yes" if row.is_inside else "no"
    if row.is_rate:
        range_text = f"{row.low:,.0f}-{row.high:,.0f}"
        return row.name, f"{row.predicted:,.0f}", range_text, f"{row.measured:,.0f}", error, inside
    return row.name, duration(row.predicted), span(row.low, row.high), duration(row.measured), error, inside


def title(plan: Plan, result: BenchResult) -> str:
    request = plan.request
    ranks = request.args.tensor_parallel_size
    where = request.gpu.name if ranks == 1 else f"{ranks} x {request.gpu.name}"
    return f"{request.spec.name} on {where}, {result.load}: {printable(result.tool)} vs kvplan"


def answer(plan: Plan, result: BenchResult, rows: list[BenchRow]) -> CommandAnswer:
    table = Table.of(HEADERS, map(cells, rows))

    def screen(_: bool) -> "list[Part]":
        return [line(title(plan, result), "bold"), line(), table]

    def page() -> "list[Block]":
        return [heading(2, title(plan, result)), table]

    servers = [plan.request.release.label]
    return CommandAnswer(
        screen, lambda: document(plan, result, rows), lambda: figures_table(rows), page, servers=servers
    )


def figures_table(rows: list[BenchRow]) -> Table:
    own = ("figure", "predicted", "low", "high", "measured", "error")
    return Table.of(own, ((row.name, row.predicted, row.low, row.high, row.measured, row.error) for row in rows))


def document(plan: Plan, result: BenchResult, rows: list[BenchRow]) -> BenchReconciliationDocument:
    """Build kvplan/bench-reconciliation@1: seconds, and tokens per second."""
    return {
        "schema": "kvplan/bench-reconciliation@1",
        "model": plan.request.spec.name,
        "gpu": plan.request.gpu.name,
        "tool": result.tool,
        "load": result.load,
        "rows": [
            {
                "figure": row.name, "predicted": row.predicted, "low": row.low, "high": row.high,
                "measured": row.measured, "error": row.error, "in_range": row.is_inside,
            }
            for row in rows
        ],
    }  # fmt: skip
