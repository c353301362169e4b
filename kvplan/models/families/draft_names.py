"""Architectures of drafts that vLLM registers: sized, or why not.

Source: vLLM 0.33 model_executor/models/registry.py (_SPECULATIVE_DECODING_MODELS). No reason: comparisons with its own
code hold it equal (tests/servers/test_draft_names.py).
"""

from collections.abc import Mapping
from typing import Final

SIZED: Final = ""
NO_MODEL: Final = "kvplan has no reader for its model"
NOT_COMPARED: Final = "its layers are not compared with the server's"
NO_CHECKPOINT: Final = "no public checkpoint has it"

VLLM: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "DFlashDraftModel", "DSparkDraftModel", "DeepSeekMTPModel", "DeepSeekV4MTPModel", "DeepseekV32MTPModel",
            "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3ForCausalLM",
            "Eagle3Qwen3vlForCausalLM", "EagleCohereForCausalLM", "EagleLlama4ForCausalLM", "EagleLlamaForCausalLM",
            "EagleMistralForCausalLM", "Gemma4MTPModel", "Glm4MoeLiteMTPModel", "Glm4MoeMTPModel", "Glm5NextMTPModel",
            "GlmOcrMTPModel", "LlamaForCausalLMEagle3", "MiMoMTPModel", "MiMoV2MTPModel", "MiniMaxM3MTP",
            "NemotronHMTPModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3DSparkModel", "Qwen3NextMTP",
            "Qwen3_5MTP", "Qwen3_5MoeMTP",
        ),
        SIZED,
    ),
    **dict.fromkeys(
        (
            "BailingMoeV25MTPModel", "BailingMoeV3MTPModel", "DFlashMuseGlimmerAssistantModel", "DSparkV41DraftModel",
            "Dots3NoteMTPModel", "EagleMistralLarge3ForCausalLM", "ErnieMTPModel", "Exaone4_5_MTP", "ExaoneMoeMTP",
            "HYV3MTPModel", "HYV4MTPModel", "InklingMTPModel", "InternS2MobiusMTP", "LongCatFlashMTPModel",
            "MiMoV2OmniMTPModel", "MuseGlimmerAssistantModel", "MuseSparkDSparkModel", "OpenPanguMTPModel",
            "ParseAuxMTPModel", "Qwen4ExpMTP", "Step3p5MTP", "Step5MTP",
        ),
        NO_MODEL,
    ),
    **dict.fromkeys(
        (
            "DFlashLagunaForCausalLM", "Gemma4DSparkModel", "K3DSparkModel", "Qwen3OmniDSparkModel",
        ),
        NOT_COMPARED,
    ),
    "DFlash2BeamDraftModel": "its selector and its convolution are not modeled",
    "DFlash2DraftModel": "its selector and its convolution are not modeled",
    "DFlashQwen3XPressModel": "its refiner is not modeled",
    "EagleDeepSeekMTPModel": NO_CHECKPOINT,
    "EagleMiniCPMForCausalLM": NO_CHECKPOINT,
    "ExtractHiddenStatesModel": "it writes hidden states out and drafts nothing",
    "KimiK3MTPModel": NO_CHECKPOINT,
    "LiLiCorrDraftModel": "its correcting layers are not modeled",
    "PEagleDraftModel": "vLLM reads it only in the format of the speculators library, under another name",
    "Qwen3XPressModel": "its refiner is not modeled",
}  # fmt: skip


def why_not(architecture: str) -> str:
    """Why an architecture of a draft is not sized; empty if vLLM registers none of that name."""
    names = (architecture, *(f"{prefix}{architecture}" for prefix in ("Eagle", "Eagle3", "DFlash")))
    return next((VLLM[name] for name in names if VLLM.get(name)), "")
