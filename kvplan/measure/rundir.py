"""The directory that a profile writes, readable even if the process is killed at any moment.

    run.json       the manifest (kvplan/run@1), replaced atomically: status, inputs, environment, results
    samples.jsonl  one line per sample, appended and flushed; synced to disk every second
    events.jsonl   one line per event (stage begun, warning, failure), likewise

Times are seconds of a monotonic clock since the run began.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO, cast

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UsageError
from kvplan.core.files import MAX_DEPTH, MIB, is_deeper_than, load_json, open_regular, os_problem, path_text
from kvplan.core.records import dataclass, field
from kvplan.measure import run_types
from kvplan.measure.run_types import Engine, Environment, Event, Inputs, Manifest, Memory, Model, Results, Sample

RUN = "kvplan/run@1"
Status = Literal["running", "complete", "partial", "failed"]
MANIFEST, SAMPLES, EVENTS = "run.json", "samples.jsonl", "events.jsonl"
MAX_LINES = 10_000_000
MAX_LINES_BYTES = 512 * MIB  # of samples or events; an hour of a hundred samples a second has 220 MiB
MAX_LINE_BYTES = MIB
BASELINES = ("baseline", "second_baseline")  # stages of the other allocators, and their results' names
SYNC_S = 1.0  # seconds of data that a power cut may lose
ENGINE_FIGURES = (*run_types.EngineFigures.__annotations__,)  # in a sample, by their names in engine.stats.Stats


class RunWriter:
    """Creates a run directory and writes to it; never touches an existing one."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raise UsageError if the directory exists (naming the process that uses it) or cannot be written."""
        self.path = path
        folders = _new_directories(path)
        self.manifest: Manifest = {
            "schema": "kvplan/run@1",
            "status": "running",
            "cause": None,
            "pid": os.getpid(),
            "host": platform.node(),
            "pid_started": _started(os.getpid()),
            "started_utc": utc_now(),
            "finished_utc": None,
            **cast(Manifest, manifest),
        }
        self._samples, self._events = self._begin(folders)
        self._synced_at = time.monotonic()

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest and rewrite it."""
        self.manifest |= cast(Manifest, entries)
        self._write_manifest()

    def sample(self, values: Mapping[str, Any]) -> None:
        self._append(self._samples, values)

    def event(self, at_s: float, kind: str, **values: Any) -> None:
        self._append(self._events, {"t": round(at_s, 6), "event": kind, **values})

    def finish(self, status: Status, cause: str | None = None) -> None:
        self.update(status=status, cause=cause, finished_utc=utc_now())
        for file in (self._samples, self._events):
            with suppress(OSError):  # a line that failed to write; reported at that time
                file.close()

    def _begin(self, folders: list[Path]) -> tuple[TextIO, TextIO]:
        """Write the first manifest and open the other files; on failure, leave nothing behind."""
        files: list[TextIO] = []
        try:
            self._replace_manifest()
            for name in (SAMPLES, EVENTS):
                files.append((self.path / name).open("a", encoding="utf-8"))
        except OSError as error:
            for file in files:
                file.close()
            for name in (MANIFEST, SAMPLES, EVENTS):
                (self.path / name).unlink(missing_ok=True)
            _remove(folders)
            raise _unwritable(self.path, error) from error
        return files[0], files[1]

    def _append(self, file: TextIO, values: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(values, allow_nan=False) + "\n")
            file.flush()
            if time.monotonic() - self._synced_at >= SYNC_S:
                self._synced_at = time.monotonic()
                for each in (self._samples, self._events):
                    os.fsync(each.fileno())
        except OSError as error:
            raise _lost(Path(file.name), error) from error

    def _write_manifest(self) -> None:
        try:
            self._replace_manifest()
        except OSError as error:
            raise _lost(self.path / MANIFEST, error) from error

    def _replace_manifest(self) -> None:
        part = self.path / f".{MANIFEST}.part"
        try:
            with part.open("w", encoding="utf-8") as file:
                json.dump(self.manifest, file, indent=2, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path / MANIFEST)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _lost(path: Path, error: OSError) -> EnvironmentProblem:
    """Error for a file of a run that was begun."""
    return EnvironmentProblem(
        path_text(path), f"cannot be written ({error.strerror})", "what was measured so far is kept"
    )


def refuse_run_files(path: str, flag: str) -> None:
    """Refuse to overwrite a run's files."""
    target = Path(path)
    if target.name in (MANIFEST, SAMPLES, EVENTS) and os.path.exists(target.parent / MANIFEST):  # noqa: PTH110 -- no error
        raise UsageError(f"{flag} {path_text(target)}", "is part of a run", "name another file")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _new_directories(path: Path) -> list[Path]:
    """Create the directory and its missing parents; return the new ones, innermost first."""
    folders: list[Path] = []
    try:
        if path.exists() or path.is_symlink():
            _refuse_existing(path)
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=folder != path)  # another run may have created the parents
            folders.insert(0, folder)
    except (OSError, ValueError) as error:
        _remove(folders)
        if isinstance(error, FileExistsError):  # since the check above
            _refuse_existing(path)
        raise _unwritable(path, error) from error
    return folders


def _remove(directories: Sequence[Path]) -> None:
    """Remove directories that are still empty."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def _unwritable(path: Path, error: OSError | ValueError) -> UsageError:
    """Error for a location where no run can be created; the remedy is always another directory."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UsageError(path_text(path), f"cannot be written ({reason})", "choose another directory")


def _refuse_existing(path: Path) -> NoReturn:
    owner = _running_pid(path)
    if owner is not None:
        raise UsageError(path_text(path), f"is in use by the profile with pid {owner}", "choose another directory")
    raise UsageError(path_text(path), "exists, and runs are never overwritten", "choose another directory")


def _running_pid(path: Path) -> int | None:
    """Process id that still writes this run, or None: it must exist on this machine with the recorded start time."""
    try:
        manifest = load_json(path / MANIFEST)
        pid = manifest["pid"] if manifest["status"] == "running" else None
        is_here = manifest.get("host") in (None, platform.node())
        started = manifest.get("pid_started")
    except (KvplanError, KeyError):
        return None
    if not isinstance(pid, int) or not is_here or not _is_alive(pid):
        return None
    return pid if started is None or started == _started(pid) else None


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if /proc does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may contain anything
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
    """A run as stored on disk.

    manifest   as written; if it ends before `results`, they are derived from the samples (see served_by_samples)
    recovered  the manifest says running but the process is gone: status is then "partial"
    notes      irregularities in the files, for the user
    """

    path: Path
    manifest: Manifest
    status: Status
    cause: str | None
    samples: list[Sample]
    events: list[Event]
    recovered: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def inputs(self) -> Inputs:
        """Inputs of the engine; empty if the run did not get that far, as for the properties below."""
        return self.manifest.get("inputs") or {}

    @property
    def memory(self) -> Memory:
        return self.manifest.get("memory") or {}

    @property
    def model(self) -> Model:
        return self.manifest.get("model") or {}

    @property
    def engine(self) -> Engine:
        return self.manifest.get("engine") or {}

    @property
    def environment(self) -> Environment:
        return self.manifest.get("environment") or {}

    @property
    def results(self) -> Results:
        return self.manifest.get("results") or {}

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Largest figures in bytes, by stage."""
        return self.manifest.get("peaks") or {}


def load_run(path: Path) -> Run:
    """Read a run directory, even if its writer was killed or is still running."""
    if not os.path.isdir(path):  # noqa: PTH112 -- False also for a name that is too long
        raise InvalidInputError(path_text(path), "is not a run directory", "name one that `kvplan profile -o` wrote")
    manifest = load_json(path / MANIFEST)
    if manifest.get("schema") != RUN:
        raise InvalidInputError(path_text(path / MANIFEST), f"schema is {manifest.get('schema')!r:.40}, not {RUN}")
    notes: list[str] = []
    samples, events = (_read_lines(path / name, notes) for name in (SAMPLES, EVENTS))
    status, cause = manifest.get("status"), manifest.get("cause")
    if status not in ("running", "complete", "partial", "failed"):
        raise InvalidInputError(path_text(path / MANIFEST), f"status is {status!r:.40}", "the file is damaged")
    recovered = status == "running" and _running_pid(path) is None
    if recovered:
        status, cause = "partial", "the process ended without a message (killed, disk full, or power lost)"
        notes.append("recovered: the process that wrote it is gone")
    if status != "complete":
        results = _results(manifest.get("results"), samples, events)
        if results != manifest.get("results"):
            manifest["results"] = results
            notes.append("what it served is put together from its samples")
    return Run(
        path, cast(Manifest, manifest), cast(Status, status), cause, cast(list[Sample], samples),
        cast(list[Event], events), recovered, tuple(notes),
    )  # fmt: skip


def _results(results: Any, samples: list[dict[str, Any]], events: list[dict[str, Any]]) -> Any:
    """Complete the manifest's results, of the run's own serving and of a baseline, from the samples."""
    own = [sample for sample in samples if sample.get("stage") not in BASELINES]
    if results is None:
        return served_by_samples(own)
    for name in BASELINES:
        begun = next((event for event in events if event.get("stage") == name and "allocator" in event), None)
        if begun is None or not isinstance(results, dict) or name in results:
            continue
        other = served_by_samples([sample for sample in samples if sample.get("stage") == name])
        if other is not None:
            results = {**results, name: {"allocator": begun["allocator"], **other}}
    return results


def served_by_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What an engine is known to have served by its last sample, or None if no sample has its figures.

    Each is a lower bound: more may have run between two samples and after the last one. Samples do not contain the
    number of finished requests.
    """
    timed = [sample for sample in samples if _is_finite(sample.get("t"))]
    engine = [sample for sample in timed if all(_is_finite(sample.get(name)) for name in _NEEDED)]
    if not engine or not engine[-1]["num_steps"]:
        return None
    # Serving began between its first figures and the sample before them.
    begin = max((sample["t"] for sample in timed if sample["t"] < engine[0]["t"]), default=engine[0]["t"])
    seconds = max(0.0, engine[-1]["t"] - begin)
    is_counted = all(_is_finite(sample.get("num_filled_slots")) for sample in engine)
    densest = max(engine, key=lambda sample: float(sample["num_filled_slots" if is_counted else "num_kv_tokens"]))
    return {
        "is_partial": True,
        "seconds": seconds,
        "most_running": max(sample["num_requests_running"] for sample in engine),
        "densest": _engine_figures(densest),
        "output_tokens_per_s": engine[-1]["generation_tokens"] / seconds if seconds else 0.0,
        "stats": _engine_figures(engine[-1]),
    }


_NEEDED = ("num_steps", "num_requests_running", "num_kv_tokens", "generation_tokens")


def _engine_figures(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in ENGINE_FIGURES if _is_finite(sample.get(name))}


def _is_finite(value: object) -> bool:
    """True if it is a number that a run may have written; integers with hundreds of digits are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2.0**63) <= value <= 2.0**63


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Complete lines of a file; a truncated last line is dropped with a note."""
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return []
    lines: list[dict[str, Any]] = []
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_LINES_BYTES:
            raise InvalidInputError(
                path_text(path), f"too large ({size:,} bytes, at most {MAX_LINES_BYTES:,})", "this is not a kvplan run"
            )
        try:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if number > MAX_LINES:
                    raise InvalidInputError(
                        path_text(path), f"has more than {MAX_LINES:,} lines", "this is not a kvplan run"
                    )
                value = _parsed(line.decode("utf-8", errors="replace"))
                if isinstance(value, dict):
                    lines.append(value)
                elif line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    raise InvalidInputError(
                        path_text(path), f"line {number} is not a JSON object", "the file is damaged"
                    )
                else:
                    notes.append(f"the last line of {path.name} is cut off; it is left out")
        except OSError as error:
            raise os_problem(path, error) from error
    return lines


def _parsed(line: str) -> Any:
    """The line's JSON value, or None if it is invalid or nested deeper than any run writes."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return None if line.count("[") + line.count("{") > MAX_DEPTH and is_deeper_than(value, MAX_DEPTH) else value
