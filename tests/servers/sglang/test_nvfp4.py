"""ModelOpt's NVFP4 experts on SGLang before Blackwell: a second copy of their block scales stays on the GPU.

tests/facts/nvfp4_sglang.jsonl: bytes of all parameters of SGLang 0.5.23's own class on torch's meta device, as on H100,
and bytes of block scales of layers of experts [experts, hidden, inner width] after SGLang's own
process_weights_after_loading on a CPU, with Marlin's kernels (H100) and with CUTLASS's (B200).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.tensors import TensorInfo
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.sglang.spread import spread
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.stored import is_twice
from kvplan.sizing.weights import Layout, swizzled, total_weights, up
from tests.support.oracle_data import needs_oracle_data, spec_named
from tests.support.refusals import reason_of

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "facts" / "nvfp4_sglang.jsonl").read_text().splitlines()
]
LAYERS = [row for row in ROWS if "scales" in row]
MODELS = [row for row in ROWS if "params" in row]
SCALES = 1e-5  # of KV caches, 8 bytes a layer, and DeepSeek-V4's tables


def weights(model: str, card: str = "h100-80g", engine: str = "sglang", tp: int = 1) -> int:
    args = EngineArgs(tensor_parallel_size=tp)
    request = Request(spec=spec_named(model), gpu=gpu(card), args=args, release=parse_engine(engine))
    return sum(rank_weights(spread(request) if engine.startswith("sglang") else request, 0).values())


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: f"{row['inputs']['gpu']}-{row['inputs']['experts']}")
def test_scales_of_a_layer_are_those_of_sglangs_own_code(row: dict[str, Any]) -> None:
    experts, hidden, inner = row["inputs"]["experts"]
    once = experts * (hidden // 16 * 2 * inner + inner // 16 * hidden)
    twice = experts * (swizzled(hidden // 16, 2 * inner) + swizzled(inner // 16, hidden))
    assert row["scales"] == once + (twice if row["inputs"]["gpu"] == "H100" else 0)


@needs_oracle_data
def test_weights_equal_sglangs_own_classes() -> None:
    assert len(MODELS) == 20
    for row in MODELS:
        own = weights(row["inputs"]["model"], tp=row["inputs"]["tp"])
        assert own == pytest.approx(row["params"], rel=SCALES, abs=0), row


def test_a_catalog_models_weights_equal_sglangs_own_class() -> None:
    for row in MODELS:
        if row["inputs"]["model"] == "nvidia__GLM-5.1-NVFP4":
            own = weights("glm-5.1-nvfp4", tp=row["inputs"]["tp"])
            assert own == pytest.approx(row["params"], rel=SCALES, abs=0)


def test_only_sglang_before_blackwell_keeps_them_twice() -> None:
    """75 layers of 256 experts of 3 matrices of 6,144 x 2,048: one byte of scale for every 16 numbers."""
    copy = 75 * 256 * 3 * 6144 * 2048 // 16
    once = weights("glm-5.1-nvfp4", "b200")
    assert weights("glm-5.1-nvfp4") == weights("glm-5.1-nvfp4", "a100-80g") == once + copy
    assert weights("glm-5.1-nvfp4", engine="sglang@0.5.15") == once + copy
    assert weights("glm-5.1-nvfp4", "b200", engine="sglang@0.5.15") == once
    assert weights("glm-5.1-nvfp4", engine="vllm") == weights("glm-5.1-nvfp4", "b200", "vllm")


def test_a_release_that_does_not_load_it_is_refused() -> None:
    """get_min_capability of ModelOptFp4Config: 100 in 0.5.9, 0.5.10 and 0.5.12, 80 in 0.5.15, 0.5.19 and 0.5.23."""
    spec, args = catalog.load("glm-5.1-nvfp4"), EngineArgs(tensor_parallel_size=8, max_model_len=8192)
    for engine, card, fits in (("0.5.12", "h200", False), ("0.5.12", "b200", True), ("0.5.15", "h200", True)):
        request = Request(spec=spec, gpu=gpu(card), args=args, release=parse_engine(f"sglang@{engine}"))
        if fits:
            assert plan(request).fits
        else:
            assert "NVFP4 below compute capability 10.0 from 0.5.15 on" in reason_of(plan(request))


def test_a_copy_is_as_large_as_a_user_measured() -> None:
    """sgl-project/sglang#38073 and #38074: 48 layers on 2 L20; a layer's packed experts and scales are 0.66 GiB of a
    rank, of which scales are a ninth; the copies of all layers "~3.5 GiB"."""
    posted = 48 * 0.66 / 9
    assert posted == pytest.approx(3.5, abs=0.05)
    hidden, inner, experts = 2560, 640, 512  # dimensions that give these 0.66 GiB
    layer = experts * (swizzled(hidden // 16, inner) + swizzled(inner // 2 // 16, hidden))
    assert layer * 9 / 2**30 == pytest.approx(0.66, abs=0.005)


def test_experts_of_llm_compressor_have_one_copy() -> None:
    """SGLang's CompressedTensorsW4A16Nvfp4MoE registers no second one."""
    assert weights("qwen3.5-122b-a10b-nvfp4") == weights("qwen3.5-122b-a10b-nvfp4", "b200")


def test_scales_in_files_are_counted_twice_too() -> None:
    spec = catalog.load("glm-5.1-nvfp4")
    experts = next(weight for layer in spec.layer_weights for weight in layer if weight.experts)
    layout = Layout(twice_scaled=True)
    scale = TensorInfo("model.layers.3.mlp.experts.0.gate_proj.weight_scale", "F8_E4M3", (2048, 384), 2048 * 384)
    assert is_twice(scale, experts, layout)
    assert not is_twice(scale, experts, replace(layout, twice_scaled=False))
    assert not is_twice(replace(scale, name=f"{scale.name}_2"), experts, layout)
    assert total_weights(spec, layout) > total_weights(spec, Layout())
    assert swizzled(3, 1) == up(1, 128) * up(3, 4)
