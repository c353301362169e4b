"""What a simulated run tells a policy: the share of preempted requests, and the largest load that keeps its targets."""

from dataclasses import dataclass

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.result import result
from kvplan.simulate.runs import Run
from kvplan.simulate.setup import Setup, check
from kvplan.simulate.slo import Broken, largest_rate, outcomes, parse_slo, refused_requests
from kvplan.simulate.source import Source
from kvplan.simulate.steptime import AtLeast, StepTime, step_time


def preempted_share(plan: Plan, source: Source, rate: float, tpot_s: float | None) -> float | str:
    """Return the share of requests that are preempted or cannot be served at `rate` per second, or an error message.

    tpot_s  minimum seconds per output token, as stated by the user; None: as modeled
    """
    setup = setup_of(plan, tpot_s)
    if isinstance(setup, str):
        return setup
    simulation = setup.run(source.open(rate), source.run_len)
    simulation.run()
    missed = sum(count > 0 for count in simulation.records.preemptions) + refused_requests(simulation)
    return missed / simulation.counts.arrived


@dataclass(frozen=True, slots=True)
class Kept:
    """The largest load that keeps latency targets: requests per second, and requests in flight at that rate."""

    rate: float
    in_flight: float


def largest_kept(plan: Plan, source: Source, rate: float, tpot_s: float | None, targets: str) -> Kept | str:
    """The largest load that likely keeps `targets` ("ttft=2s,tpot=50ms"), searched from `rate`, or why none does."""
    setup, promises = setup_of(plan, tpot_s), parse_slo(targets)
    if isinstance(setup, str):
        return setup

    def run(amount: float) -> Run:
        simulation = setup.run(source.open(amount), source.run_len)
        simulation.stop = Broken(promises, source.num_requests, 0)
        simulation.run()
        return simulation

    def keeps(amount: float) -> bool:
        simulation = run(amount)
        is_broken = Broken(promises, source.num_requests, 0)(simulation)
        return not is_broken and all(outcome.is_kept for outcome in outcomes(promises, simulation, 0))

    best = largest_rate(rate, keeps).keeps
    if best is None:
        return f"no load keeps {targets}"
    figures = result(run(best), 0)
    return Kept(best, figures.running_mean + figures.waiting_mean)


def setup_of(plan: Plan, tpot_s: float | None) -> Setup | str:
    try:
        check(plan)
        times: StepTime = step_time(plan, Shares())
    except KvplanError as error:
        return str(error)
    return Setup(plan, times if tpot_s is None else AtLeast(times, tpot_s))
