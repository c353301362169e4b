"""What `simulate --trace-events` writes, read back by Perfetto's own trace processor."""

import csv
import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.main import main
from tests.support.cli import Run, refused
from tests.support.cli import run as run
from tests.support.trace_processor import answers, needs_trace_processor

WORDS = (
    "simulate", "qwen3-0.6b", "--gpu", "l40s", "--ctx", "512", "--num-gpu-blocks-override", "60", "--prompt-tokens",
    "100", "--output-tokens", "120", "--rate", "40", "--num-requests", "40", "--baseline", "contiguous", "-q",
)  # fmt: skip
USABLE = 59  # of 60 blocks: block 0 is nobody's
SLICES = """
    select process.name as server, track.name as track, slice.name, slice.ts, slice.dur, slice.depth, slice.arg_set_id
    from slice join process_track as track on slice.track_id = track.id join process using(upid)
    order by slice.ts, slice.depth"""
COUNTERS = """
    select process.name as server, track.name, counter.ts, counter.value
    from counter join process_counter_track as track on counter.track_id = track.id join process using(upid)"""
FIGURES = "select arg_set_id, key, coalesce(int_value, real_value, string_value) as value from args"
FAULTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
THREADS = """
    select process.name as server, thread.name as track, slice.name, slice.ts, slice.dur, slice.depth, slice.arg_set_id
    from slice join thread_track on slice.track_id = thread_track.id join thread using(utid) join process using(upid)
    order by slice.ts, slice.depth"""


@dataclass(frozen=True, slots=True)
class Traced:
    """A run's files: its trace in both formats, its answer, a row of each request."""

    pftrace: Path
    chrome: Path
    variants: dict[str, Any]
    rows: list[dict[str, str]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("traced")
    paths = [folder / name for name in ("events.pftrace", "events.json", "answer.json", "rows.csv")]
    files = ("--report", str(paths[2]), "--requests", str(paths[3]))
    assert main([*WORDS, "--trace-events", str(paths[0]), *files]) == 0
    assert main([*WORDS, "--trace-events", str(paths[1])]) == 0
    variants = {variant["name"]: variant for variant in json.loads(paths[2].read_text())["variants"]}
    return Traced(paths[0], paths[1], variants, list(csv.DictReader(paths[3].read_text().splitlines())))


def ns(seconds: str | float) -> int:
    return round(float(seconds) * 1e9)


@needs_trace_processor
def test_perfetto_reads_the_requests_the_preemptions_and_the_peak(traced: Traced) -> None:
    """The rows of --requests and the answer come from runs that know of no trace."""
    slices, counters, figures, faults = answers(traced.pftrace.read_bytes(), SLICES, COUNTERS, FIGURES, FAULTS)
    assert faults == []
    named: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in figures:
        named[row["arg_set_id"]][row["key"].removeprefix("debug.")] = row["value"]
    for server, variant in traced.variants.items():
        tracks = defaultdict(list)
        for row in slices:
            if row["server"] == server:
                tracks[row["track"]].append(row)
        assert len(tracks) == variant["requests"]["finished"] == 40
        events = Counter(row["name"] for row in slices if row["server"] == server)
        assert events["preempted"] == variant["preemptions"]
        points = [row for row in counters if row["server"] == server]
        peaks: dict[str, float] = defaultdict(float)
        for row in points:
            peaks[row["name"]] = max(peaks[row["name"]], row["value"])
        assert peaks["num_used_blocks"] / USABLE == variant["kv_usage"]["peak"]
        assert peaks["num_requests_running"] == variant["running"]["peak"]
        assert peaks["num_batched_tokens"] <= 2048  # a step's most
        last = {name: [row["value"] for row in points if row["name"] == name][-1] for name in peaks}
        assert last == last | {"num_requests_running": 0, "num_used_blocks": 0, "num_batched_tokens": 0}
        if server == "paged":
            check_requests(traced.rows, tracks, named)
    assert traced.variants["paged"]["preemptions"] > 0


def check_requests(
    rows: list[dict[str, str]], tracks: dict[str, list[dict[str, Any]]], figures: dict[int, dict[str, Any]]
) -> None:
    """Each request's slices are its row."""
    for row in rows:
        whole, *parts = tracks[f"request {row['number']}"]
        assert whole["name"] == f"request {row['number']}"
        assert (whole["ts"], whole["ts"] + whole["dur"]) == (ns(row["arrival_s"]), ns(row["ended_s"]))
        assert figures[whole["arg_set_id"]] == {
            "prompt_tokens": int(row["prompt_tokens"]), "output_tokens": int(row["output_tokens"]),
            "cached_tokens": int(row["cached_tokens"]), "first_token_s": float(row["first_token_s"]),
            "ended_s": float(row["ended_s"]), "finish_reason": "length",
        }  # fmt: skip
        preempted = [part for part in parts if part["name"] == "preempted"]
        assert len(preempted) == int(row["preemptions"])
        phases = [part for part in parts if part["name"] != "preempted"]
        assert next(part["ts"] for part in phases if part["name"] == "prefill") == ns(row["admitted_s"])
        assert Counter(part["name"] for part in phases)["prefill"] == 1 + len(preempted)
        assert {part["depth"] for part in phases} == {1}
        for part, after in pairwise(phases):  # one follows the other
            assert part["ts"] + part["dur"] == after["ts"]
            assert (part["name"], after["name"]) in ORDER


ORDER = {("queued", "prefill"), ("prefill", "decode"), ("prefill", "queued"), ("decode", "queued")}


@pytest.mark.full
@needs_trace_processor
def test_json_says_the_same_to_perfetto(traced: Traced) -> None:
    (own,) = answers(traced.pftrace.read_bytes(), SLICES)
    (other,) = answers(traced.chrome.read_bytes(), THREADS)
    names = ("server", "track", "name", "ts", "dur")
    rows = [sorted(tuple(row[name] for name in names) for row in rows) for rows in (own, other)]
    assert rows[0] == rows[1]


def test_json_counts_requests_and_preemptions_without_any_library(traced: Traced) -> None:
    events = json.loads(traced.chrome.read_text())["traceEvents"]
    servers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(servers.values()) == ["paged", "contiguous"]
    for pid, server in servers.items():
        own = [event for event in events if event["pid"] == pid]
        variant = traced.variants[server]
        assert sum(event["ph"] == "i" for event in own) == variant["preemptions"]
        assert sum(event["ph"] == "X" and event["name"].startswith("request") for event in own) == 40
        used = [event["args"]["value"] for event in own if event["name"] == "num_used_blocks"]
        assert max(used) / USABLE == variant["kv_usage"]["peak"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_trace_may_be_written_again_and_nothing_else_is_overwritten(traced: Traced, run: Run, tmp_path: Path) -> None:
    for path in (traced.pftrace, traced.chrome):
        before = path.read_bytes()
        assert run(*WORDS, "--trace-events", path).code == 0
        assert path.read_bytes() == before
    other = tmp_path / "notes.json"
    other.write_text('{"traceEvents": []}')
    assert "already exists and was not written by kvplan" in refused(run(*WORDS, "--trace-events", other))


def test_what_cannot_be_traced_is_refused(run: Run, tmp_path: Path) -> None:
    assert "unknown file type ('.txt'); use .pftrace, .json" in refused(
        run(*WORDS, "--trace-events", tmp_path / "a.txt")
    )
    fleet = [word for word in WORDS if word not in ("--baseline", "contiguous")]
    ran = run(*fleet, "--replicas", "2", "--trace-events", tmp_path / "a.pftrace")
    assert "--trace-events supports only one server" in refused(ran)


WITHOUT = """
import sys
sys.modules["perfetto"] = None
from importlib import util
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name == "perfetto" else find_spec(name, *rest)
from kvplan.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_json_needs_no_perfetto_and_pftrace_says_what_to_install(tmp_path: Path) -> None:
    for name, code, text in (("a.json", 0, ""), ("a.pftrace", 3, "pip install '.[trace]' in kvplan's sources")):
        words = [*WORDS[:-3], "-q", "--trace-events", str(tmp_path / name)]
        ran = subprocess.run([sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, timeout=300)
        assert (ran.returncode, text in ran.stderr) == (code, True), ran
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
