"""What `kvplan report --output FILE.json` writes: kvplan/report@1."""

from typing import Annotated, Literal, TypedDict

Cell = str | int | float | bool | None
Cells = dict[str, Cell]


class RunObject(TypedDict):
    """One run; `tables` by name, each a list of rows by column: the tables of the HTML page."""

    label: str
    path: str
    status: str
    recovered: bool
    answer: Annotated[str, "What was predicted and measured, in a sentence."]
    banner: Annotated[str | None, "Why the figures are not those of a whole run."]
    notes: list[str]
    findings: Annotated[dict[str, str], "What a figure shows, by the figure's name."]
    tables: dict[str, list[Cells]]


class ReportDocument(TypedDict):
    """Runs as a report shows them: sizes in bytes, times in seconds, shares from 0 to 1; null where there is none."""

    schema: Literal["kvplan/report@1"]
    title: str
    runs: list[RunObject]
    tables: Annotated[dict[str, list[Cells]], "What belongs to no one run."]
