"""A model's config as SGLang reads it: with --json-model-override-args, and as the class of the model does.

Source: sglang 0.5.23 utils/hf_transformers/common.py (_patch_text_config), srt/models.
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs

WITHOUT_HEAD_DIM: Final = ("qwen2_vl", "qwen2_5_vl")  # whose class in transformers drops it
# Classes whose language model is built from its own part of the config -> what ties its head without a key there.
TIED_INSIDE: Final = {
    "gemma3_text": True, "gemma4_text": True, "mistral": False, "ministral3": False, "llama4_text": False,
}  # fmt: skip


# Classes of its own that take the full layers from full_attention_interval (4 without it), whatever layer_types says:
# srt/configs/qwen3_next.py (layers_block_type).
BY_INTERVAL: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as SGLang reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.sglang import config_overrides  # only if the config is changed

        spec = config_overrides.applied(spec, args.hf_overrides)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.overrides import changed

        spec = changed(spec, changes)
    return spec


def lists_others(text: Mapping[str, Any]) -> bool:
    """True if the listed layers are not those of the interval."""
    every, listed = text.get("full_attention_interval", 4), text.get("layer_types")
    if not isinstance(listed, list) or not isinstance(every, int) or every < 1:
        return False
    return [kind == "full_attention" for kind in listed] != [(i + 1) % every == 0 for i in range(len(listed))]


def by_class(spec: ModelSpec) -> dict[str, bool | None]:
    """Keys of the config that the model's class reads otherwise: None if it ignores them."""
    text = text_of(spec.config)
    changes: dict[str, bool | None] = {}
    if spec.model_type in WITHOUT_HEAD_DIM and text.get("head_dim"):
        changes["head_dim"] = None
    if spec.model_type in BY_INTERVAL and lists_others(text):
        changes["layer_types"] = None
    if spec.model_type in TIED_INSIDE and text is not spec.config:
        tied = bool(text.get(TIED, TIED_INSIDE[spec.model_type]))
        changes |= {TIED: tied} if tied != spec.tied else {}
    return changes
