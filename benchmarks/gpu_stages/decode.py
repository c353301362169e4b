"""Decode speed of Llama-3.1-8B with random weights, by batch and length, beside the physical limit.

The limit of a step is set by what it cannot avoid. It reads every weight that takes part (all but the embedding table,
of which it looks up a row per sequence) and multiplies each with the batch, so it takes at least the longer of weight
bytes / bandwidth and 2 * parameters * sequences / matrix rate; and it reads the KV of all sequences, KV bytes /
bandwidth. Both rates are measured here first: a copy's bytes read and written per second, and a large bfloat16 product.
"""

import random
import time
from dataclasses import dataclass

from benchmarks.gpu_stages.stage import Row, Task, parser, row, spec_of, task
from benchmarks.gpu_stages.timing import copy_bandwidths, matmul_rates
from engine import Engine, EngineConfig, SamplingParams

MODEL = "llama-3.1-8b"
FULL = ((64, 2048), (1, 2048), (8, 2048), (32, 2048), (256, 512), (1, 16_384))  # (sequences, prompt tokens)
TINY = ((2, 32), (1, 48))
NUM_WARM_UP, NUM_STEPS = 4, 32
MAX_LAG = 64  # steps that the first sequence decodes before the last one's prompt is through
MAX_OUTPUT = MAX_LAG + NUM_WARM_UP + NUM_STEPS


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decode step must do, and how fast the device is at it.

    weights, kv_per_token  bytes; parameters: weights that take part
    bandwidth, matmul      bytes and floating-point operations per second, measured
    """

    weights: int
    parameters: int
    kv_per_token: int
    bandwidth: float
    matmul: float

    def step_s(self, num_seqs: int, length: float) -> float:
        """Least seconds of a step of so many sequences, each of so many tokens."""
        in_layers = max(self.weights / self.bandwidth, 2 * self.parameters * num_seqs / self.matmul)
        return in_layers + num_seqs * length * self.kv_per_token / self.bandwidth


def limits_of(engine: Engine) -> Limits:
    """From the engine's own tensors; every layer of this model remembers alike, so a block is of all of them."""
    model, memory = engine.runner.model, engine.memory_report()
    unread = 0 if engine.spec.tied else model.embedding.weight.nbytes
    weights = memory.weights - unread
    return Limits(
        weights=weights,
        parameters=weights // model.embedding.weight.itemsize,
        kv_per_token=memory.block_bytes // engine.config.block_size,
        bandwidth=row("", "", copy_bandwidths(engine.device)).value,
        matmul=row("", "", matmul_rates(engine.device)).value,
    )


def start(stage: Task, longest: int) -> Engine:
    config = EngineConfig(
        device=str(stage.device), load_format="dummy", max_model_len=longest + MAX_OUTPUT + 1,
        max_num_seqs=4 if stage.is_small else 256, max_num_batched_tokens=64 if stage.is_small else 8192,
        enable_prefix_caching=False, num_blocks=64 if stage.is_small else None,
    )  # fmt: skip
    return Engine(spec_of(MODEL, is_small=stage.is_small), config)


def decode_times(engine: Engine, num_seqs: int, prompt_len: int) -> tuple[list[float], float]:
    """(seconds of single steps in which all sequences decode, their mean length in those steps)."""
    source = random.Random(num_seqs)
    params = SamplingParams(temperature=0, max_tokens=MAX_OUTPUT, ignore_eos=True)
    requests = [
        engine.add_request([source.randrange(engine.spec.vocab_size) for _ in range(prompt_len)], params)
        for _ in range(num_seqs)
    ]
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
    engine = start(stage, max(length for _, length in shapes))
    limits = limits_of(engine)
    numbers = {
        "weights_read": limits.weights,
        "kv_per_token": limits.kv_per_token,
        "copy_bytes_per_s": limits.bandwidth,
        "matmul_flops": limits.matmul,
    }
    rows: list[Row] = []
    for num_seqs, prompt_len in shapes:
        times, length = decode_times(engine, num_seqs, prompt_len)
        if len(times) < NUM_STEPS // 2:  # a preemption or a failed request took a sequence away
            print(f"B={num_seqs} L={prompt_len}: only {len(times)} steps of all sequences; not counted", flush=True)
            continue
        rows += rows_of(num_seqs, prompt_len, times, limits.step_s(num_seqs, length))
        what = rows[1].metric.removesuffix(": output")
        stage.save(f"{what}: {rows[1].value:,.0f} tokens/s, {rows[3].value:.0%} of the limit", numbers, rows)


if __name__ == "__main__":
    run(task(parser(__doc__)))
