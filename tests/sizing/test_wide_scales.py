"""Scales of fp8 blocks on GPUs without fp8 arithmetic: Marlin's kernels take one per output, in 16 bits."""

from collections import Counter
from dataclasses import replace

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import own_layout
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.allocator import loaded, weights_excess

# (outputs, inputs) and bytes of `weight` and `weight_scale_inv` after vLLM 0.33's own prepare_fp8_layer_for_marlin.
PREPARED = (((4096, 4096), 16777216, 262144), ((1536, 7168), 11010048, 172032), ((7168, 2048), 14680064, 229376))
# [experts, hidden, inner width] and those of w13, w2 and their scales after prepare_fp8_moe_layer_for_marlin.
EXPERTS = (((4, 2048, 768), (12582912, 6291456, 196608, 98304)), ((2, 7168, 256), (7340032, 3670016, 114688, 57344)))


def request(card: str, model: str = "qwen3-32b-fp8", engine: str = "vllm") -> Request:
    return Request(catalog.load(model), gpu(card), EngineArgs(max_model_len=8192), parse_engine(engine))


def test_prepared_scales_are_a_64th_of_the_values() -> None:
    for _, values, scales in PREPARED:
        assert scales == 2 * values // 128
    for _, (w13, w2, scales13, scales2) in EXPERTS:
        assert (scales13, scales2) == (2 * w13 // 128, 2 * w2 // 128)


@pytest.mark.parametrize("model", ["qwen3-32b-fp8", "qwen3-30b-a3b-fp8"])
def test_loaded_scales_are_the_prepared_ones(model: str) -> None:
    fp8_request = request("a100-80g", model)
    layout = own_layout(fp8_request, 0)
    assert layout is not None
    assert layout.wide_scales
    seen = Counter[bool]()
    for weight in fp8_request.spec.layer_weights[0]:
        (values, created), (scales, before), _ = loaded(fp8_request.spec, weight, 0, layout)
        once = loaded(fp8_request.spec, weight, 0, replace(layout, wide_scales=False))
        assert (values, created) == once[0]
        seen[scales > before] += 1
        assert scales in (before, values // 64)
    assert seen[True] == 4  # attention's two matrices, and two of the MLP or of the experts


def test_only_gpus_without_fp8_arithmetic_hold_them() -> None:
    """31.2e9 values in 64 layers: 31.2e9 x (1 / 64 - 1 / 4,096) bytes more, 0.45 GiB, before what segments round up."""
    fp8_request = request("a100-80g")
    layout = own_layout(fp8_request, 0)
    assert layout is not None
    more = weights_excess(fp8_request.spec, layout) - weights_excess(
        fp8_request.spec, replace(layout, wide_scales=False)
    )
    assert more == pytest.approx(31.2e9 * (1 / 64 - 1 / 4096), rel=0.05)
    for card, engine in (("l40s", "vllm"), ("h100-80g", "vllm"), ("a100-80g", "vllm@0.8")):
        other = own_layout(request(card, engine=engine), 0)
        assert other is not None
        assert not other.wide_scales
