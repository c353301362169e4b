"""`kvplan report`: run directories -> HTML, Markdown, JSON, CSV."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.cli.drawing import require_libraries
from kvplan.cli.run_options import ReportOptions
from kvplan.measure.rundir import load_run

if TYPE_CHECKING:
    from kvplan.report.run_data import ReportData

SUFFIXES = {".html": "html", ".md": "markdown", ".json": "json", ".csv": "csv"}
NEEDED = ("jinja2", "matplotlib")  # by HTML; the rest is written without any library


def report_command(options: ReportOptions) -> int:
    """Write the report in every format asked for; Markdown to standard output where no file is named."""
    # checked before the work starts
    with output.report_files(options.output or [], "--output", SUFFIXES, force=options.force) as files:
        if any(file.format == "html" for file in files):
            require_libraries("report", *NEEDED)
        from kvplan.report.run_data import report_data

        data = report_data([load_run(Path(path)) for path in options.run_dirs], options.title)
        if not files:
            output.write(rendered(data, "markdown"))
        for file, text in [(file, rendered(data, file.format)) for file in files]:
            file.save(text)
    return 0


def rendered(data: "ReportData", format: str) -> str:
    return renderer(format)(data)


def renderer(format: str) -> Callable[["ReportData"], str]:
    """The function that writes a format; figures are loaded for HTML only."""
    from kvplan.report import run_text

    match format:
        case "html":
            from kvplan.report.run_html import report_html

            return report_html
        case "json":
            return run_text.report_json
        case "csv":
            return run_text.report_csv
        case _:
            return run_text.report_markdown
