"""What is kept of every finished request, and nothing else."""

from array import array
from dataclasses import dataclass, field
from typing import Literal, assert_never

Metric = Literal["ttft", "tpot", "queue", "latency"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "queue", "latency")


def _floats() -> "array[float]":
    return array("d")


def _ints() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Records:
    """A row per request that ended well; times in seconds from the start.

    number      in the order they came, from 1
    admitted    when it was first scheduled
    cached      prompt tokens it found on the GPU; loaded: those that came from a tier
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
        """Seconds of each request that came after the first `after`.

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


def percentile(values: list[float], share: float, beyond: int = 0) -> float | None:
    """The smallest value with at least `share` of all at or below it (nearest rank); None of none.

    beyond  how many more there are that lie above every value; None where the percentile is one of those
    """
    count = len(values) + beyond
    rank = max(1, -(-count * round(share * 10_000) // 10_000))  # ceil, without the dust of floating point
    return sorted(values)[rank - 1] if rank <= len(values) else None
