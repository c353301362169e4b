"""Averages over time in a bounded number of buckets, however long the run."""

from dataclasses import field
from math import inf

from kvplan.core.records import dataclass

MAX_BUCKETS = 1024
FIRST_WIDTH_S = 0.125


# Levels during a step: running and waiting sequences, blocks in use, tokens stored, slots allocated to them.
LEVELS = ("running", "waiting", "used_blocks", "stored_tokens", "slots")
WAITING = LEVELS.index("waiting")


@dataclass(slots=True)
class Bucket:
    """Seconds of the steps that began in the bucket, sums of level x seconds, and each level's peak."""

    seconds: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    peaks: list[int] = field(default_factory=lambda: [0] * len(LEVELS))
    tokens: int = 0

    def take(self, other: "Bucket") -> None:
        self.seconds += other.seconds
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        self.peaks = [max(a, b) for a, b in zip(self.peaks, other.peaks, strict=True)]
        self.tokens += other.tokens

    def put(self, seconds: float, sums: tuple[float, ...], levels: tuple[int, ...], tokens: int) -> None:
        """Store sums to which the caller has added steps, and raise the peaks to the levels in them."""
        self.seconds = seconds
        self.sums[:] = sums
        self.tokens += tokens
        self.raise_peaks(levels)

    def raise_peaks(self, levels: tuple[int, ...]) -> None:
        peaks = self.peaks
        for i, level in enumerate(levels):
            if level > peaks[i]:
                peaks[i] = level


class Timeline:
    """Levels over time; a bucket's width doubles whenever MAX_BUCKETS are full."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.buckets: list[Bucket] = []
        self._last = Bucket(), inf, -inf  # the bucket of the last step, and its start and end

    def add(self, start: float, seconds: float, levels: tuple[int, ...], tokens: int) -> None:
        """Add a step: the levels while it ran, and the number of tokens it sampled."""
        bucket = self._bucket(start)
        bucket.seconds += seconds
        bucket.tokens += tokens
        sums = bucket.sums
        running, waiting, used, stored, slots = levels  # written out: it is called at every step
        sums[0] += running * seconds
        sums[1] += waiting * seconds
        sums[2] += used * seconds
        sums[3] += stored * seconds
        sums[4] += slots * seconds
        bucket.raise_peaks(levels)

    def add_wait(self, start: float, seconds: float, waiting: int) -> None:
        """Add the wait of a request that arrived during a step; waiting: queue length including it."""
        bucket = self._bucket(start)
        bucket.sums[WAITING] += seconds
        bucket.peaks[WAITING] = max(bucket.peaks[WAITING], waiting)

    def bucket(self, start: float) -> tuple[Bucket, float]:
        """Return the bucket of a step that begins at `start`, and the next bucket's start."""
        return self._bucket(start), self._last[2]

    def _bucket(self, start: float) -> Bucket:
        last, begin, end = self._last
        if begin <= start < end:
            return last
        index = int(start / self.width_s)
        while index >= MAX_BUCKETS:
            self._halve()
            index = int(start / self.width_s)
        while len(self.buckets) <= index:
            self.buckets.append(Bucket())
        bucket = self.buckets[index]
        self._last = bucket, index * self.width_s, (index + 1) * self.width_s  # exact: widths are powers of two
        return bucket

    def _halve(self) -> None:
        merged = []
        for left in range(0, len(self.buckets), 2):
            bucket = self.buckets[left]
            if left + 1 < len(self.buckets):
                bucket.take(self.buckets[left + 1])
            merged.append(bucket)
        self.buckets, self.width_s = merged, self.width_s * 2

    def mean(self, level: str, seconds: float) -> float:
        """Return a level's time average over `seconds`."""
        index = LEVELS.index(level)
        return sum(bucket.sums[index] for bucket in self.buckets) / seconds if seconds else 0.0

    def peak(self, level: str) -> int:
        index = LEVELS.index(level)
        return max((bucket.peaks[index] for bucket in self.buckets), default=0)
