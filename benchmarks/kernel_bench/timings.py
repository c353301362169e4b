"""Contenders timed on cases: how long each takes, beside the device's best, and what that says of the goals."""

import math
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from benchmarks.goals import worst_of
from benchmarks.gpu_stages.stage import Row, Task, row
from benchmarks.gpu_stages.timing import copy_bandwidths, matmul_rates, seconds_per_call
from benchmarks.kernel_bench.cases import FP8
from benchmarks.kernel_bench.contenders import OWN, Contender, NotDone, contenders, poisoned_answer
from benchmarks.kernel_bench.problems import LLAMA_8B, MOST_WRONG, Case, Expected, Problem, expected_of, problem_of

LARGE = 64 * 2**20  # bytes of KV from which a decode should be as fast as the memory
SHARE_OF_MEMORY = 0.2  # that one case's KV may take: some peers want copies of it


@dataclass(frozen=True, slots=True)
class Rates:
    """The device's measured best: bytes read and written, and bfloat16 operations, per second."""

    copy: Row
    matmul: Row


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one contender takes for a case, and how wrong its answer is.

    error     relative L2, against float64
    beyond    of that what rounding the answer does not explain
    """

    case: Case
    who: str
    seconds: list[float]
    error: float
    beyond: float

    @property
    def typical_s(self) -> float:
        return row("", "", self.seconds).value

    def bandwidth(self, rates: Rates) -> float:
        """Share of the copy bandwidth."""
        return self.case.moved_bytes / self.typical_s / rates.copy.value


def time_contender(problem: Problem, expected: Expected, contender: Contender) -> Timing:
    """Raises NotDone where it does not do this, ValueError for a wrong answer, and whatever else goes wrong in it."""
    built = contender.build(problem)
    with torch.inference_mode():
        answer = poisoned_answer(built) if contender.name == OWN else built.answer(built.calls[0]())
    error, rounding = expected.error(answer), expected.rounding(answer.dtype)
    if not error <= MOST_WRONG[problem.case.compute]:
        raise ValueError(f"its answer is wrong by {error:.1e} (relative L2), so it has no time")
    seconds = seconds_per_call(built.calls, problem.device)
    return Timing(problem.case, contender.name, seconds, error, math.sqrt(max(0.0, error**2 - rounding**2)))


def rows_of(timing: Timing, rates: Rates) -> list[Row]:
    case, metric = timing.case, f"{timing.case}, {timing.who}"
    model = case.heads.model
    rows = [row(metric, "us", [s * 1e6 for s in timing.seconds], model)]
    if case.kind == "prefill":
        shares = [case.operations / s / rates.matmul.value for s in timing.seconds]
        rows.append(row(f"{metric}: rate", "share of matmul", shares, model))
    else:
        shares = [case.moved_bytes / s / rates.copy.value for s in timing.seconds]
        rows.append(row(f"{metric}: bandwidth", "share of copy", shares, model))
    return [*rows, row(f"{metric}: error", "relative L2", [timing.error], model)]


def beside_peers(timings: Sequence[Timing]) -> list[Row]:
    """How often our time goes into each peer's, of one case."""
    own = [timing for timing in timings if timing.who == OWN]
    return [
        row(
            f"{peer.case}, {peer.who} : {OWN}", "x the time", [peer.typical_s / own[0].typical_s], peer.case.heads.model
        )
        for peer in timings
        if own and peer.who != OWN
    ]


# --- the goals --------------------------------------------------------------------------------------------------------


def goal_numbers(timings: Sequence[Timing], rates: Rates) -> dict[str, float]:
    """What these say of the goals: of several shapes the worst."""
    llama = [t for t in timings if t.case.heads is LLAMA_8B and t.case.is_plain and t.case.block_size == 16]
    own = [t for t in llama if t.who == OWN]
    decode = [t for t in own if t.case.kind == "decode"]
    large = [t for t in decode if t.case.num_seqs > 1 and t.case.kv_bytes >= LARGE]
    wide, fp8 = [t for t in large if t.case.stored != FP8], [t for t in large if t.case.stored == FP8]
    single = [t for t in decode if t.case.num_seqs == 1 and t.case.length >= 8192 and t.case.stored != FP8]
    prefill = [t for t in own if t.case.kind == "prefill" and t.case.length == 8192 and t.case.stored != FP8]
    least = {
        "decode-bandwidth": [t.bandwidth(rates) for t in wide],
        "decode-peer": _times_as_fast(wide, llama),
        "decode-fp8-bandwidth": [t.bandwidth(rates) for t in fp8],
        "decode-single-bandwidth": [t.bandwidth(rates) for t in single if t.case.length == 131_072],
        "prefill-matmul": [t.case.operations / t.typical_s / rates.matmul.value for t in prefill],
    }
    greatest = {
        "decode-fp8-error": [t.beyond for t in decode if t.case.stored == FP8 and t.case.compute == torch.float16],
        "decode-single-peer": [1 / ratio for ratio in _times_as_fast(single, llama)],
    }
    worst = [(name, min(values)) for name, values in least.items() if values]
    return dict(worst + [(name, max(values)) for name, values in greatest.items() if values])


def _times_as_fast(own: Sequence[Timing], all_of_them: Sequence[Timing]) -> list[float]:
    """The best peer's time over ours, for each case that a peer has solved."""
    peers = [[t.typical_s for t in all_of_them if t.case == ours.case and t.who != OWN] for ours in own]
    return [min(times) / ours.typical_s for ours, times in zip(own, peers, strict=True) if times]


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Findings:
    """What is known so far; failures: what our kernels could not do.

    missing  what peers could not do, and the cases whose data do not fit, and why
    cases    those that it has come to, whatever became of them
    before   the numbers of an earlier call, to which these are added
    """

    rates: Rates
    timings: list[Timing] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "copy_bytes_per_s": self.rates.copy.value,
            "matmul_flops": self.rates.matmul.value,
            "goals": worst_of(self.before.get("goals", {}), goal_numbers(self.timings, self.rates)),
            "failures": self.before.get("failures", {}) | self.failures,
            "missing": self.before.get("missing", {}) | self.missing,
            "cases": self.cases,
        }

    @property
    def headline(self) -> str:
        ours = [line for line in self.rows if line.metric.endswith(f", {OWN}: bandwidth")]
        shares = [line.value for line in ours if line.metric.startswith("decode ")]
        speeds = f"paged decode {min(shares):.0%} to {max(shares):.0%} of the copy bandwidth" if shares else "no decode"
        failures = len(self.numbers["failures"])
        failed = f"; {failures} failed" if failures else ""
        return f"{speeds} ({self.rates.copy.value / 1e12:.2f} TB/s){failed}"


def unfit(case: Case, device: torch.device) -> str | None:
    """Why a case is none for this device."""
    if device.type == "cpu":
        return None
    if case.stored == FP8 and torch.cuda.get_device_capability(device) < (8, 9):
        return "the device has no float8"
    if case.kv_bytes > SHARE_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory:
        return f"its KV takes {case.kv_bytes / 2**30:.0f} GiB"
    return None


def begin(device: torch.device) -> Findings:
    """What the device is capable of, which everything is held against; kernels are launched on it from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    copy = row("copy bandwidth", "bytes/s", copy_bandwidths(device))
    rates = Rates(copy, row("bfloat16 matrix rate", "FLOP/s", matmul_rates(device)))
    return Findings(rates, rows=[rates.copy, rates.matmul])


def measure(
    task: Task, cases: Sequence[Case], until_s: float, findings: Findings, who: Sequence[Contender] | None = None
) -> None:
    """Time the cases in order until the clock (time.monotonic) says so; what is known is saved after each."""
    rivals = contenders(task.device) if who is None else who
    shares = Shares((until_s - time.monotonic()) / 4, until_s)
    for case in cases:
        if time.monotonic() > until_s:
            print(f"{case}: left out, like all after it; the time is up", flush=True)
            break
        if reason := unfit(case, task.device):
            print(f"{case}: left out; {reason}", flush=True)
            findings.cases.append(str(case))
            continue
        _measure_case(case, task.device, rivals, shares, findings)
        findings.cases.append(str(case))
        is_over = task.device.type == "cuda" and not answers(task.device)
        if is_over:
            findings.failures[f"after {case}"] = "the device answers no more; nothing else was timed"
        task.save(findings.headline, findings.numbers, findings.rows)
        if is_over:
            break


class Shares:
    """Of the time, no peer gets more than its share: some compile for seconds, or minutes, at each new shape.

    until_s  when (time.monotonic) the last of them ends, whatever is left of its share
    """

    def __init__(self, each_s: float, until_s: float = math.inf) -> None:
        self._left_s: dict[str, float] = defaultdict(lambda: each_s)
        self._until_s = until_s

    def left_s(self, who: str) -> float:
        return min(self._left_s[who], self._until_s - time.monotonic())

    @contextmanager
    def taken(self, who: str) -> Iterator[None]:
        """Raises TimeoutError in the midst of what takes longer than what is left; our own kernels have no limit."""
        begin_s = time.monotonic()
        before = signal.signal(signal.SIGALRM, _raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, 0 if who == OWN else max(0.1, self.left_s(who)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self._left_s[who] -= time.monotonic() - begin_s


def _raise_timeout(*_: object) -> NoReturn:
    raise TimeoutError("its share of the time is used up")


def answers(device: torch.device) -> bool:
    """Whether a device still does anything: after a stray access it fails whatever comes next."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _measure_case(
    case: Case, device: torch.device, rivals: Sequence[Contender], shares: Shares, findings: Findings
) -> None:
    timings: list[Timing] = []
    try:
        problem = problem_of(case, device)
        expected = expected_of(problem)
    except RuntimeError as error:
        what = (
            findings.missing if isinstance(error, torch.OutOfMemoryError) else findings.failures
        )  # whoever is to solve it
        what[str(case)] = _first_line(error)
        print(f"{case}: {_first_line(error)}", flush=True)
        return
    for contender in rivals:
        if contender.name != OWN and shares.left_s(contender.name) <= 0:
            continue
        try:
            with shares.taken(contender.name):
                timings.append(time_contender(problem, expected, contender))
        except NotDone:
            continue
        except Exception as error:  # a library of another version may raise anything
            what = findings.failures if contender.name == OWN else findings.missing
            what[f"{case}, {contender.name}"] = _first_line(error)
            print(f"{case}, {contender.name}: {_first_line(error)}", flush=True)
        else:
            print(_told_of(timings[-1], findings.rates), flush=True)
    findings.timings += timings
    findings.rows += [line for timing in timings for line in rows_of(timing, findings.rates)] + beside_peers(timings)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _told_of(timing: Timing, rates: Rates) -> str:
    share = rows_of(timing, rates)[1]
    return f"{timing.case!s:<48} {timing.who:<16} {timing.typical_s * 1e6:10.1f} us  {share.value:7.1%} {share.unit}"
