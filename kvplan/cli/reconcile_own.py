"""`kvplan reconcile --log` of the bundled engine's log, which states its model and settings: the rules are its own."""

from dataclasses import replace

from kvplan.asked.form import source_of
from kvplan.asked.log import catalog_name
from kvplan.asked.question import Inputs, Resolved, resolve
from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.core.errors import InvalidInputError
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.measure.serverlog.compare import LogReconciliation
from kvplan.servers.bundled.log_rows import rows_of, start_of
from kvplan.servers.bundled.rules import Speculation
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.words.arguments import EngineArgs

# Options that say which model was served; every other one is in the log.
TAKEN = ("model", "draft_model", "revision", "offline", "assume_dense", "text_only")
MODEL, DRAFT = "--model NAME or --config config.json", "--draft-model NAME"


def compared_own(options: ReconcileOptions, log: ServerLog) -> LogReconciliation:
    """Compare the engine's log with its plan; notes go to standard error."""
    start = start_of(log)
    problem = f"cannot be used: the {log.called} is of kvplan's engine, which logs its own settings"
    form_of(options).refuse_except(TAKEN, problem, "remove it")
    names = ((options.model, log.model, MODEL), (options.draft_model, start.flags.get("draft_model"), DRAFT))
    models, notes = list[Resolved](), list[str]()
    for name, logged, cure in names[: 1 + ("draft_model" in start.flags)]:
        name, note = (name, None) if name is not None else catalog_name(logged, log.called)
        if name is None:
            called = printable(logged or "", 120)
            raise InvalidInputError(
                log.called, f"its model {called!r} is not one that `kvplan models` lists", f"add {cure}"
            )
        notes += [] if note is None else [note]
        models.append(resolve(name, source_of(form_of(options), options.revision)))
    model, inputs = models[0].spec, start.inputs(models[0].spec)
    drafts = Speculation(
        int(start.flags.get("num_speculative_tokens", "0")), models[1].spec if len(models) > 1 else None
    )
    rows, rows_of_pool, of_ranks = rows_of(start, inputs, model, drafts)
    pool, device = min(start.counts.get("num_blocks", {}).values(), default=None), start.facts["engine_device"]
    device = start.facts.get("gpu") or ("a CPU" if device == "cpu" else device)
    result = LogReconciliation(
        engine=f"kvplan's engine {printable(start.flags.get('kvplan_release', '?'), 30)}",
        model=model.name,
        gpus=(),
        args=EngineArgs(
            tensor_parallel_size=inputs.tensor_parallel_size, pipeline_parallel_size=inputs.pipeline_parallel_size
        ),
        max_model_len=inputs.max_model_len,
        rows=rows,
        given=rows_of_pool,
        given_from="" if pool is None else f"{pool:,} blocks",
        notes=(*log.notes, *of_ranks, *notes),
        machine=f"{device} of {format_gib(inputs.total)}",
        total_memory=inputs.total,
    )
    warnings = list(models[0].warnings)
    output.say(Inputs([], 1, list(result.notes), [], warnings), quiet=options.quiet)
    return replace(result, notes=tuple(dict.fromkeys([*result.notes, *warnings])))
