"""What a change weakens in a policy and its baseline, compared with a base revision.

Only the base revision's policy defines what may be weakened (`allow_changes:`): a change cannot permit itself.
"""

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.core.errors import sentence
from kvplan.core.files import printable
from kvplan.core.strict_yaml import Items, Mark, Node, Scalar
from kvplan.policy.file import EVIDENCE_ID, Policy, Rule, Target, Waiver
from kvplan.policy.judge import FIGURES, GROWING, covers
from kvplan.policy.result import RULES, ChangeKind, Figures, Finding, Outcome, TargetResult

CHANGES_ID: Final = "(policy)"  # target of findings about the policy itself; no target can have this id
MOST_NAMED: Final = 3  # targets named in one line
BASELINE: Final = "baseline"
MEASURED: Final = "measured"


@dataclass(frozen=True, slots=True)
class State:
    """A policy and the files that belong to it.

    figures       of its baseline file, or None if there is no such file
    has_evidence  True if the run that it names under `measured` exists
    """

    policy: Policy
    figures: Mapping[str, Figures] | None
    has_evidence: bool = False


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Something weaker than before.

    subjects  what it concerns: "target chat"; identical changes of several subjects are merged
    mark      its current position, or None if it was removed
    """

    kind: ChangeKind
    subjects: tuple[str, ...]
    text: str
    mark: Mark | None


def changes(base: State, now: State, gpu_bytes: Mapping[str, int]) -> list[PolicyChange]:
    """Find everything that is weaker now than at the base revision.

    gpu_bytes  memory of each target's GPU, to compare headroom fractions with sizes
    """
    return grouped(
        [
            *_targets(base.policy, now.policy),
            *_rules(base.policy, now.policy, gpu_bytes),
            *_severities(base.policy, now.policy),
            *_waivers(base.policy, now.policy),
            *_baseline(base, now),
            *_evidence(base, now),
        ]
    )


def grouped(changes: Iterable[PolicyChange]) -> list[PolicyChange]:
    """Merge changes that differ only in their subject: one default may apply to many targets."""
    subjects: dict[tuple[ChangeKind, str, Mark | None], list[str]] = {}
    for change in changes:
        subjects.setdefault((change.kind, change.text, change.mark), []).extend(change.subjects)
    return [PolicyChange(kind, tuple(names), text, mark) for (kind, text, mark), names in subjects.items()]


# --- as findings ------------------------------------------------------------------------------------------------------


def changes_result(
    policy: Policy, base: Policy, revision: str, changes: Iterable[PolicyChange], notes: Iterable[Finding] = ()
) -> TargetResult:
    """Judge the changes: each fails, unless the base revision's policy allows its kind. Notes come last."""
    findings = [_finding(change, revision, change.kind in base.allow_changes) for change in changes]
    if not findings:
        findings = [finding("base", "pass", f"no target, rule, limit, waiver or baseline is weaker than in {revision}")]
    return result(policy.path, revision, [*findings, *notes])


def result(path: str, revision: str, findings: Iterable[Finding]) -> TargetResult:
    return TargetResult(CHANGES_ID, 1, f"{path} since {revision}", tuple(findings), None, None)


def finding(name: str, outcome: Outcome, message: str, mark: Mark | None = None, fix: str | None = None) -> Finding:
    rule = f"change.{name}"
    return Finding(
        code=RULES[rule][0],
        rule=rule,
        target=CHANGES_ID,
        outcome=outcome,
        message=message,
        fix=fix,
        line=1 if mark is None else mark.line,
        column=1 if mark is None else mark.column,
        limit=None,
        actual=None,
        unit="",
    )


def _finding(change: PolicyChange, revision: str, is_allowed: bool) -> Finding:
    message = sentence(named(change.subjects), change.text)
    if is_allowed:
        return finding(change.kind, "note", f"{message} ({revision} allows it)", change.mark)
    cure = f"undo it, or first allow it in {revision}: allow_changes: [{change.kind}]"
    return finding(change.kind, "fail", message, change.mark, cure)


def named(subjects: tuple[str, ...]) -> str:
    names = ", ".join(subjects[:MOST_NAMED])
    more = len(subjects) - MOST_NAMED
    return names if more <= 0 else f"{names} and {more:,} more"


def notes(base: Policy, now: Policy) -> Iterator[Finding]:
    """Yield changes that do not weaken anything yet but should be reviewed."""
    if allowed := [kind for kind in now.allow_changes if kind not in base.allow_changes]:
        yield finding("base", "note", f"allow_changes: later changes may weaken {', '.join(allowed)}")
    old, new = base.measured, now.measured
    if old is not None and new is not None and os.path.normpath(old.text) != os.path.normpath(new.text):
        texts = (printable(scalar.text, 200) for scalar in (old, new))
        yield finding("base", "note", f"measured: the evidence file changed: {' -> '.join(texts)}", new.mark)


# --- targets and their rules ------------------------------------------------------------------------------------------


def _targets(base: Policy, now: Policy) -> Iterator[PolicyChange]:
    before = {target.id for target in base.targets}
    ids = {target.id for target in now.targets}
    added = [target for target in now.targets if target.id not in before]
    for target in base.targets:
        if target.id not in ids:
            twin = next((other for other in added if stated_values(other) == stated_values(target)), None)
            text = "was removed" if twin is None else f"was renamed to {twin.id}"
            yield PolicyChange("target", (_subject(target),), text, None if twin is None else twin.mark)


def stated_values(target: Target) -> dict[str, str]:
    """What a target states about its server, as text by key."""
    nodes: dict[str, Node] = {**target.defaults, **target.own}
    stated = {"command": target.command, "manifest": target.manifest, "container": target.container}
    nodes |= {key: node for key, node in stated.items() if node is not None}
    return {key: _text(node) for key, node in nodes.items()}


def _text(node: Node) -> str:
    match node:
        case Scalar():
            return node.text
        case Items():
            return " ".join(map(_text, node.values))
        case _:
            return " ".join(f"{key} {_text(value)}" for key, value in node.values.items())


def _subject(target: Target) -> str:
    return f"target {target.id}"


Scope = tuple[Mark, Mapping[tuple[str, str], Rule]]  # its position, and its rules by name and key


def _scopes(policy: Policy) -> dict[str, Scope]:
    """All rules of a policy, by their owner: targets, the baseline, the measurement."""
    scopes: dict[str, Scope] = {_subject(target): (target.mark, _by_name(target.rules)) for target in policy.targets}
    if policy.baseline is not None:
        scopes[BASELINE] = (policy.baseline.mark, _by_name(policy.baseline.rules))
    if policy.measured is not None:
        scopes[MEASURED] = (policy.measured.mark, _by_name(_measured_rules(policy)))
    return scopes


def _by_name(rules: Iterable[Rule]) -> dict[tuple[str, str], Rule]:
    return {(rule.name, rule.key): rule for rule in rules}


def _measured_rules(policy: Policy) -> list[Rule]:
    measured = policy.measured
    rules = () if measured is None else (measured.max_error, measured.max_age)
    return [rule for rule in rules if rule is not None]


def _rules(base: Policy, now: Policy, gpu_bytes: Mapping[str, int]) -> Iterator[PolicyChange]:
    """Yield rules that were dropped and limits that are looser. Rules of a removed target are not listed separately."""
    scopes = _scopes(now)
    of_target = {_subject(target): gpu_bytes.get(target.id, 0) for target in now.targets}
    for subject, (_, rules) in _scopes(base).items():
        if subject not in scopes and subject not in (BASELINE, MEASURED):
            continue
        mark, rules_kept = scopes.get(subject, (None, {}))
        for name, rule in rules.items():
            if name not in rules_kept:
                yield PolicyChange("rule", (subject,), f"{_shown(rule)} is no longer required", mark)
            elif is_looser(rule, rules_kept[name], of_target.get(subject, 0)):
                text = f"{_shown(rule)} is looser: {_limit(rule)} -> {_limit(rules_kept[name])}"
                yield PolicyChange("limit", (subject,), text, rules_kept[name].mark)


def is_looser(before: Rule, now: Rule, gpu_bytes: int) -> bool:
    """True if a limit now allows more than before; a fraction and a size are compared on the target's GPU."""
    old, new = before.limit, now.limit
    if before.is_share != now.is_share:
        old, new = (rule.limit * gpu_bytes if rule.is_share else rule.limit for rule in (before, now))
    return new < old if now.name.startswith("min_") else new > old


def _shown(rule: Rule) -> str:
    """ "min_users.p99", "max_drop.kv_tokens": as written in the policy."""
    if rule.name.startswith("baseline."):
        figure = rule.name.removeprefix("baseline.")
        return f"{'max_growth' if figure in GROWING else 'max_drop'}.{figure}"
    return f"{rule.name}.{rule.key}" if rule.key else rule.name


def _limit(rule: Rule) -> str:
    return printable(rule.text, 20)


# --- severities and waivers -------------------------------------------------------------------------------------------


def _severities(base: Policy, now: Policy) -> Iterator[PolicyChange]:
    """Yield rules that failed before and now only warn; baseline rules are judged for each target."""
    after = {target.id: target for target in now.targets}
    for target in base.targets:
        if target.id in after:
            yield from _lowered(base, target, now, after[target.id])
    measured = {rule.name: rule for rule in _measured_rules(now)}
    for rule in _measured_rules(base):
        if rule.name in measured and base.severity.get(rule.name) != "warn" and now.severity.get(rule.name) == "warn":
            yield PolicyChange(
                "severity", (MEASURED,), f"{rule.name} now warns instead of failing", measured[rule.name].mark
            )


def _lowered(base: Policy, target: Target, now: Policy, after: Target) -> Iterator[PolicyChange]:
    by_name = {rule.name: rule for rule in _all_rules(now, after)}
    for name in {rule.name: None for rule in _all_rules(base, target)}:
        warned = _warns(base, target, name)
        if name in by_name and not warned and _warns(now, after, name):
            rule = by_name[name]
            label = _shown(rule) if name.startswith("baseline.") else name
            yield PolicyChange("severity", (_subject(target),), f"{label} now warns instead of failing", rule.mark)


def _all_rules(policy: Policy, target: Target) -> list[Rule]:
    return [*target.rules, *(policy.baseline.rules if policy.baseline else ())]


def _warns(policy: Policy, target: Target, rule: str) -> bool:
    return (target.severity.get(rule) or policy.severity.get(rule)) == "warn"


def _waivers(base: Policy, now: Policy) -> Iterator[PolicyChange]:
    """Yield waivers for a rule that had none, or for longer than before."""
    pairs = {(target.id, rule.name) for target in now.targets for rule in _all_rules(now, target)}
    pairs |= {(EVIDENCE_ID, rule.name) for rule in _measured_rules(now)}
    for waiver in now.waivers:
        same = [old.expires for old in base.waivers if (old.target, old.rule) == (waiver.target, waiver.rule)]
        if same and max(same) >= waiver.expires:
            continue
        if not any(_is_new(waiver, pair, base.waivers) for pair in pairs):
            continue
        name = printable(f"{waiver.target}/{waiver.rule}", 200)
        text = f"is new (until {waiver.expires})" if not same else f"was extended: {max(same)} -> {waiver.expires}"
        yield PolicyChange("waiver", (f"waiver {name}",), text, waiver.mark)


def _is_new(waiver: Waiver, pair: tuple[str, str], before: Iterable[Waiver]) -> bool:
    if not covers(waiver, *pair):
        return False
    until = max((old.expires for old in before if covers(old, *pair)), default=datetime.date.min)
    return waiver.expires > until


# --- baseline ---------------------------------------------------------------------------------------------------------


def _baseline(base: State, now: State) -> Iterator[PolicyChange]:
    """Yield a baseline that was replaced, deleted, or has worse figures; none is needed if there was no file."""
    old, new = base.policy.baseline, now.policy.baseline
    if old is None or base.figures is None:
        return
    name = f"{BASELINE} {printable(old.text, 200)}"
    if new is None:
        yield PolicyChange("baseline", (name,), "is no longer referenced", None)
        return
    if os.path.normpath(old.text) != os.path.normpath(new.text):
        yield PolicyChange("baseline", (name,), f"was replaced by {printable(new.text, 200)}", new.mark)
    elif now.figures is None:
        yield PolicyChange("baseline", (name,), "was deleted", new.mark)
    ids = {target.id for target in now.policy.targets}
    for target, figures in base.figures.items():
        if now.figures is not None and target in ids:
            for text in _worse(old.rules, figures, now.figures.get(target)):
                yield PolicyChange("baseline", (f"{BASELINE} of target {target}",), text, new.mark)


def _evidence(base: State, now: State) -> Iterator[PolicyChange]:
    """Yield a measured run that no longer exists: its rules would be skipped."""
    measured = now.policy.measured
    if base.has_evidence and measured is not None and not now.has_evidence:
        text = (
            f"{printable(measured.text, 200)} is missing, but the base revision has this run; its rules are not checked"
        )
        yield PolicyChange("rule", (MEASURED,), text, measured.mark)


def _worse(rules: Iterable[Rule], before: Figures, now: Figures | None) -> Iterator[str]:
    """Yield figures limited by a rule that the new baseline makes easier to meet."""
    if now is None:
        yield "no longer has figures"
        return
    if before.fits and not now.fits:
        yield "no longer fits"
    for rule in rules:
        figure = rule.name.removeprefix("baseline.")
        old, new = round(getattr(before, figure), 12), round(getattr(now, figure), 12)
        if (new > old) if figure in GROWING else (new < old):
            name, _, text = FIGURES[figure]
            yield f"{name} {text(old)} -> {text(new)}"
