"""Weight bytes per rank: storage layouts by hand, real servers' numbers, and laws."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.models.spec import Scheme
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import weight_layout
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import (
    Layout,
    kv_scale_bytes,
    linear_bytes,
    num_params,
    rank_weights,
    stage_layers,
    total_weights,
    weight_bytes,
)
from tests.support.refusals import reason_of

GIB = 2**30


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme("fp8_tensor"), 4096 * 4096 + 4),
        (Scheme("fp8_tensor", static=True), 4096 * 4096 + 8),
        (Scheme("fp8_channel"), 4096 * 4096 + 4 * 4096),
        (Scheme("fp8_block", block=(128, 128)), 4096 * 4096 + 4 * 32 * 32),
        (Scheme("int8_channel"), 4096 * 4096 + 4 * 4096),
        (Scheme("int4", 128), 4096 * 4096 // 2 + 2 * 32 * 4096 + 16),  # 4.125 bits and a shape
        (Scheme("awq", 128, zeros=True), 4096 * 4096 // 2 + 2 * 32 * 4096 + 32 * 4096 // 2),  # 4.156 bits
        (Scheme("nvfp4", 16), 4096 * 4096 // 2 + 4096 * 256 + 8),  # 4.5 bits and two fp32
        (Scheme("mxfp4", 32), 4096 * 4096 // 2 + 4096 * 128),  # 4.25 bits
        (Scheme("mxfp8", 32), 4096 * 4096 + 4096 * 128),
        (Scheme("nf4", 64), 4096 * 4096 // 2 + 4 * 4096 * 64),  # 4.5 bits
    ],
)
def test_a_square_matrix_in_every_storage_layout(scheme: Scheme, expected: int) -> None:
    assert linear_bytes(scheme, 4096, [4096]) == expected


def test_double_quantised_nf4_is_4_127_bits() -> None:
    bits = linear_bytes(Scheme("nf4_double", 64), 4096, [4096]) * 8 / 4096**2
    assert bits == pytest.approx(4.127, abs=0.0005)  # bitsandbytes' published figure, three decimals


# Weights a vLLM 0.33 server creates on one rank; its own parameters, summed.
SERVER_BYTES = [
    ("llama-3.1-8b", Layout(), 16_060_522_496),
    ("llama-3.1-8b", Layout(tp=2), 8_030_527_488),
    ("llama-3.1-70b", Layout(tp=4), 35_278_831_616),
    ("llama-3.1-70b", Layout(tp=4, pp=2), 17_639_407_616),
    ("qwen2.5-7b", Layout(tp=4), 3_808_114_688),
    ("mixtral-8x7b", Layout(tp=8), 11_677_999_104),
    ("qwen3-30b-a3b", Layout(tp=4, ep=4), 15_285_252_096),
    ("gpt-oss-20b", Layout(), 13_761_264_768),
    ("gpt-oss-20b", Layout(sm=80), 14_679_227_520),
    ("gpt-oss-120b", Layout(tp=8), 8_711_167_680),
    ("deepseek-v3", Layout(tp=8), 85_140_130_848),
    ("nemotron-h-8b", Layout(tp=2), 8_101_072_896),
    ("gemma-3-27b", Layout(), 54_864_813_280),
]


@pytest.mark.parametrize(("model", "layout", "expected"), SERVER_BYTES)
def test_bytes_equal_a_servers_own_parameters(model: str, layout: Layout, expected: int) -> None:
    assert total_weights(catalog.load(model), layout) == expected


def test_logged_weights_of_llama_8b_are_ours_and_the_rope_table() -> None:
    # Many servers log 14.9888 GiB: parameters, and a cos/sin table of 131,072 x 128 x 2 B = 0.03125 GiB.
    assert (total_weights(catalog.load("llama-3.1-8b"), Layout()) + 131_072 * 128 * 2) / GIB == pytest.approx(
        14.9888, abs=0.0005
    )


def test_layers_left_over_go_to_the_stages_before_the_last() -> None:
    assert [len(stage) for stage in stage_layers(32, 4)] == [8, 8, 8, 8]
    assert [len(stage) for stage in stage_layers(61, 2)] == [31, 30]  # DeepSeek-V3 on two stages
    assert [len(stage) for stage in stage_layers(10, 4)] == [2, 3, 3, 2]


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_layer_is_on_exactly_one_stage(num_layers: int, pp: int) -> None:
    stages = stage_layers(num_layers, min(pp, num_layers))
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-2-9b"])
def test_more_ranks_never_hold_more_each(model: str) -> None:
    sizes = [total_weights(catalog.load(model), Layout(tp=tp)) for tp in (1, 2, 4)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_the_stages_together_hold_every_layer(model: str) -> None:
    spec = catalog.load(model)
    parts = [rank_weights(spec, Layout(pp=2, stage=stage)) for stage in (0, 1)]
    whole = rank_weights(spec, Layout())
    assert sum(part["attention"] for part in parts) == whole["attention"]


def test_parameters_by_group_add_up_to_the_published_total() -> None:
    counts = num_params(catalog.load("llama-3.1-8b"))
    assert sum(counts.values()) == 8_030_261_248
    assert counts["embedding"] == counts["lm_head"] == 128_256 * 4096


def test_a_split_that_does_not_work_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks cannot share"):
        total_weights(catalog.load("llama-3.1-8b"), Layout(tp=3))


def test_nemotron_3_keeps_its_router_wide_before_hopper() -> None:
    """23 routers of 128 x 2,688: 15,826,944 bytes more on an A100 than on an H100 (vLLM 0.33's own parameters)."""
    spec = catalog.load("nemotron-3-nano-30b-a3b")
    assert total_weights(spec, Layout(sm=80)) - total_weights(spec, Layout(sm=90)) == 15_826_944


def test_an_unknown_quantisation_asks_for_the_size() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 256, "quantization_config": {"quant_method": "vptq"},
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="--weights-bytes"):
        total_weights(read_config(config, "config.json", "x"), Layout())


# --- every tensor of a layer, as vLLM 0.33's own model classes declare them on one rank ------------------------------

TENSORS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "facts" / "tensors.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("row", TENSORS, ids=lambda row: f"{row['model']}-tp{row['tp']}")
def test_every_tensor_is_as_large_as_the_servers(row: dict[str, Any]) -> None:
    """tests/facts/tensors.jsonl: config, ranks, and the bytes of each module of some layers, its scales included.

    Sizes are compared as sets of numbers: vLLM's names for the same modules differ. KV is what the cache's scales take.
    """
    spec = read_config(row["config"], "config.json", row["model"])
    layout = Layout(tp=row["tp"])
    for place, tensors in row["layers"].items():
        if place == "lm_head":
            weights = [weight for weight in spec.other_weights if weight.group == "lm_head"]
            sizes = [weight_bytes(spec, weight, None, layout) for weight in weights]
        else:
            index = int(place)
            sizes = [weight_bytes(spec, weight, index, layout) for weight in spec.layer_weights[index]]
            sizes.append(kv_scale_bytes(spec.layers[index], spec.quantization, layout, spec.dtype))
        assert sorted(size for size in sizes if size) == sorted(tensors.values())


@pytest.mark.parametrize(
    ("model", "tp", "params"),
    [
        ("granite-4.0-h-small", 4, 20_708_404_224),  # 768 / 4 = 192 columns, held as 256
        ("qwen3-30b-a3b", 4, 20_117_090_304),  # the same
        ("glm-4.5-air", 4, 58_039_140_864),  # 352 as 384
        ("qwen3-next-80b-a3b", 8, 39_353_444_192),  # 64 as 128
        ("deepseek-v2-lite", 2, 15_741_869_056),  # 704: its router does not renormalize, another kernel runs
    ],
)
def test_plain_experts_are_padded_for_the_kernel_that_blackwell_runs(model: str, tp: int, params: int) -> None:
    """Parameter bytes of a rank that vLLM 0.33's own model has on a B200."""
    spec, args = catalog.load(model), EngineArgs(tensor_parallel_size=tp)
    request = Request(spec, gpu("b200"), args)
    assert total_weights(spec, weight_layout(request, 0)) == params
    hopper = total_weights(spec, weight_layout(replace(request, gpu=gpu("h200")), 0))
    earlier = total_weights(spec, weight_layout(replace(request, release=parse_engine("vllm@0.23")), 0))
    adapters = total_weights(spec, weight_layout(replace(request, args=replace(args, max_loras=1)), 0))
    assert hopper == earlier == adapters
    assert (hopper < params) == (model != "deepseek-v2-lite")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_mxfp4_runs_in_bfloat16_alone(dtype: str) -> None:
    """vLLM 0.33: "torch.float32 is not supported for quantization method gpt_oss_mxfp4"."""
    request = Request(catalog.load("gpt-oss-20b"), gpu("h100-80g"), EngineArgs(dtype=dtype, max_model_len=4096))
    assert "in bfloat16 alone" in reason_of(plan(request))
    assert plan(replace(request, args=replace(request.args, dtype="bfloat16"))).fits


def test_experts_that_vllm_does_not_find_cannot_be_spread() -> None:
    """vLLM 0.33: "Number of experts in the model must be greater than 0 when expert parallelism is enabled"."""
    args = EngineArgs(tensor_parallel_size=8, enable_expert_parallel=True, max_model_len=4096)
    assert "does not find the experts" in reason_of(plan(Request(catalog.load("dbrx"), gpu("h200"), args)))
    assert plan(Request(catalog.load("dbrx"), gpu("h200"), replace(args, enable_expert_parallel=False))).fits
