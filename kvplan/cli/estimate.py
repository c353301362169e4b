"""`kvplan estimate`: turn flags into requests and plans, print the answer, and set the exit code."""

from kvplan.asked.question import Inputs
from kvplan.cli import output
from kvplan.cli.options import EstimateOptions, inputs_of
from kvplan.core.errors import KvplanError
from kvplan.core.units import format_gib
from kvplan.planning.plan import Plan, PlanTable, plan_tables, plans_of
from kvplan.report import console


def estimate(options: EstimateOptions) -> int:
    """Estimate and return the exit code: 0, or with --exit-code 1 if any estimate shown does not fit."""
    with output.report_files(options.report or [], force=options.force) as reports:
        inputs = inputs_of(options)
        output.say(inputs, quiet=options.quiet)
        tables = plan_tables(inputs.requests, inputs.num_gpus)
        if not options.quiet:
            say_of_start(tables)
            say_of_host(tables, inputs)
            if options.format != "table" or options.report:
                say_of_failures(tables)
        response = console.shapes(tables, explain=options.explain)
        output.answer(response, options.format, options.color, reports)
    fits = all(isinstance(answer, Plan) and answer.fits for table in tables for _, answer in table)
    return int(options.exit_code and not fits)


def say_of_start(tables: list[PlanTable]) -> None:
    """Print the notes on a single plan, after those on reading its config."""
    plans = plans_of(tables)
    if len(plans) == 1:
        for text in plans[0].notes:
            if text not in plans[0].request.spec.notes:
                output.tell("note", text)


def say_of_host(tables: list[PlanTable], inputs: Inputs) -> None:
    """Warn of a plan that keeps more on the host than a cloud instance, or the memory shared with the GPU, has."""
    plans = plans_of(tables)
    if len(plans) != 1 or (inputs.host is None and not plans[0].request.gpu.unified):
        return
    from kvplan.planning.plan import kept_rows
    from kvplan.policy.pods import lacking  # only for these

    on_host = sum(size for _, size in kept_rows(plans[0]))
    if plans[0].request.gpu.unified and on_host > plans[0].memory.weights // 10:  # more than a server's small buffers
        share = f"GPU and host share one memory of {format_gib(plans[0].request.gpu.shared_memory)}"
        output.tell("note", f"{share}: the {format_gib(on_host)} on the host are taken from it, too")
    gpu, others = plans[0].request.gpu, plans[0].estimates["in_use"].likely
    name, memory = ("the memory that GPU and host share", gpu.shared_memory - others) if inputs.host is None else (
        f"the host memory of {inputs.host[0]}", inputs.host[1]
    )  # fmt: skip
    if plans[0].fits and (short := lacking(plans[0], memory=memory, name=name)):
        output.tell("warning", "; ".join(short))


def say_of_failures(tables: list[PlanTable]) -> None:
    """Say which GPUs are left out, for machine formats."""
    errors = ((gpu.name, str(reply)) for table in tables for gpu, reply in table if isinstance(reply, KvplanError))
    for name, error in dict.fromkeys(errors):
        output.tell("warning", f"{name}: skipped: {error}")
