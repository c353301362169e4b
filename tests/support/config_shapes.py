"""Real config shapes to damage: one model of the catalog for each model_type."""

from copy import deepcopy
from functools import cache
from typing import Any

from kvplan.models import catalog


@cache
def _names() -> dict[str, str]:
    """model_type -> the first model of the catalog with it."""
    names: dict[str, str] = {}
    for name in catalog.model_names():
        names.setdefault(str(catalog.facts(name)["config"].get("model_type")), name)
    return names


def shape_names() -> list[str]:
    return list(_names().values())


def shape(name: str) -> dict[str, Any]:
    """The model's config, free to change."""
    config: dict[str, Any] = deepcopy(catalog.expand(catalog.facts(name)["config"]))
    return config


def paths(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a config, nested ones as paths."""
    key_paths = []
    for key, value in config.items():
        key_paths.append((*before, key))
        if isinstance(value, dict):
            key_paths += paths(value, (*before, key))
    return key_paths
