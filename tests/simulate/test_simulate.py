"""A simulated run: by hand, by the laws of queues, by brute force; promises, bisection, and what it refuses."""

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.block_manager import FullGroup, Group
from engine.states import MambaGroup
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.models.spec import Scheme
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine
from kvplan.simulate import slo
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.constants import Constants
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records, percentile
from kvplan.simulate.requests import Content, Prefixes, content_of
from kvplan.simulate.result import result
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source, from_lengths, from_profile
from kvplan.simulate.steptime import (
    AtLeast,
    Attention,
    Roofline,
    Shares,
    attention_kinds,
    matmuls,
    number_format,
    roofline,
)
from kvplan.simulate.timeline import MAX_BUCKETS, Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.lengths import Lengths
from kvplan.workloads.profiles import profile
from kvplan.workloads.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Constant:
    """Every step takes as long."""

    each: float = 1.0
    text: str = "constant"

    def seconds(self, work: StepWork) -> float:
        return self.each


def simulation(
    arrivals: Arrivals, *, num_blocks: int = 1_000, groups: tuple[Group, ...] = (FullGroup(4),), each: float = 1.0,
    budget: int = 64, seqs: int = 8, context: int = 256, **changes: Any,
) -> Simulation:  # fmt: skip
    config = SimulatedConfig(budget, seqs, context, **{"enable_prefix_caching": False, **changes})
    return Simulation(config, num_blocks, groups, (), Constant(each), arrivals)


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
    return Open(iter([TraceRequest(*each) for each in requests]))


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
    arrivals = Open(iter([TraceRequest(at, 4, 1) for at in (0.0, 2.0, 10.0)]), speed)
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
    run = Setup(the_plan, roofline(the_plan, Shares())).simulation(source.open(rate))
    run.request_s = run.crowd_s = run.prompt_token_s = 0.0  # who is on the way to the server or back is not inside
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
    asked = [(at, prompt, output) for at, (_, prompt, output) in zip(arrivals, gaps, strict=True)]
    run = done(
        simulation(
            by_clock(*asked), num_blocks=num_blocks, context=64, batch_queue_depth=depth, enable_prefix_caching=caching
        )
    )
    records, counts = run.records, run.counts
    for row, number in enumerate(records.number):
        at, prompt, output = asked[number - 1]
        assert (records.arrival[row], records.prompt[row]) == (at, prompt)
        assert records.output[row] == min(output, 64 - prompt)  # an answer ends where the context does
        assert at <= records.admitted[row] < records.first_token[row] <= records.ended[row] <= run.clock
    assert counts.rejected == sum(prompt >= 64 for _, prompt, _ in asked)
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


def test_each_other_request_inside_makes_a_first_token_later() -> None:
    """Two prompts of one step, 10 ms for each other that runs: both see their tokens 10 ms later."""
    run = simulation(by_clock((0.0, 4, 2), (0.0, 4, 2)))
    run.crowd_s = 0.010
    done(run)
    assert list(run.records.first_token) == pytest.approx([1.010, 1.010])
    assert list(run.records.ended) == pytest.approx([2.010, 2.010])


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 6), st.sampled_from((0.0, 2.5)), st.sampled_from((0.0, 7.0)),
)  # fmt: skip
def test_no_more_are_inside_than_there_are_users(
    asked: list[tuple[int, int]], num_users: int, think_s: float, ramp_s: float
) -> None:
    run = simulation(Closed(iter([TraceRequest(0.0, *each) for each in asked]), num_users, think_s, ramp_s))
    most = 0

    def count(run: Simulation, _: object) -> None:
        nonlocal most
        most = max(most, len(run.scheduler.running) + len(run.scheduler.waiting))

    run.on_step = count
    done(run)
    assert most <= num_users
    assert len(run.records) == len(asked)
    # Each user's requests follow one another: as many gaps of thought as requests after the first of a user.
    starts, ends = sorted(run.records.arrival), sorted(run.records.ended)
    later = starts[num_users:]
    assert all(start >= end + think_s for start, end in zip(later, ends, strict=False))


# --- a step's time ----------------------------------------------------------------------------------------------------

# What the data sheet says, and nothing lost on the way.
PERFECT = Constants(
    weights=1.0, experts=1.0, widened=1.0, kv=1.0, flops=1.0, attention=1.0, layer=0.0, prefill_layer=0.0, step=0.0,
    sequence=0.0, switch=1.0, switch_s=0.0, switch_large=1.0, pcie=1.0, pcie_s=0.0, host=1.0, host_s=0.0, request=0.0,
    crowd=0.0, prompt_token=0.0, first_step=0.0, first_sequence=0.0,
)  # fmt: skip


def perfect(the_plan: Plan, **lost: float) -> Roofline:
    return roofline(the_plan, Shares(), replace(PERFECT, **lost))


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (1, 131_072), (8, 2_048), (64, 2_048), (256, 2_048)])
def test_a_decoding_step_takes_what_memory_and_arithmetic_take(batch: int, context: int) -> None:
    """Llama-3.1-8B on H200: 15.01 GB at 4.8 TB/s and 2 x 7.505e9 FLOPs a token at 989.4 TFLOP/s, each the other's side
    of a right angle; 131,072 bytes of KV a token."""
    tokens = batch * context
    weights, arithmetic = 2 * 7_504_924_672 / 4.8e12, 2 * 7_504_924_672 * batch / 989.4e12
    expected = (weights**2 + arithmetic**2) ** 0.5 + 131_072 * tokens / 4.8e12
    seconds = perfect(planned(gpu_name="h200")).seconds(StepWork(batch, batch, batch, (tokens,), (tokens,)))
    assert seconds == pytest.approx(expected, rel=1e-6)


def test_layers_steps_and_sequences_cost_time_of_their_own() -> None:
    """32 layers of 50 us, a step of 1 ms and 8 sequences of 10 us beside what memory and arithmetic take."""
    work = StepWork(8, 8, 8, (800,), (800,))
    bare = perfect(planned()).seconds(work)
    lost = perfect(planned(), layer=50e-6, step=1e-3, sequence=10e-6).seconds(work)
    assert lost - bare == pytest.approx(32 * 50e-6 + 1e-3 + 8 * 10e-6)


def test_a_prompt_takes_at_least_the_launch_of_its_layers() -> None:
    """A prompt of 16 tokens takes 5 ms of memory; launching 32 layers one by one takes 6.4 ms, decoding not."""
    launched = perfect(planned(), prefill_layer=200e-6)
    prompt, decode = StepWork(16, 1, 1, (16,), (136,)), StepWork(16, 16, 16, (16,), (16,))
    assert launched.seconds(prompt) == pytest.approx(32 * 200e-6)
    assert launched.seconds(decode) == perfect(planned()).seconds(decode) < 32 * 200e-6


@pytest.mark.parametrize(
    ("gpu_name", "ranks", "bandwidth", "share"),
    [
        ("h100-80g", 2, 900e9, "switch"),
        ("h100-80g", 8, 900e9, "switch"),
        ("rtx-4090", 4, 64e9, "host"),
        ("rtx-a6000", 2, 64e9, "pcie"),
    ],
)
def test_ranks_reduce_twice_a_layer_over_their_link(gpu_name: str, ranks: int, bandwidth: float, share: str) -> None:
    """64 all-reduces of 4,096 numbers of 2 bytes a token: a rank sends 2 (n - 1) / n of them; half the link, 5 us each
    doubling. GeForce cards send through the host (NVIDIA/nccl#1127), an RTX A6000 to its peer."""
    the_plan = planned(gpu_name=gpu_name, tensor_parallel_size=ranks, max_model_len=4096)
    work = StepWork(100, 100, 100, (1000,), (1000,))
    bare = perfect(the_plan, **{share: 1e9})
    slow = perfect(the_plan, **{share: 0.5, f"{share}_s": 5e-6})
    sent = 100 * 4096 * 2 * 2 * (ranks - 1) / ranks
    expected = 64 * (5e-6 * math.log2(ranks) + sent / (0.5 * bandwidth))
    assert slow.seconds(work) - bare.seconds(work) == pytest.approx(expected, rel=1e-6)


def test_what_is_beyond_eight_mebibytes_of_an_all_reduce_goes_faster() -> None:
    """Llama-3.1-8B: 1,024 tokens of 4,096 numbers of 2 bytes are 8 MiB, which vLLM's own all-reduce takes at most."""
    the_plan = planned(tensor_parallel_size=2, max_model_len=4096)
    slow, even = perfect(the_plan, switch=0.1, switch_large=0.4), perfect(the_plan, switch=0.1, switch_large=0.1)
    sent = 64 * 4096 * 2 * 2 * 1 / 2 / 900e9  # a token's seconds at the whole link
    for tokens, beyond in ((1024, 0), (3072, 2048)):
        work = StepWork(tokens, 1, 1, (tokens,), (tokens,))
        assert even.seconds(work) - slow.seconds(work) == pytest.approx(beyond * sent * (1 / 0.1 - 1 / 0.4), abs=1e-12)


def test_one_rank_speaks_to_nobody() -> None:
    work = StepWork(100, 100, 100, (1000,), (1000,))
    assert perfect(planned(), switch=1e-6, switch_s=1.0).seconds(work) == perfect(planned()).seconds(work)


def test_experts_in_fewer_bits_than_the_gpu_multiplies_are_read_slower() -> None:
    """gpt-oss in mxfp4: widened on an H100, multiplied as stored on a B200; Mixtral in 16 bits is widened nowhere."""
    slow = {"widened": 0.5}
    for model, gpu_name, is_slower in (
        ("gpt-oss-20b", "h100-80g", True), ("gpt-oss-20b", "b200", False), ("mixtral-8x7b", "b200", False),
    ):  # fmt: skip
        the_plan = planned(model, gpu_name, max_model_len=4096)
        assert (perfect(the_plan, **slow).expert > perfect(the_plan).expert) is is_slower, model


def test_the_first_engine_takes_longer() -> None:
    """vLLM 0.7 prepares its steps in Python, one after the other; from 0.8 on the second engine does."""
    request = Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), EngineArgs(max_model_len=4096))
    work = StepWork(8, 8, 8, (800,), (800,))
    seconds = {
        name: roofline(plan(replace(request, release=parse_engine(name))), Shares()).seconds(work)
        for name in ("vllm@0.7", "vllm@0.8", "vllm")
    }
    assert seconds["vllm@0.7"] > seconds["vllm@0.8"] == pytest.approx(seconds["vllm"])


def test_a_user_waits_for_the_server_outside_of_the_steps_too() -> None:
    """20 ms a request and 1 ms a prompt token: a prompt of 4 has its first token 24 ms later, each user sends later."""
    run = simulation(Closed(iter([TraceRequest(0.0, 4, 2)] * 2), 1))
    run.request_s, run.prompt_token_s = 0.020, 0.001
    done(run)
    assert list(run.records.first_token) == pytest.approx([1.024, 1.024 + 2.024])
    assert list(run.records.ended) == pytest.approx([2.024, 2 * 2.024])
    assert run.records.times("tpot") == pytest.approx([1.0, 1.0])


def weights_s(model: Roofline, num_tokens: int) -> float:
    """Seconds to read the weights of a step of so many decoding sequences."""
    return replace(model, token=0.0, layers=0.0).decode_terms(num_tokens)[0]


def bytes_read(made: Plan, num_tokens: int) -> float:
    bandwidth = made.request.gpu.memory_bandwidth
    assert bandwidth is not None
    return weights_s(perfect(made), num_tokens) * bandwidth


def test_weights_that_a_step_reads_are_all_but_the_looked_up_rows() -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters less an embedding of 128,256 x 4,096, two bytes each."""
    found = matmuls(planned())
    assert found.dense_params == 8_030_261_248 - 128_256 * 4_096
    assert found.dense_bytes == 2 * found.dense_params
    assert bytes_read(planned(), 1) == pytest.approx(found.dense_bytes)


def test_a_tied_head_reads_the_embedding() -> None:
    """Llama-3.2-1B: 1,235,814,400 parameters, the table of 128,256 x 2,048 among them once."""
    found = matmuls(planned("llama-3.2-1b"))
    assert (found.dense_params, found.dense_bytes) == (1_235_814_400, 2 * 1_235_814_400)


def test_experts_are_read_when_a_token_is_sent_there() -> None:
    """Mixtral-8x7B: 32 layers of 8 experts of 3 x 4,096 x 14,336; a token is sent to two of each."""
    made = planned("mixtral-8x7b", "b200", gpu_memory_utilization=0.95)
    found = matmuls(made)
    expert = 3 * 4_096 * 14_336 * 32
    assert (found.expert_bytes, found.active_params) == (2 * 8 * expert, 2 * expert)
    assert found.dense_params == 46_702_792_704 - 8 * expert - 32_000 * 4_096
    assert bytes_read(made, 1) == pytest.approx(found.dense_bytes + 2 * 2 * expert)
    assert bytes_read(made, 10_000) == pytest.approx(found.dense_bytes + found.expert_bytes)


@pytest.mark.parametrize(("num_experts", "picked", "num_tokens"), [(4, 2, 1), (4, 2, 2), (4, 1, 3), (5, 2, 3)])
def test_as_many_experts_are_read_as_all_ways_to_choose_have_on_average(
    num_experts: int, picked: int, num_tokens: int
) -> None:
    ways = list(itertools.combinations(range(num_experts), picked))
    drawn = list(itertools.product(ways, repeat=num_tokens))
    mean = sum(len(set().union(*each)) for each in drawn) / len(drawn)
    model = replace(perfect(planned()), dense=0.0, expert=1_000.0 * num_experts, missed=1 - picked / num_experts)
    assert weights_s(model, num_tokens) == pytest.approx(1_000 * mean)


@given(st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 60), st.integers(1, 60))
def test_what_a_window_reads_is_what_its_queries_see(reach: int | None, context: int, query: int) -> None:
    """Every query, one by one: the last `reach` tokens up to and with itself."""
    assume(query <= context)
    seen = [range(0 if reach is None else max(0, end - reach), end) for end in range(context - query + 1, context + 1)]
    found = Reach(reach)
    assert found.pairs(context, query) == sum(map(len, seen))
    assert found.span(context, query) == len(set().union(*seen))
    assert found.read(context) == len(seen[-1])


counts = st.integers(0, 10**6)


@given(
    st.tuples(counts, st.integers(0, 500), counts, counts),
    st.tuples(counts, st.integers(0, 500), counts, counts),
)
def test_more_work_never_takes_less_time(one: tuple[int, ...], more: tuple[int, ...]) -> None:
    model = Roofline(
        dense=1e-3, expert=1e-3, missed=0.75, token=1e-5, kinds=(Attention(Reach(None), 1000, 10**5),), kv_byte=1e-12,
        pairs=(1e-9,), state_bytes=100, layers=1e-3, floor=0.0, step=1e-3, sequence=1e-5, link=1e-6,
        text="",
    )  # fmt: skip

    def work(of: tuple[int, ...]) -> StepWork:
        tokens, seqs, read, pairs = of
        return StepWork(tokens, seqs, seqs, (read,), (pairs,))

    both = tuple(a + b for a, b in zip(one, more, strict=True))
    assert model.seconds(work(one)) <= model.seconds(work(both))
    assert model.seconds(StepWork(read=(0,), pairs=(0,))) == 0.0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # 32 layers x 2 x 8 heads x 128 x 2 bytes; a pair costs 2 x 32 heads x (128 + 128) per layer
        ("llama-3.1-8b", [(None, 131_072, 32 * 2 * 32 * 256)]),
        # 24 layers of 2 x 8 x 64 x 2 bytes, every other one with a window of 128; 64 heads
        ("gpt-oss-20b", [(128, 12 * 2_048, 12 * 2 * 64 * 128), (None, 12 * 2_048, 12 * 2 * 64 * 128)]),
        # 61 latents of 512 + 64, two bytes; 128 heads score 576 and sum 512
        ("deepseek-v3", [(None, 61 * 576 * 2, 61 * 2 * 128 * (576 + 512))]),
    ],
)
def test_layers_of_one_reach_are_one_kind(model: str, expected: list[tuple[int | None, int, int]]) -> None:
    kinds = attention_kinds(plan(Request(catalog.load(model), gpu("b200"), EngineArgs(max_model_len=4096))))
    found = [(kind.reach.tokens, kind.token_bytes, kind.pair_flops) for kind in kinds]
    assert sorted(found, key=str) == sorted(expected, key=str)


# --- names of blocks --------------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 30), ids), min_size=2, max_size=5), st.integers(1, 7), st.integers(1, 6))
def test_blocks_have_one_name_exactly_where_all_tokens_so_far_are_equal(
    asked: list[tuple[int, tuple[int, ...]]], run_len: int, block_size: int
) -> None:
    def tokens(number: int, prompt: int, ids: tuple[int, ...]) -> list[object]:
        """Spelled out: what each token is, for 10 more than the prompt."""
        shared = [(ids[: at // run_len + 1], at) for at in range(min(prompt, len(ids) * run_len))]
        return [*shared, *((number, at) for at in range(len(shared), prompt + 10))]

    prefixes = Prefixes()
    names: dict[tuple[object, ...], int] = {}
    for number, (prompt, ids) in enumerate(asked, 1):
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
    assert [at for at, bucket in enumerate(timeline.buckets) if bucket.seconds] == [0, 10]


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
    found = slo.parse_slo(text)
    assert [promise.metric for promise in found] == [metric for metric, _, _ in promises]
    assert [promise.share for promise in found] == pytest.approx([share for _, share, _ in promises])
    assert [promise.limit for promise in found] == pytest.approx([limit for _, _, limit in promises])


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
    for at, (number, (queue, wait, rest, output, preemptions)) in enumerate(zip(numbers, ended, strict=True)):
        records.number.append(number)
        records.arrival.append(0.0)
        records.admitted.append(queue)
        records.first_token.append(queue + wait)
        records.ended.append(queue + wait + rest)
        records.output.append(output)
        records.preemptions.append(preemptions)
        if at % every == 0:
            was_stopped = was_stopped or broken(run)
    is_kept = all(each.is_kept for each in slo.outcomes(promises, run, skipped))
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
    assert [each.is_kept for each in slo.outcomes(promises, run, 0)] == [is_kept]
    assert slo.Broken(promises, 100, 0)(run) == (not is_kept)


# --- the largest load -------------------------------------------------------------------------------------------------


def up_to(most: float, tried: list[float]) -> Callable[[float], bool]:
    def keeps(load: float) -> bool:
        tried.append(load)
        return load <= most

    return keeps


@given(st.floats(0.001, 1000), st.floats(0.001, 1000))
def test_bisection_ends_within_two_percent_of_the_largest_rate(start: float, boundary: float) -> None:
    tried: list[float] = []
    found = slo.largest_rate(start, up_to(boundary, tried))
    assert found.runs == len(tried) <= 12 + 7  # 2^-6 of a doubling is 1.6 %
    if found.keeps is not None:
        assert found.keeps in tried
        assert found.keeps <= boundary
    if found.breaks is not None:
        assert found.breaks in tried
        assert found.breaks > boundary
    if found.keeps is None:
        assert boundary < start / 2**11
    elif found.breaks is None:
        assert boundary >= start * 2**11
    else:
        assert found.breaks <= found.keeps * 1.02


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_bisection_finds_the_largest_number_of_users(start: int, boundary: int, most: int) -> None:
    tried: list[float] = []
    found = slo.largest_users(start, up_to(boundary, tried), most)
    assert found.runs == len(tried) == len(set(tried))
    assert all(1 <= users <= most and users == int(users) for users in tried)
    if found.keeps is None:
        assert found.breaks is not None
        assert boundary < found.breaks <= max(1, start / 2**11)
    elif found.breaks is None:  # as many as there may be, or as twelve runs reach
        assert min(most, start * 2**11) <= found.keeps <= boundary
    else:
        assert found.keeps <= boundary < found.breaks
        assert found.breaks <= max(found.keeps + 1, found.keeps * 1.02)


# --- what a run keeps -------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del kept


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


def many(at: Callable[[int], float] = float, prompt: int = 5, output: int = 3, num: int = 12) -> list[TraceRequest]:
    return [TraceRequest(at(number), prompt, output) for number in range(num)]


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
        (many(), {"each": 0.0}, 0, 0),
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
    base = roofline(planned(), Shares())
    stated = AtLeast(base, 0.030)
    one, prompt = StepWork(1, 1, 1, (100,), (100,)), StepWork(8192, 1, 1, (8192,), (8192 * 8193 // 2,))
    assert base.seconds(one) < 0.030 < base.seconds(prompt)
    assert (stated.seconds(one), stated.seconds(prompt)) == (0.030, base.seconds(prompt))
    assert stated.text.endswith("; at least 30 ms, as stated")


# --- what numbers are multiplied in -----------------------------------------------------------------------------------

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
INT8_WEIGHTS = FP8_WEIGHTS | {"type": "int"}
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs or weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"]}


SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1024, "dtype": "bfloat16",
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
HEAD, LAYERS = 1024 * 256, 2 * (256 * 512 + 256 * 256 + 3 * 256 * 512)


def rates_of(quantization: dict[str, Any], gpu_name: str, **args: Any) -> tuple[tuple[int, int], ...]:
    spec = read_config(SMALL_LLAMA | {"quantization_config": quantization}, "config.json", "small")
    return roofline(plan(Request(spec, gpu(gpu_name), EngineArgs(**args))), Shares()).narrow


@pytest.mark.parametrize(
    ("quantization", "gpu_name", "tera"),
    [
        # Whatever the method is called; dense figures of NVIDIA's H100, A100 and B200 data sheets.
        ({"quant_method": "fp8"}, "h100-80g", 1978.9),
        ({"quant_method": "fbgemm_fp8"}, "h100-80g", 1978.9),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "h100-80g", 1978.9),
        (compressed(FP8_WEIGHTS), "h100-80g", 1978.9),
        (compressed(INT8_WEIGHTS), "a100-80g", 624),
        (compressed(INT8_WEIGHTS), "h100-80g", 1978.9),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200", 9000),
        (compressed(FP4_WEIGHTS), "b200", 9000),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "b200", 4500),
        # No such arithmetic there, or weights alone are narrow: widened to 16 bits first.
        ({"quant_method": "fp8"}, "a100-80g", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "h100-80g", None),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "b200", None),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "h100-80g", None),
        ({"quant_method": "awq", "bits": 4}, "b200", None),
        ({"quant_method": "gptq", "bits": 4}, "h100-80g", None),
    ],
)
def test_a_checkpoint_runs_at_the_rate_of_what_it_is_stored_in(
    quantization: dict[str, Any], gpu_name: str, tera: float | None
) -> None:
    narrow = LAYERS + HEAD * (quantization["quant_method"] == "modelopt")  # it stores the head too, unless excluded
    expected = () if tera is None else ((narrow, round(tera * 10**12)),)
    assert rates_of(quantization, gpu_name) == expected


def test_layers_kept_in_16_bits_run_at_its_rate() -> None:
    quantization = {
        "quant_method": "fp8",
        "modules_to_not_convert": [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)],
    }
    assert rates_of(quantization, "h100-80g") == ((LAYERS - 2 * 256 * 512, 1_978_900_000_000_000),)


def test_weights_quantised_while_loading_run_in_fp8() -> None:
    spec = read_config(SMALL_LLAMA, "config.json", "small")
    made = plan(Request(spec, gpu("h100-80g"), EngineArgs(quantization="fp8")))
    assert roofline(made, Shares()).narrow == ((LAYERS, 1_978_900_000_000_000),)


def test_a_step_takes_each_part_at_its_own_rate() -> None:
    spec = read_config(SMALL_LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "config.json", "small")
    made = perfect(plan(Request(spec, gpu("h100-80g"), EngineArgs())))
    norms = 5 * 256
    work = StepWork(num_tokens=10**6, num_seqs=0, num_samples=0, read=(0,), pairs=(0,))
    at_rates = LAYERS / 1978.9e12 + (HEAD + norms) / 989.4e12
    assert made.seconds(work) == pytest.approx(2 * 10**6 * at_rates, rel=1e-4)  # the weights are read in a microsecond
    assert "1,979 TFLOP/s in fp8 and 989 TFLOP/s in 16 bits" in made.text


def test_mxfp4_experts_run_in_fp8_where_their_inputs_do() -> None:
    # vLLM 0.33 fused_moe/oracle/mxfp4.py: bfloat16 inputs come first for gpt-oss, mxfp8 ones for fp8 checkpoints.
    mxfp4 = Scheme("mxfp4", 32)
    assert number_format(mxfp4, gpu("b200"), narrow_inputs=True) == "fp8"
    assert number_format(mxfp4, gpu("b200"), narrow_inputs=False) is None
    assert number_format(mxfp4, gpu("h100-80g"), narrow_inputs=True) is None
