"""The options of `kvplan upgrade`."""

from typing import ClassVar

from kvplan.cli.fields import COLOR, FORCE, FORMAT, QUIET, REPORT, Color, Text, Texts, argument, complete_model, option
from kvplan.cli.options import WorkloadOptions
from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.report.formats import Format
from kvplan.servers.base import parse_engine
from kvplan.servers.releases import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeOptions(WorkloadOptions):
    """Options of `kvplan upgrade`; plan options apply to a command or a model. `model` is SERVER."""

    takes_contexts: ClassVar[bool] = False

    model: Text = argument(
        "SERVER",
        "Policy file (all its targets), quoted command ('vllm serve ...'), or model as for `estimate`.",
        complete=complete_model,
    )
    old: Text = option("--from RELEASE", "Current release, e.g. vllm@0.24. Default: from the policy or command.")
    new: Text = option("--to RELEASE", "Release to upgrade to. Default: the newest that kvplan knows.")
    # the answer
    exit_code: bool = option(
        "--exit-code", "Exit with 1 if a server that starts now would not start or would serve fewer users.", False
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


def release_of(text: str, flag: str) -> Version:
    """Parse the value of --from or --to."""
    try:
        return parse_engine(text)
    except KvplanError as error:
        raise error.renamed("--engine", flag) from error
