"""The options of `kvplan rightsize`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import ColorOption, ForceOption, FormatOption, ReportOption, Text, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsizeOptions:
    """Options of `kvplan rightsize`."""

    first: Annotated[
        Text,
        typer.Argument(metavar="FIRST", help="vLLM server's /metrics page: file or URL.", show_default=False),
    ] = None
    second: Annotated[
        Text,
        typer.Argument(
            metavar="SECOND",
            help="The same page at a later time. Default: the URL FIRST is read twice.",
            show_default=False,
        ),
    ] = None
    interval: Annotated[
        Text,
        option(
            "--interval",
            help="Time between the two pages, e.g. 10m. A URL is read again after this time (default: 1m).",
            metavar="TIME",
        ),
    ] = None
    growth: Annotated[
        Text, option("--growth", help="Plan for this multiple of the measured load, e.g. 2.", metavar="FACTOR")
    ] = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    color: ColorOption = "auto"
