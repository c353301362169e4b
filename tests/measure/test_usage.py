"""Two pages of a server -> its workload, beside the truth of workloads that vLLM's own logger counted."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError
from kvplan.measure.server_metrics import MetricsError
from kvplan.measure.usage import Usage, usage
from kvplan.report.rightsize_text import first_line
from tests.support.cli import Run, run
from tests.support.oracle_data import DATA, needs_oracle_data

__all__ = ["run"]
pytest.importorskip("prometheus_client")
ROOT = Path(__file__).resolve().parents[2]
FACTS = [json.loads(text) for text in (ROOT / "tests" / "facts" / "usage_truth.jsonl").read_text().splitlines()]
PAGES = DATA / "metrics2"
# Field -> (figure of the truth, relative error, absolute error) that no workload exceeds; what vLLM counts itself is
# exact, what follows from times by Little's law is not.
FIGURES: dict[str, tuple[str, float, float]] = {
    "mean_prompt": ("mean_prompt_tokens_finished", 1e-9, 0),
    "mean_output": ("mean_output_tokens_finished", 1e-9, 0),
    "output_rate": ("generated_tokens_per_s", 1e-9, 0),
    "preemptions": ("preemptions", 0, 0),
    "prefix_share": ("prefix_hit_rate", 1e-9, 1e-9),
    "arrival_rate": ("request_rate_arrived", 0.1, 0),
    "mean_running": ("running_mean", 0.1, 0),
    "mean_waiting": ("waiting_mean", 0.1, 0.1),
    "time_used": ("busy_fraction", 0.1, 0),
}


def page(figures: dict[str, Any]) -> str:
    """A page with these figures, as vLLM writes it."""
    blocks, size, tokens = figures["pool"]
    config = f'block_size="{size}",num_gpu_blocks="{blocks}",kv_cache_size_tokens="{tokens}"'
    values = [f'{name}{{engine="0"}} {value}' for name, value in figures.items() if name != "pool"]
    return "\n".join([f"vllm:cache_config_info{{{config}}} 1.0", *values]) + "\n"


def check(used: Usage, truth: dict[str, float]) -> None:
    for field, (figure, relative, absolute) in FIGURES.items():
        assert getattr(used, field) == pytest.approx(truth[figure], rel=relative, abs=absolute), field


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_a_workload_is_told_from_two_pages(fact: dict[str, Any]) -> None:
    check(usage(page(fact["first"]), page(fact["second"]), fact["seconds"]), fact["truth"])


def published() -> Iterator[dict[str, Any]]:
    truth = PAGES / "truth.jsonl"
    yield from map(json.loads, truth.read_text().splitlines()) if truth.is_file() else ()


@needs_oracle_data
@pytest.mark.parametrize("fact", list(published()), ids=lambda fact: fact["name"])
def test_a_workload_is_told_from_vllms_own_pages(fact: dict[str, Any]) -> None:
    first, second = ((PAGES / f"{fact['name']}.{number}.txt").read_text() for number in (1, 2))
    used = usage(first, second, None if fact.get("restart_between_scrapes") else fact["interval_s"])
    if used.restarted:
        assert used.mean_prompt == pytest.approx(fact["between_scrapes"]["mean_prompt_tokens_finished"])
        assert used.arrival_rate is None
    else:
        check(used, fact["between_scrapes"])


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_the_pool_in_use_is_told_a_little_low(fact: dict[str, Any]) -> None:
    """Longer requests run longer, which a product of means does not see; no request shares a prefix here but turns."""
    used = usage(page(fact["first"]), page(fact["second"]), fact["seconds"])
    assert used.pool_used is not None
    assert 0.8 < used.pool_used / fact["truth"]["kv_usage_mean"] < 1.02


@pytest.mark.parametrize(("growth", "enough"), [(1.0, "one is enough"), (4.0, "for 4 times the load, one is enough")])
def test_an_idle_server_says_how_much_load_it_has_room_for(growth: float, enough: str) -> None:
    """9 of 1,000 tokens are 0.0099 (x 0.99) to 0.0122 (x 1.22) of nine tenths of the pool: room for 82 to 101 times."""
    fact = FACTS[0]
    used = usage(page(fact["first"]), page(fact["second"]), fact["seconds"])
    idle = replace(used, pool_tokens=1000, held_tokens=9.0, prefix_share=0.0, queue_grows=False, preemptions=0)
    assert first_line(idle, growth) == (
        "The server is mostly idle, with 1% of its KV cache in use; "
        f"{enough}: by memory alone, it has room for 81 to 101 times the load"
    )


def test_counters_that_begin_anew_are_since_the_restart() -> None:
    fact = FACTS[0]
    fresh = fact["first"] | {"vllm:prompt_tokens_created": 1.8e9}
    used = usage(page(fact["second"]), page(fresh), 630.0)
    assert used.restarted
    assert used.ended == round(fact["first"]["vllm:request_prompt_tokens_count"])
    assert (used.seconds, used.arrival_rate, used.mean_running) == (None, None, None)


def test_pages_that_tell_nothing_are_refused() -> None:
    first = page(FACTS[0]["first"])
    with pytest.raises(InvalidInputError, match="no request completed"):
        usage(first, first, 60.0)
    with pytest.raises(MetricsError, match="SGLang"):
        usage("sglang:num_running_reqs 1.0\n", "sglang:num_running_reqs 1.0\n", 60.0)
    with pytest.raises(MetricsError, match="is not on the page"):
        usage("vllm:num_requests_running 1.0\n", "vllm:num_requests_running 1.0\n", 60.0)


PAIR = ("examples/metrics.1.txt", "examples/metrics.2.txt")


def test_the_answer_says_whether_it_keeps_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ran = run("rightsize", *PAIR, "--interval", "630s")
    # 1,550 requests came in 630 s, 1,235 ended.
    assert ran.out.startswith("The server cannot keep up: 2.46 requests/s arrive, 1.96 requests/s are served; 1.26 to")
    document = run("rightsize", *PAIR, "--interval", "630s", "--format", "json", "--growth", "2x").json
    assert document["needed"]["low"] == pytest.approx(2 * 1550 / 1235)
    without = run("rightsize", *PAIR)
    assert "add --interval" in without.out.splitlines()[0]
    assert run("rightsize", *PAIR, "--format", "json").json["needed"] is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "FIRST: missing"),
        (("examples/metrics.1.txt",), "SECOND: missing"),
        (("examples/metrics.1.txt", "examples/metrics.1.txt"), "SECOND is the first page"),
        ((*PAIR, "--growth", "-1"), "--growth"),
        ((*PAIR, "--interval", "x"), "--interval"),
        (("README.md", "examples/metrics.1.txt"), "README.md"),
        (("no-such-file", "examples/metrics.1.txt"), "no-such-file"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    run: Run, words: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ran = run("rightsize", *words)
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert problem in ran.errors[0]
