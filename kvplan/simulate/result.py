"""What a run showed, as figures."""

from collections.abc import Callable
from dataclasses import dataclass

from kvplan.simulate.records import METRICS, Metric, Records, percentile
from kvplan.simulate.runs import Run

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: mean and percentiles by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class TierResult:
    """Tokens a tier served, and their share of the prompt tokens looked up."""

    name: str
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run's figures; averages are over time, from the first arrival to the last end.

    judged           requests whose times are in `times`: all but each user's first, where users wait for answers
    rejected         requests with a prompt that the context does not hold; failed: larger than the whole pool
    preempted        requests that were preempted at least once; preemptions: how often that happened
    kv_usage         share of the pool's blocks in use, mean and highest
    empty_slots      share of the slots of running requests' blocks in which nothing is stored; None: states only
    hit_rate         share of the looked-up prompt tokens found in the GPU's prefix cache
    arrival_rate     finished requests per second between the first and the last of their arrivals; None of one
    queue_grows      whether requests come faster than they are served, by the clock
    """

    num_requests: int
    finished: int
    judged: int
    rejected: int
    failed: int
    seconds: float
    steps: int
    jumped_steps: int
    times: dict[Metric, Spread]
    running_mean: float
    running_peak: int
    waiting_mean: float
    waiting_peak: int
    kv_usage_mean: float
    kv_usage_peak: float
    empty_slots: float | None
    preempted: int
    preemptions: int
    hit_rate: float
    hit_tokens: int
    looked_up_tokens: int
    tiers: tuple[TierResult, ...]
    loaded_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    arrival_rate: float | None
    queue_grows: bool = False


GROWTH = 1.8  # of a queue that grows steadily the last quarter of the arrivals waits 7/3 as long as the second


def queue_grows(records: Records) -> bool:
    """Whether the time in queue goes on growing as long as requests come.

    Told by the last quarter of the arrivals: it waits much longer than the second, and longer than it is served.
    """
    order = sorted(range(len(records)), key=lambda row: records.arrival[row])
    if len(order) < 40:
        return False
    quarter = len(order) // 4

    def mean(rows: list[int], times: Callable[[int], float]) -> float:
        return sum(map(times, rows)) / len(rows)

    def queue(row: int) -> float:
        return records.admitted[row] - records.arrival[row]

    second, last = order[quarter : 2 * quarter], order[-quarter:]
    if records.arrival[order[-1]] <= records.arrival[order[0]] or mean(last, queue) < GROWTH * mean(second, queue):
        return False
    return mean(last, queue) > mean(last, lambda row: records.ended[row] - records.admitted[row])


def spread(values: list[float]) -> Spread:
    mean = sum(values) / len(values) if values else 0.0
    values = sorted(values)
    p50, p90, p99 = (percentile(values, share) or 0.0 for share in SHARES)
    return Spread(mean, p50, p90, p99)


def result(simulation: Run, skipped: int = 0, *, by_clock: bool = False) -> Result:
    """The figures of a run that has ended; the first `skipped` arrivals are not among its times.

    by_clock  requests come whatever the server does, so that a queue may grow without end
    """
    records, timeline, counts = simulation.records, simulation.timeline, simulation.counts
    seconds = max(records.ended, default=simulation.clock)
    cache, usable = simulation.prefix_cache_stats, simulation.num_usable_blocks
    slots = timeline.mean("slots", seconds)
    first, last = min(records.arrival, default=0.0), max(records.arrival, default=0.0)
    times: dict[Metric, Spread] = {metric: spread(records.times(metric, skipped)) for metric in METRICS}
    tiers = simulation.tiers
    return Result(
        num_requests=counts.arrived,
        finished=len(records),
        judged=sum(number > skipped for number in records.number),
        rejected=counts.rejected,
        failed=counts.failed,
        seconds=seconds,
        steps=counts.steps,
        jumped_steps=counts.jumped,
        times=times,
        running_mean=timeline.mean("running", seconds),
        running_peak=timeline.peak("running"),
        waiting_mean=timeline.mean("waiting", seconds),
        waiting_peak=timeline.peak("waiting"),
        kv_usage_mean=timeline.mean("used_blocks", seconds) / usable,
        kv_usage_peak=timeline.peak("used_blocks") / usable,
        empty_slots=max(0.0, 1 - timeline.mean("stored_tokens", seconds) / slots) if slots else None,
        preempted=sum(count > 0 for count in records.preemptions),
        preemptions=simulation.num_preemptions,
        hit_rate=cache.hits / cache.queries if cache.queries else 0.0,
        hit_tokens=cache.hits,
        looked_up_tokens=cache.queries,
        tiers=()
        if tiers is None
        else tuple(
            TierResult(tier.spec.name, tier.hit_tokens, tier.hit_tokens / tiers.looked_up if tiers.looked_up else 0.0)
            for tier in tiers.tiers
        ),
        loaded_tokens=sum(records.loaded),
        requests_per_s=len(records) / seconds if seconds else 0.0,
        output_tokens_per_s=counts.output_tokens / seconds if seconds else 0.0,
        prompt_tokens_per_s=counts.prompt_tokens / seconds if seconds else 0.0,
        arrival_rate=(len(records) - 1) / (last - first) if last > first else None,
        queue_grows=by_clock and queue_grows(records),
    )
