"""--hf-overrides: a model's config with changes.

Source: vLLM 0.33 config/model.py (ModelConfig.__post_init__, _apply_dict_overrides, _update_nested).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.models.spec import ModelSpec
from kvplan.servers.overrides import in_parts, reread, stated

OPTION: Final = "--hf-overrides"
ROPE: Final = ("rope_scaling", "rope_parameters")  # two names of the same in transformers' classes


def applied(spec: ModelSpec, text: str) -> ModelSpec:
    """The model of the changed config."""
    changes = stated(spec, text, OPTION)
    return reread(spec, merged(spec.config, changes)) if changes else spec


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with --hf-overrides: an object changes the keys of a part, and replaces any other value."""
    result = dict(in_parts(config))
    for key, value in changes.items():
        if isinstance(value, Mapping) and key.endswith("_config") and isinstance(result.get(key), Mapping):
            result[key] = updated(result[key], value)
        else:
            put(result, key, value)
    return result


def updated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the config with changes; objects in it are changed key by key."""
    result = dict(values)
    for key, value in changes.items():
        current = next((result[name] for name in names_of(key) if result.get(name) is not None), None)
        is_part = isinstance(value, Mapping) and isinstance(current, Mapping)
        put(result, key, updated(current, value) if is_part else value)  # type: ignore[arg-type] # both are
    return result


def names_of(key: str) -> tuple[str, ...]:
    return ROPE if key in ROPE else (key,)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    for name in names_of(key):
        values.pop(name, None)
    values[key] = value
