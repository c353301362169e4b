"""A run, a log and a page are figures by component of one type, held against a plan by one function."""

from pathlib import Path

import pytest

from kvplan.core.limits import Limits
from kvplan.measure.reconcile import COMPONENTS, measured_bytes, reconcile_run
from kvplan.measure.rundir import load_run
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, compared, exceeds, reconcile
from tests.measure.test_server_metrics import SGLANG_PAGE, VLLM_PAGE
from tests.support.cli import Run, run
from tests.support.recorded_runs import cpu_run, gpu_run
from tests.support.server_logs import H100, LLAMA_3090, OSS, SGLANG

__all__ = ["run"]


def test_a_row_for_each_component_and_no_other() -> None:
    measured = Measurement("log", (Figure("weights", "bytes", 100, 5.0), Figure("tokens", "tokens", None, note="no")))
    rows = reconcile({"weights": Prediction(104, "exact"), "blocks": Prediction(7)}, measured)
    assert rows == (
        ComponentRow("weights", "bytes", 104, 100, 5.0, "exact"),
        ComponentRow("tokens", "tokens", None, None, why="no"),
    )
    assert compared(rows) == [rows[0]]


@pytest.mark.parametrize(
    ("predicted", "measured", "rounding", "exact", "relative"),
    [
        (104, 100, 5.0, True, 0.04),  # within half of the last digit
        (106, 100, 5.0, False, 0.06),
        (0, 0, 0.0, True, 0.0),
        (3, 0, 0.0, False, None),  # a share of nothing
        (None, 5, 0.0, None, None),
    ],
)
def test_what_agrees_and_how_far_off_the_rest_is(
    predicted: int | None, measured: int, rounding: float, exact: bool | None, relative: float | None
) -> None:
    row = ComponentRow("weights", "bytes", predicted, measured, rounding)
    assert (row.is_exact, row.relative) == (exact, relative)


def test_a_limit_is_passed_by_what_the_digits_leave_open_and_by_nothing_else() -> None:
    rows = [("a", ComponentRow("a", "bytes", 106, 100, 5.0)), ("b", ComponentRow("b", "bytes", 104, 100, 5.0))]
    rows += [("c", ComponentRow("c", "bytes", 3, 0)), ("d", ComponentRow("d", "tokens", None, 1))]
    assert exceeds(rows, Limits(0.02)) == ["a +6.0%", "c 3 B, measured none"]
    assert exceeds(rows, Limits(None, {"b": 0.01})) == []


def test_a_runs_measured_rows_are_every_component_and_add_up(tmp_path: Path) -> None:
    for number, recorded in enumerate((cpu_run, gpu_run)):
        loaded = load_run(recorded(tmp_path / str(number)))
        measured = measured_bytes(loaded)
        assert [figure.component for figure in measured.measurement.figures] == list(COMPONENTS)
        assert (
            sum(figure.value or 0 for figure in measured.measurement.figures) == measured.reported + measured.unreached
        )
        assert all(
            isinstance(row, ComponentRow) for row in (*reconcile_run(loaded).rows, *reconcile_run(loaded).capacity)
        )


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (LLAMA_3090, ()),
        (H100, ()),
        (OSS, ()),
        (SGLANG, ()),
        (VLLM_PAGE, ("--engine", "vllm@0.11", "--model", "llama-3.1-8b")),
        (SGLANG_PAGE, ("--engine", "sglang@0.5", "--model", "llama-3.1-8b")),
    ],
    ids=["vllm", "h100", "gpt-oss", "sglang", "vllm's page", "sglang's page"],
)
def test_what_is_missing_is_missing_from_what_was_read(
    text: str, options: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "source"
    path.write_text(text, encoding="utf-8")
    is_page = bool(options)
    ran = run("reconcile", "--metrics" if is_page else "--log", path, *options, "--format", "json")
    assert ran.code == 0, ran.err
    rows = [*ran.json["rows"], *ran.json["given"]]
    here, elsewhere = ("on the page", "in the log") if is_page else ("in the log", "on the page")
    assert not [row for row in rows if elsewhere in (row["why"] or "")]
    for row in rows:
        assert (row["why"] == f"not {here}") <= (row["logged"] is None)
        assert row["logged"] is not None or row["why"]
