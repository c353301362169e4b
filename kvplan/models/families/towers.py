"""Vision and audio towers: the weights outside the language model, by the model_type of the outer config."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config, has_tower_keys
from kvplan.models.spec import Weight

Names = dict[str, tuple[str, ...]]

# model_type -> (module, function) that reads its towers; imported on first use.
TOWERS: dict[str, tuple[str, str]] = {
    "Keye": ("towers_plain", "keye"),
    "KeyeVL1_5": ("towers_plain", "keye"),
    "aria": ("towers_plain", "aria"),
    "audioflamingo3": ("towers_plain", "audio_flamingo"),
    "blip-2": ("towers_llava", "blip_2"),
    "cohere2_vision": ("towers_plain", "cohere2_vision"),
    "deepseek_v41": ("towers_plain", "deepseek_v41"),
    "dots_ocr": ("towers_plain", "dots_ocr"),
    "eagle_2_5_vl": ("towers_plain", "eagle_2_5_vl"),
    "exaone4_5": ("towers_plain", "exaone4_5"),
    "gemma3": ("towers_vision", "gemma3"),
    "gemma3n": ("towers_gemma", "gemma3n"),
    "gemma4": ("towers_gemma", "gemma4"),
    "glm4v": ("towers_llava", "glm4v"),
    "glm4v_moe": ("towers_llava", "glm4v"),
    "glm5_next": ("towers_vision", "glm5_next"),
    "glm_ocr": ("towers_llava", "glm_ocr"),
    "glmasr": ("towers_plain", "glm_asr"),
    "h2ovl_chat": ("towers_llava", "internvl"),
    "idefics3": ("towers_plain", "idefics3"),
    "interns1": ("towers_llava", "internvl"),
    "internvl": ("towers_llava", "internvl"),
    "internvl_chat": ("towers_llava", "internvl"),
    "kimi_k25": ("towers_vision", "kimi_k25"),
    "kimi_k3": ("towers_vision", "kimi_k3"),
    "kimi_vl": ("towers_vision", "kimi_k25"),
    "lfm2_vl": ("towers_plain", "lfm2_vl"),
    "llama4": ("towers_vision", "llama4"),
    "llava": ("towers_vision", "llava"),
    "llava_llama": ("towers_vision", "llava"),
    "llava_next": ("towers_llava", "llava_next"),
    "llava_next_video": ("towers_plain", "llava_next_video"),
    "llava_onevision": ("towers_llava", "llava_onevision"),
    "llava_onevision2": ("towers_plain", "llava_onevision2"),
    "minicpmv": ("towers_navit", "minicpmv"),
    "minicpmv4_6": ("towers_plain", "minicpmv4_6"),
    "minicpmv4_7": ("towers_plain", "minicpmv4_6"),
    "minimax_m3": ("towers_vision", "minimax_m3"),
    "minimax_m3_vl": ("towers_vision", "minimax_m3"),
    "mistral3": ("towers_vision", "mistral3"),
    "mllama": ("towers_vision", "mllama"),
    "paddleocr_vl": ("towers_plain", "paddleocr_vl"),
    "paligemma": ("towers_plain", "paligemma"),
    "phi3_v": ("towers_plain", "phi3_v"),
    "phi4mm": ("towers_navit", "phi4mm"),
    "qianfan_ocr": ("towers_llava", "internvl"),
    "qwen2_5_omni": ("towers_audio", "qwen2_5_omni"),
    "qwen2_5_vl": ("towers_vision", "qwen2_5_vl"),
    "qwen2_audio": ("towers_audio", "qwen2_audio"),
    "qwen2_vl": ("towers_vision", "qwen2_vl"),
    "qwen3_5": ("towers_vision", "qwen3_5"),
    "qwen3_5_moe": ("towers_vision", "qwen3_5"),
    "qwen3_asr": ("towers_plain", "qwen3_asr"),
    "qwen3_omni_moe": ("towers_audio", "qwen3_omni_moe"),
    "qwen3_vl": ("towers_vision", "qwen3_vl"),
    "qwen3_vl_moe": ("towers_vision", "qwen3_vl"),
    "qwen4_exp": ("towers_vision", "qwen3_5"),
    "skywork_chat": ("towers_llava", "internvl"),
    "smolvlm": ("towers_plain", "idefics3"),
    "voxtral": ("towers_audio", "voxtral"),
}
# Modalities of a tower: a server whose limit is zero for all of them builds none.
# Source: vLLM 0.33 model_executor/models (_mark_tower_model).
IMAGES, IMAGES_AND_VIDEOS, AUDIO = ("image",), ("image", "video"), ("audio",)
SERVES: dict[str, tuple[str, ...]] = {
    "Keye": IMAGES_AND_VIDEOS,
    "KeyeVL1_5": IMAGES_AND_VIDEOS,
    "aria": IMAGES,
    "audioflamingo3": AUDIO,
    "blip-2": IMAGES,
    "cohere2_vision": IMAGES,
    "deepseek_v41": IMAGES,
    "dots_ocr": IMAGES_AND_VIDEOS,
    "eagle_2_5_vl": IMAGES,
    "exaone4_5": IMAGES_AND_VIDEOS,
    "gemma3": IMAGES,
    "gemma3n": IMAGES,
    "gemma4": IMAGES_AND_VIDEOS,
    "glm4v": IMAGES_AND_VIDEOS,
    "glm4v_moe": IMAGES_AND_VIDEOS,
    "glm5_next": IMAGES_AND_VIDEOS,
    "glm_ocr": IMAGES_AND_VIDEOS,
    "glmasr": AUDIO,
    "h2ovl_chat": IMAGES,
    "idefics3": IMAGES,
    "interns1": IMAGES,
    "internvl": IMAGES_AND_VIDEOS,
    "internvl_chat": IMAGES,
    "kimi_k25": ("vision_chunk",),
    "kimi_k3": IMAGES,
    "kimi_vl": IMAGES,
    "lfm2_vl": IMAGES,
    "llama4": IMAGES,
    "llava": IMAGES,
    "llava_llama": IMAGES,
    "llava_next": IMAGES,
    "llava_next_video": ("video",),
    "llava_onevision": IMAGES_AND_VIDEOS,
    "llava_onevision2": IMAGES_AND_VIDEOS,
    "minicpmv": IMAGES_AND_VIDEOS,
    "minicpmv4_6": IMAGES_AND_VIDEOS,
    "minicpmv4_7": IMAGES_AND_VIDEOS,
    "minimax_m3": IMAGES_AND_VIDEOS,
    "minimax_m3_vl": IMAGES_AND_VIDEOS,
    "mistral3": IMAGES,
    "mllama": IMAGES,
    "paddleocr_vl": IMAGES,
    "paligemma": IMAGES,
    "phi3_v": IMAGES,
    "phi4mm": IMAGES,
    "qianfan_ocr": IMAGES,
    "qwen2_5_omni": IMAGES_AND_VIDEOS,
    "qwen2_5_vl": IMAGES_AND_VIDEOS,
    "qwen2_audio": AUDIO,
    "qwen2_vl": IMAGES_AND_VIDEOS,
    "qwen3_5": IMAGES_AND_VIDEOS,
    "qwen3_5_moe": IMAGES_AND_VIDEOS,
    "qwen3_asr": AUDIO,
    "qwen3_omni_moe": IMAGES_AND_VIDEOS,
    "qwen3_vl": IMAGES_AND_VIDEOS,
    "qwen3_vl_moe": IMAGES_AND_VIDEOS,
    "qwen4_exp": IMAGES_AND_VIDEOS,
    "skywork_chat": IMAGES,
    "smolvlm": IMAGES,
    "voxtral": AUDIO,
}
# Towers whose classes take the model's quantization, with the checkpoint's names of their linear layers in the first
# layer, by kvplan's names. Source: vLLM 0.33 model_executor/models, and its parameters.
_QWEN: Names = {"vision_tower.layers.attn.qkv": ("visual.blocks.0.attn.qkv",),
         "vision_tower.layers.attn.proj": ("visual.blocks.0.attn.proj",)}  # fmt: skip
_QWEN2_MERGER: Names = {
    "visual.merger.linear_fc1": ("visual.merger.mlp.0",),
    "visual.merger.linear_fc2": ("visual.merger.mlp.2",),
}
_QWEN3: Names = _QWEN | {
    "vision_tower.layers.mlp.up": ("visual.blocks.0.mlp.linear_fc1",),
    "vision_tower.layers.mlp.down": ("visual.blocks.0.mlp.linear_fc2",),
    "visual.merger.linear_fc1": ("visual.merger.linear_fc1",),
    "visual.merger.linear_fc2": ("visual.merger.linear_fc2",),
    "visual.deepstack_merger_list.linear_fc1": ("visual.deepstack_merger_list.0.linear_fc1",),
    "visual.deepstack_merger_list.linear_fc2": ("visual.deepstack_merger_list.0.linear_fc2",),
}
_SIGLIP_LAYER = "vision_tower.vision_model.encoder.layers.0"
_PIXTRAL_LAYER = "vision_tower.transformer.layers.0"
_GEMMA4_LAYER = "vision_tower.encoder.layers.0"
QUANTIZED: dict[str, Names] = {
    "qwen2_5_vl": _QWEN | _QWEN2_MERGER | {
        "vision_tower.layers.mlp.up": ("visual.blocks.0.mlp.gate_proj", "visual.blocks.0.mlp.up_proj"),
        "vision_tower.layers.mlp.down": ("visual.blocks.0.mlp.down_proj",),
    },
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _QWEN3),
    "gemma3": {
        "vision_tower.layers.attn.qkv": tuple(f"{_SIGLIP_LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "vision_tower.layers.attn.proj": (f"{_SIGLIP_LAYER}.self_attn.out_proj",),
        "vision_tower.layers.mlp.up": (f"{_SIGLIP_LAYER}.mlp.fc1",),
        "vision_tower.layers.mlp.down": (f"{_SIGLIP_LAYER}.mlp.fc2",),
    },
    "gemma4": {
        "vision_tower.patch_embedder.input_proj": ("vision_tower.patch_embedder.input_proj",),
        "vision_tower.layers.self_attn.qkv_proj": tuple(f"{_GEMMA4_LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "vision_tower.layers.self_attn.o_proj": (f"{_GEMMA4_LAYER}.self_attn.o_proj",),
        "vision_tower.layers.mlp.gate_up_proj": (f"{_GEMMA4_LAYER}.mlp.gate_proj", f"{_GEMMA4_LAYER}.mlp.up_proj"),
        "vision_tower.layers.mlp.down_proj": (f"{_GEMMA4_LAYER}.mlp.down_proj",),
        "embed_vision.embedding_projection": ("embed_vision.embedding_projection",),
    },
    "mistral3": {
        "vision_tower.layers.attn.qkv": tuple(f"{_PIXTRAL_LAYER}.attention.{part}_proj" for part in "qkv"),
        "vision_tower.layers.attn.proj": (f"{_PIXTRAL_LAYER}.attention.o_proj",),
        "vision_tower.layers.mlp.up": tuple(f"{_PIXTRAL_LAYER}.feed_forward.{part}_proj" for part in ("gate", "up")),
        "vision_tower.layers.mlp.down": (f"{_PIXTRAL_LAYER}.feed_forward.down_proj",),
        "multi_modal_projector.linear_1": ("multi_modal_projector.linear_1",),
        "multi_modal_projector.linear_2": ("multi_modal_projector.linear_2",),
    },
}  # fmt: skip
HEARING = ("audio_tower.", "embed_audio.")  # audio parts of a model that takes images too
# Towers whose ranks can divide the batch instead of sharding the weights, each with its parts that stay sharded.
# Source: vLLM 0.33 (supports_encoder_tp_data), and its parameters per rank.
BY_DATA: dict[str, tuple[str, ...]] = {
    "deepseek_v41": (), "glm5_next": (), "kimi_k25": (), "kimi_k3": (), "llama4": ("multi_modal_projector.",),
    "minicpmv": (), "minimax_m3": (), "minimax_m3_vl": (), "qwen2_5_vl": (), "qwen2_vl": (), "qwen3_5": (),
    "qwen3_5_moe": (), "qwen3_vl": (), "qwen3_vl_moe": (), "qwen4_exp": (),
}  # fmt: skip


def weights(outer: Config) -> list[Weight]:
    """Weights of the towers, including projectors; of a multimodal model.

    Raise UnsupportedModelError for a tower that kvplan has no reader for, rather than counting it as zero.
    """
    kind = outer.values.get("model_type")
    if not isinstance(kind, str) or kind not in TOWERS:
        raise UnsupportedModelError(
            outer.where,
            f"kvplan cannot size the vision or audio tower of model_type {printable(repr(kind), 60)}",
            "use --text-only to size the language model alone",
        )
    if not has_tower_keys(outer):
        outer.notes.append(f"the config describes no vision tower; the one of the published {kind} models is counted")
    module, function = TOWERS[kind]
    reader: Callable[[Config], list[Weight]] = getattr(import_module(f"kvplan.models.families.{module}"), function)
    return told_apart(reader(outer), kind)


def is_even(weight: Weight, kind: str) -> bool:
    """True unless SigLIP's class leaves a matrix alone for its width (vLLM 0.33 siglip.py: multiples of 64)."""
    return kind != "gemma3" or (weight.inputs % 64 == 0 and weight.outputs % 64 == 0)


def told_apart(tower: list[Weight], kind: str) -> list[Weight]:
    """Mark a tower's weights with their modalities, and with whether they are replicated when ranks divide the
    batch.
    """
    marked: dict[int, Weight] = {}  # the layers of a tower are one object each, and must stay so
    for weight in tower:
        if id(weight) not in marked:
            marked[id(weight)] = replace(
                weight,
                serves=AUDIO if weight.name.startswith(HEARING) else SERVES[kind],
                whole_by_data=kind in BY_DATA and not weight.name.startswith(BY_DATA[kind]),
                quantizable=weight.name in QUANTIZED.get(kind, {}) and is_even(weight, kind),
                sources=QUANTIZED.get(kind, {}).get(weight.name, ()),
            )
    return [marked[id(weight)] for weight in tower]
