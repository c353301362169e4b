"""A report as one standalone HTML file: no network, no script, figures as inline SVG."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.core.files import printable
from kvplan.core.table import Table, Value, cell_text, words
from kvplan.report.run_data import ReportData, RunData
from kvplan.report.run_figures import comparison_drawing, is_drawable, run_drawings
from kvplan.report.templates import NO_BREAK, rendered_page

SUMS = ("total", "reported", "not_reached_again", "held_before")


def report_html(data: ReportData) -> str:
    """Render the page; the template escapes everything of unknown origin."""
    return rendered_page(
        "run.html.jinja",
        title=printable(data.title, 300),
        runs=[shown_run(run, f"run-{i}") for i, run in enumerate(data.runs, 1)],
        comparison=None if data.comparison is None else shown_table(data.comparison, "all"),
        comparison_drawing=comparison_drawing(data),
        method=shown_table(data.method, "all"),
    )


def shown_run(run: RunData, slug: str) -> Mapping[str, Any]:
    return {
        "id": slug,
        "label": printable(run.label, 200),
        "answer": run.answer,
        "banner": run.banner,
        "notes": run.notes,
        "findings": defaultdict(str, run.findings),
        "zeros": zeros_text(run),
        "tables": {name: shown_table(table, slug) for name, table in run.tables.items()},
        "drawings": run_drawings(run, slug),
        "has_samples": is_drawable(run.samples, "t"),
    }


def is_zero(row: Sequence[Value]) -> bool:
    """True if a component of the memory table is 0 B on both sides: a sentence names it instead of a row."""
    return row[0] not in SUMS and row[1:3] == (0, 0)


def zeros_text(run: RunData) -> str:
    """List the components omitted from the table because both sides are 0."""
    rows = run.tables["memory"].rows if "memory" in run.tables else ()
    names = [words(str(row[0])) for row in rows if is_zero(row)]
    return f"Predicted and measured 0 B: {', '.join(names)}." if names else ""


def shown_table(table: Table, slug: str) -> Mapping[str, Any]:
    """A table's cells for the template: text, the number behind it, and its alignment."""
    places = table.shown_places
    return {
        "id": f"{slug}-{table.name}",
        "title": table.title,
        "columns": [
            {"label": words(table.columns[i].name), "is_number": table.columns[i].unit != "text"} for i in places
        ],
        "rows": [
            {"kind": kind_of(table, row), "cells": [shown_cell(table, row, i) for i in places]} for row in table.rows
        ],
    }


def kind_of(table: Table, row: Sequence[Value]) -> str:
    if table.name == "memory" and is_zero(row):
        return "zero"
    return "sum" if row[0] in SUMS else ""


def shown_cell(table: Table, row: tuple[Value, ...], i: int) -> Mapping[str, Any]:
    value, is_text = row[i], isinstance(row[i], str)
    return {
        "value": value,
        "text": cell_text(table, row, i).replace(" ", NO_BREAK if not is_text else " "),
        "is_number": not is_text and table.columns[i].unit != "text",
        "is_value": not is_text,
    }
