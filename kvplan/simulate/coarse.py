"""The speed of a plan without a simulation: one step in which every user decodes."""

from dataclasses import dataclass

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.ranges import modeled
from kvplan.simulate.steptime import attention_kinds, step_time
from kvplan.simulate.work import StepWork


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds from one token of a user to the next while all users of a server decode; prompts come on top."""

    likely: float
    low: float
    high: float


def pace(the_plan: Plan, num_users: int) -> Pace | None:
    """The pace of so many users of one server, each with its mean number of tokens; None if the model's steps are not
    modeled. Source: the step times of `simulate`, whose range is that of the token times of published results.
    """
    load, settings = the_plan.request.load, the_plan.settings
    context = load.mean_tokens or settings.max_model_len
    try:
        times = step_time(the_plan, Shares())
        read = tuple(round(num_users * kind.reach.read(context)) for kind in attention_kinds(the_plan))
        nothing = (0,) * len(read)
        seconds = times.seconds(StepWork(num_users, num_users, num_users, read, read, 0, 0, nothing))
        low, high = modeled(the_plan).time("tpot", seconds)
    except KvplanError:
        return None
    return Pace(seconds, low, high)
