"""The options of `kvplan why`."""

from typing import ClassVar

from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    REPORT,
    Color,
    Text,
    Texts,
    argument,
    complete_gpu,
    complete_model,
    option,
)
from kvplan.cli.options import SERVED_CONTEXT, SERVED_GPU, SERVED_MODEL, PlanOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions(PlanOptions):
    """Options of `kvplan why`; None: not given. Plan options supply what the log does not state."""

    takes_contexts: ClassVar[bool] = False

    log: Text = argument("LOG", "Server log or an excerpt, optionally gzipped; - reads standard input.")
    command: Text = option("--command COMMAND", 'Read the output of a command, e.g. "docker logs vllm".')
    follow: bool = option("--follow", "Pass standard input through; on failure, explain it on standard error.", False)
    model: Text = option(*SERVED_MODEL, complete=complete_model)
    gpu: Texts = option(*SERVED_GPU, complete=complete_gpu)
    max_model_len: Texts = option(*SERVED_CONTEXT)
    calibration: Text = option("--calibration FILE", "Measured constants to use for the plan.")
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option("--exit-code", "Exit with 1 if the log shows a failure.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)
