"""A server's /metrics page: what is read from it, and how it is had from servers that answer badly or not at all."""

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.measure import server_metrics
from kvplan.measure.server_metrics import (
    MetricsError,
    MetricsPage,
    ServerStats,
    checked_url,
    log_of_page,
    page_text,
    server_stats,
)
from tests.support.oracle_data import DATA, needs_oracle_data

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


def test_token_counters_are_summed_over_engines() -> None:
    page = (
        'vllm:prompt_tokens_total{engine="0"} 3000.0\n'
        'vllm:prompt_tokens_total{engine="1"} 500.0\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 9999.0\n'
        'vllm:generation_tokens_total{engine="0"} 12.0\n'
        'vllm:generation_tokens_total{engine="1"} 30.0\n'
        "vllm:generation_tokens_created 1.79e+09\n"
        "process_start_time_seconds 1.7951799704e+09\n"
    )
    stats = server_stats(page)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.started_s) == (3500, 42, 1795179970.4)


# As docs.sglang.io shows a page (production metrics).
SGLANG_TOKENS = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.557572e+06
"""


def test_a_sglang_page_counts_tokens_of_requests_that_have_ended() -> None:
    stats = server_stats(SGLANG_TOKENS)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8_128_902, 7_557_572)


def test_a_newer_sglang_page_counts_tokens_as_they_are_computed_each_replica_once() -> None:
    page = SGLANG_TOKENS + "".join(
        f'sglang:realtime_tokens_total{{dp_rank="{replica}",mode="{mode}",pp_rank="{stage}",tp_rank="0"}} {count}\n'
        for replica, mode, stage, count in [
            (0, "prefill_compute", 0, 1000),
            (0, "prefill_compute", 1, 1000),  # the same tokens, by the second stage of the pipeline
            (0, "prefill_cache", 0, 200),
            (1, "prefill_compute", 0, 30),
            (1, "decode", 0, 7),
        ]
    )
    stats = server_stats(page)
    assert (stats.prompt_tokens, stats.generation_tokens) == (1230, 7)


def test_a_newer_sglang_page_without_a_decoded_token_says_none() -> None:
    stats = server_stats(SGLANG_TOKENS + 'sglang:realtime_tokens_total{mode="prefill_compute"} 50\n')
    assert (stats.prompt_tokens, stats.generation_tokens) == (50, 0)


@needs_oracle_data
def test_a_real_servers_page_is_read() -> None:
    page = DATA / "metrics_vllm_0.33.0.txt"
    if not page.exists():
        pytest.skip(f"no {page.name} in the oracle data")
    stats = server_stats(page.read_text(encoding="utf-8"))
    assert (stats.kv_usage, stats.running, stats.waiting, stats.preemptions) == (0.4321, 7, 5, 2)
    assert (stats.prefix_hits, stats.prefix_queries) == (1024, 3000)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.started_s) == (0, 12, 1795179970.4)
    assert stats.left_out == ()
    assert (stats.num_blocks, stats.block_size, stats.kv_tokens) == (27_306, 16, 436_896)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("NaN", "nan"), ("+Inf", "inf"), ("1e999", "inf"), ("7e300", "7e+300"), ("-0.25", "-0.25"), ("1.01", "1.01"),
        ("9" * 400, "inf"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("metric", ["vllm:kv_cache_usage_perc", "sglang:token_usage", "sglang:cache_hit_rate"])
def test_a_share_that_cannot_be_is_left_out_and_said(metric: str, value: str, text: str) -> None:
    stats = server_stats(f"{metric} {value}\n{metric.partition(':')[0]}:prompt_tokens_total 1\n")
    assert (stats.kv_usage, stats.hit_rate, stats.prompt_tokens) == (None, None, 1)
    assert stats.left_out == ((metric, f"{text} is not a share"),)


@pytest.mark.parametrize("value", ["NaN", "-Inf", "7e300", "-1", "1.1e15"])
@pytest.mark.parametrize(
    ("metric", "field"),
    [
        ("vllm:num_requests_running", "running"),
        ("vllm:num_requests_waiting", "waiting"),
        ("vllm:num_preemptions_total", "preemptions"),
        ("vllm:prefix_cache_queries_total", "prefix_queries"),
        ("vllm:generation_tokens_total", "generation_tokens"),
        ("sglang:num_queue_reqs", "waiting"),
        ('sglang:realtime_tokens_total{mode="decode"}', "generation_tokens"),
    ],
)
def test_a_count_that_cannot_be_is_left_out_and_said(metric: str, field: str, value: str) -> None:
    stats = server_stats(f"{metric} {value}\n")
    assert getattr(stats, field) is None
    assert stats.left_out == ((metric.partition("{")[0], f"{float(value):g} is not a count"),)


def test_of_several_engines_one_that_says_nonsense_spoils_the_sum() -> None:
    page = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} -1\n'
    assert server_stats(page).running is None


def test_the_whole_of_the_cache_is_a_share() -> None:
    stats = server_stats("vllm:kv_cache_usage_perc 1.0\n")
    assert (stats.kv_usage, stats.left_out) == (1.0, ())


def test_more_hits_than_queries_are_no_share() -> None:
    stats = server_stats("vllm:prefix_cache_hits_total 3001\nvllm:prefix_cache_queries_total 3000\n")
    assert (stats.hit_rate, stats.prefix_hits, stats.prefix_queries) == (None, None, 3000)
    assert stats.left_out == (("vllm:prefix_cache_hits_total", "3,001 of 3,000 is not a share"),)


def test_a_cache_of_more_tokens_than_can_be_is_left_out() -> None:
    stats = server_stats(f'vllm:cache_config_info{{block_size="{10**14}",num_gpu_blocks="{10**14}"}} 1.0\n')
    assert stats.kv_tokens is None
    assert stats.left_out == (("vllm:cache_config_info", "1e+28 tokens is not a count"),)


def test_a_page_of_a_process_alone_is_no_servers() -> None:
    for read in (server_stats, log_of_page):
        with pytest.raises(MetricsError, match="no vllm:, sglang: or llamacpp: metrics"):
            read("process_start_time_seconds 1.79e+09\n")


@pytest.mark.parametrize("info", ['num_gpu_blocks="None"', 'num_gpu_blocks="-1"', 'num_gpu_blocks="1e9"'])
def test_a_cache_size_that_is_no_count_is_left_out(info: str) -> None:
    stats = server_stats(f'vllm:cache_config_info{{{info},block_size="16"}} 1.0\n')
    assert (stats.num_blocks, stats.block_size, stats.kv_tokens) == (None, 16, None)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("", "no vllm:, sglang: or llamacpp: metrics"),
        ("<html><body>hello</body></html>", "no vllm:, sglang: or llamacpp: metrics"),
        ("vllm:num_requests_running many\n", "not in Prometheus' text format"),
        (f"vllm:num_requests_running 1 {'9' * 400}\n", "not in Prometheus' text format"),
        ('vllm:num_requests_running{engine="0} 1\n', "not in Prometheus' text format"),
        ("vllm:num_requests_running 1\n" * (server_metrics.MAX_LINES + 1), "too many or too long"),
        (f'vllm:cache_config_info{{a="{"x" * server_metrics.MAX_LINE_CHARS}"}} 1\n', "too many or too long"),
    ],
    ids=["empty", "html", "no number", "no time", "open quote", "too many lines", "long line"],
)
def test_what_is_no_servers_page_is_refused(page: str, fault: str) -> None:
    with pytest.raises(MetricsError, match=fault):
        server_stats(page)


# --- fetching it ------------------------------------------------------------------------------------------------------

Responder = Callable[[http.server.BaseHTTPRequestHandler], None]


def say(body: bytes, status: int = 200, **headers: str) -> Responder:
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


def say_endlessly(handler: http.server.BaseHTTPRequestHandler) -> None:
    """10 GB of metrics, as long as somebody reads them."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(10 * 10**9))
    handler.end_headers()
    piece = b"vllm:num_requests_running 1\n" * 2000
    try:
        for _ in range(10 * 10**9 // len(piece)):
            handler.wfile.write(piece)
    except OSError:
        return


def say_less(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A page that ends amid a number."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"vllm:generation_tokens_total 12")


def shut(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def say_nothing(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.connection.recv(1)  # until the other side gives up


PAGES: dict[str, Responder] = {
    "/metrics": say(VLLM_PAGE.encode()),
    "/moved": say(b"", 302, Location="/metrics"),
    "/round": say(b"", 307, Location="/round"),
    "/elsewhere": say(b"", 302, Location="http://192.0.2.7/metrics"),
    "/file": say(b"", 302, Location="file:///etc/passwd"),
    "/nowhere": say(b"", 301),
    "/missing": say(b"not found", 404),
    "/other": say(b"node_cpu_seconds_total 1\nprocess_start_time_seconds 1.79e+09\n"),
    "/large": say(b"# " + b"x" * 5000),
    "/latin": say(VLLM_PAGE.encode() + b"# \xe9\n"),
    "/html": say(VLLM_PAGE.encode(), 200, **{"Content-Type": "text/html; charset=utf-8"}),
    "/endless": say_endlessly,
    "/less": say_less,
    "/shut": shut,
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
    ("path", "fault", "answered"),
    [
        ("/round", "more than 3 redirects", True),
        ("/elsewhere", "redirected to another host or port (192.0.2.7), not followed", True),
        ("/file", "redirected to what is not an http or https URL", True),
        ("/nowhere", "more than 3 redirects", True),
        ("/missing", "HTTP 404 Not Found", True),
        ("/large", "more than 0 MB", True),
        ("/html", "a web page (text/html), not metrics", True),
        ("/other", "no vllm:, sglang: or llamacpp: metrics on it", True),
        ("/endless", "more than 0 MB", True),
        ("/less", "cut off before its end", True),
        ("/shut", "closed without an answer", False),
        ("/garbage", "not an HTTP answer (BadStatusLine)", True),
    ],
)
def test_a_page_that_cannot_be_had_says_why_and_whether_anything_came(
    server: str, monkeypatch: pytest.MonkeyPatch, path: str, fault: str, answered: bool
) -> None:
    monkeypatch.setattr(server_metrics, "MAX_PAGE_BYTES", 4000)
    with pytest.raises(MetricsError) as caught:
        MetricsPage(server + path).read()
    assert (str(caught.value), caught.value.answered) == (fault, answered)


@pytest.mark.parametrize(("path", "answered"), [("/drip-body", True), ("/drip-headers", False), ("/silent", False)])
def test_a_server_that_takes_its_time_is_left_at_the_deadline(server: str, path: str, answered: bool) -> None:
    page = MetricsPage(server + path, deadline_s=1)
    with pytest.raises(MetricsError, match=r"no whole answer in 1 s|no answer in time") as caught:
        page.read()
    assert caught.value.answered is answered
    fetch = page._fetch
    assert fetch is not None
    fetch.join(900)
    assert not fetch.is_alive()


def test_nobody_listening_is_said() -> None:
    with pytest.raises(MetricsError, match="connection refused") as caught:
        MetricsPage("http://127.0.0.1:1/metrics").read()
    assert not caught.value.answered


def test_a_host_whose_name_cannot_be_is_no_answer() -> None:
    with pytest.raises(MetricsError, match="no such host") as caught:
        MetricsPage(f"http://{'a' * 64}.invalid/metrics").read()  # a label of a name has 63 letters at most
    assert not caught.value.answered


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


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("https://host/metrics", "http://host/metrics"),
        ("http://host:8000/metrics", "http://host:8001/metrics"),  # something else on that machine
        ("http://host/metrics", "http://host:8001/metrics"),
        ("http://host:8000/metrics", "https://host/metrics"),
    ],
)
def test_a_redirect_stays_on_its_host_and_port(url: str, location: str) -> None:
    with pytest.raises(MetricsError, match="redirected to another host or port"):
        server_metrics._redirected(checked_url(url), location)


def test_a_redirect_to_the_same_port_by_its_number_is_followed() -> None:
    assert server_metrics._redirected(checked_url("http://host/a"), "http://host:80/b").path == "/b"


def test_a_page_whose_labels_take_too_long_to_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "DEADLINE_S", -1)
    with pytest.raises(MetricsError, match="labels are too long"):
        server_stats("vllm:num_requests_running 1\n")


def test_a_sum_that_no_server_reaches_is_left_out() -> None:
    lines = [f'vllm:num_requests_running{{engine="{i}"}} {10**15}' for i in range(2)]
    stats = server_stats("\n".join(lines) + "\n")
    assert stats.running is None
    assert [metric for metric, _ in stats.left_out] == ["vllm:num_requests_running"]


def test_http_may_become_https() -> None:
    assert server_metrics._redirected(checked_url("http://host/a"), "https://host/b").geturl() == "https://host/b"


def test_a_server_without_encryption_is_said(server: str) -> None:
    with pytest.raises(MetricsError) as caught:
        MetricsPage(server.replace("http:", "https:")).read()
    assert "wrong version number" in str(caught.value).lower() or "ssl" in str(caught.value).lower()
    assert caught.value.answered


def test_a_body_of_10_gb_is_left_at_10_mb(server: str) -> None:
    with pytest.raises(MetricsError, match="more than 10 MB"):
        MetricsPage(f"{server}/endless").read()


# --- how a server was set up ------------------------------------------------------------------------------------------

SETUP_PAGE = """\
vllm:num_requests_running{model_name="org/model"} 7
vllm:cache_config_info{block_size="32",cache_dtype="fp8",enable_prefix_caching="True",gpu_memory_utilization="0.92",\
kv_cache_memory_bytes="None",num_gpu_blocks="27306",kv_cache_size_tokens="436896",kv_cache_max_concurrency="53.33",\
mamba_ssm_cache_dtype="auto",num_gpu_blocks_override="None",user_specified_block_size="True"} 1.0
"""


def setup_of(page: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """(server, flags, figures) of a page."""
    log = log_of_page(page)
    return log.engine, log.flags, {reading.fact: reading.text for reading in log.readings}


def test_a_vllm_page_says_how_its_cache_was_set_up() -> None:
    assert setup_of(SETUP_PAGE) == (
        "vllm",
        {
            "model": "org/model",
            "gpu_memory_utilization": "0.92",
            "kv_cache_dtype": "fp8",
            "enable_prefix_caching": "True",
            "block_size": "32",
        },
        {"num_blocks": "27306", "kv_tokens": "436896", "max_concurrency": "53.33"},
    )


def test_of_several_engines_the_smallest_pool_is_read() -> None:
    engines = [("0", "500"), ("1", "400"), ("2", "None")]
    lines = [f'vllm:cache_config_info{{engine="{name}",num_gpu_blocks="{blocks}"}} 1.0' for name, blocks in engines]
    assert setup_of("\n".join(lines)) == ("vllm", {"data_parallel_size": "3"}, {"num_blocks": "400"})
    assert setup_of("vllm:num_requests_running 1\n") == ("vllm", {}, {})


def test_an_older_page_says_less() -> None:
    setup = setup_of('vllm:cache_config_info{block_size="16",num_gpu_blocks="27306"} 1.0\n')
    assert setup == ("vllm", {}, {"num_blocks": "27306"})


def test_a_sglang_page_says_its_constants() -> None:
    page = (
        'sglang:max_total_num_tokens{model_name="org/a",tp_rank="0"} 871371.0\n'
        'sglang:max_total_num_tokens{model_name="org/a",tp_rank="1"} 871400.0\n'
        'sglang:weight_memory_usage_gb{model_name="org/a"} 14.98\n'
        'sglang:kv_cache_memory_usage_gb{model_name="org/a"} 106.36\n'
        "sglang:context_len 8192.0\n"
        'sglang:page_size{model_name="org/a"} 64.0\n'
    )
    facts = {"kv_tokens": "871371", "weights": "14.98", "available_kv": "106.36", "context": "8192"}
    assert setup_of(page) == ("sglang", {"model": "org/a", "page_size": "64"}, facts)


@pytest.mark.parametrize("label", ['"-5"', '"1e9"', '"nan"', '"__import__"', '"' + "9" * 40 + '"'])
def test_a_label_that_is_no_figure_is_no_fact(label: str) -> None:
    assert log_of_page(f"vllm:cache_config_info{{num_gpu_blocks={label}}} 1.0\n").readings == ()


def test_a_page_comes_from_a_url_or_a_file(server: str, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text(VLLM_PAGE)
    assert page_text(str(path)) == page_text(f"{server}/metrics") == VLLM_PAGE
    path.write_bytes(b"vllm:\xff 1\n")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        page_text(str(path))
    with pytest.raises(EnvironmentProblem, match="HTTP 404 Not Found; check the server"):
        page_text(f"{server}/missing")
    for url in ("file:///etc/passwd", "FILE:/etc/passwd", "ftp://host/x", "data:text/plain,x", "gopher://x"):
        with pytest.raises(UsageError, match="not an http or https URL"):
            page_text(url)


@needs_oracle_data
def test_a_real_pages_setup_is_read() -> None:
    page = DATA / "metrics_vllm_0.33.0.txt"
    if not page.exists():
        pytest.skip(f"no {page.name} in the oracle data")
    _, flags, figures = setup_of(page.read_text(encoding="utf-8"))
    assert figures == {"num_blocks": "27306", "kv_tokens": "436896", "max_concurrency": "53.33"}
    assert flags == {
        "model": "meta-llama/Llama-3.1-8B", "gpu_memory_utilization": "0.92", "enable_prefix_caching": "True"
    }  # fmt: skip
