"""The options of `kvplan pack`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import ColorOption, ForceOption, FormatOption, Text, Texts, complete_gpu, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """`kvplan pack`."""

    policy: Annotated[
        Text,
        typer.Argument(
            metavar="POLICY",
            help="A policy whose targets share one GPU; min_users of each says how many it must hold.",
            show_default=False,
        ),
    ] = None
    server: Annotated[
        Texts,
        option(
            "--server",
            help="A server, repeatable: 'NAME=MODEL flags --users N' or 'NAME=vllm serve ...'; flags are its own.",
            metavar="SERVER",
        ),
    ] = None
    gpu: Annotated[
        Text,
        option("--gpu", help="The GPU that all share (`kvplan gpus`).", metavar="NAME", complete=complete_gpu),
    ] = None
    memory_in_use: Annotated[
        Text,
        option("--memory-in-use", help="What a desktop and other programs hold on the GPU.", metavar="SIZE"),
    ] = None
    engine: Annotated[
        Text,
        option(
            "--engine",
            help="Server and release of each --server that is no whole command: vllm@0.33.",
            metavar="ENGINE",
        ),
    ] = None
    rest: Annotated[
        Text, option("--rest", help="Server that is given what is left; none: the first.", metavar="NAME")
    ] = None
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when they do not all start.")] = False
    format: FormatOption = "table"
    report: Annotated[
        list[str] | None,
        option("--report", help="Also write the answer to a file (.json, .csv, .md); repeatable.", metavar="PATH"),
    ] = None
    force: ForceOption = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or hints on standard error.")] = False
    offline: Annotated[bool, typer.Option("--offline", help="Use the Hub cache only.")] = False
