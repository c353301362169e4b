"""The formats of an answer. One more is a function here, its name in `Format` and its line in `WRITERS`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.core.table import Table
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

Format = Literal["table", "json", "csv", "markdown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command answers, in the shapes that formats are made of; each is made when it is asked for.

    screen    for a terminal; whether it can show blocks, of which bars are made
    document  kvplan/*@1, as JSON values
    rows      all figures, for a spreadsheet
    page      for a pull request
    """

    screen: "Callable[[bool], Sequence[Part]]"
    document: Callable[[], Any]
    rows: "Callable[[], Table]"
    page: "Callable[[], Sequence[Block]]"


def as_json(answer: Answer) -> str:
    import json

    return json.dumps(answer.document(), indent=2, allow_nan=False) + "\n"


def as_csv(answer: Answer) -> str:
    from kvplan.core import table

    return table.as_csv(answer.rows())


def as_markdown(answer: Answer) -> str:
    from kvplan.report.page import page

    return page(answer.page())


def as_text(answer: Answer) -> str:
    """The screen as a pipe has it."""
    from kvplan.report.lines import laid_out, plain

    return "".join(f"{plain(styled)}\n" for styled in laid_out(answer.screen(True)))


# The suffix of a file in each format; no suffix: a screen is no file.
WRITERS: Final[Mapping[str, tuple[str, Callable[[Answer], str]]]] = {
    "table": ("", as_text),
    "json": (".json", as_json),
    "csv": (".csv", as_csv),
    "markdown": (".md", as_markdown),
}
SUFFIXES: Final[Mapping[str, str]] = {suffix: name for name, (suffix, _) in WRITERS.items() if suffix}


def rendered(answer: Answer, format: str) -> str:
    """The answer as text, in a `Format`."""
    return WRITERS[format][1](answer)
