"""The options of `kvplan pack`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    QuietOption,
    ReportOption,
    Text,
    Texts,
    complete_gpu,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of `kvplan pack`."""

    policy: Annotated[
        Text,
        typer.Argument(
            metavar="POLICY",
            help="Policy whose targets share one GPU; each target's min_users is the number it must serve.",
            show_default=False,
        ),
    ] = None
    server: Annotated[
        Texts,
        option(
            "--server",
            help="Server to place: 'NAME=MODEL flags --users N' or 'NAME=vllm serve ...', with its own flags; "
            "repeatable.",
            metavar="SERVER",
        ),
    ] = None
    gpu: Annotated[
        Text,
        option("--gpu", help="GPU shared by all servers (`kvplan gpus`).", metavar="NAME", complete=complete_gpu),
    ] = None
    memory_in_use: Annotated[
        Text,
        option("--memory-in-use", help="GPU memory already used by a desktop and other processes.", metavar="SIZE"),
    ] = None
    engine: Annotated[
        Text,
        option(
            "--engine",
            help="Server and release for each --server that is not a full command, e.g. vllm@0.33.",
            metavar="ENGINE",
        ),
    ] = None
    rest: Annotated[
        Text, option("--rest", help="Server that gets the remaining memory. Default: the first.", metavar="NAME")
    ] = None
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if any server does not start.")] = False
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
    offline: Annotated[bool, typer.Option("--offline", help="Use only the local Hub cache.")] = False
