"""The options of `kvplan diff`."""

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
    WorkloadOptions,
    complete_gpu,
    complete_model,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions(WorkloadOptions):
    """Options of `kvplan diff`; plan options apply to models only. `model` is OLD."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="OLD",
            help="JSON output of `estimate` or `check`, a policy, or a model as for `estimate`; REV:PATH reads a file "
            "from git. With --policy: a revision.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    new: Annotated[
        Text,
        typer.Argument(
            metavar="NEW",
            help="What to compare with OLD. Default: the current file of OLD's REV:PATH or of --policy.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    policy: Annotated[
        Text, option("--policy", help="Compare this policy file between the revisions OLD and NEW.", metavar="PATH")
    ] = None
    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="GPU to compare the models on (`kvplan gpus`); separate several with commas, or repeat.",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    # the answer
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 1 if NEW no longer fits, needs more KV bytes per token, or serves fewer users (at full "
            "context or at the given lengths, all replicas together).",
        ),
    ] = False
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
