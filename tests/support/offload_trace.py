"""A real scheduler's traces with an offloading connector, replayed: in place of the worker, copies that take steps."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

from engine.block_manager import BlockKey, Group
from engine.chunk_pool import chunk_pool
from engine.connector import Transfer, Transfers
from engine.loading import Loading
from engine.offload import OffloadConnector
from engine.scheduler import Batch, PrefixCacheStats, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import UsageError
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler
from kvplan.simulate.tiers import TierSpec, TimedTiers

SAMPLED_TOKEN = 7
KNOWN_EXTRA = {"eviction_policy", "blocks_per_chunk", "offload_prompt_only", "store_threshold"}


@dataclass
class Worker:
    """Reports a copy so many of its steps after it was handed over; a step's stores are handed over in the next one."""

    store_delay: int
    load_delay: int
    now: int = 0
    unsubmitted: list[int] = field(default_factory=list)
    due: dict[int, int] = field(default_factory=dict)  # job: step in which it is done

    def step(self, transfers: Transfers) -> list[int]:
        """The jobs that are reported done in this step."""
        self.now += 1
        early = [number for number in transfers.stores if number in transfers.flush]
        for number in (*self.unsubmitted, *early):
            self.due[number] = self.now + self.store_delay
        self.unsubmitted = [number for number in transfers.stores if number not in transfers.flush]
        for number in transfers.flush & self.due.keys():
            self.due[number] = self.now
        for number in transfers.loads:
            self.due[number] = self.now + self.load_delay
        done = sorted(number for number, step in self.due.items() if step <= self.now)
        for number in done:
            del self.due[number]
        return done


def scheduler_of(trace: dict[str, Any], config: SimulatedConfig, groups: tuple[Group, ...]) -> Scheduler:
    extra = trace["inputs"]["offload"].get("extra", {})
    unknown = set(extra) - KNOWN_EXTRA
    if unknown:
        raise UsageError(f"offload option {sorted(unknown)[0]!r}: is not one the engine's connector knows")
    pool = chunk_pool(
        trace["inputs"]["offload"]["cpu_chunks"], extra.get("eviction_policy", "lru"), extra.get("store_threshold", 1)
    )
    connector = OffloadConnector(
        groups,
        pool,
        blocks_per_chunk=extra.get("blocks_per_chunk", 1),
        prompt_only=extra.get("offload_prompt_only", True),
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return simulated_scheduler(config, trace["num_blocks"], groups, Loading(connector))


def timed_scheduler_of(trace: dict[str, Any], config: SimulatedConfig, groups: tuple[Group, ...]) -> Scheduler:
    """The scheduler that `kvplan simulate --tier` and the twin have: chunks of any size, the rest as vLLM's default."""
    tiers = TimedTiers(
        (TierSpec("cpu", trace["inputs"]["offload"]["cpu_chunks"], 1),),
        groups,
        block_bytes=1,
        chunk_bytes=1,
        blocks_per_chunk=trace["inputs"]["offload"].get("extra", {}).get("blocks_per_chunk", 1),
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return simulated_scheduler(config, trace["num_blocks"], groups, tiers)


@dataclass
class Replay:
    """One trace's run, step by step."""

    scheduler: Scheduler
    worker: Worker
    names: dict[BlockKey, str] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    jobs: dict[int, str] = field(default_factory=dict)  # request of each load

    @property
    def loading(self) -> Loading:
        loading = self.scheduler.extension(Loading)
        assert loading is not None
        return loading

    @property
    def connector(self) -> OffloadConnector:
        connector = self.loading.connector
        assert isinstance(connector, OffloadConnector)
        return connector

    @property
    def has_requests(self) -> bool:
        """Whether the engine goes on stepping."""
        return self.scheduler.has_unfinished or self.connector.is_busy

    def state(self) -> dict[str, Any]:
        pool = self.connector.pool
        return {
            "running": [seq.request_id for seq in self.scheduler.running],
            "num_waiting": self.scheduler.num_waiting,
            "free_blocks": self.scheduler.blocks.num_free_blocks,
            "cpu_pool": {
                "resident": pool.num_resident, "evictable": pool.num_evictable, "writing": pool.num_writing,
            },
        }  # fmt: skip

    def row(self, batch: Batch) -> dict[str, Any]:
        """One step in the words of the trace, before the worker's part."""
        num_held = self.scheduler.blocks.num_held
        names = self._take_names()
        added, evicted = names - self.resident, self.resident - names
        self.resident = names
        loading, transfers = self.loading, batch.extra(Transfers)
        waiting = {seq.request_id: num_held(seq) for seq in loading.loading if not loading._loaded.get(seq)}
        return {
            "scheduled": {seq.request_id: n for seq, n in batch.num_tokens.items()},
            "admitted": sorted(seq.request_id for seq in (*batch.new, *batch.resumed)),
            "new_computed_tokens": {seq.request_id: n for seq, n in batch.hits.items()},
            "preempted": sorted(seq.request_id for seq in batch.preempted),
            "start": {seq.request_id: seq.num_computed_tokens - n for seq, n in batch.num_tokens.items()},
            "blocks_held": {seq.request_id: num_held(seq) for seq in batch.num_tokens},
            "stores": self._jobs(transfers.stores),
            "loads": self._jobs(transfers.loads),
            "flush": sorted(transfers.flush),
            "cpu_added": sorted(added),
            "cpu_evicted": sorted(evicted),
            "waiting_remote": sorted(waiting),
            "blocks_held_remote": waiting,
        } | self.state()

    def _take_names(self) -> set[str]:
        """Names of the chunks in the pool; one is called after the request that had it first."""
        for name, request in self.connector._requests.items():
            for g in range(len(request.keys) if any(request.keys) else 0):  # one that was looked up has all of them
                for i, key in enumerate(self.connector._keys(request, g)):
                    self.names.setdefault(key, f"{name}.g{g}.c{i}")
        return {self.names[key] for key in self.connector.pool.policy.chunks}

    def _jobs(self, transfers: dict[int, Transfer]) -> dict[str, Any]:
        return {
            str(number): {
                "req": transfer.request_id,
                "gpu_blocks": transfer.num_blocks,
                "chunks": sorted(self.names[key] for key in self.connector._jobs[number].keys),
            }
            for number, transfer in transfers.items()
        }

    def work(self, batch: Batch) -> list[int]:
        transfers = batch.extra(Transfers)
        for number, load in transfers.loads.items():
            self.jobs[number] = load.request_id
        return self.worker.step(transfers)

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.connector.pool.check_invariants()


def replay(trace: dict[str, Any], scheduler: Scheduler, sequences: list[Sequence]) -> Iterator[tuple[int, Any]]:
    """(step, row) of each batch that was applied; the last row, step -1, holds both caches' statistics."""
    offload, depth = trace["inputs"]["offload"], trace["batch_queue_depth"]
    run = Replay(scheduler, Worker(offload.get("store_delay", 1), offload.get("load_delay", 1)))
    pending = deque(
        sorted(
            zip([request["arrive_step"] for request in trace["inputs"]["requests"]], sequences, strict=True),
            key=lambda entry: entry[0],
        )
    )
    aborts: dict[str, int] = trace["inputs"].get("aborts") or {}
    in_flight: deque[tuple[int, dict[str, Any], Batch, list[int]]] = deque()
    for step in count():
        if not (pending or run.has_requests or in_flight) or step >= trace["inputs"].get("max_steps", 600):
            break
        while pending and pending[0][0] <= step:
            scheduler.add(pending.popleft()[1])
        for name in [name for name, when in aborts.items() if when == step]:
            scheduler.abort(name)
        if run.has_requests:
            batch = scheduler.schedule()
            run.check()
            row = run.row(batch)
            done = run.work(batch)
            row |= {"recv_done": sorted(run.jobs[number] for number in done if number in run.jobs), "jobs_done": done}
            in_flight.append((step, row, batch, done))
            if depth > 1 and len(in_flight) < depth and (batch.num_tokens or run.has_requests):
                continue
        if in_flight:
            when, row, batch, done = in_flight.popleft()
            scheduler.update(batch, {seq.request_id: [SAMPLED_TOKEN] for seq in batch.samples})
            run.loading.complete(done)
            run.check()
            yield when, row | {"after_update": run.state()}
    for when, row, _, _ in in_flight:  # the run was cut off
        yield when, row
    caches = {"prefix_cache": scheduler.prefix_cache_stats, "external_prefix_cache": run.loading.external_cache_stats}
    yield -1, {f"{name}_stats": totals(stats) for name, stats in caches.items()}


def totals(stats: PrefixCacheStats) -> dict[str, int]:
    return {item.name: getattr(stats, item.name) for item in fields(stats)}


def difference(trace: dict[str, Any], scheduler: Scheduler, sequences: list[Sequence]) -> str | None:
    """The first difference between a real scheduler's steps and ours, as `step N: how`."""
    expected = {step["step"]: step | {"admitted": sorted(step["new"] + step["resumed"])} for step in trace["steps"]}
    for number, row in replay(trace, scheduler, sequences):
        theirs = trace if number < 0 else expected.pop(number, None)
        if theirs is None:
            return f"step {number}: {row['scheduled']}, expected no step"
        for key, value in row.items():
            if key == "after_update":
                value = value | {name: theirs[key][name] for name in theirs[key].keys() - value.keys()}
            if value != theirs[key]:
                return f"step {number}: {key} {value}, expected {theirs[key]}"
    if expected:
        return f"step {min(expected)}: no step, expected {expected[min(expected)]['scheduled']}"
    return None
