"""/metrics: every name, type, label and bucket is vLLM 0.33's, and the figures are those of the requests that ran."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.measure.server_metrics import log_of_page, server_stats
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.start import cache_config
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.serving import MODEL, Serving, planned, serving, twin

FACTS = Path(__file__).parents[1] / "facts" / "vllm_metrics_0.33.jsonl"


def families(page: str) -> Iterator[dict[str, Any]]:
    """Name, type, labels and buckets of everything a vLLM server's page counts."""
    types = dict(re.findall(r"^# TYPE (vllm:\w+) (\w+)$", page, re.MULTILINE))
    for name, kind in types.items():
        if name.endswith("_created"):
            continue
        sample = rf"^{name}(?:_bucket|_count|_sum)?\{{(.*)\}} " if kind == "histogram" else rf"^{name}\{{(.*)\}} "
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in re.findall(sample, page, re.MULTILINE)]
        buckets = [sample_labels.pop("le") for sample_labels in labels if "le" in sample_labels]
        yield {"name": name, "type": kind, "labels": sorted(set[str]().union(*labels)), "buckets": buckets or None}


def own_page() -> str:
    return ServerMetrics(MODEL, 8192, cache_config(planned())).page().decode()


def check(theirs: list[dict[str, Any]]) -> int:
    """Compare each family that is served; returns how many."""
    known = {row["name"]: row for row in theirs}
    own = list(families(own_page()))
    for row in own:
        expected = known[row["name"]]
        if row["name"] == "vllm:cache_config_info":  # its labels are vLLM's own settings, of which a plan knows some
            assert set(row["labels"]) <= set(expected["labels"])
            row = {**row, "labels": expected["labels"]}
        assert row == expected
    return len(own)


def test_every_family_is_vllms() -> None:
    assert check([json.loads(line) for line in FACTS.read_text().splitlines()]) == 39


@needs_oracle_data
def test_every_family_is_on_the_shared_page() -> None:
    page = (DATA / "metrics_vllm_0.33.0.txt").read_text()
    assert check(list(families(page))) == 39
    facts = [json.loads(line) for line in FACTS.read_text().splitlines()]
    assert [row for row in families(page) if row["name"] in {fact["name"] for fact in facts}] == facts


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Ten requests of 40 prompt tokens and 6 of the answer, in turn; the last nine find 32 cached."""
    with serving(twin()) as running:
        for _ in range(10):
            running.post("/v1/completions", prompt=list(range(100, 140)), max_tokens=6)
        yield running


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens_total", 400),
        ("prompt_tokens_cached_total", 288),
        ("generation_tokens_total", 60),
        ("prefix_cache_queries_total", 400),
        ("prefix_cache_hits_total", 288),
        ("request_success_total", 10),
        ("request_prompt_tokens_count", 10),
        ("request_prompt_tokens_sum", 400),
        ("request_generation_tokens_sum", 60),
        ("request_params_max_tokens_sum", 60),
        ("request_params_n_sum", 10),
        ("request_prefill_kv_computed_tokens_sum", 112),
        ("time_to_first_token_seconds_count", 10),
        ("inter_token_latency_seconds_count", 50),
        ("e2e_request_latency_seconds_count", 10),
        ("iteration_tokens_total_sum", 460),
        ("iteration_tokens_total_count", 60),
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
    ],
)
def test_figures_are_those_of_the_requests(server: Serving, name: str, value: float) -> None:
    assert server.metric(f"vllm:{name}") == value


def test_the_reader_of_metrics_reads_them(server: Serving) -> None:
    stats, log = server_stats(server.metrics()), log_of_page(server.metrics())
    capacity = planned().capacity
    assert (stats.kind, stats.prompt_tokens, stats.generation_tokens, stats.hit_rate) == ("vllm", 400, 60, 0.72)
    assert (stats.num_blocks, stats.block_size, stats.kv_tokens) == (capacity.num_blocks, 16, capacity.tokens)
    assert log.flags["model"] == MODEL
    assert log.text("num_blocks") == str(capacity.num_blocks)
