"""Ollama's defaults, as its source states them (fb30760), and what of it is pasted."""

import re
from pathlib import Path

import pytest

from kvplan.servers.ollama.rules import as_started
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

GIB = 1 << 30
NONE = EngineArgs()


@pytest.mark.parametrize(
    ("stated", "memory_gib", "context", "batch", "slots"),
    [
        (NONE, 24, 32_768, 1_024, 1),
        (NONE, 12, 4_096, 512, 1),
        (NONE, 80, 131_072, 2_048, 1),  # 262,144, but never above what the model was trained for
        (EngineArgs(max_model_len=8_192), 12, 8_192, 1_024, 1),
        (EngineArgs(max_model_len=8_192, max_num_seqs=4), 12, 8_192, 1_024, 4),
        (EngineArgs(max_num_batched_tokens=256), 24, 32_768, 256, 1),
    ],
)
def test_memory_decides_the_context_and_the_context_the_batch(
    stated: EngineArgs, memory_gib: int, context: int, batch: int, slots: int
) -> None:
    own = as_started(stated, "llama", 131_072, memory_gib * GIB)
    assert (own.max_model_len, own.max_num_seqs) == (context * slots, slots)
    assert (own.max_num_batched_tokens, own.micro_batch_size) == (batch, batch)
    assert own.kv_unified is False


@pytest.mark.parametrize(("total", "context"), [("23.5GiB", 32_768), ("17.8GiB", 4_096), ("11.9GiB", 4_096),
                                                ("22.0GiB", 4_096), ("102.2GiB", 262_144)])  # fmt: skip
def test_the_default_context_is_what_its_logs_say(run: Run, total: str, context: int) -> None:
    """`vram-based default context` in public logs: total_vram and default_num_ctx."""
    words = ("estimate", "qwen3-4b-2507", "--engine", "ollama", "--gpu-memory", total, "--format", "json", "-q")
    assert run(*words).json["slots"]["cells"] == context


def test_models_with_states_have_one_slot() -> None:
    assert as_started(EngineArgs(max_num_seqs=4), "qwen35moe", 262_144, 24 * GIB).max_num_seqs == 1


def test_it_is_the_llama_server_that_it_starts(run: Run) -> None:
    """A context of its own for each slot, its batch as both batches: the same places to the byte."""
    own = run("estimate", "qwen3:14b", "--engine", "ollama", "--gpu", "rtx-4090", "--num-parallel", "2",
              "--kv-cache-type", "q8_0", "--format", "json", "-q").json  # fmt: skip
    started = (
        "-c",
        "65536",
        "-np",
        "2",
        "--no-kv-unified",
        "-b",
        "1024",
        "-ub",
        "1024",
        "-ctk",
        "q8_0",
        "-ctv",
        "q8_0",
    )
    below = run(
        "estimate", "qwen3-14b", "--engine", "llama.cpp", "--gpu", "rtx-4090", *started, "--format", "json", "-q"
    )
    assert own["slots"] == below.json["slots"]


MODELFILE = "FROM qwen3:32b\nPARAMETER num_ctx 16384\nPARAMETER num_gpu 40\nSYSTEM You are helpful.\n"
SHOWN = "  Model\n    architecture  qwen3\n    quantization  Q4_K_M\n\n  Parameters\n    num_ctx  8192\n"


@pytest.mark.parametrize(
    ("text", "cells", "layers"),
    [
        (MODELFILE, 16_384, 40),
        (f"$ ollama show qwen3:14b\n{SHOWN}", 8_192, 41),
        ("OLLAMA_CONTEXT_LENGTH=65536 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve & ollama run qwen3:4b", 40_960, 37),
        ("ollama run qwen3:8b --verbose 'why is the sky blue'", 32_768, 37),
        ("docker run -d --gpus=all -e OLLAMA_CONTEXT_LENGTH=4096 ollama/ollama\nollama run qwen3:8b", 4_096, 37),
        ("lms load qwen3-14b@q4_k_m --gpu max --context-length 8192", 8_192, 41),
    ],
)
def test_pasted_settings_are_read(run: Run, text: str, cells: int, layers: int) -> None:
    """A context above what the model was trained for (40,960) is that."""
    cache = run("estimate", "--from-command", text, "--gpu", "rtx-4090", "--format", "json", "-q").json["slots"]
    assert (cache["cells"], cache["gpu_layers"]) == (cells, layers)


def test_a_modelfile_stands_for_a_model(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    file.write_text(MODELFILE, encoding="utf-8")
    named = run("estimate", file, "--gpu", "rtx-4090", "-q")
    assert "40 of 65 layers on the GPU" in named.out
    assert "write `PARAMETER num_gpu 40`" in run("estimate", file, "--gpu", "rtx-4090").err


def test_settings_of_lm_studio_are_read(run: Run) -> None:
    text = '{"contextLength": 16384, "gpu": {"ratio": "max", "numCpuExpertLayersRatio": 1}, "flashAttention": true}'
    ran = run("estimate", "qwen3-30b-a3b", "--from-command", text, "--gpu", "rtx-4070", "-q")
    assert "16,384 tokens for one user, all 49 layers on the GPU, the experts of 48 on the host" in ran.out
    half = refused(run("estimate", "--from-command", "lms load qwen/qwen3-14b --gpu 0.5", "--gpu", "rtx-4090"))
    assert "does not publish how a ratio becomes layers" in half


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("qwen3", "--engine", "ollama"), "names no size; write the tag: qwen3:8b"),
        (("gpt-oss:120b-cloud", "--engine", "ollama"), "runs in Ollama's cloud"),
        (("qwen3-8b", "--engine", "ollama@0.12"), "has an engine of its own"),
        (("qwen3-8b", "--engine", "ollama", "--n-cpu-moe", "9"), "is no argument of Ollama"),
    ],
)
def test_what_it_does_not_have_is_refused(run: Run, words: tuple[str, ...], problem: str) -> None:
    assert problem in refused(run("estimate", *words, "--gpu", "rtx-4070"))


def test_its_command_and_its_fixes_are_its_own(run: Run) -> None:
    words = (
        "estimate",
        "qwen3:32b",
        "--engine",
        "ollama",
        "--gpu",
        "rtx-4090",
        "--num-ctx",
        "32768",
        "--num-gpu",
        "99",
    )
    short = run(*words, "--format", "json", "-q").json
    assert not short["fits"]
    flags = [fix["flag"] for fix in short["fixes"]]
    assert any(flag.startswith("--num-ctx ") for flag in flags)
    assert not any(re.search(r"(?:^| )-(?:c|ngl|ctk)\b", flag) for flag in flags)
    for fix in short["fixes"]:
        if fix["flag"].startswith("--num-"):
            position = words.index(fix["flag"].split()[0])
            others = [*words[:position], *words[position + 2 :]]
            assert run(*others, *fix["flag"].split(), "--format", "json", "-q").json["fits"], fix
    answer = run("estimate", "qwen3-8b", "--engine", "ollama", "--gpu", "rtx-4090", "--num-ctx", "8192", "-q").out
    assert "OLLAMA_CONTEXT_LENGTH=8192 ollama serve" in answer
