"""What `kvplan calibrate --bench` gains: `python -m benchmarks.timing.calibrated FACTS ... [--runs 4] [--json FILE]`.

Of each server with at least six published runs some are given to the fit as a user's own, spread evenly from the
lightest load to the heaviest; the others are predicted before and after. The host that is fitted on top of has not seen
the server's kind (folds.json). The last lines are the ranges of measured over predicted of the others, and how many of
each server's lie in that of the other servers: ranges.MEASURED.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.timing.facts import Fact, read_facts
from benchmarks.timing.kinds import is_held
from benchmarks.timing.predict import OWN, host_without_kind, load_of, planned
from benchmarks.timing.scores import is_at_load
from kvplan.core.errors import KvplanError, UsageError
from kvplan.servers.plans.calibration import FACTORS
from kvplan.simulate import bench_fit
from kvplan.simulate.bench_fit import Measurement

LEAST = 6  # runs of a server, below which it is left out
METRICS = ("tpot", "ttft", "output_tokens_per_s")
UNFITTED = dict.fromkeys(FACTORS, 1.0)


def servers(facts: Sequence[Fact], leave_out: Sequence[str]) -> list[list[Fact]]:
    """Runs of one server, from the lightest load to the heaviest; none of a family that no constant may see."""
    groups: dict[tuple[object, ...], list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.engine in OWN and fact.src not in leave_out and not is_held(fact):
            groups[fact.src, fact.engine, fact.version, fact.model, fact.gpu, fact.tp].append(fact)

    def weight(fact: Fact) -> tuple[float, float]:
        return fact.users or fact.rate or 0.0, fact.input_len + fact.output_len

    return [sorted(group, key=weight) for group in groups.values() if len(group) >= LEAST]


def spread(runs: Sequence[Measurement], num_runs: int) -> list[int]:
    """Places of the runs that are given."""
    return sorted({round(place) for place in np.linspace(0, len(runs) - 1, num_runs)})


def measurement(fact: Fact) -> Measurement:
    values = [(metric, *stated) for metric in ("tpot", "ttft") if (stated := fact.stated(metric)) is not None]
    if is_at_load(fact):
        values.append(("output_tokens_per_s", "mean", fact.measured["out_tps"]))
    return Measurement(planned(fact), load_of(fact), tuple(values), host_without_kind(fact))


def answered(group: Sequence[Fact]) -> list[Measurement]:
    """The runs that kvplan plans and simulates; a line for each other one."""
    runs = []
    for fact in group:
        try:
            run = measurement(fact)
            bench_fit.log_errors(run, UNFITTED)
        except KvplanError as error:
            print(f"{fact.id}: {error}", file=sys.stderr)
            continue
        runs.append(run)
    return runs


def ratios(run: Measurement, factors: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Predicted over measured of each figure."""
    for metric, statistic, value in run.values:
        (error,) = bench_fit.log_errors(replace(run, values=((metric, statistic, value),)), factors) or ((0.0, 0.0),)
        yield metric, float(np.exp(error[0]))


def scored(group: Sequence[Fact], num_runs: int) -> dict[str, list[tuple[float, float]]]:
    """(ratio before, ratio after) of what was left out, by metric."""
    runs = answered(group)
    if len(runs) < LEAST:
        raise UsageError(group[0].id, f"kvplan answers {len(runs)} of its server's {len(group)} runs", "left out")
    given = set(spread(runs, num_runs))
    factors = bench_fit.fitted([runs[place] for place in sorted(given)]).factors
    ratios_left: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for place, run in enumerate(runs):
        if place not in given:
            for (metric, before), (_, after) in zip(ratios(run, UNFITTED), ratios(run, factors), strict=True):
                ratios_left[metric].append((before, after))
    return ratios_left


def summary(pairs: Sequence[tuple[float, float]]) -> str:
    before, after = abs(np.array(pairs).T - 1)
    p90 = [np.quantile(sizes, 0.9, method="inverted_cdf") for sizes in (before, after)]
    medians = f"{np.median(before):6.1%} -> {np.median(after):6.1%}"
    return f"n {len(pairs):4}  {medians}  9 in 10 {p90[0]:6.1%} -> {p90[1]:6.1%}"


def interval(after: Sequence[float]) -> tuple[float, float]:
    """The middle nine tenths of measured over predicted."""
    low, high = np.quantile(1 / np.array(after), [0.05, 0.95])
    return float(low), float(high)


def ranges(servers: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> Iterator[str]:
    """A line for each metric: its range, and how many of each server's figures lie in that of the others."""
    for metric in METRICS:
        after = [[pair[1] for pair in server.get(metric, ())] for server in servers]
        inside = total = 0
        for place, own in enumerate(after):
            others = [ratio for other in (*after[:place], *after[place + 1 :]) for ratio in other]
            if own and others:
                low, high = interval(others)
                inside += sum(low <= 1 / ratio <= high for ratio in own)
                total += len(own)
        if total:
            low, high = interval([ratio for own in after for ratio in own])
            yield f"  {metric:<20} {low:.2f} to {high:.2f}; {inside} of {total} in the range of the other servers"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, nargs="+")
    parser.add_argument("--runs", type=int, default=4, help="that are given to the fit")
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--without", action="append", default=[], metavar="SRC", help="a source to leave out")
    options = parser.parse_args(argv)
    facts = [row for path in options.facts for row in read_facts(path) if isinstance(row, Fact)]
    each: list[dict[str, list[tuple[float, float]]]] = []
    groups: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = defaultdict(int)
    for group in servers(facts, options.without):
        try:
            ratios_left = scored(group, options.runs)
        except KvplanError as error:
            print(f"{group[0].id}: {error}", file=sys.stderr)
            continue
        each.append(ratios_left)
        for name in (group[0].src, "all"):
            counts[name] += 1
            for metric, pairs in ratios_left.items():
                groups[name][metric] += pairs
        print(group[0].src, group[0].engine, group[0].model, group[0].gpu, group[0].tp, flush=True)
        for metric in METRICS:
            if ratios_left.get(metric):
                print(f"  {metric:<20} {summary(ratios_left[metric])}", flush=True)
    for name, metrics in groups.items():
        print(f"\n{name}: {counts[name]} servers")
        for metric in METRICS:
            if metrics.get(metric):
                print(f"  {metric:<20} {summary(metrics[metric])}")
    print("\nranges")
    print(*ranges(each), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(groups) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
