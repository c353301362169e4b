"""Field types of JSON documents: the Python type, and further constraints of the JSON Schema."""

from typing import Annotated, Any, NamedTuple


class Keyword(NamedTuple):
    """A JSON Schema keyword in an annotation: `minimum`, `maximum`, `enum`."""

    name: str
    value: int | tuple[str, ...]


Count = Annotated[int, Keyword("minimum", 0)]
Size = Annotated[int, Keyword("minimum", 1)]
Number = Annotated[float, Keyword("minimum", 0)]
Share = Annotated[float, Keyword("minimum", 0), Keyword("maximum", 1)]
Correlation = Annotated[float, Keyword("minimum", -1), Keyword("maximum", 1)]


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of a key that may be null in a file, which its reader treats as absent."""
    return {"anyOf": [schema, {"type": "null"}]}
