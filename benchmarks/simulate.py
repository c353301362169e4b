"""What a simulation costs: the Azure conversation trace's shape, an hour of it, for Llama-3.1-8B on one A100.

    python -m benchmarks.simulate [--runs 3] [--requests 19366] [--csv FILE]
    python -m benchmarks.simulate --day [--router NAME] [--csv FILE]

Requests of the profile azure-2023-conv at its own 5.53 per second, on one core: run by what changes, over the engine's
scheduler with jumps, and with every step taken singly; all give the same figures (tests/simulate/test_unshared.py,
test_simulate_exact.py). Then 16 servers behind a router at that rate, as a part of a day. With --day, the whole of it
on 16 servers, by a process for each core where the router looks at nothing (random, round-robin), else by one; its rows
are added to those of the CSV.
"""

import argparse
import csv
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args

if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path.pop(0)

from benchmarks.planner import HEADER, measured_with
from kvplan.core.processes import cores
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.planning.sweep import portable_requests
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Open
from kvplan.simulate.fleet import Fleet, Kind
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.routers import RouterName, router
from kvplan.simulate.runs import Run
from kvplan.simulate.setup import Setup
from kvplan.simulate.steptime import step_time
from kvplan.workloads.profiles import profile

NUM_REQUESTS = 19_366
SERVERS = 16
A_DAY = 477_000
Row = tuple[str, str, float, float, float, int]


def setup() -> Setup:
    the_plan = plan(Request(catalog.load("llama-3.1-8b"), gpu("a100-80g"), EngineArgs(max_model_len=32_768)))
    [portable] = portable_requests([the_plan.request])
    return Setup(replace(the_plan, request=portable), step_time(the_plan, Shares()))


def requests(count: int) -> Open:
    return Open(islice(profile("azure-2023-conv").requests(seed=0), count))


def by_change(count: int) -> Run:
    return setup().run(requests(count))


def by_jumps(count: int) -> Run:
    return setup().simulation(requests(count))


def singly(count: int) -> Run:
    simulation = setup().simulation(requests(count))
    simulation.jump = False
    return simulation


def fleet(name: RouterName) -> Callable[[int], Fleet]:
    return lambda count: Fleet((Kind("a100-80g", setup().run),) * SERVERS, requests(count), router(name, 0, None))


def seconds(make: Callable[[int], Run | Fleet], count: int) -> float:
    """Of this process's own CPU time, so that others on the machine count less."""
    run = make(count)
    start = time.process_time()
    run.run()
    return time.process_time() - start


def day(way: RouterName) -> list[Row]:
    """Seconds of a whole day: by the clock, and of CPU in this process and in its workers."""
    servers, begun = fleet(way)(A_DAY), time.monotonic()
    jobs = cores() if servers.is_apart else 1
    before = cpu_seconds()
    servers.run(jobs)
    here, workers = (after - earlier for after, earlier in zip(cpu_seconds(), before, strict=True))
    name = f"a day ({A_DAY:,} requests), {SERVERS} servers, {way}, {jobs} process{'es' if jobs > 1 else ''}: "
    return [
        row(f"{name}CPU of this one", "s", [here]),
        row(f"{name}CPU of all workers", "s", [workers]),
        row(f"{name}by the clock", "s", [time.monotonic() - begun]),
    ]


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    here, children = (usage.ru_utime + usage.ru_stime for usage in used)
    return here, children


def row(metric: str, unit: str, values: list[float]) -> Row:
    cuts = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
    return metric, unit, statistics.median(values), cuts[0], cuts[3], len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--day", action="store_true")
    parser.add_argument("--router", choices=get_args(RouterName), default="random")
    options = parser.parse_args()
    rows = day(options.router) if options.day else parts(options.requests, options.runs)
    for metric, unit, value, p20, p80, n in rows:
        print(f"{metric:<48} {value:8.2f} {unit:<3} (20-80%: {p20:.2f}-{p80:.2f}, n={n})")
    if options.csv:
        model_and_gpu = ("llama-3.1-8b", "a100-80g (simulated)", "", "", *measured_with()[4:])
        lines = [(*row, *model_and_gpu) for row in rows]
        with options.csv.open("a" if options.day else "w", newline="") as file:
            csv.writer(file).writerows(lines if options.day else [HEADER, *lines])


def parts(count: int, runs: int) -> list[Row]:
    ways = (by_change, by_jumps, singly, fleet("least-loaded"), fleet("random"))
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(runs):  # in turn, so that the machine's mood hits all
        for way, spent in zip(ways, times, strict=True):
            spent.append(seconds(way, count))
    changed, jumped, stepped, loaded, apart = times
    return [
        row("requests per second, by what changes", "1/s", [count / spent for spent in changed]),
        row("requests per second, over the scheduler", "1/s", [count / spent for spent in jumped]),
        row("over the scheduler / by what changes", "x", [b / a for a, b in zip(changed, jumped, strict=True)]),
        row("every step singly / by what changes", "x", [b / a for a, b in zip(changed, stepped, strict=True)]),
        row(f"requests per second, {SERVERS} servers, least loaded", "1/s", [count / spent for spent in loaded]),
        row(f"requests per second, {SERVERS} servers, random", "1/s", [count / spent for spent in apart]),
    ]


if __name__ == "__main__":
    main()
