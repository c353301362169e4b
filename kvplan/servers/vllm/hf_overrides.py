"""--hf-overrides: a model's config with changes.

Source: vLLM 0.33 config/model.py (ModelConfig.__post_init__, _apply_dict_overrides, _update_nested).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.models.spec import ModelSpec
from kvplan.servers.overrides import current, merged, put, reread, stated

OPTION: Final = "--hf-overrides"


def applied(spec: ModelSpec, text: str) -> ModelSpec:
    """The model of the changed config."""
    changes = stated(spec, text, OPTION)
    return reread(spec, merged(spec.config, changes, updated)) if changes else spec


def updated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the config with changes; objects in it are changed key by key."""
    result = dict(values)
    for key, value in changes.items():
        before = current(result, key)
        is_part = isinstance(value, Mapping) and isinstance(before, Mapping)
        put(result, key, updated(before, value) if is_part else value)
    return result
