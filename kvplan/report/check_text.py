"""The answer of `kvplan check` for a terminal: the verdict, and what each rule compared."""

from collections.abc import Container, Iterator, Sequence

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import plural
from kvplan.documents.check import check_document
from kvplan.policy.changes import CHANGES_ID
from kvplan.policy.result import OUTCOMES, CheckResult, Finding, TargetResult
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Line, line, plain
from kvplan.report.page import bold
from kvplan.report.policy_text import capacity_bars

STYLES = {"pass": "green", "note": "cyan", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MOST_TARGETS_NAMED = 3  # in one line
WORDS = {"pass": "passed", "note": "noted", "warn": "warned", "fail": "failed", "skip": "skipped"}


def shapes(result: CheckResult) -> CommandAnswer:
    """The answer for a terminal and as JSON, with the charts of its page."""
    return CommandAnswer(
        lambda _: table_lines(result),
        lambda: check_document(result),
        lambda: Table.of(("rule", "outcome"), ((finding.rule, finding.outcome) for finding in result.findings), left=2),
        lambda: [bold(plain(verdict_line(result)))],
        lambda: capacity_bars(result),
    )


def table_lines(result: CheckResult) -> list[Line]:
    together = skipped_together(result)
    alone = [finding for finding in result.findings if not (finding.outcome == "skip" and finding.message in together)]
    width = max((len(finding.rule) for finding in alone), default=0)
    lines = [styled for target in result.targets for styled in target_lines(target, width, together)]
    lines += [skipped for message, findings in together.items() for skipped in skipped_lines(message, findings)]
    return [verdict_line(result), line(), *lines, *([line()] if together else []), counts_line(result)]


def verdict_line(result: CheckResult) -> Line:
    """The verdict: "2 of 3 targets pass; agents fails min_concurrency"."""
    targets = [target for target in result.targets if target.target != CHANGES_ID]
    failed = [target for target in result.targets if any(finding.outcome == "fail" for finding in target.findings)]
    total = plural(len(targets), "target")
    if failed:
        reasons = "; ".join(failure_text(target) for target in failed[:MOST_TARGETS_NAMED])
        more = f"; and {len(failed) - MOST_TARGETS_NAMED:,} more" if len(failed) > MOST_TARGETS_NAMED else ""
        passed = len(targets) - sum(target.target != CHANGES_ID for target in failed)
        verb = "passes" if len(targets) == 1 else "pass"
        return line(f"{passed:,} of {total} {verb}; {reasons}{more}", STYLES["fail"])
    if not any(finding.outcome in ("pass", "warn") for finding in result.findings):
        return line(f"No rule was checked for {total}", STYLES["skip"])
    warned = result.count("warn")
    warnings = f", with {plural(warned, 'warning')}" if warned else ""
    text = f"All {total} pass{warnings}" if len(targets) > 1 else f"{total} passes{warnings}"
    return line(text, STYLES["warn" if warned else "pass"])


def failure_text(target: TargetResult) -> str:
    """ "agents fails min_concurrency and max_weights"."""
    rules = list(dict.fromkeys(finding.name for finding in target.findings if finding.outcome == "fail"))
    named = rules if len(rules) < 4 else [*rules[:2], f"{len(rules) - 2:,} more rules"]
    name = "the policy itself" if target.target == CHANGES_ID else printable(target.target, 80)
    return f"{name} fails {' and '.join(filter(None, (', '.join(named[:-1]), named[-1])))}"


def target_lines(target: TargetResult, width: int, together: Container[str]) -> list[Line]:
    """A target's findings, except those skipped together with others."""
    heading: Line = ((target.target, "bold"), (f"  {target.title}", ""))
    own = [finding for finding in target.findings if not (finding.outcome == "skip" and finding.message in together)]
    return [heading, *(styled for finding in own for styled in finding_lines(finding, width)), line()]


def skipped_together(result: CheckResult) -> dict[str, list[Finding]]:
    """Findings skipped by several rules or targets for the same reason, by that reason: one line covers all."""
    by_message: dict[str, list[Finding]] = {}
    for finding in result.findings:
        if finding.outcome == "skip":
            by_message.setdefault(finding.message, []).append(finding)
    return {message: findings for message, findings in by_message.items() if len(findings) > 1}


def skipped_lines(message: str, findings: Sequence[Finding]) -> Iterator[Line]:
    """ "skip  KVP101 baseline.weights, KVP103 baseline.lora of 12 targets: there is no baseline", one line per set of
    rules that the same targets skip.
    """
    rules: dict[str, dict[str, None]] = {}
    for finding in findings:
        rules.setdefault(finding.target, {})[f"{finding.code} {finding.rule}"] = None
    targets: dict[tuple[str, ...], list[str]] = {}
    for target, names in rules.items():
        targets.setdefault((*names,), []).append(target)
    for those, named in targets.items():
        of = ", ".join(named) if len(named) <= MOST_TARGETS_NAMED else f"{len(named):,} targets"
        yield ("skip", STYLES["skip"]), (f"  {', '.join(those)} of {of}: {message}", "")


def finding_lines(finding: Finding, width: int) -> Iterator[Line]:
    """The value and the limit, followed by the waiver and the fix."""
    yield (
        (f"  {finding.outcome}", STYLES[finding.outcome]),
        (f"  {finding.code} {finding.rule:<{width}}  ", ""),
        (finding.message, ""),
    )
    if finding.waiver is not None:
        yield line(f"        waived: {printable(finding.waiver, 400)}")
    if finding.fix is not None:
        yield line(f"        fix: {finding.fix}")


def counts_line(result: CheckResult) -> Line:
    counts = [f"{result.count(outcome)} {WORDS[outcome]}" for outcome in OUTCOMES if result.count(outcome)]
    style = next((STYLES[outcome] for outcome in ("fail", "warn", "skip", "pass") if result.count(outcome)), "")
    return line(f"{result.path}: {', '.join(counts)}", style)
