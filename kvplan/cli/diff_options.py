"""The options of `kvplan diff`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    Text,
    Texts,
    WorkloadOptions,
    complete_gpu,
    complete_model,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions(WorkloadOptions):
    """`kvplan diff`; what a plan is made from goes with models only. `model` is OLD."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="OLD",
            help="A JSON answer of `estimate` or `check`; a policy; a model as `estimate` takes it; any file as "
            "REV:PATH of a git repository; with --policy, a revision.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    new: Annotated[
        Text,
        typer.Argument(
            metavar="NEW",
            help="What to compare it with; none: the file of OLD's REV:PATH or of --policy as it is now.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    policy: Annotated[
        Text, option("--policy", help="Compare this policy file at the revisions OLD and NEW.", metavar="PATH")
    ] = None
    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="GPU that two models are compared on (`kvplan gpus`); several by comma or repeated.",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    # the answer
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 1 when NEW does not fit where OLD did, takes more KV bytes per token, or holds fewer whole "
            "users (full-context, or of the lengths stated, all replicas together).",
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
