"""`kvplan reconcile`: a run directory -> predicted beside measured, and the exit code it means."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from kvplan import calibration
from kvplan.cli import output
from kvplan.cli.run_options import ReconcileOptions, RunFormat
from kvplan.errors import UsageError
from kvplan.reconcile import SOURCES, CapacityRow, Reconciliation, Row, document, exceeds, reconcile
from kvplan.report.lines import Line, columns, line, write
from kvplan.rundir import load_run
from kvplan.units import format_size, parse_fraction


def reconcile_command(options: ReconcileOptions) -> int:
    """Compare, print, and return 0, or 1 where --max-error is exceeded."""
    limit = None if options.max_error is None else parse_fraction(options.max_error, "--max-error")
    run = load_run(Path(options.run_dir))
    if limit is not None and (run.manifest.get("environment") or {}).get("is_wsl"):
        raise UsageError("--max-error: under WSL the driver does not say what a process holds; gate on another machine")
    known = None
    if options.calibration is not None:
        known = calibration.for_run(calibration.read(Path(options.calibration)), run.manifest)
    result = reconcile(run, known)
    if options.calibrate is not None:
        measured = {row.component: row.measured for row in result.rows}
        with output.report_files([options.calibrate], "--calibrate", {".json": "json"}) as (file,):
            file.save(json.dumps(calibration.document(run.manifest, measured, str(run.path)), indent=2) + "\n")
    show(result, options.format, options.color)
    if limit is None:
        return 0
    over = exceeds(result, limit)
    if over:
        output.tell("error", f"reconcile: off by more than {options.max_error}: {', '.join(over)}")
    return int(bool(over))


# --- showing ----------------------------------------------------------------------------------------------------------


def show(result: Reconciliation, format: RunFormat, color: str) -> None:
    match format:
        case "table":
            with output.standard_output():
                write(table_lines(result), output.console(color))
        case "json":
            output.write(json.dumps(document(result), indent=2, allow_nan=False))
        case "csv":
            output.write(as_csv(result))
        case "markdown":
            output.write(as_markdown(result))


def table_lines(result: Reconciliation) -> list[Line]:
    rows = [cells(row) for row in (*result.rows, result.total)]
    lines = [line(f"{result.model} on {result.device}: predicted beside measured", "bold"), line()]
    lines += columns(("component", "predicted", "measured", "error"), rows)
    lines += [line(), line(f"The rows add up to what the device reports: {format_size(result.reported)}.")]
    lines += [line(), *columns(("pool", "predicted", "measured", "unit"), [capacity_cells(r) for r in result.capacity])]
    lines += baseline_lines(result)
    return lines + [line(f"note: {gap}", "yellow") for gap in result.gaps]


def baseline_lines(result: Reconciliation) -> list[Line]:
    """Paged beside contiguous in the same pool, where the run has both."""
    results = result.run.manifest.get("results") or {}
    other = results.get("baseline")
    if not other:
        return []
    rows = [
        (name, f"{one['most_running']}", f"{one['output_tokens_per_s']:,.1f}", f"{waste(one, result):.1%}")
        for name, one in (("paged", results), (other["allocator"], other))
    ]
    headers = ("same pool", "most running", "tokens/s", "allocated, unused")
    return [line(), *columns(headers, rows)]


def waste(results: dict[str, Any], result: Reconciliation) -> float:
    """Share of the blocks handed out that holds no token, at the densest moment."""
    densest = results.get("densest") or {}
    used, tokens = densest.get("num_used_blocks") or 0, densest.get("num_kv_tokens") or 0
    if not used:
        return 0.0
    groups = int(result.run.manifest.get("groups") or 1)
    slots = used / groups * result.run.manifest["inputs"]["block_size"]
    return float(max(0.0, 1 - tokens / slots))


def cells(row: Row) -> tuple[str, str, str, str]:
    predicted = "-" if row.predicted is None else format_size(row.predicted)
    relative = "" if row.relative is None else f" ({row.relative:+.2%})"
    error = "-" if row.error is None else f"{row.error:+,} B{relative}"
    return row.component, predicted, format_size(row.measured), error


def capacity_cells(row: CapacityRow) -> tuple[str, str, str, str]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        if row.unit == "share":
            return f"{value:.1%}"
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"

    return row.name, text(row.predicted), text(row.measured), row.unit


def as_csv(result: Reconciliation) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("component", "predicted", "measured", "error", "relative"))
    for row in (*result.rows, result.total):
        writer.writerow((row.component, row.predicted, row.measured, row.error, row.relative))
    return text.getvalue()


def as_markdown(result: Reconciliation) -> str:
    from kvplan.report.text import escaped, rows_of

    headers = ("component", "predicted", "measured", "error", "predicted from", "measured by")
    rows = [(*cells(row), *SOURCES.get(row.component, ("", ""))) for row in (*result.rows, result.total)]
    return f"### {escaped(result.model)} on {result.device}\n\n{rows_of(headers, rows)}"
