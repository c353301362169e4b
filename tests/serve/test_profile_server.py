"""`kvplan profile --server`: what is measured from outside is what the server counted, and other commands read it."""

import asyncio
import json
import math
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from kvplan.cli.profile_server import base_of, paced
from kvplan.cli.run_options import ProfileOptions
from kvplan.core.errors import UsageError
from kvplan.documents.schema import document_schema
from kvplan.measure import drive
from kvplan.planning.plan import plan
from kvplan.serve.text import stand_in
from kvplan.serve.twin import Twin
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.steptime import step_time
from kvplan.workloads.planned import PlannedRequest
from tests.support.cli import Run, refused, run
from tests.support.serving import MODEL, Serving, planned, serving, twin

__all__ = ["run"]  # a fixture


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


def test_the_answer_is_what_the_server_counted(run: Run, server: Serving, tmp_path: Path) -> None:
    target = tmp_path / "run"
    load = ("--num-seqs", "12", "--prompt-tokens", "40", "--output-tokens", "6", "--shared-prefix", "32")
    words = (*load, "--max-concurrency", "3", "--interval", "20ms", "-o", target, "--format", "json", "-q")
    ran = run("profile", "--server", server.url, *words)
    assert ran.code == 0, ran.err
    doc = ran.json
    Draft202012Validator(document_schema("server-run")).validate(doc)
    assert (doc["model"], doc["num_requests"], doc["num_failed"]) == (MODEL, 12, 0)
    assert doc["prompt_tokens"] == 12 * 40 == server.metric("vllm:prompt_tokens_total")
    assert doc["output_tokens"] == 12 * 6 == server.metric("vllm:generation_tokens_total")
    assert server.metric("vllm:request_success_total") == 12
    hits, queries = (server.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert hits > 0  # two blocks of 16 tokens, from the second request on
    assert doc["pool"]["hit_rate"] == pytest.approx(hits / queries)
    assert doc["pool"]["peak_running"] <= 3
    assert {path.name for path in target.iterdir()} == {"bench.json", "before.prom", "after.prom", "samples.csv"}

    compared = run("reconcile", "--bench", target / "bench.json", "--gpu", "h100-80g", "--format", "json")
    assert compared.code == 0, compared.err
    assert (compared.json["load"], compared.json["tool"]) == ("3 users", "kvplan profile")
    used = run("rightsize", target / "before.prom", target / "after.prom", "--interval", "1s", "--format", "json")
    assert used.code == 0, used.err


def test_prompts_are_of_the_servers_own_vocabulary(run: Run, tmp_path: Path) -> None:
    """A model of 300 tokens refuses ids beyond them, as vLLM does; of 128,256 the ids from 1,000 are drawn."""
    request = planned().request
    small = plan(replace(request, spec=replace(request.spec, vocab_size=300)))
    backend = Twin(small, step_time(small, Shares(), None), stand_in(300), speed=1e4)
    with serving(backend) as running:
        words = ("--num-seqs", "5", "--prompt-tokens", "40", "--output-tokens", "4", "-o", tmp_path / "run", "-q")
        ran = run("profile", "--server", running.url, *words, "--format", "json")
        assert ran.code == 0, ran.err
        assert (ran.json["num_requests"], ran.json["num_failed"]) == (5, 0)
        assert running.metric("vllm:prompt_tokens_total") == 5 * 40
        assert drive.token_ids_of(f"{running.url}/nowhere", MODEL) == drive.TOKEN_IDS


def test_a_large_vocabulary_is_drawn_from_widely(server: Serving) -> None:
    ids = drive.token_ids_of(server.url, MODEL)
    assert (ids[0], len(ids) > 5_000, ids[-1] < 20_000) == (1_000, True, True)


def test_times_are_those_of_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent at 10 s; chunks at 12, 12.5 and 14 s: 2 s to the first token, then gaps of 0.5 and 1.5 s."""
    chunks = [{"choices": [{"text": "a"}]}] * 3 + [{"choices": [], "usage": {"completion_tokens": 3}}]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    clock = iter((10.0, 12.0, 12.5, 14.0, 15.0))
    timed = drive.Timed(5)

    async def send() -> None:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text=stream))
        async with httpx2.AsyncClient(transport=transport) as client:
            monkeypatch.setattr(drive, "time", SimpleNamespace(monotonic=lambda: next(clock)))
            await drive._time(client, "http://server/v1/completions", {}, timed)

    asyncio.run(send())
    assert (timed.ttft_s, timed.gaps_s, timed.output_tokens) == (2.0, [0.5, 1.5], 3)
    assert (timed.latency_s, timed.tpot_s) == (4.0, 1.0)


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0, 8.0, 7.0, 1.5]])
def test_percentiles_are_numpys(values: list[float]) -> None:
    for percent in (50, 90, 99):
        assert drive.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_requests_that_fail_are_counted_with_their_reason(run: Run, server: Serving, tmp_path: Path) -> None:
    """The server's context is 8,192 tokens: prompts of 9,000 are refused, and nothing else is measured."""
    words = ("--num-seqs", "2", "--prompt-tokens", "9000", "-o", tmp_path / "run", "--interval", "20ms")
    ran = run("profile", "--server", server.url, *words)
    assert ran.code == 4
    assert "none of 2 requests was answered (HTTP 400" in ran.out
    assert not (tmp_path / "run" / "bench.json").exists()


@pytest.mark.full  # starts a process
def test_a_server_is_started_measured_and_stopped(run: Run, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvplan", "serve", MODEL, "--simulate", "h100-80g", "--ctx", "8k", "--speed", "1000"]
    port = "48123"
    command = shlex.join([*words, "--port", port])
    load = ("--num-seqs", "3", "--output-tokens", "4", "--interval", "50ms")
    ran = run("profile", "--command", command, *load, "-o", tmp_path / "run", "--format", "json")
    assert ran.code == 0, ran.err
    assert ran.json["output_tokens"] == 12
    assert "GPU KV cache size" in (tmp_path / "run" / "server.log").read_text()
    message = refused(run("profile", "--server", f"localhost:{port}", "--timeout", "1s", "-o", tmp_path / "b"), 3)
    assert "does not answer" in message  # it is gone


def test_a_server_that_dies_points_to_why(run: Run, tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no memory')", "--port", "48124"])
    message = refused(run("profile", "--command", command, "-o", tmp_path / "run", "-q"), 3)
    log = tmp_path / "run" / "server.log"
    assert message == (
        "--command: ended with exit code 1 before the run was over; it printed last: no memory; "
        f"see {log}, or ask `kvplan why` of it"
    )
    assert log.read_text() == "no memory\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--server", "x:1", "--num-blocks", "7"), "--num-blocks works only with the bundled engine"),
        (("--server", "ftp://x"), "is not an address"),
        (("--rate", "4"), "--rate works only with a server"),
        (("--command", "python my_server.py"), "names no port and no server that kvplan knows"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(run("profile", *words, "-o", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "base"),
    [
        (ProfileOptions(server="localhost:8000"), "http://localhost:8000"),
        (ProfileOptions(server="https://host/api/v1/"), "https://host/api"),
        (ProfileOptions(command="vllm serve Qwen/Qwen3-8B"), "http://localhost:8000"),
        (ProfileOptions(command="vllm serve Qwen/Qwen3-8B --port=8010"), "http://localhost:8010"),
        (ProfileOptions(command="python -m sglang.launch_server --model-path x"), "http://localhost:30000"),
    ],
)
def test_where_a_server_listens(options: ProfileOptions, base: str) -> None:
    assert base_of(options) == base


def test_a_run_is_never_written_over(run: Run, server: Serving, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "exists already" in refused(run("profile", "--server", server.url, "-o", tmp_path / "run"))


def test_requests_come_at_the_rate_or_the_traces_times() -> None:
    requests = tuple(PlannedRequest(5, 5, arrival) for arrival in (0.0, 3.0, 9.0))
    assert paced(requests, None, 0, has_times=True) == requests
    assert [request.arrival_s for request in paced(requests, math.inf, 0, has_times=True)] == [0.0, 0.0, 0.0]
    many = paced((PlannedRequest(5, 5),) * 4000, 8.0, 0, has_times=False)
    assert many[-1].arrival_s / 3999 == pytest.approx(1 / 8, rel=0.05)  # a Poisson process: 1.6% is one deviation
    with pytest.raises(UsageError, match="not an address"):
        base_of(ProfileOptions(server="http://"))


class Dying(BaseHTTPRequestHandler):
    """A server that answers one request for tokens and is gone."""

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/tokenize":
            self.answer(b"")
            return
        self.answer(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')
        self.request.close()
        self.server.server_close()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def test_a_server_that_goes_away_ends_the_run_and_keeps_what_it_answered(run: Run, tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Dying)

    def serve() -> None:
        with suppress(OSError, ValueError):
            server.serve_forever(0.01)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    words = ("--num-seqs", "50", "--rate", "20", "-o", tmp_path / "run", "-q")
    ran = run("profile", "--server", f"http://127.0.0.1:{server.server_port}", *words)
    assert ran.code == 4
    assert "the server stopped answering, 1 of 50 requests answered; what was measured is in" in ran.err
    assert json.loads((tmp_path / "run" / "bench.json").read_text())["completed"] == 1


def test_an_interrupt_keeps_what_was_answered(run: Run, server: Serving, tmp_path: Path, monkeypatch: Any) -> None:
    real, count = drive._time, 0

    async def interrupted(*words: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            signal.raise_signal(signal.SIGINT)
        await real(*words)

    monkeypatch.setattr(drive, "_time", interrupted)
    words = ("--num-seqs", "9", "--max-concurrency", "1", "-o", tmp_path / "run", "-q")
    assert run("profile", "--server", server.url, *words).code == 130
    assert json.loads((tmp_path / "run" / "bench.json").read_text())["completed"] == 2


def test_a_stranger_at_the_address_is_not_measured(run: Run, server: Serving, tmp_path: Path) -> None:
    command = f"vllm serve x --port {server.port}"
    assert "something listens at" in refused(run("profile", "--command", command, "-o", tmp_path / "run"), 3)
    assert "close the quote" in refused(run("profile", "--command", "vllm serve 'x", "-o", tmp_path / "run"))
