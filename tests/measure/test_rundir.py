"""A run directory is untrusted input: what would hang, fill the memory or break a reader is refused in one line."""

import os
from pathlib import Path

import pytest

from kvplan.measure.rundir import MAX_LINE_BYTES, MAX_LINES_BYTES
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.recorded_runs import cpu_run

NAMES = ("samples.jsonl", "events.jsonl")
COMMANDS = (("report", "-o", "report.json"), ("reconcile",))


def append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", ["run.json", *NAMES])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    kind: str, name: str, command: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = cpu_run(tmp_path / "run") / name
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    answer = run(*command, "run")
    assert (answer.code, answer.out) == (2, "")
    wrong = " is a directory, not a file" if kind == "directory" else ": not a regular file"
    assert answer.err.startswith(f"kvplan: error: run/{name}{wrong}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "is not a JSON object"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}\n", "is not a JSON object"),
        (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}\n', "is not a JSON object"),
        (b"\0" * MAX_LINE_BYTES, "is not a JSON object"),
    ],
    ids=["deep", "deeper than any run", "long", "a hole"],
)
def test_a_line_that_no_run_writes_is_damage(line: bytes, wrong: str, name: str, run: Run, tmp_path: Path) -> None:
    folder = cpu_run(tmp_path / "run")
    append(folder / name, line)
    answer = run("reconcile", str(folder))
    assert answer.code == 2
    assert wrong in answer.err
    assert f"{folder / name}: line " in answer.err


@pytest.mark.parametrize("name", NAMES)
def test_a_file_too_large_for_a_run_is_not_read(name: str, run: Run, tmp_path: Path) -> None:
    folder = cpu_run(tmp_path / "run")
    os.truncate(folder / name, MAX_LINES_BYTES + 1)  # a hole: it takes no disk
    answer = run("reconcile", str(folder))
    assert answer.code == 2
    assert f"too large ({MAX_LINES_BYTES + 1:,} bytes" in answer.err


def test_a_profile_into_a_directory_whose_manifest_is_a_fifo_is_refused(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    answer = run("profile", "-o", str(tmp_path))
    assert answer.code == 2
    assert "exists, and runs are never overwritten" in answer.err
