"""The simulation takes the steps it claims: jumps against single steps, a real scheduler's traces, the real engine."""

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager, FullGroup, Group, WindowGroup
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.states import MambaGroup
from kvplan.core.errors import InvalidInputError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import from_profile
from kvplan.simulate.steptime import StepTime, step_time
from kvplan.simulate.tiers import TierSpec, TimedTiers
from kvplan.simulate.work import Reach
from kvplan.workloads.profiles import profile
from kvplan.workloads.trace import TraceRequest
from tests.oracles import row_difference, step_row, step_state, trace_config, trace_groups
from tests.support.oracle_data import DATA
from tests.support.small_engines import engine_for, greedy, random_tokens, simulated
from tests.support.step_times import Constant, Odd

MOST_ADVANCES = 200_000  # a run that takes more has lost its way


REACHES = (Reach(None), Reach(8))
ODD = Odd((1.1e-4, 7e-5), (2.1e-4, 1.3e-5))


@dataclass(frozen=True, slots=True)
class Case:
    """All that a run is made of."""

    config: SimulatedConfig
    num_blocks: int
    groups: tuple[Group, ...]
    step_time: StepTime
    requests: tuple[TraceRequest, ...]
    run_len: int | None = None
    users: int = 0  # 0: they come by the clock
    think_s: float = 0.0
    ramp_s: float = 0.0
    tier_chunks: int | None = None

    def arrivals(self) -> Arrivals:
        if self.users:
            return Closed(iter(self.requests), self.users, self.think_s, self.ramp_s)
        return Open(iter(self.requests))

    def tiers(self, num_chunks: int) -> TimedTiers:
        """Memory of some chunks, files of twice as many; a block of 7 bytes takes a third of a second or a second."""
        specs = (TierSpec("cpu", num_chunks * 7, 21), TierSpec("disk", num_chunks * 14, 7))
        caching = self.config.enable_prefix_caching
        return TimedTiers(specs, self.groups, 7, 7, enable_prefix_caching=caching)

    def simulation(self, *, jump: bool) -> Simulation:
        timed_tiers = None if self.tier_chunks is None else self.tiers(self.tier_chunks)
        return Simulation(
            self.config, self.num_blocks, self.groups, REACHES, self.step_time, self.arrivals(), self.run_len,
            tiers=timed_tiers, jump=jump,
        )  # fmt: skip


def sequence_state(seq: Sequence) -> tuple[Any, ...]:
    return (
        seq.request_id, len(seq.token_ids), seq.num_computed_tokens, seq.num_in_flight_tokens, seq.num_placeholders,
        seq.num_preemptions, tuple(map(tuple, seq.block_table)), tuple(seq.num_cached_blocks),
        seq.num_tokens_until_change,
    )  # fmt: skip


def memory_state(simulation: Simulation) -> tuple[Any, ...]:
    """Who holds which block, what can be found where, and what goes next."""
    blocks = simulation.scheduler.blocks
    if not isinstance(blocks, BlockManager):
        return tuple(sorted(blocks.free_regions)), blocks.num_free_blocks
    pool = blocks.pool
    cached = {key: tuple(where) for key, where in pool.cached.items()}
    return tuple(pool.free), tuple(pool.ref_counts), dict(pool.key_of), cached, pool.num_evictions


def state(simulation: Simulation) -> dict[str, Any]:
    scheduler, counts = simulation.scheduler, simulation.counts
    return {
        "clock": simulation.clock,
        "counts": {field.name: getattr(counts, field.name) for field in fields(counts) if field.name != "jumped"},
        "running": [sequence_state(seq) for seq in scheduler.running],
        "waiting": [sequence_state(seq) for seq in scheduler.waiting],
        "preemptions": scheduler.num_preemptions,
        "prefix_cache": str(scheduler.prefix_cache_stats),
        "memory": memory_state(simulation),
        "tiers": tier_state(simulation),
    }


def tier_state(simulation: Simulation) -> Any:
    tiers = simulation.tiers
    if tiers is None:
        return None
    pool = tiers.connector.pool
    where = {key: chunk.place for key, chunk in pool.policy.chunks.items()}
    return (
        where,
        list(tiers.order._keys) if tiers.order is not None else [],
        tiers.hit_tokens,
        tiers.looked_up,
        simulation.scheduler.num_deferred,
    )


def batch_state(batch: Batch) -> dict[str, Any]:
    return {
        "budget": batch.budget,
        "num_tokens": [(seq.request_id, n) for seq, n in batch.num_tokens.items()],
        "hits": [(seq.request_id, n) for seq, n in batch.hits.items()],
        **{
            name: [seq.request_id for seq in getattr(batch, name)]
            for name in ("samples", "new", "resumed", "preempted", "failed")
        },
    }


@dataclass(frozen=True, slots=True)
class Course:
    """A run: its state right after each batch that was scheduled by itself, and at the end."""

    simulation: Simulation
    moments: list[dict[str, Any]]
    error: str | None

    def records(self) -> dict[str, bytes]:
        """Every column to the bit."""
        rows = self.simulation.records
        return {field.name: getattr(rows, field.name).tobytes() for field in fields(Records)}

    def timeline(self) -> tuple[Any, ...]:
        line = self.simulation.timeline
        return line.width_s, [(bucket.seconds, bucket.sums, bucket.peaks, bucket.tokens) for bucket in line.buckets]


def course(case: Case, *, jump: bool) -> Course:
    simulation = case.simulation(jump=jump)
    moments: list[dict[str, Any]] = []
    advances = 0

    def note(simulation: Simulation, batch: Batch) -> None:
        simulation.scheduler.check_invariants()
        moments.append(state(simulation) | {"batch": batch_state(batch)})

    def lost(simulation: Simulation) -> bool:
        nonlocal advances
        advances += 1
        assert advances < MOST_ADVANCES, "the run does not end"
        return False

    simulation.on_step, simulation.stop = note, lost
    try:
        simulation.run()
    except InvalidInputError as error:
        return Course(simulation, moments, str(error))
    return Course(simulation, moments, None)


def difference(case: Case) -> str | None:
    """The first thing in which a run with jumps is not the run without."""
    by_step, by_jump = course(case, jump=False), course(case, jump=True)
    single = iter(by_step.moments)
    for moment in by_jump.moments:  # in the same order, some left out
        step = next(
            (
                candidate
                for candidate in single
                if candidate["counts"] == moment["counts"] and candidate["batch"] == moment["batch"]
            ),
            None,
        )
        if step is None:
            return f"a moment that single steps never see: {moment}"
        for key, value in moment.items():
            if step[key] != value:
                return f"{key} at {moment['clock']}: {value}, step by step {step[key]}"
    for what, mine, theirs in (
        ("error", by_jump.error, by_step.error),
        ("end", state(by_jump.simulation), state(by_step.simulation)),
        ("records", by_jump.records(), by_step.records()),
        ("timeline", by_jump.timeline(), by_step.timeline()),
    ):
        if mine != theirs:
            return f"{what}: {mine}, step by step {theirs}"
    return None


# --- jumps against single steps ---------------------------------------------------------------------------------------

GROUPS: dict[str, tuple[Group, ...]] = {
    "full": (FullGroup(4),),
    "full of 1": (FullGroup(1),),
    "window": (WindowGroup(4, 8),),
    "narrow window": (WindowGroup(2, 1),),
    "full and window": (FullGroup(4), WindowGroup(4, 7)),
    "of two sizes": (FullGroup(8), WindowGroup(4, 6)),
    "chunked": (FullGroup(4), ChunkedGroup(4, 8)),
    "chunked alone": (ChunkedGroup(4, 12),),
    "states": (MambaGroup(4),),
    "hybrid": (FullGroup(4), MambaGroup(4)),
    "hybrid of three": (FullGroup(8), WindowGroup(8, 12), MambaGroup(8)),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[TraceRequest, ...]:
    arrival_s, drawn = 0.0, []
    for _ in range(draw(st.integers(1, 14))):
        arrival_s += draw(st.sampled_from((0.0, 0.0, 0.25, 1.0, 3.0, 40.0)))
        ids = tuple(draw(st.lists(st.integers(0, 1), max_size=4)))
        drawn.append(TraceRequest(arrival_s, draw(st.integers(1, 40)), draw(st.integers(1, 50)), ids))
    return tuple(drawn)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    allocator: Literal["paged", "contiguous"] = draw(st.sampled_from(("paged", "paged", "paged", "contiguous")))
    config = SimulatedConfig(
        max_num_batched_tokens=draw(st.sampled_from((1, 2, 5, 8, 16, 64))),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=draw(st.integers(8, 64)),
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from((0, 0, 3))),
        reserve_full_prompt=draw(st.booleans()),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1))),
        batch_queue_depth=draw(st.sampled_from((1, 2))),
        allocator=allocator,
    )
    step_times: tuple[StepTime, ...] = (Constant(1.0), Constant(0.1), ODD)
    groups = GROUPS[draw(st.sampled_from(sorted(GROUPS)))]
    can_offload = allocator == "paged" and all(isinstance(group, FullGroup | WindowGroup) for group in groups)
    return Case(
        config, draw(st.integers(2, 60)), groups, draw(st.sampled_from(step_times)), draw(requests()),
        draw(st.sampled_from((None, 3, 4, 8))), users=draw(st.integers(0, 5)),
        think_s=draw(st.sampled_from((0.0, 0.3, 30.0))), ramp_s=draw(st.sampled_from((0.0, 2.0))),
        tier_chunks=draw(st.sampled_from((None, None, 1, 3, 100))) if can_offload else None,
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_run_with_jumps_is_the_run_step_by_step(case: Case) -> None:
    assert difference(case) is None


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_runs_with_jumps_are_the_runs_step_by_step(case: Case) -> None:
    assert difference(case) is None


def limits(num_batched_tokens: int, num_seqs: int, **changes: Any) -> SimulatedConfig:
    options = {"max_model_len": 64, "enable_prefix_caching": False, **changes}
    return SimulatedConfig(num_batched_tokens, num_seqs, **options)


def by_clock(*sizes: tuple[float, int, int]) -> tuple[TraceRequest, ...]:
    """(arrival, prompt, output) of each."""
    return tuple(TraceRequest(*size) for size in sizes)


FULL = GROUPS["full"]
# What ends a jump, or must not be part of one.
CORNERS = {
    "the last token of a prompt alone in its step": Case(
        limits(8, 4), 20, FULL, Constant(1.0), by_clock((0.0, 9, 5))
    ),
    "a prompt's end leaves budget to who waits": Case(
        limits(5, 4), 40, FULL, Constant(1.0), by_clock((0.0, 25, 9), (0.0, 1, 9))
    ),
    "a last token in flight leaves budget to who waits": Case(
        limits(1, 4, batch_queue_depth=2), 20, FULL, Constant(1.0), by_clock((0.0, 1, 6), (0.0, 1, 6))
    ),
    "the same where prompts end with blocks": Case(
        limits(5, 4, batch_queue_depth=2, enable_prefix_caching=True), 40, GROUPS["hybrid"], Constant(1.0),
        by_clock((0.0, 3, 6), (0.0, 3, 9), (2.0, 9, 6)),
    ),
    "blocks that a window gives back let somebody in": Case(
        limits(8, 4), 6, GROUPS["window"], Constant(1.0), by_clock((0.0, 8, 40), (0.0, 12, 9))
    ),
    "somebody comes in the very step in which another ends": Case(
        limits(64, 1), 10, FULL, Constant(1.0), by_clock((0.0, 4, 8), (8.0, 4, 8), (9.0, 4, 1), (15.0, 4, 3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CORNERS.values(), ids=CORNERS)
def test_a_jump_ends_where_anything_but_decoding_happens(case: Case) -> None:
    assert difference(case) is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_most_steps_of_long_answers_are_jumped(name: str, depth: int) -> None:
    """Three answers of 50 tokens at once: a jump ends only where one comes, runs out of blocks or ends."""
    case = Case(
        limits(64, 4, batch_queue_depth=depth), 80, GROUPS[name], ODD,
        by_clock((0.0, 8, 50), (0.0, 5, 50), (3.0, 9, 50)),
    )  # fmt: skip
    assert difference(case) is None
    counts = course(case, jump=True).simulation.counts
    assert counts.jumped > counts.steps / 2
    assert course(case, jump=False).simulation.counts.jumped == 0


@pytest.mark.parametrize(
    ("model", "gpu_name", "args", "allocator"),
    [
        ("llama-3.1-8b", "l40s", {"num_gpu_blocks_override": 1_500}, "paged"),
        ("llama-3.1-8b", "l40s", {"num_gpu_blocks_override": 5_000}, "contiguous"),
        ("llama-3.1-8b", "h100-80g", {"async_scheduling": False, "max_num_seqs": 8}, "paged"),
        ("gemma-3-4b", "l40s", {}, "contiguous"),
        ("gpt-oss-20b", "h100-80g", {"num_gpu_blocks_override": 2_000}, "paged"),
        ("granite-4.0-h-tiny", "l40s", {"enable_prefix_caching": True, "max_num_seqs": 16}, "paged"),
        ("qwen3-next-80b-a3b", "b300", {"max_num_batched_tokens": 2_048}, "paged"),
    ],
)
def test_jumps_over_real_models_change_nothing(
    model: str, gpu_name: str, args: dict[str, Any], allocator: Literal["paged", "contiguous"]
) -> None:
    the_plan = plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(max_model_len=16_384, **args)))
    setup = Setup(the_plan, step_time(the_plan, Shares()), allocator=allocator)
    source = from_profile(profile("azure-2023-conv"), 40, 0, 256)
    runs = []
    for jump in (True, False):
        simulation = setup.simulation(source.open(12.0), source.run_len)
        simulation.jump = jump
        simulation.run()
        runs.append(Course(simulation, [], None))
    by_jump, by_step = runs
    assert by_jump.records() == by_step.records()
    assert by_jump.timeline() == by_step.timeline()
    assert state(by_jump.simulation) == state(by_step.simulation)
    assert by_jump.simulation.counts.jumped > by_step.simulation.counts.jumped == 0


# --- a real scheduler's traces ----------------------------------------------------------------------------------------


def read_traces() -> Iterator[dict[str, Any]]:
    """Those under first come, first served, whose requests run to their end: a simulated request has no priority; nor
    are there drafts, and hashes are of whole blocks."""
    own = Path(__file__).parents[1] / "facts" / "traces_states.jsonl"
    for path in (DATA / "scheduler_traces.jsonl", DATA / "scheduler_traces2" / "hybrid.jsonl", own):
        for line in path.read_text().splitlines() if path.is_file() else ():
            trace = json.loads(line)
            inputs = trace["inputs"]
            args = inputs.get("engine_args") or {}
            is_plain = not ({"spec", "aborts"} & inputs.keys() or "prefix_match_unit" in args)
            if is_plain and args.get("scheduling_policy", "fcfs") == "fcfs" and not is_idle_between(trace):
                yield trace


def is_idle_between(trace: dict[str, Any]) -> bool:
    """Whether an asynchronous engine idles for two steps and goes on: it counts them, and a simulation has no such."""
    worked = "".join("x" if step["scheduled"] else " " for step in trace["steps"]).rstrip()
    return trace["batch_queue_depth"] > 1 and "  " in worked


class ByStep:
    """Requests at the beginning of a step, counted; `step` is the number of the next."""

    def __init__(self, arrivals: list[tuple[int, TraceRequest]]) -> None:
        self.step, self._left = 0, deque(arrivals)

    def next_time(self) -> float | None:
        if not self._left:
            return None
        return 0.0 if self._left[0][0] <= self.step else 1e9

    def peek(self) -> TraceRequest:
        return self._left[0][1]

    def pop(self) -> tuple[float, TraceRequest]:
        return 0.0, self._left.popleft()[1]

    def ended(self, time: float) -> None:
        """Nobody waits for it."""


def in_order(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(trace["inputs"]["requests"], key=lambda request: request["arrive_step"])


def trace_request(request: dict[str, Any], arrival_s: float) -> TraceRequest:
    """One prefix id stands for one token, so that any number of them can be shared."""
    shared = (request.get("prefix_id", 0),) * request.get("shared", 0)
    return TraceRequest(arrival_s, request["prompt_len"], request["max_tokens"], shared)


def of_trace(trace: dict[str, Any], arrivals: Arrivals, *, jump: bool) -> Simulation:
    config = trace_config(trace)
    return Simulation(
        config, trace["num_blocks"], trace_groups(trace), (), Constant(1.0), arrivals, run_len=1, jump=jump
    )


def renamed(value: Any, names: dict[str, str]) -> Any:
    """A row of a trace with its requests called by the order in which they come."""
    match value:
        case dict():
            return {names.get(key, key): renamed(child, names) for key, child in value.items()}
        case list():
            return [renamed(child, names) for child in value]
        case str():
            return names.get(value, value)
        case _:
            return value


def expected_rows(trace: dict[str, Any]) -> dict[int, dict[str, Any]]:
    names = {request["id"]: str(number) for number, request in enumerate(in_order(trace), 1)}
    rows = {row["step"]: renamed(row, names) for row in trace["steps"]}
    return {step: row | {"admitted": sorted(row["new"] + row["resumed"])} for step, row in rows.items()}


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces()])
def test_every_step_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    """With steps of one second: a step's number is the second it begins at, or, with two in flight, its place."""
    requests, is_async = in_order(trace), trace["batch_queue_depth"] == 2
    arrivals: Arrivals
    if is_async:
        arrivals = by_step = ByStep([(row["arrive_step"], trace_request(row, 0.0)) for row in requests])
    else:
        arrivals = Open(iter([trace_request(row, row["arrive_step"]) for row in requests]))
    rows, wrong, number = expected_rows(trace), [], -1

    def compare(simulation: Simulation, batch: Batch) -> None:
        nonlocal number
        number = by_step.step if is_async else int(simulation.clock)
        if is_async:
            by_step.step += 1
        row = rows.pop(number, None)
        if row is None:
            wrong.append(f"step {number}: {batch_state(batch)}, expected no step")
        elif (how := row_difference(step_row(simulation.scheduler, batch), row)) is not None:
            wrong.append(f"step {number}: {how}")
        elif not is_async:
            after[number] = row["after_update"]

    def compare_after(simulation: Simulation) -> bool:
        if number in after and (how := row_difference(step_state(simulation.scheduler), after.pop(number))) is not None:
            wrong.append(f"after step {number}: {how}")
        return False

    after: dict[int, dict[str, Any]] = {}
    simulation = of_trace(trace, arrivals, jump=False)
    simulation.on_step, simulation.stop = compare, compare_after
    simulation.run()
    assert wrong == []
    assert not any(row["scheduled"] for row in rows.values()), rows
    assert not after
    stats = simulation.scheduler.prefix_cache_stats
    assert {field.name: getattr(stats, field.name) for field in fields(stats)} == trace["prefix_cache_stats"]


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces()])
def test_with_jumps_requests_end_when_a_real_scheduler_ends_them(trace: dict[str, Any]) -> None:
    depth = trace["batch_queue_depth"]
    # With two in flight step s is scheduled while step s - 1 runs: at second s - 1.
    arrivals = Open(iter([trace_request(r, max(0, r["arrive_step"] - depth + 1)) for r in in_order(trace)]))
    simulation = of_trace(trace, arrivals, jump=True)
    simulation.run()
    rows, ends, first_hits, preemptions = expected_rows(trace), dict[str, float](), dict[str, int](), Counter[str]()
    for step, row in sorted(rows.items()):
        idle = 0 if depth == 1 else sum(not rows[before]["scheduled"] for before in range(step) if before in rows)
        ends |= dict.fromkeys(row["scheduled"], float(step + 1 - idle))  # the last step that has it
        first_hits = row["new_computed_tokens"] | first_hits
        preemptions.update(row["preempted"])
    records = simulation.records
    names = [str(number) for number in records.number]
    assert dict(zip(names, records.ended, strict=True)) == ends
    assert dict(zip(names, records.cached, strict=True)) == first_hits
    assert dict(zip(names, records.preemptions, strict=True)) == {name: preemptions[name] for name in names}
    assert simulation.counts.jumped > 0


# --- the real engine --------------------------------------------------------------------------------------------------

RUN_LEN = 3  # tokens of a prefix id: not a divisor of the block size, so runs end within blocks


@dataclass(frozen=True, slots=True)
class ExactCase:
    """What is asked of both: (step at which it comes, prompt, output, prefix ids) of each; options of the engine."""

    requests: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    options: dict[str, Any]
    family: str = "llama"


def tokens_of(number: int, prompt: int, ids: tuple[int, ...]) -> list[int]:
    """A prompt whose runs of equal prefix ids are equal tokens; the rest nobody else has."""
    shared = [3 + 7 * run_id + offset for run_id in ids for offset in range(RUN_LEN)][:prompt]
    return shared + random_tokens(prompt - len(shared), seed=1000 + number)[0]


def step_seen(batch: Batch, free: int, block_ids: dict[str, list[int]]) -> dict[str, Any]:
    return batch_state(batch) | {"free": free, "held": block_ids}


def steps_of_engine(served: ExactCase) -> list[dict[str, Any]]:
    """Step by step, until every request has ended; steps in which nothing waits or runs are left out."""
    engine, seen = engine_for(served.family, **served.options), []
    schedule = engine.scheduler.schedule

    def spied() -> Batch:
        batch = schedule()
        blocks = engine.scheduler.blocks
        block_ids = {seq.request_id: blocks.num_held(seq) for seq in engine.scheduler.running}
        seen.append(step_seen(batch, blocks.num_free_blocks, block_ids))
        return batch

    engine.scheduler.schedule = spied  # type: ignore[method-assign]
    left = deque(enumerate(served.requests, 1))
    for step in count():
        while left and left[0][1][0] <= step:
            number, (_, prompt, output, ids) = left.popleft()
            engine.add_request(tokens_of(number, prompt, ids), greedy(output), request_id=str(number))
        if engine.has_unfinished:
            engine.step()
        elif not left:
            break
    return seen


def steps_of_simulation(served: ExactCase) -> list[dict[str, Any]]:
    """The same of a simulation whose steps take a second."""
    engine, seen = engine_for(served.family, **served.options), []
    blocks = engine.scheduler.blocks
    requests = [TraceRequest(float(step), prompt, output, ids) for step, prompt, output, ids in served.requests]
    simulation = Simulation(
        simulated(engine), blocks.num_usable_blocks + 1, blocks.groups, (), Constant(1.0), Open(iter(requests)),
        run_len=RUN_LEN, jump=False,
    )  # fmt: skip

    def see(simulation: Simulation, batch: Batch) -> None:
        blocks = simulation.scheduler.blocks
        block_ids = {seq.request_id: blocks.num_held(seq) for seq in simulation.scheduler.running}
        seen.append(step_seen(batch, blocks.num_free_blocks, block_ids))

    simulation.on_step = see
    simulation.run()
    return seen


AT_ONCE = tuple((0, 10 + 5 * i, 6 + 3 * i, ()) for i in range(7))
STAGGERED = ((0, 30, 12, ()), (2, 9, 20, ()), (3, 70, 9, ()), (11, 8, 4, ()), (12, 40, 30, ()), (90, 12, 5, ()))
SHARED = (
    (0, 40, 8, (1, 2, 3, 4, 5, 6)), (1, 44, 6, (1, 2, 3, 4, 5, 6, 7)), (2, 30, 9, (1, 2, 3, 9)), (4, 21, 5, (8,) * 7),
    (30, 24, 4, (8,) * 8), (31, 40, 8, (1, 2, 3, 4, 5, 6, 7, 7, 7)),
)  # fmt: skip
SERVED = {
    "all at once": ExactCase(AT_ONCE, {}),
    "staggered": ExactCase(STAGGERED, {}),
    "three at a time": ExactCase(AT_ONCE, {"max_num_seqs": 3}),
    "small steps": ExactCase(STAGGERED, {"max_num_batched_tokens": 7}),
    "preempted": ExactCase(AT_ONCE, {"num_blocks": 27}),
    "preempted without a prefix cache": ExactCase(AT_ONCE, {"num_blocks": 27, "enable_prefix_caching": False}),
    "shared": ExactCase(SHARED, {}),
    "shared in a small pool": ExactCase(SHARED, {"num_blocks": 26}),
    "shared without a prefix cache": ExactCase(SHARED, {"enable_prefix_caching": False}),
    "window": ExactCase(SHARED, {"num_blocks": 50}, "gemma3_text"),
    "window alone": ExactCase(STAGGERED, {"num_blocks": 40}, "mistral"),
    "contiguous": ExactCase(STAGGERED, {"num_blocks": 60, "allocator": "contiguous"}),
    "too large for the pool": ExactCase(STAGGERED, {"num_blocks": 18}),
}


@pytest.mark.parametrize("served", SERVED.values(), ids=SERVED)
def test_the_engine_takes_the_same_steps(served: ExactCase) -> None:
    ours, theirs = steps_of_simulation(served), steps_of_engine(served)
    assert len(theirs) > 10
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == real, f"step {number}"
    assert len(ours) == len(theirs)


def test_the_runs_compared_with_the_engine_have_preemptions_hits_and_failures() -> None:
    """Else the comparison would say nothing of them."""
    seen = {name: steps_of_simulation(served) for name, served in SERVED.items()}
    for name, what in {
        "preempted": "preempted", "preempted without a prefix cache": "preempted", "too large for the pool": "failed",
        "shared in a small pool": "preempted",
    }.items():  # fmt: skip
        assert any(step[what] for step in seen[name]), name
    for name in ("shared", "shared in a small pool", "window"):
        assert any(hit > 0 for step in seen[name] for _, hit in step["hits"]), name
    assert not any(hit > 0 for step in seen["shared without a prefix cache"] for _, hit in step["hits"])
    assert max(len(step["num_tokens"]) for step in seen["three at a time"]) == 3
