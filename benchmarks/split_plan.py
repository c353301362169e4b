"""How evenly decode work is cut: tokens of the busiest program over an even share, by batch; no GPU is needed.

python -m benchmarks.split_plan [--heads 8] [--programs 396] prints a table: 396 programs of an H100 run at once with 96
registers each (three on a multiprocessor), and each item is read by 8 of them, one per KV head of Llama-3.1-8B.
"""

import argparse
import heapq
from collections.abc import Mapping

import numpy as np

from engine.kernels.work_list import Ints, Plan, SplitPlanner

BLOCK_N = 64


def mixes() -> Mapping[str, Ints]:
    """Context lengths by the name of their batch; chats are drawn with a fixed seed."""
    chats = np.random.default_rng(0).lognormal(6.5, 1, 128)
    equal = {f"{n} x 4,096": [4_096] * n for n in (1, 2, 4, 8, 16, 25, 32, 40, 50, 64, 100, 150, 200, 256)}
    more = {
        "64 x 2,048": [2_048] * 64,
        "256 x 512": [512] * 256,
        "100,000 and 255 x 500": [100_000, *[500] * 255],
        "128 chats": np.minimum(8_192, chats).astype(int).tolist(),
    }
    return {name: np.array(lens, np.int32) for name, lens in (equal | more).items()}


def busiest_program(plan: Plan, at_once: int) -> int:
    """Tokens that the busiest program reads when each takes the next item as soon as it is free."""
    items = plan.split()[0]
    loads = [0] * at_once
    for tokens in (items[:, 2] - items[:, 1])[items[:, 0] >= 0].tolist():
        heapq.heapreplace(loads, loads[0] + tokens)
    return max(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=8, help="KV heads of a rank (%(default)s)")
    parser.add_argument("--programs", type=int, default=396, help="programs that the GPU runs at once (%(default)s)")
    options = parser.parse_args()
    planner = SplitPlanner(options.heads, options.programs, BLOCK_N)
    print(f"{'contexts':24}{'items':>7}{'longest item':>14}{'busiest / even share':>22}")
    for name, lens in mixes().items():
        plan = planner.plan(lens)
        items = plan.split()[0]
        ratio = busiest_program(plan, planner.at_once) * planner.at_once / int(lens.sum())
        print(f"{name:24}{len(items):>7}{int((items[:, 2] - items[:, 1]).max()):>14,}{ratio:>22.2f}")


if __name__ == "__main__":
    main()
