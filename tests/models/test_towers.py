"""Towers against the parameters of published checkpoints and the bytes vLLM 0.33 holds of them on one rank."""

from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.families import towers
from kvplan.models.families.config import Config, is_multimodal
from kvplan.models.spec import Place, Weight

SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14,
}  # fmt: skip
QWEN3 = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip
GEMMA_4_LARGE = {
    "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "patch_size": 16, "position_embedding_size": 10240,
}  # fmt: skip
LLAMA_4 = {
    "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
    "projector_output_dim": 4096, "vision_output_dim": 4096,
}  # fmt: skip
LLAMA_3_2 = {
    "attention_heads": 16, "hidden_size": 1280, "image_size": 448, "intermediate_size": 5120, "max_num_tiles": 4,
    "num_global_layers": 8, "num_hidden_layers": 32, "patch_size": 14, "vision_output_dim": 7680,
}  # fmt: skip
KIMI = {
    "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
    "init_pos_emb_height": 64, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2], "patch_size": 14,
}  # fmt: skip


def model(kind: str, hidden: int, vision: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"model_type": kind, "text_config": {"hidden_size": hidden}, "vision_config": vision, **keys}


GEMMA_3_27B = model("gemma3", 5376, SIGLIP)
GEMMA_3N = model("gemma3n", 2048, {"model_type": "gemma3n_vision"}, audio_config={"model_type": "gemma3n_audio"})
GEMMA_4_E4B = model("gemma4", 2560, {"model_type": "gemma4_vision"}, audio_config={"model_type": "gemma4_audio"})
GEMMA_4_31B = model("gemma4", 5376, GEMMA_4_LARGE, audio_config=None)
QWEN_3_5_27B = model("qwen3_5", 5120, {**QWEN3, "out_hidden_size": 5120})
QWEN_3_5_397B = model("qwen3_5_moe", 4096, {**QWEN3, "out_hidden_size": 4096})
LLAMA_4_SCOUT = model("llama4", 5120, LLAMA_4)
MINISTRAL_3B = model("mistral3", 3072, PIXTRAL)
KIMI_K2_5 = model("kimi_k25", 7168, KIMI)
LLAVA_FLAT = {"model_type": "llava", "hidden_size": 4096, "mm_vision_tower": "openai/clip-vit-large-patch14-336"}


def read(values: dict[str, Any]) -> list[Weight]:
    return towers.weights(Config(values, "config.json"))


def params(values: dict[str, Any]) -> int:
    return sum(weight.num_params for weight in read(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # What the published checkpoint holds beside its language model; the same on transformers' classes.
        (GEMMA_3_27B, 423_060_336),
        (model("gemma3", 3840, SIGLIP), 421_290_864),  # 12B
        (GEMMA_3N, 983_281_504),  # MobileNet 294,126,912, a conformer and two embedders
        (GEMMA_4_E4B, 478_087_456),
        (GEMMA_4_31B, 575_741_232),
        (model("gemma4", 2816, GEMMA_4_LARGE), 572_792_112),  # 26B-A4B
        (LLAMA_4_SCOUT, 871_932_416),
        (model("mllama", 4096, LLAMA_3_2), 867_749_395),  # 11B
        (model("mllama", 8192, {**LLAMA_3_2, "image_size": 560}), 926_490_131),  # 90B
        (MINISTRAL_3B, 420_083_712),
        (model("mistral3", 5120, PIXTRAL), 438_958_080),  # Mistral-Small-3.1
        (model("qwen2_vl", 3584, {"hidden_size": 3584}), 675_759_104),
        (model("qwen2_5_vl", 3584, {"hidden_size": 1280, "out_hidden_size": 3584}), 676_550_144),
        (model("qwen3_vl_moe", 4096, {**QWEN3, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}),
         576_388_336),  # 235B
        (QWEN_3_5_27B, 460_730_096),
        (QWEN_3_5_397B, 456_010_480),
        (KIMI_K2_5, 471_143_920),
        (model("minimax_m3_vl", 6144, {"hidden_size": 1280}, projector_hidden_size=6144), 865_567_232),
        (LLAVA_FLAT, 324_487_168),  # CLIP ViT-L/14 at 336 pixels, 303,507,456, and two projections
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_published_tower(values: dict[str, Any], expected: int) -> None:
    assert params(values) == expected


def rank_elements(weight: Weight, ranks: int) -> int:
    """Elements on one rank of a weight whose parts all divide evenly."""
    if not weight.is_loaded:
        return 0
    outputs = -(-weight.outputs // weight.pad_rows) * weight.pad_rows
    if weight.split == "outputs":
        assert all(part.units % ranks == 0 for part in weight.parts), weight
        outputs //= ranks
    inputs = weight.inputs // ranks if weight.split == "inputs" else weight.inputs
    return inputs * outputs + (outputs if weight.bias else 0)


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        # Sum of vLLM 0.33's parameters under vision_tower, visual, vision_model, audio_tower and the projectors.
        (GEMMA_3_27B, 1, 846_120_672),
        (LLAMA_4_SCOUT, 8, 219_919_808),
        (QWEN_3_5_27B, 1, 921_460_192),
        (QWEN_3_5_27B, 2, 465_348_976),
        (QWEN_3_5_27B, 4, 237_293_368),
        (QWEN_3_5_397B, 8, 122_083_868),
        (GEMMA_4_E4B, 1, 956_174_912),
        (GEMMA_4_31B, 1, 1_151_482_464),
        (GEMMA_4_31B, 2, 1_151_482_464),  # whole on every rank
        (MINISTRAL_3B, 1, 840_167_424),
        (KIMI_K2_5, 8, 222_547_868),
        (GEMMA_3N, 1, 1_966_563_008),
    ],
)
def test_one_rank_holds_what_a_server_holds(values: dict[str, Any], ranks: int, expected: int) -> None:
    assert 2 * sum(rank_elements(weight, ranks) for weight in read(values)) == expected


def test_towers_stand_on_the_first_stage() -> None:
    for weight in read(GEMMA_3_27B) + read(GEMMA_3N) + read(QWEN_3_5_27B) + read(LLAVA_FLAT):
        assert weight.group == "vision_audio"
        assert weight.place is Place.FIRST


def test_llava_drops_the_layer_whose_output_it_does_not_use() -> None:
    """It reads the last layer but one: a server builds 23 of CLIP's 24 layers, and no norm after them."""
    dropped = [weight for weight in read(LLAVA_FLAT) if not weight.is_loaded]
    assert sum(weight.num_params for weight in dropped) == 12_596_224 + 2_048


def test_the_pooling_head_counts_unless_the_config_says_it_is_not_there() -> None:
    base = {"vision_config": {}, "model_type": "gemma3", "text_config": {"hidden_size": 1}}
    assert params(base) == 92_884_224 + 768 + 768  # transformers' SiglipVisionModel with its defaults; norm, projection


def test_an_audio_tower_is_there_only_when_it_is_described() -> None:
    assert params({**GEMMA_4_E4B, "audio_config": None}) < params(GEMMA_4_E4B)


def test_text_models_have_no_tower() -> None:
    for values in ({"model_type": "gemma3_text"}, {"model_type": "llama", "vision_config": None}, {}):
        assert not is_multimodal(Config(values, "config.json"))
    assert is_multimodal(Config(GEMMA_3_27B, "config.json"))
    assert is_multimodal(Config(LLAVA_FLAT, "config.json"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "muse_spark", "vision_config": {"hidden_size": 8}}, "'muse_spark'"),
        ({"model_type": "qwen", "visual": {"width": 1664}}, "'qwen'"),
        ({"model_type": "ming_omni", "thinker_config": {"audio_config": {"d_model": 8}}}, "'ming_omni'"),
        (model("llava_onevision", 3584, {"model_type": "rice_vit"}), "'rice_vit'"),
        ({"vision_config": {"hidden_size": 8}}, "None"),
        ({**GEMMA_3N, "vision_config": {"architecture": "resnet50"}}, "'resnet50'"),
        ({**LLAVA_FLAT, "mm_vision_tower": "openai/clip-vit-base-patch32"}, "'openai/clip-vit-base-patch32'"),
        (model("llava", 4096, {"model_type": "pixtral"}), "'pixtral'"),
    ],
)
def test_an_unknown_tower_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (model("gemma3", 5376, {**SIGLIP, "num_attention_heads": 7}), "num_attention_heads does not divide"),
        (
            model("gemma3", 5376, {**SIGLIP, "num_hidden_layers": 10**9}),
            "num_hidden_layers must be between 1 and 4096",
        ),
        (model("gemma3", 5376, {**SIGLIP, "image_size": "896"}), "image_size must be an integer"),
        ({"model_type": "gemma3", "vision_config": SIGLIP}, "hidden_size: missing"),
        (model("llama4", 5120, {**LLAMA_4, "pixel_shuffle_ratio": 0}), "pixel_shuffle_ratio must be above 0"),
        (model("mistral3", 5120, PIXTRAL, vision_feature_layer=-30), "vision_feature_layer must be between"),
        ({**GEMMA_3N, "audio_config": {"sscp_conv_channel_size": [128]}}, "sscp_conv_channel_size must name two"),
    ],
)
def test_a_damaged_tower_is_refused_by_the_name_of_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read(values)


def test_a_tower_the_config_does_not_describe_is_noted() -> None:
    config = Config({"model_type": "minimax_m3", "hidden_size": 6144}, "config.json")
    towers.weights(config)
    assert any("describes no vision tower" in note for note in config.notes)


TOWERS_OF_TRANSFORMERS = [
    # (model, parameters of its towers and projectors: what the transformers class counts beside the language model)
    ("llava-v1.6-mistral-7b", 324_491_264),
    ("llava-onevision-7b", 414_732_320),
    ("qwen2-audio-7b", 642_215_936),
    ("glm-ocr", 434_120_192),
    ("glm-4.1v-9b", 892_498_432),
    ("internvl3-8b", 331_552_768),
    ("voxtral-mini-3b", 662_134_784),
    ("qwen2.5-omni-7b", 1_316_197_376),
    ("qwen3-omni-30b-a3b", 1_186_558_576),
    ("blip2-opt-2.7b", 1_093_083_136),
]


@pytest.mark.parametrize(("model_name", "expected"), TOWERS_OF_TRANSFORMERS)
def test_a_tower_has_the_parameters_that_transformers_counts(model_name: str, expected: int) -> None:
    assert params(catalog.expand(catalog.facts(model_name)["config"])) == expected


def test_the_first_internvl_format_has_the_tower_of_the_second() -> None:
    """InternVL3-8B in both: 304,012,288 of the tower and 27,540,480 of the projector."""
    vision = {
        "model_type": "intern_vit_6b", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14, "qkv_bias": True, "qk_normalization": False,
        "norm_type": "layer_norm",
    }  # fmt: skip
    first = {"model_type": "internvl_chat", "llm_config": {"hidden_size": 3584}, "vision_config": vision,
             "downsample_ratio": 0.5, "select_layer": -1}  # fmt: skip
    assert params(first) == params(catalog.expand(catalog.facts("internvl3-8b")["config"])) == 331_552_768
