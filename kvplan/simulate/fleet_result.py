"""Figures of a fleet run: overall and per replica."""

from kvplan.core.records import dataclass
from kvplan.simulate.fleet import Fleet, Replica, Role, State
from kvplan.simulate.records import METRICS, Metric
from kvplan.simulate.result import Result, Spread, queue_grows, spread
from kvplan.simulate.runs import Run
from kvplan.simulate.timeline import LEVELS


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """One replica's figures, from its start to its end or the fleet's.

    seconds  time in which it was up: rented, and neither starting nor down
    times    measured from the time the request was sent to the replica
    busy     fraction of `seconds` spent in steps
    """

    index: int
    kind: str
    role: Role
    state: State
    seconds: float
    failures: int
    requests: int
    times: dict[Metric, Spread]
    busy: float
    running_mean: float
    running_peak: int
    waiting_mean: float
    waiting_peak: int
    kv_usage_mean: float
    kv_usage_peak: float
    preemptions: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Figures of the whole fleet.

    total      figures as if of one server; peaks are the highest of any one replica
    resent     requests that were sent again because a replica failed
    gpu_hours  GPU hours of all replicas, from their starts to their ends
    sizes      (seconds, serving replicas) at each change
    """

    total: Result
    resent: int
    unserved: int
    size_mean: float
    size_peak: int
    gpu_hours: float
    replicas: tuple[ReplicaResult, ...]
    sizes: tuple[tuple[float, int], ...]


def fleet_result(fleet: Fleet, skipped: int = 0, *, by_clock: bool = False) -> FleetResult:
    """Return the figures of a finished fleet run; its times leave out the first `skipped` arrivals."""
    seconds = fleet.clock
    replicas = tuple(replica_result(replica, seconds) for replica in fleet.replicas)
    ends = [*(time for time, _ in fleet.sizes[1:]), seconds]
    area = sum(count * max(0.0, end - start) for (start, count), end in zip(fleet.sizes, ends, strict=True))
    hours = sum(rented_seconds(replica, seconds) * replica.kind.num_gpus for replica in fleet.replicas) / 3600
    return FleetResult(
        total=total(fleet, skipped, by_clock=by_clock),
        resent=fleet.num_resent,
        unserved=fleet.num_held,
        size_mean=area / seconds if seconds else float(len(fleet.replicas)),
        size_peak=max(count for _, count in fleet.sizes),
        gpu_hours=hours,
        replicas=replicas,
        sizes=tuple(fleet.sizes),
    )


def rented_seconds(replica: Replica, seconds: float) -> float:
    return max(0.0, (seconds if replica.ended is None else replica.ended) - replica.begun)


def up_seconds(replica: Replica, seconds: float) -> float:
    """Return the seconds of a run of `seconds` in which the replica was neither starting nor down."""
    end = seconds if replica.ended is None else replica.ended
    still_down = 0.0 if replica.down_since is None else end - replica.down_since
    return max(0.0, rented_seconds(replica, seconds) - replica.down_s - max(0.0, still_down))


def area(runs: list[Run], level: str) -> float:
    """Return the integral of a level over time, summed over the runs."""
    place = LEVELS.index(level)
    return sum(bucket.sums[place] for run in runs for bucket in run.timeline.buckets)


def replica_result(replica: Replica, seconds: float) -> ReplicaResult:
    runs = [life.run for life in replica.lives]
    up = up_seconds(replica, seconds)
    usable = runs[0].num_usable_blocks
    looked_up = sum(run.prefix_cache_stats.queries for run in runs)
    times = {metric: spread([value for run in runs for value in run.records.times(metric)]) for metric in METRICS}
    return ReplicaResult(
        index=replica.index,
        kind=replica.kind.name,
        role=replica.kind.role,
        state=replica.state,
        seconds=up,
        failures=replica.failures,
        requests=sum(len(run.records) for run in runs),
        times=times,
        busy=min(1.0, sum(bucket.seconds for run in runs for bucket in run.timeline.buckets) / up) if up else 0.0,
        running_mean=area(runs, "running") / up if up else 0.0,
        running_peak=max(run.timeline.peak("running") for run in runs),
        waiting_mean=area(runs, "waiting") / up if up else 0.0,
        waiting_peak=max(run.timeline.peak("waiting") for run in runs),
        kv_usage_mean=area(runs, "used_blocks") / up / usable if up else 0.0,
        kv_usage_peak=max(run.timeline.peak("used_blocks") for run in runs) / usable,
        preemptions=sum(run.num_preemptions for run in runs),
        hit_rate=sum(run.prefix_cache_stats.hits for run in runs) / looked_up if looked_up else 0.0,
    )


def total(fleet: Fleet, skipped: int, *, by_clock: bool) -> Result:
    """Return the fleet's figures as if of one server."""
    records, counts, runs, seconds = fleet.records, fleet.counts, list(fleet.runs), fleet.clock
    looked_up = sum(run.prefix_cache_stats.queries for run in runs)
    hits = sum(run.prefix_cache_stats.hits for run in runs)
    first, last = min(records.arrival, default=0.0), max(records.arrival, default=0.0)
    pool_seconds = sum(up_seconds(replica, seconds) * replica.run.num_usable_blocks for replica in fleet.replicas)
    slots = area(runs, "slots")
    return Result(
        num_requests=counts.arrived,
        finished=len(records),
        judged=sum(number > skipped for number in records.number),
        rejected=counts.rejected,
        failed=counts.failed,
        seconds=seconds,
        steps=counts.steps,
        jumped_steps=counts.jumped,
        times={metric: spread(records.times(metric, skipped)) for metric in METRICS},
        running_mean=area(runs, "running") / seconds if seconds else 0.0,
        running_peak=max(run.timeline.peak("running") for run in runs),
        waiting_mean=area(runs, "waiting") / seconds if seconds else 0.0,
        waiting_peak=max(run.timeline.peak("waiting") for run in runs),
        kv_usage_mean=area(runs, "used_blocks") / pool_seconds if pool_seconds else 0.0,
        kv_usage_peak=max(run.timeline.peak("used_blocks") / run.num_usable_blocks for run in runs),
        empty_slots=max(0.0, 1 - area(runs, "stored_tokens") / slots) if slots else None,
        preempted=sum(count > 0 for count in records.preemptions),
        preemptions=sum(run.num_preemptions for run in runs),
        hit_rate=hits / looked_up if looked_up else 0.0,
        hit_tokens=hits,
        looked_up_tokens=looked_up,
        tiers=(),
        loaded_tokens=sum(records.loaded),
        requests_per_s=len(records) / seconds if seconds else 0.0,
        output_tokens_per_s=counts.output_tokens / seconds if seconds else 0.0,
        prompt_tokens_per_s=counts.prompt_tokens / seconds if seconds else 0.0,
        arrival_rate=(len(records) - 1) / (last - first) if last > first else None,
        queue_grows=by_clock and queue_grows(records),
    )
