"""The models kvplan knows by name: entries of models.yaml, read one at a time.

An entry's `config` holds keys and values as in a config.json, so the readers take it like a file. One shorthand keeps
long lists short: in any list, `{repeat: [a, b], times: 3}` stands for three copies of `a, b`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from kvplan import entries, hf_config
from kvplan.spec import ModelSpec

FILE_NAME = "models.yaml"


def path() -> Path:
    return entries.locate(FILE_NAME)


def model_names() -> list[str]:
    """Every model's own name, in file order."""
    return list(entries.sections(path()))


def find(name: str) -> str | None:
    """A model's own name for its name, an alias or a Hub id, whatever the case; None when the catalog lacks it."""
    return entries.resolve(path(), name)


def facts(name: str) -> dict[str, Any]:
    """A model's entry as written: id, source, config and, where they are known, aliases and parameters."""
    own = find(name)
    if own is None:
        raise entries.unknown(path(), "model", name)
    return entries.entry(path(), own)


def load(name: str) -> ModelSpec:
    """The facts of a model called by name, alias or Hub id; an unknown one is a UsageError with near misses."""
    own = find(name)
    if own is None:
        raise entries.unknown(path(), "model", name)
    return _read(own)


@cache
def _read(own: str) -> ModelSpec:
    entry = entries.entry(path(), own)
    return hf_config.read_config(expand(entry["config"]), where=f"{FILE_NAME}: {own}", name=own, source=entry["source"])


def expand(value: Any) -> Any:
    """`value` with every `{repeat: [...], times: n}` inside a list spelled out."""
    match value:
        case dict():
            return {key: expand(item) for key, item in value.items()}
        case list():
            return [copy for item in value for copy in _copies(item)]
        case _:
            return value


def _copies(item: Any) -> list[Any]:
    match item:
        case {"repeat": list() as unit, "times": int() as times, **rest} if not rest:
            copies: list[Any] = expand(unit) * times
            return copies
        case _:
            return [expand(item)]
