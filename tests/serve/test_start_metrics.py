"""What a page of `kvplan serve` says of the start: the rows of `reconcile --metrics` are those of `reconcile --log`."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from kvplan.measure.server_metrics import MetricsError, log_of_page, server_stats
from kvplan.measure.serverlog.log import parse_log
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.real import arguments_of, cache_config, start_of
from kvplan.servers.bundled.log_wordings import arguments_line
from tests.engine.test_tp import free_port
from tests.serve.test_commands import WORDS, environment_with, started, two_ranks_of_llama
from tests.serve.test_own_log import ENGINES, log_of_stages
from tests.support.cli import Run, refused, run
from tests.support.serving import Serving
from tests.support.small_engines import engine_for, saved_model

__all__ = ["run"]  # a fixture


def page_of(text: str) -> str:
    return ServerMetrics("m", 96, {"served_by": "kvplan"}, start=parse_log(text)).page().decode()


def rows_of(run: Run, path: Path, flag: str, text: str, *words: Any) -> list[dict[str, Any]]:
    """Rows of a comparison, by the inputs and by the pool, without what says where a figure stands."""
    path.write_text(text)
    ran = run("reconcile", flag, path, *words, "--format", "json")
    assert ran.code == 0, ran.err
    rows = [*ran.json["rows"], *ran.json["given"]]
    elsewhere = ("not in the log", "not on the page")
    return [row | {"why": None if row["why"] in elsewhere else row["why"]} for row in rows]


def page_and_log(run: Run, tmp_path: Path, page: str, log: str, *words: Any) -> list[dict[str, Any]]:
    """The rows of both, which are the same."""
    rows = rows_of(run, tmp_path / "page.txt", "--metrics", page, *words)
    assert rows == rows_of(run, tmp_path / "server.log", "--log", log, *words)
    return rows


def states_in_blocks() -> Engine:
    return engine_for("qwen3_next", num_blocks=40, max_num_seqs=2)


@pytest.mark.parametrize("kind", [*ENGINES, "states"])
def test_the_page_of_a_start_gives_the_engines_own_bytes(kind: str, run: Run, tmp_path: Path) -> None:
    """The truth is the engine's report of its tensors."""
    model = "qwen3_next" if kind == "states" else "llama"
    engine = states_in_blocks() if kind == "states" else ENGINES[kind]()
    start = start_of(engine, arguments_line(arguments_of(engine.spec, engine.config, f"/models/{model}", "0.1.0")))
    log = "\n".join(start.whole_log)
    page = ServerMetrics("m", 96, cache_config(engine), start=parse_log(log)).page().decode()
    rows = {row["name"]: row for row in page_and_log(run, tmp_path, page, log, "--model", saved_model(model))}
    memory = engine.memory_report()
    assert [rows[name]["logged"] for name in ("weights", "buffers", "kv_cache")] == [
        memory.weights, memory.buffers, memory.kv_cache,
    ]  # fmt: skip
    assert all(rows[name]["exact"] for name in ("weights", "buffers", "kv_cache", "tokens"))
    start.hooks.close()


def test_the_page_has_the_figures_of_every_rank(run: Run, tmp_path: Path) -> None:
    """Two stages of other sizes: the page's gauges are the tensors of each."""
    log, truth = log_of_stages("1,2")
    page = page_of(log)
    page_and_log(run, tmp_path, page, log, "--model", saved_model("llama"))
    for rank, sizes in enumerate(truth):
        for name, size in sizes.items():
            labels = f'{{figure="{name}_bytes",logged="{size:,}",rank="rank {rank}"}}'
            (value,) = [
                line.split()[-1] for line in page.splitlines() if line.startswith(f"kvplan:start_figure{labels}")
            ]
            assert float(value) == size


def test_a_page_without_its_start_asks_for_a_restart(run: Run, tmp_path: Path) -> None:
    """Of a release before: it was planned as vLLM's with --engine vllm@0.33, 577% off."""
    page = tmp_path / "metrics.txt"
    page.write_bytes(ServerMetrics("llama", 96, cache_config(engine_for("llama", num_blocks=40))).page())
    for words in ([], ["--engine", "vllm@0.33", "--gpu", "h100-80g"]):
        line = refused(run("reconcile", "--metrics", page, *words))
        assert line.startswith("page is of kvplan's engine and has none of its arguments; restart the server with this")


def changed(page: str, old: str, new: str) -> str:
    assert old in page
    return page.replace(old, new)


def test_a_page_of_two_servers_is_refused() -> None:
    page = page_of(log_of_stages(None)[0])
    line = next(line for line in page.splitlines() if line.startswith("kvplan:start_arguments_info{"))
    twice = changed(page, line, f"{line}\n{line.replace('4', '5')}")
    with pytest.raises(MetricsError, match="2 servers on one page"):
        log_of_page(twice)
    with pytest.raises(MetricsError, match="a page of an unknown server"):
        log_of_page(changed(page, 'server="kvplan"', 'server="x"'))


@pytest.mark.parametrize(
    "line",
    [
        'kvplan:start_figure{figure="weights_bytes",logged="-1",rank=""} 1.0',
        'kvplan:start_figure{figure="no_such",logged="1",rank=""} 1.0',
        'kvplan:start_figure{figure="weights_bytes",rank=""} 1.0',
        f'kvplan:start_figure{{figure="weights_bytes",logged="{"9" * 5000}",rank=""}} 1.0',
        "kvplan:start_figure 1.0",
    ],
    ids=lambda line: line[:60],
)
def test_a_figure_that_is_none_is_left_out(line: str) -> None:
    page = page_of(log_of_stages(None)[0])
    assert log_of_page(f"{page}{line}\n") == log_of_page(page)


@pytest.mark.parametrize(("old", "new"), [('block_size="4"', 'block_size="x"'), ('log_form="1"', 'log_form="2"')])
def test_an_argument_that_is_none_is_one_line(old: str, new: str, run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(changed(page_of(log_of_stages(None)[0]), old, new))
    assert refused(run("reconcile", "--metrics", page, "--model", saved_model("llama"))).startswith("page")


# --- live servers -----------------------------------------------------------------------------------------------------

LLAMA = two_ranks_of_llama()[:-2]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
SYNTHETIC = (
    '{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", '
    '"synthetic_acceptance_length": 2.5}'
)


def live(run: Run, tmp_path: Path, server: Serving, notes: list[str], *words: Any) -> dict[str, dict[str, Any]]:
    page, log = server.metrics(), "".join(notes)
    rows = {row["name"]: row for row in page_and_log(run, tmp_path, page, log, *words)}
    assert server_stats(page).kind == "vllm"  # as `watch` and `rightsize` read it
    return rows


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [(), ("--speculative-config", NGRAM), ("--enable-lora",), ("--kv-offloading-size", "0.001")],
    ids=["plain", "drafts", "adapters", "tiers"],
)
def test_a_live_engines_page_is_compared_as_its_log(more: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    with started(*LLAMA, *more) as (_, server, notes):
        rows = live(run, tmp_path, server, notes, "--model", saved_model("llama"))
    assert all(rows[name]["exact"] for name in ("weights", "buffers", "kv_cache", "blocks", "tokens"))


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [(), ("--speculative-config", SYNTHETIC), ("--enable-lora",), ("--tier", "cpu=8GiB@25GB/s")],
    ids=["plain", "drafts", "adapters", "tiers"],
)
def test_a_live_twins_page_is_compared_as_its_log(more: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    with started(*WORDS, *more) as (_, server, notes):
        rows = live(run, tmp_path, server, notes)
    assert rows["kv_cache"]["exact"]


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--tp", "--pp"])
def test_rank_0s_page_has_both_ranks(flag: str, run: Run, tmp_path: Path) -> None:
    words = two_ranks_of_llama(flag)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = tmp_path / "rank1.log"
    with own.open("w") as file:
        other = subprocess.Popen(
            [sys.executable, "-m", "kvplan", *words],
            env=environment_with(**group, RANK="1", LOCAL_RANK="1"),
            stderr=file,
        )
    try:
        with started(*words, **group, RANK="0", LOCAL_RANK="0") as (process, server, notes):
            lines = own.read_text().splitlines(keepends=True)
            rows = live(run, tmp_path, server, [*notes, *lines], "--model", saved_model("llama"))
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
            assert other.wait(timeout=120) == 0
    finally:
        other.kill()
        other.wait()
    assert all(rows[name]["exact"] for name in ("weights", "buffers", "kv_cache", "blocks", "tokens"))
