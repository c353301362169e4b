"""Time to first token of requests whose prefix the device has lost, with host memory behind it and without.

    python -m benchmarks.offload [--rounds 9] [--csv FILE]

A small model with random weights on the CPU. A round: a prompt of 1,200 tokens, others until the pool has turned over,
then a prompt that shares the first 900; both engines take turns. Files: the same from a fresh process's disk tier.
"""

import argparse
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path.pop(0)

import torch

from benchmarks.planner import HEADER, measured_with, spread
from engine import Engine, EngineConfig, SamplingParams
from kvplan.models.hf_config import load_spec

PROMPT, SHARED = 1_200, 900
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def engine_of(folder: Path, **options: Any) -> Engine:
    """A pool of two prompts and a half, in blocks of 16 tokens."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        load_format="dummy",
        num_blocks=190,
        max_num_seqs=2,
        max_model_len=2048,
        **options,
    )
    return Engine(load_spec(folder), config)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [3 + (seed * 7919 + i * 104_729) % 2_000 for i in range(num_tokens)]


def first_token_ms(engine: Engine, tokens: list[int]) -> tuple[float, int]:
    """(milliseconds to the first token, tokens that were not computed)."""
    start = time.perf_counter()
    (output,) = engine.generate([tokens], ONE)
    return (time.perf_counter() - start) * 1000, output.num_cached_tokens


def round_of(engine: Engine, number: int) -> tuple[float, int]:
    """The later request's time, after three others have taken the blocks of the first."""
    prefix = prompt(100 * number + 1, SHARED)
    engine.generate([prefix + prompt(100 * number + 2, PROMPT - SHARED)], ONE)
    for other in range(3, 6):
        engine.generate([prompt(100 * number + other, PROMPT)], ONE)
    return first_token_ms(engine, prefix + prompt(100 * number + 6, PROMPT - SHARED))


def measure(rounds: int, folder: Path) -> list[tuple[str, str, float, float, float, int]]:
    """Rows of both engines' times, and of the share saved, round by round."""
    plain, offloading = engine_of(folder), engine_of(folder, kv_offloading_size=1.0)
    times: dict[str, list[float]] = {"ttft_off": [], "ttft_host": []}
    for number in range(rounds + 1):
        off, cached_off = round_of(plain, number)
        host, cached = round_of(offloading, number)
        if (cached_off, cached) != (0, SHARED // 16 * 16):
            raise AssertionError(f"cached tokens {cached_off} and {cached}: the pool did not turn over as it should")
        if number:  # the first warms up
            times["ttft_off"].append(off)
            times["ttft_host"].append(host)
    saved = [1 - host / off for off, host in zip(times["ttft_off"], times["ttft_host"], strict=True)]
    rows = [(name, "ms", *spread(values), rounds) for name, values in times.items()]
    return [
        *rows,
        ("ttft_saved_host", "share", *spread(saved), rounds),
        files_row(rounds, folder, median(times["ttft_off"])),
    ]


def files_row(rounds: int, folder: Path, off_ms: float) -> tuple[str, str, float, float, float, int]:
    """The share saved by an engine that starts with files alone."""
    options = {"kv_offloading_size": 1.0, "kv_offloading_dir": str(folder / "kv"), "kv_offloading_disk_size": 1.0}
    before = engine_of(folder, **options)
    prefixes = [prompt(9_000 + number, SHARED) for number in range(rounds)]
    before.generate([prefix + prompt(1, PROMPT - SHARED) for prefix in prefixes], ONE)
    before.close()
    after = engine_of(folder, **options)
    after.generate([prompt(2, 64)], ONE)
    saved = [1 - first_token_ms(after, prefix + prompt(3, PROMPT - SHARED))[0] / off_ms for prefix in prefixes]
    after.close()
    return ("ttft_saved_files", "share", *spread(saved), rounds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.rounds, Path(folder))
    for metric, unit, value, low, high, n in rows:
        print(f"{metric:<32} {value:>9.3f} {unit:<6} ({low:.3f} to {high:.3f}, n={n})")
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *([*row, *measured_with()] for row in rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
