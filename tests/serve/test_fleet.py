"""Several servers in one process, noise, the plan's clock, and how far a host is behind."""

import statistics
from itertools import pairwise

import pytest

from kvplan.serve.run import ByPort, listen, server
from kvplan.serve.twin import LATE, WINDOW, Lag, Twin, VirtualClock
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.steptime import step_time
from tests.support.serving import api_of, planned, serving, tokenizer, twin

TEXT = "/v1/completions"


def finish_times(noise: float, count: int = 400) -> list[float]:
    """Durations of decode steps of one request, by the plan's clock."""
    clock = VirtualClock()
    backend = Twin(planned(), step_time(planned(), Shares(), None), tokenizer(), clock=clock, noise=noise)
    moments: list[float] = []
    from engine.config import SamplingParams

    params = SamplingParams(max_tokens=count, ignore_eos=True)
    backend.submit([1, 2, 3], params, on_token=lambda _: moments.append(clock.now()))
    while backend.has_unfinished:
        backend.step()
    return [later - before for before, later in pairwise(moments)]


def test_by_the_plans_clock_times_are_the_plans_and_nobody_waits() -> None:
    plain = finish_times(0.0)
    assert plain == pytest.approx(finish_times(0.0), rel=1e-6)  # whatever the machine does meanwhile
    assert max(plain) / min(plain) < 1.1


def test_noise_has_the_spread_that_is_stated() -> None:
    ratios = [a / b for a, b in zip(finish_times(0.2), finish_times(0.0), strict=True)]
    mean, spread = statistics.mean(ratios), statistics.pstdev(ratios)
    error = 0.2 / len(ratios) ** 0.5  # of a mean of so many
    assert abs(mean - 1) < 4 * error
    assert abs(spread - 0.2) < 4 * error


def test_times_on_the_page_are_the_plans() -> None:
    """A step of an 8B model takes milliseconds, of which the virtual clock's requests see all and wait for none."""
    clock = VirtualClock()
    backend = Twin(planned(), step_time(planned(), Shares(), None), tokenizer(), clock=clock)
    from kvplan.serve.worker import Hooks

    hooks = Hooks(backend.delay, now=clock.now, is_virtual=True)
    with serving(backend, hooks=hooks) as running:
        running.post(TEXT, prompt=[1, 2, 3], max_tokens=100, ignore_eos=True)
        whole = running.metric("vllm:e2e_request_latency_seconds_sum")
        between = running.metric("vllm:inter_token_latency_seconds_sum")
    gaps = finish_times(0.0, 100)
    assert between == pytest.approx(sum(gaps), rel=1e-9)
    assert whole > between


def test_a_host_that_falls_behind_is_warned_once() -> None:
    lines: list[str] = []
    lag = Lag(lines.append)
    for _ in range(WINDOW):
        lag.count(late=0.0, planned=0.01)
    assert (lag.factor, lines) == (1.0, [])
    for _ in range(2 * WINDOW):
        lag.count(late=0.01, planned=0.01)
    assert lag.factor == pytest.approx(2.0)
    assert lag.factor > LATE
    assert lines == ["this host falls behind: steps take 2.0 times as long as planned; lower --speed"]


def test_each_port_has_its_own_server() -> None:
    import asyncio
    import http.client
    import json
    import threading

    listeners = [listen("127.0.0.1", 0) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    apis = {port: api_of(twin()) for port in ports}
    running = server(apis, 5)
    assert isinstance(running.config.app, ByPort)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=listeners)))
    thread.start()
    try:
        while not running.started:
            thread.join(0.01)
        for count, port in enumerate(ports):
            for _ in range(count):
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("POST", TEXT, json.dumps({"prompt": [1, 2], "max_tokens": 1}))
                assert connection.getresponse().status == 200
                connection.close()
        prompts = [api.worker.metrics.page().decode() for api in apis.values()]
        totals = [page.partition("vllm:prompt_tokens_total{")[2].split()[1] for page in prompts]
        assert totals == ["0.0", "2.0", "4.0"]
    finally:
        running.should_exit = True
        thread.join()
        for listener in listeners:
            listener.close()
    assert not any(api.worker.is_running for api in apis.values())
