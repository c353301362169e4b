"""The constants that no formula gives, fitted on threads and judged on threads they were not fitted on.

Each class (a release range of the sampler, a kind of machine for non-torch memory) takes the median over threads of the
threads' medians, so that a thread of ten logs counts once. For cross-validation a case is predicted with what all
other threads give; a class without another thread keeps what kvplan ships, which is then counted as not validated.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.accuracy.cases import Case, Models, NotStated, check_budget
from benchmarks.accuracy.scoring import Refused, Score, Scored, score_case
from kvplan.core.errors import KvplanError
from kvplan.core.units import GIB
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.vllm import activations, overheads
from kvplan.servers.vllm.log_rows import activation_peak


@dataclass(frozen=True, slots=True)
class Point:
    """What one log says a constant of a class is: bytes per (sequence x vocabulary entry), GiB, or a ratio."""

    kind: str
    thread: str
    value: float


@dataclass(frozen=True, slots=True)
class Constant:
    """A class as fitted: threads, logs, the median over threads and the spread of the logs."""

    kind: str
    value: float
    low: float
    high: float
    logs: int
    threads: int


SAMPLERS = {  # that are not derived, or whose installation nobody stated
    id(overheads.SAMPLER_TO_011): "sampler of 0.8 to 0.10, not told",
    id(overheads.SAMPLER_TO_011_FEW): "sampler of 0.8 to 0.10, not told",
    id(overheads.SAMPLER_V2_TO_027): "sampler of runner V2, to 0.27",
    id(overheads.SAMPLER_V2_TO_032): "sampler of runner V2, 0.28 to 0.32",
}
RANGES = {
    id(getattr(overheads, name)): name.removeprefix("NON_TORCH_").lower().replace("_", " ")
    for name in dir(overheads)
    if name.startswith("NON_TORCH_")
}


def sampler_kind(the_plan: Plan) -> str | None:
    """The class of a plan's sampler, or None if nothing of it is fitted. Logs of 0.11 sort (nine of one thread)."""
    if the_plan.settings.version.has("v1_only") and not the_plan.settings.runner_v2:
        return None
    return SAMPLERS.get(id(overheads.sampler_of(the_plan.settings, the_plan.request.gpu)))


def non_torch_kind(the_plan: Plan) -> str:
    args = the_plan.request.args
    ranks = args.tensor_parallel_size * (args.data_parallel_size if the_plan.request.spec.experts_per_token else 1)
    shipped = overheads.non_torch_range(the_plan.request.gpu, ranks, the_plan.request.release)
    return "non-torch " + RANGES[id(shipped)]


def planned(scored: Scored) -> Plan | None:
    """The plan of a scored case; None where there is none."""
    inputs = scored.inputs
    if inputs.gpu is None or scored.case.engine != "vllm":
        return None
    try:
        check_budget(scored.case, inputs.gpu)
        return plan(Request(inputs.spec, inputs.gpu, inputs.args, inputs.release, draft=inputs.draft))
    except (KvplanError, NotStated):
        return None


def sampled_entries(the_plan: Plan) -> int:
    return (
        min(the_plan.settings.max_num_seqs, the_plan.settings.max_num_batched_tokens) * the_plan.request.spec.vocab_size
    )


def points_of(scored: Scored) -> list[Point]:
    """What a case says of the constants. A peak that an encoder or a forward pass sets says nothing of the sampler."""
    the_plan = planned(scored)
    if the_plan is None:
        return []
    m, thread = scored.case.measured, scored.case.thread
    points = []
    sampled = " vocab x " in the_plan.estimates["activations"].formula and not the_plan.request.spec.multimodal
    peak = m.get("activation_peak_gib", implied_peak(scored.case, the_plan))
    kind = sampler_kind(the_plan)
    if peak is not None and sampled and kind is not None:
        value = (peak * GIB - beside_sampler(the_plan)) / sampled_entries(the_plan)
        points.append(Point(kind, thread, value))
    if "non_torch_gib" in m:
        points.append(Point(non_torch_kind(the_plan), thread, m["non_torch_gib"]))
    return points


def implied_peak(case: Case, the_plan: Plan) -> float | None:
    """GiB that a log without an activation peak leaves for it, where the rest of its budget is logged."""
    m = case.measured
    if "weights_gib" not in m or "available_kv_gib" not in m or the_plan.settings.graphs_in_budget:
        return None
    total = m.get("total_gpu_mem_gib", the_plan.request.gpu.total_memory / GIB)
    non_torch = m.get("non_torch_gib", the_plan.estimates["non_torch"].likely / GIB)
    return total * the_plan.settings.gpu_memory_utilization - m["weights_gib"] - m["available_kv_gib"] - non_torch


def beside_sampler(the_plan: Plan) -> int:
    """Bytes of a logged activation peak that are not per sampled entry: hidden states, workspaces, inputs."""
    shipped = overheads.sampler_of(the_plan.settings, the_plan.request.gpu).likely
    return activation_peak(the_plan) - int(sampled_entries(the_plan) * shipped)


def peak_with(the_plan: Plan, per_entry: float) -> int:
    """Bytes of the activation peak with `per_entry` bytes in the sampler."""
    request = the_plan.request
    changed = replace(
        overheads.sampler_of(the_plan.settings, the_plan.request.gpu), low=per_entry, likely=per_entry, high=per_entry
    )
    return activations.activations(
        request.spec,
        the_plan.settings,
        request.args,
        request.release,
        request.gpu,
        stage=the_plan.stage,
        sampler=changed,
    ).likely


def fitted(points: Iterable[Point]) -> dict[str, Constant]:
    by_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        by_kind[point.kind][point.thread].append(point.value)
    constants = {}
    for kind, threads in sorted(by_kind.items()):
        values = [value for logs in threads.values() for value in logs]
        middle = statistics.median(statistics.median(logs) for logs in threads.values())
        constants[kind] = Constant(kind, middle, min(values), max(values), len(values), len(threads))
    return constants


@dataclass(frozen=True, slots=True)
class Validated:
    """A case scored with constants from other threads. `borrowed` names classes that no other thread gives."""

    scored: Scored
    scores: tuple[Score, ...]
    borrowed: tuple[str, ...]


def cross_validated(
    cases: list[Scored], training: list[Scored], kind: Callable[[Scored], str | None] = lambda scored: None
) -> list[Validated]:
    """Every case with the constants that the other threads of `training` give; with `kind`, those of other kinds."""
    points = [(kind(scored), point) for scored in training for point in points_of(scored)]
    results = []
    for scored in cases:
        thread, own = scored.case.thread, kind(scored)
        constants = fitted(point for other, point in points if point.thread != thread and (own is None or other != own))
        results.append(revised(scored, constants))
    return results


def revised(scored: Scored, constants: Mapping[str, Constant]) -> Validated:
    the_plan = planned(scored)
    if the_plan is None:
        return Validated(scored, scored.scores, ())
    sampler = sampler_kind(the_plan)
    borrowed = [kind for kind in (sampler, non_torch_kind(the_plan)) if kind is not None and kind not in constants]
    peak = shipped_peak = the_plan.estimates["activations"].likely
    if sampler is not None and sampler in constants:
        peak = peak_with(the_plan, constants[sampler].value)
    non_torch = shipped_rest = the_plan.estimates["non_torch"].likely
    if non_torch_kind(the_plan) in constants:
        non_torch = int(constants[non_torch_kind(the_plan)].value * GIB)
    change = {
        "activation": (peak - shipped_peak) / GIB,
        "non_torch": (non_torch - shipped_rest) / GIB,
        "available_kv": (shipped_peak - peak + shipped_rest - non_torch) / GIB,
    }
    ratio = 1 + change["available_kv"] * GIB / the_plan.available if the_plan.available > 0 else 1.0
    scores = []
    for score in scored.scores:
        predicted = score.predicted
        if score.part in change:
            predicted += change[score.part]
        elif score.part in ("blocks", "tokens", "concurrency"):
            predicted *= ratio
        share = None if score.share is None else abs(predicted - score.logged) * GIB / the_plan.request.gpu.total_memory
        scores.append(replace(score, predicted=predicted, share=share))
    return Validated(scored, tuple(scores), tuple(borrowed))


def scored_only(cases: Iterable[Case], models: Models) -> list[Scored]:
    results = (score_case(case, models) for case in cases)
    return [result for result in results if not isinstance(result, Refused)]
