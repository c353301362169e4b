"""`kvplan check`: a policy file -> plans of its targets -> every rule judged -> the answer, and its exit code."""

import datetime
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from kvplan.cli import manifests, output
from kvplan.cli.check_options import DEFAULT_NAME, SUFFIXES, CheckOptions
from kvplan.cli.options import WorkloadOptions
from kvplan.cli.targets import Loads, baseline_figures, planned
from kvplan.core.errors import (
    BUG,
    EnvironmentProblem,
    KvplanError,
    UsageError,
)
from kvplan.core.files import path_text, printable
from kvplan.documents.check import check_document, failure_document
from kvplan.planning.plan import Plan
from kvplan.policy import file as policy_file
from kvplan.policy import judge
from kvplan.policy.file import Policy, Workload, exists
from kvplan.policy.gauges import Case
from kvplan.policy.judge import Against, Evidence
from kvplan.policy.result import (
    OUTCOMES,
    CheckResult,
    Failure,
    Finding,
    TargetResult,
)
from kvplan.report.lines import Line, line, write

SIMULATED_REQUESTS = 2000  # of a profile, which has no end; p99 and a 1 % rule rest on 20 of them
MANIFEST_OPTIONS = ("gpu",)  # options of a plan that a manifest leaves open
ENVIRONMENT = ("offline",)  # options of a plan that say nothing about the target


def check(options: CheckOptions) -> int:
    """Answer, and return the exit code: 0, or 1 where a rule failed."""
    if options.more:
        return several(options, options.more)
    if options.init:
        from kvplan.cli.check_init import init

        return init(options)
    path = Path(options.model or DEFAULT_NAME)
    with failure_told(path, lambda failure: show_failure(failure, options.format)):
        is_manifest = not options.init and manifests.is_manifest(path)
        if options.model is None or path.suffix not in FILES or exists(path):  # else its reader says that it lacks
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


WHOLE: Final = ("json", "junit", "sarif")  # formats whose answer is one document


def several(options: CheckOptions, more: Sequence[str]) -> int:
    """Answer for each file, one after the other; the exit code is the worst of theirs."""
    if options.init:
        raise UsageError("--init", "writes a policy for one model", "name one")
    stated = {f"--format {options.format}": options.format in WHOLE, "--report": bool(options.report)}
    for flag, is_given in stated.items():
        if is_given:
            raise UsageError(
                flag, f"is an answer about one file, and {1 + len(more)} are named", "check each by itself"
            )
    paths = [options.model or DEFAULT_NAME, *more]
    return max([check(replace(options, model=path, more=None)) for path in paths])


FILES: Final = (".yaml", ".yml", ".json")  # of a policy or a manifest; another word may be a model, whose --init lacks


def gpu_of(options: CheckOptions) -> str | None:
    """The GPU of a manifest's containers."""
    return None if options.gpu is None else ",".join(options.gpu)


def refuse_plan_options(options: CheckOptions, taken: Container[str] = ()) -> None:
    """What a plan is made from stands in the policy; given beside it, it would be ignored."""
    own = {field.name for field in fields(WorkloadOptions)} - {*ENVIRONMENT, "model"} | {"output", "from_pid"}
    for field in fields(CheckOptions):
        if field.name in own and field.name not in taken and getattr(options, field.name) != field.default:
            flag = {"max_model_len": "--ctx"}.get(field.name, "--" + field.name.replace("_", "-"))
            raise UsageError(flag, "only works with --init", "set it in the policy's target instead")


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
    """The policy in a file, or the one given, judged. Raises InvalidInputError for a fault in it, with its line.

    update  the policy's baseline file is written anew, and the rules are judged against that
    base    a revision: what is weaker than there is judged, too
    """
    policy = policy or policy_file.read(path)
    loads: Loads = {}
    cases = [planned(target, policy, offline=offline, quiet=quiet, loads=loads) for target in policy.targets]
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
    """The share of a workload's requests that are preempted or not served; a text says why it cannot be told.

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
        from kvplan.workloads import trace

        source = from_trace(trace.read(workload.trace), None)
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
    """The answer as text in a machine format."""
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
def failure_told(path: Path, tell: Callable[[Failure], None]) -> Iterator[None]:
    """Hand on why a check cannot be made, whatever it is; then the error goes its way, to its line and exit code."""
    try:
        yield
    except KvplanError as error:
        tell(Failure(path_text(path), error.message, error.exit_code, error.mark))
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"[:200]
        tell(Failure(path_text(path), f"internal error: {kind}; a bug in kvplan, please report it", BUG))
        raise


def show_failure(failure: Failure, format: str) -> None:
    """On standard output for whoever reads a machine format there; a person reads standard error."""
    if format == "table":
        return
    output.write(rendered_failure(format, failure))
    if format == "github":
        append_summary(rendered_failure("markdown", failure))


def save_failure(failure: Failure, reports: Sequence[output.ReportFile]) -> None:
    for report in reports:
        report.save(rendered_failure(report.format, failure))


def rendered_failure(format: str, failure: Failure) -> str:
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
            from kvplan.report.github import failure_line

            return f"{failure_line(failure)}\n"
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
    """To the summary of the step, where GitHub runs this; a failure to write it is no failed check."""
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
    return [*lines, *([line()] if together else []), counts_line(result)]


def target_lines(target: TargetResult, width: int, together: Container[str]) -> list[Line]:
    """A target's findings, but for those that are skipped together with others."""
    heading: Line = ((target.target, "bold"), (f"  {target.title}", ""))
    own = [finding for finding in target.findings if not (finding.outcome == "skip" and finding.message in together)]
    return [heading, *(finding_line(finding, width) for finding in own), line()]


def skipped_together(result: CheckResult) -> dict[str, list[Finding]]:
    """What several rules or targets lack alike, and those that do: one line says it for all of them."""
    by_message: dict[str, list[Finding]] = {}
    for finding in result.findings:
        if finding.outcome == "skip":
            by_message.setdefault(finding.message, []).append(finding)
    return {message: findings for message, findings in by_message.items() if len(findings) > 1}


def skipped_lines(message: str, findings: Sequence[Finding]) -> Iterator[Line]:
    """ "skip  KVP101 baseline.weights, KVP103 baseline.lora of 12 targets: there is no baseline", for each set of rules
    that the same targets skip."""
    rules: dict[str, dict[str, None]] = {}
    for finding in findings:
        rules.setdefault(finding.target, {})[f"{finding.code} {finding.rule}"] = None
    targets: dict[tuple[str, ...], list[str]] = {}
    for target, names in rules.items():
        targets.setdefault((*names,), []).append(target)
    for those, named in targets.items():
        of = ", ".join(named) if len(named) <= MOST_TARGETS_NAMED else f"{len(named):,} targets"
        yield ("skip", STYLES["skip"]), (f"  {', '.join(those)} of {of}: {message}", "")


def finding_line(finding: Finding, width: int) -> Line:
    waiver = None if finding.waiver is None else f"waived: {printable(finding.waiver, 400)}"
    sentence = "; ".join(part for part in (finding.message, waiver, finding.fix) if part is not None)
    return (
        (f"  {finding.outcome}", STYLES[finding.outcome]),
        (f"  {finding.code} {finding.rule:<{width}}  ", ""),
        (sentence, ""),
    )


def counts_line(result: CheckResult) -> Line:
    counts = [f"{result.count(outcome)} {WORDS[outcome]}" for outcome in OUTCOMES if result.count(outcome)]
    style = next((STYLES[outcome] for outcome in ("fail", "warn", "skip", "pass") if result.count(outcome)), "")
    return line(f"{result.path}: {', '.join(counts)}", style)
