"""The scoreboard of time: other people's rows are read, predicted and scored; verdicts are counted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import timeboard
from benchmarks.timing import scores
from benchmarks.timing.bounds import Sample
from benchmarks.timing.facts import Fact, Malformed, read_facts
from benchmarks.timing.kinds import warming
from benchmarks.timing.predict import load_of, requests
from benchmarks.timing.scores import Point
from kvplan.core.errors import UsageError
from kvplan.simulate.coverage import Kind
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).parents[1] / "facts" / "time_cases.csv"
UNSEEN = FACTS.with_name("time_cases_unseen.csv")
ROW: dict[str, Any] = {
    "id": "a", "src": "here", "engine": "vllm", "version": "0.12.0", "model": "llama-3.1-8b", "gpu": "h100-80g",
    "tp": 1, "dtype": "bfloat16", "kv_dtype": "auto", "load": {"users": 2}, "num_prompts": 6, "input_len": 64,
    "output_len": 8, "range": 0.0, "measured": {"tpot_mean": 7.0, "ttft_p50": 20.0, "out_tps": 250.0}, "notes": "",
}  # fmt: skip


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "facts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_row(folder: Path, **changes: Any) -> Fact:
    (row,) = read_facts(written(folder, {**ROW, **changes}))
    assert isinstance(row, Fact), row
    return row


def test_a_row_is_read_in_either_form(tmp_path: Path) -> None:
    table = tmp_path / "facts.csv"
    table.write_text(
        "id,src,engine,version,model,gpu,tp,dtype,kv_dtype,load.users,num_prompts,input_len,output_len,range,"
        "measured.tpot_mean,measured.ttft_p50,measured.out_tps\n"
        "a,here,vllm,0.12.0,llama-3.1-8b,h100-80g,1,bfloat16,auto,2,6,64,8,0.0,7.0,20.0,250\n"
    )
    (row,) = read_facts(table)
    other = read_row(tmp_path)
    assert isinstance(row, Fact)
    assert (row.users, row.measured, row.lengths, row.tp) == (other.users, other.measured, other.lengths, other.tp)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "is not a JSON object"),
        ({**ROW, "load": {}}, "load must hold users or rate"),
        ({**ROW, "measured": {}}, "nothing is measured"),
        ({**ROW, "measured": {"tpot_mean": "fast"}}, "tpot_mean is not a number (fast)"),
        ({**ROW, "gpu": None}, "gpu is missing"),
        ({**ROW, "input_len": 0}, "input_len is missing or not between 0 and 1e+07 (0)"),
    ],
)
def test_a_row_that_says_too_little_is_named(tmp_path: Path, row: Any, why: str) -> None:
    assert list(read_facts(written(tmp_path, row))) == [Malformed(1, why)]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (0.0, ("fixed", 1.0)), (0.05, ("fixed", 1.0)), (0.8, ("random", 0.8)), ("sharegpt", ("chat", 0.0)),
        ("eos512", ("chat", 512.0)), ("uniform", ("random", 0.0)),
    ],
)  # fmt: skip
def test_lengths_are_drawn_as_the_source_says(tmp_path: Path, stated: Any, expected: tuple[str, float]) -> None:
    row = read_row(tmp_path, range=stated, input_len=1000)
    assert (row.lengths, row.least) == expected
    prompts = [request.prompt_tokens for request in requests(row, 400)]
    match expected:
        case ("fixed", _):
            assert set(prompts) == {1000}
        case ("random", 0.0):  # SGLang's `random`
            assert 1 <= min(prompts) < 50 < 950 < max(prompts) <= 1000
        case ("random", _):  # vLLM's --random-range-ratio of InferenceMAX: from 0.8 of the length up to it
            assert 800 <= min(prompts) < 850 < 950 < max(prompts) <= 1000
        case _:
            assert 800 < sum(prompts) / 400 < 1150


def test_answers_that_are_cut_have_the_published_mean_and_no_tail(tmp_path: Path) -> None:
    row = read_row(tmp_path, range="eos512", output_len=350)
    answers = [request.output_tokens for request in requests(row, 2000)]
    assert max(answers) == 512
    assert sum(answers) / 2000 == pytest.approx(350, rel=0.05)


def test_the_first_wave_of_a_long_run_is_not_judged(tmp_path: Path) -> None:
    """Ten times as many prompts as users: the first wave, where all send at once, is a tenth of what was published."""
    assert load_of(read_row(tmp_path, num_prompts=20)).simulated == (6, 2)
    assert load_of(read_row(tmp_path, num_prompts=2)).simulated == (2, 0)


def test_users_at_once_have_a_limit(tmp_path: Path) -> None:
    users = {"load": {"users": 40_000}, "num_prompts": 10**9}
    with pytest.raises(UsageError, match="had 40,000 users at once, 3 requests of each are simulated"):
        load_of(read_row(tmp_path, **users)).simulated  # noqa: B018 -- it raises


@pytest.mark.parametrize("rate", ["inf", 5.0])
def test_every_request_of_an_open_loop_is_simulated(tmp_path: Path, rate: float | str) -> None:
    """Requests that queue wait longer the more of them come: a part of a run has a shorter time to the first token."""
    assert load_of(read_row(tmp_path, load={"rate": rate}, num_prompts=6000)).simulated == (6000, 0)


def test_a_data_parallel_rank_has_its_share_of_the_load(tmp_path: Path) -> None:
    load = load_of(read_row(tmp_path, dp=4, load={"users": 32}, num_prompts=320))
    assert (load.users, load.num_prompts) == (8, 80)
    assert load_of(read_row(tmp_path, dp=4, load={"rate": 2.0}, num_prompts=320)).rate == 0.5


def test_a_server_is_the_limit_where_it_answers_fewer_than_come(tmp_path: Path) -> None:
    def row(load: dict[str, Any], **measured: float) -> Fact:
        return read_row(tmp_path, load=load, measured={"out_tps": 100.0, **measured})

    assert scores.is_at_load(row({"users": 4}))
    assert scores.is_at_load(row({"rate": "inf"}))
    assert scores.is_at_load(row({"rate": 10.0}, req_s=5.0))
    assert not scores.is_at_load(row({"rate": 10.0}, req_s=9.9))


@pytest.mark.parametrize(
    ("low", "high", "goal", "expected"), [(8, 12, 12, "kept"), (8, 12, 10, "too close"), (8, 12, 7, "broken")]
)
def test_a_verdict_has_three_values(tmp_path: Path, low: float, high: float, goal: float, expected: str) -> None:
    point = Point(read_row(tmp_path), "tpot", 10.0, 9.0, low, high)
    assert scores.verdict(point, goal) == expected


def test_errors_are_medians_of_the_points(tmp_path: Path) -> None:
    """Errors of +10, -20, +40 and -60%: median 30%, by nearest rank 9 in 10 within 60%, bias -5%."""
    row = read_row(tmp_path)
    points = [Point(row, "tpot", p, 100.0, low, 130.0) for p, low in ((110, 90), (80, 70), (140, 120), (40, 110))]
    standing = scores.line(points)
    assert (standing.n, standing.within) == (4, 0.5)
    assert (standing.median, standing.p90, standing.bias) == pytest.approx((0.3, 0.6, -0.05))


def test_a_file_is_scored_and_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {**ROW, "id": "b", "model": "no-such-model"}
    path = written(tmp_path, ROW, odd, {**ROW, "id": "c", "engine": "trtllm"})
    assert timeboard.main([str(path), "--json", str(tmp_path / "board.json")]) == 0
    output = capsys.readouterr().out
    assert "2 results, 3 figures compared, 1 refused, 0 unreadable" in output  # TensorRT-LLM has no plan here
    board = json.loads((tmp_path / "board.json").read_text())
    assert board["summary"]["own"]["tpot"]["n"] == 1
    assert sum(board["goals"].values()) == 4  # one fact of a server kvplan plans, two goals for each time
    first = board["points"][0]
    assert first["low"] <= first["predicted"] <= first["high"]


def test_another_planner_stands_beside_on_the_results_that_both_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, peer = written(tmp_path, ROW, {**ROW, "id": "c"}), tmp_path / "peer.jsonl"
    peer.write_text('{"id": "a", "tpot": 8.4, "ttft": 30.0}\n{"id": "c", "why": "no tables"}\n')
    assert timeboard.main([str(path), "--peer", str(peer)]) == 0
    beside = capsys.readouterr().out.partition("## Beside aiconfigurator 0.12")[2].partition("##")[0]
    assert "1 result of vLLM and SGLang that both answer" in beside
    assert "| aiconfigurator 0.12, all: time per output token | 1 | 20% | 20% | 20% |" in beside  # 8.4 for 7.0 ms
    assert "| aiconfigurator 0.12, all: time to first token | 1 | 50% | 50% | 50% |" in beside


def test_servers_without_a_plan_are_scored_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, ROW, {**ROW, "id": "c", "engine": "trtllm"})
    assert timeboard.main([str(path), "--others"]) == 0
    output = capsys.readouterr().out
    assert "1 results, 3 figures compared, 0 refused" in output
    assert "## Other servers" in output


def test_a_file_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeboard.main([str(written(tmp_path, "{}"))]) == 2
    assert "nothing in it can be scored" in capsys.readouterr().err


@pytest.mark.parametrize(("path", "least"), [(FACTS, 700), (UNSEEN, 95)])
def test_own_facts_have_sources(path: Path, least: int) -> None:
    rows = list(read_facts(path))
    facts = [row for row in rows if isinstance(row, Fact)]
    assert len(facts) == len(rows) >= least
    named = {line.split(",")[0] for line in (FACTS.parent / "time_sources.csv").read_text().splitlines()[1:]}
    assert {fact.src for fact in facts} <= named


@needs_oracle_data
def test_own_facts_are_the_published_ones() -> None:
    published = {row.id: row for row in read_facts(DATA / "serving_benchmarks.jsonl") if isinstance(row, Fact)}
    for row in read_facts(FACTS):
        assert isinstance(row, Fact)
        other = published[row.id]
        assert (row.model, row.gpu, row.tp, row.users, row.rate) == (
            other.model,
            other.gpu,
            other.tp,
            other.users,
            other.rate,
        )
        for metric in ("ttft", "tpot"):
            here, there = row.stated(metric), other.stated(metric)
            assert (here is None) == (there is None)
            assert here is None or there is None or here[1] == pytest.approx(there[1], rel=1e-3)


OWN = Kind("dense", "measured", "vllm")


def sample(*rows: tuple[float, str, Kind, bool]) -> Sample:
    """Results: measured over predicted, the kind of result, that of plan, and whether requests wait."""
    ratios, names, plans, waits = zip(*rows, strict=True)
    parts = [(*plan, str(waiting)) for plan, waiting in zip(plans, waits, strict=True)]
    return Sample(np.array(ratios), np.array(names), np.array(parts))


def spread_of(low: float, high: float, name: str, plan: Kind, *, waits: bool = False) -> list[Any]:
    """101 results of a kind, evenly between two ratios."""
    return [(low + (high - low) * number / 100, name, plan, waits) for number in range(101)]


def test_ranges_of_a_kind_come_from_its_results() -> None:
    """Factors 0.8 to 1.2: nine in ten from 0.82 to 1.18; three in ten below 0.92, 96 in 100 below 1.184."""
    every = sample(*(row for name in "abc" for row in spread_of(0.8, 1.2, name, OWN)))
    assert every.spread(OWN, waits=False) == pytest.approx((0.82, 1.18, 0.92, 1.184), abs=0.01)


def test_a_range_contains_the_prediction() -> None:
    spread = sample((1.3, "a", OWN, False), (1.5, "b", OWN, False)).spread(OWN, waits=False)
    assert (spread.low, spread.breaks) == (1.0, 1.0)


def test_results_of_another_device_count_less_than_those_of_another_server() -> None:
    """A third kind's results, twice as slow, raise the high end more the more alike their plans are."""
    own = [row for name in "ab" for row in spread_of(0.9, 1.1, name, OWN)]

    def high(plan: Kind, *, waits: bool = False) -> float:
        return sample(*own, *spread_of(1.9, 2.1, "c", plan, waits=waits)).spread(OWN, waits=False).high

    other_server, other_device = OWN._replace(server="sglang"), OWN._replace(device="amd")
    assert high(OWN) >= high(other_server) >= high(other_device)
    assert high(other_device) < 1.9 < high(other_server)


def test_a_target_is_decided_by_the_nearest_kind_with_three_kinds_of_results() -> None:
    """Two are too few: the target then is decided by all that share the device and the server."""
    experts = OWN._replace(models="experts")
    rows = [row for name in "ab" for row in spread_of(0.9, 1.1, name, OWN)]
    rows += [row for name in "cd" for row in spread_of(1.9, 2.1, name, experts)]
    assert sample(*rows).spread(OWN, waits=False).keeps > 1.9
    assert sample(*rows, *spread_of(0.9, 1.1, "e", OWN)).spread(OWN, waits=False).keeps < 1.1


def test_a_first_token_that_a_heavier_load_halves_was_not_served_by_a_warm_server(tmp_path: Path) -> None:
    """4 RTX 4090, DeepSeek-R1-Distill-Llama 8B: 6.9, 3.1, 0.2 and 0.15 s at 1, 4, 8 and 16 requests/s (ionet)."""
    served = {1.0: 6942.4, 4.0: 3092.7, 8.0: 209.41, 16.0: 151.57}
    facts = [
        read_row(tmp_path, id=str(rate), load={"rate": rate}, measured={"ttft_p50": first, "tpot_mean": 10.0})
        for rate, first in served.items()
    ]
    assert warming(facts) == {("here", "1.0"), ("here", "4.0")}
    elsewhere = read_row(tmp_path, id="x", gpu="h200", load={"rate": 1.0}, measured={"ttft_p50": 9000.0})
    assert ("here", "x") not in warming([*facts, elsewhere])
