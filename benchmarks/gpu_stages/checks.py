"""All tests marked gpu; on a CPU, where none of them can run, they are only collected.

Most of their time goes to compiling kernels on the host, so several processes share them where pytest-xdist is there.
Tests that measure the device's memory run after those, alone. Where the time ends first, the next call goes on: what
has passed is not run again.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_stages.runner import FAILURES, UNFINISHED
from benchmarks.gpu_stages.stage import Task, parser, result_of, task

# Those with tests marked gpu, kernels first.
TESTS = (
    "tests/engine/test_on_gpu.py",
    "tests/engine/test_quantized.py",
    "tests/engine/test_layers.py",
    "tests/engine/test_overlap.py",
)
# Tests of the device's memory: what another process holds there would count as theirs.
ALONE = (
    "tests/engine/test_on_gpu.py::test_the_reports_rows_are_what_the_allocator_holds",
    "tests/engine/test_on_gpu.py::test_no_step_holds_more_than_the_profile_run_saw",
    "tests/engine/test_on_gpu.py::test_the_workspaces_of_libraries_are_in_the_report",
    "tests/engine/test_on_gpu.py::test_what_the_pool_leaves_is_what_the_device_has_free",
    "tests/engine/test_on_gpu.py::test_capturing_graphs_is_in_the_report",
)
# Without a cache folder, whatever plugins are there; another version's deprecation is no failure here.
PYTEST = ("-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-W", "default", "--tb=short", "-p",
    "benchmarks.gpu_stages.passed")  # fmt: skip
NUM_PROCESSES = 6
SHARED_SHARE = 0.7  # of the time, at most, for those that share the device: a hang among them is not to cost the others
REPORTING_S = 10.0  # after the interruption, until the report is written
CUT = (2, -signal.SIGKILL)  # exit codes of what was interrupted, and of what did not hear it
NO_TESTS = 5  # pytest's exit code where all have passed before
COUNTED = ("tests", "failures", "errors", "skipped")


def shared(passed: Collection[str] = ()) -> list[str]:
    """pytest's arguments for the tests that may share the device, without those that have passed."""
    left_out = [word for name in (*ALONE, *passed) for word in ("--deselect", name)]
    processes = ["-n", str(NUM_PROCESSES)] if find_spec("xdist") is not None else []
    return [*PYTEST, *TESTS, *left_out, *processes]


def alone(passed: Collection[str] = ()) -> list[str]:
    """pytest's arguments for the others; none if all have passed."""
    left = [name for name in ALONE if name not in passed]
    return [*PYTEST, *left] if left else []


def outcome(*junits: Path) -> dict[str, Any]:
    """How many tests there were, how many of them did not pass, and which; of the files that there are."""
    roots = [ElementTree.parse(junit).getroot() for junit in junits if junit.exists()]
    counts: dict[str, Any] = {
        name: sum(int(suite.get(name, "0")) for root in roots for suite in root.iter("testsuite")) for name in COUNTED
    }
    cases = [case for root in roots for case in root.iter("testcase")]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {**counts, "not_passed": [case.get("name") for case in bad]}


def run_tests(arguments: Sequence[str], junit: Path, limit_s: float, passed: Path | None = None) -> int:
    """pytest's exit code; at the limit it is interrupted, and still writes what it found, or ended where it hangs.

    passed  gets the tests that pass, as they do
    """
    env = {**os.environ, **({} if passed is None else {"KVPLAN_PASSED": str(passed)})}
    tests = subprocess.Popen([sys.executable, *arguments, f"--junitxml={junit}", "--durations=10"], env=env)
    try:
        return tests.wait(limit_s)
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)
    try:
        return tests.wait(REPORTING_S)
    except subprocess.TimeoutExpired:  # waiting for a device that does not answer, it hears nothing
        tests.kill()
        return tests.wait()


def code_of(codes: Sequence[int]) -> int:
    """FAILURES where all tests ran and not all passed, UNFINISHED where time ended, else pytest's own trouble."""
    hindered = next((code for code in codes if code not in (0, 1, *CUT, NO_TESTS)), None)
    if hindered is not None:
        return hindered
    return UNFINISHED if set(codes) & {*CUT} else FAILURES if 1 in codes else 0


def run(stage: Task) -> int:
    """0, FAILURES, UNFINISHED, or pytest's exit code where not all tests ran."""
    if stage.is_small:
        collected = subprocess.run([sys.executable, *PYTEST, *TESTS, "--collect-only", "-q"], check=False)
        stage.save("collected only: they run on a GPU", {})
        return collected.returncode
    junits, file = (stage.folder / "junit.xml", stage.folder / "junit-alone.xml"), stage.folder / "passed.txt"
    passed = {*result_of(stage.folder).get("numbers", {}).get("passed", ())}
    until_s = stage.until_s
    codes = []
    for arguments, junit, share in ((shared(passed), junits[0], SHARED_SHARE), (alone(passed), junits[1], 1.0)):
        if not arguments:
            continue
        codes.append(run_tests(arguments, junit, max(1.0, share * (until_s - time.monotonic())), file))
        passed |= {*(file.read_text(encoding="utf-8").splitlines() if file.exists() else ())}
        numbers = outcome(*junits)
        bad = numbers["failures"] + numbers["errors"]
        summary = f"{len(passed)} passed, {bad} failed"
        is_whole = code_of(codes) in (0, FAILURES)
        stage.save(summary if is_whole else f"{summary}, not all ran", {**numbers, "passed": sorted(passed)})
    return code_of(codes)


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for the tests (%(default)s)")
    sys.exit(run(task(own, computes=False)))
