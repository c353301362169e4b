"""Quantized copies with several groups or odd lists of layers left out, against vLLM 0.33's own parameters and pools.

tests/facts/mixed_quantizations.jsonl: a `base` (a catalog entry, or the config of that name in facts/heads), the
quantization that its `source` writes, and what the server's classes answer on one H100 and on two.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import catalog
from tests import oracles

FACTS = Path(__file__).parents[1] / "facts"
ROWS = oracles.read_lines(FACTS / "mixed_quantizations.jsonl")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['inputs']['model']} on {row['inputs']['tp']}")
def test_weights_and_pools_are_the_servers(row: dict[str, Any], tmp_path: Path) -> None:
    own = FACTS / "heads" / row["base"] / "config.json"
    values = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else catalog.load(row["base"]).config
    (folder := tmp_path / row["inputs"]["model"]).mkdir()
    config = {**values, "quantization_config": row["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert oracles.compare_case(row, tmp_path) == (oracles.EQUAL, [])
