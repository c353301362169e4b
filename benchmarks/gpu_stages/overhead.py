"""What the host adds to a step of 256 decoding sequences, beyond the device's own time; overlap scheduling on and off.

A model of Qwen3-0.6B's shape: its steps are short, so nothing hides. The device's own time is that of the same steps
launched one behind the other with nobody waiting for a token, which keeps the device busy; the launch of one step,
taken alone, says whether the host could keep up (below the device's time: it could). Rounds take turns.
"""

import random
import time
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_stages.serving import random_tokens, reschedule, start
from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from engine import Engine, SamplingParams
from engine.batch import BatchArrays
from engine.sampler import SampledAhead

MODEL = "qwen3-0.6b"
NUM_SEQS, PROMPT_LEN = 256, 512
NUM_WARM_UP, NUM_STEPS, NUM_REPLAYS = 6, 48, 16
MAX_LAG = 24  # steps that the first sequence decodes before the last one's prompt is through
DEPTHS = {"overlap": 2, "no overlap": 1}  # batches in flight
GOAL_MS = 0.5
Call = tuple[BatchArrays, list[SamplingParams]]


@dataclass(slots=True)
class Times:
    """Milliseconds: of single steps, of the same on the device alone, and of launching one."""

    steps: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """What a step takes beyond the device."""
        return row("", "", self.steps).value - row("", "", self.device).value


def noted_step(engine: Engine) -> Call:
    """Run a step; returns what it gave the device."""
    calls: list[Call] = []
    run = engine.runner.run

    def noted(arrays: BatchArrays, params: list[SamplingParams]) -> SampledAhead:
        calls.append((arrays, params))
        return run(arrays, params)

    engine.runner.run = noted  # type: ignore[method-assign] # for this step
    try:
        engine.step()
    finally:
        engine.runner.run = run  # type: ignore[method-assign]
    (call,) = calls
    return call


def device_ms(engine: Engine, call: Call) -> float:
    """Of one step of several that are launched one behind the other; on a CPU, where nothing runs ahead, the host's."""

    def launch(count: int) -> None:
        for _ in range(count):
            engine.runner.run(*call)

    if engine.device.type == "cpu":
        begin = time.perf_counter()
        launch(NUM_REPLAYS)
        return (time.perf_counter() - begin) * 1000 / NUM_REPLAYS
    start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(engine.device):
        launch(2)  # which the device is still busy with when the clock starts there
        start_event.record()
        launch(NUM_REPLAYS)
        stop_event.record()
    settle(engine.device)
    return start_event.elapsed_time(stop_event) / NUM_REPLAYS


def launch_ms(engine: Engine, call: Call) -> float:
    settle(engine.device)
    begin = time.perf_counter()
    engine.runner.run(*call)
    return (time.perf_counter() - begin) * 1000


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(engine: Engine, num_seqs: int, prompt_len: int, times: Times) -> None:
    """A round: fill the batch, time steps in which all decode, then the first and the last of them alone.

    Contexts grow by a token per step, so the mean of the two is what the steps between them take on average.
    """
    source = random.Random(prompt_len)
    params = SamplingParams(temperature=0, max_tokens=MAX_LAG + NUM_WARM_UP + NUM_STEPS + 8, ignore_eos=True)
    vocab_size, before = engine.spec.vocab_size, engine.stats().prompt_tokens
    requests = [engine.add_request(random_tokens(prompt_len, vocab_size, source), params) for _ in range(num_seqs)]
    while engine.stats().prompt_tokens < before + num_seqs * prompt_len:
        engine.step()
    for _ in range(NUM_WARM_UP):
        engine.step()
    ends = [noted_step(engine)]
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        engine.step()
        times.steps.append((time.perf_counter() - begin) * 1000)
    ends.append(noted_step(engine))
    if engine.stats().num_requests_running != num_seqs:
        raise SystemExit("overhead: a sequence ended before the others")
    for request in requests:
        engine.abort(request)
    times.device.append(sum(device_ms(engine, call) for call in ends) / 2)
    times.launch += [launch_ms(engine, call) for call in ends]


def rows_of(times_by_depth: dict[str, Times], num_seqs: int) -> list[Row]:
    return [
        line
        for name, times in times_by_depth.items()
        if times.steps
        for line in (
            row(f"B={num_seqs}, {name}: step", "ms", times.steps, MODEL),
            row(f"B={num_seqs}, {name}: on the device alone", "ms", times.device, MODEL),
            row(f"B={num_seqs}, {name}: launch of one", "ms", times.launch, MODEL),
            row(f"B={num_seqs}, {name}: added by the host", "ms", [times.added], MODEL),
        )
    ]


def headline(times_by_depth: dict[str, Times]) -> str:
    """The goal is about steps with overlap; those without are told beside it."""
    parts = [
        f"{name}: {times.added:.2f} ms a step beyond the device's {row('', '', times.device).value:.2f}"
        + ("" if row("", "", times.launch).value < row("", "", times.device).value else " (the host bounds both)")
        + (f" (goal: at most {GOAL_MS:g})" if name == "overlap" else "")
        for name, times in times_by_depth.items()
        if times.steps
    ]
    return "; ".join(parts)


def run(stage: Task) -> None:
    num_seqs, prompt_len = (3, 20) if stage.is_small else (NUM_SEQS, PROMPT_LEN)
    max_model_len = prompt_len + MAX_LAG + NUM_WARM_UP + NUM_STEPS + 16
    engine = start(
        stage, MODEL, max_model_len=max_model_len, max_num_seqs=num_seqs, enable_prefix_caching=False,
        max_num_batched_tokens=64 if stage.is_small else 16_384, num_blocks=1 + num_seqs * -(-max_model_len // 16),
        async_scheduling=True,
    )  # fmt: skip
    times_by_depth = {name: Times() for name in DEPTHS}
    for number in range(1 if stage.is_small else 4):
        for name, depth in DEPTHS.items():
            reschedule(engine, batch_queue_depth=depth)
            measure(engine, num_seqs, prompt_len, times_by_depth[name] if number or stage.is_small else Times())
            if number or stage.is_small:  # the first round compiles
                stage.save(
                    headline(times_by_depth),
                    {"added_ms": {k: t.added for k, t in times_by_depth.items() if t.steps}},
                    rows_of(times_by_depth, num_seqs),
                )


if __name__ == "__main__":
    run(task(parser(__doc__)))
