"""Run the bundled engine on a workload and measure it: samples from a separate thread, stages marked in time.

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
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, cast

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.block_manager import Group, WindowGroup, cdiv
from engine.disk_tier import HEADER_BYTES
from engine.host_tier import HostTier
from engine.memory import host_memory
from engine.request import Request, RequestOutput
from engine.stats import Stats
from engine.tiers import Tiers
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.git import checkout, release
from kvplan.hardware.nvml import Device, Nvml, open_nvml
from kvplan.measure.recording import Recording, ServingRecord
from kvplan.measure.run_types import Files, Manifest, Offload, Progress
from kvplan.measure.rundir import BASELINES, RunWriter, Status
from kvplan.models.spec import ModelSpec
from kvplan.workloads.planned import PlannedRequest

STATM = Path("/proc/self/statm")
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds that it ran, and waited for a processor
BUSY = 0.1  # of a serving spent waiting for a processor; beyond, its speed is compared with no other's
PACKAGES = ("torch", "triton", "nvidia-ml-py", "safetensors", "numpy")
HANGS_AFTER_S = 30.0  # past --timeout without a finished step
FOREIGN = 0.01  # of the device's memory; if other processes take more during a run, its samples are excluded
EARLY_END = 4  # exit code of a run that ended early, with its partial result saved
TIERS = ("kv_offloading_size", "kv_offloading_dir", "kv_offloading_disk_size")
SERVING = ("prefill", "decode", "drained", *BASELINES)  # stages with partial results worth saving
PEAKS = ("rss", "torch_allocated", "torch_reserved", "torch_peak", "device_used", "process_used")  # recorded per stage


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload for the engine.

    requests       in order of arrival
    shared_prefix  tokens that every prompt starts with
    duration_s     repeat the requests for this many seconds, then send no more; None: once
    seed           of the token ids
    adapters       directories by name: the requests name them in turn; {}: none
    """

    requests: tuple[PlannedRequest, ...]
    shared_prefix: int = 0
    duration_s: float | None = None
    seed: int = 0
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


@dataclass(slots=True)
class Probe:
    """Reads the device and this process, one flat record per call."""

    device: torch.device
    gpu: Device | None
    nvml: Nvml | None = None
    first_used: int | None = None  # of the device, before this run used any
    first_others: int | None = None  # used by other processes

    def of_torch(self) -> dict[str, int]:
        """Counters of torch's allocator: fast, without a driver call. Empty on a CPU."""
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
        """NVML's values for the GPU; may take milliseconds. Empty without a GPU."""
        return {} if self.gpu is None else self._gpu_values(self.gpu)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of NVML and the device so far."""
        return (() if self.nvml is None else self.nvml.warnings) + (() if self.gpu is None else self.gpu.warnings)

    def _gpu_values(self, gpu: Device) -> dict[str, Any]:
        # Before this process has a CUDA context, all used memory belongs to others.
        sample = gpu.sample(os.getpid() if torch.cuda.is_initialized() else None)
        memory, own, others = sample.memory, sample.process_used, sample.others_used
        if self.first_used is None:
            self.first_used, self.first_others = memory.used, others
        is_estimated = own is None
        if own is None:  # hidden by a container or the driver: growth of device memory since before the run
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
    """Resident bytes of this process, from Linux's /proc or else from psutil."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        rss: int = psutil.Process().memory_info().rss
        return rss


def waited_s() -> float:
    """Seconds for which this thread has been ready and others had the processors; 0 where nothing tells."""
    try:
        return int(SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Recorder(threading.Thread):
    """Samples every interval until stopped; a failing probe ends the sampling, not the run.

    Two locks: samples are taken one at a time and may wait for the driver and the disk; a stage change waits only while
    torch's counters are read, so that each number in a sample belongs to the stage it names.
    """

    def __init__(self, probe: Probe, writer: RunWriter, interval_s: float, watch: Callable[[Progress], None]):
        super().__init__(name="kvplan-sampler", daemon=True)
        self.probe, self.writer, self.interval_s, self.watch = probe, writer, interval_s, watch
        self.start_s = time.monotonic()
        self.deadline_s: float | None = None  # when the run is considered hung
        self.stage = "before"
        self.serving: Serving | None = None  # the current engine's
        self.recording = Recording()  # of its steps
        self.torch_tensors: int | None = None  # bytes of weights, tables and pool, once allocated
        self.failure: KvplanError | None = None
        self.peaks: dict[str, dict[str, int]] = {}  # by stage, the largest value of each memory figure
        self.warned: set[str] = set()
        self._events = deque[tuple[float, str, dict[str, Any]]]([(0.0, "stage", {"stage": self.stage})])  # unwritten
        self._sampled: set[str] = set()  # stages that have at least one sample
        self._sampling, self._switching = threading.Lock(), threading.Lock()
        self._stopping = threading.Event()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    def enter(self, stage: str) -> None:
        """Mark the beginning of a stage: take a last sample of the previous stage and a first one of this stage."""
        self.take()
        self._switch(stage)
        self.take()

    def enter_baseline(self, name: str, allocator: str) -> None:
        """Enter the baseline stage of another engine; drop everything the engine before it reported."""
        self.take()
        self.serving, self.torch_tensors = None, None
        self._switch(name, allocator=allocator)
        self.take()

    def mark(self, stage: str) -> None:
        """Enter a stage between steps, without delay: the timer takes the samples, except a new stage's first."""
        if stage == self.stage:
            return
        self._switch(stage)
        if stage not in self._sampled:
            self.take()

    def _switch(self, stage: str, **values: Any) -> None:
        """Begin a stage and reset torch's peak. The event has the previous stage's peak and the tokens so far."""
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
            if self.failure is not None:  # nothing can be read anymore; only the deadline is still checked
                continue
            try:
                self.take()
            except KvplanError as error:
                self.failure = error

    def _give_up(self) -> None:
        """End the process of a hung run: a kernel that never returns cannot be interrupted from Python."""
        cause = f"hangs in stage {self.stage}, past its --timeout"
        end = f"profile: {cause}; what was measured is in {self.writer.path}"
        try:
            self.finish(self.early_status, cause)
        except KvplanError as error:
            end = f"profile: {cause}; {error}"
        print(f"kvplan: error: {end}", file=sys.stderr, flush=True)
        os._exit(EARLY_END)

    def finish(self, status: Status, cause: str | None) -> None:
        """Finish the run directory; an interrupted serving leaves partial results."""
        entries: dict[str, Any] = {"peaks": self.peaks, "seconds": round(self.now_s, 3)}
        if self.serving is not None and self.serving.stats.num_steps:
            before = self.writer.manifest.get("results", {})
            served = self.serving.results()
            if self.serving.baseline is None:
                entries["results"] = before or served
            else:
                entries["results"] = {self.serving.baseline: served, **before}
        self.writer.update(**entries)
        with suppress(KvplanError):  # the manifest says how it ended; these lines did not fit on the disk
            self._write_events()
        self.writer.finish(status, cause)

    @property
    def early_status(self) -> Status:
        """Status of a run that ends now: partial if it has results, else failed."""
        return "partial" if self.stage in SERVING else "failed"

    def take(self) -> None:
        with self._sampling:
            try:
                values = self._read()
                self.writer.sample(values)
                self._sampled.add(values["stage"])
                for text in self.probe.warnings:
                    self.warn(text)
                if values.get("is_foreign"):  # another process appeared: its bytes must not be counted as this run's
                    others = f"{values['others_used']:,} bytes belong to other processes"
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
        """Save a warning with the run; the same one (or one of the same kind) is saved once."""
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
        """Progress values for the live view only."""
        return {} if self.serving is None or self.serving.end_s is not None else self.serving.progress()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a profile ended: the exit code and, if it is not 0, one line that says why."""

    exit_code: int
    message: str | None = None
    is_early: bool = True  # if the exit code is not 0: the workload was not completed


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
    baselines: Sequence[Literal["contiguous", "static"]] = (),
    snapshot: bool = False,
    watch: Callable[[Progress], None] = lambda values: None,
    recording: Recording | None = None,
) -> Outcome:
    """Run the workload and leave everything measured in the run directory, however it ends.

    baselines  serve the workload again with each of these allocators and the same number of blocks
    snapshot   also write torch's memory history, for its viewer
    timeout_s  for each serving of the workload; HANGS_AFTER_S later, also during start-up, the process is killed
    watch      receives every sample, for a live view
    recording  receives every step of both servings; its overhead is part of their times
    Re-raises input errors and unexpected exceptions after the run is finished.
    """
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else config.device)
    recorder = Recorder(Probe(device, gpu, nvml), writer, interval_s, watch)
    recorder.recording = recording or Recording()
    try:
        recorder.take()
        recorder.start()
        _set_deadline(recorder, timeout_s)
        snapshot_in = writer.path if snapshot else None
        results = _run(spec, config, workload, recorder, weights, timeout_s, snapshot_in, baselines)
        writer.update(results=results)  # saved now, in case the second run fails
        for name, baseline in zip(BASELINES, baselines, strict=False):
            blocks = writer.manifest["memory"]["num_blocks"]
            alone: dict[str, Any] = dict.fromkeys(TIERS)  # reserving allocators have no offloading tiers
            other = replace(config, allocator=baseline, num_blocks=blocks, **alone)
            _set_deadline(recorder, timeout_s)
            results[name] = _baseline(spec, other, workload, recorder, weights, timeout_s, name)
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
    """What went wrong with a serving in which every request failed, or None."""
    others = ((f" of the {name.replace('_', ' ')}", results.get(name, {})) for name in BASELINES)
    for name, served in (("", results), *others):
        if served.get("num_failed") and served["num_failed"] == served["num_finished"]:
            return f"all {served['num_failed']} requests{name} failed: {served['failures'][0]}"
    return None


def _early_end(error: BaseException) -> tuple[str, Outcome | None]:
    """Return (cause for the manifest, outcome) of a run that raised; outcome None: re-raise the error."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", Outcome(130)
        case SystemExit():  # SIGTERM, as converted by the entry point
            return "terminated", Outcome(int(error.code or 0))
    cause = next(iter(str(error).splitlines()), "")
    if isinstance(error, EnvironmentProblem):
        return cause, Outcome(EARLY_END, cause)
    if isinstance(error, KvplanError):  # an input error stays one, even if only the engine could detect it
        return cause, None
    if isinstance(error, RuntimeError) and _is_of_the_device(error):
        return cause, Outcome(EARLY_END, cause)
    return f"{type(error).__name__}: {cause}", None


def _is_of_the_device(error: RuntimeError) -> bool:
    """True if torch failed because of the device (out of memory, GPU lost), not because of a bug."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CUDA" in str(error)


def _end(recorder: Recorder, status: Status, cause: str | None) -> None:
    recorder.deadline_s = None
    recorder.stop()
    recorder.finish(status, cause)


def _set_deadline(recorder: Recorder, timeout_s: float | None) -> None:
    """Restart the deadline for the next phase: the user's limit plus some time to finish on its own."""
    recorder.deadline_s = None if timeout_s is None else recorder.now_s + timeout_s + HANGS_AFTER_S


def _run(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
    snapshot: Path | None,
    baselines: Sequence[str],
) -> dict[str, Any]:
    """Start the engine and serve the workload; returns the results for the manifest."""
    recorder.enter("context")
    if recorder.probe.device.type == "cuda":
        torch.cuda.init()
        torch.zeros(1, device=recorder.probe.device)
        torch.cuda.synchronize(recorder.probe.device)
    with _memory_history(snapshot):
        engine = Engine(spec if weights is None else weights, config, on_stage=recorder.enter)
        _load_adapters(engine, workload)
        recorder.take()
        memory, writer = engine.memory_report(), recorder.writer
        inputs: dict[str, Any] = {**writer.manifest.get("inputs", {})}
        inputs["total"] = memory.total  # CUDA's, not the driver's
        if engine.runner.host is not None and inputs.get("max_blocks") is not None:
            inputs["max_blocks"] = min(inputs["max_blocks"], engine.runner.host.size // memory.block_bytes)
        graphs = {} if engine.runner.graphs is None else engine.runner.graphs.num_bytes
        writer.update(
            memory={name: size for name, size in asdict(memory).items() if name != "fallbacks"},
            groups=len(engine.runner.groups), inputs=inputs,
            graph_bytes={str(size): taken for size, taken in graphs.items()},
        )  # fmt: skip
        recorder.torch_tensors = memory.weights + memory.buffers + memory.kv_cache + memory.lora
        refuse_small_pool(
            tuple(group.rule for group in engine.runner.groups), config, workload, memory.num_blocks, baselines
        )
        served = _serve(engine, workload, recorder, timeout_s)
        recorder.enter("drained")
        if engine.tiers is not None:
            engine.close()  # finishes the copies
            served["offload"] = _offload(engine.tiers)
    return served


def _load_adapters(engine: Engine, workload: Workload) -> None:
    for name, path in workload.adapters.items():
        engine.load_adapter(name, path)


def _offload(tiers: Tiers[HostTier]) -> Offload:
    stats, copied, disk = tiers.external_cache_stats, tiers.host.num_bytes, tiers.host.disk
    files: Files = {}
    if disk is not None:
        sizes = [path.stat().st_size for path in disk.directory.glob("*/*.g*")]
        space = disk.num_chunks * (disk.chunk_bytes + HEADER_BYTES)
        files = {"disk_space": space, "num_files": len(sizes), "disk_files": sum(sizes)}
    return {
        **files,
        "memory": tiers.host.memory.nbytes,
        "looked_up_tokens": stats.queries,
        "loaded_tokens": stats.hits,
        "stored": copied["store"],
        "loaded": copied["load"],
        "saved": copied["save"],
        "fetched": copied["fetch"],
    }


def _baseline(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    recorder: Recorder,
    weights: Path | None,
    timeout_s: float | None,
    name: str,
) -> dict[str, Any]:
    """Serve the same workload in another engine; its samples belong to the stage of this name."""
    recorder.enter_baseline(name, config.allocator)
    gc.collect()  # the first engine's tensors, then torch's cached memory
    if recorder.probe.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(spec if weights is None else weights, config)
    _load_adapters(engine, workload)
    memory = engine.memory_report()
    recorder.torch_tensors = memory.weights + memory.buffers + memory.kv_cache + memory.lora
    served = _serve(engine, workload, recorder, timeout_s, name)
    recorder.take()  # after the last step: the timer's last sample may be earlier
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


# --- serving --------------------------------------------------------------------------------------------------------


def refuse_small_pool(
    groups: Sequence[Group], config: EngineConfig, workload: Workload, num_blocks: int, baselines: Sequence[str]
) -> None:
    """Raise UsageError if the longest request does not fit into the whole pool with any of the allocators."""
    num_tokens = workload.longest
    for allocator in dict.fromkeys((config.allocator, *baselines)):
        if allocator in ("contiguous", "static"):
            needed = sum(group.table_len(config.max_model_len or num_tokens) for group in groups)
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
                f"raise --num-blocks to {needed + 1}, or shorten the requests",
            )


def blocks_needed(groups: Sequence[Group], config: EngineConfig, request: PlannedRequest) -> int:
    """Blocks that a request needs if it has the paged pool to itself: the larger of admission and its peak."""
    prompt, budget = request.prompt_tokens, config.max_num_batched_tokens
    end = prompt + request.output_tokens - 1  # the last token's KV is never computed
    limit = config.max_model_len or end + 1
    end = min(limit, end + config.rows_per_seq - 1)  # drafts have slots too, also those past the last token

    def blocks(start: int, stop: int) -> int:
        """Blocks in use while the tokens from start to stop are computed."""
        return sum(cdiv(stop, g.block_size) - g.num_skipped_tokens(start) // g.block_size for g in groups)

    def admitted(group: Group) -> int:
        return min(cdiv(prompt, group.block_size), group.max_blocks_held(limit, budget))

    reserved = sum(map(admitted, groups)) if config.reserve_full_prompt else 0
    if not any(isinstance(group, WindowGroup) for group in groups):
        return max(reserved, blocks(0, end))
    chunks = range(0, prompt, budget)
    # Decoding peaks within the last block_size steps: windows repeat with that period, and nothing else shrinks.
    last = range(max(prompt, end - config.block_size), end)
    return max(
        reserved,
        max(blocks(start, min(prompt, start + budget)) for start in chunks),
        max((blocks(start, start + 1) for start in last), default=0),
    )


class Feed:
    """The requests as they come due: each once, at its arrival; with a duration, again whenever none waits."""

    def __init__(self, workload: Workload, max_num_seqs: int) -> None:
        self.duration_s, self.max_num_seqs = workload.duration_s, max_num_seqs
        self.num_requests = len(workload.requests)
        self._first = list(reversed(workload.requests))  # still to come, reversed: the next one is last
        self._again = cycle(workload.requests)

    def due(self, elapsed: float, num_running: int, num_waiting: int) -> list[PlannedRequest]:
        """Requests to send now. Repeats only fill the batch: a growing queue would distort the measurement."""
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
    """Progress of serving the workload: `results` are valid at any moment, in case it ends early.

    baseline  name of the results, by its allocator; None: they are the run's own
    end_s     when all had finished, in time.monotonic's clock, or None before
    """

    workload: Workload
    allocator: str
    baseline: str | None
    stats: Stats  # after the last step
    begin_s: float = field(default_factory=time.monotonic)
    end_s: float | None = None
    num_finished: int = 0
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)
    most_running: int = 0
    densest: Stats | None = None  # of all steps, the stats at the fullest pool

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic() if self.end_s is None else self.end_s) - self.begin_s

    def count(self, outputs: Sequence[RequestOutput], stats: Stats) -> None:
        """Count a step."""
        errors = [output.error for output in outputs if output.error]
        self.num_finished += len(outputs)
        self.num_failed += len(errors)
        self.failures += errors[: 20 - len(self.failures)]
        # Requests that finished in this step were running in it; the scheduler no longer counts them.
        self.most_running = max(self.most_running, stats.num_requests_running + len(outputs) - len(errors))
        if self.densest is None or stats.num_filled_slots > self.densest.num_filled_slots:
            self.densest = stats
        self.stats = stats

    def results(self) -> dict[str, Any]:
        """Results for the manifest, marked as partial if the serving has not finished."""
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
        return served if self.baseline is None else {"allocator": self.allocator, **served}

    def progress(self) -> dict[str, Any]:
        return _progress(self.workload, self.num_finished, self.stats.generation_tokens, self.elapsed_s)


def _serve(
    engine: Engine, workload: Workload, recorder: Recorder, timeout_s: float | None, baseline: str | None = None
) -> dict[str, Any]:
    """Send the requests as they come due and step until all have finished; mark stages in the first serving only."""
    source = random.Random(workload.seed)
    prefix = [source.randrange(engine.spec.vocab_size) for _ in range(workload.shared_prefix)]
    feed = Feed(workload, engine.config.num_seqs)
    adapters = cycle(workload.adapters or (None,))
    _set_deadline(recorder, timeout_s)
    if baseline is None:
        recorder.enter("prefill")
        # A stage is named before its batch runs; prefill lasts until the last prompt token in flight is processed.
        engine.on_launch = lambda num_prompt_tokens: recorder.mark("prefill" if num_prompt_tokens else "decode")
    serving = recorder.serving = Serving(workload, engine.config.allocator, baseline, engine.stats())
    waited = waited_s()
    record = recorder.recording.begin(serving.allocator, engine.scheduler, serving.begin_s - recorder.start_s)
    if record != ServingRecord():
        engine.on_schedule = lambda batch: record.schedule(engine.scheduler, batch, serving.elapsed_s)
    while True:
        elapsed = _agreed(engine, serving.elapsed_s)
        if timeout_s is not None and elapsed > timeout_s:
            raise EnvironmentProblem(
                "profile", f"not done after {timeout_s:g} s (--timeout)", "raise it, or run fewer requests"
            )
        for request in feed.due(elapsed, serving.stats.num_requests_running, serving.stats.num_requests_waiting):
            sent = _send(engine, request, prefix, source, next(adapters))
            record.arrive(sent.seq, serving.elapsed_s)
        if not engine.has_unfinished:
            if feed.is_over(elapsed):
                break
            time.sleep(0.001)
            continue
        serving.count(engine.step(), engine.stats())
        record.update(engine.scheduler, serving.elapsed_s)
    serving.end_s = time.monotonic()
    if (share := (waited_s() - waited) / (serving.elapsed_s or 1)) > BUSY:
        recorder.warn(
            f"other processes had the processors for {share:.0%} of the time with the {serving.allocator} allocator: "
            "its speed is not comparable"
        )
    recorder.deadline_s, engine.on_launch, engine.on_schedule = None, None, None
    if serving.num_failed:
        recorder.warn(f"{serving.num_failed} of {serving.num_finished} requests failed ({serving.failures[0]})")
    return serving.results()


def _send(
    engine: Engine, request: PlannedRequest, prefix: list[int], source: random.Random, adapter: str | None
) -> Request:
    """Queue one request: the shared prefix plus random tokens."""
    fresh = max(1, request.prompt_tokens - len(prefix))
    prompt = prefix[: request.prompt_tokens - 1] + [source.randrange(engine.spec.vocab_size) for _ in range(fresh)]
    params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
    return engine.submit(prompt[: request.prompt_tokens], params, adapter=adapter)


def _agreed(engine: Engine, elapsed: float) -> float:
    """Rank 0's clock: ranks that decided by their own would diverge and wait for each other forever."""
    tp = engine.runner.tp
    if tp.size == 1:
        return elapsed
    return float(tp.broadcast(torch.tensor(elapsed, dtype=torch.float64, device=engine.device)))


def _progress(workload: Workload, num_finished: int, num_tokens: int, elapsed: float) -> dict[str, Any]:
    """Progress for the live view: finished and total requests (None: no fixed number), and seconds left."""
    if workload.duration_s is not None:
        return {"num_finished": num_finished, "num_requests": None, "eta_s": max(0.0, workload.duration_s - elapsed)}
    total = sum(request.output_tokens for request in workload.requests)
    left = elapsed * (total - num_tokens) / num_tokens if 0 < num_tokens < total else None
    return {"num_finished": num_finished, "num_requests": len(workload.requests), "eta_s": left}


# --- ranks ----------------------------------------------------------------------------------------------------------


class SilentWriter(RunWriter):
    """Replaces the run directory on ranks other than 0: keeps the manifest and writes nothing."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, cast(Manifest, dict(manifest))

    def update(self, **entries: Any) -> None:
        self.manifest |= cast(Manifest, entries)

    def sample(self, values: Mapping[str, Any]) -> None:
        """Do nothing: only rank 0 writes samples."""

    def event(self, at_s: float, kind: str, **values: Any) -> None:
        """Do nothing: only rank 0 writes events."""

    def finish(self, status: Status, cause: str | None = None) -> None:
        self.update(status=status, cause=cause)


# --- the machine ----------------------------------------------------------------------------------------------------


def environment(nvml: Nvml | None, gpu: Device | None) -> dict[str, Any]:
    """Versions and hardware, for the manifest."""
    return {
        "kvplan": release(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: release(name) for name in PACKAGES},
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


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[tuple[Nvml | None, Device | None]]:
    """Yield NVML and the device torch computes on; (None, None) on a CPU."""
    if device.type != "cuda":
        yield None, None
        return
    with open_nvml() as nvml:
        yield nvml, nvml.visible_device(device.index or 0)
