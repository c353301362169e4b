"""Vision and audio towers: the weights outside the language model, by the model_type of the outer config."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config, has_tower_keys
from kvplan.models.spec import Weight

Names = dict[str, tuple[str, ...]]

# Modalities of a tower: a server whose limit is zero for all of them builds none.
# Source: vLLM 0.33 model_executor/models (_mark_tower_model).
IMAGES, IMAGES_AND_VIDEOS, AUDIO = ("image",), ("image", "video"), ("audio",)
# model_type -> module and function that reads its towers, imported on first use, and their modalities.
TOWERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "kimi_audio": ("towers_sound", "kimi_audio", AUDIO),
    "minicpm_ocr": ("towers_siglip", "minicpmv4_6", IMAGES_AND_VIDEOS),
    "moss_audio": ("towers_sound", "moss_audio", AUDIO),
    "ovis": ("towers_siglip", "ovis", IMAGES),
    "step3p7": ("towers_perception", "step_vl", IMAGES),
    "step3p7_vl": ("towers_perception", "step_vl", IMAGES),
    "step_robotics": ("towers_perception", "step_vl", IMAGES),
    "midashenglm": ("towers_sound", "midashenglm", AUDIO),
    "mimo_v2_omni": ("towers_rotary", "mimo_v2_omni", IMAGES_AND_VIDEOS),
    "molmo2": ("towers_molmo", "molmo2", IMAGES_AND_VIDEOS),
    "muse_glimmer": ("towers_rotary", "muse_glimmer", IMAGES),
    "bailing_moe_v3_vl": ("towers_rotary", "bailing_v3", IMAGES_AND_VIDEOS),
    "chatglm": ("towers_glm", "glm4v_9b", IMAGES),
    "cosmos3_edge": ("towers_siglip", "cosmos3_edge", IMAGES_AND_VIDEOS),
    "granite_speech": ("towers_speech", "granite_speech", AUDIO),
    "granite_speech_plus": ("towers_speech", "granite_speech", AUDIO),
    "minicpmo": ("towers_speech", "minicpmo", IMAGES_AND_VIDEOS),
    "molmo": ("towers_molmo", "molmo", IMAGES),
    "phi4-siglip": ("towers_siglip", "phi4_siglip", IMAGES),
    "ultravox": ("towers_speech", "ultravox", AUDIO),
    "voxtral_rt": ("towers_audio", "voxtral", AUDIO),
    "alpamayo2_super": ("towers_vision", "qwen3_vl", IMAGES_AND_VIDEOS),
    "aria": ("towers_siglip", "aria", IMAGES),
    "audioflamingo3": ("towers_sound", "audio_flamingo", AUDIO),
    "bagel": ("towers_siglip", "bagel", IMAGES),
    "bee": ("towers_siglip", "bee", IMAGES_AND_VIDEOS),
    "blip-2": ("towers_llava", "blip_2", IMAGES),
    "cohere2_vision": ("towers_siglip", "cohere2_vision", IMAGES),
    "cosmos3_omni": ("towers_vision", "qwen3_vl", IMAGES_AND_VIDEOS),
    "deepseek_vl_v2": ("towers_deepseek", "deepseek_vl2", IMAGES),
    "dots_ocr": ("towers_rotary", "dots_ocr", IMAGES_AND_VIDEOS),
    "eagle_2_5_vl": ("towers_siglip", "eagle_2_5_vl", IMAGES),
    "exaone4_5": ("towers_rotary", "exaone4_5", IMAGES_AND_VIDEOS),
    "gemma3": ("towers_vision", "gemma3", IMAGES),
    "gemma3n": ("towers_gemma", "gemma3n", IMAGES),
    "gemma4": ("towers_gemma", "gemma4", IMAGES_AND_VIDEOS),
    "glm4v": ("towers_llava", "glm4v", IMAGES_AND_VIDEOS),
    "glm4v_moe": ("towers_llava", "glm4v", IMAGES_AND_VIDEOS),
    "glm5_next": ("towers_vision", "glm5_next", IMAGES_AND_VIDEOS),
    "glm_ocr": ("towers_llava", "glm_ocr", IMAGES_AND_VIDEOS),
    "glmasr": ("towers_sound", "glm_asr", AUDIO),
    "h2ovl_chat": ("towers_llava", "internvl", IMAGES),
    "hyperclovax_vision_v2": ("towers_rotary", "hyperclovax", IMAGES_AND_VIDEOS),
    "idefics3": ("towers_siglip", "idefics3", IMAGES),
    "interns1": ("towers_llava", "internvl", IMAGES),
    "interns2_mobius": ("towers_vision", "qwen3_5", IMAGES_AND_VIDEOS),
    "interns2_preview": ("towers_vision", "qwen3_5", IMAGES_AND_VIDEOS),
    "internvl": ("towers_llava", "internvl", IMAGES_AND_VIDEOS),
    "internvl_chat": ("towers_llava", "internvl", IMAGES),
    "isaac": ("towers_siglip", "isaac", IMAGES),
    "kanana-1.5-v": ("towers_kanana", "kanana", IMAGES),
    "Keye": ("towers_siglip", "keye", IMAGES_AND_VIDEOS),
    "KeyeVL1_5": ("towers_siglip", "keye", IMAGES_AND_VIDEOS),
    "kimi_k25": ("towers_vision", "kimi_k25", ("vision_chunk",)),
    "kimi_k3": ("towers_vision", "kimi_k3", IMAGES),
    "kimi_vl": ("towers_vision", "kimi_k25", IMAGES),
    "lfm2_vl": ("towers_siglip", "lfm2_vl", IMAGES),
    "lightonocr": ("towers_vision", "mistral3", IMAGES),
    "llama4": ("towers_vision", "llama4", IMAGES),
    "llava": ("towers_vision", "llava", IMAGES),
    "llava_llama": ("towers_vision", "llava", IMAGES),
    "llava_next": ("towers_llava", "llava_next", IMAGES),
    "llava_next_video": ("towers_clip", "llava_next_video", ("video",)),
    "llava_onevision": ("towers_llava", "llava_onevision", IMAGES_AND_VIDEOS),
    "llava_onevision2": ("towers_rotary", "llava_onevision2", IMAGES_AND_VIDEOS),
    "minicpmv": ("towers_navit", "minicpmv", IMAGES_AND_VIDEOS),
    "minicpmv4_6": ("towers_siglip", "minicpmv4_6", IMAGES_AND_VIDEOS),
    "minicpmv4_7": ("towers_siglip", "minicpmv4_6", IMAGES_AND_VIDEOS),
    "minimax_m3": ("towers_vision", "minimax_m3", IMAGES_AND_VIDEOS),
    "minimax_m3_vl": ("towers_vision", "minimax_m3", IMAGES_AND_VIDEOS),
    "mistral3": ("towers_vision", "mistral3", IMAGES),
    "mllama": ("towers_vision", "mllama", IMAGES),
    "moss_transcribe_diarize": ("towers_sound", "moss_transcribe", AUDIO),
    "opencua": ("towers_vision", "qwen2_5_vl", IMAGES_AND_VIDEOS),
    "openvla": ("towers_timm", "openvla", IMAGES),
    "paddleocr_vl": ("towers_siglip", "paddleocr_vl", IMAGES),
    "paligemma": ("towers_siglip", "paligemma", IMAGES),
    "phi3_v": ("towers_clip", "phi3_v", IMAGES),
    "phi4mm": ("towers_navit", "phi4mm", IMAGES),
    "qianfan_ocr": ("towers_llava", "internvl", IMAGES),
    "qwen2_5_omni": ("towers_audio", "qwen2_5_omni", IMAGES_AND_VIDEOS),
    "qwen2_5_vl": ("towers_vision", "qwen2_5_vl", IMAGES_AND_VIDEOS),
    "qwen2_audio": ("towers_audio", "qwen2_audio", AUDIO),
    "qwen2_vl": ("towers_vision", "qwen2_vl", IMAGES_AND_VIDEOS),
    "qwen3_5": ("towers_vision", "qwen3_5", IMAGES_AND_VIDEOS),
    "qwen3_5_moe": ("towers_vision", "qwen3_5", IMAGES_AND_VIDEOS),
    "qwen3_asr": ("towers_sound", "qwen3_asr", AUDIO),
    "qwen3_omni_moe": ("towers_audio", "qwen3_omni_moe", IMAGES_AND_VIDEOS),
    "qwen3_vl": ("towers_vision", "qwen3_vl", IMAGES_AND_VIDEOS),
    "qwen3_vl_moe": ("towers_vision", "qwen3_vl", IMAGES_AND_VIDEOS),
    "qwen4_exp": ("towers_vision", "qwen3_5", IMAGES_AND_VIDEOS),
    "rvl": ("towers_siglip", "bee", IMAGES_AND_VIDEOS),
    "skywork_chat": ("towers_llava", "internvl", IMAGES),
    "smolvlm": ("towers_siglip", "idefics3", IMAGES),
    "unlimited-ocr": ("towers_deepseek", "deepseek_vl2", IMAGES),
    "voxtral": ("towers_audio", "voxtral", AUDIO),
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
    "glm5_next": (), "kimi_k25": (), "kimi_k3": (), "llama4": ("multi_modal_projector.",), "minicpmv": (),
    "minimax_m3": (), "minimax_m3_vl": (), "qwen2_5_vl": (), "qwen2_vl": (), "qwen3_5": (), "qwen3_5_moe": (),
    "qwen3_vl": (), "qwen3_vl_moe": (), "qwen4_exp": (),
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
    module, function, _ = TOWERS[kind]
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
                serves=AUDIO if weight.name.startswith(HEARING) else TOWERS[kind][2],
                whole_by_data=kind in BY_DATA and not weight.name.startswith(BY_DATA[kind]),
                quantizable=weight.name in QUANTIZED.get(kind, {}) and is_even(weight, kind),
                sources=QUANTIZED.get(kind, {}).get(weight.name, ()),
            )
    return [marked[id(weight)] for weight in tower]
