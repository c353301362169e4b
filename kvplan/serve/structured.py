"""What a request says its output has to be: constraints, tools, and the calls that such an output is."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.config import Constraint
from kvplan.serve.fields import ApiError

KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
ANY_OBJECT: Final = {"type": "object"}
HEAD: Final = re.compile(r'[\s\[,]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*')
PARTS: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]')  # of JSON: texts, brackets


def constraint_of(values: Mapping[str, Any]) -> tuple[Constraint, str] | None:
    """Return the constraint of `response_format` or `structured_outputs`, and the field it is of; None: any text.

    Raise ApiError where there are several, or one that is none.
    """
    param, stated = "structured_outputs", values["structured_outputs"] or {}
    kinds = {name: stated[name] for name in KINDS if stated.get(name) is not None}
    match values["response_format"]:
        case None | {"type": "text"}:
            pass
        case {"type": "json_object"}:
            param, kinds["json_object"] = "response_format", True
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema", "schema": schema}:
            param, kinds["json"] = "response_format", schema
        case {"type": "structural_tag"} as tag:
            param, kinds["structural_tag"] = "response_format", tag
        case _:
            raise ApiError("response_format must be text, json_object or json_schema", param="response_format")
    if len(kinds) > 1:
        problem = f"You can only use one kind of structured outputs constraint ({', '.join(kinds)})"
        raise ApiError(problem, param="structured_outputs")
    match kinds:
        case {"json": schema}:
            return Constraint("json", schema if isinstance(schema, str) else json.dumps(schema)), param
        case {"json_object": True}:
            return Constraint("json", json.dumps(ANY_OBJECT)), param
        case {"regex": str(text)}:
            return Constraint("regex", text), param
        case {"grammar": str(text)}:
            return Constraint("grammar", text), param
        case {"choice": [str(), *others] as texts} if all(isinstance(text, str) for text in others):
            return Constraint("choice", json.dumps(texts)), param
        case {"structural_tag": _}:
            raise ApiError(f"{param}: structural_tag is not supported; use json, regex, choice or grammar", param=param)
    if values["structured_outputs"] is not None:
        problem = "structured_outputs must have json, regex, choice (a list of texts), grammar or json_object (true)"
        raise ApiError(problem, param=param)
    return None


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of tools that an output has to be.

    name  of the tool that the request names: the output is its arguments; None: a JSON list of calls
    """

    name: str | None
    constraint: Constraint

    def of(self, text: str) -> list[tuple[str, str]]:
        """Return the names and arguments in an output, or in its beginning."""
        if self.name is not None:
            return [(self.name, text)] if text else []
        calls, place = list[tuple[str, str]](), 0
        while head := HEAD.match(text, place):
            end = value_end(text, head.end())
            calls.append((json.loads(head[1]), text[head.end() : end]))
            place = text.find("}", end) + 1 or len(text)
        return calls


def value_end(text: str, start: int) -> int:
    """Return where the JSON object or list that begins at `start` ends, or the text's length if it does not."""
    depth = 0
    for part in PARTS.finditer(text, start):
        depth += (part[0] in "{[") - (part[0] in "}]")
        if depth <= 0 and part[0] in "}]":
            return part.end() if depth == 0 else part.start()
    return len(text)


def forced_calls(tools: Any, choice: Any, *, is_parallel: bool | None = None) -> Calls | None:
    """Return the calls that `tools` and `tool_choice` force, or None; raise ApiError, as vLLM, where they disagree."""
    if not tools and choice in (None, "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise ApiError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError("tools must be functions with a name", param="tools")
        schemas[function["name"]] = function.get("parameters") or {**ANY_OBJECT, "properties": {}}
    match choice:
        case None | "none" | "auto":  # a model may do without
            return None
        case "required":
            return Calls(None, Constraint("json", json.dumps(_list_of(schemas, is_parallel=is_parallel))))
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)} if name in schemas:
            return Calls(name, Constraint("json", json.dumps(schemas[name])))
    problem = "tool_choice must be none, auto, required, or name one of the specified `tools`"
    raise ApiError(problem, param="tool_choice")


def _list_of(schemas: Mapping[str, Any], *, is_parallel: bool | None) -> dict[str, Any]:
    """Return the schema of a list of calls, vLLM's without other keys; what tools' schemas define is the list's."""
    options, shared = [], dict[str, Any]()
    for name, schema in schemas.items():
        own = dict(schema) if isinstance(schema, dict) else schema
        for key, definition in (own.pop("$defs", None) or {} if isinstance(own, dict) else {}).items():
            if shared.setdefault(key, definition) != definition:
                raise ApiError(
                    f"Tool definition '{key[:80]}' has multiple schemas, which is not supported.", param="tools"
                )
        parts = {"name": {"type": "string", "enum": [name]}, "parameters": own}
        options.append({**ANY_OBJECT, "properties": parts, "required": [*parts], "additionalProperties": False})
    whole = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    return {**whole, **({"maxItems": 1} if is_parallel is False else {}), **({"$defs": shared} if shared else {})}
