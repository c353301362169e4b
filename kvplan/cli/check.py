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
from kvplan.cli.inputs import Context, Inputs, load_of, read, refuse_missing
from kvplan.cli.options import EstimateOptions, WorkloadOptions
from kvplan.cli.resolve import is_path
from kvplan.core.errors import (
    BUG,
    EnvironmentProblem,
    InvalidInputError,
    KvplanError,
    UnsupportedModelError,
    UsageError,
)
from kvplan.core.files import load_json, path_text, printable
from kvplan.core.strict_yaml import Items, Mark, Node, Scalar
from kvplan.documents.check import check_document, failure_document
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Load, Plan, plan
from kvplan.policy import file as policy_file
from kvplan.policy import judge
from kvplan.policy.file import ENGINE_KEYS, LENGTH_KEYS, SWITCH_KEYS, Policy, Target, Workload, exists, is_within
from kvplan.policy.gauges import Case
from kvplan.policy.judge import Against, Evidence
from kvplan.policy.result import (
    OUTCOMES,
    CheckResult,
    Failure,
    Figures,
    Finding,
    TargetResult,
    figures_by_target,
)
from kvplan.report.lines import Line, line, write
from kvplan.servers.arguments import SHORT
from kvplan.servers.manifest import Served
from kvplan.servers.pasted import read_command
from kvplan.servers.words import ServeCommand

Loads = dict[tuple[object, ...], Load]  # by what is said of lengths, the context, and the model's own

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


# --- targets -> plans -------------------------------------------------------------------------------------------------


def planned(target: Target, policy: Policy, *, offline: bool, quiet: bool = True, loads: Loads | None = None) -> Case:
    """A target's plan. An error in it names the file, the line and the target; it is never a failed rule.

    loads  what is said of lengths, as far as it was read for other targets
    """
    try:
        inputs = asked_of(target, policy, offline=offline, loads=loads)
        request = inputs.requests[0]
        made = plan(replace(request, load=replace(request.load, lengths=None)))
    except KvplanError as error:
        raise located(error, target) from error
    if not quiet:
        say(target, inputs)
    return Case(target, made, request.load.lengths)


def asked_of(
    target: Target, policy: Policy, *, offline: bool, loads: Loads | None = None, engine: str | None = None
) -> Inputs:
    """What a target asks to be planned; with `engine`, of that release."""
    known = {} if loads is None else loads
    served = manifests.container_of(target, policy.folder)
    stated = target if served is None else manifests.with_gpu(served, target)
    command = command_of(target, served)
    options = options_of(stated, command, policy.folder, offline=offline, served=served)
    if engine is not None:
        options = replace(options, engine=engine)
    refuse_files_outside(options, command, policy.root)
    inputs = read(options, lambda context, spec: load_at(options, context, spec, known), command)
    if served is not None:
        manifests.check_gpus(served, inputs)
        manifests.note_gpu(served, inputs, stated=stated is target)
    return inputs


def command_of(target: Target, served: Served | None) -> ServeCommand | None:
    """The command of a target's container, or its own; None where it has neither."""
    if served is not None:
        return manifests.command_of(served)
    return None if target.command is None else read_command(target.command.text)


def load_at(options: EstimateOptions, context: Context, spec: ModelSpec, loads: Loads) -> Load:
    """As asked.load_of, each distribution read once: targets often share one."""
    key = (*(getattr(options, name) for name in LENGTH_KEYS), context, spec.max_model_len)
    if key not in loads:
        loads[key] = load_of(options, context, spec)
    return loads[key]


def located(error: KvplanError, target: Target) -> KvplanError:
    """The same error with its place in the policy."""
    key = "command:" if target.manifest is None else "manifest:"
    known = error if target.command is target.manifest else error.renamed("--from-command", key)
    placed = known.within(f"target {target.id}")
    kind = EnvironmentProblem if isinstance(error, EnvironmentProblem) else InvalidInputError
    return kind(placed.subject, placed.problem, placed.remedy, mark=place_of(error, target))


NAMING_KEYS = ("model", "draft_model", "lengths", "calibration")  # their values are files and Hub ids
KEYS = {  # arguments by the other names that errors have for them
    "ctx": "max_model_len",
    "no_enable_lora": "enable_lora",
    **SHORT,
}


def place_of(error: KvplanError, target: Target) -> Mark:
    """The place of the key that an error is about: the first of its keys that the target states, else the defaults."""
    keys = [KEYS.get(key, key) for key in error.keys]
    if not set(keys) & {"from_command", *ENGINE_KEYS}:
        keys = named_by(error, target)
    stated = next((key for key in keys if key in target.own), None)
    source = target.command or target.manifest
    if stated is None and source is not None and keys:
        return source.mark
    return target.place(stated or next((key for key in keys if key in target.defaults), ""))


def named_by(error: KvplanError, target: Target) -> list[str]:
    """The keys whose value an error is about: a file, or a model, which may go by another of its names."""
    nodes = {**target.defaults, **target.own}
    values = {key: node.text.removeprefix("./") for key, node in nodes.items() if isinstance(node, Scalar)}
    subject = error.subject.partition(": ")[0]
    keys = [key for key in NAMING_KEYS if values.get(key) and subject.endswith(values[key])]
    return keys or (["model"] if isinstance(error, UnsupportedModelError) else [])


def options_of(
    target: Target, command: ServeCommand | None, folder: Path, *, offline: bool, served: Served | None = None
) -> EstimateOptions:
    """A target as the options of `kvplan estimate`: what it says itself, then its command, then the defaults."""
    nodes = dict(target.own)
    stated = keys_of_command(command)
    nodes |= {key: node for key, node in target.defaults.items() if key not in nodes and key not in stated}
    given: dict[str, Any] = {key: value_of(key, node, folder) for key, node in nodes.items()}
    if served is not None and command is not None:
        given |= {"from_command": served.command}
        if "model" not in given:
            manifests.check_model(served, command)
    elif target.command is not None and command is not None:
        given |= {"from_command": target.command.text}
        if "model" not in given and command.model is not None and command.model.startswith("."):
            given |= {"model": path_in(folder, command.model)}
    refuse_missing(
        (
            "model",
            "model" in given or command is not None,
            "name one, or paste the command: `command: vllm serve ...`",
        ),
        (
            "gpu",
            "gpu" in given or "gpu_memory" in given,
            "name one of `kvplan gpus`"
            if served is None
            else "no label of its node says which; add --gpu or gpu: NAME",
        ),
    )
    return EstimateOptions(**given, offline=offline)


def refuse_files_outside(options: WorkloadOptions, command: ServeCommand | None, root: Path) -> None:
    """Refuse files of a target that lie outside the policy's repository."""
    names = {
        "model": options.model or (command.model if command else None),
        "draft_model": options.draft_model or (command.draft_model if command else None),
        "lengths": options.lengths,
        "calibration": options.calibration,
    }
    for key, text in names.items():
        if text is not None and is_file(key, text) and not is_within(root, Path(text)):
            raise UsageError(
                key, f"points outside {path_text(root)} ({printable(text, 200)})", "keep it in the repository"
            )


def is_file(key: str, text: str) -> bool:
    """Whether the reader of a key takes its value for a file's name."""
    from kvplan.models import catalog
    from kvplan.workloads.lengths import DISTRIBUTIONS

    match key:
        case "lengths":
            return text.partition(":")[0] not in DISTRIBUTIONS
        case "calibration":
            return True
        case _:
            return catalog.find(text) is None and is_path(text)


def keys_of_command(command: ServeCommand | None) -> set[str]:
    """The engine keys that a target's command states: they win over the policy's defaults."""
    if command is None:
        return set()
    others = {
        "model": command.model, "revision": command.revision, "draft_model": command.draft_model,
        "engine": command.engine,
    }  # fmt: skip
    return {*command.args, *(key for key, value in others.items() if value is not None)}


def value_of(key: str, node: Node, folder: Path) -> Any:
    """A key's value as the option of its name wants it; policy_file has refused what is not of its kind."""
    match node:
        case Items():
            return [item.text for item in node.values if isinstance(item, Scalar)]
        case Scalar() if key in SWITCH_KEYS:
            return node.text == "true"
        case Scalar() if key in ("gpu", "max_model_len", "engine_arg"):
            return [node.text]
        case Scalar() if key in ("model", "draft_model"):
            return path_in(folder, node.text) if is_path_in(folder, node.text) else node.text
        case Scalar() if key == "calibration" or (key == "lengths" and is_path_in(folder, node.text)):
            return path_in(folder, node.text)
        case _:
            assert isinstance(node, Scalar)
            return node.text


def path_in(folder: Path, text: str) -> str:
    """A path as the policy means it, with its leading ./ kept: it tells a path from a name of the catalog."""
    return text if str(folder) == "." else os.path.join(folder, text)  # noqa: PTH118 -- a Path drops the ./


def is_path_in(folder: Path, text: str) -> bool:
    """Whether a name is meant as a path: it looks like one, or there is such a file beside the policy."""
    from kvplan.models import catalog

    if text.startswith((".", "/")) or text.endswith((".json", ".csv", ".csv.gz", ".txt")):
        return True
    try:
        return catalog.find(text) is None and (folder / text).exists()
    except (OSError, ValueError):
        return False


def say(target: Target, inputs: Inputs) -> None:
    """Warnings of a target, and where its command reads a number otherwise than kvplan's own keys would."""
    source = "command" if target.manifest is None else "manifest"
    for text in dict.fromkeys(inputs.warnings):
        output.tell("warning", f"target {target.id}: {text.replace('--from-command', source, 1)}")
    for text in dict.fromkeys(inputs.notes):
        if text in inputs.readings or (target.manifest is not None and text.startswith("--from-command: ")):
            output.tell("note", f"target {target.id}: {text.replace('--from-command', source, 1)}")
    if (others := overruled_model(target)) is not None:
        own, other = (printable(text, 100) for text in others)
        output.tell("note", f"target {target.id}: uses model: {own}, not {other} from its command")


def overruled_model(target: Target) -> tuple[str, str] | None:
    """(the target's own model, its command's) where they are not one and the same."""
    from kvplan.models import catalog

    node = target.own.get("model")
    if target.command is None or not isinstance(node, Scalar):
        return None
    other = read_command(target.command.text).model
    if other is None or other == node.text:
        return None
    known = catalog.find(node.text)
    return None if known is not None and known == catalog.find(other) else (node.text, other)


# --- baseline ---------------------------------------------------------------------------------------------------------


def baseline_figures(policy: Policy) -> Mapping[str, Figures] | None:
    """The baseline's figures by target; None where there is no such file (yet)."""
    if policy.baseline is None or not exists(policy.baseline.path):
        return None
    try:
        return figures_by_target(load_json(policy.baseline.path), printable(str(policy.baseline.path), 200))
    except KvplanError as error:
        raise error.within("baseline", policy.baseline.mark) from error


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
