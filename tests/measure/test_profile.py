"""`kvplan profile` and `kvplan reconcile` on a CPU: what is measured, what is predicted, and what goes wrong."""

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine, EngineConfig
from engine.block_manager import FullGroup, Group, WindowGroup
from engine.extensions import ExtendedConfig, scheduler_of
from engine.memory import MemoryReport
from engine.request import Request
from engine.sequence import Sequence
from engine.stats import Stats
from kvplan.cli.live import progress_words
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.core.limits import Limits
from kvplan.documents.reconciliation import document
from kvplan.documents.schema import document_schema
from kvplan.measure import profile as runs
from kvplan.measure.reconcile import COMPONENTS, peaks_of, reconcile_run
from kvplan.measure.run_types import Progress
from kvplan.measure.rundir import ENGINE_FIGURES, RunWriter, load_run, served_by_samples
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import FullAttention
from kvplan.servers.logs.measurement import exceeds
from kvplan.workloads.planned import PlannedRequest
from tests.support.cli import LLAMA, Run
from tests.support.cli import run as run  # the fixture

SMALL = (
    "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--num-seqs", "3", "--prompt-tokens", "20",
    "--output-tokens", "4", "--max-num-batched-tokens", "32",
)  # fmt: skip
KVPLAN = (sys.executable, "-m", "kvplan")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One small run with a contiguous baseline: (directory, what the command printed)."""
    folder = tmp_path_factory.mktemp("profile") / "run"
    options = ("--baseline", "contiguous", "--format", "json", "-q", "-o", str(folder))
    done = subprocess.run([*KVPLAN, "profile", *SMALL, *options], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """SMALL with a model that takes no time, where any will do."""
    return (str(model_directory(tmp_path_factory.mktemp("tiny") / "model")), *SMALL[1:])


@pytest.fixture
def copied(profiled: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(profiled[0], tmp_path / "copy"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- a run and its reconciliation -------------------------------------------------------------------------------------


def test_rows_add_up_to_what_the_device_reports(profiled: tuple[Path, dict[str, Any]]) -> None:
    printed = profiled[1]
    rows = {row["component"]: row for row in printed["rows"]}
    assert tuple(rows) == COMPONENTS
    assert sum(row["measured"] for row in printed["rows"]) == printed["reported"]
    own = [sample["rss"] for sample in load_run(profiled[0]).samples if sample["stage"] != "baseline"]
    assert printed["reported"] == max(own)
    assert all(isinstance(row["measured"], int) for row in printed["rows"])


def test_weights_tables_and_pool_are_exact_and_the_peak_is_near(profiled: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["component"]: row for row in profiled[1]["rows"]}
    # SmolLM2-135M: 134,515,008 parameters (49,152 rows need no padding), 4 bytes each.
    assert rows["weights"]["measured"] == rows["weights"]["predicted"] == 4 * 134_515_008
    # cos and sin, 64 wide, of the 25 positions served
    assert rows["buffers"]["measured"] == rows["buffers"]["predicted"] == 4 * 64 * 25
    # 1 + 3 sequences x 2 blocks of 16 tokens, 30 layers x K and V x 3 heads x 64 x 4 bytes
    assert rows["kv_cache"]["measured"] == rows["kv_cache"]["predicted"] == 7 * 16 * 30 * 2 * 3 * 64 * 4
    assert abs(rows["activations"]["relative"]) < 0.1


def test_stages_are_marked_in_their_order(profiled: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(profiled[0])
    stages = [event["stage"] for event in run.events if event["event"] == "stage"]
    assert stages == ["before", "context", "weights", "profile_run", "pool", "prefill", "decode", "drained", "baseline"]
    times = [event["t"] for event in run.events]
    assert times == sorted(times)
    assert {sample["stage"] for sample in run.samples} == set(stages)


def test_the_manifest_says_what_ran_where(profiled: tuple[Path, dict[str, Any]]) -> None:
    manifest = load_run(profiled[0]).manifest
    assert manifest["status"] == "complete"
    assert manifest["environment"]["packages"]["torch"]
    assert manifest["engine"]["load_format"] == "dummy"
    results = manifest["results"]
    assert results["num_finished"] == results["most_running"] == 3
    assert results["stats"]["generation_tokens"] == 3 * 4
    assert results["baseline"]["allocator"] == "contiguous"
    assert results["baseline"]["num_finished"] == 3


def test_peaks_can_be_had_from_the_samples_alone(profiled: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(profiled[0])
    assert peaks_of(run) == run.manifest["peaks"]


def test_every_format_has_the_same_numbers(profiled: tuple[Path, dict[str, Any]], run: Run) -> None:
    folder, printed = profiled
    assert run("reconcile", str(folder), "--format", "json").json["rows"] == printed["rows"]
    rows = list(csv.DictReader(io.StringIO(run("reconcile", str(folder), "--format", "csv").out)))
    of_bytes = [int(row["measured"]) for row in rows if row["kind"] == "bytes" and row["name"] in COMPONENTS]
    assert of_bytes == [row["measured"] for row in printed["rows"]]
    markdown = run("reconcile", str(folder), "--format", "markdown").out
    table = run("reconcile", str(folder)).out
    for component in COMPONENTS:
        assert f"| {component} |" in markdown
        assert component in table


# --- a fault on either side shows in its row --------------------------------------------------------------------------


def test_a_wrong_head_count_in_the_plan_shows_in_its_rows(copied: Path) -> None:
    model = json.loads((copied / "run.json").read_text())["model"]
    model["config"]["num_key_value_heads"] = 9  # it has 3
    edit(copied, model=model)
    rows = {row.component: row for row in reconcile_run(load_run(copied)).rows}
    assert rows["kv_cache"].relative == pytest.approx(2.0)  # three times what there is
    # k_proj and v_proj of 30 layers: 6 more heads of 64 x 576 each, float32
    assert rows["weights"].error == 30 * 2 * 6 * 64 * 576 * 4
    assert rows["buffers"].error == 0
    over = exceeds([(row.component, row) for row in reconcile_run(load_run(copied)).compared], Limits(0.02))
    assert [name.split()[0] for name in over][:2] == ["weights", "kv_cache"]


def test_a_wrong_head_count_in_the_engine_shows_in_its_row(copied: Path) -> None:
    """An engine that keeps 1 KV head instead of 3: its own report, in the place of the run's."""
    spec = catalog.load("smollm2-135m")
    wrong = replace(spec, layers=((FullAttention(1, 64, 64),),) * spec.num_layers)
    config = EngineConfig(device="cpu", dtype="float32", load_format="dummy", num_blocks=7, max_model_len=25,
                          max_num_seqs=3, max_num_batched_tokens=32)  # fmt: skip
    memory = json.loads((copied / "run.json").read_text())["memory"]
    edit(copied, memory={**memory, "kv_cache": Engine(wrong, config).memory_report().kv_cache})
    rows = {row.component: row for row in reconcile_run(load_run(copied)).rows}
    assert rows["kv_cache"].relative == pytest.approx(2.0)
    assert rows["weights"].error == 0


def test_max_error_is_a_gate(copied: Path, run: Run) -> None:
    assert run("reconcile", str(copied), "--max-error", "100%").code == 0
    memory = json.loads((copied / "run.json").read_text())["memory"]
    edit(copied, memory={**memory, "weights": memory["weights"] // 2})
    failed = run("reconcile", str(copied), "--max-error", "2%")
    assert failed.code == 1
    assert "weights +100.0%" in failed.err


def test_max_error_may_be_said_of_one_row_and_of_the_total(copied: Path, run: Run) -> None:
    memory = json.loads((copied / "run.json").read_text())["memory"]
    edit(copied, memory={**memory, "weights": memory["weights"] // 2})
    # What is wrong is not asked after, or allowed.
    assert run("reconcile", str(copied), "--max-error", "kv_cache=0.1%,buffers=0.1%").code == 0
    assert run("reconcile", str(copied), "--max-error", "total=100%", "--max-error", "weights=100%").code == 0
    only = run("reconcile", str(copied), "--max-error", "100%", "--max-error", "weights=50%")
    assert only.code == 1
    assert only.err.strip().endswith("off by more than 100%, weights=50%: weights +100.0%")
    # What weights lost is unattributed then, so the total is as far off as it was.
    total = abs(run("reconcile", str(copied), "--format", "json").json["total"]["relative"])
    assert run("reconcile", str(copied), "--max-error", f"total={total * 1.01:.9f}").code == 0
    assert "total " in run("reconcile", str(copied), "--max-error", f"total={total * 0.99:.9f}").err


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ("context=1%",),
            "'context' is not a row of this comparison; these are: weights, buffers, kv_cache, activations, ",
        ),
        (("unattributed=1%",), "'unattributed' is not a row of this comparison"),
        (("wieghts=1%",), "'wieghts' is not a row of this comparison"),
        (("=1%",), "'=1%' does not name a row; write total=1%"),
        (("weights=1%", "weights=2%"), "says weights twice; set it once"),
        (("1%", "2%"), "says the share of every row twice; set it once"),
        (("total=much",), "'total=much' has no percentage; write 2%, or ROW=SHARE: total=1%"),
        (("weights",), "'weights' has no percentage; write 2%, or ROW=SHARE: total=1%"),
        (("2%,",), "'' has no percentage"),
        (("total=1e",), "not a number"),
        (("total=101%",), "must be greater than 0 and at most 1"),
        (("0",), "must be greater than 0 and at most 1"),
    ],
    ids=str,
)
def test_a_limit_that_could_not_fail_is_refused(copied: Path, run: Run, texts: tuple[str, ...], message: str) -> None:
    flags = [part for text in texts for part in ("--max-error", text)]
    refused = run("reconcile", str(copied), *flags)
    assert refused.code == 2
    assert message in refused.err


def test_a_predicted_row_that_measured_nothing_is_off(copied: Path, run: Run) -> None:
    memory = json.loads((copied / "run.json").read_text())["memory"]
    edit(copied, memory={**memory, "kv_cache": 0})
    failed = run("reconcile", str(copied), "--max-error", "kv_cache=100%")
    assert failed.code == 1
    assert failed.err.strip().endswith(f"kv_cache {memory['kv_cache']:,} B, measured none")


def test_a_calibration_predicts_the_context_of_the_same_machine_only(copied: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "constants.json"
    assert run("reconcile", str(copied), "--calibrate", str(file)).code == 0
    rows = run("reconcile", str(copied), "--calibration", str(file), "--format", "json").json["rows"]
    context = next(row for row in rows if row["component"] == "context")
    assert context["predicted"] == context["measured"] > 0
    content = json.loads(file.read_text())
    content["for"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    refused = run("reconcile", str(copied), "--calibration", str(file))
    assert refused.code == 2
    assert "was measured on a different setup (torch '1.0' there" in refused.err


# --- run directories --------------------------------------------------------------------------------------------------


def test_a_run_is_never_overwritten(copied: Path, run: Run) -> None:
    before = (copied / "run.json").read_bytes()
    again = run("profile", *SMALL, "-o", str(copied))
    assert again.code == 2
    assert "exists, and runs are never overwritten" in again.err
    assert (copied / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [{"host": "another-machine"}, {"pid_started": 1}],  # the number of our own process, in use elsewhere or before
)
def test_a_process_of_the_same_number_is_not_the_one_that_wrote(tmp_path: Path, other: dict[str, Any]) -> None:
    writer = RunWriter(tmp_path / "run", {})
    assert load_run(tmp_path / "run").status == "running"
    writer.update(**other)
    record = load_run(tmp_path / "run")
    assert (record.status, record.recovered) == ("partial", True)
    writer.finish("complete")


def test_what_is_appended_reaches_the_disk_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run", {})
    synced: list[int] = []
    now = [time.monotonic()]
    monkeypatch.setattr("kvplan.measure.rundir.os.fsync", synced.append)
    monkeypatch.setattr("kvplan.measure.rundir.time.monotonic", lambda: now[0])
    for seconds in (0.5, 0.6, 0.9, 0.2):  # 0.5 and 1.1 s after the start, then 0.9 and 1.1 s after that
        now[0] += seconds
        writer.sample({"t": now[0]})
    assert len(synced) == 2 * 2  # twice, two files
    writer.finish("complete")


def test_a_directory_in_use_names_its_process(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", {"device": "cpu"})
    with pytest.raises(UsageError, match=f"is in use by the profile with pid {os.getpid()}"):
        RunWriter(tmp_path / "run", {"device": "cpu"})
    writer.finish("complete")


def test_a_line_cut_off_by_a_kill_is_left_out(copied: Path) -> None:
    whole = load_run(copied).samples
    with (copied / "samples.jsonl").open("a") as file:
        file.write('{"t": 99.0, "stage": "dec')
    cut = load_run(copied)
    assert cut.samples == whole
    assert cut.notes == ("the last line of samples.jsonl is cut off; it is left out",)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("run.json", "{", "run.json"),
        ("run.json", '{"schema": "other@1"}', "schema is 'other@1', not kvplan/run@1"),
        ("samples.jsonl", "nonsense\n", "line 1 is not a JSON object"),
    ],
)
def test_a_damaged_run_is_one_line(copied: Path, run: Run, name: str, text: str, complaint: str) -> None:
    (copied / name).write_text(text)
    failed = run("reconcile", str(copied))
    assert failed.code == 2
    assert len(failed.errors) == 1
    assert complaint in failed.err


def test_a_run_without_memory_has_nothing_to_compare(copied: Path) -> None:
    edit(copied, memory=None, status="failed", cause="no room")
    with pytest.raises(InvalidInputError, match="ended before its memory was measured"):
        reconcile_run(load_run(copied))


def test_no_run_directory_is_one_line(tmp_path: Path, run: Run) -> None:
    assert "is not a run directory" in run("reconcile", str(tmp_path / "none")).err


# --- ends before the end ----------------------------------------------------------------------------------------------


def serving(folder: Path) -> "subprocess.Popen[str]":
    """A profile of two requests at a time for ten minutes, which has sampled tokens."""
    options = (
        "--device", "cpu", "--dtype", "float32", "--num-seqs", "2", "--max-num-seqs", "2", "--prompt-tokens", "20",
        "--output-tokens", "100", "--max-num-batched-tokens", "32", "--interval", "20ms", "--duration", "10m",
    )  # fmt: skip
    process = subprocess.Popen(
        [*KVPLAN, "profile", str(model_directory(folder / "model")), *options, "-o", str(folder / "run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    samples = folder / "run" / "samples.jsonl"
    while process.poll() is None:
        if samples.exists() and re.search('"generation_tokens": [1-9]', samples.read_text()):
            return process
        time.sleep(0.02)
    raise AssertionError(f"never served: {process.communicate()[1]}")


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.full),
        (signal.SIGKILL, -signal.SIGKILL, None),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_run_that_a_signal_ends_keeps_what_it_measured_and_served(
    tmp_path: Path, end: signal.Signals, code: int, cause: str | None
) -> None:
    process = serving(tmp_path)
    process.send_signal(end)
    process.communicate(timeout=900)
    run = load_run(tmp_path / "run")
    killed = end == signal.SIGKILL
    assert (process.returncode, run.status, run.recovered) == (code, "partial", killed)
    assert killed or run.cause == cause
    comparison = reconcile_run(run)
    rows = {row.component: row for row in comparison.rows}
    assert rows["weights"].error == rows["kv_cache"].error == 0
    results = run.manifest["results"]
    assert results["is_partial"]
    assert results["most_running"] == results["densest"]["num_requests_running"] == 2
    sampled = [sample for sample in run.samples if "num_steps" in sample]
    assert results["stats"]["generation_tokens"] >= sampled[-1]["generation_tokens"] > 0
    rate = results["stats"]["generation_tokens"] / results["seconds"]
    assert results["output_tokens_per_s"] == pytest.approx(rate)
    assert ("what it served is put together from its samples" in run.notes) == killed
    assert document(comparison)["status"] == "partial"
    assert document(comparison)["served"][0]["most_running"] == 2


def test_a_model_that_does_not_fit_is_a_result(tmp_path: Path, run: Run) -> None:
    failed = run("profile", *SMALL, "--memory-limit", "100MiB", "-q", "-o", str(tmp_path / "run"))
    assert failed.code == 4
    assert "its weights need 513.1" in failed.err
    assert load_run(tmp_path / "run").status == "failed"


def test_host_memory_for_kv_is_planned_beside_the_measured(tmp_path: Path, run: Run, tiny: tuple[str, ...]) -> None:
    """0.001 GiB are 1,073,741 bytes, of which whole chunks are taken, each of whole pages of 4,096 bytes."""
    ran = run("profile", *tiny, "--kv-offloading-size", "0.001", "--format", "json", "-o", str(tmp_path / "run"))
    assert ran.code == 0, ran.err
    offload = load_run(tmp_path / "run").manifest["results"]["offload"]
    (row,) = ran.json["outside"]
    planned, measured = row["predicted"], row["measured"]
    assert planned == measured == offload["memory"] <= 1_073_741
    assert planned % 4096 == 0
    assert planned > 1_073_741 - 2 * 4096 * 4
    assert offload["stored"] > 0


def test_a_time_limit_ends_the_run_and_keeps_it(tmp_path: Path, run: Run, tiny: tuple[str, ...]) -> None:
    ended = run("profile", *tiny, "--timeout", "1ms", "-q", "-o", str(tmp_path / "run"))
    assert ended.code == 4
    assert "not done after 0.001 s (--timeout)" in ended.err
    assert load_run(tmp_path / "run").status == "partial"


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (RuntimeError("CUDA error: an illegal memory access"), 4, "CUDA error: an illegal memory access"),
        (torch.OutOfMemoryError("out of memory\nsecond line"), 4, "out of memory"),
        (RuntimeError("shapes do not match"), 70, "RuntimeError: shapes do not match"),
        (OSError("Input/output error"), 70, "OSError: Input/output error"),
        (LookupError(), 70, "LookupError: "),
    ],
    ids=["device", "out of memory", "a fault of torch's caller", "operating system", "without a message"],
)
def test_whatever_ends_a_run_is_in_it(
    error: Exception,
    code: int,
    cause: str,
    tmp_path: Path,
    run: Run,
    tiny: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Engine) -> None:
        raise error

    monkeypatch.setattr(Engine, "step", fail)
    assert run("profile", *tiny, "-q", "-o", str(tmp_path / "run")).code == code
    ended = load_run(tmp_path / "run")
    assert (ended.status, ended.cause, ended.recovered) == ("partial", cause, False)


def test_a_failing_baseline_leaves_the_first_result(
    tmp_path: Path, run: Run, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: Any, config: Any, workload: Any, recorder: runs.Recorder, *args: Any) -> Any:
        recorder.enter("baseline")
        raise EnvironmentProblem("cpu: no room for a second engine; free some memory")

    monkeypatch.setattr(runs, "_baseline", fail)
    ended = run("profile", *tiny, "--baseline", "contiguous", "-q", "-o", str(tmp_path / "run"))
    record = load_run(tmp_path / "run")
    assert (ended.code, record.status) == (4, "partial")
    assert record.manifest["results"]["num_finished"] == 3


# --- the workload -----------------------------------------------------------------------------------------------------


def test_a_duration_keeps_the_batch_full_and_no_queue(tmp_path: Path, run: Run) -> None:
    options = ("--duration", "1s", "--max-num-seqs", "2", "--interval", "5ms", "-q", "-o", str(tmp_path / "run"))
    assert run("profile", str(model_directory(tmp_path / "model")), *SMALL[1:], *options).code == 0
    record = load_run(tmp_path / "run")
    waiting = [sample["num_requests_waiting"] for sample in record.samples if "num_requests_waiting" in sample]
    assert max(waiting) <= 3  # the requests of the command line
    results = record.manifest["results"]
    assert results["num_finished"] > 3
    assert results["most_running"] == 2
    assert results["seconds"] >= 1


def test_repeats_fill_the_room_and_end_with_the_duration() -> None:
    requests = tuple(PlannedRequest(n, 1) for n in (5, 6, 7))
    feed = runs.Feed(runs.Workload(requests, duration_s=10), max_num_seqs=4)
    assert feed.due(0.0, 0, 0) == list(requests)
    assert feed.due(1.0, 2, 1) == []  # one waits
    assert feed.due(2.0, 2, 0) == list(requests[:2])
    assert feed.due(3.0, 4, 0) == []
    assert feed.due(9.9, 0, 0) == [requests[2], requests[0], requests[1]]
    assert feed.due(10.0, 0, 0) == []
    assert feed.is_over(10.0)


def test_requests_that_end_in_their_first_step_have_run(tmp_path: Path, run: Run, tiny: tuple[str, ...]) -> None:
    options = ("--output-tokens", "1", "--max-num-batched-tokens", "64", "-q", "-o", str(tmp_path / "run"))
    assert run("profile", *tiny, *options).code == 0
    assert load_run(tmp_path / "run").manifest["results"]["most_running"] == 3  # 3 x 20 tokens are one step


def test_failed_requests_are_said(
    tmp_path: Path, run: Run, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, {"request-2", "request-3"})
    done = run("profile", *tiny, "-q", "-o", str(tmp_path / "run"))
    record = load_run(tmp_path / "run")
    assert (done.code, record.status, record.manifest["results"]["num_failed"]) == (0, "complete", 2)
    assert "warning: profile: 2 of 3 requests failed (request-2: broken)" in done.err
    assert [event for event in record.events if "2 of 3 requests failed" in event.get("text", "")]


def failing(monkeypatch: pytest.MonkeyPatch, request_ids: set[str]) -> None:
    """Requests of these ids go wrong as soon as they are sent."""
    send = runs._send

    def send_and_fail(engine: Engine, *args: Any) -> Request:
        request = send(engine, *args)
        if request.seq.request_id in request_ids:
            engine._fail(request.seq, "broken")
        return request

    monkeypatch.setattr(runs, "_send", send_and_fail)


POOLS = """
import torch
from engine.kv_cache import KVCache, group_layers
from engine.tp import TensorParallel
from kvplan.models import catalog
from kvplan.measure.profile import resident
spec = catalog.load("smollm2-135m")
kept = []
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
    before = resident()
    kept.append(KVCache(spec, group_layers(spec, 16), 500, 16, dtype, "cpu", TensorParallel()))
    print(kept[-1].num_bytes, resident() - before)
"""


@pytest.mark.full
def test_the_whole_pool_is_resident_before_it_is_used() -> None:
    # A process of its own: the heap of this one has free pages that are resident from before.
    done = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, timeout=900, check=True)
    sizes = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    # 8,000 tokens of 30 layers, K and V of 3 heads of 64, of 4, 2 and 1 bytes
    assert [size for size, _ in sizes] == [8_000 * 30 * 2 * 3 * 64 * width for width in (4, 2, 1)]
    for size, grown in sizes:
        assert grown > 0.95 * size  # an allocator's heap has a few pages to spare


def test_the_live_view_says_how_far_it_is() -> None:
    workload = runs.Workload((PlannedRequest(20, 10),) * 4)
    assert progress_words({}) == []
    assert progress_words(cast(Progress, runs._progress(workload, 0, 0, 5.0))) == ["0/4 done"]
    assert progress_words(cast(Progress, runs._progress(workload, 1, 10, 30.0))) == [
        "1/4 done",
        "1:30 left",
    ]  # 30 of 40 tokens left
    endless = replace(workload, duration_s=60.0)
    assert progress_words(cast(Progress, runs._progress(endless, 9, 99, 55.0))) == ["9 requests done", "0:05 left"]


# --- bad usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (("llama-3.1-8b",), 3, "no GPU that CUDA can use; use --device cpu"),
        (("smollm2-135m", "--device", "cuda"), 3, "--device cuda: no GPU that CUDA can use; use --device cpu"),
        (("smollm2-135m", "--device", "tpu9"), 2, "'tpu9' is not a device"),
        ((*SMALL, "--trace", "x.csv"), 2, "--trace already sets the number of requests"),
        ((*SMALL, "--lengths", "const:9"), 2, "both set request lengths"),
        ((*SMALL, "--ctx", "8"), 2, "the longest request has 24 tokens, the context 8"),
        ((*SMALL, "--interval", "soon"), 2, "--interval"),
        ((*SMALL, "--kv-cache-dtype", "int3"), 2, "--kv-cache-dtype must be one of"),
        (("mamba-2.8b", "--device", "cpu"), 2, "--enable-prefix-caching is not combined with the recurrent states"),
        (
            ("mamba-2.8b", "--device", "cpu", "--no-enable-prefix-caching"),
            2,
            "a mamba1 state, which the engine cannot run",
        ),
        ((*SMALL, "--snapshot"), 2, "--snapshot: torch records memory history only on a GPU"),
        ((*SMALL, "--tp", "2"), 2, "--tp 2 needs 2 processes (no torchrun found)"),
        ((*SMALL, "--pp", "2"), 2, "--pp 2: a run records the memory of one rank"),
        ((*SMALL, "--weights", "nowhere"), 2, "--weights nowhere is not a directory"),
        (("--weights", "nowhere"), 2, "--weights nowhere is not a directory"),  # which needs no GPU to be seen
        ((*SMALL, "--weights", ""), 2, "--weights '' is not a directory"),
        ((*SMALL, "--ctx", "8193"), 2, "--ctx 8193: smollm2-135m has 8192 positions"),
        (
            (*SMALL, "--baseline", "contiguous", "--allocator", "contiguous"),
            2,
            "is already the allocator of the first run",
        ),
        (
            ("--trace", "x.csv", "--output-tokens", "4", "--device", "cpu"),
            2,
            "--trace already sets the number of requests",
        ),
        ((*SMALL, "--shared-prefix", "21"), 2, "longer than the shortest prompt (20 tokens)"),
    ],
)
def test_bad_usage_is_one_line_and_leaves_no_directory(
    options: tuple[str, ...], code: int, complaint: str, tmp_path: Path, run: Run
) -> None:
    failed = run("profile", *options, "-q", "-o", str(tmp_path / "run"))
    assert failed.code == code
    assert len(failed.errors) == 1
    assert complaint in failed.err
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_name_is_refused(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = run("profile", *SMALL, "-q", "-o", "")
    assert (failed.code, len(failed.errors)) == (2, 1)
    assert "--output '' names no directory" in failed.err
    assert list(tmp_path.iterdir()) == []


def model_directory(folder: Path, **changes: Any) -> Path:
    """A directory with the config.json of a very small model."""
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 128,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | small | changes))
    return folder


def test_weights_of_another_model_are_refused(tmp_path: Path, run: Run) -> None:
    weights = model_directory(tmp_path / "weights", hidden_size=576, vocab_size=49152)
    failed = run("profile", *SMALL, "--weights", str(weights), "-q", "-o", str(tmp_path / "run"))
    assert failed.code == 2
    assert "is not smollm2-135m (num_layers 2, not 30)" in failed.err
    assert not (tmp_path / "run").exists()


def test_weights_without_safetensors_are_refused(tmp_path: Path, run: Run) -> None:
    weights = model_directory(tmp_path / "weights")
    options = ("--device", "cpu", "--prompt-tokens", "8", "--output-tokens", "2", "-q", "-o", str(tmp_path / "run"))
    failed = run("profile", "--weights", str(weights), *options)
    assert failed.code == 2
    assert "holds no .safetensors file" in failed.err
    assert not (tmp_path / "run").exists()


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_of_two_ranks_keeps_the_run(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    options = (
        str(model), "--device", "cpu", "--dtype", "float32", "--tp", "2", "--num-seqs", "3", "--prompt-tokens", "8",
        "--output-tokens", "4", "--duration", "300ms", "--format", "json", "-q", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "-m", "kvplan", "profile", *options], capture_output=True, text=True, timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)  # one answer, not one per rank
    run = load_run(tmp_path / "run")
    assert (run.status, run.manifest["inputs"]["tensor_parallel_size"]) == ("complete", 2)
    assert run.manifest["results"]["num_finished"] >= 3
    # k and v of 2 layers, 1 of the 2 KV heads x 16 x 4 bytes, in blocks of 16 tokens
    assert run.manifest["memory"]["block_bytes"] == 2 * 2 * 16 * 16 * 4


# --- stages of serving ------------------------------------------------------------------------------------------------

PLANNED = (PlannedRequest(40, 4),) * 4
TINY = EngineConfig(
    device="cpu", dtype="float32", load_format="dummy", num_blocks=40, max_model_len=64, max_num_seqs=4,
    max_num_batched_tokens=256,
)  # fmt: skip


def tiny_run(
    folder: Path, config: EngineConfig = TINY, num_rounds: int = 1, **options: Any
) -> tuple[runs.Outcome, Any]:
    """A profile of a very small model that serves rounds of four requests; samples where stages begin."""
    spec = load_spec(model_directory(folder / "model"))
    workload = runs.Workload(PLANNED * num_rounds)
    outcome = runs.profile(spec, config, workload, RunWriter(folder / "run", {}), interval_s=60, **options)
    return outcome, load_run(folder / "run")


@pytest.mark.parametrize("is_async", [False, True], ids=["one in flight", "two in flight"])
def test_every_prompt_token_is_computed_in_prefill(tmp_path: Path, is_async: bool) -> None:
    _, run = tiny_run(tmp_path, replace(TINY, async_scheduling=is_async), num_rounds=5)
    stages = [event for event in run.events if event["event"] == "stage" and "prompt_tokens" in event]
    computed = Counter[str]()
    for this, following in pairwise(stages):
        computed[this["stage"]] += following["prompt_tokens"] - this["prompt_tokens"]
    total = run.manifest["results"]["stats"]["prompt_tokens"]
    assert total == 5 * 4 * 40
    # The first stretch of prefill begins before the engine is asked anything, and has no count at its beginning.
    assert computed["prefill"] + stages[0]["prompt_tokens"] == total
    assert computed["decode"] == 0
    assert [stage["stage"] for stage in stages].count("decode") == 5


def test_between_steps_samples_are_the_timers(tmp_path: Path) -> None:
    """Whose next sample is a minute off: the ones there are were taken as a stage began for the first time."""
    _, run = tiny_run(tmp_path, num_rounds=5)
    served = Counter(sample["stage"] for sample in run.samples if sample["stage"] in ("prefill", "decode"))
    begun = Counter(event["stage"] for event in run.events if event["event"] == "stage")
    assert (begun["prefill"], begun["decode"]) == (5, 5)
    assert served.total() == 3  # prefill's first, decode's first, and the last before `drained`
    assert min(served["prefill"], served["decode"]) == 1


class Counters(runs.Probe):
    """An allocator whose counters the test sets, and a driver that counts how often it is asked."""

    peak = num_asked = 0

    def of_torch(self) -> dict[str, int]:
        return {"torch_peak": self.peak}

    def reset_torch_peak(self) -> None:
        self.peak = 0

    def of_device(self) -> dict[str, Any]:
        self.num_asked += 1
        return {}


def test_each_stretch_of_a_stage_has_its_own_peak_without_asking_the_driver(tmp_path: Path) -> None:
    probe = Counters(torch.device("cpu"), None)
    recorder = runs.Recorder(probe, RunWriter(tmp_path / "run", {}), 60, lambda values: None)
    recorder.enter("prefill")
    probe.peak = 70
    recorder.mark("decode")
    num_questions = probe.num_asked
    for stage, peak in (("prefill", 30), ("decode", 90), ("prefill", 40)):
        probe.peak = peak  # of the stretch before
        recorder.mark(stage)
    assert probe.num_asked == num_questions
    assert (recorder.peaks["prefill"]["torch_peak"], recorder.peaks["decode"]["torch_peak"]) == (90, 40)
    recorder.finish("complete", None)
    ended = [
        event["peaks"] for event in load_run(tmp_path / "run").events if event.get("stage") in ("prefill", "decode")
    ]
    assert ended[1:] == [{"prefill": {"torch_peak": n}} if n in (70, 90) else {"decode": {"torch_peak": n}}
                         for n in (70, 30, 90, 40)]  # fmt: skip


def test_a_run_is_before_its_first_stage_once(profiled: tuple[Path, dict[str, Any]]) -> None:
    first, *events = load_run(profiled[0]).events
    assert first == {"t": 0.0, "event": "stage", "stage": "before"}
    assert [event for event in events if event.get("stage") == "before"] == []


def test_a_baseline_begins_with_nothing_of_the_first_engine(profiled: tuple[Path, dict[str, Any]]) -> None:
    run = load_run(profiled[0])
    samples = [sample for sample in run.samples if sample["stage"] == "baseline"]
    assert "generation_tokens" not in samples[0]
    assert "torch_tensors" not in samples[0]
    counts = [sample["generation_tokens"] for sample in samples if "generation_tokens" in sample]
    assert counts == sorted(counts)
    assert counts[0] < 3 * 4  # what each engine generates in all


def test_a_baseline_ends_with_a_sample_of_its_last_step(tmp_path: Path, run: Run, tiny: tuple[str, ...]) -> None:
    target = tmp_path / "run"
    # With so long an interval the timer takes no sample: what there is was taken at a stage's begin and end.
    assert run("profile", *tiny, "--baseline", "contiguous", "--interval", "1h", "-q", "-o", str(target)).code == 0
    last = load_run(target).samples[-1]
    # Three requests of 20 and 4 tokens.
    assert (last["stage"], last["prompt_tokens"], last["generation_tokens"]) == ("baseline", 60, 12)


def test_shared_blocks_and_prefix_hits_are_in_the_results(tmp_path: Path, run: Run) -> None:
    options = (
        "--device", "cpu", "--dtype", "float32", "--num-seqs", "4", "--prompt-tokens", "40", "--output-tokens", "4",
        "--shared-prefix", "32", "-q", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert run("profile", str(model_directory(tmp_path / "model")), *options).code == 0
    record = load_run(tmp_path / "run")
    results = record.manifest["results"]
    # After the third of four steps each has 42 tokens: 2 shared blocks of 16, and 10 tokens in a block of its own.
    densest = results["densest"]
    assert (densest["num_used_blocks"], densest["num_filled_slots"], densest["num_kv_tokens"]) == (6, 32 + 4 * 10, 168)
    # The second to fourth find the 32 tokens, which the first computes in the same step.
    stats = results["stats"]
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"], stats["num_cached_tokens"]) == (160, 96, 96)
    assert all(sample["num_filled_slots"] <= 72 for sample in record.samples if "num_steps" in sample)


# --- what an early end keeps ------------------------------------------------------------------------------------------


def test_a_failure_keeps_what_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = Engine.step, 0

    def fail_at_the_third(engine: Engine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise RuntimeError("CUDA error: an illegal memory access")
        return step(engine)

    monkeypatch.setattr(Engine, "step", fail_at_the_third)
    outcome, run = tiny_run(tmp_path)
    results = run.manifest["results"]
    assert (outcome.exit_code, run.status, results["is_partial"]) == (4, "partial", True)
    assert (results["stats"]["generation_tokens"], results["most_running"], results["num_finished"]) == (2 * 4, 4, 0)
    assert results["densest"]["num_filled_slots"] == 4 * 41  # the second step computed the first token generated


def test_a_baseline_that_fails_keeps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def fail_in_the_baseline(engine: Engine) -> Any:
        if engine.config.allocator == "contiguous" and engine.stats().num_steps == 2:
            raise RuntimeError("CUDA error: an illegal memory access")
        return step(engine)

    monkeypatch.setattr(Engine, "step", fail_in_the_baseline)
    _, run = tiny_run(tmp_path, baselines=("contiguous",))
    results = run.manifest["results"]
    assert ("is_partial" in results, results["num_finished"]) == (False, 4)
    partial = results["baseline"]
    assert (partial["is_partial"], partial["allocator"], partial["stats"]["num_steps"]) == (True, "contiguous", 2)


def served_sample(t: float, **figures: float) -> dict[str, Any]:
    return {"t": t, "stage": "decode", **dict.fromkeys(ENGINE_FIGURES, 0), **figures}


def test_a_killed_run_says_no_more_than_its_samples(tmp_path: Path) -> None:
    samples = [
        {"t": 1.0, "stage": "pool"},
        served_sample(1.5, num_steps=1, num_requests_running=2, num_filled_slots=50, num_kv_tokens=90),
        served_sample(2.0, num_steps=5, num_requests_running=3, num_filled_slots=70, num_kv_tokens=80),
        served_sample(5.0, num_steps=9, num_requests_running=1, generation_tokens=20, num_preemptions=1),
        {**served_sample(9.0, num_steps=99, num_requests_running=8, generation_tokens=500), "stage": "baseline"},
    ]
    folder = tmp_path / "run"
    writer = RunWriter(folder, {})
    for sample in samples:
        writer.sample(sample)
    writer.update(pid=2**22 + 1)  # above the largest that Linux gives
    results = load_run(folder).manifest["results"]
    assert (results["most_running"], results["densest"]["num_filled_slots"]) == (3, 70)
    assert results["stats"]["num_preemptions"] == 1
    assert (results["seconds"], results["output_tokens_per_s"]) == (4.0, 5.0)  # 20 tokens, from 1 s at the earliest
    assert not {"num_finished", "num_failed", "baseline"} & set(results)
    # Nothing is made up, and nothing that was written is replaced.
    assert served_by_samples(samples[:1]) is None
    assert served_by_samples([{"t": "x", "num_steps": float("nan")}, {"stage": "decode"}]) is None
    writer.update(results={"num_finished": 7})
    assert load_run(folder).manifest["results"] == {"num_finished": 7}
    writer.event(5.5, "stage", stage="baseline", allocator="contiguous")
    baseline = load_run(folder).manifest["results"]["baseline"]
    assert (baseline["allocator"], baseline["most_running"]) == ("contiguous", 8)
    writer.finish("partial")


def test_every_figure_of_the_engine_is_known_to_who_reads_samples() -> None:
    assert set(ENGINE_FIGURES) == {figure.name for figure in fields(Stats)}


# --- requests that cannot succeed -------------------------------------------------------------------------------------


def test_when_every_request_fails_the_run_is_no_success(
    tmp_path: Path, run: Run, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, {f"request-{n}" for n in range(1, 4)})
    done = run("profile", *tiny, "-q", "-o", str(tmp_path / "run"))
    record = load_run(tmp_path / "run")
    assert (done.code, record.status, done.out) == (4, "partial", "")
    assert record.cause == "all 3 requests failed: request-1: broken"
    assert done.err.splitlines() == [
        f"kvplan: error: profile: {record.cause}; what was measured is in {tmp_path / 'run'}"
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        # 20 + 15 tokens, of which the last is never computed: 34 in blocks of 16
        (("--num-blocks", "3", "--output-tokens", "15"),
         "the longest request (35 tokens) takes 3 blocks of 16 tokens, and the pool has 2 to give; "
         "raise --num-blocks to 4, or shorten the requests"),
        (("--num-blocks", "4", "--ctx", "64", "--output-tokens", "4", "--baseline", "contiguous"),
         "a contiguous reservation (64 tokens) takes 4 blocks of 16 tokens, and the pool has 3 to give; "
         "raise --num-blocks to 5, or shorten the requests"),
        (("--num-blocks", "4", "--ctx", "64", "--output-tokens", "4", "--baseline", "static"),
         "a contiguous reservation (64 tokens) takes 4 blocks of 16 tokens, and the pool has 3 to give; "
         "raise --num-blocks to 5, or shorten the requests"),
    ],
    ids=["paged", "the baseline", "a static baseline"],
)  # fmt: skip
def test_a_pool_too_small_for_one_request_is_refused(
    options: tuple[str, ...], complaint: str, tmp_path: Path, run: Run
) -> None:
    refused = run("profile", *SMALL[:-4], "--max-num-batched-tokens", "32", *options, "-q", "-o", str(tmp_path / "run"))
    assert (refused.code, refused.err) == (2, f"kvplan: error: profile: {complaint}\n")
    assert not (tmp_path / "run").exists()


def test_a_pool_that_turns_out_too_small_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes 3 blocks of 16 tokens, and the pool has 2 to give"):
        tiny_run(tmp_path, replace(TINY, num_blocks=3))
    assert load_run(tmp_path / "run").status == "failed"


@given(
    groups=st.sampled_from([(FullGroup(4),), (WindowGroup(4, 9),), (WindowGroup(4, 6), FullGroup(4), FullGroup(4))]),
    prompt=st.integers(1, 60),
    output=st.integers(1, 40),
    budget=st.integers(1, 32),
    reserve=st.booleans(),
)
def test_one_request_runs_alone_in_just_the_blocks_it_needs(
    groups: tuple[Group, ...], prompt: int, output: int, budget: int, reserve: bool
) -> None:
    config = EngineConfig(
        block_size=4, max_model_len=128, max_num_batched_tokens=budget, reserve_full_prompt=reserve
    )  # fmt: skip
    needed = runs.blocks_needed(groups, config, PlannedRequest(prompt, output))

    def reason(num_blocks: int) -> str | None:
        """How the scheduler ends it in a pool of so many blocks, one of which holds nothing."""
        limits = ExtendedConfig(budget, 1, 128, reserve_full_prompt=reserve)
        scheduler, seq = scheduler_of(limits, num_blocks, groups), Sequence("a", [5] * prompt, output)
        scheduler.add(seq)
        while not seq.is_finished:
            batch = scheduler.schedule()
            scheduler.update(batch, {sample.request_id: [1] for sample in batch.samples})
        return seq.finish_reason

    assert reason(needed + 1) == "length"
    if needed > 1:  # the pool has at least one block
        assert reason(needed) == "out_of_blocks"


# --- places that cannot be written ------------------------------------------------------------------------------------

LONG = "n" * 300


@pytest.mark.parametrize("command", ["profile", "report"])
def test_a_name_that_is_too_long_is_one_line(command: str, tmp_path: Path, run: Run) -> None:
    target = str(tmp_path / LONG)
    refused = run("profile", *SMALL, "-q", "-o", target) if command == "profile" else run("report", target)
    assert refused.code == 2
    assert len(refused.errors) == 1


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied"),
     (errno.ENOSPC, "No space left on device")],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_bad_input(
    number: int, reason: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    target = tmp_path / "above" / "run"
    refused = run("profile", *SMALL, "-q", "-o", str(target))
    assert (refused.code, refused.err) == (
        2, f"kvplan: error: {target} cannot be written ({reason}); choose another directory\n",
    )  # fmt: skip


def full_disk(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """From now on there is no room for files whose name ends so."""
    fsync = os.fsync

    def sync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.endswith(suffix):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync)


def test_a_disk_that_is_full_from_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, ".part")
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\); choose another directory"):
        RunWriter(tmp_path / "above" / "run", {})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_leaves_the_manifest_and_no_part_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run", {"device": "cpu"})
    before = (tmp_path / "run" / "run.json").read_bytes()
    full_disk(monkeypatch, ".part")
    with pytest.raises(EnvironmentProblem, match="what was measured so far is kept"):
        writer.update(device="cuda")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["events.jsonl", "run.json", "samples.jsonl"]
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    monkeypatch.undo()
    writer.update(pid=2**22 + 1)
    assert "disk full" in str(load_run(tmp_path / "run").cause)
    writer.finish("partial")


def test_trace_events_that_find_no_room_cost_only_themselves(
    tmp_path: Path, run: Run, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, ".tmp")
    events = ("--trace-events", tmp_path / "events.json")
    done = run("profile", *tiny, *events, "--format", "json", "-q", "-o", str(tmp_path / "run"))
    assert (done.code, len(done.errors)) == (3, 1)
    assert "--trace-events" in done.err
    assert done.json["status"] == "complete"
    file_names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert file_names == ["events.jsonl", "run.json", "samples.jsonl"]


def test_weights_alone_do_not_choose_the_cpu(tmp_path: Path, run: Run) -> None:
    weights = model_directory(tmp_path / "weights")
    refused = run("profile", "--weights", str(weights), "-q", "-o", str(tmp_path / "run"))
    assert refused.code == 3
    assert "no GPU that CUDA can use; use --device cpu" in refused.err


def test_a_run_document_names_every_setting_and_every_size_of_the_engine(profiled: tuple[Path, dict[str, Any]]) -> None:
    written = json.loads((profiled[0] / "run.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, document_schema("run"))
    assert {*written["engine"]} == {field.name for field in fields(EngineConfig)}
    assert {*written["memory"]} == {field.name for field in fields(MemoryReport)} - {"fallbacks"}  # no size
