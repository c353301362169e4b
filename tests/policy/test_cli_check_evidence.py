"""`kvplan check`: what a target is held against: an earlier check, and what a run measured."""

import json
from pathlib import Path

import jsonschema
import pytest

from kvplan.documents.schema import document_schema
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import findings, policy
from tests.support.recorded_runs import cpu_run, failed_run, gpu_run, rewritten

# --- baseline ---------------------------------------------------------------------------------------------------------

BASELINE = "baseline: {file: .kvplan/base.json, max_growth: {weights: 0%}, max_drop: {kv_tokens: 1%}}"


def test_a_baseline_is_written_held_and_accepted_anew(run: Run, tmp_path: Path) -> None:
    config_file(tmp_path / "model")
    target = "  model: ./model\n  gpu: a100-80g\n  max_model_len: 8k\n"
    path = policy(tmp_path, target, more=BASELINE)
    first = findings(run("check", path, "--format", "json"))
    assert {first[rule]["outcome"] for rule in ("baseline.weights", "baseline.kv_tokens")} == {"skip"}
    assert run("check", path, "--update-baseline").code == 0
    written = json.loads((tmp_path / ".kvplan" / "base.json").read_text())
    jsonschema.Draft202012Validator(document_schema("check")).validate(written)
    assert run("check", path, "--strict").code == 0
    config_file(tmp_path / "model", {"num_hidden_layers": 33})
    grown = run("check", path, "--format", "json")
    assert grown.code == 1
    # 4,096 x (4,096 + 2 x 1,024 + 4,096) in attention, 3 x 4,096 x 14,336 in the MLP, two norms of 4,096; 2 bytes each.
    layer = 2 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096)
    weights = findings(grown)["baseline.weights"]
    assert weights["actual"] - weights["limit"] == layer
    assert findings(grown)["baseline.kv_tokens"]["outcome"] == "fail"  # one layer in 33 is 3% of the KV
    assert run("check", path, "--update-baseline").code == 0
    assert run("check", path).code == 0


def test_a_json_report_serves_as_a_baseline(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, more="baseline: {file: base.json, max_growth: {weights: 0%}}")
    run("check", path, "--report", tmp_path / "base.json")
    assert findings(run("check", path, "--format", "json"))["baseline.weights"]["outcome"] == "pass"


def test_an_update_wants_a_baseline_to_write(run: Run, tmp_path: Path) -> None:
    assert "names no baseline" in refused(run("check", policy(tmp_path), "--update-baseline"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema": "kvplan/plan@1"}', "{'a'", '{"a": NaN}'])
def test_a_damaged_baseline_is_2_with_its_place(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "b.json").write_text(content)
    path = policy(tmp_path, more="baseline: {file: b.json, max_growth: {weights: 0%}}")
    assert refused(run("check", path)).startswith(f"{path}:8:12: baseline: ")


# --- evidence ---------------------------------------------------------------------------------------------------------

H100 = "  model: llama-3.1-8b\n  gpu: h100-80g\n  max_model_len: 8k\n"
MEASURED = "measured: {file: run, max_error: 5%, max_age: 30d}"


def test_a_run_of_a_target_is_judged_by_the_error_that_reconcile_shows(run: Run, tmp_path: Path) -> None:
    """The run's activations are 1,280 MB, far from the formula's: reconcile --max-error says the same."""
    gpu_run(tmp_path / "run")
    path = policy(tmp_path, H100, more=MEASURED)
    finding = findings(run("check", path, "--format", "json"))["max_prediction_error"]
    rows = run("reconcile", tmp_path / "run", "--format", "json").json
    compared = [*rows["rows"], rows["total"]]
    worst = max(abs(row["relative"]) for row in compared if row["relative"] is not None)
    assert finding["actual"] == pytest.approx(worst)
    assert finding["outcome"] == "fail"
    assert run("reconcile", tmp_path / "run", "--max-error", "5%").code == 1
    wide = policy(tmp_path, H100, more=f"measured: {{file: run/run.json, max_error: {100 * worst + 0.01:.2f}%}}")
    assert findings(run("check", wide, "--format", "json"))["max_prediction_error"]["outcome"] == "pass"


def test_a_reconciliation_says_the_error_and_the_run_beside_it_the_rest(run: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path / "run")
    document = run("reconcile", tmp_path / "run", "--format", "json").out
    (tmp_path / "run" / "reconciliation.json").write_text(document)
    beside = policy(tmp_path, H100, more="measured: {file: run/reconciliation.json, max_error: 1%, max_age: 9999w}")
    by_rule = findings(run("check", beside, "--format", "json"))
    assert (by_rule["max_prediction_error"]["outcome"], by_rule["max_age"]["outcome"]) == ("fail", "pass")
    (tmp_path / "alone.json").write_text(document)
    alone = policy(tmp_path, H100, more="measured: {file: alone.json, max_error: 1%}")
    ran = run("check", alone, "--format", "json")
    assert findings(ran)["max_prediction_error"]["outcome"] == "skip"
    assert "run.json is missing next to" in findings(ran)["max_prediction_error"]["message"]


def test_evidence_ages_from_the_day_the_run_began(run: Run, tmp_path: Path) -> None:
    rewritten(gpu_run(tmp_path / "run"), started_utc="2026-10-01T23:59:59+00:00")
    path = policy(tmp_path, H100, more="measured: {file: run, max_age: 30d}")
    assert run("check", path, "--today", "2026-10-31").code == 0
    late = run("check", path, "--today", "2026-11-01")
    assert late.code == 1
    assert "measured on 2026-10-01, 31 days ago; maximum age 30 days" in late.out


def test_what_is_no_evidence_for_any_target_is_skipped(run: Run, tmp_path: Path) -> None:
    def message(more: str = MEASURED) -> str:
        by_rule = findings(run("check", policy(tmp_path, H100, more=more), "--format", "json"))
        assert by_rule["max_prediction_error"]["outcome"] == "skip"
        return str(by_rule["max_prediction_error"]["message"])

    assert "run does not exist" in message()
    cpu_run(tmp_path / "run")
    assert message() == "the run is for tiny on cpu, which matches no target"
    failed_run(tmp_path / "failed")
    assert "CUDA out of memory" in message("measured: {file: failed, max_error: 5%}")
    gpu_run(tmp_path / "wsl")
    environment = json.loads((tmp_path / "wsl" / "run.json").read_text())["environment"]
    rewritten(tmp_path / "wsl", environment={**environment, "is_wsl": True})
    assert "under WSL" in message("measured: {file: wsl, max_error: 5%}")


def test_a_damaged_run_is_2_with_its_place(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, H100, more=MEASURED)
    (tmp_path / "run").mkdir()
    for content in ("", "{}", '{"schema": "kvplan/run@1", "status": "done"}'):
        (tmp_path / "run" / "run.json").write_text(content)
        assert refused(run("check", path)).startswith(f"{path}:8:12: measured: "), content
