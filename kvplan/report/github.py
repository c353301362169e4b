"""A judged policy for GitHub: workflow annotations, and the summary of a job's step."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvplan.core.files import printable
from kvplan.policy.result import CheckFailure, CheckResult, Finding, Outcome
from kvplan.report.policy_text import counts_text, document

MOST_ANNOTATIONS: Final = 10  # GitHub shows this many of a kind per step and silently drops the rest
MAX_SUMMARY_BYTES: Final = 1 << 20  # per step; GitHub drops a larger summary entirely

COMMANDS: Final[Mapping[Outcome, str]] = {"fail": "error", "warn": "warning", "note": "notice", "skip": "notice"}


def repository_path(path: str) -> str | None:
    """A file's path from the root of the repository, with forward slashes, or None if it is outside.

    The root is $GITHUB_WORKSPACE, else the current directory.
    """
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    # A link inside the repository keeps its name; links on the way are followed only if that fails.
    for here, there in ((_absolute(root), _absolute(Path(path))), (root.resolve(), Path(path).resolve())):
        if there.is_relative_to(here):
            return there.relative_to(here).as_posix()
    return None


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def github_lines(result: CheckResult) -> list[str]:
    """At most 10 workflow commands, the worst findings first, the last of which may count the rest; then the totals."""
    file = annotated_file(result.path)
    grouped = groups(result)
    limit = len(grouped) if len(grouped) <= MOST_ANNOTATIONS else MOST_ANNOTATIONS - 1
    lines = [annotation(group, file) for group in grouped[:limit]]
    if more := sum(len(group) for group in grouped[limit:]):
        lines.append(f"::notice title=kvplan check::{more:,} more: the full table is in the summary of this step")
    return [*lines, f"kvplan check: {counts_text(result)}"]


def annotated_file(path: str) -> str:
    return repository_path(path) or Path(path).as_posix()


def failure_lines(failure: CheckFailure) -> list[str]:
    """Workflow commands for a check that could not run: one for each error."""
    return [failure_line(error) for error in failure.all]


def failure_line(failure: CheckFailure) -> str:
    """One workflow command for an error, with its position if known."""
    place = "" if failure.mark is None else f",line={failure.mark.line},col={failure.mark.column}"
    return f"::error file={_property(annotated_file(failure.file))}{place},title=kvplan::{_data(failure.message)}"


def groups(result: CheckResult) -> list[list[Finding]]:
    """Findings to annotate, the worst first; those with the same text and line for several targets are grouped."""
    by_message: dict[tuple[object, ...], list[Finding]] = {}
    for outcome in COMMANDS:
        for finding in result.findings:
            if finding.outcome == outcome:
                by_message.setdefault((outcome, finding.code, finding.line, finding.column, _said(finding)), []).append(
                    finding
                )
    return list(by_message.values())


def annotation(group: list[Finding], file: str) -> str:
    """One workflow command for findings that differ only in their targets."""
    first = group[0]
    title = f"{first.code} {first.name} {', '.join(finding.target for finding in group)}"
    where = f"file={_property(file)},line={first.line},col={first.column},title={_property(title)}"
    return f"::{COMMANDS[first.outcome]} {where}::{_data(_said(first))}"


def _said(finding: Finding) -> str:
    text = finding.message if finding.fix is None else f"{finding.message}; {finding.fix}"
    return text if finding.waiver is None else f"{text} (waived: {finding.waiver})"


def _data(text: str) -> str:
    """Escape text for a workflow command, where percent signs and line ends have a meaning."""
    escaped = text[:4000].replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(escaped, 20_000)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# --- the summary of a step --------------------------------------------------------------------------------------------


def step_summary(result: CheckResult) -> str:
    """The full table as Markdown, within GitHub's limit for one step."""
    return document(result, MAX_SUMMARY_BYTES // 2)


def append_summary(path: str, text: str) -> str | None:
    """Append to the file that $GITHUB_STEP_SUMMARY names; return the error as one line, or None.

    A summary that cannot be written must not fail a check that passed.
    """
    file, where = Path(path), f"$GITHUB_STEP_SUMMARY {printable(path, 400)}"
    data = f"{text}\n".encode()
    try:
        size = file.stat().st_size if file.exists() else 0
        if size + len(data) > MAX_SUMMARY_BYTES:
            return f"{where}: not changed: the table would make it larger than GitHub accepts ({size:,} bytes held)"
        with file.open("ab") as summary:
            summary.write(data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"{where} cannot be written ({reason}); the table is omitted"
    return None
