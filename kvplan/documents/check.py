"""What `kvplan check --format json` prints: kvplan/check@1 and kvplan/check-failure@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Keyword, Number, Size, from_fields
from kvplan.policy import result as judged
from kvplan.policy.result import RULES, Outcome

Counts = TypedDict("Counts", {"pass": Count, "note": Count, "warn": Count, "fail": Count, "skip": Count})  # by outcome


class Figures(TypedDict):
    """What a target's plan says, in bytes of one rank, tokens and requests of one replica; what the pool holds is 0
    where it does not fit. concurrency is the server's own figure, users those served at once (null: not known).
    """

    fits: bool
    weights: Count
    kv_cache: Count
    kv_bytes_per_token: Count
    kv_tokens: Count
    concurrency: Number
    headroom: int
    lora: Count
    users: Count | None


class CheckCure(TypedDict):
    """One change after which the target keeps every rule that it keeps now, and those named (findings' names)."""

    flags: list[str]
    keys: Annotated[dict[str, str | float | bool], "The change as keys of the policy's target."]
    rules: list[str]


class Finding(TypedDict):
    """One rule, judged. limit and actual are numbers in `unit`; null: not known."""

    code: Annotated[str, Keyword("enum", tuple(code for code, _ in RULES.values()))]
    rule: Annotated[str, Keyword("enum", tuple(RULES))]
    outcome: Outcome
    message: str
    fix: str | None
    line: Size
    column: Size
    limit: float | bool | None
    actual: float | bool | None
    unit: str
    key: judged.Key
    waiver: str | None


class Target(TypedDict):
    """A target with its rules; figures is null for findings about the measurement itself."""

    id: str
    line: Size
    title: str
    figures: Figures | None
    baseline: Figures | None
    cure: CheckCure | None
    findings: Annotated[list[Finding], "In the order of the file."]


class CheckDocument(TypedDict):
    """A policy, judged (kvplan check --format json; also what a baseline file holds)."""

    schema: Literal["kvplan/check@1"]
    policy: str
    counts: Annotated[Counts, "Findings by outcome."]
    targets: Annotated[list[Target], "In the order of the file."]
    warnings: list[str]


class CheckFailureDocument(TypedDict):
    """A check that could not be made (kvplan check --format json, exit code 2, 3 or 70): no rule was judged."""

    schema: Literal["kvplan/check-failure@1"]
    policy: str
    file: str
    line: Size | None
    column: Size | None
    message: str
    others: list[str]
    exit_code: Count


def check_document(result: judged.CheckResult) -> CheckDocument:
    """A judged policy as JSON values (kvplan/check1)."""
    return {
        "schema": "kvplan/check@1",
        "policy": result.path,
        "counts": {
            "pass": result.count("pass"),
            "note": result.count("note"),
            "warn": result.count("warn"),
            "fail": result.count("fail"),
            "skip": result.count("skip"),
        },
        "targets": [_target(target) for target in result.targets],
        "warnings": list(result.warnings),
    }


def _target(result: judged.TargetResult) -> Target:
    return {
        "id": result.target,
        "line": result.line,
        "title": result.title,
        "figures": None if result.figures is None else _figures(result.figures),
        "baseline": None if result.baseline is None else _figures(result.baseline),
        "cure": None
        if result.cure is None
        else {"flags": list(result.cure.flags), "keys": dict(result.cure.keys), "rules": list(result.cure.rules)},
        "findings": [_finding(finding) for finding in result.findings],
    }


def _figures(figures: judged.Figures) -> Figures:
    return from_fields(Figures, figures)


def _finding(finding: judged.Finding) -> Finding:
    return from_fields(Finding, finding)


def failure_document(failure: judged.CheckFailure) -> CheckFailureDocument:
    """A check that could not be made as JSON values; no reader can take it for an answer."""
    mark = failure.mark
    return {
        "schema": "kvplan/check-failure@1",
        "policy": failure.path,
        "file": failure.file,
        "line": None if mark is None else mark.line,
        "column": None if mark is None else mark.column,
        "message": failure.message,
        "others": [str(other) for other in failure.others],
        "exit_code": failure.exit_code,
    }
