"""The directory a profile leaves behind: written so that a kill at any moment leaves a readable run.

    run.json       the manifest (kvplan/run@1), replaced atomically: status, inputs, environment, results
    samples.jsonl  one line per sample, appended and flushed; every second it is made to reach the disk
    events.jsonl   one line per event (stage begun, warning, failure), likewise

Times are seconds of a monotonic clock since the run began.
"""

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from kvplan.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.files import load_json, os_problem, shown

RUN = "kvplan/run@1"
Status = Literal["running", "complete", "partial", "failed"]
MANIFEST, SAMPLES, EVENTS = "run.json", "samples.jsonl", "events.jsonl"
MAX_LINES = 10_000_000
SYNC_S = 1.0  # what a power cut may cost


class RunWriter:
    """Creates a run directory and writes into it; one that exists is never touched."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raises UsageError when the directory exists (and by whom it is in use), EnvironmentProblem for the disk."""
        self.path = path
        _refuse_existing(path)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise os_problem(path, error) from error
        self.manifest: dict[str, Any] = {
            "schema": RUN,
            "status": "running",
            "cause": None,
            "pid": os.getpid(),
            "host": platform.node(),
            "pid_started": _started(os.getpid()),
            "started_utc": utc_now(),
            "finished_utc": None,
            **manifest,
        }
        self._write_manifest()
        self._samples, self._events = (self._open(name) for name in (SAMPLES, EVENTS))
        self._synced_at = time.monotonic()

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest and replace it."""
        self.manifest |= entries
        self._write_manifest()

    def sample(self, values: Mapping[str, Any]) -> None:
        self._append(self._samples, values)

    def event(self, at_s: float, kind: str, **values: Any) -> None:
        self._append(self._events, {"t": round(at_s, 6), "event": kind, **values})

    def finish(self, status: Status, cause: str | None = None) -> None:
        self.update(status=status, cause=cause, finished_utc=utc_now())
        self._samples.close()
        self._events.close()

    def _open(self, name: str) -> TextIO:
        try:
            return (self.path / name).open("a", encoding="utf-8")
        except OSError as error:
            raise os_problem(self.path / name, error) from error

    def _append(self, file: TextIO, values: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(values, allow_nan=False) + "\n")
            file.flush()
            if time.monotonic() - self._synced_at >= SYNC_S:
                self._synced_at = time.monotonic()
                for each in (self._samples, self._events):
                    os.fsync(each.fileno())
        except OSError as error:
            raise EnvironmentProblem(
                f"{shown(Path(file.name))}: cannot be written ({error.strerror}); what was measured so far is kept"
            ) from error

    def _write_manifest(self) -> None:
        target, part = self.path / MANIFEST, self.path / f".{MANIFEST}.part"
        try:
            with part.open("w", encoding="utf-8") as file:
                json.dump(self.manifest, file, indent=2, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            raise EnvironmentProblem(
                f"{shown(target)}: cannot be written ({error.strerror}); what was measured so far is kept"
            ) from error


def refuse_run_files(path: str, flag: str) -> None:
    """Refuse to write over what a run consists of."""
    target = Path(path)
    if target.name in (MANIFEST, SAMPLES, EVENTS) and (target.parent / MANIFEST).exists():
        raise UsageError(f"{flag} {shown(target)}: is part of a run; name another file")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refuse_existing(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    owner = _running_pid(path)
    if owner is not None:
        raise UsageError(f"{shown(path)}: is in use by the profile with pid {owner}; choose another directory")
    raise UsageError(f"{shown(path)}: exists, and runs are never overwritten; choose another directory")


def _running_pid(path: Path) -> int | None:
    """The process that still writes this run, if it does: one of that number on this machine, started when it was."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        pid = manifest["pid"] if manifest["status"] == "running" else None
        is_here = manifest.get("host") in (None, platform.node())
        started = manifest.get("pid_started")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(pid, int) or not is_here or not _is_alive(pid):
        return None
    return pid if started is None or started == _started(pid) else None


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None where /proc does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before may hold anything
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it lies on disk.

    recovered  the manifest says it is running, and the process is gone: status is then "partial"
    notes      what was odd in the files, for the user
    """

    path: Path
    manifest: dict[str, Any]
    status: Status
    cause: str | None
    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]
    recovered: bool = False
    notes: tuple[str, ...] = field(default=())


def load_run(path: Path) -> Run:
    """Read a run directory, also one whose writer was killed or still runs."""
    if not path.is_dir():
        raise InvalidInputError(f"{shown(path)}: is no run directory; name one that `kvplan profile -o` wrote")
    manifest = load_json(path / MANIFEST)
    if manifest.get("schema") != RUN:
        raise InvalidInputError(f"{shown(path / MANIFEST)}: schema is {manifest.get('schema')!r:.40}, not {RUN}")
    notes: list[str] = []
    samples, events = (_read_lines(path / name, notes) for name in (SAMPLES, EVENTS))
    status, cause = manifest.get("status"), manifest.get("cause")
    if status not in ("running", "complete", "partial", "failed"):
        raise InvalidInputError(f"{shown(path / MANIFEST)}: status is {status!r:.40}; the file is damaged")
    recovered = status == "running" and _running_pid(path) is None
    if recovered:
        status, cause = "partial", "the process ended without a word (killed, or power was cut)"
        notes.append("recovered: the process that wrote it is gone")
    return Run(path, manifest, cast(Status, status), cause, samples, events, recovered, tuple(notes))


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The complete lines of a file; a last one cut short by a kill is left out, with a note."""
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return []
    lines: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if number > MAX_LINES:
                    raise InvalidInputError(
                        f"{shown(path)}: has more than {MAX_LINES:,} lines; this is no run of kvplan"
                    )
                value = _parsed(line)
                if isinstance(value, dict):
                    lines.append(value)
                elif line.endswith("\n"):
                    raise InvalidInputError(f"{shown(path)}: line {number} is not a JSON object; the file is damaged")
                else:
                    notes.append(f"the last line of {path.name} is cut off; it is left out")
    except OSError as error:
        raise os_problem(path, error) from error
    return lines


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
