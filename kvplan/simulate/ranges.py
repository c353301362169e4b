"""Ranges of simulated times: as far as times of real servers were from those predicted without their kind.

`coverage` has the ranges by kind of plan, as factors; each feature that no such result has makes them wider.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Plan
from kvplan.simulate import coverage
from kvplan.simulate.coverage import Spread
from kvplan.simulate.host import regime_of
from kvplan.simulate.steptime import borrowed_kernels

Bounds = tuple[float, float]
Verdict = Literal["kept", "broken", "too close to call"]

UNSEEN: Final = 1.2  # factor for a feature that no result has, and for borrowed kernels: an assumption
# Measured over predicted of 24 runs of 5 servers, each calibrated with four others: the middle nine tenths, rounded
# outward (benchmarks/timing/calibrated.py on tests/facts/time_cases_unseen.csv, 2026-11-28).
CALIBRATED: Final[Mapping[str, Bounds]] = {"tpot": (0.8, 1.55), "ttft": (0.2, 1.8), "out_tps": (0.65, 1.25)}
DRAFTS: Final = "drafts (but for 12 times of one 8B model, which nothing was fitted to)"
FORMATS: Final = frozenset({"fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "mxfp4", "nvfp4", "int4"})


def bounds(tpot: Bounds, ttft: Bounds) -> Mapping[str, Bounds]:
    """Return the bounds of every metric: queue time as TTFT, which includes it; latency, mostly decode, near TPOT."""
    return {"ttft": ttft, "tpot": tpot, "queue": ttft, "latency": (tpot[0], tpot[1] + 0.1)}


@dataclass(frozen=True, slots=True)
class Ranges:
    """Low and high of each figure, as factors of it.

    unseen    features of this plan that no published result has, as text; empty if results cover all of them
    coverage  how often the ranges held on unseen results of this kind, as text
    targets   as `times`, but both ends for themselves: a target above the high end is kept, one below the low end
              broken, with as many wrong verdicts as the docs state; the same as `times` if empty
    waiting   ranges where requests wait for others; the same if None
    """

    times: Mapping[str, Bounds]
    throughput: Bounds
    unseen: tuple[str, ...] = ()
    coverage: str = ""
    targets: Mapping[str, Bounds] = field(default_factory=dict)
    waiting: "Ranges | None" = None

    def of(self, *, waits: bool) -> "Ranges":
        """Return the ranges of a run, by whether its requests wait for others: what steps are off by comes back many
        times in the wait for a server that is nearly full.
        """
        return self.waiting if waits and self.waiting is not None else self

    def target(self, metric: str | None, value: float) -> Bounds:
        """Return the values of a time between which it is too close to call whether a target is met."""
        low, high = (1.0, 1.0) if metric is None else self.decided[metric]
        return low * value, high * value

    @property
    def decided(self) -> Mapping[str, Bounds]:
        """Factors of every time between which a target is too close to call."""
        return self.targets or self.times

    def time(self, metric: str | None, value: float) -> Bounds:
        """Return low and high of a time; without a metric (a share of requests) both are the value."""
        low, high = (1.0, 1.0) if metric is None else self.times[metric]
        return low * value, high * value

    def rate(self, value: float, *, arrivals: float | None) -> Bounds:
        """Return low and high of a throughput; both are the value if the server keeps up with the arrivals."""
        if arrivals is not None and value >= 0.95 * arrivals:
            return value, value
        return self.throughput[0] * value, self.throughput[1] * value


def verdict(low: float, high: float, limit: float) -> Verdict:
    """Return whether a target is met over the whole range, nowhere in it, or in part of it."""
    if high <= limit:
        return "kept"
    return "broken" if low > limit else "too close to call"


def modeled(plan: Plan) -> Ranges:
    """Return the ranges of times made of kernels."""
    request = plan.request
    kind = coverage.kind_of(request.spec, request.gpu, regime_of(plan))
    unseen = tuple(unlike(plan))
    text, factor = coverage.coverage(plan), UNSEEN ** len(unseen)
    scores = {metric: coverage.score_of(kind, metric) for metric in coverage.METRICS}

    def ranges(spreads: Mapping[str, Spread], waiting: Ranges | None) -> Ranges:
        tpot, ttft, rate = ((spread.low / factor, spread.high * factor) for spread in spreads.values())
        targets = ((spread.breaks / factor, spread.keeps * factor) for spread in spreads.values())
        return Ranges(bounds(tpot, ttft), rate, unseen, text, bounds(next(targets), next(targets)), waiting)

    waiting = ranges({metric: score.waiting for metric, score in scores.items()}, None)
    return ranges({metric: score.served for metric, score in scores.items()}, waiting)


def calibrated() -> Ranges:
    """Return the ranges of times that are calibrated with runs of such a server."""
    times = bounds(CALIBRATED["tpot"], CALIBRATED["ttft"])
    return Ranges(times, CALIBRATED["out_tps"], coverage=coverage.CALIBRATED)


def widest(several: tuple[Ranges, ...]) -> Ranges:
    """Return the union of several servers' ranges."""
    unseen = tuple(dict.fromkeys(name for server in several for name in server.unseen))
    text = "; ".join(dict.fromkeys(server.coverage for server in several))
    waiting = tuple(server.waiting for server in several if server.waiting is not None)
    return Ranges(
        union([server.times for server in several]),
        union([{"": server.throughput} for server in several])[""],
        unseen,
        text,
        union([server.targets for server in several]),
        widest(waiting) if waiting else None,
    )


def union(several: Sequence[Mapping[str, Bounds]]) -> Mapping[str, Bounds]:
    return {
        name: (min(server[name][0] for server in several), max(server[name][1] for server in several))
        for name in several[0]
    }


def unlike(plan: Plan) -> Iterator[str]:
    """Yield the features of a plan that no published result has."""
    spec, gpu = plan.request.spec, plan.request.gpu
    if gpu.unified:
        yield "GPUs that share their memory with the CPU"
    if spec.has_states:
        yield "recurrent layers"
    if plan.request.args.enforce_eager:
        yield "steps without CUDA graphs (slower)"
    if plan.request.draft is not None or plan.request.args.num_speculative_tokens:
        yield DRAFTS
    if plan.request.args.max_loras:
        yield "adapters (slower; their kernels were not measured)"
    formats = sorted(formats_of(spec) - FORMATS)
    if formats:
        yield f"weights in {', '.join(formats)}"
    if gpu.memory_bandwidth is not None:
        try:
            borrowed = borrowed_kernels(plan)
        except KvplanError:  # no step time, so no ranges either
            borrowed = ()
        if borrowed:
            yield f"borrowed kernels ({'; '.join(borrowed)})"


def formats_of(spec: ModelSpec) -> set[str]:
    """Return the kinds of quantization schemes of a model's weights, without 16-bit formats."""
    if spec.quantization is None or spec.quantization.default is None:
        return set()
    return {spec.quantization.default.kind}


def unseen_note(unseen: Sequence[str]) -> str:
    """Return the note on a plan with features that no fitted result has."""
    return f"no published benchmarks with {' or '.join(unseen)}: times are extrapolated, with wider ranges"


def unseen_remark(unseen: Sequence[str]) -> str:
    """Return the note of unseen_note as a full sentence."""
    return f"Ranges are wider: no published benchmarks with {' or '.join(unseen)}."


def coverage_remark(text: str) -> str:
    """Return the coverage of ranges as a full sentence."""
    return f"The range {text}." if text.startswith("covers") else f"Ranges: {text}."
