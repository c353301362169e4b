"""`kvplan reconcile --log` and `--metrics`: compare a server's own figures with its plan, row by row."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvplan.asked.form import FLAGS, Form, flag_of
from kvplan.asked.log import (
    Logged,
    UnplannedLog,
    agrees,
    check_model,
    completed,
    engine_of,
    logged_as,
    machines_of,
    model_of,
    sample_gpus,
)
from kvplan.asked.question import Asked, Inputs, requests
from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError
from kvplan.core.files import printable
from kvplan.core.limits import Limits
from kvplan.core.table import Table, words
from kvplan.core.units import GIB, MIB, format_gib
from kvplan.hardware.gpu import gpu, offered_names
from kvplan.measure.serverlog.compare import LogReconciliation, allowed_gpus, document, reconcile_log, unplanned
from kvplan.measure.serverlog.drafts import with_draft
from kvplan.measure.serverlog.log import parse_log, read_log, read_text
from kvplan.models import catalog
from kvplan.planning.plan import Request, assignments
from kvplan.report.drawing import side_by_side
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, bullets, heading, with_own_names
from kvplan.servers.base import OWN, logs_of
from kvplan.servers.logs.log import Context, ServerLog
from kvplan.servers.logs.measurement import ComponentRow, exceeds

OF_THE_MACHINE = {"gpu", "gpu_memory", "calibration", "offline"}  # options that say nothing of the server


NEAREST = 5  # GPUs of the table of those that a log allows


def reconcile_server(
    options: ReconcileOptions, limits: Limits | None, reports: Sequence[output.ReportFile] = ()
) -> int:
    """Read, compare, print; return 1 if a row exceeds both --max-error and the log's own rounding."""
    log = log_of(options)
    result = compared(options, log)
    if limits is not None and result.unplanned:
        raise InvalidInputError("--max-error", f"nothing can be compared: {result.unplanned}")
    if limits is not None and not result.compared:
        source = "one that has the whole start-up" if log.called == "log" else "the page of a server that has started"
        raise InvalidInputError("--max-error", f"the {log.called} contains no figure to compare", f"name {source}")
    if limits is not None:
        limits.check((row.component for row in result.compared), "--max-error")
    output.answer(answer(result), options.format, options.color, reports)
    over = [] if limits is None else exceeds(result.named, limits)
    if over:
        typed = ", ".join(printable(text, 80) for text in options.max_error or [])
        output.tell("error", f"reconcile: off by more than {typed}: {', '.join(over)}")
    return int(bool(over))


def say_failure(text: str, source: str) -> None:
    """If the server failed, first say what happened, although the comparison does not need it."""
    from kvplan.measure.failure import read_failure
    from kvplan.measure.why_words import summary

    failure = read_failure(text.splitlines())
    if failure.outcome in ("failed", "died"):
        output.tell("warning", f"{summary(failure)} `kvplan why {source}` explains how to fix it.")


def log_of(options: ReconcileOptions) -> ServerLog:
    if options.log is not None:
        if options.log != "-":
            say_failure(read_text(options.log), shlex.quote(options.log))
            return read_log(options.log)
        text = read_text("-")
        say_failure(text, "-")
        return parse_log(text, "standard input")
    from kvplan.measure.server_metrics import MetricsError, log_of_page, page_text, shown_url

    assert options.metrics is not None
    try:
        return log_of_page(page_text(options.metrics))
    except MetricsError as error:
        raise InvalidInputError(
            f"--metrics {shown_url(options.metrics)}", f"{error}", "name a server's /metrics page"
        ) from error


def compared(options: ReconcileOptions, log: ServerLog) -> LogReconciliation:
    """Compare a log with its plan, or show its figures alone; notes on the sources of values go to standard error."""
    if log.engine in OWN:
        from kvplan.cli.reconcile_own import compared_own

        return compared_own(options, log)
    try:
        return compared_with_plan(options, log)
    except UnplannedLog as error:
        result = unplanned(log, error)
        output.say(Inputs([], 1, list(log.notes)), quiet=options.quiet)
        return result


def compared_with_plan(options: ReconcileOptions, log: ServerLog) -> LogReconciliation:
    form = form_of(options)
    logged = completed(form, log)
    try:
        machines, warnings, gpu_notes = machines_of(form, log)
        query = logged.query(machines or sample_gpus())
        inputs = requests(query)
        drafted, draft_notes = with_draft(log, inputs.requests[0])
        check_model(log, drafted.spec)
        rows = [replace(request, args=drafted.args, started=True) for request in inputs.requests]
        context: Context = "derived" if logged.derived else "unknown" if drafted.args.max_model_len is None else "known"
        result = reconcile_log(log, rows, gpu_known=len(machines) == 1, context=context)
    except KvplanError as error:
        raise of_the_log(error, log, logged, form) from error
    if not machines:
        result = replace(result, allowed=allowed(log, logged, drafted, context))
    if "engine" in logged.form.origins:
        gpu_notes += logs_of(log.engine).notes(log, drafted.args, len(machines) == 1)
    notes = [
        *result.notes,
        *logged.notes,
        *draft_notes,
        *contradictions(logged, drafted),
        *inferences(logged, query, drafted),
        *gpu_notes,
    ]
    notices = Inputs([], 1, [*notes, *inputs.notes], inputs.hints, [*inputs.warnings, *warnings])
    output.say(notices, quiet=options.quiet)
    return replace(result, notes=tuple(dict.fromkeys([*notices.notes, *notices.warnings])))


def allowed(
    log: ServerLog, logged: Logged, request: Request, context: Context
) -> tuple[tuple[str, tuple[ComponentRow, ...]], ...]:
    """The GPUs that the log's figures allow, if it names none, and the rows of each."""
    inputs = requests(logged.query([gpu(name) for name in offered_names()]))
    started = [replace(candidate, args=request.args, started=True) for candidate in inputs.requests]
    return allowed_gpus(log, started, context)


def inferences(logged: Logged, query: Asked, request: Request) -> list[str]:
    """Notes on a release and a context that the log does not state outright."""
    notes = []
    if request.release != query.release:
        stated = " ".join(assignments(request.release, request.args))
        notes.append(f"sized with {stated}, as the log or its command says")
    if logged.derived is not None:
        _, low, high = logged.derived
        others = "" if low == high else f" ({low:,} to {high:,} also match)"
        notes.append(
            f"the context is assumed to be {request.args.max_model_len:,}{others}, the page's tokens divided by its "
            "concurrency; set it with --ctx"
        )
    return notes


def contradictions(logged: Logged, request: Request) -> list[str]:
    """Notes on arguments given to kvplan that contradict the log."""
    log, notes = logged.log, []
    for name, text in logged.flags.items():
        value = getattr(request.args, name, None)
        if value is not None and name in logged.stated and not agrees(log, name, text, value):
            notes.append(f"{as_flag(name, value)} is used, although the {log.called} says {logged_as(log, name, text)}")
    engine = engine_of(log) if log.release is not None else None  # a log may state the patch number as well
    taken = request.release.label.partition("+")[0]  # details beyond the number are not contradictions
    if engine is not None and "@" in engine and not f"{engine}.".startswith(f"{taken}."):
        version = printable(log.text("version") or "", 40)
        notes.append(f"--engine {taken} is used, although the {log.called} says version {version}")
    named, own = catalog.find(model_of(log)[0] or ""), catalog.find(request.spec.served_name)
    if named is not None and own is not None and named != own:
        notes.append(f"--model {own} is used, although the {log.called} says {printable(log.model or '', 100)}")
    return notes


def as_flag(name: str, value: Any) -> str:
    """Format an argument as typed on the command line."""
    if isinstance(value, bool):
        return flag_of(name) if value else f"--no-{flag_of(name).removeprefix('--')}"
    return f"{FLAGS.get(name, flag_of(name))} {printable(str(value), 60)}"


def of_the_log(error: KvplanError, log: ServerLog, logged: Logged, form: Form) -> KvplanError:
    """An error about what the log says, as such: it names a logged value, or the user gave nothing but the GPU."""
    if isinstance(error, UnplannedLog | EnvironmentProblem):
        return error
    named, stated = logged.form.named(error), form.values.keys()
    if named is error and (stated - OF_THE_MACHINE or stated & set(error.keys)):
        return error
    return UnplannedLog(named.subject, named.problem, named.remedy)


# --- showing ----------------------------------------------------------------------------------------------------------

HEADERS = ("", "predicted", "logged", "error", "kind", "why")
SAME = 0.0005  # relative rounding error of a logged figure
LEFT = (0, len(HEADERS) - 1)  # text columns


def answer(result: LogReconciliation) -> CommandAnswer:
    return CommandAnswer.of(
        result,
        screen,
        document,
        rows_table,
        page,
        lambda _: side_by_side("Predicted from the inputs, and logged", figures(result)),
        [result.engine],
    )


def figures(result: LogReconciliation) -> Iterator[tuple[str, float | None, float, str, str]]:
    for row in result.rows:
        if row.unit == "bytes" and row.measured is not None:
            yield (
                words(row.component),
                row.predicted,
                row.measured,
                figure(row, row.predicted),
                figure(row, row.measured),
            )


def title(result: LogReconciliation) -> str:
    where = [gpu.name for gpu in result.gpus] or [result.machine or "an unknown GPU"]
    ranks = result.args.world_size
    total = "" if not result.gpus else f" of {format_gib(result.gpus[0].total_memory)}"
    machines = f"{ranks} x {where[0]}" if ranks > 1 else where[0]
    replicas = result.args.data_parallel_size
    machines = f"{replicas} replicas of {machines}" if replicas > 1 else machines
    parts = [f"{printable(result.model)} on {machines}{total}", printable(result.engine, 60)]
    if result.max_model_len is not None:
        parts.append(f"{result.max_model_len:,} tokens per request")
    return ", ".join(parts)


def given_title(result: LogReconciliation) -> str:
    return f"Given the logged pool of {result.given_from}:" if result.given_from else "Given the logged pool:"


def screen(result: LogReconciliation) -> list[Part]:
    given: list[Part] = [line(), line(given_title(result), "bold"), table(result.given)] if result.given else []
    allowed: list[Part] = [line(), line(allowed_title(result), "bold"), allowed_table(result)] if result.allowed else []
    return [line(answer_text(result), "bold"), line(title(result)), line(), table(result.rows), *allowed, *given]


def allowed_title(result: LogReconciliation) -> str:
    number = len(result.allowed)
    nearest = "" if number <= NEAREST else f"; the nearest {NEAREST}"
    gpus = "1 GPU allows" if number == 1 else f"{number} GPUs allow"
    return f"{gpus} the logged KV cache{nearest}:"


def allowed_table(result: LogReconciliation) -> Table:
    """Predicted from the inputs for each GPU that the log's KV cache allows; the error is that of the KV cache."""
    parts = ("activations", "cuda_graphs", "kv_cache", "tokens", "concurrency")
    rows = []
    for name, components in result.allowed[:NEAREST]:
        named = {row.component: row for row in components}
        predicted = [figure(named[part], named[part].predicted) if part in named else "-" for part in parts]
        rows.append((name, *predicted, error_text(named["kv_cache"])))
    return Table.of(("", *parts, "error"), rows, left=(0,))


def table(rows: tuple[ComponentRow, ...]) -> Table:
    return Table.of(HEADERS, map(cells, rows), left=LEFT)


def cells(row: ComponentRow) -> tuple[str, ...]:
    return (
        row.component,
        figure(row, row.predicted),
        figure(row, row.measured),
        error_text(row),
        row.kind or "-",
        row.why,
    )


def figure(row: ComponentRow, value: float | None) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        is_small = row.measured is not None and not row.rounding and abs(value) < GIB // 10  # whole bytes were logged
        return f"{value / MIB:,.3f} MiB" if is_small else f"{value / GIB:,.2f} GiB"
    return f"{value:,.2f}" if row.component == "concurrency" else f"{value:,.0f}"


def error_text(row: ComponentRow) -> str:
    if row.error is None:
        return "-"
    if row.is_exact:
        return "as logged"
    share = "" if row.relative is None else f" ({row.relative:+.1%})"
    if row.unit == "bytes":
        small = f"{row.error / MIB:+,.1f} MiB"  # two decimals of a GiB would show 0
        size = small if abs(row.error) < GIB // 100 else f"{row.error / GIB:+,.2f} GiB"
        return size + share
    return (f"{row.error:+,.2f}" if row.component == "concurrency" else f"{row.error:+,.0f}") + share


def rows_table(result: LogReconciliation) -> Table:
    names = ("from", "name", "unit", "predicted", "low", "high", "logged", "error", "relative", "kind", "why")
    rows = [
        (source, row.component, row.unit, row.predicted, row.low, row.high, row.measured, row.error, row.relative,
         row.kind, row.why)
        for source, part in (("inputs", result.rows), ("logged pool", result.given))
        for row in part
    ]  # fmt: skip
    return Table.of(names, rows)


def page(result: LogReconciliation) -> list[Block]:
    notes = [bullets([note], "*") for note in result.notes]
    rows, given = (with_own_names(table(part), left=LEFT) for part in (result.rows, result.given))
    of_pool: list[Block] = [given_title(result), given] if result.given else []
    allowed: list[Block] = (
        [allowed_title(result), with_own_names(allowed_table(result), left=(0,))] if result.allowed else []
    )
    return [heading(3, f"{answer_text(result)}: {title(result)}"), rows, *allowed, *of_pool, *notes]


def answer_text(result: LogReconciliation) -> str:
    """Error of the prediction compared with the log, in short."""
    if result.unplanned:
        return f"Nothing is compared: {result.unplanned}"
    compared = {row.component: row for row in result.rows if row.measured is not None and row.predicted is not None}
    if result.allowed:
        names = [name for name, _ in result.allowed]
        listed = ", ".join(names[:3]) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} others"
        logged = next(row for row in result.rows if row.component == "kv_cache")
        parts = [f"{words('kv_cache')} of {figure(logged, logged.measured)} is in the range of {listed}"]
    else:
        parts = []
    if compared and not compared.keys() & {"kv_cache", "weights"}:  # figures by place
        alike = sum(row.is_exact is True for row in compared.values())
        worst = max(compared.values(), key=lambda row: abs(row.relative or 0.0))
        parts = [f"{alike} of {len(compared)} figures as logged", *([] if worst.is_exact else [deviation(worst)])]
    parts += [deviation(compared[name]) for name in ("kv_cache", "weights", "tokens") if name in compared]
    return "; ".join(parts[:2]) if parts else "Nothing to compare"


def deviation(row: ComponentRow) -> str:
    """ "KV cache: predicted 10.79 GiB, logged 12.02 GiB (-10.2%)"."""
    name = words(row.component)
    if row.is_exact or row.relative is None or abs(row.relative) < SAME:
        return f"{name} as logged"
    return f"{name}: predicted {figure(row, row.predicted)}, logged {figure(row, row.measured)} ({row.relative:+.1%})"
