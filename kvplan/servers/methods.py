"""The methods of speculative decoding, by vLLM's names. Source: vLLM 0.33 config/speculative.py."""

from collections.abc import Mapping
from typing import Final

NO_DRAFT: Final = ("ngram", "ngram_gpu", "suffix")  # use no GPU memory
NO_DRAFT_NAMES: Final = (*NO_DRAFT, "[ngram]")  # placeholders for a draft's name
HEADS: Final = ("eagle", "eagle3", "dflash", "dspark")
METHODS: Final = ("draft_model", "mtp", *HEADS, *NO_DRAFT)
TARGET_READERS: Final = ("mtp", *HEADS)  # read the target's hidden states
READS_NEXT: Final = ("mtp", "eagle", "eagle3")  # their KV at a position depends on the next token
LOOKING_AHEAD: Final = ("draft_model", "mtp", *HEADS)  # write to the cache beyond a step's tokens
MTP_TYPES: Final = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp",
    "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp",
    "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp",
    "glm5_next_mtp",
)  # fmt: skip
# Keys that change memory use in a way that is not sized.
REFUSED_KEYS: Final[Mapping[str, str]] = {
    "draft_lm_head_quantization": "keeps a second output head",
    "kv_cache_dtype": "gives the draft a cache of its own kind",
    "attention_backend": "may give the draft blocks of another size",
    "use_heterogeneous_vocab": "drafts with another vocabulary",
    "quantization": "may quantize the draft while loading",
}


def plain_method(method: str) -> str:
    """Return a method's current name."""
    return "mtp" if method in MTP_TYPES else {"[ngram]": "ngram"}.get(method, method)


RANKS: Final = "draft_tensor_parallel_size"  # of a speculative config
