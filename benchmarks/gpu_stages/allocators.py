"""Paged memory against a contiguous reservation of 8,192 tokens per request, in the same pool: requests per second.

Lengths are those of azure-2023-conv (`kvplan profiles`), all submitted at once. The pools are what Llama-3.1-8B
leaves of a 24 GB and of a 40 GB GPU, in whole reservations (`kvplan estimate llama-3.1-8b --ctx 8192 --gpu rtx-4090`,
and a100-40g): where memory is scarce, how it is given out decides. Both ways serve from one engine: weights, pool and
graphs are the same, the scheduler is another. The empty part of a pool is, over all steps, the share of slots that
requests held and had nothing in.
"""

import random
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from benchmarks.gpu_stages.serving import requests_of, reschedule, start
from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from benchmarks.throughput import BenchRequest, Figures, figures, run_engine, run_warm_up
from engine import Engine
from engine.stats import Stats
from kvplan.workloads.profiles import profile

WORKLOAD = "azure-2023-conv"
BLOCK_SIZE = 16
Allocator = Literal["paged", "contiguous"]
ALLOCATORS: tuple[Allocator, ...] = ("paged", "contiguous")


@dataclass(frozen=True, slots=True)
class Shape:
    """max_model_len, and the pools: (reservations of so many tokens, requests to serve); the goal is about the first.

    divisor  of the workload's lengths, so that a CPU is done in seconds
    """

    max_model_len: int
    pools: tuple[tuple[int, int], ...]
    divisor: int = 1


FULL = Shape(8192, ((5, 96), (19, 128)))
SMALL = Shape(128, ((2, 8),), divisor=64)


@dataclass(slots=True)
class Slots:
    """Over the steps of a run: slots that requests held, and tokens in them."""

    allocated: int = 0
    full: int = 0

    def count(self, stats: Stats) -> None:
        self.allocated += stats.num_used_blocks * BLOCK_SIZE
        self.full += stats.num_kv_tokens

    @property
    def empty(self) -> float:
        return 1 - self.full / self.allocated


@dataclass(frozen=True, slots=True)
class Served:
    figures: Figures
    empty: float


def lengths(shape: Shape, count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first requests that fit into max_model_len."""
    drawn = (
        (max(1, request.prompt_tokens // shape.divisor), max(1, request.output_tokens // shape.divisor))
        for request in profile(WORKLOAD).requests(rate=1, seed=0)
    )
    return list(islice((pair for pair in drawn if sum(pair) < shape.max_model_len), count))


def serve(engine: Engine, mix: list[BenchRequest], allocator: Allocator, num_blocks: int) -> Served:
    reschedule(engine, num_blocks, allocator=allocator)
    slots = Slots()
    engine.on_step = slots.count
    served = figures(mix, run_engine(engine, mix))
    engine.on_step = None
    return Served(served, slots.empty)


def rows_of(where: str, results: dict[Allocator, Served], model: str) -> list[Row]:
    rows = [
        line
        for name, served in results.items()
        for line in (
            row(f"{where}, {name}: served", "requests/s", [served.figures.requests_per_second], model),
            row(f"{where}, {name}: admitted, most", "requests", [served.figures.max_running], model),
            row(f"{where}, {name}: admitted, mean of the steps", "requests", [served.figures.mean_running], model),
            row(f"{where}, {name}: held and empty", "share", [served.empty], model),
        )
    ]
    if len(results) == 2:
        rows.append(row(f"{where}, paged : contiguous", "x requests/s", [ratio(results)], model))
    return rows


def ratio(results: dict[Allocator, Served]) -> float:
    return results["paged"].figures.requests_per_second / results["contiguous"].figures.requests_per_second


def goals_of(results: dict[Allocator, Served]) -> dict[str, float]:
    goals = {f"{name}-waste": served.empty for name, served in results.items()}
    return goals | ({"paged-contiguous": ratio(results)} if len(results) == 2 else {})


def headline(where: str, results: dict[Allocator, Served]) -> str:
    parts = [
        f"{name} {served.figures.requests_per_second:.2f} requests/s, {served.figures.max_running} at once, "
        f"{served.empty:.1%} empty"
        for name, served in results.items()
    ]
    times = [f"{ratio(results):.2f}x"] if len(results) == 2 else []
    return f"{where}: {'; '.join(times + parts)}"


def run(stage: Task) -> None:
    shape, model = SMALL if stage.is_small else FULL, stage.options.model
    blocks_of = [1 + num * shape.max_model_len // BLOCK_SIZE for num, _ in shape.pools]
    engine = start(
        stage, model, max_model_len=shape.max_model_len, max_num_seqs=8 if stage.is_small else 256,
        max_num_batched_tokens=64 if stage.is_small else 8192, block_size=BLOCK_SIZE, num_blocks=max(blocks_of),
        enable_prefix_caching=False,
    )  # fmt: skip
    numbers: dict[str, Any] = {"goals": {}, "pools": {}}
    rows: list[Row] = []
    missing: list[str] = []
    for (num_regions, num_requests), num_blocks in zip(shape.pools, blocks_of, strict=True):
        lens = lengths(shape, num_requests)
        mix = requests_of(lens, engine.spec.vocab_size, random.Random(num_regions))
        mean = sum(map(sum, lens)) / len(lens)
        where = f"pool of {num_regions} x {shape.max_model_len}"
        if not missing:
            run_warm_up(engine, mix)
        results: dict[Allocator, Served] = {}
        for name in ALLOCATORS:
            results[name] = serve(engine, mix, name, num_blocks)
            numbers["pools"][where] = {"requests": num_requests, "mean_tokens": mean, **goals_of(results)}
            if not missing:
                numbers["goals"] = goals_of(results)
            print(headline(where, results), flush=True)
            stage.save(
                "; ".join([*missing, headline(where, results)]), numbers, [*rows, *rows_of(where, results, model)]
            )
        rows += rows_of(where, results, model)
        missing.append(headline(where, results))


if __name__ == "__main__":
    own = parser(__doc__)
    own.add_argument("--model", default="llama-3.1-8b", help="a name of models.yaml (%(default)s)")
    run(task(own))
