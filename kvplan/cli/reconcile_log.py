"""`kvplan reconcile --log` and `--metrics`: what a server says of itself -> the plan for it, row by row beside it."""

import csv
import io
import json
import re
from dataclasses import fields, replace
from typing import Any

from kvplan.cli import asked, output
from kvplan.cli.asked import Asked
from kvplan.cli.options import PlanOptions, flag_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.command import ARGUMENTS
from kvplan.errors import InvalidInputError, UsageError
from kvplan.files import printable
from kvplan.gpu import GpuSpec, with_memory
from kvplan.logged import (
    LogReconciliation,
    LogRow,
    check_model,
    compares_nothing,
    document,
    draft_of,
    engine_of,
    exceeds,
    flags_of,
    gpus_of,
    log_of_page,
    model_of,
    reconcile_log,
    sample_gpus,
)
from kvplan.report.lines import Line, columns, line, write
from kvplan.serverlog import ServerLog, read_log
from kvplan.units import GIB, MIB, format_gib

ENOUGH_MEMORY = "1TiB"  # stands for a GPU until the log's own is put in its place


def reconcile_server(options: ReconcileOptions, limit: float | None) -> int:
    """Read, compare, print; 1 where a row is off by more than --max-error and than the log's own rounding."""
    log = log_of(options)
    result = compared(options, log)
    if limit is not None and compares_nothing(result):
        raise InvalidInputError("--max-error: the log holds no figure to compare; name one that has the whole start-up")
    show(result, options)
    over = [] if limit is None else exceeds(result, limit)
    if over:
        output.tell("error", f"reconcile: off by more than {options.max_error}: {', '.join(over)}")
    return int(bool(over))


def log_of(options: ReconcileOptions) -> ServerLog:
    if options.log is not None:
        return read_log(options.log)
    from kvplan.server_metrics import MetricsError, page_text, server_setup, shown_url

    assert options.metrics is not None
    try:
        return log_of_page(server_setup(page_text(options.metrics)))
    except MetricsError as error:
        raise InvalidInputError(
            f"--metrics {shown_url(options.metrics)}: {error}; name a server's /metrics page"
        ) from error


def compared(options: ReconcileOptions, log: ServerLog) -> LogReconciliation:
    """The comparison; notes of what was taken from where go to standard error."""
    wanted, notes = completed(options, log)
    found = asked.read(replace(wanted, gpu=None, gpu_memory=ENOUGH_MEMORY))
    if len(found.requests) > 1:
        raise UsageError("--ctx: names several contexts; a server has one")
    request = found.requests[0]
    check_model(log, request.spec)
    machines, gpu_notes = machines_of(options, log)
    requests = [replace(request, gpu=one, measured=asked.measured_on(wanted, one)) for one in machines or sample_gpus()]
    result = reconcile_log(log, requests, gpu_known=len(machines) == 1, context_known=wanted.max_model_len is not None)
    said = Asked(
        [], 1, notes=[*result.notes, *notes, *gpu_notes, *found.notes], hints=found.hints, warnings=found.warnings
    )
    asked.say(said, quiet=options.quiet)
    return replace(result, notes=tuple(dict.fromkeys([*said.notes, *said.warnings])))


def completed(options: ReconcileOptions, log: ServerLog) -> tuple[PlanOptions, list[str]]:
    """The plan's options: what was said to kvplan, else what the log says, and notes of both."""
    notes = []
    plain = {field.name: getattr(options, field.name) for field in fields(PlanOptions)}
    if plain["model"] is None and options.from_command is None:
        name, note = model_of(log)
        if name is None:
            raise InvalidInputError(f"log: {unknown_model(log)}; add --model NAME or --config config.json")
        plain["model"] = name
        notes += [] if note is None else [note]
    if plain["engine"] is None and log.engine == "vllm":
        plain["engine"] = engine_of(log)
        if plain["engine"] is None and options.from_command is None:
            version = log.text("version")
            said = "does not say its release" if version is None else f"{printable(version, 40)} is no release"
            raise InvalidInputError(f"log: {said}; add --engine vllm@0.11, or whichever it was")
    for name, text in flags_of(log).items():
        if plain[name] is None and not is_said(options, name):
            plain[name] = value_of(name, text)
    if draft_of(log) and options.draft_model is None:
        method = printable(draft_of(log).get("method", draft_of(log).get("model", "speculation")), 40)
        notes.append(f"the server drafts tokens ({method}); add --draft-model to size what drafts")
    return PlanOptions(**plain), notes


def is_said(options: ReconcileOptions, name: str) -> bool:
    """Whether --engine-arg or a pasted command may say it: they are read later, and win."""
    pairs = [text.partition("=")[0].strip("- ").replace("-", "_") for text in options.engine_arg or []]
    forms = [name.replace("_", "[-_]"), *ARGUMENTS[name].short]
    flag = rf"(?<![\w-])--?(?:no-)?(?:{'|'.join(forms)})(?![\w-])"
    return name in pairs or re.search(flag, options.from_command or "") is not None


def value_of(name: str, text: str) -> Any:
    """A logged argument as its option would hold it."""
    if ARGUMENTS[name].kind == "flag":
        if text not in ("True", "False"):
            raise InvalidInputError(
                f"log: {name} is neither True nor False ({printable(text, 40)}); add {flag_of(name)}"
            )
        return text == "True"
    return [text] if name == "max_model_len" else text


def unknown_model(log: ServerLog) -> str:
    if log.model is None:
        return "does not say which model it served"
    return f"its model {printable(log.model, 120)} is not one that `kvplan models` lists"


def machines_of(options: ReconcileOptions, log: ServerLog) -> tuple[list[GpuSpec], list[str]]:
    """The GPU said to kvplan, with the total that was logged; else those that the log may mean."""
    if options.gpu is None and options.gpu_memory is None:
        found, note = gpus_of(log)
        if not found:
            note = "the log does not say on which GPU it ran: what depends on it is not compared; --gpu NAME says it"
        return found, [] if note is None else [note]
    named = asked.gpus_of(options)
    if len(named) > 1:
        raise UsageError("--gpu: names several GPUs; a server ran on one kind")
    logged = log.first("total_memory")
    if options.gpu_memory is None and logged is not None and logged.size > 0:
        return [with_memory(named[0], logged.size)], []
    return named, []


# --- showing ----------------------------------------------------------------------------------------------------------

HEADERS = ("", "predicted", "logged", "error", "kind", "why")


def show(result: LogReconciliation, options: ReconcileOptions) -> None:
    match options.format:
        case "table":
            with output.standard_output():
                write(table_lines(result), output.console(options.color))
        case "json":
            output.write(json.dumps(document(result), indent=2, allow_nan=False))
        case "csv":
            output.write(as_csv(result))
        case "markdown":
            output.write(as_markdown(result))


def title(result: LogReconciliation) -> str:
    where = [one.name for one in result.gpus] or ["a GPU that is not known"]
    ranks = result.args.tensor_parallel_size * result.args.pipeline_parallel_size
    total = "" if not result.gpus else f" of {format_gib(result.gpus[0].total_memory)}"
    machines = f"{ranks} x {where[0]}" if ranks > 1 else where[0]
    tokens = f"{result.max_model_len:,} tokens per request"
    return f"{printable(result.model)} on {machines}{total}, {printable(result.engine, 60)}, {tokens}"


def given_title(result: LogReconciliation) -> str:
    return f"Given the logged pool of {result.given_from}:" if result.given_from else "Given the logged pool:"


def table_lines(result: LogReconciliation) -> list[Line]:
    lines = [line(title(result), "bold"), line(), *table(result.rows)]
    return [*lines, line(), line(given_title(result), "bold"), *table(result.given)]


def table(rows: tuple[LogRow, ...]) -> list[Line]:
    """The rows in columns, the reasons behind them to the left."""
    cut = columns(HEADERS[:-1], [cells(row)[:-1] for row in rows])
    reasons = [HEADERS[-1], *(cells(row)[-1] for row in rows)]
    return [
        ((text, style), (f"  {why}" if why else "", style)) for ((text, style),), why in zip(cut, reasons, strict=True)
    ]


def cells(row: LogRow) -> tuple[str, ...]:
    return row.name, figure(row, row.predicted), figure(row, row.logged), error_text(row), row.kind or "-", row.why


def figure(row: LogRow, value: float | None) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return f"{value / GIB:,.2f} GiB"
    return f"{value:,.2f}" if row.unit == "requests" else f"{value:,.0f}"


def error_text(row: LogRow) -> str:
    if row.error is None:
        return "-"
    if row.is_exact:
        return "as logged"
    share = "" if row.relative is None else f" ({row.relative:+.1%})"
    if row.unit == "bytes":
        small = f"{row.error / MIB:+,.1f} MiB"  # what two digits of a GiB would show as 0
        size = small if abs(row.error) < GIB // 100 else f"{row.error / GIB:+,.2f} GiB"
        return size + share
    return (f"{row.error:+,.2f}" if row.unit == "requests" else f"{row.error:+,.0f}") + share


def as_csv(result: LogReconciliation) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("from", "name", "unit", "predicted", "low", "high", "logged", "error", "relative", "kind", "why"))
    for source, rows in (("inputs", result.rows), ("logged pool", result.given)):
        for row in rows:
            figures = (row.predicted, row.low, row.high, row.logged, row.error, row.relative)
            writer.writerow((source, row.name, row.unit, *figures, row.kind, row.why))
    return text.getvalue()


def as_markdown(result: LogReconciliation) -> str:
    from kvplan.report.text import escaped, rows_of

    parts = [f"### {escaped(title(result))}", rows_of(HEADERS, [cells(row) for row in result.rows])]
    parts += [escaped(given_title(result)), rows_of(HEADERS, [cells(row) for row in result.given])]
    return "\n\n".join([*parts, *(f"* {escaped(note)}" for note in result.notes)])
