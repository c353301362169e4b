"""Errors by group: how far predictions are from what was measured, and what they say of goals."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from benchmarks.timing import kinds
from benchmarks.timing.facts import Fact, name_of, spec_of
from benchmarks.timing.predict import OWN, Predicted

METRICS = ("tpot", "ttft", "out_tps")
UNITS = {"tpot": "time per output token", "ttft": "time to first token", "out_tps": "output tokens/s at load"}
GOALS = {"tpot": (25.0, 50.0), "ttft": (200.0, 1000.0)}  # milliseconds
AT_LOAD = 0.95  # a server that answers fewer than this share of the arrivals is the bottleneck, not the load


@dataclass(frozen=True, slots=True)
class Point:
    """One metric of one fact: predicted and measured, with the range that kvplan states.

    breaks, keeps  between them it is too close to call whether a goal is met; the range if not set
    waits          requests wait for others for most of their time to the first token
    """

    fact: Fact
    metric: str
    predicted: float
    measured: float
    low: float
    high: float
    breaks: float | None = None
    keeps: float | None = None
    waits: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Line:
    """The errors of one group: medians of the absolute error, 9 in 10, and the median with its sign."""

    n: int
    median: float
    p90: float
    bias: float
    within: float


def points(fact: Fact, predicted: Predicted) -> list[Point]:
    """The metrics of a fact that can be compared."""
    pairs: list[tuple[str, float, float, *tuple[float, ...]]] = []
    for metric in ("tpot", "ttft"):
        stated = fact.stated(metric)
        if stated is None or (metric == "ttft" and "TTFT not judged" in fact.notes):
            continue
        value = predicted.times.get(f"{metric}_{stated[0]}")
        if value is not None:
            pairs.append((metric, value, stated[1], *predicted.range(metric, value), *predicted.target(metric, value)))
    if is_at_load(fact):
        pairs.append(("out_tps", predicted.out_tps, fact.measured["out_tps"], *predicted.range("out_tps")))
    return [replace(Point(fact, *pair), waits=predicted.waits) for pair in pairs]


def is_at_load(fact: Fact) -> bool:
    """Whether the server decides how many tokens come: users who wait, or more requests than it answers."""
    if "out_tps" not in fact.measured:
        return False
    if fact.rate is None or fact.rate == float("inf"):
        return True
    return fact.measured.get("req_s", fact.rate) < AT_LOAD * fact.rate


def frame(points: Iterable[Point], group: Callable[[Fact], str] = lambda fact: "all") -> pd.DataFrame:
    """A row for each point: its group, metric, error, and whether what was measured lies in the stated range."""
    rows = (
        (group(point.fact), point.metric, point.error, point.low <= point.measured <= point.high) for point in points
    )
    return pd.DataFrame(rows, columns=["group", "metric", "error", "within"])


def line_of(rows: pd.DataFrame) -> Line:
    absolute = rows["error"].abs()
    p90 = np.quantile(absolute, 0.9, method="inverted_cdf")  # the smallest error with 9 in 10 at or below it
    return Line(
        len(rows), float(absolute.median()), float(p90), float(rows["error"].median()), float(rows["within"].mean())
    )


def line(points: Iterable[Point]) -> Line:
    return line_of(frame(points))


# --- groups -----------------------------------------------------------------------------------------------------------


def model_class(fact: Fact) -> str:
    """Dense or experts, and what the weights are stored in."""
    spec = spec_of(fact.model)
    kind = "experts" if spec.experts_per_token else "dense"
    method = "16 bits" if spec.quantization is None else spec.quantization.method
    return f"{kind}, {method}"


def size_class(fact: Fact) -> str:
    spec = spec_of(fact.model)
    total = sum(weight.num_params for weights in spec.layer_weights for weight in weights) / 1e9
    return "below 3 B" if total < 3 else "3-20 B" if total < 20 else "20-100 B" if total < 100 else "100 B and more"


def load_class(fact: Fact) -> str:
    if fact.users is None:
        return "all at once" if fact.rate == float("inf") else "by the clock"
    names = ((1, "1 user"), (8, "2-8 users"), (32, "9-32 users"))
    return next((name for most, name in names if fact.users <= most), "33 users and more")


def server(fact: Fact) -> str:
    if fact.engine not in OWN:
        return f"{fact.engine} (predicted as vLLM)"
    is_first = fact.engine == "vllm" and fact.version.startswith(("0.6", "0.7"))
    return "vllm V0" if is_first else "vllm V1" if fact.engine == "vllm" else fact.engine


def kind(fact: Fact) -> str:
    """The kind by which `simulate` states how often its ranges held."""
    return ", ".join(kinds.group(fact))


GROUPS: Mapping[str, Callable[[Fact], str]] = {
    "source": lambda fact: fact.src,
    "server": server,
    "GPU": lambda fact: fact.gpu,
    "TP": lambda fact: str(fact.tp),
    "model": name_of,
    "model class": model_class,
    "size": size_class,
    "load": load_class,
    "kind": kind,
}


def table(points: Iterable[Point], group: Callable[[Fact], str]) -> dict[str, dict[str, Line]]:
    """Lines by group and metric."""
    return {
        str(name): {metric: line_of(own) for metric in METRICS if len(own := rows[rows["metric"] == metric])}
        for name, rows in frame(points, group).groupby("group")
    }


# --- goals ------------------------------------------------------------------------------------------------------------

VERDICTS = ("kept", "too close", "broken")


def verdict(point: Point, goal: float) -> str:
    if (point.high if point.keeps is None else point.keeps) <= goal:
        return "kept"
    return "broken" if (point.low if point.breaks is None else point.breaks) > goal else "too close"


def goals(points: Iterable[Point]) -> Counter[tuple[str, str]]:
    """(what the server did, what kvplan says) over every point and goal."""
    counts: Counter[tuple[str, str]] = Counter()
    for point in points:
        for goal in GOALS.get(point.metric, ()):
            counts["kept" if point.measured <= goal else "broken", verdict(point, goal)] += 1
    return counts
