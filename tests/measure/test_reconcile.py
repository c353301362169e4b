"""`kvplan reconcile` on runs written by hand: damaged ones are one line, and nothing it writes destroys a run."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.measure.reconcile import COMPONENTS, peaks_of, reconcile_run
from kvplan.measure.rundir import load_run
from kvplan.models.hf_config import read_config
from kvplan.servers.bundled.rules import EngineInputs, predict
from tests.support.cli import LLAMA, Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.recorded_runs import (
    GIB,
    GPU_INPUTS,
    cpu_run,
    gpu_run,
    gpu_samples,
    manifest,
    rewritten,
    served,
    write_run,
)

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
    ("memory.workspaces", "x", "memory.workspaces"),
    ("memory.graph_tensors", -1, "memory.graph_tensors"),
    ("graph_bytes", [1], "graph_bytes"),
    ("environment", "x", "environment"),
    ("engine", 5, "engine"),
    ("workload", [1], "workload"),
    ("cause", [], "cause"),
    ("graph_bytes", {"8": 0.5}, "graph_bytes"),
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
    assert [row["allocator"] for row in served] == ["paged", "contiguous"]
    rows = list(csv.DictReader(io.StringIO(run("reconcile", folder, "--format", "csv").out)))
    of_csv = {
        (row["kind"], row["name"]): float(row["measured"]) for row in rows if row["kind"] in ("paged", "contiguous")
    }
    assert of_csv == {
        (row["allocator"], name): value for row in served for name, value in row.items() if name != "allocator"
    }
    assert {"num_blocks", "pool_tokens"} <= {row["name"] for row in rows}
    for format in ("table", "markdown"):
        assert "contiguous" in run("reconcile", folder, "--format", format).out


def test_gpu_rows_are_named_and_add_up(tmp_path: Path) -> None:
    result = reconcile_run(load_run(gpu_run(tmp_path / "run")))
    rows = {row.component: row for row in result.rows}
    assert sum(row.size for row in result.rows) == result.reported + result.unreached
    assert rows["weights"].error == 0
    assert min(row.size for row in result.rows if row.component != "unattributed") >= 0
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
    command = ("estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "h100-80g", "--calibration", target)
    assert "was measured on a CPU" in refused(run(*command))


def test_a_calibration_corrects_the_activation_peak(tmp_path: Path, run: Run) -> None:
    folder, target = cpu_run(tmp_path / "run"), tmp_path / "constants.json"
    plain = {row["component"]: row for row in run("reconcile", folder, "--format", "json").json["rows"]}["activations"]
    assert plain["error"] != 0
    run("reconcile", folder, "--calibrate", target)
    answer = run("reconcile", folder, "--calibration", target, "--format", "json")
    corrected = {row["component"]: row for row in answer.json["rows"]}["activations"]
    assert corrected["predicted"] == corrected["measured"] == plain["measured"]


# --- a run that is exactly as the formulas say -----------------------------------------------------------------------

CONTEXT, LIBRARIES, GRAPHS, GUESTS = 500_000_000, 200_000_000, {"1": 100_000_000, "8": 200_000_000}, 700_000_000
WORKSPACES, GRAPH_TENSORS = 35_000_000, 120_000_000  # of the libraries' bytes and of the graphs', in torch's own pool


def exact_gpu_run(path: Path, name: str = "llama-3.1-8b", *, unreached: int = 0, **changes: Any) -> Path:
    """Weights, pool and peak are the planner's; a context, libraries and two graphs of these sizes, beside guests.

    The pool by hand: 0.9 of the device less weights, buffers, peak, and all that is not torch's when it is sized.
    """
    inputs: dict[str, Any] = {**GPU_INPUTS, "total": 85_049_409_536}
    outside = GUESTS + CONTEXT + LIBRARIES
    planned = predict(read_config(LLAMA, "tests", "llama"), EngineInputs(**inputs), non_torch=outside)
    sizes = {part: getattr(planned, part) for part in ("weights", "buffers", "activations", "kv_cache")}
    budget = 85_049_409_536 * 9 // 10
    left = budget - sum(sizes.values()) + sizes["kv_cache"] - outside
    assert planned.num_blocks == left // (16 * 131_072)
    graphs = sum(GRAPHS.values())
    memory = {
        **sizes, "cuda_graphs": graphs, "non_torch": outside, "total": inputs["total"], "budget": budget,
        "num_blocks": planned.num_blocks, "block_bytes": planned.block_bytes, "workspaces": WORKSPACES,
        "graph_tensors": GRAPH_TENSORS,
    }  # fmt: skip
    reserved = sum(sizes.values()) + GRAPH_TENSORS + WORKSPACES - unreached
    in_drivers = GUESTS + CONTEXT + LIBRARIES - WORKSPACES + graphs - GRAPH_TENSORS
    peaks = {
        "before": {"device_used": GUESTS},
        "context": {"device_used": GUESTS + CONTEXT, "torch_reserved": 0},
        "decode": {"device_used": in_drivers + reserved, "torch_reserved": reserved},
    }
    results = served(64.0, 163_840, 64, 27_900, 441_000, num_preemptions=4)
    defaults = {"memory": memory, "peaks": peaks, "results": results, "graph_bytes": GRAPHS}
    return write_run(path, manifest(LLAMA, "cuda", inputs, name), gpu_samples(), **(defaults | changes))


def test_a_run_agrees_with_its_own_calibration_and_is_told_that_it_must(tmp_path: Path, run: Run) -> None:
    folder, target = exact_gpu_run(tmp_path / "run"), tmp_path / "constants.json"
    assert run("reconcile", folder, "--calibrate", target).code == 0
    answer = run("reconcile", folder, "--calibration", target, "--format", "json", "--max-error", "0.0001%")
    assert answer.code == 0
    assert {row["component"]: row["error"] for row in answer.json["rows"]} == dict.fromkeys(COMPONENTS, 0)
    assert any("measured on this very run" in gap for gap in answer.json["gaps"])


def test_the_pool_is_predicted_with_the_coefficient_of_the_peak(tmp_path: Path, run: Run) -> None:
    """An engine that holds twice the formula's peak has that much less for its pool."""
    folder, target = exact_gpu_run(tmp_path / "run"), tmp_path / "constants.json"
    run("reconcile", folder, "--calibrate", target)
    constants = json.loads(target.read_text())
    target.write_text(json.dumps({**constants, "activation_coefficient": 2.0}))
    answer = run("reconcile", folder, "--calibration", target, "--format", "json")
    rows = {row["component"]: row for row in answer.json["rows"]}
    assert rows["activations"]["error"] == rows["activations"]["measured"]
    assert 0 <= rows["activations"]["error"] + rows["kv_cache"]["error"] < 2 * 2**20  # to a block


def test_a_cpu_finds_no_context_when_it_sizes_its_pool(tmp_path: Path, run: Run) -> None:
    """8 GiB of memory: 0.9 of it less weights, tables and peak, in blocks of 8,192 bytes, and no more than 129."""
    folder, target = edited(cpu_run(tmp_path / "run"), "inputs.num_blocks", None), tmp_path / "constants.json"
    edited(folder, "inputs.max_blocks", 129)
    edited(folder, "peaks.context.rss", 8 * GIB)  # more than there is to share out
    run("reconcile", folder, "--calibrate", target)
    rows = run("reconcile", folder, "--calibration", target, "--format", "json").json["capacity"]
    assert {row["name"]: row["predicted"] for row in rows}["num_blocks"] == 129


@pytest.mark.parametrize("other", ["model", "ranks"])
def test_the_coefficient_of_another_model_or_of_other_ranks_is_not_used(other: str, tmp_path: Path, run: Run) -> None:
    folder, target = cpu_run(tmp_path / "run"), tmp_path / "constants.json"
    run("reconcile", folder, "--calibrate", target)
    change = {"run_id": "b", **({"model": "another"} if other == "model" else {"tensor_parallel_size": 2})}
    target.write_text(json.dumps({**json.loads(target.read_text()), **change}))

    def activations(*flags: Any) -> Any:
        rows = run("reconcile", folder, "--format", "json", *flags).json["rows"]
        return {row["component"]: row["predicted"] for row in rows}["activations"]

    assert activations("--calibration", target) == activations()
    assert "activations: the formula alone" in run("reconcile", folder, "--calibration", target).out


def test_a_row_that_a_calibration_predicts_is_called_that(tmp_path: Path, run: Run) -> None:
    folder, target = cpu_run(tmp_path / "run"), tmp_path / "constants.json"
    run("reconcile", folder, "--calibrate", target)
    plain, known = (
        run("reconcile", folder, "--format", "markdown", *more).out for more in ((), ("--calibration", target))
    )
    assert "not predicted without a calibration" in plain
    assert "not predicted without a calibration" not in known
    assert f"as {target} measured it" in known.replace("\\", "")


def test_graphs_and_slack_of_another_model_predict_nothing(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "constants.json"
    run("reconcile", exact_gpu_run(tmp_path / "first"), "--calibrate", target)
    folder = exact_gpu_run(tmp_path / "other", "another-llama")
    other = run("reconcile", folder, "--calibration", target, "--format", "json")
    rows = {row["component"]: row for row in other.json["rows"]}
    assert (rows["context"]["predicted"], rows["non_torch"]["predicted"]) == (CONTEXT, LIBRARIES)
    assert rows["cuda_graphs"]["predicted"] is rows["allocator_slack"]["predicted"] is None
    assert any("measured them with llama-3.1-8b" in gap for gap in other.json["gaps"])


def test_graphs_are_predicted_by_the_sizes_that_a_run_captures(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "constants.json"
    run("reconcile", exact_gpu_run(tmp_path / "first"), "--calibrate", target)

    def graphs(name: str, **changes: Any) -> Any:
        answer = run(
            "reconcile", exact_gpu_run(tmp_path / name, **changes), "--calibration", target, "--format", "json"
        )
        return {row["component"]: row["predicted"] for row in answer.json["rows"]}["cuda_graphs"]

    assert graphs("fewer", graph_bytes={"8": 1}) == GRAPHS["8"]
    assert graphs("others", graph_bytes={"8": 1, "16": 1}) is None
    assert graphs("eager", graph_bytes={}, engine={"enforce_eager": True}) == 0


def test_a_peak_that_serving_did_not_reach_again_is_told_and_no_error(tmp_path: Path, run: Run) -> None:
    folder, target = exact_gpu_run(tmp_path / "run", unreached=300_000_000), tmp_path / "constants.json"
    run("reconcile", folder, "--calibrate", target)
    document = run("reconcile", folder, "--calibration", target, "--format", "json").json
    assert (document["unreached"], document["held_before"], document["total"]["error"]) == (300_000_000, GUESTS, 0)
    assert sum(row["measured"] for row in document["rows"]) == document["reported"] + 300_000_000
    for format in ("table", "markdown"):
        text = run("reconcile", folder, "--format", format).out
        assert "beyond the 667.57 MiB in use before the run, and 286.10 MiB of peak activations not" in text


def test_what_is_held_against_other_code_says_so(tmp_path: Path, run: Run) -> None:
    """The runs written by hand are of commit 0123456789abcdef..."""
    gaps = run("reconcile", cpu_run(tmp_path / "run"), "--format", "json").json["gaps"]
    assert any(gap.startswith("measured with kvplan 0123456789ab, predicted by the formulas of ") for gap in gaps)


def test_shared_blocks_count_once_and_what_is_not_known_is_not_told(tmp_path: Path, run: Run) -> None:
    """Sixty-four requests that share all but 16 of 336 tokens: 20 blocks for all, and one for each, of 16 slots."""
    used = 20 + 64
    shared = served(2.0, 32, 64, used, 64 * 336, prefix_cache_queries=1000, prefix_cache_hits=950)
    shared["densest"]["num_filled_slots"] = 20 * 16 + 64 * 12
    pool = pool_of(run("reconcile", cpu_run(tmp_path / "run", results=shared), "--format", "json").json)
    assert pool["allocated_but_unused"] == pytest.approx(1 - 1088 / 1344)
    assert pool["kv_bytes_per_token"] == pytest.approx(
        512 * 1344 / 1088
    )  # 512 bytes for each token, and what is unused
    assert pool["prefix_hits"] == 0.95
    del shared["densest"]["num_filled_slots"]  # as earlier runs were written
    pool = pool_of(run("reconcile", cpu_run(tmp_path / "older", results=shared), "--format", "json").json)
    assert pool["allocated_but_unused"] is pool["kv_bytes_per_token"] is None


def pool_of(document: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row["measured"] for row in document["capacity"]}


def test_what_torch_counted_between_two_samples_is_not_lost(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run")
    before = peaks_of(load_run(folder))["prefill"]
    with (folder / "events.jsonl").open("a") as file:
        for ended in ({"prefill": {"torch_reserved": 77 * GIB, "torch_peak": "x"}}, {"prefill": 3}, "x"):
            file.write(json.dumps({"t": 90.0, "event": "stage", "stage": "drained", "peaks": ended}) + "\n")
    assert peaks_of(load_run(folder))["prefill"] == {**before, "torch_reserved": 77 * GIB}


def test_one_rank_of_several_is_called_that(tmp_path: Path, run: Run) -> None:
    folder = edited(cpu_run(tmp_path / "run"), "inputs.tensor_parallel_size", 2)
    assert "tiny on cpu, rank 0 of 2: predicted vs measured" in run("reconcile", folder).out
    document = run("reconcile", folder, "--format", "json").json
    assert (document["rank"], document["tensor_parallel_size"]) == (0, 2)


def test_an_error_too_small_for_a_share_is_told_in_bytes(tmp_path: Path, run: Run) -> None:
    folder = exact_gpu_run(tmp_path / "run")
    weights = json.loads((folder / "run.json").read_text())["memory"]["weights"]
    failed = run("reconcile", edited(folder, "memory.weights", weights - 1), "--max-error", "weights=1e-12")
    assert failed.err.strip().endswith("weights +1 B")
