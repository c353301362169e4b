"""Averages over time in a fixed number of buckets, however long it takes."""

from dataclasses import dataclass, field

MAX_BUCKETS = 1024
FIRST_WIDTH_S = 0.125


# What holds during a step: sequences that run and wait, blocks in use, tokens stored, slots given to them.
LEVELS = ("running", "waiting", "used_blocks", "stored_tokens", "slots")
WAITING = LEVELS.index("waiting")


@dataclass(slots=True)
class Bucket:
    """Seconds of the steps that began in it, level x seconds, and the highest of each."""

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
        """Sums that steps were added to elsewhere, and the highest of each level in them."""
        self.seconds = seconds
        self.sums[:] = sums
        peaks = self.peaks
        for i, level in enumerate(levels):
            if level > peaks[i]:
                peaks[i] = level
        self.tokens += tokens


class Timeline:
    """Levels over time; a bucket's width doubles whenever MAX_BUCKETS are full."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.buckets: list[Bucket] = []

    def add(self, start: float, seconds: float, levels: tuple[int, ...], tokens: int) -> None:
        """A step: what held while it ran, and the tokens it gave."""
        bucket = self._bucket(start)
        bucket.seconds += seconds
        bucket.tokens += tokens
        sums, peaks = bucket.sums, bucket.peaks
        for i, level in enumerate(levels):
            sums[i] += level * seconds
            if level > peaks[i]:
                peaks[i] = level

    def add_wait(self, start: float, seconds: float) -> None:
        """A request that came while a step ran, and waited for its end."""
        self._bucket(start).sums[WAITING] += seconds

    def bucket(self, start: float) -> tuple[Bucket, float]:
        """The bucket of a step that begins at `start`, and where the next one begins."""
        bucket = self._bucket(start)
        return bucket, (int(start / self.width_s) + 1) * self.width_s

    def _bucket(self, start: float) -> Bucket:
        index = int(start / self.width_s)
        while index >= MAX_BUCKETS:
            self._halve()
            index = int(start / self.width_s)
        while len(self.buckets) <= index:
            self.buckets.append(Bucket())
        return self.buckets[index]

    def _halve(self) -> None:
        merged = []
        for left in range(0, len(self.buckets), 2):
            bucket = self.buckets[left]
            if left + 1 < len(self.buckets):
                bucket.take(self.buckets[left + 1])
            merged.append(bucket)
        self.buckets, self.width_s = merged, self.width_s * 2

    def mean(self, level: str, seconds: float) -> float:
        """Time average over `seconds`."""
        index = LEVELS.index(level)
        return sum(bucket.sums[index] for bucket in self.buckets) / seconds if seconds else 0.0

    def peak(self, level: str) -> int:
        index = LEVELS.index(level)
        return max((bucket.peaks[index] for bucket in self.buckets), default=0)
