"""nano-vllm's public workload on a model of Qwen3-0.6B's shape: output tokens per second beside what the device allows.

256 requests at once, prompts and outputs of 100 to 1024 tokens, temperature 0.6, no end token: bench.py of
github.com/GeeeekExplorer/nano-vllm, drawn here from Python's random with its seed and in its order, so that the totals
are its totals. The limit (roofline.py) has all of them running from the start. Rounds with and without overlap
scheduling take turns; no round can find another's prompts in a cache, which is off.
"""

import random
import time
from typing import Any

from benchmarks.gpu_stages import roofline
from benchmarks.gpu_stages.roofline import limits_of
from benchmarks.gpu_stages.serving import reschedule, start
from benchmarks.gpu_stages.stage import Task, parser, row, task
from benchmarks.throughput import BenchRequest, run_warm_up
from engine import Engine, SamplingParams

MODEL = "qwen3-0.6b"
NUM_REQUESTS, LEAST, MOST, LARGEST_TOKEN, SEED = 256, 100, 1024, 10_000, 0
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 142_827, 133_966  # of the workload as published
DEPTHS = (2, 1, 2, 1, 2)  # batches in flight, round by round: 2 is overlap scheduling


def workload() -> list[BenchRequest]:
    """The requests as nano-vllm draws them; raises AssertionError where Python's random draws others."""
    source = random.Random(SEED)
    prompts = [
        [source.randint(0, LARGEST_TOKEN) for _ in range(source.randint(LEAST, MOST))] for _ in range(NUM_REQUESTS)
    ]
    mix = [BenchRequest(prompt, source.randint(LEAST, MOST)) for prompt in prompts]
    totals = sum(len(request.prompt) for request in mix), sum(request.output_len for request in mix)
    assert totals == (NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS), f"nano-vllm: {totals} tokens in and out"
    return mix


def smaller(mix: list[BenchRequest], vocab_size: int) -> list[BenchRequest]:
    """For a CPU: the first six, a sixteenth as long."""
    return [
        BenchRequest([token % vocab_size for token in request.prompt[::16]], request.output_len // 16)
        for request in mix[:6]
    ]


def serve(engine: Engine, mix: list[BenchRequest]) -> float:
    """Seconds from the first submission to the last token; raises SystemExit where a request fails."""
    params = [SamplingParams(temperature=0.6, max_tokens=request.output_len, ignore_eos=True) for request in mix]
    begin = time.perf_counter()
    outputs = engine.generate([request.prompt for request in mix], params)
    seconds = time.perf_counter() - begin
    for output, request in zip(outputs, mix, strict=True):
        if output.error is not None or len(output.token_ids) != request.output_len:
            raise SystemExit(f"nano-vllm: {output.error or 'a request ended early'}")
    return seconds


def run(stage: Task) -> None:
    engine = start(
        stage, MODEL, max_model_len=2 * MOST, max_num_seqs=4 if stage.is_small else NUM_REQUESTS,
        max_num_batched_tokens=64 if stage.is_small else 16_384, enable_prefix_caching=False,
        num_blocks=200 if stage.is_small else None, async_scheduling=True,
    )  # fmt: skip
    mix = smaller(workload(), engine.spec.vocab_size) if stage.is_small else workload()
    num_tokens = sum(request.output_len for request in mix)
    limits = limits_of(engine)
    limit = num_tokens / limits.batch_s([(len(request.prompt), request.output_len) for request in mix])
    numbers = {**roofline.figures(limits), "limit": limit, "seconds": {"overlap": [], "none": []}}
    serve(engine, [BenchRequest(request.prompt, 3) for request in mix])  # compiles
    run_warm_up(engine, mix)
    for depth in DEPTHS[:2] if stage.is_small else DEPTHS:
        reschedule(engine, batch_queue_depth=depth)
        numbers["seconds"]["overlap" if depth > 1 else "none"].append(serve(engine, mix))
        save(stage, numbers, num_tokens)


def save(stage: Task, numbers: dict[str, Any], num_tokens: int) -> None:
    limit, seconds = numbers["limit"], numbers["seconds"]
    speeds = {name: [num_tokens / s for s in values] for name, values in seconds.items() if values}
    titles = {"overlap": "output", "none": "output, no overlap scheduling"}
    rows = [row(f"nano-vllm: {titles[name]}", "tokens/s", values, MODEL) for name, values in speeds.items()]
    best = rows[0].value
    rows += [
        row("nano-vllm: limit", "tokens/s", [limit], MODEL),
        row("nano-vllm: of the limit", "share", [speed / limit for speed in speeds["overlap"]], MODEL),
    ]
    stage.save(
        f"{best:,.0f} output tokens/s, {best / limit:.0%} of the limit",
        {**numbers, "goals": {"nano-vllm": best, "nano-vllm-share": best / limit}},
        rows,
    )


if __name__ == "__main__":
    run(task(parser(__doc__)))
