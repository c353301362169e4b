"""Records of finished requests: the only per-request data that a run keeps."""

from array import array
from dataclasses import field
from typing import Literal, assert_never

from kvplan.core.records import dataclass

Metric = Literal["ttft", "tpot", "queue", "latency"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "queue", "latency")


def _floats() -> "array[float]":
    return array("d")


def _ints() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Records:
    """One row per successfully finished request; times in seconds from the start.

    number      order of arrival, from 1
    admitted    time at which the request was first scheduled
    cached      prompt tokens found in the GPU's prefix cache; loaded: prompt tokens loaded from a tier
    """

    number: "array[int]" = field(default_factory=_ints)
    arrival: "array[float]" = field(default_factory=_floats)
    admitted: "array[float]" = field(default_factory=_floats)
    first_token: "array[float]" = field(default_factory=_floats)
    ended: "array[float]" = field(default_factory=_floats)
    prompt: "array[int]" = field(default_factory=_ints)
    output: "array[int]" = field(default_factory=_ints)
    cached: "array[int]" = field(default_factory=_ints)
    loaded: "array[int]" = field(default_factory=_ints)
    preemptions: "array[int]" = field(default_factory=_ints)

    def __len__(self) -> int:
        return len(self.arrival)

    def times(self, metric: "Metric", after: int = 0) -> list[float]:
        """Return the metric in seconds of each request that arrived after the first `after`.

        ttft     from arrival to the first token
        tpot     per token after the first, of requests with at least two
        queue    from arrival to being scheduled
        latency  from arrival to the end
        """
        rows = [row for row, number in enumerate(self.number) if number > after]
        match metric:
            case "ttft":
                return [self.first_token[row] - self.arrival[row] for row in rows]
            case "tpot":
                return [
                    (self.ended[row] - self.first_token[row]) / (self.output[row] - 1)
                    for row in rows
                    if self.output[row] > 1
                ]
            case "queue":
                return [self.admitted[row] - self.arrival[row] for row in rows]
            case "latency":
                return [self.ended[row] - self.arrival[row] for row in rows]
            case _:
                assert_never(metric)

    def waits(self, after: int = 0) -> bool:
        """Return whether requests wait for others for most of their time to the first token: longer than the request
        that waits the least, by more than what the prompts themselves take.
        """
        queued = self.times("queue", after)
        others = sum(queued) - len(queued) * min(self.times("queue"), default=0.0)
        return others > sum(self.times("ttft", after)) / 2


def percentile(values: list[float], share: float, beyond: int = 0) -> float | None:
    """Return the smallest value with at least `share` of all values at or below it (nearest rank).

    beyond  number of additional values above all others
    Return None if there are no values, or if the percentile is one of those beyond.
    """
    count = len(values) + beyond
    rank = max(1, -(-count * round(share * 10_000) // 10_000))  # ceil, free of rounding errors
    return sorted(values)[rank - 1] if rank <= len(values) else None
