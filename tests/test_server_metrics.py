"""A server's /metrics page: what is read from it, and how it is had from servers that answer badly or not at all."""

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan import server_metrics
from kvplan.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.server_metrics import (
    MetricsError,
    MetricsPage,
    ServerSetup,
    ServerStats,
    checked_url,
    page_text,
    server_setup,
    server_stats,
)
from tests.oracle_data import DATA, needs_oracle_data

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
        ("vllm:num_requests_running 1\n" * (server_metrics.MAX_LINES + 1), "too many or too long"),
        (f'vllm:cache_config_info{{a="{"x" * server_metrics.MAX_LINE_CHARS}"}} 1\n', "too many or too long"),
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


def shut(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


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
    "/html": say(VLLM_PAGE.encode(), 200, **{"Content-Type": "text/html; charset=utf-8"}),
    "/endless": say_endlessly,
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
    ("path", "fault"),
    [
        ("/round", "more than 3 redirects"),
        ("/elsewhere", "redirected to another host (192.0.2.7), not followed"),
        ("/file", "redirected to what is no http or https URL"),
        ("/nowhere", "more than 3 redirects"),
        ("/missing", "HTTP 404 Not Found"),
        ("/large", "more than 0 MB"),
        ("/html", "a web page (text/html), not metrics"),
        ("/endless", "more than 0 MB"),
        ("/shut", "closed without an answer"),
        ("/garbage", "not an HTTP answer (BadStatusLine)"),
    ],
)
def test_a_page_that_cannot_be_had_says_why(
    server: str, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    monkeypatch.setattr(server_metrics, "MAX_PAGE_BYTES", 4000)
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
        server_metrics._redirected(checked_url("https://host/metrics"), "http://host/metrics")
    assert server_metrics._redirected(checked_url("http://host/a"), "https://host/b").geturl() == "https://host/b"


def test_a_server_without_encryption_is_said(server: str) -> None:
    with pytest.raises(MetricsError) as caught:
        MetricsPage(server.replace("http:", "https:")).read()
    assert "wrong version number" in str(caught.value).lower() or "ssl" in str(caught.value).lower()


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


def test_a_vllm_page_says_how_its_cache_was_set_up() -> None:
    assert server_setup(SETUP_PAGE) == ServerSetup(
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
    assert server_setup("\n".join(lines)) == ServerSetup("vllm", {}, {"num_blocks": "400"}, num_engines=3)
    assert server_setup("vllm:num_requests_running 1\n").num_engines == 1


def test_an_older_page_says_less() -> None:
    setup = server_setup('vllm:cache_config_info{block_size="16",num_gpu_blocks="27306"} 1.0\n')
    assert setup == ServerSetup("vllm", {}, {"num_blocks": "27306"})


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
    assert server_setup(page) == ServerSetup("sglang", {"model": "org/a", "page_size": "64"}, facts)


@pytest.mark.parametrize("label", ['"-5"', '"1e9"', '"nan"', '"__import__"', '"' + "9" * 40 + '"'])
def test_a_label_that_is_no_figure_is_no_fact(label: str) -> None:
    assert server_setup(f"vllm:cache_config_info{{num_gpu_blocks={label}}} 1.0\n").facts == {}


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
    setup = server_setup(page.read_text(encoding="utf-8"))
    assert setup.facts == {"num_blocks": "27306", "kv_tokens": "436896", "max_concurrency": "53.33"}
    assert setup.flags == {
        "model": "meta-llama/Llama-3.1-8B", "gpu_memory_utilization": "0.92", "enable_prefix_caching": "True"
    }  # fmt: skip
