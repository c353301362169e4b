"""Every Triton kernel computes what reference.py does in float64, reads nothing else and writes nothing else.

The kernels run in Triton's interpreter, in a process of its own: triton decides when it is imported.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import checks, fp8, torch_backend, triton_backend
from kvplan.core.errors import EnvironmentProblem
from tests.support.interpreter_cases import CASES, FULL_CASES, IN_EVERY_RUN
from tests.support.line_process import LineProcess
from tests.support.parts import some

ENV = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}  # exp2 of a large number is meant to be infinite
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Verdict:
    error: float
    tolerance: float
    faults: list[str]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineProcess]:
    process = LineProcess("tests.support.interpreter_run", ENV, tmp_path_factory.mktemp("interpreter") / "stderr")
    yield process
    process.close()


def check(interpreter: LineProcess, case: str) -> None:
    verdict = Verdict(**interpreter.ask(case))
    assert verdict.faults == []
    assert verdict.error <= verdict.tolerance


@pytest.mark.parametrize("case", some(CASES, IN_EVERY_RUN))
def test_a_kernel_agrees_with_float64(interpreter: LineProcess, case: str) -> None:
    check(interpreter, case)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_CASES)
def test_attention_agrees_with_float64_in_every_combination(interpreter: LineProcess, case: str) -> None:
    check(interpreter, case)


def test_a_dead_process_is_a_failure_and_the_next_case_gets_a_new_one(tmp_path: Path) -> None:
    process = LineProcess("tests.support.mortal", ENV, tmp_path / "stderr")
    first = process.ask("pid")
    with pytest.raises(ChildProcessError, match="ended with -11 on 'crash'"):
        process.ask("crash")
    assert process.ask("pid") != first
    process.close()


@pytest.mark.parametrize("fault", ["value", "unset", "stale slot", "beside", "cache"])
def test_a_planted_fault_is_seen(interpreter: LineProcess, fault: str) -> None:
    verdict = Verdict(**interpreter.ask(f"planted {fault}"))
    assert verdict.faults or not verdict.error <= verdict.tolerance


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("q", "q must be of 3 dimensions (torch.Size([4, 64]))"),
        ("q heads", "q must be of a multiple of 2 heads (3)"),
        ("q strides", "q must be contiguous in its last dimension, not of these strides ((256, 1, 4))"),
        ("k_cache", "k_cache must be of head_dim 64 like q (80)"),
        ("k_cache dtype", "k_cache must be torch.float32 or float8_e4m3fn (torch.bfloat16)"),
        ("k_cache block_size", "k_cache must be of block size 16, 32, 64, ... (24)"),
        ("v_cache", "v_cache must be of k_cache's blocks and heads (torch.Size([2, 16, 2, 64]))"),
        ("block_tables", "context_lens must be of shape (3,) (torch.Size([2]))"),
        ("context_lens", "context_lens must be int32 (torch.int64)"),
        ("context_lens device", "context_lens must be on cpu like q (meta)"),
        ("sinks", "sinks must be of shape (4,) (torch.Size([2]))"),
        ("window", "window must be at least 1 (0)"),
        ("k_scale", "k_scale must be 1.0 for a torch.float32 cache (2.0)"),
        ("work", "work must be planned for 2 sequences like q (3)"),
        ("work window", "work must be planned for window None (7)"),
        ("work device", "work must be on cpu like q (meta)"),
        ("out", "out must be of shape (2, 4, 64) (torch.Size([2, 4, 80]))"),
        ("out strides", "out must be contiguous, not of these strides ((64, 128, 1))"),
        ("out dtype", "out must be torch.float32 like q (torch.bfloat16)"),
        ("out device", "out must be on cpu like q (meta)"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(interpreter: LineProcess, argument: str, message: str) -> None:
    assert interpreter.ask(f"refused {argument}") == {"error": message}


# --- products with fp8 weights in rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("torch_lacks", [None, "scales of rows"])
def test_rows_of_fp8_products_are_scaled_by_any_torch(monkeypatch: pytest.MonkeyPatch, torch_lacks: str | None) -> None:
    """Torch 2.11 refuses scales of rows on a CPU; the result is the same to one rounding of bfloat16."""
    product: Callable[..., torch.Tensor] = torch._scaled_mm

    def of_tensors_only(*args: Any, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> torch.Tensor:
        if scale_a.numel() > 1 or scale_b.numel() > 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")
        return product(*args, scale_a=scale_a, scale_b=scale_b, **options)

    source = torch.Generator().manual_seed(0)
    x, values = ((torch.randn(rows, 64, generator=source) * 100).clamp(-448, 448).to(FP8) for rows in (5, 48))
    x_scales, row_scales = torch.rand(5, 1, generator=source), torch.rand(48, generator=source)
    terms = x.double() * x_scales.double(), (values.double() * row_scales.double()[:, None]).T
    if torch_lacks:
        monkeypatch.setattr(torch, "_scaled_mm", of_tensors_only)
    fp8.scales_rows.cache_clear()
    try:
        got = fp8.scaled_product(x, x_scales, values, row_scales, BF16)
    finally:
        fp8.scales_rows.cache_clear()
    assert got.dtype == BF16
    exact = terms[0] @ terms[1]
    # bfloat16 keeps 8 bits, float32 24; a sum of 64 terms and two scalings round 66 times in float32
    allowed = exact.abs() * 2**-8 + (terms[0].abs() @ terms[1].abs()) * 66 * 2**-24
    assert bool(((got.double() - exact).abs() <= allowed).all())


def test_a_gpu_that_multiplies_fp8_scales_rows_itself() -> None:
    assert fp8.scales_rows("cuda")


# --- products with fp8 weights in blocks ------------------------------------------------------------------------------


def in_blocks(
    num_tokens: int, inputs: int, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]]:
    """x, values [40, inputs], scales, block."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, inputs, generator=source).to(dtype)
    values = torch.randn(40, inputs, generator=source).to(torch.float8_e4m3fn)
    return x, values, torch.rand(-(-40 // block[0]), -(-inputs // block[1]), generator=source), block


@pytest.mark.parametrize(
    ("arch", "args"),
    [
        (80, (5, 256, (128, 128))),
        (90, (2048, 256, (128, 128))),
        (90, (128, 256, (128, 128), torch.float32)),
        (90, (5, 200, (128, 128))),
        (90, (5, 256, (1, 128))),
        (90, (5, 256, (40, 24))),  # all outputs, but no tile of inputs
    ],
    ids=["no fp8", "many tokens", "many tokens in float32", "rows that begin anywhere", "rows", "narrow blocks"],
)
def test_weights_that_no_tile_takes_are_widened_by_torch(
    monkeypatch: pytest.MonkeyPatch, arch: int, args: tuple[Any, ...]
) -> None:
    """Without a GPU a kernel could not even be launched."""
    monkeypatch.setattr("engine.kernels.configs.arch", lambda: arch)
    checks.forget()
    operands = in_blocks(*args)
    assert torch.equal(triton_backend.fp8_block_linear(*operands), torch_backend.fp8_block_linear(*operands))


def test_of_no_tokens_comes_nothing() -> None:
    assert triton_backend.fp8_block_linear(*in_blocks(0, 256, (128, 128))).shape == (0, 40)


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("x", torch.zeros(5, 240, dtype=BF16), r"values must be of shape (40, 240) (torch.Size([40, 256]))"),
        ("values", torch.zeros(40, 256), "values must be float8_e4m3fn (torch.float32)"),
        ("values", torch.zeros(256), "values must be of 2 dimensions (torch.Size([256]))"),
        ("scales", torch.zeros(2, 1), "scales must be of shape (1, 2) (torch.Size([2, 1]))"),
        ("scales", torch.zeros(1, 2, dtype=BF16), "scales must be float32 (torch.bfloat16)"),
        ("scales", torch.zeros(1, 2, device="meta"), "scales must be on cpu like x (meta)"),
        ("block", (0, 128), "block must be of at least 1 x 1 ((0, 128))"),
        ("num_splits", 0, "num_splits must be at least 1 (0)"),
    ],
)
def test_a_wrong_argument_of_a_product_is_refused_by_name(argument: str, wrong: Any, message: str) -> None:
    args = dict(zip(("x", "values", "scales", "block"), in_blocks(5, 256, (128, 128)), strict=True))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        triton_backend.fp8_block_linear(**{**args, argument: wrong})


# --- what the kernels cannot run is known before a step -------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arch"),
    [
        ((128, 4, 16, BF16), 80),  # Llama 3 8B
        ((256, 64, 32, BF16), 89),  # the 64 rows of prefill's tile hold one query
        ((256, 128, 32, BF16), 90),
        ((80, 128, 16, BF16), 90),
        ((64, 32, 16, F32), 90),
        ((128, 4, 16, BF16, FP8), 89),
        ((None, 128, 64, BF16), 90),
    ],
    ids=["llama", "64 heads", "128 heads", "padded head_dim", "float32", "fp8 cache", "latents"],
)
def test_what_the_kernels_can_run_is_not_refused(monkeypatch: pytest.MonkeyPatch, model: Any, arch: int) -> None:
    monkeypatch.setattr("engine.kernels.configs.arch", lambda: arch)
    assert triton_backend.unsupported(*model) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ((128, 4, 8, BF16), "block size 8 (they read 16, 32, 64, ...)"),
        ((128, 4, 24, BF16), "block size 24 (they read 16, 32, 64, ...)"),
        ((None, 128, 24, BF16), "block size 24 (they read 16, 32, 64, ...)"),
        ((288, 4, 16, BF16), "head_dim 288 (at most 256)"),
        ((128, 129, 16, BF16), "129 query heads per KV head (at most 128)"),
        ((128, 17, 16, F32), "17 query heads per KV head in float32 (at most 16)"),
        ((256, 65, 16, BF16, FP8), "65 query heads per KV head (at most 64)"),
        ((128, 4, 16, torch.float64), "float64 (they compute in float32, float16, bfloat16)"),
    ],
    ids=[
        "small block",
        "odd block",
        "latents in odd blocks",
        "head_dim",
        "heads",
        "heads in float32",
        "heads over fp8",
        "dtype",
    ],
)
def test_what_the_kernels_cannot_run_is_said_in_a_phrase(
    monkeypatch: pytest.MonkeyPatch, model: Any, reason: str
) -> None:
    monkeypatch.setattr("engine.kernels.configs.arch", lambda: 90)
    assert triton_backend.unsupported(*model) == reason


def test_a_gpu_without_float8_or_without_tiles_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.configs.arch", lambda: 80)
    with pytest.raises(EnvironmentProblem, match=r"^sm_80: kv_cache_dtype is torch\.float8_e4m3fn, .*; keep the KV"):
        triton_backend.unsupported(128, 4, 16, BF16, FP8)
    monkeypatch.setattr("engine.kernels.configs.arch", lambda: 75)
    with pytest.raises(EnvironmentProblem, match=r"^sm_75: the Triton kernels have no tiles for it"):
        triton_backend.unsupported(128, 4, 16, BF16)


@pytest.mark.full
def test_the_reference_loads_no_triton() -> None:
    code = "import sys, tests.support.kernel_reference; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=900, check=False).returncode == 0
