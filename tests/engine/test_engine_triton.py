"""The whole engine on its Triton kernels, in the interpreter on a CPU, against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig
from engine import kernels as engine_kernels
from kvplan.core.errors import UsageError
from tests.support.small_engines import engine_for, greedy, saved_model, wrong_greedy_tokens
from tests.support.triton_engine import PROMPTS, TOKENS

ROOT = Path(__file__).resolve().parents[2]
# Beside those named below: sinks, biases and experts; norms over all heads, layers that do not rotate, half a head.
SLOW = (
    "gpt_oss", "qwen3_moe", "mistral", "gemma3_text", "llama_yarn", "olmo2", "cohere2", "glm4", "phimoe",
    "cohere_normed", "minimax_m2", "opt",
)  # fmt: skip


def interpreted(*models: str, kv_dtype: str = "auto") -> list[list[list[int]]]:
    """The tokens of each model, a family or FAMILY,graphs; one process for all."""
    folders = [f"{saved_model(family)}{comma}{graphs}" for family, comma, graphs in (m.partition(",") for m in models)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_engine", kv_dtype, *folders],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# On a graph's tensors work lists have a fixed size: there are rows that are not there, and sequences of no tokens.
@pytest.mark.parametrize(
    "models",
    [
        pytest.param(("llama,graphs", "gemma2"), id="graphs and windows"),
        pytest.param(("llama",), id="plain", marks=pytest.mark.full),
        pytest.param(("gemma3_text,compared", "mixtral,compared"), id="compared", marks=pytest.mark.full),
        pytest.param(("deepseek_v3,compared",), id="latents compared", marks=pytest.mark.full),
        pytest.param(("deepseek_v3", "deepseek_v3,graphs"), id="latents", marks=pytest.mark.full),
        pytest.param(("gemma2", "gemma2,graphs"), id="windows on graphs", marks=pytest.mark.full),
        *(pytest.param((family,), id=family, marks=pytest.mark.full) for family in SLOW),
    ],
)
def test_triton_kernels_give_the_tokens_of_transformers(models: tuple[str, ...]) -> None:
    for model, served in zip(models, interpreted(*models), strict=True):
        assert [len(tokens) for tokens in served] == [TOKENS] * len(PROMPTS)
        for prompt, tokens in zip(PROMPTS, served, strict=True):
            assert wrong_greedy_tokens(model.partition(",")[0], prompt, tokens) == [], model


@pytest.mark.full
def test_triton_kernels_read_an_fp8_cache_as_torch_does() -> None:
    expected = engine_for(saved_model("llama"), kv_cache_dtype="fp8", block_size=16, max_model_len=48).generate(
        [list(prompt) for prompt in PROMPTS], greedy(TOKENS)
    )
    assert interpreted("llama", kv_dtype="fp8") == [[output.token_ids for output in expected]]


def test_triton_without_a_gpu_and_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="triton kernels run on a GPU only"):
        engine_kernels.load(EngineConfig(backend="triton").backend, "cpu")


@pytest.mark.full
def test_shapes_without_a_tile_are_refused_before_anything_is_loaded() -> None:
    code = """
import sys
from engine import Engine, EngineConfig
for size in (24, 8):
    config = EngineConfig(device="cpu", dtype="float32", backend="triton", block_size=size, num_blocks=9)
    try:
        Engine(sys.argv[1], config)
    except Exception as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved_model("llama"))],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert "the Triton kernels cannot run block size 24" in first
    assert "the Triton kernels cannot run block size 8" in second
