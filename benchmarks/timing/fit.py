"""Constants of servers' hosts, fitted to published results: `python -m benchmarks.timing.fit FACTS... [--folds FILE]`.

Each result is described by a few kinds of step and how often they come (a closed form of its load; rates take the batch
that the measured time per token implies). The constants minimize soft-L1 of the log errors; kinds of results count by
the square root of their number; a weak pull leads to where they begin. --folds fits again without each kind of results
(model family, weight format, GPU generation, release) and writes the constants that `timeboard` scores that kind with.
Needs numpy; nothing of this is imported by kvplan.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.timing.facts import Fact, read_facts
from benchmarks.timing.kinds import has_other_kernel, has_tables, is_compiled, is_faulty, is_held, kind_of, regime
from benchmarks.timing.predict import OWN, keeps_step, planned, poll_of, stepped
from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate.host import HOSTS, Host
from kvplan.simulate.kernels.step import KernelStep
from kvplan.simulate.steptime import attention_kinds
from kvplan.simulate.whole_prompts import runs_whole_prompts
from kvplan.simulate.work import StepWork

START = Host(
    request=3e-3,
    prompt_token=2e-6,
    delay=10e-3,
    gap=0.3e-3,
    gap_sequence=10e-6,
    step=1e-3,
    sequence=20e-6,
    token=10e-6,
    prompt=1.2,
)
FREE = ("delay", "gap", "gap_sequence", "step", "sequence", "token", "prompt")
WEIGHTS = {"tpot": 1.0, "ttft": 0.4, "out_tps": 0.7}
SOFT = 0.15
PULL = 0.3
PULL_OF_REGIMES = 3.0
Steps = tuple[tuple[StepWork, float], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A fact as kinds of step: (work, how many of it in the time of `output` tokens), and of a first token; gpu: its
    kernels without a host, and what prompts add to them.
    """

    fact: Fact
    kind: str
    regime: str
    decode: tuple[tuple[float, float, int, float], ...]  # seconds, of these of prompts, sequences, how many
    first: tuple[tuple[float, float, int, float], ...]
    poll: float  # steps until the scheduler sees a request
    batch: float
    prompt: float
    output: float
    measured: Mapping[str, float]


def work(made: Plan, decodes: float, context: float, prompt: float, start: float = 0.0) -> StepWork:
    """A step of so many sequences that decode at a context, and so many prompt tokens after `start` others."""
    read, pairs, own = [], [], []
    for kind in attention_kinds(made):
        reach = kind.reach.tokens or math.inf
        decoded = decodes * min(context, reach)
        own.append(prompt * min(start + prompt / 2, reach))
        read.append(decoded + (min(start + prompt, reach + prompt) if prompt else 0))
        pairs.append(decoded + own[-1])
    new, number = round(prompt), round(decodes)
    return StepWork(
        number + new or 1, max(1, number), number + (new > 0), tuple(map(int, read)), tuple(map(int, pairs)),
        int(new > 0), new, tuple(map(int, own)),
    )  # fmt: skip


def mean_lengths(fact: Fact) -> tuple[float, float]:
    half = (1 + fact.least) / 2 if fact.lengths == "random" else 1.0
    return fact.input_len * half, fact.output_len * half


def seconds(step: KernelStep, kinds: Steps) -> tuple[tuple[float, float, int, float], ...]:
    """Seconds of each kind of step, with prompts as fast as measured, and twice as slow."""
    rows = []
    for load, count in kinds:
        plain = step.seconds(load)
        slow = replace_host(step, Host(prompt=2.0)).seconds(load)
        rows.append((plain, slow - plain, load.num_seqs, count))
    return tuple(rows)


def replace_host(step: KernelStep, host: Host) -> KernelStep:
    return KernelStep(step.layers, step.kernels, step.reaches, host)


def case_of(fact: Fact) -> Case | None:
    made = planned(fact)
    step = stepped(fact, made, Host())
    prompt, output = mean_lengths(fact)
    if output < 2:
        return None
    limit, budget = made.settings.max_num_seqs, made.settings.max_num_batched_tokens
    tokens = made.capacity.num_blocks * made.pool.block_size
    limit = max(1, min(limit, int(tokens / (prompt + output / 2))))
    stated = {metric: fact.stated(metric) for metric in ("tpot", "ttft")}
    measured = {metric: value[1] / 1000 for metric, value in stated.items() if value is not None}
    if "TTFT not judged" in fact.notes:
        measured.pop("ttft", None)
    is_prefixed = bool(fact.limits.get("unique_prompts"))
    computed = 16.0 if is_prefixed else prompt * (0.6 if fact.lengths == "chat" else 1.0)  # the median
    if fact.users is not None:
        batch = float(min(fact.users, limit, fact.num_prompts))
        if "out_tps" in fact.measured:
            measured["out_tps"] = fact.measured["out_tps"]
        if fact.users > limit:
            measured.pop("ttft", None)  # waits for a place
    elif fact.rate == math.inf:
        batch = float(min(fact.num_prompts, limit))
        measured = (
            {"out_tps": fact.measured["out_tps"]} if fact.num_prompts >= 20 and "out_tps" in fact.measured else {}
        )
    else:
        if "tpot" not in measured or fact.rate is None:
            return None
        batch = min(fact.rate * output * measured["tpot"], limit, fact.num_prompts)
        if batch >= 0.9 * min(limit, fact.num_prompts) or batch > 0.3 * fact.num_prompts:
            return None  # a burst or an overload, in which nothing is steady
    return shaped(fact, made, step, batch, (prompt, output, computed), budget, measured)


def shaped(
    fact: Fact, made: Plan, step: KernelStep, batch: float, lengths: tuple[float, float, float], budget: int,
    measured: dict[str, float],
) -> Case:  # fmt: skip
    prompt, output, computed = lengths
    context, others = prompt + output / 2, max(0.0, batch - 1)
    chunks = max(1, math.ceil(computed / budget))
    is_wave = fact.users is not None and fact.lengths == "fixed" and batch > 1 and keeps_step(fact)
    share = 0.5 if is_wave else 1.0  # where all begin together, half of the others' prompts come before one's own
    mixed = min(output - 1, others * chunks * share)
    in_step = min(others * computed * share / mixed if mixed else 0.0, budget)
    is_whole = runs_whole_prompts(made) or fact.engine == "sglang"
    decode = [(work(made, max(1.0, batch), context, 0.0), output - 1 - (0.0 if is_whole else mixed))]
    if mixed > 0.01:  # or prompts are computed in steps of their own
        decode.append(
            (work(made, 0.0 if is_whole else batch, context, in_step, max(0.0, (computed - in_step) / 2)), mixed)
        )
    first = []
    left, start = computed, prompt - computed
    while left > 0:
        chunk = min(left, max(16.0, budget - others))
        first.append((work(made, 0.0 if is_whole else others, context, chunk, start), 1.0))
        left, start = left - chunk, start + chunk
    if others >= 0.5:
        first.append((work(made, batch, context, 0.0), 0.5))  # the step in flight when it came
    is_first_wave_in_it = fact.users is not None and fact.users >= 8 and "ttft_p50" not in fact.measured
    if is_wave or is_first_wave_in_it or (others * computed > 0.25 * output * 2000 and fact.users != 1):
        measured.pop("ttft", None)  # prompts wait for prompts, which the simulation knows better
    return Case(
        fact, kind_of(fact), regime(fact), seconds(step, tuple(decode)), seconds(step, tuple(first)),
        poll_of(fact), batch, prompt, output, measured,
    )  # fmt: skip


def predicted(case: Case, host: Host) -> dict[str, float]:
    """Seconds per output token and to the first token, and output tokens per second."""
    own = replace(host, is_hidden=HOSTS[case.regime].is_hidden)

    def total(rows: Iterable[tuple[float, float, int, float]]) -> float:
        return sum(count * own.seconds(plain + (own.prompt - 1) * added, seqs) for plain, added, seqs, count in rows)

    decode, first = total(case.decode), total(case.first)
    first += host.delay + host.request + host.prompt_token * case.prompt + case.poll * decode / (case.output - 1)
    return {"tpot": decode / (case.output - 1), "ttft": first, "out_tps": case.batch * case.output / (decode + first)}


def log_errors(case: Case, host: Host) -> dict[str, float]:
    mine = predicted(case, host)
    return {name: math.log(mine[name] / value) for name, value in case.measured.items()}


def residuals(cases: Sequence[Case], host: Host) -> np.ndarray:
    counts = Counter(case.kind for case in cases)
    mean = len(cases) / len(counts)
    return np.array(
        [
            (mean / counts[case.kind]) ** 0.25 * WEIGHTS[name] * error
            for case in cases
            for name, error in log_errors(case, host).items()
        ]
    )


def cost(errors: np.ndarray) -> tuple[float, np.ndarray]:
    """Soft-L1 of the errors, and the weight of each in a step of Gauss and Newton."""
    scaled = 1 + (errors / SOFT) ** 2
    return float((2 * SOFT**2 * (np.sqrt(scaled) - 1)).sum()), 1 / np.sqrt(scaled)


def fitted(
    cases: Sequence[Case], start: Host = START, free: Sequence[str] = FREE, rounds: int = 12, pull: float = PULL
) -> Host:
    """The host with the least cost on these cases, drawn to where it starts."""

    def host(x: np.ndarray) -> Host:
        return replace(
            start, **{name: getattr(start, name) * math.exp(value) for name, value in zip(free, x, strict=True)}
        )

    x, damping = np.zeros(len(free)), 1e-2
    errors = residuals(cases, host(x))
    best = cost(errors)[0]
    for _ in range(rounds):
        columns = []
        for index in range(len(free)):
            moved = x.copy()
            moved[index] += 0.03
            columns.append((residuals(cases, host(moved)) - errors) / 0.03)
        slopes, weights = np.stack(columns, axis=1), cost(errors)[1]
        square = slopes.T @ (slopes * weights[:, None]) + pull * np.eye(len(free))
        slope = slopes.T @ (errors * weights) + pull * x
        for _ in range(6):
            move = -np.linalg.solve(square + damping * np.diag(np.diag(square)), slope)
            there = np.clip(x + np.clip(move, -0.7, 0.7), -4, 4)
            moved_errors = residuals(cases, host(there))
            value = cost(moved_errors)[0] + pull * float((there**2).sum()) / 2
            if value < best:
                break
            damping *= 4
        else:
            break
        gained, best = best - value, value
        x, errors, damping = there, moved_errors, max(damping / 5, 1e-5)
        if gained < 1e-4 * best:
            break
    return host(x)


def summary(errors: Sequence[float]) -> str:
    real = np.exp(np.array(errors)) - 1
    size = np.abs(real)
    return (
        f"n {len(real):4} median {np.median(size):6.1%} p90 {np.quantile(size, 0.9):6.1%} bias {np.median(real):+6.1%}"
    )


def show(title: str, results: Sequence[tuple[Case, dict[str, float]]], key: Callable[[Case], str]) -> None:
    print(f"\n{title}")
    groups: dict[str, dict[str, list[float]]] = {}
    for case, errors in results:
        for metric, error in errors.items():
            groups.setdefault(key(case), {}).setdefault(metric, []).append(error)
    for name, metrics in sorted(groups.items()):
        for metric in WEIGHTS:
            if metric in metrics:
                print(f"  {name:<40} {metric:<8} {summary(metrics[metric])}")


def cases_of(paths: Iterable[Path]) -> list[Case]:
    """Cases of results that constants may be fitted to: of no family that is held, on GPUs with tables."""
    cases = []
    for path in paths:
        for row in read_facts(path):
            if isinstance(row, Fact) and row.engine in OWN:
                try:
                    case = case_of(row) if is_fitted(row) else None
                except KvplanError:
                    continue
                if case is not None and case.measured:
                    cases.append(case)
    return cases


def is_fitted(fact: Fact) -> bool:
    is_odd = is_faulty(fact) or is_compiled(fact) or has_other_kernel(fact)
    return not is_odd and not is_held(fact) and has_tables(fact)


def rounded(host: Host) -> dict[str, float]:
    return {name: float(f"{getattr(host, name):.3g}") for name in FREE}


def hosts(cases: Sequence[Case], starts: Mapping[str, Host] | None = None, rounds: int = 12) -> dict[str, Host]:
    """Hosts by regime, drawn to the one that is fitted to all."""
    common = fitted(cases, START if starts is None else starts["all"], rounds=rounds)
    made = {"all": common}
    for name in HOSTS:
        own = [case for case in cases if case.regime == name]
        made[name] = fitted(own, common, pull=PULL_OF_REGIMES, rounds=rounds) if own else common
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, nargs="+")
    parser.add_argument("--folds", type=Path, help="write the constants without each kind here")
    options = parser.parse_args()
    cases = cases_of(options.facts)
    shipped = hosts(cases)
    content: dict[str, dict[str, dict[str, float]]] = {name: {"all": rounded(host)} for name, host in shipped.items()}
    left_out = []
    for kind in sorted({case.kind for case in cases}):
        own = [case for case in cases if case.kind == kind]
        others = hosts([case for case in cases if case.kind != kind], shipped, rounds=4)
        for name in {case.regime for case in own}:
            content[name][kind] = rounded(others[name])
        left_out += [(case, log_errors(case, others[case.regime])) for case in own]
    for name in HOSTS:
        print(name, sum(case.regime == name for case in cases), "results", content[name]["all"])
    show("fitted", [(case, log_errors(case, shipped[case.regime])) for case in cases], lambda case: case.regime)
    show("without its kind", left_out, lambda case: case.regime)
    show("without its kind, by kind", left_out, lambda case: case.kind)
    if options.folds:
        options.folds.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
