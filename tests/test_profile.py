"""`kvplan profile` and `kvplan reconcile` on a CPU: what is measured, what is predicted, and what goes wrong."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from kvplan import catalog
from kvplan import profile as runs
from kvplan.cli.live import progress_words
from kvplan.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.limits import Limits
from kvplan.reconcile import COMPONENTS, document, exceeds, peaks_of, reconcile
from kvplan.rundir import RunWriter, load_run
from kvplan.spec import FullAttention
from tests.cli import LLAMA, Run
from tests.cli import run as run  # the fixture

SMALL = (
    "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--num-seqs", "3", "--prompt-tokens", "20",
    "--output-tokens", "4", "--max-num-batched-tokens", "32",
)  # fmt: skip
KVPLAN = (sys.executable, "-m", "kvplan")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One small run with a contiguous baseline: (directory, what the command printed)."""
    folder = tmp_path_factory.mktemp("profile") / "run"
    options = ("--baseline", "contiguous", "--perfetto", "--format", "json", "-q", "-o", str(folder))
    done = subprocess.run([*KVPLAN, "profile", *SMALL, *options], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, json.loads(done.stdout)


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


def test_counters_are_trace_events(profiled: tuple[Path, dict[str, Any]]) -> None:
    events = json.loads((profiled[0] / "counters.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"C", "X"}
    assert "decode" in {event["name"] for event in events if event["ph"] == "X"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


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
    rows = {row.component: row for row in reconcile(load_run(copied)).rows}
    assert rows["kv_cache"].relative == pytest.approx(2.0)  # three times what there is
    # k_proj and v_proj of 30 layers: 6 more heads of 64 x 576 each, float32
    assert rows["weights"].error == 30 * 2 * 6 * 64 * 576 * 4
    assert rows["buffers"].error == 0
    over = exceeds(reconcile(load_run(copied)), Limits(0.02))
    assert [name.split()[0] for name in over][:2] == ["weights", "kv_cache"]


def test_a_wrong_head_count_in_the_engine_shows_in_its_row(copied: Path) -> None:
    """An engine that keeps 1 KV head instead of 3: its own report, in the place of the run's."""
    from engine import EngineConfig

    spec = catalog.load("smollm2-135m")
    wrong = replace(spec, layers=((FullAttention(1, 64, 64),),) * spec.num_layers)
    config = EngineConfig(device="cpu", dtype="float32", load_format="dummy", num_blocks=7, max_model_len=25,
                          max_num_seqs=3, max_num_batched_tokens=32)  # fmt: skip
    memory = json.loads((copied / "run.json").read_text())["memory"]
    edit(copied, memory={**memory, "kv_cache": Engine(wrong, config).memory_report().kv_cache})
    rows = {row.component: row for row in reconcile(load_run(copied)).rows}
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
        (("context=1%",), "'context' is no row compared here; these are: weights, buffers, kv_cache, activations, "),
        (("unattributed=1%",), "'unattributed' is no row compared here"),
        (("wieghts=1%",), "'wieghts' is no row compared here"),
        (("=1%",), "'=1%' names no row; write total=1%"),
        (("weights=1%", "weights=2%"), "says weights twice; say it once"),
        (("1%", "2%"), "says the share of every row twice; say it once"),
        (("total=much",), "not a number"),
        (("total=0",), "outside (0, 1]"),
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
    assert "was measured elsewhere (torch '1.0' there" in refused.err


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
    found = load_run(tmp_path / "run")
    assert (found.status, found.recovered) == ("partial", True)
    writer.finish("complete")


def test_what_is_appended_reaches_the_disk_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run", {})
    synced: list[int] = []
    now = [time.monotonic()]
    monkeypatch.setattr("kvplan.rundir.os.fsync", synced.append)
    monkeypatch.setattr("kvplan.rundir.time.monotonic", lambda: now[0])
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
        reconcile(load_run(copied))


def test_no_run_directory_is_one_line(tmp_path: Path, run: Run) -> None:
    assert "is no run directory" in run("reconcile", str(tmp_path / "none")).err


# --- ends before the end ----------------------------------------------------------------------------------------------


def begun(folder: Path, stage: str) -> "subprocess.Popen[str]":
    """A long profile that has reached the stage."""
    options = ("--output-tokens", "2000", "--num-seqs", "2", "--ctx", "4096", "--num-blocks", "300", "-o", str(folder))
    process = subprocess.Popen(
        [*KVPLAN, "profile", *SMALL[:5], "--max-num-batched-tokens", "32", "--prompt-tokens", "20", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        events = folder / "events.jsonl"
        if events.exists() and f'"{stage}"' in events.read_text():
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"never reached {stage}: {process.communicate()[1]}")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    process = begun(tmp_path / "run", "decode")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    run = load_run(tmp_path / "run")
    assert process.returncode == 130
    assert (run.status, run.cause, run.recovered) == ("partial", "interrupted", False)
    assert document(reconcile(run))["status"] == "partial"


def test_a_terminated_run_says_so(tmp_path: Path) -> None:
    process = begun(tmp_path / "run", "decode")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (load_run(tmp_path / "run").status, load_run(tmp_path / "run").cause) == ("partial", "terminated")


def test_a_killed_run_is_recovered(tmp_path: Path) -> None:
    process = begun(tmp_path / "run", "decode")
    process.kill()
    process.communicate(timeout=60)
    run = load_run(tmp_path / "run")
    assert (run.status, run.recovered) == ("partial", True)
    rows = {row.component: row for row in reconcile(run).rows}
    assert rows["weights"].error == rows["kv_cache"].error == 0


def test_a_model_that_does_not_fit_is_a_result(tmp_path: Path, run: Run) -> None:
    failed = run("profile", *SMALL, "--memory-limit", "100MiB", "-q", "-o", str(tmp_path / "run"))
    assert failed.code == 4
    assert "its weights need 538,0" in failed.err
    assert load_run(tmp_path / "run").status == "failed"


def test_a_time_limit_ends_the_run_and_keeps_it(tmp_path: Path, run: Run) -> None:
    ended = run("profile", *SMALL, "--timeout", "1ms", "-q", "-o", str(tmp_path / "run"))
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
    error: Exception, code: int, cause: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Engine) -> None:
        raise error

    monkeypatch.setattr(Engine, "step", fail)
    assert run("profile", *SMALL, "-q", "-o", str(tmp_path / "run")).code == code
    ended = load_run(tmp_path / "run")
    assert (ended.status, ended.cause, ended.recovered) == ("partial", cause, False)


def test_a_failing_baseline_leaves_the_first_result(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Any, config: Any, workload: Any, recorder: runs.Recorder, *rest: Any) -> Any:
        recorder.enter("baseline")
        raise EnvironmentProblem("cpu: no room for a second engine; free some memory")

    monkeypatch.setattr(runs, "_baseline", fail)
    ended = run("profile", *SMALL, "--baseline", "contiguous", "-q", "-o", str(tmp_path / "run"))
    kept = load_run(tmp_path / "run")
    assert (ended.code, kept.status) == (4, "partial")
    assert kept.manifest["results"]["num_finished"] == 3


# --- the workload -----------------------------------------------------------------------------------------------------


def test_a_duration_keeps_the_batch_full_and_no_queue(tmp_path: Path, run: Run) -> None:
    options = ("--duration", "1s", "--max-num-seqs", "2", "--interval", "5ms", "-q", "-o", str(tmp_path / "run"))
    assert run("profile", *SMALL, *options).code == 0
    kept = load_run(tmp_path / "run")
    waiting = [sample["num_requests_waiting"] for sample in kept.samples if "num_requests_waiting" in sample]
    assert max(waiting) <= 3  # the requests of the command line
    results = kept.manifest["results"]
    assert results["num_finished"] > 3
    assert results["most_running"] == 2
    assert 1 <= results["seconds"] < 20


def test_repeats_fill_the_room_and_end_with_the_duration() -> None:
    requests = tuple(runs.PlannedRequest(n, 1) for n in (5, 6, 7))
    feed = runs.Feed(runs.Workload(requests, duration_s=10), max_num_seqs=4)
    assert feed.due(0.0, 0, 0) == list(requests)
    assert feed.due(1.0, 2, 1) == []  # one waits
    assert feed.due(2.0, 2, 0) == list(requests[:2])
    assert feed.due(3.0, 4, 0) == []
    assert feed.due(9.9, 0, 0) == [requests[2], requests[0], requests[1]]
    assert feed.due(10.0, 0, 0) == []
    assert feed.is_over(10.0)


def test_requests_that_end_in_their_first_step_have_run(tmp_path: Path, run: Run) -> None:
    options = ("--output-tokens", "1", "--max-num-batched-tokens", "64", "-q", "-o", str(tmp_path / "run"))
    assert run("profile", *SMALL, *options).code == 0
    assert load_run(tmp_path / "run").manifest["results"]["most_running"] == 3  # 3 x 20 tokens are one step


def test_failed_requests_are_said(tmp_path: Path, run: Run) -> None:
    done = run("profile", *SMALL, "--num-blocks", "2", "-q", "-o", str(tmp_path / "run"))  # 16 tokens of 24 fit
    kept = load_run(tmp_path / "run")
    assert (done.code, kept.status, kept.manifest["results"]["num_failed"]) == (0, "complete", 3)
    assert "warning: profile: 3 of 3 requests failed" in done.err
    assert [event for event in kept.events if "3 of 3 requests failed" in event.get("text", "")]


def test_a_pool_the_machine_cannot_hold_is_left_untouched(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "TOUCHABLE", 0.0)
    assert run("profile", *SMALL, "-q", "-o", str(tmp_path / "run")).code == 0
    events = load_run(tmp_path / "run").events
    assert [event for event in events if "it is left untouched" in event.get("text", "")]


def test_the_live_view_says_how_far_it_is() -> None:
    workload = runs.Workload((runs.PlannedRequest(20, 10),) * 4)
    assert progress_words({}) == []
    assert progress_words(runs._progress(workload, 0, 0, 5.0)) == ["0/4 done"]
    assert progress_words(runs._progress(workload, 1, 10, 30.0)) == ["1/4 done", "1:30 left"]  # 30 of 40 tokens left
    endless = replace(workload, duration_s=60.0)
    assert progress_words(runs._progress(endless, 9, 99, 55.0)) == ["9 requests done", "0:05 left"]


# --- bad usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (("llama-3.1-8b",), 3, "no GPU that CUDA can use; use --device cpu"),
        (("smollm2-135m", "--device", "cuda"), 3, "--device cuda: no GPU that CUDA can use; use --device cpu"),
        (("smollm2-135m", "--device", "tpu9"), 2, "'tpu9': is not a device"),
        ((*SMALL, "--trace", "x.csv"), 2, "--trace: says how many requests"),
        ((*SMALL, "--lengths", "const:9"), 2, "both say how long requests are"),
        ((*SMALL, "--ctx", "8"), 2, "the longest request has 24 tokens, the context 8"),
        ((*SMALL, "--interval", "soon"), 2, "--interval"),
        ((*SMALL, "--kv-cache-dtype", "int3"), 2, "kv_cache_dtype must be one of"),
        (("mamba-2.8b", "--device", "cpu"), 2, "RecurrentState"),
        ((*SMALL, "--snapshot"), 2, "--snapshot: torch records its memory history on a GPU only"),
        ((*SMALL, "--tp", "2"), 2, "--tp 2: needs 2 processes (no torchrun found)"),
        ((*SMALL, "--weights", "nowhere"), 2, "--weights nowhere: is no directory"),
        ((*SMALL, "--ctx", "8193"), 2, "--ctx 8193: smollm2-135m has 8192 positions"),
        ((*SMALL, "--baseline", "contiguous", "--allocator", "contiguous"), 2, "is the allocator of the first run"),
        (("--trace", "x.csv", "--output-tokens", "4", "--device", "cpu"), 2, "--trace: says how many requests"),
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


def test_one_of_two_ranks_keeps_the_run(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    options = (
        str(model), "--device", "cpu", "--dtype", "float32", "--tp", "2", "--num-seqs", "3", "--prompt-tokens", "8",
        "--output-tokens", "4", "--duration", "300ms", "--format", "json", "-q", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "-m", "kvplan", "profile", *options], capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)  # one answer, not one per rank
    run = load_run(tmp_path / "run")
    assert (run.status, run.manifest["inputs"]["tensor_parallel_size"]) == ("complete", 2)
    assert run.manifest["results"]["num_finished"] >= 3
    # k and v of 2 layers, 1 of the 2 KV heads x 16 x 4 bytes, in blocks of 16 tokens
    assert run.manifest["memory"]["block_bytes"] == 2 * 2 * 16 * 16 * 4
