"""Host memory that torch pins, against torch's own allocator and published measurements."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, host_rows, kept_rows, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.allocator import pinned

GIB, MIB = 2**30, 2**20
FACTS = Path(__file__).parents[1] / "facts"
LAYER = (64 + 32 + 256 + 128) * MIB + 2 * 8192  # Llama-3.1-8B: 48, 32, 224 and 112 MiB, and two norms of 8 KiB


def planned(model: str, engine: str, machine: str = "h100-80g", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(machine), EngineArgs(**args), parse_engine(engine)))


def size_of(answer: Plan, name: str) -> int:
    return sum(size for row, size in kept_rows(answer) if row.name == name)


def test_a_pinned_tensor_takes_what_torch_s_allocator_asks_the_device_for() -> None:
    """Sizes of 216 parameters of 18 models, those around powers of two, and random ones.

    The answers are those of torch 2.13's CachingHostAllocatorImpl, compiled from its header with a function in place of
    cudaHostAlloc that notes the size.
    """
    lines = (FACTS / "pinned.csv").read_text(encoding="utf-8").splitlines()
    rows = [tuple(map(int, row)) for row in csv.reader(lines[1:])]
    assert len(rows) == 600
    assert [(size, pinned(size)) for size, _ in rows] == rows
    assert pinned(0) == 0


@pytest.mark.parametrize(
    ("requested", "measured"),
    [
        # vllm-project/vllm#50094, resident memory of one tensor, GiB
        (6, 8), (10, 16), (12, 16),
        # wtdcode/vllm-backport#67, RssShmem of one tensor, GiB; vllm-project/vllm#58185, an expert's w13
        (2.25, 4.008), (1.125, 2), (0.563, 1), (4.5, 8),
    ],
)  # fmt: skip
def test_one_tensor_takes_what_was_measured(requested: float, measured: float) -> None:
    assert pinned(round(requested * GIB)) / GIB == pytest.approx(measured, rel=0.003)  # measured to three digits


@pytest.mark.parametrize(("requested", "shmem"), [(200, 385.0), (400, 769.0)])
def test_offloaded_kv_of_a_hybrid_model_takes_what_a_node_measured(requested: int, shmem: float) -> None:
    """vllm-project/vllm#53042, vLLM 0.26, four ranks: tensors of 2,053 x 1,089,536 B, 24 in each, and the node's Shmem
    in GiB. The thread does not name its model; these are the tensors of Qwen3.8-2.4T with one draft token, whose text
    class 0.26 has below that of the model with a tower only.
    """
    spec = replace(catalog.load("qwen3.8-2.4t-a95b"), architecture="Qwen3_5MoeForConditionalGeneration")
    args = EngineArgs(
        max_model_len=2048, tensor_parallel_size=4, data_parallel_size=4,
        enable_expert_parallel=True, kv_cache_dtype="fp8", mamba_ssm_cache_dtype="bfloat16", block_size=16,
        enable_prefix_caching=True, speculative_method="mtp", num_speculative_tokens=1,
        kv_offloading_size=requested * GIB,
    )  # fmt: skip
    answer = plan(Request(spec, gpu("gb200"), args, parse_engine("vllm@0.26")))
    (row,) = (row for row in host_rows(answer) if row.name == "kv_offloading")
    if requested == 200:
        assert f": 2,053 x {4 * 24 * 1_089_536:,} B" in row.formula
    assert row.size / GIB == pytest.approx(shmem, rel=0.01)
    assert not row.in_shm


@pytest.mark.parametrize(
    ("engine", "gib"),
    [
        # 36 layers in one tensor of 40 GiB on each of two ranks; vllm-project/vllm#48436 measures 64 GB in each
        ("vllm@0.26+runner-v1", 2 * 64),
        ("vllm@0.26", 2 * 36 * 2),  # in a tensor of 1.11 GiB each
        ("vllm@0.27", 80),  # in one region of both ranks
    ],
)
def test_offloaded_kv_was_pinned_tensor_by_tensor_before_0_27(engine: str, gib: int) -> None:
    answer = planned("qwen3-8b", engine, tensor_parallel_size=2, max_model_len=4096, kv_offloading_size=80 * GIB)
    assert size_of(answer, "kv_offloading") / GIB == pytest.approx(gib, rel=1e-4)  # a chunk less


@pytest.mark.parametrize(
    ("model", "machine", "ratio"),
    [("llama-3.1-8b", "h100-80g", 1.15), ("llama-3.1-70b-awq", "h100-80g", 1.18)],  # vllm-project/vllm#56410
)
def test_offloaded_weights_take_the_published_ratio(model: str, machine: str, ratio: float) -> None:
    answer = planned(model, "vllm@0.33", machine, max_model_len=4096, cpu_offload_gb=10 * GIB)
    plain = planned(model, "vllm@0.33", machine, max_model_len=4096)
    assert size_of(answer, "weights") / (plain.memory.weights - answer.memory.weights) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(("engine", "copies"), [("vllm@0.28", 1), ("vllm@0.29", 2), ("vllm@0.33", 2)])
def test_fetched_weights_are_pinned_twice_from_0_29_on(engine: str, copies: int) -> None:
    """vLLM 0.33's own _CpuParamOffloader and device_loading_context, run with the allocator's rule: 4 linear layers of
    40,000 B take 524,288 B, of which half stays in torch's cache. Norms are not loaded through that context.
    """
    answer = planned("llama-3.1-8b", engine, max_model_len=4096, offload_group_size=4)
    assert size_of(answer, "weights") == 8 * (copies * (LAYER - 2 * 8192) + 2 * 8192)


def test_unpinned_weights_keep_their_size() -> None:
    """10 layers, of which the last lacks its norms: 480 MiB before rounding are 416."""
    pinned_size = size_of(planned("llama-3.1-8b", "vllm@0.33", max_model_len=4096, cpu_offload_gb=4 * GIB), "weights")
    assert pinned_size == 10 * LAYER - 2 * 8192
    plain = planned("llama-3.1-8b", "vllm@0.33+unpinned-weights", max_model_len=4096, cpu_offload_gb=4 * GIB)
    assert size_of(plain, "weights") == 10 * 416 * MIB + 9 * 2 * 8192


def test_a_sleeping_server_pins_each_segment_of_its_weights() -> None:
    """vLLM 0.33 device_allocator/cumem.py copies each segment of torch's into a pinned tensor: 32 layers, two tables of
    1,002 MiB, 32 MiB of rotary tables, and one segment of 2 MiB for all 65 norms.
    """
    answer = planned("llama-3.1-8b", "vllm@0.33", max_model_len=4096, enable_sleep_mode=True)
    assert size_of(answer, "weights") == (32 * 480 + 2 * 1024 + 32 + 2) * MIB
