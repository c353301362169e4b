"""What `kvplan models` says a checkpoint weighs, held against the sizes of published files.

tests/facts/checkpoints.jsonl carries a few; the reference data's checkpoints.jsonl has totals of index files of
checkpoints of the same models.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.report import console
from kvplan.sizing.weights import stored_bytes
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = oracles.read_lines(Path(__file__).parents[1] / "facts" / "checkpoints.jsonl")


@pytest.mark.parametrize("row", FACTS, ids=lambda row: str(row["model"]))
def test_a_checkpoint_weighs_what_its_files_weigh(row: dict[str, Any]) -> None:
    stored = stored_bytes(catalog.load(row["model"]))
    assert stored is not None
    if "stored_bytes" in row:
        assert stored == row["stored_bytes"]
    else:  # two decimals of a GiB
        assert abs(stored - row["stored_gib"] * GIB) <= 0.0051 * GIB


# Why files of an index in the reference data are not those of the catalog's entry.
OTHER_FILES = {
    "gemma-4-26b-a4b": "a quantised copy", "llama-2-13b": "quantised copies", "llama-3.1-8b": "a quantised copy",
    "llama-3.3-70b": "a copy in float32", "mistral-7b-v0.1": "a copy in float32", "phi-2": "the first, in float32",
    "llama-3-8b": "copies with more in them", "llama-2-7b": "copies in float32", "qwen2.5-14b": "a quantised copy",
    "qwen3.5-27b": "a quantised copy", "qwen3.5-35b-a3b": "experts left out", "glm-4.6": "an MTP block",
    "mimo-7b": "an MTP block", "llama-3.2-3b": "a second head", "gpt-oss-20b": "Metal's layout",
    "llava-1.5-7b": "without the tower, which a server loads beside it",
    "qwen3-30b-a3b": "a changed attention", "qwen2-vl-7b": "a copy in float32",
}  # fmt: skip
CLOSE = 0.001  # headers of the files, buffers of Llama 2's first conversion, two added rows of a vocabulary


@needs_oracle_data
def test_most_index_files_agree_and_the_others_are_explained() -> None:
    different, equal = set(), 0
    for row in oracles.read_lines(DATA / "models" / "checkpoints.jsonl"):
        name = catalog.find(row["model"] or "")
        size = row.get("total_size") or row.get("lfs_bytes")
        if name is None or not size or row.get("approximate"):
            continue
        stored = stored_bytes(catalog.load(name))
        assert stored is not None
        if abs(stored - size) <= CLOSE * size:
            equal += 1
        else:
            different.add(name)
    assert different - set(OTHER_FILES) == set()
    assert equal >= 45


def test_a_quantised_row_shows_its_stored_size(run: Run) -> None:
    result = run("models", "llama-3.1-8b-awq", "--format", "json")
    row = json.loads(result.out)
    # 32 layers of (4096 x 6144 + 4096 x 4096 + 4096 x 28672 + 14336 x 4096) at 4 bits with a 16-bit scale and a 4-bit
    # zero per 128 inputs, the embedding, the head and 65 norms in 16 bits
    linear = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    plain = 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert row["stored_bytes"] == linear // 2 + linear // 128 * 2 + linear // 128 // 2 + plain
    assert row["bf16_gb"] == 16.06
    assert "5.73 GB as stored, in awq int4; 16.06 GB in bf16" in run("models", "llama-3.1-8b-awq").out
    assert "16.06 GB as stored, in bfloat16\n" in run("models", "llama-3.1-8b").out


def test_a_float32_checkpoint_weighs_four_bytes_a_parameter() -> None:
    config = catalog.expand(catalog.facts("llama-3.2-1b")["config"]) | {"torch_dtype": "float32"}
    assert stored_bytes(read_config(config, "config.json", "x")) == 4 * 1_235_814_400


def test_an_unknown_quantisation_has_no_size() -> None:
    config = catalog.expand(catalog.facts("llama-3.2-1b")["config"]) | {"quantization_config": {"quant_method": "hqq"}}
    spec = read_config(config, "config.json", "x")
    assert stored_bytes(spec) is None
    assert console.model_row("x", spec)["stored_bytes"] is None


# --- Llama-3.1-405B: files of two kinds -------------------------------------------------------------------------------


def test_both_kinds_of_405b_are_known(run: Run) -> None:
    # The first files keep every KV head twice: 126 layers x K and V x 8 heads more x 128 x 16,384.
    first = 405_853_388_800 + 126 * 2 * 8 * 128 * 16384
    assert oracles.total_params(catalog.load("hugging-quants/Meta-Llama-3.1-405B-Instruct-AWQ-INT4")) == first
    for name in ("llama-3.1-405b", "llama-3.1-405b-fp8"):
        assert "num_key_value_heads 16" in catalog.facts(name)["note"]
        assert "num_key_value_heads 16" in run("models", name).out
    result = run("estimate", "llama-3.1-405b", "--gpu", "h200", "--tp", "8", "--ctx", "8k")
    assert "num_key_value_heads 16" in result.err
