"""The twin: the simulator's own steps and times, request by request, and answers that can be repeated."""

import random
from collections.abc import Iterator

import pytest

from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate
from kvplan.serve.twin import Twin
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import Setup
from kvplan.simulate.steptime import step_time
from kvplan.workloads.trace import TraceRequest
from tests.support.serving import planned, twin


class OwnClock:
    """Time that moves only while somebody sleeps."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def sleep_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)


class AllAtOnce:
    """Requests that are all there at the start."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._left: Iterator[TraceRequest] = iter(requests)
        self._next = next(self._left, None)

    def next_time(self) -> float | None:
        return None if self._next is None else 0.0

    def peek(self) -> TraceRequest:
        assert self._next is not None
        return self._next

    def pop(self) -> tuple[float, TraceRequest]:
        assert self._next is not None
        request, self._next = self._next, next(self._left, None)
        return 0.0, request

    def ended(self, moment: float) -> None: ...


def run_dry(backend: Twin) -> list[RequestOutput]:
    outputs = []
    while backend.has_unfinished:
        outputs += backend.step()
    backend.scheduler.check_invariants()
    return outputs


def lengths(num: int, seed: int) -> list[TraceRequest]:
    source = random.Random(seed)
    return [
        TraceRequest(0.0, prompt_tokens=source.randint(1, 3000), output_tokens=source.randint(1, 200))
        for _ in range(num)
    ]


@pytest.mark.parametrize("flags", [{}, {"num_gpu_blocks_override": 700}, {"async_scheduling": False}])
def test_times_are_the_simulators(flags: dict[str, object]) -> None:
    """Two loops over one scheduler, written apart: each request's first token and end come at the same time.

    The twin has a front end of its own and adds the modeled one to its tokens' delivery, so the simulation has none.
    """
    plan, requests = planned(**flags), lengths(60, seed=1)
    setup = Setup(plan, step_time(plan, Shares(), None))
    simulation = setup.simulation(AllAtOnce(requests))
    simulation.arrivals = AllAtOnce(requests)
    simulation.run()
    host = setup.step_time.host
    assert host is not None
    rows = simulation.records
    expected = {row: (rows.first_token[i], rows.ended[i]) for i, row in enumerate(rows.number)}
    clock, first, delays = OwnClock(), dict[str, float](), dict[str, float]()
    backend, ended = twin(plan, speed=1.0, output_tokens=10**6, clock=clock), dict[str, float]()
    begun: dict[str, Request] = {}

    def note(update: TokenUpdate) -> None:
        if update.request_id not in first:
            delay = delays[update.request_id] = backend.delay(begun[update.request_id])
            prompt = requests[int(update.request_id) - 1].prompt_tokens
            assert delay == pytest.approx(host.delay + host.request + host.prompt_token * prompt)
            first[update.request_id] = clock.moment + delays[update.request_id]

    source = random.Random(2)
    for number, request in enumerate(requests, 1):
        tokens = [source.randrange(1000, 100_000) for _ in range(request.prompt_tokens)]
        params = SamplingParams(max_tokens=request.output_tokens)
        begun[str(number)] = backend.submit(tokens, params, request_id=str(number), on_token=note)
    while backend.has_unfinished:
        for output in backend.step():
            ended[output.request_id] = clock.moment + delays[output.request_id]
    assert simulation.scheduler.num_preemptions == backend.scheduler.num_preemptions
    assert (backend.scheduler.num_preemptions > 0) == ("num_gpu_blocks_override" in flags)
    assert set(ended) == set(map(str, expected))
    for number, times in expected.items():
        without = (first[str(number)] - delays[str(number)], ended[str(number)] - delays[str(number)])
        assert without == pytest.approx(times, rel=1e-9)


def test_an_answer_can_be_repeated() -> None:
    outputs = []
    for _ in range(2):
        backend = twin(clock=OwnClock())
        for seed in (None, 1, 2):
            backend.submit([5, 6, 7], SamplingParams(max_tokens=12, seed=seed))
        outputs.append([output.token_ids for output in sorted(run_dry(backend), key=lambda output: output.request_id)])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) > 1, "a seed changes the answer"


def test_an_answer_ends_where_the_server_was_told() -> None:
    backend = twin(output_tokens=7, clock=OwnClock())
    backend.submit([1], SamplingParams(max_tokens=100), request_id="own")
    backend.submit([1], SamplingParams(max_tokens=100, ignore_eos=True), request_id="forced")
    backend.submit([1], SamplingParams(max_tokens=3), request_id="short")
    ended = {output.request_id: (len(output.token_ids), output.finish_reason) for output in run_dry(backend)}
    assert ended == {"own": (7, "stop"), "forced": (100, "length"), "short": (3, "length")}


def test_abort_frees_the_blocks_at_once() -> None:
    backend = twin(clock=OwnClock())
    backend.submit([1] * 1000, SamplingParams(max_tokens=100), request_id="left")
    backend.step()
    assert backend.scheduler.num_used_blocks > 0
    backend.abort("left")
    assert backend.scheduler.num_used_blocks == 0
    assert run_dry(backend) == []


def test_a_shared_prefix_is_found() -> None:
    backend = twin(clock=OwnClock())
    prefix = list(range(1000, 1064))
    for end in (1, 2):
        backend.submit([*prefix, end], SamplingParams(max_tokens=2), request_id=str(end))
        (output,) = run_dry(backend)
        assert output.num_cached_tokens == (0 if end == 1 else 64)


def test_the_twins_modules_load_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, kvplan.cli.serve, kvplan.serve.twin, kvplan.serve.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
