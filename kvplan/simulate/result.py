"""Figures of a simulated run."""

from collections.abc import Callable

from kvplan.core.records import dataclass
from kvplan.simulate.records import METRICS, Metric, Records, percentile
from kvplan.simulate.runs import Run

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and nearest-rank percentiles in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class TierResult:
    """Tokens served by a tier, and their share of the prompt tokens looked up."""

    name: str
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run's figures; averages are over time, from the first arrival to the last end.

    judged           requests whose times are in `times`: all, but without each user's first in a closed loop
    rejected         requests with a prompt longer than the context; failed: larger than the whole pool
    preempted        requests preempted at least once; preemptions: number of preemptions
    kv_usage         share of the pool's blocks in use, mean and peak
    empty_slots      share of unused slots in running requests' blocks; None if not tracked (states only, prefill first)
    hit_rate         share of the looked-up prompt tokens found in the GPU's prefix cache
    arrival_rate     finished requests per second between the first and the last of their arrivals; None if at most one
    queue_grows      True if requests of an open loop arrive faster than they are served
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


GROWTH = 1.8  # in a steadily growing queue the last quarter of the arrivals waits 7/3 as long as the second


def queue_grows(records: Records) -> bool:
    """True if the time in queue keeps growing as long as requests arrive.

    The criterion: the last quarter of the arrivals waits much longer than the second quarter, and longer than it runs.
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
    """Return the figures of a finished run; its times leave out the first `skipped` arrivals.

    by_clock  True for an open loop, whose queue may grow without limit
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
            TierResult(spec.name, tokens, tokens / tiers.looked_up if tiers.looked_up else 0.0)
            for spec, tokens in zip(tiers.specs, tiers.hit_tokens, strict=True)
        ),
        loaded_tokens=sum(records.loaded),
        requests_per_s=len(records) / seconds if seconds else 0.0,
        output_tokens_per_s=counts.output_tokens / seconds if seconds else 0.0,
        prompt_tokens_per_s=counts.prompt_tokens / seconds if seconds else 0.0,
        arrival_rate=(len(records) - 1) / (last - first) if last > first else None,
        queue_grows=by_clock and queue_grows(records),
    )
