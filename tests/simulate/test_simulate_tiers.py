"""KV kept beyond the GPU: what tiers serve and when, against the engine, a plain list and arithmetic.

That each decision is vLLM's is checked on its own traces in tests/engine/test_offload.py, for these tiers too.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.block_manager import FullGroup
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.vllm import tiers as host_memory
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Open
from kvplan.simulate.loop import Simulation
from kvplan.simulate.result import result
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.setup import timed_tiers
from kvplan.simulate.steptime import StepTime
from kvplan.simulate.tiers import TierSpec, TimedTiers
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest, read
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.step_times import Constant

CHUNK = 4
TOKEN_BYTES = 10
CHUNK_BYTES = CHUNK * TOKEN_BYTES
APART_S = 100.0  # one request ends, and its copies, long before the next comes


@dataclass(frozen=True, slots=True)
class Clocked(Constant):
    """A second a step; keeps what every step was made of."""

    works: list[StepWork] = field(default_factory=list)

    def seconds(self, work: StepWork) -> float:
        self.works.append(work)
        return 1.0


def tiers_of(
    *num_chunks: int, bandwidth: int = 10**9, chunk: int = CHUNK, block_size: int = CHUNK, caching: bool = False
) -> TimedTiers:
    """Memory of so many chunks, and files of so many."""
    size = chunk * TOKEN_BYTES
    specs = tuple(TierSpec(f"t{place}", count * size, bandwidth) for place, count in enumerate(num_chunks))
    block_bytes, blocks = block_size * TOKEN_BYTES, chunk // block_size
    groups = (FullGroup(block_size),)
    return TimedTiers(specs, groups, block_bytes, size, blocks_per_chunk=blocks, enable_prefix_caching=caching)


def simulation(
    requests: list[TraceRequest], tiers: TimedTiers | None, step_time: StepTime | None = None, *, run_len: int = CHUNK,
    num_blocks: int = 500, block_size: int = CHUNK, budget: int = 1_000_000, **config: bool,
) -> Simulation:  # fmt: skip
    """Of one full-attention group, without a prefix cache on the GPU unless it is asked for, already run."""
    options = {"enable_prefix_caching": False, **config}
    limits = SimulatedConfig(budget, 8, 10_000_000, **options)  # type: ignore[arg-type]
    run = Simulation(
        limits, num_blocks, (FullGroup(block_size),), (Reach(None),), step_time or Clocked(), Open(iter(requests)),
        run_len, tiers,
    )  # fmt: skip
    run.run()
    return run


def alone(*prompts: tuple[int, tuple[int, ...]], output: int = 2) -> list[TraceRequest]:
    """(prompt tokens, ids of its runs) of requests that never meet."""
    return [TraceRequest(place * APART_S, prompt, output, ids) for place, (prompt, ids) in enumerate(prompts)]


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_loaded_but_for_its_last_token() -> None:
    """12 tokens are 3 chunks; all are loaded, and the last token is computed again: it says what comes next."""
    run = simulation(alone((12, (1, 2, 3)), (12, (1, 2, 3)), (13, (1, 2, 3))), tiers_of(10))
    assert list(run.records.loaded) == [0, 11, 12]


def test_chunks_that_are_not_whole_are_not_kept() -> None:
    run = simulation(alone((7, (1, 2)), (30, (1, 2, 3))), tiers_of(10))
    assert list(run.records.loaded) == [0, 4]


def test_answers_are_not_kept() -> None:
    """A prompt of 4 and an answer of 12: only the prompt's chunk is found by whoever asks for the same 16 tokens."""
    run = simulation(alone((4, (1,)), (17, (1,)), output=12), tiers_of(10))
    assert list(run.records.loaded) == [0, 4]


def test_the_end_of_a_prompt_goes_first() -> None:
    """Room for 3 chunks, two of them taken by another prompt: of the first one the beginning stays."""
    run = simulation(alone((13, (1, 2, 3)), (9, (7, 8)), (13, (1, 2, 3))), tiers_of(3))
    assert list(run.records.loaded) == [0, 0, 4]


def test_what_memory_has_lost_comes_from_files() -> None:
    """Memory of 3 chunks, files of 20: of the prompt that comes back one chunk is there still, two are fetched."""
    run = simulation(alone((13, (1, 2, 3)), (9, (7, 8)), (13, (1, 2, 3))), tiers_of(3, 20))
    assert list(run.records.loaded) == [0, 0, 12]
    figures = result(run)
    assert [(tier.name, tier.hit_tokens) for tier in figures.tiers] == [("t0", 4), ("t1", 8)]
    assert [tier.hit_rate for tier in figures.tiers] == [4 / 35, 8 / 35]
    assert figures.loaded_tokens == 12


def test_files_go_by_their_last_use() -> None:
    """Files of 3 chunks and memory of 3: the second prompt's two chunks take the files of the first one's last two."""
    run = simulation(alone((13, (1, 2, 3)), (13, (4, 5, 6)), (13, (1, 2, 3))), tiers_of(3, 3))
    assert list(run.records.loaded) == [0, 0, 0]


def test_what_the_gpu_still_has_is_not_loaded() -> None:
    requests = alone((13, (1, 2, 3)), (13, (1, 2, 3)), (40, (1, 2, 3)))
    run = simulation(requests, tiers_of(10, caching=True), enable_prefix_caching=True)
    assert list(run.records.cached) == [0, 12, 12]
    assert list(run.records.loaded) == [0, 0, 0]


def test_a_chunk_of_several_blocks_is_loaded_for_the_rest() -> None:
    """Chunks of 2 blocks; of 16 shared tokens the GPU finds nothing once others have had its blocks."""
    run = simulation(alone((17, (1, 2, 3, 4)), (39, (1, 2, 3, 4))), tiers_of(10, chunk=8))
    assert list(run.records.loaded) == [0, 16]


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByToken(Constant):
    """Computing a token takes 20 us, reading the 10 bytes of its KV 10 ns."""

    def seconds(self, work: StepWork) -> float:
        return 2e-5 * work.num_tokens + 1e-8 * work.read[0]


@pytest.mark.parametrize("bandwidth", [10_000, 1_000_000])
def test_a_request_waits_for_its_bytes_over_the_tiers_bandwidth(bandwidth: int) -> None:
    """The second prompt of 13 loads 12 tokens, 120 bytes, then computes 1: 20 us, and 13 tokens of KV at 10 bytes."""
    tiers = tiers_of(20, bandwidth=bandwidth)
    run = simulation(alone((13, (1, 2, 3)), (13, (1, 2, 3)), output=1), tiers, ByToken())
    first, second = (run.records.ended[row] - run.records.arrival[row] for row in (0, 1))
    assert first == pytest.approx(13 * 20e-6 + 13 * 10 / 1e9, abs=1e-12)
    assert second == pytest.approx(120 / bandwidth + 20e-6 + 13 * 10 / 1e9, abs=1e-12)


def test_files_are_fetched_before_memory_is_loaded() -> None:
    """Of 3 chunks of 40 bytes 2 come from files at 1,000 bytes/s, then 3 from memory at 10,000: 0.080 + 0.012 s."""
    tiers = tiers_of(3, 20)
    tiers.host._specs = (TierSpec("t0", 120, 10_000), TierSpec("t1", 800, 1_000))
    run = simulation(alone((13, (1, 2, 3)), (9, (7, 8)), (13, (1, 2, 3)), output=1), tiers, ByToken())
    assert run.records.ended[2] - run.records.arrival[2] == pytest.approx(0.092 + 20e-6 + 130e-9, abs=1e-12)


def test_others_run_while_a_request_loads() -> None:
    """A load of 120 bytes at 10 bytes/s takes 12 s; a short prompt that comes a second later is done before it."""
    requests = [
        TraceRequest(0.0, 13, 1, (1, 2, 3)),
        TraceRequest(APART_S, 13, 1, (1, 2, 3)),
        TraceRequest(APART_S + 1, 3, 2, ()),
    ]
    run = simulation(requests, tiers_of(20, bandwidth=10), Clocked())
    ended = dict(zip(run.records.number, run.records.ended, strict=True))
    assert ended[3] == APART_S + 3
    assert ended[2] == APART_S + 12 + 1


def test_nobody_waits_for_stores() -> None:
    """Stores at 1 byte/s: 120 s for the first prompt's; the answers end when they end without a tier."""
    requests = [TraceRequest(float(place), 13, 5, (place,)) for place in range(4)]
    slow, without = (simulation(requests, tiers, Clocked()) for tiers in (tiers_of(20, bandwidth=1), None))
    assert list(slow.records.ended) == list(without.records.ended)


# --- laws -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LeastRecent:
    """A tier that any prompt fits into, as plainly as can be: a list of chunks, the least recently used first.

    A chunk is what lies before its end: its ids, and whose it is where no id covers it whole.
    """

    num_chunks: int
    names: list[tuple[object, ...]] = field(default_factory=list)
    hit_tokens: int = 0

    def serve(self, number: int, prompt: int, ids: tuple[int, ...], run_len: int, chunk: int) -> None:
        def name(index: int) -> tuple[object, ...]:
            end = (index + 1) * chunk
            runs = -(-end // run_len)
            return (index, ids[:runs]) if runs <= len(ids) else (index, number)

        whole = range(prompt // chunk)
        hits = next((index for index in whole if name(index) not in self.names), len(whole))
        self.hit_tokens += min(hits * chunk, prompt - 1)  # the last token is always computed
        for index in reversed(whole):
            if name(index) in self.names:
                self.names.remove(name(index))
            self.names.append(name(index))
        del self.names[: max(0, len(self.names) - self.num_chunks)]


def hits_of(requests: list[TraceRequest], num_chunks: int, run_len: int, chunk: int) -> int:
    model = LeastRecent(num_chunks)
    for number, request in enumerate(requests, 1):
        model.serve(number, request.prompt_tokens, request.prefix_ids, run_len, chunk)
    return model.hit_tokens


prompts = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 2), max_size=6).map(tuple)), min_size=1, max_size=12
)


@given(prompts, st.integers(10, 30), st.sampled_from((1, 3, 4, 6, 8)))
def test_a_tier_serves_what_a_least_recently_used_list_would(
    prompts: list[tuple[int, tuple[int, ...]]], num_chunks: int, run_len: int
) -> None:
    requests = [
        TraceRequest(
            request.arrival_s, request.prompt_tokens, 2, request.prefix_ids[: -(-request.prompt_tokens // run_len)]
        )
        for request in alone(*prompts)
    ]
    run = simulation(requests, tiers_of(num_chunks), run_len=run_len)
    assert result(run).loaded_tokens == hits_of(requests, num_chunks, run_len, CHUNK)
    assert result(run).tiers[0].hit_tokens == result(run).loaded_tokens


@example([(4, (0,)), (4, (0,))], 1, 0, 1, False)  # the second is held whole
@given(prompts, st.integers(1, 12), st.integers(0, 20), st.sampled_from((1, 2, 5, 64)), st.booleans())
def test_every_token_of_a_prompt_is_computed_or_loaded_once(
    prompts: list[tuple[int, tuple[int, ...]]], num_chunks: int, num_files: int, budget: int, caching: bool
) -> None:
    """All at once, in steps that cut through chunks; at the end no block is taken and no copy pinned."""
    requests = [TraceRequest(0.0, prompt, 2, ids) for prompt, ids in prompts]
    tiers = tiers_of(*([num_chunks, num_files] if num_files else [num_chunks]), bandwidth=37, caching=caching)
    run = simulation(requests, tiers, budget=budget, num_blocks=60, enable_prefix_caching=caching)
    run.scheduler.check_invariants()
    tiers.connector.pool.check_invariants()
    records = run.records
    if run.scheduler.num_preemptions or run.counts.failed:
        return
    assert run.counts.prompt_tokens + sum(records.cached) + sum(records.loaded) == sum(records.prompt)
    assert sum(tiers.hit_tokens) == sum(records.loaded)
    # A prompt that tiers hold whole is counted whole, as vLLM counts num_external_computed_tokens; its last token is
    # computed all the same. What is found or loaded otherwise ends on a block's boundary.
    whole = sum(
        prompt % CHUNK == 0 and cached + loaded == prompt - 1
        for prompt, cached, loaded in zip(records.prompt, records.cached, records.loaded, strict=True)
    )
    assert tiers.external_cache_stats.hits == sum(records.loaded) + whole


@needs_oracle_data
@pytest.mark.parametrize("num_chunks", [500, 1_000, 100_000])
def test_tiers_serve_a_real_trace_as_the_list_would(num_chunks: int) -> None:
    """Mooncake's conversations, one after the other, in chunks of half a published run."""
    rows = read(DATA / "traces" / "mooncake_conv_first400.jsonl").requests[:80]
    requests = [TraceRequest(place * APART_S, row.prompt_tokens, 1, row.prefix_ids) for place, row in enumerate(rows)]
    run = simulation(requests, tiers_of(num_chunks, chunk=256, block_size=256), run_len=512, num_blocks=40_000,
                     block_size=256)  # fmt: skip
    assert result(run).loaded_tokens == hits_of(requests, num_chunks, 512, 256) > 0


# --- the server that is asked about -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 4), ("deepseek-v2-lite", 2), ("gpt-oss-20b", 1)]
)
def test_memory_has_room_for_as_many_chunks_as_vllms_would(model: str, tp: int) -> None:
    """The size that kvplan plans for --kv-offloading-size, which is compared with vLLM's own classes."""
    args = EngineArgs(max_model_len=4096, tensor_parallel_size=tp, kv_offloading_size=8 * GIB)
    answer = plan(Request(catalog.load(model), gpu("h100-80g"), args))
    (memory,) = host_memory.of_plan(answer)
    tiers = timed_tiers(answer, (TierSpec("cpu", 8 * GIB, 10**9),))
    assert tiers is not None
    assert tiers.size == memory.size


CHATS = ("llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "16k", "--trace", "examples/chats.jsonl")
REFUSED = [
    (("--kv-offloading-size", "16"), "nobody stated it; write --tier cpu=16GiB@25GB/s with its speed"),
    (("--kv-offloading-size", "16", "--tier", "cpu=8GiB@25GB/s"), "give them one size"),
    (("--kv-offloading-size", "16", "--kv-offloading-backend", "lmcache"), "LMCache cannot be simulated"),
    (("--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'), "--kv-transfer-config"),
    (("--tier", "cpu=1KiB@25GB/s"), "hold no chunk of 2,097,152"),
    (("--tier", "a=8GiB@25GB/s", "--tier", "b=8GiB@2GB/s", "--tier", "c=8GiB@1GB/s"), "3 tiers"),
    (("--tier", "a=8GiB@25GB/s", "--tier-chunk", "40"), "must be a multiple of the block of 16 tokens (40); use 48"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_no_tier_describes_is_refused(run: Run, flags: tuple[str, ...], message: str) -> None:
    ran = run("simulate", *CHATS, *flags)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert message in ran.err


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (
            "qwen3-next-80b-a3b",
            ["--no-enable-prefix-caching"],
            "recurrent states, which are offloaded only with prefix",
        ),
        ("qwen3-next-80b-a3b", ["--engine", "vllm@0.31"], "recurrent states, whose offloading was compared with"),
        ("llama-4-scout-17b-16e", [], "chunked"),
    ],
)
def test_layers_that_no_tier_keeps_are_refused_by_name(run: Run, model: str, flags: list[str], message: str) -> None:
    ran = run("simulate", model, "--gpu", "8x h200", *CHATS[3:], "--tier", "cpu=8GiB@25GB/s", "--tp", "8", *flags)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert message in ran.err
