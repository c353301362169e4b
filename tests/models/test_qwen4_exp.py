"""Qwen4's preview against vLLM 0.33's own parameters, pools and refusals, and its n-gram tables on the host.

No published config was to be had: those in facts/heads/qwen4-exp* are transformers' class defaults with the keys of
its layers; the rows in facts/qwen4_exp.jsonl are what the server's classes answered to them, tables on the GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan.policy.pods import lacking
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[1] / "facts"
ROWS = oracles.read_lines(FACTS / "qwen4_exp.jsonl")
CONFIG = FACTS / "heads" / "qwen4-exp" / "config.json"
GIB = 2**30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["inputs"])[:90])
def test_weights_pools_and_refusals_are_the_servers(row: dict[str, Any]) -> None:
    assert oracles.compare_case(row) == (oracles.EQUAL, [])


TABLES = oracles.read_lines(FACTS / "qwen4_tables.jsonl")


@pytest.mark.parametrize("row", TABLES, ids=lambda row: f"{row['ple_embedding_dtype']} on {row['inputs']['tp']}")
def test_tables_in_8_and_4_bits_are_the_servers(row: dict[str, Any], tmp_path: Path) -> None:
    values = json.loads(CONFIG.read_text()) | {"ple_embedding_dtype": row["ple_embedding_dtype"]}
    (folder := tmp_path / row["inputs"]["model"]).mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    assert oracles.compare_case(row, tmp_path) == (oracles.EQUAL, [])


@pytest.mark.parametrize(("stored", "is_smaller"), [("int8", None), ("bfloat16", None), ("nvfp4", True)])
def test_other_dtypes_of_tables_are_refused_as_the_server_does(
    stored: str, is_smaller: bool | None, tmp_path: Path, run: Run
) -> None:
    """ "ple_embedding_dtype must be 'nvfp4' or 'float8_e4m3fn'", its class says."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | {"ple_embedding_dtype": stored}))
    if is_smaller is None:
        result = run("estimate", tmp_path, "--gpu", "h200", "--tp", "4", "--ctx", "32k")
        assert "is not one of float8_e4m3fn, nvfp4" in result.errors[0]
    else:  # values and scales, each pinned in a power of two: 4.77 GiB in 8, 0.6 in 1
        assert answer(run, "--tp", "4", config=tmp_path)["host_memory"]["weights"] == 4 * (8 + 1) * GIB


def answer(run: Run, *words: str, config: Path = CONFIG) -> dict[str, Any]:
    return run("estimate", config, "--gpu", "h200", "--ctx", "32k", "--format", "json", *words).json


# The server's own parameter: 320,001,536 rows of 128 in bfloat16 without sharding (layers.ple...ngram_embedding).
TABLE = 81_920_393_216


@pytest.mark.parametrize(("tp", "block"), [(4, 32 * GIB), (8, 16 * GIB)])
def test_a_ranks_rows_are_pinned_in_a_power_of_two_bytes(tp: int, block: int, run: Run) -> None:
    on_host = answer(run, "--tp", str(tp))
    assert block // 2 < TABLE // tp < block
    assert on_host["host_memory"]["weights"] == tp * block
    on_gpu = answer(run, "--tp", str(tp), "--engram-config", '{"cpu_offload": false}')
    assert on_gpu["host_memory"]["weights"] == 0
    # the table's own segment is rounded up to 2 MiB, as torch does on a GPU
    assert 0 <= on_gpu["memory"]["weights"] - on_host["memory"]["weights"] - TABLE // tp < 2 * 2**20


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--engram-config", '{"cpu_ofload": false}'), "has no such setting"),
        (("--engram-config", '{"use_thp": true, "cpu_offload": false}'), "use_thp requires"),
        (("--engram-config", '{"dp_shared_memory": true}'), "several data-parallel ranks"),
        (("--pp", "2"), "has tables of n-grams"),
        (("--engine", "vllm@0.28"), "use --engine vllm@0.29"),  # the first whose registry has the class
    ],
)
def test_what_the_server_rejects_is_refused(words: tuple[str, ...], problem: str, run: Run) -> None:
    result = run("estimate", CONFIG, "--gpu", "h200", "--ctx", "32k", "--tp", "4", *words)
    assert result.code == 2
    assert problem in result.errors[0]


def test_a_model_without_tables_takes_no_such_flag(run: Run) -> None:
    result = run("estimate", "llama-3.1-8b", "--gpu", "h200", "--engram-config", "{}")
    assert result.code == 2
    assert "has no tables of n-grams" in result.errors[0]


def test_memory_below_the_tables_is_named() -> None:
    """A pod's memory counts what a server pins: 4 times 32 GiB."""
    plan = kvplan.estimate(CONFIG, gpu="h200", tensor_parallel_size=4, max_model_len=32768).plan
    short = lacking(plan, memory=127 * GIB, name="the pod's limit")
    assert short is not None
    assert "the pod's limit is 127.00 GiB" in short[0]
    assert lacking(plan, memory=256 * GIB, name="the pod's limit") is None
