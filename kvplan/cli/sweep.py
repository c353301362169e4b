"""`kvplan sweep`: every combination of lists of values, streamed to the requested outputs."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

from kvplan.cli import output
from kvplan.cli.drawing import FIGURES, require_libraries
from kvplan.cli.options import form_of
from kvplan.cli.output import ReportFile, report_files
from kvplan.cli.sweep_options import SweepOptions
from kvplan.cli.workers import at_work, workers_of
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.units import parse_count
from kvplan.hardware.prices import Prices
from kvplan.planning.grid import grid_of, refuse_unusable
from kvplan.planning.sweep import Curves, Front, Grid, SweepRow, all_rows, plainest
from kvplan.report import sweep_text as text
from kvplan.report.formats import FORMS, rendered

ROWS = 40
PROGRESS_S = 10.0
SPOOL_BYTES = 1 << 26


def sweep(options: SweepOptions) -> int:
    """Sweep and return the exit code: 0, or with --exit-code 1 if no combination fits."""
    with ExitStack() as stack:
        reports = stack.enter_context(report_files(options.report or [], force=options.force))
        figures = [options.figure] if options.figure else []
        pictures = stack.enter_context(report_files(figures, "--figure", FIGURES, force=options.force))
        limit = parse_count(options.limit, "--limit") if options.limit is not None else ROWS
        jobs = workers_of(options.jobs, options.ray)
        if pictures:
            require_libraries("--figure", "matplotlib")
        inputs, grid, prices = grid_of(form_of(options), options.models or [], options.prices)
        if options.sort == "users-per-dollar" and prices is None:
            raise UsageError("--sort users-per-dollar", "needs GPU prices", "add --prices FILE")
        output.say(inputs, quiet=options.quiet)
        refuse_unusable(grid)
        run = Run(options, grid, prices, limit, [Sink(report.format, report) for report in reports])
        with at_work(jobs, quiet=options.quiet):
            run.take(progress(all_rows(grid, jobs), grid.count, quiet=options.quiet))
            run.finish()
        for picture in pictures:
            picture.save(drawn(run.curves, picture.format))
    return int(options.exit_code and not run.tally.fitting)


def drawn(curves: Curves, format: str) -> bytes:
    from kvplan.report import sweep_figures

    return sweep_figures.picture(curves, format)


# --- writing ----------------------------------------------------------------------------------------------------------


def progress(chunks: Iterable[list[SweepRow]], total: int, *, quiet: bool) -> Iterator[list[SweepRow]]:
    """Pass the chunks through, printing a line every ten seconds."""
    done, last = 0, time.monotonic()
    for rows in chunks:
        yield rows
        done += len(rows)
        if not quiet and done < total and time.monotonic() - last > PROGRESS_S:
            output.tell("note", f"{done:,} of {total:,} combinations")
            last = time.monotonic()


class Sink:
    """Destination of the answer in one format: standard output, or a report, which is buffered until complete."""

    def __init__(self, format: str, report: ReportFile | None = None) -> None:
        self.format, self.form, self.report = format, FORMS[format], report
        self.is_open, self.has_rows = True, False
        self.spool: IO[bytes] | None = None
        if report is not None:
            self.spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 -- closed once the report is whole

    @property
    def streams(self) -> bool:
        return self.format == "json" or self.form.lines is not None

    def put(self, part: str) -> None:
        if self.spool is not None:
            try:
                self.spool.write(part.encode())
            except OSError as error:
                raise EnvironmentProblem(
                    "a temporary file",
                    f"cannot be written ({error.strerror})",
                    f"check the disk of {tempfile.gettempdir()}",
                ) from error
        elif self.is_open:
            self.is_open = False
            with output.standard_output():  # exits without an error if the reader closed the pipe
                output.put(part)
                self.is_open = True

    def rows(self, rows: list[SweepRow]) -> None:
        if self.form.lines is not None:
            self.put(self.form.lines(rows))
        elif self.format == "json":
            self.put(text.json_rows(rows, first=not self.has_rows))
        self.has_rows = self.has_rows or bool(rows)

    def close(self) -> None:
        if self.report is not None and self.spool is not None:
            self.spool.seek(0)
            self.report.save(self.spool)
            self.spool.close()


@dataclass
class Run:
    """One pass over all rows: streams, counts and keeps them."""

    options: SweepOptions
    grid: Grid
    prices: Prices | None
    limit: int
    reports: list[Sink]

    def __post_init__(self) -> None:
        self.tally, self.front, self.curves = text.Tally(), Front(), Curves()
        rows = (self.grid.requests, *self.grid.copies.values())
        models = list(dict.fromkeys(request.spec.name for requests in rows for request in requests))
        self.alike = 0  # combinations with the same users as one that is kept
        self.best = text.Best(self.limit, text.key_of(self.options.sort, models))
        self.sinks = [*self.reports, Sink(self.options.format)]

    def take(self, chunks: Iterator[list[SweepRow]]) -> None:
        """Process every row once; stop early if no output is left."""
        self._head()
        number = 0
        for rows in chunks:
            self.tally.add(rows)
            for i, row in enumerate(rows):
                if self.options.figure:
                    self.curves.offer(row)
                if self.options.pareto:
                    self.front.offer(number + i, row)
            number += len(rows)
            if not self.options.pareto:
                self._give(rows)
            if not any(sink.is_open for sink in self.sinks):
                break
        if self.options.pareto:
            plain_rows = plainest(self.grid, self.front.ties)
            self.alike = sum(others for _, others in plain_rows)
            self._give([row for row, _ in plain_rows])

    def _head(self) -> None:
        for sink in self.sinks:
            if sink.form.lines is not None:
                sink.put(sink.form.lines([SweepRow._fields]))
            elif sink.format == "json":
                sink.put(text.json_head(self.prices.source if self.prices else None, pareto=self.options.pareto))

    def _give(self, rows: list[SweepRow]) -> None:
        if not all(sink.streams for sink in self.sinks):
            self.best.add(rows)
        for sink in self.sinks:
            sink.rows(rows)

    def finish(self) -> None:
        """Write what follows the rows, and put reports in place."""
        possible = self.tally.fitting + self.tally.short
        if self.options.pareto:
            possible = len(self.front.ties)
        left_out, pareto, alike = possible - len(self.best.rows), self.options.pareto, self.alike
        shown_rows = text.Shown(self.grid, self.best.rows, self.tally, left_out, pareto, alike)
        for sink in self.sinks:
            if sink.format == "json":
                sink.put(text.json_tail(self.tally, self.alike))
            elif sink.format == "table":
                output.show(shown_rows.parts(), self.options.color)
            elif not sink.streams:
                sink.put(rendered(shown_rows.answer(self._document), sink.format))
            sink.close()

    def _document(self) -> Any:
        """kvplan/sweep@1 of the kept rows, for a format made from the document."""
        import json

        head = text.json_head(self.prices.source if self.prices else None, pareto=self.options.pareto)
        return json.loads(head + text.json_rows(self.best.rows, first=True) + text.json_tail(self.tally, self.alike))
