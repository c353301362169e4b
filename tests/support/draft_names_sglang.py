"""Architectures of drafts that SGLang registers: sized, or why not.

Source: SGLang 0.5.23 srt/models, the classes for a draft. No reason: comparisons with its own code hold the pool equal
(tests/servers/test_draft_names.py).
"""

from collections.abc import Mapping
from typing import Final

from kvplan.models.families.draft_names import NO_MODEL, NOT_COMPARED, SIZED

SGLANG: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "DFlashDraftModel", "DeepseekV3ForCausalLMNextN", "Eagle3DeepseekV2ForCausalLM", "Glm4MoeForCausalLMNextN",
            "Glm4MoeLiteForCausalLMNextN", "GlmMoeDsaForCausalLMNextN", "LlamaForCausalLMEagle",
            "LlamaForCausalLMEagle3", "Gemma4AssistantForCausalLM", "MiMoV2MTP", "NemotronHForCausalLMMTP",
            "Qwen3DSparkModel", "Qwen3NextForCausalLMMTP", "Qwen3_5ForCausalLMMTP",
        ),
        SIZED,
    ),
    **dict.fromkeys(
        (
            "BailingMoeForCausalLMNextN", "Dots3NoteForCausalLMNextN", "Ernie4_5_MoeForCausalLMMTP",
            "ExaoneMoEForCausalLMMTP", "GigaChat35ForCausalLMNextN", "HYV3ForCausalLMNextN", "HYV4ForCausalLMNextN",
            "IQuestQ1MTP", "InklingForConditionalGenerationMTP", "LingDSparkModel", "LongcatFlashForCausalLMNextN",
            "MistralLarge3ForCausalLMEagle", "MuseGlimmerAssistantModel", "Qwen4ExpForCausalLMMTP", "Step3p5MTP",
        ),
        NO_MODEL,
    ),
    **dict.fromkeys(
        (
            "DFlashLagunaForCausalLM", "DSparkDraftModel", "DSparkMiniMaxDraftModel",
            "Gemma4UnifiedAssistantForCausalLM", "GlmOcrForConditionalGenerationNextN", "Lfm2DSparkDraftModel",
            "MiMoMTP", "MistralForCausalLMEagle", "Qwen2ForCausalLMEagle", "Qwen3MoeForCausalLMMTP",
        ),
        NOT_COMPARED,
    ),
    "DFlash2BeamDraftModel": "its selector and its convolution are not modeled",
    "DFlash2DraftModel": "its selector and its convolution are not modeled",
    "DeepseekV4ForCausalLMDSpark": "SGLang's pools of DeepSeek-V4 with drafts are not modeled",
    "DeepseekV4ForCausalLMNextN": "SGLang's pools of DeepSeek-V4 with drafts are not modeled",
    "Glm5NextForConditionalGenerationNextN": "SGLang's pool of pooled index keys is not modeled",
    "LiLiCorrDraftModel": "its correcting layers are not modeled",
    "MiniMaxDFlash2DraftModel": "its selector and its convolution are not modeled",
}  # fmt: skip
