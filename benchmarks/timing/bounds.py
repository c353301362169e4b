"""Ranges of times by kind of plan, from results of other kinds: what `kvplan/simulate/held_out.csv` is made of.

Both are quantiles of measured over predicted. A range is of all results; one counts less for each part in which its
kind of plan or its load differs, so that a kind with few results has mostly its neighbors' range. Where a target is
decided is of the nearest kind of plan with enough results alone: at the same risk that leaves less too close to call.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.timing import kinds
from benchmarks.timing.scores import METRICS, Point
from kvplan.simulate.coverage import ANY, DEVICES, FILE, MODELS, Kind, Spread
from kvplan.simulate.host import HOSTS

# What a result counts for if the models, the device, the server or the load are of another kind: least pinball loss, by
# results of other kinds, of the grid 0.1, 0.3, 0.6 and, of device and load, from 0.05 on. Chosen without a kind's own
# results, 47 of 70 kinds have these, and the whole grid is within 8%.
UNLIKE = (0.6, 0.1, 0.6, 0.15)
RANGE = (0.05, 0.95)  # shares of results below a range's ends
# Shares of results below which a target is called broken, and above which it is called kept. The second leaves the
# least too close to call among a grid with which at most 3% of the broken are called kept: chosen without a kind's own
# results it is the same for 76 of 77. The first would be 0.45 by that rule, but then No is said where odds are even.
TARGETS = (0.3, 0.96)
FEWEST = 20  # results with which a kind of plans decides its own targets
FEWEST_KINDS = 3  # model families, weight formats, GPU generations or releases among them
HEADER = (
    "models,device,server,metric,results,kinds,in_range,"
    "low,high,breaks,keeps,low waiting,high waiting,breaks waiting,keeps waiting"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Results of one metric: measured over predicted, kinds of results, and parts of kinds of plans with the load."""

    ratios: np.ndarray
    names: np.ndarray
    parts: np.ndarray

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Sample":
        return cls(
            np.array([point.measured / point.predicted for point in points]),
            np.array([kinds.kind_of(point.fact) for point in points]),
            np.array([(*kinds.group(point.fact), str(point.waits)) for point in points]),
        )

    def without(self, name: str) -> "Sample":
        others = self.names != name
        return Sample(self.ratios[others], self.names[others], self.parts[others])

    def spread(self, kind: Kind, *, waits: bool) -> Spread:
        """The range of such plans and loads, and where their targets are decided."""
        alike = self.parts == (*kind, str(waits))
        low, high = self.quantiles(np.prod(np.where(alike, 1.0, UNLIKE), axis=1), RANGE)
        for wider in nearest(kind):
            own = np.all(alike | (np.array((*wider, "")) == np.array((ANY,) * 3 + ("?",))), axis=1)
            if (own.sum() >= FEWEST and len(set(self.names[own])) >= FEWEST_KINDS) or wider == (ANY, ANY, ANY):
                break
        breaks, keeps = self.quantiles(own.astype(float), TARGETS)
        return Spread(min(1.0, low), max(1.0, high), min(1.0, breaks), max(1.0, keeps))

    def quantiles(self, counts: np.ndarray, shares: tuple[float, float]) -> tuple[float, float]:
        """Quantiles of what counts; each kind of results counts by the square root of their number."""
        chosen = counts > 0
        _, places, numbers = np.unique(self.names[chosen], return_inverse=True, return_counts=True)
        weights, ratios = counts[chosen] / np.sqrt(numbers)[places], self.ratios[chosen]
        order = np.argsort(ratios)
        below = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
        first, second = np.interp(shares, below, ratios[order])
        return float(first), float(second)


def nearest(kind: Kind) -> tuple[Kind, ...]:
    """A kind of plans, and those that it is part of, the nearest first."""
    models, device, server = kind
    return (
        kind, Kind(ANY, device, server), Kind(models, device, ANY), Kind(ANY, device, ANY), Kind(ANY, ANY, ANY)
    )  # fmt: skip


def by_metric(points: Iterable[Point]) -> Mapping[str, list[Point]]:
    chosen: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        chosen[point.metric].append(point)
    return chosen


def sound(points: Iterable[Point]) -> list[Point]:
    """Points of results in which no kernels were compiled."""
    return [point for point in points if not kinds.is_compiled(point.fact)]


def by_others(points: Sequence[Point]) -> Iterator[Point]:
    """Points with the range that results of other kinds give them; those in which kernels were compiled give none."""
    samples = {metric: Sample.of(chosen) for metric, chosen in by_metric(sound(points)).items()}
    known: dict[tuple[str, str, Kind, bool], Spread] = {}
    for point in points:
        name, kind = kinds.kind_of(point.fact), kinds.group(point.fact)
        key = point.metric, name, kind, point.waits
        if key not in known:
            known[key] = samples[point.metric].without(name).spread(kind, waits=point.waits)
        low, high, breaks, keeps = (factor * point.predicted for factor in known[key])
        yield replace(point, low=low, high=high, breaks=breaks, keeps=keeps)


def lines(every: Sequence[Point]) -> Iterator[str]:
    """Rows of the file, without results in which kernels were compiled."""
    yield HEADER
    points = by_metric(by_others(sound(every)))
    samples = {metric: Sample.of(chosen) for metric, chosen in points.items()}
    own_points: dict[tuple[Kind, str], list[Point]] = defaultdict(list)
    for metric, chosen in points.items():
        for point in chosen:
            own_points[kinds.group(point.fact), metric].append(point)
    for kind in map(Kind._make, product(MODELS, DEVICES, (*HOSTS, ANY))):
        for metric in METRICS:
            if metric not in points:
                continue
            own = own_points[kind, metric]
            inside = sum(point.low <= point.measured <= point.high for point in own)
            counts = (len(own), len(Counter(kinds.kind_of(point.fact) for point in own)), inside)
            factors = (factor for waits in (False, True) for factor in samples[metric].spread(kind, waits=waits))
            yield ",".join((*kind, metric, *map(str, counts), *(f"{factor:.3f}" for factor in factors)))


def write(points: Sequence[Point]) -> None:
    FILE.write_text("\n".join(lines(points)) + "\n", encoding="utf-8")
