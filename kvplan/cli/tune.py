"""`kvplan tune`: find the flags with the highest throughput on given GPUs under a load and latency targets."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf, isinf
from typing import TYPE_CHECKING, Final

from kvplan.asked.form import refuse_missing
from kvplan.asked.question import MODEL_CURE, Inputs
from kvplan.cli import output
from kvplan.cli.load_options import words_of
from kvplan.cli.options import inputs_of, stated_by, whole_form
from kvplan.cli.simulate import with_generator
from kvplan.cli.tune_options import TuneOptions
from kvplan.cli.workers import at_work, workers_of
from kvplan.core.errors import UsageError
from kvplan.core.units import parse_count
from kvplan.planning.advise import reads_fp8
from kvplan.planning.choice import counted
from kvplan.planning.plan import Request, plan
from kvplan.planning.recommend import is_fp8_already, with_args
from kvplan.report.formats import rendered
from kvplan.servers.base import abilities_of, titles
from kvplan.simulate import slo
from kvplan.simulate.load import check_lengths, load_of
from kvplan.simulate.question import parse_tier, say_how_steady
from kvplan.simulate.settings import space
from kvplan.simulate.setup import check_tiers, refuse_reordering
from kvplan.simulate.steady import Demand, How
from kvplan.simulate.tiers import TierSpec
from kvplan.simulate.tuning import TURNS, Tried, refuse_unless_some, tune

if TYPE_CHECKING:
    from kvplan.documents.tune import TuneDocument
    from kvplan.simulate.load import Load

NUM_REQUESTS: Final = "2000"
ROWS: Final = 10
MOST_GPUS: Final = 1024
SOUGHT: Final = {  # engine arguments that the search must be free to change
    "data_parallel_size": "the number of servers follows from --num-gpus and --tp",
    "pipeline_parallel_size": "stages cannot be simulated",
}


def tune_command(options: TuneOptions) -> int:
    """Tune and return the exit code: 0, or with --exit-code 1 if the load may not be served."""
    with output.report_files(options.report or [], force=options.force) as reports:
        limit = parse_count(options.limit, "--limit") if options.limit is not None else ROWS
        try:
            doc = answered(options)
        except KeyboardInterrupt:
            output.tell("warning", "interrupted: no setting was chosen")
            raise
        from kvplan.report.tune_text import shapes

        response = shapes(doc, limit)
        for report in reports:
            report.save(rendered(response, report.format))
        output.answer(response, options.format, options.color)
    return int(options.exit_code and doc["verdict"] not in (None, "kept"))


def answered(options: TuneOptions) -> TuneDocument:
    from kvplan.report.tune_text import HIGHEST_RATE, document

    gpus, num_gpus = counted(options.gpu, options.num_gpus)
    options = with_generator(replace(options, gpu=gpus, num_gpus=num_gpus))
    refuse_missing(
        ("MODEL", whole_form(options).names_model, MODEL_CURE),
        ("--gpu", whole_form(options).names_gpu, "name the GPU to serve on: h100-80g, or 8xh100-80g"),
        (
            "workload",
            any((options.trace, options.profile, options.prompt_tokens, options.output_tokens)),
            "give one of --trace, --profile, --prompt-tokens",
        ),
    )
    jobs = workers_of(options.jobs, options.ray)
    stated = stated_by(options, SOUGHT)
    refuse_reordering(whole_form(options).command())
    inputs = inputs_of(options)
    base = base_of(inputs)
    count = num_gpus_of(options, base, stated)
    promises = () if options.slo is None else slo.parse_slo(options.slo)
    load, rate = load_and_rate(options)
    tier = None if options.tier is None else tier_of(options.tier, base, load)
    demand = demand_of(options, load, promises, tier)
    context = base.args.max_model_len
    assert isinstance(context, int), "it is stated by now"
    check_lengths(demand.rows, context, base.spec, promises, output.notes_of(options))
    if not promises and demand.how == "rate":
        raise UsageError(
            "--slo",
            "is missing: without it more requests only wait longer",
            "add --slo ttft.p90=2s,tpot=50ms",
        )
    output.say(inputs, quiet=options.quiet)
    say_how_steady(promises, load.source.num_requests - load.skipped, output.notes_of(options))
    fp8 = options.fp8 and reads_fp8(base) and not is_fp8_already(base)
    has_prefixes, host = load.source.run_len is not None, 0 if demand.tier is None else demand.tier.capacity
    where = space(base, stated, count, fp8=fp8, has_prefixes=has_prefixes, host=host)
    with at_work(jobs, quiet=options.quiet):
        tuned = tune(base, demand, where, jobs, rate)
    refuse_unless_some(tuned)
    sought = HIGHEST_RATE if rate is None else f"{rate:g} requests/s"
    how = load.how if demand.how != "rate" else sought
    doc = document(base, count, f"{load.source.name}, {how}", demand, rate, tuned)
    if tuned.best is not None and demand.how == "rate" and not tuned.is_light_load and not options.quiet:
        say_how_long(tuned.best.tried, len(demand.rows))
    return doc


def say_how_long(best: Tried, num_requests: int) -> None:
    """Note a run so short that most requests arrive at a server that is still filling up."""
    running = 0 if best.run is None else best.run.result.running_peak
    if num_requests < TURNS * running:
        output.tell(
            "note",
            f"{num_requests:,} requests are few with {running:,} running at once; a longer run may serve less: "
            "raise --num-requests",
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def base_of(inputs: Inputs) -> Request:
    """The one server to tune, with a fixed context."""
    base = inputs.only("tune", "name one --gpu and one --ctx")
    if not abilities_of(base.release.engine).simulated:
        names, engines = titles(lambda can: can.simulated)
        raise UsageError("--engine", f"tune supports only {names}", f"use --engine {engines}")
    if base.args.max_model_len == "auto":
        raise UsageError("--ctx", "auto would be another length with every setting", "write one, for example 16k")
    return base if base.args.max_model_len is not None else with_args(base, max_model_len=base.spec.max_model_len)


def num_gpus_of(options: TuneOptions, base: Request, stated: frozenset[str]) -> int:
    ranks = base.args.tensor_parallel_size
    if options.num_gpus is None:
        return ranks
    count = parse_count(options.num_gpus, "--num-gpus", MOST_GPUS)
    if "tensor_parallel_size" in stated and count % ranks:
        raise UsageError(f"--num-gpus {count}", f"is not a multiple of --tp {ranks}", "change one of them")
    return count


def load_and_rate(options: TuneOptions) -> tuple[Load, float | None]:
    """(the load, the requests per second to serve)."""
    is_sought = options.rate is None and options.users is None and options.max_concurrency is None
    by_users = options.users is not None or options.max_concurrency is not None
    load = load_of(
        replace(
            words_of(options),
            rate="1" if is_sought else options.rate,
            num_requests=options.num_requests or (None if by_users else NUM_REQUESTS),
        ),
        output.tell,
    )
    if len(load.stages) > 1:
        raise UsageError("--rate", "must be one number of requests per second", "write --rate 4")
    if load.stages and load.users is not None:
        raise UsageError("--max-concurrency", "cannot be combined with a rate here", "use only one")
    is_rate = not is_sought and bool(load.stages) and not isinf(load.peak)
    return load, load.peak if is_rate else None


def tier_of(text: str, base: Request, load: Load) -> TierSpec:
    """Host memory for vLLM's offloading connector. Refuse it if no prompts share a prefix."""
    tier = parse_tier(text)
    if abilities_of(base.release.engine).prompts_first is not None:
        raise UsageError("--tier", "needs vLLM's scheduler", "use --engine vllm")
    if load.source.run_len is None:
        raise UsageError("--tier", "helps only if prompts share prefixes, which these do not", "remove it")
    check_tiers(plan(base), (tier,))
    return tier


def demand_of(options: TuneOptions, load: Load, promises: tuple[slo.Promise, ...], tier: TierSpec | None) -> Demand:
    source = load.source
    timed = source.requests(1.0)
    if load.process is not None:
        timed = source.timed(((1.0, inf),), load.process, load.seed)
    rows = tuple(islice(timed, source.num_requests))
    how: How = "users" if load.is_closed else "at once" if isinf(load.peak) else "rate"
    return Demand(
        rows,
        how,
        promises,
        load.users or 0,
        load.think_s,
        load.ramp_s,
        first_counts=load.is_judged_whole,
        run_len=source.run_len,
        calibration=options.calibration,
        tier=tier,
    )
