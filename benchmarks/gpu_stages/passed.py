"""A plugin of pytest: the tests that passed, one id a line in the file that KVPLAN_PASSED names, as they pass."""

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("KVPLAN_PASSED")
    if file and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a", encoding="utf-8") as passed:
            passed.write(f"{report.nodeid}\n")
