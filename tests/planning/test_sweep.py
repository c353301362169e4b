"""A sweep has every combination once, in any number of processes, and knows which of them nothing beats."""

import io
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request
from kvplan.planning.sweep import Curves, Front, Grid, SweepRow, all_rows, check_size, front_of, portable, unusable
from kvplan.report import sweep_figures
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("llama-3.1-8b", "gpt-oss-20b")
GPUS = ("l40s", "h200")
CONTEXTS = (4096, 32768, 100_000)


def grid(**changes: Any) -> Grid:
    requests = tuple(
        Request(catalog.load(model), gpu(card), EngineArgs(max_model_len=context))
        for model in MODELS
        for card in GPUS
        for context in CONTEXTS
    )
    arguments = {"tensor_parallel_size": (1, 2, 3), "kv_cache_dtype": ("auto", "fp8"), "max_num_seqs": (64,)}
    usual = Grid(
        requests,
        (len(MODELS), len(GPUS), len(CONTEXTS)),
        (parse_engine("vllm@0.33"), parse_engine("vllm@0.11")),
        (1000, 3000),
        arguments,
        {"h200": 4.0},
    )
    return replace(usual, **changes)


def rows_of(combinations: Grid) -> list[SweepRow]:
    return [row for chunk in all_rows(combinations, jobs=1) for row in chunk]


# --- every combination ------------------------------------------------------------------------------------------------


def test_every_combination_is_there_once_in_the_order_of_its_values() -> None:
    expected = itertools.product(
        MODELS, GPUS, ("vllm@0.33", "vllm@0.11"), (1, 2, 3), ("auto", "fp8"), CONTEXTS, (1000, 3000)
    )
    rows = [
        (r.model, r.gpu, r.engine, r.tensor_parallel_size, r.kv_cache_dtype, r.max_model_len, r.mean_tokens)
        for r in rows_of(grid())
    ]
    assert rows == list(expected)


def test_a_combination_that_cannot_be_keeps_its_values_and_says_why() -> None:
    row = next(row for row in rows_of(grid()) if row.tensor_parallel_size == 3)
    assert not row.is_possible
    assert not row.fits
    assert row.reason is not None
    assert row.reason.startswith("--tp 3 does not divide the 32 attention heads of llama-3.1-8b")
    assert (row.max_num_seqs, row.num_gpus, row.users, row.weights) == (64, 3, None, None)


def test_one_that_does_not_fit_says_by_how_much() -> None:
    # 70.55 billion parameters of 2 bytes are 131 GiB, an L40S has 44.
    request = Request(catalog.load("llama-3.1-70b"), gpu("l40s"), EngineArgs(max_model_len=4096))
    (row,) = rows_of(Grid((request,), (1, 1, 1)))
    assert row.is_possible
    assert not row.fits
    assert row.users == row.num_blocks == row.tokens == 0
    assert row.reason == f"does not fit, {(row.deficit or 0) / 2**30:,.2f} GiB short"


def test_users_are_those_that_run_at_once_on_all_replicas() -> None:
    args = EngineArgs(max_model_len=4096, max_num_seqs=16, data_parallel_size=2)
    (row,) = rows_of(Grid((Request(catalog.load("llama-3.1-8b"), gpu("h200"), args),), (1, 1, 1)))
    assert (row.pool_users or 0) > 16  # more than the scheduler takes
    assert (row.users, row.users_low, row.users_high, row.num_gpus, row.users_per_gpu) == (32, 32, 32, 2, 16.0)


def test_prices_count_every_gpu() -> None:
    row = next(row for row in rows_of(grid()) if row.gpu == "h200" and row.tensor_parallel_size == 2)
    assert row.price_per_hour == 8.0  # two at 4 dollars
    assert row.users_per_dollar == (row.users or 0) / 8.0
    assert all(row.price_per_hour is None for row in rows_of(grid()) if row.gpu == "l40s")


@pytest.mark.parametrize("chunk", [7, 50])
def test_processes_find_the_same_rows_in_the_same_order(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("kvplan.planning.sweep.WORTH_PROCESSES", 10)
    shared = [row for part in all_rows(grid(), jobs=2, chunk=chunk) for row in part]
    assert shared == rows_of(grid())


def test_closing_a_sweep_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    monkeypatch.setattr("kvplan.planning.sweep.WORTH_PROCESSES", 10)
    rows = all_rows(grid(), jobs=2, chunk=5)
    next(rows)
    assert multiprocessing.active_children()
    rows.close()  # type: ignore[attr-defined] # a generator
    assert not multiprocessing.active_children()


def test_a_process_that_dies_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    monkeypatch.setattr("kvplan.planning.sweep.WORTH_PROCESSES", 10)
    rows = all_rows(grid(), jobs=2, chunk=1)
    first = next(rows)
    for child in multiprocessing.active_children():
        child.kill()
    assert [row for part in (first, *rows) for row in part] == rows_of(grid())
    assert not multiprocessing.active_children()


def test_a_grid_for_another_process_makes_the_same_rows() -> None:
    sent = pickle.loads(pickle.dumps(portable(grid())))
    assert sent.rows(0, 200) == grid().rows(0, 200)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full), (signal.SIGKILL, -9),
])  # fmt: skip
def test_no_process_is_left_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    contexts = ",".join(str(1024 + i) for i in range(1_000))
    seqs = ",".join(str(8 + i) for i in range(25))
    words = ["sweep", "llama-3.1-8b", "--gpu", "h200", "--ctx", contexts, "--max-num-seqs", seqs]
    line = "import sys; from kvplan.cli.main import run; run()"
    errors = tmp_path / "stderr"
    with errors.open("wb") as err:
        running = subprocess.Popen(
            [sys.executable, "-c", line, *words, "--jobs", "2", "--format", "csv"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
        )
    assert running.stdout is not None
    try:
        while running.stdout.readline().count(b",") and not len(session(running.pid)) > 2:
            pass  # until the processes are there
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # a terminal tells the whole group
        else:
            running.send_signal(number)
        running.stdout.close()
        assert running.wait(900) == code
        assert b"Traceback" not in errors.read_bytes()
        until = time.monotonic() + 900
        while session(running.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert session(running.pid) == []
    finally:
        for left in session(running.pid):
            os.kill(left, signal.SIGKILL)
        running.wait(900)


def session(number: int) -> list[int]:
    """The processes of a session that are no zombies."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == number and fields[0] != "Z":
            pids.append(int(folder.name))
    return pids


# --- what is refused --------------------------------------------------------------------------------------------------


def test_too_many_combinations_are_refused_before_the_work() -> None:
    check_size(2_000_000)
    with pytest.raises(UsageError, match=r"2,000,001 combinations are more than 2,000,000"):
        check_size(2_000_001)


def test_a_value_is_unusable_only_where_no_combination_can_use_it() -> None:
    # 3 divides neither 32 nor 64 heads; 100,000 tokens are within both models' 131,072.
    (reason,) = unusable(grid())
    assert reason.subject.startswith("tensor_parallel_size 3")
    assert unusable(grid(arguments={"tensor_parallel_size": (1, 2)})) == []


def test_what_a_class_does_not_support_is_a_row_unless_nothing_else_is_asked() -> None:
    """SGLang's class of Falcon-H1 passes no hidden states on: its model_runner.py starts no pipeline stages of it."""
    release = parse_engine("sglang")
    request = Request(catalog.load("falcon-h1-7b"), gpu("h100-80g"), EngineArgs(max_model_len=8192), release=release)
    both = Grid((request,), (1, 1, 1), arguments={"pipeline_parallel_size": (1, 2)})
    assert unusable(both) == []
    rows = both.rows(0, 2)
    assert [row.fits for row in rows] == [True, False]
    assert "has no pipeline stages" in (rows[1].reason or "")
    (reason,) = unusable(replace(both, arguments={"pipeline_parallel_size": (2,)}))
    assert "has no pipeline stages" in str(reason)


# --- what nothing beats -----------------------------------------------------------------------------------------------

FIGURES = st.tuples(st.integers(1, 6), st.integers(0, 5), st.sampled_from([None, 0.5, 1.0, 2.0]))


@given(st.lists(FIGURES, max_size=40))
def test_the_front_is_what_no_other_row_beats(figures: list[tuple[int, int, float | None]]) -> None:
    (template,) = rows_of(
        Grid((Request(catalog.load("llama-3.1-8b"), gpu("h200"), EngineArgs(max_model_len=4096)),), (1, 1, 1))
    )
    rows = [
        template._replace(
            max_model_len=context, users=users, users_per_gpu=float(users), users_per_dollar=worth and users * worth
        )
        for context, users, worth in figures
    ]
    front = Front()
    for number, row in enumerate(rows):
        front.offer(number, row)

    def values(row: SweepRow) -> tuple[float, ...]:
        return (row.max_model_len or 0, row.users_per_gpu or 0, row.users_per_dollar or 0)

    def is_beaten(row: SweepRow) -> bool:
        mine = values(row)
        return any(
            all(theirs >= own for theirs, own in zip(values(other), mine, strict=True)) and values(other) != mine
            for other in rows
            if other.users
        )

    assert sorted(itertools.chain(*front.ties)) == [i for i, row in enumerate(rows) if row.users and not is_beaten(row)]


def test_models_do_not_beat_one_another() -> None:
    front = Front()
    combinations = grid(arguments={}, releases=(), means=())
    for number, row in enumerate(rows_of(combinations)):
        front.offer(number, row)
    assert {combinations.row(number).model for number in itertools.chain(*front.ties)} == set(MODELS)


@given(st.lists(st.dictionaries(st.integers(1, 9), st.integers(1, 9).map(float), max_size=5), max_size=4))
def test_the_front_of_curves_falls_and_covers_every_point(curves: list[dict[int, float]]) -> None:
    front = front_of(curves)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(front))
    for context, value in ((c, v) for curve in curves for c, v in curve.items()):
        assert any(longer >= context and more >= value for longer, more in front)
    assert all(any(curve.get(context) == value for curve in curves) for context, value in front)


# --- the figure -------------------------------------------------------------------------------------------------------


def curves_of(combinations: Grid) -> tuple[Curves, list[SweepRow]]:
    curves, rows = Curves(), rows_of(combinations)
    for row in rows:
        curves.offer(row)
    return curves, rows


def one_model(**changes: Any) -> Grid:
    arguments = {"tensor_parallel_size": (1, 2), "kv_cache_dtype": ("auto", "fp8")}
    return grid(requests=grid().requests[:6], shape=(1, 2, 3), releases=(), means=(), arguments=arguments, **changes)


def test_a_curve_has_the_most_users_per_gpu_at_each_context() -> None:
    curves, rows = curves_of(one_model())
    per_gpu, per_dollar = sweep_figures.panels(curves)
    assert [label for label, _ in per_gpu.curves] == ["h200", "l40s"]  # the higher first
    for label, points in per_gpu.curves:
        for context, value in points:
            assert value == max(
                (row.users or 0) / row.num_gpus for row in rows if (row.gpu, row.max_model_len) == (label, context)
            )
    assert [label for label, _ in per_dollar.curves] == ["h200"]  # the only one with a price
    assert per_gpu.front == per_gpu.curves[0][1]  # the largest GPU leads everywhere here


def test_the_figure_draws_what_the_panels_hold() -> None:
    panels = sweep_figures.panels(curves_of(one_model())[0])
    figure = sweep_figures.draw(panels)
    for ax, panel in zip(figure.axes, panels, strict=True):
        drawn = {
            str(line.get_label()): [(int(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in ax.lines
        }
        assert drawn.pop("Pareto-optimal") == list(panel.front)
        assert drawn == {label: list(points) for label, points in panel.curves}
    colors = [{str(line.get_label()): line.get_color() for line in ax.lines} for ax in figure.axes]
    assert colors[0]["h200"] == colors[1]["h200"]  # whatever its place in the panel


def test_without_prices_there_is_one_panel_and_of_several_models_no_front() -> None:
    assert len(sweep_figures.panels(curves_of(one_model(prices={}))[0])) == 1
    both = sweep_figures.panels(curves_of(grid())[0])[0]
    assert both.front == ()
    assert ("llama-3.1-8b, h200" in dict(both.curves), len(both.curves)) == (True, 4)


def test_nothing_that_fits_is_a_figure_that_says_so() -> None:
    figure = sweep_figures.draw(sweep_figures.panels(Curves()))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no combination fits"]


@pytest.mark.parametrize(("format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_the_same_each_time(format: str, start: bytes) -> None:
    curves = curves_of(one_model())[0]
    picture = sweep_figures.picture(curves, format)
    assert picture.startswith(start)
    assert picture == sweep_figures.picture(curves, format)
    assert len(io.BytesIO(picture).getvalue()) > 1000
