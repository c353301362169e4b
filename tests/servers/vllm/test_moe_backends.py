"""--moe-backend: what vLLM 0.33 starts with and how it pads, its workspaces, and measured pools.

Rows of tests/facts/moe_backends.jsonl are what vLLM's own code answers for whole models: whether it starts, and the
bytes of a rank's experts. Those of tests/facts/moe_workspaces.jsonl are the bytes of the tensors that FlashInfer
0.7.2's allocation functions make on the meta device. kvplan/servers/vllm/moe_backends.txt is asked by
benchmarks/start_experts.py of vLLM's own classes.
"""

import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.start_experts import ACTIVATIONS, FLAGS
from benchmarks.start_experts_table import fitted, table
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import weight_layout
from kvplan.servers.vllm import expert_kernels
from kvplan.servers.vllm.expert_kernels import Kind
from kvplan.servers.vllm.moe_backends import BACKENDS, b12x_bytes
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import rank_weights, total_weights
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FILE = Path(__file__).parents[2] / "facts" / "moe_workspaces.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(row) for row in FILE.read_text().splitlines()]
ACCEPTED: list[dict[str, Any]] = [
    json.loads(row) for row in FILE.with_name("moe_backends.jsonl").read_text().splitlines()
]
SERVE = (
    "vllm serve nvidia/Qwen3.6-35B-A3B-NVFP4 --trust-remote-code --kv-cache-dtype=fp8 --max-model-len=180224 "
    "--max-num-batched-tokens=8192 --max-num-seqs=8 --gpu-memory-utilization=0.92"
)


def planned(backend: str | None, engine: str = "vllm@0.25", card: str = "rtx-pro-6000", **changes: Any) -> Plan:
    """The server of vllm-project/vllm#49476."""
    args = {
        "kv_cache_dtype": "fp8", "max_model_len": 180_224, "max_num_batched_tokens": 8192, "max_num_seqs": 8,
        "gpu_memory_utilization": 0.92, "moe_backend": backend, **changes,
    }  # fmt: skip
    spec = catalog.load("qwen3.6-35b-a3b-nvfp4")
    return plan(Request(spec, gpu(card), EngineArgs(**args), release=parse_engine(engine)))


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['experts']}x{row['hidden']}-{row['tokens']}" for row in ROWS])
def test_a_layers_workspaces_are_what_flashinfer_allocates(row: dict[str, Any]) -> None:
    shape = (row["experts"], row["topk"], row["hidden"], row["inner"], row["tokens"])
    own = b12x_bytes(*shape, split=True, gated=row.get("gated", True))
    allocated = row["static"] + row["dynamic"] + row["output"]
    assert 0 <= allocated - own <= allocated // 10_000  # left out: counters and a queue of tasks


@pytest.mark.parametrize(("backend", "logged"), [("marlin", 64.36), ("flashinfer_b12x", 52.89)])
def test_two_backends_on_one_card(backend: str, logged: float) -> None:
    """vllm-project/vllm#49476: the same server on an RTX PRO 6000 logs these GiB for its KV cache."""
    answer = planned(backend)
    assert answer.available / GIB == pytest.approx(logged, rel=0.015)
    assert answer.available_low / GIB <= logged <= answer.available_high / GIB


def test_a_large_step_takes_half_of_the_pool() -> None:
    """vllm-project/vllm#49079: 55% less KV cache with 65,536 tokens a step on a GB10, of 58.38 GiB."""
    change: dict[str, Any] = {"max_num_batched_tokens": 65_536, "max_num_seqs": 512, "max_model_len": 131_072}
    auto, b12x = (
        planned(backend, card="gb10", gpu_memory_utilization=0.8, **change) for backend in (None, "flashinfer_b12x")
    )
    least, greatest = auto.available - b12x.available_high, auto.available - b12x.available_low
    assert least <= 0.55 * 58.38 * GIB <= greatest


def test_a_backend_that_nobody_measured_widens_the_range() -> None:
    known, unknown = planned(None).estimates["buffers"], planned("hpc").estimates["buffers"]
    assert unknown.high - known.high == int(11.47 * GIB)
    assert "unknown workspace of hpc" in unknown.formula


def test_the_flag_is_neither_without_effect_nor_lost(run: Run) -> None:
    result = run("estimate", "--from-command", f"{SERVE} --moe-backend=flashinfer_b12x", "--gpu", "rtx-pro-6000")
    assert "--moe-backend flashinfer_b12x" in result.out
    assert "moe" not in result.err


# A card of 16 GB whose profile run fails in the backend's own allocation, in the form of vllm-project/vllm#49476.
LOG = """\
(APIServer pid=1) INFO 07-22 09:14:02 [utils.py:299] vLLM API server version 0.25.1
(APIServer pid=1) INFO 07-22 09:14:02 [utils.py:233] non-default args: {'model': 'nvidia/Qwen3.6-35B-A3B-NVFP4', \
'max_model_len': 180224, 'pipeline_parallel_size': 2, 'gpu_memory_utilization': 0.92, 'kv_cache_dtype': 'fp8', \
'max_num_batched_tokens': 8192, 'max_num_seqs': 8, 'moe_backend': 'flashinfer_b12x'}
(Worker_PP0 pid=120) INFO 07-22 09:14:40 [gpu_model_runner.py:4100] Starting to load model nvidia/Qwen3.6...
(Worker_PP0 pid=120) INFO 07-22 09:15:44 [gpu_model_runner.py:4210] Model loading took 10.36 GiB memory and 61.2 seconds
(Worker_PP0 pid=120) ERROR 07-22 09:15:59 [multiproc_executor.py:870]     self.model_runner.profile_run()
(Worker_PP0 pid=120) ERROR 07-22 09:15:59 [multiproc_executor.py:870] torch.OutOfMemoryError: CUDA out of memory. \
Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 15.46 GiB of which 58.00 MiB is free.
"""


def test_the_first_cure_is_the_backend_that_starts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG)
    answer = run("why", str(tmp_path / "server.log"), "--gpu-memory", "15.46GiB", "--offline").out
    assert "  1. --moe-backend marlin:" in answer
    command = answer[answer.index("Command with fix 1") :]
    assert "--moe-backend marlin" in command
    assert "flashinfer_b12x" not in command


def test_a_log_without_that_backend_has_no_such_cure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG.replace("flashinfer_b12x", "triton"))
    assert "marlin" not in run("why", str(tmp_path / "server.log"), "--gpu-memory", "15.46GiB", "--offline").out


def test_a_name_that_vllm_does_not_have_is_refused(run: Run) -> None:
    result = run("estimate", "qwen3-30b-a3b", "--gpu", "h100-80g", "--moe-backend", "marline")
    assert result.code == 2
    assert "did you mean marlin?" in result.err


def plan_of(row: dict[str, Any]) -> Plan:
    args = EngineArgs(
        max_model_len=4096, tensor_parallel_size=row.get("tp", 1), moe_backend=row["backend"],
        enable_expert_parallel=row.get("ep", False), max_loras=row.get("loras", 0),
    )  # fmt: skip
    return plan(Request(catalog.load(row["model"]), gpu(row["gpu"]), args))


def row_name(row: dict[str, Any]) -> str:
    flags = "-ep" * row.get("ep", False) + "-lora" * ("loras" in row)
    return f"{row['model']}-{row['gpu']}-{row['backend']}-tp{row.get('tp', 1)}{flags}"


@pytest.mark.parametrize("row", ACCEPTED, ids=row_name)
def test_a_backend_is_refused_where_vllm_refuses_it(row: dict[str, Any]) -> None:
    refusal = plan_of(row).refusal
    assert ("--moe-backend" in refusal.text if refusal is not None else False) is not row["starts"]


@pytest.mark.parametrize("row", [row for row in ACCEPTED if "experts" in row], ids=row_name)
def test_experts_are_padded_as_the_backend_needs(row: dict[str, Any]) -> None:
    answer = plan_of(row)
    assert rank_weights(answer.request.spec, weight_layout(answer.request, 0))["experts"] == row["experts"]


def test_marlin_on_hopper_takes_a_tenth_more_than_triton() -> None:
    """gpt-oss-120b on two H100: 1,440 inputs of an expert on a rank are padded to 1,536 and not 1,472; 2,880 hidden to
    3,072 for Marlin alone. Triton's values are then laid out in multiples of 256, Marlin's are not.
    """
    marlin, triton = (plan_of({"model": "gpt-oss-120b", "gpu": "h100-80g", "tp": 2, "backend": name})
                      for name in ("marlin", "triton"))  # fmt: skip
    experts = 36 * 128 * 3  # layers, experts, matrices of one shape each
    more = experts * (1536 * 3072 - 1472 * 2880) * 17 // 32  # values of 4 bits and a byte for 32 of them
    weights = [total_weights(answer.request.spec, weight_layout(answer.request, 0)) for answer in (marlin, triton)]
    biases = 2 * 36 * 128 * (2 * (1536 - 1472) + 3072 - 2880)
    assert weights[0] - weights[1] == more + biases


def test_every_line_of_the_table_is_read() -> None:
    _, *texts = expert_kernels.TABLE.read_text().splitlines()  # the first one lists capabilities
    blocks = "\n".join(texts).replace("\n  ", "\0").split("\n")
    counts = {key: block.count("\0") for block in blocks for key in block.split("\0")[0].split("; ")}
    assert {key: len(lines) for key, lines in expert_kernels.lines().items()} == counts
    named = {name for lines in expert_kernels.lines().values() for line in lines for name in line.backends}
    assert named <= set(BACKENDS)


def test_conditions_are_read_as_they_are_written() -> None:
    line = expert_kernels.line_of(
        "  triton | 90 | silu -lora | width:32 or hidden:128 whole:128 not width:64 | 128x256"
    )
    assert line.takes((32, 1, 32))  # a width of 32
    assert line.takes((48, 256, 384))  # three ranks of 128 in all, and a hidden width of two times 128
    assert not line.takes((48, 256, 96))
    assert not line.takes((64, 1, 64))  # the exception
    assert line.units == (128, 256)
    assert line.runs("triton", 90, Kind("silu", frozenset({"spread"})))
    assert not line.runs("triton", 90, Kind("silu", frozenset({"lora"})))


def test_a_grid_is_explained_by_one_of_two_conditions_or_by_one_without_another() -> None:
    shapes = [(width, hidden, 2) for width in (32, 48, 64, 96) for hidden in (64, 128)]
    for text in ("width:32", "width:64 or hidden:128", "width:32 not hidden:128"):
        line = expert_kernels.line_of(f"  marlin | 90 | any | {text} | 1x1")
        answers = [(shape, line.takes((shape[0], shape[1], 2 * shape[0]))) for shape in shapes]
        again = expert_kernels.line_of(f"  marlin | 90 | any | {fitted(answers, spread=False)} | 1x1")
        assert [again.takes((width, hidden, 2 * width)) for width, hidden, _ in shapes] == [ok for _, ok in answers]
    # What divides 32 and 64, and what divides 48 and 128, both divide 32 and 128, which is refused.
    with pytest.raises(ValueError, match="no condition explains"):
        fitted([(shape, shape in ((32, 64, 2), (48, 128, 2))) for shape in shapes], spread=False)


HOME = Path(os.environ.get("ORACLE_HOME") or "/nowhere")


@pytest.mark.skipif(
    not (HOME / "vllm-extra" / "humming").is_dir(), reason="vLLM's own code is not at hand (ORACLE_HOME)"
)
def test_the_table_is_what_vllm_answers(tmp_path: Path) -> None:
    out, key = tmp_path / "cells.jsonl", "fp8 fp8_block"
    words = [sys.executable, "-m", "benchmarks.start_experts", "ask", str(HOME), "--only", key, "-o", str(out)]
    subprocess.run(words, check=True, capture_output=True)
    fresh = [line for line in table(map(json.loads, out.read_text().splitlines())) if line.startswith("  ")]
    assert len(fresh) > 5
    kinds = [Kind(name, frozenset(flags)) for name in ACTIVATIONS for n in range(3) for flags in combinations(FLAGS, n)]
    stored = expert_kernels.lines()["fp8 fp8_block 128x128"]
    for name, kind, width in product(BACKENDS, kinds, (48, 96, 192, 256)):
        sizes = (width, 1024, width if "spread" in kind.flags else 2 * width)
        if name != "auto":
            mine, theirs = (
                any(line.runs(name, 90, kind) and line.takes(sizes) for line in lines)
                for lines in (stored, [expert_kernels.line_of(text) for text in fresh])
            )
            assert mine is theirs, (name, kind, width)


def test_a_refused_backend_is_no_plan_and_its_remedy_is_printed(run: Run) -> None:
    words = ("estimate", "qwen3.6-35b-a3b-nvfp4", "--ctx", "8k", "--offline", "--exit-code", "--gpu", "h100-80g")
    result = run(*words, "--moe-backend", "flashinfer_b12x")
    assert result.code == 1
    assert "--moe-backend flashinfer_b12x needs compute capability 12.0, this GPU has 9.0" in result.out
    assert run(*words, "--moe-backend", "auto").code == 0
