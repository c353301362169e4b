"""What any command prints with --format json where it could not answer: kvplan/error@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Size


class Mark(TypedDict):
    """Its place in a file."""

    file: str
    line: Size
    column: Size


class Other(TypedDict):
    """Another thing that is wrong with the same command line."""

    subject: str
    problem: str
    remedy: str


class ErrorDocument(TypedDict):
    """Why a command could not answer (any command with --format json): its line on standard error, field by field."""

    schema: Literal["kvplan/error@1"]
    subject: Annotated[str, "What it is about; empty where the mark says it."]
    problem: str
    remedy: Annotated[str, "The next step; may be empty."]
    mark: Mark | None
    others: Annotated[list[Other], "What else is wrong with the command line, a line each on standard error."]
    exit_code: Count
