"""A model's config as SGLang reads it: with --json-model-override-args, and as the class of the model does.

Source: sglang 0.5.23 utils/hf_transformers/common.py (_patch_text_config), srt/models, srt/configs/qwen3_next.py
(layers_block_type).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.records import dataclass
from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import ModelSpec
from kvplan.servers.words.arguments import EngineArgs


@dataclass(frozen=True, slots=True)
class Reading:
    """How the class of a model type reads its config.

    ignores      keys without an effect
    tied_inside  its language model is built from its own part of a config with towers: whether its head is tied without
    a key there; None: the outer config decides
    by_interval  its full layers are those of full_attention_interval (4 without it), whatever layer_types says
    """

    ignores: tuple[str, ...] = ()
    tied_inside: bool | None = None
    by_interval: bool = False


AS_STATED: Final = Reading()
READINGS: Final[Mapping[str, Reading]] = {
    "gemma3_text": Reading(tied_inside=True),
    "gemma4_text": Reading(tied_inside=True),
    "llama4_text": Reading(tied_inside=False),
    "ministral3": Reading(tied_inside=False),
    "mistral": Reading(tied_inside=False),
    "qwen2_5_vl": Reading(ignores=("head_dim",)),
    "qwen2_vl": Reading(ignores=("head_dim",)),
    "qwen3_5_moe_text": Reading(by_interval=True),
    "qwen3_5_text": Reading(by_interval=True),
    "qwen3_next": Reading(by_interval=True),
}


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as SGLang reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.sglang import config_overrides  # only if the config is changed

        spec = config_overrides.applied(spec, args.hf_overrides)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.plans.overrides import changed

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
    text, reading = text_of(spec.config), READINGS.get(spec.model_type, AS_STATED)
    changes: dict[str, bool | None] = {key: None for key in reading.ignores if text.get(key)}
    if reading.by_interval and lists_others(text):
        changes["layer_types"] = None
    if reading.tied_inside is not None and text is not spec.config:
        tied = bool(text.get(TIED, reading.tied_inside))
        changes |= {TIED: tied} if tied != spec.tied else {}
    return changes
