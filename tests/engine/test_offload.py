"""KV in host memory: the scheduler with its connector step by step against a real one's traces, and by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.block_manager import BlockKey, FullGroup, Group, WindowGroup
from engine.chunk_pool import Access, ChunkPool, chunk_pool
from engine.connector import Transfers
from engine.loading import Loading
from engine.offload import OffloadConnector
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig, simulated_scheduler
from tests.oracles import trace_difference
from tests.support.oracle_data import DATA, needs_oracle_data

SHARED = DATA / "scheduler_traces2" / "offload.jsonl"
FACTS = Path(__file__).parents[1] / "facts" / "offload_traces.jsonl"


def read_traces(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def cases(path: Path) -> list[Any]:
    return [pytest.param(trace, id=trace["name"]) for trace in read_traces(path)]


@pytest.mark.parametrize("trace", cases(FACTS))
def test_every_step_is_vllms_with_its_offloading_connector(trace: dict[str, Any]) -> None:
    """Runs of vLLM 0.33.0's own scheduler, connector and pool."""
    assert trace_difference(trace) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", cases(SHARED))
def test_every_step_is_vllms_on_the_shared_traces(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


def default_cases(path: Path) -> list[Any]:
    """Those whose connector has vLLM's defaults, but for the size of a chunk."""
    return [case for case in cases(path) if is_default(case.values[0]["inputs"]["offload"].get("extra", {}))]


def is_default(extra: dict[str, Any]) -> bool:
    defaults = {"eviction_policy": "lru", "offload_prompt_only": True, "store_threshold": 1}
    return all(value == defaults[name] for name, value in extra.items() if name != "blocks_per_chunk")


@pytest.mark.parametrize("trace", default_cases(FACTS))
def test_every_step_of_a_simulations_tiers_is_vllms(trace: dict[str, Any]) -> None:
    """`kvplan simulate --tier` and the twin: the same connector, put together for copies that only take time."""
    assert trace_difference(trace, timed=True) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", default_cases(SHARED))
def test_every_step_of_a_simulations_tiers_is_vllms_on_the_shared_traces(trace: dict[str, Any]) -> None:
    assert trace_difference(trace, timed=True) is None


def test_a_planted_difference_is_seen() -> None:
    trace = next(read_traces(FACTS))
    step = next(step for step in trace["steps"] if step["stores"])
    step["cpu_pool"] = step["cpu_pool"] | {"writing": step["cpu_pool"]["writing"] + 1}
    assert (trace_difference(trace) or "").startswith(f"step {step['step']}: cpu_pool")


# --- by hand: blocks of 4 tokens ---------------------------------------------------------------------------------


def loading_scheduler(
    num_blocks: int, num_chunks: int, groups: tuple[Group, ...] = (FullGroup(4),), **options: Any
) -> Scheduler:
    config = SimulatedConfig(max_num_batched_tokens=32, max_num_seqs=4, max_model_len=64, **options)
    loading = Loading(OffloadConnector(groups, chunk_pool(num_chunks)))
    return simulated_scheduler(config, num_blocks, groups, loading)


def loading_of(scheduler: Scheduler) -> Loading:
    loading = scheduler.extension(Loading)
    assert loading is not None
    return loading


def pool_of(scheduler: Scheduler) -> ChunkPool:
    connector = loading_of(scheduler).connector
    assert isinstance(connector, OffloadConnector)
    return connector.pool


def request(name: str, prompt_len: int, first: int = 0, max_tokens: int = 1) -> Sequence:
    return Sequence(name, [first + i for i in range(prompt_len)], max_tokens)


def step(scheduler: Scheduler, *, copies: bool = True) -> Batch:
    """One batch, and all its copies."""
    batch = scheduler.schedule()
    scheduler.update(batch, {seq.request_id: [7] for seq in batch.samples})
    if copies:
        transfers = batch.extra(Transfers)
        loading_of(scheduler).complete([*transfers.stores, *transfers.loads])
    scheduler.check_invariants()
    pool_of(scheduler).check_invariants()
    return batch


def run(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)
    while scheduler.has_unfinished:
        step(scheduler)
    step(scheduler)


def test_a_prefix_that_the_device_has_lost_is_loaded_while_others_run() -> None:
    scheduler = loading_scheduler(9, 20)
    run(scheduler, request("a", 20), request("b", 30, first=100))  # b's 8 blocks take the place of a's
    again, other = request("c", 20), request("d", 6, first=200, max_tokens=3)
    scheduler.add(again)
    scheduler.add(other)
    batch = step(scheduler, copies=False)
    assert (again.status, other.status) == ("loading", "running")
    (load,) = batch.extra(Transfers).loads.values()
    assert load.num_blocks == 5
    assert step(scheduler, copies=False).num_tokens == {other: 1}
    loading_of(scheduler).complete(batch.extra(Transfers).loads)
    assert step(scheduler).num_tokens == {other: 1, again: 1}  # all 20 tokens came; the last one is computed
    assert loading_of(scheduler).external_cache_stats.hits == 20


def test_a_prompt_that_skips_the_cache_is_no_query_of_it() -> None:
    """The connector is not asked for it, as the prefix cache is not."""
    scheduler = loading_scheduler(9, 20)
    run(scheduler, request("a", 20), Sequence("b", list(range(100, 120)), 1, skips_cache=True))
    assert loading_of(scheduler).external_cache_stats.queries == scheduler.prefix_cache_stats.queries == 20


def test_what_an_aborted_load_writes_to_is_given_back_when_it_is_done() -> None:
    scheduler = loading_scheduler(9, 20)
    run(scheduler, request("a", 20), request("b", 30, first=100))
    scheduler.add(request("c", 20))
    batch = step(scheduler, copies=False)
    scheduler.abort("c")
    assert scheduler.blocks.num_free_blocks == 3
    assert not scheduler.has_unfinished
    loading_of(scheduler).complete(batch.extra(Transfers).loads)
    assert scheduler.blocks.num_free_blocks == 8


def test_a_sequence_alone_with_one_that_loads_gives_way_instead_of_failing() -> None:
    scheduler = loading_scheduler(9, 20, watermark=0.0)
    run(scheduler, request("a", 12), request("b", 30, first=100))
    grows = request("c", 19, first=200, max_tokens=8)
    scheduler.add(grows)
    step(scheduler)
    scheduler.add(request("d", 12, max_tokens=1))
    step(scheduler, copies=False)
    assert [seq.request_id for seq in loading_of(scheduler).loading] == ["d"]
    for _ in range(3):
        step(scheduler, copies=False)
    assert grows.status in ("running", "preempted")
    assert grows.error is None


def test_what_a_failed_request_has_stored_is_dropped() -> None:
    scheduler = loading_scheduler(20, 20)
    bad = request("a", 20, max_tokens=4)
    scheduler.add(bad)
    batch = step(scheduler, copies=False)
    scheduler.fail("a", "no numbers")
    loading_of(scheduler).complete(batch.extra(Transfers).stores)
    step(scheduler)
    assert pool_of(scheduler).num_resident == 0


def test_memory_of_the_old_kind_cannot_be_offloaded() -> None:
    with pytest.raises(UsageError, match="allocator must be 'paged'"):
        loading_scheduler(64, 4, allocator="contiguous")


def test_states_are_offloaded_only_where_prefixes_end_in_them() -> None:
    """vLLM 0.33 refuses hybrid models without prefix caching: their groups' blocks are not of one size."""
    groups: tuple[Group, ...] = (FullGroup(4), MambaGroup(4))
    with pytest.raises(UnsupportedModelError, match="mamba layers without prefix caching cannot be offloaded"):
        OffloadConnector(groups, chunk_pool(4), enable_prefix_caching=False)
    with pytest.raises(UnsupportedModelError, match="chunked layers cannot be offloaded"):
        OffloadConnector((ChunkedGroup(4, 8),), chunk_pool(4))
    with pytest.raises(UsageError, match="kv_offloading_size cannot be combined with prefix_match_unit"):
        loading_scheduler(64, 4, groups=groups, prefix_match_unit=2)


def test_of_states_the_last_whole_block_of_a_prompt_is_kept() -> None:
    """Of 22 tokens the first 20: five blocks of keys and values, and the state after block five."""
    scheduler = loading_scheduler(40, 40, groups=(FullGroup(4), MambaGroup(4)))
    run(scheduler, request("a", 22))
    groups = [group for _, group in pool_of(scheduler).policy.chunks]
    assert (groups.count(0), groups.count(1)) == (5, 1)


def test_a_state_that_the_device_has_lost_is_loaded_with_the_blocks_before_it() -> None:
    scheduler = loading_scheduler(12, 40, groups=(FullGroup(4), MambaGroup(4)))
    run(scheduler, request("a", 22), request("b", 30, first=100))
    again = request("c", 22, max_tokens=2)
    scheduler.add(again)
    batch = step(scheduler, copies=False)
    (load,) = batch.extra(Transfers).loads.values()
    assert load.num_blocks == 6
    assert scheduler.blocks.num_held(again) == [5, 1]
    loading_of(scheduler).complete(batch.extra(Transfers).loads)
    assert step(scheduler).num_tokens == {again: 2}


def test_windows_keep_what_a_prompts_end_reads() -> None:
    """A window of 8 before token 40: blocks 8 and 9 of 4 tokens; full attention all ten."""
    scheduler = loading_scheduler(40, 40, groups=(FullGroup(4), WindowGroup(4, 8)))
    run(scheduler, request("a", 41))
    groups = [group for _, group in pool_of(scheduler).policy.chunks]
    assert (groups.count(0), groups.count(1)) == (10, 2)


# --- the pool ----------------------------------------------------------------------------------------------------


def keys(text: str) -> list[BlockKey]:
    return [(letter.encode(), 0) for letter in text]


def use(pool: ChunkPool, text: str) -> list[str]:
    """A request of these chunks from beginning to end; returns what it had to write."""
    access = Access({key: i for i, key in enumerate(keys(text), 1)})
    places = pool.reserve(keys(text), access)
    assert places is not None
    pool.stored(places)
    pool.finish(access)
    pool.check_invariants()
    return [key[0].decode() for key in places]


@pytest.mark.parametrize(("policy", "stays"), [("lru", "abxyz"), ("arc", "abxyz")])
def test_the_end_of_the_prefix_used_longest_ago_goes_first(policy: Literal["lru", "arc"], stays: str) -> None:
    pool = chunk_pool(5, policy)
    use(pool, "abcde")
    assert use(pool, "xyz") == ["x", "y", "z"]
    assert sorted(key[0].decode() for key in pool.policy.chunks) == list(stays)


def test_chunks_that_are_copied_are_not_evicted() -> None:
    pool = chunk_pool(3)
    use(pool, "abc")
    pool.pin(keys("abc"), Access(dict.fromkeys(keys("abc"), 1)))
    assert pool.reserve(keys("x"), Access(dict.fromkeys(keys("x"), 1))) is None
    pool.unpin(keys("c"))
    assert use(pool, "x") == ["x"]
    pool.unpin(keys("ab"))
    pool.check_invariants()
