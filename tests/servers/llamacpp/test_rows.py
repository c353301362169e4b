"""Every place of a server, and what --fit chooses, against the answers of llama.cpp's own code.

Source of the rows: llama.cpp at commit 0c1e57098 with CUDA devices played to it (memory, alignment and the operations
that they take): weights, context and compute buffers as it reports them before it serves; inputs and numbers only.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from tests.oracles import read_lines, spec_in
from tests.support.llamacpp_rows import compare
from tests.support.oracle_data import DATA, needs_oracle_data

ROWS = read_lines(Path(__file__).parents[2] / "facts/llamacpp.jsonl")


def spec_of(name: str) -> ModelSpec:
    own = catalog.find(name)
    assert own is not None
    return catalog.load(own)


def title(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    return " ".join([inputs["model"], inputs["quant"], *inputs["gpus"], *inputs["flags"]])


@pytest.mark.parametrize("row", ROWS, ids=title)
def test_every_place_is_the_servers_to_the_byte(row: dict[str, Any]) -> None:
    assert compare(row, spec_of) == ("equal", [])


def test_a_difference_is_told() -> None:
    row = json.loads(json.dumps(ROWS[0]))
    row["places"]["CUDA0"][2] += 128
    outcome, why = compare(row, spec_of)
    assert outcome == "different"
    assert why[0].startswith("CUDA0: compute ")


@needs_oracle_data
def test_a_sample_of_all_rows_is_equal() -> None:
    """Every 23rd of 416 rows, but for a file with a head that the model does not have; `oracles.py` compares all."""

    def load(name: str) -> ModelSpec:
        folder = DATA / "models" / name
        return spec_in(folder) if folder.is_dir() else spec_of(name.replace("__", "/"))

    rows = [row for row in read_lines(DATA / "llamacpp_cases.jsonl")[::23] if "LFM2" not in title(row)]
    different = [(title(row), why) for row in rows if (why := compare(row, load)[1])]
    assert different == []
