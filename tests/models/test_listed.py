"""Layer lists of quantization configs: what matches, what is refused by name, and how often a pattern is tried."""

from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.models import listed
from kvplan.models.hf_config import read_config
from kvplan.models.patterns import Patterns
from kvplan.models.spec import ModelSpec, Scheme
from kvplan.sizing.weights import Layout, num_params, total_weights

MOE = {
    "model_type": "minimax_m2", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 128, "vocab_size": 1024, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
DENSE = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1024,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}


def spec(quantization: dict[str, Any], base: dict[str, Any] = MOE) -> ModelSpec:
    return read_config(base | {"quantization_config": quantization}, "config.json", "x")


def mixed(**layers: dict[str, str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def experts(prefix: str, layers: range = range(4), count: int = 8) -> dict[str, dict[str, str]]:
    """Every expert's matrices by the names MiniMax's checkpoints have."""
    return {
        f"{prefix}.{layer}.block_sparse_moe.experts.{expert}.{name}": {"quant_algo": "NVFP4"}
        for layer in layers for expert in range(count) for name in ("w1", "w2", "w3")
    }  # fmt: skip


def expert_bytes(spec: ModelSpec) -> int:
    from kvplan.sizing.weights import rank_weights

    return rank_weights(spec, Layout())["experts"]


@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers", "model.language_model.layers"])
def test_experts_listed_under_a_prefix_have_their_scheme(prefix: str) -> None:
    # 4 layers x 8 experts x 3 matrices of 256 x 128: half a byte each, a scale byte per 16; weight and input scale
    # (4 bytes each) of the three matrices.
    matrices = 4 * 8 * 3
    assert expert_bytes(spec(mixed(**experts(prefix)))) == matrices * (256 * 128 // 2 + 256 * 128 // 16 + 8)


def test_weights_alone_in_four_bits_keep_smaller_scales_of_their_inputs() -> None:
    # vLLM 0.33's ModelOpt linear method: `input_scale` is in the model's dtype here, in float32 for W4A4.
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
    both = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    narrow = total_weights(spec(config, DENSE), Layout())
    assert total_weights(spec(both, DENSE), Layout()) - narrow == 4 * 2 * (3 + 1 + 2 + 1)  # qkv, o, gate and up, down


def test_a_listed_head_is_sized_as_listed() -> None:
    listed_head = mixed(**{"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "NVFP4"}})
    head = 1024 * 256
    plain = mixed(**{"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}})
    saved = total_weights(spec(plain, DENSE), Layout()) - total_weights(spec(listed_head, DENSE), Layout())
    assert saved == 2 * head - (head // 2 + head // 16 + 8)


CT = {"quant_method": "compressed-tensors"}
REFUSED = [
    # a layer list whose names are nobody's
    (mixed(**{"decoder.stack.layers.3.mlp.w1": {"quant_algo": "FP8"}}), MOE, "decoder.stack.layers.3.mlp.w1"),
    # a module that the layer does not have
    (mixed(**{"model.layers.3.mlp.dense_h_to_4h": {"quant_algo": "FP8"}}), DENSE, "model.layers.3.mlp.dense_h_to_4h"),
    # some of the experts
    (mixed(**experts("model.layers", count=5)), MOE, "4 of the 7 other experts"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4",
         "ignore": [f"model.layers.2.mlp.experts.{i}.*" for i in range(6)]},
        MOE, "5 of the 7 other experts",
    ),
    # excluded under another name than the model's
    ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.attention.wo"]}, DENSE, "attention.wo"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1.attention*"]}, DENSE, "attention"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["model.layers.1.attention.wo"]}, DENSE, "wo"),
    ({**CT, "config_groups": {"g": {"targets": [r"re:.*\.attention\..*"], "weights": FP8}}}, DENSE, "attention"),
    ({**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}},
      "ignore": [r"re:model\.layers\.2\.attention\..*"]}, DENSE, "attention"),
    ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["attention.wqkv"]]}, DENSE, "wqkv"),
    # nothing is listed at all
    (mixed(), DENSE, "gives no layer of llama a scheme"),
]  # fmt: skip


def test_a_list_of_some_experts_is_said_to_be_one() -> None:
    some = spec(mixed(**experts("model.layers", count=5)), MOE).quantization
    assert some is not None
    assert "but a layer's experts are stored as one" in some.problem
    assert "match no tensor" not in some.problem


@pytest.mark.parametrize(("quantization", "base", "name"), REFUSED)
def test_a_list_that_does_not_fit_the_model_is_refused_by_name(
    quantization: dict[str, Any], base: dict[str, Any], name: str
) -> None:
    model = spec(quantization, base)
    with pytest.raises(UnsupportedModelError, match="quantization_config") as refusal:
        total_weights(model, Layout())
    assert name in str(refusal.value)
    assert "--weights-bytes" in str(refusal.value)


# What published configs list beside the layers that are sized.
CARRIED = [
    ["lm_head", "model.embed_tokens", "model.norm"],
    ["model.layers.3.input_layernorm", "model.layers.3.mlp.gate.e_score_correction_bias"],
    ["model.layers.3.self_attn.indexers_proj"],  # GLM-5-FP8: transformers' name of a module no server quantizes
    ["model.layers.4.eh_proj", "model.layers.4.shared_head.norm", "mtp.layers.0.mlp.gate_proj"],  # beyond the layers
    ["model.visual.blocks.0.attn.qkv", "vision_tower.encoder.layers.3.mlp.fc1", "multi_modal_projector"],
    ["model.layers.0.block_sparse_moe.gate"],
]


@pytest.mark.parametrize("ignored", CARRIED)
@pytest.mark.parametrize("method", ["fp8", "modelopt", "compressed-tensors", "awq"])
def test_lists_may_name_what_is_not_sized_by_them(ignored: list[str], method: str) -> None:
    config = {
        "quant_method": method, "quant_algo": "FP8", "modules_to_not_convert": ignored, "ignore": [*ignored, "lm_head"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}},
    }  # fmt: skip
    plain = {key: value for key, value in config.items() if key not in ("modules_to_not_convert", "ignore")}
    plain["ignore"] = ["lm_head"]  # which ModelOpt's layers otherwise quantize
    assert total_weights(spec(config), Layout()) == total_weights(spec(plain), Layout())


@pytest.mark.parametrize(
    ("quantization", "quantized"),
    [
        # vLLM 0.33 auto_gptq: a module is quantized when its name holds one of the listed texts.
        ({"modules_in_block_to_quantize": [[f"self_attn.{x}_proj" for x in "qkv"]]}, {"qkv_proj"}),
        ({"dynamic": {r"-:.*\.mlp\..*": {}}}, {"qkv_proj", "o_proj"}),
    ],
)  # fmt: skip
def test_gptq_may_quantize_a_part_of_each_layer(quantization: dict[str, Any], quantized: set[str]) -> None:
    from kvplan.sizing.weights import scheme_for

    model = spec({"quant_method": "gptq", "bits": 4, "group_size": 128, **quantization}, DENSE)
    schemes = {weight.name: scheme_for(model, weight, 2, None) for weight in model.layer_weights[2]}
    assert {name.rpartition(".")[2] for name, scheme in schemes.items() if scheme is not None} == quantized


def test_awq_leaves_out_whatever_holds_a_listed_text() -> None:
    # vLLM 0.33 auto_awq: is_layer_skipped(match_mode="substring").
    model = spec({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, DENSE)
    all_of_it = spec({"quant_method": "awq", "bits": 4}, DENSE)
    attention = num_params(model)["attention"]  # 16 bits; else 4, with 2.5 bytes for each 128 inputs
    assert total_weights(model, Layout()) - total_weights(all_of_it, Layout()) == (
        attention * 2 - attention // 2 - attention // 128 * 5 // 2
    )


def test_a_fused_module_goes_before_its_parts() -> None:
    # vLLM 0.33's is_layer_skipped: "gate" is in gate_up_proj's own name, so all of it stays in 16 bits.
    model = spec({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate"]}, DENSE)
    all_of_it = spec({"quant_method": "awq", "bits": 4}, DENSE)
    up = 4 * 2 * 512 * 256
    assert total_weights(model, Layout()) - total_weights(all_of_it, Layout()) == up * 2 - up // 2 - up // 128 * 5 // 2


def test_a_layers_number_is_not_the_beginning_of_anothers() -> None:
    assert listed.own_layer("model.layers.3.mlp*") == 3
    assert listed.own_layer("model.layers.3*") is None  # 30 to 39 as well, as globs go
    assert listed.own_layer(r"re:model\.layers\.3\.mlp") == 3
    assert listed.own_layer(r"re:.*layers.3.mlp") == 3
    assert listed.own_layer(r"re:.*layers.3.*") is None
    assert listed.own_layer(r"re:model\.layers\.(3|4)\.mlp") is None
    assert listed.own_layer(r"re:(model\.layers\.3\.)?mlp") is None


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that patterns are matched against from now on."""
    seen: list[str] = []
    real = Patterns.matching

    def matching(self: Patterns, name: str) -> frozenset[int]:
        seen.append(name)
        return real(self, name)

    monkeypatch.setattr(Patterns, "matching", matching)
    return seen


@pytest.mark.parametrize("style", ["{}.mlp.experts.*", r"re:.*layers\.{}\.mlp\.experts\..*"])
def test_a_pattern_of_one_layer_is_tried_on_that_layer_alone(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of patterns must not meet every tensor of every layer: calls grow with the layers, not their square."""

    def calls(num_layers: int) -> int:
        seen = watch(monkeypatch)
        text = style if style.startswith("re:") else "model.layers." + style
        ignored = [text.format(layer) for layer in range(num_layers)]
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
        model = spec(config, MOE | {"num_hidden_layers": num_layers})
        for tp in (1, 2, 4):
            total_weights(model, Layout(tp=tp))
        monkeypatch.undo()
        return len(seen)

    assert calls(40) <= 2 * calls(20)


def test_a_pattern_without_digits_is_tried_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    config = {**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}}, "ignore": [r"re:.*\.o_proj$"]}
    model = spec(config, DENSE | {"num_hidden_layers": 10})
    total_weights(model, Layout())
    numbers = {name.partition("layers.")[2].partition(".")[0] for name in seen if "layers." in name}
    assert numbers == {"0"}


def test_a_digit_may_tell_layers_apart() -> None:
    config = {**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}},
              "ignore": [r"re:.*layers\.[0-1]\.mlp\.down_proj$"]}  # fmt: skip
    from kvplan.sizing.weights import scheme_for

    model = spec(config, DENSE)
    down = next(weight for weight in model.layer_weights[0] if weight.name == "mlp.down_proj")
    schemes = [scheme_for(model, down, layer, None) for layer in range(4)]
    assert schemes == [None, None, *[Scheme("fp8_channel", variant="weight-only")] * 2]


def test_patterns_for_every_expert_are_one_pattern_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(count: int) -> int:
        seen = watch(monkeypatch)
        ignored = [rf"re:.*layers\.{layer}\.mlp\.experts\.{i}\..*" for layer in range(4) for i in range(count)]
        config = {**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": FP8}}, "ignore": ignored}
        model = spec(config, MOE | {"num_local_experts": count})
        assert expert_bytes(model) == 4 * count * 3 * 256 * 128 * 2  # 16 bits
        monkeypatch.undo()
        return len(seen)

    assert calls(8) == calls(64)
