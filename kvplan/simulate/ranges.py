"""Ranges of simulated times: as far as times of real servers were from those predicted without their kind.

`coverage` has the ranges by kind of plan, as factors; each feature that no such result has makes them wider.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Plan
from kvplan.simulate import coverage
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
    """

    times: Mapping[str, Bounds]
    throughput: Bounds
    unseen: tuple[str, ...] = ()
    coverage: str = ""

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
    factor = UNSEEN ** len(unseen)
    factors = {}
    for metric in coverage.METRICS:
        lowest, highest = coverage.range_of(kind, metric)
        factors[metric] = (lowest / factor, highest * factor)
    return Ranges(bounds(factors["tpot"], factors["ttft"]), factors["out_tps"], unseen, coverage.coverage(plan))


def calibrated() -> Ranges:
    """Return the ranges of times that are calibrated with runs of such a server."""
    times = bounds(CALIBRATED["tpot"], CALIBRATED["ttft"])
    return Ranges(times, CALIBRATED["out_tps"], coverage=coverage.CALIBRATED)


def widest(several: tuple[Ranges, ...]) -> Ranges:
    """Return the union of several servers' ranges."""
    first = several[0]
    times = {
        metric: (min(server.times[metric][0] for server in several), max(server.times[metric][1] for server in several))
        for metric in first.times
    }
    low, high = (limit(server.throughput[side] for server in several) for side, limit in ((0, min), (1, max)))
    unseen = tuple(dict.fromkeys(name for server in several for name in server.unseen))
    return Ranges(times, (low, high), unseen, "; ".join(dict.fromkeys(server.coverage for server in several)))


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
    return f"Ranges {text}." if text.startswith("held") else f"Ranges: {text}."
