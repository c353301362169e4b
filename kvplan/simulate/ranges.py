"""How far a simulated time may be from a real server's: ranges that 5 in 6 published results lie in.

Measured over predicted, with constants fitted without the result's source: of the fifth of
tests/facts/time_cases.csv that they were chosen on 88 % of the times per output token, 86 % of those to the first
token and 92 % of the output tokens per second lie within; of another fifth 83, 80 and 93 % (reports/LOG.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import terms_of
from kvplan.servers.plans import Plan

Bounds = tuple[float, float]
Verdict = Literal["kept", "broken", "too close to call"]
TIMES: Final[Mapping[str, Bounds]] = {
    "ttft": (0.5, 2.3),
    "tpot": (0.65, 1.4),
    "queue": (0.5, 2.3),
    "latency": (0.65, 1.5),
}
THROUGHPUT: Final[Bounds] = (0.65, 1.45)
UNSEEN: Final = 1.3  # by how much wider where no published result is like it: an assumption, no error was measured
MEASURED: Final[Bounds] = (0.8, 1.25)  # of step times that a run on the user's own GPU gave: an assumption
VENDORS: Final = frozenset({"nvidia"})  # of the published results that the constants were fitted to
FORMATS: Final = frozenset({"fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "mxfp4"})


@dataclass(frozen=True, slots=True)
class Ranges:
    """Low and high of each figure as parts of it.

    unseen  what of this plan no published result is like, for the reader; empty where there are such results
    """

    times: Mapping[str, Bounds]
    throughput: Bounds
    unseen: tuple[str, ...] = ()

    def time(self, metric: str | None, value: float) -> Bounds:
        """Low and high of a time; a share of requests, which has no metric, is as it is."""
        low, high = (1.0, 1.0) if metric is None else self.times[metric]
        return low * value, high * value

    def rate(self, value: float, *, arrivals: float | None) -> Bounds:
        """Low and high of what a server gives per second; as much as comes where it keeps up with the arrivals."""
        if arrivals is not None and value >= 0.95 * arrivals:
            return value, value
        return self.throughput[0] * value, self.throughput[1] * value


def verdict(low: float, high: float, limit: float) -> Verdict:
    """Whether a promise holds over the whole range, nowhere in it, or in a part."""
    if high <= limit:
        return "kept"
    return "broken" if low > limit else "too close to call"


def modeled(plan: Plan) -> Ranges:
    """Those of times by the roofline."""
    unseen = tuple(unlike(plan))
    factor = UNSEEN if unseen else 1.0
    times = {metric: (low / factor, high * factor) for metric, (low, high) in TIMES.items()}
    return Ranges(times, (THROUGHPUT[0] / factor, THROUGHPUT[1] * factor), unseen)


def measured() -> Ranges:
    """Those of times by steps that were measured on such a GPU with such a model."""
    return Ranges(dict.fromkeys(TIMES, MEASURED), MEASURED)


def widest(several: tuple[Ranges, ...]) -> Ranges:
    """Ranges that hold for each of several servers."""
    first = several[0]
    times = {
        metric: (min(server.times[metric][0] for server in several), max(server.times[metric][1] for server in several))
        for metric in first.times
    }
    low, high = (limit(server.throughput[side] for server in several) for side, limit in ((0, min), (1, max)))
    unseen = tuple(dict.fromkeys(name for server in several for name in server.unseen))
    return Ranges(times, (low, high), unseen)


def unlike(plan: Plan) -> Iterator[str]:
    """What of a plan no published result that the constants were fitted to has."""
    spec, gpu, terms = plan.request.spec, plan.request.gpu, terms_of(plan.request.release.engine)
    if terms.prompts_first is not None:
        yield terms.title
    if gpu.vendor not in VENDORS:
        yield "GPUs of AMD" if gpu.vendor == "amd" else "this GPU"
    elif gpu.unified:
        yield "GPUs that share their memory with the CPU"
    if spec.has_states:
        yield "recurrent layers"
    if spec.is_mla:
        yield "latent attention"
    formats = sorted(formats_of(spec) - FORMATS)
    if formats:
        yield f"weights in {', '.join(formats)}"


def formats_of(spec: ModelSpec) -> set[str]:
    """Kinds of schemes that a model's weights are stored in, 16 bits left out."""
    if spec.quantization is None or spec.quantization.default is None:
        return set()
    return {spec.quantization.default.kind}


def unseen_note(unseen: Sequence[str]) -> str:
    """The note on a plan that is like nothing that the times were fitted to."""
    return f"the times were fitted to no published result with {' or '.join(unseen)}: extrapolated, with wider ranges"
