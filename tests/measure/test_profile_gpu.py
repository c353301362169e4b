"""What a profile makes of a GPU's troubles: a fake driver under the real NVML package; torch computes on the CPU."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine import Engine, EngineConfig
from kvplan.cli.profile import refuse_shared
from kvplan.core.errors import EnvironmentProblem
from kvplan.hardware.nvml import open_nvml
from kvplan.measure import profile as runs
from kvplan.measure.profile import Outcome, Workload, profile
from kvplan.measure.reconcile import reconcile_run
from kvplan.measure.run_types import Progress
from kvplan.measure.rundir import Run, RunWriter, load_run
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.workloads.planned import PlannedRequest
from tests.support import fake_nvml
from tests.support.cli import Run as Command
from tests.support.cli import run as run  # the fixture
from tests.support.fake_nvml import GIB, MIB, FakeGpu
from tests.support.fake_nvml import install as install  # the fixture

CONFIG_JSON = catalog.expand(catalog.facts("smollm2-135m")["config"]) | {"num_hidden_layers": 2, "vocab_size": 1024}
SPEC = read_config(CONFIG_JSON, "config.json", "two layers")
CONFIG = EngineConfig(
    device="cpu", dtype="float32", load_format="dummy", num_blocks=9, max_model_len=32, max_num_seqs=2,
    max_num_batched_tokens=16,
)  # fmt: skip
WORKLOAD = Workload((PlannedRequest(8, 6),) * 2)
OTHER = 4242  # a pid that is not ours
INPUTS = {
    "total": 80 * GIB, "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 16, "max_model_len": 32,
    "max_num_seqs": 2, "max_num_batched_tokens": 16, "gpu_memory_utilization": 0.9, "num_blocks": 9, "backend": "torch",
}  # fmt: skip


def measured(folder: Path, gpu: FakeGpu, happens: Callable[[Progress], None] | None = None) -> tuple[Outcome, Run]:
    """A profile beside the fake GPU; `happens` sees each sample and may change the GPU."""
    manifest = {
        "model": {"name": SPEC.name, "config": dict(SPEC.config)}, "device": "cuda", "inputs": INPUTS,
        "environment": {}, "groups": 1,
    }  # fmt: skip
    with open_nvml() as nvml:
        outcome = profile(
            SPEC, CONFIG, WORKLOAD, RunWriter(folder, manifest), interval_s=0.01, gpu=nvml.devices()[0],
            watch=happens or (lambda values: None),
        )  # fmt: skip
    return outcome, load_run(folder)


def at_stage(stage: str, do: Callable[[], Any]) -> Callable[[Progress], None]:
    """Does it once, when the stage begins."""
    done: list[Any] = []

    def watch(values: Progress) -> None:
        if values["stage"] == stage and not done:
            done.append(do())

    return watch


def test_what_the_driver_says_is_in_every_sample(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu(compute=[(os.getpid(), 3 * GIB)])
    install(gpu)
    outcome, run = measured(tmp_path / "run", gpu)
    assert outcome.exit_code == 0
    for sample in run.samples:
        assert sample["device_total"] == 80 * GIB
        assert sample["device_reserved"] + sample["device_used"] + sample["device_free"] == 80 * GIB
        assert (sample["power_w"], sample["sm_clock_mhz"]) == (312.5, 1410)


def test_a_hidden_process_is_estimated_and_said_so(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu(used=10 * GIB)  # no process is listed
    install(gpu)

    def grow() -> None:
        gpu.used += 5 * GIB

    _, run = measured(tmp_path / "run", gpu, at_stage("prefill", grow))
    assert all(sample["process_is_estimated"] for sample in run.samples)
    assert run.samples[0]["process_used"] == 0
    assert run.samples[-1]["process_used"] == 5 * GIB


def test_another_process_that_moves_in_is_flagged_and_left_out(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu(used=10 * GIB, compute=[(OTHER, 1 * GIB)])
    install(gpu)

    def move_in() -> None:
        gpu.compute[0] = (OTHER, 21 * GIB)
        gpu.used += 20 * GIB

    _, run = measured(tmp_path / "run", gpu, at_stage("decode", move_in))
    foreign = [sample for sample in run.samples if sample["is_foreign"]]
    assert foreign
    assert all(sample["device_used"] == 30 * GIB for sample in foreign)
    result = reconcile_run(run)
    assert result.reported == 0  # the device held 10 GiB before and, without the guest, all along
    assert sum(row.size for row in result.rows) == result.reported + result.unreached
    assert [gap for gap in result.gaps if "another process took memory" in gap]


def test_a_gpu_lost_on_the_way_ends_the_run_with_what_was_measured(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu()
    install(gpu)

    def vanish() -> None:
        gpu.errors["nvmlDeviceGetMemoryInfo"] = gpu.errors["nvmlDeviceGetMemoryInfo_v2"] = fake_nvml.GPU_IS_LOST

    outcome, run = measured(tmp_path / "run", gpu, at_stage("decode", vanish))
    assert (outcome.exit_code, run.status) == (4, "partial")
    assert "lost" in str(run.cause)
    assert len(run.samples) > 1


def test_unified_memory_is_compared_by_torchs_account(tmp_path: Path, install: fake_nvml.Install) -> None:
    names = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
    gpu = FakeGpu(name="NVIDIA GB10", errors=dict.fromkeys(names, fake_nvml.NOT_SUPPORTED))
    install(gpu)
    _, run = measured(tmp_path / "run", gpu)
    assert run.samples[0]["device_is_host"]
    result = reconcile_run(run)
    assert {row.component: row.measured for row in result.rows}["context"] == 0
    assert sum(row.size for row in result.rows) == result.reported + result.unreached


def test_wsl_is_no_gate(tmp_path: Path, install: fake_nvml.Install, run: Command) -> None:
    gpu = FakeGpu()
    install(gpu)
    measured(tmp_path / "run", gpu)
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"environment": {}', '"environment": {"is_wsl": true}'))
    refused = run("reconcile", tmp_path / "run", "--max-error", "2%")
    assert refused.code == 2
    assert "under WSL the driver does not report" in refused.err


def test_device_rows_add_up_with_what_was_there_before(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu(used=2 * GIB)
    install(gpu)

    def grow(by: int) -> Callable[[], None]:
        def now() -> None:
            gpu.used += by

        return now

    context, later = at_stage("context", grow(500 * MIB)), at_stage("prefill", grow(3 * GIB))

    def both(values: Progress) -> None:
        context(values)
        later(values)

    _, run = measured(tmp_path / "run", gpu, both)
    result = reconcile_run(run)
    rows = {row.component: row.size for row in result.rows}
    assert rows["context"] == 500 * MIB
    assert result.reported == 500 * MIB + 3 * GIB
    assert sum(rows.values()) == result.reported + result.unreached


HANG_IN_A_STEP = """
import time
from engine.llm import Engine
from kvplan.measure import profile as runs
serve = runs._serve
def serve_with_less_patience(*args, **kwargs):
    runs.HANGS_AFTER_S = 0.2
    return serve(*args, **kwargs)
runs._serve = serve_with_less_patience
Engine._step = lambda self: time.sleep(60)
from kvplan.cli.main import run
run()
"""
HANG_IN_THE_START = """
import time
from kvplan.measure import profile as runs
runs.HANGS_AFTER_S = 0.2
def hang(spec, config, on_stage):
    on_stage("weights")
    time.sleep(60)
runs.Engine = hang
from kvplan.cli.main import run
run()
"""


@pytest.mark.parametrize(
    ("program", "stage", "status"),
    [
        pytest.param(HANG_IN_A_STEP, "prefill", "partial", marks=pytest.mark.full),
        (HANG_IN_THE_START, "weights", "failed"),
    ],
    ids=["in a step", "in the start"],
)
def test_what_never_returns_is_given_up(program: str, stage: str, status: str, tmp_path: Path) -> None:
    options = (
        "profile", "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--num-seqs", "1", "--prompt-tokens", "4",
        "--output-tokens", "2", "--max-num-batched-tokens", "16", "--timeout", "300ms", "-q",
        "-o", str(tmp_path / "run"),
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True, timeout=900)
    run = load_run(tmp_path / "run")
    assert done.returncode == 4
    assert (run.status, run.cause) == (status, f"hangs in stage {stage}, past its --timeout")
    assert f"hangs in stage {stage}" in done.stderr


def test_a_baseline_has_a_deadline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    recorders: list[runs.Recorder] = []
    start = runs.Recorder.start

    def watched(*args: Any, **kwargs: Any) -> Engine:
        deadlines.append(recorders[0].deadline_s)
        return Engine(*args, **kwargs)

    def known(recorder: runs.Recorder) -> None:
        recorders.append(recorder)
        start(recorder)

    monkeypatch.setattr(runs.Recorder, "start", known)
    monkeypatch.setattr(runs, "Engine", watched)
    profile(SPEC, CONFIG, WORKLOAD, RunWriter(tmp_path / "run", {}), timeout_s=100, baselines=("contiguous",))
    first, second = deadlines
    assert first is not None
    assert second is not None
    run = load_run(tmp_path / "run")
    begun = next(event["t"] for event in run.events if event.get("stage") == "drained")
    assert first < begun + 100 + runs.HANGS_AFTER_S <= second  # counted from the end of the first serving
    assert recorders[0].deadline_s is None


# --- before CUDA starts -----------------------------------------------------------------------------------------------


def test_cuda_is_left_alone_until_the_first_sample(
    tmp_path: Path, install: fake_nvml.Install, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function of torch.cuda is replaced by one that keeps its name."""
    install(FakeGpu(used=0))
    folder = tmp_path / "run"
    early: list[str] = []
    answers = {"is_available": True, "device_count": 1, "is_initialized": False}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            samples = folder / "samples.jsonl"
            if not (samples.exists() and samples.read_text()):
                early.append(name)
            if name in answers:
                return answers[name]
            raise RuntimeError(f"CUDA error: {name} on a machine without a GPU")

        return call

    for name, value in list(vars(torch.cuda).items()):
        if inspect.isfunction(value):
            monkeypatch.setattr(torch.cuda, name, counted(name))
    ended = run("profile", "smollm2-135m", "--device", "cuda", "-q", "-o", folder)
    assert ended.code == 4
    assert set(early) <= set(answers)
    record = load_run(folder)
    assert (record.status, record.cause) == ("failed", "CUDA error: init on a machine without a GPU")
    assert record.manifest["inputs"]["total"] == 80 * GIB


def test_the_manifest_ends_with_the_total_that_the_engine_saw(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu()
    install(gpu)
    _, run = measured(tmp_path / "run", gpu)
    assert run.manifest["inputs"]["total"] == psutil.virtual_memory().total  # it computed on the CPU
    assert run.manifest["inputs"]["block_size"] == 16


# --- what the driver warns of, and who else is there ------------------------------------------------------------------


def test_what_nvml_warns_of_is_kept_once(tmp_path: Path, install: fake_nvml.Install) -> None:
    gpu = FakeGpu(errors=dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), 3))
    install(gpu)
    _, run = measured(tmp_path / "run", gpu)
    warnings = [event["text"] for event in run.events if event["event"] == "warning"]
    assert warnings.count("GPU 0 has no memory of its own; totals are the machine's (/proc/meminfo)") == 1


def test_processes_that_are_not_listed_are_seen_by_what_is_used(install: fake_nvml.Install) -> None:
    gpu = FakeGpu(used=1 * GIB)  # 1% of 80 GiB is 819 MiB
    install(gpu)
    with open_nvml() as nvml:
        device = nvml.devices()[0]
        with pytest.raises(EnvironmentProblem, match="of processes that the driver does not list"):
            refuse_shared(device, allow=False)
        gpu.used = 100 * MIB
        refuse_shared(device, allow=False)
