"""Runs in the form a report shows: HTML, Markdown, JSON and CSV are all written from these tables and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, printable
from kvplan.core.table import Column, Table, Value
from kvplan.measure.reconcile import COMPONENTS, Reconciliation, sources_of
from kvplan.measure.run_types import Sample
from kvplan.measure.rundir import Run
from kvplan.measure.techniques import SOURCES as OUTSIDE
from kvplan.report import run_tables
from kvplan.report.run_contexts import contexts_table
from kvplan.report.run_record import Stage, compared, device_of, number, stages_of, timed
from kvplan.report.run_sentences import answer, banner, findings

SENTENCE = 2000  # characters


@dataclass(frozen=True, slots=True)
class RunData:
    """One run in the form a report shows.

    label     its directory's name, unique in the report
    answer    one sentence: what fits, and how far the prediction was off
    banner    status to read first: killed, interrupted, failed; None for a complete run
    notes     irregularities in the files
    tables    by name, in display order; empty ones are omitted
    findings  what a figure shows, by the figure's name
    memory    the reconciliation, if there is one
    samples   those with a time, in time order
    """

    run: Run
    label: str
    model: str
    device: str
    answer: str
    banner: str | None
    notes: tuple[str, ...]
    tables: dict[str, Table]
    findings: dict[str, str]
    memory: Reconciliation | None
    samples: list[Sample]
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that a report shows; `comparison` covers several runs and is None for one."""

    title: str
    runs: tuple[RunData, ...]
    comparison: Table | None
    method: Table


def report_data(runs: Sequence[Run], title: str | None = None) -> ReportData:
    """Convert runs to report data.

    Raises InvalidInputError for a manifest that kvplan cannot have written.
    """
    data = tuple(run_data(run, label) for run, label in zip(runs, labels(runs), strict=True))
    comparison = comparison_table(data) if len(data) > 1 else None
    return ReportData(title or default_title(data), data, comparison, method_table(data))


def default_title(runs: Sequence[RunData]) -> str:
    models = list(dict.fromkeys(data.model for data in runs))
    return f"Predicted and measured: {', '.join(models)}"


def labels(runs: Sequence[Run]) -> list[str]:
    """Directory names of the runs; duplicates are numbered in the given order."""
    names = [run.path.resolve().name or "run" for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def run_data(run: Run, label: str) -> RunData:
    try:
        return _run_data(run, label)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, ZeroDivisionError, AssertionError) as error:
        raise InvalidInputError(
            path_text(run.path), f"run.json cannot be read ({type(error).__name__}: {error})", "the file is damaged"
        ) from error


def _run_data(run: Run, label: str) -> RunData:
    samples = timed(run.samples)
    stages = stages_of(run, samples)
    memory, gaps = compared(run)
    model = str(run.model.get("name") or "unknown model")
    device = device_of(run)
    built = [
        run_tables.memory_table(memory),
        run_tables.outside_table(memory),
        run_tables.pool_table(memory),
        contexts_table(run),
        run_tables.savings_table(run),
        run_tables.allocators_table(run),
        run_tables.stages_table(run, samples, stages),
        run_tables.run_table(run, model, device),
        run_tables.environment_table(run),
        run_tables.timeline_table(samples),
    ]
    tables = {table.name: table for table in built if table.rows}
    banner_text = banner(run, samples)
    sentences = findings(run, samples, memory, tables)
    return RunData(
        run=run,
        label=label,
        model=model,
        device=device,
        answer=sentence(answer(run, model, device, memory, tables)),
        banner=None if banner_text is None else sentence(banner_text),
        notes=tuple(dict.fromkeys(sentence(note) for note in (*run.notes, *gaps))),
        tables=tables,
        findings={name: sentence(finding) for name, finding in sentences.items()},
        memory=memory,
        samples=samples,
        stages=stages,
    )


def sentence(text: str) -> str:
    """Escape a sentence for display: it may contain names of unknown origin."""
    return printable(text, SENTENCE)


def comparison_table(runs: Sequence[RunData]) -> Table:
    """Several runs compared, one row each."""
    columns = (
        Column("run"), Column("model"), Column("device"), Column("status"),
        Column("weights", "bytes"), Column("weights_error", "relative"),
        Column("kv_cache", "bytes"), Column("kv_cache_error", "relative"),
        Column("total", "bytes"), Column("total_error", "relative"),
        Column("num_blocks", "count"), Column("most_running", "count"), Column("output_tokens_per_s", "tokens/s"),
    )  # fmt: skip
    return Table("comparison", "Side by side", columns, tuple(comparison_row(data) for data in runs))


def comparison_row(data: RunData) -> tuple[Value, ...]:
    rows = {str(row[0]): row for row in data.tables["memory"].rows} if "memory" in data.tables else {}
    bytes_and_errors: list[Value] = []
    for name in ("weights", "kv_cache", "total"):
        bytes_and_errors += [rows[name][2], rows[name][3]] if name in rows else [None, None]
    results = data.run.results
    return (
        data.label,
        data.model,
        data.device,
        data.run.status,
        *bytes_and_errors,
        number(data.run.memory, "num_blocks"),
        number(results, "most_running"),
        number(results, "output_tokens_per_s"),
    )


def method_table(runs: Sequence[RunData]) -> Table:
    """Sources of the two numbers of each row."""
    columns = (Column("component"), Column("predicted_from"), Column("measured_by"))
    devices = dict.fromkeys(data.memory.device for data in runs if data.memory is not None)
    sources = {(name, sources_of(name, device)): None for name in COMPONENTS for device in devices}
    outside = dict.fromkeys(row.component for data in runs if data.memory for row in data.memory.outside)
    rows = [*((name, *two) for name, two in sources), *((name, *OUTSIDE[name]) for name in outside)]
    return Table("method", "What each row is", columns, tuple(rows))
