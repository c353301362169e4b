"""Clients that come, leave, send nonsense and read slowly: at the end no block, thread or file is left.

KVPLAN_SOAK_S=600 runs the long one for ten minutes per server.
"""

import os
import random
import threading
import time
from collections import Counter
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


SOAK_S = float(os.environ.get("KVPLAN_SOAK_S", "20"))


def client(server: Serving, seed: int, end: float, least: int, statuses: Counter[str]) -> None:
    """Ask at least so many times, and until the end."""
    source = random.Random(seed)
    num_requests = 0
    while num_requests < least or time.monotonic() < end:
        num_requests += 1
        prompt = [source.randrange(3, 250) for _ in range(source.randint(1, 60))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": source.randint(1, 30), "n": source.randint(1, 3)}
        match source.randrange(5):
            case 0:  # leaves at once, or after some of the answer
                raw = leave_open(server, {**body, "max_tokens": 30, "stream": source.random() < 0.5})
                if source.random() < 0.5:
                    raw.recv(200)
                raw.close()
                statuses["left"] += 1
            case 1:
                server.stream(TEXT, **body)
                statuses["200"] += 1
            case 2:
                statuses[str(server.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 5})[0])] += 1
            case 3:
                statuses[str(server.ask("POST", TEXT, {**body, "prompt": [10**9]})[0])] += 1
            case _:
                statuses[str(server.ask("POST", TEXT, body)[0])] += 1


def soak(server: Serving, seconds: float, least: int) -> Counter[str]:
    """How requests ended, by status, and how many clients left."""
    counts, end = [Counter[str]() for _ in range(CLIENTS)], time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(server, number, end, least, counts[number])) for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not server.api.worker.jobs and not server.backend.scheduler.has_unfinished)
    return sum(counts, Counter[str]())


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.mark.parametrize("kind", ["twin", "engine"])
@pytest.mark.parametrize("seconds", [0.0, pytest.param(SOAK_S, marks=pytest.mark.full, id="long")])
def test_nothing_is_left_behind(kind: str, seconds: float) -> None:
    backend: Any
    if kind == "twin":
        backend = twin(speed=1e4)
    else:
        backend = engine_for("llama", num_blocks=150, max_model_len=120)  # too few blocks for all: some are preempted
        backend.tokenizer = stand_in(256)
    config = None if kind == "twin" else cache_config(backend)
    threads, files = threading.active_count(), open_files()
    with serving(backend, config, limits=Limits(40)) as server:
        statuses = soak(server, seconds, 3)
        assert set(statuses) <= {"200", "400", "503", "left"}
        assert statuses["200"] > 0
        backend.scheduler.check_invariants()
        assert backend.scheduler.num_used_blocks == 0
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.ask("GET", "/health")[0] == 200
        assert server.metric("vllm:request_success_total") > 0
    leaks = (backend.scheduler.num_used_blocks, threading.active_count() - threads, open_files() - files)
    print(f"soak of {seconds:g} s on the {kind}: {dict(statuses)}; blocks, threads and files left: {leaks}")
    assert leaks[0] == 0
    assert max(leaks[1:]) <= 0  # threads of an earlier server may have ended meanwhile
