"""A combination that the server refuses: every command says the reason in its first line, and prints none of it.

TurboQuant caches on B200: vLLM 0.33 raises "No KV cache layout satisfies all" for its FlashInfer and TurboQuant layers
(v1/attention/backends/utils.py), and starts with fp8. An fp8 cache on V100: no backend of vLLM 0.33 takes it below
compute capability 8.0, and any takes the model's dtype.
"""

import json
from typing import Any

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

REFUSED = ("--gpu", "b200", "--kv-cache-dtype", "turboquant_k8v4")
REASON = "no layout of a KV cache of turboquant_k8v4 suits all its attention backends"
LOAD = ("--prompt-tokens", "100", "--output-tokens", "100", "--rate", "1")


def first_line(ran: Any) -> str:
    return str((ran.out or ran.err).splitlines()[0])


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "qwen3-8b", *REFUSED, "--ctx", "4k"),
        ("estimate", "qwen3-8b", *REFUSED, "--ctx", "4k,8k"),
        ("recommend", "qwen3-8b", *REFUSED, "--ctx", "4k", "--users", "10"),
        ("recommend", "qwen3-8b", *REFUSED, "--ctx", "4k", *LOAD, "--slo", "ttft.p90=2s"),
        ("sweep", "qwen3-8b", *REFUSED, "--ctx", "4k,8k"),
        ("simulate", "qwen3-8b", *REFUSED, "--ctx", "4k", *LOAD),
        ("tune", "qwen3-8b", *REFUSED, "--ctx", "4k", *LOAD, "--slo", "ttft.p90=2s"),
        ("diff", "qwen3-8b", "llama-3.1-8b", *REFUSED, "--ctx", "4k"),
        ("upgrade", "qwen3-8b", *REFUSED, "--ctx", "4k", "--from", "vllm@0.32", "--to", "vllm@0.33"),
        ("pack", "--gpu", "b200", "--server", "qwen3-8b --max-model-len 8192 --kv-cache-dtype turboquant_k8v4",
         "--server", "bge-m3 --max-model-len 8192"),
    ],
    ids=lambda words: "-".join(word for word in words if not word.startswith("-"))[:40],
)  # fmt: skip
def test_the_first_line_has_the_servers_reason(run: Run, words: tuple[str, ...]) -> None:
    ran = run(*words)
    assert REASON in first_line(ran)
    commands = [line for line in ran.out.splitlines() if "vllm serve" in line]
    assert not any("turboquant" in command for command in commands)


def test_several_gpus_are_told_apart(run: Run) -> None:
    ran = run("estimate", "qwen3-8b", "--gpu", "b200,h100-80g", "--kv-cache-dtype", "turboquant_k8v4", "--ctx", "4k")
    assert f"b200 does not start: {REASON}" in ran.out
    assert "h100-80g does not start" not in ran.out


def test_the_fix_of_a_refused_dtype_is_one_that_the_gpu_takes(run: Run) -> None:
    words = ("estimate", "qwen3-8b", "--ctx", "4k", "--gpu", "v100-32g")
    plain = json.loads(run(*words, "--format", "json").out)["concurrency"]["users"]
    answer = run(*words, "--kv-cache-dtype", "fp8")
    fix = next(line for line in answer.out.splitlines() if line.startswith("  --"))
    assert fix.split() == ["--kv-cache-dtype", "auto", f"{plain}", "users", "at", "4,096", "tokens", "on", "v100-32g"]
    serve = next(line for line in answer.out.splitlines() if line.startswith("Serve"))
    assert "--kv-cache-dtype" not in serve


def test_a_fix_on_another_gpu_is_named_with_its_command(run: Run) -> None:
    """deepseek-v3.2's sparse attention needs compute capability 9.0: no flag starts it on an A100."""
    answer = run("estimate", "deepseek-v3.2", "--gpu", "a100-80g", "--tp", "8", "--ctx", "4k")
    fix = next(line for line in answer.out.splitlines() if line.startswith("  --gpu"))
    assert f"Serve (on {fix.split()[1]})  vllm serve" in answer.out


def test_recommend_offers_the_fix_of_estimate(run: Run) -> None:
    words = ("qwen3-8b", *REFUSED, "--ctx", "4k", "--format", "json")
    estimated = json.loads(run("estimate", *words).out)["fixes"]
    fit = json.loads(run("recommend", *words, "--users", "10").out)["fit"]
    assert [fix["flag"] for fix in estimated] == ["--kv-cache-dtype fp8"]
    assert fit["refused"] is True
    assert fit["cures"][0]["needs"] == ["--kv-cache-dtype fp8"]
    assert fit["cures"][0]["users_low"] >= 10


def test_pack_names_what_starts(run: Run) -> None:
    servers = ("--server", "qwen3-8b --max-model-len 8192 --users 4 --kv-cache-dtype turboquant_k8v4")
    ran = run("pack", "--gpu", "b200", *servers)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].endswith("; use --kv-cache-dtype fp8")
