"""Structured output without a model: the shortest text that a constraint of vLLM's requests allows.

Values follow the schema alone and are the same for every request; each is the smallest that is allowed.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined] # the parser behind `re`
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any, Final

import re2

from kvplan.serve.fields import ApiError

MOST_DEPTH: Final = 64
MOST_SCHEMAS: Final = 10_000  # that are visited for one value
MOST_CHARS: Final = 1 << 16  # of a text that a pattern or minLength asks for
FORMATS: Final = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}
CATEGORIES: Final = {"DIGIT": "0", "SPACE": " ", "WORD": "a", "NOT_DIGIT": "a", "NOT_SPACE": "a", "NOT_WORD": " "}
NESTED: Final = "it is nested too deep, or requires itself"


class UnfilledError(Exception):
    """A schema that no value is known for."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a tool that a request forces.

    opening    what the output has before the arguments: nothing for a named tool, as in vLLM
    is_named   True if the request names the tool
    """

    name: str
    opening: str
    arguments: str
    is_named: bool

    @property
    def text(self) -> str:
        return self.arguments if self.is_named else f"{self.opening}{self.arguments}}}]"

    def argued(self, num_chars: int) -> str:
        """Return the arguments as far as the first characters of the text have them."""
        return self.arguments[: max(0, num_chars - len(self.opening))]


def forced_call(tools: Any, choice: Any) -> Call | None:
    """Return the call that `tools` and `tool_choice` force, or None; raise ApiError, as vLLM, where they disagree."""
    if not tools and choice in (None, "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise ApiError("When using `tool_choice`, `tools` must be set.", param="tool_choice" if choice else "tools")
    functions: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError("tools must be functions with a name", param="tools")
        functions[function["name"]] = function.get("parameters") or {"type": "object"}
    match choice:
        case None | "none" | "auto":  # a model may do without
            return None
        case "required":
            name = next(iter(functions))
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            pass
        case _:
            raise ApiError("tool_choice must be none, auto, required, or a function's name", param="tool_choice")
    if name not in functions:
        problem = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise ApiError(problem, param="tool_choice")
    is_named = choice != "required"
    opening = "" if is_named else f'[{{"name": {json.dumps(name)}, "parameters": '
    return Call(name, opening, _json_text(functions[name], "tools"), is_named)


def constrained_text(response_format: Any, constraints: Any) -> str | None:
    """Return the text for `response_format` and `structured_outputs`; None: they allow any text."""
    match response_format:
        case None | {"type": "text" | "structural_tag"}:
            pass
        case {"type": "json_object"}:
            return "{}"
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema", "schema": schema}:
            return _json_text(schema, "response_format")
        case _:
            raise ApiError("response_format must be text, json_object or json_schema", param="response_format")
    match {name: value for name, value in (constraints or {}).items() if value is not None}:
        case {"json": schema}:
            return _json_text(schema, "structured_outputs")
        case {"json_object": True}:
            return "{}"
        case {"regex": str(pattern)}:
            return _filled(lambda: matching(pattern), "structured_outputs")
        case {"choice": [str(text), *_]}:
            return text
        case {"grammar": _}:
            problem = "structured_outputs.grammar: a simulated server writes no text of a grammar; use json or regex"
            raise ApiError(problem, param="structured_outputs")
    return None


def _json_text(schema: Any, param: str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"{param}: the schema is not JSON", param=param) from error
    return _filled(lambda: json.dumps(value_of(schema), ensure_ascii=False), param)


def _filled(text: Callable[[], str], param: str) -> str:
    try:
        return text()
    except Exception as error:  # a schema can be anything
        problem = f"{param}: no value is known for the schema ({str(error)[:120] or type(error).__name__})"
        raise ApiError(f"{problem}; simplify it", param=param) from error


# --- JSON Schema ------------------------------------------------------------------------------------------------------


def value_of(schema: Any) -> Any:
    """Return a value that a JSON Schema allows; raise any error where none is known."""
    return _value(schema, Document(schema))


@dataclass(slots=True)
class Document:
    """A schema that references point into, and how many more of its parts may be visited."""

    root: Any
    num_left: int = MOST_SCHEMAS

    def visit(self, depth: int) -> None:
        self.num_left -= 1
        if depth > MOST_DEPTH or self.num_left < 0:
            raise UnfilledError(NESTED)

    def target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnfilledError(f"$ref {reference!r:.60} is in another document")
        target = self.root
        for word in filter(None, reference[1:].split("/")):
            key = word.replace("~1", "/").replace("~0", "~")
            target = target[int(key)] if isinstance(target, list) else target.get(key)
            if target is None:
                raise UnfilledError(f"$ref {reference!r:.60} is not in the schema")
        return target


def _value(schema: Any, document: Document, depth: int = 0) -> Any:
    document.visit(depth)
    if schema is False:
        raise UnfilledError("false allows nothing")
    if not isinstance(schema, dict):
        return {}
    schema = _merged(schema, document, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kinds = schema.get("type") or _kind_of(schema)
    match kinds[0] if isinstance(kinds, list) else kinds:
        case "object":
            return _object(schema, document, depth)
        case "array":
            return _array(schema, document, depth)
        case "string":
            return _text(schema)
        case "integer":
            return _number(schema, is_whole=True)
        case "number":
            return _number(schema, is_whole=False)
        case "boolean":
            return False
        case "null":
            return None
        case kind:
            raise UnfilledError(f"type {kind!r:.40}")


def _kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type that a schema without `type` speaks of."""
    words = {
        "array": ("items", "prefixItems", "minItems"),
        "string": ("pattern", "minLength", "format"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
    return next((kind for kind, names in words.items() if any(name in schema for name in names)), "object")


def _merged(schema: Mapping[str, Any], document: Document, depth: int) -> dict[str, Any]:
    """Return a schema with what it refers to, all of allOf, and the first of anyOf and oneOf that can be filled."""
    merged = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
    parts = [*schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(document.target(schema["$ref"]))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            parts.append(_first_filled(schema[name], document, depth))
    document.visit(depth)
    for part in parts:
        if part is False:
            raise UnfilledError("false allows nothing")
        for name, value in (_merged(part, document, depth + 1) if isinstance(part, dict) else {}).items():
            match name, merged.get(name):
                case "properties", dict() as known:
                    merged[name] = {**value, **known}
                case "required", list() as known:
                    merged[name] = list(dict.fromkeys([*known, *value]))
                case "minimum" | "minLength" | "minItems" | "exclusiveMinimum", int() | float() as known:
                    merged[name] = max(known, value)
                case "maximum" | "maxLength" | "maxItems" | "exclusiveMaximum", int() | float() as known:
                    merged[name] = min(known, value)
                case _:
                    merged.setdefault(name, value)
    return merged


def _first_filled(options: Iterable[Any], document: Document, depth: int) -> Any:
    problem = UnfilledError("anyOf and oneOf need a schema")
    for option in options:
        try:
            _value(option, document, depth + 1)
        except UnfilledError as error:
            problem = error
        else:
            return option
    raise problem


def _object(schema: Mapping[str, Any], document: Document, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [*(name for name in properties if name in required), *(name for name in required if name not in properties)]
    names += [name for name in properties if name not in required][
        : max(0, schema.get("minProperties", 0) - len(names))
    ]
    others = schema.get("additionalProperties", {})
    values = {name: _value(properties.get(name, others), document, depth + 1) for name in names}
    while len(values) < schema.get("minProperties", 0):
        values[f"key{len(values)}"] = _value(others, document, depth + 1)
    return values


def _array(schema: Mapping[str, Any], document: Document, depth: int) -> list[Any]:
    first = schema.get("prefixItems", [])
    items = schema.get("items", {})
    length = schema.get("minItems", 0)
    if length > MOST_CHARS or (length > 1 and schema.get("uniqueItems")):
        raise UnfilledError(f"an array of {length} items")
    kinds = [*first[:length], *([items] * (length - len(first)))]
    return [_value(kind, document, depth + 1) for kind in kinds]


def _text(schema: Mapping[str, Any]) -> str:
    text = matching(schema["pattern"]) if "pattern" in schema else FORMATS.get(schema.get("format", ""), "")
    length = schema.get("minLength", 0)
    if length > MOST_CHARS:
        raise UnfilledError(f"a text of {length} characters")
    longer = text.ljust(length, "a")
    if longer != text and ("pattern" in schema or text) and not re2.search(schema.get("pattern", ""), longer):
        raise UnfilledError("pattern and minLength")
    return longer


def _number(schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
    """Return the number nearest to 0 within the bounds, a multiple where one is asked for."""
    step = schema.get("multipleOf", 1 if is_whole else 0)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    bounds = [0, low, high]
    for bound, toward in ((above, 1), (below, -1)):
        if math.isfinite(bound):
            width = step or min(1.0, (min(high, below) - max(low, above)) / 2)
            bounds.append(bound + toward * (width if math.isfinite(width) and width > 0 else 1))
    if step:
        bounds = [rounded(bound / step) * step for bound in bounds if math.isfinite(bound) for rounded in (
            math.floor, math.ceil)]  # fmt: skip
    allowed = [n for n in bounds if math.isfinite(n) and low <= n <= high and above < n < below]
    if not allowed:
        raise UnfilledError("no number within the bounds")
    value = min(allowed, key=abs)
    return int(value) if float(value).is_integer() else value


# --- regular expressions ----------------------------------------------------------------------------------------------


def matching(pattern: str) -> str:
    """Return a text that a regular expression matches, the shortest of the first branches."""
    text = _matching(patterns.parse(pattern))
    if re2.search(pattern, text) is None:
        raise UnfilledError("the pattern looks around")
    return text


def _matching(parts: Iterable[Any]) -> str:
    text = ""
    for code, value in parts:
        match code:
            case codes.LITERAL:
                text += chr(value)
            case codes.NOT_LITERAL:
                text += "a" if value != ord("a") else "b"
            case codes.ANY:
                text += "a"
            case codes.IN:
                text += _of_set(value)
            case codes.BRANCH:
                text += _matching(value[1][0])
            case codes.SUBPATTERN:
                text += _matching(value[3])
            case codes.MAX_REPEAT | codes.MIN_REPEAT:
                one = _matching(value[2])
                if len(one) * value[0] > MOST_CHARS:
                    raise UnfilledError("the pattern asks for too long a text")
                text += one * value[0]
            case codes.AT:
                pass  # the whole text is checked at the end
            case _:
                raise UnfilledError(f"the pattern has {code}")
    return text


def _of_set(parts: Iterable[Any]) -> str:
    """Return a character of a set such as [a-z\\d] or [^,]."""
    is_negated, members = False, []
    for code, value in parts:
        match code:
            case codes.NEGATE:
                is_negated = True
            case codes.LITERAL:
                members.append((value, value))
            case codes.RANGE:
                members.append(value)
            case codes.CATEGORY:
                example = ord(CATEGORIES[str(value).removeprefix("CATEGORY_")])
                members.append((example, example))
    if not is_negated:
        return chr(members[0][0])
    return next(letter for letter in map(chr, range(97, 0x3000)) if all(not a <= ord(letter) <= b for a, b in members))
