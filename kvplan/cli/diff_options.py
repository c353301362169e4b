"""The options of `kvplan diff`."""

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
from kvplan.cli.options import WorkloadOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions(WorkloadOptions):
    """Options of `kvplan diff`; plan options apply to models only. `model` is OLD."""

    model: Text = argument(
        "OLD",
        "JSON output of `estimate` or `check`, a policy, or a model as for `estimate`; REV:PATH reads a file from "
        "git. With --policy: a revision.",
        complete=complete_model,
    )
    new: Text = argument(
        "NEW",
        "What to compare with OLD. Default: the current file of OLD's REV:PATH or of --policy.",
        complete=complete_model,
    )
    policy: Text = option("--policy PATH", "Compare this policy file between the revisions OLD and NEW.")
    gpu: Texts = option(
        "--gpu NAME",
        "GPU to compare the models on (`kvplan gpus`); separate several with commas, or repeat.",
        complete=complete_gpu,
    )
    # the answer
    exit_code: bool = option(
        "--exit-code",
        "Exit with 1 if NEW no longer fits, needs more KV bytes per token, or serves fewer users (at full context "
        "or at the given lengths, all replicas together).",
        False,
    )
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)

    @property
    def reads_file(self) -> bool:
        """A file is one side of what is compared."""
        return False
