"""The formats of an answer: one more is a function here, its name in `Format` and its line in `FORMS`.

The options, report files and what may be written over follow from these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.core.table import Table
    from kvplan.report.drawing import Figure
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

Format = Literal["table", "json", "csv", "markdown", "html"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command answers, in the shapes that formats are made of; each is made when it is asked for.

    screen    for a terminal; whether it can show blocks, of which bars are made
    document  kvplan/*@1, as JSON values
    rows      all figures, for a spreadsheet
    page      for a pull request; its first block is the answer in a sentence
    figures   what its HTML page draws before the tables
    servers   whose starts are planned, with their releases: "vllm@0.33"; its HTML page names them at the foot
    """

    screen: "Callable[[bool], Sequence[Part]]"
    document: Callable[[], Any]
    rows: "Callable[[], Table]"
    page: "Callable[[], Sequence[Block]]"
    figures: "Callable[[], Sequence[Figure]]" = tuple
    servers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """A format: the suffix of its files ("": a screen is no file), and how an answer is written in it.

    lines  of a format of rows alone, how some of them are written: a sweep writes its rows as they come
    needs  libraries that it takes
    mark   the last line of a file, which shows nowhere, by which kvplan knows its own; "": it is known by its beginning
    """

    suffix: str
    write: Callable[[Answer], str]
    lines: "Callable[[Iterable[Iterable[Any]]], str] | None" = None
    mark: str = ""
    needs: tuple[str, ...] = ()


def as_json(answer: Answer) -> str:
    import json

    return json.dumps(answer.document(), indent=2, allow_nan=False) + "\n"


def as_csv(answer: Answer) -> str:
    from kvplan.core import table

    return table.as_csv(answer.rows())


def as_markdown(answer: Answer) -> str:
    from kvplan.report.page import page

    return page(answer.page())


def as_html(answer: Answer) -> str:
    from kvplan.report.answer_html import answer_html

    return answer_html(answer.page(), answer.figures(), answer.servers)


def as_text(answer: Answer) -> str:
    """The screen as a pipe has it."""
    from kvplan.report.lines import laid_out, plain

    return "".join(f"{plain(styled)}\n" for styled in laid_out(answer.screen(True)))


def csv_lines(rows: Iterable[Iterable[Any]]) -> str:
    from kvplan.core import table

    return table.csv_text(rows)


FORMS: Final[Mapping[str, Form]] = {
    "table": Form("", as_text),
    "json": Form(".json", as_json),
    "csv": Form(".csv", as_csv, lines=csv_lines),
    "markdown": Form(".md", as_markdown, mark="<!-- kvplan -->"),
    "html": Form(".html", as_html, needs=("jinja2", "markdown_it")),
}
SUFFIXES: Final[Mapping[str, str]] = {form.suffix: name for name, form in FORMS.items() if form.suffix}


def rendered(answer: Answer, format: str) -> str:
    """The answer as text."""
    return FORMS[format].write(answer)
