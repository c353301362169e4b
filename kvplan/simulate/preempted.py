"""How often requests are preempted: one figure of a run, for rules about it."""

from kvplan.errors import KvplanError
from kvplan.plan import Plan
from kvplan.simulate.setup import Setup, check
from kvplan.simulate.source import Source
from kvplan.simulate.steptime import Shares, roofline


def preempted_share(plan: Plan, source: Source, rate: float) -> float | str:
    """The share of the requests that are preempted at `rate` per second; a text says why it cannot be told."""
    try:
        check(plan)
        setup = Setup(plan, roofline(plan, Shares()))
    except KvplanError as error:
        return str(error)
    simulation = setup.simulation(source.open(rate), source.run_len)
    simulation.run()
    preemptions = simulation.records.preemptions
    if not preemptions:
        return "no request of the workload can be served"
    return sum(count > 0 for count in preemptions) / len(preemptions)
