"""benchmarks/coverage.py: what counts as a public model, and as covered."""

import json
from pathlib import Path

import pytest

from benchmarks import coverage


def test_descriptions_are_no_models_and_each_model_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        "Qwen/Qwen3-8B", "Qwen3-8B", "qwen/qwen3-8b (bf16)", "(not named)", "Qwen2.5-7B class (14 GiB)", None,
        "someone/Qwen3-8B-FP8-dynamic", "someone/never-heard-of",
    ]  # fmt: skip
    file = tmp_path / "logs.jsonl"
    file.write_text("".join(json.dumps({"model": row}) + "\n" for row in rows))
    assert coverage.main([file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not covered: someone/never-heard-of"
    assert lines[1].startswith("not covered: someone/Qwen3-8B-FP8-dynamic (of the same model: qwen3-8b")
    assert lines[2] == "1 of 3 distinct public models in the catalog (33 %), 1 by a sibling alone"
