"""The scheduler, step by step against a real one's traces, and small cases worked by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.block_manager import FullGroup
from engine.extensions import ExtendedConfig, scheduler_of
from engine.scheduler import Batch, PrefixCacheStats, Scheduler
from engine.sequence import FinishReason, Sequence
from engine.states import MambaGroup
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler
from tests.oracles import trace_difference, traces
from tests.support.oracle_data import DATA, needs_oracle_data

TRACES = DATA / "scheduler_traces.jsonl"
MORE_TRACES = tuple(DATA / "scheduler_traces2" / f"{name}.jsonl" for name in ("spec", "misc"))
OWN_TRACES = Path(__file__).parents[1] / "facts" / "traces.jsonl"  # six of those, cut to what is compared
LORA_TRACES = DATA / "scheduler_traces2" / "lora.jsonl"
OWN_LORA_TRACES = Path(__file__).parents[1] / "facts" / "traces_lora.jsonl"  # three of those, cut to what is compared

STATE_TRACES = DATA / "scheduler_traces2" / "hybrid.jsonl"
# Drawn at random (models, pools, budgets, drafts, units of prefixes), played by vLLM 0.33.0, cut to what is compared.
OWN_STATE_TRACES = Path(__file__).parents[1] / "facts" / "traces_states.jsonl"

ENCODER_TRACES = DATA / "scheduler_traces2" / "encoder.jsonl"
OWN_ENCODER_TRACES = Path(__file__).parents[1] / "facts" / "traces_encoder.jsonl"  # drawn and played as those


def read_traces(*paths: Path) -> Iterator[dict[str, Any]]:
    for path in paths or (TRACES,):
        if path.is_file():
            yield from map(json.loads, path.read_text().splitlines())


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(OWN_TRACES)])
def test_every_step_of_our_own_traces_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    """Speculation of four kinds, a pipeline of two stages and prefills at intervals, played by vLLM 0.33.0."""
    assert trace_difference(trace) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(*MORE_TRACES)])
def test_every_step_with_drafts_stages_and_aborts_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces()])
def test_every_step_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(LORA_TRACES)])
def test_every_step_with_adapters_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(OWN_LORA_TRACES)])
def test_every_step_with_adapters_is_that_of_the_traces_kept_here(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@needs_oracle_data
@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(STATE_TRACES)])
def test_every_step_with_recurrent_states_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(OWN_STATE_TRACES)])
def test_every_step_with_recurrent_states_is_that_of_the_traces_kept_here(trace: dict[str, Any]) -> None:
    """Gated delta nets, Mamba 1 and 2: hits within blocks and copies, junctions, drafts, preemption, no caching."""
    assert trace_difference(trace) is None


def test_a_trace_with_states_is_compared_by_what_is_shared_and_copied() -> None:
    trace = next(trace for trace in read_traces(OWN_STATE_TRACES) if "40" in trace["name"])
    step = next(step for step in trace["steps"] if step["block_copies"])
    step["block_copies"] += 1
    assert (
        trace_difference(trace)
        == f"step {step['step']}: block_copies {step['block_copies'] - 1}, expected {step['block_copies']}"
    )


def test_states_and_attention_share_blocks_of_one_size_of_which_a_unit_is_part() -> None:
    config = SimulatedConfig(8, 2, 32, prefix_match_unit=3)
    with pytest.raises(UsageError, match=r"^recurrent states: share blocks of one size .* not of \[2, 4\]"):
        simulated_scheduler(config, 9, (FullGroup(2), MambaGroup(4)))
    with pytest.raises(UsageError, match=r"^prefix_match_unit must divide the block size 4 \(3\); choose a divisor"):
        simulated_scheduler(config, 9, (FullGroup(4), MambaGroup(4)))


@needs_oracle_data
@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(ENCODER_TRACES)])
def test_every_step_with_images_is_a_real_schedulers(trace: dict[str, Any]) -> None:
    assert trace_difference(trace) is None


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace["name"]) for trace in read_traces(OWN_ENCODER_TRACES)])
def test_every_step_with_images_is_that_of_the_traces_kept_here(trace: dict[str, Any]) -> None:
    """Evictions, equal images, drafts, aborts; and an image that no chunk below the long-prefill threshold holds."""
    assert trace_difference(trace) is None


def test_a_trace_with_adapters_is_compared_by_its_queue() -> None:
    trace = next(read_traces(OWN_LORA_TRACES))
    trace["steps"][1]["waiting"].reverse()
    assert trace_difference(trace) == ("step 1: waiting ['r4', 'r7', 'r8'], expected ['r8', 'r7', 'r4']")


def one_step_trace(**wrong: Any) -> dict[str, Any]:
    """Four tokens in, one out, worked by hand."""
    after = {"running": [], "num_waiting": 0, "free_blocks": 9}
    step = {"step": 0, "scheduled": {"r0": 4}, "new": ["r0"], "resumed": [], "preempted": [], "running": ["r0"],
            "new_computed_tokens": {"r0": 0}, "blocks_held": {"r0": [1]}, "free_blocks": 8, "num_waiting": 0,
            "after_update": after}  # fmt: skip
    return {
        "name": "one",
        "inputs": {"max_model_len": 32, "max_num_batched_tokens": 8, "max_num_seqs": 2,
                   "requests": [{"id": "r0", "arrive_step": 0, "prompt_len": 4, "max_tokens": 1}]},
        "num_blocks": 10, "batch_queue_depth": 1,
        "groups": [{"type": "FullAttentionSpec", "block_size": 16, "sliding_window": None}],
        "steps": [step | wrong],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trace", "line", "code"),
    [
        (one_step_trace(), "one: equal", 0),
        (one_step_trace(free_blocks=7), "one: differs at step 0: free_blocks 8, expected 7", 1),
        (one_step_trace(step=3), "one: differs at step 0: scheduled {'r0': 4}, expected no step", 1),
        (one_step_trace() | {"groups": [{"type": "Odd", "block_size": 16}]},
         "one: differs at step 0: refused: group type 'Odd' is not one the engine knows", 1),
    ],
)  # fmt: skip
def test_a_replay_prints_a_line_per_trace(
    trace: dict[str, Any], line: str, code: int, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(trace) + "\n")
    assert traces(path) == code
    assert capsys.readouterr().out == line + "\n"


# --- by hand: blocks of 4 tokens ---------------------------------------------------------------------------------


def scheduler(num_blocks: int, budget: int = 16, **options: Any) -> Scheduler:
    config = ExtendedConfig(
        max_num_batched_tokens=budget, max_num_seqs=options.pop("max_num_seqs", 4), max_model_len=64, **options
    )
    return scheduler_of(config, num_blocks, (FullGroup(4),))


def request(name: str, prompt_len: int, max_tokens: int = 8, **kwargs: Any) -> Sequence:
    return Sequence(name, [ord(name[-1]) * 1000 + i for i in range(prompt_len)], max_tokens, **kwargs)


def step(sched: Scheduler) -> Batch:
    """Schedule and apply one batch; every sequence samples token 7."""
    batch = sched.schedule()
    sched.update(batch, {seq.request_id: [7] for seq in batch.samples})
    sched.check_invariants()
    return batch


def finish_all(sched: Scheduler) -> int:
    """Step until nothing is left; returns the most sequences that a step had."""
    max_running = 0
    for _ in range(2_000):
        if not sched.has_unfinished:
            return max_running
        max_running = max(max_running, len(step(sched).num_tokens))
    raise AssertionError("a sequence never finishes")


def tokens(batch: Batch) -> dict[str, int]:
    return {seq.request_id: n for seq, n in batch.num_tokens.items()}


def names(seqs: list[Sequence]) -> list[str]:
    return [seq.request_id for seq in seqs]


def test_prefill_and_decode_share_one_budget() -> None:
    sched = scheduler(40)
    sched.add(request("a", 10))
    sched.add(request("b", 10))
    assert tokens(step(sched)) == {"a": 10, "b": 6}
    assert tokens(step(sched)) == {"a": 1, "b": 4}
    assert tokens(step(sched)) == {"a": 1, "b": 1}


def test_one_long_prompt_leaves_room_for_others() -> None:
    sched = scheduler(40, long_prefill_token_threshold=5)
    sched.add(request("a", 20))
    assert tokens(step(sched)) == {"a": 16}  # alone: no cap
    sched = scheduler(40, long_prefill_token_threshold=5)
    sched.add(request("a", 20))
    sched.add(request("b", 4))
    assert tokens(step(sched)) == {"a": 5, "b": 4}


def test_no_more_than_max_num_seqs_run() -> None:
    sched = scheduler(40, max_num_seqs=2)
    for name in "abc":
        sched.add(request(name, 2, max_tokens=1))
    assert tokens(step(sched)) == {"a": 2, "b": 2}
    assert tokens(step(sched)) == {"c": 2}


def test_a_prompt_is_admitted_when_all_of_it_fits() -> None:
    for reserve, admitted in ((True, ["a"]), (False, ["a", "b"])):
        sched = scheduler(8, budget=20, reserve_full_prompt=reserve)  # 7 blocks to give
        sched.add(request("a", 16))  # 4 blocks
        sched.add(request("b", 16))  # 4, and its first chunk 1
        assert names(step(sched).new) == admitted


def test_the_watermark_stays_free_while_others_run() -> None:
    for watermark, admitted in ((0.0, ["a", "b"]), (0.2, ["a"])):
        sched = scheduler(10, budget=64, watermark=watermark)  # 9 blocks to give; 0.2 x 10 stay free
        sched.add(request("a", 16))
        sched.add(request("b", 16))
        assert names(step(sched).new) == admitted


def test_the_last_admitted_gives_way_and_comes_back_to_its_own_blocks() -> None:
    sched = scheduler(6)  # 5 blocks to give
    sched.add(request("a", 8))
    sched.add(request("b", 8))
    step(sched)  # a 2, b 2
    second = step(sched)  # a takes the fifth; nothing is left for b
    assert names(second.preempted) == ["b"]
    assert tokens(second) == {"a": 1}
    while sched.running:
        step(sched)
    last = step(sched)
    assert names(last.resumed) == ["b"]
    # 9 tokens known, two full blocks. b's tail went into the free list first, but a (15 computed, 4 blocks) took
    # only the one that was free and b's second block: the first still hits.
    assert list(last.hits.values()) == [4]


def test_under_priority_the_least_urgent_gives_way_though_it_came_first() -> None:
    sched = scheduler(6, policy="priority")
    sched.add(request("a", 8, priority=1))
    step(sched)
    sched.add(request("b", 8, priority=0))
    seen = [names(step(sched).preempted) for _ in range(6)]
    assert ["a"] in seen
    assert ["b"] not in seen


def test_a_prompt_that_the_pool_cannot_hold_fails_and_the_others_go_on() -> None:
    sched = scheduler(4)  # 12 tokens
    big, small = request("a", 20), request("b", 4, max_tokens=1)
    sched.add(big)
    sched.add(small)
    assert names(step(sched).failed) == ["a"]
    assert big.finish_reason == "out_of_blocks"
    assert big.error == (
        "a: does not fit (20 tokens need 5 blocks, the pool has 3); shorten the request or raise num_blocks"
    )
    assert (small.finish_reason, small.error) == ("length", None)


def test_a_sequence_that_outgrows_the_pool_fails() -> None:
    sched = scheduler(3)  # 8 tokens
    seq = request("a", 6, max_tokens=30)
    sched.add(seq)
    for _ in range(4):
        step(sched)
    assert seq.finish_reason == "out_of_blocks"
    assert seq.error is not None
    assert "(9 tokens need 3 blocks, the pool has 2)" in seq.error
    assert sched.blocks.num_free_blocks == 2


def test_a_stop_token_ends_a_sequence() -> None:
    sched = scheduler(10)
    seq = request("a", 4, stop_token_ids=frozenset({7}))
    sched.add(seq)
    step(sched)
    assert (seq.finish_reason, seq.num_output_tokens) == ("stop", 1)


def test_tokens_in_flight_for_an_aborted_sequence_are_ignored() -> None:
    sched = scheduler(10)
    seq = request("a", 4)
    sched.add(seq)
    batch = sched.schedule()
    sched.abort("a")
    assert sched.update(batch, {"a": [7]}) == []
    assert (seq.finish_reason, seq.num_output_tokens) == ("abort", 0)
    assert sched.blocks.num_free_blocks == 9


def test_promised_blocks_of_a_victim_are_not_found() -> None:
    """A sequence scheduled and preempted in one step never computed its blocks: a hit would read rubbish."""
    sched = scheduler(
        9, budget=12, policy="priority", reserve_full_prompt=False, long_prefill_token_threshold=8
    )  # 8 blocks to give
    sched.add(request("a", 40, priority=5))
    step(sched)  # a 12 tokens, 3 blocks
    sched.add(request("b", 30, priority=0))
    assert tokens(step(sched)) == {"a": 8, "b": 4}  # a 5 blocks, b 1
    victim = sched.running[0]
    third = sched.schedule()  # a is given 8 tokens and the last 2 blocks, then b needs one
    assert (names(third.preempted), tokens(third), third.budget) == (["a"], {"b": 4}, 8)
    assert sched.blocks.lookup(victim).num_tokens == 20


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_a_sequence_can_be_ended_from_outside_wherever_it_is(reason: FinishReason) -> None:
    sched = scheduler(10, max_num_seqs=1)
    runs, waits = request("a", 4), request("b", 4)
    sched.add(runs)
    sched.add(waits)
    step(sched)
    for seq in (waits, runs):
        sched.finish(seq.request_id, reason)
        sched.check_invariants()
        assert (seq.is_finished, seq.finish_reason, seq.error) == (True, reason, None)
    assert not sched.has_unfinished
    assert sched.blocks.num_free_blocks == 9


def test_one_sequence_can_fail_between_a_batch_and_its_update() -> None:
    sched = scheduler(10)
    bad, good = request("a", 4), request("b", 4)
    sched.add(bad)
    sched.add(good)
    batch = sched.schedule()
    sched.fail("a", "a: the logits are not numbers (nan); check the weights")
    sched.update(batch, {"b": [7]})
    sched.check_invariants()
    assert (bad.finish_reason, bad.num_output_tokens) == ("error", 0)
    assert bad.error == "a: the logits are not numbers (nan); check the weights"
    assert (good.is_finished, good.num_output_tokens) == (False, 1)


def test_what_has_finished_or_never_came_is_not_ended_again() -> None:
    sched = scheduler(10)
    seq = request("a", 4, max_tokens=1)
    sched.add(seq)
    step(sched)
    sched.fail("a", "too late")
    sched.abort("nobody")
    sched.preempt("a")
    assert (seq.finish_reason, seq.error, sched.num_preemptions) == ("length", None, 0)


def test_a_sequence_preempted_by_name_comes_back_and_ends_as_if_undisturbed() -> None:
    sched = scheduler(10)
    seq = request("a", 6, max_tokens=5)
    sched.add(seq)
    for _ in range(2):
        step(sched)
    sched.preempt("a")
    sched.check_invariants()
    sched.preempt("a")  # it waits already
    assert (seq.status, sched.blocks.num_free_blocks) == ("preempted", 9)
    assert names(step(sched).resumed) == ["a"]
    finish_all(sched)
    assert (seq.finish_reason, seq.num_output_tokens, seq.num_preemptions) == ("length", 5, 1)


def test_sequences_that_finish_together_all_leave() -> None:
    sched = scheduler(20)
    for name in "abcd":
        sched.add(request(name, 3, max_tokens=2 if name == "b" else 1))
    step(sched)
    assert names(sched.running) == ["b"]


def test_an_id_is_free_again_once_its_request_has_finished() -> None:
    sched = scheduler(20)
    sched.add(request("a", 3, max_tokens=1))
    with pytest.raises(InvalidInputError, match=r"^a: a request of this id has not finished; "):
        sched.add(request("a", 4))
    step(sched)
    sched.add(request("a", 4))
    assert tokens(step(sched)) == {"a": 4}


def test_a_sequence_that_cannot_be_ranked_is_not_half_there() -> None:
    sched = scheduler(20, policy="priority")
    sched.add(request("a", 3, max_tokens=1))
    with pytest.raises(TypeError):
        sched.add(request("b", 3, priority="high"))
    sched.check_invariants()
    finish_all(sched)
    sched.add(request("b", 3, max_tokens=1))
    assert tokens(step(sched)) == {"b": 3}


# --- contiguous against paged: 64 blocks of 16 tokens, max_model_len 256 -----------------------------------------


def sized(allocator: Literal["paged", "contiguous", "static"], num_blocks: int = 65, budget: int = 4096) -> Scheduler:
    config = ExtendedConfig(
        max_num_batched_tokens=budget, max_num_seqs=100, max_model_len=256, enable_prefix_caching=False,
        allocator=allocator,
    )  # fmt: skip
    return scheduler_of(config, num_blocks, (FullGroup(16),))


@pytest.mark.parametrize(
    ("allocator", "num_running", "usage"),
    [
        ("paged", 21, 63 / 64),  # 40 tokens and 8 to come: 3 blocks each
        ("contiguous", 4, 1.0),  # 256 / 16 = 16 blocks each
    ],
)
def test_reserving_the_longest_request_for_every_one_serves_fewer_at_once(
    allocator: Literal["paged", "contiguous"], num_running: int, usage: float
) -> None:
    sched = sized(allocator)
    seqs = [Sequence(str(i), list(range(40)), 8) for i in range(30)]
    for seq in seqs:
        sched.add(seq)
    assert len(step(sched).new) == num_running
    assert sched.blocks.usage == usage
    assert finish_all(sched) <= num_running
    assert {seq.finish_reason for seq in seqs} == {"length"}
    assert sched.num_preemptions == 0


def test_contiguous_never_runs_out_after_admission() -> None:
    """Four that grow to 256 tokens fill 64 blocks in either way; paged admits a fifth and has to preempt."""
    ends = {}
    for allocator in ("paged", "contiguous"):
        sched = sized(allocator)
        for i in range(5):
            sched.add(Sequence(str(i), list(range(16)), 300))
        finish_all(sched)
        ends[allocator] = sched.num_preemptions
    assert ends["contiguous"] == 0
    assert ends["paged"] > 0


def admissions(sched: Scheduler) -> list[list[str]]:
    """Who was admitted in each step, to the end of all."""
    names = []
    while sched.has_unfinished:
        names.append([seq.request_id for seq in step(sched).new])
    return names


def test_a_static_batch_ends_before_others_begin() -> None:
    """Four reservations fit. A step brings the first token, so a batch takes as many as its longest output: 9, 5, 2.

    Where nobody waits for the longest, the other eight fit into three places while it runs: 9 steps in all.
    """
    outputs = [2, 9, 1, 4, 5, 1, 3, 2, 2]
    steps = {}
    for allocator in ("static", "contiguous"):
        sched = sized(allocator)
        for i, num_outputs in enumerate(outputs):
            sched.add(Sequence(str(i), list(range(16)), num_outputs))
        steps[allocator] = admissions(sched)
    assert [(i, names) for i, names in enumerate(steps["static"]) if names] == [
        (0, ["0", "1", "2", "3"]), (9, ["4", "5", "6", "7"]), (14, ["8"]),
    ]  # fmt: skip
    assert (len(steps["static"]), len(steps["contiguous"])) == (9 + 5 + 2, 9)


def test_a_static_batch_forms_over_the_steps_that_its_prompts_take() -> None:
    """Steps of 64 tokens: 40 + 24, then 1 + 16 + 40 + 7, then 1 + 1 + 1 + 33 and the fourth's first of 6 tokens."""
    sched = sized("static", budget=64)
    for i in range(5):
        sched.add(Sequence(str(i), list(range(40)), 6))
    names = admissions(sched)
    assert names[:9] == [["0", "1"], ["2", "3"], [], [], [], [], [], [], ["4"]]


def test_who_comes_later_waits_for_the_batch_to_end_though_there_is_room() -> None:
    sched = sized("static")
    sched.add(Sequence("first", list(range(16)), 3))
    assert len(step(sched).new) == 1
    sched.add(Sequence("second", list(range(16)), 1))
    assert [len(step(sched).new) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("num_blocks", "reason"), [(16, "out_of_blocks"), (17, "length")])
def test_contiguous_needs_a_pool_of_one_reservation(num_blocks: int, reason: FinishReason) -> None:
    sched = sized("contiguous", num_blocks)
    seqs = [Sequence(name, list(range(20)), 2) for name in "ab"]
    for seq in seqs:
        sched.add(seq)
    finish_all(sched)
    assert [seq.finish_reason for seq in seqs] == [reason] * 2
    if reason == "out_of_blocks":
        assert seqs[0].error == (
            "a: does not fit (20 tokens need 16 blocks, the pool has 15); lower max_model_len or raise num_blocks"
        )


def test_contiguous_looks_no_prefix_up() -> None:
    config = ExtendedConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, allocator="contiguous")
    sched = scheduler_of(config, 40, (FullGroup(4),))
    for name in "ab":
        sched.add(Sequence(name, list(range(20)), 1))
        assert tokens(step(sched)) == {name: 20}
    assert sched.prefix_cache_stats == PrefixCacheStats()


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(0, 1), (64, 1), (4, 0)])
def test_a_request_that_could_never_run_is_refused(prompt_len: int, max_tokens: int) -> None:
    with pytest.raises(InvalidInputError, match=r"^a: "):
        scheduler(40).add(request("a", prompt_len, max_tokens))


# --- adapters ----------------------------------------------------------------------------------------------------


def adapted(request_id: str, adapter: str | None, tokens: int = 4) -> Sequence:
    return Sequence(request_id, list(range(tokens)), 4, extra_keys=(adapter,), adapter=adapter)


def test_a_request_whose_adapter_has_no_slot_lets_others_pass() -> None:
    rules = scheduler(40, max_loras=1)
    for request_id, adapter in (("a", "x"), ("b", "y"), ("c", None), ("d", "x"), ("e", "z")):
        rules.add(adapted(request_id, adapter))
    rules.schedule()
    assert [seq.request_id for seq in rules.running] == ["a", "c", "d"]
    assert [seq.request_id for seq in rules.waiting] == ["b", "e"]  # as they came
    for request_id in ("a", "d"):
        rules.abort(request_id)
    rules.schedule()
    assert [seq.request_id for seq in rules.running] == ["c", "b"]
    rules.check_invariants()


def test_a_request_with_an_adapter_is_refused_where_there_are_no_slots() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^a: there is no slot for adapter 'x' \(max_loras 0\); raise max_loras$"
    ):
        scheduler(40).add(adapted("a", "x"))
