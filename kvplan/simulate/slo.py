"""Latency targets: parsing, evaluation on a run, and the largest load that meets them."""

import re
from collections.abc import Callable

from kvplan.core.errors import Faults, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import parse_duration, parse_fraction
from kvplan.simulate.ranges import Ranges, Verdict, verdict
from kvplan.simulate.records import METRICS, Metric, percentile
from kvplan.simulate.runs import ServedRequests

OPTION = "--slo"
FORMS = "metrics are ttft, tpot, queue, latency (p99, or e.g. ttft.p95=2s) and preempt<1%"
DEFAULT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Promise:
    """A target: percentile `share` of a metric in seconds, or without a metric the share of preempted requests, is at
    most `limit`.
    """

    metric: Metric | None
    share: float
    limit: float

    @property
    def name(self) -> str:
        return "preempted" if self.metric is None else f"{self.metric} p{self.share * 100:g}"

    def value(self, simulation: ServedRequests, skipped: int) -> float | None:
        """Return the value over the judged requests, or None if the percentile is a request that was not served.

        A refused request (too long for the context or the pool) misses every target.
        """
        records, refused = simulation.records, refused_requests(simulation)
        if self.metric is not None:
            times = records.times(self.metric, skipped)
            if times or refused:
                return percentile(times, self.share, refused)
            # Responses of one token have no time per token after the first.
            return 0.0 if any(number > skipped for number in records.number) else None
        judged = [count for number, count in zip(records.number, records.preemptions, strict=True) if number > skipped]
        if not judged:
            return None
        return (sum(count > 0 for count in judged) + refused) / (len(judged) + refused)


def refused_requests(simulation: ServedRequests) -> int:
    return simulation.counts.rejected + simulation.counts.failed


@dataclass(frozen=True, slots=True)
class Kept:
    """A target with the run's value, and between what values it is too close to call; without a value it is missed."""

    promise: Promise
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_kept(self) -> bool:
        """True if the likely value meets the target."""
        return self.value is not None and self.value <= self.promise.limit

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met over the whole range, nowhere in it, or in part of it."""
        if self.value is None:
            return "broken"
        low = self.value if self.low is None else self.low
        return verdict(low, self.value if self.high is None else self.high, self.promise.limit)


def parse_slo(text: str) -> tuple[Promise, ...]:
    promises, faults = list[Promise](), Faults()
    for part in text.split(","):
        with faults.part():
            promise = parse_promise(part)
            if any((other.metric, other.share) == (promise.metric, promise.share) for other in promises):
                raise UsageError(OPTION, f"{promise.name} is set twice", "use only one")
            promises.append(promise)
    faults.refuse()
    return tuple(promises)


def parse_promise(part: str) -> Promise:
    match = re.fullmatch(r"([a-z]+)(?:\.p([0-9]{1,2}(?:\.[0-9]{1,2})?))?(?:=|<=?)(.+)", part.strip())
    if match is None:
        raise UsageError(OPTION, f"{printable(part)!r} is not understood", f"{FORMS}")
    name, share, limit = match.groups()
    if name in ("preempt", "preempted") and share is None:
        return Promise(None, 1.0, 0.0 if limit in ("0", "0%") else parse_fraction(limit, f"{OPTION} {name}"))
    if name not in METRICS:
        raise UsageError(OPTION, f"unknown metric {printable(name)!r}", f"{FORMS}")
    of = DEFAULT_SHARE if share is None else float(share) / 100
    if of <= 0:
        raise UsageError(OPTION, f"{printable(part)!r} names the percentile 0", f"{FORMS}")
    return Promise(METRICS[METRICS.index(name)], of, parse_duration(limit, f"{OPTION} {name}"))


def outcomes(
    promises: tuple[Promise, ...], simulation: ServedRequests, skipped: int, ranges: Ranges | None = None
) -> tuple[Kept, ...]:
    """Return each target with the run's value; without ranges a value counts as exact."""
    ranges = None if ranges is None else ranges.of(waits=simulation.records.waits(skipped))
    return tuple(kept_promise(promise, promise.value(simulation, skipped), ranges) for promise in promises)


def kept_promise(promise: Promise, value: float | None, ranges: Ranges | None) -> Kept:
    if value is None or ranges is None:
        return Kept(promise, value, value, value)
    return Kept(promise, value, *ranges.target(promise.metric, value))


def good_requests(promises: tuple[Promise, ...], simulation: ServedRequests, skipped: int) -> int:
    """Return the number of judged requests that meet every latency target individually (goodput).

    A response of one token meets any TPOT target.
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
    """Stop condition of a run: True as soon as too many requests have missed a target for it to be met."""

    def __init__(self, promises: tuple[Promise, ...], num_requests: int, skipped: int) -> None:
        self._promises, self._skipped = promises, skipped
        judged = num_requests - skipped
        # By nearest rank, the target is met while at most this many requests lie above the limit.
        self._may_miss = [may_miss(promise, judged) for promise in promises]
        self._missed = [0] * len(promises)
        self._seen = 0

    def __call__(self, simulation: ServedRequests) -> bool:
        records = simulation.records
        while self._seen < len(records):
            row, self._seen = self._seen, self._seen + 1
            if records.number[row] <= self._skipped:
                continue
            for i, promise in enumerate(self._promises):
                self._missed[i] += _misses(promise, simulation, row)
        refused = refused_requests(simulation)
        return any(missed + refused > may for missed, may in zip(self._missed, self._may_miss, strict=True))


def may_miss(promise: Promise, judged: int) -> int:
    """Return how many of the requests may miss the target."""
    return judged - _rank(judged, promise)


def _rank(judged: int, promise: Promise) -> int:
    """Return how many requests must meet the target."""
    if promise.metric is None:
        allowed = round(judged * promise.limit)  # float products may fall on either side of an integer
        return judged - (allowed if judged == 0 or allowed / judged <= promise.limit else allowed - 1)
    return max(1, -(-judged * round(promise.share * 10_000) // 10_000))


def _misses(promise: Promise, simulation: ServedRequests, row: int) -> bool:
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
        case "tpot":  # fewer are judged if responses of one token have none, and then fewer may miss it
            times, number = records.ended[row] - records.first_token[row], records.output[row] - 1
            return number > 0 and times / number > promise.limit


# --- the largest load -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest load tried that meets all targets, and the smallest that misses one; None if there was none."""

    keeps: float | None
    breaks: float | None
    runs: int


PRECISION = 0.02
DOUBLINGS = 12


def largest_rate(start: float, keeps: Callable[[float], bool]) -> Largest:
    """Search by doubling or halving from `start`, then bisect to 2%."""
    return _largest(start, keeps, lambda low, high: (low + high) / 2 if high > low * (1 + PRECISION) else None)


def largest_users(start: int, keeps: Callable[[int], bool], most: int) -> Largest:
    """Search as largest_rate does, over integer users up to `most`."""

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
