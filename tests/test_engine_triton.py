"""The whole engine on its Triton kernels, in the interpreter on a CPU, against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig
from engine import kernels as engine_kernels
from kvplan.errors import UsageError
from tests.small_engines import engine_for, greedy, saved_model, wrong_greedy_tokens
from tests.triton_engine import PROMPTS, TOKENS

ROOT = Path(__file__).resolve().parents[1]
# Each adds what the ones before lack: windows, softcaps and wide norms; sinks, biases and experts; MLA.
FAST, SLOW = ("llama", "gemma2", "deepseek_v3"), ("gpt_oss", "qwen3_moe", "mistral", "gemma3_text", "llama_yarn")


def interpreted(family: str, kv_dtype: str = "auto", *more: str) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_engine", str(saved_model(family)), kv_dtype, *more],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    tokens: list[list[int]] = json.loads(done.stdout)
    return tokens


@pytest.mark.parametrize("family", [*FAST, *(pytest.param(family, marks=pytest.mark.full) for family in SLOW)])
def test_triton_kernels_give_the_tokens_of_transformers(family: str) -> None:
    found = interpreted(family)
    assert [len(tokens) for tokens in found] == [TOKENS] * len(PROMPTS)
    faults = [
        fault
        for prompt, tokens in zip(PROMPTS, found, strict=True)
        for fault in wrong_greedy_tokens(family, prompt, tokens)
    ]
    assert faults == []


@pytest.mark.parametrize("family", ["gemma2", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_triton_kernels_give_the_same_tokens_on_a_graphs_tensors(family: str) -> None:
    """Work lists of fixed size there: rows that are not there, and sequences of no tokens."""
    assert interpreted(family, "auto", "graphs") == interpreted(family)


@pytest.mark.full
def test_triton_kernels_read_an_fp8_cache_as_torch_does() -> None:
    expected = engine_for(saved_model("llama"), kv_cache_dtype="fp8", block_size=16, max_model_len=48).generate(
        [list(prompt) for prompt in PROMPTS], greedy(TOKENS)
    )
    assert interpreted("llama", "fp8") == [output.token_ids for output in expected]


def test_triton_without_a_gpu_and_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="triton kernels run on a GPU only"):
        engine_kernels.load(EngineConfig(backend="triton").backend, "cpu")


@pytest.mark.parametrize(("block_size", "reason"), [(24, "block size 24"), (8, "block size 8")])
def test_shapes_without_a_tile_are_refused_before_anything_is_loaded(block_size: int, reason: str) -> None:
    code = (
        "from engine import Engine, EngineConfig; import sys\n"
        f"Engine(sys.argv[1], EngineConfig(device='cpu', dtype='float32', backend='triton', block_size={block_size}, "
        "num_blocks=9))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved_model("llama"))],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert f"the Triton kernels cannot run {reason}" in done.stderr
