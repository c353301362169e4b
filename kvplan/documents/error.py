"""What any command prints with --format json where it could not answer: kvplan/error@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.errors import ERROR, KvplanError
from kvplan.core.files import printable
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


def error_document(error: KvplanError, code: int) -> ErrorDocument:
    """The document of an error, with names of unknown origin made printable."""
    mark: Mark | None = None
    if error.mark is not None:
        mark = {"file": printable(error.mark.where, 400), "line": error.mark.line, "column": error.mark.column}
    others = [fields_of(other) for other in error.others]
    return {"schema": ERROR, **fields_of(error), "mark": mark, "others": others, "exit_code": code}


def fields_of(error: KvplanError) -> Other:
    subject, problem, remedy = (printable(text, 4000) for text in (error.subject, error.problem, error.remedy))
    return {"subject": subject, "problem": problem, "remedy": remedy}
