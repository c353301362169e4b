"""Results of `simulate`: one run per variant, with the requested latency targets."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.core.records import dataclass
from kvplan.planning.plan import Plan
from kvplan.simulate.ranges import Ranges
from kvplan.simulate.result import Result
from kvplan.simulate.runs import Run
from kvplan.simulate.slo import Kept, Largest, Promise

if TYPE_CHECKING:
    from kvplan.simulate.fleet import Fleet
    from kvplan.simulate.fleet_result import FleetResult
    from kvplan.simulate.routers import RouterName


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
    """Complete result of `simulate`; the first variant is the requested one.

    is_bounded  the variants are the best and the worst case of an acceptance that is not stated
    """

    plan: Plan
    load: str
    step_time: str
    how: str
    by_users: bool
    promises: tuple[Promise, ...]
    variants: tuple[Variant, ...]
    ranges: Ranges
    is_bounded: bool = False

    @property
    def outcomes(self) -> tuple[Kept, ...]:
        """The targets' outcomes, from the best case to the worst."""
        best, worst = self.variants[0], self.variants[-1]
        if not self.is_bounded:
            return best.outcomes
        pairs = zip(best.outcomes, worst.outcomes, strict=True)
        return tuple(replace(high, low=low.low) if high.value is not None else high for low, high in pairs)


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """Result of a fleet simulation: figures as if of one server, and those of its replicas."""

    total: SimulationAnswer  # its variant's run is that of the first replica
    result: "FleetResult"
    fleet: "Fleet"
    router: "RouterName"
    servers: str
