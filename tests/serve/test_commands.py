"""`kvplan serve` as users start it, and kvplan's own readers pointed at a server whose truth is known."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from engine.config import EngineConfig
from kvplan.core.errors import SettingError
from kvplan.serve.app import Api, ServedModel
from kvplan.serve.chat import ChatTemplate
from kvplan.serve.generation import Limits
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.run import server as server_of_uvicorn
from kvplan.serve.run import time_to_finish
from kvplan.serve.text import stand_in
from kvplan.serve.worker import Worker
from kvplan.servers.vllm.log_lines import log_lines
from tests.engine.test_tp import free_port
from tests.serve.test_server import TEXT, leave_open, until
from tests.support.cli import Run, refused, run
from tests.support.serving import MODEL, WAIT_S, Serving, api_of, planned, serving, twin
from tests.support.small_engines import engine_for, greedy, random_tokens, saved_model, wrong_greedy_tokens

__all__ = ["run"]  # a fixture
SERVED = ServedModel((MODEL,), 128_256, "0", Limits(4096), ChatTemplate())
PLAN = ("--gpu", "h100-80g", "--ctx", "8k")
WORDS = ("serve", MODEL, "--simulate", "h100-80g", "--ctx", "8k", "--port", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


def test_reconcile_reads_the_page(run: Run, server: Serving) -> None:
    ran = run("reconcile", "--metrics", f"{server.url}/metrics", "--engine", "vllm@0.33", *PLAN, "--format", "json")
    rows = {row["name"]: row for row in ran.json["rows"]}
    capacity = planned().capacity
    assert rows["blocks"]["logged"] == rows["blocks"]["predicted"] == capacity.num_blocks
    assert rows["tokens"]["logged"] == rows["tokens"]["predicted"] == capacity.tokens


@pytest.mark.parametrize("changes", [{}, {"max_loras": 2, "max_lora_rank": 32}], ids=str)
def test_reconcile_reads_the_log_of_the_start(run: Run, tmp_path: Path, changes: dict[str, int]) -> None:
    """Every row that is logged is what was planned, to the digits logged."""
    log = tmp_path / "start.log"
    log.write_text("\n".join(log_lines(planned(**changes))))
    ran = run("reconcile", "--log", log, "--gpu", "h100-80g", "--max-error", "0.01%", "--format", "json")
    assert ran.code == 0, ran.err
    compared = {row["name"] for row in ran.json["rows"] if row["logged"] is not None}
    assert {"weights", "kv_cache", "tokens", "concurrency"} <= compared


def test_watch_reads_the_page(run: Run, server: Serving) -> None:
    server.post(TEXT, prompt=[1] * 40, max_tokens=3)
    ran = run("watch", "--metrics", server.url, "--duration", "0.2s", "--interval", "0.1s")
    assert ran.code == 0, ran.err
    assert "0 running" in ran.out.lower() or "running 0" in ran.out.lower(), ran.out


def test_rightsize_counts_the_requests(run: Run, tmp_path: Path) -> None:
    """Between the pages: 20 requests of 100 prompt tokens, half of them found, and 8 of the answer."""
    with serving(twin()) as server:
        server.post(TEXT, prompt=list(range(500, 600)), max_tokens=8, ignore_eos=True)
        (tmp_path / "1.txt").write_text(server.metrics())
        for number in range(20):
            prompt = [*range(500, 548), *range(1000 + 100 * number, 1052 + 100 * number)]
            server.post(TEXT, prompt=prompt, max_tokens=8, ignore_eos=True)
        (tmp_path / "2.txt").write_text(server.metrics())
    ran = run("rightsize", tmp_path / "1.txt", tmp_path / "2.txt", "--interval", "60s", "--format", "json")
    assert ran.code == 0, ran.err
    workload = ran.json["workload"]
    assert (workload["ended"], workload["mean_prompt_tokens"], workload["mean_output_tokens"]) == (20, 100, 8)
    assert workload["prefix_share"] == pytest.approx(0.48)


HYBRID = "qwen3-next-80b-a3b"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("serve",), "MODEL"),
    (("serve", "no-such-model", "--simulate", "h100-80g"), "no-such-model"),
    (("serve", MODEL, "--simulate", "no-such-gpu"), "no-such-gpu"),
    (("serve", MODEL, "--simulate", "h100-80g,l40s"), "2 plans"),
    (("serve", MODEL, "--simulate", "rtx-4090", "--ctx", "128k"), "does not fit"),
    ((*WORDS, "--speed", "0"), "--speed"),
    ((*WORDS, "--speed", "x"), "--speed"),
    ((*WORDS, "--port", "70000"), "--port"),
    ((*WORDS, "--api-key", ""), "--api-key"),
    ((*WORDS, "--device", "cpu"), "--device"),
    ((*WORDS, "--tokenizer", "no-such-directory"), "tokenizer"),
    ((*WORDS, "--pp", "2"), "--pp cannot be simulated; use --tp"),
    ((*WORDS, "--max-num-queued-reqs", "-1"), "--max-num-queued-reqs"),
    ((*WORDS, "--kv-offloading-size", "8"), "--kv-offloading-size"),
    (("serve", MODEL, "--speed", "2"), "--speed"),
    (("serve", MODEL, "--quantization", "fp8"), "--quantization"),
    (("serve", MODEL, "--tp", "2"), "torchrun --nproc-per-node 2 -m kvplan serve"),
    (("serve", MODEL, "--pp", "2"), "--pp 2 needs as many processes (no torchrun started)"),
    (("serve", MODEL, "--tp", "2", "--pp", "2"), "needs 4 processes (no torchrun started); start with: torchrun"),
    (("serve", HYBRID, "--pp", "2"), f"--pp is not combined with the recurrent states of {HYBRID}"),
    (("serve", HYBRID, "--tensor-parallel-size", "2"), "--tensor-parallel-size is not combined with the recurrent"),
    (("serve", MODEL, "--pp-layer-partition", "8,8"), "--pp-layer-partition needs several stages"),
    (("serve", MODEL, "--speculative-config", "{"), "--speculative-config is not a JSON object"),
    (
        ("serve", MODEL, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'),
        "--speculative-config: method must be",
    ),
    (
        ("serve", MODEL, "--speculative-config", '{"method": "ngram"}'),
        "--speculative-config: num_speculative_tokens must be",
    ),
    (("serve", MODEL, "--speculative-config", '{"rejection_sample_method": "x"}'), "rejection_sample_method"),
    ((*WORDS, "--speculative-config", "{}"), "--speculative-config"),
    (("serve", MODEL, "--lora-target-modules", "q_proj"), "--lora-target-modules"),
    (("serve", MODEL, "--lora-modules", "x=/no"), "--lora-modules x=/no: there is no slot for adapters"),
    (("serve", MODEL, "--no-enable-lora", "--max-loras", "2"), "--no-enable-lora"),
    ((*WORDS, "--lora-modules", "x=/no"), "add --enable-lora, or --max-loras N"),
    ((*WORDS, "--enable-lora", "--lora-modules", "x"), "must be NAME=DIR"),
    ((*WORDS, "--enable-lora", "--lora-modules", '{"name": "x"}'), "is no object with name and path"),
    ((*WORDS, "--enable-lora", "--lora-modules", f"{MODEL}=/no"), "is named twice"),
    ((*WORDS, "--enable-lora", "--lora-modules", "x=/a", "--lora-modules", "x=/b"), "is named twice"),
]


@pytest.mark.parametrize(("words", "problem"), REFUSED, ids=lambda value: " ".join(value)[-40:])
def test_what_cannot_be_served_is_one_line(run: Run, words: tuple[str, ...], problem: str) -> None:
    assert problem in refused(run(*words))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--max-num-seqs", "300", "--max-num-batched-tokens", "8"),
            "--max-num-batched-tokens: (8) must be greater than or equal to --max-num-seqs (300); raise it, or lower "
            "--max-num-seqs",
        ),
        (
            ("--num-gpu-blocks-override", "1"),
            "--num-gpu-blocks-override must be at least 2: block 0 holds nothing (1)",
        ),
        (
            ("--kv-offloading-dir", "x"),
            "--kv-offloading-dir and --kv-offloading-disk-size: go together; set both",
        ),
        (
            ("--speculative-config", NGRAM, "--async-scheduling"),
            "--async-scheduling and --speculative-config cannot be combined: a step's drafts are made from "
            "the tokens of the one before; use only one",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_engines_settings_are_named_as_they_were_typed(run: Run, words: tuple[str, ...], line: str) -> None:
    assert refused(run("serve", MODEL, *words)) == line


def test_the_option_that_turns_a_setting_off_is_named(run: Run, tmp_path: Path) -> None:
    where = ("-q", "-o", str(tmp_path / "run"), "--device", "cpu", "--dtype", "float32")
    error = refused(run("profile", "--weights", str(saved_model("qwen3_next")), *where))
    assert "--enable-prefix-caching is not combined with the recurrent states of" in error
    assert error.endswith("; use --no-enable-prefix-caching")
    assert not (tmp_path / "run").exists()
    by_name = SettingError("", ("enable_prefix_caching",), "is off", "", off=True)
    assert str(by_name) == "enable_prefix_caching is off; set it to False"


def test_a_settings_error_has_the_names_of_whoever_reads_it() -> None:
    """The value may have braces of its own."""
    with pytest.raises(SettingError) as caught:
        EngineConfig(dtype="{x}")
    assert str(caught.value) == "EngineConfig: dtype must be one of auto, float32, bfloat16, float16 ('{x}')"
    named = caught.value.in_words({"dtype": "--dtype"})
    assert (named.subject, named.problem) == ("--dtype", "must be one of auto, float32, bfloat16, float16 ('{x}')")


def test_a_port_in_use_is_one_line(run: Run, server: Serving) -> None:
    ran = run(*WORDS[:-1], str(server.port))
    assert "choose another --port" in refused(ran, code=3)


def test_a_port_in_use_is_told_before_a_model_is_loaded(run: Run, server: Serving) -> None:
    """A model whose weights no machine of the tests has room for: its error would be another."""
    ran = run("serve", "llama-3.1-405b", "--device", "cpu", "-q", "--port", str(server.port))
    assert "choose another --port" in refused(ran, code=3)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--ctx", "99k"), "--ctx is more than the positions of smollm2-135m (101376 of 8192); lower it"),
        (("--max-model-len", "99k"), "--max-model-len is more than the positions of smollm2-135m"),
        (("--device", "tpu"), "--device: 'tpu' is not a device; use auto, cpu, cuda or cuda:N"),
        (("--api-key", " "), "--api-key is empty; remove it, or set a key"),
        (("--served-model-name", ""), "--served-model-name is empty; remove it, or set a name"),
        (("--drain-timeout", "soon"), "--drain-timeout"),
        (("--request-timeout", "-1s"), "--request-timeout"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_option_is_named_as_it_was_typed(run: Run, words: tuple[str, ...], line: str) -> None:
    assert refused(run("serve", "smollm2-135m", "-q", "--port", "0", *words)).startswith(line)


@pytest.mark.parametrize("kinds", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)], ids=str)
def test_a_second_signal_of_either_kind_ends_at_once(kinds: tuple[int, int]) -> None:
    first: list[int] = []
    second: list[int] = []
    running = server_of_uvicorn({0: Api(Worker(twin(), ServerMetrics(MODEL, 8192, {})), SERVED)}, 30)
    running.on_signal, running.on_forced = first.append, second.append
    running.handle_exit(kinds[0], None)
    assert (running.should_exit, running.force_exit, first, second) == (True, False, [kinds[0]], [])
    running.handle_exit(kinds[1], None)
    assert (running.force_exit, first, second) == (True, [kinds[0]], [kinds[1]])


@pytest.mark.parametrize(("drain_s", "seconds"), [(0, 0), (1, 0), (2, 1), (10, 9), (30, 27), (600, 597)])
def test_the_end_of_the_drain_time_is_for_errors(drain_s: int, seconds: int) -> None:
    assert time_to_finish(drain_s) == seconds


def test_the_drain_time_counts_from_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn counts from when its event loop comes to it: 3 s later here, and it closes connections for 0.1 s."""
    moments = iter((100.0, 103.0))
    monkeypatch.setattr("kvplan.serve.run.time", SimpleNamespace(monotonic=lambda: next(moments)))

    async def shutdown(self: uvicorn.Server, sockets: object = None) -> None: ...

    monkeypatch.setattr("uvicorn.Server.shutdown", shutdown)
    running = server_of_uvicorn({0: api_of(twin())}, 10)
    running.handle_exit(signal.SIGTERM, None)
    asyncio.run(running.shutdown())
    assert running.config.timeout_graceful_shutdown == pytest.approx(9 - 3 - 0.1)


def test_the_drain_time_ends_whatever_runs() -> None:
    """One step of this server takes hours: its thread cannot be joined."""
    with started(*WORDS, "--speed", "0.000001", "--drain-timeout", "1s") as (process, server, _):
        with leave_open(server, {"prompt": [1], "max_tokens": 8}):
            time.sleep(0.5)  # /metrics shows what a step has counted
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT_S)
        assert process.returncode == 143


def environment_with(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **changes}


Started = tuple[subprocess.Popen[str], Serving, list[str]]


def started(*words: str, **environment: str) -> AbstractContextManager[Started]:
    """`kvplan serve` as a process of its own, once it says where it listens; and its log so far."""
    return started_by((), words, **environment)


@contextmanager
def started_by(launcher: tuple[str, ...], words: tuple[str, ...], **environment: str) -> Iterator[Started]:
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "kvplan", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with(**environment),
    )
    try:
        assert process.stderr is not None
        notes = []
        for line in process.stderr:
            notes.append(line)
            address = re.search(r" on http://([0-9.]+):([0-9]+)$", line.rstrip())
            if address:
                api: Any = None
                yield process, Serving(api, address[1], int(address[2])), notes
                break
        else:
            raise AssertionError("".join(notes))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_sigterm_lets_what_runs_end() -> None:
    with started(*WORDS, "--output-tokens", "200") as (process, server, notes):
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.post(TEXT, prompt=[1], max_tokens=200)))
        thread.start()
        until(lambda: server.metric("vllm:num_requests_running") == 1)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 200
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (143, "")
        assert "Traceback" not in err
        assert "GPU KV cache size: " in "".join(notes)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_second_signal_ends_what_runs_with_openais_error(kind: signal.Signals, code: int) -> None:
    with started(*WORDS, "--output-tokens", "8000", "--drain-timeout", "10m") as (process, server, _):
        errors: list[Any] = []
        body = {"prompt": [1], "max_tokens": 8000}
        thread = threading.Thread(target=lambda: errors.append(server.refusal(TEXT, body)))
        thread.start()
        until(lambda: server.metric("vllm:num_requests_running") == 1)
        process.send_signal(kind)
        time.sleep(0.3)  # signals of one kind do not queue
        process.send_signal(kind)
        thread.join()
        assert (errors[0][0], errors[0][1]["type"]) == (503, "ServiceUnavailableError")
        assert "Traceback" not in process.communicate(timeout=60)[1]
        assert process.returncode == code


@pytest.mark.full
def test_a_directory_is_served_with_its_weights() -> None:
    """Greedy tokens are transformers'; planned and measured bytes stand side by side."""
    words = ("serve", str(saved_model("llama")), "--device", "cpu", "--dtype", "float32", "--ctx", "64", "--port", "0")
    few = ("--num-gpu-blocks-override", "40", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    prompt = [5, 77, 130, 9]
    with started(*words, *few) as (process, server, log):
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        text = server.post(TEXT, **body)["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    for name in ("weights", "kv_cache"):
        (row,) = [line for line in log if f" {name}: " in line]
        assert len(set(re.findall(r"[0-9,]+ bytes", row))) == 1
    tokens = stand_in(256).encode(text).ids
    # Bytes that are no UTF-8 show as one sign that is three bytes long.
    assert "\ufffd" in text or wrong_greedy_tokens("llama", prompt, tokens) == []


@pytest.mark.full
def test_the_demo_asks_and_stops() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "serve_demo.py"), MODEL, "--simulate", "h100-80g", "--ctx", "8k"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=600, check=True
    )
    assert 'generation_tokens_total{engine="0",model_name="llama-3.1-8b"} 12.0' in done.stdout
    assert "stopped by SIGTERM: exit code 143" in done.stdout


def two_ranks_of_llama(flag: str = "--tp") -> tuple[str, ...]:
    words = ("serve", str(saved_model("llama")), "--device", "cpu", "--dtype", "float32", "--ctx", "96", "--port", "0")
    return (
        *words,
        "--num-gpu-blocks-override",
        "60",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "64",
        flag,
        "2",
    )


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--tp", "--pp"])
def test_two_ranks_answer_as_one(flag: str) -> None:
    """Rank 0 serves and the other follows, through refusals and clients that leave; both end when rank 0 is told to."""
    words = two_ranks_of_llama(flag)
    body: dict[str, Any] = {"prompt": random_tokens(5, 17, 30), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    engine = engine_for("llama")
    engine.tokenizer = stand_in(256)
    expected = [output.text for output in engine.generate(body["prompt"], greedy(12))]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "kvplan", *words]
    follower = subprocess.Popen(command, env=environment_with(**group, RANK="1", LOCAL_RANK="1"))
    try:
        with started(*words, **group, RANK="0", LOCAL_RANK="0") as (process, server, _):
            for _ in range(2):
                assert [choice["text"] for choice in server.post(TEXT, **body)["choices"]] == expected
                assert server.refusal(TEXT, {"prompt": [10**6]})[0] == 400
                leave_open(server, {"prompt": [1] * 20, "max_tokens": 70, "ignore_eos": True}).close()
            until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
            assert process.returncode == 143
            assert follower.wait(timeout=120) == 0
    finally:
        follower.kill()
        follower.wait()


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--tp", "--pp"])
def test_a_server_whose_other_rank_is_killed_fails_the_request_and_ends(flag: str) -> None:
    words = two_ranks_of_llama(flag)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "kvplan", *words]
    follower = subprocess.Popen(command, env=environment_with(**group, RANK="1", LOCAL_RANK="1"))
    try:
        with started(*words, **group, RANK="0", LOCAL_RANK="0") as (process, server, _):
            server.post(TEXT, prompt=[1] * 20, max_tokens=2)
            follower.kill()
            status, error = server.refusal(TEXT, {"prompt": [1] * 20})
            assert (status, error["type"]) == (500, "InternalServerError")
            _, notes = process.communicate(timeout=120)
            assert "kvplan: error: serve: another rank has gone; its log says why; start all ranks again" in notes
            assert process.returncode == 3
    finally:
        follower.kill()
        follower.wait()


@pytest.mark.full
def test_two_nodes_answer_as_one_rank_and_end_on_sigterm() -> None:
    """Rank 0 serves for two agents of torchrun; the first is told to end, and ends the other's rank too."""
    body: dict[str, Any] = {"prompt": random_tokens(5, 17, 30), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    engine = engine_for("llama")
    engine.tokenizer = stand_in(256)
    expected = [output.text for output in engine.generate(body["prompt"], greedy(12))]
    group = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    torchrun = ("-m", "torch.distributed.run", *group, "--node-rank")
    words = two_ranks_of_llama()
    other = subprocess.Popen([sys.executable, *torchrun, "1", "-m", "kvplan", *words], env=environment_with())
    try:
        with started_by((*torchrun, "0"), words) as (agent, server, _):
            try:
                assert [choice["text"] for choice in server.post(TEXT, **body)["choices"]] == expected
            finally:
                agent.send_signal(signal.SIGTERM)  # killed at once, it would leave its worker
                agent.communicate(timeout=120)
            assert other.wait(timeout=120) == 0  # its rank was told the end, and ended well
            with pytest.raises(ConnectionRefusedError):
                server.ask("GET", "/health")
    finally:
        other.terminate()
        other.wait()


TWIN = ("serve", "llama-3.1-8b", "--simulate", "h100-80g", "--ctx", "8k", "-q", "--port", "0")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--noise", "x"), "--noise: not a ratio"),
        (("--replicas", "0"), "--replicas must be at least 1"),
        (("--replicas", "2", "--data-parallel-size", "2"), "--replicas cannot be used with --data-parallel-size"),
        (("--data-parallel-size", "2", "--enable-expert-parallel"), "--data-parallel-size: ranks that share experts"),
        (("--faults", "x"), "--faults is wrong"),
        (("--kv-events-config", "x"), "--kv-events-config is not a JSON object"),
        (("--runner", "pooling", "--convert", "classify"), "--convert classify: no classifier is simulated"),
        (("--port", "65535", "--replicas", "3"), "--port 65535 leaves no room for 3 ports in a row"),
        (("--trust-remote-code", "--tool-call-parser", "hermes", "--noise", "x"), "--noise: not a ratio"),
    ],
)
def test_a_twins_options_are_checked(run: Run, words: tuple[str, ...], line: str) -> None:
    assert refused(run(*TWIN, *words)).startswith(line)


def test_options_of_a_twin_need_one(run: Run) -> None:
    assert refused(run("serve", "smollm2-135m", "--replicas", "2")).startswith("--replicas needs --simulate")
