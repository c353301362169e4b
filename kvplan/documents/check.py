"""What `kvplan check --format json` prints: kvplan/check@1 and kvplan/check-failure@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.field_types import Count, Keyword, Number, Size
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


class Cure(TypedDict):
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
    key: Literal["", "mean", "p99"]
    waiver: str | None


class Target(TypedDict):
    """A target with its rules; figures is null for findings about the measurement itself."""

    id: str
    line: Size
    title: str
    figures: Figures | None
    baseline: Figures | None
    cure: Cure | None
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
    exit_code: Count
