"""`kvplan estimate`: turn flags into requests and plans, print the answer, and set the exit code."""

from typing import TYPE_CHECKING, Any

from kvplan.asked.question import Inputs
from kvplan.cli import output
from kvplan.cli.options import EstimateOptions, inputs_of
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.report.formats import CommandAnswer

if TYPE_CHECKING:
    from kvplan.core.table import Table as Rows
    from kvplan.report.drawing import Figure
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

Outcome = tuple[GpuSpec, Plan | KvplanError]
Table = list[Outcome]  # of one context, by GPU


def estimate(options: EstimateOptions) -> int:
    """Estimate and return the exit code: 0, or with --exit-code 1 if any estimate shown does not fit."""
    with output.report_files(options.report or [], force=options.force) as reports:
        inputs = inputs_of(options)
        output.say(inputs, quiet=options.quiet)
        tables = answer(inputs)
        if not options.quiet:
            say_of_start(tables)
            say_of_host(tables, inputs)
        response = shapes(tables, options)
        output.answer(response, options.format, options.color, reports)
    fits = all(isinstance(answer, Plan) and answer.fits for table in tables for _, answer in table)
    return int(options.exit_code and not fits)


def say_of_start(tables: list[Table]) -> None:
    """Print the notes on a single plan, after those on reading its config."""
    plans = plans_of(tables)
    if len(plans) == 1:
        for text in plans[0].notes:
            if text not in plans[0].request.spec.notes:
                output.tell("note", text)


def say_of_host(tables: list[Table], inputs: Inputs) -> None:
    """Warn of a plan that keeps more on the host than a cloud instance, or the memory shared with the GPU, has."""
    plans = plans_of(tables)
    if len(plans) != 1 or (inputs.host is None and not plans[0].request.gpu.unified):
        return
    from kvplan.policy.pods import lacking  # only for these

    gpu, others = plans[0].request.gpu, plans[0].estimates["in_use"].likely
    name, memory = ("the memory that GPU and host share", gpu.shared_memory - others) if inputs.host is None else (
        f"the host memory of {inputs.host[0]}", inputs.host[1]
    )  # fmt: skip
    if plans[0].fits and (short := lacking(plans[0], memory=memory, name=name)):
        output.tell("warning", "; ".join(short))


# --- answering --------------------------------------------------------------------------------------------------------


def answer(inputs: Inputs) -> list[Table]:
    """A table per context: a plan per GPU, or why there is none. If none can be made at all, raise the first reason."""
    outcomes = [outcome(request, alone=inputs.num_gpus == 1) for request in inputs.requests]
    errors = [reply for _, reply in outcomes if isinstance(reply, KvplanError)]
    if len(errors) == len(outcomes):
        raise errors[0]
    return [outcomes[start : start + inputs.num_gpus] for start in range(0, len(outcomes), inputs.num_gpus)]


def outcome(request: Request, *, alone: bool) -> Outcome:
    try:
        return request.gpu, plan(request)
    except KvplanError as error:
        if alone:
            raise
        return request.gpu, error


def plans_of(tables: list[Table]) -> list[Plan]:
    return [reply for table in tables for _, reply in table if isinstance(reply, Plan)]


def shapes(tables: list[Table], options: EstimateOptions) -> CommandAnswer:
    """The answer for each format; for machine formats, a note says which GPUs are left out."""
    plans = plans_of(tables)

    def document() -> Any:
        from kvplan.documents import artifact

        single = len(tables) == len(tables[0]) == 1
        return artifact.plan_document(plans[0]) if single else artifact.plans_document(plans)

    def rows() -> "Rows":
        from kvplan.report import text

        return text.plans_table(plans)

    def page() -> "list[Block]":
        from kvplan.report import text

        return text.plans_page(plans, explain=options.explain)

    def figures() -> "list[Figure]":
        from kvplan.report import text

        return text.memory_bars(plans)

    if (options.format != "table" or options.report) and not options.quiet:
        errors = ((gpu.name, str(reply)) for table in tables for gpu, reply in table if isinstance(reply, KvplanError))
        for name, error in dict.fromkeys(errors):
            output.tell("warning", f"{name}: skipped: {error}")
    servers = [plan.request.release.label for plan in plans]
    whole = lambda blocks: screen(tables, blocks=blocks, explain=options.explain)  # noqa: E731
    return CommandAnswer(whole, document, rows, page, figures, servers)


def screen(tables: list[Table], *, blocks: bool, explain: bool) -> "list[Part]":
    """For one GPU: the whole answer, or a row per context. For several: a row per GPU, in a table per context."""
    from kvplan.report import console
    from kvplan.report.lines import line

    plans, parts = plans_of(tables), list["Part"]()
    if len(tables[0]) > 1:
        for number, table in enumerate(tables):
            parts += [line()] if number else []
            reasons = {str(reply) for _, reply in table}
            if plans_of([table]) or len(reasons) > 1:
                parts += console.gpu_parts(table)
            else:
                parts.append(line(f"on none of these GPUs: {reasons.pop()}", "red"))
    elif len(plans) > 1:
        parts += console.context_parts(plans)
    else:
        parts += console.plan_parts(plans[0], blocks=blocks, explain=explain)
    if explain and (len(tables) > 1 or len(tables[0]) > 1):
        for each_plan in plans:
            parts += [line(), *console.plan_parts(each_plan, blocks=blocks, explain=True)]
    return parts
