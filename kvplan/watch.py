"""What a GPU, a process and a server hold at one moment: readings for `kvplan watch`, as values and as rows of a CSV.

A server's own numbers come from its /metrics page. The page is read with bounds (time as a whole, bytes, redirects),
and one that cannot be had is a MetricsError, after which the other readings go on.
"""

import csv
import http.client
import io
import math
import os
import re
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urljoin, urlsplit

from kvplan.errors import EnvironmentProblem, UsageError
from kvplan.files import open_regular, printable
from kvplan.nvml import Device, DeviceSample, HostMemory, host_memory

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


# --- a server's /metrics page -----------------------------------------------------------------------------------------

MAX_PAGE_BYTES = 10 * 10**6
MAX_LINES = 5_000  # of the metrics read here; a server with 64 ranks has some hundreds
MAX_LINE_CHARS = 1 << 16
MAX_REDIRECTS = 3
DEADLINE_S = 5.0

Kind = Literal["vllm", "sglang"]
# Field of ServerStats -> the metric's names, the newest first.
_VLLM: dict[str, tuple[str, ...]] = {
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
}
_SGLANG: dict[str, tuple[str, ...]] = {
    "kv_usage": ("sglang:token_usage",),
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "hit_rate": ("sglang:cache_hit_rate",),
}
_CACHE_CONFIG = "vllm:cache_config_info"
_WANTED = (
    _CACHE_CONFIG,
    *(name for table in (_VLLM, _SGLANG) for names in table.values() for name in names),
)


class MetricsError(Exception):
    """A /metrics page that cannot be had or read, and why. The watch goes on without it."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What a server says of itself, over all its engines; None where it does not.

    kv_usage        share of the KV cache in use, of the fullest engine
    running, waiting, preemptions, prefix_hits, prefix_queries   sums; the prefix figures are tokens since its start
    hit_rate        share of prompt tokens found in the prefix cache
    num_blocks, block_size, kv_tokens   of one engine's KV cache: blocks, tokens of a block, tokens
    """

    kind: Kind
    kv_usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    prefix_hits: int | None = None
    prefix_queries: int | None = None
    hit_rate: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    cache_dtype: str | None = None


def server_stats(page: str) -> ServerStats:
    """The figures of a vLLM or SGLang server's /metrics page; MetricsError where it is no such page."""
    samples = _samples(page)
    if any(name.startswith("vllm:") for name, _, _ in samples):
        return _vllm_stats(samples)
    if samples:
        return ServerStats("sglang", **_figures(samples, _SGLANG))
    raise MetricsError("no vllm: or sglang: metrics on it")


Samples = Sequence[tuple[str, dict[str, str], float]]  # (name, labels, value)


def _samples(page: str) -> Samples:
    """The wanted samples of a page in Prometheus' text format; the other lines are not parsed."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
    if len(lines) > MAX_LINES or any(len(line) > MAX_LINE_CHARS for line in lines):
        raise MetricsError("not a server's page, its lines are too many or too long")
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"not in Prometheus' text format ({printable(str(error), 60)})") from error
    return [
        (sample.name, sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if math.isfinite(sample.value)
    ]


def _vllm_stats(samples: Samples) -> ServerStats:
    figures = _figures(samples, _VLLM)
    hits, queries = figures.get("prefix_hits"), figures.get("prefix_queries")
    config = next((labels for name, labels, _ in samples if name == _CACHE_CONFIG), {})
    num_blocks, block_size = _number(config, "num_gpu_blocks"), _number(config, "block_size")
    counted = None if num_blocks is None or block_size is None else num_blocks * block_size
    return ServerStats(
        "vllm",
        **figures,
        hit_rate=hits / queries if hits is not None and queries else None,
        num_blocks=num_blocks,
        block_size=block_size,
        kv_tokens=_number(config, "kv_cache_size_tokens") or counted,
        cache_dtype=printable(config["cache_dtype"], 40) if "cache_dtype" in config else None,
    )


def _figures(samples: Samples, table: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Every field that a sample gives: shares are those of the fullest engine, counts are summed."""
    found: dict[str, Any] = {}
    for field, names in table.items():
        given = [[value for name, _, value in samples if name == wanted] for wanted in names]
        values: list[float] = next((each for each in given if each), [])
        if values:
            found[field] = max(values) if field in ("kv_usage", "hit_rate") else round(sum(values))
    return found


def _number(labels: dict[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


class MetricsPage:
    """A server's /metrics page by its URL. `read` takes no longer than the deadline, whatever the server does."""

    def __init__(self, url: str, deadline_s: float = DEADLINE_S) -> None:
        self._url = checked_url(url)
        self._deadline_s = deadline_s
        self._fetch: _Fetch | None = None
        _require_parser()

    def read(self) -> ServerStats:
        """The server's figures now; MetricsError where they cannot be had."""
        if self._fetch is not None and self._fetch.is_alive():  # a name server that does not answer cannot be hurried
            raise MetricsError("the last request is still waiting")
        self._fetch = fetch = _Fetch(self._url, self._deadline_s)
        fetch.start()
        fetch.join(self._deadline_s)
        if fetch.is_alive():
            fetch.abort()
            raise MetricsError(f"no whole answer in {self._deadline_s:g} s")
        return server_stats(fetch.page())


def _require_parser() -> None:
    try:
        import prometheus_client.parser  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            "prometheus_client: not installed, --metrics needs it; run `pip install prometheus_client`"
        ) from error


def checked_url(text: str) -> SplitResult:
    """An http or https URL with a host; UsageError for all else. A bare host gets the path /metrics."""
    where = f"--metrics {printable(text)}"
    try:
        url = urlsplit(text)
        url.port  # noqa: B018 -- it is parsed when asked for
    except ValueError as error:
        raise UsageError(f"{where}: not a URL ({error}); write http://localhost:8000/metrics") from error
    if url.scheme not in ("http", "https") or not url.hostname or re.search(r"[\x00-\x20\x7f]", text):
        raise UsageError(f"{where}: not an http or https URL; write http://localhost:8000/metrics")
    if url.username is not None:
        raise UsageError("--metrics: a URL with a password is not used, other users could read it; leave it out")
    return url._replace(path="/metrics") if url.path in ("", "/") else url


class _Fetch(threading.Thread):
    """One GET in a thread of its own, so that no server, proxy or name server can hold up the view."""

    def __init__(self, url: SplitResult, timeout_s: float) -> None:
        super().__init__(daemon=True, name="kvplan-metrics")
        self._url = url
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False
        self._body = b""
        self._problem: MetricsError | None = None

    def run(self) -> None:
        try:
            self._body = self._get()
        except MetricsError as error:
            self._problem = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._problem = MetricsError(_reason(error))
        finally:
            if self._connection is not None:
                self._connection.close()

    def page(self) -> str:
        """The text that came; MetricsError for what went wrong."""
        if self._problem is not None:
            raise self._problem
        return self._body.decode("utf-8", "replace")

    def abort(self) -> None:
        """End a request that takes too long: a read that blocks returns when its socket is cut."""
        self._aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _get(self) -> bytes:
        url = self._url
        for _ in range(1 + MAX_REDIRECTS):
            with self._answer(url) as answer:
                if answer.status not in (301, 302, 303, 307, 308):
                    return self._body_of(answer)
                url = _redirected(url, answer.headers.get("Location", ""))
        raise MetricsError(f"more than {MAX_REDIRECTS} redirects")

    def _answer(self, url: SplitResult) -> http.client.HTTPResponse:
        if self._connection is not None:
            self._connection.close()
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "", url.port, timeout=self._timeout_s)
        self._connection.connect()
        if self._aborted:  # while the name was looked up, when there was no socket to cut
            raise MetricsError("given up")
        path = url.path + (f"?{url.query}" if url.query else "")
        self._connection.request("GET", path, headers={"Accept": "text/plain", "User-Agent": "kvplan"})
        return self._connection.getresponse()

    def _body_of(self, answer: http.client.HTTPResponse) -> bytes:
        if answer.status != 200:
            raise MetricsError(f"HTTP {answer.status} {printable(answer.reason, 40)}".rstrip())
        body = bytearray()
        while not self._aborted and (chunk := answer.read1(1 << 16)):
            body += chunk
            if len(body) > MAX_PAGE_BYTES:
                raise MetricsError(f"more than {MAX_PAGE_BYTES // 10**6} MB")
        return bytes(body)


def _redirected(url: SplitResult, location: str) -> SplitResult:
    """Where a redirect leads: another path of the same host, or to https there; MetricsError for all else."""
    try:
        found = checked_url(urljoin(url.geturl(), location))
    except (UsageError, ValueError) as error:
        raise MetricsError("redirected to what is no http or https URL") from error
    if found.hostname != url.hostname or (url.scheme, found.scheme) == ("https", "http"):
        raise MetricsError(f"redirected to another host ({printable(found.netloc, 80)}), not followed")
    return found


def _reason(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case socket.gaierror():
            return "no such host"
        case OSError():
            return (error.strerror or type(error).__name__).lower()
        case _:
            return f"not an HTTP answer ({type(error).__name__})"


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
