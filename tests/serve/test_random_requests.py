"""A share of the random requests of benchmarks/attacks: none is an error of the server, and it answers as before."""

from benchmarks.attacks.requests import attack
from kvplan.serve.real import cache_config
from kvplan.serve.text import stand_in
from tests.serve.test_server import until
from tests.support.serving import serving, twin
from tests.support.small_engines import engine_for


def test_random_requests_break_nothing() -> None:
    with serving(twin()) as server:
        tally = attack(server.port, count=150, seed=5)
        assert tally.broken == []
        assert server.post("/v1/completions", prompt="Hello world", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert tally.counts["valid"] > 60
    assert 10 < tally.counts["refused"] < 90


def test_random_requests_break_nothing_of_the_engine() -> None:
    engine = engine_for("llama", max_num_batched_tokens=128)
    engine.tokenizer = stand_in(256)
    with serving(engine, cache_config(engine)) as server:
        tally = attack(server.port, count=60, seed=5, vocab=256)
        assert tally.broken == []
        until(lambda: not engine.has_unfinished)
        assert server.post("/v1/completions", prompt="Hello world", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert tally.counts["valid"] > 20
    assert tally.counts["refused"] < 50


def test_a_server_that_is_gone_is_seen() -> None:
    with serving(twin()) as server:
        port = server.port
    tally = attack(port, count=40, seed=5)
    assert len(tally.broken) == 40
    assert any("left" in line for line in tally.broken)
