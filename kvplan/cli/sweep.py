"""`kvplan sweep`: every combination of lists of values, streamed to the requested outputs."""

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from kvplan.cli import output
from kvplan.cli.drawing import FIGURES, require_libraries
from kvplan.cli.inputs import Inputs, gpus_of, load_of, read, refuse_undrafted, say
from kvplan.cli.options import WorkloadOptions, engine_pairs, flag_of, refuse_two
from kvplan.cli.output import ReportFile, report_files
from kvplan.cli.speculation import FLAG, config_of, in_parts
from kvplan.cli.sweep_options import SweepOptions
from kvplan.cli.workers import at_work, workers_of
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_count, parse_tokens, split_list
from kvplan.hardware import prices as price_file
from kvplan.hardware.prices import Prices
from kvplan.planning.plan import Request
from kvplan.planning.sweep import Curves, Front, Grid, Row, all_rows, check_size, plainest, unusable
from kvplan.report import sweep_text as text
from kvplan.report.formats import FORMS, rendered
from kvplan.servers.base import parse_engine
from kvplan.servers.words.argument_values import read_argument

# Engine arguments that may be lists; --gpu, --ctx, --engine, --mean-tokens and MODEL may be, too.
LISTS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "quantization", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "num_speculative_tokens",
)  # fmt: skip
SHORT_FLAGS = {
    "tensor_parallel_size": "--tp", "pipeline_parallel_size": "--pp", "data_parallel_size": "--dp",
    "prefill_context_parallel_size": "--pcp", "decode_context_parallel_size": "--dcp",
}  # fmt: skip
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
        inputs, grid, prices = grid_of(options)
        if options.sort == "users-per-dollar" and prices is None:
            raise UsageError("--sort users-per-dollar", "needs GPU prices", "add --prices FILE")
        say(inputs, quiet=options.quiet)
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


# --- reading ----------------------------------------------------------------------------------------------------------


def grid_of(options: SweepOptions) -> tuple[Inputs, Grid, Prices | None]:
    """The combinations, with the notes from parsing the options."""
    arguments = {name: values for name, values in arguments_of(in_parts(options)).items() if len(values) > 1}
    if arguments.keys() & SHORT_FLAGS.keys():
        gpus_of(options)  # refuses a number of GPUs: use --tp
    config = config_of(options)
    if config is not None:
        for size in arguments.get("tensor_parallel_size", ()):
            config.check_ranks(size, FLAG)
    lists = {"engine": parts(options.engine, "--engine"), "mean_tokens": parts(options.mean_tokens, "--mean-tokens")}
    cleared: dict[str, Any] = dict.fromkeys(arguments)
    cleared |= {name: None for name, values in lists.items() if len(values) > 1}
    if options.quantization == "none":
        cleared |= {"quantization": None}
    requests: list[Request] = []
    inputs = Inputs([], 0)
    shape = (0, 0, 0)
    models: list[str | None] = [*dict.fromkeys(options.models or [])]
    for model in models or [None]:
        per_model = workload_options(options, model=model, **cleared)
        model_inputs = read(per_model, lambda context, spec, per_model=per_model: load_of(per_model, context, spec))  # type: ignore[misc] # bound now
        contexts = len(model_inputs.requests) // model_inputs.num_gpus
        # read() nests GPUs in contexts; a grid nests contexts in GPUs
        requests += [
            model_inputs.requests[c * model_inputs.num_gpus + g]
            for g in range(model_inputs.num_gpus)
            for c in range(contexts)
        ]
        shape = (shape[0] + 1, model_inputs.num_gpus, contexts)
        inputs.notes += model_inputs.notes
        inputs.hints += model_inputs.hints
        inputs.warnings += model_inputs.warnings
    inputs.requests = requests
    means = tuple(parse_tokens(text, "--mean-tokens") for text in lists["mean_tokens"])
    if len(means) > 1 and (options.prompt_tokens is not None or options.output_tokens is not None):
        raise UsageError("--mean-tokens", "conflicts with --prompt-tokens and --output-tokens", "use only one")
    releases = tuple(dict.fromkeys(parse_engine(text) for text in lists["engine"]))
    prices = prices_of(options.prices, {request.gpu.name for request in requests}, inputs)
    grid = Grid(
        tuple(requests),
        shape,
        releases if len(releases) > 1 else (),
        tuple(dict.fromkeys(means)) if len(means) > 1 else (),
        arguments,
        prices.per_hour if prices else {},
    )
    refuse_undrafted_lists(requests, arguments)
    check_size(grid.count)
    return inputs, grid, prices


def workload_options(options: WorkloadOptions, **changes: Any) -> WorkloadOptions:
    """Copy the options of one plan with some changes."""
    values = {field.name: getattr(options, field.name) for field in fields(WorkloadOptions)}
    return WorkloadOptions(**(values | changes))


def arguments_of(options: WorkloadOptions) -> dict[str, tuple[Any, ...]]:
    """Given engine arguments, each with its values; --engine-arg must agree with them."""
    axes: dict[str, tuple[Any, ...]] = {}
    pairs = engine_pairs(options)
    for name in LISTS:
        text: str | None = getattr(options, name)
        if text is None:
            continue
        flag = SHORT_FLAGS.get(name, flag_of(name))
        values = tuple(
            None if name == "quantization" and part == "none" else read_argument(name, part, flag)
            for part in parts(text, flag)
        )
        axes[name] = tuple(dict.fromkeys(values))
        if name in pairs and axes[name] != (pairs[name],):
            refuse_two(name, pairs[name], text)
    return axes


def refuse_undrafted_lists(requests: Iterable[Request], arguments: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse numbers of draft tokens that nothing drafts."""
    for request in requests:
        for tokens in arguments.get("num_speculative_tokens", ()):
            refuse_undrafted(replace(request, args=replace(request.args, num_speculative_tokens=tokens)))


def parts(text: str | None, flag: str) -> list[str]:
    """Values of a list, each once."""
    entries = [] if text is None else split_list(text, flag)
    if "" in entries:
        raise UsageError(
            flag, f"contains an empty value ({printable(str(text), 60)!r})", "write one, or several separated by commas"
        )
    return list(dict.fromkeys(entries))


def prices_of(path: str | None, gpus: set[str], inputs: Inputs) -> Prices | None:
    """The prices file, if it has at least one of these GPUs; warns of GPUs without a price."""
    if path is None:
        return None
    prices = price_file.read(Path(path))
    without = sorted(gpus - prices.per_hour.keys())
    if len(without) == len(gpus):
        raise UsageError(f"--prices {prices.source}", f"has no price for {', '.join(without)}", "add a line for each")
    if without:
        inputs.notes.append(f"--prices {prices.source} has no price for {', '.join(without)}")
    return prices


def refuse_unusable(grid: Grid) -> None:
    """Refuse a value that no combination can use: it is a mistake, not a row."""
    reasons = unusable(grid)
    if reasons:
        raise UsageError(reasons[0].subject, reasons[0].problem, reasons[0].remedy)


# --- writing ----------------------------------------------------------------------------------------------------------


def progress(chunks: Iterable[list[Row]], total: int, *, quiet: bool) -> Iterator[list[Row]]:
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

    def rows(self, rows: list[Row]) -> None:
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
        models = list(dict.fromkeys(request.spec.name for request in self.grid.requests))
        self.alike = 0  # combinations with the same users as one that is kept
        self.best = text.Best(self.limit, text.key_of(self.options.sort, models))
        self.sinks = [*self.reports, Sink(self.options.format)]

    def take(self, chunks: Iterator[list[Row]]) -> None:
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
                sink.put(sink.form.lines([Row._fields]))
            elif sink.format == "json":
                sink.put(text.json_head(self.prices.source if self.prices else None, pareto=self.options.pareto))

    def _give(self, rows: list[Row]) -> None:
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
