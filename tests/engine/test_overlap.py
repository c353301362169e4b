"""Overlap scheduling: the next step is launched while this one runs, and nobody's tokens show it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, SamplingParams
from engine.batch import BatchArrays
from engine.request import RequestOutput, TokenUpdate
from engine.sampler import SampledAhead
from engine.staging import DownloadRing, Layout, UploadRing
from tests.support.parts import paired, some
from tests.support.small_engines import (
    FAMILIES,
    ROUNDING,
    engine_for,
    faults,
    greedy,
    poison,
    random_tokens,
    reference_logits,
    run_dry,
)

LENS = (5, 17, 33, 50)
NUM_TOKENS = 24


def overlapping(family: str, **changes: Any) -> Engine:
    return engine_for(family, async_scheduling=True, **changes)


# --- the order of things -------------------------------------------------------------------------------------------


def noted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine does from now on: `launch n` and `wait n`, batches counted from 1."""
    events: list[str] = []
    run, wait = engine.runner.run, SampledAhead.wait
    numbers: dict[int, int] = {}
    alive: list[Any] = []

    def launch(arrays: BatchArrays, params: list[SamplingParams]) -> Any:
        sampled = run(arrays, params)
        alive.append(sampled)  # so that no id comes twice
        numbers[id(sampled)] = len(alive)
        events.append(f"launch {len(alive)}")
        return sampled

    def waited(sampled: SampledAhead) -> Any:
        events.append(f"wait {numbers[id(sampled)]}")
        return wait(sampled)

    monkeypatch.setattr(engine.runner, "run", launch)
    monkeypatch.setattr(SampledAhead, "wait", waited)
    return events


def test_the_next_step_is_launched_before_this_ones_tokens_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapping("llama")
    events = noted(engine, monkeypatch)
    engine.generate([5, 6, 7], greedy(4))
    assert events == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "launch 4", "wait 3", "wait 4"]


def test_without_overlap_every_step_is_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("llama", async_scheduling=False)
    events = noted(engine, monkeypatch)
    engine.generate([5, 6, 7], greedy(3))
    assert events == ["launch 1", "wait 1", "launch 2", "wait 2", "launch 3", "wait 3"]


def test_a_cpu_which_is_host_and_device_in_one_does_not_overlap_unless_told_to() -> None:
    assert engine_for("llama").scheduler.config.batch_queue_depth == 1
    assert overlapping("llama").scheduler.config.batch_queue_depth == 2


@pytest.mark.parametrize(
    ("chosen", "device_type", "batches"),
    [(None, "cuda", 2), (None, "cpu", 1), (True, "cpu", 2), (False, "cuda", 1)],
)
def test_a_gpu_overlaps_unless_told_not_to(chosen: bool | None, device_type: str, batches: int) -> None:
    assert EngineConfig(async_scheduling=chosen).batches_in_flight(device_type) == batches


def test_a_token_goes_from_step_to_step_without_the_host() -> None:
    engine = overlapping("llama")
    run, seen = engine.runner.run, list[list[int]]()

    def launch(arrays: BatchArrays, params: list[SamplingParams]) -> Any:
        seen.append(arrays.token_ids.tolist())
        return run(arrays, params)

    engine.runner.run = launch  # type: ignore[method-assign, assignment]
    engine.generate([[5, 6, 7], [8, 9]], [greedy(4), greedy(2)])
    # ~0 and ~1 stand for what the first and the second row of the step before sampled.
    assert seen == [[5, 6, 7, 8, 9], [~0, ~1], [~0], [~0]]


def test_every_call_of_step_gives_a_token_as_without_overlap() -> None:
    engine = overlapping("llama")
    updates: list[TokenUpdate] = []
    engine.add_request([5, 6, 7], greedy(4), on_token=updates.append)
    counts = []
    while engine.has_unfinished:
        engine.step()
        counts.append(len(updates))
    assert counts == [1, 2, 3, 4]


def test_stats_count_what_was_asked_and_given() -> None:
    engine = overlapping("llama")
    seen: list[tuple[int, int]] = []
    engine.on_step = lambda stats: seen.append((stats.prompt_tokens, stats.generation_tokens))
    prompts = random_tokens(33, 9)
    engine.generate(prompts, greedy(5))
    engine.generate(prompts[0], greedy(3))
    stats = engine.stats()
    # 32 tokens of the first prompt are found by the third request
    assert seen == [(42, 2), (42, 4), (42, 6), (42, 8), (42, 10), (43, 11), (43, 12), (43, 13)]
    assert (stats.num_steps, stats.num_cached_tokens) == (8, 32)
    assert (stats.num_used_blocks, stats.num_kv_tokens, stats.num_requests_running) == (0, 0, 0)


# --- the same tokens: transformers' --------------------------------------------------------------------------------

HOW: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "contiguous": {"allocator": "contiguous"},
    "chunked": {"max_num_batched_tokens": 7, "long_prefill_token_threshold": 5},
}


@pytest.mark.parametrize(("family", "how"), paired(FAMILIES, HOW))
def test_tokens_are_those_of_transformers(family: str, how: str) -> None:
    outputs = overlapping(family, **HOW[how]).generate(random_tokens(*LENS), greedy(NUM_TOKENS))
    assert faults(family, outputs, NUM_TOKENS) == []


@pytest.mark.parametrize(
    ("family", "num_blocks"), [("gemma3_text", 30), ("gemma3_text", 32), ("gemma3_text", 34), ("gpt_oss", 10)]
)
def test_a_pool_that_holds_a_request_alone_holds_it_with_overlap(family: str, num_blocks: int) -> None:
    """Windows are charged for two steps in flight; a request that has the pool to itself can wait for one of them."""
    (prompt,) = random_tokens(33)
    options = {
        "block_size": 8, "num_blocks": num_blocks, "max_num_batched_tokens": 13, "max_model_len": 40,
        "long_prefill_token_threshold": 5,
    }  # fmt: skip
    plain, overlapped = (
        engine_for(family, async_scheduling=on, **options).generate(prompt, greedy(6))[0] for on in (False, True)
    )
    assert plain.finish_reason == "length"
    assert (overlapped.token_ids, overlapped.finish_reason) == (plain.token_ids, plain.finish_reason)


@pytest.mark.parametrize("family", some(FAMILIES, ("llama", "gpt_oss")))
def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens(family: str) -> None:
    num_groups = len(engine_for(family).runner.groups)
    engine = overlapping(family, num_blocks=1 + 20 * num_groups, enable_prefix_caching=False)
    outputs = engine.generate(random_tokens(*[10] * 6), greedy(NUM_TOKENS))
    assert engine.stats().num_preemptions > 0
    assert faults(family, outputs, NUM_TOKENS) == []


def test_a_request_ends_where_max_model_len_ends() -> None:
    output = overlapping("llama", max_model_len=20).generate(random_tokens(17), greedy(50))[0]
    assert output.finish_reason == "length"
    assert faults("llama", [output], 3) == []


# --- the same outputs, whatever is asked ---------------------------------------------------------------------------

SHARED = 14  # tokens that prompts begin alike with, where they do
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.3, "top_p": 0.95, "seed": 11},
    "unseeded": {"temperature": 0.8, "top_k": 40},
    "penalties": {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5},
    "seeded penalties": {"temperature": 1.1, "seed": 3, "frequency_penalty": 1.2},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "seeded logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 0, "presence_penalty": -0.7},
}
REQUEST = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(1, 50),
        "is_shared": st.booleans(),
        "max_tokens": st.integers(1, 30),
        "arrival": st.integers(0, 12),
        "kind": st.sampled_from(list(KINDS)),
        "abort_after": st.sampled_from([None, None, None, 1, 4]),  # tokens
        "is_ended": st.booleans(),  # by one of the stop tokens
    }
)


def loads(least: int) -> st.SearchStrategy[dict[str, Any]]:
    """Requests and an engine for them, whose pool has room for `least` blocks of 4 tokens or somewhat more."""
    return st.fixed_dictionaries(
        {
            "requests": st.lists(REQUEST, min_size=1, max_size=8),
            "stops": st.frozensets(st.integers(3, 255), max_size=40),
            "num_blocks": st.integers(1 + least, 40 + least),
            "budget": st.integers(1, 64),
            "threshold": st.sampled_from([0, 3]),
            "max_num_seqs": st.integers(1, 6),
            "policy": st.sampled_from(["fcfs", "priority"]),
            "caching": st.booleans(),
            "allocator": st.sampled_from(["paged", "paged", "paged", "contiguous"]),
        }
    )


# 96 tokens take 24 blocks: some requests run out of them, with overlap after as many tokens as without.
SMALL_POOLS = loads(21)
# A request is charged 24 blocks in each group, and one more where a window may begin within a block. (Less in steps of
# few tokens, but for twice as many in flight with overlap: in a smaller pool it would be refused sooner.)
HYBRID_POOLS = loads(25 * 3)


def prompts_of(load: dict[str, Any]) -> list[list[int]]:
    shared, *own = random_tokens(SHARED, *(request["prompt_len"] for request in load["requests"]))
    return [
        shared + tokens if request["is_shared"] else tokens
        for request, tokens in zip(load["requests"], own, strict=True)
    ]


def params_of(request: dict[str, Any], stops: frozenset[int]) -> SamplingParams:
    ends = tuple(stops) if request["is_ended"] else ()
    return SamplingParams(
        **KINDS[request["kind"]], max_tokens=request["max_tokens"], ignore_eos=True, stop_token_ids=ends
    )


def serve(family: str, load: dict[str, Any], *, is_async: bool, bad_token: int | None = None) -> list[RequestOutput]:
    """The load's outputs; every request's updates are its tokens, and nothing is left behind."""
    engine = engine_for(
        family, num_blocks=load["num_blocks"], max_num_batched_tokens=load["budget"],
        long_prefill_token_threshold=load["threshold"], max_num_seqs=min(load["max_num_seqs"], load["budget"]),
        scheduling_policy=load["policy"], enable_prefix_caching=load["caching"], allocator=load["allocator"],
        async_scheduling=is_async,
    )  # fmt: skip
    if bad_token is not None:
        poison(engine, bad_token)
    outputs: dict[str, RequestOutput] = {}
    seen: dict[str, list[int]] = {str(i): [] for i in range(len(load["requests"]))}

    def on_token(update: TokenUpdate) -> None:
        seen[update.request_id].append(update.token_id)
        if load["requests"][int(update.request_id)]["abort_after"] == len(seen[update.request_id]):
            output = engine.abort(update.request_id)
            if output is not None:
                outputs[update.request_id] = output

    prompts = prompts_of(load)
    for step in range(3_000):
        for i, request in enumerate(load["requests"]):
            if request["arrival"] == step:
                params = params_of(request, load["stops"])
                engine.add_request(prompts[i], params, request_id=str(i), priority=i % 3, on_token=on_token)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
        if step > 12 and not engine.has_unfinished:
            break
    engine.step()
    assert sorted(outputs) == sorted(seen)
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().generation_tokens == sum(map(len, seen.values()))
    for name, output in outputs.items():
        assert seen[name] == output.token_ids
    return [outputs[str(i)] for i in range(len(load["requests"]))]


def differences(family: str, load: dict[str, Any], ours: list[RequestOutput], plain: list[RequestOutput]) -> list[str]:
    """Where outputs differ, but for greedy tokens that transformers finds a rounding apart."""
    lines = []
    for request, a, b in zip(load["requests"], ours, plain, strict=True):
        if is_a_tie(family, request, a, b):
            continue
        for name in ("token_ids", "text", "finish_reason"):
            if getattr(a, name) != getattr(b, name):
                lines.append(f"{request}: {name} {getattr(a, name)} with overlap, {getattr(b, name)} without")
        if a.logprobs is None or b.logprobs is None:
            assert a.logprobs is b.logprobs
            continue
        # Batches of other sizes round otherwise.
        assert [x.chosen for x in a.logprobs] == pytest.approx([x.chosen for x in b.logprobs], abs=ROUNDING * 10)
        assert [len(x.top) for x in a.logprobs] == [len(x.top) for x in b.logprobs]
    return lines


def is_a_tie(family: str, request: dict[str, Any], a: RequestOutput, b: RequestOutput) -> bool:
    """Whether greedy outputs part at a token where transformers' two best are a rounding apart."""
    if request["kind"] not in ("greedy", "logprobs"):
        return False
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            row = reference_logits(family, [*a.prompt_token_ids, *a.token_ids[: i + 1]], 1)[0]
            return bool((row[x] - row[y]).abs() < ROUNDING * row.abs().max())
    return False


def check_load(family: str, load: dict[str, Any]) -> None:
    ours, plain = (serve(family, load, is_async=is_async) for is_async in (True, False))
    assert differences(family, load, ours, plain) == []


@settings(max_examples=6)
@given(load=SMALL_POOLS)
def test_any_load_has_the_same_outputs_with_overlap_and_without(load: dict[str, Any]) -> None:
    check_load("llama", load)


@settings(max_examples=3)
@given(load=HYBRID_POOLS)
def test_any_load_of_a_hybrid_model_has_the_same_outputs(load: dict[str, Any]) -> None:
    check_load("qwen2_window", load)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_many_loads_of_every_kind_have_the_same_outputs(family: str) -> None:
    @settings(max_examples=30)
    @given(load=loads(25 * len(engine_for(family).runner.groups)))
    def check(load: dict[str, Any]) -> None:
        check_load(family, load)

    check()


# --- a token that makes nan, sampled by the model itself -----------------------------------------------------------


def check_bad_load(family: str, load: dict[str, Any], choice: int) -> None:
    """From the embedding of a token that somebody samples comes nan: whoever feeds it fails, and nobody else."""
    sampled = [token for output in serve(family, load, is_async=False) for token in output.token_ids]
    bad_token = sampled[choice % len(sampled)]
    for ends in (False, True):  # as a stop token it ends its request before it is fed; with overlap it is fed anyway
        load = {**load, "stops": load["stops"] | {bad_token} if ends else load["stops"] - {bad_token}}
        ours, plain = (serve(family, load, is_async=is_async, bad_token=bad_token) for is_async in (True, False))
        assert differences(family, load, ours, plain) == []
        for output in ours:
            is_fed = bad_token in [*output.prompt_token_ids, *output.token_ids[:-1]]
            assert not is_fed or output.finish_reason == "error"
            assert output.finish_reason != "error" or bad_token in [*output.prompt_token_ids, *output.token_ids]


@settings(max_examples=4)
@given(load=SMALL_POOLS, choice=st.integers(0, 200))
def test_any_load_with_a_bad_token_has_the_same_outputs(load: dict[str, Any], choice: int) -> None:
    if any(output.token_ids for output in serve("llama", load, is_async=False)):
        check_bad_load("llama", load, choice)


def taught(engine: Engine, bad_at: dict[str, int]) -> None:
    """Logits of a request's row are nan in the batch that computes its token number `bad_at`, and so is its KV."""
    logits = engine.runner.logits

    def spoilt(arrays: BatchArrays) -> torch.Tensor:
        rows = logits(arrays)
        slots = arrays.slot_mapping[0]
        for row, seq in enumerate(arrays.seqs):
            if seq.num_computed_tokens == bad_at.get(seq.request_id):
                rows[row] = torch.nan
                block, offset = divmod(int(slots[arrays.last_tokens[row]]), 4)
                for tensor in engine.runner.kv.tensors:
                    tensor[block, offset] = torch.nan
        return rows

    engine.runner.logits = spoilt  # type: ignore[method-assign]


def holds_nan(engine: Engine) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in engine.runner.kv.tensors)


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_nan_of_a_step_whose_request_was_aborted_meanwhile_reaches_nobody(allocator: str) -> None:
    """The aborted request's blocks are the next one's before anyone knows that they hold nan."""
    engine = overlapping("llama", num_blocks=49, allocator=allocator, enable_prefix_caching=False)
    taught(engine, {"bad": 11})
    bad, good, beside = random_tokens(9, 9, 5)
    engine.add_request(bad, greedy(NUM_TOKENS), request_id="bad")
    engine.add_request(beside, greedy(NUM_TOKENS), request_id="beside")
    for _ in range(2):
        engine.step()  # the second leaves the batch that computes the eleventh token in flight
    assert holds_nan(engine)
    assert engine.abort("bad") is not None
    engine.add_request(good, greedy(NUM_TOKENS), request_id="good")
    outputs = run_dry(engine)
    assert faults("llama", outputs.values(), NUM_TOKENS) == []
    assert not holds_nan(engine)


def test_nan_of_a_step_whose_request_was_preempted_meanwhile_reaches_nobody() -> None:
    engine = overlapping("llama", num_blocks=25, enable_prefix_caching=False, scheduling_policy="priority")
    taught(engine, {"bad": 11})
    bad, good = random_tokens(9, 9)
    engine.add_request(bad, greedy(NUM_TOKENS), request_id="bad")
    for _ in range(2):
        engine.step()
    engine.scheduler.preempt("bad")
    engine.add_request(good, greedy(NUM_TOKENS), request_id="good", priority=-1)
    outputs = run_dry(engine)
    assert (outputs["bad"].finish_reason, len(outputs["bad"].token_ids)) == ("error", 2)
    assert outputs["bad"].error == "bad: its logits are not numbers after 11 tokens; check the weights and the dtype"
    assert faults("llama", [outputs["good"]], NUM_TOKENS) == []
    assert not holds_nan(engine)


def test_who_shares_a_prefix_that_turns_out_bad_computes_it_again() -> None:
    """The second is admitted, on blocks of the first, while the step that spoils them is in flight."""
    engine = overlapping("llama", max_num_batched_tokens=16)
    taught(engine, {"bad": 16})
    prefix, end = random_tokens(16, 5)
    engine.add_request([*prefix, *end], greedy(NUM_TOKENS), request_id="bad")
    engine.add_request([*prefix, *end, 9], greedy(NUM_TOKENS), request_id="shares")
    outputs = run_dry(engine)
    assert outputs["bad"].finish_reason == "error"
    assert faults("llama", [outputs["shares"]], NUM_TOKENS) == []
    assert engine.stats().num_preemptions == 1
    assert not holds_nan(engine)


# --- one step too many ---------------------------------------------------------------------------------------------


def stopping(engine: Engine, prompt: list[int], num_tokens: int) -> RequestOutput:
    """The prompt's greedy tokens up to the first that equals the one of this number, which ends it."""
    last = engine_for("llama").generate(prompt, greedy(num_tokens))[0].token_ids[-1]
    return engine.generate(prompt, greedy(num_tokens + 8, stop_token_ids=(last,)))[0]


def test_a_token_after_the_last_one_is_dropped_and_its_kv_is_not_trusted() -> None:
    engine = overlapping("llama")
    (prompt,) = random_tokens(9)
    output = stopping(engine, prompt, 7)
    assert output.finish_reason == "stop"
    text = [*prompt, *output.token_ids]
    # With overlap the stop token itself was fed: its KV completes the fourth block, if 16 tokens end there.
    assert len(text) == 16
    again = engine.generate([*text, 5, 6], greedy(NUM_TOKENS))[0]
    assert again.num_cached_tokens == 12
    assert faults("llama", [again], NUM_TOKENS) == []


def test_a_batch_of_which_nobody_is_left_is_not_a_step() -> None:
    engine = overlapping("llama")
    output = stopping(engine, random_tokens(9)[0], 7)
    assert engine.stats().num_steps == len(output.token_ids)
    assert not engine.has_unfinished
    updates: list[TokenUpdate] = []
    engine.add_request([5, 6, 7], greedy(2), on_token=updates.append)
    engine.step()
    assert len(updates) == 1


def test_an_id_taken_over_while_its_old_requests_step_is_in_flight_gets_its_own_tokens_only() -> None:
    engine = overlapping("llama")
    old, new = random_tokens(9, 14)
    engine.add_request(old, greedy(NUM_TOKENS), request_id="a")
    engine.step()
    assert engine.abort("a") is not None
    updates: list[TokenUpdate] = []
    engine.add_request(new, greedy(NUM_TOKENS), request_id="a", on_token=updates.append)
    output = run_dry(engine)["a"]
    assert output.prompt_token_ids == new
    assert [update.token_id for update in updates] == output.token_ids
    assert faults("llama", [output], NUM_TOKENS) == []


def test_a_request_that_runs_out_of_blocks_has_the_token_that_was_in_flight() -> None:
    engine = overlapping("llama", num_blocks=11)
    output = engine.generate(random_tokens(33), greedy(30))[0]
    assert output.finish_reason == "out_of_blocks"
    # The 40 slots hold the prompt and 7 answers; the 8th is sampled from the last of them.
    assert faults("llama", [output], 8) == []


def test_a_step_that_fails_at_its_launch_leaves_the_one_in_flight_alone() -> None:
    engine = overlapping("llama", max_num_seqs=1)
    for name, prompt in zip("ab", random_tokens(9, 14), strict=True):
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=name)
    run, steps = engine.runner.run, iter(range(1, 1_000))

    def failing(arrays: BatchArrays, params: list[SamplingParams]) -> Any:
        if next(steps) == 3:
            raise RuntimeError("a kernel failed")
        return run(arrays, params)

    engine.runner.run = failing  # type: ignore[method-assign, assignment]
    engine.step()
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step()
    outputs = run_dry(engine)
    # The first two batches gave a token each, as they do without overlap.
    assert (outputs["a"].finish_reason, len(outputs["a"].token_ids)) == ("error", 2)
    assert outputs["a"].error == "a: the step failed: RuntimeError('a kernel failed')"
    assert faults("llama", [outputs["b"]], NUM_TOKENS) == []
    assert engine.stats().num_used_blocks == 0


def test_the_engine_goes_on_after_an_interrupt_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overlapping("llama")
    wait, calls = SampledAhead.wait, iter(range(1, 1_000))

    def interrupted(sampled: SampledAhead) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return wait(sampled)

    monkeypatch.setattr(SampledAhead, "wait", interrupted)
    prompts = random_tokens(9, 14)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, greedy(NUM_TOKENS))
    engine.scheduler.check_invariants()
    assert not engine.has_unfinished
    assert engine.stats().num_used_blocks == 0
    assert faults("llama", engine.generate(prompts, greedy(NUM_TOKENS)), NUM_TOKENS) == []


# --- memory between the host and the device ------------------------------------------------------------------------


def test_what_one_step_sends_stays_until_the_step_after_the_next() -> None:
    uploads = UploadRing(torch.device("cpu"))
    sent = []
    for step in range(4):
        uploads.next_step()
        sent.append([uploads.stage(np.full((n, 2), 10 * step + n, np.int32)) for n in (3, 50 * step)])
        for tensor, n in zip(sent[step], (3, 50 * step), strict=True):  # the other part is untouched, and so is this
            assert tensor.tolist() == [[10 * step + n] * 2] * n
        if step:
            assert sent[step - 1][0].tolist() == [[10 * (step - 1) + 3] * 2] * 3


def test_two_parts_of_memory_serve_all_steps() -> None:
    uploads, places = UploadRing(torch.device("cpu")), []
    for _ in range(5):
        uploads.next_step()
        places.append(uploads.stage(np.zeros((3, 2), np.int32)).data_ptr())
    assert places == [*places[:2], *places[:2], places[0]]
    assert places[0] != places[1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_an_array_is_sent_as_it_is(dtype: Any) -> None:
    uploads = UploadRing(torch.device("cpu"))
    uploads.stage(np.zeros(3, np.int32))  # 12 bytes: what follows begins at 16
    array = np.arange(24).reshape(4, 6).astype(dtype)
    tensor = uploads.stage(array[:, ::2])
    assert torch.equal(tensor, torch.from_numpy(array[:, ::2].copy()))
    assert tensor.data_ptr() % np.dtype(dtype).itemsize == 0
    assert uploads.stage(np.zeros((0, 5), dtype)).shape == (0, 5)


def test_arrays_that_are_sent_together_lie_one_behind_the_other() -> None:
    uploads = UploadRing(torch.device("cpu"))
    uploads.stage(np.zeros(3, np.int32))
    arrays: list[Any] = [
        np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int64), np.zeros((0, 4), np.int32),
        np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::2], np.array([7]),
    ]  # fmt: skip
    tensors = uploads.upload(arrays)
    assert all(
        torch.equal(tensor, torch.from_numpy(array.copy())) for tensor, array in zip(tensors, arrays, strict=True)
    )
    # 40 bytes, 24, none, none, 16 and 8: each begins at a multiple of 16.
    assert [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors if tensor.numel()] == [0, 48, 80, 96]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert uploads.upload([]) == []


def test_what_is_written_into_a_reserved_layout_is_there_for_the_copy() -> None:
    uploads, layout = UploadRing(torch.device("cpu")), Layout.of(((2, 3), "int32"), ((2,), "int64"))
    assert layout.num_bytes == 32 + 16
    memory, (tables, longs) = uploads.reserve(layout)
    tables[...], longs[...] = 7, [1, 2]
    there = [tensor.tolist() for tensor in layout.tensors(memory.clone())]
    assert there == [[[7, 7, 7], [7, 7, 7]], [1, 2]]


def test_a_copy_can_be_read_while_the_next_one_is_on_its_way() -> None:
    downloads = DownloadRing(torch.device("cpu"))
    first = downloads.download(torch.tensor([1, 2, 3], dtype=torch.int32))
    second = downloads.download(torch.tensor([4, 5, 6, 7, 8], dtype=torch.int32))
    assert first.wait().tolist() == [1, 2, 3]
    third = downloads.download(torch.tensor([9], dtype=torch.int32))
    assert second.wait().tolist() == [4, 5, 6, 7, 8]
    assert third.wait().tolist() == [9]


# --- on a GPU ------------------------------------------------------------------------------------------------------

PARAMS = [
    SamplingParams(**options, max_tokens=20, ignore_eos=True)
    for options in (*KINDS.values(), {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": 9})
]


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_a_decode_step_never_waits_for_the_gpu_but_for_the_tokens_of_the_one_before(is_eager: bool) -> None:
    engine = engine_for("llama", device="cuda", block_size=16, num_blocks=400, enforce_eager=is_eager)
    for prompt, params in zip(random_tokens(*range(9, 17)), PARAMS, strict=True):
        engine.add_request(prompt, params)
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")  # an event, which is what the engine waits for, is not looked at
    try:
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(run_dry(engine)) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_a_gpu_gives_the_same_outputs_with_overlap_and_without(is_eager: bool) -> None:
    outputs = [
        engine_for(
            "llama", device="cuda", block_size=16, num_blocks=30, enforce_eager=is_eager, async_scheduling=is_async
        ).generate(random_tokens(*range(9, 17)), PARAMS)
        for is_async in (True, False)
    ]
    with_overlap, without = ([output.token_ids for output in run] for run in outputs)
    assert with_overlap == without


@pytest.mark.gpu
def test_what_travels_to_a_gpu_lies_in_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    uploads, downloads = UploadRing(device), DownloadRing(device)
    uploads.next_step()
    sent = uploads.stage(np.arange(5))
    assert sent.is_pinned()
    copy = downloads.download(sent.to(device, non_blocking=True).int())
    assert copy.on_host.is_pinned()
    assert copy.wait().tolist() == [0, 1, 2, 3, 4]
