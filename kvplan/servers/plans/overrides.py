"""A model whose config a server reads otherwise than it is written: changed by a flag, or by what its class ignores."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.models.families.rope import FLAT
from kvplan.models.hf_config import TIED, language_path
from kvplan.models.spec import ModelSpec


def reread(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The model of a changed config, or `spec` itself if the config is the same."""
    return spec if config == spec.config else _reread(spec, json.dumps(config))


@lru_cache(maxsize=64)
def _reread(spec: ModelSpec, text: str) -> ModelSpec:
    from kvplan.models.hf_config import MODULE_OF, read_config  # only if a config is changed

    def read(config: Mapping[str, Any]) -> ModelSpec:
        # An unknown type was accepted before, with --assume-dense.
        unchanged = config.get("model_type") == spec.config.get("model_type")
        return read_config(
            config, spec.name, spec.served_name, source=spec.source, assume_dense=unchanged, text_only=spec.text_only,
            by_class=unchanged and spec.model_type not in MODULE_OF,
        )  # fmt: skip

    result = read(json.loads(text))
    given = [note for note in spec.notes if note not in read(spec.config).notes]  # not from its config
    return replace(result, name=spec.name, processor=spec.processor, notes=(*result.notes, *given))


def stated(spec: ModelSpec, text: str, option: str) -> dict[str, Any]:
    """The changes that a flag states; UsageError for a model without a config.json."""
    if not spec.config:
        raise UsageError(option, f"{spec.name} has no config.json to change", "remove it")
    changes: dict[str, Any] = json.loads(text)
    return changes


def changed(spec: ModelSpec, changes: Mapping[str, Any]) -> ModelSpec:
    """The model with changed keys of the language model in its config."""
    tied = {key: value for key, value in changes.items() if key == TIED}  # the outer level's decides
    return reread(spec, {**with_text(spec.config, changes), **tied})


def with_text(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with changed keys in the language model's part; None removes a key."""

    def inside(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        if path:
            return {**values, path[0]: inside(values[path[0]], path[1:])}
        return {key: value for key, value in {**values, **changes}.items() if changes.get(key, value) is not None}

    return inside(config, language_path(config))


ROPE: Final = ("rope_scaling", "rope_parameters")  # two names of the same in transformers' classes


def names_of(key: str) -> tuple[str, ...]:
    """The names under which a config may have a key."""
    return ROPE if key in ROPE else (key,)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of a config under this name alone."""
    for name in names_of(key):
        values.pop(name, None)
    values[key] = value


def current(values: Mapping[str, Any], key: str) -> Any:
    """A key's value under any of its names, or None."""
    return next((values[name] for name in names_of(key) if values.get(name) is not None), None)


Combine = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


def merged(config: Mapping[str, Any], changes: Mapping[str, Any], combine: Combine) -> dict[str, Any]:
    """The config with changed keys; `combine` changes one of its parts (`text_config`) by an object."""
    result = dict(in_parts(config))
    for key, value in changes.items():
        is_part = isinstance(value, Mapping) and key.endswith("_config") and isinstance(result.get(key), Mapping)
        put(result, key, combine(result[key], value) if is_part else value)
    return result


def in_parts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the language model's keys in a part of their own, as its class has them."""
    if config.get("model_type") not in FLAT or language_path(config):
        return config
    text = {key: value for key, value in config.items() if not key.endswith("_config") and key != "architectures"}
    return {**config, "text_config": text}


# Model types whose cards describe YaRN to four times the length that they were trained for, from this hidden size on.
# Source: model cards of Qwen3-4B to 32B, 30B-A3B and 235B-A22B, "Processing Long Texts"; smaller ones do not.
WITH_YARN: dict[str, int] = {"qwen3": 2560, "qwen3_moe": 0}
TRAINED, STATED = 32_768, 40_960  # tokens; their config states room for an answer in addition
THETA = 1_000_000


def too_long(spec: ModelSpec, context: int, limit: int, option: str) -> UsageError:
    """Error for a context above a model's, with the YaRN settings of its card if they reach it.

    option  the server's flag that changes a config
    """
    remedy = "lower it"
    factor = next((factor for factor in (2.0, 4.0) if context <= factor * TRAINED), None)
    least = WITH_YARN.get(spec.model_type)
    if factor and least is not None and spec.hidden_size >= least and limit == STATED:
        yarn = {"rope_type": "yarn", "rope_theta": THETA, "factor": factor, "original_max_position_embeddings": TRAINED}
        changes = json.dumps({"rope_parameters": yarn, "max_position_embeddings": int(factor * TRAINED)})
        remedy = f"lower it, or extend it as the model's card describes: {option} {shlex.quote(changes)}"
    return UsageError(f"max_model_len {context:,}", f"{spec.name} supports up to {limit:,} tokens", remedy)
