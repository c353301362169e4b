"""Ranges of times by kind of plan, from results of other kinds: what `kvplan/simulate/held_out.csv` is made of."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.timing import kinds
from benchmarks.timing.scores import METRICS, Point
from kvplan.simulate.coverage import FILE, Kind, Score, range_of

INSIDE = 0.9  # of a kind's results that its range contains
HEADER = "models,device,server,metric,results,kinds,in_range,low,high"
Table = Mapping[Kind, Mapping[str, Score]]


def bounds(factors: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Range of measured over predicted; each kind of results counts by the square root of their number."""
    values = np.array([factor for _, factor in factors])
    _, places, counts = np.unique([name for name, _ in factors], return_inverse=True, return_counts=True)
    weights = (1 / np.sqrt(counts))[places]
    order = np.argsort(values)
    shares = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, high = np.interp([(1 - INSIDE) / 2, (1 + INSIDE) / 2], shares, values[order])
    return min(1.0, float(low)), max(1.0, float(high))


def table(points: Iterable[Point]) -> Table:
    """Range and number of results by kind, and by each wider one."""
    factors: dict[Kind, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        for wider in kinds.group(point.fact).wider:
            factors[wider][point.metric].append((kinds.kind_of(point.fact), point.measured / point.predicted))
    return {
        kind: {
            metric: Score(len(ratios), len({name for name, _ in ratios}), 0, *bounds(ratios))
            for metric, ratios in metrics.items()
        }
        for kind, metrics in factors.items()
    }


def by_others(points: Sequence[Point]) -> Iterator[Point]:
    """Points with the range that results of other kinds give them; those in which kernels were compiled give none."""
    sound = [point for point in points if not kinds.is_compiled(point.fact)]
    for name in sorted({kinds.kind_of(point.fact) for point in points}):
        others = table(point for point in sound if kinds.kind_of(point.fact) != name)
        for point in points:
            if kinds.kind_of(point.fact) == name:
                low, high = range_of(kinds.group(point.fact), point.metric, others)
                yield replace(point, low=low * point.predicted, high=high * point.predicted)


def in_range(points: Iterable[Point]) -> Mapping[tuple[Kind, str], int]:
    """How many results of each kind of plan lie in their range."""
    counts: dict[tuple[Kind, str], int] = defaultdict(int)
    for point in points:
        for wider in dict.fromkeys(kinds.group(point.fact).wider):
            counts[wider, point.metric] += point.low <= point.measured <= point.high
    return counts


def lines(every: Sequence[Point]) -> Iterator[str]:
    """Rows of the file, without results in which kernels were compiled."""
    yield HEADER
    points = [point for point in every if not kinds.is_compiled(point.fact)]
    inside = in_range(by_others(points))
    for kind, metrics in sorted(table(points).items()):
        for metric in METRICS:
            if metric in metrics:
                score = metrics[metric]
                counts = f"{score.results},{score.kinds},{inside[kind, metric]}"
                yield f"{','.join(kind)},{metric},{counts},{score.low:.3f},{score.high:.3f}"


def write(points: Sequence[Point]) -> None:
    FILE.write_text("\n".join(lines(points)) + "\n", encoding="utf-8")
