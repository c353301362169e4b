"""How often ranges of simulated times held on published results that no constant was fitted to, by kind of plan.

A kind is what changes the kernels and the scheduler: dense or experts, the GPU's vendor, the server. The counts of
`unseen.csv` were measured on tests/facts/time_cases_unseen.csv by `benchmarks/timeboard.py --unseen`, with the shipped
constants.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kvplan.models.spec import ModelSpec
from kvplan.servers.base import terms_of
from kvplan.servers.plans import Plan

FILE: Final = Path(__file__).with_name("unseen.csv")
MEASURED: Final = "0.8 to 1.25 times the measured step times, an assumption"
VENDORS: Final = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs"}
METRICS: Final = {"tpot": "per output token", "ttft": "to the first token", "out_tps": "in throughput"}


class Kind(NamedTuple):
    """Plans whose errors are alike."""

    models: Literal["dense", "experts"]
    vendor: str
    server: str


class Score(NamedTuple):
    """Results of one kind and metric, and how many of them lie in the stated range."""

    results: int
    in_range: int


def kind_of(spec: ModelSpec, vendor: str, server: str) -> Kind:
    return Kind("experts" if spec.experts_per_token else "dense", vendor, server)


@cache
def scores() -> dict[Kind, dict[str, Score]]:
    """Scores by kind and metric, as measured."""
    table: dict[Kind, dict[str, Score]] = {}
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            models: Literal["dense", "experts"] = "experts" if row["models"] == "experts" else "dense"
            kind = Kind(models, row["vendor"], row["server"])
            table.setdefault(kind, {})[row["metric"]] = Score(int(row["results"]), int(row["in_range"]))
    return table


def coverage(plan: Plan) -> str:
    """State how often the ranges held on unseen results of the plan's kind, or that none was scored."""
    server = plan.request.release.engine
    kind = kind_of(plan.request.spec, plan.request.gpu.vendor, server)
    words = "models with experts" if kind.models == "experts" else "dense models"
    where = f"{words}, {terms_of(server).title}, {VENDORS.get(kind.vendor, 'such GPUs')}"
    scored = scores().get(kind)
    if scored is None:
        return f"no unseen result of this kind was scored ({where}); measure yours with kvplan calibrate"
    counts = [f"{score.in_range} of {score.results} {METRICS[metric]}" for metric, score in scored.items()]
    return f"held {', '.join(counts)} on unseen results ({where})"
