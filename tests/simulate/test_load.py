"""Loads in the words of benchmarks: how requests come, and a load generator's own command."""

import csv
import json
import math
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from kvplan.core.errors import UsageError
from kvplan.servers.sglang.bench import below
from kvplan.servers.vllm.bench import around
from kvplan.simulate.arrivals import Closed, Process
from kvplan.simulate.generator import options_of
from kvplan.workloads.lengths import parse_lengths
from kvplan.workloads.trace import TraceRequest
from tests.oracles import read_lines
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.client_parsers import READERS

ONCE = ((math.inf, math.inf),)
LLAMA = ("simulate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "-q", "--format", "json")


def times(process: Process, stages: tuple[tuple[float, float], ...], count: int) -> list[float]:
    return list(islice(process.times(stages, 0), count))


def test_constant_gaps_and_stages() -> None:
    """2 a second for 3 s are requests at 0, 0.5, ... 3; then 10 a second."""
    assert times(Process(math.inf), ((2.0, math.inf),), 4) == [0, 0.5, 1, 1.5]
    staged = times(Process(math.inf), ((2.0, 3.0), (10.0, math.inf)), 10)
    assert staged == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 3, 3.1, 3.2, 3.3])
    # 1.5 requests fit into a second at 1.5/s: the half gap that is left takes 0.05 s at 10/s.
    assert times(Process(math.inf), ((1.5, 1.0), (10.0, math.inf)), 3) == pytest.approx([0, 2 / 3, 1.05])


def test_all_at_once() -> None:
    assert times(Process(), ONCE, 5) == [0.0] * 5


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_and_spread(shape: float) -> None:
    """The gamma distribution: mean 1 / rate, standard deviation over mean 1 / sqrt(shape); shape 1 is Poisson."""
    arrivals = times(Process(shape), ((5.0, math.inf),), 40_000)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_a_limit_holds_requests_back() -> None:
    """Two at a time, one due each second, each taking 5 s: the third is sent at 5 s, when the first is answered."""
    arrivals = Closed((TraceRequest(float(second), 10, 10) for second in range(4)), 2, timed=True)
    sent = []
    ends = iter((5.0, 6.0, 10.0, 11.0))
    while arrivals.next_time() is not None:
        sent.append(arrivals.pop()[0])
        if arrivals.next_time() is None:
            arrivals.ended(next(ends))
    assert sent == [0.0, 1.0, 5.0, 6.0]


# --- load generators --------------------------------------------------------------------------------------------------

# Shortest and longest of 400,000 draws by the tools' own functions: get_sampling_params of vllm 0.33.0
# (vllm/benchmarks/datasets/utils.py), compute_random_lens of sglang 0.5.23 (sglang/benchmark/datasets/common.py).
VLLM = [(1000, 0.2, 800, 1200), (1024, 0.0, 1024, 1024), (7, 0.5, 3, 11), (512, 0.9, 51, 973), (333, 0.15, 283, 383)]
SGLANG = [(1024, 0.0, 1, 1024), (1024, 0.8, 819, 1024), (1000, 1.0, 1000, 1000), (7, 0.5, 3, 7), (333, 0.15, 49, 333)]


@pytest.mark.parametrize(("tokens", "ratio", "low", "high"), VLLM)
def test_vllm_draws_lengths_around_the_stated_one(tokens: int, ratio: float, low: int, high: int) -> None:
    assert around(tokens, ratio) == (low, high)


@pytest.mark.parametrize(("tokens", "ratio", "low", "high"), SGLANG)
def test_sglang_draws_lengths_below_the_stated_one(tokens: int, ratio: float, low: int, high: int) -> None:
    assert below(tokens, ratio) == (low, high)


COMMANDS = [
    (
        "vllm bench serve --model m --random-input-len 1000 --random-output-len 200 --random-range-ratio 0.2 "
        "--num-prompts 64 --max-concurrency 16 --goodput ttft:2000 tpot:50 --ignore-eos --port 8001",
        {"model": "m", "prompt_tokens": "uniform:800-1200", "output_tokens": "uniform:160-240", "num_requests": "64",
         "rate": "inf", "max_concurrency": "16", "slo": "ttft=2000ms,tpot=50ms"},
    ),
    (
        "vllm bench serve",  # its defaults
        {"prompt_tokens": "1024", "output_tokens": "128", "num_requests": "1000", "rate": "inf"},
    ),
    (
        "python3 benchmarks/benchmark_serving.py --dataset-name sharegpt --dataset-path x.json --request-rate 4 "
        "--burstiness 0.5 --seed 3",
        {"profile": "sharegpt", "num_requests": "1000", "rate": "4", "arrivals": "gamma:0.5", "seed": "3"},
    ),
    (
        "vllm bench serve --random-prefix-len 100 --random-input-len 200",
        {"prompt_tokens": "300", "output_tokens": "128", "shared_prefix": "100", "num_requests": "1000", "rate": "inf"},
    ),
    (
        "python3 -m sglang.bench_serving --backend sglang --dataset-name random --random-input 1024 "
        "--random-output=512 --random-range-ratio 0.5 --num-prompt 30 --request-rate 8",
        {"prompt_tokens": "uniform:512-1024", "output_tokens": "uniform:256-512", "num_requests": "30", "rate": "8"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options"), COMMANDS)
def test_a_load_generators_command_is_read(command: str, options: dict[str, str]) -> None:
    assert options_of(command) == options


# What the tools' own parsers and samplers made of each command: guidellm 0.8.1 and 0.3.0, aiperf 0.13.0
# (tests/support/client_parsers.py; lengths are shortest, mean and longest of 20,000 draws).
READINGS = read_lines(Path(__file__).parents[1] / "facts" / "load_generators.jsonl")


@pytest.mark.parametrize("row", READINGS, ids=lambda row: f"{row['tool']}-{row['command'][:40]}")
def test_a_command_means_what_its_tool_reads(row: dict[str, Any]) -> None:
    own, options = row["reading"], options_of(row["command"])
    assert float(options["rate"]) == (own["rate"] or math.inf)
    assert options.get("max_concurrency") == (None if own["limit"] is None else str(own["limit"]))
    gaps = options.get("arrivals", "poisson") if own["rate"] else None
    assert gaps == {"gamma:None": "gamma:1"}.get(own["gaps"], own["gaps"])
    count, seconds = own["ends"].get("max_requests"), own["ends"].get("max_duration")
    assert int(options["num_requests"]) == (count or math.ceil(seconds * own["rate"]))
    assert int(options["num_requests"]) <= own.get("entries", math.inf)  # no prompt comes twice
    assert int(options.get("shared_prefix", 0)) == own["prefix"]
    for side in ("prompt", "output"):
        text = options[f"{side}_tokens"]
        lengths = parse_lengths(text if ":" in text else f"const:{text}", 10**6)
        shortest, mean, longest = own[side]
        assert lengths.mean == pytest.approx(mean, rel=0.008)  # four standard errors of 20,000 draws, half a grid step
        assert lengths.points[0][0] <= shortest <= longest <= lengths.longest


@pytest.mark.parametrize("row", READINGS, ids=lambda row: f"{row['tool']}-{row['command'][:40]}")
def test_the_tools_still_read_the_commands_so(row: dict[str, Any]) -> None:
    tool, release = row["tool"].split()
    pytest.importorskip(tool)
    if version(tool) != release:
        pytest.skip(f"{tool} {version(tool)} is installed, not {release}")
    reading = READERS[row["tool"]](row["command"])
    assert json.loads(json.dumps(reading)) == row["reading"]


def test_a_goal_and_a_model_are_read_from_the_tools() -> None:
    options = options_of(
        "aiperf profile -m m --concurrency 2 --osl 9 --goodput 'time_to_first_token:2000 request_latency:9.5'"
    )
    assert (options["model"], options["slo"]) == ("m", "ttft=2000ms,latency=9.5ms")
    options = options_of(
        "guidellm run --backend kind=openai_http,target=x,model=m --profile kind=synchronous --constraint "
        "kind=max_requests,count=3 --data kind=synthetic_text,prompt_tokens=5,output_tokens=5 "
        "--metrics kind=generative,slo.ttft_ms=2000,slo.tpot_ms=50 --seed kind=static,value=3"
    )
    assert (options["model"], options["slo"], options["seed"]) == ("m", "ttft=2000ms,tpot=50ms", "3")


def test_genai_perf_is_read_as_its_source_says() -> None:
    """genai-perf 0.0.16: gaps at a rate are alike; a normal is cut at its end; 550 tokens unless stated."""
    command = "genai-perf profile -m m --request-rate 4 --request-count 90 --output-tokens-mean 20"
    assert options_of(f"{command} --output-tokens-stddev 5 --endpoint-type chat --streaming") == {
        "model": "m", "rate": "4", "arrivals": "constant", "num_requests": "90", "prompt_tokens": "550",
        "output_tokens": "normal:mean=20,stddev=5,min=1",
    }  # fmt: skip


LOAD = "--data prompt_tokens=9,output_tokens=9"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("guidellm benchmark --rate-type sweep --rate 10 " + LOAD, "sweep of guidellm finds its own rates"),
        ("guidellm benchmark --rate-type constant --rate 1,2 --max-requests 5 " + LOAD, "one rate at a time"),
        ("guidellm benchmark --rate-type concurrent --rate 4,8 --max-requests 5 " + LOAD, "one at a time"),
        ("guidellm benchmark --rate-type constant --max-requests 5 " + LOAD, "needs a rate"),
        ("guidellm benchmark --rate-type constant --rate 4 " + LOAD, "--max-requests is missing"),
        ("guidellm benchmark --rate-type concurrent --rate 4 --max-seconds 9 " + LOAD, "depends on the server"),
        ("guidellm benchmark --rate-type constant --rate 4 --max-requests 5 --data dataset.jsonl", "not known here"),
        (
            "guidellm benchmark --rate-type constant --rate 4 --max-requests 5 --data prompt_tokens=9",
            "no output_tokens",
        ),
        (
            "guidellm benchmark --rate-type constant --rate 4 --max-requests 5 --rampup 3 " + LOAD,
            "--rampup of guidellm",
        ),
        ("guidellm run --profile kind=replay --data kind=trace_mooncake,path=x", "finds its own rates"),
        ("guidellm run --profile kind=constant,rate=4,rampup_duration=3 " + LOAD, "rampup_duration"),
        (
            "guidellm run --profile kind=constant,rate=4 --constraint kind=over_saturation " + LOAD,
            "over_saturation cannot be simulated",
        ),
        (
            "guidellm run --profile kind=constant,rate=4 --constraint kind=max_requests,count=9 "
            "--data kind=synthetic_text,prompt_tokens=9,output_tokens=9,turns=3",
            "turns of --data above 1",
        ),
        ("guidellm run --profile constant " + LOAD, "not a list of key=value"),
        ("aiperf profile --concurrency 4 --isl 9", "without --osl"),
        ("aiperf profile --concurrency 4,8 --osl 9", "single number of requests at once"),
        ("aiperf profile --concurrency 4 --osl 9 --benchmark-duration 60", "depends on the server"),
        ("aiperf profile --request-rate 4 --osl 9 --benchmark-duration 60", "its 100 prompts again and again"),
        ("aiperf profile --osl 9 --public-dataset sharegpt", "--public-dataset of aiperf"),
        ("aiperf profile --osl 9 --num-prefix-prompts 4 --prefix-prompt-length 100", "several prefixes"),
        ("aiperf profile --osl 9 --random-range-ratio 0.5", "--random-range-ratio of aiperf"),
        ("aiperf profile -m a,b --osl 9", "several models"),
        ("genai-perf profile -m a --osl 9", "--request-count is missing"),
    ],
)
def test_what_the_clients_send_and_a_simulation_lacks_is_refused_by_name(command: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        options_of(command)


@pytest.mark.parametrize(
    ("text", "mean"), [("normal:mean=30,stddev=20", 30.656), ("truncnormal:mean=100,stddev=60", 106.8)]
)
def test_normal_lengths_are_cut_or_drawn_again(text: str, mean: float) -> None:
    """Cut at 1: 30 P(z > -1.45) + 20 p(1.45) + P(z < -1.45); above 0: 100 + 60 p(5/3) / P(z > -5/3) + 0.5."""
    assert parse_lengths(text, 10**6).mean == pytest.approx(mean, rel=2e-3)


@pytest.mark.parametrize(
    "text",
    ["normal:mean=30", "normal:mean=9,stddev=2,min=20,max=10", "truncnormal:mean=9,stddev=1,min=500", "normal:sigma=3"],
)
def test_a_normal_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="normal"):
        parse_lengths(text, 10**6)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("vllm bench serve --ramp-up-strategy linear", "--ramp-up-strategy"),
        ("vllm bench serve --dataset-name sonnet", "sonnet"),
        ("vllm bench serve --goodput ttfb:3", "ttfb:3"),
        ("vllm bench serve --random-range-ratio x", "x is no share"),
        ("vllm serve m", "no command of a load generator"),
        ("vllm bench serve '", "quotes"),
    ],
)
def test_what_a_simulation_lacks_is_refused_by_name(command: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        options_of(command)


# --- in the command ---------------------------------------------------------------------------------------------------


def test_the_first_wave_counts_and_may_be_all_there_is(run: Run) -> None:
    load = ("--prompt-tokens", "500", "--output-tokens", "20", "--num-requests", "16")
    document = run(*LLAMA, *load, "--max-concurrency", "16").json
    [variant] = document["variants"]
    assert (variant["requests"]["judged"], variant["requests"]["finished"]) == (16, 16)
    assert variant["running"]["peak"] + variant["waiting"]["peak"] >= 16
    at_once = run(*LLAMA, *load, "--rate", "inf").json["variants"][0]
    assert at_once["times"] == variant["times"]  # nobody waits for a slot: the same load
    command = "vllm bench serve --random-input-len 500 --random-output-len 20 --num-prompts 16 --max-concurrency 16"
    assert run(*LLAMA, "--bench-command", command).json["variants"][0]["times"] == variant["times"]
    assert run(*LLAMA, "--from-command", command).json["variants"][0]["times"] == variant["times"]


def test_a_limit_over_a_rate(run: Run) -> None:
    load = ("--prompt-tokens", "500", "--output-tokens", "50", "--num-requests", "80", "--rate", "50")
    limited = run(*LLAMA, *load, "--max-concurrency", "4", "--arrivals", "constant").json["variants"][0]
    assert limited["running"]["peak"] + limited["waiting"]["peak"] <= 8  # never more than 4 at once
    assert not limited["requests"]["queue_grows"]


def test_goodput_counts_requests_that_keep_every_time(run: Run, tmp_path: Path) -> None:
    """Told by the rows of the requests themselves."""
    load = ("--prompt-tokens", "uniform:100-3000", "--output-tokens", "40", "--num-requests", "120", "--rate", "4")
    path = tmp_path / "requests.csv"
    document = run(*LLAMA, *load, "--slo", "ttft=300ms,tpot=25ms", "--requests", path).json["variants"][0]
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    good = sum(
        row["first_token_s"] - row["arrival_s"] <= 0.3 and (row["ended_s"] - row["first_token_s"]) / 39 <= 0.025
        for row in rows
    )
    assert 0 < good < len(rows) == 120
    assert document["requests"]["good"] == good
    assert document["throughput"]["goodput_per_s"] == pytest.approx(good / document["seconds"])


def test_a_queue_that_grows_is_said(run: Run) -> None:
    """An A100 reads some 5 prompts of 1,000 tokens a second with answers of 300; 40 a second come, then 1."""
    load = ("--prompt-tokens", "1000", "--output-tokens", "300")
    many = run(*LLAMA, *load, "--rate", "40", "--num-requests", "400").json
    assert many["variants"][0]["requests"]["queue_grows"]
    assert many["verdict"].startswith("Overloaded: ")
    few = run(*LLAMA, *load, "--rate", "1", "--num-requests", "100").json
    assert not few["variants"][0]["requests"]["queue_grows"]
    assert few["verdict"].startswith("With 1 request/s: TTFT p50 ")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--rate", "2:x"), "--rate"),
        (("--rate", "2:60s,8"), "--rate"),
        (("--rate", "inf", "--arrivals", "constant"), "--arrivals"),
        (("--rate", "2", "--arrivals", "gamma:0"), "gamma:0"),
        (("--users", "4", "--max-concurrency", "4"), "--max-concurrency"),
        (("--max-concurrency", "0"), "--max-concurrency"),
    ],
)
def test_loads_that_make_no_sense_are_refused(run: Run, options: tuple[str, ...], part: str) -> None:
    ran = run(*LLAMA[:-3], "--prompt-tokens", "500", "--output-tokens", "20", *options)
    assert ran.code == 2
    assert part in ran.err
