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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, cast

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.block_manager import Group, WindowGroup, cdiv, max_blocks_held, num_skipped_tokens
from engine.contiguous import num_reserved_blocks
from engine.memory import host_memory
from engine.request import Request, RequestOutput
from engine.stats import Stats
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.git import checkout
from kvplan.hardware.nvml import Device, Nvml, open_nvml
from kvplan.measure.recording import Recording, ServingRecord
from kvplan.measure.run_types import Manifest, Progress
from kvplan.measure.rundir import RunWriter, Status
from kvplan.models.spec import ModelSpec
from kvplan.workloads.planned import PlannedRequest

STATM = Path("/proc/self/statm")
PACKAGES = ("torch", "triton", "nvidia-ml-py", "safetensors", "numpy")
HANGS_AFTER_S = 30.0  # past --timeout without a step's end
FOREIGN = 0.01  # of the device's memory, that others may take during a run before its samples are left out
EARLY_END = 4  # exit code of a run that ended early, with its partial result saved
TIERS = ("kv_offloading_size", "kv_offloading_dir", "kv_offloading_disk_size")
SERVING = ("prefill", "decode", "drained", "baseline")  # stages in which there is something to keep
PEAKS = ("rss", "torch_allocated", "torch_reserved", "torch_peak", "device_used", "process_used")  # kept by stage


@dataclass(frozen=True, slots=True)
class Workload:
    """What the engine is asked to do.

    requests       in order of arrival
    shared_prefix  tokens every prompt starts with
    duration_s     the requests are repeated for so many seconds, and none is sent after that; None: once
    seed           of the token ids
    """

    requests: tuple[PlannedRequest, ...]
    shared_prefix: int = 0
    duration_s: float | None = None
    seed: int = 0

    @property
    def longest(self) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


@dataclass(slots=True)
class Probe:
    """What can be read of the device and of this process, as one flat record per call."""

    device: torch.device
    gpu: Device | None
    nvml: Nvml | None = None
    first_used: int | None = None  # of the device, before this run held anything
    first_others: int | None = None  # of it, what other processes hold

    def of_torch(self) -> dict[str, int]:
        """What torch's allocator says: quick, and asks nothing of the driver. Nothing on a CPU."""
        if self.device.type != "cuda" or not torch.cuda.is_initialized():
            return {}
        counted = torch.cuda.memory_stats(self.device)
        return {
            "torch_allocated": counted.get("allocated_bytes.all.current", 0),
            "torch_reserved": counted.get("reserved_bytes.all.current", 0),
            "torch_peak": counted.get("allocated_bytes.all.peak", 0),
        }

    def reset_torch_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def of_device(self) -> dict[str, Any]:
        """What NVML says of the GPU; it may take milliseconds. Nothing without one."""
        return {} if self.gpu is None else self._gpu_values(self.gpu)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What NVML and the device have warned of so far."""
        return (() if self.nvml is None else self.nvml.warnings) + (() if self.gpu is None else self.gpu.warnings)

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


def resident() -> int:
    """Bytes of this process in the machine's memory, as Linux says them; elsewhere psutil is asked."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        rss: int = psutil.Process().memory_info().rss
        return rss


class Recorder(threading.Thread):
    """Samples every interval until stopped; a failing probe ends the sampling, not the run.

    Two locks: one sample is taken at a time, which may wait for the driver and the disk; a change of stage waits only
    while torch's counters are read, so that each figure of a sample is of the stage it names.
    """

    def __init__(self, probe: Probe, writer: RunWriter, interval_s: float, watch: Callable[[Progress], None]):
        super().__init__(name="kvplan-sampler", daemon=True)
        self.probe, self.writer, self.interval_s, self.watch = probe, writer, interval_s, watch
        self.start_s = time.monotonic()
        self.deadline_s: float | None = None  # when the run is taken for hanging
        self.stage = "before"
        self.serving: Serving | None = None  # by the engine there is now
        self.recording = Recording()  # of its steps
        self.torch_tensors: int | None = None  # bytes of weights, tables and pool, once they are there
        self.failure: KvplanError | None = None
        self.peaks: dict[str, dict[str, int]] = {}  # by stage, the largest of each memory figure
        self.warned: set[str] = set()
        self._events = deque[tuple[float, str, dict[str, Any]]]([(0.0, "stage", {"stage": self.stage})])  # not written
        self._sampled: set[str] = set()  # stages that have a sample
        self._sampling, self._switching = threading.Lock(), threading.Lock()
        self._stopping = threading.Event()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    def enter(self, stage: str) -> None:
        """Mark the beginning of a stage; the one before it gets a last sample, and this one its first."""
        self.take()
        self._switch(stage)
        self.take()

    def enter_baseline(self, allocator: str) -> None:
        """The same for a second engine: nothing that the first one said is its own."""
        self.take()
        self.serving, self.torch_tensors = None, None
        self._switch("baseline", allocator=allocator)
        self.take()

    def mark(self, stage: str) -> None:
        """The same between steps, where nothing may take time: samples are the timer's, but for a new stage's first."""
        if stage == self.stage:
            return
        self._switch(stage)
        if stage not in self._sampled:
            self.take()

    def _switch(self, stage: str, **values: Any) -> None:
        """Begin a stage: torch's peak is each stage's own. The event says the last one's, and the tokens until now."""
        with self._switching:
            ended = self.probe.of_torch()
            if ended:
                self.probe.reset_torch_peak()
                self._raise_peaks(self.stage, ended)
                values["peaks"] = {self.stage: ended}
            if self.serving is not None:
                values["prompt_tokens"] = self.serving.stats.prompt_tokens
                values["generation_tokens"] = self.serving.stats.generation_tokens
            self.stage = stage
            self._events.append((self.now_s, "stage", {"stage": stage, **values}))

    def run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            if self.deadline_s is not None and self.now_s > self.deadline_s:
                self._give_up()
            if self.failure is not None:  # nothing can be read any more; only the deadline is still watched
                continue
            try:
                self.take()
            except KvplanError as error:
                self.failure = error

    def _give_up(self) -> None:
        """End the process of a run that hangs: a kernel that never returns cannot be interrupted from Python."""
        cause = f"hangs in stage {self.stage}, past its --timeout"
        end = f"profile: {cause}; what was measured is in {self.writer.path}"
        try:
            self.finish(self.early_status, cause)
        except KvplanError as error:
            end = f"profile: {cause}; {error}"
        print(f"kvplan: error: {end}", file=sys.stderr, flush=True)
        os._exit(EARLY_END)

    def finish(self, status: Status, cause: str | None) -> None:
        """End the run directory; what a serving that did not end has come to is kept as partial results."""
        entries: dict[str, Any] = {"peaks": self.peaks, "seconds": round(self.now_s, 3)}
        if self.serving is not None and self.serving.stats.num_steps:
            before = self.writer.manifest.get("results", {})
            served = self.serving.results()
            if self.serving.is_first:
                entries["results"] = before or served
            else:
                entries["results"] = {"baseline": served, **before}
        self.writer.update(**entries)
        with suppress(KvplanError):  # the manifest says how it ended; these lines are what the disk had no room for
            self._write_events()
        self.writer.finish(status, cause)

    @property
    def early_status(self) -> Status:
        """What a run is that ends now: with results in part, or without any."""
        return "partial" if self.stage in SERVING else "failed"

    def take(self) -> None:
        with self._sampling:
            try:
                values = self._read()
                self.writer.sample(values)
                self._sampled.add(values["stage"])
                for text in self.probe.warnings:
                    self.warn(text)
                if values.get("is_foreign"):  # another process moved in: its bytes must not become ours
                    others = f"{values['others_used']:,} bytes are others'"
                    self.warn(f"another process took memory of the GPU ({others})", once_for="foreign")
                    return
                with self._switching:
                    self._raise_peaks(values["stage"], values)
            finally:
                self._write_events()
        self.watch(cast(Progress, values | self._progress()))

    def _read(self) -> dict[str, Any]:
        with self._switching:
            values: dict[str, Any] = {"t": round(self.now_s, 6), "stage": self.stage, "rss": resident()}
            values |= self.probe.of_torch()
            if self.torch_tensors is not None:
                values["torch_tensors"] = self.torch_tensors
            if self.serving is not None:
                values |= asdict(self.serving.stats)
        return values | self.probe.of_device()

    def _raise_peaks(self, stage: str, values: Mapping[str, Any]) -> None:
        peaks = self.peaks.setdefault(stage, {})
        for key in PEAKS:
            if isinstance(values.get(key), int):
                peaks[key] = max(values[key], peaks.get(key, 0))

    def warn(self, text: str, *, once_for: str | None = None) -> None:
        """Keep a warning with the run; the same one (or one of the same kind) is kept once."""
        key = once_for or text
        if key not in self.warned:
            self.warned.add(key)
            with self._switching:
                self._events.append((self.now_s, "warning", {"text": text}))

    def _write_events(self) -> None:
        while self._events:
            at_s, kind, values = self._events.popleft()
            self.writer.event(at_s, kind, **values)

    def _progress(self) -> dict[str, Any]:
        """For the live view alone."""
        return {} if self.serving is None or self.serving.end_s is not None else self.serving.progress()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a profile ended: the exit code, and the one line that says why where it is not 0."""

    exit_code: int
    message: str | None = None
    is_early: bool = True  # where it is not 0: the workload was not served to its end


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
    nvml: Nvml | None = None,
    baseline: Literal["contiguous", "static"] | None = None,
    snapshot: bool = False,
    watch: Callable[[Progress], None] = lambda values: None,
    recording: Recording | None = None,
) -> Outcome:
    """Run the workload and leave everything measured in the run directory, however it ends.

    baseline   the workload is served a second time with this allocator and the same number of blocks
    snapshot   torch's memory history is written beside the run, for its viewer
    timeout_s  for each serving of the workload; HANGS_AFTER_S beyond it, also of a start, the process is ended
    watch      sees every sample, for a live view
    recording  takes in every step of both servings; what it costs is in their times
    Raises what is wrong with the input, and what only a bug can raise, after the run is ended.
    """
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else config.device)
    recorder = Recorder(Probe(device, gpu, nvml), writer, interval_s, watch)
    recorder.recording = recording or Recording()
    try:
        recorder.take()
        recorder.start()
        _set_deadline(recorder, timeout_s)
        snapshot_in = writer.path if snapshot else None
        results = _run(spec, config, workload, recorder, weights, timeout_s, snapshot_in, baseline)
        writer.update(results=results)  # should the second run fail, the first is kept
        if baseline is not None:
            blocks = writer.manifest["memory"]["num_blocks"]
            alone: dict[str, Any] = dict.fromkeys(TIERS)  # reserved memory has nothing beside it
            other = replace(config, allocator=baseline, num_blocks=blocks, **alone)
            _set_deadline(recorder, timeout_s)
            results["baseline"] = _baseline(spec, other, workload, recorder, weights, timeout_s)
            writer.update(results=results)
    except BaseException as error:
        cause, outcome = _early_end(error)
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        _end(recorder, "partial" if is_stopped else recorder.early_status, cause)
        if outcome is None:
            raise
        return outcome
    if recorder.failure is not None:
        cause = str(recorder.failure)
        _end(recorder, "partial", cause)
        return Outcome(EARLY_END, cause)
    useless = _why_useless(results)
    _end(recorder, "complete" if useless is None else "partial", useless)
    return Outcome(0) if useless is None else Outcome(EARLY_END, useless, is_early=False)


def _why_useless(results: Mapping[str, Any]) -> str | None:
    """What is wrong with a serving of which no request succeeded."""
    for name, served in (("", results), (" of the baseline", results.get("baseline", {}))):
        if served.get("num_failed") and served["num_failed"] == served["num_finished"]:
            return f"all {served['num_failed']} requests{name} failed: {served['failures'][0]}"
    return None


def _early_end(error: BaseException) -> tuple[str, Outcome | None]:
    """(cause for the manifest, outcome) of a run that raised; None: the error is to be raised again."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", Outcome(130)
        case SystemExit():  # SIGTERM, as the entry point turns it
            return "terminated", Outcome(int(error.code or 0))
    cause = next(iter(str(error).splitlines()), "")
    if isinstance(error, EnvironmentProblem):
        return cause, Outcome(EARLY_END, cause)
    if isinstance(error, KvplanError):  # wrong input is wrong input, also where only the engine could tell
        return cause, None
    if isinstance(error, RuntimeError) and _is_of_the_device(error):
        return cause, Outcome(EARLY_END, cause)
    return f"{type(error).__name__}: {cause}", None


def _is_of_the_device(error: RuntimeError) -> bool:
    """Whether torch failed for the device's sake (no memory, GPU lost), not for a fault in a program."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CUDA" in str(error)


def _end(recorder: Recorder, status: Status, cause: str | None) -> None:
    recorder.deadline_s = None
    recorder.stop()
    recorder.finish(status, cause)


def _set_deadline(recorder: Recorder, timeout_s: float | None) -> None:
    """From now on, what is to come has the user's limit, and some time to end by itself."""
    recorder.deadline_s = None if timeout_s is None else recorder.now_s + timeout_s + HANGS_AFTER_S


def _run(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
    snapshot: Path | None,
    baseline: Literal["contiguous", "static"] | None,
) -> dict[str, Any]:
    """Start the engine and serve the workload; returns the results for the manifest."""
    recorder.enter("context")
    if recorder.probe.device.type == "cuda":
        torch.cuda.init()
        torch.zeros(1, device=recorder.probe.device)
        torch.cuda.synchronize(recorder.probe.device)
    with _memory_history(snapshot):
        engine = Engine(spec if weights is None else weights, config, on_stage=recorder.enter)
        recorder.take()
        memory, writer = engine.memory_report(), recorder.writer
        inputs = {**writer.manifest.get("inputs", {}), "total": memory.total}  # CUDA's total, not the driver's
        graphs = {} if engine.runner.graphs is None else engine.runner.graphs.num_bytes
        writer.update(
            memory=asdict(memory), groups=len(engine.runner.groups), inputs=inputs,
            graph_bytes={str(size): taken for size, taken in graphs.items()},
        )  # fmt: skip
        recorder.torch_tensors = memory.weights + memory.buffers + memory.kv_cache
        refuse_small_pool(
            tuple(group.rule for group in engine.runner.groups), config, workload, memory.num_blocks, baseline
        )
        served = _serve(engine, workload, recorder, timeout_s)
        recorder.enter("drained")
    return served


def _baseline(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
) -> dict[str, Any]:
    """The same workload in an engine of its own; its samples belong to the stage `baseline`."""
    recorder.enter_baseline(config.allocator)
    gc.collect()  # the first engine's tensors, and then what torch keeps of them
    if recorder.probe.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(spec if weights is None else weights, config)
    memory = engine.memory_report()
    recorder.torch_tensors = memory.weights + memory.buffers + memory.kv_cache
    served = _serve(engine, workload, recorder, timeout_s, is_first=False)
    recorder.take()  # after the last step, which the timer's last sample may have come before
    return served


@contextmanager
def _memory_history(folder: Path | None) -> Iterator[None]:
    """Record torch's allocations and write them to folder/snapshot.pickle, which pytorch.org/memory_viz reads."""
    if folder is None:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


# --- serving ----------------------------------------------------------------------------------------------------------


def refuse_small_pool(
    groups: Sequence[Group], config: EngineConfig, workload: Workload, num_blocks: int, baseline: str | None
) -> None:
    """Raise UsageError where the longest request does not fit into the whole pool, by either allocator."""
    num_tokens = workload.longest
    for allocator in dict.fromkeys((config.allocator, baseline or config.allocator)):
        if allocator in ("contiguous", "static"):
            needed = sum(num_reserved_blocks(group, config.max_model_len or num_tokens) for group in groups)
            what = f"a contiguous reservation ({config.max_model_len} tokens)"
        else:
            longest = max(workload.requests, key=lambda request: request.prompt_tokens + request.output_tokens)
            needed = blocks_needed(groups, config, longest)
            what = f"the longest request ({num_tokens} tokens)"
        if needed > num_blocks - 1:
            raise UsageError(
                "profile",
                f"{what} takes {needed} blocks of {config.block_size} tokens, and the pool has {num_blocks - 1} to "
                "give",
                f"raise --num-blocks to {needed + 1}, or ask for less",
            )


def blocks_needed(groups: Sequence[Group], config: EngineConfig, request: PlannedRequest) -> int:
    """Blocks that a request takes which has the paged pool to itself: at admission, and then where it holds most."""
    prompt, budget = request.prompt_tokens, config.max_num_batched_tokens
    end = prompt + request.output_tokens - 1  # the last token's KV is never computed
    limit = config.max_model_len or end + 1

    def blocks(start: int, stop: int) -> int:
        """While the tokens from start to stop are computed."""
        return sum(cdiv(stop, g.block_size) - num_skipped_tokens(g, start) // g.block_size for g in groups)

    def admitted(group: Group) -> int:
        return min(cdiv(prompt, group.block_size), max_blocks_held(group, limit, budget))

    reserved = sum(map(admitted, groups)) if config.reserve_full_prompt else 0
    if not any(isinstance(group, WindowGroup) for group in groups):
        return max(reserved, blocks(0, end))
    chunks = range(0, prompt, budget)
    # Decoding holds most in the last block's length of steps: windows repeat with it, and nothing else shrinks.
    last = range(max(prompt, end - config.block_size), end)
    return max(
        reserved,
        max(blocks(start, min(prompt, start + budget)) for start in chunks),
        max((blocks(start, start + 1) for start in last), default=0),
    )


class Feed:
    """The requests as they come due: each once, at its arrival; with a duration, again whenever nothing waits."""

    def __init__(self, workload: Workload, max_num_seqs: int) -> None:
        self.duration_s, self.max_num_seqs = workload.duration_s, max_num_seqs
        self.num_requests = len(workload.requests)
        self._first = list(reversed(workload.requests))  # still to come, the next one last
        self._again = cycle(workload.requests)

    def due(self, elapsed: float, num_running: int, num_waiting: int) -> list[PlannedRequest]:
        """What to send now. Repeats fill the batch, no more: a queue that grows would measure itself."""
        if self.is_over(elapsed):
            return []
        requests = []
        while self._first and self._first[-1].arrival_s <= elapsed:
            requests.append(self._first.pop())
        if requests or self._first or num_waiting:
            return requests
        room = max(0, min(self.max_num_seqs - num_running, self.num_requests))
        return list(islice(self._again, room))

    def is_over(self, elapsed: float) -> bool:
        return not self._first if self.duration_s is None else elapsed >= self.duration_s


@dataclass(slots=True)
class Serving:
    """What serving the workload has come to: `results` are good at any moment, should it end early.

    is_first  its results are the run's own; else those of the baseline, by its allocator
    end_s     when all had ended, on time.monotonic's clock; None before
    """

    workload: Workload
    allocator: str
    is_first: bool
    stats: Stats  # after the last step
    begin_s: float = field(default_factory=time.monotonic)
    end_s: float | None = None
    num_finished: int = 0
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)
    most_running: int = 0
    densest: Stats | None = None  # of all steps, the one after which the pool held most

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic() if self.end_s is None else self.end_s) - self.begin_s

    def count(self, outputs: Sequence[RequestOutput], stats: Stats) -> None:
        """Take in a step."""
        errors = [output.error for output in outputs if output.error]
        self.num_finished += len(outputs)
        self.num_failed += len(errors)
        self.failures += errors[: 20 - len(self.failures)]
        # Those that ended in this step ran in it, and the scheduler no longer counts them.
        self.most_running = max(self.most_running, stats.num_requests_running + len(outputs) - len(errors))
        if self.densest is None or stats.num_filled_slots > self.densest.num_filled_slots:
            self.densest = stats
        self.stats = stats

    def results(self) -> dict[str, Any]:
        """For the manifest; those of a serving that has not ended say so."""
        seconds = self.elapsed_s
        served: dict[str, Any] = {
            "seconds": seconds,
            "num_finished": self.num_finished,
            "num_failed": self.num_failed,
            "failures": self.failures,
            "most_running": self.most_running,
            "densest": None if self.densest is None else asdict(self.densest),
            "output_tokens_per_s": self.stats.generation_tokens / seconds if seconds else 0.0,
            "stats": asdict(self.stats),
        }
        if self.end_s is None:
            served["is_partial"] = True
        return served if self.is_first else {"allocator": self.allocator, **served}

    def progress(self) -> dict[str, Any]:
        return _progress(self.workload, self.num_finished, self.stats.generation_tokens, self.elapsed_s)


def _serve(
    engine: Engine, workload: Workload, recorder: Recorder, timeout_s: float | None, *, is_first: bool = True
) -> dict[str, Any]:
    """Send the requests as they come due and step until all have ended; the first serving's stages are marked."""
    source = random.Random(workload.seed)
    prefix = [source.randrange(engine.spec.vocab_size) for _ in range(workload.shared_prefix)]
    feed = Feed(workload, engine.config.num_seqs)
    _set_deadline(recorder, timeout_s)
    if is_first:
        recorder.enter("prefill")
        # A stage is named before its batch runs, and prefill lasts until the last prompt token in flight is taken in.
        engine.on_launch = lambda num_prompt_tokens: recorder.mark("prefill" if num_prompt_tokens else "decode")
    serving = recorder.serving = Serving(workload, engine.config.allocator, is_first, engine.stats())
    record = recorder.recording.begin(serving.allocator, engine.scheduler, serving.begin_s - recorder.start_s)
    if record != ServingRecord():
        engine.on_schedule = lambda batch: record.schedule(engine.scheduler, batch, serving.elapsed_s)
    while True:
        elapsed = _agreed(engine, serving.elapsed_s)
        if timeout_s is not None and elapsed > timeout_s:
            raise EnvironmentProblem(
                "profile", f"not done after {timeout_s:g} s (--timeout)", "raise it or ask for less"
            )
        for request in feed.due(elapsed, serving.stats.num_requests_running, serving.stats.num_requests_waiting):
            record.arrive(_send(engine, request, prefix, source).seq, serving.elapsed_s)
        if not engine.has_unfinished:
            if feed.is_over(elapsed):
                break
            time.sleep(0.001)
            continue
        serving.count(engine.step(), engine.stats())
        record.update(engine.scheduler, serving.elapsed_s)
    serving.end_s = time.monotonic()
    recorder.deadline_s, engine.on_launch, engine.on_schedule = None, None, None
    if serving.num_failed:
        recorder.warn(f"{serving.num_failed} of {serving.num_finished} requests failed ({serving.failures[0]})")
    return serving.results()


def _send(engine: Engine, request: PlannedRequest, prefix: list[int], source: random.Random) -> Request:
    """Queue one request: the shared prefix, and random tokens after it."""
    fresh = max(1, request.prompt_tokens - len(prefix))
    prompt = prefix[: request.prompt_tokens - 1] + [source.randrange(engine.spec.vocab_size) for _ in range(fresh)]
    params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
    return engine.submit(prompt[: request.prompt_tokens], params)


def _agreed(engine: Engine, elapsed: float) -> float:
    """Rank 0's clock: ranks that decided by their own would step apart and wait for each other for ever."""
    tp = engine.runner.tp
    if tp.size == 1:
        return elapsed
    return float(tp.broadcast(torch.tensor(elapsed, dtype=torch.float64, device=engine.device)))


def _progress(workload: Workload, num_finished: int, num_tokens: int, elapsed: float) -> dict[str, Any]:
    """For the live view: requests that have ended of all (None: no fixed number), and seconds that are left."""
    if workload.duration_s is not None:
        return {"num_finished": num_finished, "num_requests": None, "eta_s": max(0.0, workload.duration_s - elapsed)}
    total = sum(request.output_tokens for request in workload.requests)
    left = elapsed * (total - num_tokens) / num_tokens if 0 < num_tokens < total else None
    return {"num_finished": num_finished, "num_requests": len(workload.requests), "eta_s": left}


# --- ranks ------------------------------------------------------------------------------------------------------------


class SilentWriter(RunWriter):
    """Stands in for the run directory on ranks other than 0: it keeps the manifest and writes nothing."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, cast(Manifest, dict(manifest))

    def update(self, **entries: Any) -> None:
        self.manifest |= cast(Manifest, entries)

    def sample(self, values: Mapping[str, Any]) -> None:
        """Rank 0's samples are the run's."""

    def event(self, at_s: float, kind: str, **values: Any) -> None:
        """Rank 0's events are the run's."""

    def finish(self, status: Status, cause: str | None = None) -> None:
        self.update(status=status, cause=cause)


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
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "host_memory": host_memory()[1],
        "warnings": [] if nvml is None else list(nvml.warnings),
        "is_wsl": "microsoft" in platform.release().lower(),
        "commit": checkout(Path(__file__).resolve().parents[2]),
        "argv": sys.argv[1:],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[tuple[Nvml | None, Device | None]]:
    """NVML and the device torch computes on; (None, None) on a CPU."""
    if device.type != "cuda":
        yield None, None
        return
    with open_nvml() as nvml:
        yield nvml, nvml.visible_device(device.index or 0)
