"""What `simulate` answers: a run for each variant, with the promises that were asked about."""

from dataclasses import dataclass

from kvplan.planning.plan import Plan
from kvplan.simulate.fleet import Fleet
from kvplan.simulate.fleet_result import FleetResult
from kvplan.simulate.ranges import Ranges
from kvplan.simulate.result import Result
from kvplan.simulate.runs import Run
from kvplan.simulate.slo import Kept, Largest, Promise


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the same load.

    largest  None where nothing is promised, or all requests come at once
    good     requests that keep every promised time by themselves
    """

    name: str
    simulation: Run
    result: Result
    outcomes: tuple[Kept, ...] = ()
    largest: Largest | None = None
    good: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All of it; the first variant is the one that was asked for."""

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
    """What a fleet answers: figures as of one server, and those of its replicas."""

    total: Answer  # its variant's run is that of the first replica
    result: FleetResult
    fleet: Fleet
    router: str
    servers: str
