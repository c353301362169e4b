"""What a user of the engine asks and gets: prompts, endings, text, log-probabilities, requests by hand, figures."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import Engine, EngineConfig, SamplingParams
from engine.batch import BatchArrays
from engine.block_manager import NULL_BLOCK
from engine.request import Prompt, RequestOutput, TokenUpdate
from engine.sampler import SampledTokens
from engine.stats import Stats
from kvplan.core.errors import InvalidInputError, UsageError
from tests.support import small_models
from tests.support.small_engines import (
    FAMILIES,
    ROUNDING,
    engine_for,
    faults,
    greedy,
    random_tokens,
    reference,
    reference_logits,
    run_dry,
    saved_model,
)

NUM_TOKENS = 24

# --- generate: prompts, parameters, order --------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_each_by_its_own_parameters() -> None:
    prompts = random_tokens(9, 30, 4)
    params = [greedy(8), greedy(2), greedy(5)]
    outputs = engine_for("llama").generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [8, 2, 5]
    assert [output.finish_reason for output in outputs] == ["length"] * 3


def test_one_list_of_tokens_is_one_prompt_and_no_prompts_are_no_outputs() -> None:
    engine = engine_for("llama")
    assert len(engine.generate([5, 6, 7], greedy(2))) == 1
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "prompt",
    [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int32(5), np.int64(6), torch.tensor(7)], (5, 6, 7), range(5, 8)],
    ids=["numpy array", "torch tensor", "list of scalars", "tuple", "range"],
)
def test_tokens_may_come_in_any_sequence_of_integers(prompt: Any) -> None:
    engine = engine_for("llama")
    outputs = [*engine.generate(prompt, greedy(2)), *engine.generate([prompt, prompt], greedy(2))]
    engine.add_request(prompt, greedy(2), request_id="by hand")
    outputs.append(run_dry(engine)["by hand"])
    assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7]] * 4
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}


def test_a_matrix_of_tokens_is_a_prompt_per_row() -> None:
    outputs = engine_for("llama").generate(np.array([[5, 6], [7, 8]]), greedy(1))
    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [7, 8]]


def test_parameters_are_one_for_all_or_one_each() -> None:
    with pytest.raises(UsageError, match=r"^generate: 2 params for 3 prompts; give one, or one each$"):
        engine_for("llama").generate(random_tokens(3, 4, 5), [greedy(), greedy()])


def test_a_request_ends_where_max_model_len_ends() -> None:
    output = engine_for("llama", max_model_len=20).generate(random_tokens(17)[0], greedy(50))[0]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


# --- how a request ends --------------------------------------------------------------------------------------------


def script(engine: Engine, *tokens: int) -> None:
    """Every request samples these tokens, one after the other."""

    def run(arrays: BatchArrays, params: list[SamplingParams]) -> SampledTokens:
        before = [
            seq.num_output_tokens + max(0, seq.num_placeholders - 1) for seq in arrays.seqs
        ]  # the one in flight too
        chosen = [tokens[min(n, len(tokens) - 1)] for n in before]
        return SampledTokens(chosen, [False] * len(chosen), [None] * len(chosen))

    engine.runner.run = run  # type: ignore[method-assign, assignment] # tokens that are there at once will do


def with_files(family: str, folder: Path, **files: Any) -> Path:
    """A copy of a family's directory with JSON files added, by stem."""
    shutil.copytree(saved_model(family), folder)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_a_stop_token_ends_a_request_and_is_kept() -> None:
    engine = engine_for("llama")
    script(engine, 10, 11, 12, 13)
    output = engine.generate([5, 6], greedy(stop_token_ids=(12,)))[0]
    assert (output.token_ids, output.finish_reason) == ([10, 11, 12], "stop")


@pytest.mark.parametrize(
    ("generation", "ends_at"),
    [({"eos_token_id": 12}, 12), ({"eos_token_id": [90, 11]}, 11), ({}, 2), ({"eos_token_id": None}, 2)],
    ids=["one", "several", "config.json's where it has none", "config.json's where it is null"],
)
def test_the_end_token_is_that_of_generation_config(generation: dict[str, Any], ends_at: int, tmp_path: Path) -> None:
    folder = with_files("llama", tmp_path / "model", generation_config=generation)
    engine = engine_for(folder)
    script(engine, 10, 11, 12, 2, 13)
    tokens = [10, 11, 12, 2, 13]
    ended = engine.generate([5, 6], greedy(5, ignore_eos=False))[0]
    assert (ended.token_ids, ended.finish_reason) == (tokens[: tokens.index(ends_at) + 1], "stop")
    assert engine.generate([5, 6], greedy(5))[0].token_ids == tokens


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[1]", "the top level is a list (line 1 column 1); expected a JSON object"),
        (
            "{",
            "line 1 column 2: not JSON, expecting property name enclosed in double quotes; "
            "the file is cut short, fetch it again",
        ),
        ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id or a list of them ('</s>')"),
        ('{"eos_token_id": true}', "eos_token_id must be a token id or a list of them (True)"),
    ],
    ids=["a list", "cut off", "a string", "a truth"],
)
def test_a_generation_config_that_says_nothing_is_named(content: str, fault: str, tmp_path: Path) -> None:
    folder = with_files("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInputError, match=rf"generation_config\.json:? {re.escape(fault)}$"):
        engine_for(folder)


# --- text ----------------------------------------------------------------------------------------------------------

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, small_models.VOCAB)}


def word_tokenizer() -> Tokenizer:
    """Token i is the word "wi"; 0 to 2 are special."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Every token is one byte."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: tokens 0 to 251 are bytes, 252 is " a", 253 is "b"; bytes that are no UTF-8 are no text."""
    vocab = {f"<0x{i:02X}>": i for i in range(252)} | {"▁a": 252, "b": 253, "▁": 254, "<unk>": 255}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def speaking(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Engine:
    """A llama with a tokenizer.json beside it."""
    engine = engine_for(with_files("llama", folder, tokenizer=json.loads(tokenizer.to_str())), **changes)
    assert engine.tokenizer is not None
    return engine


def stream(engine: Engine, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, list[TokenUpdate]]:
    updates: list[TokenUpdate] = []
    return engine.generate(prompt, params, on_token=updates.append)[0], updates


def test_a_text_prompt_is_the_tokens_of_its_words(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    prompts: list[Prompt] = ["w9 w20 w3", [9, 20, 3]]
    text, tokens = engine.generate(prompts, greedy(4))
    assert text.prompt_token_ids == [9, 20, 3]
    assert text.token_ids == tokens.token_ids
    assert text.text == tokens.text == "".join(f" w{token}" for token in text.token_ids)


def test_a_text_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9, pad_id=7)
    engine = speaking(tmp_path / "model", tokenizer)
    assert engine.generate("w9 w20 w3", greedy(1))[0].prompt_token_ids == [9, 20, 3]


def test_a_text_that_becomes_a_token_the_model_lacks_is_refused(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["extra"])  # the 257th
    engine = speaking(tmp_path / "model", tokenizer)
    with pytest.raises(InvalidInputError) as error:
        engine.generate("w9 extra", greedy(1))
    assert str(error.value) == (
        "prompt: 256 is not a token of the model (0 to 255); its tokenizer.json belongs to another model: replace it"
    )
    assert not engine.has_unfinished


def test_one_text_is_one_prompt(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    assert len(engine.generate("w9 w20", greedy(1))) == 1


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids_only() -> None:
    engine = engine_for("llama")
    with pytest.raises(UsageError, match=r"text prompt needs a tokenizer\.json next to the model; give token ids$"):
        engine.generate("hello")
    with pytest.raises(UsageError, match=r"stop strings need a tokenizer\.json next to the model; use stop_token_ids$"):
        engine.generate([5, 6], greedy(stop=("x",)))
    output = engine.generate([5, 6], greedy(2))[0]
    assert (output.text, len(output.token_ids)) == ("", 2)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"tokenizer\.json is not a tokenizer \("):
        engine_for(with_files("llama", tmp_path / "model", tokenizer={"model": 3}))


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        (("w11",), " w10 ", 2),
        (("11 w1",), " w10 w", 3),  # ends within the third token
        (("nowhere", "w12", "11 w12"), " w10 w11 ", 3),  # both end here: the first in the list counts, as in vLLM
        (("1",), " w", 1),
        (("w14",), " w10 w11 w12 w13", 4),
    ],
    ids=["a word", "across two tokens", "the first of several", "within the first token", "never"],
)
def test_a_stop_string_ends_a_request_and_is_cut_off(
    stop: tuple[str, ...], text: str, num_tokens: int, tmp_path: Path
) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    script(engine, 10, 11, 12, 13)
    output, updates = stream(engine, [5, 6], greedy(4, stop=stop))
    assert output.text == text
    assert output.token_ids == [10, 11, 12, 13][:num_tokens]
    assert output.finish_reason == ("stop" if stop != ("w14",) else "length")
    assert "".join(update.text for update in updates) == text
    assert [update.token_id for update in updates] == output.token_ids


def test_streaming_holds_back_what_may_become_a_stop_string(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    script(engine, 10, 11, 12, 13)
    updates = stream(engine, [5, 6], greedy(4, stop=("11 w12 w14",)))[1]
    assert [update.text for update in updates] == [" w10", " w", "", "11 w12 w13"]


def test_a_stop_string_that_came_true_is_no_longer_there_to_be_shown(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    script(engine, 10, 11, 12, 13)
    updates = stream(engine, [5, 6], greedy(4, stop=("11 w12 w13",)))[1]
    assert [update.text for update in updates] == [" w10", " w", "", ""]


def test_special_tokens_are_not_text(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    script(engine, 10, 1, 11, 2)
    output = engine.generate([5, 6], greedy(9, ignore_eos=False))[0]
    assert (output.text, output.token_ids, output.finish_reason) == (" w10 w11", [10, 1, 11, 2], "stop")


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_special_token_is_a_stop_string_by_its_name(ignore_eos: bool, tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", word_tokenizer())
    script(engine, 10, 1, 11, 2)
    output = engine.generate([5, 6], greedy(9, stop=("w9", "<s>"), ignore_eos=ignore_eos))[0]
    assert (output.text, output.token_ids, output.finish_reason) == (" w10", [10, 1], "stop")


def test_bytes_that_are_no_letter_end_nothing(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", byte_fallback_tokenizer())
    script(engine, 253, ord("A"), 0xC3, 253, 253)  # 0xC3 begins a letter of two bytes that does not come
    output, updates = stream(engine, [5, 6], greedy(5))
    assert (output.token_ids, output.finish_reason) == ([253, ord("A"), 0xC3, 253, 253], "length")
    assert [update.text for update in updates] == ["b", "A", "", "b", "b"]
    assert output.text == "bAbb"


def test_the_first_word_keeps_the_space_before_it(tmp_path: Path) -> None:
    """As the tokenizer itself decodes prompt and output together, less the prompt."""
    tokenizer = byte_fallback_tokenizer()
    engine = speaking(tmp_path / "model", tokenizer)
    script(engine, 252, 253, 252)
    output, updates = stream(engine, [253, 252], greedy(3))
    assert output.text == " ab a" == tokenizer.decode([253, 252, 252, 253, 252]).removeprefix("b a")
    assert [update.text for update in updates] == [" a", "b", " a"]


def test_a_word_after_a_stray_byte_keeps_its_space(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", byte_fallback_tokenizer())
    script(engine, 252, ord("A"), 0xC3, 252)  # with the letter before it the byte makes a run that is no UTF-8
    assert engine.generate([253], greedy(4))[0].text == " aA a"


@pytest.mark.parametrize("prompt", [[5, 6], [0xC3] * 30], ids=["letters", "no letter at all"])
def test_a_letter_cut_off_at_the_end_is_a_replacement_character(prompt: list[int], tmp_path: Path) -> None:
    """Two of the three bytes of a euro sign: one sign each, as the tokenizer's own decode has them."""
    tokenizer = byte_fallback_tokenizer()
    engine = speaking(tmp_path / "model", tokenizer)
    script(engine, 253, 0xE2, 0x82)
    output, updates = stream(engine, prompt, greedy(3))
    assert output.text == "b\ufffd\ufffd" == tokenizer.decode([253, 0xE2, 0x82])
    assert "".join(update.text for update in updates) == output.text


def test_any_bytes_can_be_streamed(tmp_path: Path) -> None:
    engine = speaking(tmp_path / "model", byte_fallback_tokenizer())
    updates: list[TokenUpdate] = []
    params = [SamplingParams(temperature=3.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(24)]
    outputs = engine.generate([[5, 6]] * 24, params, on_token=updates.append)
    assert len({tuple(output.token_ids) for output in outputs}) == 24
    for output in outputs:
        own = [update for update in updates if update.request_id == output.request_id]
        assert [update.token_id for update in own] == output.token_ids
        assert "".join(update.text for update in own) == output.text


def test_a_letter_of_two_tokens_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    engine = speaking(tmp_path / "model", tokenizer)
    tokens = tokenizer.encode("aéb").ids
    assert len(tokens) == 4  # é is two bytes
    script(engine, *tokens)
    output, updates = stream(engine, "xy", greedy(4))
    assert output.text == "aéb"
    assert [update.text for update in updates] == ["a", "", "é", "b"]


def test_tokens_are_streamed_in_order_as_they_are_sampled() -> None:
    engine = engine_for("llama")
    updates: list[TokenUpdate] = []
    outputs = engine.generate(random_tokens(5, 70), greedy(6), on_token=updates.append)
    for output in outputs:
        seen = [update.token_id for update in updates if update.request_id == output.request_id]
        assert seen == output.token_ids
    # 70 tokens take two steps of 64: the short one is ahead by one token
    assert [update.request_id for update in updates[:3]] == [outputs[0].request_id] * 2 + [outputs[1].request_id]


# --- log-probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_logprobs_are_the_log_softmax_of_transformers(family: str) -> None:
    prompt = random_tokens(23)[0]
    drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=10, ignore_eos=True, logprobs=5)
    output, plain = engine_for(family).generate([prompt, prompt], [drawn, greedy(10)])
    assert plain.logprobs is None
    assert output.logprobs is not None
    theirs = reference_logits(family, prompt + output.token_ids, 10)
    bound = ROUNDING * float(theirs.abs().max())  # the log-sum-exp is off by no more than the logits are
    theirs = theirs.log_softmax(-1)
    for row, token, ours in zip(theirs, output.token_ids, output.logprobs, strict=True):
        assert ours.chosen == pytest.approx(float(row[token]), abs=2 * bound)
        assert [value for _, value in ours.top] == pytest.approx(row.topk(5).values.tolist(), abs=2 * bound)
        assert [float(row[i]) for i, _ in ours.top] == pytest.approx(row.topk(5).values.tolist(), abs=2 * bound)


# --- requests by hand ----------------------------------------------------------------------------------------------


def test_requests_may_be_added_while_others_run() -> None:
    engine = engine_for("llama")
    prompts = random_tokens(9, 14, 4)
    outputs: dict[str, RequestOutput] = {}
    for prompt in prompts:
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=str(len(prompt)))
        outputs |= {output.request_id: output for output in engine.step()}
    outputs |= run_dry(engine)
    assert sorted(outputs) == ["14", "4", "9"]
    assert faults("llama", outputs.values(), NUM_TOKENS) == []


def test_a_request_id_is_taken_while_its_request_runs() -> None:
    engine = engine_for("llama")
    engine.add_request([5, 6], greedy(2), request_id="a")
    with pytest.raises(InvalidInputError, match=r"^a: a request of this id has not finished; choose another id$"):
        engine.add_request([7, 8], greedy(2), request_id="a")
    assert list(run_dry(engine)) == ["a"]
    assert engine.add_request([7, 8], greedy(2), request_id="a") == "a"


def test_an_id_made_up_is_one_that_nobody_has() -> None:
    engine = engine_for("llama")
    for name in ("request-1", "request-3"):
        engine.add_request([5, 6], greedy(2), request_id=name)
    assert [engine.add_request([7, 8], greedy(2)) for _ in range(2)] == ["request-2", "request-4"]
    assert len(run_dry(engine)) == 4


def test_an_id_made_up_is_not_that_of_an_output_still_to_come() -> None:
    engine = engine_for("llama")
    engine.add_request([5, 6], greedy(1), request_id="request-2")
    engine.generate([7, 8], greedy(2))
    name = engine.add_request([7, 8], greedy(2))
    assert sorted(run_dry(engine)) == ["request-2", name]


def test_an_aborted_request_gives_what_it_has_and_leaves_the_others_alone() -> None:
    engine = engine_for("llama", max_num_seqs=2)
    for name, prompt in zip("abc", random_tokens(9, 14, 4), strict=True):
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=name)
    for _ in range(5):
        engine.step()
    running, queued = engine.abort("a"), engine.abort("c")
    assert running is not None
    assert queued is not None
    assert (running.finish_reason, len(running.token_ids)) == ("abort", 5)
    assert (queued.finish_reason, queued.token_ids) == ("abort", [])
    assert engine.abort("a") is None
    assert engine.abort("never there") is None
    outputs = run_dry(engine)
    assert list(outputs) == ["b"]
    assert faults("llama", outputs.values(), NUM_TOKENS) == []
    assert engine.stats().num_used_blocks == 0


def test_a_callback_may_abort_its_own_request() -> None:
    engine = engine_for("llama")
    prompts = random_tokens(9, 14)

    def on_token(update: TokenUpdate) -> None:
        if update.request_id == "request-1" and len(seen) == 4:
            engine.abort(update.request_id)
        seen.append(update.request_id)

    seen: list[str] = []
    first, second = engine.generate(prompts, greedy(NUM_TOKENS), on_token=on_token)
    assert (first.finish_reason, len(first.token_ids)) == ("abort", 3)
    assert faults("llama", [second], NUM_TOKENS) == []


def test_a_request_that_ends_beside_a_generate_is_handed_out_by_the_next_step() -> None:
    engine = engine_for("llama")
    engine.add_request([5, 6, 7], greedy(2), request_id="by hand")
    engine.generate([[8, 9]], greedy(6))
    assert [output.request_id for output in engine.step()] == ["by hand"]
    assert engine.step() == []


def test_a_request_that_has_ended_keeps_the_engine_unfinished_until_its_output_is_fetched() -> None:
    engine = engine_for("llama")
    engine.add_request([5, 6, 7], greedy(2), request_id="by hand")
    engine.generate([[8, 9]], greedy(6))
    assert list(run_dry(engine)) == ["by hand"]
    assert not engine.has_unfinished


def test_an_id_is_free_in_the_callback_of_its_last_token() -> None:
    engine = engine_for("llama")
    prompts = random_tokens(5, 9)
    seen: list[TokenUpdate] = []

    def ask_again(update: TokenUpdate) -> None:
        seen.append(update)
        if len(seen) == 3:
            engine.add_request(prompts[1], greedy(4), request_id="chat")

    engine.add_request(prompts[0], greedy(3), request_id="chat", on_token=ask_again)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [("chat", 3), ("chat", 4)]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_a_generate_leaves_alone_a_request_that_took_its_id_over() -> None:
    engine = engine_for("llama")

    def ask_again(update: TokenUpdate) -> None:
        engine.add_request([7, 8], greedy(3), request_id=update.request_id)

    first = engine.generate([5, 6], greedy(1), on_token=ask_again)[0]
    assert first.prompt_token_ids == [5, 6]
    assert run_dry(engine)[first.request_id].prompt_token_ids == [7, 8]


def test_a_callback_may_step_and_generate() -> None:
    engine = engine_for("llama")
    prompts = random_tokens(9, 14)
    inner: list[RequestOutput] = []

    def nested(update: TokenUpdate) -> None:
        if not inner:
            inner.extend(engine.generate(prompts[1], greedy(NUM_TOKENS)))
        elif engine.has_unfinished:
            inner.extend(engine.step())

    outer = engine.generate(prompts[0], greedy(NUM_TOKENS), on_token=nested)
    assert len(inner) >= 1
    assert faults("llama", [*outer, inner[0]], NUM_TOKENS) == []


def test_a_callback_may_abort_another_request_of_the_same_step() -> None:
    engine = engine_for("llama")
    aborted_outputs: list[RequestOutput | None] = []
    engine.add_request([5, 6], greedy(4), request_id="a", on_token=lambda _: aborted_outputs.append(engine.abort("b")))
    engine.add_request([5, 7], greedy(4), request_id="b")
    assert list(run_dry(engine)) == ["a"]
    assert aborted_outputs[0] is not None
    assert aborted_outputs[0].finish_reason == "abort"
    assert engine.stats().num_used_blocks == 0


def test_the_smaller_priority_runs_first() -> None:
    engine = engine_for("llama", max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("late", 5), ("first", -1), ("second", 0)):
        engine.add_request([5, 6, 7], greedy(2), request_id=name, priority=priority)
    assert list(run_dry(engine)) == ["first", "second", "late"]


def test_prefixes_are_shared_within_a_salt_only() -> None:
    engine = engine_for("llama")
    prompt = random_tokens(33)[0]

    def num_cached(salt: str | None) -> int:
        request_id = engine.add_request(prompt, greedy(NUM_TOKENS), cache_salt=salt)
        output = run_dry(engine)[request_id]
        assert faults("llama", [output], NUM_TOKENS) == []
        return output.num_cached_tokens

    # 8 full blocks of 4 tokens; the last token is always computed
    assert [num_cached(salt) for salt in (None, None, "a", "a", "b", None)] == [0, 32, 0, 32, 0, 32]


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = engine_for("llama", enable_prefix_caching=False)
    outputs = [engine.generate(random_tokens(33)[0], greedy(2))[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


# --- figures -------------------------------------------------------------------------------------------------------


def test_stats_count_what_was_asked_and_given() -> None:
    engine = engine_for("llama")
    seen: list[Stats] = []
    engine.on_step = seen.append
    prompts = random_tokens(33, 9)
    engine.generate(prompts, greedy(5))
    engine.generate(prompts[0], greedy(3))
    stats = engine.stats()
    # 32 tokens of the first prompt are found by the third request
    assert (stats.prompt_tokens, stats.num_cached_tokens) == (33 + 9 + 1, 32)
    assert stats.generation_tokens == 5 + 5 + 3
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (33 + 9 + 33, 32)
    assert (stats.num_steps, len(seen)) == (5 + 3, 8)
    assert (stats.kv_cache_usage_perc, stats.num_used_blocks, stats.num_kv_tokens) == (0, 0, 0)
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_preemptions) == (0, 0, 0)
    assert [step.generation_tokens for step in seen] == [2, 4, 6, 8, 10, 11, 12, 13]


def test_stats_show_the_pool_while_requests_run() -> None:
    engine = engine_for("llama", num_blocks=21, max_num_seqs=1)
    engine.add_request(random_tokens(17)[0], greedy(8))
    engine.add_request(random_tokens(9)[0], greedy(8))
    engine.step()
    stats = engine.stats()
    # 17 tokens lie in 5 blocks of the 20 that can be used; the second request waits
    assert (stats.num_used_blocks, stats.kv_cache_usage_perc, stats.num_kv_tokens) == (5, 0.25, 17)
    assert stats.num_cached_blocks == 4  # of 17 tokens in blocks of 4, the full ones
    assert stats.num_filled_slots == 17  # of 5 x 4
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)


def test_a_shared_slot_is_filled_once_and_one_that_a_window_has_given_back_is_not() -> None:
    shared = engine_for("llama", num_blocks=41)
    prompts = [[*random_tokens(32)[0], *ending] for ending in ([5], [6, 7])]
    shared.generate(prompts[0], greedy(1))  # leaves 8 full blocks behind
    for prompt in prompts:
        shared.add_request(prompt, greedy(8))
    shared.step()
    stats = shared.stats()
    # 8 shared blocks and one more each: 10 x 4 slots, 32 shared tokens and 1 and 2 of their own
    assert (stats.num_used_blocks, stats.num_filled_slots, stats.num_kv_tokens) == (10, 35, 33 + 34)
    window = engine_for("qwen2_window", num_blocks=200)
    window.add_request(random_tokens(60)[0], greedy(8))
    for _ in range(3):
        window.step()
    stats = window.stats()
    num_blocks = sum(block != NULL_BLOCK for table in window.scheduler.running[0].block_table for block in table)
    num_groups = len(window.runner.groups)
    assert stats.num_used_blocks == num_blocks < num_groups * 16  # all 62 tokens would be 16 blocks of each group
    assert stats.num_filled_slots == num_blocks * 4 - num_groups * 2  # each group's last block has 2 of 4


@pytest.mark.parametrize(("reserve", "num_running"), [(True, 1), (False, 2)])
def test_a_prompt_is_admitted_when_all_of_it_fits_or_at_will_when_its_first_part_does(
    reserve: bool, num_running: int
) -> None:
    engine = engine_for("llama", num_blocks=21, max_num_batched_tokens=56, reserve_full_prompt=reserve)
    prompts = random_tokens(48, 40)  # 12 and 10 of the 20 blocks; 8 tokens of the second fit into the first step
    for prompt in prompts:
        engine.add_request(prompt, greedy(6))
    engine.step()
    assert engine.stats().num_requests_running == num_running
    assert faults("llama", run_dry(engine).values(), 6) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_bytes_of_transformers_parameters(family: str) -> None:
    model = reference(family)
    parameters = {id(p): p for p in model.parameters()}.values()  # tied ones once; 256 rows need no padding
    expected = sum(p.numel() for p in parameters)
    expected += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert engine_for(family).memory_report().weights == 4 * expected


def test_memory_is_what_the_tensors_take_and_within_the_budget() -> None:
    engine = engine_for("llama", num_blocks=None, memory_limit=4_000_000, max_num_seqs=64)
    report = engine.memory_report()
    assert report.kv_cache == report.num_blocks * report.block_bytes == engine.runner.kv.num_bytes
    assert report.block_bytes == 3 * 2 * 4 * 2 * 16 * 4  # layers, K and V, tokens, KV heads, head_dim, bytes
    assert (report.total, report.budget) == (4_000_000, 3_600_000)
    used = report.weights + report.buffers + report.activations + report.kv_cache
    assert report.budget - report.block_bytes < used <= report.budget
    assert report.buffers == 96 * 16 * 4  # cos and sin of 96 positions, 8 angles each
    assert (report.cuda_graphs, report.non_torch) == (0, 0)


@pytest.mark.parametrize(
    "less", [{"memory_limit": 3_000_000}, {"gpu_memory_utilization": 0.675}], ids=["memory_limit", "utilization"]
)
def test_less_memory_is_fewer_blocks(less: dict[str, Any]) -> None:
    options = {"num_blocks": None, "max_num_seqs": 64, "memory_limit": 4_000_000}
    more, fewer = (engine_for("llama", **{**options, **changes}).memory_report() for changes in ({}, less))
    assert fewer.budget == 2_700_000  # 900,000 less, either way
    assert 0 <= more.num_blocks - fewer.num_blocks - 900_000 // more.block_bytes <= 1


def test_activations_grow_with_the_tokens_of_a_step() -> None:
    small, large = (engine_for("llama", max_num_batched_tokens=n).memory_report() for n in (32, 64))
    assert small.activations < large.activations <= 4 * small.activations


def test_a_random_model_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved_model("llama") / "config.json").read_text())
    first, same, other = (engine_for(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    tokens = [engine.generate([5, 6, 7], greedy(8))[0].token_ids for engine in (first, same, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    spec = Engine(first.spec, EngineConfig(device="cpu", dtype="float32", load_format="dummy", num_blocks=10)).spec
    assert spec is first.spec


def test_a_spec_alone_has_no_weights() -> None:
    with pytest.raises(UsageError, match=r"^load_format: a ModelSpec has no weights; give a directory"):
        Engine(engine_for("llama").spec, EngineConfig(device="cpu"))


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [
        ("block_size", 0, "a whole number of at least 1 (0)"),
        ("max_num_seqs", -1, "a whole number of at least 1 (-1)"),
        ("max_num_batched_tokens", 2.5, "a whole number of at least 1 (2.5)"),
        ("tensor_parallel_size", True, "a whole number of at least 1 (True)"),
        ("num_blocks", 1, "at least 2: block 0 holds nothing (1)"),
        ("max_model_len", 0, "a whole number of at least 1 (0)"),
        ("memory_limit", -5, "a whole number of at least 1 (-5)"),
        ("gpu_memory_utilization", 1.01, "above 0 and at most 1 (1.01)"),
        ("gpu_memory_utilization", float("nan"), "a finite number (nan)"),
        ("gpu_memory_utilization", "0.9", "a finite number ('0.9')"),
        ("kv_scale", 0, "above 0 (0)"),
        ("kv_scale", float("inf"), "a finite number (inf)"),
        ("watermark", 1, "at least 0 and below 1 (1)"),
        ("long_prefill_token_threshold", -1, "a whole number of at least 0 (-1)"),
        ("seed", None, "a whole number (None)"),
        ("enforce_eager", "no", "True or False ('no')"),
        ("enable_prefix_caching", 1, "True or False (1)"),
        ("reserve_full_prompt", None, "True or False (None)"),
        ("async_scheduling", 1, "True, False or None (1)"),
        ("max_loras", -1, "a whole number of at least 0 (-1)"),
        ("max_lora_rank", 5, "one of 1, 8, 16, 32, 64, 128, 256, 320, 512 (5)"),
        ("fully_sharded_loras", None, "True or False (None)"),
        ("speculative_config", "ngram", "a SpeculativeConfig or None ('ngram')"),
        ("dtype", "int8", "one of auto, float32, bfloat16, float16 ('int8')"),
        ("kv_cache_dtype", "int4", "one of auto, float32, bfloat16, float16, fp8, fp8_e4m3 ('int4')"),
        ("allocator", "slab", "one of paged, contiguous, static ('slab')"),
        ("backend", "cuda", "one of auto, triton, torch ('cuda')"),
        ("load_format", "pt", "one of auto, dummy ('pt')"),
        ("scheduling_policy", "lifo", "one of fcfs, priority ('lifo')"),
        ("kv_offloading_size", 0, "a number of GiB above 0, or None (0)"),
        ("kv_offloading_disk_size", -1.0, "a number of GiB above 0, or None (-1.0)"),
        ("kv_offloading_dir", 5, "a path (5)"),
        ("pipeline_parallel_size", 0, "a whole number of at least 1 (0)"),
        ("pp_layer_partition", "20;22", "numbers of layers, such as \"20,22\", or None ('20;22')"),
    ],
)
def test_a_bad_engine_option_is_named_with_what_it_must_be(name: str, value: Any, need: str) -> None:
    with pytest.raises(UsageError) as error:
        EngineConfig(**{name: value})
    assert str(error.value) == f"EngineConfig: {name} must be {need}"


def test_a_step_too_small_for_a_token_of_each_sequence_is_refused_as_vllm_refuses_it() -> None:
    """vLLM 0.33 config/scheduler.py: with fewer tokens than sequences the last ones would wait for the first to end."""
    with pytest.raises(UsageError) as error:
        EngineConfig(max_num_batched_tokens=8, max_num_seqs=16)
    assert str(error.value) == (
        "EngineConfig: max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16); "
        "raise it, or lower max_num_seqs"
    )
    assert EngineConfig(max_num_batched_tokens=16, max_num_seqs=16).num_seqs == 16
    assert [EngineConfig(max_num_batched_tokens=n).num_seqs for n in (64, 2048)] == [64, 256]  # vLLM's arg_utils.py


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [
        ("temperature", -0.1, "at least 0 (-0.1)"),
        ("temperature", float("inf"), "a finite number (inf)"),
        ("top_k", -2, "a whole number of at least -1 (-2)"),
        ("top_k", 1.5, "a whole number of at least -1 (1.5)"),
        ("top_k", True, "a whole number of at least -1 (True)"),
        ("top_p", 0, "above 0 and at most 1 (0)"),
        ("min_p", 1.5, "from 0 to 1 (1.5)"),
        ("max_tokens", 0, "a whole number of at least 1 (0)"),
        ("seed", 1.5, "a whole number (1.5)"),
        ("stop", ("a", ""), "texts that are not empty (('a', ''))"),
        ("stop", 5, "texts that are not empty (5)"),
        ("stop_token_ids", ("a",), "token ids (('a',))"),
        ("stop_token_ids", 5, "token ids (5)"),
        ("logprobs", 1025, "from 0 to 1024 (1025)"),
        ("repetition_penalty", 0, "above 0 (0)"),
        ("presence_penalty", 2.5, "from -2 to 2 (2.5)"),
        ("frequency_penalty", "1", "a finite number ('1')"),
    ],
)
def test_a_bad_sampling_option_is_named_with_what_it_must_be(name: str, value: Any, need: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"SamplingParams: {name} must be {need}"


def test_every_engine_option_has_a_bad_value_here() -> None:
    table = test_a_bad_engine_option_is_named_with_what_it_must_be.pytestmark[0].args[1]
    # Which devices there are is the machine's business: tests/engine/test_engine_faults.py.
    assert {field.name for field in fields(EngineConfig)} - {name for name, *_ in table} == {"device"}


PLAIN = """
import sys
import engine.scheduler, engine.block_manager, engine.contiguous, engine.config, engine.sequence
print(*sorted({"torch", "numpy", "triton", "tokenizers"} & set(sys.modules)))
"""


def test_who_runs_next_is_decided_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == ""
