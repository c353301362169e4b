"""Sleep, the prefix cache, adapters, faults and load at run time, as vLLM's own paths answer."""

import json
import threading
from collections.abc import Iterator

import pytest

from kvplan.core.errors import UsageError
from kvplan.serve.admin import forget
from kvplan.serve.faults import faults_of
from tests.support.serving import Gate, Serving, planned, serving, twin

TEXT = "/v1/completions"
PROMPT = list(range(100, 140))


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


def cached(server: Serving) -> int:
    answer = server.post(TEXT, prompt=PROMPT, max_tokens=2)
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_reset_cache_has_nothing(server: Serving) -> None:
    assert (cached(server), cached(server)) == (0, 32)
    assert server.post("/reset_prefix_cache") == {"success": True}
    assert cached(server) == 0


def test_blocks_in_use_are_not_forgotten_unless_their_requests_begin_again() -> None:
    backend = twin()
    request = backend.submit(PROMPT)
    backend.step()
    assert not forget(backend.scheduler, preempts=False)
    assert forget(backend.scheduler, preempts=True)
    assert backend.scheduler.blocks.num_cached_blocks == 0
    while backend.has_unfinished:
        backend.step()
    assert (request.seq.finish_reason, request.seq.num_preemptions) == ("length", 1)
    backend.scheduler.check_invariants()


@pytest.mark.parametrize(("level", "states"), [(1, (0, 1, 0)), (2, (0, 0, 1)), (0, (0, 0, 0))])
def test_a_sleeping_server_refuses_until_it_wakes(server: Serving, level: int, states: tuple[int, ...]) -> None:
    assert (cached(server), cached(server)) == (0, 32)
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    assert server.post(f"/sleep?level={level}") == {"status": "sleeping", "level": level}
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    page = server.metrics()
    names = ("awake", "weights_offloaded", "discard_all")
    assert all(f'sleep_state="{name}"}} {state}.0' in page for name, state in zip(names, states, strict=True))
    assert server.refusal(TEXT, {"prompt": [1]})[0] == 503
    assert server.post("/wake_up") == {"status": "awake", "tags": None}
    assert cached(server) == (0 if level else 32)  # from level 1 on, the KV cache is lost


def test_parts_wake_one_after_the_other(server: Serving) -> None:
    server.post("/sleep")
    assert server.post("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert server.post("/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    assert server.refusal("/wake_up?tags=x", {})[0] == server.refusal("/sleep?level=3", {})[0] == 400


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_sleep_ends_or_keeps_what_runs(mode: str) -> None:
    gate = Gate()
    with serving(twin(clock=gate)) as server:
        answers: list[str] = []

        def ask() -> None:
            answers.append(server.post(TEXT, prompt=PROMPT, max_tokens=4)["choices"][0]["finish_reason"])

        client = threading.Thread(target=ask)
        client.start()
        while server.get("/load") != {"server_load": 1}:
            pass
        sleeper = threading.Thread(target=server.post, args=(f"/sleep?mode={mode}",))
        sleeper.start()
        if mode == "abort":
            client.join()
        gate.open()
        sleeper.join()
        server.post("/wake_up")
        client.join()
        assert answers == ["abort" if mode == "abort" else "length"]
        assert server.get("/load") == {"server_load": 0}


def test_adapters_come_and_go() -> None:
    plan = planned(max_loras=2)
    with serving(twin(plan), adapters={}) as server:
        load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        status, text = server.ask("POST", "/v1/load_lora_adapter", load)
        assert (status, text) == (200, b"Success: LoRA adapter 'sql' added successfully.")
        assert [row["id"] for row in server.get("/v1/models")["data"]][1:] == ["sql"]
        assert server.post(TEXT, model="sql", prompt=PROMPT, max_tokens=2)["model"] == "sql"
        assert server.refusal("/v1/load_lora_adapter", load)[0] == 400
        assert server.ask("POST", "/v1/load_lora_adapter", {**load, "load_inplace": True})[0] == 200
        assert server.refusal("/v1/load_lora_adapter", {"lora_name": "x"})[0] == 400
        assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 200
        assert server.refusal("/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 404
        assert server.refusal(TEXT, {"model": "sql", "prompt": [1]})[0] == 404


def test_a_server_without_slots_takes_no_adapter(server: Serving) -> None:
    status, error = server.refusal("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/x"})
    assert (status, error["message"]) == (500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")


def test_shares_of_requests_fail_and_change_at_run_time(server: Serving) -> None:
    assert server.post("/faults", rate_limit=0.25, timeout=0.25) == {"rate_limit": 0.25, "timeout": 0.25}
    codes = [server.ask("POST", TEXT, {"prompt": [1], "max_tokens": 1})[0] for _ in range(40)]
    assert set(codes) == {200, 429, 504}
    server.post("/faults")
    assert json.loads(server.ask("GET", "/faults")[1]) == {}
    assert server.ask("POST", TEXT, {"prompt": [1], "max_tokens": 1})[0] == 200
    assert server.refusal("/faults", {"rate_limit": 2})[0] == server.refusal("/faults", {"x": 0.1})[0] == 400


def test_shares_are_read_as_written() -> None:
    assert faults_of("rate_limit=5%, server_error=0.01").rates == {"rate_limit": 0.05, "server_error": 0.01}
    for text in ("", "x=1%", "rate_limit", "rate_limit=60%,timeout=50%", "rate_limit=500%"):
        with pytest.raises(UsageError):
            faults_of(text)
