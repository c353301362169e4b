"""A policy's targets planned, and its rules judged, with what was measured of them."""

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan.core.errors import Faults, UsageError
from kvplan.planning.plan import Plan
from kvplan.policy import file as policy_file
from kvplan.policy import judge, manifests
from kvplan.policy.file import Policy, Workload
from kvplan.policy.gauges import Case, read_trace
from kvplan.policy.judge import Against, Evidence
from kvplan.policy.result import CheckResult, TargetResult
from kvplan.policy.targets import Loads, baseline_figures, planned

if TYPE_CHECKING:
    from kvplan.simulate.preempted import Kept
    from kvplan.simulate.source import Source

SIMULATED_REQUESTS = 2000  # of a profile, which is endless; p99 and a 1% rule rest on 20 of them


def policy_at(path: Path, gpu: str | None = None, base: str | None = None) -> Policy:
    """The policy in a file; of a manifest, that its containers start.

    gpu   of a manifest that names none
    base  a revision to compare with, which only a policy has
    """
    if not manifests.is_manifest(path):
        return policy_file.read(path)
    if base is not None:
        raise UsageError("--base", "compares policies, not manifests", "name the manifest in a policy's target")
    return manifests.policy_of(path, gpu)


def checked(
    policy: Policy,
    path: Path,
    *,
    today: datetime.date | None = None,
    offline: bool = False,
    tell: Callable[[str, str], None] | None = None,
    update: bool = False,
    base: str | None = None,
    limits: bool = False,
) -> CheckResult:
    """Judge a policy. Raise InvalidInputError with the line of an error in its file, which is at `path`.

    tell    takes the notes from reading the targets, each with its kind
    update  judge the rules with the current figures as the baseline
    base    a revision: also judge what is weaker than there
    limits  also derive each target's operating limits
    """
    loads: Loads = {}
    cases: list[Case] = []
    faults = Faults()
    for target in policy.targets:
        with faults.part():
            cases.append(planned(target, policy, offline=offline, tell=tell, loads=loads))
    faults.refuse()
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
        from kvplan.policy.base import since_base  # only with a base

        changed = (since_base(base, policy, path, cases, against.baseline, offline=offline),)
    operating = {}
    if limits:
        from kvplan.policy.limits import limits_of  # only for what is made of them

        operating = {case.target.id: limits_of(case, kept(case.plan, case.target.workload)) for case in cases}
    return replace(result, targets=(*result.targets, *changed), limits=operating)


def evidence_of(policy: Policy, cases: list[Case]) -> Evidence:
    from kvplan.measure.evidence import read_evidence

    assert policy.measured is not None
    return read_evidence(policy.measured, cases)


def preemption_rate(plan: Plan, workload: Workload) -> float | str:
    """Fraction of a workload's requests that are preempted or not served, or a text that says why it is unknown.

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

    load = load_of(workload)
    return load if isinstance(load, str) else preempted_share(plan, *load, workload.tpot_s)


def kept(plan: Plan, workload: Workload | None) -> "Kept | str | None":
    """The largest load that keeps a workload's latency targets, or why it is not known; None: it states none."""
    if workload is None or workload.slo is None:
        return None
    from kvplan.simulate.preempted import largest_kept

    load = load_of(workload)
    return load if isinstance(load, str) else largest_kept(plan, *load, workload.tpot_s, workload.slo)


def load_of(workload: Workload) -> "tuple[Source, float] | str":
    """A workload's requests and their rate, or what it lacks."""
    from kvplan.simulate.source import from_profile, from_trace

    if workload.trace is not None:
        source = from_trace(read_trace(workload.trace), None)
    elif workload.profile is not None:
        from kvplan.workloads.profiles import profile

        source = from_profile(profile(workload.profile), SIMULATED_REQUESTS, seed=0, shared_prefix=None)
    else:
        return "the workload names neither a profile nor a trace"
    rate = workload.rate_per_s or source.rate
    return f"{source.name} has no rate; add one to the workload" if rate is None else (source, rate)
