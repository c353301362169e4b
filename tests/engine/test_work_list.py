"""Decode work: every visible token is read once, in items that fill the device, within the room that a graph has."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.split_plan import busiest_program
from engine.batch import BatchArrays
from engine.kernels.query_tiles import all_tiles, cut_queries
from engine.kernels.split_kv import own_work_list
from engine.kernels.work_list import ITEM_TOKENS, MAX_CONTEXT_LEN, MERGE_TOKENS, Ints, Plan, SplitPlanner, busiest, cut
from engine.step import step_tensors

H200 = {"heads": 8, "num_programs": 132 * 3, "block_n": 64}  # Llama 8B: 396 // 8 = 49 items at once


def lens(*values: int) -> Ints:
    return np.array(values, np.int32)


def rows_of(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """(items, merges) that are there."""
    items, merges = (rows[rows[:, 0] >= 0].tolist() for rows in plan.split())
    return items, merges


planners = st.builds(
    SplitPlanner,
    heads=st.integers(1, 40),
    num_programs=st.integers(1, 500),
    block_n=st.sampled_from([16, 32, 64, 128]),
    window=st.none() | st.integers(1, 3_000),
)
contexts = st.lists(st.integers(0, 300) | st.integers(0, 20_000), max_size=40).map(lambda values: lens(*values))


# --- what is read -----------------------------------------------------------------------------------------------------


@given(planners, contexts)
@example(SplitPlanner(**H200, window=1), lens(1, 64, 65, 20_000, 0))
@example(SplitPlanner(8, 396, 64, window=128), lens(*[1_000] * 3))
def test_every_visible_token_is_in_one_item_and_no_other_token_is_in_any(
    planner: SplitPlanner, context_lens: Ints
) -> None:
    items, _ = rows_of(planner.plan(context_lens))
    for seq, length in enumerate(context_lens.tolist()):
        mine = sorted((first, end) for of, first, end, _ in items if of == seq)
        visible = length if planner.window is None else min(length, planner.window)
        # Laid end to end they are the visible part; each but an empty sequence's reads something.
        assert mine[0][0] == length - visible
        assert mine[-1][1] == length
        assert all(end == first for (_, end), (first, _) in pairwise(mine))
        assert all(first < end for first, end in mine) or (length == 0 and mine == [(0, 0)])
        # A tile of a kernel belongs to one item: inner edges lie between tiles.
        assert all(first % planner.block_n == 0 for first, _ in mine[1:])
    assert {item[0] for item in items} == set(range(len(context_lens)))


@given(planners, contexts)
def test_a_sequence_in_parts_has_a_slot_for_each_and_one_merge_of_them(
    planner: SplitPlanner, context_lens: Ints
) -> None:
    plan = planner.plan(context_lens)
    items, merges = rows_of(plan)
    parts = Counter(item[0] for item in items)
    assert [merge[0] for merge in merges] == [seq for seq in range(len(context_lens)) if parts[seq] > 1]
    for seq, first, end, _ in merges:
        assert sorted(slot for of, _, _, slot in items if of == seq) == list(range(first, end))
    slots = [slot for seq, _, _, slot in items if parts[seq] > 1]
    assert sorted(slots) == list(range(plan.sizes.num_slots))
    assert all(slot == -1 for seq, _, _, slot in items if parts[seq] == 1)


@given(planners, contexts)
def test_the_longest_items_start_first(planner: SplitPlanner, context_lens: Ints) -> None:
    items, _ = rows_of(planner.plan(context_lens))
    sizes = [end - first for _, first, end, _ in items]
    assert sizes == sorted(sizes, reverse=True)


# --- room in a graph --------------------------------------------------------------------------------------------------


@given(planners, contexts, st.integers(0, 9))
@example(SplitPlanner(8, 396, 64), lens(20_000, *[1] * 38), 0)
@example(SplitPlanner(500, 3, 16), lens(20_000, 20_000), 0)  # less than one item at once
def test_a_graph_has_room_for_every_plan(planner: SplitPlanner, context_lens: Ints, empty: int) -> None:
    num_seqs = len(context_lens) + empty
    plan = planner.padded_plan(context_lens, num_seqs)
    exact = planner.plan(np.concatenate([context_lens, lens(*[0] * empty)]))
    assert plan.sizes == planner.capacity(num_seqs)
    assert len(plan.rows) == plan.sizes.num_items + plan.sizes.num_merges
    assert rows_of(plan) == rows_of(exact)  # whatever is beside them is not there
    assert exact.sizes.num_slots <= plan.sizes.num_slots
    assert plan.sizes.num_items <= num_seqs + 6 * planner.num_programs


# --- how much is cut --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context_lens", "num_items"),
    [
        ([8_192], 43),  # 8192 / 49 are 167.2 tokens, so three tiles of 64: ceil(8192 / 192)
        ([300], 3),  # no item below 128 tokens, though 49 could run
        ([128], 1),
        ([131_072], 49),  # 2674.9 tokens, 42 tiles: ceil(131072 / 2688)
        ([4_096] * 16, 48),  # three parts each, of 22 tiles
        ([4_096] * 25, 125),  # five parts of 13 tiles in three rounds of 49; two would be 50, one too many
        ([4_096] * 32, 96),  # three parts of 22 tiles, in two rounds
        ([4_096] * 49, 49),
        ([1_900] + [1_000] * 44, 90),  # 15 tiles, half of the longest, leave 40 tokens of each 1,000
        ([512] * 256, 512),  # eleven rounds of 256 tokens, six of 512
        ([100_000] + [500] * 255, 277),  # 227500 / 49 are 4642.9 tokens, 73 tiles: ceil(100000 / 4672) are 22, and 255
        ([], 0),
        ([0, 0], 2),
    ],
)
def test_contexts_are_cut_where_it_fills_the_device(context_lens: list[int], num_items: int) -> None:
    assert SplitPlanner(**H200).plan(lens(*context_lens)).sizes.num_items == num_items


@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=200), st.integers(1, 40), st.integers(1, 500))
def test_no_queue_is_longer_than_it_was_reckoned(values: list[int], at_once: int, tiles: int) -> None:
    """Against the queue itself: each program takes the next item as soon as it is free."""
    seen, chunk = np.array(values, np.int64), tiles * 64
    plan = cut(lens(*values), None, chunk, 64)
    reckoned = busiest(seen, chunk, max(values), sum(values), at_once, 10**9)
    assert busiest_program(plan, at_once) <= reckoned


@pytest.mark.parametrize(
    ("context_lens", "max_excess"),
    [
        ([4_096] * 16, 1.1),
        ([4_096] * 32, 1.12),  # whole: 1.53
        ([4_096] * 50, 1.12),  # whole: 1.96, as the fiftieth waits for one of the others to end
        ([4_096] * 64, 1.12),  # whole: 1.53
        ([2_048] * 64, 1.12),
        ([4_096] * 256, 1.12),
        ([100_000] + [500] * 255, 1.12),
    ],
)
def test_the_busiest_program_reads_little_more_than_an_even_share(context_lens: list[int], max_excess: float) -> None:
    planner = SplitPlanner(**H200)
    plan = planner.plan(lens(*context_lens))
    assert busiest_program(plan, planner.at_once) <= max_excess * sum(context_lens) / planner.at_once


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=80), st.integers(1, 16))
def test_no_program_reads_more_than_two_even_shares_where_it_could_be_cut(values: list[int], heads: int) -> None:
    planner = SplitPlanner(heads, 396, 64)
    share = max(128, -(-sum(values) // planner.at_once))
    items = -(-sum(values) // share) + len(values)  # of an even share: what each costs beside reading may be weighed
    slack = 64 + (2 * items // planner.at_once + 2) * ITEM_TOKENS + MERGE_TOKENS
    assert busiest_program(planner.plan(lens(*values)), planner.at_once) <= 2 * (share + 64) + slack


@pytest.mark.parametrize(
    ("window", "num_items"), [(None, 43), (1, 1), (128, 1), (129, 1), (200, 2), (1_024, 8), (10**6, 43)]
)
def test_a_window_is_cut_by_what_it_sees(window: int | None, num_items: int) -> None:
    assert SplitPlanner(**H200, window=window).plan(lens(8_192)).sizes.num_items == num_items


def test_contexts_are_counted_in_64_bits_on_the_host_and_refused_where_a_kernel_cannot() -> None:
    max_len = MAX_CONTEXT_LEN
    items, _ = rows_of(SplitPlanner(**H200).plan(lens(*[max_len] * 8)))  # 8 * 2^31 tokens
    assert Counter(item[0] for item in items) == dict.fromkeys(range(8), 6)  # of 49 at once
    assert max(end for _, _, end, _ in items) == max_len
    # Two tiles of the largest kernel past the end are still numbers of 32 bits.
    assert max_len + 2 * 512 <= 2**31
    with pytest.raises(ValueError, match=rf"^context_lens must be at most {max_len} \({max_len + 1}\)"):
        cut(lens(max_len + 1), None, 128, 64)


# --- who keeps and shares it ------------------------------------------------------------------------------------------


def arrays(context_lens: list[int], num_decodes: int, num_groups: int) -> BatchArrays:
    """A step of these decodes, and of prefills of one block after them."""
    num_seqs = len(context_lens)
    return BatchArrays(
        seqs=[],
        num_decodes=num_decodes,
        token_ids=np.zeros(num_seqs, np.int64),
        positions=np.zeros(num_seqs, np.int64),
        context_lens=lens(*context_lens),
        query_start=np.arange(num_seqs - num_decodes + 1, dtype=np.int32),
        last_tokens=np.arange(num_seqs),
        block_tables=(np.zeros((num_seqs, 1), np.int32),) * num_groups,
        slot_mapping=(np.zeros(num_seqs, np.int64),) * num_groups,
    )


def test_groups_that_see_the_same_share_a_list_of_the_decodes() -> None:
    full, window = SplitPlanner(**H200), SplitPlanner(**H200, window=1_024)
    step = step_tensors(arrays([5_000, 9, 77], 2, 3), torch.device("cpu"), planners=(full, window, full))
    first, second, third = (group.work for group in step.groups)
    assert first is not None
    assert second is not None
    assert first is third
    assert (first.window, second.window) == (None, 1_024)
    assert first.num_seqs == second.num_seqs == 2
    assert (first.items[:, 2] - first.items[:, 1]).sum() == 5_009
    assert (second.items[:, 2] - second.items[:, 1]).sum() == 1_033


def test_a_step_without_decodes_or_for_torch_has_no_list() -> None:
    alone = step_tensors(arrays([16, 16], 0, 1), torch.device("cpu"), planners=(SplitPlanner(**H200),))
    plain = step_tensors(arrays([16, 16], 2, 2), torch.device("cpu"))
    assert [group.work for group in (*alone.groups, *plain.groups)] == [None] * 3


def test_a_launchers_own_plan_is_kept_until_the_lengths_are_written_to() -> None:
    planner, context_lens = SplitPlanner(**H200), torch.tensor([5_000, 7], dtype=torch.int32)
    work = own_work_list(planner, context_lens)
    assert own_work_list(planner, context_lens) is work
    assert own_work_list(SplitPlanner(**H200, window=9), context_lens).window == 9
    assert own_work_list(planner, context_lens).window is None
    with torch.inference_mode():
        context_lens[0] = 100
    assert own_work_list(planner, context_lens).items[:, 1:3].tolist() == [[0, 100], [0, 7]]


def test_a_launchers_own_plan_of_lengths_whose_writes_nobody_counts_is_made_anew() -> None:
    with torch.inference_mode():
        context_lens = torch.tensor([100], dtype=torch.int32)
        own_work_list(SplitPlanner(**H200), context_lens)
        context_lens[0] = 50
        assert own_work_list(SplitPlanner(**H200), context_lens).items[:, 2].tolist() == [50]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=12),
    queries=st.sampled_from([1, 4, 16, 32]),
)
def test_tiles_hold_every_query_once_the_longest_first(lengths: list[tuple[int, int]], queries: int) -> None:
    query_lens = np.array([n for n, _ in lengths], np.int32)
    context_lens = np.array([n + before for n, before in lengths], np.int32)
    rows = cut_queries(query_lens, context_lens, queries)
    tile_queries = [
        (seq, first + i) for seq, first in rows.tolist() for i in range(queries) if first + i < query_lens[seq]
    ]
    assert sorted(tile_queries) == [(seq, i) for seq, (n, _) in enumerate(lengths) for i in range(n)]
    assert all(first < query_lens[seq] for seq, first in rows.tolist())  # none is begun in vain
    seen = [lengths[seq][1] + first for seq, first in rows.tolist()]
    assert seen == sorted(seen, reverse=True)


def test_tiles_without_lengths_hold_every_query_of_the_longest() -> None:
    rows = all_tiles(3, 33, 16, torch.device("cpu")).rows.tolist()
    assert sorted(rows) == [[seq, first] for seq in range(3) for first in (0, 16, 32)]
    assert [first for _, first in rows] == sorted((first for _, first in rows), reverse=True)


def test_a_step_cuts_its_prefills_for_the_kernels_that_ask() -> None:
    """Two that decode, then chunks of 5 and 40 tokens: tiles of 16 queries at most of a step's longest, 40."""
    query_lens, context_lens = np.array([1, 1, 5, 40]), np.array([9, 30, 5, 50])
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    arrays = BatchArrays(
        seqs=[], num_decodes=2, token_ids=np.zeros(47, np.int64), positions=np.zeros(47, np.int64),
        context_lens=context_lens.astype(np.int32), query_start=(starts[2:] - starts[2]).astype(np.int32),
        last_tokens=starts[1:] - 1, block_tables=(np.zeros((4, 4), np.int32),), slot_mapping=(np.zeros(47, np.int64),),
    )  # fmt: skip
    step = step_tensors(arrays, torch.device("cpu"), queries_of_tile={40: 16}.__getitem__)
    assert step.tiles is not None
    assert step.tiles.queries == 16
    assert step.tiles.rows.tolist() == [[1, 32], [1, 16], [1, 0], [0, 0]]  # from positions 42, 26, 10 and 0
    assert step_tensors(arrays, torch.device("cpu")).tiles is None
