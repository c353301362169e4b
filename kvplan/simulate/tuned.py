"""What `tune` is asked: the flags with the highest throughput of a server under a load; and its answer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, isinf
from typing import Final, NamedTuple

from kvplan.asked.form import Form, read_form, refuse_missing, stated_except
from kvplan.asked.question import MODEL_CURE, Inputs, requests
from kvplan.core.errors import UsageError
from kvplan.core.processes import Jobs
from kvplan.core.units import parse_count
from kvplan.planning.advise import reads_fp8
from kvplan.planning.plan import Request, plan
from kvplan.planning.recommend import is_fp8_already, with_args
from kvplan.servers.base import abilities_of, titles
from kvplan.simulate import slo
from kvplan.simulate.load import ONE_LOAD, Load, LoadWords, Tell, check_lengths, load_of
from kvplan.simulate.question import parse_tier, say_how_steady
from kvplan.simulate.settings import gpus_per_rank, space
from kvplan.simulate.setup import check_tiers, refuse_reordering
from kvplan.simulate.steady import Demand, How
from kvplan.simulate.tiers import TierSpec
from kvplan.simulate.tuning import TURNS, Tried, Tuned, refuse_unless_some, tune

NUM_REQUESTS: Final = "2000"
MOST_GPUS: Final = 1024
HIGHEST_RATE: Final = "the highest rate within the targets"  # what is sought where no --rate is given
SOUGHT: Final = {  # engine arguments that the search must be free to change
    "pipeline_parallel_size": "stages cannot be simulated"
}


@dataclass(frozen=True, slots=True)
class TuneQuestion:
    """A plan and its load as they are written, and what a search asks in addition; None: not given."""

    form: Form
    words: LoadWords
    num_gpus: str | None = None
    slo: str | None = None
    tier: str | None = None
    fp8: bool = True


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears the notes: on the requests as read, and of the load; `quiet`: only warnings of the load."""

    say: Callable[[Inputs], None]
    tell: Tell
    quiet: bool = False

    def note(self, kind: str, text: str) -> None:
        if not self.quiet:
            self.tell(kind, text)


class TuneAnswer(NamedTuple):
    """What a search answers, as its document is made of; rate: requests per second to serve, None: the highest."""

    base: Request
    num_gpus: int
    load: str
    demand: Demand
    rate: float | None
    tuned: Tuned


def tuned(
    question: TuneQuestion, jobs: Jobs, listener: Listener, at_work: AbstractContextManager[None] | None = None
) -> TuneAnswer:
    """Search. at_work: entered while it works, for workers elsewhere."""
    form = question.form
    refuse_missing(
        ("MODEL", form.names_model, MODEL_CURE),
        ("--gpu", form.names_gpu, "name the GPU to serve on: h100-80g, or 8xh100-80g"),
        ("workload", question.words.names_source, ONE_LOAD),
    )
    stated = stated_except(form, SOUGHT)
    refuse_reordering(form.command())
    inputs = requests(read_form(form))
    base = base_of(inputs)
    count = num_gpus_of(question, base, stated)
    promises = () if question.slo is None else slo.parse_slo(question.slo)
    load, rate = load_and_rate(question.words, listener.tell)
    tier = None if question.tier is None else tier_of(question.tier, base, load)
    demand = demand_of(question, load, promises, tier)
    context = base.args.max_model_len
    assert isinstance(context, int), "it is stated by now"
    check_lengths(demand.rows, context, base.spec, promises, listener.note)
    if not promises and demand.how == "rate":
        problem = "is missing: without it more requests only wait longer"
        raise UsageError("--slo", problem, "add --slo ttft.p90=2s,tpot=50ms")
    listener.say(inputs)
    say_how_steady(promises, load.source.num_requests - load.skipped, listener.note)
    fp8 = question.fp8 and reads_fp8(base) and not is_fp8_already(base)
    has_prefixes, host = load.source.run_len is not None, 0 if demand.tier is None else demand.tier.capacity
    where = space(base, stated, count, fp8=fp8, has_prefixes=has_prefixes, host=host)
    with at_work or nullcontext():
        result = tune(base, demand, where, jobs, rate)
    refuse_unless_some(result)
    how = load.how if demand.how != "rate" else HIGHEST_RATE if rate is None else f"{rate:g} requests/s"
    if result.best is not None and demand.how == "rate" and not result.is_light_load:
        say_how_long(result.best.tried, len(demand.rows), base.args.data_parallel_size, listener.note)
    return TuneAnswer(base, count, f"{load.source.name}, {how}", demand, rate, result)


def say_how_long(best: Tried, num_requests: int, ranks: int, tell: Tell) -> None:
    """Note a run so short that most requests arrive at servers that are still filling up."""
    running = 0 if best.run is None else best.run.result.running_peak * best.setting.replicas * ranks
    if num_requests < TURNS * running:
        tell(
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


def num_gpus_of(question: TuneQuestion, base: Request, stated: frozenset[str]) -> int:
    replicas = gpus_per_rank(base)
    ranks = base.args.tensor_parallel_size * replicas
    if question.num_gpus is None:
        return ranks
    count = parse_count(question.num_gpus, "--num-gpus", MOST_GPUS)
    own = ranks if "tensor_parallel_size" in stated else replicas
    if count % own:
        what = f"the {own} GPUs of a server" if replicas > 1 else f"--tp {own}"
        raise UsageError(f"--num-gpus {count}", f"is not a multiple of {what}", "change one of them")
    return count


def load_and_rate(words: LoadWords, tell: Tell) -> tuple[Load, float | None]:
    """(the load, the requests per second to serve)."""
    is_sought = words.rate is None and words.users is None and words.max_concurrency is None
    by_users = words.users is not None or words.max_concurrency is not None
    load = load_of(
        replace(
            words,
            rate="1" if is_sought else words.rate,
            num_requests=words.num_requests or (None if by_users else NUM_REQUESTS),
        ),
        tell,
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


def demand_of(question: TuneQuestion, load: Load, promises: tuple[slo.Promise, ...], tier: TierSpec | None) -> Demand:
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
        calibration=question.form.text("calibration"),
        tier=tier,
    )
