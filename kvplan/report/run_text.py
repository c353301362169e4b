"""A report as Markdown for a pull request, as JSON and as CSV: the numbers of the HTML, in the same tables."""

from collections.abc import Iterable

from kvplan.core.records import from_fields
from kvplan.core.table import FACTS, Markdown, Table, Value, as_objects, markdown_text
from kvplan.documents.report import ReportDocument, RunObject
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import line
from kvplan.report.page import Block, folded, heading, page
from kvplan.report.run_data import ReportData, RunData

CSV_COLUMNS = ("run", "table", "row", "column", "unit", "value")
# Key of the sentence below a table; default: the table's name.
BELOW = {"memory": ("memory", "sums"), "stages": ("over_time", "kv", "throughput", "gpu")}
FOLDED = ("timeline", *FACTS)  # collapsed in Markdown


def shapes(data: ReportData) -> CommandAnswer:
    """The report in every format except HTML, which has figures; its screen is the Markdown page."""
    return CommandAnswer(
        lambda _: [line(text) for text in page(report_page(data)).split("\n")],
        lambda: report_document(data),
        lambda: report_table(data),
        lambda: report_page(data),
    )


def report_document(data: ReportData) -> ReportDocument:
    """Build kvplan/report@1: sizes in bytes, times in seconds, fractions from 0 to 1; null if there is no value."""
    shared = {table.name: as_objects(table) for table in shared_tables(data)}
    return {
        "schema": "kvplan/report@1",
        "title": data.title,
        "runs": [run_object(run) for run in data.runs],
        "tables": shared,
    }


def run_object(run: RunData) -> RunObject:
    tables = {name: as_objects(table) for name, table in run.tables.items()}
    recorded = {"path": str(run.run.path), "status": run.run.status, "recovered": run.run.recovered}
    return from_fields(RunObject, run, **recorded, notes=list(run.notes), tables=tables)


def shared_tables(data: ReportData) -> list[Table]:
    """Tables that belong to no single run."""
    return [table for table in (data.comparison, data.method) if table is not None and table.rows]


# --- csv --------------------------------------------------------------------------------------------------------------


def report_table(data: ReportData) -> Table:
    """One line per cell, so that tables of any shape fit in one file; `row` counts from 1 in each table."""
    rows: list[tuple[Value, ...]] = []
    for run in data.runs:
        texts = {"answer": run.answer, "banner": run.banner, "notes": "; ".join(run.notes) or None}
        rows += ((run.label, "", 1, name, "text", value) for name, value in texts.items())
        for table in run.tables.values():
            rows += csv_lines(table, run.label)
    for table in shared_tables(data):
        rows += csv_lines(table, "")
    return Table.of(CSV_COLUMNS, rows)


def csv_lines(table: Table, label: str) -> Iterable[tuple[Value, ...]]:
    for number, row in enumerate(table.rows, 1):
        for i, column in enumerate(table.columns):
            unit = "text" if isinstance(row[i], str) else table.unit(row, i)
            yield label, table.name, number, column.name, unit, row[i]


# --- markdown ---------------------------------------------------------------------------------------------------------


def report_page(data: ReportData) -> list[Block]:
    """The report without its figures: answers first, then every table."""
    parts: list[Block] = [heading(1, data.title)]
    for run in data.runs:
        parts += opening(run, is_one_of_many=len(data.runs) > 1)
    if data.comparison is not None:
        parts += [heading(2, data.comparison.title), data.comparison]
    for run in data.runs:
        parts += run_parts(run, is_one_of_many=len(data.runs) > 1)
    return parts + ([heading(2, "Method"), data.method] if data.method.rows else [])


def opening(run: RunData, *, is_one_of_many: bool) -> list[Block]:
    name = f"{markdown_text(run.label)}: " if is_one_of_many else ""
    warning: list[Block] = [Markdown(f"> {name}{markdown_text(run.banner)}")] if run.banner else []
    return [*warning, Markdown(f"**{name}{markdown_text(run.answer)}**")]


def run_parts(run: RunData, *, is_one_of_many: bool) -> list[Block]:
    parts: list[Block] = [heading(2, run.label if is_one_of_many else "Memory and capacity")]
    parts += [f"Note: {note}." for note in run.notes]
    for name, table in run.tables.items():
        if name in FOLDED:
            parts += folded(table.title, [table])
        else:
            parts += [heading(3, table.title), table]
        parts += [run.findings[key] for key in BELOW.get(name, (name,)) if key in run.findings]
    return parts
