"""A policy held against plans: every rule passes, warns, fails or is skipped, and a failure says what would cure it.

A rule whose input is missing is skipped, never guessed. A cure is a change whose plan satisfies the rule: it is
computed with plan(), like the target itself.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan import advise, users
from kvplan.errors import KvplanError
from kvplan.files import printable
from kvplan.plan import Plan, Request, plan
from kvplan.policy import RULES, CheckResult, Figures, Finding, Outcome, TargetResult
from kvplan.policy_file import EVIDENCE_ID, Policy, Rule, Severity, Target, Waiver, Workload
from kvplan.rules.vllm import EngineArgs
from kvplan.strict_yaml import wrong
from kvplan.units import format_count, format_gib, format_size

if TYPE_CHECKING:
    from kvplan.workload import Lengths

Number = int | float
# Of a plan that serves a workload, the share of requests that are preempted; a text says why it cannot be told.
PreemptionRate = Callable[[Plan, Workload], float | str]

MAX_CURED: Final = 100  # targets whose failures get a cure; a cure costs dozens of plans
NOTHING: Final = "nothing tried would do"


@dataclass(frozen=True, slots=True)
class Case:
    """A target, its plan, and how long its requests are where a distribution says so.

    The plan itself knows a mean at most: users for a distribution cost a convolution, which no rule asks for.
    """

    target: Target
    plan: Plan
    lengths: "Lengths | None" = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the measurement says.

    problem  why it cannot be used at all; the rest is then empty
    error    the largest relative error of a predicted row, `worst` names it; None: `no_error` says why
    started  the day the run began; None: not known
    matches  ids of the targets that it is evidence for
    subject  what ran, on what
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
    """What the rules are judged with besides the plans.

    baseline  figures by target; None: there is no such file
    """

    today: datetime.date
    baseline: Mapping[str, Figures] | None = None
    evidence: Evidence | None = None
    preemption_rate: PreemptionRate = lambda plan, workload: "the simulation is not at hand"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule of one target: ok None is a skip, whose message says what is missing."""

    ok: bool | None
    message: str
    limit: Number | bool | None = None
    actual: Number | bool | None = None
    unit: str = ""
    fix: str | None = None


def judge(policy: Policy, cases: Sequence[Case], against: Against) -> CheckResult:
    """Every rule of every target, in the order of the file.

    Raises InvalidInputError for a target without a rule and for a waiver that matches none.
    """
    results = []
    num_cured = 0
    for case in cases:
        bench = _Bench(policy, case, against, cures=num_cured < MAX_CURED)
        result = bench.result()
        num_cured += any(finding.outcome in ("fail", "warn") for finding in result.findings)
        results.append(result)
    if policy.measured is not None and against.evidence is not None:
        results.append(_evidence_result(policy, against.evidence, against.today))
    refuse_idle(policy, results)
    warnings = [*_expired(policy.waivers, against.today)]
    if num_cured > MAX_CURED:
        warnings.append(f"{policy.path}: cures were sought for the first {MAX_CURED} targets that fail")
    outcomes = {finding.outcome for result in results for finding in result.findings}
    if outcomes == {"skip"}:
        warnings.append(f"{policy.path}: every rule was skipped, so nothing was judged; --strict makes that fail")
    return CheckResult(policy.path, tuple(results), tuple(warnings))


def figures(plan: Plan) -> Figures:
    """What is compared with a baseline; nothing is held where the plan does not fit."""
    return Figures(
        fits=plan.fits,
        weights=plan.memory.weights,
        kv_cache=plan.memory.kv_cache,
        kv_bytes_per_token=plan.bytes_per_token,
        kv_tokens=kv_tokens(plan),
        concurrency=plan.concurrency.max,
        headroom=plan.memory.unused,
        lora=plan.memory.lora,
    )


def kv_tokens(plan: Plan) -> int:
    return plan.capacity.tokens if plan.fits else 0


def title(plan: Plan) -> str:
    """ "llama-3.1-8b on a100-80g, tp 1, 32,768 tokens"."""
    args = plan.request.args
    ranks = [f"tp {args.tensor_parallel_size}"]
    ranks += [f"pp {args.pipeline_parallel_size}"] * (args.pipeline_parallel_size > 1)
    ranks += [f"dp {args.data_parallel_size}"] * (args.data_parallel_size > 1)
    name = printable(plan.request.spec.name, 200)
    return f"{name} on {plan.request.gpu.name}, {', '.join(ranks)}, {plan.capacity.max_model_len:,} tokens"


# --- one target -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bench:
    """One target while it is judged; `tried` keeps the plans of changes, which several rules may ask for."""

    policy: Policy
    case: Case
    against: Against
    cures: bool
    tried: dict[str, Plan | None] = field(default_factory=dict)

    def result(self) -> TargetResult:
        target, plan = self.case.target, self.case.plan
        before = (self.against.baseline or {}).get(target.id)
        rules = [*target.rules, *(self.policy.baseline.rules if self.policy.baseline else ())]
        if not rules and self.policy.measured is None:
            raise wrong(target.mark, f"target {target.id}: has no rules; write at least rules: {{fits: true}}")
        findings = tuple(
            finding_of(rule, target.id, self.verdict(rule, before), self.policy, self.against.today, target.severity)
            for rule in rules
        )
        return TargetResult(target.id, target.mark.line, title(plan), findings, figures(plan), before)

    def verdict(self, rule: Rule, before: Figures | None) -> Verdict:
        if rule.name == "fits":
            return self.fits()
        if rule.name.startswith("baseline."):
            return self.since_baseline(rule, before)
        if rule.name == "max_prediction_error":
            return self.predicted(rule)
        gauge = self.gauge(rule)
        return Verdict(None, gauge) if isinstance(gauge, str) else self.measured(rule, gauge)

    def fits(self) -> Verdict:
        plan = self.case.plan
        if plan.fits:
            return Verdict(True, f"fits, {format_gib(plan.memory.unused)} of the GPU are left", True, True)
        found = advise.fixes(plan)[:2] if self.cures else []
        fix = needs([(it.flag, f"{it.plan.concurrency.max:.1f} requests") for it in found]) if self.cures else None
        return Verdict(False, f"does not fit, {format_gib(plan.deficit)} short on each GPU", True, False, "", fix)

    def measured(self, rule: Rule, gauge: "Gauge") -> Verdict:
        plan = self.case.plan
        limit, actual = gauge.limit(rule, plan), gauge.value(plan)
        if isinstance(actual, str):
            return Verdict(None, actual)
        ok = gauge.holds(rule, plan)
        message = f"{gauge.describe(plan)}, {'at least' if gauge.is_floor else 'at most'} {gauge.wanted(rule, plan)}"
        if not ok:
            message += f": {gauge.text(abs(limit - actual))} {'short' if gauge.is_floor else 'over'}"
            message += "" if plan.fits or not gauge.is_floor else " (it does not fit)"
        fix = self.cure(rule, gauge) if not ok and self.cures else None
        return Verdict(ok, message, limit, actual, gauge.unit, fix)

    def gauge(self, rule: Rule) -> "Gauge | str":
        """What the rule measures; a text says what is missing."""
        match rule.name:
            case "min_users":
                tokens = request_tokens(self.case, rule.key)
                return tokens if isinstance(tokens, str) else users_gauge(tokens, rule.key)
            case "max_preemption_rate":
                return self.preemption_gauge()
            case _:
                return GAUGES[rule.name]

    def preemption_gauge(self) -> "Gauge | str":
        workload = self.case.target.workload
        if workload is None or (workload.profile is None and workload.trace is None):
            return "the target has no workload with a profile or a trace to simulate"
        if workload.trace is not None and not workload.trace.exists():
            return f"the trace {printable(str(workload.trace), 200)} does not exist"

        def rate(plan: Plan) -> Number | str:
            return self.against.preemption_rate(plan, workload)

        def describe(plan: Plan) -> str:
            return f"{percent(_number(rate(plan)))} of the requests are preempted"

        return Gauge(rate, "share", False, percent, describe, more_kv)

    def since_baseline(self, rule: Rule, before: Figures | None) -> Verdict:
        assert self.policy.baseline is not None
        if before is None:
            shown = printable(self.policy.baseline.text, 200)
            missing = "there is no baseline" if self.against.baseline is None else "the target is not in the baseline"
            return Verdict(None, f"{missing} {shown} yet (--update-baseline writes it)")
        return compared(rule, getattr(before, _figure(rule)), getattr(figures(self.case.plan), _figure(rule)))

    def predicted(self, rule: Rule) -> Verdict:
        evidence = self.against.evidence
        if evidence is None:
            return Verdict(None, "there is no measured: file with a run")
        if evidence.problem is None and self.case.target.id not in evidence.matches:
            return Verdict(None, f"the run is of {evidence.subject}, not of this target")
        return error_verdict(rule, evidence)

    # --- cures

    def cure(self, rule: Rule, gauge: "Gauge") -> str:
        """Up to two changes that satisfy the rule, each with the value that it gives."""
        found: list[tuple[str, str]] = []
        for group in gauge.changes(rule, self.case.plan):
            for flag, request in group:
                changed = self.plan_of(flag, request)
                if changed is not None and changed.fits and gauge.holds(rule, changed):
                    found.append((flag, gauge.text(_number(gauge.value(changed)))))
                    break
            if len(found) == 2:
                break
        return needs(found)

    def plan_of(self, flag: str, request: Request) -> Plan | None:
        if flag not in self.tried:
            try:
                self.tried[flag] = plan(request)
            except KvplanError:
                self.tried[flag] = None
        return self.tried[flag]


def needs(found: Iterable[tuple[str, str]]) -> str:
    """ "needs --tensor-parallel-size 2 (30.3) or --kv-cache-dtype fp8 (28.2)"."""
    told = [f"{flag} ({value})" for flag, value in found]
    return f"needs {' or '.join(told)}" if told else NOTHING


def finding_of(
    rule: Rule,
    target: str,
    verdict: Verdict,
    policy: Policy,
    today: datetime.date,
    own: Mapping[str, Severity],
) -> Finding:
    outcome: Outcome = "skip" if verdict.ok is None else "pass"
    waiver = None
    if verdict.ok is False:
        outcome = own.get(rule.name) or policy.severity.get(rule.name) or "fail"
        waiver = next((it for it in policy.waivers if covers(it, target, rule.name) and today <= it.expires), None)
        if waiver is not None:
            outcome = "warn"
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
        waiver=None if waiver is None else f"{waiver.reason} (until {waiver.expires.isoformat()})",
    )


# --- waivers ----------------------------------------------------------------------------------------------------------


def covers(waiver: Waiver, target: str, rule: str) -> bool:
    return fnmatchcase(target, waiver.target) and fnmatchcase(rule, waiver.rule)


def refuse_idle(policy: Policy, results: Sequence[TargetResult]) -> None:
    """Refuse a waiver that no rule of any target matches: it is misspelt, or its rule is gone."""
    pairs = {(finding.target, finding.rule) for result in results for finding in result.findings}
    for waiver in policy.waivers:
        if not any(covers(waiver, target, rule) for target, rule in pairs):
            rule = printable(f"{waiver.target}/{waiver.rule}", 200)
            raise wrong(waiver.mark, f"waiver {rule}: matches no rule of any target; correct it, or delete it")


def _expired(waivers: Sequence[Waiver], today: datetime.date) -> Iterator[str]:
    for waiver in waivers:
        if waiver.expires < today:
            rule = printable(f"{waiver.target}/{waiver.rule}", 200)
            yield f"{waiver.mark}: the waiver of {rule} expired on {waiver.expires.isoformat()} and no longer counts"


# --- gauges: what a rule measures -------------------------------------------------------------------------------------

Change = tuple[str, Request]  # the flag that makes it, and the request changed
Changes = Callable[[Rule, Plan], Iterator[Iterable[Change]]]  # groups of one kind, the nearest first


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of a plan that a rule bounds.

    value     of a plan; a text says why there is none
    describe  the sentence that states it
    changes   what may cure a failure
    """

    value: Callable[[Plan], Number | str]
    unit: str
    is_floor: bool
    text: Callable[[Number], str]
    describe: Callable[[Plan], str]
    changes: Changes

    def limit(self, rule: Rule, plan: Plan) -> Number:
        """The limit in the gauge's unit: a share of headroom is one of the GPU's memory, in whole bytes."""
        if rule.is_share and self.unit == "bytes":
            return -(-round(rule.limit * 10**12) * plan.memory.total // 10**12)
        return rule.limit

    def wanted(self, rule: Rule, plan: Plan) -> str:
        text = self.text(self.limit(rule, plan))
        return f"{text} ({printable(rule.text, 20)})" if rule.is_share and self.unit == "bytes" else text

    def holds(self, rule: Rule, plan: Plan) -> bool:
        actual, limit = self.value(plan), self.limit(rule, plan)
        if isinstance(actual, str):
            return False
        return actual >= limit if self.is_floor else actual <= limit


def _number(value: Number | str) -> Number:
    assert not isinstance(value, str)
    return value


def plain(value: Number) -> str:
    """A concurrency: two decimals, none where they say nothing."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else format_count(value)


def percent(value: Number) -> str:
    return f"{100 * value:,.2f}".rstrip("0").rstrip(".") + " %"


def requests_at_once(plan: Plan) -> str:
    answer = plan.concurrency
    told = f"{plain(answer.max)} requests of {plan.capacity.max_model_len:,} tokens at once"
    if not plan.fits:
        return told
    each = f"{format_gib(plan.memory.kv_cache)} of KV cache, {format_size(plan.bytes_per_request)} each"
    return f"{told} ({answer.low:.1f}-{answer.high:.1f}; {each})"


def headroom(plan: Plan) -> str:
    left = plan.memory.unused
    if left < 0:
        return f"{format_gib(-left)} more planned than the {format_gib(plan.memory.total)} there are"
    return f"{format_gib(left)} ({percent(left / plan.memory.total)}) of {format_gib(plan.memory.total)} left"


def users_gauge(tokens: int, key: str) -> Gauge:
    def value(plan: Plan) -> int:
        return min(pool_users(plan, tokens), plan.settings.max_num_seqs)

    def describe(plan: Plan) -> str:
        length = min(tokens, plan.capacity.max_model_len)
        told = f"{value(plan):,} requests of {length:,} tokens ({'the mean' if key == 'mean' else 'p99'}) at once"
        held = pool_users(plan, tokens)
        return told if held == value(plan) else f"{told} (--max-num-seqs; the pool holds {held:,})"

    return Gauge(value, "requests", True, plain, describe, more_users)


def pool_users(plan: Plan, tokens: int) -> int:
    """Requests of a length that the pool holds at once; 0 where nothing fits."""
    if not plan.fits:
        return 0
    context, load = plan.capacity.max_model_len, plan.request.load
    shared = plan.pool.shared(min(load.shared_prefix, context))
    return users.users_at(plan.pool.held, plan.capacity.num_blocks - 1, min(tokens, context), shared)


# --- how long requests are --------------------------------------------------------------------------------------------


def request_tokens(case: Case, key: str) -> int | str:
    """The mean or p99 length in tokens: what the target states, else its workload's; a text says what is missing."""
    load, workload = case.plan.request.load, case.target.workload
    if key == "mean" and load.mean_tokens is not None:
        return load.mean_tokens
    if case.lengths is not None:
        return ceil(case.lengths.mean) if key == "mean" else quantile(case.lengths.points, 0.99)
    if workload is not None and workload.trace is not None and not workload.trace.exists():
        return f"the trace {printable(str(workload.trace), 200)} does not exist"
    if workload is not None and (workload.profile is not None or workload.trace is not None):
        return _workload_tokens(workload.profile, workload.trace)[key]
    wanted = "mean_tokens, lengths nor a workload" if key == "mean" else "lengths nor a workload"
    return f"the target states neither {wanted} to take the {key} length from"


def quantile(points: Sequence[tuple[int, float]], share: float) -> int:
    """The smallest length that at least this share of the requests does not exceed."""
    mass = 0.0
    for tokens, probability in points:
        mass += probability
        if mass >= share - 1e-12:  # probabilities are sums of floats
            return tokens
    return points[-1][0]


DRAWN: Final = 10_000  # requests of a profile; its p99 is then known to about a percent


@cache
def _workload_tokens(profile: str | None, trace: Path | None) -> dict[str, int]:
    """Mean and p99 of prompt + output."""
    from itertools import islice

    if profile is not None:
        from kvplan import profiles

        requests = list(islice(profiles.profile(profile).requests(rate=1.0, seed=0), DRAWN))
    else:
        from kvplan import trace as traces

        assert trace is not None
        requests = list(traces.read(trace).requests)
    lengths = sorted(it.prompt_tokens + it.output_tokens for it in requests)
    return {"mean": ceil(sum(lengths) / len(lengths)), "p99": lengths[ceil(0.99 * len(lengths)) - 1]}


# --- changes that may cure --------------------------------------------------------------------------------------------


def with_args(plan: Plan, **changed: int | float | str | bool) -> Request:
    args: EngineArgs = replace(plan.request.args, **changed)  # type: ignore[arg-type] # names and types are EngineArgs'
    return replace(plan.request, args=args)


def more_ranks(plan: Plan) -> list[Change]:
    now = plan.request.args.tensor_parallel_size
    return [
        (f"--tensor-parallel-size {tp}", with_args(plan, tensor_parallel_size=tp)) for tp in advise.TP_SIZES if tp > now
    ]


def fp8_cache(plan: Plan) -> list[Change]:
    if plan.request.args.kv_cache_dtype != "auto":
        return []
    return [("--kv-cache-dtype fp8", with_args(plan, kv_cache_dtype="fp8"))]


def larger_gpus(plan: Plan) -> Iterator[Change]:
    for bigger in advise.larger_gpus(plan.request):
        yield f"--gpu {bigger.name}", replace(plan.request, gpu=bigger)


def more_kv(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    """More ranks, smaller entries, a larger GPU."""
    yield more_ranks(plan)
    yield fp8_cache(plan)
    yield larger_gpus(plan)


def more_users(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    if plan.settings.max_num_seqs < rule.limit:
        yield [(f"--max-num-seqs {rule.limit}", with_args(plan, max_num_seqs=int(rule.limit)))]
    yield from more_kv(rule, plan)


CONTEXT_STEP: Final = 1024


def more_requests(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    """More KV cache, or shorter requests: the longest context, in steps of 1,024 tokens, that satisfies the rule."""
    yield more_ranks(plan)
    yield fp8_cache(plan)
    yield shorter_context(rule, plan)
    yield larger_gpus(plan)


def shorter_context(rule: Rule, plan: Plan) -> Iterator[Change]:
    gauge = GAUGES["min_concurrency"]

    def at(steps: int) -> Change:
        context = steps * CONTEXT_STEP
        return f"--max-model-len {context}", with_args(plan, max_model_len=context)

    def holds(steps: int) -> bool:
        changed = advise.tried(at(steps)[1])
        return changed is not None and gauge.holds(rule, changed)

    low, high = 1, (plan.capacity.max_model_len - 1) // CONTEXT_STEP
    if high < 1 or not holds(low):
        return
    while low < high:  # a shorter context never holds fewer requests
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    yield at(low)


def less_weight(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    yield more_ranks(plan)
    if plan.request.spec.quantization is None and plan.request.args.quantization is None:
        yield [("--quantization fp8", with_args(plan, quantization="fp8"))]


def smaller_entries(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    yield fp8_cache(plan)
    yield more_ranks(plan)


LORA_RANKS: Final = (512, 320, 256, 128, 64, 32, 16, 8, 1)


def fewer_adapters(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    args = plan.request.args
    if args.tensor_parallel_size > 1 and not args.fully_sharded_loras:
        yield [("--fully-sharded-loras", with_args(plan, fully_sharded_loras=True))]
    most = min(args.max_loras - 1, 64)
    yield ((f"--max-loras {slots}", with_args(plan, max_loras=slots)) for slots in range(most, 0, -1))
    yield (
        (f"--max-lora-rank {rank}", with_args(plan, max_lora_rank=rank))
        for rank in LORA_RANKS
        if rank < args.max_lora_rank
    )
    yield more_ranks(plan)


def more_left(rule: Rule, plan: Plan) -> Iterator[Iterable[Change]]:
    """Less of the GPU for the server, or a larger one."""
    args = plan.request.args
    if not plan.fits:
        yield more_ranks(plan)
    if args.kv_cache_memory_bytes is None and args.num_gpu_blocks_override is None:
        percents = range(ceil(100 * plan.settings.gpu_memory_utilization) - 1, 0, -1)
        yield (
            (f"--gpu-memory-utilization {hundredths / 100}", with_args(plan, gpu_memory_utilization=hundredths / 100))
            for hundredths in percents
        )
    elif args.kv_cache_memory_bytes is not None:
        short = max(0, int(GAUGES["min_headroom"].limit(rule, plan)) - plan.memory.unused)
        less = args.kv_cache_memory_bytes - short
        if less > 0:
            yield [(f"--kv-cache-memory-bytes {less}", with_args(plan, kv_cache_memory_bytes=less))]
    yield larger_gpus(plan)


GAUGES: Final[Mapping[str, Gauge]] = {
    "min_headroom": Gauge(
        lambda plan: plan.memory.unused, "bytes", True, lambda n: format_gib(int(n)), headroom, more_left
    ),
    "min_concurrency": Gauge(
        lambda plan: plan.concurrency.max, "requests", True, plain, requests_at_once, more_requests
    ),
    "min_kv_tokens": Gauge(
        kv_tokens, "tokens", True, plain, lambda plan: f"the KV cache holds {kv_tokens(plan):,} tokens", more_kv
    ),
    "max_weights": Gauge(
        lambda plan: plan.memory.weights,
        "bytes",
        False,
        lambda n: format_gib(int(n)),
        lambda plan: f"{format_gib(plan.memory.weights)} of weights on each GPU",
        less_weight,
    ),
    "max_kv_bytes_per_token": Gauge(
        lambda plan: plan.bytes_per_token,
        "bytes/token",
        False,
        lambda n: format_size(int(n)),
        lambda plan: f"{format_size(plan.bytes_per_token)} of KV for each token on each GPU",
        smaller_entries,
    ),
    "max_lora_bytes": Gauge(
        lambda plan: plan.memory.lora,
        "bytes",
        False,
        lambda n: format_gib(int(n)),
        lambda plan: f"{format_gib(plan.memory.lora)} of adapter slots on each GPU",
        fewer_adapters,
    ),
}


# --- baseline ---------------------------------------------------------------------------------------------------------

ACCEPT: Final = "if that is meant, kvplan check --update-baseline accepts it"
FIGURES: Final[Mapping[str, tuple[str, str, Callable[[Number], str]]]] = {
    # figure -> (what it is called, unit, its text)
    "weights": ("weights", "bytes", lambda n: format_gib(int(n))),
    "kv_bytes_per_token": ("KV per token", "bytes/token", lambda n: format_size(int(n))),
    "lora": ("adapter slots", "bytes", lambda n: format_gib(int(n))),
    "kv_cache": ("KV cache", "bytes", lambda n: format_gib(int(n))),
    "kv_tokens": ("tokens in the KV cache", "tokens", plain),
    "concurrency": ("full-length requests", "requests", plain),
    "headroom": ("memory left", "bytes", lambda n: format_gib(int(n))),
}
GROWING: Final = ("weights", "kv_bytes_per_token", "lora")


def _figure(rule: Rule) -> str:
    return rule.name.removeprefix("baseline.")


def compared(rule: Rule, before: Number, now: Number) -> Verdict:
    """A figure against the baseline's: the allowed growth or drop is a share of what was."""
    figure = _figure(rule)
    name, unit, text = FIGURES[figure]
    grows = figure in GROWING
    worse = now - before if grows else before - now
    change = share_of(worse, before)
    # Floats are compared to twelve digits: 14.0 -> 13.3 is 5 %, whatever the last bit says.
    ok = worse <= 0 or (change is not None and round(change, 12) <= rule.limit)
    signed = "" if not before else f" ({100 * (now - before) / abs(before):+.2f} %)"
    told = f"{name} {text(before)} -> {text(now)}{signed}, at most {percent(rule.limit)} {'more' if grows else 'less'}"
    return Verdict(ok, told, _edge(rule, before, grows), now, unit, None if ok else ACCEPT)


def share_of(worse: Number, before: Number) -> float | None:
    """The change as a share of what was; None where that was nothing, or less."""
    return worse / before if before > 0 else None


def _edge(rule: Rule, before: Number, grows: bool) -> Number:
    """The worst value that would pass; bytes and tokens are whole."""
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
    shown = printable(measured.text, 200)
    heading = f"{shown}: {evidence.subject}" if evidence.subject else shown
    return TargetResult(EVIDENCE_ID, measured.mark.line, heading, findings, None, None)


def error_verdict(rule: Rule, evidence: Evidence) -> Verdict:
    if evidence.problem is not None:
        return Verdict(None, evidence.problem)
    if not evidence.matches:
        return Verdict(None, f"the run is of {evidence.subject}, which no target is")
    if evidence.error is None:
        return Verdict(None, evidence.no_error)
    ok = round(evidence.error, 12) <= rule.limit
    message = f"predicted and measured differ by {percent(evidence.error)} at most ({evidence.worst})"
    message += f", at most {percent(rule.limit)} allowed"
    fix = None if ok else "kvplan reconcile shows the rows; --calibrate keeps this GPU's constants"
    return Verdict(ok, message, rule.limit, evidence.error, "share", fix)


def age_verdict(rule: Rule, evidence: Evidence, today: datetime.date) -> Verdict:
    if evidence.problem is not None:
        return Verdict(None, evidence.problem)
    if evidence.started is None:
        return Verdict(None, "the measurement does not say when it was made")
    age = (today - evidence.started).days
    if age < 0:
        return Verdict(None, f"the measurement is of {evidence.started.isoformat()}, after today; check the clock")
    ok = age <= rule.limit
    message = f"measured on {evidence.started.isoformat()}, {age:,} days ago, at most {rule.limit:,} allowed"
    return Verdict(ok, message, int(rule.limit), age, "days", None if ok else "measure again: kvplan profile")
