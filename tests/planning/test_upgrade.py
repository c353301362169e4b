"""What another release does to a server: effects that add up, and the signs that public threads report."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.documents.schema import document_schema
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.attribute import figures_of
from kvplan.planning.plan import Request, plan
from kvplan.planning.upgrade import effects, steps
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run, run

__all__ = ["run"]


def answer(run: Run, *words: str) -> dict[str, Any]:
    server: dict[str, Any] = run("upgrade", *words, "-q", "--format", "json").json["servers"][0]
    return server


def ratio(server: dict[str, Any], path: str) -> float:
    row = next(row for row in server["rows"] if row["name"] == path)
    return float(row["new"]) / float(row["old"])


GEMMA = ("gemma-4-31b", "--gpu", "a100-80g", "--gpu-memory-utilization", "0.9", "--weights-bytes", "21GB")
LLAMA_FP8 = ("llama-3.1-8b", "--quantization", "fp8", "--gpu", "h100-80g", "--ctx", "4k")


# What posters saw after an upgrade; their GPUs, utilizations and contexts as far as they say them.
@pytest.mark.parametrize(
    ("words", "old", "new", "path", "low", "high"),
    [
        # vllm-project/vllm#43308: 55k -> 525k tokens, 9.5 times, of gemma-4-31B AWQ on an A100 80GB at 0.9.
        (GEMMA, "0.20.0", "0.21", "kv.tokens", 8.0, 12.0),
        # vllm-project/vllm#49878: a request of Gemma 4 takes about 40% more KV cache.
        (("gemma-4-31b", "--gpu", "a100-80g", "--ctx", "32k"), "0.25.1", "0.26", "kv.bytes_per_request", 1.3, 1.5),
        # NVIDIA-NeMo/RL#3280: at the same utilization 0.25 has a larger cache than 0.20, by GiB.
        ((*LLAMA_FP8, "--gpu-memory-utilization", "0.5"), "0.20", "0.25.1", "memory.kv_cache", 1.03, 1.5),
        # vllm-project/vllm#15617: 0.8.2 needs much more memory on RTX 4090s than 0.7.3, with 1,024 sequences.
        (("llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "8k", "--gpu-memory-utilization", "0.95"), "0.7.3", "0.8.2",
         "memory.activations", 1.5, 4.0),
    ],
)  # fmt: skip
def test_an_upgrade_has_the_sign_that_was_reported(
    run: Run, words: tuple[str, ...], old: str, new: str, path: str, low: float, high: float
) -> None:
    server = answer(run, *words, "--from", f"vllm@{old}", "--to", f"vllm@{new}")
    assert low < ratio(server, path) < high


# vllm-project/vllm#11230: 47.74 GiB, Qwen2.5 72B of 4 bits, 0.95, eager: 0.6.3.post1 starts; 0.6.4.post1 lacks memory,
# and logs weights of 38.526 GiB and 4.09 that are not torch's, of which the CUDA context is some 0.5.
FULL_GPU = (
    "qwen2.5-72b-awq", "--weights-bytes", "38.526GiB", "--gpu-memory", "47.74GiB", "--memory-in-use", "3.6GiB", "--ctx",
    "8192", "--gpu-memory-utilization", "0.95", "--enforce-eager",
)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "outcome", "since"),
    [
        ("0.6.3", "0.6.4", "does not start", ["0.6.4"]),
        ("0.6.4.post1", "0.6.5", "starts", ["0.6.5"]),
        ("0.6.3", "0.6.6", "as before", []),  # one change undoes the other
    ],
)
def test_patches_of_0_6_count_other_memory_differently(
    run: Run, old: str, new: str, outcome: str, since: list[str]
) -> None:
    server = answer(run, *FULL_GPU, "--from", f"vllm@{old}", "--to", f"vllm@{new}")
    assert server["outcome"] == outcome
    assert [change["since"] for change in server["changes"] if change["deltas"]] == since


def test_the_second_engine_of_0_8_counts_what_the_first_does_not(run: Run) -> None:
    """vllm-project/vllm#17366: two servers on a GPU start with V0 and not with V1: what the other holds counts."""
    words = (
        "qwen3-8b",
        "--gpu",
        "a100-80g",
        "--memory-in-use",
        "20GiB",
        "--gpu-memory-utilization",
        "0.4",
        "--ctx",
        "8k",
    )
    server = answer(run, *words, "--from", "vllm@0.8.5+v0", "--to", "vllm@0.8.5+v1")
    assert server["outcome"] == "does not start"


def test_patches_that_are_not_told_apart_are_refused(run: Run) -> None:
    """An answer "as before" would be a guess: no change within 0.7 is known, and none is ruled out."""
    ran = run("upgrade", "qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--from", "vllm@0.7.1", "--to", "vllm@0.7.3")
    assert ran.code == 2
    assert "--from, --to: vllm@0.7.1 and vllm@0.7.3 are planned alike" in ran.err


DEPRECATED = "vllm serve meta-llama/Llama-3.1-405B-Instruct-FP8 -tp 8 --max-model-len 8192"


@pytest.mark.parametrize(
    ("old", "new", "outcome", "since"),
    [("0.13", "0.14", "does not start", ["0.14"]), ("0.32", "0.33", "starts with neither", [])],
)
def test_a_deprecated_method_is_a_change_of_the_release_that_deprecated_it(
    run: Run, old: str, new: str, outcome: str, since: list[str]
) -> None:
    """The wheel of 0.14.0 lists fbgemm_fp8 under DEPRECATED_QUANTIZATION_METHODS, that of 0.13.0 has no such list."""
    server = answer(run, DEPRECATED, "--gpu", "h200", "--from", f"vllm@{old}", "--to", f"vllm@{new}")
    assert server["outcome"] == outcome
    moved = [change for change in server["changes"] if "concurrency.users" in change["deltas"]]
    assert [change["since"] for change in moved] == since


@pytest.mark.parametrize("old", ["0.32", "0.29"])
def test_what_was_asked_of_one_release_is_no_change_of_it(run: Run, tmp_path: Path, old: str) -> None:
    """vLLM 0.33's own code refuses asymmetric GPTQ; earlier releases were not asked."""
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
    config = {**catalog.load("qwen3-8b").config, "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = (str(tmp_path), "--gpu", "h100-80g", "--ctx", "4k", "--from", f"vllm@{old}", "--to", "vllm@0.33")
    server = answer(run, *words)
    (change,) = (row for row in server["changes"] if "concurrency.users" in row["deltas"] and row["since"] is None)
    assert f"was not asked of vllm@{old}" in change["what"]
    assert not any("table" in row["what"] for row in server["changes"])


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-27b", "gemma-4-31b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("old", "new"), [("0.17", "0.33"), ("0.33", "0.19"), ("0.28", "0.28")])  # Qwen3.5 is of 0.17
def test_effects_add_up_to_the_difference(run: Run, name: str, old: str, new: str) -> None:
    server = answer(
        run, name, "--gpu", "h100-80g", "--ctx", "8k", "--tp", "2", "--from", f"vllm@{old}", "--to", f"vllm@{new}"
    )
    for row in server["rows"]:
        if row["name"].startswith("memory.weight_groups"):
            continue
        total = sum(change["deltas"].get(row["name"], 0) for change in server["changes"])
        assert total == pytest.approx(row["new"] - row["old"], abs=1e-9), row["name"]
    assert old != new or server["changes"] == []


def test_each_change_is_switched_on_once() -> None:
    old, new = parse_engine("vllm@0.20"), parse_engine("vllm@0.33")
    up, down = list(steps(old, new)), list(steps(new, old))
    changes = [change for _, change in up if change is not None]
    assert changes == [*new.since(old).values()]
    assert [change for _, change in down if change is not None] == changes[::-1]
    assert up[-1][0] == new
    assert down[-1][0] == old
    assert [change.since for change in changes] == sorted(change.since for change in changes)


def test_a_policy_is_answered_target_by_target(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ndefaults: {gpu: l40s, max_model_len: 8k}\ntargets:\n"
        "  - {id: chat, model: qwen3-8b, engine: vllm@0.24}\n"
        "  - {id: other, model: qwen3-8b, engine: sglang@0.5}\n"
        "  - {id: small, model: llama-3.1-8b, gpu: rtx-4090, max_model_len: 16k, engine: vllm@0.7}\n"
    )
    ran = run("upgrade", str(policy), "--to", "vllm@0.8.2", "--format", "json", "--exit-code")
    assert ran.code == 1  # 1,024 sequences leave an RTX 4090 no room for the cache
    by_key = {server["key"]: server for server in ran.json["servers"]}
    assert by_key["small"]["outcome"] == "does not start"
    assert by_key["chat"]["old"]["release"] == "vllm@0.24"
    assert ran.json["left_out"] == ["other"]
    table = run("upgrade", str(policy), "--to", "vllm@0.8.2")
    assert table.out.splitlines()[0].startswith("2 of 2 servers would be worse off with vllm@0.8.2: chat, small")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("qwen3-8b", "--gpu", "l40s"), "--from is missing"),
        (("--gpu", "l40s"), "SERVER: missing"),
        (("qwen3-8b", "--gpu", "l40s", "--from", "vllm@0.24", "--to", "sglang"), "--from, --to: name two servers"),
        (("qwen3-8b", "--gpu", "l40s", "--from", "vllm@9.1"), "vllm@9.1"),
        (("qwen3-8b", "--gpu", "l40s,h200", "--from", "vllm@0.24"), "--gpu, --ctx: give 2 combinations"),
        (("qwen3-8b", "--gpu", "l40s", "--engine", "vllm@0.24"), "--engine is one release"),
        (("none.yaml", "--from", "vllm@0.24"), "none.yaml"),
        (("none.yaml", "--gpu", "l40s"), "--gpu works only with a command or a model"),
    ],
)
def test_what_cannot_be_asked_is_one_line(run: Run, words: tuple[str, ...], problem: str) -> None:
    ran = run("upgrade", *words)
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert problem in ran.errors[0]


def test_a_release_that_was_not_compared_is_named_on_either_side(run: Run) -> None:
    words = ("upgrade", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k")
    for old, new in (("vllm@0.24", "vllm@0.33"), ("vllm@0.33", "vllm@0.24")):
        assert run(*words, "--from", old, "--to", new).out.count("vllm@0.24: rules come from its wheel") == 1


def test_a_release_that_refuses_the_model_says_so(run: Run) -> None:
    server = answer(
        run, "deepseek-v2-lite", "--gpu", "h100-80g", "--ctx", "8k", "--from", "vllm@0.9", "--to", "vllm@0.6"
    )
    assert server["outcome"] == "refused"
    assert "latent attention" in str(server["answer"])


def test_every_format_says_the_same(run: Run, tmp_path: Path) -> None:
    words = ("qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--from", "vllm@0.20", "--to", "vllm@0.33", "-q")
    files = [tmp_path / f"answer.{suffix}" for suffix in ("json", "csv", "md")]
    ran = run("upgrade", *words, *(word for file in files for word in ("--report", str(file))))
    document = json.loads(files[0].read_text())
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(document, document_schema("upgrade"))
    request = plan_of("vllm@0.20"), plan_of("vllm@0.33")
    for side, side_request in zip(("old", "new"), request, strict=True):
        assert document["servers"][0][side]["users"] == figures_of(plan(side_request))["concurrency.users"]
    assert document["servers"][0]["answer"] in ran.out.splitlines()[0]
    for change in document["servers"][0]["changes"]:
        if "memory.kv_cache" in change["deltas"]:
            assert change["what"] in " ".join(ran.out.split())
    assert files[1].read_text().count("\n") == len(document["servers"][0]["rows"]) + 1
    assert files[2].read_text().startswith("### qwen3-8b on l40s")
    assert len(list(effects(*request))) == len(document["servers"][0]["changes"])


def plan_of(release: str) -> Request:
    args = EngineArgs(max_model_len=8192)
    return Request(catalog.load("qwen3-8b"), gpu("l40s"), args, parse_engine(release))


def test_one_release_on_both_sides_is_told(run: Run) -> None:
    words = ("upgrade", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "-q")
    for more in (("--from", "sglang"), ("--from", "vllm@0.33", "--to", "vllm@0.33")):
        assert " is the release to upgrade from and to: it serves " in run(*words, *more).out
    assert " is the release to upgrade from and to" not in run(*words, "--from", "vllm@0.24").out


def test_a_change_is_named_where_neither_release_starts(run: Run) -> None:
    """vllm-project/vllm#49878: windows charged for every batch in flight, on a card where the model never fits."""
    server = (
        "vllm serve google/gemma-4-31B-it --max-model-len 262144 --kv-cache-memory-bytes 52613349376 "
        "--kv-cache-dtype bfloat16 --max-num-batched-tokens 32768 --quantization fp8"
    )
    options = ("--gpu", "h100-80g", "--from", "vllm@0.25.1", "--to", "vllm@0.26", "--offline")
    answer = run("upgrade", server, *options).out
    assert "starts with neither" in answer
    cause = " ".join(answer[answer.index("since") :].split())
    assert "0.26 +25 GiB +13.95 GiB windows and chunks are charged" in cause
    assert "None of the" not in answer
    assert "| KV per user | short by |" in run("upgrade", server, *options, "--format", "markdown").out


def test_a_release_without_a_patch_says_which_one_it_means(run: Run) -> None:
    """vllm-project/vllm#43308: 0.20.0 and 0.20.2 print other tokens."""
    options = ("upgrade", "gemma-4-31b", "--gpu", "h200", "--ctx", "32k", "--to", "vllm@0.21", "--offline")
    bare = " ".join(run(*options, "--from", "vllm@0.20").out.split())
    assert "vllm@0.20 means its newest patch: 0.20.1 changed what is planned" in bare
    assert "write it out, vllm@0.20.0." in bare
    assert "newest patch" not in run(*options, "--from", "vllm@0.20.0").out
