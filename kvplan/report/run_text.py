"""A report as Markdown for a pull request, as JSON and as CSV: the numbers of the HTML, in the same tables."""

import json
from collections.abc import Iterable
from typing import Any

from kvplan.core.csv_text import csv_text
from kvplan.report.run_cells import Table, Value, cell_text, words
from kvplan.report.run_data import ReportData, RunData
from kvplan.report.text import escaped, rows_of

REPORT = "kvplan/report@1"
CSV_COLUMNS = ("run", "table", "row", "column", "unit", "value")
# Sentences under a table; else that of its own name.
BELOW = {"memory": ("memory", "sums"), "stages": ("over_time", "kv", "throughput", "gpu")}
FACTS = ("run", "environment")
FOLDED = ("timeline", *FACTS)  # in Markdown, behind a click


def report_json(data: ReportData) -> str:
    """kvplan/report@1: sizes in bytes, times in seconds, shares from 0 to 1; null where there is no value."""
    shared = {table.name: rows_as_objects(table) for table in shared_tables(data)}
    document = {"schema": REPORT, "title": data.title, "runs": [run_object(run) for run in data.runs], "tables": shared}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def run_object(run: RunData) -> dict[str, Any]:
    return {
        "label": run.label,
        "path": str(run.run.path),
        "status": run.run.status,
        "recovered": run.run.recovered,
        "answer": run.answer,
        "banner": run.banner,
        "notes": list(run.notes),
        "findings": run.findings,
        "tables": {name: rows_as_objects(table) for name, table in run.tables.items()},
    }


def rows_as_objects(table: Table) -> list[dict[str, Value]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def shared_tables(data: ReportData) -> list[Table]:
    """The tables that belong to no run."""
    return [table for table in (data.comparison, data.method) if table is not None and table.rows]


# --- csv --------------------------------------------------------------------------------------------------------------


def report_csv(data: ReportData) -> str:
    """One line per cell, so that tables of all shapes go into one file; `row` counts from 1 in each table."""
    rows: list[tuple[Value, ...]] = [CSV_COLUMNS]
    for run in data.runs:
        texts = {"answer": run.answer, "banner": run.banner, "notes": "; ".join(run.notes) or None}
        rows += ((run.label, "", 1, name, "text", value) for name, value in texts.items())
        for table in run.tables.values():
            rows += csv_lines(table, run.label)
    for table in shared_tables(data):
        rows += csv_lines(table, "")
    return csv_text(rows)


def csv_lines(table: Table, label: str) -> Iterable[tuple[Value, ...]]:
    for number, row in enumerate(table.rows, 1):
        for i, column in enumerate(table.columns):
            unit = "text" if isinstance(row[i], str) else table.unit(row, i)
            yield label, table.name, number, column.name, unit, row[i]


# --- markdown ---------------------------------------------------------------------------------------------------------


def report_markdown(data: ReportData) -> str:
    """The report without its figures: answers first, then every table."""
    parts = [f"# {escaped(data.title)}"]
    for run in data.runs:
        parts += opening(run, is_one_of_many=len(data.runs) > 1)
    if data.comparison is not None:
        parts += [f"## {data.comparison.title}", markdown_table(data.comparison)]
    for run in data.runs:
        parts += run_parts(run, is_one_of_many=len(data.runs) > 1)
    if data.method.rows:
        parts += ["## Method", markdown_table(data.method)]
    return "\n\n".join(parts) + "\n"


def opening(run: RunData, *, is_one_of_many: bool) -> list[str]:
    name = f"{escaped(run.label)}: " if is_one_of_many else ""
    warning = [f"> {name}{escaped(run.banner)}"] if run.banner else []
    return [*warning, f"**{name}{escaped(run.answer)}**"]


def run_parts(run: RunData, *, is_one_of_many: bool) -> list[str]:
    heading = f"## {escaped(run.label)}" if is_one_of_many else "## Memory and capacity"
    parts = [heading, *(f"Note: {escaped(note)}." for note in run.notes)]
    for name, table in run.tables.items():
        if name in FOLDED:
            parts += [f"<details><summary>{table.title}</summary>", markdown_table(table), "</details>"]
        else:
            parts += [f"### {table.title}", markdown_table(table)]
        parts += [escaped(run.findings[key]) for key in BELOW.get(name, (name,)) if key in run.findings]
    return parts


def markdown_table(table: Table) -> str:
    """Columns of text to the left, numbers to the right; units stand with the numbers."""
    places = table.shown_places
    headers = [words(table.columns[i].name) for i in places]
    rows = [[escaped(cell_text(table, row, i)) for i in places] for row in table.rows]
    num_left = len(places) if table.name in FACTS else sum(table.columns[i].unit == "text" for i in places)
    return rows_of(headers, rows, left=num_left)
