"""The options of `kvplan trace stats|profiles|convert|sample`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import ColorOption, FormatOption, Text, complete, option

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".gz": "gz"}


def complete_profile(incomplete: str) -> list[str]:
    return complete("workloads.yaml", incomplete)


TraceFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE|PROFILE",
        help="A trace (CSV, JSON Lines or a saved benchmark, gzipped or not), or a profile's name.",
        autocompletion=complete_profile,
        show_default=False,
    ),
]
OutputFile = Annotated[
    str,
    typer.Option("--output", "-o", metavar="OUT", help="File to write: .csv or .jsonl, and .gz.", show_default=False),
]
Force = Annotated[bool, option("--force", help="Replace OUT where it exists.")]
NumRequests = Annotated[Text, option("--num-requests", help="Requests to write.", metavar="N")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatsOptions:
    """`kvplan trace stats`."""

    file: TraceFile
    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProfilesOptions:
    """`kvplan trace profiles`."""

    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConvertOptions:
    """`kvplan trace convert`; the last four go with a profile. None: not said."""

    file: TraceFile
    output: OutputFile
    force: Force = False
    num_requests: NumRequests = None
    rate: Annotated[Text, option("--rate", help="Requests per second; none: the published rate.", metavar="N")] = None
    seed: Annotated[Text, option("--seed", help="Of what is drawn; none: 0.", metavar="N")] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Tokens that every prompt starts with.", metavar="TOKENS")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSampleOptions:
    """`kvplan trace sample`. None: not said."""

    file: Annotated[str, typer.Argument(metavar="FILE", help="A trace, as for stats.", show_default=False)]
    output: OutputFile
    force: Force = False
    num_requests: NumRequests = None
    share: Annotated[Text, option("--share", help="Part of the requests to keep: 10%.", metavar="SHARE")] = None
    span: Annotated[Text, option("--span", help="Keep a span of time as it was: 10m.", metavar="TIME")] = None
    start: Annotated[
        Text, option("--start", help="Where the span begins, after the first request; none: drawn.", metavar="TIME")
    ] = None
    seed: Annotated[Text, option("--seed", help="Of what is drawn; none: 0.", metavar="N")] = None
