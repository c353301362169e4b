"""What times of real servers are as factors of those predicted, by kind of plan, on results whose kind was left out.

A kind of plan is what changes kernels and scheduler: small, dense, experts or blocks of fp8; whether kernels were
measured on the GPU; the server. `held_out.csv` is written by `benchmarks/timeboard.py --ranges`: each result was
predicted with a host that was fitted without its model family, weight format, GPU generation and release, and its range
is the others', of the nearest kinds of plan (`benchmarks/timing/bounds.py`).
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from kvplan.core.units import plural
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import terms_of
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.host import IN_TURN, regime_of
from kvplan.simulate.kernels.choice import source_of
from kvplan.sizing.weights import num_params

FILE: Final = Path(__file__).with_name("held_out.csv")
CALIBRATED: Final = (
    "covers 13 of 24 per output token, 19 of 24 to the first token of runs of 5 calibrated servers that no fit had seen"
)
CURE: Final = "run `kvplan calibrate` with 3 of yours"
METRICS: Final = {"tpot": "per output token", "ttft": "to the first token", "out_tps": "in throughput"}
DEVICES: Final = {
    "measured": "GPUs with measured kernels",
    "similar": "NVIDIA GPUs without measured kernels",
    "amd": "AMD GPUs",
    "other": "other GPUs",
}
MODELS: Final = {
    "small": "models below 1B",
    "dense": "dense models",
    "experts": "models with experts",
    "fp8 blocks": "models in blocks of fp8",
}
SMALL: Final = 10**9  # parameters below which the host, whose CPU nobody states, takes longer than the GPU
ANY: Final = ""
FEWEST: Final = 20  # results of a kind of plans from which on it is said how many lay in their range
WIDE: Final = 6  # high over low, from which a range says why


class Kind(NamedTuple):
    """Plans whose errors are alike; a server of which there is no result is ANY."""

    models: str
    device: str
    server: str


class Spread(NamedTuple):
    """Factors on a predicted figure: its range, and those on both sides of which a target is decided.

    keeps   a target of at least this factor is called kept; breaks: one below this factor is called broken
    """

    low: float
    high: float
    breaks: float
    keeps: float


class Score(NamedTuple):
    """Results of one kind of plans, of how many kinds of their own, how many of them lay in the range of the others;
    and the spread of what others measured: where requests are served as they come, and where they wait for others.
    """

    results: int
    kinds: int
    in_range: int
    served: Spread
    waiting: Spread


def kind_of(spec: ModelSpec, gpu: GpuSpec, regime: str) -> Kind:
    quantization = spec.quantization
    scheme = None if quantization is None else quantization.default
    is_blocks = scheme is not None and scheme.kind == "fp8_block"
    models = "fp8 blocks" if is_blocks else "experts" if spec.experts_per_token else "dense"
    if sum(num_params(spec).values()) < SMALL:
        models = "small"
    is_own = gpu.memory_bandwidth is not None and source_of(gpu).is_own
    device = "measured" if is_own else {"nvidia": "similar", "amd": "amd"}.get(gpu.vendor, "other")
    return Kind(models, device, regime)


@cache
def scores() -> Mapping[Kind, Mapping[str, Score]]:
    """Scores by kind and metric."""
    table: dict[Kind, dict[str, Score]] = {}
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.reader(lines):
            if row[0] == "models":
                continue
            factors = list(map(float, row[7:]))
            served, waiting = Spread(*factors[:4]), Spread(*factors[4:])
            score = Score(int(row[4]), int(row[5]), int(row[6]), served, waiting)
            table.setdefault(Kind(*row[:3]), {})[row[3]] = score
    return table


def score_of(kind: Kind, metric: str) -> Score:
    known = scores()
    return known.get(kind, known[kind._replace(server=ANY)])[metric]


def coverage(plan: Plan) -> str:
    """State how often the ranges held on results of the plan's kind, or that there is none."""
    request = plan.request
    kind = kind_of(request.spec, request.gpu, regime_of(plan))
    title = terms_of(request.release.engine).title
    server = f"{title} without async scheduling" if kind.server == IN_TURN else title
    where = f"{MODELS[kind.models]}, {server}, {DEVICES[kind.device]}"
    scored = {metric: score for metric, score in scores().get(kind, {}).items() if score.results}
    if "tpot" not in scored:
        return f"no result of this kind ({where}): {CURE}"
    counts = [
        f"{score.in_range} of {plural(score.results, 'result')} {METRICS[metric]}" for metric, score in scored.items()
    ]
    text = f"covers {', '.join(counts)} ({where}), each predicted without its like"
    if scored["tpot"].results < FEWEST:
        return f"{text}; too few to go by: {CURE}"
    low, high, *_ = score_of(kind, "ttft").served
    if high < WIDE * low:
        return text
    why = "as sources do not state who begins together or what was compiled meanwhile: `kvplan calibrate` narrows it"
    return f"{text}; {high / low:.0f}-fold to the first token, {why}"
