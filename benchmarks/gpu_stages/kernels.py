"""benchmarks/kernels.py in a stage: the shapes with the biggest news first, as many as the time allows.

With --rest those that the stage `kernels`, whose result lies in the folder beside this one's, did not come to. What is
left of them after that is left to the next call, which finds this stage's own result in its folder and adds to it.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.runner import FAILURES, UNFINISHED
from benchmarks.gpu_stages.stage import RESULT, Row, Task, parser, task
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.figure import draw
from benchmarks.kernel_bench.timings import Findings, begin, measure

TERMINATED = 143
FIRST = "kernels"  # the stage that begins


def result_of(folder: Path) -> dict[str, Any]:
    """What a stage has saved; nothing where it has not, or not what can be read."""
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cases_of(result: dict[str, Any]) -> list[str]:
    """The names of the cases that a stage has come to."""
    return list(result.get("numbers", {}).get("cases", []))


def run(stage: Task) -> int:
    """FAILURES where one of our kernels could not be measured: the rest is still worth having."""
    until_s = stage.until_s
    found = begin(stage.device)
    try:
        measure(stage, cases(stage.device), until_s, found)
    finally:  # where the budget ends it, too
        draw(stage.folder / "kernels.svg", found.timings, found.rates, str(stage.device))
    return FAILURES if found.failures else 0


def run_rest(stage: Task) -> int:
    """UNFINISHED where cases are left."""
    until_s, own = stage.until_s, result_of(stage.folder)
    first, every = cases_of(result_of(stage.folder.parent / FIRST)), cases(stage.device)
    wanted = [case for case in every if str(case) not in {*first, *cases_of(own)}]
    if not wanted and not own:
        stage.save(f"all {len(every)} cases were measured before", {"cases": []})
        return 0
    found = begin(stage.device)
    resume(found, own)
    stage.save(found.headline, found.numbers, found.rows)
    try:
        measure(stage, wanted, until_s, found)
    finally:
        draw(stage.folder / "kernels.svg", found.timings, found.rates, str(stage.device))
        left = len([case for case in wanted if str(case) not in found.cases])
        told = f"{left} of {len(every)} cases are left" if left else f"none of {len(every)} cases is left"
        stage.save(f"{found.headline}; {told}", found.numbers, found.rows)
    if left:
        return UNFINISHED
    return FAILURES if found.numbers["failures"] else 0


def resume(found: Findings, own: dict[str, Any]) -> None:
    """Take over what an earlier call has saved."""
    found.before = own.get("numbers", {})
    found.cases = cases_of(own)
    found.rows = [*(Row(**values) for values in own.get("rows", [])), *found.rows]


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for the kernels (%(default)s)")
    own.add_argument("--rest", action="store_true", help="the cases that another stage did not come to")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    chosen = task(own)
    raise SystemExit(run_rest(chosen) if chosen.options.rest else run(chosen))
