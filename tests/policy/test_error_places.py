"""An error in a target names the line of the very key it is about, not that of the target."""

import json
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

HEAD = """\
version: 1
targets:
  - id: a
"""
# What the target says beside; the key whose line the error must name; the target's lines in the order written.
CASES = [
    ("max_model_len", ["model: llama-3.1-8b", "gpu: a100-80g", "max_model_len: 1000k"]),
    ("prompt_tokens", ["model: llama-3.1-8b", "gpu: a100-80g", "max_model_len: 32k", "prompt_tokens: 60000",
                       "output_tokens: 10"]),
    ("mean_tokens", ["model: llama-3.1-8b", "gpu: a100-80g", "max_model_len: 32k", "mean_tokens: 60000"]),
    ("output_tokens", ["model: llama-3.1-8b", "gpu: a100-80g", "max_model_len: 32k", "output_tokens: 10"]),
    ("prompt_tokens", ["model: llama-3.1-8b", "gpu: a100-80g", "max_model_len: 32k", "prompt_tokens: 10"]),
    ("shared_prefix", ["model: llama-3.1-8b", "gpu: a100-80g", "mean_tokens: 1k", "shared_prefix: 2k"]),
    ("overflow", ["model: llama-3.1-8b", "gpu: a100-80g", "overflow: 1%"]),
    ("lengths", ["model: llama-3.1-8b", "gpu: a100-80g", "lengths: uniform:9-2"]),
    ("model", ["gpu: a100-80g", "model: llama-9"]),
    ("draft_model", ["model: llama-3.1-8b", "gpu: a100-80g", "draft_model: llama-9"]),
    ("gpu", ["model: llama-3.1-8b", "gpu: a1000"]),
    ("gpu_memory", ["model: llama-3.1-8b", "gpu: a100-80g", "gpu_memory: 80"]),
    ("tensor_parallel_size", ["model: llama-3.1-8b", "gpu: a100-80g", "tensor_parallel_size: 3"]),
    ("pipeline_parallel_size", ["model: llama-3.1-8b", "gpu: a100-80g", "pipeline_parallel_size: 64"]),
    ("kv_cache_dtype", ["model: llama-3.1-8b", "gpu: a100-80g", "kv_cache_dtype: int3"]),
    ("gpu_memory_utilization", ["model: llama-3.1-8b", "gpu: a100-80g", "gpu_memory_utilization: 1.5"]),
    ("max_num_batched_tokens", ["model: llama-3.1-8b", "gpu: a100-80g", "max_num_batched_tokens: 0"]),
    ("engine", ["model: llama-3.1-8b", "gpu: a100-80g", "engine: vllm@9"]),
    ("engine_arg", ["model: llama-3.1-8b", "gpu: a100-80g", "engine_arg: nonsense=3"]),
    ("quantization", ["model: llama-3.1-8b", "gpu: a100-80g", "quantization: int3"]),
    ("calibration", ["model: llama-3.1-8b", "gpu: a100-80g", "calibration: none.json"]),
    ("command", ["command: vllm serve llama-3.1-8b --tensor-parallel-size 3", "gpu: a100-80g"]),
    ("command", ["command: ls -l", "gpu: a100-80g"]),
    ("pipeline_parallel_size",
     ["model: llama-3.1-8b", "gpu: a100-80g", "pipeline_parallel_size: 2", "draft_model: llama-3.2-1b"]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "lines"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_names_the_line_of_its_key(key: str, lines: list[str], tmp_path: Path, run: Run) -> None:
    text = HEAD + "".join(f"    {line}\n" for line in lines) + "    rules: {fits: true}\n"
    policy = tmp_path / "p.yaml"
    policy.write_text(text)
    ran = run("check", str(policy), "--format", "json", "--offline")
    failure = json.loads(ran.out)
    line_number = next(number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(f"{key}:"))
    assert (ran.code, failure["line"]) == (2, line_number), ran.err
