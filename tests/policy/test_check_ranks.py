"""Rules on users of a server with data-parallel ranks: the limit is of one rank, and the message says so."""

from pathlib import Path

import pytest

from kvplan.planning.advise import more_sharing_ranks
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_message_counts_all_ranks_and_a_fix_says_its_gpus(run: Run, tmp_path: Path, engine: str) -> None:
    """`sweep` counts the users of all ranks. Twice the tensor-parallel size is twice the GPUs: SGLang's ranks of DP
    attention lie within the tensor ranks (8 to 16), vLLM's each have their own (2 x 1 to 2 x 2).
    """
    ranks = 2 if engine == "vllm" else 8
    more = "on 4 GPUs instead of 2" if engine == "vllm" else "on 16 GPUs instead of 8"
    command = "vllm serve Qwen/Qwen3-32B --max-model-len 16384 --data-parallel-size 2"
    options = ["qwen3-32b", "--gpu", "h100", "--ctx", "16k", "--dp", "2"]
    if engine == "sglang":
        words = ["--tp", "8", "--dp", "8", "--enable-dp-attention"]
        command = " ".join(["python -m sglang.launch_server --model-path Qwen/Qwen3-235B-A22B", *words])
        command += " --context-length 16384"
        options = ["qwen3-235b-a22b", "--gpu", "h100", "--ctx", "16k", "--engine", "sglang", *words]
    limit = 4 if engine == "vllm" else 8
    (tmp_path / "p.yaml").write_text(
        f"version: 1\ntargets:\n- {{id: a, gpu: h100, command: {command}, rules: {{min_concurrency: {limit}}}}}\n"
    )
    (row,) = run("sweep", *options, "--format", "json", "-q").json["rows"]
    (target,) = run("check", tmp_path / "p.yaml", "--format", "json", "-q").json["targets"]
    (finding,) = target["findings"]
    assert row["users"] == ranks * finding["actual"]
    assert f"on each of {ranks} data-parallel ranks, {row['users']} in all" in finding["message"]
    assert finding["outcome"] == "fail"
    assert more in finding["fix"]


POLICY = """version: 1
targets:
  - id: chat
    model: deepseek-v3
    gpu: h200
    max_model_len: 32k
    data_parallel_size: 8
    enable_expert_parallel: true
    rules:
      min_kv_tokens: 600k
      max_weights: 45GiB
"""


def test_tokens_are_those_of_each_rank(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(POLICY)
    tokens, weights = run("check", policy, "--format", "json").json["targets"][0]["findings"]
    estimate = run(
        "estimate", "deepseek-v3", "--gpu", "h200", "--ctx", "32k", "--dp", "8", "--ep", "--format", "json"
    ).json
    count = estimate["kv"]["tokens"]
    assert f"{count:,} tokens on each of 8 data-parallel ranks, {8 * count:,} in all" in tokens["message"]
    assert "on each of 8" not in weights["message"]


def test_more_ranks_are_a_fix_only_where_they_share_the_experts() -> None:
    shared = EngineArgs(data_parallel_size=8, enable_expert_parallel=True)
    assert [change.flag for change in more_sharing_ranks(shared).changes] == [
        "--data-parallel-size 16", "--data-parallel-size 32", "--data-parallel-size 64",
    ]  # fmt: skip
    for args in (EngineArgs(data_parallel_size=8), EngineArgs(enable_expert_parallel=True)):
        assert not more_sharing_ranks(args).changes


def test_a_baseline_says_whose_tokens_it_compares(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.policy.yaml"
    rules = "baseline:\n  file: kvplan.baseline.json\n  max_drop: {kv_tokens: 1%}\n"
    policy.write_text(POLICY.replace("600k", "1k").replace("45GiB", "95GiB") + rules)
    assert run("check", policy, "--update-baseline").code == 0
    policy.write_text(
        policy.read_text().replace("max_model_len: 32k", "max_model_len: 32k\n    gpu_memory_utilization: 0.8")
    )
    assert "tokens in the KV cache on each of 8 data-parallel ranks" in run("check", policy).out
