"""Serving launches no variant of a kernel that was not launched before it began."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("llama", "qwen2_window", "gemma3_text", "gpt_oss", "deepseek_v3")


@pytest.mark.full
@pytest.mark.parametrize("families", [("mixtral",), OTHERS])
def test_no_variant_is_first_launched_while_serving(families: tuple[str, ...]) -> None:
    """Prompts of 1 to 508 tokens, 1 to 40 at a time, and every way to sample beside every other."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.variants", *families],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["family"] for result in results] == list(families)
    for result in results:
        assert result["at_start"] >= 20  # all that serving launches, compiled before
        assert result["while_serving"] == [], result["family"]
