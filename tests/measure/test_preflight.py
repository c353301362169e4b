"""`kvplan preflight`: played GPUs, memory and limits decide whether a server starts, and which flag helps."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan.hardware import nvml
from kvplan.measure import machine
from tests.support.cli import Ran, Run, refused
from tests.support.cli import run as run
from tests.support.fake_nvml import GIB, MIB, NOT_SUPPORTED, FakeGpu, Install
from tests.support.fake_nvml import install as install
from tests.support.fake_nvml import no_driver as no_driver

QWEN = "vllm serve Qwen/Qwen3-8B --max-model-len 8192"
H100 = "NVIDIA H100 80GB HBM3"
Host = Callable[..., None]


def h100(used: int = 0, **more: Any) -> FakeGpu:
    """79.18 GiB by CUDA: 80 GiB less the 0.82 that the driver reserves."""
    whole = FakeGpu(name=H100, total=80 * GIB, reserved=840 * MIB, used=used, capability=(9, 0))
    return replace(whole, **more)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(total, available, groups={...}, shm=...)`: its /proc/meminfo, control groups and /dev/shm, in GiB."""
    monkeypatch.setattr(nvml, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CONTAINED", ())

    def play(
        total: int = 256,
        available: int = 200,
        groups: dict[str, str] | None = None,
        own: str = "0::/",
        shm: float = 64,
        names: dict[int, str] | None = None,
    ) -> None:
        files = {"proc/meminfo": f"MemTotal: {total << 20} kB\nMemAvailable: {available << 20} kB\n"}
        files |= {"proc/self/cgroup": own + "\n"} | {f"cgroup/{name}": text for name, text in (groups or {}).items()}
        files |= {f"proc/{pid}/comm": name + "\n" for pid, name in (names or {}).items()}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="ascii")
        blocks = SimpleNamespace(f_frsize=4096, f_blocks=int(shm * GIB) // 4096)
        monkeypatch.setattr(os, "statvfs", lambda path: blocks)

    play()
    return play


def checks(ran: Ran) -> dict[str, str]:
    return {check["name"]: check["status"] for check in ran.json["checks"]}


def preflight(run: Run, *words: str) -> Ran:
    return run("preflight", "-q", "--format", "json", *words)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_an_idle_gpu_starts_the_server(run: Run, install: Install, host: Host) -> None:
    install(h100())
    ran = run("preflight", "-q", QWEN)
    assert ran.code == 0
    assert ran.out.startswith("Yes: qwen3-8b starts on h100-80g (vllm@0.33), for ")


def test_the_memory_of_other_processes_is_refused_by_name_with_the_share_that_is_free(
    run: Run, install: Install, host: Host
) -> None:
    host(names={4711: "python3"})
    install(h100(30 * GIB, compute=[(4711, 30 * GIB)]))
    ran = preflight(run, QWEN)
    assert ran.code == 1
    assert ran.json["outcome"] == "does not start"
    assert "(python3 4711 30.00 GiB)" in ran.json["answer"]
    # 79.18 GiB - 30 - 0.5 of the server's own CUDA context = 48.68 are free: 0.61 of 79.18
    flags = [cure["flags"] for cure in ran.json["cures"] if cure["flags"]]
    assert flags[0] == ["--gpu-memory-utilization 0.61"]
    (command,) = [cure["command"] for cure in ran.json["cures"] if cure["flags"] == flags[0]]
    assert command == f"{QWEN} --gpu-memory-utilization 0.61"


def test_the_printed_fix_starts_when_it_is_asked_again(run: Run, install: Install, host: Host) -> None:
    install(h100(30 * GIB, compute=[(4711, 30 * GIB)]))
    first = preflight(run, QWEN)
    command = next(cure["command"] for cure in first.json["cures"] if cure["command"])
    assert preflight(run, *shlex.split(command)).code == 0


def test_a_context_that_does_not_fit_gets_the_longest_that_does(run: Run, install: Install, host: Host) -> None:
    install(FakeGpu(name="NVIDIA GeForce RTX 4090", total=24564 * MIB, reserved=350 * MIB, used=0, capability=(8, 9)))
    ran = preflight(run, "vllm serve meta-llama/Llama-3.1-8B-Instruct")
    assert ran.code == 1
    assert ran.json["cures"][0]["kind"] == "max_model_len"
    assert ran.json["cures"][0]["starts"] is True


def test_a_mig_instance_has_its_own_memory(run: Run, install: Install, host: Host) -> None:
    part = FakeGpu(
        uuid="MIG-1", name=f"{H100} MIG 1g.10gb", total=9984 * MIB, reserved=0, used=16 * MIB, is_mig=True,
        capability=(9, 0),
    )  # fmt: skip
    install(h100(uuid="GPU-1", mig=[part]))
    ran = preflight(run, QWEN)
    assert ran.code == 1  # 15.26 GiB of weights
    assert ran.json["gpu"] == "h100-80g-1g.10gb"
    assert ran.json["machine"]["gpus"][0]["is_mig"] is True
    assert ran.json["machine"]["gpus"][0]["memory"]["total"] == 9984 * MIB
    assert preflight(run, "vllm serve Qwen/Qwen3-0.6B --max-model-len 4096").code == 0


def test_more_gpus_than_are_visible(run: Run, install: Install, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    install(h100(uuid="GPU-1"), h100(uuid="GPU-2"))
    ran = preflight(run, f"{QWEN} --tensor-parallel-size 4")
    assert ran.code == 1
    assert checks(ran)["GPUs"] == "fail"
    assert ran.json["cures"][0]["flags"] == ["--tensor-parallel-size 2"]
    assert preflight(run, f"{QWEN} --tensor-parallel-size 2").code == 0
    assert preflight(run, f"CUDA_VISIBLE_DEVICES=1 {QWEN} --tensor-parallel-size 2").code == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert preflight(run, f"{QWEN} --tensor-parallel-size 2").code == 1


def test_the_fullest_of_several_gpus_decides(run: Run, install: Install, host: Host) -> None:
    install(h100(uuid="GPU-1"), h100(20 * GIB, uuid="GPU-2", compute=[(7, 20 * GIB)]))
    assert preflight(run, QWEN).code == 0  # it takes the first
    ran = preflight(run, f"{QWEN} --tensor-parallel-size 2")
    assert ran.code == 1
    assert "on GPU 1" in ran.json["answer"]


def test_an_unknown_gpu_is_planned_by_its_memory(run: Run, install: Install, host: Host) -> None:
    install(FakeGpu(name="NVIDIA Something New", total=96 * GIB, reserved=GIB, used=0, capability=(12, 0)))
    ran = preflight(run, QWEN)
    assert (ran.code, ran.json["gpu"]) == (0, "NVIDIA Something New")


# --- unified memory ---------------------------------------------------------------------------------------------------


def gb10() -> FakeGpu:
    errors = {"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    return FakeGpu(name="NVIDIA GB10", capability=(12, 1), errors=errors)


def test_a_gb10_has_what_its_host_has_available(run: Run, install: Install, host: Host) -> None:
    install(gb10())
    host(total=120, available=116)
    assert preflight(run, f"{QWEN} --gpu-memory-utilization 0.9").code == 0
    host(total=120, available=70)  # the page cache counts as available; what processes hold does not
    ran = preflight(run, f"{QWEN} --gpu-memory-utilization 0.9")
    assert ran.code == 1
    assert ran.json["machine"]["gpus"][0]["memory"]["is_host"] is True
    assert ran.json["machine"]["gpus"][0]["memory"]["free"] == 70 * GIB
    # 70 GiB less 0.5 of the context, of 120: 0.57
    assert ["--gpu-memory-utilization 0.57"] in [cure["flags"] for cure in ran.json["cures"]]


# --- host memory ------------------------------------------------------------------------------------------------------

OFFLOAD = f"{QWEN} --kv-offloading-size 32 --kv-offloading-backend native"


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("0::/pod/box", {"pod/box/memory.max": "max\n", "pod/memory.max": f"{20 * GIB}\n"}),
        ("0::/", {"memory.max": f"{20 * GIB}\n", "memory.current": "0\n"}),
        ("4:memory:/pod\n0::/", {"memory/pod/memory.limit_in_bytes": f"{20 * GIB}\n"}),
        (
            "0::/",
            {"memory.max": f"{40 * GIB}\n", "memory.current": f"{30 * GIB}\n", "memory.stat": f"inactive_file {GIB}\n"},
        ),
    ],
    ids=["a parent's", "version 2", "version 1", "in use"],
)
def test_a_pods_limit_counts_what_the_server_keeps_on_the_host(
    run: Run, install: Install, host: Host, own: str, groups: dict[str, str]
) -> None:
    install(h100())
    host(own=own, groups=groups)
    ran = preflight(run, OFFLOAD)
    assert (ran.code, checks(ran)["host memory"]) == (1, "fail")
    assert "the memory limit" in ran.json["answer"]
    assert preflight(run, QWEN).code == 0


def test_no_limit_leaves_what_the_host_has(run: Run, install: Install, host: Host) -> None:
    install(h100())
    host(own="4:memory:/", groups={"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert preflight(run, OFFLOAD).json["machine"]["limit"] is None
    host(available=10)
    assert preflight(run, OFFLOAD).code == 1


def test_a_small_shm_stops_gpus_that_cannot_reach_each_other(run: Run, install: Install, host: Host) -> None:
    host(shm=1 / 16)  # Docker's default, 64 MiB
    cards = [FakeGpu(uuid=f"GPU-{n}", name="NVIDIA GeForce RTX 4090", total=24564 * MIB, reserved=350 * MIB, used=0,
                     capability=(8, 9)) for n in range(2)]  # fmt: skip
    install(*cards)
    ran = run("preflight", "-q", f"{QWEN} --tensor-parallel-size 2")
    assert ran.code == 1
    assert "--shm-size 16g" in ran.out
    install(h100(uuid="GPU-1"), h100(uuid="GPU-2"))
    assert checks(preflight(run, f"{QWEN} --tensor-parallel-size 2"))["/dev/shm"] == "risk"


# --- driver and build -------------------------------------------------------------------------------------------------


def test_a_driver_older_than_the_build(run: Run, install: Install, host: Host) -> None:
    install(h100(), driver=b"550.54.15", cuda=12040)
    new = "docker run --gpus all vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3-8B --max-model-len 8192"
    ran = preflight(run, new)
    assert (ran.code, checks(ran)["driver"]) == (1, "fail")  # CUDA 13 takes 580 or newer
    assert preflight(run, new.replace("v0.33.0", "v0.33.0-cu129")).code == 0
    assert preflight(run, new.replace("v0.33.0", "v0.11.0")).code == 0


def test_a_build_older_than_the_gpu(run: Run, install: Install, host: Host) -> None:
    install(FakeGpu(name="NVIDIA B200", total=183359 * MIB, reserved=700 * MIB, used=0, capability=(10, 0)))
    ran = run("preflight", "-q", "--engine", "vllm@0.8.5", QWEN)
    assert ran.code == 1
    assert "use vllm@0.9 or newer" in ran.out
    assert preflight(run, "--engine", "vllm@0.9", QWEN).code == 0


# --- what is asked ----------------------------------------------------------------------------------------------------

MANIFEST = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.33.0
          args: [--model, Qwen/Qwen3-8B, --max-model-len, "8192", --kv-offloading-size, "32"]
          resources: {limits: {nvidia.com/gpu: 1, memory: 16Gi}}
"""


def test_a_manifest_states_its_own_limits(run: Run, install: Install, host: Host, tmp_path: Path) -> None:
    install(h100())
    file = tmp_path / "chat.yaml"
    file.write_text(MANIFEST, encoding="utf-8")
    ran = preflight(run, str(file))
    assert (ran.code, checks(ran)["host memory"]) == (1, "fail")
    file.write_text(MANIFEST.replace("16Gi", "64Gi"), encoding="utf-8")
    assert preflight(run, str(file)).code == 0
    file.write_text(MANIFEST + "---" + MANIFEST.replace("name: chat", "name: other"), encoding="utf-8")
    assert "name one with --container" in refused(run("preflight", str(file)))
    assert preflight(run, "--container", "other", str(file)).code == 1


def test_a_command_may_be_the_last_words(run: Run, install: Install, host: Host, tmp_path: Path) -> None:
    install(h100())
    words = (*QWEN.split(), "--port", "8001")
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/sh\nexport VLLM_LOGGING_LEVEL=INFO\nexec " + QWEN + "\n", encoding="utf-8")
    forms = (words, ("--", *words), (shlex.join(words),), (str(script),))
    answers = [preflight(run, *form).json for form in forms]
    assert all(answer == answers[0] for answer in answers)


def test_without_a_driver_the_gpu_is_named_and_the_rest_is_checked(run: Run, no_driver: None, host: Host) -> None:
    assert "name it with --gpu" in refused(run("preflight", "-q", QWEN), 3)
    ran = preflight(run, QWEN, "--gpu", "h100-80g")
    assert (ran.code, checks(ran)["GPUs"], checks(ran)["GPU memory"]) == (0, "unknown", "unknown")
    assert "no libnvidia-ml.so.1" in ran.json["machine"]["problem"]
    assert preflight(run, "vllm serve meta-llama/Llama-3.1-70B-Instruct", "--gpu", "h100-80g").code == 1


@pytest.mark.parametrize("words", [(), ("vllm serve",), ("ls -l",), (f"{QWEN} --max-num-seqs many",)])
def test_a_bad_question_exits_with_2(run: Run, no_driver: None, host: Host, words: tuple[str, ...]) -> None:
    assert run("preflight", "--gpu", "h100-80g", *words).code == 2


def test_a_path_of_the_container_is_named_by_model(run: Run, no_driver: None, host: Host) -> None:
    words = ("vllm serve /models/target --max-model-len 8192", "--gpu", "h100-80g")
    assert "say which it is with --model NAME" in refused(run("preflight", "-q", *words))
    assert preflight(run, *words, "--model", "qwen3-8b").json["model"] == "qwen3-8b"


def test_a_close_start_is_refused_only_if_strict(run: Run, no_driver: None, host: Host) -> None:
    # gpt-oss-120b on an H100 with vLLM 0.11: 38 B a sampled entry are too much, FlashInfer's 14, if installed, are not
    words = ("vllm serve openai/gpt-oss-120b --max-model-len 32768", "--gpu", "h100-80g", "--engine", "vllm@0.11")
    ran = preflight(run, *words)
    assert (ran.code, ran.json["outcome"]) == (0, "may not start")
    assert preflight(run, *words, "--strict").code == 1
    assert json.loads(ran.out)["cures"]


def test_a_default_batch_that_has_too_few_state_blocks_is_refused(run: Run, no_driver: None, host: Host) -> None:
    """vLLM's own line: max_num_seqs (1024) exceeds available Mamba cache blocks; `estimate` chooses a smaller batch."""
    ran = preflight(run, "vllm serve Qwen/Qwen3.6-27B-FP8 --gpu-memory-utilization 0.95", "--gpu", "h100-80g")
    assert ran.code == 1
    assert ran.json["cures"][0]["kind"] == "max_num_seqs"


# --- a server that places layers --------------------------------------------------------------------------------------

LLAMA = "llama-server -hf unsloth/Qwen3-32B-GGUF:Q4_K_M -c 8192"


def rtx_3090(used: int) -> FakeGpu:
    return FakeGpu(name="NVIDIA GeForce RTX 3090", total=24576 * MIB, reserved=350 * MIB, used=used, capability=(8, 6))


def test_layers_are_placed_in_what_is_free_now(run: Run, install: Install, host: Host) -> None:
    texts = []
    for used in (0, 8 * GIB):
        install(rtx_3090(used))
        ran = preflight(run, LLAMA)
        (check,) = [check for check in ran.json["checks"] if "layers on GPUs" in check["text"]]
        texts.append((ran.code, check["status"], check["text"]))
    (idle, ok, whole), (busy, fitted, fewer) = texts
    assert (idle, ok, busy, fitted) == (0, "ok", 0, "ok")
    assert whole.startswith("65 of 65 layers on GPUs")
    assert int(fewer.partition(" ")[0]) < 65  # --fit makes do with 8 GiB less


def test_layers_that_are_stated_and_do_not_fit_in_what_is_free_are_refused(
    run: Run, install: Install, host: Host
) -> None:
    install(rtx_3090(8 * GIB))
    ran = preflight(run, f"{LLAMA} -ngl 99 --fit off")
    assert (ran.code, ran.json["outcome"]) == (1, "does not start")
