"""Find the launch parameters of the attention kernels on this GPU: the table engine/kernels/tiles.json.

    python -m benchmarks.tune_kernels OUT [--budget 300] [--device cuda:0] [--kernels decode,latent] [--table FILE]

For each shape that models have, the most used first: every candidate is compiled, and skipped where it spills registers
or exceeds the shared memory; then its answers are held against float64; only then it is timed, with CUDA graphs, on KV
that is read in turn and larger than any cache, with as many programs per multiprocessor as its compiled code lets run
there at once, four at most, as the default tiles have them. Of the three fastest that number is varied. A candidate
takes the place of the default tile where its slow times are below the default's fast ones. OUT gets tuning.csv, with
everything that was tried, and tiles.json: the checked-in entries with the new ones over them.
`--table engine/kernels/tiles.json` writes them there instead.

Compiling and timing are processes of their own: one that crashes, or hangs, costs the candidate it was at. Several
compile ahead of the one that times; what a GPU takes for a graph does not depend on them.

With --device cpu a few tiny candidates run in Triton's interpreter. That tries the script; the file it leaves says so,
and the engine does not read it.

Exit codes: 0 done, 2 usage or a damaged table, 3 no GPU, 4 the budget ended before the first entry.
"""

import argparse
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, get_args
from unittest import mock

import torch

from benchmarks.gpu import machine
from benchmarks.gpu_stages.evidence import write_json
from benchmarks.gpu_stages.runner import ROOT, Machine, Result, write_rows
from benchmarks.gpu_stages.stage import Row, row
from benchmarks.gpu_stages.timing import seconds_per_call
from benchmarks.kernel_bench.contenders import own_kernels, poisoned_answer
from benchmarks.kernel_bench.problems import (
    GEMMA_12B,
    GPT_OSS,
    LLAMA_8B,
    MOST_WRONG,
    V2_LITE,
    V3,
    Case,
    Expected,
    Heads,
    Problem,
    expected_of,
    problem_of,
)
from engine.kernels import checks, configs
from engine.kernels.tiles import AttentionTile, Entry, Kernel, Key, Trial, document_of, read_tiles
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from tests.support.compile_kernels import MULTIPROCESSORS, CompiledKernel

TRIAL = "kvplan/tiles-trial@1"  # what the engine refuses to read: no GPU has timed it
NO_GPU = "none: Triton's interpreter"
REPEATS = 10
ANSWER_S = 120.0  # the longest that compiling or timing one candidate may take
VARIED = 3  # of how many candidates the number of programs is varied
PROGRAMS = (1, 2, 4, 6)  # to what
MOST_PROGRAMS = 4  # that a candidate begins with: the default tiles have no more (engine/kernels/configs.py)
BUDGET_ENDED, INTERRUPTED, TERMINATED = 4, 130, 143


# --- what is tuned ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of the table to be, and the cases whose times decide: their geometric mean.

    programs  counts per multiprocessor to be tried; none where the kernel does not take one
    """

    kernel: Kernel
    cases: tuple[Case, ...]
    space: tuple[AttentionTile, ...]
    programs: tuple[int, ...] = ()

    def key(self, arch: int) -> Key:
        case = self.cases[0]
        kind = configs.kind_of(case.stored, case.compute)
        return Key(self.kernel, arch, case.heads.head_dim, case.heads.group, kind, case.block_size)

    def default(self, arch: int) -> AttentionTile:
        """The tile that is used without an entry."""
        case = self.cases[0]
        dtypes = (case.stored, case.compute)
        match self.kernel:
            case "decode":
                return configs.decode_tile(arch, case.heads.head_dim, *dtypes)
            case "prefill":
                return configs.prefill_tile(arch, case.heads.head_dim, *dtypes, case.length * case.heads.group)
            case "latent":
                return configs.latent_tile(arch, case.heads.heads, case.compute)

    def candidates(self, arch: int) -> list[AttentionTile]:
        """The default first, none twice."""
        return list(dict.fromkeys([self.default(arch), *self.space]))


def targets(*, is_small: bool) -> list[Target]:
    return _small_targets() if is_small else list(_targets())


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DECODED = ((32, 4096), (1, 32_768), (128, 512))
QWEN_7B, QWEN_30B = Heads("qwen2.5-7b", 28, 4, 128), Heads("qwen3-30b-a3b", 32, 4, 128)


def _targets() -> Iterator[Target]:
    """Planner's default block size first, then the others."""
    for stored in (BF16, FP8):
        yield _decode(LLAMA_8B, stored, 16)
    yield _prefill(LLAMA_8B, BF16, 16)
    yield _latent(V2_LITE, 64)
    for heads, stored in product((QWEN_30B, GPT_OSS, GEMMA_12B, QWEN_7B), (BF16, FP8)):
        yield _decode(heads, stored, 16)
    for block_size, stored in product((32, 64, 128), (BF16, FP8)):
        yield _decode(LLAMA_8B, stored, block_size)
    yield _prefill(LLAMA_8B, FP8, 16)
    yield _latent(V3, 64)
    for heads in (QWEN_30B, GPT_OSS, GEMMA_12B, QWEN_7B):
        yield _prefill(heads, BF16, 16)


def _decode(heads: Heads, stored: torch.dtype, block_size: int) -> Target:
    cases = tuple(Case("decode", n, length, BF16, stored, block_size, heads) for n, length in DECODED)
    first = ((64, 4, 3), (64, 8, 3), (32, 4, 3), (128, 8, 2))  # those of which compiled registers promise most
    sizes = dict.fromkeys([*first, *product((64, 32, 128), (4, 8), (3, 2, 4))])
    return Target("decode", cases, tuple(AttentionTile(*size) for size in sizes), PROGRAMS)


def _prefill(heads: Heads, stored: torch.dtype, block_size: int) -> Target:
    """128 rows take 8 warps and 64 take 4: other pairs spill."""
    cases = tuple(Case("prefill", n, length, BF16, stored, block_size, heads) for n, length in ((1, 8192), (8, 1024)))
    sizes = product(((128, 8), (64, 4)), (64, 128, 32), (3, 2))
    space = tuple(AttentionTile(n, warps, stages, m) for (m, warps), n, stages in sizes if m >= heads.group)
    return Target("prefill", cases, space)


def _latent(heads: Heads, block_size: int) -> Target:
    cases = tuple(
        Case("latent", n, length, BF16, BF16, block_size, heads) for n, length in ((64, 4096), (1, 32_768), (128, 512))
    )
    rows = (16,) if heads.heads <= 16 else (64, 32, 16)
    space = tuple(AttentionTile(n, 8, stages, m) for m, n, stages in product(rows, (64, 32, 16), (3, 2)))
    return Target("latent", cases, space, PROGRAMS)


def _small_targets() -> list[Target]:
    """What an interpreter gets through in seconds; the last tile of decode exceeds any shared memory."""
    small, latent = Heads("small", 4, 2, 64), Heads("small-mla", 4, 1, 576)
    return [
        Target(
            "decode",
            (Case("decode", 2, 20, BF16, BF16, 16, small), Case("decode", 1, 40, BF16, BF16, 16, small)),
            (AttentionTile(32, 4, 2), AttentionTile(256, 4, 8)),
            (2,),
        ),
        Target("prefill", (Case("prefill", 1, 20, BF16, BF16, 16, small),), (AttentionTile(32, 4, 2, 64),)),
        Target("latent", (Case("latent", 1, 40, BF16, BF16, 64, latent),), (AttentionTile(16, 8, 2),), (2,)),
    ]


@contextmanager
def launched_with(tile: AttentionTile) -> Iterator[None]:
    """Within it every launcher takes this tile, whatever it is for."""
    with ExitStack() as stack:
        for name in ("decode_tile", "prefill_tile", "latent_tile"):
            stack.enter_context(mock.patch.object(configs, name, return_value=tile))
        stack.callback(checks.forget)
        checks.forget()
        yield


# --- the two processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a candidate's kernels take at most, of registers, bytes of stack and bytes of shared memory."""

    registers: int
    spills: int
    shared: int

    def fault(self, arch: int) -> str | None:
        """What keeps it from running well, or at all."""
        if self.spills > 0:
            return f"spills {self.spills} bytes"
        if self.shared > configs.SHARED_MEMORY[arch]:
            return f"takes {self.shared} bytes of shared memory of {configs.SHARED_MEMORY[arch]}"
        if self.registers < 16:  # what is left where the compiler gives up without an error
            return f"compiles to nothing ({self.registers} registers)"
        return None

    def programs(self, arch: int, num_warps: int) -> int:
        """How many run at once on one multiprocessor, from 1 to MOST_PROGRAMS; of what has no fault."""
        code = CompiledKernel("", "", f"w{num_warps}", _counted(arch), self.registers, self.spills, self.shared, 0, "")
        return max(1, min(MOST_PROGRAMS, code.programs))


def _counted(arch: int) -> int:
    """The architecture itself or, where its multiprocessor is not in the table, one with as much shared memory.

    Such two differ in how many programs beyond MOST_PROGRAMS they hold.
    """
    if arch in MULTIPROCESSORS:
        return arch
    return next(known for known in MULTIPROCESSORS if configs.SHARED_MEMORY[known] == configs.SHARED_MEMORY[arch])


class Compiler:
    """Compiles for an architecture, whether its GPU is here or not, and runs nothing."""

    def __init__(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        from tests.support.compile_kernels import AbsentGpu

        self._gpu = AbsentGpu()
        triton.runtime.driver.set_active(self._gpu)
        self._kernels: list[Any] = []
        plain_run = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._kernels.append(plain_run(kernel, *args, grid=grid, warmup=True, **options))

        JITFunction.run = run

    def answer(self, target: Target, tile: AttentionTile, arch: int) -> dict[str, Any]:
        from engine.kernels import triton_backend

        self._gpu.arch = arch
        checks.forget()
        self._kernels.clear()
        case = replace(target.cases[0], num_seqs=2, length=256)
        tiles = [tile, replace(tile, block_m=64)] if target.kernel == "prefill" and tile.block_m > 64 else [tile]
        problem = problem_of(case, torch.device("cpu"))
        for shape in tiles:  # a short chunk takes half of a prefill's tile
            with launched_with(shape):
                own_kernels(triton_backend, problem).calls[0]()
        compiled = [resources(kernel) for kernel in self._kernels]
        return asdict(Compiled(*(max(values) for values in zip(*compiled, strict=True))))


def resources(kernel: Any) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of shared memory) of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            registers, stack = cuobjdump_usage(kernel, Path(folder))
        except (OSError, RuntimeError, subprocess.CalledProcessError):  # not every installation has it
            registers, stack = ptxas_usage(kernel, Path(folder))
    return registers, stack, int(kernel.metadata.shared)


def cuobjdump_usage(kernel: Any, folder: Path) -> tuple[int, int]:
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    done = _run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)])
    return _counts(r"REG:(\d+) STACK:(\d+)", done.stdout)


def ptxas_usage(kernel: Any, folder: Path) -> tuple[int, int]:
    """From the assembler, without which nothing would have been compiled."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx, path = kernel.asm["ptx"], folder / "kernel.ptx"
    path.write_text(ptx)
    target = re.search(r"^\.target (\S+?),?$", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("ptx: names no target")
    tool = get_ptxas(kernel.metadata.target.arch).path
    done = _run([tool, "-v", f"--gpu-name={target[1]}", str(path), "-o", str(folder / "again.cubin")])
    (registers,) = _counts(r"Used (\d+) registers", done.stderr)
    (stack,) = _counts(r"(\d+) bytes stack frame", done.stderr)
    return registers, stack


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _counts(pattern: str, text: str) -> Any:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern}: the compiler does not say ({text[:80]!r})")
    return tuple(map(int, match.groups()))


class Timer:
    """Runs a candidate: first the right answers, then the times."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # what kernels are launched on
        self._device = device
        self._target: Target | None = None
        self._problems: list[tuple[Problem, Expected]] = []

    def answer(self, target: Target, tile: AttentionTile, arch: int) -> dict[str, Any]:
        """{"error": the worst relative L2 error, "us": per repeat the geometric mean of the cases'}."""
        from engine.kernels import triton_backend

        if target is not self._target:
            self._problems = []  # before the next ones take their memory
            self._problems = [(p, expected_of(p)) for p in (problem_of(case, self._device) for case in target.cases)]
            self._target = target
        errors, seconds = [], []
        with launched_with(tile):
            for problem, expected in self._problems:
                built = own_kernels(triton_backend, problem)
                errors.append(expected.error(poisoned_answer(built)))
                if not errors[-1] <= MOST_WRONG[problem.case.compute]:
                    return {"error": errors[-1] if math.isfinite(errors[-1]) else -1.0}
                repeats = REPEATS if self._device.type == "cuda" else 1
                seconds.append(seconds_per_call(built.calls, self._device, repeats))
        us = [math.exp(sum(map(math.log, times)) / len(times)) * 1e6 for times in zip(*seconds, strict=True)]
        return {"error": max(errors), "us": us}


def serve(kind: str, device: torch.device) -> None:
    """Answer one line per candidate: [index of the target, tile, architecture]; the first line asks for the arch."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    own = Compiler() if kind == "compile" else Timer(device)
    known = targets(is_small=device.type == "cpu")
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question is None:
                answer = {"arch": configs.arch()}
            else:
                index, tile, arch = question
                answer = own.answer(known[index], AttentionTile(**tile), arch)
        except Exception as error:
            answer = {"fault": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"}
        print(json.dumps(answer), file=out, flush=True)


class Worker:
    """One of the two processes; started when it is first asked, and again after it ended."""

    def __init__(self, kind: str, device: str, log: Path) -> None:
        self._argv = [sys.executable, "-m", "benchmarks.tune_kernels", "--serve", kind, "--device", device]
        on_gpu = device != "cpu" or kind == "compile"
        self._env = {**os.environ, "TRITON_INTERPRET": "0" if on_gpu else "1", "OMP_NUM_THREADS": "1"}
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """Its answer; {"fault": what} where it ends or does not answer in time, which ends it."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended("ended")
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not ready.select(max(1.0, limit_s)):
                return self._ended(f"no answer in {max(1.0, limit_s):.0f} s")
        line = process.stdout.readline()
        if not line:
            return self._ended("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    text=True,
                )  # fmt: skip
        return self._process

    def _ended(self, how: str) -> dict[str, Any]:
        self.close()
        return {"fault": f"the process {how}" if how == "ended" else how}

    def kill(self) -> None:
        """End the process; who asks it is told so."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self.kill()
        if self._process is not None:
            self._process.communicate()
            self._process = None


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate: what it takes, how wrong it is, how long it takes (us), or why it has no time."""

    target: Target
    tile: AttentionTile
    outcome: str
    compiled: Compiled | None = None
    error: float | None = None
    us: Row | None = None


class Compilers:
    """Several compiling processes; each compiles one tile at a time, in the order asked for, and none twice."""

    def __init__(self, workers: Sequence[Worker], arch: int) -> None:
        self._workers, self._arch = workers, arch
        self._idle = SimpleQueue[Worker]()
        for worker in workers:
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(len(workers))
        self._answers: dict[tuple[int, AttentionTile], Future[dict[str, Any]]] = {}

    def ask(self, index: int, tile: AttentionTile) -> "Future[dict[str, Any]]":
        """The answer to be."""
        tile = _compiled_tile(tile)
        if (index, tile) not in self._answers:
            self._answers[index, tile] = self._pool.submit(self._compile, [index, asdict(tile), self._arch])
        return self._answers[index, tile]

    def _compile(self, question: Any) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(question)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Drop what was not begun, and end what was."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown()  # whoever waits for an answer now has none
        for worker in self._workers:
            worker.close()


@dataclass(slots=True)
class Search:
    """One call: its processes, how long it may go on, and all that was tried."""

    compilers: Compilers
    timer: Worker
    arch: int
    known: list[Target]
    until_s: float
    tried: list[Tried] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def compile_ahead(self, target: Target) -> None:
        for tile in target.candidates(self.arch):
            self.compilers.ask(self.known.index(target), tile)

    def best_of(self, target: Target) -> tuple[Tried, Tried] | None:
        """(the fastest, the default tile), None where the time is up before both are known."""
        measured: dict[AttentionTile, Tried] = {}
        for tile in target.candidates(self.arch):
            if self.left_s <= 0:
                return None
            outcome = self._made(target, tile)
            if measured and target.programs:  # the default has its own number
                tile = self._filling(tile, outcome)
            if tile not in measured:
                measured[tile] = self.candidate(target, tile, outcome)
        default = next(iter(measured.values()))
        for tile in self._varied(target, measured.values()):
            if self.left_s <= 0:
                break
            if tile not in measured:
                measured[tile] = self.candidate(target, tile, self._made(target, tile))
        timed = [value for value in measured.values() if value.us is not None]
        if not timed or default.us is None:
            return None
        return fastest(timed, default), default

    def _filling(self, tile: AttentionTile, outcome: Compiled | str) -> AttentionTile:
        """A tile with as many programs as fit a multiprocessor; unchanged where it cannot run."""
        if isinstance(outcome, str) or outcome.fault(self.arch):
            return tile
        return replace(tile, programs=outcome.programs(self.arch, tile.num_warps))

    def _varied(self, target: Target, measured: Iterable[Tried]) -> list[AttentionTile]:
        """The fastest tiles, each of them once, with every number of programs."""
        timed = sorted((measurement for measurement in measured if measurement.us is not None), key=_us)
        tiles = dict.fromkeys(_compiled_tile(timing.tile) for timing in timed)
        return [replace(tile, programs=count) for tile in list(tiles)[:VARIED] for count in target.programs]

    def candidate(self, target: Target, tile: AttentionTile, outcome: Compiled | str) -> Tried:
        tried = self._candidate(target, tile, outcome)
        self.tried.append(tried)
        time_text = f"{tried.us.value:9.1f} us" if tried.us else "           "
        print(f"{name_of(target, self.arch):<36} {name_of_tile(tile):<34} {time_text}  {tried.outcome}", flush=True)
        return tried

    def _made(self, target: Target, tile: AttentionTile) -> Compiled | str:
        """What a tile compiles to, or why it does not."""
        try:
            answer = self.compilers.ask(self.known.index(target), tile).result(max(1.0, self.left_s))
        except TimeoutError:
            return "was not compiled in time"
        return f"does not compile: {answer['fault']}" if "fault" in answer else Compiled(**answer)

    def _candidate(self, target: Target, tile: AttentionTile, outcome: Compiled | str) -> Tried:
        if isinstance(outcome, str):
            return Tried(target, tile, outcome)
        if fault := outcome.fault(self.arch):
            return Tried(target, tile, fault, outcome)
        answer = self.timer.ask([self.known.index(target), asdict(tile), self.arch], min(ANSWER_S, self.left_s))
        if "fault" in answer:
            self.timer.close()  # after a stray access a process can do nothing more on a GPU
            return Tried(target, tile, f"does not run: {answer['fault']}", outcome)
        if "us" not in answer:
            return Tried(target, tile, "its answer is wrong", outcome, answer["error"])
        return Tried(target, tile, "timed", outcome, answer["error"], row("", "us", answer["us"]))


def _compiled_tile(tile: AttentionTile) -> AttentionTile:
    """The same for all that are one in compiled code: how many programs run at once changes nothing about it."""
    return replace(tile, programs=configs.PROGRAMS_PER_PROCESSOR)


def _us(tried: Tried) -> float:
    return math.inf if tried.us is None else tried.us.value


def fastest(timed: Sequence[Tried], default: Tried) -> Tried:
    """The least time, where it is less than the default's by more than both scatter; else the default."""
    best = min(timed, key=_us)
    assert best.us is not None
    assert default.us is not None
    return best if best.us.p80 < default.us.p20 else default


def name_of(target: Target, arch: int) -> str:
    key = target.key(arch)
    return f"{key.kernel} {key.head_dim}/{key.group} {key.kv} block {key.block_size} sm_{key.arch}"


def name_of_tile(tile: AttentionTile) -> str:
    masked = " masked" if tile.mask_all else ""
    return f"M {tile.block_m} N {tile.block_n} w{tile.num_warps} s{tile.num_stages} programs {tile.programs}{masked}"


# --- what is kept -----------------------------------------------------------------------------------------------------


def csv_row(tried: Tried, arch: int) -> dict[str, Any]:
    target, us = tried.target, tried.us
    compiled = asdict(tried.compiled) if tried.compiled else dict.fromkeys(("registers", "spills", "shared"))
    return {
        "metric": f"{name_of(target, arch)}, {name_of_tile(tried.tile)}",
        "unit": "us",
        **{name: getattr(us, name) if us else None for name in ("value", "p20", "p80", "n")},
        "model": target.cases[0].heads.model,
        **asdict(tried.tile),
        **compiled,
        "error": tried.error,
        "outcome": tried.outcome,
    }


def entry_of(best: Tried, default: Tried, arch: int, where: Machine) -> Entry:
    assert best.us is not None
    assert default.us is not None
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    gpu = NO_GPU if where.device == "cpu" else where.device
    best_trial = Trial(gpu, where.commit or "unknown", utc, round(best.us.value, 2), round(default.us.value, 2))
    return Entry(best.target.key(arch), best.tile, best_trial)


def write_table(path: Path, entries: dict[Key, Entry], *, is_trial: bool) -> None:
    """Replace the table as a whole; of a trial it is one that the engine does not read."""
    document = document_of(entries)
    write_json(path, {**document, "schema": TRIAL} if is_trial else document)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call writes, and whether a GPU's times are in it."""

    out: Path
    table: Path
    where: Machine

    @property
    def is_trial(self) -> bool:
        return self.where.device == "cpu"

    def known_entries(self) -> dict[Key, Entry]:
        """What the table has already; without one, what is checked in."""
        if self.is_trial:
            return {}
        return read_tiles(self.table if self.table.exists() else configs.TILES)


def tune(place: Place, device: str, kernels: Sequence[str], until_s: float) -> tuple[Search, dict[Key, Entry]]:
    """Search each target in turn; the table and the CSV are written after each. Returns the new entries."""
    log = place.out / "workers.log"
    timer = Worker("time", device, log)
    entries, new = place.known_entries(), dict[Key, Entry]()
    compilers: Compilers | None = None
    try:
        answer = timer.ask(None)
        if "arch" not in answer:
            raise EnvironmentProblem(f"{device}: cannot be timed on ({answer['fault']}); see {log.name}")
        workers = [Worker("compile", device, log) for _ in range(num_compilers())]
        compilers = Compilers(workers, answer["arch"])
        search = Search(compilers, timer, answer["arch"], targets(is_small=device == "cpu"), until_s)
        chosen = [target for target in search.known if target.kernel in kernels]
        for target in chosen:
            search.compile_ahead(target)
        for target in chosen:
            if search.left_s <= 0:
                break
            try:
                best = search.best_of(target)
            finally:
                keep(place, search)
            if best is not None:
                entry = entry_of(*best, search.arch, place.where)
                new[entry.key] = entries[entry.key] = entry
                write_table(place.table, entries, is_trial=place.is_trial)
    finally:
        timer.close()
        if compilers is not None:
            compilers.close()
    return search, new


def num_compilers() -> int:
    """Half of the cores, for the processes that compile ahead."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def keep(place: Place, search: Search) -> None:
    """Write tuning.csv: everything that was tried."""
    rows = [csv_row(attempt, search.arch) for attempt in search.tried]
    if rows:
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        result = Result("tune", "", "ok", rows=rows, commit=place.where.commit, utc=utc)
        write_rows(place.out / "tuning.csv", result, place.where)


def summary(search: Search, new: dict[Key, Entry]) -> str:
    """What came out, in a line."""
    gains = [1 - entry.trial.us / entry.trial.default_us for entry in new.values()]
    count = f"{len(search.tried)} candidates, {len(new)} entries"
    if any(entry.trial.gpu == NO_GPU for entry in new.values()):
        return f"{count} of a trial without a GPU"
    return f"{count}, {max(gains):.0%} faster than the default tile at most" if gains else count


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder for the CSV and the table")
    own.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="for all of it (%(default)s)")
    own.add_argument("--device", default="cuda:0", help="cuda:N or cpu (%(default)s)")
    own.add_argument("--kernels", default="decode,prefill,latent", help="these alone (%(default)s)")
    own.add_argument("--table", type=Path, metavar="FILE", help="the table to write (OUT/tiles.json)")
    own.add_argument("--commit", help="of the code, where there is no repository to ask")
    own.add_argument("--serve", choices=("compile", "time"), help=argparse.SUPPRESS)  # one of its own processes
    return own


def run(options: argparse.Namespace, started_s: float) -> int:
    if options.out is None:
        raise UsageError("OUT: missing; name a folder for the results")
    if not options.budget > 0:
        raise UsageError(f"--budget: must be above 0 ({options.budget:g})")
    kernels = options.kernels.split(",")
    unknown = [name for name in kernels if name not in get_args(Kernel)]
    if unknown:
        raise UsageError(f"--kernels: {unknown[0]!r} is none; there are {', '.join(get_args(Kernel))}")
    table = options.table or options.out / "tiles.json"
    if options.device == "cpu" and table.resolve() == configs.TILES.resolve():
        raise UsageError(f"--table: {table} is what the engine reads, and a CPU has timed nothing; name another file")
    place = Place(options.out, table, machine(options.device, options.commit))
    place.known_entries()  # a damaged table is refused before anything is timed
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        table.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"{options.out}: cannot be made ({error.strerror}); name another folder") from error
    search, new = tune(place, options.device, kernels, started_s + options.budget)
    print(summary(search, new))
    if place.is_trial:
        print("a CPU has timed nothing: this tries the script, and the engine does not read its table", file=sys.stderr)
    return 0 if new else BUDGET_ENDED


def main(argv: Sequence[str] | None = None) -> int:
    started_s = time.monotonic()
    options = parser().parse_args(argv)
    try:
        if options.serve:
            serve(options.serve, torch.device(options.device))
            return 0
        return run(options, started_s)
    except KvplanError as error:
        print(f"tune_kernels.py: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main())
