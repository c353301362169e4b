"""`kvplan watch`: what it reads, what it shows, what it logs, and how it ends."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvplan.cli.watch as view
from kvplan.cli.watch import Tries, ticks
from kvplan.cli.watch_view import BAR, Screen, bar, memory_rows, reading_lines, view_lines
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.hardware.nvml import DeviceMemory, DeviceSample, HostMemory
from kvplan.measure.server_metrics import MetricsError, MetricsPage, ServerStats, server_stats
from kvplan.measure.watch import (
    COLUMNS,
    CsvLog,
    ProcessEnded,
    Rates,
    Reading,
    ServerReading,
    Watched,
    WatchedPage,
    WatchedProcess,
    csv_rows,
    rates_between,
)
from kvplan.report.lines import plain
from tests.measure.test_server_metrics import PAGES, SGLANG_PAGE, VLLM_PAGE, say, server
from tests.support.cli import Run, refused, run
from tests.support.fake_nvml import GIB, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, MIB, FakeGpu, Install, install, no_driver

__all__ = ["install", "no_driver", "run", "server"]  # fixtures

QUICK = ("--interval", "1s", "--duration", "2s")  # three readings; sleeping takes no time in these tests
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
LIMIT_S = 900  # bounds a hang


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)


def fake_clock(monkeypatch: pytest.MonkeyPatch, *work: float) -> list[float]:
    """A clock that only sleeping and the given seconds of work move; returns the sleeps."""
    now, sleeps, left = 100.0, list[float](), list(work)

    def sleep(seconds: float) -> None:
        nonlocal now
        sleeps.append(round(seconds, 9))
        now += seconds

    def monotonic() -> float:
        nonlocal now
        now += left.pop(0) if left else 0.0
        return now

    monkeypatch.setattr(view, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic))
    return sleeps


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch)


# --- readings ---------------------------------------------------------------------------------------------------------

SAMPLE = DeviceSample(
    memory=DeviceMemory(total=80 * GIB, reserved=GIB, used=19 * GIB, free=60 * GIB),
    process_used=10 * GIB,
    process_is_estimated=False,
    others_used=8 * GIB,
    gpu_utilization=0.37,
    memory_utilization=0.21,
    power_w=312.5,
    sm_clock_mhz=1410,
    memory_clock_mhz=1593,
    temperature_c=56,
)
HOST = HostMemory(total=64 * GIB, available=48 * GIB)


def reading(**changes: Any) -> Reading:
    values: dict[str, Any] = {
        "sample": None, "resident": None, "host": None,
    }  # fmt: skip
    server = changes.pop("server", None)
    values["servers"] = () if server is None else (server,)
    return Reading(utc="2026-11-21T10:11:12.345Z", elapsed_s=3725.0, **{**values, **changes})


WATCHED = Watched(pid=42)


def first_line(now: Reading, watched: Watched) -> str:
    return reading_lines(now, watched)[0]


RATES = Rates(prompt=12_345.6, output=7.25)


def test_a_reading_is_first_line() -> None:
    now = ServerReading(server_stats(VLLM_PAGE), 0.01, RATES)
    assert first_line(reading(sample=SAMPLE, resident=3 * MIB, host=HOST, server=now), WATCHED) == (
        "10:11:12  19.00 of 80.00 GiB used, pid 42 10.00 GiB, others 8.00 GiB, 37% busy, memory busy 21%, 312 W, "
        "SM 1,410 MHz, memory 1,593 MHz, 56 C, resident 3 MiB, host 16.00 of 64.00 GiB used, "
        "vllm: KV 50.0% of 436,896 tokens, 27,306 blocks, 7 running, 5 waiting, 2 preemptions, prefix hits 25.0%, "
        "12,346 prompt tokens/s, 7.2 output tokens/s"
    )


def test_a_page_out_of_reach_is_a_part_of_the_line() -> None:
    now = ServerReading(problem="unreachable (connection refused)")
    line = first_line(reading(host=HOST, server=now), WATCHED)
    assert line == "10:11:12  host 16.00 of 64.00 GiB used, metrics: unreachable (connection refused)"


@pytest.mark.parametrize(
    ("age", "problem", "text", "rows"),
    [
        (0.2, None, "sglang: 162 running", ["sglang"]),
        (1.5, None, "1.5 s ago sglang: 162 running", ["sglang, 1.5 s ago"]),
        (
            0.2,
            "no answer yet",
            "metrics: no answer yet; 0.2 s ago sglang: 162 running",
            ["sglang, 0.2 s ago", "  metrics: no answer yet"],
        ),
        (
            4000.4,
            "no figures (HTTP 503 x)",
            "metrics: no figures (HTTP 503 x); 4,000 s ago sglang: 162 running",
            ["sglang, 4,000 s ago", "  metrics: no figures (HTTP 503 x)"],
        ),
    ],
)
def test_the_last_figures_are_shown_with_their_age(age: float, problem: str | None, text: str, rows: list[str]) -> None:
    now = ServerReading(ServerStats("sglang", running=162), age, problem=problem)
    assert first_line(reading(server=now), WATCHED) == f"10:11:12  {text}"
    view = [plain(styled) for styled in view_lines([reading(server=now)], Screen(WATCHED, "no GPU"), blocks=False)]
    assert view[3:-1] == rows
    assert view[-1].split() == ["running", *([] if problem else ["#"]), "162"]


def test_a_page_without_a_figure_says_so() -> None:
    assert first_line(reading(server=ServerReading(ServerStats("vllm"), 0.0)), WATCHED) == "10:11:12  vllm: no figures"


def test_the_view_shows_every_part() -> None:
    screen = Screen(WATCHED, "GPU 0: NVIDIA A100")
    now = ServerReading(server_stats(SGLANG_PAGE + "sglang:prompt_tokens_total -1\n"), 0.01, RATES)
    full_reading = reading(sample=SAMPLE, resident=16 * GIB, host=HOST, server=now)
    assert [plain(styled) for styled in view_lines([full_reading], screen, blocks=False)] == [
        "GPU 0: NVIDIA A100",
        "10:11:12 UTC, 1:02:05 watched",
        "",
        "memory   ##########..............................  19.00 of 80.00 GiB used",
        "history                                         :  19.00 to 19.00 GiB",
        "  pid 42          10.00 GiB",
        "  others           8.00 GiB",
        "  other use        1.00 GiB",
        "  reserved         1.00 GiB",
        "  free            60.00 GiB",
        "busy     ###############.........................",
        "  37% busy, memory busy 21%, 312 W, SM 1,410 MHz, memory 1,593 MHz, 56 C",
        "",
        "host     ##########..............................  16.00 of 64.00 GiB used",
        "  resident           16 GiB",
        "",
        "sglang",
        "  KV                                :  28.0%",
        "  running                           #  162",
        "  waiting                           #  2,826",
        "  prompt                            #  12,346 tokens/s",
        "  output                            #  7.2 tokens/s",
        "  hits       0.8% of prompt tokens from the prefix cache",
        "  sglang:prompt_tokens_total: -1 is not a count; left out",
    ]


# --- a server's page --------------------------------------------------------------------------------------------------


def counted(prompt: int | None, generated: int | None, started_s: float | None = None) -> ServerStats:
    return ServerStats("vllm", prompt_tokens=prompt, generation_tokens=generated, started_s=started_s)


@pytest.mark.parametrize(
    ("before", "now", "seconds", "rates"),
    [
        (counted(1000, 10), counted(5000, 250), 2.0, (2000.0, 120.0)),
        (counted(1000, 10), counted(1000, 10), 10.0, (0.0, 0.0)),
        (counted(None, 10), counted(5000, 250), 2.0, (None, 120.0)),
        (counted(5000, 250), counted(400, 20), 2.0, (None, None)),  # started anew
        (counted(5000, 250), counted(6000, 20), 2.0, (None, None)),  # and had a long prompt since
        (counted(50, 20, 1e9), counted(4000, 250, 1e9 + 60), 2.0, (None, None)),  # and is past where it was
        (counted(50, 20, 1e9), counted(4050, 260, 1e9), 2.0, (2000.0, 120.0)),
        (counted(50, 20), replace(counted(4000, 250), kind="sglang"), 2.0, (None, None)),
        (counted(1000, 10), counted(5000, 250), 0.0, (None, None)),
    ],
)
def test_a_rate_is_what_two_pages_differ_by_over_the_time_between(
    before: ServerStats, now: ServerStats, seconds: float, rates: tuple[float | None, float | None]
) -> None:
    assert rates_between(before, now, seconds) == Rates(*rates)


class Pages:
    """A server whose pages come when the test says, and the clock by which they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.num_requests = 0
        self.answer: ServerStats | Exception = counted(0, 0)
        self.let_go = threading.Event()
        monkeypatch.setattr("kvplan.measure.watch.time", SimpleNamespace(monotonic=lambda: self.now))

    def read(self) -> ServerStats:
        self.num_requests += 1
        assert self.let_go.wait(LIMIT_S)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    stub = Pages(monkeypatch)
    yield stub
    stub.let_go.set()


def reading_of(page: WatchedPage) -> ServerReading:
    page.ask()
    return page.reading()


def test_the_first_page_has_no_rate_and_the_next_ones_have(pages: Pages) -> None:
    page = WatchedPage(pages.read, LIMIT_S)
    pages.let_go.set()
    assert reading_of(page) == ServerReading(counted(0, 0), 0.0)
    pages.now, pages.answer = 104.0, counted(400, 20)
    assert reading_of(page) == ServerReading(counted(400, 20), 0.0, Rates(100.0, 5.0))


def test_a_page_that_does_not_come_is_waited_for_no_longer_than_the_patience(pages: Pages) -> None:
    page = WatchedPage(pages.read, patience_s=0.01)
    assert reading_of(page) == reading_of(page) == ServerReading(problem="no answer yet")
    assert pages.num_requests == 1  # the first request is still under way


def test_a_late_page_is_in_the_next_reading_with_its_age(pages: Pages) -> None:
    page = WatchedPage(pages.read, patience_s=0.01)
    pages.answer = counted(1, 1)
    assert reading_of(page).stats is None
    pages.let_go.set()
    wait_for(lambda: page._request is None or not page._request.is_alive())
    pages.now += 3.0
    pages.let_go.clear()
    assert reading_of(page) == ServerReading(counted(1, 1), 3.0)
    pages.now += 1.0
    assert reading_of(page) == ServerReading(counted(1, 1), 4.0, problem="no answer yet")


def test_a_page_that_came_between_readings_is_not_lost_to_a_failure_after_it(pages: Pages) -> None:
    page = WatchedPage(pages.read, patience_s=0.01)
    pages.answer = counted(1, 1)
    assert reading_of(page).stats is None
    pages.let_go.set()
    wait_for(lambda: page._request is None or not page._request.is_alive())
    pages.now, pages.answer = pages.now + 3.0, MetricsError("connection refused", answered=False)
    page._patience_s = LIMIT_S  # so that the failure is in before the reading is
    assert reading_of(page) == ServerReading(counted(1, 1), 3.0)
    assert reading_of(page) == ServerReading(counted(1, 1), 3.0, problem="unreachable (connection refused)")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (MetricsError("HTTP 404 Not Found"), "no figures (HTTP 404 Not Found)"),
        (MetricsError("connection refused", answered=False), "unreachable (connection refused)"),
    ],
)
def test_figures_are_kept_while_a_page_fails_and_the_rate_is_over_the_gap(
    pages: Pages, fault: MetricsError, problem: str
) -> None:
    page = WatchedPage(pages.read, LIMIT_S)
    pages.let_go.set()
    pages.answer = counted(100, 10)
    reading_of(page)
    pages.now, pages.answer = 105.0, fault
    assert reading_of(page) == ServerReading(counted(100, 10), 5.0, problem=problem)
    pages.now, pages.answer = 110.0, counted(200, 60)
    assert reading_of(page) == ServerReading(counted(200, 60), 0.0, Rates(10.0, 5.0))


def test_why_the_last_request_failed_is_said_while_the_next_is_under_way(pages: Pages) -> None:
    page = WatchedPage(pages.read, patience_s=0.01)
    pages.answer = MetricsError("no whole answer in 5 s", answered=False)
    assert reading_of(page).problem == "no answer yet"
    pages.let_go.set()
    wait_for(lambda: page._request is None or not page._request.is_alive())
    pages.let_go.clear()
    assert reading_of(page).problem == reading_of(page).problem == "unreachable (no whole answer in 5 s)"


def test_a_fault_in_reading_a_page_is_not_hidden(pages: Pages) -> None:
    page = WatchedPage(pages.read, LIMIT_S)
    pages.let_go.set()
    pages.answer = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        reading_of(page)


def cells(now: Reading) -> dict[str, str]:
    return dict(zip(COLUMNS, csv_rows(WATCHED, now)[0], strict=True))


def test_a_page_is_in_one_row_of_the_log() -> None:
    fresh = cells(reading(server=ServerReading(counted(400, 20), 0.25, Rates(100.0, 5.0))))
    assert [fresh[f"server_{name}"] for name in ("kind", "prompt_tokens", "generation_tokens", "problem")] == [
        "vllm", 400, 20, "",
    ]  # fmt: skip
    assert [fresh[name] for name in COLUMNS[-3:]] == ["100.000", "5.000", "0.250"]
    stale = cells(reading(server=ServerReading(counted(400, 20), 9.0, Rates(100.0, 5.0), "no answer yet")))
    assert {name: cell for name, cell in stale.items() if name.startswith("server_") and cell != ""} == {
        "server_problem": "no answer yet"
    }


@pytest.mark.parametrize(
    "sample",
    [
        SAMPLE,
        replace(SAMPLE, process_used=None, others_used=None),
        replace(SAMPLE, process_used=15 * GIB, others_used=15 * GIB),  # shared memory is in both
        replace(SAMPLE, memory=DeviceMemory(total=80 * GIB, reserved=None, used=20 * GIB, free=60 * GIB)),
    ],
    ids=["all known", "nothing known", "listed twice", "old driver"],
)
def test_the_rows_add_up_to_the_device(sample: DeviceSample) -> None:
    assert sum(size for _, size, _ in memory_rows(sample, 42)) == 80 * GIB


@pytest.mark.parametrize("parts", [[], [(1.0, "a")], [(0.33, "a")] * 3, [(2.0, "a")], [(0.0, "a"), (0.0125, "b")]])
@pytest.mark.parametrize("total", [1.0, 0.0])
def test_a_bar_is_always_as_wide(parts: list[tuple[float, str]], total: float) -> None:
    assert sum(len(text) for text, _ in bar(parts, total, True)) == BAR


def test_ticks_keep_to_the_clock_until_the_duration_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = fake_clock(monkeypatch)
    assert [round(seconds, 9) for seconds in ticks(0.1, 0.3)] == [0.0, 0.1, 0.2, 0.3]
    assert sleeps == [0.1] * 3


def test_a_tick_that_was_missed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, 0.0, 2.5)  # the first reading takes 2.5 s
    assert list(ticks(1.0, 4.0)) == [0.0, 3.0, 4.0]


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_gpu_is_watched_and_logged(run: Run, install: Install, tmp_path: Path) -> None:
    gpu = FakeGpu(compute=[(os.getpid(), 7 * GIB), (1, 2 * GIB)])
    install(gpu)
    log = tmp_path / "log.csv"
    ran = run("watch", "--pid", str(os.getpid()), "--csv", log, *QUICK)
    assert (ran.code, ran.err) == (0, "")
    heading, *lines = ran.out.splitlines()
    assert heading == "GPU 0: NVIDIA A100-SXM4-80GB, driver 580.95.05, CUDA 13.0"
    assert len(lines) == 3
    assert all(f"10.00 of 80.00 GiB used, pid {os.getpid()} 7.00 GiB, others 2.00 GiB" in line for line in lines)
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert len(rows) == len(lines)
    assert list(rows[0]) == list(COLUMNS)
    known = {
        "gpu_index": "0", "gpu_uuid": gpu.uuid, "pid": str(os.getpid()), "gpu_total": str(80 * GIB),
        "gpu_reserved": str(600 * MIB), "gpu_used": str(10 * GIB), "gpu_free": str(70 * GIB - 600 * MIB),
        "gpu_is_host": "false", "process_used": str(7 * GIB), "process_is_estimated": "false",
        "others_used": str(2 * GIB), "gpu_utilization": "0.37", "memory_utilization": "0.21", "power_w": "312.5",
        "sm_clock_mhz": "1410", "memory_clock_mhz": "1593", "temperature_c": "56", "server_kind": "",
    }  # fmt: skip
    assert {name: rows[0][name] for name in known} == known
    assert int(rows[0]["resident"]) > MIB


@pytest.mark.parametrize(("which", "name"), [("1", "NVIDIA L4"), ("GPU-b", "NVIDIA L4"), ("GPU-a", "NVIDIA A100")])
def test_a_gpu_is_chosen_by_index_or_uuid(run: Run, install: Install, which: str, name: str) -> None:
    install(FakeGpu(uuid="GPU-aaaa", name="NVIDIA A100"), FakeGpu(uuid="GPU-bbbb", name="NVIDIA L4"))
    assert name in run("watch", "--gpu-index", which, *QUICK).out


def test_31_without_a_gpu_the_cure_names_what_else_can_be_watched(run: Run, no_driver: None) -> None:
    line = refused(run("watch", *QUICK), 3)
    assert line.startswith("NVIDIA driver: not found")
    assert line.endswith("without a GPU, watch a process with --pid PID or a server with --metrics URL")


def test_31_without_a_gpu_a_process_is_watched(run: Run, no_driver: None) -> None:
    ran = run("watch", "--pid", str(os.getpid()), *QUICK)
    assert (ran.code, ran.err) == (0, "kvplan: note: no GPU found; showing host memory\n")
    heading, *lines = ran.out.splitlines()
    assert heading == "no GPU"
    assert all("  resident " in line for line in lines)


def test_32_a_broken_driver_is_an_error_or_a_warning_beside_a_process(run: Run, install: Install) -> None:
    install(FakeGpu(), errors={"nvmlInitWithFlags": LIB_RM_VERSION_MISMATCH})
    assert "reload the kernel module or reboot" in refused(run("watch", *QUICK), 3)
    assert "different versions" in refused(run("watch", "--gpu-index", "0", "--pid", "1", *QUICK), 3)
    ran = run("watch", "--pid", str(os.getpid()), *QUICK)
    assert ran.code == 0
    assert ran.err.startswith("kvplan: warning: NVIDIA driver: its library and its kernel module are of different")


def test_33_a_warning_is_told_once(run: Run, install: Install) -> None:
    install(FakeGpu(), missing=frozenset({"nvmlDeviceGetMemoryInfo_v2"}))
    ran = run("watch", *QUICK)
    assert ran.code == 0
    assert ran.err == "kvplan: warning: GPU 0: an old driver (before 510.39) counts its own memory as used; update it\n"


def test_35_a_process_the_driver_does_not_list_is_not_shown_as_zero(run: Run, install: Install) -> None:
    install(FakeGpu(compute=[(1, 2 * GIB)]))
    assert f"pid {os.getpid()} not listed," in run("watch", "--pid", str(os.getpid()), *QUICK).out


def test_39_a_gpu_lost_on_the_way_ends_the_watch_with_its_rows_kept(
    run: Run, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, log = FakeGpu(), tmp_path / "log.csv"
    install(gpu)
    clock = SimpleNamespace(
        monotonic=lambda: 0.0, sleep=lambda seconds: gpu.errors.update(nvmlDeviceGetMemoryInfo_v2=GPU_IS_LOST)
    )
    monkeypatch.setattr(view, "time", clock)
    ran = run("watch", "--csv", log)
    assert ran.code == 3
    assert ran.errors[0].startswith("kvplan: error: GPU 0: lost")
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (("--interval", "fast"), "--interval: not a duration ('fast')"),
        (("--interval", "1ms"), "--interval: "),
        (("--duration", "-1s"), "--duration: not a duration ('-1s')"),
        (("--pid", "self"), "--pid: not a whole number ('self')"),
        (("--pid", "0"), "--pid must be at least 1 ('0')"),
        (("--pid", "4194304"), "--pid 4194304: there is no such process"),  # above Linux' highest pid
        (("--metrics", "gopher://x"), "--metrics gopher://x: not an http or https URL"),
        (("--csv", "/no/such/folder/log.csv"), "--csv /no/such/folder/log.csv cannot be written"),
        (("--csv", "/"), "--csv / is not a regular file"),
    ],
)
def test_bad_usage_is_first_line(run: Run, install: Install, argv: tuple[str, ...], fault: str) -> None:
    install(FakeGpu())
    assert refused(run("watch", *argv)).startswith(fault)


def test_a_gpu_that_is_not_there_is_first_line(run: Run, install: Install) -> None:
    install(FakeGpu())
    assert refused(run("watch", "--gpu-index", "3"), 3).startswith("GPU 3: there is no such GPU (1 found)")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading waits for the page's answer, however busy this machine is."""
    monkeypatch.setattr(view, "watched_page", lambda url, interval: WatchedPage(MetricsPage(url).read, LIMIT_S))


def test_a_server_is_watched_without_a_gpu(run: Run, no_driver: None, server: str, patient: None) -> None:
    ran = run("watch", "--metrics", f"{server}/metrics", *QUICK)
    assert ran.code == 0
    assert "vllm: KV 50.0% of 436,896 tokens, 27,306 blocks, 7 running, 5 waiting" in ran.out


def test_tokens_per_second_are_shown_and_logged_from_the_second_reading_on(
    run: Run, no_driver: None, server: str, patient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """(prompt, output) tokens so far, on pages 2 s apart; the server is started anew before the fourth."""
    counters = [(1000, 100), (5000, 340), (5000, 345), (40, 8), (140, 10)]
    served = 0

    def grow(handler: Any) -> None:
        nonlocal served
        prompt, output = counters[served]
        served += 1
        say(f"vllm:prompt_tokens_total {prompt}\nvllm:generation_tokens_total {output}\n".encode())(handler)

    monkeypatch.setitem(PAGES, "/growing", grow)
    monkeypatch.setattr("kvplan.measure.watch.time", SimpleNamespace(monotonic=lambda: 2.0 * served))
    log = tmp_path / "log.csv"
    ran = run("watch", "--metrics", f"{server}/growing", "--csv", log, "--interval", "1s", "--duration", "4s")
    assert (ran.code, ran.err.count("\n")) == (0, 1)  # the note that there is no GPU
    assert [line.partition("vllm: ")[2] for line in ran.out.splitlines()[1:]] == [
        "no figures",
        "2,000 prompt tokens/s, 120 output tokens/s",
        "0 prompt tokens/s, 2.5 output tokens/s",
        "no figures",
        "50 prompt tokens/s, 1.0 output tokens/s",
    ]
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [(row["server_prompt_tokens_per_s"], row["server_output_tokens_per_s"]) for row in rows] == [
        ("", ""), ("2000.000", "120.000"), ("0.000", "2.500"), ("", ""), ("50.000", "1.000"),
    ]  # fmt: skip
    assert [row["server_generation_tokens"] for row in rows] == ["100", "340", "345", "8", "10"]


def test_a_figure_that_cannot_be_is_left_out_with_one_note(
    run: Run, install: Install, server: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeGpu())
    page = b"vllm:kv_cache_usage_perc 7e300\nvllm:num_requests_running 7e300\nvllm:num_requests_waiting 5\n"
    monkeypatch.setitem(PAGES, "/nonsense", say(page))
    ran = run("watch", "--metrics", f"{server}/nonsense", *QUICK)
    assert ran.code == 0
    assert all(line.endswith(", vllm: 5 waiting") for line in ran.out.splitlines()[1:])
    assert ran.err.splitlines() == [
        "kvplan: note: vllm:kv_cache_usage_perc: 7e+300 is not a share; left out",
        "kvplan: note: vllm:num_requests_running: 7e+300 is not a count; left out",
    ]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/missing", "no figures (HTTP 404 Not Found)"),
        ("/other", "no figures (no vllm:, sglang: or llamacpp: metrics on it)"),
        ("/shut", "unreachable (closed without an answer)"),
    ],
)
def test_a_page_that_answers_is_not_out_of_reach(
    run: Run, install: Install, server: str, patient: None, tmp_path: Path, path: str, problem: str
) -> None:
    install(FakeGpu())
    ran = run("watch", "--metrics", f"{server}{path}", "--csv", tmp_path / "log.csv", *QUICK)
    assert ran.code == 0
    assert [line.partition("metrics: ")[2] for line in ran.out.splitlines()[1:]] == [problem] * 3
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["server_problem"] for row in rows] == [problem] * 3


def test_a_page_that_hangs_holds_up_no_reading(
    run: Run, install: Install, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeGpu())
    asked_for, let_go = threading.Semaphore(0), threading.Event()

    def hang(handler: Any) -> None:
        asked_for.release()
        let_go.wait(LIMIT_S)

    monkeypatch.setitem(PAGES, "/hanging", hang)
    ran = run("watch", "--metrics", f"{server}/hanging", "--interval", "20ms", "--duration", "200ms")
    let_go.set()
    lines = ran.out.splitlines()[1:]
    assert (ran.code, ran.err, len(lines)) == (0, "", 11)
    assert all(" of 80.00 GiB used, " in line and line.endswith("metrics: no answer yet") for line in lines)
    assert asked_for.acquire(timeout=LIMIT_S)
    assert not asked_for.acquire(blocking=False)  # all of them while the first request was under way


def test_the_planned_pool_is_shown_beside_the_servers(
    run: Run, no_driver: None, server: str, patient: None, tmp_path: Path
) -> None:
    plan = run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--format", "json")
    tokens = plan.json["kv"]["tokens"]
    (tmp_path / "plan.json").write_text(plan.out)
    ran = run("watch", "--metrics", f"{server}/metrics", "--plan", tmp_path / "plan.json", *QUICK)
    assert ran.code == 0
    off = tokens / 436_896 - 1  # 27,306 blocks of 16
    assert "of 436,896 tokens, 27,306 blocks" in ran.out
    assert f"planned {tokens:,} tokens ({off:+.1%})" in ran.out


@pytest.mark.parametrize(
    "text", ['{"schema": "kvplan/plans@1"}', '{"schema": "kvplan/plan@1", "kv": {"tokens": true}}', "[]"]
)
def test_what_is_no_plan_is_refused(run: Run, no_driver: None, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    refused(run("watch", "--metrics", "http://127.0.0.1:1/", "--plan", tmp_path / "plan.json", *QUICK))
    assert "add --metrics URL" in refused(run("watch", "--plan", tmp_path / "plan.json", *QUICK))


DEAD = ("--metrics", "http://127.0.0.1:1/metrics")  # nobody listens on port 1


def test_a_page_out_of_reach_is_part_of_each_reading(run: Run, install: Install, patient: None) -> None:
    install(FakeGpu())
    ran = run("watch", *DEAD, *QUICK)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()[1:]
    assert len(lines) == 3
    assert all(line.endswith("metrics: unreachable (connection refused)") for line in lines)


@pytest.mark.parametrize(("argv", "count"), [((), 5), (("--tries", "2"), 2), (("--tries", "1"), 1)])
def test_a_server_that_never_answers_ends_the_watch(
    run: Run, install: Install, patient: None, tmp_path: Path, argv: tuple[str, ...], count: int
) -> None:
    """Without --duration, which would end it too; every reading until then is in the CSV."""
    install(FakeGpu())
    ran = run("watch", *DEAD, "--interval", "1s", "--csv", tmp_path / "log.csv", *argv)
    times = "1 try" if count == 1 else f"{count} tries in a row"
    assert ran.code == 3
    assert ran.errors == [
        f"kvplan: error: --metrics http://127.0.0.1:1/metrics: unreachable (connection refused) after {times}; "
        "start the server, or wait for it with --tries 0"
    ]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + count


def test_tries_0_waits_for_as_long_as_the_duration(run: Run, install: Install, patient: None) -> None:
    install(FakeGpu())
    ran = run("watch", *DEAD, "--interval", "1s", "--duration", "8s", "--tries", "0")
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1 + 9


def test_a_server_that_answered_once_is_waited_for_unless_tries_are_stated() -> None:
    pages: list[ServerStats | MetricsError] = [counted(1, 1), *[MetricsError("connection refused", answered=False)] * 6]

    def read() -> ServerStats:
        page = pages.pop(0)
        if isinstance(page, MetricsError):
            raise page
        return page

    page = WatchedPage(read, patience_s=LIMIT_S)
    for _ in range(7):
        reading_of(page)
    assert page.failures == 6
    Tries().check([page])  # a server that is restarted comes back
    with pytest.raises(EnvironmentProblem, match=r"unreachable .connection refused. after 6 tries in a row"):
        Tries(at_first=6, later=6).check([page])


def test_tries_are_a_whole_number_beside_a_page(run: Run, no_driver: None) -> None:
    assert refused(run("watch", "--pid", "1", "--tries", "3", *QUICK)).endswith("add --metrics URL")
    assert refused(run("watch", *DEAD, "--tries", "-1", *QUICK)).startswith("--tries must be at least 0 ('-1'); ")
    assert refused(run("watch", *DEAD, "--tries", "x", *QUICK)).startswith("--tries: ")


@pytest.mark.parametrize(
    ("missing", "argv"),
    [("psutil", ("--pid", "1")), ("prometheus_client", ("--metrics", "http://127.0.0.1:1/"))],
)
def test_a_missing_package_is_named(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch, missing: str, argv: tuple[str, ...]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing] + [missing]:
        monkeypatch.setitem(sys.modules, name, None)
    ran = run("watch", *argv, *QUICK)
    assert ran.code == 3
    assert ran.errors[0].endswith(
        "run `pip install psutil`" if missing == "psutil" else "run `pip install '.[metrics]'` in kvplan's sources"
    )


def test_beside_a_gpu_psutil_can_be_done_without(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeGpu(compute=[(4711, 7 * GIB)]))
    monkeypatch.setitem(sys.modules, "psutil", None)
    ran = run("watch", "--pid", "4711", *QUICK)
    assert ran.code == 0
    assert "pid 4711 7.00 GiB" in ran.out
    assert ran.err.startswith("kvplan: note: psutil: not installed")


# --- a process that ends ----------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_the_end_of_the_process_ends_the_watch(
    run: Run, no_driver: None, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(seconds: float) -> None:
        child.kill()
        child.wait()

    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=end))
    ran = run("watch", "--pid", str(child.pid))
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 2
    assert ran.err.endswith(f"kvplan: note: process {child.pid} has ended\n")


def test_a_process_that_may_not_be_read_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    process = WatchedProcess(os.getpid())
    monkeypatch.setattr(psutil.Process, "memory_info", denied)
    with pytest.raises(EnvironmentProblem, match="run as its user or as root"):
        process.resident()


def test_a_pid_given_away_again_is_an_end(child: subprocess.Popen[bytes]) -> None:
    process = WatchedProcess(child.pid)
    assert process.resident() > 0
    child.kill()
    child.wait()
    with pytest.raises(ProcessEnded):
        process.resident()


# --- the CSV file -----------------------------------------------------------------------------------------------------

ROW = ["x"] * len(COLUMNS)


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_log_is_continued_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for _ in range(2):
        with CsvLog(str(path)) as log:
            log.add(ROW)
    assert lines_of(path) == [",".join(COLUMNS), ",".join(ROW), ",".join(ROW)]


def test_a_row_is_in_the_file_when_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(str(path)) as log:
        log.add(ROW)
        assert len(lines_of(path)) == 2


# The columns of a log without tokens per second.
FORMER = (
    "utc,elapsed_s,gpu_index,gpu_uuid,pid,gpu_total,gpu_reserved,gpu_used,gpu_free,gpu_is_host,process_used,"
    "process_is_estimated,others_used,gpu_utilization,memory_utilization,power_w,sm_clock_mhz,memory_clock_mhz,"
    "temperature_c,resident,host_total,host_available,server_kind,server_kv_usage,server_running,server_waiting,"
    "server_preemptions,server_prefix_hits,server_prefix_queries,server_hit_rate,server_num_blocks,"
    "server_block_size,server_kv_tokens,server_cache_dtype,server_problem"
)


def test_new_columns_are_at_the_end() -> None:
    assert ",".join(COLUMNS) == FORMER + (
        ",server_prompt_tokens,server_generation_tokens,server_prompt_tokens_per_s,server_output_tokens_per_s,"
        "server_age_s"
    )


@pytest.mark.parametrize(
    "before",
    ["a,b,c\n1,2,3\n", ",".join(COLUMNS), "notes\n", ",".join(COLUMNS) + ",more\n", f"{FORMER}\n"],
    ids=["others", "torn", "notes", "more", "former"],
)
def test_a_file_with_other_columns_is_refused_and_kept(tmp_path: Path, before: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(before)
    with pytest.raises(UsageError, match="has other columns; name a new file"):
        CsvLog(str(path))
    assert path.read_text() == before


def test_a_torn_last_line_does_not_swallow_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(",".join(COLUMNS) + "\n2026-11-21T")
    with CsvLog(str(path)) as log:
        log.add(ROW)
    assert lines_of(path)[1:] == ["2026-11-21T", ",".join(ROW)]


def test_an_empty_file_gets_a_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.touch()
    CsvLog(str(path)).__exit__()
    assert lines_of(path) == [",".join(COLUMNS)]


@posix
def test_a_pipe_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        CsvLog(str(tmp_path / "pipe"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_the_machines_fault(tmp_path: Path) -> None:
    with CsvLog(str(tmp_path / "log.csv")) as log:
        log._file.close()
        log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123 -- closed with the log
        with pytest.raises(EnvironmentProblem, match="No space left on device"):
            log.add(ROW)


# --- as a program -----------------------------------------------------------------------------------------------------

PROGRAM = (sys.executable, "-c", "from kvplan.cli.main import run; run()", "watch")


@posix
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_whole_rows(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    log = tmp_path / "log.csv"
    argv = [*PROGRAM, "--pid", str(os.getpid()), "--interval", "20ms", "--csv", str(log)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > 2)
        process.send_signal(sent)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert log.read_bytes().endswith(b"\n")
    assert {len(row) for row in csv.reader(lines_of(log))} == {len(COLUMNS)}


@posix
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_page_that_hangs_holds_up_no_interrupt(
    server: str, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    has_come, let_go = threading.Event(), threading.Event()

    def hang(handler: Any) -> None:
        has_come.set()
        let_go.wait(LIMIT_S)

    monkeypatch.setitem(PAGES, "/hanging", hang)
    argv = [*PROGRAM, "--pid", str(os.getpid()), "--metrics", f"{server}/hanging"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert has_come.wait(LIMIT_S)
        process.send_signal(sent)
        _, err = process.communicate(timeout=LIMIT_S)
    let_go.set()
    assert process.returncode == code
    assert b"Traceback" not in err


@posix
def test_a_reader_that_leaves_ends_the_watch_quietly() -> None:
    argv = [*PROGRAM, "--pid", str(os.getpid()), "--interval", "20ms"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(LIMIT_S) == 0
    assert b"error" not in err


@posix
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colors", "no colors"])
def test_on_a_terminal_the_view_is_redrawn_in_place(environment: dict[str, str]) -> None:
    import pty

    ours, theirs = pty.openpty()
    argv = [*PROGRAM, "--pid", str(os.getpid()), "--interval", "50ms", "--duration", "500ms"]
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        screen_bytes = b"".join(iter(lambda: read_terminal(ours), b""))
        os.close(ours)
    text = screen_bytes.decode()
    assert process.returncode == 0
    assert "resident" in text
    assert "\x1b[1A" in text  # up a line, over the last picture
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again
    assert ("\x1b[32m" in text) == (not environment)


def read_terminal(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # Linux' word for the other side having closed
        return b""


def test_an_estimate_loads_nothing_of_this() -> None:
    code = (
        "import sys; from kvplan.cli.main import main;"
        "main(['estimate', 'llama-3.1-8b', '--ctx', '4k', '--gpu', 'l4']);"
        "print(*(name for name in sys.modules if name in sys.argv[1:]), file=sys.stderr)"
    )
    names = [f"kvplan.{name}" for name in ("nvml", "watch", "doctor", "cli.watch", "cli.doctor")]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "", done.stderr  # behind the notes on the plan
