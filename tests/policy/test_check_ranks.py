"""Rules on users of a server with data-parallel ranks: the limit is of one rank, and the message says so."""

from pathlib import Path

import pytest

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
