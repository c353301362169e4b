"""Types of the fields of JSON documents: what Python sees, and what a JSON Schema says beyond that."""

from typing import Annotated, Any, NamedTuple


class Keyword(NamedTuple):
    """A keyword of JSON Schema that an annotation carries: `minimum`, `maximum`, `enum`."""

    name: str
    value: int | tuple[str, ...]


Count = Annotated[int, Keyword("minimum", 0)]
Size = Annotated[int, Keyword("minimum", 1)]
Number = Annotated[float, Keyword("minimum", 0)]
Share = Annotated[float, Keyword("minimum", 0), Keyword("maximum", 1)]
Correlation = Annotated[float, Keyword("minimum", -1), Keyword("maximum", 1)]


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that a file may say to be null, though its reader takes that for absent."""
    return {"anyOf": [schema, {"type": "null"}]}
