"""Readings of a GPU, a process and servers for `kvplan watch`, as values and as CSV rows.

A server's own numbers come from its /metrics page (server_metrics.py), which is read in a separate thread: a page that
fails or is late is reported in the reading, and does not delay the others.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import open_regular, printable
from kvplan.core.table import csv_text
from kvplan.hardware.nvml import Device, DeviceSample, HostMemory, host_memory
from kvplan.measure.server_metrics import MetricsError, ServerStats

# --- a process -------------------------------------------------------------------------------------------------------


class ProcessEnded(Exception):
    """The watched process has exited."""


class WatchedProcess:
    """A process whose resident memory is read. Raises UsageError if no process has the pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._library = _psutil()
        try:
            self._process = self._library.Process(pid)
        except self._library.NoSuchProcess as error:
            raise UsageError(f"--pid {pid}", "there is no such process", "`ps` lists them") from error

    def resident(self) -> int:
        """Bytes of resident memory. Raise ProcessEnded if the process has exited, even if its pid has been reused."""
        try:
            if not self._process.is_running():
                raise ProcessEnded
            return int(self._process.memory_info().rss)
        except self._library.NoSuchProcess as error:
            raise ProcessEnded from error
        except self._library.AccessDenied as error:
            raise EnvironmentProblem(
                f"--pid {self.pid}", "no permission to read its memory", "run as its user or as root"
            ) from error


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise EnvironmentProblem("psutil", "not installed, but --pid needs it", "run `pip install psutil`") from error
    return psutil


# --- a server -------------------------------------------------------------------------------------------------------

NO_ANSWER_YET = "no answer yet"


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens and preemptions per second between two pages, or None if unknown."""

    prompt: float | None = None
    output: float | None = None
    preemptions: float | None = None


def rates_between(before: ServerStats, now: ServerStats, seconds: float) -> Rates:
    """Rates between two pages this many seconds apart; None after a restart, which resets the counters."""
    counters = (
        (before.prompt_tokens, now.prompt_tokens),
        (before.generation_tokens, now.generation_tokens),
        (before.preemptions, now.preemptions),
    )
    grown = [None if old is None or new is None else new - old for old, new in counters]
    is_another = (before.kind, before.started_s) != (now.kind, now.started_s)
    if is_another or seconds <= 0 or any(count is not None and count < 0 for count in grown):
        return Rates()
    return Rates(*(None if count is None else count / seconds for count in grown))


@dataclass(frozen=True, slots=True)
class ServerReading:
    """State of a server at one moment.

    stats    the figures of its last page
    age_s    age of that page
    rates    between that page and the one before
    problem  why this reading has no new page, or None if it has one
    """

    stats: ServerStats | None = None
    age_s: float | None = None
    rates: Rates = Rates()
    problem: str | None = None


class WatchedPage:
    """A server's page, read in a separate thread: a reading waits for it at most `patience_s`."""

    def __init__(self, read: Callable[[], ServerStats], patience_s: float) -> None:
        """read: returns the page's figures or raises MetricsError; it may block."""
        self._read = read
        self._patience_s = patience_s
        self._request: _Request | None = None
        self._stats: ServerStats | None = None
        self._came_s = 0.0
        self._rates = Rates()
        self._problem: str | None = None  # of the last finished request
        self._has_news = False
        self.failures = 0  # consecutive requests that failed

    @property
    def has_answered(self) -> bool:
        """True if any request returned a page."""
        return self._stats is not None

    @property
    def problem(self) -> str | None:
        """Why the last finished request failed, or None."""
        return self._problem

    def ask(self) -> None:
        """Start reading the page again, unless the last request is still running."""
        self._has_news = False
        self._take()
        if self._request is None:
            self._request = _Request(self._read)
            self._request.start()

    def reading(self) -> ServerReading:
        """Current state; includes the requested page if it arrives in time."""
        if self._request is not None:
            self._request.join(self._patience_s)
            self._take()
        age = None if self._stats is None else max(0.0, time.monotonic() - self._came_s)
        problem = None if self._has_news else self._problem or NO_ANSWER_YET
        return ServerReading(self._stats, age, self._rates, problem)

    def _take(self) -> None:
        """Store the result of a finished request."""
        request = self._request
        if request is None or request.is_alive():
            return
        self._request = None
        try:
            stats = request.stats()
        except MetricsError as error:
            self.failures += 1
            self._problem = f"no figures ({error})" if error.answered else f"unreachable ({error})"
            return
        self.failures = 0
        before, seconds = self._stats, request.ended_s - self._came_s
        self._rates = Rates() if before is None else rates_between(before, stats, seconds)
        self._stats, self._came_s, self._problem, self._has_news = stats, request.ended_s, None, True


class _Request(threading.Thread):
    """One reading of a page in a daemon thread, which never delays exit."""

    def __init__(self, read: Callable[[], ServerStats]) -> None:
        super().__init__(daemon=True, name="kvplan-page")
        self._read = read
        self._found: ServerStats | Exception | None = None
        self.ended_s = 0.0

    def run(self) -> None:
        try:
            self._found = self._read()
        except Exception as error:  # re-raised by `stats`
            self._found = error
        self.ended_s = time.monotonic()

    def stats(self) -> ServerStats:
        """Result of the finished thread; re-raises its exception."""
        if isinstance(self._found, Exception):
            raise self._found
        assert self._found is not None
        return self._found


# --- readings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything watched, at one moment; sizes are bytes. None: not watched, or unknown.

    utc        ISO 8601 with milliseconds
    elapsed_s  since the first reading
    resident   resident memory of the watched process
    servers    one for each page watched, in their order
    """

    utc: str
    elapsed_s: float
    sample: DeviceSample | None
    resident: int | None
    host: HostMemory | None
    servers: tuple[ServerReading, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched; None: not watched. `names`: server names, in the order of `pages`."""

    device: Device | None = None
    pid: int | None = None
    process: WatchedProcess | None = None
    pages: tuple[WatchedPage, ...] = ()
    names: tuple[str, ...] = ()

    def read(self, elapsed_s: float) -> Reading:
        """Take a reading. Raise ProcessEnded or DeviceError; a page that fails is reported in the reading."""
        for page in self.pages:
            page.ask()  # read concurrently with the rest
        return Reading(
            utc=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            elapsed_s=elapsed_s,
            sample=None if self.device is None else self.device.sample(self.pid),
            resident=None if self.process is None else self.process.resident(),
            host=host_memory(),
            servers=tuple(page.reading() for page in self.pages),
        )


# --- CSV ------------------------------------------------------------------------------------------------------------

_MEMORY = ("total", "reserved", "used", "free", "is_host")
_DEVICE = tuple(name for name in DeviceSample.__slots__ if name != "memory")
_TOKENS = ("prompt_tokens", "generation_tokens")
_NOT_LOGGED = ("max_concurrency", "started_s", "left_out")
_SERVER = tuple(field.name for field in fields(ServerStats) if field.name not in (*_TOKENS, *_NOT_LOGGED))
COLUMNS = (
    "utc",
    "elapsed_s",
    "gpu_index",
    "gpu_uuid",
    "pid",
    *(f"gpu_{name}" for name in _MEMORY),
    *_DEVICE,
    "resident",
    "host_total",
    "host_available",
    *(f"server_{name}" for name in _SERVER),
    "server_problem",
    *(f"server_{name}" for name in _TOKENS),
    "server_prompt_tokens_per_s",
    "server_output_tokens_per_s",
    "server_age_s",
)


def columns(num_servers: int) -> tuple[str, ...]:
    """Header of a log; with several servers, each row also names its server."""
    return COLUMNS if num_servers < 2 else (*COLUMNS, "server")


def csv_rows(watched: Watched, reading: Reading) -> list[list[Any]]:
    """Return a row per server, or one row if there is no server."""
    if len(watched.pages) < 2:
        return [_csv_row(watched, reading, next(iter(reading.servers), None))]
    named = zip(reading.servers, watched.names, strict=True)
    return [[*_csv_row(watched, reading, server), name] for server, name in named]


def _csv_row(watched: Watched, reading: Reading, now: ServerReading | None) -> list[Any]:
    """Cells of COLUMNS: empty if unknown, booleans as true and false. Each page appears in one row only."""
    device, sample, host = watched.device, reading.sample, reading.host
    known = now or ServerReading()
    server = known if known.problem is None else ServerReading(problem=known.problem)
    cells = [
        reading.utc,
        f"{reading.elapsed_s:.3f}",
        *_values(device, ("index", "uuid")),
        watched.pid,
        *_values(None if sample is None else sample.memory, _MEMORY),
        *_values(sample, _DEVICE),
        reading.resident,
        *_values(host, ("total", "available")),
        *_values(server.stats, _SERVER),
        server.problem,
        *_values(server.stats, _TOKENS),
        *(
            None if figure is None else f"{figure:.3f}"
            for figure in (server.rates.prompt, server.rates.output, server.age_s)
        ),
    ]
    return [str(cell).lower() if isinstance(cell, bool) else "" if cell is None else cell for cell in cells]


def _values(record: object, names: Iterable[str]) -> list[Any]:
    return [None if record is None else getattr(record, name) for name in names]


class CsvLog:
    """A CSV file that grows by a row per reading; each row is written when `add` returns.

    An existing file is continued if its header is the same. Raises UsageError at once if the path cannot be written.
    """

    def __init__(self, path: str, header: Sequence[str] = COLUMNS) -> None:
        self._header = _line(header)
        self._where = f"--csv {printable(path, 400)}"
        self._new = None if Path(path).exists() else Path(path)  # until the first row: removed if none was added
        target = Path(path)
        try:
            if target.exists() and not target.is_file():
                raise UsageError(self._where, "is not a regular file", "name another path")
            missing = self._missing(target) if target.exists() else self._header
            self._file = target.open("ab", buffering=0)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(self._where, f"cannot be written ({reason})", "name another path") from error
        self._write(missing)

    def __enter__(self) -> "CsvLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._new is not None:
            with suppress(OSError):
                self._new.unlink(missing_ok=True)

    def add(self, cells: Sequence[Any]) -> None:
        """Append a row. Raise EnvironmentProblem if it cannot be written."""
        self._write(_line(cells))
        self._new = None

    def _missing(self, target: Path) -> bytes:
        """Bytes to write before the first row: the header of an empty file, the newline of a torn last line."""
        header = self._header
        with open_regular(target) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return header
            if file.read(len(header)) != header:
                raise UsageError(self._where, "has other columns", "name a new file")
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._full(error.strerror) from error
        if written != len(line):  # partial write
            raise self._full("no space left")

    def _full(self, reason: str | None) -> EnvironmentProblem:
        return EnvironmentProblem(self._where, f"cannot be written ({reason})", "check the disk")


def _line(cells: Sequence[Any]) -> bytes:
    return csv_text([cells]).encode("utf-8", "backslashreplace")
