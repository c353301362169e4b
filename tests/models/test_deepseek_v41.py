"""DeepSeek-V4.1 against vLLM 0.33's own parameters, pools and refusals, and its n-gram tables on the host.

The config is the published one; rows of facts/deepseek_v41.jsonl are what the server's classes answered to it, played
on GPUs of 8.0, 9.0 and 10.0. Where tables lie in host memory, as by default, their bytes are left out of the weights.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import catalog
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[1] / "facts"
ROWS = oracles.read_lines(FACTS / "deepseek_v41.jsonl")
NAME = "deepseek-v4.1-flash"
GIB = 2**30
SPARK = '{"method": "dspark", "num_speculative_tokens": 5}'


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["inputs"])[:120])
def test_weights_pools_and_refusals_are_the_servers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: catalog.load(folder.name))
    assert oracles.compare_case(row, Path()) == (oracles.EQUAL, [])


def answer(run: Run, *words: str) -> dict[str, Any]:
    return run("estimate", NAME, "--gpu", "h200", "--ctx", "32k", "--format", "json", *words).json


# The server's own parameters of two tables, values and scales: layers.engram.embed_tokens of rank 0 of 1, and of 2.
WHOLE, HALF = 202_758_032_400, 101_378_311_600


def test_tables_on_the_gpu_are_the_servers(run: Run) -> None:
    """On two ranks, the second has the larger half: its primes come later."""
    on_gpu, on_host = (
        answer(run, "--tp", "2", "--engram-config", json.dumps({"cpu_offload": keeps}))["memory"]["weights"]
        for keeps in (False, True)
    )
    assert 0 <= on_gpu - on_host - (WHOLE - HALF) < 2 * 2**20  # the allocator's rounding
    assert WHOLE - HALF > HALF


# Logged for a rank of 4: 47.2 GiB (vllm#57491); of 8: 23.6 GiB (InferenceX#3310).
@pytest.mark.parametrize(("tp", "logged"), [(4, 47.2), (8, 23.6)])
def test_a_ranks_tables_are_as_logged(tp: int, logged: float, run: Run) -> None:
    result = answer(run, "--tp", str(tp), "--engram-config", '{"use_thp": true}')
    assert result["host_memory"]["weights"] / tp / GIB == pytest.approx(logged, abs=0.05)


def test_pinned_tables_take_powers_of_two(run: Run) -> None:
    """By torch's rule, of a rank's two tables: 22.9 GiB of rows each in 32 GiB, 0.72 GiB of scales in 1 GiB."""
    assert answer(run, "--tp", "4")["host_memory"]["weights"] == 4 * 2 * (32 + 1) * GIB


def test_replicas_share_the_tables(run: Run) -> None:
    """In /dev/shm, where nothing is rounded; a page of the answer is one replica's."""
    shared = answer(run, "--tp", "4", "--dp", "2")["host_memory"]["weights"]
    alone = answer(run, "--tp", "8", "--engram-config", '{"use_thp": true}')["host_memory"]["weights"]
    assert shared == alone // 2


def test_the_files_are_as_large_as_published(run: Run) -> None:
    """510,313,353,565 B in 88 files (FujitsuPolycom/sparkring#260), with the draft's, which the row leaves out."""
    result = answer(run, "--tp", "1", "--speculative-config", SPARK)
    (files,) = (row["bytes"] for row in result["host"]["rows"] if row["name"] == "checkpoint")
    assert files + result["memory"]["draft_weights"] == pytest.approx(510_313_353_565, rel=0.001)


# Per GPU, with the draft: 49.6 GiB of weights on 8 H200 (InferenceX#3310), about 145 on 2 GB200 (InferenceX#3320).
# A log counts what is allocated with them: rotary tables of 0.5 GiB, and the draft's own copy of the model's tables.
@pytest.mark.parametrize(("gpu", "tp", "logged"), [("h200", 8, 49.6), ("gb200", 2, 145)])
def test_loaded_weights_are_as_logged(gpu: str, tp: int, logged: float, run: Run) -> None:
    words = ("--gpu", gpu, "--tp", str(tp), "--ctx", "32k", "--speculative-config", SPARK, "--format", "json")
    memory = run("estimate", NAME, *words).json["memory"]
    assert memory["weights"] / GIB == pytest.approx(logged, rel=0.03)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--engram-config", '{"dp_shared_memory": true}'), "several data-parallel ranks"),
        (("--engine", "vllm@0.29"), "use --engine vllm@0.30"),  # the first whose registry has the class
        (("--kv-cache-dtype", "nvfp4_ds_mla"), "only on compute capability 10.x"),
        (("--dp", "16", "--enable-expert-parallel", "--engram-config", '{"cpu_offload": false}'), "without one of the"),
    ],
)
def test_what_the_server_rejects_is_refused(words: tuple[str, ...], problem: str, run: Run) -> None:
    result = run("estimate", NAME, "--gpu", "h200", "--ctx", "32k", "--tp", "4", *words)
    assert result.code == 2
    assert problem in result.errors[0]
