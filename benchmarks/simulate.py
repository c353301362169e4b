"""What a simulation costs: the Azure conversation trace's shape, an hour of it, for Llama-3.1-8B on one A100.

    python -m benchmarks.simulate [--runs 3] [--csv FILE]

19,366 requests of the profile azure-2023-conv at its own 5.53 per second, on one core; beside it the same run with
every step taken singly, which gives the same figures (tests/simulate/test_simulate_exact.py).
"""

import argparse
import csv
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path.pop(0)

from benchmarks.planner import HEADER, measured_with
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.vllm.rules import EngineArgs
from kvplan.simulate.arrivals import Open
from kvplan.simulate.loop import Simulation
from kvplan.simulate.setup import Setup
from kvplan.simulate.steptime import Shares, roofline
from kvplan.workloads.profiles import profile

NUM_REQUESTS = 19_366
Row = tuple[str, str, float, float, float, int]


def simulation(*, jump: bool) -> Simulation:
    the_plan = plan(Request(catalog.load("llama-3.1-8b"), gpu("a100-80g"), EngineArgs(max_model_len=32_768)))
    workload = profile("azure-2023-conv")
    requests = islice(workload.requests(seed=0), NUM_REQUESTS)
    made = Setup(the_plan, roofline(the_plan, Shares())).simulation(Open(requests), workload.prefix_block)
    made.jump = jump
    return made


def seconds(*, jump: bool) -> float:
    """Of this process's own CPU time, so that others on the machine do not count."""
    made = simulation(jump=jump)
    start = time.process_time()
    made.run()
    return time.process_time() - start


def row(metric: str, unit: str, values: list[float]) -> Row:
    cuts = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
    return metric, unit, statistics.median(values), cuts[0], cuts[3], len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    jumped, stepped = [], []
    for _ in range(options.runs):  # in turn, so that the machine's mood hits both
        jumped.append(seconds(jump=True))
        stepped.append(seconds(jump=False))
    rows = [
        row("simulate an hour of azure-2023-conv", "s", jumped),
        row("the same, every step singly", "s", stepped),
        row("ratio", "x", [b / a for a, b in zip(jumped, stepped, strict=True)]),
    ]
    for metric, unit, value, p20, p80, n in rows:
        print(f"{metric:<36} {value:8.2f} {unit:<3} (20-80 %: {p20:.2f}-{p80:.2f}, n={n})")
    if options.csv:
        model_and_gpu = ("llama-3.1-8b", "a100-80g (simulated)", "", "", *measured_with()[4:])
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *((*each, *model_and_gpu) for each in rows)])


if __name__ == "__main__":
    main()
