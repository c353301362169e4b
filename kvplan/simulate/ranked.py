"""Data-parallel ranks of one server as a fleet: each has a scheduler and a pool of its own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.planning.plan import Plan
from kvplan.planning.users import num_gpus
from kvplan.simulate import slo
from kvplan.simulate.fleet import Fleet, Kind
from kvplan.simulate.fleet_result import fleet_result
from kvplan.simulate.load import Load
from kvplan.simulate.outcome import Variant
from kvplan.simulate.ranges import Ranges
from kvplan.simulate.routers import router
from kvplan.simulate.setup import Setup

ROUTER: Final = "least-loaded"


def ranks_of(
    plan: Plan,
    setups: Mapping[str, Setup],
    load: Load,
    promises: tuple[slo.Promise, ...],
    uncertainty: Ranges,
    stop: Callable[[int], bool],
) -> Variant:
    """Run a server's ranks behind a router, which gives each the same share; stop: told how many are finished."""
    if len(setups) > 1:
        problem = "data-parallel ranks are simulated in one way at a time"
        raise UsageError("simulate", problem, "remove --tier and --baseline, and state the acceptance of drafts")
    [setup] = setups.values()
    count = plan.request.args.data_parallel_size
    kind = Kind(plan.request.gpu.name, setup.run, num_gpus=num_gpus(plan) // count)
    run_len, seed = load.source.run_len, load.seed
    fleet = Fleet(
        (kind,) * count, load.arrivals(), router(ROUTER, seed, run_len), run_len,
        decode_router=router(ROUTER, seed, run_len), stop=lambda fleet: stop(fleet.num_finished),
    )  # fmt: skip
    fleet.run(1)
    figures = fleet_result(fleet, load.skipped, by_clock=not load.is_closed and load.users is None)
    if not figures.total.judged:
        raise UsageError("simulate", "no request is served by the ranks", "raise --ctx or --num-requests")
    outcomes = slo.outcomes(promises, fleet, load.skipped, uncertainty)
    good = slo.good_requests(promises, fleet, load.skipped) if promises else None
    total = figures.total  # counts of requests at once are of each rank, as their highest are
    by_rank = replace(total, running_mean=total.running_mean / count, waiting_mean=total.waiting_mean / count)
    name = f"{count} ranks (running, waiting: of each)"
    return Variant(name, fleet.replicas[0].run, by_rank, outcomes, None, good)
