"""Share of preempted requests in a simulated run, for rules about it."""

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import Setup, check
from kvplan.simulate.slo import refused_requests
from kvplan.simulate.source import Source
from kvplan.simulate.steptime import AtLeast, StepTime, step_time


def preempted_share(plan: Plan, source: Source, rate: float, tpot_s: float | None) -> float | str:
    """Return the share of requests that are preempted or cannot be served at `rate` per second, or an error message.

    tpot_s  minimum seconds per output token, as stated by the user; None: as modeled
    """
    try:
        check(plan)
        times: StepTime = step_time(plan, Shares())
    except KvplanError as error:
        return str(error)
    setup = Setup(plan, times if tpot_s is None else AtLeast(times, tpot_s))
    simulation = setup.run(source.open(rate), source.run_len)
    simulation.run()
    missed = sum(count > 0 for count in simulation.records.preemptions) + refused_requests(simulation)
    return missed / simulation.counts.arrived
