"""Quiet steps run together are the scheduler's own steps: the same times, tokens, blocks and cache events."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import SamplingParams
from engine.request import TokenUpdate
from engine.sequence import Sequence
from kvplan.serve.jobs import Simulated
from kvplan.serve.twin import Twin
from tests.serve.test_twin import OwnClock
from tests.support.serving import planned, twin


class Recorder:
    """What becomes findable and what is forgotten, in order."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def stored(self, seq: Sequence, group: int, numbers: range, findable: list[int], hashes: list[bytes]) -> None:
        tokens = tuple(seq.token_ids[: numbers.stop * 16])
        self.rows.append(("stored", seq.request_id, group, numbers, tuple(findable), tuple(hashes), tokens))

    def removed(self, key: Any) -> None:
        self.rows.append(("removed", key))

    def cleared(self) -> None:
        self.rows.append(("cleared",))


def run(flags: dict[str, Any], seed: int, count_step: Callable[[Twin], None]) -> list[Any]:
    """Everything that can be seen of a twin after each of its steps, with requests that come, end and go."""
    plan, clock, source = planned(**flags), OwnClock(), random.Random(seed)
    backend, events, rows = twin(plan, speed=1.0, output_tokens=60, clock=clock), Recorder(), list[Any]()
    backend.scheduler.blocks.pool.watcher = events

    def note(update: TokenUpdate) -> None:
        rows.append((update.request_id, update.token_id, update.text))

    waiting = [(source.randint(0, 400), number) for number in range(40)]
    for step in range(5000):
        for number in [number for when, number in waiting if when == step]:
            prompt = [source.randrange(1000, 100_000) for _ in range(source.randint(1, 400))]
            params = SamplingParams(
                max_tokens=source.randint(1, 300),
                ignore_eos=source.random() < 0.7,
                stop=("blocks",) if source.random() < 0.1 else (),
            )
            whole = Simulated(is_whole=source.random() < 0.5)
            reader = None if whole.is_whole else note
            backend.submit(prompt, params, request_id=str(number), on_token=reader, simulated=whole)
        if source.random() < 0.01:
            backend.abort(str(source.randrange(40)))
        outputs = backend.step() if backend.has_unfinished else []
        count_step(backend)
        rows.append((clock.moment, [(out.request_id, out.token_ids, out.text, out.finish_reason) for out in outputs]))
        rows += events.rows
        events.rows.clear()
    backend.scheduler.check_invariants()
    return [*rows, backend.scheduler.num_preemptions, backend.scheduler.prefix_cache_stats]


FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"async_scheduling": False},
    {"num_gpu_blocks_override": 90},
    {"max_num_seqs": 3},
    {"enable_prefix_caching": False},
)


@pytest.mark.parametrize("flags", FLAGS)
def test_steps_together_are_the_steps_one_by_one(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[bool] = []
    together = run(flags, 1, lambda backend: quiet.append(backend._stretch is not None))
    assert sum(quiet) > 100, "many steps are quiet"
    monkeypatch.setattr("kvplan.serve.twin.quiet_steps", lambda *_: 0)
    singly = run(flags, 1, lambda backend: quiet.append(backend._stretch is not None))
    assert together == singly
    assert ("num_gpu_blocks_override" in flags) == (singly[-2] > 0), "with few blocks, some give way"
