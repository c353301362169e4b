"""Does `kvplan tune` choose what was measured as best? `python -m benchmarks.timing.sweeps FACTS [--simulate]`.

A sweep is one model, GPU, release and lengths of requests, measured with several numbers of users and ranks. Under a
limit of the time per token its points are settings: so many sequences at once on so many ranks, on eight GPUs. The one
that is predicted to serve the most is compared with the one that was measured to: its share of the best throughput, and
whether it kept the limit. Limits are the same for all sweeps; hosts are those fitted without the sweep's kind.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.timing.facts import Fact, read_facts
from benchmarks.timing.predict import host_without_kind, load_of, planned, requests, stepped
from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan
from kvplan.simulate.bench_load import figures
from kvplan.simulate.settings import Setting
from kvplan.simulate.steady import Demand, means_of, steady
from kvplan.simulate.steptime import StepTime

LIMITS = (0.010, 0.015, 0.020, 0.030, 0.050, 0.100, math.inf)  # seconds per token; the last: no limit
NEAR = 0.95  # of the best measured throughput
FEWEST = 3  # points of a sweep


@dataclass(frozen=True, slots=True)
class Point:
    """One result and what is predicted of it: seconds per token, output tokens per second and GPU."""

    sweep: str
    ranks: int
    users: int
    measured: tuple[float, float]
    predicted: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen of a sweep under a limit.

    share     of the best measured throughput that the chosen point was measured at; None: nothing is chosen
    is_kept   whether it was measured to keep the limit
    is_bound  whether some measured point does not
    is_empty  whether none does
    """

    sweep: str
    limit: float
    share: float | None
    is_kept: bool
    is_bound: bool
    is_empty: bool
    num_points: int

    @property
    def is_near(self) -> bool:
        """Nothing is right where nothing keeps the limit."""
        if self.is_empty:
            return self.share is None
        return self.is_kept and (self.share or 0.0) >= NEAR


def measured(fact: Fact) -> tuple[float, float] | None:
    """(seconds per token, output tokens per second and GPU).

    The latter from the times where it is not stated: a user has an answer after the first token and all the others.
    """
    tpot, ttft = fact.stated("tpot"), fact.stated("ttft")
    if tpot is None or fact.users is None:
        return None
    tokens = fact.measured.get("out_tps")
    if tokens is None:
        if ttft is None:
            return None
        tokens = fact.users * fact.output_len / ((ttft[1] + tpot[1] * (fact.output_len - 1)) / 1000)
    return tpot[1] / 1000, tokens / fact.tp


def closed_form(fact: Fact, made: Plan, times: StepTime) -> tuple[float, float]:
    rows = tuple(requests(fact, 200))
    demand = Demand(rows, "users", (), fact.users or 1)
    setting = Setting(fact.tp, 1)
    rating = steady(setting, made, times, demand, means_of(rows, None))
    output = sum(row.output_tokens for row in rows) / len(rows)
    return rating.tpot, rating.rate * output / fact.tp


def simulated(fact: Fact, made: Plan, times: StepTime) -> tuple[float, float]:
    run = figures(made, times, load_of(fact))
    return run.times["tpot_p50"] / 1000, run.output_tokens_per_s / fact.tp


def point(fact: Fact, *, simulate: bool) -> Point | None:
    """None where nothing is measured, or kvplan has no such server."""
    truth = measured(fact)
    if truth is None:
        return None
    try:
        made = planned(fact)
        times = stepped(fact, made, host_without_kind(fact))
        answer = (simulated if simulate else closed_form)(fact, made, times)
    except KvplanError:
        return None
    return Point(name_of(fact), fact.tp, fact.users or 1, truth, answer)


def name_of(fact: Fact) -> str:
    parts = (fact.src, fact.version, fact.model, fact.gpu, fact.dtype, fact.kv_dtype[:4], f"{fact.input_len:g}")
    return " ".join((*parts, f"{fact.output_len:g}"))


def usable(path: Path) -> list[Fact]:
    facts = (row for row in read_facts(path) if isinstance(row, Fact))
    return [fact for fact in facts if fact.engine == "vllm" and fact.users is not None]


def sweeps(points: Iterable[Point], *, by_ranks: bool) -> Mapping[str, list[Point]]:
    """Points by sweep; by_ranks: the number of ranks is chosen as well, else each has a sweep of its own."""
    groups: dict[str, dict[tuple[int, int], Point]] = defaultdict(dict)
    for result in points:
        name = result.sweep if by_ranks else f"{result.sweep} TP {result.ranks}"
        groups[name][result.ranks, result.users] = result
    chosen = {name: list(group.values()) for name, group in groups.items() if len(group) >= FEWEST}
    return {
        name: group for name, group in chosen.items() if not by_ranks or len({result.ranks for result in group}) > 1
    }


def choices(groups: Mapping[str, Sequence[Point]], margin: float = 1.0) -> Iterator[Choice]:
    """Under each limit; margin: by which the predicted time is taken longer."""
    for name, group in groups.items():
        for limit in LIMITS:
            able = [result for result in group if result.measured[0] <= limit]
            best = max(result.measured[1] for result in able or group)
            likely = [result for result in group if result.predicted[0] * margin <= limit]
            pick = max(likely, key=lambda result: result.predicted[1], default=None)
            yield Choice(
                name,
                limit,
                None if pick is None else pick.measured[1] / best,
                pick is not None and pick.measured[0] <= limit,
                0 < len(able) < len(group),
                not able,
                len(group),
            )


def summary(made: Sequence[Choice]) -> dict[str, float]:
    """Shares of the choices: near the best, keeping the limit, breaking it, nothing chosen."""
    count = max(1, len(made))
    shares = sorted(choice.share for choice in made if choice.is_kept and choice.share is not None)
    return {
        "choices": len(made),
        "near": sum(choice.is_near for choice in made) / count,
        "kept": sum(choice.is_kept for choice in made) / count,
        "broken": sum(choice.share is not None and not choice.is_kept for choice in made) / count,
        "nothing": sum(choice.share is None for choice in made) / count,
        "median_share": shares[len(shares) // 2] if shares else math.nan,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--simulate", action="store_true", help="the simulator's figures in place of the closed form's")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the points here")
    options = parser.parse_args(argv)
    answer, facts = partial(point, simulate=options.simulate), usable(options.facts)
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            points = [result for result in pool.map(answer, facts, chunksize=4) if result is not None]
    else:
        points = [result for result in map(answer, facts) if result is not None]
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in points]) + "\n", encoding="utf-8")
    for by_ranks in (False, True):
        groups = sweeps(points, by_ranks=by_ranks)
        print(f"{len(groups)} sweeps of {'ranks and users' if by_ranks else 'users'}, {len(points)} points")
        for name, margin in {"likely": 1.0, "whole range": 1.4}.items():
            made = list(choices(groups, margin))
            for title, part in {
                "all limits": made,
                "where some points keep the limit and some do not": [choice for choice in made if choice.is_bound],
                "where none keeps it": [choice for choice in made if choice.is_empty],
                "no limit": [choice for choice in made if choice.limit == math.inf],
            }.items():
                row = summary(part)
                print(
                    f"  {name}, {title}: {row['choices']:.0f} choices, {row['near']:.1%} within 5% of the best, "
                    f"{row['broken']:.1%} break the limit, {row['nothing']:.1%} choose nothing; "
                    f"of those that keep it the median has {row['median_share']:.1%} of the best"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
