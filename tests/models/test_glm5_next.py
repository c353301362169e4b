"""GLM-5.3-Flash against vLLM 0.33's own parameters and pages; its pools stand in tests/facts/capacity.jsonl."""

import re
from collections import Counter

import pytest

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.planning.plan import Request, plan
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import Layout, weight_bytes

# Bytes of each kind of parameter, all layers, on one of 8 ranks, as vLLM 0.33's model class declares them.
PARAMETERS = {
    "hc_attn_base": 4_320,
    "hc_attn_fn": 70_778_880,
    "hc_attn_scale": 540,
    "hc_ffn_base": 4_320,
    "hc_ffn_fn": 70_778_880,
    "hc_ffn_scale": 540,
    "input_layernorm": 368_640,
    "lm_head": 158_597_120,
    "mlp.down_proj": 37_748_736,
    "mlp.experts.routed_experts.w13": 50_734_301_184,
    "mlp.experts.routed_experts.w2": 25_367_150_592,
    "mlp.gate": 99_090_432,
    "mlp.gate.e_score_correction_bias": 48_384,
    "mlp.gate_up_proj": 75_497_472,
    "mlp.shared_experts.down_proj": 88_080_384,
    "mlp.shared_experts.gate_up_proj": 176_160_768,
    "model.embed_tokens": 158_597_120,
    "model.norm": 8_192,
    "post_attention_layernorm": 368_640,
    "self_attn.A_log": 1_088,
    "self_attn.dt_bias": 139_264,
    "self_attn.f_b_proj": 8_912_896,
    "self_attn.fused_qkv_a_proj": 184_549_376,
    "self_attn.g_b_proj": 8_912_896,
    "self_attn.in_proj_qkvbfg_a": 929_169_408,
    "self_attn.indexer.index_kpool_compress_ape": 22_528,
    "self_attn.indexer.index_kpool_compress_gate": 11_534_336,
    "self_attn.indexer.k_norm": 11_264,
    "self_attn.indexer.wk_weights_proj": 14_417_920,
    "self_attn.indexer.wq_b": 138_412_032,
    "self_attn.k_conv1d": 557_056,
    "self_attn.kv_a_layernorm": 11_264,
    "self_attn.kv_b_proj": 46_137_344,
    "self_attn.o_norm": 8_704,
    "self_attn.o_proj": 469_762_048,
    "self_attn.q_a_layernorm": 33_792,
    "self_attn.q_b_proj": 69_206_016,
    "self_attn.q_conv1d": 557_056,
    "self_attn.v_conv1d": 557_056,
}


def test_every_kind_of_parameter_is_as_large_as_the_servers() -> None:
    spec, layout, weight_sizes = catalog.load("glm-5.3-flash"), Layout(tp=8), Counter[str]()
    for index, weights in enumerate(spec.layer_weights):
        for weight in weights:
            weight_sizes[weight.name] += weight_bytes(spec, weight, index, layout)
    for weight in spec.other_weights:
        if not weight.serves:
            weight_sizes[weight.name] += weight_bytes(spec, weight, None, layout)
    assert sorted(weight_sizes.values()) == sorted(PARAMETERS.values())
    for name in ("self_attn.in_proj_qkvbfg_a", "self_attn.indexer.index_kpool_compress_ape", "hc_attn_fn"):
        assert weight_sizes[name] == PARAMETERS[name]


def test_a_ring_is_no_block_of_tokens() -> None:
    """vLLM 0.33 logs 640 tokens a block on 8 H200; the ring holds the keys of 4 tokens that are not pooled yet."""
    answer = plan(Request(catalog.load("glm-5.3-flash"), gpu("h200"), EngineArgs(tensor_parallel_size=8)))
    assert answer.pool.block_size == 640
    assert sum(group.first.kind == "ring" for group in answer.pool.groups) == 1


def test_releases_that_page_it_otherwise_are_refused_by_name() -> None:
    request = Request(catalog.load("glm-5.3-flash"), gpu("h200"), EngineArgs(), release=Version((0, 30)))
    with pytest.raises(UnsupportedModelError, match=re.escape("use --engine vllm@0.31")):
        plan(request)
    request = Request(catalog.load("glm-5.3-flash"), gpu("b200"), EngineArgs(), release=Version((0, 31)))
    with pytest.raises(UnsupportedModelError, match=re.escape("use --engine vllm@0.32")):
        plan(request)


def test_its_heads_cannot_be_shared() -> None:
    config = catalog.expand(catalog.facts("glm-5.3-flash")["config"])
    config["text_config"]["num_key_value_heads"] = 32
    with pytest.raises(InvalidInputError, match="num_key_value_heads"):
        read_config(config, "config.json", "glm")
