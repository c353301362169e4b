"""What a step costs before the device has work: schedule() + update(), and the sampler's set-up, at 256 sequences.

    python -m benchmarks.scheduler [--steps 300] [--csv FILE]

All sequences decode, with prompts of 2,000 tokens behind them; a block has 16 tokens.
"""

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import Any

if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path.pop(0)

import torch

from benchmarks.planner import HEADER, measured_with, spread
from engine.block_manager import FullGroup, Group, WindowGroup
from engine.config import SamplingParams
from engine.extensions import ExtendedConfig, scheduler_of
from engine.sampler import Sampler
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence

NUM_SEQS, PROMPT_LEN, MAX_MODEL_LEN = 256, 2_000, 4_096
FULL = (FullGroup(16),)
HYBRID = (FullGroup(16), WindowGroup(16, 128))
Row = tuple[str, str, float, float, float, int]


def request(number: int) -> Sequence:
    return Sequence(f"r{number}", list(range(number * PROMPT_LEN, (number + 1) * PROMPT_LEN)), MAX_MODEL_LEN)


def decoding(groups: tuple[Group, ...], **options: Any) -> Scheduler:
    """A scheduler whose sequences are all past their prompts; the pool holds them to the end."""
    config = ExtendedConfig(max_num_batched_tokens=8_192, max_num_seqs=NUM_SEQS, max_model_len=MAX_MODEL_LEN, **options)
    num_blocks = 1 + NUM_SEQS * len(groups) * MAX_MODEL_LEN // 16
    scheduler = scheduler_of(config, num_blocks, groups)
    for number in range(NUM_SEQS):
        scheduler.add(request(number))
    while len(step(scheduler)[0].samples) < NUM_SEQS:
        pass
    return scheduler


def step(scheduler: Scheduler) -> tuple[Batch, float]:
    """One step and its milliseconds, less the making up of tokens."""
    start = time.perf_counter()
    batch = scheduler.schedule()
    scheduled = time.perf_counter()
    tokens = {seq.request_id: [7] for seq in batch.samples}
    sampled = time.perf_counter()
    scheduler.update(batch, tokens)
    return batch, (scheduled - start + time.perf_counter() - sampled) * 1000


def steps(metric: str, scheduler: Scheduler, num_steps: int) -> Row:
    return metric, "ms", *spread([step(scheduler)[1] for _ in range(num_steps)]), num_steps


def set_up(metric: str, params: SamplingParams, num_steps: int, *, is_same_set: bool) -> Row:
    """Sampler.prepare() while the same sequences run, or with one fewer at every other step."""
    seqs, sampler = [request(number) for number in range(NUM_SEQS)], Sampler(128_256)
    times = []
    for i in range(num_steps):
        n = NUM_SEQS - (0 if is_same_set else i % 2)
        rows, of_rows = seqs[:n], [params] * n
        start = time.perf_counter()
        sampler.prepare(rows, of_rows)
        times.append((time.perf_counter() - start) * 1000)
    return metric, "ms", *spread(times[1:]), num_steps - 1


def measure(num_steps: int) -> list[Row]:
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(top_p=0.9, seed=1)
    return [
        steps("schedule+update", decoding(FULL, enable_prefix_caching=False), num_steps),
        steps("schedule+update, prefix caching", decoding(FULL), num_steps),
        steps("schedule+update, prefix caching, full + window", decoding(HYBRID), num_steps),
        steps("schedule+update, contiguous", decoding(FULL, allocator="contiguous"), num_steps),
        set_up("sampling set-up, greedy, same set", greedy, num_steps, is_same_set=True),
        set_up("sampling set-up, greedy, set changes", greedy, num_steps, is_same_set=False),
        set_up("sampling set-up, top_p and seed, same set", drawn, num_steps, is_same_set=True),
        set_up("sampling set-up, top_p and seed, set changes", drawn, num_steps, is_same_set=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.steps)
    for metric, unit, value, p20, p80, n in rows:
        print(f"{metric:<48} {value:7.3f} {unit:<3} (20-80%: {p20:.3f}-{p80:.3f}, n={n})")
    if options.csv:
        model, gpu, driver, _, *others = measured_with()
        columns = (model, gpu, driver, torch.__version__, *others)
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *((*row, *columns) for row in rows)])


if __name__ == "__main__":
    main()
