"""A step's arrays: worked by hand, against a slow and obvious reading of the sequences, and padded for graphs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchArrays, BatchBuilder
from engine.block_manager import FullGroup, Group, WindowGroup
from engine.extensions import ExtendedConfig, scheduler_of
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence

MAX_MODEL_LEN = 64


def scheduler(groups: tuple[Group, ...], num_blocks: int = 100, **options: Any) -> Scheduler:
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN, **options}
    return scheduler_of(ExtendedConfig(**config), num_blocks, groups)


def builder(groups: tuple[Group, ...]) -> BatchBuilder:
    return BatchBuilder(groups, 4, MAX_MODEL_LEN)


def request(name: str, prompt_len: int, max_tokens: int = 40) -> Sequence:
    return Sequence(name, [100 * ord(name[-1]) + i for i in range(prompt_len)], max_tokens)


def sampled(batch: Batch) -> dict[str, list[int]]:
    return {seq.request_id: [7] for seq in batch.samples}


def test_two_steps_worked_by_hand() -> None:
    groups = (FullGroup(4),)
    sched, build = scheduler(groups), builder(groups).build
    sched.add(request("a", 3))
    sched.add(request("b", 6))
    batch = sched.schedule()
    first = build(batch)
    # Nobody decodes: a's 3 tokens, then b's 6. The pool gives block 1 to a and blocks 2 and 3 to b.
    assert [seq.request_id for seq in first.seqs] == ["a", "b"]
    assert first.num_decodes == 0
    assert first.token_ids.tolist() == [9700, 9701, 9702, 9800, 9801, 9802, 9803, 9804, 9805]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert first.context_lens.tolist() == [3, 6]
    assert first.query_start.tolist() == [0, 3, 9]
    assert first.prefill_lens.tolist() == [3, 6]
    assert first.last_tokens.tolist() == [2, 8]
    assert first.block_tables[0].tolist() == [[1, 0], [2, 3]]
    assert first.slot_mapping[0].tolist() == [4, 5, 6, 8, 9, 10, 11, 12, 13]
    sched.update(batch, sampled(batch))
    sched.add(request("c", 2))
    second = build(sched.schedule())
    # a's and b's tokens 7 stand before c's prompt: at a's position 3 in block 1, at b's position 6 in block 3.
    assert [seq.request_id for seq in second.seqs] == ["a", "b", "c"]
    assert second.num_decodes == 2
    assert second.token_ids.tolist() == [7, 7, 9900, 9901]
    assert second.positions.tolist() == [3, 6, 0, 1]
    assert second.context_lens.tolist() == [4, 7, 2]
    assert second.query_start.tolist() == [0, 2]
    assert second.last_tokens.tolist() == [0, 1, 3]
    assert second.block_tables[0].tolist() == [[1, 0], [2, 3], [4, 0]]
    assert second.slot_mapping[0].tolist() == [7, 14, 16, 17]


def test_a_token_in_flight_is_named_by_its_row_of_the_step_before() -> None:
    groups = (FullGroup(4),)
    sched, build = scheduler(groups, batch_queue_depth=2, max_num_batched_tokens=8), builder(groups).build
    for name, prompt_len in (("a", 2), ("b", 3), ("c", 5)):
        sched.add(request(name, prompt_len))
    batches = [sched.schedule()]
    assert build(batches[0]).token_ids.tolist() == [9700, 9701, 9800, 9801, 9802, 9900, 9901, 9902]
    batches.append(sched.schedule())
    arrays = build(batches[1])
    # a and b decode what rows 0 and 1 sample; c goes on with its prompt.
    assert [seq.request_id for seq in arrays.seqs] == ["a", "b", "c"]
    assert arrays.token_ids.tolist() == [~0, ~1, 9903, 9904]
    sched.update(batches[0], sampled(batches[0]))
    sched.abort("a")
    batches.append(sched.schedule())
    # The rows of a's step count, not those of this one: b was the second, c the third.
    assert build(batches[2]).token_ids.tolist() == [~1, ~2]
    sched.update(batches[1], sampled(batches[1]))
    sched.update(batches[2], sampled(batches[2]))
    assert build(sched.schedule()).token_ids.tolist() == [7, 7]


def test_the_blocks_that_a_sequence_writes_are_those_of_its_slots() -> None:
    groups = (FullGroup(4), WindowGroup(8, 12))
    sched, build = scheduler(groups), builder(groups).build
    first, second, absent = request("a", 6), request("b", 9), request("c", 2)
    sched.add(first)
    sched.add(second)
    arrays = build(sched.schedule())
    # The pool gives from 1 on: a 6 tokens, so 1 and 2 of the first group and 3 of the second; b 9, so 4 to 6, 7 and 8.
    assert [arrays.written_blocks(seq) for seq in (first, second, absent)] == [{1, 2, 3}, {4, 5, 6, 7, 8}, set()]


def test_a_sequence_that_decodes_stands_before_one_that_was_admitted_earlier_and_is_in_prefill() -> None:
    groups = (FullGroup(4),)
    sched, build = scheduler(groups, max_num_batched_tokens=8, long_prefill_token_threshold=4), builder(groups).build
    sched.add(request("long", 20))
    sched.add(request("b", 2))
    batch = sched.schedule()
    build(batch)
    sched.update(batch, sampled(batch))
    arrays = build(sched.schedule())
    assert [seq.request_id for seq in arrays.seqs] == ["b", "long"]
    assert (arrays.num_decodes, arrays.query_start.tolist()) == (1, [0, 4])
    assert arrays.positions.tolist() == [2, 4, 5, 6, 7]


def test_dtypes_are_those_of_the_kernels() -> None:
    groups = (FullGroup(4), WindowGroup(4, 8))
    sched = scheduler(groups)
    sched.add(request("a", 3))
    arrays = builder(groups).build(sched.schedule())
    for longs in (arrays.token_ids, arrays.positions, arrays.last_tokens, *arrays.slot_mapping):
        assert longs.dtype == np.int64
    for ints in (arrays.context_lens, arrays.query_start, *arrays.block_tables):
        assert ints.dtype == np.int32


# --- any load, against the sequences themselves --------------------------------------------------------------------


def check_arrays(arrays: BatchArrays, batch: Batch, groups: tuple[Group, ...]) -> None:
    """Everything said once more, token by token."""
    query_lens = [batch.num_tokens[seq] for seq in arrays.seqs]
    assert set(arrays.seqs) == set(batch.num_tokens)
    assert arrays.num_decodes == sum(n == 1 for n in query_lens)
    assert all(n == 1 for n in query_lens[: arrays.num_decodes])
    steps = [(seq, p) for seq, n in zip(arrays.seqs, query_lens, strict=True)
             for p in range(seq.num_computed_tokens - n, seq.num_computed_tokens)]  # fmt: skip
    assert arrays.token_ids.tolist() == [seq.token_ids[p] for seq, p in steps]
    assert arrays.positions.tolist() == [p for _, p in steps]
    assert arrays.context_lens.tolist() == [seq.num_computed_tokens for seq in arrays.seqs]
    assert arrays.last_tokens.tolist() == [sum(query_lens[: i + 1]) - 1 for i in range(len(query_lens))]
    assert arrays.prefill_lens.tolist() == query_lens[arrays.num_decodes :]
    for g, group in enumerate(groups):
        size = group.block_size
        # A slot is never in the null block, which everybody may read.
        slots = [seq.block_table[g][p // size] * size + p % size for seq, p in steps]
        assert arrays.slot_mapping[g].tolist() == slots
        assert min(slots) >= size
        assert len(set(slots)) == len(slots)
        tables = arrays.block_tables[g]
        assert tables.shape[1] == -(-max(seq.num_computed_tokens for seq in arrays.seqs) // size)
        for seq, row in zip(arrays.seqs, tables.tolist(), strict=True):
            # Only its own blocks, 0 where a window gave one back and past the end.
            own = seq.block_table[g][: len(row)]
            assert row == own + [0] * (len(row) - len(own))


LOADS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 12), st.sampled_from(["", "abort", "preempt", "finish"])),
    min_size=1,
    max_size=12,
)  # a request per step: prompt length, answer length, and what befalls the one before it


@pytest.mark.parametrize(
    "groups",
    [(FullGroup(4),), (FullGroup(4), WindowGroup(4, 8), WindowGroup(4, 8)), (WindowGroup(8, 12),)],
    ids=["full", "hybrid", "window"],
)
@given(load=LOADS, num_blocks=st.integers(16, 60))
def test_arrays_of_any_load_are_what_the_sequences_say(
    groups: tuple[Group, ...], load: list[tuple[int, int, str]], num_blocks: int
) -> None:
    sched, build = scheduler(groups, num_blocks), builder(groups).build
    for i in range(60):
        if i < len(load):
            prompt_len, max_tokens, fate = load[i]
            # Prompts begin alike, so that prefixes are found.
            sched.add(Sequence(str(i), [*range(prompt_len)], max_tokens))
            match fate:
                case "abort":
                    sched.abort(str(i - 1))
                case "preempt":
                    sched.preempt(str(i - 1))
                case "finish":
                    sched.finish(str(i - 1), "stop")
        batch = sched.schedule()
        if batch.num_tokens:
            check_arrays(build(batch), batch, groups)
        sched.update(batch, sampled(batch))
