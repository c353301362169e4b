"""Workspaces of --moe-backend: FlashInfer's own allocations (tests/facts/moe_workspaces.jsonl), and measured pools.

The rows are the bytes of the tensors that FlashInfer 0.7.2's allocation functions make on the meta device.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm.moe_backends import b12x_bytes
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FILE = Path(__file__).parents[1] / "facts" / "moe_workspaces.jsonl"
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
    """vllm-project/vllm#49079: 55 % less KV cache with 65,536 tokens a step on a GB10, of 58.38 GiB."""
    change: dict[str, Any] = {"max_num_batched_tokens": 65_536, "max_num_seqs": 512, "max_model_len": 131_072}
    auto, b12x = (
        planned(each, card="gb10", gpu_memory_utilization=0.8, **change) for each in (None, "flashinfer_b12x")
    )
    least, most = auto.available - b12x.available_high, auto.available - b12x.available_low
    assert least <= 0.55 * 58.38 * GIB <= most


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


@pytest.mark.parametrize("row", ACCEPTED, ids=[f"{row['model']}-{row['gpu']}-{row['backend']}" for row in ACCEPTED])
def test_a_backend_is_refused_where_vllm_refuses_it(row: dict[str, Any]) -> None:
    """tests/facts/moe_backends.jsonl: what vLLM 0.33's own choice of the experts' kernels answers."""
    args = EngineArgs(max_model_len=4096, moe_backend=row["backend"])
    refusal = plan(Request(catalog.load(row["model"]), gpu(row["gpu"]), args)).refusal
    assert ("--moe-backend" in refusal.text if refusal is not None else False) is not row["starts"]


def test_a_refused_backend_is_no_plan_and_its_remedy_is_printed(run: Run) -> None:
    words = ("estimate", "qwen3.6-35b-a3b-nvfp4", "--ctx", "8k", "--offline", "--exit-code", "--gpu", "h100-80g")
    result = run(*words, "--moe-backend", "flashinfer_b12x")
    assert result.code == 1
    assert "--moe-backend flashinfer_b12x needs compute capability 12.x, this GPU has 9.0" in result.out
    assert run(*words, "--moe-backend", "auto").code == 0
