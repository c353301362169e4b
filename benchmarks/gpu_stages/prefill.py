"""Prompt tokens per second of Llama-3.1-8B with random weights, beside what its products take (roofline.py).

Requests ask for one token, so a prompt's time ends with it; a step takes 8,192 tokens.
"""

import random
import time

from benchmarks.gpu_stages import roofline
from benchmarks.gpu_stages.roofline import limits_of
from benchmarks.gpu_stages.serving import random_tokens, start
from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from engine import Engine, SamplingParams

MODEL = "llama-3.1-8b"
FULL = ((1, 8192), (4, 2048), (16, 512), (1, 32_768))  # (sequences, tokens of each)
TINY = ((1, 64), (2, 24))
NUM_ROUNDS = 5
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt_times(engine: Engine, num_seqs: int, length: int, num_rounds: int) -> list[float]:
    """Seconds for so many prompts at once, new ones in each round; the first round, which compiles, does not count."""
    source, times = random.Random(length), list[float]()
    for _ in range(1 + num_rounds):
        prompts = [random_tokens(length, engine.spec.vocab_size, source) for _ in range(num_seqs)]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, ONE)
        times.append(time.perf_counter() - begin)
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise SystemExit(f"prefill: {errors[0]}")
    return times[1:]


def run(stage: Task) -> None:
    shapes = TINY if stage.is_small else FULL
    longest, max_tokens = max(length for _, length in shapes), 64 if stage.is_small else 8192
    engine = start(
        stage, MODEL, max_model_len=longest + 1, max_num_seqs=16, max_num_batched_tokens=max_tokens, enforce_eager=True,
        enable_prefix_caching=False, num_blocks=1 + 2 * max(longest, max_tokens) // 16,
    )  # fmt: skip
    limits = limits_of(engine)
    rows: list[Row] = []
    for num_seqs, length in shapes:
        times = prompt_times(engine, num_seqs, length, 2 if length > max_tokens else NUM_ROUNDS)
        where, count = f"prefill B={num_seqs} L={length}", num_seqs * length
        limit_s = limits.prefill_s(num_seqs, length)
        rows += [
            row(f"{where}: prompt", "tokens/s", [count / s for s in times], MODEL),
            row(f"{where}: limit", "tokens/s", [count / limit_s], MODEL),
            row(f"{where}: of the limit", "share", [limit_s / s for s in times], MODEL),
        ]
        print(f"{where}: {rows[-3].value:,.0f} tokens/s, {rows[-1].value:.0%} of the limit", flush=True)
        speeds = ", ".join(f"{row.value:,.0f}" for row in rows if row.metric.endswith(": prompt"))
        shares = [row.value for row in rows if row.unit == "share"]
        what = f"{speeds} prompt tokens/s, {min(shares):.0%} to {max(shares):.0%} of the matrix rate"
        stage.save(what, roofline.figures(limits), rows)


if __name__ == "__main__":
    run(task(parser(__doc__)))
