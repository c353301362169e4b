"""benchmarks/gpu.py: stages end within their time, lose nothing of each other, resume, and stay small on disk."""

import argparse
import ast
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, tune_kernels
from benchmarks.gpu_stages import checks, evidence, profiles, runner, stage, triton_cache
from benchmarks.gpu_stages import kernels as kernels_stage
from benchmarks.gpu_stages import tune as tune_stage
from benchmarks.gpu_stages.roofline import Limits
from benchmarks.gpu_stages.runner import Stage
from engine import memory
from kvplan.core.errors import EnvironmentProblem
from kvplan.measure.reconcile import COMPONENTS

pytestmark = pytest.mark.full  # a script for GPUs: what it measures needs one, what it writes is checked here
ROOT = Path(__file__).resolve().parents[2]
# What a fake stage begins with: FOLDER, and save(numbers) as a real stage would.
PRELUDE = """
import json, os, sys, time, pathlib
folder = pathlib.Path(sys.argv[sys.argv.index('--folder') + 1])
def save(headline='done', rows=(), **numbers):
    values = {'headline': headline, 'numbers': numbers, 'rows': list(rows)}
    (folder / 'result.json').write_text(json.dumps(values))
"""
OK = "save('42 things', answer=42)"
ROW = {"metric": "speed", "unit": "tokens/s", "value": 3.0, "p20": 2.0, "p80": 4.0, "n": 5, "model": "small"}


def fake(name: str, code: str = OK, group: str = "all", minimum_s: float = 0, timeout_s: float = 30) -> Stage:
    return Stage(name, group, f"shows {name}", ("-S", "-c", PRELUDE + code), minimum_s, timeout_s)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the script on fake stages; OUT is tmp_path / out."""

    def run(stages: list[Stage], *arguments: str, out: str = "out") -> tuple[int, str, str]:
        code = gpu.main([str(tmp_path / out), "--device", "cpu", "--commit", "c0ffee", *arguments], stages)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def stages_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in summary(folder)["stages"]}


def statuses(folder: Path) -> dict[str, str]:
    return {name: entry["status"] for name, entry in stages_of(folder).items()}


def members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as packed:
        files = {name: packed.extractfile(name) for name in packed.getnames()}
        return {name: file.read() for name, file in files.items() if file is not None}


# --- one stage after the other ----------------------------------------------------------------------------------------


def test_a_stage_that_ends_well_is_in_the_summary_and_its_archive(call: Any, tmp_path: Path) -> None:
    code, out, _ = call([fake("one", "print('hello'); " + OK)])
    assert code == 0
    assert "42 things" in out
    document = summary(tmp_path / "out")
    assert document["schema"] == "kvplan/gpu@1"
    assert (document["commit"], document["device"], document["budget_s"]) == ("c0ffee", "cpu", 480)
    assert document["versions"]["torch"]
    entry = stages_of(tmp_path / "out")["one"]
    assert (entry["status"], entry["numbers"], entry["error"], entry["commit"]) == (
        "ok",
        {"answer": 42},
        None,
        "c0ffee",
    )
    packed = members(tmp_path / "out" / "evidence-all.tar.gz")
    assert packed["one/log.txt"] == b"hello\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evidence-all.tar.gz", "summary.json"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise RuntimeError('CUDA out of memory')", "exit code 1: RuntimeError: CUDA out of memory"),
        ("os.kill(os.getpid(), 9)", "exit code -9: it printed nothing"),
        ("print('so far'); os.abort()", "exit code -6: so far"),
        ("sys.exit('no such kernel')", "exit code 1: no such kernel"),
        ("pass", "it left no result.json"),
    ],
    ids=["raises", "killed", "aborts", "exits", "says nothing"],
)
def test_a_stage_that_fails_costs_no_other(call: Any, tmp_path: Path, code: str, error: str) -> None:
    assert call([fake("bad", code), fake("good")])[0] == 1
    stages = stages_of(tmp_path / "out")
    assert (stages["bad"]["status"], stages["bad"]["error"]) == ("failed", error)
    assert stages["good"]["status"] == "ok"


def test_a_stage_that_hangs_is_ended_with_its_children_and_keeps_what_it_saved(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    code = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
save('as far as this', pid=child.pid)
time.sleep(600)
"""
    assert call([fake("hangs", code, timeout_s=1), fake("good")])[0] == 1
    stages = stages_of(tmp_path / "out")
    assert (stages["hangs"]["status"], stages["hangs"]["error"]) == ("timeout", "ended after 1 s")
    assert stages["hangs"]["headline"] == "as far as this"
    assert stages["good"]["status"] == "ok"
    assert not is_running(stages["hangs"]["numbers"]["pid"])


def test_a_child_that_saves_when_asked_to_end_is_given_the_time(tmp_path: Path) -> None:
    """The process itself ends at once at SIGTERM; its child needs half a second more, and has it."""
    child = f"""
import pathlib, signal, sys, time
folder = pathlib.Path({str(tmp_path)!r})
def save(*_):
    time.sleep(0.5)
    (folder / 'run.json').write_text('saved')
    sys.exit()
signal.signal(signal.SIGTERM, save)
(folder / 'ready').touch()
time.sleep(60)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-S", "-c", parent], start_new_session=True)
    wait_for(tmp_path / "ready")
    runner.end(process)
    assert process.returncode == -signal.SIGTERM
    assert (tmp_path / "run.json").read_text() == "saved"


def wait_for(path: Path) -> None:
    """Return when the file is there, or after 15 minutes."""
    deadline = time.monotonic() + 900
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_gets_no_more_than_the_budget_leaves(call: Any, tmp_path: Path) -> None:
    """12 s less the 10 that are kept for the end: the first stage is ended after 2, the second is not begun."""
    code, _, _ = call([fake("long", "time.sleep(600)"), fake("later", minimum_s=1)], "--budget", "12")
    assert code == 1
    stages = stages_of(tmp_path / "out")
    assert stages["long"]["status"] == "timeout"
    assert stages["later"]["status"] == "skipped"
    assert stages["later"]["error"] == "it needs 1 s, 0 s of the budget are left"


@pytest.mark.parametrize(("timeout_s", "budget", "seconds"), [(30, "480", 30), (180, "40", 30)])
def test_a_stage_is_told_when_it_is_ended(
    call: Any, tmp_path: Path, timeout_s: float, budget: str, seconds: float
) -> None:
    """Its own limit, or what is left of the budget less the 10 s for the end; on the clock of all processes."""
    code = "save(end=float(sys.argv[sys.argv.index('--end') + 1]), now=time.monotonic())"
    begin = time.monotonic()
    call([fake("one", code, timeout_s=timeout_s)], "--budget", budget)
    numbers = stages_of(tmp_path / "out")["one"]["numbers"]
    assert begin + seconds - 0.1 <= numbers["end"] <= numbers["now"] + seconds + 0.1


def test_a_stage_that_the_budget_does_not_hold_is_skipped_and_a_shorter_one_runs(call: Any, tmp_path: Path) -> None:
    code, out, _ = call([fake("large", minimum_s=100), fake("little", minimum_s=1)], "--budget", "60")
    assert code == 4
    assert statuses(tmp_path / "out") == {"large": "skipped", "little": "ok"}
    assert "it needs 100 s" in out


def test_every_stage_is_on_disk_before_the_next_begins(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    look = f"""
found = json.loads(pathlib.Path({str(out / "summary.json")!r}).read_text())
save(seen=[entry['name'] for entry in found['stages']], archive=os.path.exists({str(out / "evidence-a.tar.gz")!r}))
"""
    call([fake("first", group="a"), fake("second", look, group="b")])
    assert stages_of(out)["second"]["numbers"] == {"seen": ["first"], "archive": True}


def test_a_stage_imports_the_repository_and_no_terminal(call: Any, tmp_path: Path) -> None:
    code = (
        "import kvplan.core.errors; save(cwd=os.getcwd(), stdin=sys.stdin.read(), leader=os.getsid(0) == os.getpid())"
    )
    call([fake("one", code)])
    assert stages_of(tmp_path / "out")["one"]["numbers"] == {"cwd": str(ROOT), "stdin": "", "leader": True}


def test_rows_are_written_with_what_they_were_measured_on(call: Any, tmp_path: Path) -> None:
    call([fake("one", f"save(rows=[{ROW}])")])
    text = members(tmp_path / "out" / "evidence-all.tar.gz")["one/rows.csv"].decode()
    (values,) = csv.DictReader(io.StringIO(text))
    assert list(values) == [
        "metric", "unit", "value", "p20", "p80", "n", "model", "gpu", "driver", "torch", "kvplan", "commit", "utc",
    ]  # fmt: skip
    assert (values["value"], values["gpu"], values["commit"]) == ("3.0", "cpu", "c0ffee")


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["out", "second"], ids=["the same folder", "another folder"])
def test_resuming_runs_what_is_missing_or_failed_and_keeps_the_rest(call: Any, tmp_path: Path, out: str) -> None:
    call([fake("good", "save(run=1)"), fake("bad", "sys.exit(1)"), fake("late", minimum_s=10**6)])
    stages = [fake("good", "save(run=2)"), fake("bad", "save(run=2)"), fake("late", "save(run=2)"), fake("new")]
    code, _, _ = call(stages, "--resume", str(tmp_path / "out"), "--commit", "badcafe", out=out)
    assert code == 0
    by_stage = stages_of(tmp_path / out)
    assert [(name, entry["status"]) for name, entry in by_stage.items()] == [
        ("good", "ok"), ("bad", "ok"), ("late", "ok"), ("new", "ok"),
    ]  # fmt: skip
    assert [by_stage[name]["numbers"] for name in ("good", "bad", "late")] == [{"run": 1}, {"run": 2}, {"run": 2}]
    assert [by_stage[name]["commit"] for name in ("good", "bad")] == ["c0ffee", "badcafe"]
    packed = members(tmp_path / out / "evidence-all.tar.gz")
    assert json.loads(packed["good/result.json"])["numbers"] == {"run": 1}
    assert json.loads(packed["bad/result.json"])["numbers"] == {"run": 2}


def test_resuming_into_another_folder_carries_archives_over_that_have_no_news(call: Any, tmp_path: Path) -> None:
    call([fake("a", group="a"), fake("b", "sys.exit(1)", group="b")])
    call([fake("a", group="a"), fake("b", group="b")], "--resume", str(tmp_path / "out"), out="second")
    assert "a/result.json" in members(tmp_path / "second" / "evidence-a.tar.gz")
    assert "b/result.json" in members(tmp_path / "second" / "evidence-b.tar.gz")


def test_resuming_says_which_results_are_of_another_commit(call: Any, tmp_path: Path) -> None:
    """`bad` is run again and is of this commit then; without a change of commit there is nothing to say."""
    call([fake("a"), fake("b"), fake("bad", "sys.exit(1)")])
    stages = [fake("a"), fake("b"), fake("bad")]
    _, out, _ = call(stages, "--resume", str(tmp_path / "out"), "--commit", "badcafe")
    how = "; --again STAGE,... measures them anew"
    assert out.splitlines()[0] == f"kept of another commit than badcafe: a (c0ffee), b (c0ffee){how}"
    _, out, _ = call([fake("a")], "--resume", str(tmp_path / "out"), out="second")
    assert out.splitlines()[0] == f"kept of another commit than c0ffee: bad (badcafe){how}"
    call([fake("a")], out="third")
    _, out, _ = call([fake("a")], "--resume", str(tmp_path / "third"), out="third")
    assert "another commit" not in out


SAVED = "save('3 passed, 1 failed', run={run}); sys.exit({code})"


def test_a_stage_that_ended_with_failures_is_done_and_told(call: Any, tmp_path: Path) -> None:
    """Its numbers are there: another try would take as long and show the same. The call has failed each time."""
    code, out, _ = call([fake("tests", SAVED.format(run=1, code=9)), fake("good")])
    assert code == 1
    assert "failures" in out
    assert "3 passed, 1 failed" in out
    code, out, _ = call([fake("tests", SAVED.format(run=2, code=0)), fake("good")], "--resume", str(tmp_path / "out"))
    assert code == 1
    (line,) = (line.split() for line in out.splitlines() if " kept " in line and line.startswith("tests"))
    assert line == ["tests", "kept", "failures", "3", "passed,", "1", "failed"]
    entry = stages_of(tmp_path / "out")["tests"]
    assert (entry["status"], entry["numbers"]) == ("failures", {"run": 1})


def test_failures_without_numbers_are_a_crash(call: Any, tmp_path: Path) -> None:
    call([fake("tests", "sys.exit(9)")])
    assert statuses(tmp_path / "out") == {"tests": "failed"}


def test_again_runs_a_stage_that_is_done(call: Any, tmp_path: Path) -> None:
    call([fake("a", "save(run=1)"), fake("b", "save(run=1)"), fake("c", SAVED.format(run=1, code=9))])
    stages = [fake(name, "save(run=2)") for name in "abc"]
    arguments = ("--resume", str(tmp_path / "out"), "--again", "c,a", "--commit", "badcafe")
    code, out, _ = call(stages, *arguments)
    assert code == 0
    assert (
        out.splitlines()[0] == "kept of another commit than badcafe: b (c0ffee); --again STAGE,... measures them anew"
    )
    by_stage = stages_of(tmp_path / "out")
    assert [(by_stage[name]["numbers"], by_stage[name]["commit"]) for name in "abc"] == [
        ({"run": 2}, "badcafe"), ({"run": 1}, "c0ffee"), ({"run": 2}, "badcafe"),
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "status"), [(0, "ok"), (1, "failed")])
def test_what_the_time_does_not_allow_again_stays_as_it_was(call: Any, tmp_path: Path, code: int, status: str) -> None:
    """With the commit that it is of, its numbers and its evidence; the call says that it was not run."""
    call([fake("a", SAVED.format(run=1, code=code))])
    late = [fake("a", "save(run=2)", minimum_s=10**6)]
    arguments = ("--resume", str(tmp_path / "out"), "--again", "a", "--commit", "badcafe")
    exit_code, out, _ = call(late, *arguments)
    assert exit_code == (4 if status == "ok" else 1)
    assert "not run again: it needs 1e+06 s" in out
    entry = stages_of(tmp_path / "out")["a"]
    assert (entry["status"], entry["numbers"], entry["commit"]) == (status, {"run": 1}, "c0ffee")
    assert "a/result.json" in members(tmp_path / "out" / "evidence-all.tar.gz")


def test_a_stage_is_told_which_code_it_measures(call: Any, tmp_path: Path) -> None:
    """So that it can tell what others have left of that code; its options take it as they are given."""
    call([fake("one", "save(argv=sys.argv[1:])")])
    (argv,) = (entry["numbers"]["argv"] for entry in stages_of(tmp_path / "out").values())
    options = stage.parser(None).parse_args(argv)
    assert (options.commit, options.device) == ("c0ffee", "cpu")
    task = stage.Task(tmp_path, torch.device("cpu"), options)
    task.save("said", {})
    assert json.loads((tmp_path / "result.json").read_text())["commit"] == "c0ffee"


GOES_ON = """
path = folder / 'result.json'
before = json.loads(path.read_text())['numbers'].get('cases', []) if path.exists() else []
save(cases=[*before, len(before)])
sys.exit(10 if len(before) < 2 else 0)
"""


def test_a_stage_that_goes_on_adds_to_its_own_result_call_after_call(call: Any, tmp_path: Path) -> None:
    """Of the same code; of another it begins anew. Until it is done the calls end as at a budget's end."""
    grid = [Stage("grid", "all", "shows", ("-S", "-c", PRELUDE + GOES_ON), 0, 30, goes_on=True)]
    resume = ("--resume", str(tmp_path / "out"))
    codes = [call(grid)[0], call(grid, *resume)[0]]
    assert stages_of(tmp_path / "out")["grid"]["numbers"] == {"cases": [0, 1]}
    assert statuses(tmp_path / "out") == {"grid": "partial"}
    codes.append(call(grid, *resume, "--commit", "badcafe")[0])
    assert stages_of(tmp_path / "out")["grid"]["numbers"] == {"cases": [0]}
    codes += [call(grid, *resume, "--commit", "badcafe")[0] for _ in range(2)]
    assert statuses(tmp_path / "out") == {"grid": "ok"}
    assert stages_of(tmp_path / "out")["grid"]["numbers"] == {"cases": [0, 1, 2]}
    assert codes == [4, 4, 4, 4, 0]
    call(grid, *resume, "--commit", "badcafe", "--again", "grid")
    assert stages_of(tmp_path / "out")["grid"]["numbers"] == {"cases": [0]}


def test_a_stage_that_does_not_go_on_finds_nothing_of_an_earlier_try(call: Any, tmp_path: Path) -> None:
    plain = [fake("grid", GOES_ON)]
    for more in ((), ("--resume", str(tmp_path / "out"))):
        call(plain, *more)
        assert stages_of(tmp_path / "out")["grid"]["numbers"] == {"cases": [0]}


def test_a_partial_stage_with_failures_fails_the_call(call: Any) -> None:
    assert call([fake("grid", "save(failures={'decode': 'wrong'}); sys.exit(10)")])[0] == 1


def test_what_lost_its_evidence_on_the_way_is_measured_again(call: Any, tmp_path: Path) -> None:
    """An archive that is cut off costs the stages of its group."""
    call([fake("a", "save(run=1)", group="x"), fake("b", "save(run=1)", group="y")])
    packed = tmp_path / "out" / "evidence-x.tar.gz"
    packed.write_bytes(packed.read_bytes()[:60])
    stages = [fake("a", "save(run=2)", group="x"), fake("b", "save(run=2)", group="y")]
    code, out, _ = call(stages, "--resume", str(tmp_path / "out"), out="second")
    assert code == 0
    assert out.splitlines()[0] == f"{packed}: cannot be unpacked; measured again: a"
    by_stage = stages_of(tmp_path / "second")
    assert [by_stage[name]["numbers"] for name in "ab"] == [{"run": 2}, {"run": 1}]


def test_what_another_gpu_showed_is_not_taken_over_and_the_call_goes_on(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine was started for this call: it is not wasted. Where the results lie they stay."""
    call([fake("a", "save(run=1)")])
    before = (tmp_path / "out" / "summary.json").read_text()
    monkeypatch.setattr(gpu, "machine", lambda device, commit: runner.Machine("NVIDIA H100", "580", commit, {}))
    resume = ("--resume", str(tmp_path / "out"))
    code, out, _ = call([fake("a", "save(run=2)")], *resume, out="second")
    assert code == 0
    assert out.splitlines()[0] == f"{tmp_path}/out: was measured on cpu, this is NVIDIA H100; not taken over"
    assert stages_of(tmp_path / "second")["a"]["numbers"] == {"run": 2}
    assert call([fake("a")], *resume)[0] == 2
    assert (tmp_path / "out" / "summary.json").read_text() == before


def test_code_that_nobody_knows_is_never_the_same(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a repository and without --commit: nothing can be gone on from, and nothing goes on."""
    monkeypatch.setattr(gpu, "checkout", lambda root: None)
    argv, resume = [str(tmp_path / "out"), "--device", "cpu"], ["--resume", str(tmp_path / "out")]
    assert gpu.main(argv, [fake("a", "save(run=1)")]) == 0
    assert "nobody knows which code this is: without --commit" in capsys.readouterr().out
    assert stages_of(tmp_path / "out")["a"]["commit"] is None
    assert gpu.main([*argv, *resume], [fake("a")]) == 2
    assert capsys.readouterr().err == (
        "gpu.py: error: --resume: nobody knows which code this is; give --commit, in the call that is resumed as well\n"
    )
    code, out, _ = call([fake("a", "save(run=2)")], *resume)
    assert code == 0
    assert out.splitlines()[0] == "measured again, of unknown code: a; give --commit in every call"
    assert stages_of(tmp_path / "out")["a"]["numbers"] == {"run": 2}


def test_the_folder_that_results_travel_in_is_one_that_git_ignores(tmp_path: Path) -> None:
    """So that they lie in the checkout and are not committed by accident; the script's text and make name the same."""
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("summary.json", "evidence-kernels.tar.gz"):
        done = subprocess.run(["git", "check-ignore", "-q", f"build/gpu/{name}"], cwd=tmp_path, check=False)
        assert done.returncode == 0
    assert "--resume build/gpu" in (gpu.__doc__ or "")


@pytest.mark.parametrize(
    ("where", "variables", "words"),
    [
        (None, (), ["build/gpu", "--budget", "480"]),
        ("build/gpu", (), ["build/gpu", "--budget", "480", "--resume", "build/gpu"]),
        ("build/gpu", ("OUT=new",), ["new", "--budget", "480", "--resume", "build/gpu"]),
        ("new", ("OUT=new", "COMMIT=c0ffee"), ["new", "--budget", "480", "--resume", "new", "--commit", "c0ffee"]),
        (None, ("RESUME=old",), ["build/gpu", "--budget", "480", "--resume", "old"]),
    ],
)
def test_make_goes_on_from_what_lies_in_out_or_in_the_folder_that_travels(
    tmp_path: Path, where: str | None, variables: tuple[str, ...], words: list[str]
) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    if where is not None:
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "summary.json").touch()
    env = {name: value for name, value in os.environ.items() if name not in ("OUT", "RESUME", "COMMIT", "MAKEFLAGS")}
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu", *variables],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.replace("\\\n", " ").split() == ["PYTHONPATH=.", "python3", "benchmarks/gpu.py", *words]


def test_only_runs_what_it_names_and_forgets_nothing(call: Any, tmp_path: Path) -> None:
    stages = [fake("a"), fake("b"), fake("c")]
    assert call(stages, "--only", "c,a")[0] == 0
    assert statuses(tmp_path / "out") == {"a": "ok", "c": "ok"}
    call(stages, "--only", "b", "--resume", str(tmp_path / "out"))
    assert statuses(tmp_path / "out") == {"a": "ok", "c": "ok", "b": "ok"}


def test_a_terminated_call_ends_its_stage_and_keeps_what_there_is(tmp_path: Path) -> None:
    """SIGTERM during the second stage: the first is whole, the second is "failed" and resumable."""
    code = f"""
import sys, signal
from benchmarks import gpu
from tests.benchmarks.test_gpu_script import fake
signal.signal(signal.SIGTERM, lambda *_: sys.exit(gpu.TERMINATED))
hang = "save('begun'); open({str(tmp_path / "begun")!r}, 'w'); time.sleep(60)"
sys.exit(gpu.main([{str(tmp_path / "out")!r}, "--device", "cpu", "--commit", "c"], [fake("a"), fake("b", hang)]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    wait_for(tmp_path / "begun")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 143
    assert b"42 things" in out
    stages = stages_of(tmp_path / "out")
    assert (stages["a"]["status"], stages["b"]["status"]) == ("ok", "failed")
    assert (stages["b"]["error"], stages["b"]["headline"]) == ("stopped by SystemExit", "begun")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_the_list_names_every_stage_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [stage.name for stage in gpu.STAGES]


SMOKE = {"name": "smoke", "group": "all", "status": "ok", "commit": "c0ffee"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "OUT: missing; name a folder for the results"),
        (["{tmp}", "--only", "smoke,nonsense"], "--only: 'nonsense' is no stage; --list prints them"),
        (["{tmp}/old"], "{tmp}/old holds an earlier call's results; --resume it, or name another folder"),
        (["{tmp}/old", "--resume", "{tmp}/old"], "{tmp}/old was measured on H200, this is cpu; name another OUT"),
        (["{tmp}", "--again", "smoke,nonsense"], "--again: 'nonsense' is no stage; --list prints them"),
        (
            ["{tmp}/new", "--resume", "{tmp}/other"],
            "{tmp}/other/summary.json is not kvplan/gpu@1; name an OUT of an earlier call",
        ),
        (
            ["{tmp}/new", "--resume", "{tmp}/odd"],
            "{tmp}/odd/summary.json: stages cannot be read (Result.__init__() got an unexpected keyword argument 'x')",
        ),
        (["{tmp}/new", "--resume", "{tmp}/odd2"], "{tmp}/odd2/summary.json: stages cannot be read (smoke)"),
    ],
    ids=[
        "no OUT",
        "no such stage",
        "OUT is used",
        "another device",
        "none again",
        "no summary of ours",
        "odd stages",
        "an odd status",
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    for name, values in (
        ("old", {"schema": "kvplan/gpu@1", "device": "H200", "stages": []}),
        ("other", {"schema": "kvplan/run@1"}),
        ("odd", {"schema": "kvplan/gpu@1", "device": "cpu", "stages": [{"x": 1}]}),
        ("odd2", {"schema": "kvplan/gpu@1", "device": "cpu", "stages": [{**SMOKE, "status": "well"}]}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(values))
    argv = [argument.format(tmp=tmp_path) for argument in arguments]
    assert gpu.main([*argv, "--device", "cpu", "--commit", "c0ffee"], [fake("smoke")]) == 2
    assert capsys.readouterr().err == f"gpu.py: error: {error.format(tmp=tmp_path)}\n"


def test_without_a_gpu_it_says_so_before_it_writes_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main([str(tmp_path / "out")], [fake("a")]) == 3
    expected = "gpu.py: error: --device cuda:0: torch finds no GPU; use --device cpu to try the script\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "out").exists()


# --- the stages as they are -------------------------------------------------------------------------------------------


def test_the_stages_fit_the_files_that_can_be_carried() -> None:
    """At most six archives, the kernels and the summary; no name twice; none asks for more time than it may take; all
    of them take 24 minutes at most."""
    assert len({stage.group for stage in gpu.STAGES}) <= 6
    assert sum(stage.timeout_s for stage in gpu.STAGES) <= 24 * 60
    assert len({stage.name for stage in gpu.STAGES}) == len(gpu.STAGES)
    assert all(0 < stage.minimum_s <= stage.timeout_s for stage in gpu.STAGES)


def test_every_stage_is_a_module_of_the_repository() -> None:
    for gpu_stage in gpu.STAGES:
        assert gpu_stage.argv[0] == "-m"
        assert (ROOT / f"{gpu_stage.argv[1].replace('.', '/')}.py").is_file()


def test_every_model_but_the_one_with_latents_is_profiled_with_bf16_and_then_fp8_kv() -> None:
    names = [stage.name.removeprefix("profile-") for stage in gpu.STAGES if stage.name.startswith("profile-")]
    models = ["llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma-3-12b", "gpt-oss-20b"]
    assert [name for name in names if name.endswith("-fp8")] == [f"{model}-fp8" for model in models]
    assert [name for name in names if not name.endswith("-fp8")] == [*models, "deepseek-v2-lite"]
    assert all(names.index(model) < names.index(f"{model}-fp8") for model in models)


def test_what_nobody_can_say_without_a_gpu_comes_first_and_fp8_profiles_last() -> None:
    names = [stage.name for stage in gpu.STAGES]
    assert names[:5] == ["smoke", "tests", "decode", "prefill", "kernels"]
    assert all(name.endswith("-fp8") for name in names[-5:])
    assert [stage.name for stage in gpu.STAGES if stage.goes_on] == ["tests", "kernels-grid"]


@pytest.mark.parametrize("name", ["kernels", "tune", "kernels-grid"])
def test_a_search_that_may_go_on_for_ever_ends_before_it_is_ended(name: str) -> None:
    """Its own limit, of which --help speaks, is at least 20 s below the stage's: a last case may be under way."""
    (chosen_stage,) = (stage for stage in gpu.STAGES if stage.name == name)
    text = subprocess.run(
        [sys.executable, *chosen_stage.argv, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    limit = re.search(r"--limit SECONDS\s+for the \w+ \((\d+)\)", text.stdout)
    assert limit is not None
    limit_s = chosen_stage.argv[chosen_stage.argv.index("--limit") + 1] if "--limit" in chosen_stage.argv else limit[1]
    assert int(limit_s) <= chosen_stage.timeout_s - 20


@pytest.mark.parametrize(("left_s", "seconds"), [(60, 45), (500, 150), (None, 150)])
def test_a_stage_stops_15_seconds_before_it_is_ended_or_at_its_own_limit(left_s: float | None, seconds: float) -> None:
    begin = time.monotonic()
    end = None if left_s is None else begin + left_s
    until = stage.Task(Path(), torch.device("cpu"), argparse.Namespace(limit=150, end=end)).until_s
    assert begin + seconds <= until <= time.monotonic() + seconds


def test_each_of_the_three_stages_with_a_limit_keeps_to_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 s are left, of which 15 are for saving: none of them takes its own limit of 150.

    Of the tests' 55 s those that share the device may take 70%; they take no time here, so the others get all of it.
    """
    limits_s: list[float] = []

    def measure(task: Any, todo: Any, until_s: float, findings: Any) -> None:
        limits_s.append(until_s)

    def tune(place: Any, device: str, kernels: Any, until_s: float) -> tuple[Any, dict[Any, Any]]:
        limits_s.append(until_s)
        return argparse.Namespace(tried=[]), {}

    def run_tests(arguments: Any, junit: Path, limit_s: float, passed: Path) -> int:
        limits_s.append(now_s + limit_s)
        junit.write_text(JUNIT)
        return 0

    monkeypatch.setattr(kernels_stage, "measure", measure)
    monkeypatch.setattr(tune_kernels, "tune", tune)
    monkeypatch.setattr(tune_kernels, "summary", lambda search, new: "nothing")
    monkeypatch.setattr(checks, "run_tests", run_tests)
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    end = now_s + 70
    options = argparse.Namespace(limit=150, end=end)
    kernels_stage.run(stage.Task(tmp_path, torch.device("cpu"), options))
    tune_stage.run(stage.Task(tmp_path, torch.device("cpu"), options))
    checks.run(stage.Task(tmp_path, torch.device("meta"), options))  # on a CPU it only collects
    assert limits_s == [end - 15, end - 15, now_s + 0.7 * 55, end - 15]


@pytest.mark.parametrize(("shared_s", "alone_s"), [(8.0, 67.0), (52.5, 22.5)])
def test_the_tests_that_run_alone_get_what_those_that_share_the_device_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_s: float, shared_s: float
) -> None:
    """The least time that the stage is begun with is 90 s, 15 of them for saving: 75 s, of which shared_s are used."""
    (begun,) = (stage.minimum_s for stage in gpu.STAGES if stage.name == "tests")
    now_s, calls = 1000.0, []

    def run_tests(arguments: list[str], junit: Path, limit_s: float, passed: Path) -> int:
        nonlocal now_s
        calls.append((arguments, limit_s))
        junit.write_text(JUNIT)
        now_s += shared_s
        return 0

    monkeypatch.setattr(checks, "run_tests", run_tests)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    checks.run(stage.Task(tmp_path, torch.device("meta"), argparse.Namespace(limit=165, end=1000.0 + begun)))
    assert calls == [(checks.shared(), 52.5), (checks.alone(), alone_s)]


def test_tests_that_have_passed_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off after one, the next call runs the other, and counts both."""
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this test's own
    pytest_here = ("-m", "pytest", "-p", "benchmarks.gpu_stages.passed", "-p", "no:cacheprovider", "-c", os.devnull)
    monkeypatch.setattr(checks, "PYTEST", (*pytest_here, "--rootdir", str(tmp_path)))
    monkeypatch.setattr(checks, "TESTS", ("test_two.py",))
    monkeypatch.setattr(checks, "ALONE", ())
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    own = stage.Task(tmp_path, torch.device("meta"), argparse.Namespace(limit=600, end=None, commit="c0ffee"))
    assert checks.run(own) == runner.UNFINISHED
    assert stage.result_of(tmp_path)["numbers"]["passed"] == ["test_two.py::test_a"]
    assert stage.result_of(tmp_path)["headline"] == "1 passed, 0 failed, not all ran"
    (tmp_path / "test_two.py").write_text("def test_a(): assert 0, 'ran again'\ndef test_b(): pass\n")
    assert checks.run(own) == 0
    assert stage.result_of(tmp_path)["headline"] == "2 passed, 0 failed"


def test_compiled_kernels_travel_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for sm_90 in one folder, packed and unpacked, a kernel is found in another and not compiled again."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    for folder in (first, second, out):
        folder.mkdir()
    compile_one(first / triton_cache.NAME)
    assert triton_cache.pack_cache(out, first) >= 1
    triton_cache.unpack_cache(out, second)
    before = {path: path.stat().st_mtime_ns for path in (second / triton_cache.NAME).rglob("*")}
    assert any(path.suffix == ".cubin" for path in before)
    compile_one(second / triton_cache.NAME)
    assert {path: path.stat().st_mtime_ns for path in (second / triton_cache.NAME).rglob("*")} == before


def compile_one(cache: Path) -> None:
    code = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
source = triton.compiler.ASTSource(double, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 64})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
    script = cache.parent.parent / "compile_one.py"  # triton reads a kernel's source from its file
    script.write_text(code)
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    env.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, str(script)], env=env, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("device", "computes", "current"),
    [("cuda:1", True, [torch.device("cuda:1")]), ("cuda:1", False, []), ("cpu", True, [])],
)
def test_a_stage_makes_its_device_the_current_one_unless_others_do_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, computes: bool, current: list[torch.device]
) -> None:
    """Graphs are captured on the current device; a parent that opens it would hold memory that its child measures."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(sys, "argv", ["stage", "--folder", str(tmp_path), "--device", device])
    assert stage.task(stage.parser(None), computes=computes).device == torch.device(device)
    assert taken == current


def profile_task(folder: Path) -> stage.Task:
    options = argparse.Namespace(model="llama-3.1-8b", kv_cache_dtype=None, baseline=None)
    return stage.Task(folder, torch.device("cpu"), options)


@pytest.mark.parametrize("measured", [{}, {"memory": {"weights": 1}}], ids=["before the engine stood", "later"])
def test_a_profile_that_ran_out_of_memory_says_so_whatever_reconcile_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> None:
    """Without measured memory there is nothing to reconcile; where reconcile fails, the cause stays."""
    cause = "CUDA out of memory. Tried to allocate 1.96 GiB."
    commands = []

    def kvplan(task: stage.Task, arguments: list[str]) -> tuple[int, str]:
        commands.append(arguments[0])
        if arguments[0] == "reconcile":
            return 2, ""
        (task.folder / "run").mkdir()
        manifest = {"status": "failed", "cause": cause, **measured}
        (task.folder / "run" / "run.json").write_text(json.dumps(manifest))
        return 4, ""

    monkeypatch.setattr(profiles, "kvplan", kvplan)
    if measured:
        with pytest.raises(SystemExit, match="kvplan reconcile: exit code 2"):
            profiles.run(profile_task(tmp_path))
    else:
        assert profiles.run(profile_task(tmp_path)) == 4
    assert commands == ["profile", *(["reconcile"] if measured else [])]
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["numbers"] == {"status": "failed", "cause": cause}
    assert saved["headline"] == f"the run ended early: {cause}"


def test_a_complete_profile_that_is_cut_while_it_is_compared_does_not_say_that_it_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kvplan(task: stage.Task, arguments: list[str]) -> tuple[int, str]:
        if arguments[0] == "reconcile":
            raise KeyboardInterrupt
        (task.folder / "run").mkdir()
        manifest = {"status": "complete", "cause": None, "memory": {"weights": 1}}
        (task.folder / "run" / "run.json").write_text(json.dumps(manifest))
        return 0, ""

    monkeypatch.setattr(profiles, "kvplan", kvplan)
    with pytest.raises(KeyboardInterrupt):
        profiles.run(profile_task(tmp_path))
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["headline"] == "the run is complete, and not compared yet"


@pytest.mark.parametrize(("code", "status"), [(4, 9), (1, 1)], ids=["no memory", "an error"])
def test_a_run_that_the_memory_did_not_do_for_is_done_once_its_rows_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    """Another try would end as this one did; `kvplan profile` exits with 4 for that alone."""
    document = {"rows": [], "gaps": ["no request was served"]}

    def kvplan(task: stage.Task, arguments: list[str]) -> tuple[int, str]:
        if arguments[0] == "reconcile":
            return 0, json.dumps(document)
        (task.folder / "run").mkdir()
        manifest = {"status": "failed", "cause": "CUDA out of memory.", "memory": {"weights": 1}}
        (task.folder / "run" / "run.json").write_text(json.dumps(manifest))
        return code, ""

    monkeypatch.setattr(profiles, "kvplan", kvplan)
    assert profiles.run(profile_task(tmp_path)) == status
    assert json.loads((tmp_path / "result.json").read_text())["numbers"]["gaps"] == document["gaps"]


def test_the_engine_needs_no_psutil_where_linux_says_its_memory() -> None:
    """In a process in which psutil cannot be imported; sysconf counts the same pages in its own way."""
    code = """
import sys
sys.modules["psutil"] = None
import torch
from engine import Engine
from engine.memory import device_memory
print(*device_memory(torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    available, total = map(int, done.stdout.split())
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available <= total


def test_elsewhere_psutil_is_asked_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.host_memory()[1] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(EnvironmentProblem, match=r"psutil: not installed, .*; run `pip install psutil`"):
        memory.host_memory()


JUNIT = """<testsuites><testsuite errors="1" failures="1" skipped="0" tests="4">
<testcase name="good[a]"/><testcase name="bad[b]"><failure/></testcase><testcase name="bad[c]"><error/></testcase>
<testcase name="good[d]"/></testsuite></testsuites>"""


def test_the_kernels_are_tested_first() -> None:
    """No GPU has run them yet, and everything else rests on them."""
    assert checks.TESTS[0] == "tests/engine/test_on_gpu.py"


def test_the_tests_that_did_not_pass_are_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert checks.outcome(tmp_path / "junit.xml") == {
        "tests": 4, "failures": 1, "errors": 1, "skipped": 0, "not_passed": ["bad[b]", "bad[c]"],
    }  # fmt: skip


def test_the_counts_are_those_of_both_runs_of_the_tests(tmp_path: Path) -> None:
    """And of the first alone where there was no time for the second."""
    (tmp_path / "a.xml").write_text(JUNIT)
    (tmp_path / "b.xml").write_text(JUNIT.replace("bad", "late"))
    assert checks.outcome(tmp_path / "a.xml", tmp_path / "b.xml") == {
        "tests": 8, "failures": 2, "errors": 2, "skipped": 0,
        "not_passed": ["bad[b]", "bad[c]", "late[b]", "late[c]"],
    }  # fmt: skip
    assert checks.outcome(tmp_path / "a.xml", tmp_path / "none.xml")["tests"] == 4


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([1, 0], 9), ([0, 1], 9), ([2, 0], 10), ([1, 2], 10), ([-9, 0], 10), ([1, 3], 3), ([0, 5], 0)],
)
def test_failing_tests_are_a_result_and_tests_that_did_not_run_are_none(codes: list[int], code: int) -> None:
    """pytest's codes: 1 some failed, 2 interrupted, 3 its own error, 5 no tests are left; -9: it was killed."""
    assert checks.code_of(codes) == code


MEASURES = {"memory_report", "memory_allocated", "max_memory_allocated", "mem_get_info", "memory_stats", "allocated"}


def test_every_test_of_a_gpus_memory_runs_alone_and_no_other() -> None:
    """Those whose code asks for memory, by name; the others must not need to be alone."""
    names_alone = []
    for path in checks.TESTS:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        whole = any(isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node) for node in tree.body)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            is_marked = whole or any("mark.gpu" in ast.unparse(decorator) for decorator in node.decorator_list)
            names = {
                child.attr if isinstance(child, ast.Attribute) else getattr(child, "id", "") for child in ast.walk(node)
            }
            names_alone += [f"{path}::{node.name}"] if is_marked and names & MEASURES else []
    assert sorted(names_alone) == sorted(checks.ALONE)


def test_the_tests_are_shared_out_where_that_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.shared()[-2:] == ["-n", "6"]
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "-n" not in checks.shared()
    assert "-n" not in checks.alone()


@pytest.mark.full
def test_no_test_is_run_twice_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest collects for both runs is what it collects without this division; -v once, -q thrice: file: count."""

    def collected(*arguments: str) -> int:
        argv = [sys.executable, *arguments, "--collect-only", "-q", "-q", "-q"]
        listing = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        return sum(int(line.rsplit(":", 1)[1]) for line in listing.stdout.splitlines() if line.startswith("tests/"))

    monkeypatch.setattr(checks, "find_spec", lambda name: None)  # several processes collect the same
    alone = collected(*checks.alone())
    assert alone == len(checks.ALONE)
    assert collected(*checks.shared()) + alone == collected(*checks.PYTEST, *checks.TESTS)


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["one process", "several"])
def test_tests_that_take_too_long_are_interrupted_and_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(checks, "REPORTING_S", 900)  # workers of a busy machine take their time to end
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(600)\n")
    arguments = ("-m", "pytest", str(slow), "-p", "no:cacheprovider", "-c", os.devnull, *more)
    assert checks.run_tests(arguments, tmp_path / "junit.xml", 10) == pytest.ExitCode.INTERRUPTED
    assert checks.outcome(tmp_path / "junit.xml")["not_passed"] == []
    assert checks.outcome(tmp_path / "junit.xml")["tests"] >= 1


def test_tests_that_hear_no_interruption_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device answers no more: the tests after them still get their time."""
    monkeypatch.setattr(checks, "REPORTING_S", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    assert checks.run_tests(("-S", "-c", deaf), tmp_path / "junit.xml", 3) == -signal.SIGKILL


def test_a_config_loses_its_quantisation_and_nothing_else() -> None:
    config = stage.config_of("gpt-oss-20b", is_small=False)
    assert "quantization_config" not in config
    assert (config["hidden_size"], config["num_local_experts"], len(config["layer_types"])) == (2880, 32, 24)
    assert stage.spec_of("gpt-oss-20b", is_small=False).quantization is None
    assert stage.config_of("gpt-oss-20b", is_small=True)["num_local_experts"] == 8


def test_a_row_is_the_median_and_the_middle_three_fifths() -> None:
    """Of 1..11 the 20th percentile is 3 and the 80th 9: the third and the ninth of ten steps."""
    assert stage.row("m", "s", list(range(1, 12))) == stage.Row("m", "s", 6, 3, 9, 11)
    assert stage.row("m", "s", [4.0]) == stage.Row("m", "s", 4, 4, 4, 1)


def test_the_limit_of_a_decode_step_is_that_of_reading_weights_and_kv() -> None:
    """Llama-3.1-8B in bfloat16 on 4.8 TB/s and 0.75 x 989 TFLOP/s, by hand.

    One sequence of 2048: (15.01e9 + 2048 * 131072) / 4.8e12 = 3.183 ms. 256 of 512: 2 * 7.505e9 * 256 / 741.75e12 =
    5.180 ms of products, longer than reading the weights, + 256 * 512 * 131072 / 4.8e12 = 3.579 ms.
    """
    limits = Limits(15_010_000_000, 7_505_000_000, 131_072, 4.8e12, 0.75 * 989e12)
    assert limits.step_s(1, 2048) == pytest.approx(3.183e-3, abs=1e-6)
    assert limits.step_s(256, 512) == pytest.approx(8.759e-3, abs=2e-6)


# --- evidence ---------------------------------------------------------------------------------------------------------


def samples(path: Path, count: int) -> None:
    """A run of two stages."""
    lines = [json.dumps({"t": i, "stage": "prefill" if i < 7 else "decode", "x": "." * 80}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")


def test_samples_are_thinned_evenly_and_keep_the_ends_of_each_stage(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples(path, 1000)
    assert evidence.thin(path, limit=-(-path.stat().st_size // 10))
    times = [json.loads(line)["t"] for line in path.read_text().splitlines()]
    assert times == sorted({*range(0, 1000, 10), 6, 7, 999})


def test_samples_that_are_few_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples(path, 20)
    before = path.read_bytes()
    assert not evidence.thin(path)
    assert path.read_bytes() == before


def test_an_archive_keeps_to_its_limit_and_says_what_it_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "a"
    folder.mkdir(parents=True)
    for name, size in (("trace.bin", 300_000), ("log.txt", 50_000), ("result.json", 1_000)):
        (folder / name).write_bytes(os.urandom(size))  # random bytes do not shrink
    left_out = evidence.pack(tmp_path / "a.tar.gz", tmp_path / "work", ["a"], limit=100_000)
    assert left_out == ["a/trace.bin"]
    assert set(members(tmp_path / "a.tar.gz")) == {"a/log.txt", "a/result.json"}
    assert (tmp_path / "a.tar.gz").stat().st_size <= 100_000
    assert evidence.pack(tmp_path / "a.tar.gz", tmp_path / "work", ["a"], limit=10) == ["a/trace.bin", "a/log.txt"]


def test_what_an_archive_left_out_is_in_the_summary(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "pack", lambda to, work, names: evidence.pack(to, work, names, limit=20_000))
    call([fake("one", "(folder / 'big.bin').write_bytes(os.urandom(100_000)); " + OK)])
    assert summary(tmp_path / "out")["left_out"] == {"all": ["one/big.bin"]}


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage, on tiny models; then a second call finds nothing left to do."""
    argv = [str(tmp_path), "--device", "cpu", "--budget", "5400"]  # more than a busy machine needs
    assert gpu.main(argv) == 0, capsys.readouterr().out
    stages = stages_of(tmp_path)
    assert list(stages) == [stage.name for stage in gpu.STAGES]
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert all(path.stat().st_size < 16 * 2**20 for path in files)
    for name in ("profile-llama-3.1-8b", "profile-gpt-oss-20b", "profile-deepseek-v2-lite"):
        assert stages[name]["numbers"]["weights"]["relative"] == 0
        assert stages[name]["numbers"]["kv_cache"]["relative"] == 0
    # Every row of a later model is predicted, with what the first one measured.
    assert "total_predicted_before" not in stages["profile-llama-3.1-8b"]["numbers"]
    assert set(COMPONENTS) == set(stages["profile-qwen2.5-7b"]["numbers"]["total_predicted_before"]["of"])
    assert stages["contiguous"]["numbers"]["contiguous"]["num_finished"] == 3
    assert stages["prefix"]["numbers"]["prefix"] == 90
    assert stages["kernels"]["numbers"]["failures"] == {}
    assert stages["kernels-grid"]["headline"] == "all 9 cases were measured before"
    assert stages["tune"]["numbers"]["timed"] > 0
    assert any(row["unit"] == "tokens/s" for row in stages["decode"]["rows"])
    assert stages["nano-vllm"]["numbers"]["goals"]["nano-vllm"] > 0
    assert stages["generate"]["numbers"]["missing"] == {}
    assert stages["allocators"]["numbers"]["goals"]["paged-waste"] < 1
    packed = members(tmp_path / "evidence-llama.tar.gz")
    assert "profile-llama-3.1-8b/run/run.json" in packed
    assert b"weights" in packed["profile-llama-3.1-8b/reconciliation.md"]
    assert gpu.main([*argv, "--resume", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" kept ") == len(gpu.STAGES)


def test_the_tests_stage_runs_every_file_with_a_test_for_a_gpu() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            r"^(@pytest\.mark\.gpu|pytestmark = pytest\.mark\.gpu)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert marked == set(checks.TESTS)
