"""Shared by all tests: `--update` rewrites expected output, `golden` compares with it, hypothesis profiles."""

import difflib
import faulthandler
import gc
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.browser import browser as browser  # a fixture

# One test worker per core: more threads of torch would wait for each other. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"

# A shell has what it starts in the background ignore Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run repeats the same examples, so a red run is red for everyone: few in plain runs, many in `make test-full`.
# `--hypothesis-profile new` draws others.
settings.register_profile("plain", max_examples=15, derandomize=True, deadline=None)
settings.register_profile("full", max_examples=120, derandomize=True, deadline=None)
settings.register_profile("new", max_examples=200, deadline=None)
settings.load_profile("plain")

# No test asserts seconds. One that hangs ends its process, which prints where; the slowest takes a few minutes.
HANG_S = 3600
REARM_S = 60  # each arming starts a thread and waits for the last one, so not at every test
STDERR = pytest.StashKey[int]()
armed_s = -math.inf


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # before each test's output is captured


def pytest_collectstart() -> None:
    gc.disable()  # of what is collected nothing goes away


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.enable()
    gc.freeze()  # the modules and tests, which stay: else every engine that is made looks through all of them again


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global armed_s
    if time.monotonic() - armed_s > REARM_S:
        armed_s = time.monotonic()
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=item.config.stash[STDERR])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and the README's console blocks")


@pytest.fixture(scope="session")
def update(request: pytest.FixtureRequest) -> bool:
    """Whether expected output is to be rewritten rather than compared."""
    return bool(request.config.getoption("--update"))


@pytest.fixture
def golden(update: bool) -> Callable[[str, str], None]:
    """`golden(name, text)` fails unless tests/golden/NAME holds exactly `text`; `pytest --update` writes it there."""

    def compare(name: str, text: str) -> None:
        check_golden(GOLDEN / name, text, update=update)

    return compare


def check_golden(path: Path, text: str, *, update: bool) -> None:
    """Fail with a diff unless the file holds exactly `text`; write it instead under `update`."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    if not path.exists():
        pytest.fail(f"{path.name}: no such golden file; `pytest --update` writes it", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), path.name, "now", lineterm="")
        pytest.fail("\n".join(diff) + "\n`pytest --update` rewrites it", pytrace=False)
