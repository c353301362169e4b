"""`kvplan estimate`: flags -> requests -> plans -> the answer, and the exit code it means."""

from typing import TYPE_CHECKING, TextIO

from kvplan.cli import output
from kvplan.cli.asked import Asked, load_of, read, say
from kvplan.cli.options import EstimateOptions
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.plan import Plan, Request, plan

if TYPE_CHECKING:
    from rich.console import Console

Outcome = tuple[GpuSpec, Plan | KvplanError]
Table = list[Outcome]  # one context's, GPU by GPU


def estimate(options: EstimateOptions) -> int:
    """Answer, and return the exit code: 0, or with --exit-code 1 where any estimate shown does not fit."""
    with output.report_files(options.report or [], force=options.force) as reports:
        asked = read(options, lambda context, spec: load_of(options, context, spec))
        say(asked, quiet=options.quiet)
        tables = answer(asked)
        if not options.quiet:
            say_of_start(tables)
        for report in reports:
            report.save(render(report.format, tables, options))
        show(tables, options)
    fits = all(isinstance(it, Plan) and it.fits for table in tables for _, it in table)
    return int(options.exit_code and not fits)


def say_of_start(tables: list[Table]) -> None:
    """What the rules have to say of the one plan that was asked for, beside what was read into its config."""
    plans = plans_of(tables)
    if len(plans) == 1:
        for text in plans[0].notes:
            if text not in plans[0].request.spec.notes:
                output.tell("note", text)


# --- answering --------------------------------------------------------------------------------------------------------


def answer(asked: Asked) -> list[Table]:
    """A table for each context: a plan for each GPU, or why there is none. Where none can be made at all, the first
    reason is the answer."""
    found = [outcome(request, alone=asked.num_gpus == 1) for request in asked.requests]
    errors = [it for _, it in found if isinstance(it, KvplanError)]
    if len(errors) == len(found):
        raise errors[0]
    return [found[at : at + asked.num_gpus] for at in range(0, len(found), asked.num_gpus)]


def outcome(request: Request, *, alone: bool) -> Outcome:
    try:
        return request.gpu, plan(request)
    except KvplanError as error:
        if alone:
            raise
        return request.gpu, error


def plans_of(tables: list[Table]) -> list[Plan]:
    return [it for table in tables for _, it in table if isinstance(it, Plan)]


def show(tables: list[Table], options: EstimateOptions) -> None:
    if options.format != "table":
        output.write(render(options.format, tables, options))
        return
    with output.standard_output():
        show_tables(tables, output.console(options.color), explain=options.explain)


def show_tables(tables: list[Table], console: "Console | TextIO", *, explain: bool) -> None:
    """One GPU: the whole answer, or a row per context. Several: a row per GPU, in a table for each context."""
    from kvplan.report import console as screen
    from kvplan.report.lines import line, write

    plans = plans_of(tables)
    if len(tables[0]) > 1:
        for at, table in enumerate(tables):
            write([line()] if at else [], console)
            reasons = {str(it) for _, it in table}
            if plans_of([table]) or len(reasons) > 1:
                screen.print_gpus(table, console)
            else:
                write([line(f"on none of these GPUs: {reasons.pop()}", "red")], console)
    elif len(plans) > 1:
        screen.print_contexts(plans, console)
    else:
        screen.print_plan(plans[0], console, explain=explain)
    if explain and (len(tables) > 1 or len(tables[0]) > 1):
        for one in plans:
            write([line()], console)
            screen.print_plan(one, console, explain=True)


def render(format: str, tables: list[Table], options: EstimateOptions) -> str:
    """The answer as text in a machine format."""
    from kvplan.documents import artifact

    for one, it in dict.fromkeys(
        (one.name, str(it)) for table in tables for one, it in table if isinstance(it, KvplanError)
    ):
        if not options.quiet:
            output.tell("warning", f"{one}: left out: {it}")
    plans = plans_of(tables)
    if format == "json":
        single = len(tables) == len(tables[0]) == 1
        return artifact.dumps(artifact.plan_document(plans[0]) if single else artifact.plans_document(plans)) + "\n"
    from kvplan.report import text

    return text.plans_csv(plans) if format == "csv" else text.plans_markdown(plans, explain=options.explain)
