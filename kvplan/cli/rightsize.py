"""`kvplan rightsize`: from two pages of a live server, its load, its use of resources, and the capacity needed."""

import time
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.run_options import RightsizeOptions
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_duration
from kvplan.measure.server_metrics import MetricsError, page_text, shown_url
from kvplan.measure.usage import Usage, usage
from kvplan.report.formats import CommandAnswer

READ_AFTER_S = 60.0  # between two reads of a URL


def rightsize(options: RightsizeOptions) -> int:
    """Print the answer and return exit code 0."""
    growth = growth_of(options.growth)
    with output.report_files(options.report or [], force=options.force) as reports:
        response = answer(usage_of(options), growth)
        output.answer(response, options.format, options.color, reports)
    return 0


def growth_of(text: str | None) -> float:
    if text is None:
        return 1.0
    try:
        growth = float(text.removesuffix("x"))
    except ValueError:
        growth = 0.0
    if not 0 < growth <= 1000:
        raise UsageError("--growth", f"not a factor above 0 ({printable(text, 40)!r})", "write one like 2 or 1.5x")
    return growth


def usage_of(options: RightsizeOptions) -> Usage:
    first, second = options.first, options.second
    if first is None:
        raise UsageError("FIRST", "missing", "name two pages of a server, or its URL: http://localhost:8000/metrics")
    seconds = None if options.interval is None else parse_duration(options.interval, "--interval")
    if second is None:
        if "://" not in first:
            raise UsageError("SECOND", "missing", "name a later copy of the same page, or a URL")
        return watched(first, seconds or READ_AFTER_S)
    if first == second and "://" not in first:
        raise UsageError("SECOND", "is the first page", "name a later copy of the same page")
    return read(first, second, page_text(first), page_text(second), seconds)


def watched(url: str, seconds: float) -> Usage:
    """Usage between two reads of a server's page, with the actual time between them."""
    start = time.monotonic()
    page = page_text(url)
    output.tell("note", f"{shown_url(url)} is read again in {seconds:g} s")
    time.sleep(seconds)
    later = page_text(url)
    return read(url, url, page, later, time.monotonic() - start)


def read(first: str, second: str, page: str, later: str, seconds: float | None) -> Usage:
    try:
        return usage(page, later, seconds)
    except MetricsError as error:
        where = f"{source_text(first)}, {source_text(second)}"
        raise InvalidInputError(where, f"{error}", "name two pages of one server, the earlier one first") from error


def source_text(source: str) -> str:
    return shown_url(source) if "://" in source else printable(str(Path(source)), 200)


def answer(used: Usage, growth: float) -> CommandAnswer:
    from kvplan.report import rightsize_text as text

    return CommandAnswer(
        screen=lambda _: text.rightsize_lines(used, growth),
        document=lambda: text.rightsize_document(used, growth),
        rows=lambda: text.rightsize_table(used),
        page=lambda: list(text.rightsize_page(used, growth)),
    )
