"""benchmarks/kernels.py in a stage: the shapes with the biggest news first, as many as the time allows."""

import signal
import sys

from benchmarks.gpu_stages.stage import Task, parser, task
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.figure import draw
from benchmarks.kernel_bench.timings import begin, measure

TERMINATED = 143


def run(stage: Task) -> int:
    """1 where one of our kernels could not be measured; the rest is still worth having."""
    until_s = stage.until_s
    found = begin(stage.device)
    try:
        measure(stage, cases(stage.device), until_s, found)
    finally:  # where the budget ends it, too
        draw(stage.folder / "kernels.svg", found.timings, found.rates, str(stage.device))
    return int(bool(found.failures))


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for the kernels (%(default)s)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    raise SystemExit(run(task(own)))
