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
        help="Trace (CSV, JSON Lines or saved benchmark, optionally gzipped) or profile name.",
        autocompletion=complete_profile,
        show_default=False,
    ),
]
OutputFile = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="OUT", help="File to write: .csv or .jsonl, optionally .gz.", show_default=False
    ),
]
Force = Annotated[bool, option("--force", help="Overwrite OUT if it exists.")]
NumRequests = Annotated[Text, option("--num-requests", help="Number of requests to write.", metavar="N")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatsOptions:
    """Options of `kvplan trace stats`."""

    file: TraceFile
    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProfilesOptions:
    """Options of `kvplan trace profiles`."""

    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConvertOptions:
    """Options of `kvplan trace convert`; the last four only apply to a profile. None: not given."""

    file: TraceFile
    output: OutputFile
    force: Force = False
    num_requests: NumRequests = None
    rate: Annotated[Text, option("--rate", help="Requests per second. Default: the published rate.", metavar="N")] = (
        None
    )
    seed: Annotated[Text, option("--seed", help="Random seed. Default: 0.", metavar="N")] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all prompts share.", metavar="TOKENS")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSampleOptions:
    """Options of `kvplan trace sample`. None: not given."""

    file: Annotated[str, typer.Argument(metavar="FILE", help="Trace, as for stats.", show_default=False)]
    output: OutputFile
    force: Force = False
    num_requests: NumRequests = None
    share: Annotated[Text, option("--share", help="Fraction of the requests to keep, e.g. 10%.", metavar="SHARE")] = (
        None
    )
    span: Annotated[Text, option("--span", help="Keep a time span unchanged, e.g. 10m.", metavar="TIME")] = None
    start: Annotated[
        Text, option("--start", help="Start of the span, after the first request. Default: random.", metavar="TIME")
    ] = None
    seed: Annotated[Text, option("--seed", help="Random seed. Default: 0.", metavar="N")] = None
