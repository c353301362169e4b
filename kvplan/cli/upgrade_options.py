"""The options of `kvplan upgrade`."""

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
    WorkloadOptions,
    complete_model,
    option,
)
from kvplan.core.errors import KvplanError
from kvplan.servers.base import parse_engine
from kvplan.servers.releases import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeOptions(WorkloadOptions):
    """Options of `kvplan upgrade`; plan options apply to a command or a model. `model` is SERVER."""

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
            help="Current release, e.g. vllm@0.24. Default: from the policy or command.",
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
            "--exit-code", help="Exit with 1 if a server that starts now would not start or would serve fewer users."
        ),
    ] = False
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    color: ColorOption = "auto"
    quiet: QuietOption = False


def release_of(text: str, flag: str) -> Version:
    """Parse the value of --from or --to."""
    try:
        return parse_engine(text)
    except KvplanError as error:
        raise error.renamed("--engine", flag) from error
