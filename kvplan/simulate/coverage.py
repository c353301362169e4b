"""What times of real servers are as factors of those predicted, by kind of plan, on results whose kind was left out.

A kind of plan is what changes kernels and scheduler: dense, experts or blocks of fp8; whether kernels were measured on
the GPU; the server. `held_out.csv` is written by `benchmarks/timeboard.py --ranges`: each result was predicted with a
host that was fitted without its model family, weight format, GPU generation and release, and its range is the others'.
"""

import csv
from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import terms_of
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.host import IN_TURN, regime_of
from kvplan.simulate.kernels.choice import source_of

FILE: Final = Path(__file__).with_name("held_out.csv")
CALIBRATED: Final = (
    "held 13 of 24 per output token, 19 of 24 to the first token on runs of 5 calibrated servers that no fit had seen"
)
METRICS: Final = {"tpot": "per output token", "ttft": "to the first token", "out_tps": "in throughput"}
DEVICES: Final = {
    "measured": "GPUs with measured kernels",
    "similar": "NVIDIA GPUs without measured kernels",
    "amd": "AMD GPUs",
    "other": "other GPUs",
}
MODELS: Final = {"dense": "dense models", "experts": "models with experts", "fp8 blocks": "models in blocks of fp8"}
ANY: Final = ""
FEWEST: Final = 20  # results for which a kind of plans has a range of its own
FEWEST_KINDS: Final = 3  # model families, weight formats, GPU generations or releases among them
WIDE: Final = 6  # high over low, from which a range says why
WIDER: Final = 1.15  # factor for each part of a kind of which there are not enough results: an assumption


class Kind(NamedTuple):
    """Plans whose errors are alike; ANY stands for all of a part."""

    models: str
    device: str
    server: str

    @property
    def wider(self) -> "tuple[Kind, ...]":
        """This kind, and those that it is part of, the nearest first."""
        models, device, server = self
        return (
            self, Kind(ANY, device, server), Kind(models, device, ANY), Kind(ANY, device, ANY), Kind(ANY, ANY, ANY)
        )  # fmt: skip


class Score(NamedTuple):
    """Results of one kind of plans, of how many kinds of their own, how many of them lay in the range of the others,
    and the range of all of them.
    """

    results: int
    kinds: int
    in_range: int
    low: float
    high: float

    @property
    def is_enough(self) -> bool:
        return self.results >= FEWEST and self.kinds >= FEWEST_KINDS


def kind_of(spec: ModelSpec, gpu: GpuSpec, regime: str) -> Kind:
    quantization = spec.quantization
    scheme = None if quantization is None else quantization.default
    is_blocks = scheme is not None and scheme.kind == "fp8_block"
    models = "fp8 blocks" if is_blocks else "experts" if spec.experts_per_token else "dense"
    is_own = gpu.memory_bandwidth is not None and source_of(gpu).is_own
    device = "measured" if is_own else {"nvidia": "similar", "amd": "amd"}.get(gpu.vendor, "other")
    return Kind(models, device, regime)


@cache
def scores() -> Mapping[Kind, Mapping[str, Score]]:
    """Scores by kind and metric."""
    table: dict[Kind, dict[str, Score]] = {}
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            kind = Kind(row["models"], row["device"], row["server"])
            table.setdefault(kind, {})[row["metric"]] = Score(
                int(row["results"]), int(row["kinds"]), int(row["in_range"]), float(row["low"]), float(row["high"])
            )
    return table


def range_of(kind: Kind, metric: str, table: Mapping[Kind, Mapping[str, Score]] | None = None) -> tuple[float, float]:
    """Low and high as factors: those of the nearest kind with enough results, wider for each step to it."""
    known = scores() if table is None else table
    factor = 1.0
    for wider in kind.wider:
        score = known.get(wider, {}).get(metric)
        if score is not None and (score.is_enough or wider == (ANY, ANY, ANY)):
            return score.low / factor, score.high * factor
        factor *= WIDER
    return 0.0, inf  # of no result at all


def coverage(plan: Plan) -> str:
    """State how often the ranges held on results of the plan's kind, or that there is none."""
    request = plan.request
    kind = kind_of(request.spec, request.gpu, regime_of(plan))
    title = terms_of(request.release.engine).title
    server = f"{title} without async scheduling" if kind.server == IN_TURN else title
    where = f"{MODELS[kind.models]}, {server}, {DEVICES[kind.device]}"
    scored = {metric: score for metric, score in scores().get(kind, {}).items() if score.results >= FEWEST}
    if "tpot" not in scored:
        return f"no result of this kind ({where}): run `kvplan calibrate` with 3 of yours"
    counts = [f"{score.in_range} of {score.results} {METRICS[metric]}" for metric, score in scored.items()]
    text = f"held {', '.join(counts)} on results of other models, GPUs or releases ({where})"
    low, high = range_of(kind, "ttft")
    if high < WIDE * low:
        return text
    why = "as sources do not state who begins together or what was compiled meanwhile: `kvplan calibrate` narrows it"
    return f"{text}; {high / low:.0f}-fold to the first token, {why}"
