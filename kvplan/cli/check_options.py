"""The options of `kvplan check`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import ColorOption, Text, WorkloadOptions, complete, option

CheckFormat = Literal["table", "json", "markdown", "github", "junit", "sarif"]
DEFAULT_NAME = "kvplan.policy.yaml"
# File name endings of --report, and the format each means.
SUFFIXES = {".json": "json", ".md": "markdown", ".xml": "junit", ".sarif": "sarif"}


def complete_policy(incomplete: str) -> list[str]:
    """Policy files beside the user; with --init, models."""
    from pathlib import Path

    found = [path.name for path in Path().glob("*.y*ml") if path.name.startswith(incomplete)]
    return found or complete("models.yaml", incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(WorkloadOptions):
    """`kvplan check`; what a plan is made from goes with --init only."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="[POLICY]",
            help=f"The policy file; none: ./{DEFAULT_NAME}. With --init, the model.",
            autocompletion=complete_policy,
            show_default=False,
        ),
    ] = None
    # judging
    strict: Annotated[bool, typer.Option("--strict", help="Warnings and skipped rules fail, too.")] = False
    today: Annotated[
        Text, option("--today", help="The day that waivers and ages are counted from: 2027-01-31.", metavar="DATE")
    ] = None
    base: Annotated[
        Text,
        option(
            "--base",
            help="Also compare the policy and its baseline with those of a revision, say origin/main; what is weaker "
            "fails.",
            metavar="REV",
        ),
    ] = None
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write today's figures to the policy's baseline file.")
    ] = False
    format: Annotated[CheckFormat, typer.Option("--format", help="How the answer is written.")] = "table"
    report: Annotated[
        list[str] | None,
        option(
            "--report",
            help="Also write the answer to a file (.json, .md, .xml: JUnit, .sarif); repeatable.",
            metavar="PATH",
        ),
    ] = None
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No warnings or notes on standard error.")] = False
    # writing one
    init: Annotated[
        bool,
        typer.Option("--init", help="Write a policy for a model and the options above; its rules are today's figures."),
    ] = False
    output: Annotated[Text, option("--output", "-o", help="--init: the file to write.", metavar="PATH")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists: of --report, of --init.")] = False
    from_pid: Annotated[
        Text, option("--from-pid", help="--init: read the command of a running vLLM server (Linux).", metavar="PID")
    ] = None
