"""The options of `kvplan why`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import ColorOption, PlanOptions, Text, Texts, complete_gpu, complete_model, option


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions(PlanOptions):
    """Everything that can be said to `kvplan why`; None: not said. What a plan is made from fills in what the log does
    not say."""

    log: Annotated[
        Text,
        typer.Argument(
            metavar="LOG",
            help="Server log or an excerpt, optionally gzipped; - reads standard input.",
            show_default=False,
        ),
    ] = None
    command: Annotated[
        Text, option("--command", help='Read the output of a command: "docker logs vllm".', metavar="COMMAND")
    ] = None
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Pass standard input through; on failure, explain it on standard error."),
    ] = False
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "--config",
            metavar="MODEL",
            help="Model that was served: catalog name, Hub id, config.json or its directory.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="GPU the server ran on (`kvplan gpus`). Default: from the log.",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    max_model_len: Annotated[
        Texts, option("--max-model-len", "--ctx", help="Context length. Default: from the log.", metavar="TOKENS")
    ] = None
    calibration: Annotated[
        Text, option("--calibration", help="Measured constants to use for the plan.", metavar="FILE")
    ] = None
    format: Annotated[Literal["table", "json"], typer.Option("--format", help="Output format.")] = "table"
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the log shows a failure.")] = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, option("--quiet", "-q", help="Suppress notes and hints.")] = False
