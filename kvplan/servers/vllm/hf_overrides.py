"""--hf-overrides: a model's config with changes.

Source: vLLM 0.33 config/model.py (ModelConfig.__post_init__, _apply_dict_overrides, _update_nested).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.overrides import current, in_parts, merged, put, reread, stated

OPTION: Final = "--hf-overrides"
TEXT: Final = "text_config"
PARTS: Final = (TEXT, "vision_config", "audio_config")


def applied(spec: ModelSpec, text: str) -> ModelSpec:
    """The model of the changed config."""
    changes = read_by_class(spec, stated(spec, text, OPTION))
    return reread(spec, merged(spec.config, changes, updated)) if changes else spec


def read_by_class(spec: ModelSpec, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes without parts that a config, and so its class, does not have. UsageError for a `text_config` where
    the language model is the whole: vLLM then looks for the model in it.

    Source: vLLM 0.33 transformers_utils/config.py (get_hf_text_config).
    """
    new = {key for key in PARTS if isinstance(changes.get(key), Mapping)} - set(in_parts(spec.config))
    if TEXT in new:
        raise UsageError(
            OPTION, f"gives {spec.name} a {TEXT}, which its config does not have", "state its keys without"
        )
    return {key: value for key, value in changes.items() if key not in new}


def updated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the config with changes; objects in it are changed key by key."""
    result = dict(values)
    for key, value in changes.items():
        before = current(result, key)
        is_part = isinstance(value, Mapping) and isinstance(before, Mapping)
        put(result, key, updated(before, value) if is_part else value)
    return result
