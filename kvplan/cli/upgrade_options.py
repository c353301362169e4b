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
            help="Policy file (all its targets), quoted command ('vllm serve ...'), or model as for `estimate`.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    old: Annotated[
        Text,
        option(
            "--from",
            help="Current release: vllm@0.24. Default: from the policy or command.",
            metavar="RELEASE",
        ),
    ] = None
    new: Annotated[
        Text, option("--to", help="Release to upgrade to. Default: the newest that kvplan knows.", metavar="RELEASE")
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Suppress notes and hints.")] = False
