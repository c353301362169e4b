"""What goes wrong in one request, one step or one option is said in one line, and the engine goes on without it."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from itertools import permutations
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, SamplingParams
from engine.batch import BatchArrays
from engine.request import RequestOutput, TokenUpdate
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.stats import Stats
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from tests.support.parts import paired, some
from tests.support.small_engines import engine_for, faults, greedy, poison, random_tokens, run_dry, saved_model

NUM_TOKENS = 12
POISON = 1  # a token that no prompt here has and no model here samples


def one_line(error: KvplanError) -> str:
    text = str(error)
    assert "\n" not in text
    assert "; " in text, "says no next step"
    return text


# --- requests that can never run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "the prompt must have 1 to 95 tokens (0); shorten it or raise max_model_len"),
        (list(range(3, 99)), "the prompt must have 1 to 95 tokens (96); shorten it or raise max_model_len"),
        ([5, 256], "prompt: 256 is not a token of the model (0 to 255); tokenize with the model's own tokenizer"),
        ([5, -1], "prompt: -1 is not a token of the model (0 to 255); tokenize with the model's own tokenizer"),
        ([5, 6.0], "prompt: 6.0 is not a token of the model (0 to 255); tokenize with the model's own tokenizer"),
        ([5, None], "prompt: None is not a token of the model (0 to 255); tokenize with the model's own tokenizer"),
        ([5, True], "prompt: True is not a token of the model (0 to 255); tokenize with the model's own tokenizer"),
        (
            np.array([5.0]),
            "prompt: 5.0 is not a token of the model (0 to 255); tokenize with the model's own tokenizer",
        ),
        (7, "prompt: 7 is neither a text nor a list of tokens; give one of them"),
    ],
    ids=[
        "empty",
        "too long",
        "past the vocabulary",
        "negative",
        "a fraction",
        "nothing",
        "a truth",
        "an array of fractions",
        "a token alone",
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(prompt: Any, text: str) -> None:
    engine = engine_for("llama")
    with pytest.raises(InvalidInputError) as error:
        engine.generate([[5, 6, 7], prompt, [8, 9]], greedy(NUM_TOKENS))
    assert text in str(error.value)
    assert engine.stats().num_steps == 0
    assert not engine.has_unfinished
    assert faults("llama", engine.generate([[5, 6, 7]], greedy(NUM_TOKENS)), NUM_TOKENS) == []


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("priority", "high", "add_request: priority must be a whole number ('high'); smaller runs first"),
        ("priority", True, "add_request: priority must be a whole number (True); smaller runs first"),
        ("cache_salt", 5, "add_request: cache_salt must be a text (5); remove it to share prefixes with all"),
        ("request_id", 5, "add_request: request_id must be a text (5); remove it for one made up"),
    ],
)
def test_a_bad_option_of_a_request_is_refused_before_it_is_queued(option: str, value: Any, text: str) -> None:
    engine = engine_for("llama", scheduling_policy="priority")
    engine.add_request([5, 6, 7], greedy(NUM_TOKENS), request_id="a")
    with pytest.raises(UsageError) as error:
        engine.add_request([8, 9], greedy(NUM_TOKENS), **{option: value})
    assert one_line(error.value) == text
    outputs = run_dry(engine)
    assert list(outputs) == ["a"]
    assert faults("llama", outputs.values(), NUM_TOKENS) == []


def test_a_prompt_larger_than_the_pool_fails_alone() -> None:
    engine = engine_for("llama", num_blocks=11)  # 10 blocks of 4 tokens can be used
    first, large, last = engine.generate(random_tokens(9, 41, 17), greedy(NUM_TOKENS))
    assert large.finish_reason == "out_of_blocks"
    assert large.error == (
        "request-2: does not fit (41 tokens need 11 blocks, the pool has 10); shorten the request or raise num_blocks"
    )
    assert large.token_ids == []
    assert faults("llama", [first, last], NUM_TOKENS) == []
    assert engine.stats().kv_cache_usage_perc == 0


def test_an_answer_that_outgrows_the_pool_fails_with_what_it_has() -> None:
    engine = engine_for("llama", num_blocks=11)
    output = engine.generate(random_tokens(33)[0], greedy(30))[0]
    assert output.finish_reason == "out_of_blocks"
    # The 40 slots hold the prompt and 7 answers; the 8th is sampled from the last of them.
    assert len(output.token_ids) == 8
    assert faults("llama", [output], 8) == []


def test_a_contiguous_pool_without_one_whole_region_fails_every_request() -> None:
    engine = engine_for("llama", allocator="contiguous", num_blocks=24)  # 96 tokens take 24 blocks beside the null one
    output = engine.generate([5, 6, 7], greedy(4))[0]
    assert output.finish_reason == "out_of_blocks"
    assert output.error is not None
    assert output.error.endswith("lower max_model_len or raise num_blocks")


# --- pools that are too small --------------------------------------------------------------------------------------

LOADS = st.fixed_dictionaries(
    {
        "requests": st.lists(
            st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=8
        ),  # (prompt length, answer length, step of arrival)
        "num_blocks": st.integers(8, 60),
        "budget": st.integers(1, 64),
        "threshold": st.sampled_from([0, 3]),
        "max_num_seqs": st.integers(1, 6),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
    }
)


def finish_load(family: str, load: dict[str, Any]) -> tuple[Engine, dict[str, RequestOutput]]:
    engine = engine_for(
        family, num_blocks=load["num_blocks"], max_num_batched_tokens=load["budget"],
        long_prefill_token_threshold=load["threshold"], max_num_seqs=min(load["max_num_seqs"], load["budget"]),
        scheduling_policy=load["policy"], enable_prefix_caching=load["caching"], watermark=load["watermark"],
    )  # fmt: skip
    outputs: dict[str, RequestOutput] = {}
    prompts = random_tokens(*(prompt_len for prompt_len, _, _ in load["requests"]))
    for step in range(3_000):
        for i, (_, num_tokens, arrival) in enumerate(load["requests"]):
            if arrival == step:
                engine.add_request(prompts[i], greedy(num_tokens), request_id=str(i), priority=i % 3)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
        if step > 12 and not engine.has_unfinished:
            break
    return engine, outputs


def check_load(family: str, load: dict[str, Any]) -> None:
    """Every request ends within the time that running them one by one would take many times over; nothing is left."""
    engine, outputs = finish_load(family, load)
    assert sorted(outputs) == [str(i) for i in range(len(load["requests"]))]
    for i, (_, num_tokens, _) in enumerate(load["requests"]):
        output = outputs[str(i)]
        assert output.finish_reason in ("length", "out_of_blocks")
        num = num_tokens if output.finish_reason == "length" else len(output.token_ids)
        assert faults(family, [output], num) == []
        if output.error is not None:  # it said how many blocks it wants: more than there are
            num_needed = int(output.error.split(" tokens need ")[1].split(" blocks")[0])
            assert num_needed > load["num_blocks"] - 1
    assert engine.stats().num_used_blocks == 0


@settings(max_examples=6)
@given(load=LOADS)
def test_any_load_on_any_pool_comes_to_its_end(load: dict[str, Any]) -> None:
    check_load("llama", load)


@settings(max_examples=3)
@given(load=LOADS)
def test_any_load_of_a_hybrid_model_comes_to_its_end(load: dict[str, Any]) -> None:
    check_load("qwen2_window", load)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen2_window", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral"])
def test_many_loads_of_every_kind_come_to_their_end(family: str) -> None:
    @settings(max_examples=25)
    @given(load=LOADS)
    def check(load: dict[str, Any]) -> None:
        check_load(family, load)

    check()


# --- logits that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "allocator"),
    paired(["llama", "qwen2_window", "gpt_oss", "deepseek_v3", "mixtral"], ["paged", "contiguous"]),
)
def test_a_request_whose_logits_are_nan_fails_alone(family: str, allocator: str) -> None:
    engine = engine_for(family, allocator=allocator, max_num_batched_tokens=32)
    poison(engine, POISON)
    good = random_tokens(9, 30, 21)
    first, bad, second, third = engine.generate(
        [good[0], [*random_tokens(40)[0], POISON, 7, 8], good[1], good[2]], greedy(NUM_TOKENS)
    )
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.startswith(f"{bad.request_id}: its logits are not numbers after ")
    assert bad.token_ids == []
    assert faults(family, [first, second, third], NUM_TOKENS) == []
    assert engine.stats().kv_cache_usage_perc == 0


@pytest.mark.parametrize("family", ["llama", "qwen2_window", "deepseek_v3"])
def test_blocks_that_held_nan_are_clean_for_the_next(family: str) -> None:
    # Barely room for one request, so the next one gets the same blocks; some are read before they are full.
    engine = engine_for(family, num_blocks=64, enable_prefix_caching=False)
    poison(engine, POISON)
    bad = engine.generate([POISON, *random_tokens(59)[0]], greedy(NUM_TOKENS))[0]
    assert bad.finish_reason == "error"
    assert faults(family, engine.generate(random_tokens(5, 18, 27), greedy(NUM_TOKENS)), NUM_TOKENS) == []


def test_the_prefix_cache_keeps_nothing_of_a_request_with_nan() -> None:
    engine = engine_for("llama")
    poison(engine, POISON)
    prompt = random_tokens(20)[0]
    with_poison = [*prompt, POISON, *random_tokens(20, seed=1)[0]]
    for _ in range(2):
        bad = engine.generate(with_poison, greedy(NUM_TOKENS))[0]
        assert (bad.finish_reason, bad.num_cached_tokens) == ("error", 0)
    good = engine.generate(prompt, greedy(NUM_TOKENS))[0]
    assert good.num_cached_tokens == 0
    assert faults("llama", [good], NUM_TOKENS) == []


def test_a_prefix_that_others_share_with_a_request_with_nan_stays_shared() -> None:
    engine = engine_for("llama")
    poison(engine, POISON)
    prefix = random_tokens(32)[0]
    engine.generate(prefix, greedy(1))
    for name, end in (("a", [5]), ("b", [6]), ("bad", [POISON])):
        engine.add_request([*prefix, *end], greedy(NUM_TOKENS), request_id=name)
    outputs = run_dry(engine)
    assert outputs["bad"].finish_reason == "error"
    assert faults("llama", [outputs["a"], outputs["b"]], NUM_TOKENS) == []
    assert engine.generate([*prefix, 9], greedy(1))[0].num_cached_tokens == 32


ORDERS = list(permutations(("bad", "worse", "a", "b")))


@pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "overlapped"])
@pytest.mark.parametrize("order", some(ORDERS, ORDERS[::5]), ids=" ".join)  # each of them first at least once
def test_nan_of_the_same_step_stays_with_its_request_whoever_comes_first(
    order: tuple[str, ...], is_async: bool
) -> None:
    """All four share blocks that the first of them computes, in one step."""
    engine = engine_for("llama", async_scheduling=is_async)
    poison(engine, POISON)
    prefix = random_tokens(8, seed=11)[0]
    ends = {"bad": [POISON, 4], "worse": [9, 9, 9, 9, POISON], "a": [5], "b": []}
    for name in order:
        engine.add_request([*prefix, *ends[name]], greedy(NUM_TOKENS), request_id=name)
    outputs = run_dry(engine)
    assert {name for name, output in outputs.items() if output.finish_reason == "error"} == {"bad", "worse"}
    assert faults("llama", [outputs["a"], outputs["b"]], NUM_TOKENS) == []
    assert engine.stats().kv_cache_usage_perc == 0


def test_nan_does_not_come_in_through_blocks_that_a_window_gave_back() -> None:
    engine = engine_for("qwen2_window", num_blocks=80, max_num_seqs=4, enable_prefix_caching=False)
    poison(engine, POISON)
    long, short = random_tokens(60, 4)
    engine.add_request(long, greedy(30), request_id="long")
    engine.step()
    engine.step()  # its windows of 12 tokens have given most of 60 tokens' blocks back
    engine.add_request(short, greedy(30), request_id="short")  # has the batch read tables from their beginning
    engine.step()
    engine.add_request([POISON, *random_tokens(50)[0]], greedy(4), request_id="bad")
    outputs = run_dry(engine)
    assert outputs["bad"].finish_reason == "error"
    assert faults("qwen2_window", [outputs["long"], outputs["short"]], 30) == []


# --- several threads -----------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_and_disturbs_nothing() -> None:
    """Each call of another thread, made while a step of the first one runs."""
    engine = engine_for("llama")
    refused: list[str] = []
    prompt = random_tokens(9)[0]
    calls: tuple[Callable[[], object], ...] = (
        engine.step,
        lambda: engine.generate([5, 6], greedy(2)),
        lambda: engine.add_request([5, 6], greedy(2)),
        lambda: engine.abort("request-1"),
    )

    def refusal(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError) as error:
            call()
        refused.append(str(error.value))

    def on_token(update: TokenUpdate) -> None:
        for call in calls if len(refused) < len(calls) else ():
            thread = Thread(target=refusal, args=(call,))
            thread.start()
            thread.join()

    output = engine.generate(prompt, greedy(NUM_TOKENS), on_token=on_token)[0]
    assert refused == [
        "Engine: another thread is using it; give the engine a thread of its own and pass requests to that"
    ] * len(calls)
    assert faults("llama", [output], NUM_TOKENS) == []
    thread = Thread(target=lambda: refused.append(engine.generate([5, 6], greedy(1))[0].finish_reason))
    thread.start()
    thread.join()
    assert refused[-1] == "length"  # one after the other they may


# --- a step that fails ---------------------------------------------------------------------------------------------


def fail_once(engine: Engine, error: BaseException, at_step: int) -> None:
    """The step that would be the engine's `at_step`-th raises instead of running."""
    run, steps = engine.runner.run, iter(range(1, 1_000))

    def failing(arrays: BatchArrays, params: list[SamplingParams]) -> Any:
        if next(steps) == at_step:
            raise error
        return run(arrays, params)

    engine.runner.run = failing  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("at_step", [1, 2, 5], ids=["in prefill", "in a later chunk", "in decode"])
@pytest.mark.parametrize("family", ["llama", "qwen2_window"])
def test_the_engine_goes_on_after_a_step_that_failed(family: str, at_step: int, error: BaseException) -> None:
    engine = engine_for(family, max_num_batched_tokens=24)
    fail_once(engine, error, at_step)
    prompts = random_tokens(9, 30, 14)
    with pytest.raises(type(error)):
        engine.generate(prompts, greedy(NUM_TOKENS))
    assert not engine.has_unfinished
    engine.scheduler.check_invariants()
    assert engine.stats().num_used_blocks == 0
    again = engine.generate(prompts, greedy(NUM_TOKENS))
    assert faults(family, again, NUM_TOKENS) == []
    # What was promised to the cache in the failed step was not computed, and is not found.
    assert at_step > 1 or [output.num_cached_tokens for output in again] == [0, 0, 0]


def test_requests_outside_a_failed_step_are_not_lost() -> None:
    engine = engine_for("llama", max_num_seqs=1)
    for name, prompt in zip("ab", random_tokens(9, 14), strict=True):
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=name)
    fail_once(engine, RuntimeError("a kernel failed"), 3)
    for _ in range(2):
        engine.step()
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step()
    outputs = run_dry(engine)
    assert list(outputs) == ["a", "b"]
    assert (outputs["a"].finish_reason, len(outputs["a"].token_ids)) == ("error", 2)
    assert outputs["a"].error == "a: the step failed: RuntimeError('a kernel failed')"
    assert faults("llama", [outputs["b"]], NUM_TOKENS) == []


def test_a_request_that_the_pool_cannot_hold_is_told_so_though_the_step_fails() -> None:
    engine = engine_for("llama", num_blocks=11)  # 10 blocks of 4 tokens can be used
    for name, prompt in zip("ab", random_tokens(41, 9), strict=True):
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=name)
    fail_once(engine, RuntimeError("a kernel failed"), 1)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step()
    assert {name: output.finish_reason for name, output in run_dry(engine).items()} == {
        "a": "out_of_blocks",
        "b": "error",
    }


def test_the_engine_goes_on_after_an_interrupt_amid_the_tokens_of_a_step() -> None:
    engine = engine_for("llama")
    update, steps = engine.scheduler.update, iter(range(1, 1_000))

    def interrupted(batch: Batch, sampled: Mapping[str, Several[int]]) -> list[Sequence]:
        done = update(batch, sampled)
        if next(steps) == 3:
            raise KeyboardInterrupt
        return done

    engine.scheduler.update = interrupted  # type: ignore[method-assign]
    prompts = random_tokens(9, 14)
    engine.add_request(prompts[0], greedy(3), request_id="ends")
    engine.add_request(prompts[1], greedy(NUM_TOKENS), request_id="goes on")
    for _ in range(2):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.check_invariants()
    outputs = run_dry(engine)
    assert {name: output.finish_reason for name, output in outputs.items()} == {"ends": "length", "goes on": "error"}
    assert faults("llama", [outputs["ends"]], 3) == []
    assert engine.stats().num_used_blocks == 0
    assert faults("llama", engine.generate(prompts, greedy(NUM_TOKENS)), NUM_TOKENS) == []


def raise_once(error: BaseException, at_call: int) -> Callable[[object], None]:
    """A callback whose `at_call`-th call raises."""
    calls = iter(range(1, 1_000))

    def callback(news: object) -> None:
        if next(calls) == at_call:
            raise error

    return callback


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("whose", ["a request's", "the engine's"])
def test_a_callback_that_raises_takes_nothing_from_any_request(whose: str, error: BaseException) -> None:
    engine = engine_for("llama")
    callback = raise_once(error, at_call=3)
    if whose == "the engine's":
        engine.on_step = callback
    seen: list[TokenUpdate] = []
    first, second, third = random_tokens(5, 6, 7)
    # In the third step a's callback raises, b goes on, c ends.
    engine.add_request(first, greedy(8), request_id="a", on_token=callback if whose == "a request's" else None)
    engine.add_request(second, greedy(8, logprobs=1), request_id="b", on_token=seen.append)
    engine.add_request(third, greedy(3, logprobs=1), request_id="c", on_token=seen.append)
    for _ in range(2):
        engine.step()
    with pytest.raises(type(error)):
        engine.step()
    engine.scheduler.check_invariants()
    outputs = run_dry(engine)
    assert sorted(outputs) == ["a", "b", "c"]
    assert faults("llama", [outputs["a"], outputs["b"]], 8) == []
    assert faults("llama", [outputs["c"]], 3) == []
    for name, num_tokens in (("b", 8), ("c", 3)):
        assert [update.token_id for update in seen if update.request_id == name] == outputs[name].token_ids
        logprobs = outputs[name].logprobs
        assert logprobs is not None
        assert [entry.top[0][0] for entry in logprobs] == outputs[name].token_ids  # greedy: the most likely
        assert len(logprobs) == num_tokens


def test_the_last_output_survives_the_callback_that_raises_on_it() -> None:
    engine = engine_for("llama")
    engine.add_request([5, 6], greedy(2), request_id="a", on_token=raise_once(ValueError("no more"), at_call=2))
    engine.step()
    with pytest.raises(ValueError, match="no more"):
        engine.step()
    outputs = run_dry(engine)
    assert faults("llama", [outputs["a"]], 2) == []


def test_a_generate_that_raised_is_heard_of_no_more() -> None:
    engine = engine_for("llama")
    seen: list[TokenUpdate] = []

    def on_token(update: TokenUpdate) -> None:
        seen.append(update)
        raise ValueError("no more")

    engine.add_request([5, 6, 7], greedy(1), request_id="by hand")
    with pytest.raises(ValueError, match="no more"):
        engine.generate(random_tokens(9, 14), greedy(1), on_token=on_token)  # both end in the step that raises
    assert list(run_dry(engine)) == ["by hand"]
    assert engine.step() == []
    assert len(seen) == 1


def test_a_callback_that_raises_ends_its_generate_and_nothing_else() -> None:
    engine = engine_for("llama")
    prompts = random_tokens(9, 14)

    def on_token(update: TokenUpdate) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        engine.generate(prompts, greedy(NUM_TOKENS), on_token=on_token)
    assert not engine.has_unfinished
    engine.scheduler.check_invariants()
    assert faults("llama", engine.generate(prompts, greedy(NUM_TOKENS)), NUM_TOKENS) == []


def test_an_observer_that_raises_leaves_the_engine_usable() -> None:
    engine = engine_for("llama")

    def on_step(stats: Stats) -> None:
        raise ValueError("no more")

    engine.on_step = on_step
    with pytest.raises(ValueError, match="no more"):
        engine.generate([5, 6], greedy(1))
    engine.on_step = None
    assert faults("llama", engine.generate([[5, 6]], greedy(NUM_TOKENS)), NUM_TOKENS) == []


# --- memory --------------------------------------------------------------------------------------------------------


def test_weights_larger_than_the_memory_are_refused() -> None:
    # 125,376 parameters of 4 bytes (test_tp.py adds them up), and cos and sin of 96 positions times 8 angles
    needed = (125_376 * 4 + 96 * 16 * 4) / 2**10
    with pytest.raises(EnvironmentProblem) as error:
        engine_for(saved_model("llama"), memory_limit=500_000)
    assert one_line(error.value) == (
        f"llama: its weights need {needed:.2f} KiB on cpu, 488.28 KiB are free; "
        "use a larger device, more ranks (tensor_parallel_size) or a smaller dtype"
    )


def test_memory_that_leaves_nothing_for_the_pool_is_refused_with_the_sum() -> None:
    with pytest.raises(EnvironmentProblem) as error:
        engine_for("llama", num_blocks=None, memory_limit=600_000)
    text = one_line(error.value)
    assert "no memory is left for KV: 540,000 bytes may be used (gpu_memory_utilization 0.9 of 600,000)" in text
    assert "weights take 501,504, buffers 6,144, activations " in text


def test_a_pool_that_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(EnvironmentProblem) as error:
        engine_for("llama", num_blocks=10**13)
    assert one_line(error.value).startswith("cpu: a KV pool of 10000000000000 blocks did not fit: ")


# --- devices and options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("abacus", UsageError, "device: 'abacus' is not a device; use auto, cpu, cuda or cuda:N"),
        ("meta", UsageError, "device: the engine runs on cpu and cuda (meta)"),
        ("mps", UsageError, "device: the engine runs on cpu and cuda (mps)"),
        ("cuda", EnvironmentProblem, "device: no CUDA GPU is usable here; use device cpu"),
        ("cuda:1", EnvironmentProblem, "device: no CUDA GPU is usable here; use device cpu"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    device: str, kind: type[KvplanError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(kind) as error:
        engine_for("llama", device=device)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("family", "options", "kind", "text"),
    [
        ("llama", {"max_model_len": 513}, UsageError,
         "max_model_len is more than the positions of llama (513 of 512); lower it"),
        ("llama", {"backend": "triton"}, UsageError,
         "backend: triton kernels run on a GPU only (device cpu); use backend torch"),
        ("llama", {"tensor_parallel_size": 2}, UsageError,
         "tensor_parallel_size: 2 ranks need 2 processes; start with: torchrun --nproc-per-node 2 ..."),
        ("deepseek_v3", {"kv_cache_dtype": "fp8"}, UnsupportedModelError,
         "deepseek_v3: the engine keeps no latents in fp8; use kv_cache_dtype auto"),
    ],
    ids=["more positions than the model has", "triton on a CPU", "ranks without torchrun", "latents in fp8"],
)  # fmt: skip
def test_an_option_that_cannot_be_had_is_refused(
    family: str, options: dict[str, Any], kind: type[KvplanError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(kind) as error:
        engine_for(family, **options)
    assert one_line(error.value) == text


# --- directories ---------------------------------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"^no/such/dir is not a directory; give a model directory"):
        Engine("no/such/dir", EngineConfig(device="cpu"))


MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4, "expand": 2, "time_step_rank": 1,
    "torch_dtype": "float32", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 64, "n_positions": 32}


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
GPTQ_3 = {"quant_method": "gptq", "bits": 3, "group_size": 128}
NOT_RUN: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: (
            {**GPT2, **SMALL, "n_heads": 2, "d_model": 16, "n_layers": 2, "model_type": kind},
            f"model_type '{kind}'",
        )
        for kind in ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt")
    },
    "a state": (MAMBA, "layer 0 keeps a mamba1 state, which the engine cannot run"),
    "3 bits": ({**SMALL, "model_type": "llama", "quantization_config": GPTQ_3}, "its weights are quantized"),
}


@pytest.mark.parametrize("case", NOT_RUN)
def test_what_does_not_run_is_named_before_its_checkpoint_is_opened(case: str, tmp_path: Path) -> None:
    config, named = NOT_RUN[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors that the engine knows")
    with pytest.raises(UnsupportedModelError, match=named):
        Engine(tmp_path, EngineConfig(device="cpu"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MAMBA, "layer 0 keeps a mamba1 state, which the engine cannot run"),
        ({"model_type": "abacus"}, "abacus"),
        (GPT2, "gpt2"),
    ],
    ids=["a kind of layer", "an unknown family", "a family that is sized only"],
)
def test_a_model_that_the_engine_cannot_run_is_named(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as error:
        Engine(tmp_path, EngineConfig(device="cpu", load_format="dummy", num_blocks=4))
    assert "\n" not in str(error.value)
    assert named in str(error.value)
