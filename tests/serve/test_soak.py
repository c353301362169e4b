"""Clients that come, leave, send nonsense and read slowly: at the end no block, thread or file is left."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvplan.serve.generation import Limits
from kvplan.serve.real import cache_config
from kvplan.serve.text import stand_in
from tests.serve.test_server import CHAT, HELLO, TEXT, leave_open, until
from tests.support.serving import Serving, serving, twin
from tests.support.small_engines import engine_for

CLIENTS = 12


def client(server: Serving, seed: int, num: int, statuses: list[int]) -> None:
    source = random.Random(seed)
    for _ in range(num):
        prompt = [source.randrange(3, 250) for _ in range(source.randint(1, 60))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": source.randint(1, 30), "n": source.randint(1, 3)}
        match source.randrange(5):
            case 0:  # leaves at once, or after some of the answer
                raw = leave_open(server, {**body, "max_tokens": 30, "stream": source.random() < 0.5})
                if source.random() < 0.5:
                    raw.recv(200)
                raw.close()
            case 1:
                server.stream(TEXT, **body)
                statuses.append(200)
            case 2:
                statuses.append(server.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 5})[0])
            case 3:
                statuses.append(server.ask("POST", TEXT, {**body, "prompt": [10**9]})[0])
            case _:
                statuses.append(server.ask("POST", TEXT, body)[0])


def soak(server: Serving, num: int) -> list[int]:
    statuses: list[int] = []
    threads = [threading.Thread(target=client, args=(server, number, num, statuses)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not server.api.worker.jobs and not server.backend.scheduler.has_unfinished)
    return statuses


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.mark.parametrize("kind", ["twin", "engine"])
@pytest.mark.parametrize("num", [3, pytest.param(40, marks=pytest.mark.full)])
def test_nothing_is_left_behind(kind: str, num: int) -> None:
    backend: Any
    if kind == "twin":
        backend = twin(speed=1e4)
    else:
        backend = engine_for("llama", num_blocks=150, max_model_len=120)  # too few blocks for all: some are preempted
        backend.tokenizer = stand_in(256)
    config = None if kind == "twin" else cache_config(backend)
    threads, files = threading.active_count(), open_files()
    with serving(backend, config, limits=Limits(40)) as server:
        statuses = soak(server, num)
        assert set(statuses) <= {200, 400, 503}
        assert statuses.count(200) > 0
        backend.scheduler.check_invariants()
        assert backend.scheduler.num_used_blocks == 0
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.ask("GET", "/health")[0] == 200
        assert server.metric("vllm:request_success_total") > 0
    assert threading.active_count() == threads
    assert open_files() <= files
