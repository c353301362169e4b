"""Every Triton kernel computes what reference.py does in float64, reads nothing else and writes nothing else.

The kernels run in Triton's interpreter, in a process of its own: triton decides when it is imported.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.kernels.split_kv import choose_num_splits
from tests.interpreter_cases import CASES, FULL_CASES
from tests.line_process import LineProcess

ENV = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}  # exp2 of a large number is meant to be infinite


@dataclass(frozen=True, slots=True)
class Verdict:
    error: float
    tolerance: float
    faults: list[str]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineProcess]:
    process = LineProcess("tests.interpreter_run", ENV, tmp_path_factory.mktemp("interpreter") / "stderr")
    yield process
    process.close()


def check(interpreter: LineProcess, case: str) -> None:
    verdict = Verdict(**interpreter.ask(case))
    assert verdict.faults == []
    assert verdict.error <= verdict.tolerance


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_agrees_with_float64(interpreter: LineProcess, case: str) -> None:
    check(interpreter, case)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_CASES)
def test_attention_agrees_with_float64_in_every_combination(interpreter: LineProcess, case: str) -> None:
    check(interpreter, case)


def test_a_dead_interpreter_is_a_failure_and_the_next_case_gets_a_new_one(interpreter: LineProcess) -> None:
    with pytest.raises(ChildProcessError, match="ended with -11 on 'crash'"):
        interpreter.ask("crash")
    check(interpreter, next(iter(CASES)))


@pytest.mark.parametrize("fault", ["value", "unset", "stale slot", "beside", "cache"])
def test_a_planted_fault_is_seen(interpreter: LineProcess, fault: str) -> None:
    verdict = Verdict(**interpreter.ask(f"planted {fault}"))
    assert verdict.faults or not verdict.error <= verdict.tolerance


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("q", "q: must be of 3 dimensions (torch.Size([4, 64]))"),
        ("q heads", "q: must be of a multiple of 2 heads (3)"),
        ("q strides", "q: must be contiguous in its last dimension, not of these strides ((256, 1, 4))"),
        ("k_cache", "k_cache: must be of head_dim 64 like q (80)"),
        ("k_cache dtype", "k_cache: must be torch.float32 or float8_e4m3fn (torch.bfloat16)"),
        ("k_cache block_size", "k_cache: must be of block size 16, 32, 64, ... (24)"),
        ("v_cache", "v_cache: must be of k_cache's blocks and heads (torch.Size([2, 16, 2, 64]))"),
        ("block_tables", "context_lens: must be of shape (3,) (torch.Size([2]))"),
        ("context_lens", "context_lens: must be int32 (torch.int64)"),
        ("context_lens device", "context_lens: must be on cpu like q (meta)"),
        ("sinks", "sinks: must be of shape (4,) (torch.Size([2]))"),
        ("window", "window: must be at least 1 (0)"),
        ("k_scale", "k_scale: must be 1.0 for a torch.float32 cache (2.0)"),
        ("num_splits", "num_splits: must be at least 1 (0)"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(interpreter: LineProcess, argument: str, message: str) -> None:
    assert interpreter.ask(f"refused {argument}") == {"error": message}


@pytest.mark.parametrize(
    ("num_programs", "max_context_len", "num_splits"),
    [
        (8, 131_072, 50),  # 132 processors, 3 programs each: 396 / 8, rounded up
        (317, 131_072, 1),  # four fifths of 396: nearly full without
        (316, 131_072, 2),
        (8, 1_000, 7),  # parts of at least 128 tokens
        (8, 100, 1),
        (1, 131_072, 64),  # the most that are merged
    ],
)
def test_contexts_are_split_until_the_device_is_full(
    monkeypatch: pytest.MonkeyPatch, num_programs: int, max_context_len: int, num_splits: int
) -> None:
    monkeypatch.setattr("engine.kernels.configs.num_processors", lambda device: 132)
    assert choose_num_splits(num_programs, max_context_len, torch.device("cpu")) == num_splits


def test_the_reference_loads_no_triton() -> None:
    code = "import sys, engine.kernels.reference; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
