"""What the benchmarks' warm-up has compiled before the clock starts."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_stages import serving
from benchmarks.gpu_stages.stage import Task
from benchmarks.throughput import BenchRequest, run_warm_up


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_a_warm_up_has_one_step_of_greedy_and_drawn_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocator: str, is_overlapped: bool
) -> None:
    """One row with top_p among them; in all other steps, as in those that are timed, each row is greedy."""
    torch.set_num_threads(1)
    engine = serving.start(
        Task(tmp_path, torch.device("cpu"), Namespace()), "llama-3.1-8b",
        max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=40, allocator=allocator,
        async_scheduling=is_overlapped,
    )  # fmt: skip
    steps: list[list[tuple[bool, bool]]] = []
    prepare = engine.runner.sampler.prepare

    def noted(seqs: Any, params: Any, *more: Any, **options: Any) -> Any:
        steps.append([(row.temperature == 0, row.top_p < 1) for row in params])
        return prepare(seqs, params, *more, **options)

    monkeypatch.setattr(engine.runner.sampler, "prepare", noted)
    run_warm_up(engine, [BenchRequest([1] * 9, 3), BenchRequest([2] * 17, 3)])
    assert [step for step in steps if not all(is_greedy for is_greedy, _ in step)] == [
        [(True, False), (False, False), (False, True)]
    ]
    assert not engine.has_unfinished


def test_an_engine_for_one_sequence_of_two_tokens_is_warmed_up_all_the_same(tmp_path: Path) -> None:
    engine = serving.start(
        Task(tmp_path, torch.device("cpu"), Namespace()), "llama-3.1-8b",
        max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1, num_blocks=2,
    )  # fmt: skip
    run_warm_up(engine, [BenchRequest([1], 1)])
    assert not engine.has_unfinished
    assert engine.stats().num_requests_running == 0
