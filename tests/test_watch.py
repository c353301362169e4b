"""`kvplan watch`: what it reads, what it shows, what it logs, and how it ends."""

import csv
import http.server
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
from kvplan import watch
from kvplan.cli.watch import Screen, bar, memory_rows, one_line, ticks, view_lines
from kvplan.errors import EnvironmentProblem, UsageError
from kvplan.nvml import DeviceMemory, DeviceSample, HostMemory
from kvplan.report.lines import plain
from kvplan.watch import (
    COLUMNS,
    CsvLog,
    MetricsError,
    MetricsPage,
    ProcessEnded,
    Reading,
    ServerStats,
    Watched,
    WatchedProcess,
    checked_url,
    server_stats,
)
from tests.cli import Run, refused, run
from tests.fake_nvml import GIB, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, MIB, FakeGpu, Install, install, no_driver
from tests.oracle_data import DATA, needs_oracle_data

__all__ = ["install", "no_driver", "run"]  # fixtures

QUICK = ("--interval", "1s", "--duration", "2s")  # three readings; sleeping takes no time in these tests
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")

VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.79e+09
vllm:prefix_cache_queries_total{engine="0"} 3000.0
vllm:prefix_cache_hits_total{engine="0"} 750.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="27306",note="a \\"quoted\\" text"} 1.0
process_resident_memory_bytes 6.46479872e+08
"""
SGLANG_PAGE = """\
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
sglang:num_running_reqs{model_name="m"} 162
sglang:num_queue_reqs{model_name="m"} 2826
sglang:cache_hit_rate{model_name="m"} 0.0075
"""


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


# --- a server's page --------------------------------------------------------------------------------------------------


def test_a_vllm_page_is_summed_over_engines_and_its_fullest_cache_counts() -> None:
    assert server_stats(VLLM_PAGE) == ServerStats(
        kind="vllm",
        kv_usage=0.5,
        running=7,
        waiting=5,
        preemptions=2,
        prefix_hits=750,
        prefix_queries=3000,
        hit_rate=0.25,
        num_blocks=27_306,
        block_size=16,
        kv_tokens=436_896,  # 27,306 * 16
        cache_dtype="auto",
    )


def test_a_sglang_page_gives_its_four_figures() -> None:
    assert server_stats(SGLANG_PAGE) == ServerStats(
        kind="sglang", kv_usage=0.28, running=162, waiting=2826, hit_rate=0.0075
    )


def test_older_names_are_read() -> None:
    page = (
        "vllm:gpu_cache_usage_perc 0.125\nvllm:gpu_prefix_cache_hits_total 1\nvllm:gpu_prefix_cache_queries_total 8\n"
    )
    stats = server_stats(page)
    assert (stats.kv_usage, stats.hit_rate) == (0.125, 0.125)


@needs_oracle_data
def test_a_real_servers_page_is_read() -> None:
    page = DATA / "metrics_vllm_0.33.0.txt"
    if not page.exists():
        pytest.skip(f"no {page.name} in the oracle data")
    stats = server_stats(page.read_text(encoding="utf-8"))
    assert (stats.kv_usage, stats.running, stats.waiting, stats.preemptions) == (0.4321, 7, 5, 2)
    assert (stats.prefix_hits, stats.prefix_queries) == (1024, 3000)
    assert (stats.num_blocks, stats.block_size, stats.kv_tokens) == (27_306, 16, 436_896)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999"])
def test_a_figure_that_is_no_number_is_left_out(value: str) -> None:
    assert server_stats(f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running 1\n").kv_usage is None


@pytest.mark.parametrize("info", ['num_gpu_blocks="None"', 'num_gpu_blocks="-1"', 'num_gpu_blocks="1e9"'])
def test_a_cache_size_that_is_no_count_is_left_out(info: str) -> None:
    stats = server_stats(f'vllm:cache_config_info{{{info},block_size="16"}} 1.0\n')
    assert (stats.num_blocks, stats.block_size, stats.kv_tokens) == (None, 16, None)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("", "no vllm: or sglang: metrics"),
        ("<html><body>hello</body></html>", "no vllm: or sglang: metrics"),
        ("vllm:num_requests_running many\n", "not in Prometheus' text format"),
        ('vllm:num_requests_running{engine="0} 1\n', "not in Prometheus' text format"),
        ("vllm:num_requests_running 1\n" * (watch.MAX_LINES + 1), "too many or too long"),
        (f'vllm:cache_config_info{{a="{"x" * watch.MAX_LINE_CHARS}"}} 1\n', "too many or too long"),
    ],
    ids=["empty", "html", "no number", "open quote", "too many lines", "long line"],
)
def test_what_is_no_servers_page_is_refused(page: str, fault: str) -> None:
    with pytest.raises(MetricsError, match=fault):
        server_stats(page)


# --- fetching it ------------------------------------------------------------------------------------------------------

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def say(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def drip_body(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    drip(handler, b"#")


def drip_headers(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    drip(handler, b"a")


def drip(handler: http.server.BaseHTTPRequestHandler, byte: bytes) -> None:
    """A byte now and then, each well within any timeout of a single read, until nobody listens."""
    for _ in range(500):
        try:
            handler.wfile.write(byte)
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.02)


def say_garbage(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")


def say_nothing(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.connection.recv(1)  # until the other side gives up


PAGES: dict[str, Answer] = {
    "/metrics": say(VLLM_PAGE.encode()),
    "/moved": say(b"", 302, Location="/metrics"),
    "/round": say(b"", 307, Location="/round"),
    "/elsewhere": say(b"", 302, Location="http://192.0.2.7/metrics"),
    "/file": say(b"", 302, Location="file:///etc/passwd"),
    "/nowhere": say(b"", 301),
    "/missing": say(b"not found", 404),
    "/large": say(b"# " + b"x" * 5000),
    "/latin": say(VLLM_PAGE.encode() + b"# \xe9\n"),
    "/garbage": say_garbage,
    "/drip-body": drip_body,
    "/drip-headers": drip_headers,
    "/silent": say_nothing,
}


@pytest.fixture
def server() -> Iterator[str]:
    """The base URL of a server of this test's own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            PAGES[self.path](self)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Standard error is kvplan's in these tests."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/moved", "/latin"])
def test_a_page_is_fetched(server: str, path: str) -> None:
    page = MetricsPage(server + path)
    assert page.read().running == 7
    assert page.read().running == 7


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/round", "more than 3 redirects"),
        ("/elsewhere", "redirected to another host (192.0.2.7), not followed"),
        ("/file", "redirected to what is no http or https URL"),
        ("/nowhere", "more than 3 redirects"),
        ("/missing", "HTTP 404 Not Found"),
        ("/large", "more than 0 MB"),
        ("/garbage", "not an HTTP answer (BadStatusLine)"),
    ],
)
def test_a_page_that_cannot_be_had_says_why(
    server: str, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    monkeypatch.setattr(watch, "MAX_PAGE_BYTES", 4000)
    with pytest.raises(MetricsError) as caught:
        MetricsPage(server + path).read()
    assert str(caught.value) == fault


@pytest.mark.parametrize("path", ["/drip-body", "/drip-headers", "/silent"])
def test_a_server_that_takes_its_time_is_left_at_the_deadline(server: str, path: str) -> None:
    page = MetricsPage(server + path, deadline_s=0.2)
    start = time.monotonic()
    with pytest.raises(MetricsError, match=r"no whole answer in 0.2 s|no answer in time"):
        page.read()
    assert time.monotonic() - start < 5  # against hanging: 500 bytes would drip for 10 s
    fetch = page._fetch
    assert fetch is not None
    fetch.join(5)
    assert not fetch.is_alive()


def test_nobody_listening_is_said() -> None:
    with pytest.raises(MetricsError, match="connection refused"):
        MetricsPage("http://127.0.0.1:1/metrics").read()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://localhost/metrics",
        "file:///etc/passwd",
        "localhost:8000",
        "http://",
        "http://host:port/",
        "http://host:99999/",
        "http://a b/",
        "http://host/\r\nX: y",
        "http://[::1",
        "http://user:secret@host/metrics",
    ],
)
def test_what_is_no_plain_http_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_url(url)
    assert str(caught.value).startswith("--metrics")
    assert "secret" not in str(caught.value)


def test_https_is_not_left_for_http() -> None:
    with pytest.raises(MetricsError, match="redirected to another host"):
        watch._redirected(checked_url("https://host/metrics"), "http://host/metrics")
    assert watch._redirected(checked_url("http://host/a"), "https://host/b").geturl() == "https://host/b"


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


def reading(**said: Any) -> Reading:
    values: dict[str, Any] = {
        "sample": None, "resident": None, "host": None, "server": None, "server_problem": None,
    }  # fmt: skip
    return Reading(utc="2026-11-21T10:11:12.345Z", elapsed_s=3725.0, **{**values, **said})


def watched_page() -> Watched:
    return Watched(pid=42, page=MetricsPage("http://127.0.0.1:1/"))


def test_a_reading_is_one_line() -> None:
    stats = server_stats(VLLM_PAGE)
    assert one_line(reading(sample=SAMPLE, resident=3 * MIB, host=HOST, server=stats), watched_page()) == (
        "10:11:12  19.00 of 80.00 GiB used, pid 42 10.00 GiB, others 8.00 GiB, 37 % busy, memory busy 21 %, 312 W, "
        "SM 1,410 MHz, memory 1,593 MHz, 56 C, resident 3 MiB, machine 16.00 of 64.00 GiB used, "
        "vllm: KV 50.0 % of 436,896 tokens, 27,306 blocks, 7 running, 5 waiting, 2 preemptions, prefix hits 25.0 %"
    )


def test_a_page_out_of_reach_is_a_part_of_the_line() -> None:
    line = one_line(reading(host=HOST, server_problem="connection refused"), watched_page())
    assert line == "10:11:12  machine 16.00 of 64.00 GiB used, metrics: unreachable (connection refused)"


def test_the_view_shows_every_part() -> None:
    screen = Screen(watched_page(), "GPU 0: NVIDIA A100")
    shown = reading(sample=SAMPLE, resident=16 * GIB, host=HOST, server=server_stats(SGLANG_PAGE))
    assert [plain(styled) for styled in view_lines(shown, screen, blocks=False)] == [
        "GPU 0: NVIDIA A100",
        "10:11:12 UTC, 1:02:05 watched",
        "",
        "memory   ##########..............................  19.00 of 80.00 GiB used",
        "  pid 42          10.00 GiB",
        "  others           8.00 GiB",
        "  other use        1.00 GiB",
        "  reserved         1.00 GiB",
        "  free            60.00 GiB",
        "busy     ###############.........................",
        "  37 % busy, memory busy 21 %, 312 W, SM 1,410 MHz, memory 1,593 MHz, 56 C",
        "",
        "machine  ##########..............................  16.00 of 64.00 GiB used",
        "  resident           16 GiB",
        "",
        "KV       ###########.............................",
        "sglang: KV 28.0 %, 162 running, 2,826 waiting, prefix hits 0.8 %",
    ]


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
    assert sum(len(text) for text, _ in bar(parts, total, True)) == view.BAR


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


def test_31_without_a_gpu_or_a_process_the_cure_names_both(run: Run, no_driver: None) -> None:
    line = refused(run("watch", *QUICK), 3)
    assert line.startswith("NVIDIA driver: not found")
    assert line.endswith("without a GPU, watch a process with --pid PID")


def test_31_without_a_gpu_a_process_is_watched(run: Run, no_driver: None) -> None:
    ran = run("watch", "--pid", str(os.getpid()), *QUICK)
    assert (ran.code, ran.err) == (0, "kvplan: note: no GPU: the machine's own memory is shown\n")
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
        (("--pid", "0"), "--pid: must be at least 1 ('0')"),
        (("--pid", "4194304"), "--pid 4194304: there is no such process"),  # above Linux' highest pid
        (("--metrics", "gopher://x"), "--metrics gopher://x: not an http or https URL"),
        (("--csv", "/no/such/folder/log.csv"), "--csv /no/such/folder/log.csv: cannot be written"),
        (("--csv", "/"), "--csv /: is not a regular file"),
    ],
)
def test_bad_usage_is_one_line(run: Run, install: Install, argv: tuple[str, ...], fault: str) -> None:
    install(FakeGpu())
    assert refused(run("watch", *argv)).startswith(fault)


def test_a_gpu_that_is_not_there_is_one_line(run: Run, install: Install) -> None:
    install(FakeGpu())
    assert refused(run("watch", "--gpu-index", "3"), 3).startswith("GPU 3: there is no such GPU (1 found)")


def test_a_server_is_watched_without_a_gpu(run: Run, no_driver: None, server: str) -> None:
    ran = run("watch", "--metrics", f"{server}/metrics", *QUICK)
    assert ran.code == 0
    assert "vllm: KV 50.0 % of 436,896 tokens, 27,306 blocks, 7 running, 5 waiting" in ran.out


def test_a_page_out_of_reach_does_not_end_the_watch(run: Run, install: Install) -> None:
    install(FakeGpu())
    ran = run("watch", "--metrics", "http://127.0.0.1:1/metrics", *QUICK)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()[1:]
    assert len(lines) == 3
    assert all(line.endswith("metrics: unreachable (connection refused)") for line in lines)


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
    assert ran.errors[0].endswith(f"run `pip install {missing}`")


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


@pytest.mark.parametrize("before", ["a,b,c\n1,2,3\n", ",".join(COLUMNS), "notes\n", ",".join(COLUMNS) + ",more\n"])
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
LIMIT_S = 60


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)


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
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_on_a_terminal_the_view_is_redrawn_in_place(environment: dict[str, str]) -> None:
    import pty

    ours, theirs = pty.openpty()
    argv = [*PROGRAM, "--pid", str(os.getpid()), "--interval", "50ms", "--duration", "500ms"]
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: read_terminal(ours), b""))
        os.close(ours)
    text = shown.decode()
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
    assert done.stderr.strip() == ""
