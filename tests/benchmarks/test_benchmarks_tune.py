"""benchmarks/tune_kernels.py: tiles that are right, fit and are faster win, and no CPU's times reach the engine."""

import csv
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune_kernels
from benchmarks.gpu_stages.runner import ROOT, Machine
from benchmarks.gpu_stages.stage import row
from benchmarks.tune_kernels import Compiled, Compilers, Place, Search, Target, Tried, Worker, targets
from engine.kernels import configs, tiles
from engine.kernels.tiles import AttentionTile, Entry
from kvplan.core.errors import InvalidInputError

pytestmark = pytest.mark.full  # a script for GPUs: what it measures needs one, what it writes is checked here
WHERE = Machine("NVIDIA H200", "600.1", "c0ffee", {})
FINE = asdict(Compiled(80, 0, 70_000))
DECODE = targets(is_small=False)[0]


class Scripted:
    """A worker that answers by a function of the tile."""

    def __init__(self, answer: Callable[[AttentionTile], dict[str, Any]]) -> None:
        self._answer, self.tiles, self.closed = answer, list[AttentionTile](), 0

    def ask(self, question: Any, limit_s: float = 0) -> dict[str, Any]:
        if question is None:
            return {"arch": 90}
        self.tiles.append(AttentionTile(**question[1]))
        return self._answer(self.tiles[-1])

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def search(compiler: Any, timer: Any, left_s: float = 60) -> Search:
    return Search(Compilers([compiler], 90), timer, 90, targets(is_small=False), time.monotonic() + left_s)


def us(*values: float) -> dict[str, Any]:
    return {"error": 1.7e-3, "us": list(values)}


def speed(tile: AttentionTile) -> dict[str, Any]:
    """Fastest by far is 128 tokens at a time, with 8 warps, 2 stages and 6 programs; all scatter by 1%."""
    value = 100.0 if tile.block_n == 128 and tile.num_warps == 8 and tile.num_stages == 2 else 200.0
    value -= tile.programs
    return us(value * 0.99, value, value * 1.01)


# --- the space --------------------------------------------------------------------------------------------------------


def test_each_target_is_another_entry_and_its_default_tile_is_tried_first() -> None:
    all_targets = targets(is_small=False)
    assert len({target.key(90) for target in all_targets}) == len(all_targets)
    for target in all_targets:
        candidates = target.candidates(90)
        assert candidates[0] == target.default(90)
        assert len(set(candidates)) == len(candidates)


def test_decode_is_tuned_over_tiles_warps_stages_programs_and_block_sizes() -> None:
    decode_targets = [target for target in targets(is_small=False) if target.kernel == "decode"]
    assert {target.key(90).block_size for target in decode_targets} == {16, 32, 64, 128}
    assert {target.key(90).kv for target in decode_targets} == {"16-bit", "float8"}
    sizes = {(tile.block_n, tile.num_warps, tile.num_stages) for tile in DECODE.space}
    assert sizes == {(n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4)}
    assert {configs.PROGRAMS_PER_PROCESSOR, *DECODE.programs} == {1, 2, 3, 4, 6}


def test_a_tile_of_prefill_holds_all_heads_of_a_group() -> None:
    for target in targets(is_small=False):
        if target.kernel == "prefill":
            assert all(tile.block_m >= target.cases[0].heads.group for tile in target.space)
            assert {tile.num_warps for tile in target.space if tile.block_m == 128} == {8}  # with 4 they spill


def test_every_launcher_takes_the_tile_that_is_tried_and_then_its_own_again() -> None:
    tile = AttentionTile(16, 1, 1)
    before = configs.decode_tile(*_LLAMA)
    with tune_kernels.launched_with(tile):
        assert configs.decode_tile(*_LLAMA, group=4, block_size=16) == tile
        assert configs.prefill_tile(*_LLAMA, 8192) == tile
        assert configs.latent_tile(90, 16, _LLAMA[2]) == tile
    assert configs.decode_tile(*_LLAMA) == before


_LLAMA = (90, 128, DECODE.cases[0].stored, DECODE.cases[0].compute)


# --- who wins ---------------------------------------------------------------------------------------------------------


def test_the_fastest_wins_and_its_programs_are_varied() -> None:
    timer = Scripted(speed)
    best_and_default = search(Scripted(lambda tile: FINE), timer).best_of(DECODE)
    assert best_and_default is not None
    best, default = best_and_default
    assert best.tile == AttentionTile(128, 8, 2, programs=6)
    assert default.tile == DECODE.default(90)
    assert best.us is not None
    assert best.us.value == 94.0
    assert len(timer.tiles) == len(DECODE.candidates(90)) + 3 * 4  # three tiles, four more counts of programs each


@pytest.mark.parametrize(
    ("compiled", "arch", "warps", "programs"),
    [
        # Of a quarter's 16384 registers a warp of 185 * 32, rounded up to 6144, leaves room for 2: 8 warps of 4 each
        (Compiled(185, 0, 38_912), 90, 4, 2),
        (Compiled(128, 0, 93_184), 90, 8, 2),  # 4096 registers, 16 warps of 8; 233472 // (93184 + 1024) bytes are 2
        (Compiled(246, 0, 147_456), 90, 8, 1),  # 7936 registers, 8 warps of 8
        (Compiled(96, 0, 71_680), 80, 4, 2),  # 3072 registers hold 5; 164 KiB // 71 KiB are 2
        (Compiled(96, 0, 71_680), 87, 4, 2),  # as much shared memory as 80
        (Compiled(85, 0, 37_888), 86, 4, 2),  # 100 KiB // 38 KiB, as 89
        (Compiled(40, 0, 2_048), 90, 4, 4),  # 12 would fit
    ],
)
def test_a_candidate_begins_with_what_fits_at_once(compiled: Compiled, arch: int, warps: int, programs: int) -> None:
    assert compiled.programs(arch, warps) == programs


@pytest.mark.parametrize("index", [i for i, target in enumerate(targets(is_small=False)) if target.kernel != "prefill"])
def test_candidates_and_the_default_are_timed_with_programs_that_fit_and_none_twice(index: int) -> None:
    """Code of 185 registers: two programs of 4 warps, one of 8. The default keeps the number it is used with."""
    target, timer = targets(is_small=False)[index], Scripted(speed)
    run = search(Scripted(lambda tile: asdict(Compiled(185, 0, 38_912))), timer)
    assert run.best_of(target) is not None
    assert timer.tiles[0] == target.default(90)
    assert len(timer.tiles) == len(set(timer.tiles))
    first: dict[AttentionTile, int] = {}
    for tile in timer.tiles[1:]:
        first.setdefault(replace(tile, programs=0), tile.programs)
    known = replace(timer.tiles[0], programs=0)
    assert {tile.programs for tile in timer.tiles} == {1, 2, 4, 6, target.default(90).programs}
    assert all(count == {4: 2, 8: 1}[tile.num_warps] for tile, count in first.items() if tile != known)


def test_a_prefill_takes_no_number_of_programs() -> None:
    target = next(candidate for candidate in targets(is_small=False) if candidate.kernel == "prefill")
    timer = Scripted(speed)
    assert search(Scripted(lambda tile: asdict(Compiled(185, 0, 38_912))), timer).best_of(target) is not None
    assert timer.tiles == target.candidates(90)


@pytest.mark.parametrize(
    ("resources", "fault"),
    [
        (Compiled(255, 8, 70_000), "spills 8 bytes"),
        (Compiled(80, 0, 232_449), "takes 232449 bytes of shared memory of 232448"),
        (Compiled(4, 0, 0), "compiles to nothing (4 registers)"),
    ],
)
def test_what_spills_or_does_not_fit_is_never_run(resources: Compiled, fault: str) -> None:
    """The fastest of all, were it run."""

    def compiled(tile: AttentionTile) -> dict[str, Any]:
        return asdict(resources) if tile.block_n == 128 else FINE

    timer = Scripted(speed)
    run = search(Scripted(compiled), timer)
    best = run.best_of(DECODE)
    assert best is not None
    assert best[0].tile.block_n != 128
    assert all(tile.block_n != 128 for tile in timer.tiles)
    assert {attempt.outcome for attempt in run.tried if attempt.tile.block_n == 128} == {fault}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"error": 0.3}, "its answer is wrong"),
        ({"fault": "no answer in 120 s"}, "does not run: no answer in 120 s"),
    ],
)
def test_a_wrong_answer_or_none_does_not_win(answer: dict[str, Any], outcome: str) -> None:
    timer = Scripted(lambda tile: answer if tile.block_n == 128 else speed(tile))
    run = search(Scripted(lambda tile: FINE), timer)
    best = run.best_of(DECODE)
    assert best is not None
    assert best[0].tile.block_n != 128
    assert {attempt.outcome for attempt in run.tried if attempt.tile.block_n == 128} == {outcome}
    assert (timer.closed > 0) == ("fault" in answer)  # what has failed once may fail whatever comes next


@pytest.mark.parametrize(("best", "wins"), [((90, 91, 92), True), ((90, 97, 104), False)])
def test_a_difference_within_the_scatter_is_none(best: tuple[float, ...], wins: bool) -> None:
    """Of 98, 100, 102 the 20th percentile is 98.8; of 90, 97, 104 the 80th is 101.2."""
    default = Tried(DECODE, DECODE.default(90), "timed", us=row("", "us", [98, 100, 102]))
    other = Tried(DECODE, AttentionTile(128, 8, 2), "timed", us=row("", "us", best))
    assert tune_kernels.fastest([default, other], default) is (other if wins else default)


def test_what_was_compiled_is_not_compiled_again_for_another_number_of_programs() -> None:
    compiler = Scripted(lambda tile: FINE)
    run = search(compiler, Scripted(speed))
    run.compile_ahead(DECODE)
    run.best_of(DECODE)
    assert sorted(compiler.tiles, key=str) == sorted(DECODE.candidates(90), key=str)


def test_two_processes_compile_at_the_same_time_and_are_asked_in_order() -> None:
    """Each waits for the other to be asked as well: one alone would be asked everything."""
    both = threading.Barrier(2)

    def compiled(tile: AttentionTile) -> dict[str, Any]:
        both.wait(900)
        return FINE

    workers: Any = [Scripted(compiled), Scripted(compiled)]
    compilers = Compilers(workers, 90)
    answers = [compilers.ask(0, AttentionTile(n, 4, 2)) for n in (16, 32)]
    assert [answer.result(900) for answer in answers] == [FINE, FINE]
    compilers.close()
    assert [worker.closed for worker in workers] == [1, 1]


def test_processes_are_ended_while_they_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hangs, and a second question waits for it: closing ends both."""
    path = tmp_path / "pid"
    code = f"import os, time\nopen({str(path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    compilers = Compilers([echo(monkeypatch, tmp_path, code)], 90)
    answer, waiting = compilers.ask(0, AttentionTile(16, 4, 2)), compilers.ask(0, AttentionTile(32, 4, 2))
    while not path.exists() or not path.read_text():
        time.sleep(0.02)
    compilers.close()
    assert answer.result(0) == {"fault": "the process ended"}
    assert waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_what_is_not_compiled_in_time_is_not_timed() -> None:
    released = threading.Event()

    def late(tile: AttentionTile) -> dict[str, Any]:
        released.wait(30)
        return FINE

    timer = Scripted(speed)
    run = search(Scripted(late), timer, left_s=0.5)
    assert run.best_of(DECODE) is None
    released.set()
    assert [attempt.outcome for attempt in run.tried] == ["was not compiled in time"]
    assert timer.tiles == []


def test_without_a_time_of_the_default_there_is_no_entry() -> None:
    timer = Scripted(lambda tile: {"fault": "ended"} if tile == DECODE.default(90) else speed(tile))
    assert search(Scripted(lambda tile: FINE), timer).best_of(DECODE) is None


def test_a_search_that_was_cut_short_is_no_entry() -> None:
    assert search(Scripted(lambda tile: FINE), Scripted(speed), left_s=-1).best_of(DECODE) is None


# --- what is kept -----------------------------------------------------------------------------------------------------


def scripted_tune(place: Place, monkeypatch: pytest.MonkeyPatch, only: Target = DECODE) -> dict[Any, Entry]:
    """tune() of one target with scripted workers."""
    place.out.mkdir(exist_ok=True)
    workers = {"compile": Scripted(lambda tile: FINE), "time": Scripted(speed)}
    monkeypatch.setattr(tune_kernels, "Worker", lambda kind, device, log: workers[kind])
    monkeypatch.setattr(tune_kernels, "targets", lambda is_small: [only])
    return tune_kernels.tune(place, "cuda:0", ("decode",), time.monotonic() + 900)[1]


def test_the_table_gets_the_winner_over_what_it_had_and_the_engine_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Entry(replace_key(), AttentionTile(32, 4, 2), tiles.Trial("NVIDIA H200", "old", "2026-01-01", 5.0, 6.0))
    stale = Entry(DECODE.key(90), AttentionTile(32, 4, 2), old.trial)
    (tmp_path / "tiles.json").write_text(json.dumps(tiles.document_of({e.key: e for e in (old, stale)})))
    scripted_tune(Place(tmp_path, tmp_path / "tiles.json", WHERE), monkeypatch)
    read = tiles.read_tiles(tmp_path / "tiles.json")
    assert read[old.key] == old
    new = read[DECODE.key(90)]
    assert new.tile == AttentionTile(128, 8, 2, programs=6)
    # the default takes 200 us less one per program, of which it has 3
    assert (new.trial.gpu, new.trial.commit, new.trial.us, new.trial.default_us) == ("NVIDIA H200", "c0ffee", 94, 197)
    monkeypatch.setattr(configs, "TILES", tmp_path / "tiles.json")
    configs.tuned.cache_clear()
    assert configs.decode_tile(*_LLAMA, group=4, block_size=16) == new.tile
    configs.tuned.cache_clear()


def replace_key() -> tiles.Key:
    return DECODE.key(90)._replace(head_dim=64)


def test_a_table_that_is_not_there_begins_as_the_checked_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, tmp_path / "tiles.json", WHERE)
    new = scripted_tune(place, monkeypatch)
    assert tiles.read_tiles(place.table) == {**tiles.read_tiles(configs.TILES), **new}


def test_everything_that_was_tried_is_in_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_tune(Place(tmp_path, tmp_path / "tiles.json", WHERE), monkeypatch)
    with (tmp_path / "tuning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(DECODE.candidates(90)) + 12
    assert rows[0]["metric"] == "decode 128/4 16-bit block 16 sm_90, M 16 N 64 w4 s3 programs 3"
    assert (rows[0]["value"], rows[0]["n"], rows[0]["unit"], rows[0]["gpu"]) == ("197.0", "3", "us", "NVIDIA H200")
    assert (rows[0]["registers"], rows[0]["outcome"]) == ("80", "timed")


def test_a_damaged_table_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiles.json").write_text("{")
    monkeypatch.setattr(tune_kernels, "machine", lambda device, commit: WHERE)
    assert tune_kernels.main([str(tmp_path / "out"), "--table", str(tmp_path / "tiles.json")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tune_kernels.py: error: tiles.json is not JSON (")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "OUT: missing; name a folder for the results"),
        (["{tmp}/out", "--budget", "-3"], "--budget must be above 0 (-3)"),
        (["{tmp}/out", "--kernels", "decode,moe"], "--kernels: 'moe' is none; there are decode, prefill, latent"),
        (
            ["{tmp}/out", "--table", str(configs.TILES)],
            f"--table: {configs.TILES} is what the engine reads, and a CPU has timed nothing; name another file",
        ),
        (
            ["{tmp}/out", "--table", str(configs.TILES.parent / ".." / "kernels" / "tiles.json")],
            f"--table: {configs.TILES.parent / '..' / 'kernels' / 'tiles.json'} is what the engine reads, and a CPU "
            "has timed nothing; name another file",
        ),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    argv = [word.format(tmp=tmp_path) for word in arguments]
    assert tune_kernels.main([*argv, "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"tune_kernels.py: error: {error}\n"
    assert not (tmp_path / "out").exists()


def test_a_budget_that_ends_before_the_first_entry_is_an_early_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_kernels, "Worker", lambda kind, device, log: Scripted(speed))
    assert tune_kernels.main([str(tmp_path), "--device", "cpu", "--budget", "1e-9"]) == 4
    assert "0 candidates, 0 entries" in capsys.readouterr().out
    assert not (tmp_path / "tiles.json").exists()


# --- the processes ----------------------------------------------------------------------------------------------------


def echo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> Worker:
    worker = Worker("time", "cpu", tmp_path / "log")
    monkeypatch.setattr(worker, "_argv", [sys.executable, "-S", "-c", code])
    return worker


def test_a_process_that_ends_costs_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, os, json\nfor line in sys.stdin:\n"
    code += "    if json.loads(line) == 'die': os.abort()\n    print(line, end='', flush=True)"
    worker = echo(monkeypatch, tmp_path, code)
    assert worker.ask({"a": 1}) == {"a": 1}
    assert worker.ask("die") == {"fault": "the process ended"}
    assert worker.ask({"a": 2}) == {"a": 2}
    worker.close()


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pid"
    code = f"import os, time\nopen({str(path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    worker = echo(monkeypatch, tmp_path, code)
    assert worker.ask({}, limit_s=0.1) == {"fault": "no answer in 1 s"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_it_tunes_in_the_interpreter_and_the_engine_reads_none_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled for sm_90 in one process, run in another: one candidate needs more shared memory than there is."""
    argv = [str(tmp_path), "--device", "cpu", "--kernels", "decode", "--commit", "c0ffee", "--budget", "120"]
    assert tune_kernels.main(argv) == 0
    out, err = capsys.readouterr()
    assert "5 candidates, 1 entries of a trial without a GPU" in out
    assert "a CPU has timed nothing" in err
    with (tmp_path / "tuning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"].split()[0] for row in rows] == ["timed", "timed", "takes", "timed", "timed"]
    assert all(math.isfinite(float(row["error"])) for row in rows if row["value"])
    assert {row["gpu"] for row in rows} == {"cpu"}
    document = json.loads((tmp_path / "tiles.json").read_text())
    assert document["entries"][0]["found"]["gpu"] == "none: Triton's interpreter"
    with pytest.raises(InvalidInputError, match=r"^tiles\.json is not kvplan/tiles@1; make it anew"):
        tiles.read_tiles(tmp_path / "tiles.json")


def test_the_assembler_counts_what_the_disassembler_counts() -> None:
    """Registers and stack of a prefill tile that spills and of a decode tile that does not, on two architectures."""
    code = """
import json, tempfile
from pathlib import Path
from benchmarks import tune_kernels as tune
from engine.kernels.tiles import AttentionTile
compiler, known, found = tune.Compiler(), tune.targets(is_small=False), []
for target, tile, arch in ((known[0], known[0].default(90), 90), (known[2], AttentionTile(128, 8, 3, 128), 89)):
    compiler.answer(target, tile, arch)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        found += [(tune.cuobjdump_usage(k, folder), tune.ptxas_usage(k, folder)) for k in compiler._kernels]
print(json.dumps(found))
"""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert all(disassembled == assembled for disassembled, assembled in counts)
    assert any(stack > 0 for (_, stack), _ in counts)
    assert any(stack == 0 for (_, stack), _ in counts)
