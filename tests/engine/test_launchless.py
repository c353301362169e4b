"""The planner's activation peak beside what the GPU's path allocates at real widths, no kernel of it being launched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL_TENSORS = 0.003  # of the peak: expert ids, sums of norms and the like, which the planner leaves out
SMALL = "qwen3-0.6b@4096,1024"  # its peak is in sampling
MODELS = (
    "llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma-2-9b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v2-lite",
    "mistral-7b", "qwen3-8b@32768,2048",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("model", [SMALL, *MODELS])
def test_the_peak_is_the_planners(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.launchless", model], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run: dict[str, Any] = json.loads(done.stdout)
    predicted, reported = run["predicted"], run["reported"]
    assert (predicted["weights"], predicted["buffers"]) == (reported["weights"], reported["buffers"])
    # A step's own inputs lie in the host's memory here, and on a GPU beside the rest.
    on_gpu = reported["activations"] + run["inputs"]
    assert predicted["activations"] == pytest.approx(on_gpu, rel=SMALL_TENSORS)
