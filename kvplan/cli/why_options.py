"""The options of `kvplan why`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    PlanOptions,
    QuietOption,
    ReportOption,
    ServedContextOption,
    ServedGpuOption,
    ServedModelOption,
    Text,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions(PlanOptions):
    """Options of `kvplan why`; None: not given. Plan options supply what the log does not state."""

    log: Annotated[
        Text,
        typer.Argument(
            metavar="LOG",
            help="Server log or an excerpt, optionally gzipped; - reads standard input.",
            show_default=False,
        ),
    ] = None
    command: Annotated[
        Text, option("--command", help='Read the output of a command, e.g. "docker logs vllm".', metavar="COMMAND")
    ] = None
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Pass standard input through; on failure, explain it on standard error."),
    ] = False
    model: ServedModelOption = None
    gpu: ServedGpuOption = None
    max_model_len: ServedContextOption = None
    calibration: Annotated[
        Text, option("--calibration", help="Measured constants to use for the plan.", metavar="FILE")
    ] = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the log shows a failure.")] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
