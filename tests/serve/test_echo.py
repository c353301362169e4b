"""Prompts that are echoed, as lm-eval scores them: their log-probabilities are transformers'."""

from collections.abc import Iterator
from math import isclose
from typing import Any

import pytest

from engine.draft_rules import SpeculativeConfig
from kvplan.serve.real import cache_config
from kvplan.serve.text import stand_in
from tests.engine.test_prompt_logprobs import expected
from tests.support.serving import Serving, serving, twin
from tests.support.small_engines import engine_for, random_tokens

TEXT = "/v1/completions"
PROMPT, OTHER = random_tokens(20, 12)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    engine = engine_for("llama", max_num_batched_tokens=16)
    engine.tokenizer = stand_in(256)
    with serving(engine, cache_config(engine)) as running:
        yield running


def test_what_lm_eval_asks_is_the_models_own(server: Serving) -> None:
    """A prompt alone, with a log-probability for each token, twice: the second finds no less for the prefix cache."""
    truth = expected("llama", PROMPT)
    for _ in range(2):
        (choice,) = server.post(TEXT, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, temperature=0)["choices"]
        rows = choice["logprobs"]
        texts = stand_in(256)
        assert choice["text"] == texts.decode(PROMPT, skip_special_tokens=False)
        assert rows["tokens"] == [texts.decode([token], skip_special_tokens=False) for token in PROMPT]
        assert rows["token_logprobs"][0] is rows["top_logprobs"][0] is None
        for place, value in enumerate(rows["token_logprobs"][1:]):
            assert isclose(value, truth[place, PROMPT[place + 1]], abs_tol=1e-3)
            assert isclose(max(rows["top_logprobs"][place + 1].values()), truth[place].max(), abs_tol=1e-3)
        lens = [len(text) for text in rows["tokens"]]
        assert rows["text_offset"] == [sum(lens[:place]) for place in range(len(lens))]


def test_an_answer_follows_its_prompt_whole_or_streamed(server: Serving) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, OTHER], "max_tokens": 5, "logprobs": 0, "temperature": 0, "n": 2}
    plain = server.post(TEXT, **body)["choices"]
    echoed = server.post(TEXT, **body, echo=True)
    texts = [stand_in(256).decode(prompt, skip_special_tokens=False) for prompt in (PROMPT, PROMPT, OTHER, OTHER)]
    assert [choice["text"] for choice in echoed["choices"]] == [
        text + choice["text"] for text, choice in zip(texts, plain, strict=True)
    ]
    assert [len(choice["logprobs"]["tokens"]) for choice in echoed["choices"]] == [25, 25, 17, 17]
    assert echoed["usage"]["prompt_tokens"] == 32
    parts: dict[int, dict[str, Any]] = {}
    for event in server.stream(TEXT, **body, echo=True):
        for choice in event["choices"]:
            part = parts.setdefault(choice["index"], {"text": "", "tokens": []})
            part["text"] += choice["text"]
            part["tokens"] += choice["logprobs"]["tokens"]
    assert [parts[choice["index"]]["text"] for choice in echoed["choices"]] == [c["text"] for c in echoed["choices"]]
    whole = [choice["logprobs"]["tokens"] for choice in echoed["choices"]]
    assert [parts[choice["index"]]["tokens"] for choice in echoed["choices"]] == whole


def test_a_text_is_echoed_as_it_came_without_log_probabilities(server: Serving) -> None:
    (choice,) = server.post(TEXT, prompt="one two", max_tokens=3, echo=True, temperature=0)["choices"]
    assert choice["text"].startswith("one two")
    assert choice["logprobs"] is None


def test_an_engine_with_speculation_refuses_in_the_clients_words() -> None:
    engine = engine_for("llama", speculative_config=SpeculativeConfig("ngram", 2))
    engine.tokenizer = stand_in(256)
    with serving(engine, cache_config(engine)) as server:
        status, error = server.refusal(TEXT, {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1})
        assert (status, error["message"]) == (
            400,
            "logprobs with echo cannot be combined with speculation; use only one",
        )


def test_a_twin_echoes_too() -> None:
    with serving(twin()) as running:
        (choice,) = running.post(TEXT, prompt="one two", max_tokens=0, echo=True, logprobs=1)["choices"]
        assert choice["text"] == "one two"
        assert choice["logprobs"]["token_logprobs"][1:] == [0.0] * (len(choice["logprobs"]["tokens"]) - 1)
