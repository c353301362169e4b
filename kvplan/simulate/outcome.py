"""What `simulate` answers: a run for each variant, with the promises that were asked about."""

from dataclasses import dataclass

from kvplan.planning.plan import Plan
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
