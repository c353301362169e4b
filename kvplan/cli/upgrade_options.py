"""The options of `kvplan upgrade`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import ColorOption, ForceOption, FormatOption, Text, WorkloadOptions, complete_model, option


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeOptions(WorkloadOptions):
    """`kvplan upgrade`; what a plan is made from goes with a command or a model. `model` is SERVER."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="SERVER",
            help="A policy file (each of its targets), a command in quotes ('vllm serve ...'), or a model as "
            "`estimate` takes it.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    old: Annotated[
        Text,
        option(
            "--from",
            help="The release that runs now: vllm@0.24; none: as the policy or command says.",
            metavar="RELEASE",
        ),
    ] = None
    new: Annotated[
        Text, option("--to", help="The release it goes to; none: the newest that kvplan knows.", metavar="RELEASE")
    ] = None
    # the answer
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 when a server that starts now would not start, or would hold fewer users."
        ),
    ] = False
    format: FormatOption = "table"
    report: Annotated[
        list[str] | None,
        option("--report", help="Also write the answer to a file (.json, .csv, .md); repeatable.", metavar="PATH"),
    ] = None
    force: ForceOption = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or hints on standard error.")] = False
