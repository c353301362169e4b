"""Models that embed, rank or classify, against vLLM 0.33's own loading and planning code."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.planning.plan import Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles

CASES = [json.loads(line) for line in (Path(__file__).parents[2] / "facts" / "pooling.jsonl").read_text().splitlines()]


def request(inputs: dict[str, Any]) -> Request:
    import shlex

    command = read_command(shlex.join(oracles.serve_words(inputs)))
    spec = catalog.load(inputs["model"])
    spec = replace(spec, architecture=inputs.get("architecture", spec.architecture))
    return Request(spec, gpu("h100-80g"), EngineArgs(**command.args))


def name(case: dict[str, Any]) -> str:
    inputs = case["inputs"]
    words = [f"{key}={value}" for key, value in (inputs.get("engine_args") or {}).items()]
    return " ".join([inputs["model"], inputs.get("architecture", ""), f"tp{inputs['tp']}", *words])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_weights_and_pools_equal_the_servers(case: dict[str, Any]) -> None:
    question = request(case["inputs"])
    wrong = [text for expected in case["results"] for text in oracles.result_differences(question, expected)]
    if "resolved" in case:
        settings, resolved = plan(question).settings, case["resolved"]
        assert settings.max_num_batched_tokens == resolved["max_num_batched_tokens"]
        assert settings.prefix_caching == resolved["enable_prefix_caching"]
    assert [*wrong, *oracles.weight_differences(question, case["weights"])] == []


def pooling(model: str, engine: str = "vllm", **args: Any) -> Request:
    flags = EngineArgs(runner="pooling", max_model_len=4096, **args)
    return Request(catalog.load(model), gpu("h100-80g"), flags, parse_engine(engine))


def test_an_untied_head_is_not_loaded_and_a_note_says_what_was_not_compared() -> None:
    """Llama-3.1-8B's head: 128,256 x 4,096 in bfloat16."""
    with_head = plan(replace(pooling("llama-3.1-8b"), args=EngineArgs(max_model_len=4096)))
    without = plan(pooling("llama-3.1-8b"))
    assert with_head.memory.weights - without.memory.weights == 128256 * 4096 * 2
    assert any("compared with no pooling server" in note for note in without.notes)
    assert plan(without.request).memory == without.memory  # planned again, it is the same


@pytest.mark.parametrize(
    ("words", "runner", "convert"),
    [
        ("--task embed", "pooling", "embed"), ("--task embedding", "pooling", "embed"),
        ("--task score", "pooling", "classify"), ("--task classify", "pooling", "classify"),
        ("--task generate", "generate", None), ("--runner pooling", "pooling", None),
        ("--runner pooling --convert embed", "pooling", "embed"), ("--convert=classify", None, "classify"),
    ],
)  # fmt: skip
def test_flags_of_old_and_new_releases_are_read(words: str, runner: str | None, convert: str | None) -> None:
    args = read_command(f"vllm serve Qwen/Qwen3-8B {words}").args
    assert (args.get("runner"), args.get("convert")) == (runner, convert)


@pytest.mark.parametrize(
    ("engine", "words"),
    [("vllm@0.33.0", ["--runner", "pooling", "--convert", "embed"]), ("vllm@0.9.2", ["--task", "embed"])],
)
def test_the_printed_command_pools_too(engine: str, words: list[str]) -> None:
    command = serve_command(plan(pooling("qwen3-8b", engine, convert="embed")))
    assert " ".join(words) in " ".join(command)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "mamba-2.8b", "gpt-oss-20b"])
def test_what_was_not_compared_is_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match="--runner pooling"):
        plan(pooling(model))


def test_a_task_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="'reward' is not modeled"):
        read_command("vllm serve x --task reward")
    with pytest.raises(UsageError, match="nothing to draft"):
        plan(pooling("llama-3.1-8b", speculative_method="ngram", num_speculative_tokens=3))


def test_a_model_that_scores_steps_of_a_proof_takes_whole_prompts() -> None:
    """vLLM 0.33 for Qwen2ForProcessRewardModel (STEP): 131,072 batched tokens and no prefix cache, at its context."""
    spec = replace(catalog.load("qwen2.5-7b"), architecture="Qwen2ForProcessRewardModel")
    answer = plan(Request(spec, gpu("h100-80g"), EngineArgs()))
    assert (answer.settings.max_num_batched_tokens, answer.settings.prefix_caching) == (131_072, False)
    command = serve_command(answer)
    assert "--no-enable-chunked-prefill" in command
    assert "--no-enable-prefix-caching" in command


@pytest.mark.parametrize("kind", ["nomic_bert", "new", "distilbert", "deberta-v2"])
@pytest.mark.parametrize("assume_dense", [False, True])
def test_an_encoder_is_refused_by_name_and_never_taken_for_a_decoder(kind: str, assume_dense: bool) -> None:
    """BERT's class defaults: vLLM 0.33 plans no KV cache for such, and as a decoder it would get one."""
    config = {
        "model_type": kind, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' is an encoder that kvplan has no reader for"):
        hf_config.read_config(config, "config.json", "x", assume_dense=assume_dense)


@pytest.mark.parametrize(
    ("keys", "num_labels"),
    [
        ({}, 2),  # transformers' default
        ({"id2label": {str(label): f"LABEL_{label}" for label in range(5)}}, 5),
        ({"num_labels": 3}, 3),
        ({"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}, 1),
        ({"classifier_from_token": ["0", "1", "2"], "method": "no_post_processing"}, 3),
    ],
)
def test_a_classifier_has_the_labels_of_its_config(tmp_path: Path, keys: dict[str, Any], num_labels: int) -> None:
    """The score layer of vLLM's adapters.py: hidden size x labels in float32, on the last stage."""
    config = {**catalog.expand(catalog.facts("qwen3-0.6b")["config"]), **keys}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"], "tie_word_embeddings": True})
    )
    spec = hf_config.load_spec(tmp_path)
    flags = EngineArgs(max_model_len=4096)
    classifies = plan(Request(spec, gpu("h100-80g"), flags)).memory.weights
    embeds = plan(Request(spec, gpu("h100-80g"), replace(flags, runner="pooling", convert="embed"))).memory.weights
    assert classifies - embeds == num_labels * spec.hidden_size * 4
