"""benchmarks/kernels.py in a stage: the shapes with the biggest news first, as many as the time allows.

With --rest those that the stage `kernels`, whose result lies in the folder beside this one's, did not come to; a result
of other code counts for nothing. What is left of them after that is left to the next call, which finds this stage's own
result in its folder and adds to it.
"""

import signal
import sys
from typing import Any

from benchmarks.gpu_stages.runner import FAILURES, UNFINISHED
from benchmarks.gpu_stages.serving import first_line
from benchmarks.gpu_stages.stage import Row, Task, parser, result_of, task
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.figure import draw
from benchmarks.kernel_bench.timings import Findings, begin, measure

TERMINATED = 143
FIRST = "kernels"  # the stage that begins


def cases_of(result: dict[str, Any]) -> list[str]:
    """The names of the cases that a stage has come to."""
    return list(result.get("numbers", {}).get("cases", []))


def cases_before(stage: Task) -> list[str]:
    """The names of the cases that the first stage has come to with the code that runs now.

    Where nobody knows the code, no earlier call's result is there: gpu.py goes on from none.
    """
    first = result_of(stage.folder.parent / FIRST)
    return cases_of(first) if first.get("commit") == stage.commit else []


def illustrate(stage: Task, findings: Findings) -> None:
    """Draw what is saved by now; a figure that cannot be drawn is told in the log, and costs nothing else."""
    try:
        draw(stage.folder / "kernels.svg", findings.timings, findings.rates, str(stage.device))
    except Exception as error:  # of matplotlib, whatever it is
        print(f"kernels.svg: not drawn: {first_line(error)}", file=sys.stderr)


def run(stage: Task) -> int:
    """FAILURES where one of our kernels could not be measured: the rest is still worth having."""
    until_s = stage.until_s
    findings = begin(stage.device)
    try:
        measure(stage, cases(stage.device), until_s, findings)
    finally:  # where the budget ends it, too
        if findings.cases:
            stage.save(findings.headline, findings.numbers, findings.rows)
        illustrate(stage, findings)
    return FAILURES if findings.failures else 0


def run_rest(stage: Task) -> int:
    """UNFINISHED where cases are left."""
    until_s, own = stage.until_s, result_of(stage.folder)
    every, known = cases(stage.device), {*cases_before(stage), *cases_of(own)}
    cases_left = [case for case in every if str(case) not in known]
    if not cases_left and not own:
        stage.save(f"all {len(every)} cases were measured before", {"cases": []})
        return 0
    findings = begin(stage.device)
    resume(findings, own)
    stage.save(findings.headline, findings.numbers, findings.rows)
    try:
        measure(stage, cases_left, until_s, findings)
    finally:
        left = len([case for case in cases_left if str(case) not in findings.cases])
        progress = f"{left} of {len(every)} cases are left" if left else f"none of {len(every)} cases is left"
        stage.save(f"{findings.headline}; {progress}", findings.numbers, findings.rows)
        illustrate(stage, findings)
    if left:
        return UNFINISHED
    return FAILURES if findings.numbers["failures"] else 0


def resume(findings: Findings, own: dict[str, Any]) -> None:
    """Take over what an earlier call has saved."""
    findings.before = own.get("numbers", {})
    findings.cases = cases_of(own)
    findings.rows = [*(Row(**values) for values in own.get("rows", [])), *findings.rows]


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for the kernels (%(default)s)")
    own.add_argument("--rest", action="store_true", help="the cases that another stage did not come to")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    chosen = task(own)
    raise SystemExit(run_rest(chosen) if chosen.options.rest else run(chosen))
