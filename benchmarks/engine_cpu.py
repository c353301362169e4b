"""The engine on a CPU against transformers, paged memory against contiguous, and what a step costs beside the model.

    python -m benchmarks.engine_cpu [--rounds 4] [--threads 2] [--csv FILE]

The model has SmolLM2-135M's shape and random weights in float32, the same for both sides; 32 requests of 16-256 tokens
ask for 16-128 more, all at once. A round is the engine on all 32, then transformers on a quarter of them as a batch of
8, then on the same quarter one by one; four rounds make a whole mix. Longer pieces would not do: a shared machine's
load changes within minutes, and falls on one side of a ratio. CPU time beside wall time shows where it did.

Admission and the step's own cost are measured on the real engine with runner.forward replaced by fixed logits of 64
tokens: who is admitted and preempted depends on lengths alone, and what is left of Engine.step() is schedule, arrays,
tensors, sampling set-up, choosing among 64 and update. The cost is taken with one torch thread: so little work is
never worth a second, and waiting for one on a busy machine costs a time slice.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path.pop(0)

import numpy as np
import torch
import transformers

from benchmarks.planner import HEADER, measured_with
from benchmarks.throughput import (
    BenchRequest,
    LengthRange,
    Run,
    load_transformers,
    random_mix,
    run_engine,
    run_transformers,
    run_warm_up,
    warm_up,
)
from engine import Engine, EngineConfig, SamplingParams
from engine.directory import read_spec
from kvplan.models import catalog

MODEL = "smollm2-135m"
VOCAB_SIZE, BLOCK_SIZE, MAX_MODEL_LEN = 49_152, 16, 1024
ROOM = 1 + 32 * (256 + 128) // BLOCK_SIZE  # holds all 32 requests at their longest
NUM_RESERVATIONS, NUM_WAITING = 8, 128
NUM_SEQS, PROMPT_LEN = 256, 500
Row = tuple[str, str, float, float, float, int]


def spread(values: Many[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile, never outside the values, of which there may be two."""
    middle, low, high = np.percentile(values, [50, 20, 80]).tolist()
    return middle, low, high


def save_model(folder: Path) -> Path:
    """A model of SmolLM2-135M's shape with random weights, as transformers saves it."""
    torch.manual_seed(0)
    values = catalog.expand(catalog.facts(MODEL)["config"])
    config = transformers.AutoConfig.for_model(**{**values, "torch_dtype": "float32"})
    causal_lm: Any = transformers.AutoModelForCausalLM  # has untyped class methods
    causal_lm.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def mix(num_prompts: int, seed: int = 0) -> list[BenchRequest]:
    """Requests with the lengths of seed 0 and tokens by `seed`, so that no run finds another's prefixes."""
    lens = random_mix(num_prompts, LengthRange(16, 256), LengthRange(16, 128), VOCAB_SIZE, 0)
    return [BenchRequest([(token + seed) % VOCAB_SIZE for token in r.prompt], r.output_len) for r in lens]


# --- against transformers ---------------------------------------------------------------------------------------


def against_transformers(folder: Path, num_rounds: int) -> list[Row]:
    """The mix's requests per second on each side, and the ratios of pieces that stood side by side."""
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, num_blocks=ROOM)
    engine, model = Engine(folder, config), load_transformers(str(folder), config, read_spec(folder))
    run_warm_up(engine, mix(32))
    run_transformers(model, warm_up(mix(32), VOCAB_SIZE), 8)
    speeds: dict[str, list[Speed]] = {"engine": [], "batches of 8": [], "one by one": []}
    for i in range(num_rounds):
        whole, first = mix(32, seed=i + 1), i % 4 * 8
        quarter = whole[first : first + 8]
        speeds["engine"].append(speed(whole, partial(run_engine, engine)))
        speeds["batches of 8"].append(speed(quarter, partial(run_transformers, model, batch_size=8)))
        speeds["one by one"].append(speed(quarter, partial(run_transformers, model)))
        so_far = ", ".join(f"{name} {values[-1].wall:.3f}" for name, values in speeds.items())
        print(f"round {i + 1} of {num_rounds}, requests/s: {so_far}", file=sys.stderr)
    ours = speeds["engine"]
    rows: list[Row] = [("engine", "requests/s", *spread([x.wall for x in ours]), num_rounds)]
    for name in ("batches of 8", "one by one"):
        theirs = speeds[name]
        wall = [x.wall / y.wall for x, y in zip(ours, theirs, strict=True)]
        cpu = [x.cpu / y.cpu for x, y in zip(ours, theirs, strict=True)]
        rows.append((f"transformers, {name}", "requests/s", *spread([x.wall for x in theirs]), num_rounds))
        rows.append((f"engine : transformers, {name}", "x", *spread(wall), num_rounds))
        rows.append((f"engine : transformers, {name}, CPU time", "x", *spread(cpu), num_rounds))
    return rows


@dataclass(frozen=True, slots=True)
class Speed:
    """Requests of the whole mix's mean output length, per second and per second of this process's CPU time."""

    wall: float
    cpu: float


def speed(requests: list[BenchRequest], run: Callable[[list[BenchRequest]], Run]) -> Speed:
    """Quarters differ in length, so output tokens are counted and told in requests of the mix."""
    mean_len = sum(request.output_len for request in mix(32)) / 32
    num_requests = sum(request.output_len for request in requests) / mean_len
    cpu = time.process_time()
    elapsed = run(requests).elapsed_s
    return Speed(num_requests / elapsed, num_requests / (time.process_time() - cpu))


# --- on an engine without its model -----------------------------------------------------------------------------


def modelless(folder: Path, **options: Any) -> Engine:
    """An engine whose steps compute nothing: every token is the same."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_batched_tokens=512, **options)
    engine = Engine(folder, config)
    logits = torch.zeros(config.num_seqs, 64)
    logits[:, 7] = 1
    engine.runner.forward = lambda step: logits[: len(step.context_lens)]  # type: ignore[method-assign]
    return engine


def admitted(folder: Path, allocator: Literal["paged", "contiguous"]) -> Run:
    """128 waiting requests in a pool of 8 reservations."""
    num_blocks = 1 + NUM_RESERVATIONS * MAX_MODEL_LEN // BLOCK_SIZE
    engine = modelless(folder, max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks, allocator=allocator)
    return run_engine(engine, mix(NUM_WAITING))


def concurrency(folder: Path) -> list[Row]:
    """Requests that run at once, over the steps of a run, and the most of any step."""
    rows: list[Row] = []
    max_running: dict[str, int] = {}
    for allocator in ("paged", "contiguous"):
        run = admitted(folder, allocator)
        max_running[allocator] = max(run.num_running)
        rows.append((f"running at once, {allocator}", "requests", *spread(run.num_running), len(run.num_running)))
        rows.append((f"running at once, {allocator}, most", "requests", *spread([max_running[allocator]]), 1))
        rows.append((f"preemptions, {allocator}", "", *spread([run.num_preemptions]), 1))
    ratio = max_running["paged"] / max_running["contiguous"]
    return [*rows, ("running at once, most, paged : contiguous", "x", *spread([ratio]), 1)]


def step_cost(folder: Path, metric: str, params: SamplingParams, num_steps: int) -> Row:
    """Milliseconds of steps in which 256 sequences decode and none ends."""
    num_blocks = 1 + NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE
    engine = modelless(folder, max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks, max_num_seqs=NUM_SEQS)
    for request in random_mix(NUM_SEQS, LengthRange(PROMPT_LEN, PROMPT_LEN), LengthRange(1, 1), VOCAB_SIZE, 0):
        engine.add_request(request.prompt, params)
    while engine.stats().generation_tokens < 2 * NUM_SEQS or engine.stats().num_requests_waiting:
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1000)
    return metric, "ms", *spread(times), num_steps


def measure(folder: Path, num_rounds: int) -> list[Row]:
    greedy = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=1, max_tokens=500, ignore_eos=True)
    rows = [*against_transformers(folder, num_rounds), *concurrency(folder)]
    torch.set_num_threads(1)
    return [
        *rows,
        step_cost(folder, "step beside the model, 256 decode, greedy", greedy, 100),
        step_cost(folder, "step beside the model, 256 decode, drawn", drawn, 100),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        rows = measure(save_model(Path(folder)), options.rounds)
    for metric, unit, value, p20, p80, n in rows:
        print(f"{metric:<48} {value:8.3f} {unit:<10} (20-80%: {p20:.3f}-{p80:.3f}, n={n})")
    if options.csv:
        _, gpu, driver, _, *others = measured_with()
        columns = (MODEL, gpu, driver, torch.__version__, *others)
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *((*row, *columns) for row in rows)])


if __name__ == "__main__":
    main()
