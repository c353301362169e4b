"""`kvplan check`: plan the targets of a policy file, judge every rule, and set the exit code."""

import datetime
import os
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvplan.cli import output
from kvplan.cli.check_options import DEFAULT_NAME, SUFFIXES, CheckOptions
from kvplan.cli.options import form_of, refuse_given
from kvplan.cli.typed import in_typed_words
from kvplan.core.errors import (
    BUG,
    EnvironmentProblem,
    Faults,
    KvplanError,
    UsageError,
)
from kvplan.core.files import path_text, printable
from kvplan.core.units import plural
from kvplan.documents.check import check_document, failure_document
from kvplan.planning.plan import Plan
from kvplan.policy import file as policy_file
from kvplan.policy import judge, manifests
from kvplan.policy.changes import CHANGES_ID
from kvplan.policy.file import Policy, Workload, exists
from kvplan.policy.gauges import Case, read_trace
from kvplan.policy.judge import Against, Evidence
from kvplan.policy.result import (
    OUTCOMES,
    CheckFailure,
    CheckResult,
    Finding,
    TargetResult,
)
from kvplan.policy.targets import Loads, baseline_figures, planned
from kvplan.report.lines import Line, line, write

SIMULATED_REQUESTS = 2000  # of a profile, which is endless; p99 and a 1% rule rest on 20 of them
MANIFEST_OPTIONS = ("gpu",)  # plan options that a manifest does not set


def check(options: CheckOptions) -> int:
    """Run the check and return the exit code: 0, or 1 if a rule failed."""
    if options.more:
        return several(options, options.more)
    if options.init:
        from kvplan.cli.check_init import init

        return init(options)
    path = Path(options.model or DEFAULT_NAME)
    with failure_told(path, lambda failure: show_failure(failure, options.format)):
        is_manifest = not options.init and manifests.is_manifest(path)
        if options.model is None or path.suffix not in FILES or exists(path):  # else its reader reports it
            refuse_plan_options(options, MANIFEST_OPTIONS if is_manifest else ())
        refuse_no_policy(options, path)
        if is_manifest and options.base is not None:
            raise UsageError("--base", "compares policies, not manifests", "name the manifest in a policy's target")
        with (
            output.report_files(options.report or [], "--report", SUFFIXES, force=options.force) as reports,
            failure_told(path, lambda failure: save_failure(failure, reports)),
        ):
            result = checked(
                path,
                today=today_of(options),
                offline=options.offline,
                quiet=options.quiet,
                update=options.update_baseline,
                base=options.base,
                policy=manifests.policy_of(path, gpu_of(options)) if is_manifest else None,
            )
            for report in reports:
                report.save(rendered(report.format, result))
    show(result, options)
    if not options.quiet:
        for warning in result.warnings:
            output.tell("warning", warning)
    return result.exit_code(options.strict)


WHOLE: Final = ("json", "junit", "sarif")  # formats that consist of one document


def several(options: CheckOptions, more: Sequence[str]) -> int:
    """Check each file in turn; return the worst exit code."""
    if options.init:
        raise UsageError("--init", "writes a policy for one model", "name one")
    stated = {f"--format {options.format}": options.format in WHOLE, "--report": bool(options.report)}
    for flag, is_given in stated.items():
        if is_given:
            raise UsageError(flag, f"supports one file, but {1 + len(more)} are named", "check each by itself")
    paths = [options.model or DEFAULT_NAME, *more]
    return max([check(replace(options, model=path, more=None)) for path in paths])


FILES: Final = (".yaml", ".yml", ".json")  # of a policy or a manifest; any other word may be a model without --init


def gpu_of(options: CheckOptions) -> str | None:
    """GPU for a manifest's containers, or None."""
    return None if options.gpu is None else ",".join(options.gpu)


def refuse_plan_options(options: CheckOptions, taken: Collection[str] = ()) -> None:
    """Refuse plan options: plans come from the policy, so these options would be ignored."""
    problem = ("works only with --init", "set it in the policy's target instead")
    form_of(options).refuse_except(("model", "offline", *taken), *problem)
    refuse_given(options, ("output", "from_pid"), *problem)


def refuse_no_policy(options: CheckOptions, path: Path) -> None:
    if options.model is None and not exists(path):
        raise UsageError(
            f"./{DEFAULT_NAME}",
            "no such file",
            "name a policy, or write one with `kvplan check --init MODEL --gpu NAME`",
        )


def today_of(options: CheckOptions) -> datetime.date:
    if options.today is None:
        return datetime.datetime.now(datetime.UTC).date()
    try:
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", options.today):
            return datetime.date.fromisoformat(options.today)
    except ValueError:
        pass
    raise UsageError("--today", f"not a date ({printable(options.today, 40)!r})", "write one like 2027-01-31")


def checked(
    path: Path,
    *,
    today: datetime.date | None = None,
    offline: bool = False,
    quiet: bool = False,
    update: bool = False,
    base: str | None = None,
    policy: Policy | None = None,
) -> CheckResult:
    """Judge the policy in a file, or the given one. Raise InvalidInputError with the line of an error in it.

    update  rewrite the policy's baseline file and judge the rules with it
    base    a revision: also judge what is weaker than there
    """
    policy = policy or policy_file.read(path)
    loads: Loads = {}
    cases: list[Case] = []
    faults = Faults()
    for target in policy.targets:
        with faults.part():
            cases.append(planned(target, policy, offline=offline, tell=None if quiet else output.tell, loads=loads))
    faults.refuse()
    evidence = None
    if policy.measured is not None:
        evidence = evidence_of(policy, cases)
    against = Against(
        today=today or datetime.datetime.now(datetime.UTC).date(),
        baseline={case.target.id: judge.figures(case) for case in cases} if update else baseline_figures(policy),
        evidence=evidence,
        preemption_rate=preemption_rate,
    )
    result = judge.judge(policy, cases, against)
    changed: tuple[TargetResult, ...] = ()
    if base is not None:
        from kvplan.cli.check_base import since_base

        changed = (since_base(base, policy, path, cases, against.baseline, offline=offline),)
    if update:
        write_baseline(policy, result, quiet=quiet)
    return replace(result, targets=(*result.targets, *changed))


def evidence_of(policy: Policy, cases: list[Case]) -> Evidence:
    from kvplan.cli.check_evidence import read_evidence

    assert policy.measured is not None
    return read_evidence(policy.measured, cases)


def preemption_rate(plan: Plan, workload: Workload) -> float | str:
    """Fraction of a workload's requests that are preempted or not served, or a text that says why it is unknown.

    Equal servers with equal workloads are simulated once.
    """
    request = plan.request
    key = (
        request.spec, request.gpu, request.args, request.release, request.weights_bytes, workload.profile,
        workload.trace, workload.rate_per_s, workload.tpot_s,
    )  # fmt: skip
    if key not in SIMULATED:
        SIMULATED[key] = simulated(plan, workload)
    return SIMULATED[key]


SIMULATED: dict[Any, float | str] = {}


def simulated(plan: Plan, workload: Workload) -> float | str:
    from kvplan.simulate.preempted import preempted_share
    from kvplan.simulate.source import Source, from_profile, from_trace

    source: Source
    if workload.trace is not None:
        source = from_trace(read_trace(workload.trace), None)
    elif workload.profile is not None:
        from kvplan.workloads.profiles import profile

        source = from_profile(profile(workload.profile), SIMULATED_REQUESTS, seed=0, shared_prefix=None)
    else:
        return "the workload names neither a profile nor a trace"
    rate = workload.rate_per_s or source.rate
    if rate is None:
        return f"{source.name} has no rate; add one to the workload"
    return preempted_share(plan, source, rate, workload.tpot_s)


# --- baseline ---------------------------------------------------------------------------------------------------------


def write_baseline(policy: Policy, result: CheckResult, *, quiet: bool) -> None:
    if policy.baseline is None:
        raise UsageError(
            "--update-baseline", f"{policy.path} names no baseline", "add `baseline: {file: .kvplan/baseline.json}`"
        )
    path = policy.baseline.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = printable(str(path.parent), 200)
        raise EnvironmentProblem(
            f"--update-baseline: {where}", f"cannot be created ({error.strerror})", "name another file"
        ) from error
    with output.report_files([str(path)], "--update-baseline", {path.suffix.lower(): "json"}, force=True) as (file,):
        file.save(rendered("json", result))
    if not quiet:
        output.tell("note", f"wrote {printable(str(path), 400)}; commit it with the policy")


# --- showing ----------------------------------------------------------------------------------------------------------


def rendered(format: str, result: CheckResult) -> str:
    """Render the result in a machine format."""
    match format:
        case "json":
            return as_json(check_document(result))
        case "markdown":
            from kvplan.report.policy_text import markdown

            return markdown(result)
        case "html":
            from kvplan.report.policy_text import html

            return html(result)
        case "junit":
            from kvplan.report.junit import junit_xml

            return junit_xml(result)
        case "sarif":
            from kvplan.report.sarif import sarif

            return as_json(sarif(result))
        case "github":
            from kvplan.report.github import github_lines

            return "".join(f"{text}\n" for text in github_lines(result))
    raise AssertionError(format)


@contextmanager
def failure_told(path: Path, tell: Callable[[CheckFailure], None]) -> Iterator[None]:
    """Report why a check cannot run, then re-raise the error for its message and exit code."""
    try:
        yield
    except KvplanError as raised:
        error = in_typed_words(raised, output.command_line(), {})
        first, *others = (
            CheckFailure(path_text(path), wrong.message, wrong.exit_code, wrong.mark) for wrong in error.all
        )
        tell(replace(first, others=tuple(others)))
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"[:200]
        tell(CheckFailure(path_text(path), f"internal error: {kind}; a bug in kvplan, please report it", BUG))
        raise


def show_failure(failure: CheckFailure, format: str) -> None:
    """Write the failure to standard output in a machine format; for people, standard error is enough."""
    if format == "table":
        return
    output.write(rendered_failure(format, failure))
    if format == "github":
        append_summary(rendered_failure("markdown", failure))


def save_failure(failure: CheckFailure, reports: Sequence[output.ReportFile]) -> None:
    for report in reports:
        report.save(rendered_failure(report.format, failure))


def rendered_failure(format: str, failure: CheckFailure) -> str:
    match format:
        case "json":
            return as_json(failure_document(failure))
        case "markdown":
            from kvplan.report.policy_text import failure_markdown

            return failure_markdown(failure)
        case "html":
            from kvplan.report.policy_text import failure_html

            return failure_html(failure)
        case "junit":
            from kvplan.report.junit import failure_xml

            return failure_xml(failure)
        case "sarif":
            from kvplan.report.sarif import failure_sarif

            return as_json(failure_sarif(failure))
        case "github":
            from kvplan.report.github import failure_lines

            return "".join(f"{text}\n" for text in failure_lines(failure))
    raise AssertionError(format)


def as_json(document: Mapping[str, Any]) -> str:
    import json

    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def show(result: CheckResult, options: CheckOptions) -> None:
    if options.format == "table":
        with output.standard_output():
            write(table_lines(result), output.console(options.color))
        return
    output.write(rendered(options.format, result))
    if options.format == "github":
        from kvplan.report.github import step_summary

        append_summary(step_summary(result))


def append_summary(text: str) -> None:
    """Append to the step's summary on GitHub; failing to write it does not fail the check."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        from kvplan.report import github

        problem = github.append_summary(path, text)
        if problem is not None:
            output.tell("warning", problem)


STYLES = {"pass": "green", "note": "cyan", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MOST_TARGETS_NAMED = 3  # in one line
WORDS = {"pass": "passed", "note": "noted", "warn": "warned", "fail": "failed", "skip": "skipped"}


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
