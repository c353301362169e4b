"""The JSON Schemas of kvplan's documents (draft 2020-12), made from their types: every key named, none beyond them.

A document is a TypedDict. Its docstring is its description; `Annotated[kind, "text"]` describes a key; the types of
kvplan.core.records carry limits; a function completes the schema where the keys are those of a table. A dataclass
and a NamedTuple whose fields are the keys will do as well.
"""

import dataclasses
import types
from collections.abc import Container, Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import Keyword

Schema = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
NULL: Final[Schema] = {"type": "null"}
# Name of a document -> its module in kvplan.documents, if that is called otherwise.
MODULES: Final = {
    "plans": "plan", "workload": "trace", "check-failure": "check", "packs": "pack", "timed-recommendation": "timed",
    **dict.fromkeys(("model", "fitting", "models", "gpu", "gpus", "workloads"), "listing"),
}  # fmt: skip
DOCUMENTS: Final = (
    "error", "plan", "plans", "trace", "workload", "check", "check-failure", "diff", "upgrade", "pack", "packs",
    "preflight", "rightsize", "model", "fitting", "models", "gpu", "gpus", "workloads", "explorer", "sweep",
    "recommendation", "offers", "timed-recommendation", "tune", "simulation", "fleet", "diagnosis", "reconciliation",
    "report", "doctor", "calibration", "run", "log-reconciliation", "server-run", "bench-reconciliation",
)  # fmt: skip
NAMES: Final = (*DOCUMENTS, "policy")
# A command by its name stands for what it prints.
OF_COMMANDS: Final = {"estimate": "plan", "recommend": "recommendation", "simulate": "simulation", "why": "diagnosis"}


def document_schema(name: str) -> Schema:
    """The JSON Schema of a kind of document, `plan`, or of what a command prints, `estimate`; UsageError for others."""
    name = OF_COMMANDS.get(name, name)
    if name not in NAMES:
        raise UsageError(f"schema {printable(name, 60)!r}", "no such schema", f"{_near(name)}")
    return {"$schema": DIALECT, "title": f"kvplan/{name}@1", **_plain_schema(name)}


def _plain_schema(name: str) -> Schema:
    if name == "policy":  # a file that people write, not a document
        from kvplan.documents.policy_file import POLICY_SCHEMA

        return POLICY_SCHEMA
    module, kind = MODULES.get(name, name.replace("-", "_")), f"{name.title().replace('-', '')}Document"
    return schema_of(getattr(import_module(f"kvplan.documents.{module}"), kind))


def _near(name: str) -> str:
    from kvplan.core.near import meant, near_names

    return meant(near_names(name, NAMES, 2), f"use one of {', '.join(NAMES)}", " or ")


# --- from types -------------------------------------------------------------------------------------------------------

SIMPLE: Final = {str: "string", bool: "boolean", int: "integer", float: "number", None: "null", types.NoneType: "null"}


def schema_of(kind: Any) -> Schema:
    """The JSON Schema of a type; TypeError for a type that no document has."""
    if kind is Any:
        return {}
    if kind in SIMPLE:
        return {"type": SIMPLE[kind]}
    if is_record(kind):
        return _record(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated(schema_of(arguments[0]), arguments[1:])
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union([schema_of(each) for each in arguments])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    raise TypeError(f"{kind!r} is not a type of a document")


def is_record(kind: Any) -> bool:
    return is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def keys(properties: Mapping[str, Schema], optional: Container[str] = ()) -> Schema:
    """An object with exactly these keys."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _record(kind: Any) -> Schema:
    hints = get_type_hints(kind, include_extras=True)
    schema = keys(
        {name: schema_of(hint) for name, hint in hints.items()}, getattr(kind, "__optional_keys__", frozenset())
    )
    description = " ".join((kind.__doc__ or "").split()) if is_typeddict(kind) else ""
    return {"description": description, **schema} if description else schema


def _annotated(schema: Schema, notes: Iterable[object]) -> Schema:
    for note in notes:
        match note:
            case Keyword("enum", values):
                schema = {"enum": list(values)} if isinstance(values, tuple) else schema
            case Keyword(name, value):
                schema = {**schema, name: value}
            case str():
                schema = {**schema, "description": note}
            case _ if callable(note):
                schema = note(schema)
    return schema


def _union(schemas: list[Schema]) -> Schema:
    """Types side by side in one schema where that says it, and alternatives where it does not."""
    plain = [each for each in schemas if each != NULL]
    is_optional = len(plain) < len(schemas)
    if all(each.keys() == {"type"} for each in plain):
        kinds = [each["type"] for each in plain if each["type"] != "integer" or {"type": "number"} not in plain]
        return {"type": [*kinds, "null"] if is_optional else kinds}
    if len(plain) == 1 and plain[0].get("type") not in (None, "object", "array"):
        return {**plain[0], "type": [plain[0]["type"], "null"]}
    if len(plain) == 1 and "enum" in plain[0]:
        return {**plain[0], "enum": [*plain[0]["enum"], None]}
    return {"anyOf": [*plain, *([NULL] if is_optional else [])]}
