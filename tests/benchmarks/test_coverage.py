"""benchmarks/coverage.py: what counts as a public model, and as covered."""

import json
from pathlib import Path

import pytest

from benchmarks import coverage
from kvplan.models import catalog
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).parents[1] / "facts/logged_models.jsonl"
LOGGED = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
LOGS = ("server_logs.jsonl", "server_logs_2026.jsonl", "server_failures.jsonl")


def log_of(folder: Path, rows: list[str | None]) -> Path:
    file = folder / "logs.jsonl"
    file.write_text("".join(json.dumps({"model": row}) + "\n" for row in rows))
    return file


def test_descriptions_are_no_models_and_each_model_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        "Qwen/Qwen3-8B", "Qwen3-8B", "qwen/qwen3-8b (bf16)", "(not named)", "Qwen2.5-7B class (14 GiB)", None,
        "someone/Qwen3-8B-FP8-dynamic", "someone/never-heard-of",
    ]  # fmt: skip
    assert coverage.main([log_of(tmp_path, rows)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not covered: someone/never-heard-of"
    assert lines[1].startswith("not covered: someone/Qwen3-8B-FP8-dynamic (of the same model: qwen3-8b")
    assert lines[2] == "no checkpoint: (not named) (a description)"
    assert lines[-1] == "1 of 3 distinct public models in the catalog (33.3%), 1 by a sibling alone"


@pytest.mark.parametrize(
    "spelling",
    [
        "meta-llama/Llama-3.1-405B-Instruct",
        "META-LLAMA/llama-3.1-405b-instruct",
        "Llama 3.1 405B Instruct",
        "Llama-3.1-405B-Instruct",
        "/data/models/Llama-3.1-405B-Instruct/",
        "../hub/meta-llama/Llama-3.1-405B-Instruct",
        "meta-llama/Llama-3.1-405B-Instruct@a1b2c3d4",
        "meta-llama/Llama-3.1-405B-Instruct (16 GPUs)",
    ],
)
def test_one_model_however_it_is_spelled(tmp_path: Path, spelling: str) -> None:
    names = coverage.names([log_of(tmp_path, [spelling, "meta-llama/Llama-3.1-405B-Instruct"])])
    assert [coverage.entry(name) for name in names] == ["llama-3.1-405b"]


def test_two_publishers_checkpoints_of_one_name_are_two(tmp_path: Path) -> None:
    rows: list[str | None] = ["a/Qwen9-1B-NVFP4", "b/Qwen9-1B-NVFP4", "Qwen9-1B NVFP4", "/models/Qwen9-1B-NVFP4"]
    assert coverage.names([log_of(tmp_path, rows)]) == ["a/Qwen9-1B-NVFP4", "b/Qwen9-1B-NVFP4"]


def test_a_folder_that_names_no_known_model_counts_for_nothing(tmp_path: Path) -> None:
    assert coverage.names([log_of(tmp_path, ["/data/my-finetune", "./checkpoint-300"])]) == []


# What the catalog has of the distinct public models that the logs and failures of tests/benchmarks' oracle data name.
SHARE = 0.95


def test_the_catalog_covers_the_models_that_public_logs_run() -> None:
    """Each model of the list is loaded, or stands there with why it is not in the catalog."""
    covered = [row for row in LOGGED if "entry" in row]
    assert len(LOGGED) >= 120
    assert len(covered) / len(LOGGED) >= SHARE
    for row in covered:
        assert coverage.entry(row["model"]) == row["entry"], row["model"]
        assert catalog.load(row["entry"]).num_layers > 0
    for row in LOGGED:
        assert ("entry" in row) != bool(row.get("why")), row["model"]
        assert "entry" in row or coverage.entry(row["model"]) is None, row["model"]


@needs_oracle_data
def test_the_list_is_that_of_the_logs() -> None:
    assert sorted(coverage.names([DATA / name for name in LOGS])) == sorted(row["model"] for row in LOGGED)
