"""Machines by any name in every command: cloud instances, MIG slices, labels, shared memories, and what is refused."""

import json
from pathlib import Path

import pytest

import kvplan
from kvplan.hardware import prices
from tests.support.cli import Run, refused, run

__all__ = ["run"]

MODEL = ("llama-3.1-8b", "--ctx", "8k")


def test_an_instance_is_planned_with_its_number_of_gpus(run: Run) -> None:
    ran = run("estimate", *MODEL, "--gpu", "g6.12xlarge", "--format", "json")
    assert ran.json["inputs"]["gpu"]["name"] == "l4"
    assert ran.json["inputs"]["args"]["tensor_parallel_size"] == 4
    assert "kvplan: note: g6.12xlarge is 4 x l4 with 192 GiB of host memory" in ran.err
    same = run("estimate", *MODEL, "--gpu", "4xl4", "--format", "json")
    assert ran.json["memory"] == same.json["memory"]


def test_fewer_gpus_than_an_instance_has_may_be_used_and_more_not(run: Run) -> None:
    ran = run("estimate", *MODEL, "--gpu", "g6.12xlarge", "--tp", "2", "--format", "json")
    assert ran.json["inputs"]["args"]["tensor_parallel_size"] == 2
    more = run("estimate", *MODEL, "--gpu", "g6.12xlarge", "--tp", "8")
    assert refused(more) == "--gpu: g6.12xlarge has 4 GPUs, and --tp x --pp x --dp make 8; change one of them"


def test_an_instance_with_too_little_host_memory_is_told(run: Run) -> None:
    ran = run("estimate", *MODEL, "--gpu", "g6.xlarge", "--cpu-offload-gb", "14")
    assert "warning: the host memory of g6.xlarge is 16.00 GiB, less than" in ran.err
    assert "warning" not in run("estimate", *MODEL, "--gpu", "g6.4xlarge", "--cpu-offload-gb", "14").err


def test_a_price_of_an_instance_is_divided_by_its_gpus(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("p5.48xlarge: 55.04\ng6.xlarge: 0.80\nnvidia-h200-141gb: 4\n")
    assert prices.read(file).per_hour == {"h100-80g": 6.88, "l4": 0.8, "h200": 4.0}


@pytest.mark.parametrize("name", ["NVIDIA-L4", "nvidia-l4", "nvidia.com/gpu.product=NVIDIA-L4", "l4"])
def test_a_label_is_read_by_every_way_to_ask(run: Run, tmp_path: Path, name: str) -> None:
    assert run("estimate", *MODEL, "--gpu", name, "--format", "json").json["inputs"]["gpu"]["name"] == "l4"
    assert run("gpus", name, "--format", "json").json["name"] == "l4"
    assert kvplan.estimate("llama-3.1-8b", gpu=name, max_model_len=8192).plan.request.gpu.name == "l4"
    policy = tmp_path / "kvplan.yaml"
    policy.write_text(
        f"version: 1\ntargets:\n  - id: a\n    model: llama-3.1-8b\n    gpu: {json.dumps(name)}\n"
        "    max_model_len: 4096\n    rules: {fits: true}\n"
    )
    assert run("check", policy).code == 0


def test_a_logged_slice_lies_in_the_plans_range(run: Run) -> None:
    """A log of vLLM 0.10.1 on an A100 MIG 1g.5gb: 1.40 GiB of KV cache for gemma-3-1b-it; its batch is not stated."""
    model = ("google/gemma-3-1b-it", "--ctx", "32k", "--engine", "vllm@0.10")
    memory = run("estimate", *model, "--gpu", "a100-1g.5gb", "--format", "json").json["memory"]
    assert memory["available_low"] <= 1.40 * 2**30 <= memory["available_high"]


def test_slices_are_not_joined(run: Run) -> None:
    ran = run("estimate", "qwen3-0.6b", "--ctx", "8k", "--gpu", "h100-1g.10gb", "--tp", "2")
    assert refused(ran).startswith("--gpu h100-80g-1g.10gb is a MIG slice, and NCCL joins none with others (2 ranks)")
    assert run("estimate", "qwen3-0.6b", "--gpu", "h100-1g.10gb", "--ctx", "8k", "--exit-code").code == 0


@pytest.mark.parametrize(
    ("name", "engine", "text"),
    [
        ("m4-max-64g", "vllm", "vLLM is not planned on Apple GPUs (m4-max-64g); "),
        ("M1 8GB", "sglang", "SGLang is not planned on Apple GPUs (m1-8g); "),
        ("b60", "vllm", "vLLM is not planned on Intel GPUs (arc-pro-b60); "),
    ],
)
def test_a_makers_gpus_without_rules_are_refused_with_what_serves_on_them(
    run: Run, name: str, engine: str, text: str
) -> None:
    assert text in refused(run("estimate", *MODEL, "--gpu", name, "--engine", engine))


@pytest.mark.parametrize(
    ("name", "engine", "needs"), [("p40", "vllm", "7.0, this GPU has 6.1"), ("gtx-1080-ti", "sglang", "7.5")]
)  # vLLM's CMakeLists.txt begins at 7.0, SGLang says "only supports sm75 and above"
def test_a_gpu_without_kernels_is_refused(run: Run, name: str, engine: str, needs: str) -> None:
    ran = run("estimate", *MODEL, "--gpu", name, "--engine", engine)
    assert f"does not start: it needs compute capability {needs}" in ran.out


def test_a_shared_memory_has_room_for_both(run: Run) -> None:
    flags = ("--gpu", "dgx-spark", "--cpu-offload-gb", "30", "--gpu-memory-utilization")
    ran = run("estimate", *MODEL, *flags, "0.8")
    assert "warning: the memory that GPU and host share is 106.49 GiB, less than" in ran.err
    assert "lower --gpu-memory-utilization to 0.74 or less" in ran.err
    lower = run("estimate", *MODEL, *flags, "0.74").err
    assert "warning" not in lower
    assert "GPU and host share one memory of 121.69 GiB: the " in lower
    apart = run("estimate", *MODEL, "--gpu", "h200", *flags[2:4]).err
    assert "share one memory" not in apart


def test_a_macs_layers_on_the_host_leave_its_gpu_room(run: Run) -> None:
    """llama.cpp's own --fit on a device of 48 GiB that reads no buffer of the host's, as Metal's does not
    (ggml-metal.cpp, `supports_buft`): 77 layers, weights, caches and compute buffers with flash attention.
    """
    ran = run("estimate", "llama-3.1-70b", "--gpu", "m4-max-64g", "--ctx", "32k", "--format", "json")
    device, host = ran.json["slots"]["places"]
    assert ran.json["fits"]
    assert ran.json["slots"]["gpu_layers"] == 77
    assert [device[name] for name in ("weights", "context", "compute")] == [39745208576, 10200547328, 469502208]
    assert [host[name] for name in ("weights", "context", "compute")] == [2767323392, 536870912, 67121184]


def test_a_file_beyond_the_memory_that_both_share_is_read_from_the_disk(run: Run) -> None:
    ran = run("estimate", "llama-3.1-405b", "--gpu", "m4-max-48g", "--ctx", "8k")
    assert "warning: the memory that GPU and host share is 48.00 GiB, less than" in ran.err
    assert "take a smaller file (--quant)" in ran.err


def test_models_of_a_mac_are_those_whose_files_are_whole_on_its_gpu(run: Run) -> None:
    """Metal may take 6 of 8 GiB and --fit leaves 1: of the five sizes of Qwen3 no file of 14B's 9 GB."""
    rows = run("models", "qwen3", "--gpu", "m1-8g", "--max-params", "20B", "--format", "json").json["fitting"]
    names = {row["name"] for row in rows}
    assert {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"} <= names
    assert "qwen3-14b" not in names
    assert all(row["stored_bytes"] < 5 * 2**30 for row in rows)
    assert next(row["scheme"] for row in rows if row["name"] == "qwen3-4b") == "Q4_K_M"


def test_a_gpu_with_a_limit_of_its_own_leaves_the_rest_to_the_host(run: Run) -> None:
    """GTT of Strix Halo: 112.5 of 128 GiB logged; what the host uses lies in the rest."""
    ran = run("estimate", *MODEL, "--gpu", "strix-halo", "--format", "json")
    assert ran.json["memory"]["total"] == 115200 * 2**20
    assert "other_processes" not in json.dumps(ran.json["assumptions"])
    assert run("estimate", *MODEL, "--gpu", "gb10", "--exit-code").code == 1  # 0.92 of a memory that the host uses
    assert run("estimate", *MODEL, "--gpu", "strix-halo", "--exit-code").code == 0
