"""A load test of a real server: started or already running, sampled through its /metrics page and NVML.

The output files are in formats that kvplan's other commands read:

    bench.json           times by request, as `vllm bench serve` saves them: `reconcile --bench`, `calibrate`
    before.prom, after.prom   its /metrics page at both ends: `rightsize`
    samples.csv          a row per interval: batch, queue, KV cache, preemptions, GPU memory
    server.log           output of a server that was started here: `reconcile --log`, `why`
"""

import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.table import csv_text
from kvplan.hardware.nvml import Device, DeviceError, open_nvml
from kvplan.measure.server_metrics import MetricsError, MetricsPage, ServerStats, server_stats

LOG, BEFORE, AFTER, BENCH, SAMPLES = "server.log", "before.prom", "after.prom", "bench.json", "samples.csv"
STOPS_WITHIN_S: Final = 60.0  # for a server to exit after SIGTERM, before it is killed
COLUMNS: Final = (
    "t", "running", "waiting", "kv_usage", "preemptions", "prompt_tokens", "generation_tokens", "gpu_used", "power_w",
)  # fmt: skip


def created(path: Path) -> Path:
    """Create the directory of a run. Raise UsageError if it exists."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"--output {path_text(path)}", "exists already", "name a new directory") from None
    except OSError as error:
        raise EnvironmentProblem(f"--output {path_text(path)}", f"cannot be created ({error.strerror})") from None
    return path


@dataclass(slots=True)
class Started:
    """A server's process and its output file."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise EnvironmentProblem if the server has exited."""
        code = self.process.poll()
        if code is not None:
            problem = f"ended with exit code {code} before the run was over"
            last = self.last_line()
            ending = f"; it printed last: {last}" if last else ""
            raise EnvironmentProblem(
                "--command", problem + ending, f"see {path_text(self.log)}, or ask `kvplan why` of it"
            )

    def last_line(self) -> str:
        """The last line that the server printed."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""), 200)


def words_of(command: str) -> list[str]:
    """Split a shell command into words. Raise UsageError for an unclosed quote."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError("--command", f"cannot be read ({str(error).lower()})", "close the quote") from None


def refuse_taken(base: str) -> None:
    """Raise EnvironmentProblem if something already listens on the address of a server that is to be started."""
    url = urlsplit(base)
    with suppress(OSError), socket.create_connection((url.hostname or "", url.port or 80), timeout=2):
        raise EnvironmentProblem(
            "--command", f"something listens at {base} already", "stop it, or choose another --port"
        )


@contextmanager
def running(command: str, log: Path) -> Iterator[Started]:
    """Run the command in its own process group, with its output in a file; end it with SIGTERM, then SIGKILL."""
    words = words_of(command)
    assignments = []
    while words and "=" in words[0] and not words[0].startswith("-"):
        assignments.append(words.pop(0))
    if not words:
        raise UsageError("--command", "contains no command", "write 'vllm serve MODEL ...'")
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                ["env", *assignments, *words] if assignments else words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            problem = f"cannot be started ({printable(words[0], 100)}: {error.strerror})"
            raise EnvironmentProblem("--command", problem, "install it, or name its path") from None
        try:
            yield Started(process, log)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to the server and its workers, and SIGKILL to those that stay."""
    with suppress(ProcessLookupError):
        signal_group(process, signal.SIGTERM)
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError, PermissionError):
            signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    import os

    os.killpg(process.pid, number)


def wait_until_ready(base: str, started: Started | None, timeout_s: float) -> None:
    """Wait until /health responds. Raise EnvironmentProblem if the server exits first or on timeout."""
    import httpx2

    deadline = time.monotonic() + timeout_s
    while True:
        if started is not None:
            started.check()
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{base}/health", timeout=5).is_success:
                return
        if time.monotonic() > deadline:
            remedy = "correct the address, or wait longer with --timeout"
            raise EnvironmentProblem(f"{base}/health", f"does not answer within {timeout_s:g} s", remedy)
        time.sleep(0.2)


@dataclass(slots=True)
class Peaks:
    """Maximum of each sampled value; None if never read."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    gpu_used: int | None = None

    def take(self, row: Mapping[str, Any]) -> None:
        for name in ("running", "waiting", "kv_usage", "gpu_used"):
            value, peak = row.get(name), getattr(self, name)
            if value is not None and (peak is None or value > peak):
                setattr(self, name, value)


@dataclass(slots=True)
class Sampler:
    """Rows of samples.csv, taken in a separate thread until the block ends.

    missed  how often the page did not respond, with the last reason
    """

    page: MetricsPage | None
    gpus: tuple[Device, ...]
    path: Path
    interval_s: float
    peaks: Peaks = field(default_factory=Peaks)
    missed: int = 0
    reason: str = ""
    failure: str | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampling(self) -> Iterator["Sampler"]:
        thread = threading.Thread(target=self._run, name="kvplan-sampler", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join()

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            with self.path.open("w", encoding="utf-8", newline="") as file:
                file.write(csv_text([COLUMNS]))
                while True:
                    row = self.row(time.monotonic() - begin)
                    self.peaks.take(row)
                    file.write(csv_text([["" if row[name] is None else row[name] for name in COLUMNS]]))
                    file.flush()
                    if self._stopping.wait(self.interval_s):
                        break
        except OSError as error:
            self.failure = f"{path_text(self.path)} cannot be written ({error.strerror})"

    def row(self, seconds: float) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"t": round(seconds, 3)}
        if self.page is not None:
            try:
                stats = self.page.read()
                row |= {name: getattr(stats, name) for name in COLUMNS if hasattr(stats, name)}
            except MetricsError as error:
                self.missed, self.reason = self.missed + 1, str(error)
        try:
            samples = [gpu.sample(None) for gpu in self.gpus]
        except DeviceError as error:
            self.gpus, self.reason = (), str(error)
            return row
        if samples:
            row["gpu_used"] = sum(sample.memory.used for sample in samples)
            watts = [sample.power_w for sample in samples if sample.power_w is not None]
            row["power_w"] = round(sum(watts), 1) if watts else None
        return row


@contextmanager
def local_gpus() -> Iterator[tuple[tuple[Device, ...], str | None]]:
    """Yield this machine's GPUs and, if none can be read, why."""
    with ExitStack() as stack:
        try:
            devices = stack.enter_context(open_nvml()).devices()
        except DeviceError as error:
            yield (), str(error)
            return
        yield devices, None


def page_of(base: str) -> tuple[MetricsPage | None, str]:
    """Return the server's /metrics page and its current text, or (None, why) if it has none that can be read."""
    page = MetricsPage(f"{base}/metrics")
    try:
        text = page.text()
        server_stats(text)
    except MetricsError as error:
        return None, str(error)
    return page, text


def stats_of(path: Path) -> ServerStats | None:
    """Figures of a saved page, or None if there is none."""
    try:
        return server_stats(path.read_text(encoding="utf-8"))
    except (OSError, MetricsError, KvplanError):
        return None
