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
        typer.Argument(metavar="LOG", help="A server's log, or a part of it, .gz too; - reads it.", show_default=False),
    ] = None
    command: Annotated[
        Text, option("--command", help='Read what a command prints: "docker logs vllm".', metavar="COMMAND")
    ] = None
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Pass standard input through, and explain on standard error once it fails."),
    ] = False
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "--config",
            metavar="MODEL",
            help="The model that was served: a catalog name, a Hub id, a config.json or its directory.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option("--gpu", help="GPU it ran on (`kvplan gpus`); none: by the log.", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        Texts, option("--max-model-len", "--ctx", help="Context in tokens; none: by the log.", metavar="TOKENS")
    ] = None
    calibration: Annotated[Text, option("--calibration", help="Measured constants to plan with.", metavar="FILE")] = (
        None
    )
    format: Annotated[Literal["table", "json"], typer.Option("--format", help="How the answer is written.")] = "table"
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the log shows a failure.")] = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, option("--quiet", "-q", help="No notes or hints on standard error.")] = False
