"""`kvplan report`: convert run directories to HTML, Markdown, JSON, CSV."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.cli.drawing import require_libraries
from kvplan.cli.run_options import ReportOptions
from kvplan.measure.rundir import load_run
from kvplan.report.formats import SUFFIXES as SHARED
from kvplan.report.formats import rendered

if TYPE_CHECKING:
    from kvplan.report.run_data import ReportData

SUFFIXES = {".html": SHARED[".html"], ".md": SHARED[".md"], **SHARED}
NEEDED = ("jinja2", "matplotlib")  # for HTML; the other formats need no library


def report_command(options: ReportOptions) -> int:
    """Write the report in every requested format; Markdown to standard output if no file is named."""
    # checked before the work starts
    with output.report_files(options.output or [], "--output", SUFFIXES, force=options.force) as files:
        if any(file.format == "html" for file in files):
            require_libraries("report", *NEEDED)
        from kvplan.report.run_data import report_data

        data = report_data([load_run(Path(path)) for path in options.run_dirs], options.title)
        if not files:
            output.write(written(data, "markdown"))
        for file, text in [(file, written(data, file.format)) for file in files]:
            file.save(text)
    return 0


def written(data: "ReportData", format: str) -> str:
    if format == "html":  # only HTML has figures
        from kvplan.report.run_html import report_html

        return report_html(data)
    from kvplan.report.run_text import shapes

    return rendered(shapes(data), format)
