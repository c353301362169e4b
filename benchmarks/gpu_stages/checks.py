"""All tests marked gpu; on a CPU, where none of them can run, they are only collected."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_stages.stage import Task, parser, task

TESTS = ("tests/test_overlap.py", "tests/test_on_gpu.py", "tests/test_quantized.py")  # those with tests marked gpu
# Without a cache folder, whatever plugins are there; another version's deprecation is no failure here.
PYTEST = ("-m", "pytest", *TESTS, "-m", "gpu", "-v", "-p", "no:cacheprovider", "-W", "default", "--tb=short")
COUNTED = ("tests", "failures", "errors", "skipped")


def outcome(junit: Path) -> dict[str, Any]:
    """How many tests there were, how many of them did not pass, and which."""
    root = ElementTree.parse(junit).getroot()
    found: dict[str, Any] = {
        name: sum(int(suite.get(name, "0")) for suite in root.iter("testsuite")) for name in COUNTED
    }
    bad = [case for case in root.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    return {**found, "not_passed": [case.get("name") for case in bad]}


def run_tests(junit: Path, limit_s: float) -> int:
    """pytest's exit code; at the limit it is interrupted, and still writes what it found."""
    tests = subprocess.Popen([sys.executable, *PYTEST, f"--junitxml={junit}", "--durations=10"])
    try:
        return tests.wait(limit_s)
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)
        return tests.wait()


def run(stage: Task) -> int:
    """pytest's exit code."""
    if stage.is_small:
        found = subprocess.run([sys.executable, *PYTEST, "--collect-only", "-q"], check=False)
        stage.save("collected only: they run on a GPU", {})
        return found.returncode
    junit = stage.folder / "junit.xml"
    code = run_tests(junit, stage.until_s - time.monotonic())
    numbers = outcome(junit)
    bad = numbers["failures"] + numbers["errors"]
    stage.save(f"{numbers['tests'] - bad - numbers['skipped']} passed, {bad} failed", numbers)
    return code


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--limit", type=float, default=165, metavar="SECONDS", help="for the tests (%(default)s)")
    sys.exit(run(task(own, computes=False)))
