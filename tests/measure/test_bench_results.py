"""Results of load generators are read as their own sources write them.

The files below were written by hand after: vllm/benchmarks/serve.py (result_json and process_one_metric),
sglang's docs/developer_guide/bench_serving.md and bench_serving.py, guidellm's benchmark/schemas/generative
(GenerativeMetrics, BenchmarkConfig.strategy), aiperf's docs/tutorials/working-with-profile-exports.md and InferenceX's
utils/process_result.py.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError
from kvplan.measure.bench_results import BenchResult, read_results

VLLM: dict[str, Any] = {
    "date": "20261122-120000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
    "model_id": "meta-llama/Llama-3.1-8B", "tokenizer_id": "meta-llama/Llama-3.1-8B", "num_prompts": 160,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 20.5, "completed": 160, "failed": 0,
    "total_input_tokens": 163840, "total_output_tokens": 20480, "request_throughput": 7.8, "request_goodput": None,
    "output_throughput": 999.0, "total_token_throughput": 8991.2, "mean_ttft_ms": 80.5, "median_ttft_ms": 61.0,
    "std_ttft_ms": 30.0, "p99_ttft_ms": 240.0, "mean_tpot_ms": 9.5, "median_tpot_ms": 9.1, "std_tpot_ms": 0.4,
    "p99_tpot_ms": 10.9, "mean_itl_ms": 9.4, "median_itl_ms": 8.7, "p99_itl_ms": 40.0,
}  # fmt: skip
SGLANG: dict[str, Any] = {
    "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": None,
    "sharegpt_output_len": None, "random_input_len": 1024, "random_output_len": 128, "random_range_ratio": 1.0,
    "duration": 50.0, "completed": 200, "total_input_tokens": 204800, "total_output_tokens": 25600,
    "total_output_tokens_retokenized": 25590, "request_throughput": 4.0, "input_throughput": 4096.0,
    "output_throughput": 512.0, "mean_e2e_latency_ms": 1300.0, "median_e2e_latency_ms": 1290.0, "mean_ttft_ms": 70.0,
    "median_ttft_ms": 66.0, "p99_ttft_ms": 150.0, "mean_tpot_ms": 9.6, "median_tpot_ms": 9.5, "p99_tpot_ms": 12.0,
    "mean_itl_ms": 9.5, "median_itl_ms": 9.0, "concurrency": 5.2, "accept_length": None,
}  # fmt: skip
INFERENCEX: dict[str, Any] = {
    "hw": "h100", "tp": 2, "ep": 1, "dp_attention": "false", "conc": 16, "model": "openai/gpt-oss-120b",
    "framework": "vllm", "precision": "fp4", "tput_per_gpu": 2000.0, "output_tput_per_gpu": 930.0, "isl": 1024,
    "osl": 1024, "mean_ttft": 0.0805, "median_ttft": 0.061, "p99_ttft": 0.24, "mean_tpot": 0.0083,
    "mean_intvty": 120.5, "median_tpot": 0.0082, "median_intvty": 121.9, "p99_tpot": 0.009,
}  # fmt: skip


def spread(mean: float, median: float, p90: float, p99: float) -> dict[str, Any]:
    """A StatusDistributionSummary of guidellm, of what it holds here."""
    return {"successful": {"mean": mean, "median": median, "percentiles": {"p50": median, "p90": p90, "p99": p99}}}


def guidellm(strategy: dict[str, Any], place: str = "config") -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 64, "incomplete": 3, "errored": 0, "total": 67},
        "prompt_token_count": spread(1024, 1024, 1024, 1024), "output_token_count": spread(128, 128, 128, 128),
        "time_to_first_token_ms": spread(80.5, 61.0, 120.0, 240.0),
        "inter_token_latency_ms": spread(9.5, 9.1, 10.0, 10.9),
        "request_latency": spread(1.3, 1.29, 1.4, 1.6), "output_tokens_per_second": spread(999.0, 990.0, 1100.0, 1200),
    }  # fmt: skip
    backend = {"backend": {"model": "meta-llama/Llama-3.1-8B"}} if place == "config" else {}
    part = {"type_": "generative_benchmark", place: {"strategy": strategy, **backend}, "metrics": metrics}
    return {"metadata": {"version": 1}, "args": {"model": "meta-llama/Llama-3.1-8B"}, "benchmarks": [part]}


def aiperf(loadgen: dict[str, Any]) -> dict[str, Any]:
    return {
        "request_throughput": {"unit": "requests/sec", "avg": 7.8},
        "request_latency": {"unit": "ms", "avg": 1300.0, "p50": 1290.0, "p90": 1400.0, "p99": 1600.0, "std": 20.0},
        "time_to_first_token": {"unit": "ms", "avg": 80.5, "p50": 61.0, "p90": 120.0, "p99": 240.0, "min": 40.0},
        "inter_token_latency": {"unit": "ms", "avg": 9.5, "p50": 9.1, "p99": 10.9},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 999.0},
        "output_sequence_length": {"unit": "tokens", "avg": 128.0},
        "request_count": {"unit": "requests", "avg": 160.0}, "total_isl": {"unit": "tokens", "avg": 163840.0},
        "was_cancelled": False, "error_summary": [],
        "input_config": {
            "endpoint": {"model_names": ["meta-llama/Llama-3.1-8B"], "type": "chat", "streaming": True},
            "loadgen": loadgen,
        },
    }  # fmt: skip


def read(folder: Path, *rows: Any) -> list[BenchResult]:
    path = folder / "result.json"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_results(path)


@pytest.mark.parametrize(
    ("row", "tool", "tokens_per_s"),
    [
        (VLLM, "vllm bench serve", 999.0),
        (INFERENCEX, "InferenceX", 2 * 930.0),
        (guidellm({"type_": "concurrent", "streams": 16}), "guidellm", 999.0),
        (guidellm({"type_": "concurrent", "streams": 16}, "args"), "guidellm", 999.0),
        (aiperf({"concurrency": 16, "request_rate_mode": "concurrency_burst"}), "aiperf", 999.0),
    ],
)
def test_sixteen_users_are_read_whatever_measured_them(
    row: dict[str, Any], tool: str, tokens_per_s: float, tmp_path: Path
) -> None:
    (result,) = read(tmp_path, row)
    assert (result.tool, result.users, result.rate) == (tool, 16, None)
    assert result.stated("ttft") == ("p50", result.times["ttft_p50"])
    assert result.times["ttft_p50"] == pytest.approx(61.0)
    assert result.times["ttft_mean"] == pytest.approx(80.5)
    assert result.times["ttft_p99"] == pytest.approx(240.0)
    assert result.output_tokens_per_s == tokens_per_s
    assert (result.prompt, result.output) == ((1024, 1024) if tool == "InferenceX" else (1024, 128))
    assert result.model in ("meta-llama/Llama-3.1-8B", "openai/gpt-oss-120b")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every number in a document."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(row))
    target: Any = copy
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return copy


FILES: dict[str, tuple[dict[str, Any], int]] = {  # and how many of the numbers are read
    "vllm": ({**VLLM, "input_lens": [9, 8], "output_lens": [3, 2]}, 17),
    "sglang": (SGLANG, 13),
    "inferencex": (INFERENCEX, 11),
    "guidellm": (guidellm({"type_": "concurrent", "streams": 16}), 17),
    "aiperf": (aiperf({"concurrency": 16}), 16),
}


@pytest.mark.parametrize("bad", [math.nan, -1, -0.5, 10**400], ids=["nan", "-1", "-0.5", "huge"])
@pytest.mark.parametrize("tool", FILES)
def test_a_figure_that_cannot_be_is_an_error_that_names_its_row(tool: str, bad: float, tmp_path: Path) -> None:
    row, num_read = FILES[tool]
    (whole,) = read(tmp_path, row)
    refused = []
    for path in leaves(row):
        try:
            assert read(tmp_path, row, changed(row, path, bad)) == [whole, whole]  # no figure that is read
        except InvalidInputError as error:
            refused.append(str(error))
    assert len(refused) == num_read
    assert all(text.startswith(f"{tmp_path / 'result.json'}, row 2: ") for text in refused)


def test_the_error_of_a_figure_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"result.json: ttft_p50 is -1; leave that run out"):
        read(tmp_path, {**VLLM, "median_ttft_ms": -1})
    with pytest.raises(InvalidInputError, match=r"result.json: tpot_mean is infinite"):
        read(tmp_path, {**VLLM, "mean_tpot_ms": math.inf})
    two = guidellm({"type_": "concurrent", "streams": 16})
    bad = changed(two, ("benchmarks", 0, "metrics", "request_latency", "successful", "mean"), math.nan)
    with pytest.raises(InvalidInputError, match=r"result.json, benchmark 2: request_latency mean is nan"):
        read(tmp_path, {**two, "benchmarks": [*two["benchmarks"], *bad["benchmarks"]]})


def test_sglang_is_told_from_vllm_by_its_own_fields(tmp_path: Path) -> None:
    """sglang.bench_serving names the whole request e2e_latency, and appends one object a line."""
    first, second = read(tmp_path, SGLANG, {**SGLANG, "request_rate": math.inf, "median_ttft_ms": 99.0})
    assert (first.tool, first.users, first.rate, first.model) == ("sglang.bench_serving", None, 4.0, None)
    assert (first.times["latency_p50"], first.times["tpot_p50"], first.num_prompts) == (1290.0, 9.5, 200)
    assert (second.rate, second.times["ttft_p50"]) == (math.inf, 99.0)


@pytest.mark.parametrize(
    ("row", "users", "rate", "is_constant"),
    [
        ({**VLLM, "max_concurrency": None}, None, math.inf, False),
        ({**VLLM, "max_concurrency": None, "request_rate": 2.5}, None, 2.5, False),
        ({**VLLM, "max_concurrency": None, "request_rate": 2.5, "burstiness": "inf"}, None, 2.5, True),
        (guidellm({"type_": "synchronous"}), 1, None, False),
        (guidellm({"type_": "throughput"}), None, math.inf, False),
        (guidellm({"type_": "constant", "rate": 3.0}), None, 3.0, True),
        (guidellm({"type_": "poisson", "rate": 3.0}), None, 3.0, False),
        (aiperf({"request_rate": 5.0, "request_rate_mode": "constant"}), None, 5.0, True),
    ],
)
def test_how_requests_came_is_read(
    row: dict[str, Any], users: int | None, rate: float | None, is_constant: bool, tmp_path: Path
) -> None:
    (result,) = read(tmp_path, row)
    assert (result.users, result.rate, result.is_constant) == (users, rate, is_constant)


def test_a_detailed_result_holds_the_lengths_of_its_requests(tmp_path: Path) -> None:
    (result,) = read(tmp_path, {**VLLM, "input_lens": [1000, 1048, 9], "output_lens": [100, 156, 0]})
    assert result.lengths == ((1000, 100), (1048, 156))  # one failed


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("no json",), "is not JSON"),
        ((["a"],), "contains no JSON object"),
        (({"a": 1},), "is not in a known result format"),
        (({**VLLM, "completed": 0},), "completed is not a number of requests (0)"),
        (({**VLLM, "request_rate": 4.0},), "has both a rate and a maximum concurrency"),
        (({**VLLM, "max_concurrency": None, "request_rate": None},), "does not state a rate or a concurrency"),
        (({"benchmarks": []},), "contains no result"),
        ((guidellm({"type_": "sweep"}),), "unknown guidellm strategy ('sweep')"),
        (({**INFERENCEX, "tp": "two"},), "tp is not a number of requests ('two')"),
        (({**INFERENCEX, "conc": 0.5},), "conc is not a number of requests (0.5)"),
        (({**VLLM, "max_concurrency": 0.5},), "the concurrency is not a number of requests (0.5)"),
        (({**VLLM, "max_concurrency": 16.5},), "the concurrency is not a number of requests (16.5)"),
        (({**VLLM, "max_concurrency": math.inf, "request_rate": None},), "does not state a rate or a concurrency"),
        (({name: "fast" if name.endswith("_ms") else value for name, value in VLLM.items()},), "contains no times"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_by_name(rows: tuple[Any, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read(tmp_path, *rows)
    assert says in str(caught.value)
