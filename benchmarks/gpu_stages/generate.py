"""The engine against transformers' generate, of Llama-3.1-8B's shape: 64 requests of 512 tokens in and 128 out.

transformers serves them one by one, of which the first few are enough, since all are alike; and in static batches, one
of each size. Both sides have the same config, rope scaling included, and random weights of their own, and choose
greedily: speed depends on neither weights nor tokens.
"""

import json
import random
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_stages.serving import first_line, requests_of, start
from benchmarks.gpu_stages.stage import Row, Task, config_of, parser, row, task
from benchmarks.throughput import (
    BenchRequest,
    figures,
    load_transformers,
    run_engine,
    run_transformers,
    run_warm_up,
    warm_up,
)
from engine import Engine

MODEL = "llama-3.1-8b"
FULL = (64, 512, 128)  # requests, and tokens in and out of each
SMALL = (6, 24, 6)
NUM_ROUNDS, NUM_SINGLES = 3, 4
SINGLE = "transformers, one by one"
MISSING = "transformers is not installed, so there is nothing to compare with"


def mix_of(engine: Engine, shape: tuple[int, int, int], seed: int) -> list[BenchRequest]:
    num_requests, prompt, output = shape
    return requests_of([(prompt, output)] * num_requests, engine.spec.vocab_size, random.Random(seed))


def batch_sizes(num_requests: int) -> tuple[int, ...]:
    """All of them, a half and a quarter: the larger batch is the faster where it fits."""
    return tuple(dict.fromkeys(max(1, num_requests // part) for part in (1, 2, 4)))


def causal_lm(stage: Task, engine: Engine) -> Any:
    """transformers' model of that shape, made on the device: on a host, 8 billion random numbers take minutes."""
    folder = stage.folder / MODEL
    folder.mkdir(exist_ok=True)
    config = config_of(MODEL, is_small=stage.is_small)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with stage.device:
        return load_transformers(str(folder), engine.config, engine.spec)


def speed(model: Any, mix: list[BenchRequest]) -> float:
    """Requests per second of one static batch."""
    return figures(mix, run_transformers(model, mix, len(mix))).requests_per_second


def rows_of(speeds: dict[str, list[float]]) -> list[Row]:
    """Requests per second, and how often theirs go into ours."""
    rows = [row(f"{name}: served", "requests/s", values, MODEL) for name, values in speeds.items()]
    ours = rows[0].value
    return rows + [
        row(f"engine : {name}", "x requests/s", [ours / theirs.value], MODEL)
        for name, theirs in zip(list(speeds)[1:], rows[1:], strict=True)
    ]


def goals_of(speeds: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: row("", "", values).value for name, values in speeds.items()}
    ours, singles = medians.pop("engine"), medians.pop(SINGLE, None)
    goals = {} if singles is None else {"transformers-single": ours / singles}
    return goals | ({"transformers-batch": ours / max(medians.values())} if medians else {})


def save(stage: Task, speeds: dict[str, list[float]], missing: dict[str, str]) -> None:
    goals = goals_of(speeds)
    parts = [f"engine {row('', '', speeds['engine']).value:.2f} requests/s"]
    parts += [f"{goals[name]:.1f}x {what}" for name, what in (
        ("transformers-single", "transformers one by one"), ("transformers-batch", "its best static batch"),
    ) if name in goals]  # fmt: skip
    parts += [f"{name}: {why}" for name, why in missing.items()]
    stage.save("; ".join(parts), {"goals": goals, "requests_per_s": speeds, "missing": missing}, rows_of(speeds))


def run(stage: Task) -> None:
    num_requests, prompt, output = shape = SMALL if stage.is_small else FULL
    engine = start(
        stage, MODEL, max_model_len=prompt + output + 1, max_num_seqs=num_requests,
        max_num_batched_tokens=64 if stage.is_small else 8192, enable_prefix_caching=False,
        num_blocks=1 + num_requests * -(-(prompt + output) // 16),
    )  # fmt: skip
    run_warm_up(engine, mix_of(engine, shape, seed=NUM_ROUNDS))
    speeds: dict[str, list[float]] = {"engine": []}
    missing: dict[str, str] = {}
    for seed in range(NUM_ROUNDS):
        mix = mix_of(engine, shape, seed)
        speeds["engine"].append(figures(mix, run_engine(engine, mix)).requests_per_second)
        save(stage, speeds, missing)
    if find_spec("transformers") is None:
        missing["transformers"] = MISSING
        save(stage, speeds, missing)
        return
    mix = mix_of(engine, shape, 0)
    model = causal_lm(stage, engine)
    run_transformers(model, warm_up(mix, engine.spec.vocab_size)[:1])
    speeds[SINGLE] = [speed(model, [request]) for request in mix[:NUM_SINGLES]]
    save(stage, speeds, missing)
    for size in batch_sizes(num_requests):
        name = f"transformers, static batch of {size}"
        try:
            speeds[name] = [speed(model, mix[:size])]
        except torch.OutOfMemoryError as error:
            missing[name] = first_line(error)
        save(stage, speeds, missing)


if __name__ == "__main__":
    run(task(parser(__doc__)))
