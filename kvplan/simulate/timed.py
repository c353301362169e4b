"""What `recommend` is asked with latency targets: servers that meet them under a load; and its answer."""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvplan.asked.form import Form
from kvplan.asked.question import Inputs
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import parse_count
from kvplan.planning.plan import Request, plan
from kvplan.planning.recommend import Question, shares_experts
from kvplan.servers.base import abilities_of
from kvplan.simulate import slo
from kvplan.simulate.load import LoadWords, check_lengths, load_of
from kvplan.simulate.placing import Demand, Placed, placed
from kvplan.simulate.setup import refuse_reordering, refuse_unmodeled
from kvplan.simulate.tuned import Listener

MOST_SPARES = 1000


@dataclass(frozen=True, slots=True)
class Targets:
    """What is asked in addition to the plan: targets and a load, as text; None: not given."""

    slo: str
    words: LoadWords
    spare: str | None = None
    prices: str | None = None  # where they come from
    optimistic: bool = False


class TimedAnswer(NamedTuple):
    """Placements, as their document is made of."""

    request: Request
    load: str
    demand: Demand
    placed: Placed
    prices: str | None
    shares_experts: bool


def timed(
    targets: Targets,
    question: Question,
    inputs: Inputs,
    form: Form,
    listener: Listener,
    progress: Callable[[str], None],
) -> TimedAnswer:
    """Simulate each placement. form: as a whole, for what a pasted command asks of its server."""
    promises = slo.parse_slo(targets.slo)
    load = load_of(targets.words, listener.tell)
    if load.amount is None or len(load.stages) > 1:
        raise UsageError("--rate", "must be one number of requests per second", "write --rate 4")
    users = load.users if load.is_closed else None
    if users is not None and load.source.num_requests < users:
        raise UsageError(
            f"--num-requests {load.source.num_requests:,}",
            f"is fewer than the {users:,} users, so they would never all run at once",
            f"write {2 * users} or more",
        )
    spare = 0 if targets.spare in (None, "0") else parse_count(targets.spare or "", "--spare", MOST_SPARES)
    demand = Demand(
        load.source, None if load.is_closed else load.peak, users, promises, spare,
        strict=not targets.optimistic, is_sized=bool(targets.words.num_requests or targets.words.trace),
        calibration=form.text("calibration"), think_s=load.think_s, ramp_s=load.ramp_s,
    )  # fmt: skip
    listener.say(inputs)
    request = inputs.requests[0]
    first = plan(request)
    refuse_unmodeled(first)  # applies to every placement: the answer would not be for the requested load
    refuse_reordering(form.command())
    context = first.request.args.max_model_len
    assert isinstance(context, int), "the question states one"
    rows = islice(load.source.requests(1.0), load.source.num_requests)
    check_lengths(rows, context, first.request.spec, promises, listener.note)
    placements = placed(question, inputs.requests, demand, progress)
    shares = abilities_of(request.release.engine).recommended and shares_experts(question, request)
    return TimedAnswer(request, f"{load.source.name}, {load.how}", demand, placements, targets.prices, shares)
