"""`kvplan recommend --slo`: find servers that meet latency targets under a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.cli.options import refuse_given, whole_form
from kvplan.cli.simulate_options import words_of
from kvplan.report import timed_text
from kvplan.simulate.timed import Targets
from kvplan.simulate.timed import timed as placements_of
from kvplan.simulate.tuned import Listener

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
    listener = Listener(lambda inputs: output.say(inputs, quiet=options.quiet), output.tell, quiet=options.quiet)
    targets = Targets(options.slo, words_of(options), options.spare, prices, options.optimistic)
    progress = silent if options.quiet else say_progress
    return timed_text.document(*placements_of(targets, question, inputs, whole_form(options), listener, progress))
