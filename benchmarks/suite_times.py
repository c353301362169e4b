"""Where the processor time of the tests goes: the tests that cost most, then the files.

    python benchmarks/suite_times.py [--rows 40] [pytest's arguments; -n 2 unless given]
    make times              of what `make test` runs
    make times FULL=1       of what `make test-full` runs

Processor seconds, user and system, of the test workers and of the processes they wait for: a busy machine changes them
little. A test's share holds its fixtures; `start` is what a worker imports before its first test. What each process
spent is kept in build/suite_times/. pytest loads this file as a plugin (`-p benchmarks.suite_times`).
"""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "suite_times"


def processor_s(with_children: bool) -> float:
    times = os.times()
    own = times.user + times.system
    return own + times.children_user + times.children_system if with_children else own


class Times:
    """Writes what this process spends, test by test, to a file of its own: a run that is cut short leaves its part."""

    def __init__(self, has_workers: bool) -> None:
        self.with_children = not has_workers  # workers count for themselves
        FOLDER.mkdir(parents=True, exist_ok=True)
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.file = (FOLDER / f"{name}.tsv").open("w", encoding="utf-8", buffering=1)
        self.last = 0.0

    def add(self, name: str) -> None:
        now = processor_s(self.with_children)
        self.file.write(f"{now - self.last:.3f}\t{name}\n")
        self.last = now


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMES] = Times(has_workers=bool(getattr(config.option, "numprocesses", None)))


TIMES = pytest.StashKey[Times]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[TIMES].add("between tests")
    try:
        return (yield)
    finally:
        item.config.stash[TIMES].add(item.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[TIMES].add("start")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[TIMES].add("end")


def table(seconds: dict[str, float], counts: Counter[str], rows: int) -> Iterator[str]:
    yield f"{'seconds':>9}  {'tests':>6}"
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:rows]:
        yield f"{seconds[name]:9.1f}  {counts[name]:6}  {name}"
    total = sum(seconds.values())
    yield f"{total:9.1f}  {counts.total():6}  in all: {total / 60:.1f} minutes of one core"


def report(rows: int) -> Iterator[str]:
    """The tests that cost most, then the files."""
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for path in FOLDER.glob("*.tsv"):
        for line in path.read_text(encoding="utf-8").splitlines():
            share, _, name = line.partition("\t")
            tests[name] += float(share)
            files[name.split("::")[0]] += float(share)
    names = [name for name in tests if "::" in name]
    yield from table(tests, Counter(names), rows)
    yield ""
    yield from table(files, Counter(name.split("::")[0] for name in names), rows)


def main() -> int:
    arguments = sys.argv[1:]
    rows = 40
    if arguments[:1] == ["--rows"]:
        rows, arguments = int(arguments[1]), arguments[2:]
    for path in FOLDER.glob("*.tsv"):
        path.unlink()
    distribution = () if "-n" in arguments else ("-n", "2")
    command = [sys.executable, "-m", "pytest", "-q", *distribution, "-p", "benchmarks.suite_times", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("\n".join(report(rows)))
    return code


if __name__ == "__main__":
    sys.exit(main())
