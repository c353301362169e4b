"""vLLM's first engine: who runs next, step by step as its own scheduler decides it."""

from pathlib import Path
from typing import Any

import pytest

from engine.block_manager import FullGroup
from engine.sequence import Sequence
from kvplan.simulate.arrivals import Open
from kvplan.simulate.loop import ANY_TOKEN, Simulation
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.whole_prompts import NUM_SPARE_BLOCKS, WholePrompts, whole_prompts
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest
from tests.oracles import read_lines
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.step_times import Constant

# Recorded from vLLM 0.7.3's own Scheduler and SelfAttnBlockSpaceManager, run with made-up tokens in place of a model.
# A step: kind (p: prompts, d: decode, -: none), requests ("=": those of the step before), tokens of each prompt, who
# ended, who was preempted, free blocks after it. A request: the step at which it comes, prompt and answer in tokens.
TRACES = read_lines(Path(__file__).parents[1] / "facts" / "first_engine_schedules.jsonl")


def scheduler_of(row: dict[str, Any]) -> WholePrompts:
    config = SimulatedConfig(
        max_num_batched_tokens=row["max_num_batched_tokens"],
        max_num_seqs=row["max_num_seqs"],
        max_model_len=row["max_num_batched_tokens"],
        enable_prefix_caching=False,
    )
    return whole_prompts(config, row["num_blocks"] + 1, (FullGroup(row["block_size"]),))  # one is never given out


@pytest.mark.parametrize("row", TRACES, ids=lambda row: str(row["name"]))
def test_every_step_is_the_first_engines(row: dict[str, Any]) -> None:
    scheduler, before = scheduler_of(row), [-1]
    for number, expected in enumerate(row["steps"]):
        for name, (arrival, prompt_len, max_tokens) in enumerate(row["requests"]):
            if arrival == number:
                scheduler.add(Sequence(str(name), [0] * prompt_len, max_tokens))
        batch = scheduler.schedule()
        names = [int(seq.request_id) for seq in batch.num_tokens]
        is_prefill = bool(batch.new or batch.resumed)
        preempted = sorted(int(seq.request_id) for seq in batch.preempted)
        done = [int(seq.request_id) for seq in scheduler.update(batch, ANY_TOKEN)]
        kind = "-" if not names else "p" if is_prefill else "d"
        same = kind == "d" and names == before
        lengths = list(batch.num_tokens.values()) if is_prefill else []
        step = [kind, "=" if same else names, lengths, done, preempted, scheduler.blocks.num_free_blocks]
        assert step == [*expected[:4], sorted(expected[4]), expected[5]], number
        before = names


def test_the_traces_cover_what_the_scheduler_does() -> None:
    steps = [step for row in TRACES for step in row["steps"]]
    assert sum(len(step[4]) for step in steps) >= 10  # preemptions
    assert sum(len(step[2]) > 1 for step in steps) >= 10  # several prompts in a step


def test_a_prompt_is_a_step_in_which_nobody_decodes(run: Run) -> None:
    """0.7 runs V0: 28,000 tokens of a prompt are one step; 0.8 computes them in fourteen steps, and decodes in them."""
    argv = ["simulate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "30k", "--rate", "0.2", "--num-requests", "8"]
    argv += ["--prompt-tokens", "28000", "--output-tokens", "64", "--format", "json"]
    first, second = (run(*argv, "--engine", engine).json["variants"][0] for engine in ("vllm@0.7", "vllm@0.8"))
    assert first["requests"]["finished"] == second["requests"]["finished"] == 8
    assert first["steps"] < second["steps"]


def test_steps_that_run_together_are_those_that_run_one_by_one() -> None:
    """In a pool that is too small for all: preemptions, and steps that a free block is missing for."""
    plans = [
        Simulation(
            config=SimulatedConfig(max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=1024),
            num_blocks=60,
            groups=(FullGroup(16),),
            reaches=(Reach(None),),
            step_time=Counted(),
            arrivals=Open(TraceRequest(i * 0.2, 50 + 37 * i % 200, 20 + 53 * i % 150) for i in range(40)),
            jump=jump,
            make_scheduler=whole_prompts,
            num_spare_blocks=NUM_SPARE_BLOCKS,
        )
        for jump in (True, False)
    ]
    for plan in plans:
        plan.run()
    together, apart = plans
    assert together.counts.jumped > 0
    assert together.num_preemptions > 0
    assert together.records == apart.records
    assert together.num_preemptions == apart.num_preemptions


class Counted(Constant):
    """A step's time by what is in it."""

    def seconds(self, work: StepWork) -> float:
        return 0.01 + 0.001 * work.num_tokens
