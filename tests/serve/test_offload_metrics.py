"""/metrics of a server whose engine keeps KV beyond the device: vLLM's names, and the figures of what was copied."""

import json
import re
from pathlib import Path

import pytest

from kvplan.cli import output
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.real import cache_config, start_of
from tests.engine.test_tiers import offloading, on_disk
from tests.serve.test_metrics import families
from tests.support.small_engines import greedy, random_tokens, run_dry

# As vLLM 0.33.0 registers them: v1/offloading/metrics.py, kv_offload/cpu/spec.py, v1/metrics/loggers.py.
FACTS = Path(__file__).parents[1] / "facts" / "vllm_offload_metrics_0.33.jsonl"


def value(page: str, name: str) -> float:
    return float(re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)[0])


def test_the_figures_are_those_of_the_copies_by_vllms_names() -> None:
    engine = offloading("llama", num_blocks=40, num_chunks=100)
    metrics = ServerMetrics("m", 96, cache_config(engine), tiers=engine.tiers)
    prompts = random_tokens(50, 49, 51, 50)
    for prompt in (*prompts, prompts[0]):
        engine.generate([prompt], greedy(4))
        metrics.step(engine.scheduler)
    run_dry(engine)
    engine.close()
    metrics.step(engine.scheduler)
    page = metrics.page().decode()
    own = {row["name"]: row for row in families(page)}
    for row in map(json.loads, FACTS.read_text(encoding="utf-8").splitlines()):
        assert own[row["name"]]["type"] == row["type"]
        if row["buckets"]:
            assert [float(edge) for edge in own[row["name"]]["buckets"]] == [float(edge) for edge in row["buckets"]]
        assert own[row["name"]]["labels"] == ["engine", "model_name"]
    block = engine.runner.memory.block_bytes
    assert value(page, "vllm:kv_offload_store_bytes_total") == block * (12 + 12 + 12 + 12)  # of 4 tokens; whole ones
    assert value(page, "vllm:kv_offload_load_bytes_total") == block * 12
    assert value(page, "vllm:external_prefix_cache_hits_total") == 48
    assert value(page, "vllm:kv_offload_allocation_failure_total") == 0


def test_a_start_prints_the_planned_bytes_beside_the_measured() -> None:
    engine = offloading("llama", num_blocks=40, num_chunks=100)
    start = start_of(engine)
    (row,) = [line for line in start.log if ": kv_offload: " in line]
    assert row.count(f" {100 * 4096:,} bytes") == 2  # a block is 2 KiB or less: a page
    assert start.tiers is engine.tiers
    assert float(start.cache_config["kv_offloading_size"]) > 0
    start.hooks.close()


def test_files_that_are_lost_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = random_tokens(50)
    engine = on_disk(tmp_path)
    engine.generate([prompt], greedy(2))
    run_dry(engine)
    engine.close()
    paths = list(tmp_path.glob("*/*/*.g0"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    engine = on_disk(tmp_path)
    metrics = ServerMetrics("m", 96, cache_config(engine), tiers=engine.tiers)
    with output.showing_warnings():
        engine.generate([prompt], greedy(2))
        run_dry(engine)
    metrics.step(engine.scheduler)
    engine.close()
    lines = capsys.readouterr().err.splitlines()
    lost = [line for line in lines if line.startswith("kvplan: warning: ") and "is damaged and was dropped" in line]
    page = metrics.page().decode()
    counts = re.findall(r'^kvplan:kv_offload_files_lost_total\{.*reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
    assert 0 < len(lost) <= len(paths)
    assert dict(counts) == {"damaged": f"{len(lost)}.0", "unwritten": "0.0"}
