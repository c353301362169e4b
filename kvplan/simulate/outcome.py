"""Results of `simulate`: one run per variant, with the requested latency targets."""

from dataclasses import dataclass

from kvplan.planning.plan import Plan
from kvplan.simulate.fleet import Fleet
from kvplan.simulate.fleet_result import FleetResult
from kvplan.simulate.ranges import Ranges
from kvplan.simulate.result import Result
from kvplan.simulate.routers import RouterName
from kvplan.simulate.runs import Run
from kvplan.simulate.slo import Kept, Largest, Promise


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the same load.

    largest  largest load within the targets; None without targets or if all requests arrive at once
    good     requests that meet every latency target individually
    """

    name: str
    simulation: Run
    result: Result
    outcomes: tuple[Kept, ...] = ()
    largest: Largest | None = None
    good: int | None = None


@dataclass(frozen=True, slots=True)
class SimulationAnswer:
    """Complete result of `simulate`; the first variant is the requested one."""

    plan: Plan
    load: str
    step_time: str
    how: str
    by_users: bool
    promises: tuple[Promise, ...]
    variants: tuple[Variant, ...]
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """Result of a fleet simulation: figures as if of one server, and those of its replicas."""

    total: SimulationAnswer  # its variant's run is that of the first replica
    result: FleetResult
    fleet: Fleet
    router: RouterName
    servers: str
