"""The same face over the engine: tokens and log-probabilities are the engine's own, and nothing is left behind."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.detokenizer import Detokenizer
from engine.draft_rules import SpeculativeConfig
from kvplan.serve.real import cache_config
from kvplan.serve.text import stand_in
from tests.serve.test_server import leave_open, until
from tests.support.serving import Serving, serving
from tests.support.small_engines import engine_for, greedy, random_tokens

TEXT = "/v1/completions"
PROMPTS = random_tokens(5, 17, 30)


def small_engine(**changes: Any) -> Any:
    engine = engine_for("llama", **changes)
    engine.tokenizer = stand_in(256)
    return engine


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    engine = small_engine()
    with serving(engine, cache_config(engine)) as running:
        yield running


def test_greedy_tokens_are_the_engines(server: Serving) -> None:
    outputs = small_engine().generate(PROMPTS, greedy(12, logprobs=3))
    answer = server.post(TEXT, prompt=PROMPTS, max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
    for choice, output in zip(answer["choices"], outputs, strict=True):
        assert choice["text"] == output.text
        assert output.logprobs is not None
        chosen = [row.chosen for row in output.logprobs]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-4)


def test_texts_are_made_in_a_thread_of_their_own_unless_a_stop_depends_on_them(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in pieces they are the engine's, which makes them with the tokens; bytes that are no letter too."""
    names: list[str] = []
    step = Detokenizer.step

    def noted(detokenizer: Detokenizer, token: int) -> str:
        names.append(threading.current_thread().name)
        return step(detokenizer, token)

    params = [SamplingParams(max_tokens=20, seed=n, temperature=2, ignore_eos=True) for n in range(6)]
    texts = [output.text for output in small_engine().generate([PROMPTS[0]] * 6, params)]
    assert any("\ufffd" in text for text in texts)
    monkeypatch.setattr(Detokenizer, "step", noted)
    for seed, text in enumerate(texts):
        body = {"prompt": PROMPTS[0], "max_tokens": 20, "seed": seed, "temperature": 2, "ignore_eos": True}
        assert server.post(TEXT, **body)["choices"][0]["text"] == text
        assert "".join(event["choices"][0]["text"] for event in server.stream(TEXT, **body)) == text
    assert (set(names), len(names)) == ({"kvplan-texts"}, 240)
    server.post(TEXT, **body, stop=["no such text"])
    assert names[240:] == ["kvplan-engine"] * 20


def test_a_tokenizer_that_fails_ends_its_request_alone(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Detokenizer.step

    def failing(detokenizer: Detokenizer, token: int) -> str:
        if len(detokenizer._token_ids) == 8:
            raise ValueError(token)
        return step(detokenizer, token)

    monkeypatch.setattr(Detokenizer, "step", failing)
    assert server.refusal(TEXT, {"prompt": [5, 6], "max_tokens": 9, "ignore_eos": True})[0] == 500
    assert server.post(TEXT, prompt=[5, 6], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_seed_draws_what_the_engine_draws(server: Serving) -> None:
    params = [SamplingParams(max_tokens=8, seed=11 + child, ignore_eos=True) for child in range(3)]
    outputs = small_engine().generate([PROMPTS[0]] * 3, params)
    answer = server.post(TEXT, prompt=PROMPTS[0], max_tokens=8, seed=11, n=3, ignore_eos=True)
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]


def test_a_bias_bans_what_would_come_and_log_probabilities_stay_the_models(server: Serving) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    plain = small_engine().generate([PROMPTS[0]], greedy(1, logprobs=2))[0]
    assert plain.logprobs is not None
    (best, _), (second, value) = plain.logprobs[0].top
    output = small_engine().generate([PROMPTS[0]], greedy(1, logit_bias={best: -100}))[0]
    assert output.token_ids == [second]
    choice = server.post(TEXT, **body, logit_bias={str(best): -100})["choices"][0]
    assert choice["text"] == output.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([value], abs=1e-4)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 1, "ignore_eos": True}
    forced = server.post("/v1/chat/completions", **chat, logit_bias={"97": 100})["choices"][0]
    assert forced["message"]["content"] == server.post("/detokenize", tokens=[97] * 4)["prompt"]
    events = server.stream(TEXT, prompt=PROMPTS[1], max_tokens=3, logit_bias={"97": 100}, ignore_eos=True)
    assert "".join(event["choices"][0]["text"] for event in events) == forced["message"]["content"][:3]


def test_a_bias_of_no_token_of_the_model_is_refused(server: Serving) -> None:
    status, error = server.refusal(TEXT, {"prompt": PROMPTS[0], "logit_bias": {"123456": 1}})
    assert status == 400
    assert "logit_bias: 123456 is not a token of the model" in error["message"]


def test_a_stop_string_never_shows(server: Serving) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = server.post(TEXT, **body)["choices"][0]["text"]
    stop = text[7:9]
    events = server.stream(TEXT, **body, stop=[stop])
    assert "".join(event["choices"][0]["text"] for event in events) == text[: text.index(stop)]
    (last,) = events[-1]["choices"]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_64_streams_at_once() -> None:
    engine = small_engine(max_num_seqs=64, num_blocks=900)
    prompts = random_tokens(*range(4, 68), seed=3)
    expected = [output.text for output in small_engine().generate(prompts, greedy(10))]
    with serving(engine, cache_config(engine)) as server:
        texts: dict[int, str] = {}

        def ask(number: int) -> None:
            events = server.stream(TEXT, prompt=prompts[number], max_tokens=10, temperature=0, ignore_eos=True)
            texts[number] = "".join(event["choices"][0]["text"] for event in events)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [texts[number] for number in range(64)] == expected
        assert engine.scheduler.num_used_blocks == 0
        assert server.metric("vllm:generation_tokens_total") == 640


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_blocks_back(stream: bool) -> None:
    engine = small_engine(max_model_len=500, num_blocks=400)
    with serving(engine, cache_config(engine)) as server:
        body = {"prompt": PROMPTS[2], "max_tokens": 400, "stream": stream, "ignore_eos": True}
        raw = leave_open(server, body)
        until(lambda: engine.scheduler.num_used_blocks > 0)
        raw.close()
        until(lambda: not engine.has_unfinished)
        engine.scheduler.check_invariants()
        assert engine.scheduler.num_used_blocks == 0


def test_a_request_that_the_pool_cannot_hold_is_told_the_servers_option() -> None:
    """10 blocks of 4 tokens, one of them the null block: 36 tokens."""
    engine = small_engine(num_blocks=10)
    with serving(engine, cache_config(engine)) as server:
        status, page = server.ask("POST", TEXT, {"prompt": random_tokens(60)[0], "max_tokens": 2})
    assert (status, "or raise --num-gpu-blocks-override" in page.decode()) == (500, True), page


def test_a_directory_brings_its_tokenizer_and_template(tmp_path: Path) -> None:
    from kvplan.serve.chat import template_of

    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": {"content": "<s>"}})
    )
    assert template_of(tmp_path).prompt([{"role": "user", "content": "Hi"}], {}) == "<s>Hi"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert template_of(tmp_path).prompt([{"role": "user", "content": "Hi"}], {}) == "1"


def test_speculation_gives_the_same_text_and_is_counted_as_vllm_counts_it() -> None:
    """Names, labels and types are those of vLLM 0.33 v1/spec_decode/metrics.py."""
    config = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
    prompts = [prompt * 2 for prompt in PROMPTS]
    body = {"prompt": prompts, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    texts = [output.text for output in small_engine().generate(prompts, greedy(24))]
    engine = small_engine(speculative_config=config)
    with serving(engine, cache_config(engine)) as server:
        assert [choice["text"] for choice in server.post(TEXT, **body)["choices"]] == texts
        chunks = server.stream(TEXT, **body | {"prompt": prompts[0]})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == texts[0]
        stats, page = engine.draft_stats(), server.metrics()
        assert stats is not None
        assert stats.num_accepted_tokens > 0
        for name, value in (
            ("drafts", stats.num_drafts),
            ("draft_tokens", stats.num_draft_tokens),
            ("accepted_tokens", stats.num_accepted_tokens),
            ("accepted_tokens_per_pos", stats.num_accepted_tokens),  # the sum over places
        ):
            assert server.metric(f"vllm:spec_decode_num_{name}_total") == value
            assert f"# TYPE vllm:spec_decode_num_{name}_total counter" in page
        first = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name='
        line = next(line for line in page.splitlines() if line.startswith(first) and 'position="0"' in line)
        assert float(line.rpartition(" ")[2]) == stats.accepted_per_position[0]
        assert server.metric("vllm:generation_tokens_total") == 24 * 4
    assert "spec_decode" not in plain_page()


def plain_page() -> str:
    with serving(small_engine()) as server:
        return server.metrics()
