"""What users are promised, whether a run keeps it, and the largest load that does."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_duration, parse_fraction
from kvplan.simulate.ranges import Ranges, Verdict, verdict
from kvplan.simulate.records import METRICS, Metric, percentile
from kvplan.simulate.runs import Served

OPTION = "--slo"
FORMS = "write ttft=2s,tpot=50ms,preempt<1% (of ttft, tpot, queue, latency: the 99th percentile; ttft.p95=2s another)"
DEFAULT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Promise:
    """A percentile of a time in seconds, at most `limit`; or, without a metric, the share of requests preempted."""

    metric: Metric | None
    share: float
    limit: float

    @property
    def name(self) -> str:
        return "preempted" if self.metric is None else f"{self.metric} p{self.share * 100:g}"

    def value(self, simulation: Served, skipped: int) -> float | None:
        """What the run showed of the requests that are judged; None where the percentile is a request that got nothing.

        A request that is refused (too long for the context or the pool) misses every promise.
        """
        records, refused = simulation.records, refused_requests(simulation)
        if self.metric is not None:
            times = records.times(self.metric, skipped)
            if times or refused:
                return percentile(times, self.share, refused)
            # Answers of one token have no time per token after the first.
            return 0.0 if any(number > skipped for number in records.number) else None
        judged = [count for number, count in zip(records.number, records.preemptions, strict=True) if number > skipped]
        if not judged:
            return None
        return (sum(count > 0 for count in judged) + refused) / (len(judged) + refused)


def refused_requests(simulation: Served) -> int:
    return simulation.counts.rejected + simulation.counts.failed


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise, what the run showed, and its range; with nothing to show it is not kept."""

    promise: Promise
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the likely value keeps it."""
        return self.value is not None and self.value <= self.promise.limit

    @property
    def verdict(self) -> Verdict:
        """Whether it is kept over the whole range, nowhere in it, or in a part."""
        if self.value is None:
            return "broken"
        low = self.value if self.low is None else self.low
        return verdict(low, self.value if self.high is None else self.high, self.promise.limit)


def parse_slo(text: str) -> tuple[Promise, ...]:
    promises: list[Promise] = []
    for part in text.split(","):
        match = re.fullmatch(r"([a-z]+)(?:\.p([0-9]{1,2}(?:\.[0-9]{1,2})?))?(?:=|<=?)(.+)", part.strip())
        if match is None:
            raise UsageError(OPTION, f"{printable(part)!r} is not understood", f"{FORMS}")
        name, share, limit = match.groups()
        if name in ("preempt", "preempted") and share is None:
            promise = Promise(None, 1.0, 0.0 if limit in ("0", "0%") else parse_fraction(limit, OPTION))
        elif name in METRICS:
            of = DEFAULT_SHARE if share is None else float(share) / 100
            if of <= 0:
                raise UsageError(OPTION, f"{printable(part)!r} names the percentile 0", f"{FORMS}")
            promise = Promise(METRICS[METRICS.index(name)], of, parse_duration(limit, OPTION))
        else:
            raise UsageError(OPTION, f"{printable(part)!r} is not understood", f"{FORMS}")
        if any((other.metric, other.share) == (promise.metric, promise.share) for other in promises):
            raise UsageError(OPTION, f"{promise.name} is set twice", "leave one out")
        promises.append(promise)
    return tuple(promises)


def outcomes(
    promises: tuple[Promise, ...], simulation: Served, skipped: int, ranges: Ranges | None = None
) -> tuple[Kept, ...]:
    """Each promise with what the run showed; without ranges a figure is taken for exact."""
    return tuple(kept_promise(promise, promise.value(simulation, skipped), ranges) for promise in promises)


def kept_promise(promise: Promise, value: float | None, ranges: Ranges | None) -> Kept:
    if value is None or ranges is None:
        return Kept(promise, value, value, value)
    return Kept(promise, value, *ranges.time(promise.metric, value))


def good_requests(promises: tuple[Promise, ...], simulation: Served, skipped: int) -> int:
    """Requests that are judged and keep every promised time by themselves: what load generators call goodput.

    An answer of one token keeps any time per token.
    """
    records = simulation.records
    limits = {promise.metric: promise.limit for promise in promises if promise.metric is not None}
    good = 0
    for row, number in enumerate(records.number):
        first, ended, arrival = records.first_token[row], records.ended[row], records.arrival[row]
        times = {
            "ttft": first - arrival,
            "tpot": (ended - first) / max(1, records.output[row] - 1),
            "queue": records.admitted[row] - arrival,
            "latency": ended - arrival,
        }
        good += number > skipped and all(times[metric] <= limit for metric, limit in limits.items())
    return good


class Broken:
    """Tells while a run goes on that a promise can no longer be kept: already too many requests have missed it."""

    def __init__(self, promises: tuple[Promise, ...], num_requests: int, skipped: int) -> None:
        self._promises, self._skipped = promises, skipped
        judged = num_requests - skipped
        # By nearest rank the percentile is kept while at most this many lie above the limit.
        self._may_miss = [judged - _rank(judged, promise) for promise in promises]
        self._missed = [0] * len(promises)
        self._seen = 0

    def __call__(self, simulation: Served) -> bool:
        records = simulation.records
        while self._seen < len(records):
            row, self._seen = self._seen, self._seen + 1
            if records.number[row] <= self._skipped:
                continue
            for i, promise in enumerate(self._promises):
                self._missed[i] += _misses(promise, simulation, row)
        refused = refused_requests(simulation)
        return any(missed + refused > may for missed, may in zip(self._missed, self._may_miss, strict=True))


def _rank(judged: int, promise: Promise) -> int:
    """How many requests must keep the promise."""
    if promise.metric is None:
        most = round(judged * promise.limit)  # the product of floats may lie on either side of a whole number
        return judged - (most if judged == 0 or most / judged <= promise.limit else most - 1)
    return max(1, -(-judged * round(promise.share * 10_000) // 10_000))


def _misses(promise: Promise, simulation: Served, row: int) -> bool:
    records = simulation.records
    match promise.metric:
        case None:
            return records.preemptions[row] > 0
        case "ttft":
            return records.first_token[row] - records.arrival[row] > promise.limit
        case "queue":
            return records.admitted[row] - records.arrival[row] > promise.limit
        case "latency":
            return records.ended[row] - records.arrival[row] > promise.limit
        case "tpot":  # requests of one token have none, so that the number judged is only known at the end
            return False


# --- the largest load -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest load that keeps every promise, and the smallest that was tried and breaks one; None: none did."""

    keeps: float | None
    breaks: float | None
    runs: int


PRECISION = 0.02
DOUBLINGS = 12


def largest_rate(start: float, keeps: Callable[[float], bool]) -> Largest:
    """By doubling or halving from `start`, then bisection to 2 %."""
    return _largest(start, keeps, lambda low, high: (low + high) / 2 if high > low * (1 + PRECISION) else None)


def largest_users(start: int, keeps: Callable[[int], bool], most: int) -> Largest:
    """The same over whole users, at most `most`."""

    def between(low: float, high: float) -> float | None:
        return (int(low) + int(high)) // 2 if high - low > 1 and high > low * (1 + PRECISION) else None

    return _largest(float(start), lambda users: keeps(int(users)), between, least=1.0, most=float(most))


def _largest(
    start: float,
    keeps: Callable[[float], bool],
    between: Callable[[float, float], float | None],
    *,
    least: float = 0.0,
    most: float = float("inf"),
) -> Largest:
    low: float | None = None
    high: float | None = None
    load, runs = min(start, most), 0
    for _ in range(DOUBLINGS):
        runs += 1
        if keeps(load):
            low = load
            if high is not None or load >= most:
                break
            load = min(load * 2, most)
        else:
            high = load
            if low is not None or load <= least:
                break
            load = max(load / 2 if least == 0 else float(int(load) // 2), least)
    while low is not None and high is not None and (middle := between(low, high)) is not None:
        runs += 1
        if keeps(middle):
            low = middle
        else:
            high = middle
    return Largest(low, high, runs)
