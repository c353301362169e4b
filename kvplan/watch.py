"""What a GPU, a process and a server hold at one moment: readings for `kvplan watch`, as values and as rows of a CSV.

A server's own numbers come from its /metrics page (kvplan/server_metrics.py); a page that cannot be had is part of a
reading, and the others go on.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvplan.errors import EnvironmentProblem, UsageError
from kvplan.files import open_regular, printable
from kvplan.nvml import Device, DeviceSample, HostMemory, host_memory
from kvplan.server_metrics import MetricsError, MetricsPage, ServerStats

# --- a process --------------------------------------------------------------------------------------------------------


class ProcessEnded(Exception):
    """The watched process is no more."""


class WatchedProcess:
    """A process whose resident memory is read; UsageError where there is none of that pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._library = _psutil()
        try:
            self._process = self._library.Process(pid)
        except self._library.NoSuchProcess as error:
            raise UsageError(f"--pid {pid}: there is no such process; `ps` lists them") from error

    def resident(self) -> int:
        """Bytes of resident memory; ProcessEnded when it has ended, even where its pid has been given away again."""
        try:
            if not self._process.is_running():
                raise ProcessEnded
            return int(self._process.memory_info().rss)
        except self._library.NoSuchProcess as error:
            raise ProcessEnded from error
        except self._library.AccessDenied as error:
            raise EnvironmentProblem(
                f"--pid {self.pid}: its memory may not be read; run as its user or as root"
            ) from error


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise EnvironmentProblem("psutil: not installed, --pid needs it; run `pip install psutil`") from error
    return psutil


# --- readings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything watched, at one moment; sizes are bytes. None: not watched, or not known.

    utc             ISO 8601 with milliseconds
    elapsed_s       since the first reading
    resident        resident memory of the watched process
    server_problem  why the server's page could not be read
    """

    utc: str
    elapsed_s: float
    sample: DeviceSample | None
    resident: int | None
    host: HostMemory | None
    server: ServerStats | None
    server_problem: str | None


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched; None: not watched."""

    device: Device | None = None
    pid: int | None = None
    process: WatchedProcess | None = None
    page: MetricsPage | None = None

    def read(self, elapsed_s: float) -> Reading:
        """A reading now. Raises ProcessEnded, DeviceError; a page that fails is part of the reading."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        server, problem = self._server()
        return Reading(
            utc=now,
            elapsed_s=elapsed_s,
            sample=None if self.device is None else self.device.sample(self.pid),
            resident=None if self.process is None else self.process.resident(),
            host=host_memory(),
            server=server,
            server_problem=problem,
        )

    def _server(self) -> tuple[ServerStats | None, str | None]:
        if self.page is None:
            return None, None
        try:
            return self.page.read(), None
        except MetricsError as error:
            return None, str(error)


# --- CSV --------------------------------------------------------------------------------------------------------------

_MEMORY = ("total", "reserved", "used", "free", "is_host")
_DEVICE = tuple(name for name in DeviceSample.__slots__ if name != "memory")
_SERVER = tuple(field.name for field in fields(ServerStats))
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
)


def csv_row(watched: Watched, reading: Reading) -> list[Any]:
    """The cells of COLUMNS; empty where there is no figure, booleans as true and false."""
    device, sample, host = watched.device, reading.sample, reading.host
    cells = [
        reading.utc,
        f"{reading.elapsed_s:.3f}",
        *_values(device, ("index", "uuid")),
        watched.pid,
        *_values(None if sample is None else sample.memory, _MEMORY),
        *_values(sample, _DEVICE),
        reading.resident,
        *_values(host, ("total", "available")),
        *_values(reading.server, _SERVER),
        reading.server_problem,
    ]
    return [str(cell).lower() if isinstance(cell, bool) else "" if cell is None else cell for cell in cells]


def _values(record: object, names: Iterable[str]) -> list[Any]:
    return [None if record is None else getattr(record, name) for name in names]


class CsvLog:
    """A CSV file that grows by a row per reading; each is on its way to the disk when `add` returns.

    An existing file is continued if its header is the same. UsageError for a path that cannot be written, at once.
    """

    def __init__(self, path: str) -> None:
        self._where = f"--csv {printable(path, 400)}"
        target = Path(path)
        try:
            if target.exists() and not target.is_file():
                raise UsageError(f"{self._where}: is not a regular file; name another path")
            missing = self._missing(target) if target.exists() else _line(COLUMNS)
            self._file = target.open("ab", buffering=0)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{self._where}: cannot be written ({reason}); name another path") from error
        self._write(missing)

    def __enter__(self) -> "CsvLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, cells: Sequence[Any]) -> None:
        """Append a row; EnvironmentProblem where it does not go in."""
        self._write(_line(cells))

    def _missing(self, target: Path) -> bytes:
        """What must be written before the first row: the header of an empty file, the end of a torn last line."""
        header = _line(COLUMNS)
        with open_regular(target) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return header
            if file.read(len(header)) != header:
                raise UsageError(f"{self._where}: has other columns; name a new file")
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._full(error.strerror) from error
        if written != len(line):  # the disk took a part of it
            raise self._full("no space left")

    def _full(self, reason: str | None) -> EnvironmentProblem:
        return EnvironmentProblem(f"{self._where}: cannot be written ({reason}); check the disk")


def _line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")
