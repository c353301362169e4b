"""Whisper's two caches against vLLM 0.33's own planning code: its decoder's tokens, and those of its encoder.

tests/facts/cross_attention.jsonl: weights of a rank, and blocks, tokens and concurrency of stated pools.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import catalog
from tests import oracles

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "cross_attention.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str({k: v for k, v in row["inputs"].items() if v}))
def test_answers_what_vllm_answers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: catalog.load(folder.name))
    assert oracles.compare_case(row, Path()) == (oracles.EQUAL, [])
