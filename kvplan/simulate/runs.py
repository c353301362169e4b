"""A run of one server: over the engine's scheduler, or by what changes where requests share nothing."""

from kvplan.simulate.loop import Simulation
from kvplan.simulate.unshared import Unshared

Run = Simulation | Unshared
