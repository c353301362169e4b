"""The models kvplan knows by name: entries of models.yaml, read one at a time.

An entry's `config` has keys and values as in a config.json, so the readers treat it like a file. One shorthand keeps
long lists short: in any list, `{repeat: [a, b], times: 3}` stands for three copies of `a, b`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypedDict, cast

from kvplan.core import entries
from kvplan.core.errors import UnknownNameError
from kvplan.models import hf_config
from kvplan.models.spec import ModelSpec

FILE_NAME = "models.yaml"


class Entry(TypedDict):
    """An entry of models.yaml that every model has."""

    id: str
    source: str
    config: dict[str, Any]


class Facts(Entry, total=False):
    """A model's entry as written."""

    aliases: list[str]
    note: str


# Popular models that are not in the catalog: name prefixes, and why they are missing.
MISSING = {
    "deepseek-v4-pro-0813": "no copy of its published config could be had",
    "qwen3.8-flash": "no copy of its published config could be had; its type (qwen4_exp) is read from a config.json",
}


def path() -> Path:
    return entries.locate(FILE_NAME)


def model_names() -> list[str]:
    """Names of all models, in file order."""
    return list(entries.sections(path()))


def find(name: str) -> str | None:
    """Resolve a name, alias or Hub id, also one without its owner, to a model's own name, ignoring case; None if the
    catalog lacks it, or has several.
    """
    known = listed(name)
    if known is not None or "/" in name:
        return known
    same = same_names(name) or _by_total(name)
    return same[0] if len(same) == 1 else None


def _by_total(name: str) -> list[str]:
    """Models of this name and a number of active parameters, which people leave out: qwen3-next-80b."""
    active = re.compile(re.escape("-".join(name.lower().split())) + r"-a[0-9.]+b")
    return list(filter(active.fullmatch, model_names()))


def listed(name: str) -> str | None:
    """As `find`, for names as they stand in the catalog only, with spaces for hyphens as people say them."""
    return entries.resolve(path(), name) or entries.resolve(path(), "-".join(name.split()))


@cache
def _last_parts() -> dict[str, tuple[str, ...]]:
    table: dict[str, dict[str, None]] = {}
    for known, name in entries.names(path()).items():
        table.setdefault(known.rpartition("/")[2], {})[name] = None
    return {last: tuple(names) for last, names in table.items()}


def same_names(last: str) -> tuple[str, ...]:
    """Every model whose name, Hub id or alias is this after the owner, ignoring case; only the one of that name if it
    is a name of its own.
    """
    known = listed(last)
    return _last_parts().get(last.lower(), ()) if known is None else (known,)


def missing(name: str) -> str | None:
    """Return why a popular model is not in the catalog, or None for any other name."""
    short_name = name.lower().rpartition("/")[2]
    return next(
        (why for known, why in MISSING.items() if short_name == known or short_name.startswith(f"{known}-")), None
    )


def unknown(name: str) -> UnknownNameError:
    """Error for a model that is not in the catalog: the reason, if known, or suggestions."""
    why = missing(name)
    if why is not None:
        return UnknownNameError(f"model {name!r}", f"not in the catalog: {why}", "`kvplan models` lists the known ones")
    if "," in name and all(find(part.strip()) for part in name.split(",")):
        remedy = "name one; `kvplan sweep` takes several, separated by spaces"
        return UnknownNameError(f"model {name!r}", "several names, not one", remedy)
    if len(several := same_names(name)) > 1:
        ids = " or ".join(str(facts(own)["id"]) for own in several[:3])
        return UnknownNameError(f"model {name!r}", f"may be {ids}", "name one of them")
    return entries.unknown(path(), "model", name)


def facts(name: str) -> Facts:
    """Return a model's entry as written: id, source, config and, if known, aliases and parameters."""
    own = find(name)
    if own is None:
        raise unknown(name)
    return cast(Facts, entries.entry(path(), own))


def model_id(spec: ModelSpec) -> str:
    """Hub id or directory as the user gave it; a catalog name is replaced by its Hub id."""
    return _id_of(spec.served_name)


@cache
def _id_of(name: str) -> str:
    path = PurePath(name)
    if path.name == "config.json":
        return str(path.parent)
    if "/" in name or find(name) is None:
        return name
    return str(facts(name)["id"])


def labels(name: str) -> tuple[str, ...]:
    """Labels of a model: its name, Hub id, model_type and aliases."""
    own = facts(name)
    return (name, str(own["id"]), str(own["config"].get("model_type", "")), *map(str, own.get("aliases", ())))


def load(name: str, *, text_only: bool = False) -> ModelSpec:
    """Load a model's facts by name, alias or Hub id. Raise UsageError with suggestions if it is unknown."""
    own = find(name)
    if own is None:
        raise unknown(name)
    return _read(own, text_only)


@cache
def _read(own: str, text_only: bool) -> ModelSpec:
    entry = entries.entry(path(), own)
    spec = hf_config.read_config(
        expand(entry["config"]), where=f"{FILE_NAME}: {own}", name=own, source=entry["source"], text_only=text_only
    )
    return replace(spec, notes=(*spec.notes, entry["note"])) if "note" in entry else spec


_SCHEMES = r"(?:awq|gptq|fp8(?:-dynamic)?|w[0-9]+a[0-9]+|int[48]|nvfp4|mxfp4)"


def quantized(own: str, method: str) -> str | None:
    """Entry of a model's checkpoint for --quantization `method`, or None if the catalog has none."""
    plain_method = method.removesuffix("_marlin")
    for name in siblings(own):
        stored = load(name).quantization
        if stored is not None and stored.method.removesuffix("_marlin") == plain_method:
            return name
    return None


def siblings(own: str) -> Iterator[str]:
    """Entries of a model's quantized checkpoints: qwen2.5-32b-awq of qwen2.5-32b, and of qwen2.5-32b-instruct."""
    for base in dict.fromkeys((own, re.sub(r"-(?:instruct|it)$", "", own))):
        pattern = re.compile(re.escape(base) + "-" + _SCHEMES)
        yield from filter(pattern.fullmatch, model_names())


def expand(value: Any) -> Any:
    """Expand every `{repeat: [...], times: n}` inside a list of `value`."""
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
