"""The constants of a step's time, fitted to published results: `python -m benchmarks.timing.fit FACTS [--cross]`.

Each result is described by a few kinds of step and how often they come (a closed form of its load; rates take the batch
that the measured time per token implies). The constants minimise soft-L1 of the log errors, sources weighted by the
square root of their size, with a weak pull to where they begin. --cross fits again without each source, model and GPU,
and prints the errors on what was left out. Needs numpy; nothing of this is imported by kvplan.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.timing.facts import Fact, read_facts
from benchmarks.timing.predict import OWN, planned
from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate import constants as shipped
from kvplan.simulate import steptime
from kvplan.simulate.constants import Constants
from kvplan.simulate.steptime import Roofline, Shares, attention_kinds, roofline
from kvplan.simulate.whole_prompts import runs_whole_prompts
from kvplan.simulate.work import StepWork

START = Constants(  # guesses before any fact: what kernels are said to reach, and launches of some microseconds
    weights=0.85, experts=0.7, widened=0.6, kv=0.85, flops=0.6, attention=0.5, layer=60e-6,
    prefill_layer=150e-6, step=1e-3, sequence=10e-6, switch=0.3, switch_s=3e-6, switch_large=0.4, pcie=0.34,
    pcie_s=30e-6, host=0.08, host_s=30e-6, request=10e-3, crowd=100e-6, prompt_token=2e-6, first_step=3e-3,
    first_sequence=50e-6,
)  # fmt: skip
T = TypeVar("T")
FREE = tuple(field.name for field in fields(Constants))
WEIGHTS = {"tpot": 1.0, "ttft": 0.4, "out_tps": 0.7}
SOFT = 0.15
MOST = {
    "weights": 0.95,
    "experts": 0.95,
    "widened": 0.95,
    "kv": 0.95,
    "flops": 0.9,
    "attention": 0.8,
}  # shares of what there is
PULL = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """A fact as kinds of step: (work, how many of it in the time of `tokens` output tokens), and of a first token."""

    fact: Fact
    plan: Plan
    decode: tuple[tuple[StepWork, float], ...]
    first: tuple[tuple[StepWork, float], ...]
    batch: float
    tpot: float | None
    ttft: float | None
    out_tps: float | None


def work(made: Plan, decodes: float, context: float, prompt: float, start: float = 0.0) -> StepWork:
    """A step of so many sequences that decode at a context, and so many prompt tokens after `start` others."""
    read, pairs = [], []
    for kind in attention_kinds(made):
        reach = kind.reach.tokens or math.inf
        own = decodes * min(context, reach)
        mean = min(start + prompt / 2, reach)
        read.append(own + (min(start + prompt, reach + prompt) if prompt else 0))
        pairs.append(own + prompt * mean)
    seqs = decodes + (1 if prompt else 0)
    tokens, samples = round(decodes + prompt) or 1, max(1, round(decodes))
    return StepWork(tokens, samples, round(seqs), tuple(map(int, read)), tuple(map(int, pairs)))


def mean_lengths(fact: Fact) -> tuple[float, float]:
    half = (1 + fact.least) / 2 if fact.lengths == "random" else 1.0
    return fact.input_len * half, fact.output_len * half


def case_of(fact: Fact) -> Case | None:
    made = planned(fact)
    prompt, output = mean_lengths(fact)
    if output < 2:
        return None
    limit, budget = made.settings.max_num_seqs, made.settings.max_num_batched_tokens
    tokens = made.capacity.num_blocks * made.pool.block_size
    limit = max(1, min(limit, int(tokens / (prompt + output / 2))))
    stated = {metric: fact.stated(metric) for metric in ("tpot", "ttft")}
    tpot = stated["tpot"][1] / 1000 if stated["tpot"] else None
    ttft = stated["ttft"][1] / 1000 if stated["ttft"] and "TTFT not judged" not in fact.notes else None
    is_prefixed = bool(fact.limits.get("unique_prompts"))
    computed = 16.0 if is_prefixed else prompt * (0.6 if fact.lengths == "chat" else 1.0)  # the median
    out_tps = None
    if fact.users is not None:
        batch = float(min(fact.users, limit, fact.num_prompts))
        out_tps = fact.measured.get("out_tps")
        if fact.users > limit:
            ttft = None  # waits for a place
    elif fact.rate == math.inf:
        batch = float(min(fact.num_prompts, limit))
        out_tps = fact.measured.get("out_tps") if fact.num_prompts >= 20 else None
        tpot = ttft = None
    else:
        if tpot is None or fact.rate is None:
            return None
        batch = min(fact.rate * output * tpot, limit, fact.num_prompts)
        if batch >= 0.9 * min(limit, fact.num_prompts) or batch > 0.3 * fact.num_prompts:
            return None  # a burst or an overload, in which nothing is steady
    context = prompt + output / 2
    others = max(0.0, batch - 1)
    chunks = max(1, math.ceil(computed / budget))
    mixed = others * chunks * computed / max(computed, 1)
    is_wave = fact.users is not None and fact.lengths == "fixed" and batch > 1
    share = 0.5 if is_wave else 1.0  # where all begin together, half of the others' prompts come before one's own
    mixed = min(output - 1, mixed * share)
    in_step = others * computed * share / mixed if mixed else 0.0
    in_step = min(in_step, budget)
    is_whole = runs_whole_prompts(made)
    decode = [(work(made, max(1.0, batch), context, 0.0), output - 1 - (0.0 if is_whole else mixed))]
    if is_whole and mixed > 0.01:  # prompts are computed in steps of their own
        decode.append((work(made, 0.0, context, in_step, max(0.0, (computed - in_step) / 2)), mixed))
    elif mixed > 0.01:
        decode.append((work(made, max(1.0, batch), context, in_step, max(0.0, (computed - in_step) / 2)), mixed))
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
        ttft = None  # prompts wait for prompts, which the simulation knows better
    return Case(fact, made, tuple(decode), tuple(first), batch, tpot, ttft, out_tps)


def remembered(ask: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """What a plan's layers ask of a step, whatever the constants: asked once."""
    known: dict[int, tuple[Plan, T]] = {}

    def answer(plan: Plan) -> T:
        if id(plan) not in known:
            known[id(plan)] = plan, ask(plan)
        return known[id(plan)][1]

    return answer


def rooflines(case: Case, values: Constants) -> Roofline:
    return roofline(case.plan, Shares(), shipped.adapted(values, case.plan))


def predicted(case: Case, values: Constants) -> tuple[float, float, float]:
    """(seconds per output token, to the first token, output tokens per second)."""
    line = rooflines(case, values)
    prompt, output = mean_lengths(case.fact)
    decode = sum(count * line.seconds(step) for step, count in case.decode)
    first = sum(count * line.seconds(step) for step, count in case.first)
    first += line.request_s + line.crowd_s * max(0.0, case.batch - 1) + line.prompt_token_s * prompt
    tpot = decode / (output - 1)
    return tpot, first, case.batch * output / (decode + first)


def log_errors(case: Case, values: Constants) -> dict[str, float]:
    tpot, ttft, out_tps = predicted(case, values)
    pairs = {"tpot": (tpot, case.tpot), "ttft": (ttft, case.ttft), "out_tps": (out_tps, case.out_tps)}
    return {name: math.log(mine / theirs) for name, (mine, theirs) in pairs.items() if theirs}


def source_weights(cases: Sequence[Case]) -> dict[str, float]:
    counts = Counter(case.fact.src for case in cases)
    return {src: (len(cases) / len(counts) / count) ** 0.25 for src, count in counts.items()}


def residuals(cases: Sequence[Case], values: Constants) -> np.ndarray:
    weights = source_weights(cases)
    return np.array(
        [
            weights[case.fact.src] * WEIGHTS[name] * error
            for case in cases
            for name, error in log_errors(case, values).items()
        ]
    )


def cost(errors: np.ndarray) -> tuple[float, np.ndarray]:
    """Soft-L1 of the errors, and the weight of each in a step of Gauss and Newton."""
    scaled = 1 + (errors / SOFT) ** 2
    return float((2 * SOFT**2 * (np.sqrt(scaled) - 1)).sum()), 1 / np.sqrt(scaled)


def fitted(cases: Sequence[Case], start: Constants, free: Sequence[str] = FREE, rounds: int = 10) -> Constants:
    def constants_of(x: np.ndarray) -> Constants:
        values = {name: getattr(start, name) * math.exp(value) for name, value in zip(free, x, strict=True)}
        return replace(start, **{name: min(value, MOST.get(name, math.inf)) for name, value in values.items()})

    x, damping = np.zeros(len(free)), 1e-2
    errors = residuals(cases, constants_of(x))
    best = cost(errors)[0]
    for _ in range(rounds):
        columns = []
        for index in range(len(free)):
            moved = x.copy()
            moved[index] += 0.03
            columns.append((residuals(cases, constants_of(moved)) - errors) / 0.03)
        slopes, weights = np.stack(columns, axis=1), cost(errors)[1]
        square = slopes.T @ (slopes * weights[:, None]) + PULL * np.eye(len(free))
        slope = slopes.T @ (errors * weights) + PULL * x
        for _ in range(6):
            move = -np.linalg.solve(square + damping * np.diag(np.diag(square)), slope)
            there = np.clip(x + np.clip(move, -0.7, 0.7), -3, 3)
            moved_errors = residuals(cases, constants_of(there))
            value = cost(moved_errors)[0] + PULL * float((there**2).sum()) / 2
            if value < best:
                break
            damping *= 4
        else:
            break
        gained, best = best - value, value
        x, errors, damping = there, moved_errors, max(damping / 5, 1e-5)
        if gained < 1e-3 * best:
            break
    return constants_of(x)


def folds_of(cases: Sequence[Case], start: Constants, key: Callable[[Case], str]) -> dict[str, Constants]:
    """Constants fitted without the cases of each key."""
    names = sorted({key(case) for case in cases})
    return {name: fitted([case for case in cases if key(case) != name], start, rounds=5) for name in names}


def left_out(
    cases: Sequence[Case], folds: Mapping[str, Constants], key: Callable[[Case], str]
) -> list[tuple[Case, dict[str, float]]]:
    """Each case with its log errors under the constants fitted without its key."""
    return [(case, log_errors(case, folds[key(case)])) for case in cases]


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
                print(f"  {name:<28} {metric:<8} {summary(metrics[metric])}")


def cases_of(path: Path) -> list[Case]:
    cases = []
    for row in read_facts(path):
        if isinstance(row, Fact) and row.engine in OWN:
            try:
                case = case_of(row)
            except KvplanError:
                continue
            if case is not None:
                cases.append(case)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--cross", action="store_true", help="also fit without each source, model and GPU")
    parser.add_argument("--json", type=Path, help="write the constants here")
    parser.add_argument("--folds", type=Path, help="with --cross: write those without each source here (folds.json)")
    options = parser.parse_args()
    for name in ("matmuls", "attention_kinds", "widens_experts"):
        setattr(steptime, name, remembered(getattr(steptime, name)))
    cases = cases_of(options.facts)
    values = fitted(cases, START)
    content: dict[str, Any] = {name: getattr(values, name) for name in FREE}
    print("\n".join(f"{name:<14} {value:.4g}" for name, value in content.items()))
    everything = [(case, log_errors(case, values)) for case in cases]
    show("fitted", everything, lambda case: "all")
    show("fitted, by source", everything, lambda case: case.fact.src)
    show("fitted, by GPU", everything, lambda case: case.fact.gpu)
    show("fitted, by TP", everything, lambda case: str(case.fact.tp))
    show("fitted, by model", everything, lambda case: case.fact.model)
    if options.cross:
        keys = {
            "source": lambda case: case.fact.src,
            "model": lambda case: case.fact.model,
            "GPU": lambda case: case.fact.gpu,
        }
        for name, key in keys.items():
            folds = folds_of(cases, START, key)
            left = left_out(cases, folds, key)
            if name == "source" and options.folds:
                rows = {
                    src: {field: float(f"{getattr(each, field):.4g}") for field in FREE} for src, each in folds.items()
                }
                options.folds.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            show(f"without its {name}", left, lambda case: "all")
            show(f"without its {name}, by {name}", left, key)
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
