"""KV kept beyond the GPU: what each tier serves, against a least-recently-used list kept in the test."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_manager import FullGroup
from engine.scheduler import SchedulerConfig
from kvplan.simulate.arrivals import Open
from kvplan.simulate.loop import Simulation
from kvplan.simulate.result import result
from kvplan.simulate.steptime import Attention, Roofline, StepTime
from kvplan.simulate.tiers import Tiers, TierSpec, tiers
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest, read
from tests.support.oracle_data import DATA, needs_oracle_data

CHUNK = 4
TOKEN_BYTES = 10
CHUNK_BYTES = CHUNK * TOKEN_BYTES
APART_S = 10.0  # one request ends long before the next comes


@dataclass(slots=True)
class Clocked:
    """A second a step; keeps what every step was made of."""

    works: list[StepWork] = field(default_factory=list)
    text: str = "a second"

    def seconds(self, work: StepWork) -> float:
        self.works.append(work)
        return 1.0


def kept(*num_chunks: int, chunk: int = CHUNK) -> Tiers:
    """Tiers of so many chunks, fastest first."""
    specs = tuple(TierSpec(f"t{at}", n * chunk * TOKEN_BYTES, 10**9) for at, n in enumerate(num_chunks))
    return tiers(specs, chunk, TOKEN_BYTES)


def simulation(
    requests: list[TraceRequest], tiers: Tiers | None, step_time: StepTime | None = None, *, run_len: int = CHUNK,
    num_blocks: int = 500, block_size: int = 4, budget: int = 1_000_000, **config: bool,
) -> Simulation:  # fmt: skip
    """Of one full-attention group, without a prefix cache on the GPU unless it is asked for, already run."""
    options = {"enable_prefix_caching": False, **config}
    limits = SchedulerConfig(budget, 8, 10_000_000, **options)  # type: ignore[arg-type]
    found = Simulation(
        limits, num_blocks, (FullGroup(block_size),), (Reach(None),), step_time or Clocked(), Open(iter(requests)),
        run_len, tiers,
    )  # fmt: skip
    found.run()
    return found


def alone(*prompts: tuple[int, tuple[int, ...]], output: int = 2) -> list[TraceRequest]:
    """(prompt tokens, ids of its runs) of requests that never meet."""
    return [TraceRequest(at * APART_S, prompt, output, ids) for at, (prompt, ids) in enumerate(prompts)]


@dataclass(slots=True)
class LeastRecent:
    """One tier, as plainly as can be: a list of chunks, the least recently used first.

    A chunk is what lies before its end: its ids, and whose it is where no id covers it whole.
    """

    num_chunks: int
    held: list[tuple[object, ...]] = field(default_factory=list)
    hit_tokens: int = 0

    def serve(self, number: int, prompt: int, ids: tuple[int, ...], run_len: int, chunk: int) -> None:
        def name(index: int) -> tuple[object, ...]:
            end = (index + 1) * chunk
            runs = -(-end // run_len)
            return (index, ids[:runs]) if runs <= len(ids) else (index, number)

        for index in range((prompt - 1) // chunk):  # the last token is always computed
            if name(index) not in self.held:
                break
            self.hit_tokens += chunk
        for index in reversed(range(prompt // chunk)):
            if name(index) in self.held:
                self.held.remove(name(index))
            self.held.append(name(index))
            del self.held[: max(0, len(self.held) - self.num_chunks)]


def hits_of(requests: list[TraceRequest], num_chunks: int, run_len: int, chunk: int) -> int:
    model = LeastRecent(num_chunks)
    for number, each in enumerate(requests, 1):
        model.serve(number, each.prompt_tokens, each.prefix_ids, run_len, chunk)
    return model.hit_tokens


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_loaded_but_for_its_last_chunk() -> None:
    """12 tokens are 3 chunks; the last token must be computed, and with it the chunk it is in."""
    run = simulation(alone((12, (1, 2, 3)), (12, (1, 2, 3)), (13, (1, 2, 3))), kept(10))
    assert list(run.records.loaded) == [0, 8, 12]


def test_chunks_that_are_not_whole_are_not_kept() -> None:
    run = simulation(alone((7, (1, 2)), (30, (1, 2, 3))), kept(10))
    assert list(run.records.loaded) == [0, 4]


def test_answers_are_not_kept() -> None:
    """A prompt of 4 and an answer of 12: only the prompt's chunk is found by whoever asks for the same 16 tokens."""
    run = simulation(alone((4, (1,)), (17, (1,)), output=12), kept(10))
    assert list(run.records.loaded) == [0, 4]


def test_the_beginning_of_a_prompt_goes_out_last() -> None:
    """Room for 2 of 3 chunks: the first two stay, as only they are of use without the third."""
    run = simulation(alone((13, (1, 2, 3)), (13, (1, 2, 3))), kept(2))
    assert list(run.records.loaded) == [0, 8]


def test_the_fastest_tier_that_has_a_chunk_serves_it() -> None:
    """Tiers of 1 and 3 chunks after a prompt of 3: the first chunk is the fast one's, two are the slow one's."""
    run = simulation(alone((13, (1, 2, 3)), (13, (1, 2, 3))), kept(1, 3))
    assert run.tiers is not None
    assert [tier.hit_tokens for tier in run.tiers.tiers] == [4, 8]
    figures = result(run)
    assert [tier.hit_rate for tier in figures.tiers] == [4 / 26, 8 / 26]
    assert figures.loaded_tokens == 12


def test_what_the_gpu_still_has_is_not_loaded() -> None:
    """13 tokens of blocks of 3: the GPU finds 12, the chunks of 4 have nothing to add; of a longer one they would."""
    run = simulation(
        alone((13, (1, 2, 3)), (13, (1, 2, 3)), (40, (1, 2, 3))), kept(10), block_size=3, enable_prefix_caching=True
    )
    assert list(run.records.cached) == [0, 12, 12]
    assert list(run.records.loaded) == [0, 0, 0]


def test_a_chunk_that_the_gpu_has_in_part_is_loaded_for_the_rest() -> None:
    """Blocks of 3 under 8 shared tokens: the GPU finds 6, the tier ends its second chunk at 8."""
    run = simulation(alone((9, (1, 2)), (20, (1, 2))), kept(10), block_size=3, enable_prefix_caching=True)
    assert (list(run.records.cached), list(run.records.loaded)) == ([0, 6], [0, 2])


def test_a_tier_without_room_for_a_chunk_serves_nothing() -> None:
    small = tiers((TierSpec("small", CHUNK_BYTES - 1, 1),), CHUNK, TOKEN_BYTES)
    run = simulation(alone((13, (1, 2, 3)), (13, (1, 2, 3))), small)
    assert list(run.records.loaded) == [0, 0]
    assert [len(tier.chunks) for tier in small.tiers] == [0]


# --- laws -------------------------------------------------------------------------------------------------------------

prompts = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 2), max_size=6).map(tuple)), min_size=1, max_size=12
)


@given(prompts, st.integers(0, 12), st.sampled_from((1, 3, 4, 6, 8)))
def test_a_tier_serves_what_a_least_recently_used_list_would(
    asked: list[tuple[int, tuple[int, ...]]], num_chunks: int, run_len: int
) -> None:
    requests = [
        TraceRequest(each.arrival_s, each.prompt_tokens, 2, each.prefix_ids[: -(-each.prompt_tokens // run_len)])
        for each in alone(*asked)
    ]
    run = simulation(requests, kept(num_chunks), run_len=run_len)
    assert run.tiers is not None
    assert run.tiers.tiers[0].hit_tokens == hits_of(requests, num_chunks, run_len, CHUNK)
    assert sum(run.records.loaded) == run.tiers.tiers[0].hit_tokens


@given(prompts, st.lists(st.integers(0, 10), min_size=1, max_size=4).map(sorted))
def test_a_tier_serves_what_its_room_adds_to_the_faster_ones(
    asked: list[tuple[int, tuple[int, ...]]], rooms: list[int]
) -> None:
    """Every tier keeps everything it has room for, so the slower holds what the faster holds: H(Cj) - H(Cj-1)."""
    requests = alone(*asked)
    run = simulation(requests, kept(*rooms))
    assert run.tiers is not None
    found = [hits_of(requests, room, CHUNK, CHUNK) for room in rooms]
    expected = [high - low for low, high in zip([0, *found], found, strict=False)]
    assert [tier.hit_tokens for tier in run.tiers.tiers] == expected


@given(prompts, st.integers(0, 12), st.sampled_from((1, 2, 5, 64)), st.booleans(), st.sampled_from((8, 14, 60)))
def test_every_token_of_a_prompt_is_computed_found_or_loaded(
    asked: list[tuple[int, tuple[int, ...]]], num_chunks: int, budget: int, caching: bool, num_blocks: int
) -> None:
    """All at once, in steps that cut through chunks; the bytes that steps load are those of the tokens."""
    requests = [TraceRequest(0.0, prompt, 2, ids) for prompt, ids in asked]
    clock = Clocked()
    run = simulation(
        requests, kept(num_chunks), clock, budget=budget, num_blocks=num_blocks, enable_prefix_caching=caching
    )
    records = run.records
    assert run.tiers is not None
    assert not run.tiers._loading
    assert not run.tiers._starts
    if run.scheduler.num_preemptions or run.counts.failed:
        return
    assert sum(sum(work.loaded) for work in clock.works) == sum(records.loaded) * TOKEN_BYTES
    assert run.counts.prompt_tokens + sum(records.cached) + sum(records.loaded) == sum(records.prompt)
    assert all(
        cached + loaded < prompt
        for cached, loaded, prompt in zip(records.cached, records.loaded, records.prompt, strict=True)
    )


def test_nothing_is_kept_of_a_sequence_that_was_preempted_and_came_back() -> None:
    """Seven blocks: the last of three is preempted with some of its answer given, and loads its prompt again."""
    requests = [TraceRequest(0.0, 6, 12, (1, 2)), TraceRequest(0.0, 6, 12, (3, 4)), TraceRequest(0.0, 6, 12, (5, 6))]
    run = simulation(requests, kept(20), num_blocks=8)
    assert run.scheduler.num_preemptions > 0
    assert run.tiers is not None
    assert run.tiers.tiers[0].hit_tokens > 0
    assert not run.tiers._loading
    assert not run.tiers._starts


def roofline(tier_bandwidth: int) -> Roofline:
    """Computing a token takes 20 us, loading its 10 bytes 10 / tier_bandwidth."""
    return Roofline(
        dense=0.0, expert=0.0, missed=0.0, token=2e-5, kinds=(Attention(Reach(None), 10, 0),), kv_byte=1e-9,
        pairs=(0.0,), state_bytes=0, layers=0.0, floor=0.0, step=0.0, sequence=0.0, link=0.0,
        tier_bandwidths=(tier_bandwidth,), text="",
    )  # fmt: skip


@given(prompts)
def test_a_tier_faster_than_computing_never_makes_a_first_token_later(
    asked: list[tuple[int, tuple[int, ...]]],
) -> None:
    requests = alone(*asked)
    without = simulation(requests, None, roofline(1)).records.times("ttft")
    with_tier = simulation(requests, kept(20), roofline(10**9)).records.times("ttft")
    assert all(fast <= plain for fast, plain in zip(with_tier, without, strict=True))


@pytest.mark.parametrize("bandwidth", [10_000, 1_000_000])
def test_loading_takes_its_bytes_over_the_tiers_bandwidth(bandwidth: int) -> None:
    """The second prompt of 13 loads 12 tokens, 120 bytes, and computes 1: 20 us, and 13 tokens of KV at 10 bytes."""
    run = simulation(alone((13, (1, 2, 3)), (13, (1, 2, 3)), output=1), kept(20), roofline(bandwidth))
    first, second = (run.records.ended[row] - run.records.arrival[row] for row in (0, 1))
    assert first == pytest.approx(13 * 20e-6 + 13 * 10 / 1e9, abs=1e-12)
    assert second == pytest.approx(20e-6 + 13 * 10 / 1e9 + 120 / bandwidth, abs=1e-12)


@needs_oracle_data
@pytest.mark.parametrize("num_chunks", [0, 50, 1_000, 100_000])
def test_tiers_serve_a_real_trace_as_the_list_would(num_chunks: int) -> None:
    """Mooncake's conversations, one after the other, in chunks of half a published run."""
    rows = read(DATA / "traces" / "mooncake_conv_first400.jsonl").requests[:80]
    requests = [TraceRequest(at * APART_S, row.prompt_tokens, 1, row.prefix_ids) for at, row in enumerate(rows)]
    run = simulation(requests, kept(num_chunks, chunk=256), run_len=512, num_blocks=40_000)
    assert run.tiers is not None
    found = run.tiers.tiers[0].hit_tokens
    assert found == hits_of(requests, num_chunks, 512, 256)
    assert (found > 0) == (num_chunks > 0)
