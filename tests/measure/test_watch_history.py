"""`kvplan watch` of several servers: each figure's history, the plan beside it, and a server that goes away."""

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvplan.cli.watch as command
from kvplan.cli.run_options import WatchOptions
from kvplan.cli.watch import Tries
from kvplan.cli.watch_view import Planned, Screen, view_lines
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.measure.server_metrics import MetricsPage, server_stats
from kvplan.measure.watch import (
    COLUMNS,
    CsvLog,
    Rates,
    Reading,
    ServerReading,
    Watched,
    WatchedPage,
    columns,
    rates_between,
)
from kvplan.report.lines import plain
from kvplan.report.sparkline import sparkline
from tests.measure.test_server_metrics import PAGES, VLLM_PAGE, say, server
from tests.measure.test_usage import FACTS, page, published
from tests.measure.test_usage import PAGES as PUBLISHED
from tests.measure.test_watch import LIMIT_S, fake_clock, posix, read_terminal
from tests.support.cli import Run, refused, run
from tests.support.fake_nvml import no_driver
from tests.support.oracle_data import needs_oracle_data
from tests.support.serving import serving, twin

__all__ = ["no_driver", "run", "server"]  # fixtures
pytest.importorskip("prometheus_client")


# --- a line of characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "top", "blocks", "text"),
    [
        ([], None, True, "     "),
        ([0, 0], None, True, "   ▁▁"),
        ([0, 1], 1000.0, True, "   ▁▂"),  # what is not 0 does not look like 0
        ([0, 0.5, 1], 1.0, False, "  _=#"),  # half of seven steps is the fourth
        ([1, None, 2], None, True, "  ▅ █"),  # 1 of 2 is round(3.5) steps, the even one
        ([9, 9, 1, 1, 1, 1, 1], None, True, "█████"),  # of what is shown, all is the largest
        ([3], 2.0, True, "    █"),
    ],
)
def test_the_newest_value_is_rightmost(values: list[float | None], top: float | None, blocks: bool, text: str) -> None:
    assert sparkline(values, 5, top=top, blocks=blocks) == text


# --- pages that vLLM's own logger wrote -------------------------------------------------------------------------------


def screen_lines(history: Sequence[ServerReading], planned: Planned | None = None, **how: Any) -> list[str]:
    """The view's rows of a server."""
    readings = [reading(server) for server in history]
    return [plain(styled) for styled in view_lines(readings, Screen(Watched(), "no GPU", planned=planned), **how)][3:]


def reading(*servers: ServerReading, seconds: float = 0.0) -> Reading:
    return Reading("2026-11-21T10:11:12.345Z", seconds, None, None, None, servers)


def row(lines: list[str], label: str) -> str:
    return next(line for line in lines if line.startswith(f"  {label} "))


def check_rates(first: str, second: str, seconds: float, truth: dict[str, float]) -> None:
    """Rates between two pages are those of the workload that the logger counted."""
    before, now = server_stats(first), server_stats(second)
    rates = rates_between(before, now, seconds)
    assert rates.output == pytest.approx(truth["generated_tokens_per_s"], rel=1e-9)
    assert rates.preemptions == pytest.approx(truth["preemptions"] / seconds, rel=1e-9)
    lines = screen_lines([ServerReading(before, 0.0), ServerReading(now, 0.0, rates)], width=80)
    assert row(lines, "preempted").endswith(f"/s, {now.preemptions:,} in all")
    if now.kv_usage is not None:  # our own part of these pages has no gauge of it
        assert f"{100 * now.kv_usage:.1f}% of {now.kv_tokens:,} tokens" in row(lines, "KV")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_rates_are_those_of_the_workload(fact: dict[str, Any]) -> None:
    check_rates(page(fact["first"]), page(fact["second"]), fact["seconds"], fact["truth"])


@needs_oracle_data
@pytest.mark.parametrize("fact", list(published()), ids=lambda fact: fact["name"])
def test_rates_of_vllms_own_pages_are_those_of_the_workload(fact: dict[str, Any]) -> None:
    first, second = ((PUBLISHED / f"{fact['name']}.{number}.txt").read_text() for number in (1, 2))
    # vLLM's own: tokens of the pool over the longest context, which is 8,192 of every one of these servers
    assert server_stats(second).max_concurrency == fact["server"]["kv_tokens"] / 8192
    if not fact.get("restart_between_scrapes"):
        check_rates(first, second, fact["interval_s"], fact["between_scrapes"])


def test_the_server_says_how_many_requests_fit_over_all_its_engines() -> None:
    config = 'vllm:cache_config_info{{engine="{}",kv_cache_max_concurrency="{}"}} 1.0\n'
    assert server_stats(config.format(0, "11.71875")).max_concurrency == 11.71875
    assert server_stats(config.format(0, "11.5") + config.format(1, "12")).max_concurrency == 23.5
    assert server_stats(config.format(0, "11.5") + config.format(1, "None")).max_concurrency is None


# --- the view ---------------------------------------------------------------------------------------------------------

BUSY = replace(server_stats(VLLM_PAGE), max_concurrency=53.3)
HISTORY = [
    ServerReading(replace(BUSY, kv_usage=0.0, running=0, waiting=0), 0.0),
    ServerReading(replace(BUSY, kv_usage=0.25, running=3), 0.0, Rates(100.0, 50.0, 0.0)),
    ServerReading(replace(BUSY, kv_usage=0.3), 5.0, Rates(100.0, 50.0, 0.0), "unreachable (connection refused)"),
    ServerReading(BUSY, 0.0, Rates(200.0, 25.0, 0.5)),
]


def test_a_row_is_a_history_and_the_figure_now() -> None:
    """A reading whose page is not its own is a gap; where the server says how many fit, that is the scale's end."""
    assert screen_lines(HISTORY, width=80) == [
        "vllm",
        "  KV                             ▁▃ ▅  50.0% of 436,896 tokens, 27,306 blocks",
        "  running                        ▁▂ ▂  7 (53.3 of the longest context fit)",
        "  waiting                        ▁█ █  5",
        "  preempted                       ▁ █  0.5/s, 2 in all",
        "  prompt                          ▅ █  200 tokens/s",
        "  output                          █ ▅  25 tokens/s",
        "  hits       25.0% of prompt tokens from the prefix cache",
    ]


def test_the_plan_has_a_line_and_is_the_scale_of_running() -> None:
    plan = Planned(tokens=400_000, users=14, context=8192)
    lines = screen_lines(HISTORY, plan, width=80, blocks=False)
    # 400,000 / 436,896 - 1 = -8.4%; half of 436,896 is 54.6% of 400,000
    assert lines[-1] == "  plan       400,000 tokens (-8.4%), 54.6% in use, 14 users of 8,192 tokens".replace(
        "4%)", "4%)"
    )
    assert row(lines, "running").split() == ["running", "_:", "=", "7", "of", "the", "plan's", "14"]
    assert row(screen_lines(HISTORY, replace(plan, users=5)), "running").endswith("7 above the plan's 5")


@pytest.mark.parametrize(("width", "cells"), [(40, 8), (80, 24), (120, 60), (300, 60)])
def test_the_history_is_as_wide_as_the_terminal_has_room(width: int, cells: int) -> None:
    assert row(screen_lines(HISTORY[-1:] * 100, width=width), "KV").count("▅") == cells


def test_several_servers_have_a_line_each_where_the_height_is_short() -> None:
    gone = ServerReading(BUSY, 12.0, problem="unreachable (connection refused)")
    screen = Screen(Watched(names=("a:8000", "b:8000", "c:8000")), "no GPU")
    readings = [reading(server, gone, ServerReading(problem="no answer yet")) for server in HISTORY]
    tall = [plain(styled) for styled in view_lines(readings, screen, height=40)]
    assert [line for line in tall if " at " in line] == [
        "vllm at a:8000",
        "vllm at b:8000, 12 s ago",
        "server at c:8000",
    ]
    short = [plain(styled) for styled in view_lines(readings, screen, height=20)]
    assert short[3:] == [
        "a:8000                 KV       ▁▃ ▅  50%      ▁▄ █ 7 run, 5 wait",
        "b:8000                 unreachable (connection refused), page 12 s old",
        "c:8000                 no answer yet",
    ]


def test_a_late_page_keeps_its_figures_in_its_line() -> None:
    late = ServerReading(BUSY, 0.9, problem="no answer yet")
    screen = Screen(Watched(names=("a:8000", "b" * 30)), "no GPU")
    readings = [reading(HISTORY[1], HISTORY[1]), reading(late, HISTORY[3])]
    rows = [plain(row) for row in view_lines(readings, screen, height=10)][3:]
    assert rows == [
        "a:8000                 KV         ▃   50%        █  7 run, 5 wait",
        f"{'b' * 22} KV         ▃▅  50%        ▄█ 7 run, 5 wait",
    ]


# --- several servers, as a user runs it -------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading waits for each page's answer, and sleeping takes no time."""
    fake_clock(monkeypatch)
    monkeypatch.setattr(command, "watched_page", lambda url, interval: WatchedPage(MetricsPage(url).read, LIMIT_S))


QUICK = ("--interval", "1s", "--duration", "6s")  # seven readings


def test_a_server_that_goes_away_says_so_and_the_others_go_on(
    run: Run, no_driver: None, server: str, patient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seven readings, of which five tries in a row end the watch of one server alone."""
    num_requests = 0

    def leave(handler: Any) -> None:
        nonlocal num_requests
        num_requests += 1
        if num_requests == 1:
            say(b"vllm:num_requests_running 3\n")(handler)
        else:
            PAGES["/missing"](handler)

    monkeypatch.setitem(PAGES, "/leaving", leave)
    host = server.removeprefix("http://")
    urls = ("--metrics", server, "--metrics", f"{server}/leaving", "--metrics", "http://127.0.0.1:1")
    ran = run("watch", *urls, *QUICK, "--csv", tmp_path / "log.csv")
    assert ran.code == 0
    lines = [line.partition("  ")[2] for line in ran.out.splitlines()[1:]]
    lines = [line for line in lines if not line.startswith("host ")]
    assert len(lines) == 3 * 7
    assert lines[1] == f"{host}/leaving  vllm: 3 running"
    assert all(line.startswith(f"{host}  vllm: KV 50.0% of 436,896 tokens") for line in lines[::3])
    assert all("metrics: no figures (HTTP 404" in line for line in lines[4::3])
    assert set(lines[2::3]) == {"127.0.0.1:1  metrics: unreachable (connection refused)"}
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["server"] for row in rows] == [host, f"{host}/leaving", "127.0.0.1:1"] * 7
    assert [row["server_running"] for row in rows[:3]] == ["7", "3", ""]


def test_a_watch_ends_when_no_server_answers(run: Run, no_driver: None, patient: None) -> None:
    ran = run("watch", "--metrics", "http://127.0.0.1:1", "--metrics", "http://127.0.0.1:2", *QUICK)
    assert ran.code == 3
    assert ran.errors == [
        "kvplan: error: --metrics http://127.0.0.1:1: unreachable (connection refused) after 5 tries in a row, and so "
        "with 1 more; start the server, or wait for it with --tries 0"
    ]


def test_a_server_is_named_once(run: Run, no_driver: None, patient: None) -> None:
    again = ("--metrics", "http://a:8000", "--metrics", "http://a:8000/metrics")
    assert "is named twice" in refused(run("watch", *again, *QUICK))


def test_a_log_of_one_server_is_not_continued_with_several(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(UsageError, match="has other columns"):
        CsvLog(str(path), columns(2))


def test_any_server_that_may_yet_answer_is_waited_for() -> None:
    never, later = (
        SimpleNamespace(has_answered=False, failures=5, problem="x"),
        SimpleNamespace(has_answered=True, failures=50, problem="x"),
    )
    pages: Any = [never, later]
    Tries().check(pages)
    with pytest.raises(EnvironmentProblem):
        Tries().check(pages[:1])


# --- a server that simulates ------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of pages, which stands still but where a test moves it."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("kvplan.measure.watch.time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_simulated_servers_are_watched_beside_their_plan(run: Run, clock: SimpleNamespace, tmp_path: Path) -> None:
    words = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--engine", "vllm@0.33")
    estimate = run("estimate", *words, "--format", "json")
    path = tmp_path / "plan.json"
    path.write_text(estimate.out)
    plan = command.planned_pool(WatchOptions(plan=str(path), metrics=["http://first"]))
    with serving(twin(output_tokens=24)) as first:
        with serving(twin(output_tokens=24)) as second:
            pages = [WatchedPage(MetricsPage(server.url).read, LIMIT_S) for server in (first, second)]
            watched = Watched(pages=tuple(pages), names=("first", "second"))
            readings = [watched.read(0.0)]
            answer = first.post("/v1/completions", model="llama-3.1-8b", prompt="one two three", max_tokens=24)
            clock.s += 2.0
            readings.append(watched.read(2.0))
        clock.s += 2.0
        readings.append(watched.read(4.0))
    tokens = answer["usage"]["completion_tokens"]
    assert [moment.servers[0].rates.output for moment in readings] == [None, tokens / 2.0, 0.0]
    assert readings[1].servers[1].rates.output == 0.0
    lines = [plain(styled) for styled in view_lines(readings, Screen(watched, "no GPU", planned=plan))]
    # the servers' own pages say 446,240 tokens, which are 54.47 times 8,192
    assert lines.count("  plan       446,240 tokens (+0.0%), 0.0% in use, 54 users of 8,192 tokens") == 2
    assert "vllm at first" in lines
    assert "metrics: unreachable" in lines[lines.index("vllm at second, 2.0 s ago") + 1]
    assert max(map(len, lines)) <= 80


def test_a_plan_of_a_model_and_a_gpu_is_what_estimate_answers(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run("estimate", "qwen3-8b", "--gpu", "2xl40s", "--ctx", "8k", "--format", "json").out)
    url = ["http://first"]
    named = WatchOptions(model="qwen3-8b", gpu=["2xl40s"], max_model_len=["8k"], metrics=url)
    assert command.planned_pool(named) == command.planned_pool(WatchOptions(plan=str(path), metrics=url))


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (("--model", "qwen3-8b"), "--gpu: missing"),
        (("--gpu", "l40s"), "--model: missing"),
        (("--model", "no-such-model", "--gpu", "l40s"), "model 'no-such-model': not in the catalog"),
        (("--model", "qwen3-8b", "--gpu", "l40s", "--gpu", "l4"), "--gpu or --ctx names several plans"),
        (
            ("--model", "qwen3-8b", "--gpu", "l40s", "--plan", "x"),
            "--plan is a plan already and cannot be combined with --model",
        ),
    ],
)
def test_what_is_no_one_plan_is_refused(run: Run, no_driver: None, argv: tuple[str, ...], fault: str) -> None:
    assert fault in refused(run("watch", "--metrics", "http://127.0.0.1:1", *argv, *QUICK))


def test_a_plan_needs_a_server_to_compare(run: Run, no_driver: None) -> None:
    assert refused(run("watch", "--model", "qwen3-8b", "--gpu", "l40s", *QUICK)).endswith("add --metrics URL")


def test_users_of_a_plan_are_those_of_all_its_replicas() -> None:
    assert command.planned_users({"concurrency": {"users": 48, "replicas": 2}}) == 96
    assert command.planned_users({"concurrency": {"users": None, "replicas": 2}}) is None
    assert command.planned_users({"concurrency": {"users": True, "replicas": 1}}) is None


@posix
@pytest.mark.parametrize("terminal", ["xterm-256color", "linux"])
def test_on_a_terminal_the_history_is_drawn(server: str, terminal: str) -> None:
    """The kernel's own console has no low blocks in its font: ASCII there."""
    for duration in ("400ms", "4s", "40s"):  # a busy machine answers late
        text = drawn(server, terminal, duration)
        if "  running" in text:
            break
    assert "  running" in text
    assert ("█" in text) == (terminal != "linux")


def drawn(server: str, terminal: str, duration: str) -> str:
    """What a watch writes to a terminal."""
    import pty

    ours, theirs = pty.openpty()
    argv = [sys.executable, "-c", "from kvplan.cli.main import run; run()", "watch", "--metrics", server]
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": terminal, "COLUMNS": "80", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    options = ["--interval", "20ms", "--duration", duration, "--tries", "0"]
    with subprocess.Popen([*argv, *options], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = b"".join(iter(lambda: read_terminal(ours), b"")).decode()
        os.close(ours)
    assert process.returncode == 0
    return text
