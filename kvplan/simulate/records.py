"""What is kept of every finished request, and nothing else."""

from array import array
from dataclasses import dataclass, field


def _floats() -> "array[float]":
    return array("d")


def _ints() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Records:
    """A row per request that ended well; times in seconds from the start.

    admitted    when it was first scheduled
    cached      prompt tokens it found on the GPU; loaded: those that came from a tier
    """

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

    @property
    def ttft(self) -> list[float]:
        """Seconds from arrival to the first token."""
        return [first - came for came, first in zip(self.arrival, self.first_token, strict=True)]

    @property
    def tpot(self) -> list[float]:
        """Seconds per token after the first, of requests with at least two."""
        rows = zip(self.first_token, self.ended, self.output, strict=True)
        return [(end - first) / (n - 1) for first, end, n in rows if n > 1]

    @property
    def queued(self) -> list[float]:
        """Seconds from arrival to being scheduled."""
        return [at - came for came, at in zip(self.arrival, self.admitted, strict=True)]

    @property
    def latency(self) -> list[float]:
        """Seconds from arrival to the end."""
        return [end - came for came, end in zip(self.arrival, self.ended, strict=True)]


def percentile(values: list[float], share: float) -> float:
    """The smallest value with at least `share` of all at or below it (nearest rank); 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-len(ordered) * round(share * 10_000) // 10_000)  # ceil, without the dust of floating point
    return ordered[max(1, rank) - 1]
