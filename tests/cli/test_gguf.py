"""`estimate FILE.gguf`: a model from its header alone."""

import json
from pathlib import Path

from kvplan.models import catalog
from kvplan.models.gguf_model import gguf_of
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.gguf_files import saved

# llama.cpp: bytes of Qwen3-8B as Q4_K_M (tests/facts/llamacpp_files.jsonl). Norms are in float32 in the file and in
# 16 bits in the server: 36 layers of two norms of 4,096 and two of 128, and a last one of 4,096.
IN_FILE = 5_021_827_072
NORMS = 36 * (2 * 4096 + 2 * 128) + 4096


def test_a_file_alone_is_planned_tensor_by_tensor(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "Qwen3-8B-Q4_K_M.gguf", gguf_of(catalog.load("qwen3-8b")))
    result = run("estimate", path, "--gpu", "rtx-4090", "--ctx", "8k", "--format", "json")
    plan = json.loads(result.out)
    assert plan["memory"]["weights"] == IN_FILE - 2 * NORMS
    assert plan["kv"]["bytes_per_token"] == 36 * 2 * 8 * 128 * 2
    assert "qwen3, Q4_K_M, read from the file's header alone" in result.err


def test_a_file_alone_starts_the_server_with_the_file(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "Qwen3-8B-Q4_K_M.gguf", gguf_of(catalog.load("qwen3-8b")))
    result = run("estimate", path, "--gpu", "rtx-4090", "--ctx", "8k", "--engine", "sglang")
    assert f"--model-path {path}" in result.out
