"""A plugin of pytest: the tests that passed, one id a line in the file that KVPLAN_PASSED names, as they pass.

The stage's result beside that file has them at once too: whoever is cut off keeps them.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stages.evidence import write_json


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("KVPLAN_PASSED")
    if file and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a", encoding="utf-8") as passed:
            passed.write(f"{report.nodeid}\n")
        keep(Path(file).with_name("result.json"), report.nodeid)


def keep(result: Path, test: str) -> None:
    """Add a test to the numbers of a stage's result."""
    try:
        values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = {}
    numbers = values.get("numbers", {})
    passed = sorted({*numbers.get("passed", ()), test})
    headline = f"{len(passed)} passed so far"
    write_json(result, {"rows": [], **values, "headline": headline, "numbers": {**numbers, "passed": passed}})
