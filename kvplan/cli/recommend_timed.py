"""`kvplan recommend --slo`: find servers that meet latency targets under a load."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.cli.load_options import words_of
from kvplan.cli.options import refuse_given, whole_form
from kvplan.core.errors import UsageError
from kvplan.core.units import parse_count
from kvplan.planning.plan import plan
from kvplan.planning.recommend import shares_experts
from kvplan.report import timed_text
from kvplan.servers.base import abilities_of
from kvplan.simulate import slo
from kvplan.simulate.load import check_lengths, load_of
from kvplan.simulate.placing import Demand, placed
from kvplan.simulate.setup import refuse_reordering, refuse_unmodeled

if TYPE_CHECKING:
    from kvplan.asked.question import Inputs
    from kvplan.cli.sweep_options import RecommendOptions
    from kvplan.documents.timed import TimedRecommendationDocument
    from kvplan.planning.recommend import Question

ONLY_WITH_TARGETS = ("rate", "profile", "trace", "num_requests", "seed", "spare")
NOT_WITH_TARGETS = ("mean_tokens", "lengths", "overflow", "num_gpus", "output")


def check_alone(options: RecommendOptions) -> None:
    """Refuse options that only apply with, or only without, latency targets."""
    if options.slo is None:
        refuse_given(options, ONLY_WITH_TARGETS, "needs latency targets", "add --slo ttft=2s,tpot=50ms")
    else:
        refuse_given(options, NOT_WITH_TARGETS, "does not apply with --slo", "use --prompt-tokens or --profile")


def say_progress(text: str) -> None:
    output.tell("progress", text)


def silent(text: str) -> None:
    return None


def timed(
    options: RecommendOptions, question: Question, inputs: Inputs, prices: str | None
) -> TimedRecommendationDocument:
    assert options.slo is not None
    promises = slo.parse_slo(options.slo)
    load = load_of(words_of(options), output.tell)
    if load.amount is None or len(load.stages) > 1:
        raise UsageError("--rate", "must be one number of requests per second", "write --rate 4")
    users = load.users if load.is_closed else None
    if users is not None and load.source.num_requests < users:
        raise UsageError(
            f"--num-requests {load.source.num_requests:,}",
            f"is fewer than the {users:,} users, so they would never all run at once",
            f"write {2 * users} or more",
        )
    spare = 0 if options.spare in (None, "0") else parse_count(options.spare or "", "--spare", 1000)
    demand = Demand(
        load.source, None if load.is_closed else load.peak, users, promises, spare,
        strict=not options.optimistic, is_sized=bool(options.num_requests or options.trace),
        calibration=options.calibration, think_s=load.think_s, ramp_s=load.ramp_s,
    )  # fmt: skip
    output.say(inputs, quiet=options.quiet)
    first = plan(inputs.requests[0])
    refuse_unmodeled(first)  # applies to every placement: the answer would not be for the requested load
    refuse_reordering(whole_form(options).command())
    context = first.request.args.max_model_len
    assert isinstance(context, int), "the command states one"
    rows = islice(load.source.requests(1.0), load.source.num_requests)
    check_lengths(rows, context, first.request.spec, promises, output.notes_of(options))
    placements = placed(question, inputs.requests, demand, silent if options.quiet else say_progress)
    first_request = inputs.requests[0]
    return timed_text.document(
        first_request, f"{load.source.name}, {load.how}", demand, placements,
        prices=prices,
        shares_experts=abilities_of(first_request.release.engine).recommended
        and shares_experts(question, first_request),
    )  # fmt: skip
