"""`kvplan reconcile` on runs written by hand: damaged ones are one line, and nothing it writes destroys a run."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.reconcile import reconcile
from kvplan.rundir import load_run
from tests.cli import Run, refused
from tests.cli import run as run  # the fixture
from tests.recorded_runs import cpu_run, gpu_run, rewritten

DELETED = object()
# Where a run.json is edited, what is put there, and what the refusal calls it.
DAMAGES: list[tuple[str, Any, str]] = [
    ("model.name", None, "model.name"),
    ("model.name", DELETED, "model.name"),
    ("device", DELETED, "device"),
    ("device", "tpu", "device"),
    ("memory.weights", "12", "memory.weights"),
    ("memory.weights", -5, "memory.weights"),
    ("memory.weights", 1.5, "memory.weights"),
    ("memory.non_torch", DELETED, "memory.non_torch"),
    ("memory.num_blocks", DELETED, "memory.num_blocks"),
    ("memory.block_bytes", 0, "memory.block_bytes"),
    ("memory", [1], "memory"),
    ("peaks", [1], "peaks"),
    ("peaks", {"before": {"rss": "x"}}, "peaks"),
    ("peaks", {"before": 3}, "peaks"),
    ("inputs", "x", "inputs"),
    ("inputs.max_num_batched_tokens", "16", "inputs.max_num_batched_tokens"),
    ("inputs.block_size", 0, "inputs.block_size"),
    ("inputs.max_model_len", -4, "inputs.max_model_len"),
    ("inputs.tensor_parallel_size", 0, "inputs.tensor_parallel_size"),
    ("inputs.dtype", "float3", "inputs.dtype"),
    ("inputs.kv_cache_dtype", "int9", "inputs.kv_cache_dtype"),
    ("inputs.backend", "foo", "inputs.backend"),
    ("inputs.gpu_memory_utilization", 2, "inputs.gpu_memory_utilization"),
    ("groups", 0, "groups"),
    ("groups", "x", "groups"),
    ("results", [1], "results"),
    ("results.densest", "x", "results.densest"),
    ("results.densest.num_kv_tokens", "x", "results.densest"),
    ("results.most_running", "x", "results.most_running"),
    ("results.baseline", "x", "results.baseline"),
]


def edited(folder: Path, path: str, value: Any) -> Path:
    file = folder / "run.json"
    manifest = json.loads(file.read_text())
    *above, last = path.split(".")
    inner = manifest
    for key in above:
        inner = inner[key]
    if value is DELETED:
        del inner[last]
    else:
        inner[last] = value
    file.write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("path", "value", "named"), DAMAGES, ids=[f"{i}-{path}" for i, (path, _, _) in enumerate(DAMAGES)]
)
def test_a_value_that_no_run_writes_is_named(path: str, value: Any, named: str, tmp_path: Path, run: Run) -> None:
    folder = edited(cpu_run(tmp_path / "run"), path, value)
    assert f"run.json: {named}" in refused(run("reconcile", folder))


def test_a_name_from_a_run_cannot_drive_the_terminal(tmp_path: Path, run: Run) -> None:
    folder = edited(cpu_run(tmp_path / "run"), "model.name", "\x1b[31mred\x07[bold]x[/bold]")
    for format in ("table", "markdown", "csv"):
        assert "\x1b" not in run("reconcile", folder, "--format", format).out


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl", "events.jsonl"])
def test_a_run_is_not_written_over(name: str, tmp_path: Path, run: Run) -> None:
    folder = cpu_run(tmp_path / "run")
    before = (folder / name).read_bytes()
    assert "is part of a run" in refused(run("reconcile", folder, "--calibrate", folder / name))
    assert "is part of a run" in refused(run("report", folder, "-o", folder / name))
    assert (folder / name).read_bytes() == before


def test_every_format_says_what_each_allocator_served(tmp_path: Path, run: Run) -> None:
    folder = cpu_run(tmp_path / "run")
    served = run("reconcile", folder, "--format", "json").json["served"]
    assert [one["allocator"] for one in served] == ["paged", "contiguous"]
    rows = list(csv.DictReader(io.StringIO(run("reconcile", folder, "--format", "csv").out)))
    of_csv = {
        (row["kind"], row["name"]): float(row["measured"]) for row in rows if row["kind"] in ("paged", "contiguous")
    }
    assert of_csv == {
        (one["allocator"], name): value for one in served for name, value in one.items() if name != "allocator"
    }
    assert {"num_blocks", "pool_tokens"} <= {row["name"] for row in rows}
    for format in ("table", "markdown"):
        assert "contiguous" in run("reconcile", folder, "--format", format).out


def test_gpu_rows_are_named_and_add_up(tmp_path: Path) -> None:
    result = reconcile(load_run(gpu_run(tmp_path / "run")))
    rows = {row.component: row for row in result.rows}
    assert sum(row.measured for row in result.rows) == result.reported
    assert rows["weights"].error == 0
    assert min(row.measured for row in result.rows if row.component != "unattributed") >= 0
    assert "num_blocks is predicted with the measured non_torch" in " ".join(result.gaps)


def test_half_a_run_or_a_played_device_gives_no_constants(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "constants.json"
    half = rewritten(cpu_run(tmp_path / "half"), status="partial", cause="interrupted")
    assert "the run is partial" in refused(run("reconcile", half, "--calibrate", target))
    played = edited(cpu_run(tmp_path / "played"), "engine", {"memory_limit": 80 * 2**30})
    assert "had a --memory-limit" in refused(run("reconcile", played, "--calibrate", target))
    assert not target.exists()


def test_a_cpu_is_no_gpu(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "constants.json"
    assert run("reconcile", cpu_run(tmp_path / "run"), "--calibrate", target).code == 0
    asked = ("estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "h100-80g", "--calibration", target)
    assert "was measured on a CPU" in refused(run(*asked))


def test_a_calibration_corrects_the_activation_peak(tmp_path: Path, run: Run) -> None:
    folder, target = cpu_run(tmp_path / "run"), tmp_path / "constants.json"
    plain = {row["component"]: row for row in run("reconcile", folder, "--format", "json").json["rows"]}["activations"]
    assert plain["error"] != 0
    run("reconcile", folder, "--calibrate", target)
    asked = run("reconcile", folder, "--calibration", target, "--format", "json")
    corrected = {row["component"]: row for row in asked.json["rows"]}["activations"]
    assert corrected["predicted"] == corrected["measured"] == plain["measured"]
