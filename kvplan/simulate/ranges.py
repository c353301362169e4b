"""Ranges of simulated times: intervals of measured / predicted that contain 9 in 10 of the results they were chosen on.

Chosen by group of servers and models, with constants fitted without the result's source, on tests/facts/time_cases.csv:
92 % of TPOT, 89 % of TTFT and 95 % of output tokens per second lie within there. On results of other models and servers
far fewer do: `coverage` counts them by kind.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import terms_of
from kvplan.servers.plans import Plan
from kvplan.simulate import coverage

Bounds = tuple[float, float]
Verdict = Literal["kept", "broken", "too close to call"]


def bounds(tpot: Bounds, ttft: Bounds) -> Mapping[str, Bounds]:
    """Return the bounds of every metric: queue time as TTFT, which includes it; latency, mostly decode, near TPOT."""
    return {"ttft": ttft, "tpot": tpot, "queue": ttft, "latency": (tpot[0], tpot[1] + 0.1)}


TIMES: Final = bounds(tpot=(0.65, 1.4), ttft=(0.5, 2.3))
THROUGHPUT: Final[Bounds] = (0.65, 1.45)
SMALL: Final = 3_000_000_000  # parameters in layers
UNSEEN: Final = 1.3  # widening factor if no published result is similar: an assumption, no error was measured
MEASURED: Final[Bounds] = (0.8, 1.25)  # for step times measured on the user's own GPU: an assumption
VENDORS: Final = frozenset({"nvidia"})  # GPU vendors among the published results that the constants were fitted to
FORMATS: Final = frozenset({"fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "mxfp4"})


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


@dataclass(frozen=True, slots=True)
class Group:
    """Plans whose prediction errors differ from others', with ranges of their own."""

    name: str
    applies: Callable[[Plan], bool]
    times: Mapping[str, Bounds]
    throughput: Bounds


def num_params_of(plan: Plan) -> int:
    return sum(weight.num_params for weights in plan.request.spec.layer_weights for weight in weights)


def is_other_server(plan: Plan) -> bool:
    return terms_of(plan.request.release.engine).prompts_first is not None


GROUPS: Final = (
    Group(
        "models below 3 B on vLLM's first engine, which works for every sequence in Python",
        lambda plan: plan.request.release.runs_first_engine and num_params_of(plan) < SMALL,
        bounds(tpot=(0.45, 5.0), ttft=(0.5, 2.5)),
        (0.9, 2.0),
    ),
    Group(
        "vLLM's first engine",
        lambda plan: plan.request.release.runs_first_engine,
        bounds(tpot=(0.65, 2.0), ttft=(0.18, 2.0)),
        (0.85, 1.65),
    ),
    Group(
        "servers that compute prompts first",
        is_other_server,
        bounds(tpot=(0.75, 1.5), ttft=(0.18, 4.5)),
        THROUGHPUT,
    ),
    Group(
        "ranks that speak through the host",
        lambda plan: plan.request.gpu.lacks_peer_access and plan.request.args.tensor_parallel_size > 1,
        bounds(tpot=(0.45, 1.2), ttft=(0.2, 2.3)),
        THROUGHPUT,
    ),
    Group(
        "models below 3 B, whose steps take as long as the host does",
        lambda plan: num_params_of(plan) < SMALL,
        bounds(tpot=(1.0, 2.7), ttft=(0.4, 1.8)),
        THROUGHPUT,
    ),
)


def modeled(plan: Plan) -> Ranges:
    """Return the ranges of roofline estimates."""
    unseen = tuple(unlike(plan))
    group = next((group for group in GROUPS if group.applies(plan)), None)
    own, throughput = (TIMES, THROUGHPUT) if group is None else (group.times, group.throughput)
    known = {terms_of(plan.request.release.engine).title} if is_other_server(plan) else set()  # compared, not fitted
    factor = UNSEEN if set(unseen) - known else 1.0
    times = {metric: (low / factor, high * factor) for metric, (low, high) in own.items()}
    return Ranges(times, (throughput[0] / factor, throughput[1] * factor), unseen, coverage.coverage(plan))


def measured() -> Ranges:
    """Return the ranges of estimates from step times measured on such a GPU with such a model."""
    return Ranges(dict.fromkeys(TIMES, MEASURED), MEASURED, coverage=coverage.MEASURED)


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
    """Yield the features of a plan that none of the fitted published results has."""
    spec, gpu, terms = plan.request.spec, plan.request.gpu, terms_of(plan.request.release.engine)
    if terms.prompts_first is not None:
        yield terms.title
    if gpu.vendor not in VENDORS:
        yield "AMD GPUs" if gpu.vendor == "amd" else "this GPU"
    elif gpu.unified:
        yield "GPUs that share their memory with the CPU"
    if spec.has_states:
        yield "recurrent layers"
    if spec.is_mla:
        yield "latent attention (MLA)"
    formats = sorted(formats_of(spec) - FORMATS)
    if formats:
        yield f"weights in {', '.join(formats)}"


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
