"""What torch's allocator adds: by hand from its rules, and what real servers' logs show beyond the parameters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.units import GIB, MIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.allocator import blocks, excess, weights_excess, weights_reserved
from kvplan.sizing.weights import Layout

HALF = MIB // 2


@pytest.mark.parametrize(
    ("sizes", "added"),
    [
        ([100], 412),  # rounded to 512
        ([513], 511),  # to 1,024
        ([63 * HALF], HALF),  # 31.5 MiB in a segment of 32: half a MiB is not worth a block of its own
        ([49 * HALF], 0),  # 24.5 of 26: 1.5 MiB go back
        ([259 * MIB], MIB),  # 259 of 260: exactly 1 MiB is not split off
        ([12 * MIB], 0),
        ([9 * MIB, 9 * MIB], 0),  # 18 of one segment of 20; the 2 that are left are free
        ([19 * HALF, 19 * HALF], MIB),  # 9.5 twice in 20: the second takes the last 10.5, and 1 MiB goes with it
        ([49 * HALF, 3 * HALF], 0),  # the 1.5 MiB that went back are taken whole
        ([0, -1], 0),
    ],
)
def test_blocks_by_hand(sizes: list[int], added: int) -> None:
    assert excess(sizes) == added


def test_qwen_7b_takes_57_mib_more_than_its_parameters() -> None:
    # Each of 28 layers: qkv 31.5 of 32, gate and up 259 of 260, down 129.5 of 130 MiB, and o_proj 24.5 of 26 split off;
    # embedding and head 1,039.5 of 1,040 MiB each. Norms and biases are small.
    assert round(weights_excess(catalog.load("qwen2.5-7b-instruct"), Layout()) / MIB) == 28 * 2 + 1


# (model, TP, release, GPU, "Model loading took", where). GiB; logs have four decimals, some two.
LOGGED = [
    ("qwen2.5-7b-instruct", 1, (0, 6), "rtx-4090", 14.2487, "vllm-project/vllm#9356"),
    ("qwen2.5-7b-instruct", 4, (0, 6), "t4", 3.5546, "vllm-project/vllm#11173"),
    ("qwen2-7b-instruct", 2, (0, 10), "a100-80g", 7.1217, "dennislee22/vLLM-benchmarking"),
    ("qwen3-8b", 1, (0, 9), "a100-80g", 15.2683, "log of 0.9.2, repository not recorded"),
    ("qwen3-32b", 2, (0, 11), "h100-80g", 30.59, "llm-d-planner docs/empirical-vllm-memory-results.md"),
    ("qwen3-32b-awq", 1, (0, 8), "rtx-3090", 18.145, "log of 0.8.5.post1"),
    ("gemma-3-1b", 1, (0, 10), "a100-40g", 1.9147, "log of 0.10.1"),
    ("gemma-4-26b-a4b", 1, (0, 19), "a100-80g", 48.50, "myoceane.fr"),
    ("llama-4-scout", 8, (0, 12), "h200", 27.8072, "log of 0.12.0"),
    ("llama-3.1-70b", 8, (0, 6), "h200", 16.4605, "vllm-project/vllm#10702"),
    ("gpt-oss-120b", 1, (0, 11), "h100-80g", 64.38, "llm-d-planner docs/empirical-vllm-memory-results.md"),
]


@pytest.mark.parametrize(("model", "tp", "number", "device", "logged", "where"), LOGGED)
def test_logged_weights_are_met_within_their_digits(
    model: str, tp: int, number: tuple[int, int], device: str, logged: float, where: str
) -> None:
    args = EngineArgs(tensor_parallel_size=tp, dtype="float16" if device == "t4" else "auto")
    request = Request(catalog.load(model), gpu(device), args, vllm.version(number))
    settings = vllm.resolve(request.spec, request.gpu, args, request.release)
    beside = overheads.loaded(request.spec, settings, args, own_layout(request, 0))
    weights_gib = (sum(rank_weights(request, 0).values()) + beside.total) / GIB
    assert weights_gib == pytest.approx(logged, abs=0.006), where


@pytest.mark.parametrize(("gpus", "pp", "logged"), [(8, 1, 83.88), (8, 3, 25.0166)])
def test_the_release_that_multiplied_latent_projections_out_kept_them(gpus: int, pp: int, logged: float) -> None:
    # DeepSeek-R1 on 8 H200, and the first of three stages on 8 L20 each (vllm-project/vllm#13535): without the products
    # it would be 4.3 and 1.4 GiB less. Beside them, torch holds what its buffers of a load left.
    args = EngineArgs(tensor_parallel_size=gpus, pipeline_parallel_size=pp, max_model_len=32768)
    request = Request(catalog.load("deepseek-r1"), gpu("h200"), args, vllm.version((0, 7)))
    settings = vllm.resolve(request.spec, request.gpu, args, request.release)
    beside = overheads.loaded(request.spec, settings, args, own_layout(request, 0))
    weights_gib = (sum(rank_weights(request, 0).values()) + beside.total) / GIB
    assert weights_gib == pytest.approx(logged, rel=0.005)


# SGLang's "mem usage": what the device has less of, in whole segments. GB of its log are GiB, two decimals.
@pytest.mark.parametrize(
    ("model", "logged", "where"),
    [
        ("llama-3-8b", 14.98, "sgl-project/sglang#6753"),
        ("qwen2.5-0.5b", 0.98, "log of February 2026, repository not recorded"),
    ],
)
def test_segments_are_what_the_device_has_less_of(model: str, logged: float, where: str) -> None:
    assert weights_reserved(catalog.load(model), Layout()) / GIB == pytest.approx(logged, abs=0.006), where


def test_segments_by_hand() -> None:
    # 3 x 1 KiB share a small segment of 2 MiB, 9.5 MiB twice one of 20 MiB, and 24.5 MiB have one of 26
    assert blocks([1024, 1024, 1024, 19 * HALF, 19 * HALF, 49 * HALF])[1] == [2 * MIB, 20 * MIB, 26 * MIB]


@given(st.lists(st.integers(1, 64 * MIB), max_size=40))
def test_blocks_never_take_less_and_little_more(sizes: list[int]) -> None:
    added, segments = blocks(sizes)
    assert sum(sizes) + added <= sum(segments)
    assert 0 <= added <= len(sizes) * (MIB + 512)  # what is not split off is at most 1 MiB, and rounding 512 bytes
