"""--json-model-override-args: a model's config with changes.

Source: sglang 0.5.23 utils/hf_transformers/config.py (get_config).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.overrides import ROPE, current, in_parts, merged, put, reread, stated

OPTION: Final = "--json-model-override-args"
PART: Final = "text_config"
ORIGINAL: Final = "original_max_position_embeddings"


def applied(spec: ModelSpec, text: str) -> ModelSpec:
    """The model of the changed config."""
    changes = stated(spec, text, OPTION)
    if not changes:
        return spec
    if PART in changes and PART not in in_parts(spec.config):
        raise UsageError(OPTION, f"adds a {PART}, of which SGLang reads heads", "write its keys without it")
    for key in ROPE:  # an object changes them key by key
        before = current(spec.config, key)
        if isinstance(changes.get(key), Mapping) and isinstance(before, Mapping):
            changes[key] = {**before, **changes[key]}
    check_rope(changes)
    return reread(spec, merged(spec.config, changes, replaced))


def replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the config with values of other keys."""
    check_rope(changes)
    result = dict(values)
    for key, value in changes.items():
        put(result, key, value)
    return result


def check_rope(changes: Mapping[str, Any]) -> None:
    """Reject YaRN without the original length: SGLang then multiplies its own context by the factor."""
    for settings in (changes[key] for key in ROPE if isinstance(changes.get(key), Mapping)):
        if settings.get("rope_type") == "yarn" and ORIGINAL not in settings:
            raise UnsupportedModelError(OPTION, "states YaRN without the original length", f"add {ORIGINAL}")
