"""`kvplan simulate --replicas`: what a user reads, and what is refused."""

import csv
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.progress import Progress
from kvplan.core.processes import in_order
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

LLAMA = ("simulate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k", "--profile", "azure-2023-conv")
CONV = (*LLAMA, "--num-requests", "150", "--rate", "9")


def test_the_verdict_comes_first_and_then_a_row_for_each_server(run: Run) -> None:
    done = run(*CONV, "--replicas", "3", "--slo", "ttft=30s")
    lines = done.out.splitlines()
    assert lines[0].startswith("Yes: with 9 requests/s on 3 servers (a100-80g), ttft p99 is")
    assert lines[1].startswith("The range covers ")
    assert [line.split()[:2] for line in lines[5:8]] == [[str(index), "a100-80g"] for index in range(3)]


def test_one_server_behind_a_router_is_that_server(run: Run) -> None:
    alone = json.loads(run(*CONV, "--format", "json").out)["variants"][0]
    fleet = json.loads(run(*CONV, "--replicas", "1", "--format", "json").out)
    assert fleet["schema"] == "kvplan/fleet@1"
    for metric, times in alone["times"].items():
        for name in ("p50", "p90", "p99"):
            assert fleet["fleet"]["times"][metric][name] == times[name]
    assert fleet["fleet"]["steps"] == alone["steps"]
    assert fleet["gpu_hours"] == pytest.approx(alone["seconds"] / 3600)


def test_servers_of_two_kinds_and_a_failure(run: Run) -> None:
    options = ("--pool", "l40s=1", "--fail", "0@5s:5s", "--router", "round-robin", "--format", "json")
    document = json.loads(run(*CONV, "--replicas", "1", *options).out)
    assert [replica["gpu"] for replica in document["replicas"]] == ["a100-80g", "l40s"]
    assert document["sizes"] == [
        {"seconds": 0.0, "servers": 2},
        {"seconds": 5.0, "servers": 1},
        {"seconds": 10.0, "servers": 2},
    ]
    assert document["resent"] > 0
    assert document["fleet"]["requests"]["finished"] == 150


def test_processes_change_nothing_that_is_read(run: Run) -> None:
    options = (
        *CONV,
        "--replicas",
        "2",
        "--pool",
        "l40s=1",
        "--router",
        "random",
        "--slo",
        "ttft=30s",
        "--format",
        "json",
    )
    single, two = (run(*options, "--jobs", jobs) for jobs in ("1", "2"))
    assert single.code == two.code == 0
    assert single.out == two.out


def test_every_request_has_a_row(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    run(*CONV, "--disaggregate", "1P2D", "--link", "50GB/s", "--requests", str(file))
    lines = file.read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, 151))


def test_rows_as_parquet_are_those_as_csv(run: Run, tmp_path: Path) -> None:
    """Read by pyarrow."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for options in ((), ("--replicas", "2")):
        files = [tmp_path / f"{len(options)}.{form}" for form in ("csv", "parquet")]
        for file in files:
            assert run(*CONV, *options, "--requests", str(file)).code == 0
        table = parquet.read_table(files[1]).to_pylist()
        names, *lines = (line.split(",") for line in files[0].read_text().splitlines())
        assert [[str(row[name]) for name in names] for row in table] == lines
        assert len(lines) == 150


@pytest.mark.parametrize("options", [(), ("--replicas", "2")])
def test_an_interrupted_simulation_answers_with_what_is_done(
    run: Run, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: Progress, done: int) -> None:
        if done == 100:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "show", interrupt)
    done = run(*CONV, *options)
    assert done.code == 130
    assert "time to first token" in done.out
    covered = re.search(r"interrupted: the figures cover (\d+) of 150 requests", done.err)
    assert covered is not None
    assert 100 <= int(covered[1]) < 110  # those whose last token is on its way to a user are done, too


def test_interrupted_between_servers_the_answer_names_those_that_are_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(do: Any, shared: Any, tasks: Any, jobs: int, *, name: str) -> Any:
        return in_order(do, shared, tasks, 1, name=name)

    def interrupt(progress: Progress, done: int) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("kvplan.simulate.fleet.in_order", here)
    monkeypatch.setattr(Progress, "show", interrupt)
    done = run(*CONV, "--replicas", "3", "--router", "round-robin", "--jobs", "2")
    assert done.code == 130
    assert done.out.startswith("With 9 requests/s on 1 server (a100-80g)")
    assert "interrupted: the figures cover 50 of 150 requests" in done.err


def test_a_fleets_timeline_has_each_servers_levels(run: Run, tmp_path: Path) -> None:
    """Peaks are those of each server's row, and all tokens are those of the requests."""
    over_time, by_request = tmp_path / "timeline.csv", tmp_path / "requests.csv"
    files = ("--timeline", over_time, "--requests", by_request)
    replicas = run(*CONV, "--replicas", "2", *files, "--format", "json").json["replicas"]
    rows = list(csv.DictReader(over_time.read_text().splitlines()))
    for replica in replicas:
        own = [row for row in rows if row["server"] == str(replica["index"])]
        for level in ("running", "waiting"):
            assert max(int(row[f"{level}_most"]) for row in own) == replica[level]["peak"]
    tokens = [int(row["output_tokens"]) for row in csv.DictReader(by_request.read_text().splitlines())]
    assert sum(int(row["output_tokens"]) for row in rows) == sum(tokens)


def test_a_server_that_failed_goes_on_with_its_number(run: Run, tmp_path: Path) -> None:
    over_time = tmp_path / "timeline.csv"
    run(*CONV, "--replicas", "2", "--fail", "0@5s:2s", "--timeline", over_time)
    own = [row for row in csv.DictReader(over_time.read_text().splitlines()) if row["server"] == "0"]
    busy = [float(row["start_s"]) for row in own if int(row["running_most"])]
    assert not [start for start in busy if 6 < start < 7]  # it ends the step that ran, and starts empty
    assert max(busy) > 7


def test_autoscaling_starts_at_its_least_and_says_who_was_late(run: Run) -> None:
    rule = ("--autoscale", "min=2,max=4,target=1,every=1s,provision=1h")
    ran, stated = run(*CONV, *rule), run(*CONV, *rule, "--replicas", "2")
    assert (ran.code, ran.out) == (0, stated.out)
    assert "note: 2 servers not up before the end; more --num-requests show what they change" in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "random"), "--router needs several servers"),
        (("--replicas", "0"), "--replicas"),
        (("--jobs", "2"), "--jobs needs several servers"),
        (("--replicas", "2", "--jobs", "2"), "--jobs 2: these servers depend on each other"),
        (("--replicas", "2", "--ray", "auto"), "--ray auto: these servers depend on each other"),
        (("--ray", "auto"), "--ray needs several servers"),
        (("--replicas", "2", "--router", "random", "--jobs", "0"), "--jobs"),
        (("--replicas", "2", "--router", "random", "--jobs", "2", "--fail", "0@5s"), "depend on each other"),
        (("--replicas", "2", "--tier", "cpu=1GiB@1GB/s"), "--tier supports only one server"),
        (("--disaggregate", "1P2D"), "--disaggregate and --link must be used together"),
        (
            (
                "--disaggregate",
                "1P2D",
                "--link",
                "1GB/s",
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 3}',
            ),
            "--disaggregate: drafts are not handed over; remove it, or the speculative decoding",
        ),
        (("--disaggregate", "P2D", "--link", "1GB/s"), "--disaggregate 'P2D' is not understood"),
        (("--disaggregate", "1P2D", "--link", "50"), "--link '50' is not a speed"),
        (("--disaggregate", "1P2D", "--link", "1GB/s", "--replicas", "2"), "states the number of servers itself"),
        (("--disaggregate", "1P2D", "--link", "1GB/s", "--shared-prefix", "512"), "cannot be handed over"),
        (("--replicas", "2", "--fail", "2@5s"), "there are servers 0 to 1"),
        (("--replicas", "2", "--fail", "x"), "--fail 'x' is not understood"),
        (("--replicas", "2", "--autoscale", "max=8"), "target is missing"),
        (("--replicas", "9", "--autoscale", "max=8,target=2"), "is not from min=1 to max=8"),
        (("--replicas", "2", "--pool", "l40s"), "--pool 'l40s' is not understood"),
        (("--replicas", "2", "--pool", "nosuch=2"), "nosuch"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(run: Run, options: tuple[str, ...], message: str) -> None:
    done = run(*CONV, *options)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) <= 2
