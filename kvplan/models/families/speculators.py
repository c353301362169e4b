"""Heads in the format of the speculators library: the layer's config is nested, the head's facts are at the top level.

Source: vLLM 0.33 transformers_utils/configs/speculators/algos.py.
"""

from collections.abc import Mapping
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable

KIND = "speculators_model_type"
FLAT = "flattened_speculator"  # marks a converted config
ARCHITECTURES = {
    ("eagle3", "llama"): "Eagle3LlamaForCausalLM",
    ("eagle3", "qwen3"): "Eagle3Qwen3ForCausalLM",
    ("peagle", "llama"): "PeagleLlamaForCausalLM",
    ("peagle", "qwen3"): "PeagleQwen3ForCausalLM",
    ("dflash", "qwen3"): "DFlashDraftModel",
    ("dspark", "qwen3"): "Qwen3DSparkModel",
}
# Top-level keys that belong to the head.
OWN = (
    "draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "mask_token_id", "markov_rank",
    "markov_head_type", "block_size", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


def flattened(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Convert the config to the format of other heads."""
    inner = values.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise UnsupportedModelError(where, "has no transformer_layer_config", "correct the config")
    kind, family = str(values[KIND]), str(inner.get("model_type", "llama"))
    architecture = ARCHITECTURES.get((kind, family))
    if architecture is None:
        raise UnsupportedModelError(where, f"a {printable(kind, 40)} head of {printable(family, 40)} is not modeled")
    flat = {**inner, "architectures": [architecture], "model_type": family, FLAT: True}
    flat |= {key: values[key] for key in OWN if values.get(key) is not None}
    flat.setdefault("torch_dtype", values.get("torch_dtype") or values.get("dtype"))
    layers = values.get("eagle_aux_hidden_state_layer_ids") or values.get("aux_hidden_state_layer_ids")
    if layers is not None:
        flat["eagle_aux_hidden_state_layer_ids"] = layers
    if "quantization_config" in values:
        flat["quantization_config"] = values["quantization_config"]
    return flat
