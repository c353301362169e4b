"""Judge a policy with plans: every rule passes, warns, fails or is skipped, and a failure names its fix.

A rule whose input is missing is skipped, never guessed. A fix is a change whose plan satisfies the rule: it is computed
with plan(), like the target itself.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import Final

from kvplan.core.files import printable
from kvplan.core.strict_yaml import Scalar, wrong
from kvplan.core.units import format_gib, format_size, plural
from kvplan.hardware.gpu import split_count
from kvplan.planning import advise, users
from kvplan.planning.plan import Plan, lack_text
from kvplan.policy import plausible
from kvplan.policy.file import EVIDENCE_ID, Policy, Rule, Severity, Target, Waiver, Workload, exists
from kvplan.policy.gauges import (
    BASELINE_KNOBS,
    GAUGES,
    Case,
    Gauge,
    Number,
    concurrency_gauge,
    kv_tokens,
    length_name,
    located,
    next_kv,
    number,
    on_ranks,
    plain,
    prefix_tokens,
    request_tokens,
    share_text,
    users_gauge,
)
from kvplan.policy.pods import shortage
from kvplan.policy.remedies import ACCEPT, Remedies, Wish, remedies
from kvplan.policy.result import RULES, CheckResult, Figures, Finding, Outcome, RuleCure, TargetResult

# Fraction of a plan's requests that are preempted under its workload, or a text that says why it is unknown.
PreemptionRate = Callable[[Plan, Workload], float | str]

MAX_CURED: Final = 100  # targets whose failures get a fix; a fix takes dozens of plans
SHOWN_CURES: Final = 2
UNPLANNED: Final = ("max_prediction_error", plausible.RULE)  # rules that no change of flags satisfies
TP: Final = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the measurement shows.

    problem  why it cannot be used; the rest is then empty
    error    the largest relative error of a predicted row, named by `worst`; if None, `no_error` says why
    started  date on which the run began; None: unknown
    matches  ids of the targets that it applies to
    subject  what ran, on which device
    """

    subject: str = ""
    problem: str | None = None
    error: float | None = None
    worst: str = ""
    no_error: str = ""
    started: datetime.date | None = None
    matches: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Against:
    """Inputs of the rules other than the plans.

    baseline  figures by target, or None if there is no such file
    """

    today: datetime.date
    baseline: Mapping[str, Figures] | None = None
    evidence: Evidence | None = None
    preemption_rate: PreemptionRate = lambda plan, workload: "no simulation is available"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one rule of one target: ok None is a skip, whose message says what is missing."""

    ok: bool | None
    message: str
    limit: Number | bool | None = None
    actual: Number | bool | None = None
    unit: str = ""
    fix: str | None = None


def judge(policy: Policy, cases: Sequence[Case], against: Against) -> CheckResult:
    """Judge every rule of every target, in file order.

    Raises InvalidInputError for a target without rules, and for a waiver that matches nothing or lasts over a year.
    """
    refuse_long_waivers(policy.waivers, against.today)
    results = []
    num_cured = 0
    for case in cases:
        bench = _Bench(policy, case, against, cures=num_cured < MAX_CURED)
        result = bench.result()
        num_cured += any(finding.outcome in ("fail", "warn") for finding in result.findings)
        results.append(result)
    if policy.measured is not None and against.evidence is not None:
        evidence_result = _evidence_result(policy, against.evidence, against.today)
        results += [evidence_result] if evidence_result.findings else []
    refuse_idle(policy, results)
    warnings = [*_expired(policy.waivers, against.today)]
    if num_cured > MAX_CURED:
        warnings.append(f"{policy.path}: fixes were computed only for the first {MAX_CURED} failing targets")
    outcomes = {finding.outcome for result in results for finding in result.findings}
    if outcomes == {"skip"}:
        warnings.append(
            f"{policy.path}: every rule was skipped, so nothing was checked; use --strict to make this a failure"
        )
    return CheckResult(policy.path, tuple(results), tuple(warnings))


def figures(case: Case) -> Figures:
    """Figures to compare with a baseline; capacity is 0 if the plan does not fit."""
    plan = case.plan
    return Figures(
        fits=plan.fits,
        weights=plan.memory.weights,
        kv_cache=plan.memory.kv_cache,
        kv_bytes_per_token=plan.bytes_per_token,
        kv_tokens=kv_tokens(plan),
        concurrency=plan.concurrency.max,
        headroom=plan.memory.headroom,
        lora=plan.memory.lora,
        users=plan.concurrency.users if case.lengths is None else None,
    )


def title(plan: Plan) -> str:
    """Model, GPU, ranks and context: llama-3.1-8b on a100-80g, tp 1, 32,768 tokens."""
    args = plan.request.args
    ranks = [f"tp {args.tensor_parallel_size}"]
    ranks += [f"pp {args.pipeline_parallel_size}"] * (args.pipeline_parallel_size > 1)
    ranks += [f"dp {args.data_parallel_size}"] * (args.data_parallel_size > 1)
    name = printable(plan.request.spec.name, 200)
    return f"{name} on {plan.request.gpu.name}, {', '.join(ranks)}, {plan.capacity.max_model_len:,} tokens"


# --- one target -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bench:
    """A target while it is judged.

    plans  of changes, by flags, shared by several rules
    rates  fraction that each plan preempts, by the plan's id; stored with the plan, so that the id stays unique
    """

    policy: Policy
    case: Case
    against: Against
    cures: bool
    plans: dict[str, Plan | None] = field(default_factory=dict)
    rates: dict[int, tuple[Number | str, Plan]] = field(default_factory=dict)

    def result(self) -> TargetResult:
        target, plan = self.case.target, self.case.plan
        before = (self.against.baseline or {}).get(target.id)
        rules = [*target.rules, *(self.policy.baseline.rules if self.policy.baseline else ())]
        if not rules and self.policy.measured is None:
            raise wrong(target.mark, f"target {target.id}", "has no rules", "add at least `rules: {fits: true}`")
        rules += plausible.rules_of(target)
        verdicts = [self.verdict(rule, before) for rule in rules]
        remedy = self.remedies(rules, verdicts, before) if self.cures else Remedies({})
        findings = tuple(
            finding_of(rule, target.id, verdict, self.policy, self.against.today, target.severity)
            for rule, verdict in zip(rules, verdicts, strict=True)
        )
        findings = tuple(replace(finding, fix=remedy.fixes.get(finding.name, finding.fix)) for finding in findings)
        cure = None if remedy.cure is None else cure_of(remedy.cure, remedy.cured, target)
        server = plan.request.release.label
        return TargetResult(
            target.id, target.mark.line, title(plan), findings, figures(self.case), before, cure, server
        )

    def verdict(self, rule: Rule, before: Figures | None) -> Verdict:
        if rule.name == "fits":
            return self.fits()
        if rule.name.startswith("baseline."):
            return self.since_baseline(rule, before)
        if rule.name == "max_prediction_error":
            return self.predicted(rule)
        if rule.name == plausible.RULE:
            return self.possible()
        gauge = self.gauge(rule)
        if isinstance(gauge, str):
            return Verdict(None, gauge)
        if rule.name == "max_preemption_rate" and not self.case.plan.fits:  # nothing is served, so nothing is simulated
            return replace(self.fits(), limit=rule.limit, actual=None, unit="share")
        return self.measured(rule, gauge)

    def fits(self) -> Verdict:
        plan = self.case.plan
        short_pod = None if self.case.served is None or not plan.fits else shortage(plan, self.case.served)
        if short_pod is not None:
            problem, cure = short_pod
            return Verdict(False, f"fits the GPU, but not its pod: {problem}", True, False, fix=cure)
        if plan.fits:
            return Verdict(True, f"fits, {format_gib(plan.memory.unused)} of GPU memory left", True, True)
        return Verdict(False, lack_text(plan), True, False)

    def possible(self) -> Verdict:
        problems = plausible.problems(self.case.plan)
        if not problems:
            return Verdict(True, "the sizes that are stated do not contradict the card or the checkpoint", True, True)
        fix = "delete the override, or waive this rule with the reason"
        return Verdict(False, "; ".join(problems), True, False, fix=fix)

    def measured(self, rule: Rule, gauge: Gauge) -> Verdict:
        plan = self.case.plan
        limit, actual = gauge.limit(rule, plan), gauge.value(plan)
        if isinstance(actual, str):
            return Verdict(None, actual)
        ok = gauge.holds(rule, plan)
        message = f"{gauge.describe(plan)}; {'minimum' if gauge.is_floor else 'maximum'} {gauge.limit_text(rule, plan)}"
        if not ok:
            message += f", {gauge.text(abs(limit - actual))} {'short' if gauge.is_floor else 'over'}"
            message += "" if plan.fits or not gauge.is_floor else " because it does not fit"
        return Verdict(ok, message, limit, actual, gauge.unit)

    def gauge(self, rule: Rule) -> Gauge | str:
        """What the rule measures, or a text that says what is missing."""
        match rule.name:
            case "min_users":
                tokens = request_tokens(self.case, rule.key)
                if isinstance(tokens, str):
                    return tokens
                return users_gauge(tokens, length_name(self.case, rule.key), prefix_tokens(self.case))
            case "min_concurrency":
                return concurrency_gauge(self.case.plan.capacity.max_model_len, prefix_tokens(self.case))
            case "max_preemption_rate":
                return self.preemption_gauge()
            case _:
                return GAUGES[rule.name]

    def preemption_gauge(self) -> Gauge | str:
        workload = self.case.target.workload
        if workload is None or (workload.profile is None and workload.trace is None):
            return "the target has no workload with a profile or a trace to simulate"
        if workload.trace is not None and not exists(workload.trace):
            return f"the trace {printable(str(workload.trace), 200)} does not exist"

        def rate(plan: Plan) -> Number | str:
            if id(plan) not in self.rates:
                with located(workload, self.case.target):
                    self.rates[id(plan)] = self.against.preemption_rate(plan, workload), plan
            return self.rates[id(plan)][0]

        def describe(plan: Plan) -> str:
            return f"{share_text(number(rate(plan)))} of the requests are preempted"

        return Gauge(rate, "share", False, share_text, describe, next_kv)

    def since_baseline(self, rule: Rule, before: Figures | None) -> Verdict:
        assert self.policy.baseline is not None
        if before is None:
            baseline = printable(self.policy.baseline.text, 200)
            missing = (
                f"the baseline {baseline} does not exist yet"
                if self.against.baseline is None
                else f"the target is not in the baseline {baseline} yet"
            )
            return Verdict(None, f"{missing}; create it with --update-baseline")
        figure = _figure(rule)
        was, now = getattr(before, figure), getattr(figures(self.case), figure)
        if was is None or now is None:  # a length distribution, or a baseline of an earlier release
            return Verdict(None, f"{figure} is not known for {'the baseline' if was is None else 'this target'}")
        return compared(rule, was, now, on_ranks(self.case.plan) if figure in OF_A_RANK else "")

    def predicted(self, rule: Rule) -> Verdict:
        evidence = self.against.evidence
        if evidence is None:
            return Verdict(None, "there is no `measured:` run to compare with")
        if evidence.problem is None and self.case.target.id not in evidence.matches:
            return Verdict(None, f"the run is for {evidence.subject}, not for this target")
        return error_verdict(rule, evidence)

    # --- fixes

    def remedies(self, rules: Sequence[Rule], verdicts: Sequence[Verdict], before: Figures | None) -> Remedies:
        """Fixes for the failing rules that a plan can affect: not those on the measured server or on overrides."""
        wishes = [
            self.wish(rule, verdict, before)
            for rule, verdict in zip(rules, verdicts, strict=True)
            if verdict.ok is not None and rule.name not in UNPLANNED and not is_of_pod(rule, verdict)
        ]
        num_unmet = sum(verdict.ok is False for verdict in verdicts)
        return remedies(self.case.plan, wishes, num_unmet, lambda plan: self.sayable(plan, advise.fit_knobs(plan)))

    def wish(self, rule: Rule, verdict: Verdict, before: Figures | None) -> Wish:
        target, plan = self.case.target, self.case.plan
        outcome, _ = outcome_of(rule, target.id, verdict, self.policy, self.against.today, target.severity)

        def holds(changed: Plan) -> bool:
            return changed.fits and self.of(changed).verdict(rule, before).ok is True

        def knobs(changed: Plan) -> Iterator[advise.Knob]:
            return self.knobs(rule, changed)

        def alone(also: advise.Holds) -> list[advise.FlagCure]:
            if rule.name == "fits":
                return advise.fixes(plan, SHOWN_CURES, self.plans, also, knobs(plan))
            search = advise.Search(plan.request, list(knobs(plan)), advise.both(holds, also), self.plans)
            return sorted(islice(search.results(), SHOWN_CURES), key=lambda cure: cure.cost)

        return Wish(
            name=f"{rule.name}.{rule.key}" if rule.key else rule.name,
            outcome=outcome,
            need=advise.Need(holds, knobs),
            alone=alone,
            figure_text=lambda changed: self.of(changed).figure_text(rule),
            context=plan.capacity.max_model_len,
            num_gpus=users.num_gpus(plan),
            is_baseline=rule.name in BASELINE_KNOBS,
            is_simulated=rule.name == "max_preemption_rate",
        )

    def of(self, changed: Plan) -> "_Bench":
        """The same target with another plan."""
        return replace(self, case=replace(self.case, plan=changed))

    def knobs(self, rule: Rule, plan: Plan) -> Iterator[advise.Knob]:
        """Changes that may fix a failure of the rule in a target that currently has this plan."""
        if rule.name == "fits":
            return self.sayable(plan, advise.fit_knobs(plan))
        knobs = BASELINE_KNOBS.get(rule.name) or self.known_gauge(rule).knobs
        return self.sayable(plan, knobs(rule, plan))

    def sayable(self, plan: Plan, knobs: Iterable[advise.Knob]) -> Iterator[advise.Knob]:
        """Changes that the target's keys can express: a GPU whose memory is given or measured stays, and so does a
        context that truncates the lengths.
        """
        target = self.case.target
        keeps_gpu = bool(plan.request.measured) or "gpu_memory" in {*target.own, *target.defaults}
        keeps_context = self.case.lengths is not None
        for knob in knobs:
            is_gpu = bool(knob.changes) and knob.changes[0].gpu is not None
            if not (is_gpu and keeps_gpu) and not (isinstance(knob.changes, advise.Contexts) and keeps_context):
                yield knob

    def known_gauge(self, rule: Rule) -> Gauge:
        """The gauge of a rule that is not skipped."""
        gauge = self.gauge(rule)
        assert not isinstance(gauge, str)
        return gauge

    def figure_text(self, rule: Rule) -> str:
        """A plan's value for a rule, as short text."""
        plan = self.case.plan
        if rule.name == "fits":
            return plural(plan.concurrency.users, "user")
        if rule.name in BASELINE_KNOBS:
            _, _, text = FIGURES[_figure(rule)]
            return text(getattr(figures(self.case), _figure(rule)))
        gauge = self.known_gauge(rule)
        return gauge.text(number(gauge.value(plan)))


def cure_of(cure: advise.FlagCure, cured: tuple[str, ...], target: Target) -> RuleCure:
    """Express a change as keys of the target; a GPU with a count takes two keys."""
    keys: dict[str, int | float | str | bool] = {}
    for change in cure.changes:
        keys |= change.args
        keys |= {} if change.gpu is None else {"gpu": change.gpu.name}
    card, request = target.own.get("gpu") or target.defaults.get("gpu"), cure.plan.request
    if isinstance(card, Scalar) and split_count(card.text)[0] is not None and keys.keys() & {"gpu", TP}:
        keys |= {"gpu": request.gpu.name, TP: request.args.tensor_parallel_size}
    return RuleCure(cure.server_flags, keys, cured)


def finding_of(
    rule: Rule, target: str, verdict: Verdict, policy: Policy, today: datetime.date, own: Mapping[str, Severity]
) -> Finding:
    outcome, waiver = outcome_of(rule, target, verdict, policy, today, own)
    return Finding(
        code=RULES[rule.name][0],
        rule=rule.name,
        target=target,
        outcome=outcome,
        message=verdict.message,
        fix=verdict.fix,
        line=rule.mark.line,
        column=rule.mark.column,
        limit=verdict.limit,
        actual=verdict.actual,
        unit=verdict.unit,
        key=rule.key,
        waiver=None if waiver is None else f"{waiver.reason} (until {waiver.expires.isoformat()})",
    )


def outcome_of(
    rule: Rule, target: str, verdict: Verdict, policy: Policy, today: datetime.date, own: Mapping[str, Severity]
) -> tuple[Outcome, Waiver | None]:
    """Outcome of a verdict, and the waiver that turns it into a warning."""
    if verdict.ok is not False:
        return "skip" if verdict.ok is None else "pass", None
    waiver = next(
        (waiver for waiver in policy.waivers if covers(waiver, target, rule.name) and today <= waiver.expires), None
    )
    if waiver is not None:
        return "warn", waiver
    return own.get(rule.name) or policy.severity.get(rule.name) or "fail", None


# --- waivers ----------------------------------------------------------------------------------------------------------


def covers(waiver: Waiver, target: str, rule: str) -> bool:
    return bool(pattern(waiver.target).match(target)) and bool(pattern(waiver.rule).match(rule))


@lru_cache(maxsize=16_384)  # more than a policy can have: fnmatch itself caches 256 and compiles the rest every time
def pattern(text: str) -> re.Pattern[str]:
    return re.compile(translate(text))


def refuse_long_waivers(waivers: Sequence[Waiver], today: datetime.date) -> None:
    """Reject a waiver longer than a year: nobody would review it."""
    try:
        latest = today.replace(year=today.year + 1)
    except ValueError:  # February 29, or the year 9999
        latest = today + datetime.timedelta(days=min(365, (datetime.date.max - today).days))
    for waiver in waivers:
        if waiver.expires > latest:
            raise wrong(
                waiver.expires_mark,
                "waiver: expires",
                f"is more than a year away ({waiver.expires})",
                f"use {latest} or earlier",
            )


def refuse_idle(policy: Policy, results: Sequence[TargetResult]) -> None:
    """Reject a waiver that no rule of any target matches: it is misspelled, or its rule was removed."""
    pairs = {(finding.target, finding.rule) for result in results for finding in result.findings}
    for waiver in policy.waivers:
        if not any(covers(waiver, target, rule) for target, rule in pairs):
            rule = printable(f"{waiver.target}/{waiver.rule}", 200)
            raise wrong(waiver.mark, f"waiver {rule}", "matches no rule of any target", "correct or delete it")


def _expired(waivers: Sequence[Waiver], today: datetime.date) -> Iterator[str]:
    for waiver in waivers:
        if waiver.expires < today:
            rule = printable(f"{waiver.target}/{waiver.rule}", 200)
            yield f"{waiver.mark}: the waiver of {rule} expired on {waiver.expires.isoformat()} and no longer applies"


# --- baseline ---------------------------------------------------------------------------------------------------------

FIGURES: Final[Mapping[str, tuple[str, str, Callable[[Number], str]]]] = {
    # figure -> (what it is called, unit, its text)
    "weights": ("weights", "bytes", lambda n: format_gib(int(n))),
    "kv_bytes_per_token": ("KV per token", "bytes/token", lambda n: format_size(int(n))),
    "lora": ("adapter slots", "bytes", lambda n: format_gib(int(n))),
    "kv_cache": ("KV cache", "bytes", lambda n: format_gib(int(n))),
    "kv_tokens": ("tokens in the KV cache", "tokens", plain),
    "concurrency": ("Maximum concurrency in the log", "requests", plain),
    "users": ("users", "requests", plain),
    "headroom": ("memory left", "bytes", lambda n: format_gib(int(n))),
}
GROWING: Final = ("weights", "kv_bytes_per_token", "lora")
OF_A_RANK: Final = ("kv_tokens", "concurrency", "users")


def _figure(rule: Rule) -> str:
    return rule.name.removeprefix("baseline.")


def compared(rule: Rule, before: Number, now: Number, place: str = "") -> Verdict:
    """Compare a figure with the baseline's: the allowed growth or drop is a fraction of the old value.

    place  " on each of 8 data-parallel ranks" for a figure of one of them
    """
    figure = _figure(rule)
    name, unit, text = FIGURES[figure]
    grows = figure in GROWING
    worse = now - before if grows else before - now
    change = share_of(worse, before)
    # Floats are compared to twelve digits: 14.0 -> 13.3 is 5%, regardless of the last bits.
    ok = worse <= 0 or (change is not None and round(change, 12) <= rule.limit)
    signed = "" if not before else f" ({100 * (now - before) / abs(before):+.2f}%)"
    allowance = f"maximum {'growth' if grows else 'drop'} {share_text(rule.limit)}"
    message = f"{name}{place} {text(before)} -> {text(now)}{signed}; {allowance}"
    return Verdict(ok, message, _edge(rule, before, grows), now, unit, None if ok else ACCEPT)


def is_of_pod(rule: Rule, verdict: Verdict) -> bool:
    """True if only the pod is too small, which no change of the server's flags cures."""
    return rule.name == "fits" and verdict.fix is not None


def share_of(worse: Number, before: Number) -> float | None:
    """The change as a fraction of the old value, or None if that is not positive."""
    return worse / before if before > 0 else None


def _edge(rule: Rule, before: Number, grows: bool) -> Number:
    """The worst value that would pass; bytes and tokens are integers."""
    allowed = before * rule.limit if before > 0 else 0
    edge = before + allowed if grows else before - allowed
    if isinstance(before, float):
        return edge
    return int(edge) if grows else ceil(edge)


# --- evidence ---------------------------------------------------------------------------------------------------------


def _evidence_result(policy: Policy, evidence: Evidence, today: datetime.date) -> TargetResult:
    assert policy.measured is not None
    measured = policy.measured
    verdicts = []
    if measured.max_error is not None:
        verdicts.append((measured.max_error, error_verdict(measured.max_error, evidence)))
    if measured.max_age is not None:
        verdicts.append((measured.max_age, age_verdict(measured.max_age, evidence, today)))
    findings = tuple(finding_of(rule, EVIDENCE_ID, verdict, policy, today, {}) for rule, verdict in verdicts)
    name = printable(measured.text, 200)
    heading = f"{name}: {evidence.subject}" if evidence.subject else name
    return TargetResult(EVIDENCE_ID, measured.mark.line, heading, findings, None, None)


def error_verdict(rule: Rule, evidence: Evidence) -> Verdict:
    if evidence.problem is not None:
        return Verdict(None, evidence.problem)
    if not evidence.matches:
        return Verdict(None, f"the run is for {evidence.subject}, which matches no target")
    if evidence.error is None:
        return Verdict(None, evidence.no_error)
    ok = round(evidence.error, 12) <= rule.limit
    message = f"predicted and measured memory differ by up to {share_text(evidence.error)} ({evidence.worst})"
    message += f"; maximum {share_text(rule.limit)}"
    fix = None if ok else "see the rows with kvplan reconcile; --calibrate saves this GPU's constants"
    return Verdict(ok, message, rule.limit, evidence.error, "share", fix)


def age_verdict(rule: Rule, evidence: Evidence, today: datetime.date) -> Verdict:
    if evidence.problem is not None:
        return Verdict(None, evidence.problem)
    if evidence.started is None:
        return Verdict(None, "the measurement has no date")
    age = (today - evidence.started).days
    if age < 0:
        return Verdict(None, f"the measurement is dated {evidence.started.isoformat()}, in the future; check the clock")
    ok = age <= rule.limit
    message = f"measured on {evidence.started.isoformat()}, {plural(age, 'day')} ago"
    message += f"; maximum age {plural(int(rule.limit), 'day')}"
    return Verdict(ok, message, int(rule.limit), age, "days", None if ok else "measure again: kvplan profile")
