"""`kvplan recommend` over several servers, and over a server's file types."""

import json
from typing import Any

import pytest

from kvplan.servers.llamacpp.changes import TYPES
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture


def offers(run: Run, *words: str) -> dict[str, Any]:
    return dict(json.loads(run("recommend", *words, "-q", "--format", "json").out))


def estimated(run: Run, *words: str) -> dict[str, Any]:
    return dict(json.loads(run("estimate", *words, "-q", "--format", "json").out))


ONE = ("qwen3-14b", "--users", "1", "--gpu", "rtx-3060-12g", "--ctx", "8k")


def test_the_recommended_type_is_the_largest_whose_layers_are_all_on_the_gpu(run: Run) -> None:
    doc = offers(run, *ONE, "--engine", "llama.cpp")
    whole = [offer["serves"].partition(" ")[0] for offer in doc["offers"] if offer["holds"]]
    larger = TYPES[TYPES.index(whole[0]) - 1]
    plans = {
        kind: estimated(
            run, "qwen3-14b", "--engine", "llama.cpp", "--gpu", "rtx-3060-12g", "--ctx", "8k", "--parallel", "1",
            "--quant", kind,
        )["slots"]
        for kind in (whole[0], larger)
    }  # fmt: skip
    assert plans[whole[0]]["gpu_layers"] == plans[whole[0]]["num_layers"]
    assert plans[larger]["gpu_layers"] < plans[larger]["num_layers"]


def test_the_context_without_a_stated_one_is_what_the_server_chooses(run: Run) -> None:
    offer = next(offer for offer in offers(run, *ONE, "--engine", "llama.cpp")["offers"] if offer["holds"])
    kind = offer["serves"].partition(" ")[0]
    words = ("qwen3-14b", "--engine", "llama.cpp", "--gpu", "rtx-3060-12g", "--parallel", "1", "--quant", kind)
    assert offer["context"] == estimated(run, *words)["slots"]["cells"]


def test_each_of_several_users_has_a_cache_of_its_own(run: Run) -> None:
    doc = offers(run, "qwen3-8b", "--users", "3", "--gpu", "rtx-4090", "--ctx", "4k", "--engine", "llama.cpp")
    (command, *_) = [offer["command"] for offer in doc["offers"] if offer["holds"]]
    assert "--ctx-size 12288 --parallel 3" in command


def test_every_server_is_asked_and_a_printed_command_is_what_its_row_says(run: Run) -> None:
    doc = offers(run, "qwen3-8b", "--users", "2", "--gpu", "rtx-4090", "--ctx", "8k", "--engine", "any")
    assert dict.fromkeys(offer["server"] for offer in doc["offers"]) == dict.fromkeys(
        ("vLLM", "SGLang", "llama.cpp", "Ollama")
    )
    for offer in doc["offers"]:
        if offer["holds"]:
            plan = json.loads(
                run(
                    "estimate",
                    "qwen3-8b",
                    "-q",
                    "--from-command",
                    offer["command"],
                    "--gpu",
                    "rtx-4090",
                    "--format",
                    "json",
                ).out
            )
            assert plan["fits"]
            assert plan["concurrency"]["users"] >= 2


def test_a_quantized_checkpoint_of_the_catalog_is_offered_where_the_models_own_does_not_fit(run: Run) -> None:
    doc = offers(run, "qwen3-32b", "--users", "1", "--gpu", "rtx-5090", "--ctx", "8k", "--engine", "vllm,llama.cpp")
    assert doc["offers"][0]["serves"] == "qwen3-32b-awq"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--users", "1", "--engine", "any,foo"), "--engine 'any' is not a supported server"),
        (("--users", "1", "--engine", "vllm,foo"), "--engine 'foo' is not a supported server"),
        (("--engine", "any"), "--users: missing"),
        (("--users", "1", "--engine", "any", "--output", "k8s"), "--output writes the manifest of one server"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(run: Run, words: tuple[str, ...], text: str) -> None:
    ran = run("recommend", "qwen3-8b", "--gpu", "rtx-4090", *words)
    assert ran.code == 2
    assert text in ran.err


@pytest.mark.parametrize(("engine", "flag"), [("llama.cpp", "--ctx-size 24576"), ("ollama", "CONTEXT_LENGTH=8192 ")])
def test_the_answer_counts_the_tokens_of_one_user(run: Run, engine: str, flag: str) -> None:
    """llama-server's -c is of all slots; Ollama multiplies its own by the slots before it starts one."""
    doc = offers(run, "llama-3.1-8b", "--users", "3", "--gpu", "l4", "--ctx", "8k", "--engine", engine)
    assert doc["max_model_len"] == 8192
    assert "3 users of llama-3.1-8b at 8,192 tokens each" in doc["answer"]
    assert flag in doc["offers"][0]["command"]
