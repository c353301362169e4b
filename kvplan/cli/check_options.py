"""The options of `kvplan check`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import ColorOption, Text, WorkloadOptions, complete, option

CheckFormat = Literal["table", "json", "markdown", "github", "junit", "sarif"]
DEFAULT_NAME = "kvplan.policy.yaml"
# File name suffixes of --report, and the format of each.
SUFFIXES = {".json": "json", ".md": "markdown", ".html": "html", ".xml": "junit", ".sarif": "sarif"}


def complete_policy(incomplete: str) -> list[str]:
    """Complete policy files in the working directory; with --init, also models."""
    from pathlib import Path

    names = [path.name for path in Path().glob("*.y*ml") if path.name.startswith(incomplete)]
    return names or complete("models.yaml", incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(WorkloadOptions):
    """Options of `kvplan check`; plan options only work with --init."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="[POLICY]",
            help=f"Policy file, or a Kubernetes or compose file. Default: ./{DEFAULT_NAME}. With --init: the model.",
            autocompletion=complete_policy,
            show_default=False,
        ),
    ] = None
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            help="More files; each gets its own answer.",
            autocompletion=complete_policy,
            show_default=False,
        ),
    ] = None
    # judging
    strict: Annotated[bool, typer.Option("--strict", help="Also fail on warnings and skipped rules.")] = False
    today: Annotated[
        Text,
        option(
            "--today", help="Date to check waivers and ages against, e.g. 2027-01-31. Default: today.", metavar="DATE"
        ),
    ] = None
    base: Annotated[
        Text,
        option(
            "--base",
            help="Also compare the policy and its baseline with those of a revision, such as origin/main; fail where "
            "they are weaker.",
            metavar="REV",
        ),
    ] = None
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the current figures to the policy's baseline file.")
    ] = False
    format: Annotated[CheckFormat, typer.Option("--format", help="Output format.")] = "table"
    report: Annotated[
        list[str] | None,
        option(
            "--report",
            help="Also write the answer to a file (.json, .md, .html, .xml: JUnit, .sarif); repeatable.",
            metavar="PATH",
        ),
    ] = None
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Suppress warnings and notes.")] = False
    # writing a policy
    init: Annotated[
        bool,
        typer.Option(
            "--init", help="Write a policy for a model and these options, with the current figures as its rules."
        ),
    ] = False
    output: Annotated[Text, option("--output", "-o", help="--init: file to write.", metavar="PATH")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files of --report and --init.")] = False
    from_pid: Annotated[
        Text, option("--from-pid", help="--init: use the command line of a running server (Linux).", metavar="PID")
    ] = None
