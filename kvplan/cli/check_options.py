"""The options of `kvplan check`."""

from typing import Final, Literal

from kvplan.cli.fields import COLOR, Color, Text, Texts, argument, complete, option
from kvplan.cli.options import WorkloadOptions
from kvplan.core.records import dataclass

CheckFormat = Literal[
    "table", "json", "markdown", "github", "junit", "sarif",
    "prometheus-rule", "prometheus-operator", "prometheus-test", "grafana", "keda",
]  # fmt: skip
OPERATIONS: Final = CheckFormat.__args__[6:]  # what runs a server: made of its operating limits
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

    model: Text = argument(
        "[POLICY]",
        f"Policy file, or a Kubernetes or compose file. Default: ./{DEFAULT_NAME}. With --init: the model.",
        complete=complete_policy,
    )
    more: Texts = argument("[POLICY]...", "More files; each gets its own answer.", complete=complete_policy)
    # judging
    strict: bool = option("--strict", "Also fail on warnings and skipped rules.", False)
    today: Text = option("--today DATE", "Date to check waivers and ages against, e.g. 2027-01-31. Default: today.")
    base: Text = option(
        "--base REV",
        "Also compare the policy and its baseline with those of a revision, such as origin/main; fail where they "
        "are weaker.",
    )
    update_baseline: bool = option(
        "--update-baseline", "Write the current figures to the policy's baseline file.", False
    )
    format: CheckFormat = option("--format", "Output format.", "table")
    report: Texts = option(
        "--report PATH", "Also write the answer to a file (.json, .md, .html, .xml: JUnit, .sarif); repeatable."
    )
    color: Color = option(*COLOR, "auto")
    quiet: bool = option("--quiet, -q", "Suppress warnings and notes.", False)
    # writing a policy
    init: bool = option(
        "--init", "Write a policy for a model and these options, with the current figures as its rules.", False
    )
    output: Text = option("--output, -o PATH", "--init: file to write.")
    force: bool = option("--force", "Overwrite existing files of --report and --init.", False)
    from_pid: Text = option("--from-pid PID", "--init: use the command line of a running server (Linux).")

    @property
    def reads_file(self) -> bool:
        """Without --init a file is what is checked."""
        return self.init
