"""`kvplan check`: plan the targets of a policy file, judge every rule, and set the exit code."""

import datetime
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvplan.cli import output
from kvplan.cli.check_options import DEFAULT_NAME, OPERATIONS, SUFFIXES, CheckOptions
from kvplan.cli.options import form_of, refuse_given
from kvplan.cli.typed import in_typed_words
from kvplan.core.errors import BUG, EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.documents.check import check_document, failure_document
from kvplan.measure.check import checked, policy_at
from kvplan.policy import manifests
from kvplan.policy.file import Policy, exists
from kvplan.policy.result import CheckFailure, CheckResult
from kvplan.report.check_text import table_lines
from kvplan.report.lines import write

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
        with (
            output.report_files(options.report or [], "--report", SUFFIXES, force=options.force) as reports,
            failure_told(path, lambda failure: save_failure(failure, reports)),
        ):
            policy = policy_at(path, gpu_of(options), options.base)
            result = checked(
                policy,
                path,
                today=today_of(options),
                offline=options.offline,
                tell=None if options.quiet else output.tell,
                update=options.update_baseline,
                base=options.base,
                limits=options.format in OPERATIONS,
            )
            if options.update_baseline:
                write_baseline(policy, result, quiet=options.quiet)
            for report in reports:
                report.save(rendered(report.format, result))
    show(result, options)
    if not options.quiet:
        for warning in result.warnings:
            output.tell("warning", warning)
    return result.exit_code(options.strict)


WHOLE: Final = ("json", "junit", "sarif", *OPERATIONS)  # formats that consist of one document


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


# Format -> the module that writes it, and its functions for a result and for a check that cannot run.
FORMATS: Final = {
    "markdown": ("policy_text", "markdown", "failure_markdown"),
    "html": ("policy_text", "html", "failure_html"),
    "junit": ("junit", "junit_xml", "failure_xml"),
    "sarif": ("sarif", "sarif", "failure_sarif"),
    "github": ("github", "github_lines", "failure_lines"),
}


def rendered(format: str, result: CheckResult | CheckFailure) -> str:
    """Render a result, or why there is none, in a machine format."""
    if format == "json":
        return as_json(failure_document(result) if isinstance(result, CheckFailure) else check_document(result))
    if format in OPERATIONS and isinstance(result, CheckResult):
        from kvplan.report.operations import WRITERS

        return WRITERS[format](result)
    module, of_result, of_failure = FORMATS[format]
    write = getattr(
        import_module(f"kvplan.report.{module}"), of_failure if isinstance(result, CheckFailure) else of_result
    )
    written: str | Mapping[str, Any] | Iterable[str] = write(result)
    if isinstance(written, str):
        return written
    return as_json(written) if isinstance(written, Mapping) else "".join(f"{text}\n" for text in written)


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
    if format == "table" or format in OPERATIONS:
        return
    output.write(rendered(format, failure))
    if format == "github":
        append_summary(rendered("markdown", failure))


def save_failure(failure: CheckFailure, reports: Sequence[output.ReportFile]) -> None:
    for report in reports:
        report.save(rendered(report.format, failure))


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
