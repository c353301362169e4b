"""`kvplan reconcile --log` of the bundled engine's log, which states its model and settings: the rules are its own."""

from dataclasses import replace

from kvplan.asked.form import source_of
from kvplan.asked.log import model_of
from kvplan.asked.question import Inputs, Resolved, resolve
from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.run_options import ReconcileOptions
from kvplan.core.errors import InvalidInputError
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.measure.serverlog.compare import LogReconciliation
from kvplan.servers.bundled.log_rows import check_form, inputs_of, rows_of
from kvplan.servers.bundled.rules import Speculation
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.words.arguments import EngineArgs

# Options that say which model was served; every other one is in the log.
TAKEN = ("model", "draft_model", "revision", "offline", "assume_dense", "text_only")


def compared_own(options: ReconcileOptions, log: ServerLog) -> LogReconciliation:
    """Compare the engine's log with its plan; notes go to standard error."""
    check_form(log)
    problem = f"cannot be used: the {log.called} is of kvplan's engine, which logs its own settings"
    form_of(options).refuse_except(TAKEN, problem, "remove it")
    model, notes = served(options, log, options.model, log.model, "--model NAME or --config config.json")
    draft = None
    if "draft_model" in log.flags:
        named = log.flags["draft_model"]
        draft_model, more = served(options, log, options.draft_model, named, "--draft-model NAME")
        draft, notes = draft_model.spec, notes + more
    engine = inputs_of(log, model.spec)
    drafts = Speculation(int(log.flags.get("num_speculative_tokens", "0")), draft)
    rows, rows_of_pool, of_ranks = rows_of(log, model.spec, drafts)
    pool = log.least("num_blocks")
    release = printable(log.flags.get("kvplan_release", "?"), 30)
    gpu, device = log.text("gpu"), log.text("engine_device")
    result = LogReconciliation(
        engine=f"kvplan's engine {release}",
        model=model.spec.name,
        gpus=(),
        args=EngineArgs(
            tensor_parallel_size=engine.tensor_parallel_size, pipeline_parallel_size=engine.pipeline_parallel_size
        ),
        max_model_len=engine.max_model_len,
        rows=rows,
        given=rows_of_pool,
        given_from="" if pool is None else f"{pool.count:,} blocks",
        notes=(*log.notes, *of_ranks, *notes),
        machine=f"{gpu or ('a CPU' if device == 'cpu' else device)} of {format_gib(engine.total)}",
        total_memory=engine.total,
    )
    notices = Inputs([], 1, list(result.notes), [], list(model.warnings))
    output.say(notices, quiet=options.quiet)
    return replace(result, notes=tuple(dict.fromkeys([*result.notes, *model.warnings])))


def served(
    options: ReconcileOptions, log: ServerLog, model: str | None, logged: str | None, cure: str
) -> tuple[Resolved, list[str]]:
    """(a model by the option, else by its name in the log; notes): the log's own paths are never opened."""
    notes = list[str]()
    if model is None:
        model, note = model_of(replace(log, flags={"model": logged or ""}))
        if model is None:
            called = printable(logged or "", 120)
            raise InvalidInputError(
                log.called, f"its model {called!r} is not one that `kvplan models` lists", f"add {cure}"
            )
        notes += [] if note is None else [note]
    return resolve(model, source_of(form_of(options), options.revision)), notes
