"""A run of one server: over the engine's scheduler, or by what changes where requests share nothing."""

from typing import Protocol

from kvplan.simulate.counts import Counts
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records
from kvplan.simulate.unshared import Unshared

Run = Simulation | Unshared


class Served(Protocol):
    """What a run or a fleet served."""

    @property
    def records(self) -> Records: ...

    @property
    def counts(self) -> Counts: ...
