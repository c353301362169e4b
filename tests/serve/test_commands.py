"""`kvplan serve` as users start it, and kvplan's own readers pointed at a server whose truth is known."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplan.serve.start import twin_log
from kvplan.serve.text import stand_in
from tests.engine.test_tp import free_port
from tests.serve.test_server import TEXT, leave_open, until
from tests.support.cli import Run, refused, run
from tests.support.serving import MODEL, Serving, planned, serving, twin
from tests.support.small_engines import engine_for, greedy, random_tokens, saved_model, wrong_greedy_tokens

__all__ = ["run"]  # a fixture
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


def test_reconcile_reads_the_log_of_the_start(run: Run, tmp_path: Path) -> None:
    """Every row that is logged is what was planned, to the digits logged."""
    log = tmp_path / "start.log"
    log.write_text("\n".join(twin_log(planned(), "0.33.0")))
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
    ((*WORDS, "--engine", "sglang@0.5"), "simulate"),
    ((*WORDS, "--pp", "2"), "--pipeline-parallel-size"),
    ((*WORDS, "--max-num-queued-reqs", "-1"), "--max-num-queued-reqs"),
    ((*WORDS, "--kv-offloading-size", "8"), "--kv-offloading-size"),
    (("serve", MODEL, "--speed", "2"), "--speed"),
    (("serve", MODEL, "--quantization", "fp8"), "--quantization"),
    (("serve", MODEL, "--tp", "2"), "torchrun --nproc-per-node 2 -m kvplan serve"),
    (("serve", MODEL, "--speculative-config", "{"), "--speculative-config: is not a JSON object"),
    (("serve", MODEL, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'), "method must be"),
    (("serve", MODEL, "--speculative-config", '{"method": "ngram"}'), "num_speculative_tokens must be"),
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


def test_a_port_in_use_is_one_line(run: Run, server: Serving) -> None:
    ran = run(*WORDS[:-1], str(server.port))
    assert "choose another --port" in refused(ran, code=3)


def environment_with(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **changes}


@contextmanager
def started(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Serving, list[str]]]:
    """`kvplan serve` as a process of its own, once it says where it listens; and its log so far."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvplan", *words],
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
    with started(*WORDS, "--output-tokens", "200") as (process, server, _):
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.post(TEXT, prompt=[1], max_tokens=200)))
        thread.start()
        until(lambda: server.metric("vllm:num_requests_running") == 1)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 200
        out, err = process.communicate(timeout=60)
        assert process.returncode == 143
        assert "Traceback" not in err
        assert "GPU KV cache size: " in out


@pytest.mark.full
def test_a_directory_is_served_with_its_weights() -> None:
    """Greedy tokens are transformers'; planned and measured bytes stand side by side."""
    words = ("serve", str(saved_model("llama")), "--device", "cpu", "--dtype", "float32", "--ctx", "64", "--port", "0")
    few = ("--num-gpu-blocks-override", "40", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    prompt = [5, 77, 130, 9]
    with started(*words, *few) as (process, server, _):
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        text = server.post(TEXT, **body)["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.count(",") >= 2}
    assert rows["weights"][0] == rows["weights"][1]
    assert rows["kv_cache"][0] == rows["kv_cache"][1]
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
    assert "stopped, exit code 143" in done.stdout


@pytest.mark.full
def test_two_ranks_answer_as_one() -> None:
    """Rank 0 serves and the other follows, through refusals and clients that leave; both end when rank 0 is told to."""
    words = ("serve", str(saved_model("llama")), "--device", "cpu", "--dtype", "float32", "--ctx", "96", "--port", "0")
    few = ("--num-gpu-blocks-override", "60", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    body: dict[str, Any] = {"prompt": random_tokens(5, 17, 30), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    engine = engine_for("llama")
    engine.tokenizer = stand_in(256)
    wanted = [output.text for output in engine.generate(body["prompt"], greedy(12))]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "kvplan", *words, *few, "--tp", "2"]
    follower = subprocess.Popen(command, env=environment_with(**group, RANK="1", LOCAL_RANK="1"))
    try:
        with started(*words, *few, "--tp", "2", **group, RANK="0", LOCAL_RANK="0") as (process, server, _):
            for _ in range(2):
                assert [choice["text"] for choice in server.post(TEXT, **body)["choices"]] == wanted
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
