"""`kvplan simulate` as a user has it: every option, the same numbers in every form, exit codes, and refusals."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.cli.simulate_options import SimulateOptions
from kvplan.simulate.records import percentile
from tests.core.test_light import HEAVY
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture

MODEL = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "16k")
CONV = ("--profile", "azure-2023-conv")
SMALL = (*CONV, "--num-requests", "40")
TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{index * 0.25},{900 + index},{20 + index}\n" for index in range(20)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def read_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def numbers(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every number of a document by its path; lists are left out."""
    for key, child in value.items():
        if isinstance(child, dict):
            yield from numbers(child, f"{before}{key}.")
        elif not isinstance(child, list | str):
            yield f"{before}{key}", child


# --- forms ------------------------------------------------------------------------------------------------------------

KEYS = {
    "name", "requests", "seconds", "steps", "times", "running", "waiting", "kv_usage", "empty_slots", "preemptions",
    "prefix_cache", "tiers", "ttft_saved", "throughput", "slo", "largest",
}  # fmt: skip
OPTIONS = (
    "--slo", "ttft=2s,tpot=50ms,preempt<1%", "--baseline", "contiguous", "--tier", "cpu=64GiB@25GB/s",
    "--tier", "disk=1TiB@2GB/s", "--shared-prefix", "512",
)  # fmt: skip


def test_json_has_every_figure_of_every_variant(run: Run) -> None:
    ran = run("simulate", *MODEL, *SMALL, *OPTIONS, "--format", "json")
    assert ran.code == 0, ran.err
    document = ran.json
    assert document["schema"] == "kvplan/simulation@1"
    assert {"model", "gpu", "num_gpus", "max_model_len", "num_blocks", "block_size", "load", "step_time"} <= set(
        document["inputs"]
    )
    assert [row["name"] for row in document["variants"]] == ["with tiers", "without tiers", "contiguous"]
    for variant in document["variants"]:
        assert set(variant) == KEYS
        assert variant["requests"]["arrived"] == variant["requests"]["finished"] == 40
        assert set(variant["times"]) == {"ttft", "tpot", "queue", "latency"}
        for spread in variant["times"].values():
            assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"]
        assert [target["promise"] for target in variant["slo"]] == ["ttft p99", "tpot p99", "preempted"]
        assert all(target["kept"] == (target["value"] <= target["limit"]) for target in variant["slo"])
        assert variant["largest"]["keeps"] > 0
    tiers, without, contiguous = document["variants"]
    assert [tier["name"] for tier in tiers["tiers"]] == ["cpu", "disk"]
    assert without["tiers"] == contiguous["tiers"] == []
    assert contiguous["prefix_cache"]["looked_up"] == 0
    assert contiguous["empty_slots"] > tiers["empty_slots"]
    assert tiers["prefix_cache"]["hit_tokens"] > 0
    saved = without["times"]["ttft"]["mean"] - tiers["times"]["ttft"]["mean"]
    assert tiers["ttft_saved"] == pytest.approx(saved)


def test_the_json_follows_its_schema(run: Run) -> None:
    schema = run("schema", "simulation").json
    validator = jsonschema.Draft202012Validator(schema)
    for more in ((), ("--slo", "ttft=1ms,preempt=1%"), ("--tier", "cpu=1GiB@25GB/s", "--baseline", "contiguous")):
        document = run("simulate", *MODEL, *SMALL, *more, "--format", "json", "-q").json
        assert [error.message for error in validator.iter_errors(document)] == []
        assert list(validator.iter_errors(document | {"odd": 1}))


def test_csv_has_the_numbers_of_the_json(tmp_path: Path, run: Run) -> None:
    paths = [tmp_path / "out.json", tmp_path / "out.csv"]
    assert run("simulate", *MODEL, *SMALL, *OPTIONS, "--report", paths[0], "--report", paths[1]).code == 0
    document, rows = json.loads(paths[0].read_text()), read_rows(paths[1].read_text())
    for variant in document["variants"]:
        own = {row["metric"]: row["value"] for row in rows if row["variant"] == variant["name"]}
        assert own == {name: "" if value is None else cell(value) for name, value in numbers(variant)}
    assert {row["variant"] for row in rows} == {variant["name"] for variant in document["variants"]}


def cell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_table_and_markdown_have_the_numbers_of_the_json(run: Run) -> None:
    command = ("simulate", *MODEL, *SMALL, "--rate", "3", "--seed", "7")
    (variant,) = run(*command, "--format", "json").json["variants"]
    table, markdown = run(*command).out, run(*command, "--format", "markdown").out
    ttft = [variant["times"]["ttft"][name] for name in ("p50", "p90", "p99")]
    assert all(0.01 <= seconds < 0.9 for seconds in ttft)
    for what in (
        " / ".join(f"{seconds * 1000:.0f} ms" for seconds in ttft),
        f"{variant['running']['mean']:.1f} / {variant['running']['peak']}",
        f"{variant['throughput']['output_tokens_per_s']:,.0f}",
        f"{variant['throughput']['requests_per_s']:.2f}",
        f"{variant['kv_usage']['mean']:.1%} / {variant['kv_usage']['peak']:.1%}",
    ):
        assert what in table
        assert what in markdown


def test_reports_go_to_files_beside_the_table(tmp_path: Path, run: Run) -> None:
    names = [tmp_path / f"out.{ending}" for ending in ("json", "csv", "md")]
    command = ("simulate", *MODEL, *SMALL)
    ran = run(*command, *(word for name in names for word in ("--report", name)))
    assert ran.code == 0, ran.err
    assert "time to first token" in ran.out
    assert json.loads(names[0].read_text()) == run(*command, "--format", "json").json
    assert names[1].read_text() == run(*command, "--format", "csv").out
    assert names[2].read_text() == run(*command, "--format", "markdown").out + "<!-- kvplan -->\n"


def test_the_files_of_requests_and_of_time_hold_what_the_figures_say(trace: Path, tmp_path: Path, run: Run) -> None:
    by_request, over_time = tmp_path / "requests.csv", tmp_path / "timeline.csv"
    ran = run(
        "simulate", *MODEL, "--trace", trace, "--requests", by_request, "--timeline", over_time, "--format", "json"
    )
    (variant,) = ran.json["variants"]
    rows = sorted(read_rows(by_request.read_text()), key=lambda row: int(row["number"]))
    assert [int(row["prompt_tokens"]) for row in rows] == [900 + index for index in range(20)]
    assert [int(row["output_tokens"]) for row in rows] == [20 + index for index in range(20)]
    assert [float(row["arrival_s"]) for row in rows] == [index * 0.25 for index in range(20)]
    waits = [float(row["first_token_s"]) - float(row["arrival_s"]) for row in rows]
    assert variant["times"]["ttft"]["p90"] == sorted(waits)[17]  # 18 of 20
    assert variant["times"]["ttft"]["p99"] == max(waits)
    assert variant["times"]["ttft"]["mean"] == pytest.approx(sum(waits) / 20)
    apart = [(float(row["ended_s"]) - float(row["first_token_s"])) / (int(row["output_tokens"]) - 1) for row in rows]
    assert variant["times"]["tpot"]["p50"] == percentile(apart, 0.5) == sorted(apart)[9]
    assert variant["seconds"] == max(float(row["ended_s"]) for row in rows)
    assert variant["throughput"]["output_tokens_per_s"] == pytest.approx(
        sum(20 + index for index in range(20)) / variant["seconds"]
    )
    stretches = read_rows(over_time.read_text())
    assert sum(int(row["output_tokens"]) for row in stretches) == sum(20 + index for index in range(20))
    assert max(int(row["running_most"]) for row in stretches) == variant["running"]["peak"]
    assert max(int(row["waiting_most"]) for row in stretches) == variant["waiting"]["peak"]
    assert [float(row["start_s"]) for row in stretches[:3]] == [0.0, 0.125, 0.25]


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml")])
def test_a_figure_is_drawn(ending: str, begins: bytes, tmp_path: Path, run: Run) -> None:
    path = tmp_path / f"out.{ending}"
    ran = run("simulate", *MODEL, *SMALL, "--baseline", "contiguous", "--figure", path)
    assert (ran.code, ran.errors) == (0, [])
    assert path.read_bytes().startswith(begins)


def test_a_figure_has_a_line_per_variant_through_its_own_numbers(trace: Path, run: Run, monkeypatch: Any) -> None:
    from kvplan.report import simulate_figures, simulate_text

    seen: list[Any] = []
    plain = simulate_text.shapes

    def spied(answer: Any, *figures: Any) -> Any:
        seen.append(answer)
        return plain(answer, *figures)

    monkeypatch.setattr(simulate_text, "shapes", spied)
    ran = run("simulate", *MODEL, "--trace", trace, "--baseline", "contiguous", "--format", "json")
    requests, pool, first = simulate_figures.panels(seen[0])
    assert (requests.span, first.span) == (None, seen[0].ranges.times["ttft"])
    assert [series.name for series in requests.series] == [
        "paged, running", "paged, waiting", "contiguous, running", "contiguous, waiting",
    ]  # fmt: skip
    for index, variant in enumerate(ran.json["variants"]):
        assert max(share for _, share in pool.series[index].points) <= variant["kv_usage"]["peak"]
        points = first.series[index].points
        assert (len(points), points[-1][1]) == (20, 1.0)
        assert points[17] == (variant["times"]["ttft"]["p90"], 0.9)


# --- what comes -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_another(run: Run) -> None:
    command = ("simulate", *MODEL, *SMALL, "--format", "json", "--seed")
    assert run(*command, "1").out == run(*command, "1").out != run(*command, "2").out


def test_another_rate_squeezes_a_traces_times(trace: Path, tmp_path: Path, run: Run) -> None:
    """19 gaps of 0.25 s are 4 a second; at 8 they are 0.125 s."""
    path = tmp_path / "requests.csv"
    ran = run("simulate", *MODEL, "--trace", trace, "--rate", "8", "--requests", path, "--format", "json")
    assert ran.json["variants"][0]["requests"]["arrival_rate"] == pytest.approx(8.0)
    assert sorted(float(row["arrival_s"]) for row in read_rows(path.read_text())) == [
        index * 0.125 for index in range(20)
    ]


def test_a_trace_without_times_comes_evenly_at_the_rate(tmp_path: Path, run: Run) -> None:
    trace, path = tmp_path / "lengths.csv", tmp_path / "requests.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "100,5\n" * 10)
    assert refused(run("simulate", *MODEL, "--trace", trace)).startswith("--rate is required")
    ran = run("simulate", *MODEL, "--trace", trace, "--rate", "2", "--requests", path)
    assert ran.code == 0, ran.err
    assert sorted(float(row["arrival_s"]) for row in read_rows(path.read_text())) == [index / 2 for index in range(10)]


def test_a_trace_in_which_all_come_at_once_has_no_rate(tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "5,100,5\n" * 10)
    assert refused(run("simulate", *MODEL, "--trace", trace)).startswith("--rate is required")


def test_stated_lengths_and_distributions_are_drawn(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "requests.csv"
    ran = run(
        "simulate", *MODEL, "--prompt-tokens", "uniform:100-200", "--output-tokens", "7", "--rate", "5",
        "--num-requests", "50", "--requests", path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = read_rows(path.read_text())
    assert {int(row["output_tokens"]) for row in rows} == {7}
    prompts = {int(row["prompt_tokens"]) for row in rows}
    assert len(prompts) > 10
    assert 100 <= min(prompts) <= max(prompts) <= 200


def test_a_shared_prefix_is_found_by_all_but_the_first(tmp_path: Path, run: Run) -> None:
    """600 tokens each, 512 of them alike, one by one: 32 blocks of 16 are found by all but one of 40."""
    path = tmp_path / "requests.csv"
    ran = run(
        "simulate", *MODEL, "--prompt-tokens", "600", "--output-tokens", "2", "--rate", "1", "--num-requests", "40",
        "--shared-prefix", "512", "--requests", path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = sorted(read_rows(path.read_text()), key=lambda row: int(row["number"]))
    assert [int(row["cached_tokens"]) for row in rows] == [0] + [512] * 39


@pytest.mark.parametrize(("think", "ramp"), [("0s", "0s"), ("500ms", "2s")])
def test_users_send_when_they_have_their_answers(think: str, ramp: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "requests.csv"
    ran = run(
        "simulate", *MODEL, *SMALL, "--users", "5", "--think", think, "--ramp", ramp, "--requests", path,
        "--format", "json",
    )  # fmt: skip
    (variant,) = ran.json["variants"]
    assert variant["running"]["peak"] + variant["waiting"]["peak"] <= 2 * 5
    assert (variant["requests"]["finished"], variant["requests"]["judged"]) == (40, 35)  # each user's first is not
    rows = read_rows(path.read_text())
    starts, ends = sorted(float(row["arrival_s"]) for row in rows), sorted(float(row["ended_s"]) for row in rows)
    gap = 0.5 if think == "500ms" else 0.0
    assert all(start >= end + gap for start, end in zip(starts[5:], ends, strict=False))


def test_less_of_the_data_sheets_figures_is_slower(run: Run) -> None:
    command = ("simulate", *MODEL, *SMALL, "--format", "json")
    for shares in ("weights=0.3", "kv=20%", "weights=0.3,kv=0.3,flops=0.1"):
        slower = run(*command, "--efficiency", shares).json["variants"][0]
        assert slower["times"]["latency"]["mean"] > run(*command).json["variants"][0]["times"]["latency"]["mean"]


def calibrated(folder: Path, model: str = "llama-3.1-8b", **seconds: float) -> Path:
    """Constants as a run on an H100 80GB leaves them; what is not said takes no time."""
    coefficients = {"step": 0.0, "prompt_token": 0.0, "output_token": 0.0, "kv_byte": 0.0, **seconds}
    content = {
        "schema": "kvplan/calibration@1", "for": {"device": "NVIDIA H100 80GB HBM3"}, "device_total": 85_029_158_912,
        "measured": {"context": 600_000_000, "non_torch": 700_000_000, "cuda_graphs": 5, "allocator_slack": 6},
        "step_time": {"model": model, "seconds": coefficients},
    }  # fmt: skip
    path = folder / "calibration.json"
    path.write_text(json.dumps(content))
    return path


def test_measured_step_times_take_the_place_of_the_roofline(tmp_path: Path, run: Run) -> None:
    """Steps of 10 ms; one request of 100 tokens in and 11 out: 10 ms to the first token, 10 for each of the rest."""
    ran = run(
        "simulate", *MODEL, "--prompt-tokens", "100", "--output-tokens", "11", "--rate", "1", "--num-requests", "5",
        "--calibration", calibrated(tmp_path, step=0.01), "--format", "json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["inputs"]["step_time"].startswith("measured: ")
    times = ran.json["variants"][0]["times"]
    assert times["tpot"]["p50"] == pytest.approx(0.01)
    assert times["ttft"]["p50"] == pytest.approx(0.01)
    assert times["latency"]["p99"] == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama-3-8b", "step": 0.01}, "its step times are of llama-3-8b, not of llama-3.1-8b"),
        ({}, "step_time is 0 for a step"),
        ({"step": -1.0}, "must hold seconds"),
    ],
)
def test_step_times_of_something_else_are_refused(changes: dict[str, Any], says: str, tmp_path: Path, run: Run) -> None:
    assert says in refused(run("simulate", *MODEL, *SMALL, "--calibration", calibrated(tmp_path, **changes)))


def test_smaller_chunks_of_a_tier_hit_at_least_as_often(run: Run) -> None:
    command = ("simulate", *MODEL, *SMALL, "--shared-prefix", "400", "--no-enable-prefix-caching", "--format", "json")
    tier = ("--tier", "cpu=200GiB@25GB/s", "--tier-chunk")
    hits = [run(*command, *tier, size).json["variants"][0]["tiers"][0]["hit_tokens"] for size in ("16", "256")]
    assert hits[0] >= hits[1] > 0
    rows = [line.partition("  ")[0] or "range" for line in run(*command[:-2], *tier, "256").out.splitlines()]
    first = rows.index("time to first token p50 / p90 / p99")
    assert rows[first + 1 : first + 3] == ["range", "time to first token saved, mean"]


# --- promises and exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promise", "flags", "code"),
    [
        ("ttft=10m", (), 0), ("ttft=10m", ("--exit-code",), 0), ("ttft=1ms", (), 0), ("ttft=1ms", ("--exit-code",), 1),
        ("ttft=10m,tpot=1ms", ("--exit-code",), 1),
    ],
)  # fmt: skip
def test_a_broken_promise_is_one_with_exit_code(promise: str, flags: tuple[str, ...], code: int, run: Run) -> None:
    ran = run("simulate", *MODEL, *CONV, "--num-requests", "10", "--slo", promise, *flags)
    assert ran.code == code
    assert ("MISSED" in ran.out) == ("=1ms" in promise)
    assert ran.errors == []


def test_the_largest_rate_keeps_the_promise_and_the_next_breaks_it(run: Run) -> None:
    """Asked again at both ends."""
    command = ("simulate", *MODEL, *SMALL, "--slo", "ttft=200ms", "--format", "json")
    largest = run(*command).json["variants"][0]["largest"]
    assert largest["keeps"] < largest["breaks"] <= largest["keeps"] * 1.02
    for rate, is_kept in ((largest["keeps"], True), (largest["breaks"], False)):
        (promise,) = run(*command, "--rate", f"{rate:.9f}").json["variants"][0]["slo"]
        assert promise["kept"] is is_kept


def test_the_largest_number_of_users_keeps_the_promise_and_one_more_breaks_it(run: Run) -> None:
    command = ("simulate", *MODEL, "--profile", "azure-2023-conv", "--num-requests", "50", "--ramp", "0s",
               "--slo", "tpot=9ms", "--format", "json")  # fmt: skip
    largest = run(*command, "--users", "4").json["variants"][0]["largest"]
    assert largest["breaks"] == largest["keeps"] + 1
    for users, is_kept in ((largest["keeps"], True), (largest["breaks"], False)):
        (promise,) = run(*command, "--users", str(int(users))).json["variants"][0]["slo"]
        assert promise["kept"] is is_kept


def test_a_variant_that_serves_nobody_keeps_no_promise(run: Run) -> None:
    """A pool of 600 blocks, with which 0.20 starts, holds requests, but no reservation of 16,384 tokens."""
    ran = run(
        "simulate", *MODEL, "--prompt-tokens", "100", "--output-tokens", "5", "--rate", "2", "--num-requests", "5",
        "--engine", "vllm@0.20", "--num-gpu-blocks-override", "600", "--baseline", "contiguous", "--slo", "ttft=1s",
        "--format", "json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    paged, contiguous = ran.json["variants"]
    assert (paged["requests"]["failed"], contiguous["requests"]["failed"]) == (0, 5)
    assert (paged["slo"][0]["kept"], contiguous["slo"][0]["kept"]) == (True, False)
    assert contiguous["largest"]["keeps"] is None


@pytest.mark.parametrize(("share", "is_kept"), [("p95", True), ("p99", False)])
def test_a_request_that_is_refused_misses_every_promise(share: str, is_kept: bool, tmp_path: Path, run: Run) -> None:
    """One of 20 is longer than the context: the 19 others keep the 95th percentile, the 99th is the one's."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "arrival_s,prompt_tokens,output_tokens\n0,20000,5\n" + "".join(f"{index},100,5\n" for index in range(19))
    )
    ran = run("simulate", *MODEL, "--trace", trace, "--slo", f"ttft.{share}=1m", "--format", "json")
    assert ran.code == 0, ran.err
    (promise,) = ran.json["variants"][0]["slo"]
    assert promise["kept"] is is_kept
    assert (promise["value"] is None) == (not is_kept)


def test_answers_of_one_token_keep_any_time_per_token(run: Run) -> None:
    ran = run(
        "simulate", *MODEL, "--prompt-tokens", "100", "--output-tokens", "1", "--rate", "1", "--num-requests", "5",
        "--slo", "tpot=1ms", "--format", "json",
    )  # fmt: skip
    assert ran.json["variants"][0]["slo"][0]["kept"] is True


def test_quiet_says_nothing_on_standard_error(trace: Path, run: Run) -> None:
    ran = run("simulate", *MODEL, "--trace", trace, "--quiet")
    assert (ran.code, ran.err) == (0, "")


# --- refusals ---------------------------------------------------------------------------------------------------------

SIZES = ("--prompt-tokens", "100", "--output-tokens", "5", "--rate", "1", "--num-requests", "5")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (MODEL, "workload: missing; give one of --trace"),
        ((*MODEL, *CONV, "--trace", "x.csv"), "--trace and --profile conflict"),
        ((*MODEL, *CONV, "--prompt-tokens", "5"), "--profile and --prompt-tokens conflict"),
        ((*MODEL, "--prompt-tokens", "5", "--rate", "1"), "--prompt-tokens and --output-tokens must be used together"),
        ((*MODEL, "--output-tokens", "5", "--rate", "1"), "--prompt-tokens and --output-tokens must be used together"),
        ((*MODEL, "--prompt-tokens", "5", "--output-tokens", "5"), "--rate is required"),
        ((*MODEL, "--profile", "arxiv-summarization"), "--rate is required"),
        ((*MODEL, "--profile", "\x1b[2J"), "profile '"),
        ((*MODEL, *CONV, "--rate", "0"), "--rate: not requests per second"),
        ((*MODEL, *CONV, "--rate", "1e7"), "--rate: not requests per second"),
        ((*MODEL, *CONV, "--rate", "1", "--users", "5"), "--users: wait for each response"),
        ((*MODEL, *CONV, "--think", "1s"), "--think works only with --users"),
        ((*MODEL, *CONV, "--ramp", "1s"), "--ramp works only with --users"),
        ((*MODEL, *CONV, "--users", "0"), "--users must be at least 1"),
        ((*MODEL, *SMALL, "--users", "40"), "--users 40: there are only 40 requests"),
        ((*MODEL, *SMALL, "--users", "5", "--think", "soon"), "--think: not a duration"),
        ((*MODEL, *CONV, "--seed", "-1"), "--seed: not a whole number"),
        ((*MODEL, *CONV, "--num-requests", "0"), "--num-requests must be at least 1"),
        ((*MODEL, *CONV, "--tier", "cpu"), "--tier 'cpu' is not a tier"),
        ((*MODEL, *CONV, "--tier", "cpu=0GiB@1GB/s"), "--tier must be at least 1"),
        ((*MODEL, *CONV, "--tier", "cpu=1GiB@fast/s"), "--tier: "),
        ((*MODEL, *CONV, "--tier", "c=1GiB@1GB/s", "--tier", "c=2GiB@1GB/s"), "--tier: two tiers have one name"),
        ((*MODEL, *CONV, "--tier-chunk", "16"), "--tier-chunk needs --tier"),
        ((*MODEL, *CONV, "--efficiency", "speed=1"), "--efficiency: 'speed=1' is not understood"),
        ((*MODEL, *CONV, "--efficiency", "kv=0"), "--efficiency must be greater than 0 and at most 1"),
        ((*MODEL, *CONV, "--efficiency", "kv=0.5,kv=0.6"), "--efficiency: 'kv=0.6' is not understood"),
        ((*MODEL, *CONV, "--slo", "fast"), "--slo: 'fast' is not understood"),
        (("llama-3.1-8b", "--ctx", "16k", *CONV), "--gpu: missing"),
        (("llama-3.1-8b", "--gpu", "h100-80g,l40s", "--ctx", "16k", *CONV), "simulate: 2 plans requested"),
        (("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k,16k", *CONV), "simulate: 2 plans requested"),
        ((*MODEL, *CONV, "--pp", "2"), "simulate: --pp cannot be simulated; use --tp"),
        (("llama-3.1-70b", "--gpu", "h100-80g", "--ctx", "16k", *CONV), "simulate: llama-3.1-70b on h100-80g does not"),
        (("llama-3.1-8b", "--gpu-memory", "40GiB", "--ctx", "16k", *CONV), "--gpu custom: its bandwidth"),
        (("deepseek-v4-flash", "--gpu", "b300", "--ctx", "16k", *CONV), "simulate: deepseek-v4-flash: pages of "),
        (("llama-3.2-11b-vision", "--gpu", "b300", "--ctx", "16k", *CONV), "simulate: llama-3.2-11b-vision on b300 "),
        (("llama-3.2-11b-vision", "--gpu", "b300", "--ctx", "16k", "--engine", "vllm@0.10", *CONV),
         "simulate: llama-3.2-11b-vision: "),
        (("mamba-1.4b", "--gpu", "l40s", "--ctx", "2k", *CONV, "--tier", "c=1GiB@1GB/s"), "--tier: mamba-1.4b has rec"),
        ((*MODEL, "--trace", "nowhere.csv"), "nowhere.csv: no such file"),
        ((*MODEL, *CONV, "--figure", "out.pdf"), "--figure"),
        ((*MODEL, *CONV, "--timeline", "out.json"), "--timeline"),
        ((*MODEL, *CONV, "--requests", "out"), "--requests"),
        ((*MODEL, *SIZES[:5], "x"), "--rate: not requests per second"),
        ((*MODEL, "--prompt-tokens", "20k", *SIZES[2:]), "simulate: no request is served: 5 prompts are longer"),
        ((*MODEL, *SIZES, "--num-gpu-blocks-override", "5"), "simulate: llama-3.1-8b on h100-80g does not fit, "),
        (
            (*MODEL, *SIZES, "--num-gpu-blocks-override", "5", "--engine", "vllm@0.20"),
            "simulate: no request is served: 5 requests larger than the pool (5 blocks); use a larger GPU",
        ),
        ((*MODEL, "--prompt-tokens", "0", *SIZES[2:]), "--prompt-tokens must be at least 1"),
        ((*MODEL, *SIZES, "--shared-prefix", "-5"), "--shared-prefix must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused_in_one_line(argv: tuple[str, ...], says: str, run: Run) -> None:
    ran = run("simulate", *argv)
    assert refused(ran).startswith(says), ran.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no rows below the header"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,5\n", "a prompt of 0 tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,0\n", "no request has any output"),
        ("arrival_s,prompt_tokens,output_tokens\nx,5,5\n", "line 2"),
        ("a,b,c\n1,2,3\n", "line 1"),
    ],
)
def test_a_broken_trace_is_refused_with_its_place(content: str, says: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    line = refused(run("simulate", *MODEL, "--trace", path))
    assert line.startswith(f"{path}")
    assert says in line


def test_a_trace_that_says_who_shares_takes_no_shared_prefix(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 1000, "output_length": 5, "hash_ids": [1, %d]}\n'
    path.write_text("".join(row % (index * 1000, index + 2) for index in range(5)))
    assert run("simulate", *MODEL, "--trace", path).code == 0
    assert refused(run("simulate", *MODEL, "--trace", path, "--shared-prefix", "64")).startswith("--shared-prefix: ")


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, run: Run) -> None:
    ran = run("simulate", *MODEL, *SMALL, "--requests", tmp_path / "no" / "such" / "out.csv")
    assert refused(ran, ran.code)
    assert ran.code in (2, 3)


# --- models of every kind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        "gemma-3-4b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "mamba-1.4b", "jamba-1.5-mini",
        "granite-4.0-h-tiny", "qwen3-next-80b-a3b", "falcon-h1-7b", "nemotron-h-8b", "llama-4-scout", "lfm2-1.2b",
    ],
)  # fmt: skip
@pytest.mark.parametrize("flags", [(), ("--enable-prefix-caching", "--shared-prefix", "300")])
def test_models_of_every_kind_of_layer_serve_all_requests(model: str, flags: tuple[str, ...], run: Run) -> None:
    ran = run(
        "simulate", model, "--gpu", "b300", "--ctx", "2k", "--prompt-tokens", "700", "--output-tokens", "40",
        "--rate", "30", "--num-requests", "8", "--baseline", "contiguous", "--format", "json", *flags,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for variant in ran.json["variants"]:
        assert variant["requests"]["finished"] == 8
        assert variant["times"]["ttft"]["p50"] > 0


def test_a_config_of_ones_own_is_simulated(tmp_path: Path, run: Run) -> None:
    ran = run("simulate", config_file(tmp_path / "own"), *MODEL[1:], *SMALL)
    assert ran.code == 0, ran.err


# --- lightness and completeness ---------------------------------------------------------------------------------------

SIMULATE = f"""
import sys
from kvplan.cli.main import main
code = main(["simulate", {", ".join(map(repr, (*MODEL, *SMALL, *OPTIONS)))}, "--quiet"])
print(f"exit code {{code}}; loaded:", *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)
"""


def test_a_simulation_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE, *HEAVY], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr
    assert "time to first token" in done.stdout


def test_every_option_of_simulate_is_used_here() -> None:
    """Of those that estimate does not have."""
    from kvplan.cli.options import PlanOptions

    own = {option.name for option in fields(SimulateOptions)} - {option.name for option in fields(PlanOptions)}
    names = ("simulate/test_cli_simulate", "simulate/test_load", "simulate/test_cli_fleet", "simulate/test_film",
             "simulate/test_trace_events", "simulate/test_drafts", "simulate/test_adapters",
             "core/test_cluster")  # fmt: skip
    text = "".join((Path(__file__).parents[1] / f"{name}.py").read_text("utf-8") for name in names)
    assert {name for name in own if f'"--{name.replace("_", "-")}"' not in text} <= {"color", "force"}


# --- what is said beside the answer -----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_percentile_that_rests_on_few_requests_is_noted(run: Run) -> None:
    """1% of 40 is less than one request, a tenth of 220 is 22."""
    assert "ttft p99 of 40 requests depends on the 1 slowest" in run("simulate", *MODEL, *SMALL, "--slo", "ttft=9s").err
    assert run("simulate", *MODEL, *CONV, "--num-requests", "220", "--slo", "ttft.p90=9s").err == ""


def test_a_search_that_few_requests_do_not_bound_says_so(run: Run) -> None:
    ran = run("simulate", *MODEL, *SMALL, "--slo", "ttft=9999s")
    assert "not found: too few requests" in ran.out


def test_refused_requests_break_a_promise(run: Run) -> None:
    """Of these prompts some are longer than 1,024 tokens, half of the profile's being so."""
    short = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "1k")
    ran = run("simulate", *short, *SMALL, "--slo", "ttft=9999s", "--exit-code", "--format", "json")
    (variant,) = ran.json["variants"]
    assert variant["requests"]["rejected"] > 0
    nothing = {"value": None, "low": None, "high": None, "kept": False, "verdict": "broken"}
    assert variant["slo"] == [{"promise": "ttft p99", "limit": 9999.0, **nothing}]
    assert (ran.code, variant["largest"]["keeps"]) == (1, None)
    first, _, _ = run("simulate", *short, *SMALL).out.partition("\n")
    rejected, total = variant["requests"]["rejected"], variant["requests"]["arrived"]
    assert first.endswith(f"; {rejected:,} of {total:,} requests rejected.")


def test_a_figure_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplan.cli.drawing.find_spec", lambda name: None)
    monkeypatch.setattr("kvplan.cli.simulate.planned", lambda options: pytest.fail("it began"))
    assert "matplotlib is not installed" in refused(
        run("simulate", *MODEL, *SMALL, "--figure", str(tmp_path / "f.png")), code=3
    )


def test_a_trace_that_is_shorter_than_asked_for_is_said(run: Run, trace: Path) -> None:
    assert "the trace has only 20; using all" in run("simulate", *MODEL, "--trace", trace, "--num-requests", "50").err


def test_a_prefix_that_leaves_no_prompt_is_refused(run: Run) -> None:
    stated = ("--prompt-tokens", "1000", "--output-tokens", "10", "--rate", "1", "--shared-prefix")
    assert "leaves nothing of prompts of 1,000 tokens" in refused(run("simulate", *MODEL, *stated, "1000"))
    assert run("simulate", *MODEL, *stated, "999", "--num-requests", "5").code == 0


def test_users_who_never_run_together_are_noted_and_the_remedies_help(run: Run) -> None:
    """Eight users join over 60 s by default, and 24 requests of a second each are done before."""
    lengths = ("--prompt-tokens", "500", "--output-tokens", "50")
    words = ("simulate", *MODEL, *lengths, "--users", "8", "--num-requests", "24")
    joining = run(*words, "--format", "json")
    assert (
        "before all 8 users have joined, which takes 1 min 0 s; raise --num-requests, or use --ramp 0s" in joining.err
    )
    assert joining.json["variants"][0]["running"]["peak"] < 8
    together = run(*words, "--ramp", "0s", "--format", "json")
    assert "joined" not in together.err
    assert together.json["variants"][0]["running"]["peak"] == 8
    assert "joined" not in run(*words[:-1], "2000", "--format", "json").err
