"""Keywords of a Python call as a form: numbers may be numbers, JSON a dict, and several values a list."""

import json
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from os import PathLike, fspath
from typing import Any, Final

from kvplan.asked.form import LENGTH_KEYS, LISTS, PLAN_KEYS, SWITCHES, Form
from kvplan.core.errors import UsageError
from kvplan.core.near import meant, near_names

# Flags that have a short name on the command line.
SHORT: Final = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "ctx": "max_model_len",
}  # fmt: skip
PLAN_KEYWORDS: Final = frozenset(PLAN_KEYS) - {"model", "from_command"}
KEYWORDS: Final = PLAN_KEYWORDS | set(LENGTH_KEYS)
TIMED: Final = ("rate", "profile", "trace", "num_requests", "seed")  # of a recommendation with latency targets


def form_of(keywords: Mapping[str, Any], known: Collection[str] = KEYWORDS, **named: Any) -> Form:
    """The form that keywords fill in; UsageError for a name that is none of them.

    named  values of the call's own parameters, by key
    """
    for name in keywords:
        if name not in known:
            near = [SHORT[name]] if name in SHORT else near_names(name, known)
            raise UsageError(name, "no such keyword", meant(near, "`kvplan estimate --help` lists them"))
    return Form({key: written(key, value) for key, value in {**keywords, **named}.items() if value is not None})


def config_name(config: Mapping[str, Any]) -> str:
    """What a config without a file calls its model: its own name, or its kind."""
    name = config.get("_name_or_path") or config.get("model_type")
    return name if isinstance(name, str) and name.isprintable() and name else "model"


def written(key: str, value: Any) -> Any:
    """A keyword's value as text; UsageError where Python cannot write it, such as an integer of 5,000 digits."""
    try:
        return text_of(key, value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(key, f"cannot be written as text ({error})", "write its value as text") from None


def text_of(key: str, value: Any) -> Any:
    """A keyword's value as a form has it: a switch, a text, JSON, or texts where the key takes several. Raise
    UsageError, with the keyword's name, for a value of another type.
    """
    is_list = key in (*LISTS, "models")
    match value:
        case bool():
            if key in SWITCHES:
                return value
        case dict() if not is_list:
            return json.dumps(value)
        case str() | Real():
            return [str(value)] if is_list else str(value)
        case PathLike():
            return fspath(value)
        case bytes() | dict():
            pass
        case Iterable():
            items = list(value)
            if all(isinstance(item, str | Real) and not isinstance(item, bool) for item in items):
                return [str(item) for item in items] if is_list else ",".join(map(str, items))
    kind = value if isinstance(value, bool) else type(value).__name__
    raise UsageError(key, f"must be text or a number, not {kind}", "write its value, or remove it")
