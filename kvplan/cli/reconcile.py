"""`kvplan reconcile`: compare a run directory with its prediction, and set the exit code."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.limits import read as limits_of
from kvplan.core.table import Table, words
from kvplan.core.units import format_size
from kvplan.documents.reconciliation import document
from kvplan.measure.reconcile import UNKNOWN, Reconciliation, reconcile_run, sources_of, sums
from kvplan.measure.run_capacity import ServedWorkload, served
from kvplan.measure.run_manifest import check_objects, inputs_of, predicted_of, spec_of
from kvplan.measure.rundir import Run, load_run
from kvplan.measure.techniques import Saving
from kvplan.models.spec import FullAttention, LatentAttention
from kvplan.report.drawing import side_by_side
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, bullets, heading, with_own_names
from kvplan.servers.logs.measurement import ComponentRow, exceeds
from kvplan.servers.plans import calibration


def reconcile_command(options: ReconcileOptions) -> int:
    """Compare, print, and return 0, or 1 if --max-error is exceeded."""
    options = with_source(options)
    check_sources(options)
    with output.report_files(options.report or [], force=options.force) as reports:
        return reconciled(options, reports)


def reconciled(options: ReconcileOptions, reports: Sequence[output.ReportFile]) -> int:
    if options.bench is not None:
        from kvplan.cli.reconcile_bench import reconcile_bench

        return reconcile_bench(options, reports)
    limits = None if options.max_error is None else limits_of(options.max_error, "--max-error")
    if options.run_dir is None:
        from kvplan.cli.reconcile_log import reconcile_server

        return reconcile_server(options, limits, reports)
    run = load_run(Path(options.run_dir))
    check_objects(run)
    if limits is not None and (run.manifest.get("environment") or {}).get("is_wsl"):
        raise UsageError(
            "--max-error", "under WSL the driver does not report memory per process", "measure on another machine"
        )
    known = None
    if options.calibration is not None:
        known = calibration.read(Path(options.calibration))
        calibration.check_run(known, run.manifest)
    result = reconcile_run(run, known)
    if limits is not None:
        limits.check((row.component for row in result.compared), "--max-error")
    if options.calibrate is not None:
        measured = {row.component: row.size for row in result.rows}
        with output.report_files([options.calibrate], "--calibrate", {".json": "json"}, force=options.force) as (file,):
            calibrated = calibration.document(
                run.manifest, run.status, measured, result.activation_coefficient, str(run.path)
            )
            calibrated["step_time"] = step_time(run)
            file.save(json.dumps(calibrated, indent=2) + "\n")
    output.answer(answer(result), options.format, options.color, reports)
    over = [] if limits is None else exceeds([(row.component, row) for row in result.compared], limits)
    if over:
        output.tell("error", f"reconcile: off by more than {limits_text(options)}: {', '.join(over)}")
    return int(bool(over))


def limits_text(options: ReconcileOptions) -> str:
    """--max-error as typed."""
    return ", ".join(printable(text, 80) for text in options.max_error or [])


ONE_OF = "RUN_DIR, --log FILE, --metrics URL and --bench FILE"


def with_source(options: ReconcileOptions) -> ReconcileOptions:
    """A server's page or log that stands where a run does, as such."""
    source = options.run_dir
    if source is None or options.log is not None or options.metrics is not None:
        return options
    if source.startswith(("http://", "https://")):
        return replace(options, run_dir=None, metrics=source)
    return replace(options, run_dir=None, log=source) if source == "-" or Path(source).is_file() else options


def check_sources(options: ReconcileOptions) -> None:
    """Require exactly one of a run, a log, a page or a result; refuse options that do not apply to it."""
    sources = {"RUN_DIR": options.run_dir, "--log": options.log, "--metrics": options.metrics, "--bench": options.bench}
    sources_given = [name for name, value in sources.items() if value is not None]
    if len(sources_given) != 1:
        problem = "cannot be combined" if sources_given else "missing"
        raise UsageError(" and ".join(sources_given) or "RUN_DIR", problem, f"give one of {ONE_OF}")
    if sources_given != ["RUN_DIR"] and options.calibrate is not None:
        raise UsageError("--calibrate", f"needs a run, {sources_given[0]} has no samples", "give RUN_DIR")
    if sources_given == ["RUN_DIR"]:
        remedy = "use it with --log, --metrics or --bench"
        form_of(options).refuse_except(("calibration",), "a run records its own arguments", remedy)


def step_time(run: Run) -> calibration.MeasuredSteps | None:
    """Step times of the run, for `simulate`, or None if its samples lack them or its layers use windows."""
    from kvplan.simulate.step_fit import fitted

    spec = spec_of(run)
    if any(not isinstance(cache, FullAttention | LatentAttention) for caches in spec.layers for cache in caches):
        return None
    return fitted(run.samples, spec.name, predicted_of(run).bytes_per_token)


# --- showing ----------------------------------------------------------------------------------------------------------


def answer(result: Reconciliation) -> CommandAnswer:
    return CommandAnswer.of(
        result, screen, document, rows_table, page, lambda _: side_by_side("Predicted and measured", figures(result))
    )


def figures(result: Reconciliation) -> Iterator[tuple[str, float | None, float, str, str]]:
    for row in (*result.rows, result.total):
        _, predicted, measured, _ = cells(row)
        yield words(row.component), row.predicted, row.size, predicted, measured


def screen(result: Reconciliation) -> list[Part]:
    rows = Table.of(("component", "predicted", "measured", "error"), map(cells, (*result.rows, result.total)))
    parts: list[Part] = [line(title(result), "bold"), line(), rows, line(), *map(line, sums(result))]
    parts += [part for table in (*outside_tables(result), *pool_tables(result)) for part in (line(), table)]
    return parts + [line(f"note: {printable(gap, 400)}", "yellow") for gap in result.gaps]


def outside_tables(result: Reconciliation) -> list[Table]:
    """KV in host memory and on disk, if there is any."""
    headers = ("beyond the device", "predicted", "measured", "error")
    return [Table.of(headers, map(cells, result.outside))] if result.outside else []


def pool_tables(result: Reconciliation) -> list[Table]:
    """Figures of the pool, what each technique saved, and what each allocator served if there are several."""
    tables = [Table.of(("pool", "predicted", "measured", "unit"), map(capacity_cells, result.capacity))]
    if result.savings:
        tables.append(Table.of(("saved by", "saved", "of", "unit", "share"), map(saving_cells, result.savings)))
    allocators = served(result.run)
    return tables + ([Table.of(SERVED_HEADERS, map(served_cells, allocators))] if len(allocators) > 1 else [])


def title(result: Reconciliation) -> str:
    return f"{where(result)}: predicted vs measured"


def where(result: Reconciliation) -> str:
    ranks = int(inputs_of(result.run).tensor_parallel_size)
    of = f", rank 0 of {ranks}" if ranks > 1 else ""
    return f"{printable(result.model)} on {result.device}{of}"


SERVED_HEADERS = ("same pool", "most running", "tokens/s", "preemptions", "allocated, unused")


def served_cells(served: ServedWorkload) -> tuple[str, ...]:
    rate = f"{served.output_tokens_per_s:,.1f}"
    waste = "-" if served.waste is None else f"{served.waste:.1%}"
    return printable(served.allocator, 40), f"{served.most_running}", rate, f"{served.preemptions}", waste


def saving_cells(saving: Saving) -> tuple[str, ...]:
    form = ",.0f" if saving.unit == "tokens" else ",.1f"
    return saving.technique, f"{saving.saved:{form}}", f"{saving.base:{form}}", saving.unit, f"{saving.share:.1%}"


def cells(row: ComponentRow) -> tuple[str, str, str, str]:
    predicted = "-" if row.predicted is None else format_size(int(row.predicted))
    relative = "" if row.relative is None else f" ({row.relative:+.2%})"
    error = "-" if row.error is None else f"{row.error:+,} B{relative}"
    return row.component, predicted, format_size(row.size), error


def capacity_cells(row: ComponentRow) -> tuple[str, str, str, str]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        if row.unit == "share":
            return f"{value:.1%}"
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"

    return row.component, text(row.predicted), text(row.measured), row.unit


def rows_table(result: Reconciliation) -> Table:
    """Components, KV beyond the device, the pool's figures, what each technique saved and each allocator served, by
    `kind`: only rows of the kind `bytes` add up.
    """
    rows: list[tuple[Any, ...]] = []
    for row in (*result.rows, result.total):
        rows.append(("bytes", row.component, row.predicted, row.measured, row.error, row.relative))
    for row in result.outside:
        kind = row.component.partition("_")[0]
        rows.append((f"{kind} bytes", row.component, row.predicted, row.measured, row.error, row.relative))
    for figure in result.capacity:
        rows.append((figure.unit, figure.component, _whole(figure.predicted), _whole(figure.measured), None, None))
    for saving in result.savings:
        rows.append((f"saved {saving.unit}", saving.technique, None, _whole(saving.saved), None, None))
        rows.append((f"saved {saving.unit}", f"{saving.technique}_of", None, _whole(saving.base), None, None))
    for part in served(result.run):
        figures = {name: value for name, value in asdict(part).items() if name != "allocator"}
        rows += ((printable(part.allocator, 40), name, None, value, None, None) for name, value in figures.items())
    return Table.of(("kind", "name", "predicted", "measured", "error", "relative"), rows)


def _whole(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value


def told_sources(row: ComponentRow, result: Reconciliation) -> tuple[str, str]:
    """(source of the prediction, source of the measurement) of a row: a calibration if it replaces a formula."""
    source, measure = sources_of(row.component, result.device)
    if source == UNKNOWN and row.predicted is not None and result.calibration is not None:
        source = f"as {result.calibration} measured it"
    return source, measure


def page(result: Reconciliation) -> list[Block]:
    headers = ("component", "predicted", "measured", "error", "predicted from", "measured by")
    rows = ((*cells(row), *told_sources(row, result)) for row in (*result.rows, result.total))
    gaps = [bullets([gap], "*") for gap in result.gaps]
    tables = map(with_own_names, (*outside_tables(result), *pool_tables(result)))
    table = with_own_names(Table.of(headers, rows), left=(0, 4, 5))
    return [heading(3, answer_text(result)), table, *sums(result), *tables, *gaps]


def answer_text(result: Reconciliation) -> str:
    """Error of the prediction, in a sentence."""
    from kvplan.report.run_sentences import accuracy

    return f"{where(result)}: {accuracy(result)}"
