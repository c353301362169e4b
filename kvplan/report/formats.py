"""The output formats: to add one, write a function here, add its name to `Format` and its line to `FORMS`.

The options, report files and overwrite checks follow from these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.core.table import Table
    from kvplan.report.drawing import Figure
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

Facts = TypeVar("Facts")
Format = Literal["table", "json", "csv", "markdown", "html"]


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """A command's answer, in the forms that formats are made of; each is computed on demand.

    screen    for a terminal; its argument: True if the terminal can show block characters
    document  kvplan/*@1, as JSON values
    rows      all figures, for a spreadsheet
    page      for a pull request; its first block is the answer in a sentence
    figures   charts that its HTML page shows before the tables
    servers   planned servers with their releases, "vllm@0.33", for the foot of the HTML page
    """

    screen: "Callable[[bool], Sequence[Part]]"
    document: Callable[[], Any]
    rows: "Callable[[], Table]"
    page: "Callable[[], Sequence[Block]]"
    figures: "Callable[[], Sequence[Figure]]" = tuple
    servers: Sequence[str] = ()

    @classmethod
    def of(
        cls, facts: Facts, screen: "Callable[[Facts], Sequence[Part]]", document: Callable[[Facts], Any],
        rows: "Callable[[Facts], Table]", page: "Callable[[Facts], Iterable[Block]]",
        figures: "Callable[[Facts], Sequence[Figure]]" = lambda _: (), servers: Sequence[str] = (),
    ) -> "CommandAnswer":  # fmt: skip
        """An answer whose forms are all made of the same facts."""
        return cls(
            lambda _: screen(facts),
            lambda: document(facts),
            lambda: rows(facts),
            lambda: [*page(facts)],
            lambda: figures(facts),
            servers,
        )


@dataclass(frozen=True, slots=True)
class Form:
    """A format: the suffix of its files ("": a screen is not a file), and how an answer is written in it.

    lines  for a format of rows only: writes some of them; a sweep writes its rows as they are computed
    needs  libraries that it requires
    mark   invisible last line by which kvplan recognizes its own files; "": recognized by its beginning
    """

    suffix: str
    write: Callable[[CommandAnswer], str]
    lines: "Callable[[Iterable[Iterable[Any]]], str] | None" = None
    mark: str = ""
    needs: tuple[str, ...] = ()


def as_json(answer: CommandAnswer) -> str:
    import json

    return json.dumps(answer.document(), indent=2, allow_nan=False) + "\n"


def as_csv(answer: CommandAnswer) -> str:
    from kvplan.core import table

    return table.as_csv(answer.rows())


def as_markdown(answer: CommandAnswer) -> str:
    from kvplan.report.page import page

    return page(answer.page())


def as_html(answer: CommandAnswer) -> str:
    from kvplan.report.answer_html import answer_html

    return answer_html(answer.page(), answer.figures(), answer.servers)


def as_text(answer: CommandAnswer) -> str:
    """The screen as plain text."""
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


def rendered(answer: CommandAnswer, format: str) -> str:
    """Render the answer as text."""
    return FORMS[format].write(answer)
