"""The oracle commands on facts this repository carries, so that a clone without the reference data compares too.

tests/facts/capacity.jsonl: flags, and what vLLM 0.33's own capacity code and parameters answer to them (blocks, tokens,
concurrency, weight bytes per rank, refusal to start). tests/facts/models.jsonl: parameters and cache geometry that
transformers 5.17 classes have. A model stands for its catalog entry.
"""

import json
from pathlib import Path

import pytest

from kvplan.models import catalog
from tests import oracles

FACTS = Path(__file__).parents[1] / "facts"
CASES = oracles.read_lines(FACTS / "capacity.jsonl")
MODELS = oracles.read_lines(FACTS / "models.jsonl")


def write_configs(folder: Path, models: set[str]) -> Path:
    """A model directory for each, with the config the catalog holds."""
    for model in models:
        (folder / model).mkdir(parents=True)
        config = catalog.expand(catalog.facts(model)["config"])
        (folder / model / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    return write_configs(tmp_path / "configs", {case["inputs"]["model"] for case in CASES})


def test_the_cases_cover_what_servers_do_differently() -> None:
    inputs = [case["inputs"] for case in CASES]
    assert {"pp", "tp", "kv_cache_dtype", "gpu", "enable_prefix_caching", "engine_args"} <= {
        k for i in inputs for k in i
    }
    assert any(result.get("error") for case in CASES for result in case.get("results", []))
    assert len({i["model"] for i in inputs}) >= 20


def test_capacity_equals_the_servers(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oracles.main(["capacity", str(FACTS / "capacity.jsonl"), str(configs)]) == 0
    assert capsys.readouterr().out == f"{len(CASES)} equal / 0 refused by name / 0 different\n"


def models_folder(folder: Path) -> Path:
    """A folder as `oracles.py models` takes it."""
    write_configs(folder, {row["model"] for row in MODELS})
    for name in ("params.jsonl", "kv_geometry.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in MODELS))
    return folder


def test_parameters_and_geometry_equal_the_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oracles.main(["models", str(models_folder(tmp_path / "models"))]) == 0
    n = len(MODELS)
    assert capsys.readouterr().out == (f"{n} equal / 0 refused by name / 0 different ({n} totals with towers exact)\n")


@pytest.mark.parametrize("change", ["text_params", "layers", "kv_heads"])
def test_a_planted_difference_in_a_model_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    folder = models_folder(tmp_path / "models")
    rows = json.loads(json.dumps(MODELS))
    first = next(row for row in rows if row["model"] == "llama-3.1-8b")
    match change:
        case "text_params":
            first["text_params"] += 1
        case "layers":
            first["groups"][0]["layers"] = "0-30"
        case "kv_heads":
            first["groups"][0]["kv_heads"] = 4
    for name in ("params.jsonl", "kv_geometry.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert oracles.main(["models", str(folder)]) == 1
    assert "llama-3.1-8b: different:" in capsys.readouterr().out


def test_a_planted_difference_in_weights_is_seen(
    configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = json.loads(json.dumps(next(c for c in CASES if isinstance(c["weights"], dict))))
    case["weights"]["param_bytes_per_rank"] += 2
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(case) + "\n")
    assert oracles.main(["capacity", str(path), str(configs)]) == 1
    assert "weights of stage 0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "x\n", "{}\n", "[]\n", '{"inputs": {"model": "absent"}, "results": [1]}\n'])
def test_files_with_nothing_to_compare_are_no_success(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    assert oracles.run(["capacity", str(path), str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
