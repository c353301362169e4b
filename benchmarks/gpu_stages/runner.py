"""Runs stages one after the other within a budget: each a process of its own, saved as it ends.

OUT holds summary.json (kvplan/gpu@1), one evidence-GROUP.tar.gz per group of stages, and the kernels that Triton has
compiled, all replaced after every stage. A crash, a hang or a lack of memory costs the stage it happens in and no
other.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.gpu_stages.evidence import pack, unpack, write_json
from benchmarks.gpu_stages.triton_cache import NAME, archive_of, pack_cache, unpack_cache
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.files import load_json, path_text, printable

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = "kvplan/gpu@1"
SCRIPT = "KVPLAN_GPU_SCRIPT"  # variable of a stage's environment: the process that began it
SUMMARY, LOG, RESULT, ROWS = "summary.json", "log.txt", "result.json", "rows.csv"
GRACE_S = 5.0  # between asking a stage to end and ending it
POLL_S = 0.05  # between looks at whether all of it has ended
CLOSING_S = 10.0  # of the budget, kept for the last archives
KEEPING_S = 20.0  # of a stage under way, between two times at which what it has said by then is kept

# failures: it came to its own end with its numbers, and something in it failed. partial: its time was up, and the next
# call goes on with the rest. failed: it crashed or was stopped.
Status = Literal["ok", "failures", "partial", "failed", "timeout", "skipped"]
DONE = ("ok", "failures")  # not run again unless asked for
FAILURES, UNFINISHED = 9, 10  # exit codes of a stage that ended as the second and the third say
STATUSES: dict[int, Status] = {0: "ok", FAILURES: "failures", UNFINISHED: "partial"}


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing to find out.

    group      the archive its evidence goes into
    shows      what it shows, for --list
    argv       what follows the interpreter; `--folder FOLDER --device DEVICE --end SECONDS` is added, and
               `--commit COMMIT` where it is known
    minimum_s  it is not begun with less of the budget left
    timeout_s  it is ended after so long, or at the end of the budget
    goes_on    run again on the same code, it finds its own earlier result in its folder, and adds to it
    """

    name: str
    group: str
    shows: str
    argv: tuple[str, ...]
    minimum_s: float
    timeout_s: float
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What the stages run on, and the code they run.

    versions  of the packages that take part; None where one is not installed
    """

    device: str
    driver: str | None
    commit: str | None
    versions: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Result:
    """How a stage ended, and what it says.

    error           why it did not come to its own end
    numbers, rows   whatever it had saved when it ended
    commit, utc     of the run that this result is from
    """

    name: str
    group: str
    status: Status
    seconds: float = 0.0
    headline: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    commit: str | None = None
    utc: str = ""


@dataclass(slots=True)
class Session:
    """One call of the script: where it writes, how long it may take, and all results so far, by stage."""

    out: Path
    work: Path
    device: str
    machine: Machine
    budget_s: float
    started_s: float
    say: Callable[[str], None] = print
    results: dict[str, Result] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    again: frozenset[str] = frozenset()  # stages to run although they are done
    not_begun: list[str] = field(default_factory=list)  # those of which an earlier result is kept for lack of time
    plan: dict[str, float] = field(default_factory=dict)  # seconds of stages that have not begun: no other takes them
    num_kernels: int = 0  # files of Triton's when they were packed last
    is_unsaved: bool = False  # what was to be written last could not be

    @property
    def left_s(self) -> float:
        """What is left of the budget for stages."""
        return self.budget_s - CLOSING_S - (time.monotonic() - self.started_s)

    @property
    def free_s(self) -> float:
        """The same without what the plan gives stages that have not begun."""
        return self.left_s - sum(self.plan.values())


# --- stages -----------------------------------------------------------------------------------------------------------


def run_stages(stages: Sequence[Stage], session: Session) -> None:
    """Run those that are not done, or are asked for again, in order; after each, all that is known is on disk."""
    width = max(len(stage.name) for stage in stages)
    save(session)
    for stage in stages:
        session.plan.pop(stage.name, None)
        known = session.results.get(stage.name)
        if known is not None and known.status in DONE and stage.name not in session.again:
            session.say(f"{stage.name:<{width}}  kept    {known.status:<8}   {known.headline}")
            continue
        if known is not None and known.status != "skipped" and (why := lack_of_time(stage, session)):
            session.not_begun.append(stage.name)
            session.say(f"{stage.name:<{width}}  kept    {known.status:<8}   not run again: {why}")
            continue
        try:
            session.results[stage.name] = result = run_stage(stage, session)
        except BaseException as stop:  # Ctrl-C, SIGTERM: what the stage has left is kept
            session.results[stage.name] = ended(stage, session, "failed", f"stopped by {type(stop).__name__}")
            raise
        finally:
            with saving(session):
                save(session, stage.group)
        session.say(line(result, width))


def line(result: Result, width: int) -> str:
    return (
        f"{result.name:<{width}}  {result.status:<8} {result.seconds:6.1f} s  {result.headline or result.error or ''}"
    )


def lack_of_time(stage: Stage, session: Session) -> str | None:
    """Why a stage cannot be begun."""
    left = session.free_s
    if left >= stage.minimum_s:
        return None
    return f"it needs {stage.minimum_s:g} s, {max(0.0, left):.0f} s of the budget are left"


def run_stage(stage: Stage, session: Session) -> Result:
    """Run one stage in its own process, or say why not."""
    if why := lack_of_time(stage, session):
        return Result(stage.name, stage.group, "skipped", error=why, commit=session.machine.commit)
    folder = session.work / stage.name
    known = known_of(stage, session)
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier try left
    folder.mkdir(parents=True)
    if known is not None:
        write_json(folder / RESULT, {key: getattr(known, key) for key in ("headline", "commit", "numbers", "rows")})
    timeout = min(stage.timeout_s, session.free_s)
    begin = time.monotonic()  # the same clock in every process
    added = ["--folder", str(folder), "--device", session.device, "--end", f"{begin + timeout:.1f}"]
    added += [f"--commit={session.machine.commit}"] if session.machine.commit is not None else []
    command = [sys.executable, *stage.argv, *added]
    code = run_process(command, folder / LOG, timeout, session.work / NAME, partial(keep, stage, session))
    seconds = round(time.monotonic() - begin, 1)
    if code is None:
        result = ended(stage, session, "timeout", f"ended after {timeout:.0f} s")
    elif code not in STATUSES:
        result = ended(stage, session, "failed", f"exit code {code}: {last_line(folder / LOG)}")
    else:
        result = ended(stage, session, STATUSES[code], None)
        if not (folder / RESULT).exists():
            result = replace(result, status="failed", error=f"it left no {RESULT}")
    return replace(result, seconds=seconds)


def known_of(stage: Stage, session: Session) -> Result | None:
    """The earlier result that a stage goes on from; one of other code says nothing of this."""
    known = session.results.get(stage.name)
    is_more = stage.goes_on and stage.name not in session.again
    if not is_more or known is None or not known.numbers or not is_same_code(known.commit, session.machine.commit):
        return None
    return known


def is_same_code(commit: str | None, other: str | None) -> bool:
    """Two commits that nobody knows are not the same."""
    return commit is not None and commit == other


def run_process(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    cache: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int | None:
    """The exit code; None where the process and all that it started had to be ended. cache: Triton's.

    meanwhile  is called every KEEPING_S
    """
    end_s = time.monotonic() + timeout_s
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", SCRIPT: str(os.getpid())}
    env |= {} if cache is None else {"TRITON_CACHE_DIR": str(cache)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        while True:
            try:
                return process.wait(min(KEEPING_S, max(0.0, end_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end_s:
                    return None
            meanwhile()
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: asked first, so that a profile, its child, can write what it has."""
    if not signal_group(process, signal.SIGTERM):
        return
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        if not signal_group(process, 0):
            return
    signal_group(process, signal.SIGKILL)  # what outlives this would keep the GPU's memory
    process.wait()


def signal_group(process: subprocess.Popen[bytes], signum: int) -> bool:
    """Signal the group that a process leads; False where nothing is left of it."""
    process.poll()  # until it is asked after, a leader that has ended counts as there
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        return False
    return True


def ended(stage: Stage, session: Session, status: Status, error: str | None) -> Result:
    """The result of a stage that has ended, with what it saved before."""
    try:
        saved = json.loads((session.work / stage.name / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = {}
    return Result(
        stage.name,
        stage.group,
        status,
        headline=str(saved.get("headline", "")),
        numbers=saved.get("numbers", {}),
        rows=saved.get("rows", []),
        error=error,
        commit=session.machine.commit,
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def keep(stage: Stage, session: Session) -> None:
    """Save what a stage under way has said by now: who ends this process without a warning costs no more than the rest.

    What an earlier call knew stays until there is more.
    """
    if (session.work / stage.name / RESULT).exists():
        session.results[stage.name] = ended(stage, session, "failed", "it was cut off")
    with saving(session):
        save_kernels(session)
        write_json(session.out / SUMMARY, document(session))


def last_line(path: Path) -> str:
    """The last line of a log that says anything, cut to a line's length."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((text.strip()[:300] for text in reversed(lines) if text.strip()), "it printed nothing")


# --- what is kept -----------------------------------------------------------------------------------------------------


def save(session: Session, group: str | None = None) -> None:
    """Write the archive of a group that has news, and the summary."""
    if group is not None:
        stages = [name for name, result in session.results.items() if result.group == group]
        for name in stages:
            if (session.work / name).is_dir() and session.results[name].rows:
                write_rows(session.work / name / ROWS, session.results[name], session.machine)
        session.left_out[group] = pack(archive(session.out, group), session.work, stages)
        save_kernels(session)
    write_json(session.out / SUMMARY, document(session))


def save_kernels(session: Session) -> None:
    """Pack Triton's kernels where there are more than at the last time."""
    count = sum(1 for _ in (session.work / NAME).glob("*/*"))
    if count > session.num_kernels:
        pack_cache(session.out, session.work)
        session.num_kernels = count


@contextmanager
def saving(session: Session) -> Iterator[None]:
    """A disk that takes no more costs what is not written, and not the stages that are still to come."""
    try:
        yield
        session.is_unsaved = False
    except OSError as error:
        if not session.is_unsaved:
            why = error.strerror or error
            session.say(f"{path_text(session.out)}: not written ({why}); what is printed here is all there is")
        session.is_unsaved = True


def archive(out: Path, group: str) -> Path:
    return out / f"evidence-{group}.tar.gz"


def write_rows(path: Path, result: Result, machine: Machine) -> None:
    """A stage's rows with what they were measured on, as the other benchmarks write theirs."""
    known = {
        "gpu": machine.device,
        "driver": machine.driver,
        "torch": machine.versions.get("torch"),
        "kvplan": machine.versions.get("kvplan"),
        "commit": result.commit,
        "utc": result.utc,
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*result.rows[0], *known])
        writer.writeheader()
        writer.writerows({**values, **known} for values in result.rows)


def document(session: Session) -> dict[str, Any]:
    machine = session.machine
    return {
        "schema": SCHEMA,
        "commit": machine.commit,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "driver": machine.driver,
        "versions": machine.versions,
        "budget_s": session.budget_s,
        "stages": [asdict(result) for result in session.results.values()],
        "left_out": {group: names for group, names in session.left_out.items() if names},
    }


def resume(session: Session, folder: Path) -> None:
    """Take over the results and the evidence of an earlier call; says which are of another commit.

    What another device showed stays where it lies; what is of code that nobody knows is measured again. Both are said.
    Raises InvalidInputError for what is no such folder, UsageError where this call's own code is not known.
    """
    commit = session.machine.commit
    if commit is None:
        raise UsageError(
            "--resume: nobody knows which code this is; give --commit, in the call that is resumed as well"
        )
    summary = load_json(folder / SUMMARY)
    if summary.get("schema") != SCHEMA or not isinstance(summary.get("stages"), list):
        raise InvalidInputError(f"{path_text(folder / SUMMARY)}: is not {SCHEMA}; name an OUT of an earlier call")
    if summary.get("device") != session.machine.device:
        measured_on = printable(str(summary.get("device")), 60)
        what = f"{path_text(folder)}: was measured on {measured_on}, this is {session.machine.device}"
        if folder.resolve() == session.out.resolve():
            raise UsageError(f"{what}; name another OUT")
        session.say(f"{what}; not taken over")
        return
    try:
        results = [Result(**values) for values in summary["stages"]]
    except TypeError as error:
        raise InvalidInputError(f"{path_text(folder / SUMMARY)}: stages cannot be read ({error})") from error
    odd = [result.name for result in results if not is_whole(result)]
    if odd:
        raise InvalidInputError(f"{path_text(folder / SUMMARY)}: stages cannot be read ({printable(str(odd[0]), 40)})")
    unknown = [result.name for result in results if result.commit is None and result.status != "skipped"]
    if unknown:
        session.say(f"measured again, of unknown code: {', '.join(unknown)}; give --commit in every call")
    results = [result for result in results if result.name not in unknown]
    session.results |= {result.name: result for result in results}
    older = [f"{result.name} ({result.commit})" for result in results if is_older(result, session)]
    if older:
        session.say(f"kept of another commit than {commit}: {', '.join(older)}; --again STAGE,... measures them anew")
    session.left_out |= summary.get("left_out", {})
    if archive_of(folder).exists():
        try:
            unpack_cache(folder, session.work)
        except (OSError, EOFError, tarfile.TarError, zlib.error):
            session.say(f"{path_text(archive_of(folder))}: cannot be unpacked; kernels are compiled again")
    for group in {result.group for result in results}:
        packed = archive(folder, group)
        if packed.exists():
            try:
                unpack(packed, session.work)
            except (OSError, EOFError, tarfile.TarError, zlib.error):
                lost = [result.name for result in results if result.group == group]
                session.say(f"{path_text(packed)}: cannot be unpacked; measured again: {', '.join(lost)}")
                session.results = {name: result for name, result in session.results.items() if name not in lost}
                continue
            if folder.resolve() != session.out.resolve():
                shutil.copyfile(packed, archive(session.out, group))


def is_whole(result: Result) -> bool:
    """Whether it has the shape that this script writes."""
    texts = (result.name, result.group, result.headline, result.utc, result.commit or "", result.error or "")
    return (
        all(isinstance(text, str) for text in texts)
        and result.status in get_args(Status)
        and isinstance(result.numbers, dict)
        and isinstance(result.rows, list)
    )


def is_older(result: Result, session: Session) -> bool:
    """Whether a result will not be measured again although it is of other code than this."""
    is_kept = result.status in DONE and result.name not in session.again
    return is_kept and not is_same_code(result.commit, session.machine.commit)


def table(results: Sequence[Result]) -> str:
    """One line per stage: name, status, seconds, headline."""
    width = max((len(result.name) for result in results), default=0)
    return "\n".join(line(result, width) for result in results)
