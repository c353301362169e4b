"""A share of the random requests of benchmarks/attacks: none is an error of the server, and it answers as before."""

from benchmarks.attacks.requests import attack
from tests.support.serving import serving, twin


def test_random_requests_break_nothing() -> None:
    with serving(twin()) as server:
        tally = attack(server.port, count=150, seed=5)
        assert tally.broken == []
        assert server.post("/v1/completions", prompt="Hello world", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert tally.counts["valid"] > 60
    assert 10 < tally.counts["refused"] < 90
