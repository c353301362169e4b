"""A simulated run: by hand, by the laws of queues, by brute force; promises, bisection, and what it refuses."""

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.block_manager import FullGroup, Group
from engine.states import MambaGroup
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate import slo
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.host import Host, Intake
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records, percentile
from kvplan.simulate.requests import Content, Prefixes, content_of
from kvplan.simulate.result import result
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source, from_lengths, from_profile
from kvplan.simulate.steptime import AtLeast, attention_kinds, step_time
from kvplan.simulate.timeline import MAX_BUCKETS, Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.lengths import Lengths
from kvplan.workloads.profiles import profile
from kvplan.workloads.trace import TraceRequest
from tests.support.step_times import Constant


def simulation(
    arrivals: Arrivals, *, num_blocks: int = 1_000, groups: tuple[Group, ...] = (FullGroup(4),), step_s: float = 1.0,
    budget: int = 64, seqs: int = 8, context: int = 256, **changes: Any,
) -> Simulation:  # fmt: skip
    config = SimulatedConfig(budget, seqs, context, **{"enable_prefix_caching": False, **changes})
    return Simulation(config, num_blocks, groups, (), Constant(step_s), arrivals)


def done(run: Simulation) -> Simulation:
    """The run, ended; every request that came is accounted for."""
    advances = 0

    def lost(_: Simulation) -> bool:
        nonlocal advances
        advances += 1
        assert advances < 100_000, "the run does not end"
        return False

    run.stop = lost
    run.run()
    assert len(run.records) + run.counts.rejected + run.counts.failed == run.counts.arrived
    assert not run.scheduler.has_unfinished
    return run


def by_clock(*requests: tuple[float, int, int]) -> Open:
    """(arrival, prompt, output) of each."""
    return Open(iter([TraceRequest(*numbers) for numbers in requests]))


def rows(records: Records) -> list[tuple[float, ...]]:
    """(number, arrival, admitted, first token, end) of each, by number."""
    columns = (records.number, records.arrival, records.admitted, records.first_token, records.ended)
    return sorted(zip(*columns, strict=True))


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        # 0-1 the first's prompt, 1-2 its second token and the other's prompt, 2-3 the last token of both.
        (1, [(1, 0.0, 0.0, 1.0, 3.0), (2, 0.5, 1.0, 2.0, 3.0)]),
        # The step of 1-2 was chosen before 0-1 ran and has the first alone: the other's prompt runs in 2-3.
        (2, [(1, 0.0, 0.0, 1.0, 3.0), (2, 0.5, 1.0, 3.0, 4.0)]),
    ],
)
def test_times_are_those_of_steps_of_one_second(depth: int, expected: list[tuple[float, ...]]) -> None:
    run = done(simulation(by_clock((0.0, 4, 3), (0.5, 4, 2)), batch_queue_depth=depth))
    assert rows(run.records) == expected
    times = {metric: run.records.times(metric) for metric in ("ttft", "queue", "latency")}
    first, second = expected
    assert times["ttft"] == [first[3] - 0.0, second[3] - 0.5]
    assert times["queue"] == [0.0, 0.5]
    assert times["latency"] == [first[4] - 0.0, second[4] - 0.5]
    assert run.records.times("tpot") == [1.0, 1.0]  # 2 s for two tokens, 1 s for one


def test_a_prompt_is_computed_in_steps_of_the_budget() -> None:
    """9 tokens at 4 a step: the first token comes with the third step, the second with the fourth."""
    run = done(simulation(by_clock((0.0, 9, 2)), budget=4))
    assert rows(run.records) == [(1, 0.0, 0.0, 3.0, 4.0)]
    assert (run.counts.prompt_tokens, run.counts.output_tokens, run.counts.steps) == (9, 2, 4)


def test_one_who_waits_for_his_answer_sends_again_after_thinking() -> None:
    """Answers of 2 tokens take 2 s, then 3 s of thought: he sends at 0, 5 and 10."""
    requests = [TraceRequest(0.0, 4, 2)] * 3
    run = done(simulation(Closed(iter(requests), 1, think_s=3.0)))
    assert list(run.records.arrival) == [0.0, 5.0, 10.0]


def test_users_join_evenly_over_the_ramp() -> None:
    run = done(simulation(Closed(iter([TraceRequest(0.0, 4, 20)] * 4), 4, ramp_s=8.0)))
    assert list(run.records.arrival) == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
def test_a_faster_clock_squeezes_all_times(speed: float) -> None:
    arrivals = Open(iter([TraceRequest(arrival_s, 4, 1) for arrival_s in (0.0, 2.0, 10.0)]), speed)
    assert list(done(simulation(arrivals)).records.arrival) == [0.0, 2.0 / speed, 10.0 / speed]


def test_who_waits_for_a_steps_end_is_of_the_most_that_wait() -> None:
    """Two come in the first step, which lasts a second: they wait 0.75 s and 0.5 s, both of them at its end."""
    run = done(simulation(by_clock((0.0, 4, 3), (0.25, 4, 2), (0.5, 4, 2)), num_blocks=11))
    assert run.timeline.mean("waiting", run.clock) * run.clock == pytest.approx(0.75 + 0.5)
    assert run.timeline.peak("waiting") == 2


def test_levels_are_averages_over_time() -> None:
    """One runs for 3 s, a second for 2 of them after half a second unseen: 5 request-seconds in 4 s, an idle one."""
    run = done(simulation(by_clock((0.0, 4, 3), (1.0, 4, 2), (4.0, 4, 1)), num_blocks=11))
    assert run.clock == 5.0
    assert run.timeline.mean("running", run.clock) == (3 + 2 + 1) / 5
    figures = result(run)
    assert (figures.running_peak, figures.waiting_peak, figures.seconds) == (2, 0, 5.0)
    # Blocks of 4: [1] [2 1] [2 2] [] [1] of 10 that can be used.
    assert figures.kv_usage_mean == pytest.approx((1 + 3 + 4 + 0 + 1) / 10 / 5)
    assert figures.kv_usage_peak == 0.4
    # Slots with nothing in them while a step runs: 0 of 4, 3 of 12 (5 + 4 stored), 5 of 16 (6 + 5), 0 of 4.
    assert figures.empty_slots == pytest.approx(1 - (4 + 9 + 11 + 4) / (4 + 12 + 16 + 4))


# --- laws -------------------------------------------------------------------------------------------------------------


def planned(model: str = "llama-3.1-8b", gpu_name: str = "h100-80g", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**{"max_model_len": 16384, **args})))


def stated(prompt: int, output: int, num_requests: int) -> Source:
    return from_lengths(Lengths(((prompt, 1.0),)), Lengths(((output, 1.0),)), num_requests, 0, 0)


def named(name: str) -> Source:
    return from_profile(profile(name), 500, 0, None)


@pytest.mark.parametrize(
    ("source", "rate", "gpu_name"),
    [
        (named("azure-2023-conv"), 2.0, "h100-80g"),
        (named("azure-2023-conv"), 8.0, "h100-80g"),
        (named("azure-2023-conv"), 30.0, "l40s"),  # a queue that only grows
        (named("azure-2023-code"), 2.5, "a100-80g"),
        (stated(1000, 5, 500), 5.0, "a100-80g"),
        (stated(4000, 2, 500), 2.0, "a100-80g"),  # most of the time passes within steps, where requests come
    ],
)
def test_littles_law_holds(source: Source, rate: float, gpu_name: str) -> None:
    """Mean number in the system = throughput x mean time in it, but for the dust of summing floats."""
    the_plan = planned(gpu_name=gpu_name)
    run = Setup(the_plan, step_time(the_plan, Shares())).simulation(source.open(rate))
    run.arrivals = source.open(rate)  # without the front end: who is on the way to the server is not inside
    done(run)
    figures = result(run)
    inside = figures.running_mean + figures.waiting_mean
    assert inside == pytest.approx(figures.requests_per_s * figures.times["latency"].mean, rel=1e-9)
    # The queue is not the waiting alone: preempted requests wait too, when they have been admitted once.
    if not figures.preemptions:
        assert figures.waiting_mean == pytest.approx(figures.requests_per_s * figures.times["queue"].mean, rel=1e-9)
    assert run.counts.jumped > 0
    assert run.counts.output_tokens == sum(run.records.output)
    assert figures.running_peak <= the_plan.settings.max_num_seqs
    assert 0 < figures.kv_usage_mean <= figures.kv_usage_peak <= 1
    if not figures.preemptions:
        assert run.counts.prompt_tokens + sum(run.records.cached) == sum(run.records.prompt)


sizes = st.tuples(st.sampled_from((0.0, 0.5, 2.0, 9.0)), st.integers(1, 60), st.integers(1, 30))


@given(st.lists(sizes, min_size=1, max_size=15), st.integers(3, 60), st.sampled_from((1, 2)), st.booleans())
def test_tokens_are_neither_lost_nor_made_up(
    gaps: list[tuple[float, int, int]], num_blocks: int, depth: int, caching: bool
) -> None:
    arrivals = itertools.accumulate(gap for gap, _, _ in gaps)
    requests = [(arrival, prompt, output) for arrival, (_, prompt, output) in zip(arrivals, gaps, strict=True)]
    run = done(
        simulation(
            by_clock(*requests),
            num_blocks=num_blocks,
            context=64,
            batch_queue_depth=depth,
            enable_prefix_caching=caching,
        )
    )
    records, counts = run.records, run.counts
    for row, number in enumerate(records.number):
        arrival, prompt, output = requests[number - 1]
        assert (records.arrival[row], records.prompt[row]) == (arrival, prompt)
        assert records.output[row] == min(output, 64 - prompt)  # an answer ends where the context does
        assert arrival <= records.admitted[row] < records.first_token[row] <= records.ended[row] <= run.clock
    assert counts.rejected == sum(prompt >= 64 for _, prompt, _ in requests)
    if not counts.failed:
        assert counts.output_tokens == sum(records.output)
        assert run.timeline.mean("running", 1.0) >= sum(records.output) / 8  # at most 8 get a token in a second
        if not run.scheduler.num_preemptions:
            assert counts.prompt_tokens + sum(records.cached) == sum(records.prompt)
        if not counts.rejected:  # each request is running or waiting from its arrival to its end
            inside = run.timeline.mean("running", 1.0) + run.timeline.mean("waiting", 1.0)
            assert inside == pytest.approx(sum(records.times("latency")))
    assert sum(bucket.tokens for bucket in run.timeline.buckets) == counts.output_tokens
    assert run.scheduler.blocks.num_free_blocks == run.scheduler.blocks.num_usable_blocks


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 6), st.sampled_from((0.0, 2.5)), st.sampled_from((0.0, 7.0)),
)  # fmt: skip
def test_no_more_are_inside_than_there_are_users(
    lengths: list[tuple[int, int]], num_users: int, think_s: float, ramp_s: float
) -> None:
    run = simulation(
        Closed(
            iter([TraceRequest(0.0, *prompt_and_output) for prompt_and_output in lengths]), num_users, think_s, ramp_s
        )
    )
    peak = 0

    def count(run: Simulation, _: object) -> None:
        nonlocal peak
        peak = max(peak, len(run.scheduler.running) + len(run.scheduler.waiting))

    run.on_step = count
    done(run)
    assert peak <= num_users
    assert len(run.records) == len(lengths)
    # Each user's requests follow one another: as many gaps of thought as requests after the first of a user.
    starts, ends = sorted(run.records.arrival), sorted(run.records.ended)
    later = starts[num_users:]
    assert all(start >= end + think_s for start, end in zip(later, ends, strict=False))


# --- a step's time ----------------------------------------------------------------------------------------------------


def test_the_front_end_takes_requests_one_at_a_time() -> None:
    """20 ms a request and 1 ms a prompt token: two prompts of 4 are taken in after 24 and 48 ms; the second waits for
    the first one's step, too.
    """
    requests = Intake(by_clock((0.0, 4, 2), (0.0, 4, 2)), Host(request=0.020, prompt_token=0.001))
    run = done(simulation(requests))
    assert list(run.records.arrival) == [0.0, 0.0]
    assert list(run.records.first_token) == pytest.approx([1.024, 2.024])


def test_a_user_waits_for_the_front_end() -> None:
    """20 ms a request and 1 ms a prompt token: a prompt of 4 has its first token 24 ms later, each user sends later."""
    arrivals = Closed(iter([TraceRequest(0.0, 4, 2)] * 2), 1)
    run = done(simulation(Intake(arrivals, Host(request=0.020, prompt_token=0.001))))
    assert list(run.records.first_token) == pytest.approx([1.024, 2.024 + 1.024])
    assert list(run.records.ended) == pytest.approx([2.024, 2 * 2.024])
    assert run.records.times("tpot") == pytest.approx([1.0, 1.0])


def test_a_front_end_bounds_requests_per_second() -> None:
    """0.1 s a request: 10 requests/s, however many users wait and however idle the GPU is."""
    arrivals = Closed(iter([TraceRequest(0.0, 4, 2)] * 500), 100)
    run = done(simulation(Intake(arrivals, Host(request=0.1)), step_s=0.001, seqs=100))
    assert result(run).requests_per_s == pytest.approx(10.0, rel=0.01)


@given(st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 60), st.integers(1, 60))
def test_what_a_window_reads_is_what_its_queries_see(reach: int | None, context: int, query: int) -> None:
    """Every query, one by one: the last `reach` tokens up to and with itself."""
    assume(query <= context)
    seen = [range(0 if reach is None else max(0, end - reach), end) for end in range(context - query + 1, context + 1)]
    window = Reach(reach)
    assert window.pairs(context, query) == sum(map(len, seen))
    assert window.span(context, query) == len(set().union(*seen))
    assert window.read(context) == len(seen[-1])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3.1-8b", [(None, 131_072)]),  # 32 layers x 2 x 8 heads x 128 x 2 bytes
        # 24 layers of 2 x 8 x 64 x 2 bytes, every other one with a window of 128
        ("gpt-oss-20b", [(128, 12 * 2_048), (None, 12 * 2_048)]),
        ("deepseek-v3", [(None, 61 * 576 * 2)]),  # 61 latents of 512 + 64, two bytes
    ],
)
def test_layers_of_one_reach_are_one_kind(model: str, expected: list[tuple[int | None, int]]) -> None:
    kinds = attention_kinds(plan(Request(catalog.load(model), gpu("b200"), EngineArgs(max_model_len=4096))))
    sizes = [(kind.reach.tokens, kind.token_bytes) for kind in kinds]
    assert sorted(sizes, key=str) == sorted(expected, key=str)


# --- names of blocks --------------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 30), ids), min_size=2, max_size=5), st.integers(1, 7), st.integers(1, 6))
def test_blocks_have_one_name_exactly_where_all_tokens_so_far_are_equal(
    prompts: list[tuple[int, tuple[int, ...]]], run_len: int, block_size: int
) -> None:
    def tokens(number: int, prompt: int, ids: tuple[int, ...]) -> list[object]:
        """Spelled out: what each token is, for 10 more than the prompt."""
        shared = [(ids[: position // run_len + 1], position) for position in range(min(prompt, len(ids) * run_len))]
        return [*shared, *((number, position) for position in range(len(shared), prompt + 10))]

    prefixes = Prefixes()
    names: dict[tuple[object, ...], int] = {}
    for number, (prompt, ids) in enumerate(prompts, 1):
        content = content_of(TraceRequest(0.0, prompt, 10, ids), number, prefixes, run_len)
        spelled = tokens(number, prompt, ids)
        for index in range(len(spelled) // block_size):
            so_far = (index, *spelled[: (index + 1) * block_size])
            assert names.setdefault(so_far, content.block_key(index, block_size)) == content.block_key(
                index, block_size
            )
    assert len(set(names.values())) == len(names)


def test_a_request_without_ids_shares_with_nobody() -> None:
    first, second = (content_of(TraceRequest(0.0, 50, 1), number, Prefixes(), None) for number in (1, 2))
    assert first.block_key(0, 16) != second.block_key(0, 16)
    assert isinstance(first, Content)


# --- time in buckets --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60))
def test_a_timeline_keeps_sums_and_peaks_however_long_it_gets(steps: list[tuple[float, int, int]]) -> None:
    timeline, clock = Timeline(), 0.0
    for seconds, level, tokens in steps:
        timeline.add(clock, seconds, (level, 0, 2 * level, 0, 1), tokens)
        clock += seconds
    assert len(timeline.buckets) <= MAX_BUCKETS
    assert timeline.mean("running", 1.0) == pytest.approx(math.fsum(seconds * level for seconds, level, _ in steps))
    assert timeline.peak("used_blocks") == 2 * max(level for _, level, _ in steps)
    assert sum(bucket.tokens for bucket in timeline.buckets) == sum(tokens for _, _, tokens in steps)
    assert sum(bucket.seconds for bucket in timeline.buckets) == pytest.approx(clock)
    assert clock == 0 or timeline.width_s * MAX_BUCKETS >= clock - steps[-1][0]


def test_a_step_is_counted_where_it_begins() -> None:
    """Buckets of an eighth of a second."""
    timeline = Timeline()
    timeline.add(0.124, 1.0, (3, 0, 0, 0, 0), 1)
    timeline.add(1.25, 0.5, (2, 0, 0, 0, 0), 1)
    assert [index for index, bucket in enumerate(timeline.buckets) if bucket.seconds] == [0, 10]


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([2.0, 1.0], 0.5, 1.0),  # the first of two has half of them at or below it
        ([2.0, 1.0], 0.51, 2.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 102)], 0.99, 100.0),  # 99.99 of 101, so the 100th
        ([float(n) for n in range(1, 101)], 0.29, 29.0),  # 0.29 x 100 is 28.999… in floating point
        ([float(n) for n in range(1, 101)], 0.07, 7.0),  # 0.07 x 100 is 7.000…1
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
        ([], 0.5, None),
    ],
)
def test_a_percentile_is_the_smallest_value_with_so_many_at_or_below(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


@pytest.mark.parametrize(
    ("num_served", "num_refused", "expected"),
    [(99, 1, 99.0), (98, 2, None), (199, 2, 199.0), (0, 1, None)],  # the 99th, 99th, 199th and first of all
)
def test_requests_that_get_nothing_lie_above_every_time(
    num_served: int, num_refused: int, expected: float | None
) -> None:
    assert percentile([float(n) for n in range(1, num_served + 1)], 0.99, num_refused) == expected


@pytest.mark.parametrize(
    ("text", "promises"),
    [
        ("ttft=2s", [("ttft", 0.99, 2.0)]),
        ("ttft=2s,tpot=50ms", [("ttft", 0.99, 2.0), ("tpot", 0.99, 0.05)]),
        ("ttft.p95=2s, ttft.p50<=1s", [("ttft", 0.95, 2.0), ("ttft", 0.5, 1.0)]),
        ("latency<1m,queue=0.5", [("latency", 0.99, 60.0), ("queue", 0.99, 0.5)]),
        ("ttft.p99.9=2s", [("ttft", 0.999, 2.0)]),
        ("preempt<1%", [(None, 1.0, 0.01)]),
        ("preempted=0", [(None, 1.0, 0.0)]),
    ],
)
def test_promises_are_read(text: str, promises: list[tuple[str | None, float, float]]) -> None:
    slo_promises = slo.parse_slo(text)
    assert [promise.metric for promise in slo_promises] == [metric for metric, _, _ in promises]
    assert [promise.share for promise in slo_promises] == pytest.approx([share for _, share, _ in promises])
    assert [promise.limit for promise in slo_promises] == pytest.approx([limit for _, _, limit in promises])


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "ttft", "ttft=", "ttft=fast", "ttft=-1s", "ttft=0", "ttft=nan", "ttft>2s", "itl=2s", "TTFT=2s",
        "ttft.p0=2s", "ttft.p100=2s", "ttft.p=2s", "ttft.p99.999=2s", "preempt=2s", "preempt.p50=1%", "preempt<200%",
        "ttft=2s,", "ttft=1s,ttft=2s", "ttft=1s,ttft.p99=2s", "preempt=1%,preempted=2%", "ttft==2s",
        "ttft=2s;tpot=1s", "ttft=\x1b[31m",
    ],
)  # fmt: skip
def test_a_promise_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"^--slo(: | (preempt|ttft)(: not a | must be greater than 0 and at most 1 |: less than 0.001 s ))",
    ) as caught:
        slo.parse_slo(text)
    assert str(caught.value).isprintable()


finished = st.tuples(
    st.sampled_from((0.0, 1.0, 2.0, 3.0)), st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0, 2.0)),
    st.integers(1, 3), st.integers(0, 1),
)  # fmt: skip
promises = st.lists(
    st.one_of(
        st.builds(
            slo.Promise, st.sampled_from(("ttft", "tpot", "queue", "latency")),
            st.sampled_from((0.01, 0.07, 0.29, 0.5, 0.58, 0.9, 0.99)), st.sampled_from((0.5, 1.0, 2.0, 3.5)),
        ),
        st.builds(slo.Promise, st.none(), st.just(1.0), st.sampled_from((0.0, 0.01, 0.07, 0.29, 0.57, 0.58, 1.0))),
    ),
    min_size=1, max_size=3,
).map(tuple)  # fmt: skip


@given(
    st.lists(finished, max_size=100), st.integers(0, 5), st.integers(0, 3), promises, st.integers(1, 9), st.randoms()
)
def test_a_run_is_stopped_early_only_where_it_would_have_broken_a_promise(
    ended: list[tuple[float, float, float, int, int]], never: int, skipped: int, promises: tuple[slo.Promise, ...],
    every: int, shuffled: Any,
) -> None:  # fmt: skip
    """`never` requests are refused: they have no row, and miss every promise. Both judgements are one in the end, but
    for times per token, whose number is not known before."""
    run, records = simulation(Open(iter(()))), Records()
    run.records, run.counts.rejected = records, never
    assume(len(ended) >= skipped)
    numbers = list(range(1, len(ended) + 1))
    shuffled.shuffle(numbers)
    broken, was_stopped = slo.Broken(promises, len(ended) + never, skipped), False
    for index, (number, (queue, wait, time_s, output, preemptions)) in enumerate(zip(numbers, ended, strict=True)):
        records.number.append(number)
        records.arrival.append(0.0)
        records.admitted.append(queue)
        records.first_token.append(queue + wait)
        records.ended.append(queue + wait + time_s)
        records.output.append(output)
        records.preemptions.append(preemptions)
        if index % every == 0:
            was_stopped = was_stopped or broken(run)
    is_kept = all(promise_outcome.is_kept for promise_outcome in slo.outcomes(promises, run, skipped))
    if was_stopped or broken(run):
        assert not is_kept
    elif not any(promise.metric == "tpot" for promise in promises) and len(ended) > skipped:
        assert is_kept


@pytest.mark.parametrize(
    ("percent", "missed", "is_kept"), [(29, 29, True), (29, 30, False), (57, 57, True), (7, 7, True)]
)
def test_a_share_of_requests_is_counted_without_rounding(percent: int, missed: int, is_kept: bool) -> None:
    """Of 100 requests; in floating point 0.29 x 100 is 28.999… and 0.57 x 100 is 56.999…."""
    run = simulation(Open(iter(())))
    for number in range(1, 101):
        run.records.number.append(number)
        run.records.arrival.append(0.0)
        run.records.preemptions.append(int(number <= missed))
    promises = slo.parse_slo(f"preempt<{percent}%")
    assert [promise_outcome.is_kept for promise_outcome in slo.outcomes(promises, run, 0)] == [is_kept]
    assert slo.Broken(promises, 100, 0)(run) == (not is_kept)


# --- the largest load -------------------------------------------------------------------------------------------------


def up_to(limit: float, tried: list[float]) -> Callable[[float], bool]:
    def keeps(load: float) -> bool:
        tried.append(load)
        return load <= limit

    return keeps


@given(st.floats(0.001, 1000), st.floats(0.001, 1000))
def test_bisection_ends_within_two_percent_of_the_largest_rate(start: float, boundary: float) -> None:
    tried: list[float] = []
    search = slo.largest_rate(start, up_to(boundary, tried))
    assert search.runs == len(tried) <= 12 + 7  # 2^-6 of a doubling is 1.6%
    if search.keeps is not None:
        assert search.keeps in tried
        assert search.keeps <= boundary
    if search.breaks is not None:
        assert search.breaks in tried
        assert search.breaks > boundary
    if search.keeps is None:
        assert boundary < start / 2**11
    elif search.breaks is None:
        assert boundary >= start * 2**11
    else:
        assert search.breaks <= search.keeps * 1.02


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_bisection_finds_the_largest_number_of_users(start: int, boundary: int, max_users: int) -> None:
    tried: list[float] = []
    search = slo.largest_users(start, up_to(boundary, tried), max_users)
    assert search.runs == len(tried) == len(set(tried))
    assert all(1 <= users <= max_users and users == int(users) for users in tried)
    if search.keeps is None:
        assert search.breaks is not None
        assert boundary < search.breaks <= max(1, start / 2**11)
    elif search.breaks is None:  # as many as there may be, or as twelve runs reach
        assert min(max_users, start * 2**11) <= search.keeps <= boundary
    else:
        assert search.keeps <= boundary < search.breaks
        assert search.breaks <= max(search.keeps + 1, search.keeps * 1.02)


# --- what a run keeps -------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del result


def crowds(num_requests: int) -> Iterator[TraceRequest]:
    """Ten at once, every second."""
    for number in range(num_requests):
        yield TraceRequest(float(number // 10), 8, 3)


class Untimed(Timeline):
    """Keeps nothing, so that only what requests leave is counted."""

    def add(self, start: float, seconds: float, levels: tuple[int, ...], tokens: int) -> None:
        """Forgotten."""


def test_a_finished_request_leaves_its_row_and_nothing_else() -> None:
    """Ten columns of 8 bytes, which arrays let grow by up to an eighth; the timeline's buckets are bounded above.

    Python itself keeps up to 2,000 freed tuples of each length for the next: of one that has 1, 48 bytes each.
    """

    def ended(num_requests: int) -> Simulation:
        config = SimulatedConfig(200, 20, 256)
        requests = Open(crowds(num_requests))
        run = Simulation(config, 70, (FullGroup(4),), (Reach(None),), Constant(0.1), requests, timeline=Untimed())
        run.run()
        assert len(run.records) == num_requests
        return run

    few, many = (peak_bytes(lambda n=n: ended(n)) for n in (1_000, 3_000))  # type: ignore[misc]
    assert many - few <= 2_000 * 10 * 8 * 1.125 + 2_000 * 48


# --- steps smaller than a block of states ---------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_goes_on_within_a_block_of_states_where_no_step_holds_one(depth: int) -> None:
    """As vLLM's trace qwen3next_align_chunk512: steps of 512 tokens, blocks of 576."""
    run = simulation(
        by_clock((0.0, 9, 3)), groups=(MambaGroup(4),), budget=2, enable_prefix_caching=True, batch_queue_depth=depth
    )
    done(run)
    # Of 9 tokens 2 a step, the last alone: it ends the prompt past the block whose state is stored. 2 more are decoded.
    assert (list(run.records.output), run.counts.steps) == ([3], 7)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_while_others_still_decode(depth: int) -> None:
    run = simulation(
        by_clock((0.0, 1, 9), (1.0, 9, 3)), groups=(FullGroup(4), MambaGroup(4)), budget=3, enable_prefix_caching=True,
        batch_queue_depth=depth,
    )  # fmt: skip
    done(run)
    assert sorted(run.records.output) == [3, 9]


def many(
    arrival: Callable[[int], float] = float, prompt: int = 5, output: int = 3, num: int = 12
) -> list[TraceRequest]:
    return [TraceRequest(arrival(number), prompt, output) for number in range(num)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("requests", "changes", "failed", "rejected"),
    [
        ([], {}, 0, 0),
        (many(prompt=1, output=1), {}, 0, 0),
        (many(lambda _: 0.0), {}, 0, 0),
        (many(lambda n: n * 1e9), {}, 0, 0),
        (many(lambda n: n * 1e-9), {}, 0, 0),
        (many(lambda n: float(n // 3)), {"seqs": 1}, 0, 0),
        (many(), {"budget": 1}, 0, 0),
        (many(prompt=9), {"num_blocks": 2}, 12, 0),  # one block of 4
        (many(prompt=4, output=1), {"num_blocks": 2}, 0, 0),  # the last token's KV is never stored
        (many(prompt=4, output=2), {"num_blocks": 2}, 12, 0),
        (many(prompt=256), {}, 0, 12),
        (many(prompt=255), {"num_blocks": 70}, 0, 0),  # one token is left of the context
        (many(prompt=300) + many(lambda n: 20.0 + n), {}, 0, 12),
        (many(output=1_000_000), {}, 0, 0),  # to the context's end
        (many(), {"step_s": 0.0}, 0, 0),
        (many(), {"allocator": "contiguous", "num_blocks": 60}, 12, 0),  # 64 blocks each
        (many(), {"allocator": "contiguous", "num_blocks": 70}, 0, 0),
    ],
)
def test_odd_loads_come_to_an_end(
    requests: list[TraceRequest], changes: dict[str, Any], failed: int, rejected: int, depth: int
) -> None:
    for arrivals in (
        Open(iter(requests)),
        Closed(iter(requests), 3),
        Closed(iter(requests), 1, 1e9),
        Closed(iter(requests), 99),
    ):
        run = done(simulation(arrivals, batch_queue_depth=depth, **changes))
        assert (run.counts.arrived, run.counts.failed, run.counts.rejected) == (len(requests), failed, rejected)
        assert result(run).finished == len(requests) - failed - rejected
        assert run.counts.output_tokens >= sum(run.records.output)


def test_a_stated_step_time_is_a_floor() -> None:
    """One token alone takes about 6 ms of an H100; stated at 30 ms a step takes that, a long prompt takes its own."""
    base = step_time(planned(), Shares())
    stated = AtLeast(base, 0.030)
    pairs = (8192 * 8193 // 2,)
    decode, prompt = StepWork(1, 1, 1, (100,), (100,)), StepWork(8192, 1, 1, (8192,), pairs, 1, 8192, pairs)
    assert base.seconds(decode) < 0.030 < base.seconds(prompt)
    assert (stated.seconds(decode), stated.seconds(prompt)) == (0.030, base.seconds(prompt))
    assert stated.text.endswith("; at least 30 ms, as stated")
