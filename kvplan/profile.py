"""Runs the bundled engine on a workload and measures: samples in a thread of its own, stages marked in time.

Imports torch; only `kvplan profile` loads it.
"""

import gc
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.engine import Stats
from kvplan.errors import EnvironmentProblem, KvplanError
from kvplan.nvml import Device, Nvml, open_nvml
from kvplan.rundir import RunWriter
from kvplan.spec import ModelSpec
from kvplan.workload import Lengths

PACKAGES = ("torch", "triton", "nvidia-ml-py", "safetensors", "numpy")
HANGS_AFTER_S = 30.0  # past --timeout without a step's end
FOREIGN = 0.01  # of the device's memory, that others may take during a run before its samples are left out
EARLY_END = 4  # exit code of a run that ended early, with its partial result saved


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the workload: token counts, and seconds after the start at which it comes."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What the engine is asked to do.

    requests       in order of arrival
    shared_prefix  tokens every prompt starts with
    duration_s     the requests are repeated until so many seconds have passed; None: once
    seed           of the token ids
    """

    requests: tuple[PlannedRequest, ...]
    shared_prefix: int = 0
    duration_s: float | None = None
    seed: int = 0

    @property
    def longest(self) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


def from_lengths(lengths: Lengths, num_seqs: int, output_tokens: int, seed: int) -> tuple[PlannedRequest, ...]:
    """num_seqs requests whose full lengths are drawn from the distribution; each ends with output_tokens."""
    source = random.Random(seed)
    totals = source.choices([n for n, _ in lengths.points], [p for _, p in lengths.points], k=num_seqs)
    return tuple(
        PlannedRequest(max(1, total - output_tokens), max(1, min(output_tokens, total - 1))) for total in totals
    )


@dataclass(slots=True)
class Probe:
    """What can be read of the device and of this process, as one flat record per call."""

    device: torch.device
    gpu: Device | None
    process: psutil.Process = field(default_factory=psutil.Process)
    first_used: int | None = None  # of the device, before this run held anything
    first_others: int | None = None  # of it, what other processes hold

    def read(self) -> dict[str, Any]:
        values: dict[str, Any] = {"rss": self.process.memory_info().rss}
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            values |= {
                "torch_allocated": torch.cuda.memory_allocated(self.device),
                "torch_reserved": torch.cuda.memory_reserved(self.device),
                "torch_peak": torch.cuda.max_memory_allocated(self.device),
            }
        if self.gpu is not None:
            values |= self._gpu_values(self.gpu)
        return values

    def _gpu_values(self, gpu: Device) -> dict[str, Any]:
        # Before this process has a CUDA context, all that is held is others'.
        sample = gpu.sample(os.getpid() if torch.cuda.is_initialized() else None)
        memory, own, others = sample.memory, sample.process_used, sample.others_used
        if self.first_used is None:
            self.first_used, self.first_others = memory.used, others
        is_estimated = own is None
        if own is None:  # hidden in a container or by the driver: what the device holds more than before the run
            own = max(0, memory.used - self.first_used)
        return {
            "device_total": memory.total,
            "device_reserved": memory.reserved,
            "device_used": memory.used,
            "device_free": memory.free,
            "device_is_host": memory.is_host,
            "process_used": own,
            "process_is_estimated": is_estimated,
            "others_used": others,
            "is_foreign": others is not None and others - (self.first_others or 0) > FOREIGN * memory.total,
            "gpu_utilization": sample.gpu_utilization,
            "power_w": sample.power_w,
            "sm_clock_mhz": sample.sm_clock_mhz,
            "memory_clock_mhz": sample.memory_clock_mhz,
        }


class Recorder(threading.Thread):
    """Samples every interval until stopped; a failing probe ends the sampling, not the run."""

    def __init__(self, probe: Probe, writer: RunWriter, interval_s: float, watch: Callable[[dict[str, Any]], None]):
        super().__init__(name="kvplan-sampler", daemon=True)
        self.probe, self.writer, self.interval_s, self.watch = probe, writer, interval_s, watch
        self.start_s = time.monotonic()
        self.deadline_s: float | None = None  # when the run is taken for hanging
        self.stage = "before"
        self.stats: Stats | None = None
        self.failure: KvplanError | None = None
        self.peaks: dict[str, dict[str, int]] = {}  # by stage, the largest of each memory figure
        self.warned: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    def enter(self, stage: str) -> None:
        """Mark the beginning of a stage; the one before it gets a last sample."""
        self.take()
        self.stage = stage
        self.writer.event(self.now_s, "stage", stage=stage)
        self.take()

    def run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            if self.deadline_s is not None and self.now_s > self.deadline_s:
                self._give_up()
            try:
                self.take()
            except KvplanError as error:
                self.failure = error
                return

    def _give_up(self) -> None:
        """End the process of a run that hangs: a kernel that never returns cannot be interrupted from Python."""
        cause = f"hangs in stage {self.stage}, past its --timeout"
        self.writer.update(peaks=self.peaks)
        self.writer.finish("partial", cause)
        print(
            f"kvplan: error: profile: {cause}; what was measured is in {self.writer.path}", file=sys.stderr, flush=True
        )
        os._exit(EARLY_END)

    def take(self) -> None:
        with self._lock:
            values = {"t": round(self.now_s, 6), "stage": self.stage, **self.probe.read(), **self._engine_values()}
            self.writer.sample(values)
            if values.get("is_foreign"):  # another process moved in: its bytes must not become ours
                self._warn_once(f"another process took memory of the GPU ({values['others_used']:,} bytes are others')")
                return
            peaks = self.peaks.setdefault(self.stage, {})
            for key in ("rss", "torch_allocated", "torch_reserved", "torch_peak", "device_used", "process_used"):
                if isinstance(values.get(key), int):
                    peaks[key] = max(values[key], peaks.get(key, 0))
        self.watch(values)

    def _warn_once(self, text: str) -> None:
        if text.split(" (")[0] not in self.warned:
            self.warned.add(text.split(" (")[0])
            self.writer.event(self.now_s, "warning", text=text)

    def _engine_values(self) -> dict[str, Any]:
        return {} if self.stats is None else asdict(self.stats)

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a profile ended: the exit code, and the one line that says why where it is not 0."""

    exit_code: int
    message: str | None = None


def profile(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    writer: RunWriter,
    *,
    weights: Path | None = None,
    interval_s: float = 0.05,
    timeout_s: float | None = None,
    gpu: Device | None = None,
    baseline: Literal["contiguous"] | None = None,
    snapshot: bool = False,
    watch: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Outcome:
    """Run the workload and leave everything measured in the run directory, however it ends.

    baseline  the workload is served a second time with this allocator and the same number of blocks
    snapshot  torch's memory history is written beside the run, for its viewer
    watch     sees every sample, for a live view
    """
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else config.device)
    recorder = Recorder(Probe(device, gpu), writer, interval_s, watch)
    recorder.start()
    try:
        with _memory_history(device, writer.path if snapshot else None):
            results = _run(spec, config, workload, recorder, weights, timeout_s)
        if baseline is not None:
            writer.update(results=results)  # should the second run fail, the first is kept
            blocks = writer.manifest["memory"]["num_blocks"]
            other = replace(config, allocator=baseline, num_blocks=blocks)
            results["baseline"] = _baseline(spec, other, workload, recorder, weights, timeout_s)
    except KeyboardInterrupt:
        return _end(recorder, writer, "partial", "interrupted", Outcome(130))
    except SystemExit as stop:  # SIGTERM, as the entry point turns it
        return _end(recorder, writer, "partial", "terminated", Outcome(int(stop.code or 0)))
    except (KvplanError, RuntimeError) as error:  # torch's own failures (out of memory, lost GPU) are RuntimeErrors
        cause = str(error).splitlines()[0]
        is_start = recorder.stage not in ("prefill", "decode")
        return _end(recorder, writer, "failed" if is_start else "partial", cause, Outcome(EARLY_END, cause))
    writer.update(results=results)
    if recorder.failure is not None:
        cause = str(recorder.failure)
        return _end(recorder, writer, "partial", cause, Outcome(EARLY_END, cause))
    return _end(recorder, writer, "complete", None, Outcome(0))


def _end(recorder: Recorder, writer: RunWriter, status: Any, cause: str | None, outcome: Outcome) -> Outcome:
    recorder.stop()
    writer.update(peaks=recorder.peaks, seconds=round(recorder.now_s, 3))
    writer.finish(status, cause)
    return outcome


def _run(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
) -> dict[str, Any]:
    """Start the engine and serve the workload; returns the results for the manifest."""
    recorder.take()
    recorder.enter("context")
    if recorder.probe.device.type == "cuda":
        torch.cuda.init()
        torch.zeros(1, device=recorder.probe.device)
        torch.cuda.synchronize(recorder.probe.device)
    engine = Engine(spec if weights is None else weights, config, on_stage=recorder.enter)
    if engine.device.type == "cpu":
        for tensor in engine.runner.kv.tensors:  # an untouched page is not resident, and RSS would not show the pool
            tensor.view(torch.uint8).fill_(0)
    recorder.take()
    recorder.writer.update(memory=asdict(engine.memory_report()), groups=len(engine.runner.groups))
    served = _serve(engine, workload, recorder, timeout_s)
    recorder.enter("drained")
    return {**served, "stats": asdict(engine.stats())}


def _baseline(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
) -> dict[str, Any]:
    """The same workload in an engine of its own; its samples belong to the stage `baseline`."""
    recorder.enter("baseline")
    gc.collect()  # the first engine's tensors, and then what torch keeps of them
    if recorder.probe.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(spec if weights is None else weights, config)
    served = _serve(engine, workload, recorder, timeout_s, is_staged=False)
    return {"allocator": config.allocator, **served, "stats": asdict(engine.stats())}


@contextmanager
def _memory_history(device: torch.device, folder: Path | None) -> Iterator[None]:
    """Record torch's allocations and write them to folder/snapshot.pickle, which pytorch.org/memory_viz reads."""
    if folder is None:
        yield
        return
    if device.type != "cuda":
        raise EnvironmentProblem("--snapshot: torch records its memory history on a GPU only; leave it out")
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def _serve(
    engine: Engine, workload: Workload, recorder: Recorder, timeout_s: float | None, *, is_staged: bool = True
) -> dict[str, Any]:
    """Send the requests as they come due and step until all have ended; stages prefill and decode are marked."""
    source = random.Random(workload.seed)
    prefix = [source.randrange(engine.spec.vocab_size) for _ in range(workload.shared_prefix)]
    if timeout_s is not None:
        recorder.deadline_s = recorder.now_s + timeout_s + HANGS_AFTER_S
    queue = _arrivals(workload)
    pending = next(queue, None)
    if is_staged:
        recorder.enter("prefill")
    begin = time.monotonic()
    most_running = num_finished = 0
    failures: list[str] = []
    densest: Stats | None = None
    while pending is not None or engine.has_unfinished:
        elapsed = time.monotonic() - begin
        if timeout_s is not None and elapsed > timeout_s:
            raise EnvironmentProblem(f"profile: not done after {timeout_s:g} s (--timeout); raise it or ask for less")
        while pending is not None and pending.arrival_s <= elapsed:
            fresh = max(1, pending.prompt_tokens - len(prefix))
            prompt = prefix[: pending.prompt_tokens - 1] + [
                source.randrange(engine.spec.vocab_size) for _ in range(fresh)
            ]
            engine.add_request(
                prompt[: pending.prompt_tokens],
                SamplingParams(temperature=0, max_tokens=pending.output_tokens, ignore_eos=True),
            )
            pending = next(queue, None)
        if not engine.has_unfinished:
            time.sleep(0.001)
            continue
        before = engine.stats().prompt_tokens
        outputs = engine.step()
        num_finished += len(outputs)
        failures += [output.error for output in outputs if output.error]
        recorder.stats = stats = engine.stats()
        most_running = max(most_running, stats.num_requests_running)
        if densest is None or stats.num_kv_tokens > densest.num_kv_tokens:
            densest = stats
        stage = "prefill" if stats.prompt_tokens > before else "decode"
        if is_staged and stage != recorder.stage:
            recorder.enter(stage)
    seconds = time.monotonic() - begin
    return {
        "seconds": seconds,
        "num_finished": num_finished,
        "num_failed": len(failures),
        "failures": failures[:20],
        "most_running": most_running,
        "densest": None if densest is None else asdict(densest),
        "output_tokens_per_s": engine.stats().generation_tokens / seconds if seconds else 0.0,
    }


def _arrivals(workload: Workload) -> Iterator[PlannedRequest]:
    """The requests in order; with a duration, over and over until an arrival would lie beyond it."""
    begin = time.monotonic()
    yield from workload.requests
    while workload.duration_s is not None and time.monotonic() - begin < workload.duration_s:
        for request in workload.requests:
            yield PlannedRequest(request.prompt_tokens, request.output_tokens)


# --- the machine ------------------------------------------------------------------------------------------------------


def environment(nvml: Nvml | None, gpu: Device | None) -> dict[str, Any]:
    """Versions and hardware, for the manifest."""
    return {
        "kvplan": _version("kvplan"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "driver": None if nvml is None else nvml.driver_version,
        "gpu": None if gpu is None else gpu.name,
        "cpu_cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "host_memory": psutil.virtual_memory().total,
        "warnings": [] if nvml is None else list(nvml.warnings),
        "is_wsl": "microsoft" in platform.release().lower(),
        "commit": commit(Path(__file__).resolve().parents[1]),
        "argv": sys.argv[1:],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(root: Path) -> str | None:
    """The commit a checkout stands at, read from its files; None for an installed package."""
    try:
        head = (root / ".git" / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        loose = root / ".git" / name
        if loose.exists():
            return loose.read_text(encoding="ascii").strip()
        packed = (root / ".git" / "packed-refs").read_text(encoding="ascii").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[tuple[Nvml | None, Device | None]]:
    """NVML and the device torch computes on; (None, None) on a CPU."""
    if device.type != "cuda":
        yield None, None
        return
    with open_nvml() as nvml:
        yield nvml, nvml.visible_device(device.index or 0)
