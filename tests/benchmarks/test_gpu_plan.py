"""benchmarks/gpu.py in the minutes for which a GPU is lent: what is planned, what a cut and a full disk cost."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_stages import evidence, passed, plan, runner, stage
from tests.benchmarks.test_gpu_script import PRELUDE, fake, is_running, stages_of, statuses, wait_for

pytestmark = pytest.mark.full  # a script for GPUs: what it measures needs one, what it writes is checked here
ROOT = Path(__file__).resolve().parents[2]
MOST = {stage.name: stage.timeout_s for stage in gpu.STAGES}


class Clock:
    """A clock that only the stages move: each takes a share of what it may take at most."""

    def __init__(self, share: Callable[[], float]) -> None:
        self.now_s, self.share = 1000.0, share
        self.limits: list[tuple[str, float]] = []

    def run(self, command: Sequence[str], log: Path, timeout_s: float, *_: Any) -> int | None:
        share = self.share()
        self.limits.append((log.parent.name, timeout_s))
        self.now_s += timeout_s * share
        result = {"headline": "done", "numbers": {"answer": 42}, "rows": []}
        (log.parent / "result.json").write_text(json.dumps(result))
        if share < 1:
            return 0
        self.now_s += runner.GRACE_S / 5  # until it has ended
        return None


def call(clock: Clock, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, float]:
    """(exit code, seconds) of a call by that clock, with the stages that there are."""
    begin_s = clock.now_s
    clock.limits.clear()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_process", clock.run)
        patch.setattr(time, "monotonic", lambda: clock.now_s)
        code = gpu.main([*arguments, "--device", "cpu", "--commit", "c0ffee"])
    return code, clock.now_s - begin_s


def test_nine_minutes_hold_every_anchor_at_its_longest_and_four_more_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the issue: a first command of 9 minutes has smoke, tests, decode, prefill, kernels and a profile; 4 go on."""
    clock = Clock(lambda: 0.999)
    _, seconds = call(clock, monkeypatch, str(tmp_path), "--minutes", "9")
    assert seconds <= 9 * 60
    anchors = ["smoke", "tests", "decode", "prefill", "kernels", "profile-llama-3.1-8b"]
    assert sorted(plan.ANCHORS) == sorted(anchors)
    assert [(name, round(limit)) for name, limit in clock.limits[:6]] == [(name, MOST[name]) for name in anchors]
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("planned, at most: smoke 60 s, tests 165 s, decode 70 s,")
    assert first_line.endswith("; 10 s for the end")
    _, seconds = call(clock, monkeypatch, str(tmp_path), "--minutes", "4", "--resume", str(tmp_path))
    assert seconds <= 4 * 60
    assert [name for name, _ in clock.limits][:3] == ["contiguous", "profile-qwen2.5-7b", "profile-qwen3-30b-a3b"]
    assert all(status == "ok" for name, status in statuses(tmp_path).items() if name in anchors)


@pytest.mark.parametrize("minutes", [1, 2, 3, 4, 5, 7, 9, 12, 15, 24])
def test_what_is_planned_adds_up_to_the_minutes_whatever_stages_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Also where some of them hang until they are ended, which takes a second each."""
    source = random.Random(minutes)
    shares = plan.plan(gpu.STAGES, minutes * 60 - runner.CLOSING_S)
    assert sum(shares.values()) <= minutes * 60 - runner.CLOSING_S
    for name, seconds in shares.items():
        (planned,) = (stage for stage in gpu.STAGES if stage.name == name)
        assert planned.minimum_s <= seconds <= planned.timeout_s
    clock = Clock(lambda: source.choice([0.1, 0.5, 0.9, 1.0]))
    _, seconds = call(clock, monkeypatch, str(tmp_path), "--minutes", str(minutes))
    assert seconds <= 60 * minutes
    limits = dict(clock.limits)
    num_hung = 7  # at most so many of the planned ones before the last; a second each comes out of the later ones
    assert all(limits.get(name, 0) >= seconds - num_hung for name, seconds in shares.items() if seconds > 30 + num_hung)


def test_a_stage_that_takes_longer_takes_nothing_from_those_planned_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 minutes, each of the six has the least that it needs; a budget of 240 s would end with the fourth."""
    clock = Clock(lambda: 0.999)
    call(clock, monkeypatch, str(tmp_path / "planned"), "--minutes", "4")
    assert [name for name, _ in clock.limits] == [stage.name for stage in gpu.STAGES[:6]]
    call(clock, monkeypatch, str(tmp_path / "budget"), "--budget", "240")
    assert "kernels" not in dict(clock.limits)


@pytest.mark.parametrize("text", ["0", "nan", "x", "-3", "1441"])
def test_minutes_that_hold_no_stage_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["out", f"--minutes={text}"])
    assert "argument --minutes" in capsys.readouterr().err


# --- what a cut costs -------------------------------------------------------------------------------------------------


def test_a_call_that_is_killed_keeps_what_its_stage_has_said_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Killed with no warning; the stage is one of the script's own kind, with a child of its own."""
    (tmp_path / "stage.py").write_text(
        f"""
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu_stages.stage import parser, task
own = task(parser(None))
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
own.save("half of it", {{"pid": child.pid}})
time.sleep(600)
"""
    )
    code = f"""
import sys
from benchmarks import gpu
from benchmarks.gpu_stages import runner
runner.KEEPING_S = 0.2
stage = runner.Stage("one", "all", "", ({str(tmp_path / "stage.py")!r},), 1, 300, goes_on=True)
gpu.main([{str(tmp_path / "out")!r}, "--device", "cpu", "--commit", "c0ffee"], [stage])
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    wait_for(tmp_path / "out" / "summary.json")
    while not stages_of(tmp_path / "out") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    entry = stages_of(tmp_path / "out")["one"]
    assert (entry["status"], entry["headline"], entry["error"]) == ("failed", "half of it", "it was cut off")
    while is_running(entry["numbers"]["pid"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(entry["numbers"]["pid"])

    again = "known = json.loads((folder / 'result.json').read_text()); save(**known['numbers'])"
    goes_on = runner.Stage("one", "all", "", ("-S", "-c", PRELUDE + again), 0, 300, goes_on=True)
    gpu.main(
        [str(tmp_path / "out"), "--device", "cpu", "--commit", "c0ffee", "--resume", str(tmp_path / "out")], [goes_on]
    )
    assert stages_of(tmp_path / "out")["one"]["numbers"] == entry["numbers"]


def test_a_stage_whose_script_is_gone_before_it_begins_ends_at_once(tmp_path: Path) -> None:
    """Importing torch takes seconds, in which nobody looks after the script."""
    stage_code = (
        "from benchmarks.gpu_stages.stage import parser, task; import time; task(parser(None)); time.sleep(600)"
    )
    gone = subprocess.Popen(["true"])
    gone.wait()
    argv = [sys.executable, "-c", stage_code, "--folder", str(tmp_path), "--device", "cpu"]
    env = {**os.environ, runner.SCRIPT: str(gone.pid)}
    begun = subprocess.Popen(argv, cwd=ROOT, env=env, start_new_session=True)
    assert begun.wait(500) == -signal.SIGKILL


def test_what_an_earlier_call_knew_stays_until_the_stage_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.main([str(tmp_path), "--device", "cpu", "--commit", "c"], [fake("a", "save('first', n=1); sys.exit(1)")])
    monkeypatch.setattr(runner, "KEEPING_S", 0.1)
    seen = f"found = json.loads(open({str(tmp_path / 'summary.json')!r}).read())['stages'][0]"
    look = f"time.sleep(1); {seen}; first = found['headline']; save('more'); time.sleep(1); {seen}; "
    look += "save('last', first=first, second=found['headline'])"
    arguments = [str(tmp_path), "--device", "cpu", "--commit", "c", "--resume", str(tmp_path)]
    assert gpu.main(arguments, [fake("a", look)]) == 0
    assert stages_of(tmp_path)["a"]["numbers"] == {"first": "first", "second": "more"}


def test_tests_that_have_passed_are_in_the_result_at_once_and_once(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    passed.keep(result, "b")
    evidence.write_json(result, {**json.loads(result.read_text()), "numbers": {"passed": ["b"], "failures": 1}})
    for name in "aba":
        passed.keep(result, name)
    values = stage.result_of(tmp_path)
    assert (values["headline"], values["numbers"]) == ("2 passed so far", {"passed": ["a", "b"], "failures": 1})


# --- a disk that takes nothing ----------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(evidence, "write_whole", refuse)
    marker = tmp_path / "ran"
    arguments = [str(tmp_path / "out"), "--device", "cpu", "--commit", "c"]
    assert gpu.main(arguments, [fake("a", f"open({str(marker)!r}, 'w')")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu.py: error: [Errno 30] Read-only file system:")
    assert error.endswith("make room for OUT, or name another\n")
    assert not marker.exists()


def test_a_disk_that_is_full_costs_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each has said is printed; the call has failed; half a file is not left behind."""
    real, marker = Path.write_bytes, tmp_path / "full"

    def write(path: Path, content: bytes) -> int:
        if marker.exists() and path.parent == tmp_path / "out":
            real(path, content[:7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    stages = [fake("a"), fake("b", f"open({str(marker)!r}, 'w'); save('43 things')"), fake("c", "save('44 things')")]
    arguments = [str(tmp_path / "out"), "--device", "cpu", "--commit", "c"]
    assert gpu.main(arguments, stages) == 1
    out = capsys.readouterr().out
    assert out.count("not written (No space left on device)") == 1
    assert "43 things" in out
    assert "44 things" in out
    assert statuses(tmp_path / "out") == {"a": "ok"}
    assert not list((tmp_path / "out").glob("*.part"))
    marker.unlink()
    assert gpu.main([*arguments, "--resume", str(tmp_path / "out")], stages[:1] + stages[2:]) == 0
    assert statuses(tmp_path / "out") == {"a": "ok", "c": "ok"}


# --- what the engine does without -------------------------------------------------------------------------------------


def test_a_figure_that_is_not_of_the_engines_kernels_says_so(tmp_path: Path) -> None:
    task = stage.Task(tmp_path, torch.device("cpu"), None)  # type: ignore[arg-type]
    task.save("5 tokens/s", {"n": 1})
    assert stage.result_of(tmp_path)["headline"] == "5 tokens/s"
    task.fallbacks.update({"paged_decode": "it does not compile"})
    task.save("5 tokens/s", {"n": 1})
    values = stage.result_of(tmp_path)
    assert values["headline"] == "5 tokens/s; without the engine's own paged_decode"
    assert values["numbers"] == {"n": 1, "fallbacks": {"paged_decode": "it does not compile"}}
