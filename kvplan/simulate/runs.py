"""Run types of one server: over the engine's scheduler, or event-driven if requests share no prefix."""

from typing import Protocol

from kvplan.simulate.counts import Counts
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records
from kvplan.simulate.unshared import Unshared

Run = Simulation | Unshared


class ServedRequests(Protocol):
    """Records and counts of a run or a fleet."""

    @property
    def records(self) -> Records: ...

    @property
    def counts(self) -> Counts: ...
