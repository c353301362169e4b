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
# The types that a module reads, by their modalities; "type:function" where the function has another name.
MODULES: dict[tuple[str, tuple[str, ...]], str] = {
    ("moondream", IMAGES): "moondream3:tower",
    ("ernie_vl", IMAGES_AND_VIDEOS): "ernie4_5_moe_vl:tower",
    ("towers_asr", AUDIO): "fireredasr2:firered funasr",
    ("towers_audio", AUDIO): "qwen2_audio voxtral",
    ("towers_audio", IMAGES_AND_VIDEOS): "qwen2_5_omni qwen3_omni_moe",
    ("towers_deepseek", IMAGES):
        "deepseek_v4 deepseek_v41 deepseek_vl_v2:deepseek_vl2 openvla unlimited-ocr:deepseek_vl2",
    ("towers_gemma", IMAGES): "gemma3n gemma4_unified",
    ("towers_gemma", IMAGES_AND_VIDEOS): "gemma4",
    ("towers_kanana", IMAGES): "kanana-1.5-v:kanana",
    ("towers_llava", IMAGES):
        "blip-2:blip_2 chatglm:glm4v_9b granite4_vision h2ovl_chat:internvl interns1:internvl internvl_chat:internvl "
        "llava_next NVLM_D:internvl phi3_v qianfan_ocr:internvl skywork_chat:internvl",
    ("towers_llava", ("video",)): "llava_next_video",
    ("towers_llava", IMAGES_AND_VIDEOS): "glm4v glm4v_moe:glm4v glm5_next:glm_ocr glm_ocr internvl llava_onevision",
    ("towers_molmo", IMAGES): "molmo",
    ("towers_molmo", IMAGES_AND_VIDEOS): "molmo2",
    ("towers_navit", IMAGES): "phi4mm",
    ("towers_navit", IMAGES_AND_VIDEOS): "minicpmv",
    ("towers_perception", IMAGES):
        "step3_vl step3p7:step_vl step3p7_vl:step_vl step_robotics:step_vl",
    ("towers_radio", IMAGES_AND_VIDEOS):
        "NemotronH_Nano_Omni_Reasoning_V3:nano_nemotron NemotronH_Nano_VL_V2:nano_nemotron "
        "NemotronH_Omni_Reasoning_V3:nano_nemotron NemotronH_Super_Omni_Reasoning_V3:nano_nemotron",
    ("towers_rotary", IMAGES): "muse_glimmer",
    ("towers_rotary", IMAGES_AND_VIDEOS):
        "bailing_moe_v3_vl:bailing_v3 dots_ocr exaone4_5 hyperclovax_vision_v2:hyperclovax llava_onevision2 "
        "mimo_v2_omni openpangu_vl:openpangu",
    ("towers_siglip", IMAGES):
        "bagel cohere2_vision eagle_2_5_vl idefics3 isaac lfm2_vl paddleocr_vl paligemma phi4-siglip:phi4_siglip "
        "smolvlm:idefics3",
    ("towers_siglip", IMAGES_AND_VIDEOS): "cosmos3_edge Keye:keye KeyeVL1_5:keye",
    ("towers_queries", IMAGES): "aria ovis",
    ("towers_queries", IMAGES_AND_VIDEOS):
        "bee minicpm_ocr:minicpmv4_6 minicpmv4_6 minicpmv4_7:minicpmv4_6 ovis2_5 ovis2_6:ovis2_5 ovis2_6_moe:ovis2_5 "
        "rvl:bee",
    ("towers_sound", AUDIO):
        "audioflamingo3:audio_flamingo funaudiochat glmasr:glm_asr kimi_audio midashenglm moss_audio "
        "moss_transcribe_diarize:moss_transcribe qwen3_asr",
    ("towers_speech", AUDIO): "granite_speech granite_speech_plus:granite_speech ultravox",
    ("towers_speech", IMAGES_AND_VIDEOS): "minicpmo",
    ("towers_vision", ("vision_chunk",)): "kimi_k25",
    ("towers_vision", IMAGES):
        "gemma3 kimi_k3 kimi_vl:kimi_k25 lightonocr:mistral3 llama4 llava llava_llama:llava mistral3 mllama "
        "pixtral",
    ("towers_vision", IMAGES_AND_VIDEOS):
        "alpamayo2_super:qwen3_vl cohere_compass:qwen3_vl cosmos3_omni:qwen3_vl intern_s2_preview:qwen3_5 "
        "interns1_pro:qwen3_5 interns2_mobius:qwen3_5 interns2_preview:qwen3_5 minimax_m3 minimax_m3_vl:minimax_m3 "
        "opencua:qwen2_5_vl qwen2_5_vl qwen2_vl qwen3_5 "
        "qwen3_5_moe:qwen3_5 qwen3_vl qwen3_vl_moe:qwen3_vl qwen4_exp:qwen3_5",
}  # fmt: skip
# model_type -> module and function that reads its towers, imported on first use, and their modalities.
TOWERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    kind: (module, function or kind, serves)
    for (module, serves), listed in MODULES.items()
    for kind, _, function in (word.partition(":") for word in listed.split())
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
