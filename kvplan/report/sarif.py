"""A judged policy as SARIF 2.1.0 (OASIS standard), the input format of code scanning."""

from collections import Counter
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kvplan.core.files import printable
from kvplan.core.git import release
from kvplan.policy.result import RULES, CheckFailure, CheckResult, Finding
from kvplan.report.github import repository_path

Document = dict[str, Any]

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
FINGERPRINT: Final = "kvplanTargetRule/v1"
# 3.27.9, 3.27.10: "open" is a rule that lacks data to be judged; results other than "fail" have the level "none".
# 3.27.9: "informational" is a result that is not a problem.
KINDS: Final = {
    "fail": ("fail", "error"), "warn": ("fail", "warning"), "skip": ("open", "none"), "note": ("informational", "none"),
}  # fmt: skip


def sarif(result: CheckResult) -> Document:
    """One run: every rule, and a result for each that failed, warned or could not be judged."""
    seen: Counter[tuple[str, str]] = Counter()
    results = []
    for finding in result.findings:
        seen[finding.target, finding.name] += 1
        if finding.outcome != "pass":
            results.append(_result(finding, result.path, seen[finding.target, finding.name]))
    return _log({"executionSuccessful": True, "toolExecutionNotifications": _notifications(result)}, results)


def failure_sarif(failure: CheckFailure) -> Document:
    """A failed run with a notification for each error; no results, because nothing was judged."""
    invocation = {
        "executionSuccessful": False,
        "exitCode": failure.exit_code,
        "toolExecutionNotifications": [notification(error) for error in failure.all],
    }
    return _log(invocation, [])


def notification(failure: CheckFailure) -> Document:
    mark = failure.mark
    region = {} if mark is None else {"region": {"startLine": mark.line, "startColumn": mark.column}}
    return {
        "level": "error",
        "message": {"text": _text(failure.message)},
        "locations": [{"physicalLocation": {"artifactLocation": _artifact(failure.file), **region}}],
    }


def _log(invocation: Document, results: list[Document]) -> Document:
    run: Document = {
        "tool": {"driver": _driver()},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _driver() -> Document:
    version: Document = {} if (number := release()) is None else {"semanticVersion": number}
    return {"name": "kvplan", **version, "rules": [_rule(name, *texts) for name, texts in RULES.items()]}


def _rule(name: str, code: str, promise: str) -> Document:
    words = name.replace(".", "_").split("_")
    return {
        "id": code,
        "name": "".join(word.capitalize() for word in words),
        "shortDescription": {"text": promise},
        "fullDescription": {"text": promise},
        "help": {"text": f"The rule `{name}` of the policy file: {promise}"},
        "defaultConfiguration": {"level": "error"},
    }


def _notifications(result: CheckResult) -> list[Document]:
    return [{"level": "warning", "message": {"text": _text(warning)}} for warning in result.warnings]


def _result(finding: Finding, path: str, nth: int) -> Document:
    kind, level = KINDS[finding.outcome]
    fix = "" if finding.fix is None else f"; {finding.fix}"
    waived = [] if finding.waiver is None else [{"kind": "external", "justification": _text(finding.waiver)}]
    return {
        "ruleId": finding.code,
        "ruleIndex": [code for code, _ in RULES.values()].index(finding.code),
        "kind": kind,
        "level": level,
        "message": {"text": _text(f"{finding.rule} {finding.target}: {finding.message}{fix}")},
        "locations": [_location(finding, path)],
        "partialFingerprints": {FINGERPRINT: _fingerprint(finding, nth)},
        **({"suppressions": waived} if waived else {}),
    }


def _location(finding: Finding, path: str) -> Document:
    region = {"startLine": finding.line, "startColumn": finding.column}
    return {"physicalLocation": {"artifactLocation": _artifact(path), "region": region}}


def _artifact(path: str) -> Document:
    """The policy file: relative to the repository's root, or its absolute URI if it is outside."""
    relative = repository_path(path)
    if relative is None:
        return {"uri": f"file://{quote(Path(path).absolute().as_posix(), errors='replace')}"}
    return {"uri": quote(relative, errors="replace"), "uriBaseId": "%SRCROOT%"}


def _fingerprint(finding: Finding, nth: int) -> str:
    """Fingerprint of the n-th finding of a rule of a target, independent of its line and numbers."""
    from hashlib import sha256

    return sha256(f"{finding.target}\0{finding.name}\0{nth}".encode("utf-8", "backslashreplace")).hexdigest()


def _text(untrusted: str) -> str:
    return printable(untrusted, 4000)
