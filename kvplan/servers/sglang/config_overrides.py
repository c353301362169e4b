"""--json-model-override-args: a model's config with changes.

Source: sglang 0.5.23 utils/hf_transformers/config.py (get_config).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import ModelSpec
from kvplan.servers.overrides import in_parts, reread, stated

OPTION: Final = "--json-model-override-args"
ROPE: Final = ("rope_scaling", "rope_parameters")  # two names of the same in transformers' classes
ORIGINAL: Final = "original_max_position_embeddings"


def applied(spec: ModelSpec, text: str) -> ModelSpec:
    """The model of the changed config."""
    changes = stated(spec, text, OPTION)
    return reread(spec, merged(spec.config, changes)) if changes else spec


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with overrides: an object changes the keys of a part and of the rope settings, and replaces others."""
    result = dict(in_parts(config))
    for key, value in changes.items():
        if isinstance(value, Mapping) and key.endswith("_config") and isinstance(result.get(key), Mapping):
            result[key] = replaced(result[key], value)
        elif key in ROPE and isinstance(value, Mapping):
            current: Mapping[str, Any] = next(
                (result[name] for name in ROPE if isinstance(result.get(name), Mapping)), {}
            )
            result = replaced(result, {key: {**current, **value}})
        else:
            result = replaced(result, {key: value})
    return result


def replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with those of other keys, and one of the two names of the rope settings."""
    result = dict(values)
    for key, value in changes.items():
        if key in ROPE:
            check_rope(value)
            result = {name: other for name, other in result.items() if name not in ROPE}
        result[key] = value
    return result


def check_rope(settings: Any) -> None:
    """Reject YaRN without the original length: SGLang then multiplies its own context by the factor."""
    if isinstance(settings, Mapping) and settings.get("rope_type") == "yarn" and ORIGINAL not in settings:
        raise UnsupportedModelError(OPTION, "states YaRN without the original length", f"add {ORIGINAL}")
