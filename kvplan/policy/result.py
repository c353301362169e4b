"""Result of `kvplan check`: the judged rules of each target, and the figures of a baseline (kvplan/check@1).

kvplan.policy.file reads the policy, kvplan.policy.judge judges it. Sizes are integer bytes per GPU rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from kvplan.core.errors import InvalidInputError, Mark
from kvplan.core.files import printable

if TYPE_CHECKING:
    from kvplan.policy.limits import Limits

CHECK: Final = "kvplan/check@1"

Outcome = Literal["pass", "note", "warn", "fail", "skip"]  # a note is informational and never fails
OUTCOMES: Final[tuple[Outcome, ...]] = ("pass", "note", "warn", "fail", "skip")
Key = Literal["", "mean", "p99"]
ChangeKind = Literal["target", "rule", "limit", "severity", "waiver", "baseline"]
# Kinds of weakening changes to a policy; `allow_changes:` of the base revision's policy names those that are allowed.
CHANGE_KINDS: Final[tuple[ChangeKind, ...]] = ("target", "rule", "limit", "severity", "waiver", "baseline")

# Rule -> (its code, what it requires). A code never changes its meaning: other tools store it.
RULES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "fits": ("KVP001", "The server starts: one full-length request fits next to the weights."),
        "min_headroom": ("KVP002", "At least this much GPU memory stays free."),
        "min_logged_concurrency": (
            "KVP003",
            "At least this many full-length requests fit at once, by the server's figure.",
        ),
        "min_users": ("KVP004", "At least this many requests of the workload's mean or p99 length run at once."),
        "min_kv_tokens": ("KVP005", "The KV cache holds at least this many tokens."),
        "max_weights": ("KVP006", "The weights of one rank take at most this many bytes."),
        "max_kv_bytes_per_token": ("KVP007", "Each token takes at most this many bytes of KV cache on one rank."),
        "max_lora_bytes": ("KVP008", "The adapter slots of one rank take at most this many bytes."),
        "max_preemption_rate": ("KVP009", "At most this share of the workload's requests is preempted."),
        "max_prediction_error": ("KVP010", "Measured and predicted memory differ by at most this share."),
        "max_age": ("KVP011", "The measurement is at most this old."),
        "min_concurrency": ("KVP012", "At least this many full-length requests are served at once."),
        "plausible": ("KVP013", "Sizes that a target overrides do not contradict its card or its checkpoint."),
        "baseline.weights": ("KVP101", "The weights have grown by at most this share since the baseline."),
        "baseline.kv_bytes_per_token": ("KVP102", "KV per token has grown by at most this share since the baseline."),
        "baseline.lora": ("KVP103", "The adapter slots have grown by at most this share since the baseline."),
        "baseline.kv_cache": ("KVP104", "The KV cache has shrunk by at most this share since the baseline."),
        "baseline.kv_tokens": (
            "KVP105",
            "The tokens in the KV cache have dropped by at most this share since the baseline.",
        ),
        "baseline.concurrency": ("KVP106", "The server's concurrency figure has dropped by at most this fraction."),
        "baseline.headroom": ("KVP107", "The memory left over has shrunk by at most this share since the baseline."),
        "baseline.users": ("KVP108", "The users served at once have dropped by at most this share since the baseline."),
        "change.base": ("KVP200", "The policy and its baseline are compared with those of the base revision."),
        "change.target": ("KVP201", "Every target of the base revision is still there under its id."),
        "change.rule": ("KVP202", "Every rule of the base revision is still stated."),
        "change.limit": ("KVP203", "No limit is looser than at the base revision."),
        "change.severity": ("KVP204", "No rule that failed at the base revision only warns."),
        "change.waiver": ("KVP205", "No waiver is new or longer than at the base revision."),
        "change.baseline": ("KVP206", "The baseline is the base revision's file, with figures no worse."),
        "change.server": ("KVP207", "An id names the same server as at the base revision."),
    }
)


# Rules that a policy may name in its severities and waivers: not those that the base revision decides.
OWN_RULES: Final = tuple(name for name in RULES if not name.startswith("change."))


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule of one target, judged.

    code     of the rule, from RULES: "KVP003"
    message  one line without code and target: the value, the limit, and the difference
    fix      a change that satisfies the rule, with the resulting value; None: the rule did not fail
    line     of the rule in the policy file, from 1; the target's if the rule has no line of its own
    limit, actual   numbers in `unit`; bytes are integers; None: unknown
    key      the statistic that it limits, if a rule has several: "mean", "p99"
    waiver   the reason and the last day, if a waiver turned a failure into a warning
    """

    code: str
    rule: str
    target: str
    outcome: Outcome
    message: str
    fix: str | None
    line: int
    column: int
    limit: int | float | bool | None
    actual: int | float | bool | None
    unit: str
    key: Key = ""
    waiver: str | None = None

    @property
    def name(self) -> str:
        """The rule with its key, unique among a target's findings: "min_users.p99"."""
        return f"{self.rule}.{self.key}" if self.key else self.rule


@dataclass(frozen=True, slots=True)
class Figures:
    """A plan's figures for comparisons: bytes of one rank, tokens, and requests of one replica.

    concurrency  the server's own figure
    users        requests served at once, or None for a length distribution or figures of an earlier release
    """

    fits: bool
    weights: int
    kv_cache: int
    kv_bytes_per_token: int
    kv_tokens: int
    concurrency: float
    headroom: int
    lora: int
    users: int | None = None


@dataclass(frozen=True, slots=True)
class RuleCure:
    """One change with which a target keeps every rule that passes now and passes those named.

    flags  as the server accepts them: "--kv-cache-dtype fp8"
    keys   the same as keys of the policy's target, which override its command
    rules  names of the findings that it fixes
    """

    flags: tuple[str, ...]
    keys: Mapping[str, int | float | str | bool]
    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target with all its rules judged.

    title     "llama-3.1-8b on a100-80g, tp 1, 32,768 tokens"
    figures   None if it has no plan
    baseline  the figures in the baseline file, if it has this target
    cure      None if nothing fails, or if no change tried fixes everything
    server    with its release; "" if it has no plan
    """

    target: str
    line: int
    title: str
    findings: tuple[Finding, ...]
    figures: Figures | None
    baseline: Figures | None
    cure: RuleCure | None = None
    server: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A judged policy. `warnings` concern the file itself: an expired waiver, no rules at all.

    limits  operating limits by target, or why it has none; only where the format is made of them
    """

    path: str
    targets: tuple[TargetResult, ...]
    warnings: tuple[str, ...]
    limits: "Mapping[str, Limits | str]" = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, in the order of the file."""
        return tuple(finding for target in self.targets for finding in target.findings)

    def count(self, outcome: Outcome) -> int:
        return sum(finding.outcome == outcome for finding in self.findings)

    def exit_code(self, strict: bool) -> Literal[0, 1]:
        """1 if a rule failed; with `strict`, also if one warned or could not be judged."""
        refused = ("fail", "warn", "skip") if strict else ("fail",)
        return 1 if any(finding.outcome in refused for finding in self.findings) else 0


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """A check that could not run: no rule was judged, and nothing passed.

    path     of the policy, as in messages
    message  the reason, in one line without its position
    mark     the position in a file, or None if unknown
    others   further errors that were there at the same time
    """

    path: str
    message: str
    exit_code: int
    mark: Mark | None = None
    others: "tuple[CheckFailure, ...]" = ()

    @property
    def all(self) -> "tuple[CheckFailure, ...]":
        return (self, *self.others)

    @property
    def file(self) -> str:
        return self.path if self.mark is None else self.mark.where

    def __str__(self) -> str:
        """Format as one line for standard error."""
        return self.message if self.mark is None else f"{self.mark}: {self.message}"


# --- reading a baseline document --------------------------------------------------------------------------------------


def figures_by_target(document: Mapping[str, Any], where: str) -> dict[str, Figures]:
    """Figures of each target in a check document used as a baseline. Raise InvalidInputError if it is not one."""
    targets = document.get("targets")
    if document.get("schema") != CHECK or not isinstance(targets, list):
        raise InvalidInputError(where, f"is not a baseline ({CHECK})", "kvplan check --update-baseline writes one")
    figures: dict[str, Figures] = {}
    seen: set[str] = set()
    for target in targets:
        if not isinstance(target, dict) or not isinstance(target.get("id"), str) or target["id"] in seen:
            raise InvalidInputError(where, "a target has no id of its own", "the file is damaged")
        seen.add(target["id"])
        values = target.get("figures")
        if values is not None:
            figures[target["id"]] = _figures(values, f"{where}: target {printable(target['id'], 80)}")
    return figures


def _figures(values: object, where: str) -> Figures:
    if not isinstance(values, dict):
        raise InvalidInputError(where, "figures is not an object", "the file is damaged")
    kinds = {"fits": bool, "concurrency": int | float}
    for column in fields(Figures):
        value, kind = values.get(column.name), kinds.get(column.name, int)
        if column.name == "users" and value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise InvalidInputError(where, f"{column.name} is missing or not a number", "the file is damaged")
    return Figures(**{column.name: values[column.name] for column in fields(Figures) if column.name in values})
