"""Decode speed of Llama-3.1-8B with random weights, by batch and length, beside the physical limit (roofline.py)."""

import random
import time

from benchmarks.gpu_stages import roofline
from benchmarks.gpu_stages.roofline import limits_of
from benchmarks.gpu_stages.serving import random_tokens, start
from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from engine import Engine, SamplingParams

MODEL = "llama-3.1-8b"
# (sequences, prompt tokens), the one first that the goal is about; some 550,000 prompt tokens in all
FULL = (
    (64, 2048), (1, 2048), (8, 2048), (32, 2048), (256, 512), (128, 512), (1, 16_384), (8, 8192), (1, 512), (1, 32_768),
)  # fmt: skip
TINY = ((2, 32), (1, 48))
NUM_WARM_UP, NUM_STEPS = 4, 32
MAX_LAG = 64  # steps that the first sequence decodes before the last one's prompt is through
MAX_OUTPUT = MAX_LAG + NUM_WARM_UP + NUM_STEPS


def engine_for(stage: Task, longest: int) -> Engine:
    return start(
        stage, MODEL, max_model_len=longest + MAX_OUTPUT + 1, max_num_seqs=4 if stage.is_small else 256,
        max_num_batched_tokens=64 if stage.is_small else 8192, enable_prefix_caching=False,
        num_blocks=64 if stage.is_small else None,
    )  # fmt: skip


def decode_times(engine: Engine, num_seqs: int, prompt_len: int) -> tuple[list[float], float]:
    """(seconds of single steps in which all sequences decode, their mean length in those steps)."""
    source = random.Random(num_seqs)
    params = SamplingParams(temperature=0, max_tokens=MAX_OUTPUT, ignore_eos=True)
    vocab_size = engine.spec.vocab_size
    requests = [engine.add_request(random_tokens(prompt_len, vocab_size, source), params) for _ in range(num_seqs)]
    prompts_done = engine.stats().prompt_tokens + num_seqs * prompt_len
    while engine.stats().prompt_tokens < prompts_done:
        engine.step()
    begin_len = engine.stats().num_kv_tokens / num_seqs
    times: list[float] = []
    while len(times) < NUM_WARM_UP + NUM_STEPS and engine.stats().num_requests_running == num_seqs:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    for request in requests:
        engine.abort(request)
    return times[NUM_WARM_UP:], begin_len + len(times) / 2


def rows_of(num_seqs: int, prompt_len: int, times: list[float], limit_s: float) -> list[Row]:
    where = f"decode B={num_seqs} L={prompt_len}"
    return [
        row(f"{where}: step", "ms", [s * 1000 for s in times], MODEL),
        row(f"{where}: output", "tokens/s", [num_seqs / s for s in times], MODEL),
        row(f"{where}: limit", "tokens/s", [num_seqs / limit_s], MODEL),
        row(f"{where}: of the limit", "share", [limit_s / s for s in times], MODEL),
    ]


def run(stage: Task) -> None:
    shapes = TINY if stage.is_small else FULL
    engine = engine_for(stage, max(length for _, length in shapes))
    limits = limits_of(engine)
    numbers = roofline.figures(limits)
    rows: list[Row] = []
    headlines: list[str] = []
    for num_seqs, prompt_len in shapes:
        times, length = decode_times(engine, num_seqs, prompt_len)
        if len(times) < NUM_STEPS // 2:  # a preemption or a failed request took a sequence away
            print(f"B={num_seqs} L={prompt_len}: only {len(times)} steps of all sequences; not counted", flush=True)
            continue
        new = rows_of(num_seqs, prompt_len, times, limits.step_s(num_seqs, length))
        rows += new
        what = f"decode B={num_seqs} L={prompt_len}: {new[1].value:,.0f} tokens/s, {new[3].value:.0%} of the limit"
        print(what, flush=True)
        headlines.append(what)
        least, greatest = (choose(row.value for row in rows if row.unit == "share") for choose in (min, max))
        stage.save(f"{headlines[0]}; of all shapes {least:.0%} to {greatest:.0%}", numbers, rows)


if __name__ == "__main__":
    run(task(parser(__doc__)))
