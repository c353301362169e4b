"""The block manager: hand-worked hits, windows and evictions, and arbitrary runs with an invariant after every step."""

import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import (
    NULL_BLOCK,
    BlockManager,
    BlockPool,
    FullGroup,
    Group,
    WindowGroup,
    block_hashes,
)
from engine.contiguous import ContiguousManager
from engine.extensions import ExtendedConfig, scheduler_of
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup, StateBlockManager, StateStep
from engine.stats import num_filled_slots
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig, simulated_scheduler


def manager(num_blocks: int, *groups: Group, caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks, groups, max_model_len=64, max_in_flight_tokens=64, enable_prefix_caching=caching)


def admitted(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> int:
    """Admit all or the first num_tokens tokens of a sequence; returns the length of its hit."""
    hit = blocks.lookup(seq)
    blocks.admit(seq, hit, num_tokens or seq.num_tokens)
    seq.num_computed_tokens = num_tokens or seq.num_tokens
    return hit.num_tokens


def prompt(name: str, n: int, **kwargs: Any) -> Sequence:
    return Sequence(name, list(range(n)), 8, **kwargs)


def test_importing_the_scheduler_loads_no_torch() -> None:
    code = "import sys, engine.scheduler, engine.block_manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_block_0_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [1, 2, 3]
    assert not pool.free


def test_the_least_recently_used_contents_are_evicted_last_of_all_free_blocks() -> None:
    pool = BlockPool(5)
    taken = pool.take(4)
    pool.remember(1, (b"one", 0))
    pool.remember(3, (b"three", 0))
    pool.give_back(taken)
    # 2 and 4 hold nothing to find: to the front, in order as in vLLM (prepend_n; which block is taken next is seen in
    # the traces with offloading, by the copies that have to be waited for). 1 and 3 wait at the back in order.
    assert list(pool.free) == [2, 4, 1, 3]
    assert pool.take(3) == [2, 4, 1]
    assert pool.num_evictions == 1
    assert pool.find((b"one", 0)) is None
    assert pool.find((b"three", 0)) == 3


def test_of_equal_blocks_the_first_is_found() -> None:
    pool = BlockPool(4)
    pool.take(2)
    pool.remember(2, (b"same", 0))
    pool.remember(1, (b"same", 0))
    assert pool.find((b"same", 0)) == 2


def test_a_block_hash_covers_all_tokens_before_it_and_the_extra_keys() -> None:
    a, b = Sequence("a", [1, 2, 3, 4], 1), Sequence("b", [9, 2, 3, 4], 1)
    adapter = Sequence("c", [1, 2, 3, 4], 1, extra_keys=("adapter",))
    assert len(block_hashes(Sequence("d", [1, 2, 3], 1), 2)) == 1  # full blocks only
    assert len({block_hashes(seq, 2)[1] for seq in (a, b, adapter)}) == 3


@pytest.mark.parametrize(("first", "second", "hit"), [(8, 8, 4), (8, 9, 8), (8, 7, 4), (7, 9, 4), (3, 9, 0)])
def test_a_hit_is_whole_blocks_short_of_the_last_token(first: int, second: int, hit: int) -> None:
    blocks = manager(20, FullGroup(4))
    admitted(blocks, prompt("first", first))
    assert admitted(blocks, prompt("second", second)) == hit


def test_another_salt_does_not_hit() -> None:
    blocks = manager(20, FullGroup(4))
    admitted(blocks, prompt("a", 9, extra_keys=("tenant a",)))
    assert admitted(blocks, prompt("b", 9, extra_keys=("tenant b",))) == 0


def test_without_caching_nothing_hits() -> None:
    blocks = manager(20, FullGroup(4), caching=False)
    admitted(blocks, prompt("a", 9))
    assert admitted(blocks, prompt("b", 9)) == 0


def test_released_blocks_still_hit_until_they_are_evicted() -> None:
    blocks = manager(4, FullGroup(4))
    first = prompt("a", 12)
    admitted(blocks, first)
    blocks.release(first)
    assert blocks.num_free_blocks == 3
    assert blocks.lookup(prompt("b", 12)).num_tokens == 8
    other = Sequence("c", [99] * 8, 1)
    admitted(blocks, other)  # takes the two blocks at the tail: released tail first, so evicted first
    assert blocks.lookup(prompt("d", 12)).num_tokens == 4


@pytest.mark.parametrize(
    ("group", "num_tokens", "skipped"),
    [
        (FullGroup(4), 100, 0),
        (WindowGroup(4, 8), 7, 0),
        (WindowGroup(4, 8), 8, 1),  # the query at position 8 sees 1..8
        (ChunkedGroup(4, 8), 15, 8),
        (ChunkedGroup(4, 8), 16, 16),
        (MambaGroup(4), 9, 8),  # only the last state
    ],
)
def test_tokens_that_the_next_query_does_not_read(group: Group, num_tokens: int, skipped: int) -> None:
    assert group.num_skipped_tokens(num_tokens) == skipped


def test_a_window_is_charged_the_tokens_in_flight_and_one_block_for_its_alignment() -> None:
    assert WindowGroup(16, 128).max_blocks_held(131_072, 16_384) == 1033  # gpt-oss on H100: vLLM 0.33.0 charges this
    assert WindowGroup(16, 128).max_blocks_held(131_072, 4_096) == 265  # and on A100


def test_blocks_behind_the_window_are_given_back() -> None:
    blocks = manager(20, WindowGroup(4, 8), FullGroup(4))
    seq = prompt("a", 24)
    admitted(blocks, seq, 20)
    assert blocks.grow(seq, 24)
    # The query at position 20 sees 13..20: of blocks 0..2 (positions 0..11) nothing.
    assert seq.block_table[0][:4] == [NULL_BLOCK] * 3 + [seq.block_table[0][3]]
    assert blocks.num_held(seq) == [3, 6]
    blocks.check_invariants([seq])


def test_growth_that_does_not_fit_takes_nothing() -> None:
    blocks = manager(4, FullGroup(4))
    seq = Sequence("a", list(range(20)), 1)
    admitted(blocks, seq, 8)
    assert not blocks.grow(seq, 20)
    assert blocks.num_held(seq) == [2]


def test_groups_of_different_block_sizes_hit_at_their_common_multiple() -> None:
    blocks = manager(40, FullGroup(4), FullGroup(6))
    admitted(blocks, prompt("a", 30))
    assert admitted(blocks, prompt("b", 24)) == 12  # 23 tokens may hit; 12 is the last multiple of 4 and 6


def test_on_a_hybrid_the_third_to_share_a_prefix_hits_it() -> None:
    """Windows keep the tail of a prompt, and of a shared prefix once a second request was seen to share it."""
    blocks = manager(100, WindowGroup(4, 8), FullGroup(4))
    hits = [admitted(blocks, Sequence(name, [*range(16), *[ord(name)] * 16], 1)) for name in "abc"]
    assert hits == [0, 0, 16]


# --- contiguous --------------------------------------------------------------------------------------------------


def test_a_contiguous_region_is_one_run_of_blocks_and_the_lowest_is_given_first() -> None:
    blocks = ContiguousManager(12, (FullGroup(4),), max_model_len=14)  # regions 1-4 and 5-8; 9-11 fit no request
    a, b, c = prompt("a", 3), prompt("b", 3), prompt("c", 3)
    admitted(blocks, a)
    admitted(blocks, b)
    assert (a.block_table, b.block_table) == ([[1, 2, 3, 4]], [[5, 6, 7, 8]])
    assert (blocks.num_free_blocks, blocks.num_usable_blocks) == (3, 11)
    blocks.release(a)
    admitted(blocks, c)
    assert c.block_table == [[1, 2, 3, 4]]
    blocks.check_invariants([b, c])


def test_a_contiguous_reservation_has_every_groups_blocks_in_full() -> None:
    """A window's too; of a recurrent state, the one copy."""
    groups = (WindowGroup(4, 6), FullGroup(8), ChunkedGroup(4, 4), MambaGroup(16))
    blocks = ContiguousManager(40, groups, max_model_len=17)
    seq = prompt("a", 3)
    admitted(blocks, seq)
    assert seq.block_table == [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13], [14]]
    seq.num_computed_tokens = 16
    assert blocks.grow(seq, 17)
    assert blocks.num_held(seq) == [5, 3, 5, 1]


def test_contiguous_invariants_notice_a_region_held_twice_and_a_gap() -> None:
    blocks = ContiguousManager(12, (FullGroup(4),), max_model_len=14)
    a, b = prompt("a", 3), prompt("b", 3)
    admitted(blocks, a)
    b.block_table = [list(a.block_table[0])]
    with pytest.raises(AssertionError, match="regions"):
        blocks.check_invariants([a, b])
    a.block_table = [[1, 2, 3, 5]]
    with pytest.raises(AssertionError, match="not one run"):
        blocks.check_invariants([a])


# --- arbitrary runs ----------------------------------------------------------------------------------------------

SAMPLED = 1
GROUPS: tuple[tuple[Group, ...], ...] = (
    (FullGroup(2),),
    (WindowGroup(2, 5),),
    (FullGroup(4), WindowGroup(2, 4)),
    (WindowGroup(2, 3), FullGroup(2), ChunkedGroup(2, 6)),
    (FullGroup(4), MambaGroup(4)),
    (MambaGroup(4, checkpoint_alignment=4), MambaGroup(4, checkpoint_alignment=4), FullGroup(4)),
)


class Memory:
    """What each block would hold on a device: per slot, the tokens (and extra keys) its KV depends on."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.slots: dict[tuple[int, int], tuple[Any, ...]] = {}

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Make one block's slots another's, as a step does before it runs."""
        for source, target in copies:
            for (block, slot), content in tuple(self.slots.items()):
                if block == source:
                    self.slots[target, slot] = content

    def store_checkpoint(self, seq: Sequence, table: list[int], checkpoint: tuple[int, int] | None) -> None:
        """Write the state that a chunk of a prompt passes, (tokens, place in the table)."""
        if checkpoint is not None:
            num_tokens, place = checkpoint
            assert table[place] != NULL_BLOCK
            self.slots[table[place], 0] = _depends_on(seq, num_tokens - 1)

    def run(self, seq: Sequence, n: int) -> None:
        """Write the n newest tokens' KV, after checking that all the step reads is there and is this sequence's."""
        end = seq.num_computed_tokens
        for group, table in zip(self.groups, seq.block_table, strict=True):
            if isinstance(group, MambaGroup):
                self._run_state(seq, group, table, end - n, end)
                continue
            for position in range(end - n, end):
                self.slots[_slot(group, table, position)] = _depends_on(seq, position)
            for position in range(group.num_skipped_tokens(end - n), end):
                assert self.slots[_slot(group, table, position)] == _depends_on(seq, position)

    def _run_state(self, seq: Sequence, group: MambaGroup, table: list[int], start: int, end: int) -> None:
        def slot(position: int) -> tuple[int, int]:
            return (table[min(position // group.block_size, len(table) - 1)], 0)

        assert slot(end - 1)[0] != NULL_BLOCK
        if start:
            assert self.slots[slot(start - 1)] == _depends_on(seq, start - 1)
        self.slots[slot(end - 1)] = _depends_on(seq, end - 1)


def _slot(group: Group, table: list[int], position: int) -> tuple[int, int]:
    block = table[position // group.block_size]
    assert block != NULL_BLOCK, f"position {position} is read and has no block"
    return (block, position % group.block_size)


def _depends_on(seq: Sequence, position: int) -> tuple[Any, ...]:
    known = seq.token_ids[: position + 1]
    return (seq.extra_keys, *known, *[SAMPLED] * (position + 1 - len(known)))


def filled(seqs: list[Sequence], groups: tuple[Group, ...]) -> set[tuple[int, int]]:
    """Every (block, slot) in which one of the sequences has a computed token's KV, by looking at each token."""
    return {
        (table[position // group.block_size], position % group.block_size)
        for seq in seqs
        for group, table in zip(groups, seq.block_table, strict=True)
        for position in range(seq.num_computed_tokens)
        if table[position // group.block_size] != NULL_BLOCK
    }


def end_with_stop(scheduler: Scheduler, request_id: str) -> None:
    scheduler.finish(request_id, "stop")


def end_with_error(scheduler: Scheduler, request_id: str) -> None:
    scheduler.fail(request_id, f"{request_id}: broken")


def has_slots(groups: tuple[Group, ...]) -> bool:
    """Slots are counted where they are tokens' and blocks have one size, as in the engine."""
    return len({group.block_size for group in groups}) == 1 and MambaGroup not in map(type, groups)


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
@pytest.mark.parametrize("groups", [groups for groups in GROUPS if has_slots(groups)], ids=str)
def test_filled_slots_are_those_of_computed_tokens(groups: tuple[Group, ...], allocator: Any) -> None:
    """Step by step, with requests that begin alike and a pool too small for all of them."""
    is_shared = is_dropped = False
    for seed in range(30):
        source = random.Random(seed)
        config = ExtendedConfig(
            max_num_batched_tokens=source.randint(4, 24), max_num_seqs=4, max_model_len=32,
            batch_queue_depth=source.randint(1, 2), allocator=allocator,
        )  # fmt: skip
        scheduler = scheduler_of(config, source.randint(20, 40) * (3 if allocator == "contiguous" else 1), groups)
        for n in range(8):
            own = [source.randint(2, 3) for _ in range(source.randint(1, 8))]
            scheduler.add(Sequence(f"r{n}", [5] * source.randint(0, 16) + own, source.randint(1, 8)))
        batches: deque[Batch] = deque()
        while scheduler.has_unfinished:
            batches.append(scheduler.schedule())
            slots = filled(scheduler.running, groups)
            assert num_filled_slots(scheduler) == len(slots)
            tables = [table for seq in scheduler.running for table in seq.block_table]
            is_dropped |= any(NULL_BLOCK in table for table in tables)
            blocks = [block for table in tables for block in table if block != NULL_BLOCK]
            is_shared |= len(set(blocks)) < len(blocks)
            if len(batches) == config.batch_queue_depth or not batches[-1].num_tokens:
                batch = batches.popleft()
                scheduler.update(batch, {seq.request_id: [SAMPLED] for seq in batch.samples})
    # What a plain sum of the sequences' tokens gets wrong did occur.
    assert is_shared == (allocator == "paged")
    assert is_dropped == (allocator == "paged" and any(not isinstance(group, FullGroup) for group in groups))


class Runs(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        policy=st.sampled_from(["fcfs", "priority"]),
        depth=st.integers(1, 2),
        caching=st.booleans(),
        reserve=st.booleans(),
        num_blocks=st.integers(12, 40),
        allocator=st.sampled_from(["paged", "contiguous"]),
        budget=st.integers(4, 24),
        unit=st.sampled_from([None, 2]),
        watermark=st.sampled_from([0.0, 0.1]),
        threshold=st.sampled_from([0, 5]),
    )
    def start(
        self, groups: tuple[Group, ...], policy: Any, depth: int, caching: bool, reserve: bool, num_blocks: int,
        allocator: Any, budget: int, unit: int | None, watermark: float, threshold: int,
    ) -> None:  # fmt: skip
        config = SimulatedConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=32,
            policy=policy,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=threshold,
            reserve_full_prompt=reserve,
            watermark=watermark,
            batch_queue_depth=depth,
            allocator=allocator,
            prefix_match_unit=unit,
        )
        # A reservation takes up to 48 blocks: room for none to a few of them.
        self.allocator = allocator
        self.scheduler = simulated_scheduler(config, num_blocks * (3 if allocator == "contiguous" else 1), groups)
        self.memory = Memory(groups)
        self.in_flight: deque[Batch] = deque()
        self.added: list[Sequence] = []

    @rule(
        shared=st.integers(0, 16),
        own=st.lists(st.integers(2, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([(), (), ("salt",)]),
    )
    def add(self, shared: int, own: list[int], max_tokens: int, priority: int, salt: tuple[str, ...]) -> None:
        name = f"r{len(self.added)}"
        seq = Sequence(name, [*[5] * shared, *own], max_tokens, priority=priority, extra_keys=salt)
        self.added.append(seq)
        self.scheduler.add(seq)
        self.scheduler.check_invariants()

    @rule()
    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        assert sum(batch.num_tokens.values()) <= self.scheduler.config.max_num_batched_tokens
        if self.allocator == "contiguous":
            assert not batch.preempted, "a sequence with a reservation had to give way"
        self.memory.copy(batch.extra(StateStep).copies)
        for seq, n in batch.num_tokens.items():
            self.memory.run(seq, n)
            if isinstance(self.scheduler.blocks, StateBlockManager):
                for table, checkpoint in zip(seq.block_table, self.scheduler.blocks.checkpoints(seq), strict=True):
                    self.memory.store_checkpoint(seq, table, checkpoint)
        self.in_flight.append(batch)
        if len(self.in_flight) == self.scheduler.config.batch_queue_depth or not batch.num_tokens:
            self.apply_oldest()

    @precondition(lambda self: bool(self.in_flight))
    @rule()
    def apply_oldest(self) -> None:
        oldest = self.in_flight.popleft()
        for seq in self.scheduler.update(oldest, {seq.request_id: [SAMPLED] for seq in oldest.samples}):
            assert seq.num_output_tokens == seq.max_tokens or seq.num_tokens == 32
        self.scheduler.check_invariants()

    @precondition(lambda self: bool(self.added))
    @rule(data=st.data(), how=st.sampled_from([Scheduler.abort, end_with_stop, end_with_error]))
    def end(self, data: st.DataObject, how: Callable[[Scheduler, str], None]) -> None:
        how(self.scheduler, data.draw(st.sampled_from(self.added)).request_id)
        self.scheduler.check_invariants()

    @precondition(lambda self: bool(self.scheduler.running))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(self.scheduler.running)).request_id)
        self.scheduler.check_invariants()

    @invariant()
    def slots_add_up(self) -> None:
        groups = self.scheduler.blocks.groups
        if has_slots(groups):
            assert num_filled_slots(self.scheduler) == len(filled(self.scheduler.running, groups))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            self.step()
        assert all(seq.is_finished for seq in self.added), "a sequence never finishes"
        assert self.scheduler.blocks.num_free_blocks == self.scheduler.blocks.num_usable_blocks


class LongRuns(Runs):
    """The same for longer: a thousand runs, each of many steps."""


Runs.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRuns = Runs.TestCase
LongRuns.TestCase.settings = settings(max_examples=400, stateful_step_count=120, deadline=None)
TestLongRuns = pytest.mark.full(LongRuns.TestCase)
