"""Which layer is stored how: each producer's way of saying it."""

from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.config import Config
from kvplan.models.quant import read_quantization, scheme_of
from kvplan.models.spec import Quantization, Scheme

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def read(config: dict[str, Any], **outer: Any) -> Quantization:
    whole = Config({"quantization_config": config, **outer}, "config.json")
    quantization = read_quantization(whole, whole)
    assert quantization is not None
    return quantization


def scheme(quantization: Quantization, source: str, layer: int = 3) -> Scheme | None:
    return scheme_of(quantization, layer, (source,))


def test_a_plain_config_is_not_quantised() -> None:
    plain = Config({}, "config.json")
    assert read_quantization(plain, plain) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8"}, Scheme("fp8_tensor")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("fp8_tensor", static=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Scheme("fp8_block", block=(128, 128))),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8_channel", variant="fbgemm")),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Scheme("awq", 128, zeros=True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Scheme("gptq")),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, Scheme("gptq_int8", 128)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Scheme("nvfp4", 16)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES"}, Scheme("fp8_block", block=(128, 128))),
        ({"quant_algo": "FP8"}, Scheme("fp8_tensor", static=True)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Scheme("nf4", 64)),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            Scheme("nf4_double", 64),
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Scheme("bnb_int8")),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}}},
            Scheme("fp8_channel", variant="weight-only"),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}},
            Scheme("int4", 32),
        ),
    ],
)
def test_each_method_has_its_scheme(config: dict[str, Any], expected: Scheme) -> None:
    assert scheme(read(config), "mlp.down_proj") == expected


@pytest.mark.parametrize(
    ("ignored", "source"),
    [
        ("model.layers.3.mlp.down_proj", "mlp.down_proj"),  # by its name
        ("model.layers.3.mlp", "mlp.down_proj"),  # by its parent's
        ("model.layers.3", "mlp.down_proj"),
        ("language_model.model.layers.3.mlp*", "mlp.down_proj"),  # by a wildcard, below a wrapper
        (r"re:.*\.down_proj$", "mlp.down_proj"),  # by a regular expression
    ],
)
def test_ignored_layers_stay_in_the_models_dtype(ignored: str, source: str) -> None:
    config = {
        "quant_method": "compressed-tensors", "ignore": [ignored],
        "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}},
    }  # fmt: skip
    quantization = read(config)
    assert scheme(quantization, source) is None
    assert scheme(quantization, "self_attn.o_proj" if "3.mlp" in ignored or "down" in ignored else "x", 4) is not None


def test_a_layer_30_is_not_layer_3() -> None:
    quantization = read({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3"]})
    assert scheme(quantization, "mlp.down_proj", 3) is None
    assert scheme(quantization, "mlp.down_proj", 30) is not None


def test_only_experts_are_mxfp4() -> None:
    quantization = read({"quant_method": "mxfp4"})
    assert scheme(quantization, "mlp.experts.0.gate_proj") == Scheme("mxfp4", 32)
    assert scheme(quantization, "self_attn.q_proj") is None


def test_deepseek_v4_mixes_fp8_with_fp4_experts() -> None:
    quantization = read({"quant_method": "fp8", "weight_block_size": [128, 128]}, expert_dtype="fp4")
    assert scheme(quantization, "ffn.experts.0.gate_proj") == Scheme("mxfp4", 32)
    assert scheme(quantization, "attn.wq_b") == Scheme("fp8_block", block=(128, 128), scale_bytes=1)


def test_mixed_precision_names_its_layers() -> None:
    quantization = read(
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.3.mlp.up_proj": {"quant_algo": "NVFP4"},
            },
        }
    )  # fmt: skip
    assert scheme(quantization, "self_attn.q_proj") == Scheme("fp8_tensor", static=True)
    assert scheme(quantization, "mlp.up_proj") == Scheme("nvfp4", 16)
    assert scheme(quantization, "mlp.down_proj") is None


def test_parts_that_a_server_fuses_must_agree() -> None:
    quantization = read({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.self_attn.q_proj"]})
    with pytest.raises(UnsupportedModelError, match="fused by a server but stored in different schemes"):
        scheme_of(quantization, 3, ("self_attn.q_proj", "self_attn.k_proj"))


STATIC = {"num_bits": 8, "type": "float", "dynamic": False}


# vLLM 0.33's own kv_cache_dtype for these configs; SGLang's rule is in tests/servers/sglang/test_rules.py.
@pytest.mark.parametrize(
    ("method", "stated", "expected"),
    [
        ("modelopt", {"kv_cache_scheme": STATIC}, "fp8"),
        ("modelopt", {"kv_cache_scheme": {**STATIC, "dynamic": True}}, None),
        ("modelopt", {"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}}, None),
        ("modelopt", {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ("modelopt", {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ("modelopt_fp4", {"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ("modelopt", {"kv_cache_quant_algo": "INT8"}, None),
        ("modelopt", {}, None),
        ("fp8", {"kv_cache_scheme": STATIC}, None),
    ],
)
def test_a_checkpoint_may_ask_for_a_cache_dtype(method: str, stated: dict[str, Any], expected: str | None) -> None:
    assert read({"quant_method": method, "quant_algo": "NVFP4", **stated}).kv_dtype == expected


def test_the_nested_form_of_modelopt_is_read_like_the_flat_one() -> None:
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    nested = read({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner})
    assert (nested.default, nested.kv_dtype, nested.names, nested.named) == (
        Scheme("nvfp4", 16), "fp8", {"lm_head": None}, True,
    )  # fmt: skip
