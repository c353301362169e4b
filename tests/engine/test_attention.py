"""The attention backend is chosen once, and nothing else in the engine asks which one it is."""

import re
from pathlib import Path

import pytest
import torch

from engine import attention
from engine.attention import AttentionBackend, AttentionPlan
from engine.kernels import torch_backend
from tests.support.small_engines import engine_for

ENGINE = Path(__file__).parents[2] / "engine"
ASKS = re.compile(r"is_triton|kernels\.__name__|IS_PLANNED|\bbackend [!=]= ")


def test_only_the_seam_knows_which_kernels_run() -> None:
    asking = [path.name for path in sorted(ENGINE.glob("*.py")) if ASKS.search(path.read_text(encoding="utf-8"))]
    assert asking == ["attention.py"]


def test_torch_runs_everything_and_plans_nothing() -> None:
    runner = engine_for("llama").runner
    assert runner.backend == attention.load("auto", "cpu") == AttentionBackend(torch_backend)
    assert runner.plan == AttentionPlan((), None)
    assert not runner.backend.compiles
    assert runner.backend.supports_cache(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "is_supported"),
    [
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),  # a float32 cache under bfloat16 queries: no kernel loads that pair
        (torch.bfloat16, torch.float16, False),
    ],
)
def test_triton_reads_a_cache_of_the_models_dtype_or_fp8(
    kv_dtype: torch.dtype, dtype: torch.dtype, is_supported: bool
) -> None:
    backend = attention.TritonAttention(torch_backend)  # which module runs does not matter here
    assert backend.supports_cache(kv_dtype, dtype) is is_supported
