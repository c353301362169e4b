"""Structured output without a model: for each constraint of a request a text that it allows, the same every time."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined] # the parser behind `re`
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any, Final, assert_never

import re2

from engine.config import Constraint
from kvplan.serve.fields import ApiError

MOST_DEPTH: Final = 64
MOST_SCHEMAS: Final = 10_000  # that are visited for one value
MOST_CHARS: Final = 1 << 16  # of a text, and items of an array, that a schema asks for
FORMATS: Final = {
    "date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01", "time": "00:00:00Z", "email": "a@example.com",
    "hostname": "example.com", "uri": "https://example.com", "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1", "ipv6": "2001:db8::1", "duration": "P1D",
}  # fmt: skip
CATEGORIES: Final = {"DIGIT": "0", "SPACE": " ", "WORD": "a", "NOT_DIGIT": "a", "NOT_SPACE": "a", "NOT_WORD": " "}
COMBINERS: Final = ("$ref", "allOf", "anyOf", "oneOf")
LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems")
UPPER: Final = ("maximum", "exclusiveMaximum")
KEYWORDS: Final = {  # of a schema without a type
    "array": {"items", "prefixItems", "minItems"},
    "string": {"pattern", "minLength", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


class UnfilledError(Exception):
    """A schema that no value is known for."""


class UnreadableError(UnfilledError):
    """A schema that says nothing: a real server does not compile it either."""


def unreadable(kind: str, why: str) -> str:
    """Return vLLM 0.33's error for a constraint that does not compile, or without a kind for a text that is no JSON
    (sampling_params.py, v1/structured_output/backend_guidance.py).
    """
    return f"Grammar error: {why}" if kind else "Invalid JSON grammar specification."


def text_of(constraint: Constraint, param: str, words: Callable[[str, str], str] = unreadable) -> str:
    """Return a text that a constraint of this field allows; raise ApiError where none is known.

    words  the server's error for a constraint of a kind that cannot be read
    """
    try:
        match constraint.kind:
            case "json":
                return json.dumps(value_of(json.loads(constraint.text)), ensure_ascii=False)
            case "regex":
                return matching(constraint.text)
            case "choice":
                return str(json.loads(constraint.text)[0])
            case "grammar":
                raise UnfilledError("a simulated server writes no text of a grammar")
            case _:
                assert_never(constraint.kind)
    except (UnreadableError, json.JSONDecodeError, re.error) as error:
        kind = "" if isinstance(error, json.JSONDecodeError) else constraint.kind
        raise ApiError(words(kind, str(error)[:120]), param=param) from error
    except Exception as error:  # a schema can be anything
        what = {"json": "schema", "regex": "expression"}.get(constraint.kind, constraint.kind)
        problem = f"{param}: no value is known for the {what} ({str(error)[:120] or type(error).__name__})"
        raise ApiError(f"{problem}; simplify it", param=param) from error


def value_of(schema: Any) -> Any:
    """Return a value that a JSON Schema allows; raise any error where none is known."""
    return Document(schema).value(schema)


@dataclass(slots=True)
class Document:
    """A schema that references point into, and how many more of its parts may be visited."""

    root: Any
    num_left: int = MOST_SCHEMAS

    def value(self, schema: Any, depth: int = 0) -> Any:
        schema = self._merged(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        usual = next((kind for kind, names in KEYWORDS.items() if names & schema.keys()), "object")
        kinds = schema.get("type") or usual
        match kinds[0] if isinstance(kinds, list) else kinds:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return _text(schema)
            case "integer" | "number" as kind:
                return _number(schema, schema.get("multipleOf", 1 if kind == "integer" else 0))
            case "boolean":
                return False
            case "null":
                return None
            case kind:
                raise UnreadableError(f"unknown type {kind!r:.40}")

    def _merged(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return a schema with what it refers to, all of allOf, and the first of anyOf and oneOf that can be filled."""
        self.num_left -= 1
        if depth > MOST_DEPTH or self.num_left < 0:
            raise UnfilledError("it is nested too deep, or requires itself")
        if schema is False:
            raise UnfilledError("false allows nothing")
        if not isinstance(schema, dict):
            return {}
        merged = {name: value for name, value in schema.items() if name not in COMBINERS}
        parts = [*schema.get("allOf", ()), *([self._target(schema["$ref"])] if "$ref" in schema else ())]
        parts += [self._first(schema[name], depth) for name in ("anyOf", "oneOf") if name in schema]
        for part in parts:
            for name, value in self._merged(part, depth + 1).items():
                known = merged.get(name)
                if known and name == "properties":
                    merged[name] = {**value, **known}
                elif known and name == "required":
                    merged[name] = [*known, *value]
                elif known is not None and name in (*LOWER, *UPPER):
                    merged[name] = (max if name in LOWER else min)(known, value)
                else:
                    merged.setdefault(name, value)
        return merged

    def _first(self, options: Iterable[Any], depth: int) -> Any:
        problem = UnfilledError("anyOf and oneOf need a schema")
        for option in options:
            try:
                self.value(option, depth + 1)
            except UnfilledError as error:
                problem = error
            else:
                return option
        raise problem

    def _target(self, reference: str) -> Any:
        target = self.root
        for word in filter(None, reference.removeprefix("#").split("/")):
            key = word.replace("~1", "/").replace("~0", "~")
            target = target[int(key)] if isinstance(target, list) else target.get(key)
            if target is None:
                raise UnfilledError(f"$ref {reference!r:.60} is not in the schema")
        return target

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        known, least = schema.get("properties", {}), schema.get("minProperties", 0)
        required = schema.get("required", ())
        names = dict.fromkeys([*(name for name in known if name in required), *required])
        others = schema.get("additionalProperties", {})
        if len(names) < least:
            names |= dict.fromkeys([*known, *(f"key{number}" for number in range(min(least, MOST_CHARS) - len(known)))])
        return {name: self.value(known.get(name, others), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, length = schema.get("prefixItems", []), schema.get("minItems", 0)
        if length > MOST_CHARS or (length > 1 and schema.get("uniqueItems")):
            raise UnfilledError(f"an array of {length} items")
        kinds = [*first[:length], *([schema.get("items", {})] * (length - len(first)))]
        return [self.value(kind, depth + 1) for kind in kinds]


def _text(schema: Mapping[str, Any]) -> str:
    pattern, length = schema.get("pattern"), schema.get("minLength", 0)
    text = FORMATS.get(schema.get("format", ""), "") if pattern is None else matching(pattern)
    longer = text.ljust(min(length, MOST_CHARS), "a")
    if len(longer) < length or (longer != text and pattern is not None and re2.search(pattern, longer) is None):
        raise UnfilledError(f"a text of {length} characters")
    return longer


def _number(schema: Mapping[str, Any], step: float) -> int | float:
    """Return the number nearest to 0 within the bounds, a multiple of the step unless that is 0."""
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    width = step or min(1, (min(high, below) - max(low, above)) / 2)
    bounds = [bound for bound in (0, low, high, above + width, below - width) if math.isfinite(bound)]
    if step:
        bounds = [turned(bound / step) * step for bound in bounds for turned in (math.floor, math.ceil)]
    value = min((bound for bound in bounds if low <= bound <= high and above < bound < below), key=abs, default=None)
    if value is None:
        raise UnfilledError("no number within the bounds")
    return int(value) if float(value).is_integer() else value


def matching(pattern: str) -> str:
    """Return a text that a regular expression matches: its first branches, and as few repetitions as it allows."""
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
                repeated = _matching(value[2]) if value[0] else ""
                if len(repeated) * value[0] > MOST_CHARS:
                    raise UnfilledError("the pattern asks for too long a text")
                text += repeated * value[0]
            case codes.AT:
                pass  # the whole text is checked at the end
            case _:
                raise UnfilledError(f"the pattern has {code}")
    return text


def _of_set(parts: Iterable[Any]) -> str:
    """Return a character of a set such as [a-z] or [^,]."""
    members = []
    for code, value in parts:
        if code is codes.RANGE:
            members.append(value)
        elif code is not codes.NEGATE:
            own = ord(CATEGORIES[str(value).removeprefix("CATEGORY_")]) if code is codes.CATEGORY else value
            members.append((own, own))
    if next(iter(parts))[0] is not codes.NEGATE:
        return chr(members[0][0])
    return next(chr(n) for n in range(97, 0x3000) if not any(low <= n <= high for low, high in members))
