"""reports/goals.md is what the code makes of the committed evidence; only a GPU's numbers meet a goal."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals
from benchmarks.goals import GOALS, NAMES, Evidence, Measured

HOW = {"stage": "kernels", "commit": "c0ffee", "utc": "2026-11-23T10:00:00+00:00"}


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def summary(path: Path, numbers: dict[str, float], device: str = "NVIDIA H200") -> Path:
    kernels = {"name": "kernels", "status": "ok", "numbers": {"goals": numbers}, "rows": [], **HOW}
    rows = [
        {"metric": "decode B=64 L=2048: output", "value": 12_000.0},
        {"metric": "decode B=64 L=2048: of the limit", "value": 0.83},
    ]
    decode = {"name": "decode", "status": "ok", "numbers": {}, "rows": rows, "commit": "beef", "utc": "2026-11-24"}
    return write(path, {"schema": "kvplan/gpu@1", "device": device, "stages": [kernels, decode]})


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """reports/ with nothing measured."""
    monkeypatch.setattr(goals, "EVIDENCE", write(tmp_path / "goals.json", {"schema": "kvplan/goals@1", "measured": {}}))
    monkeypatch.setattr(goals, "PAGE", tmp_path / "goals.md")
    return tmp_path


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """(measured, met) by the goal's first words."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    return {what: (measured, met) for what, _, measured, met in cells[2:]}


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_committed_page_is_made_of_the_committed_evidence() -> None:
    assert goals.PAGE.read_text(encoding="utf-8") == goals.page(goals.read_evidence(goals.EVIDENCE))


def test_the_page_has_all_goals_and_no_number_that_no_gpu_has_measured() -> None:
    page = goals.page(Evidence(None, {}))
    rows = rows_of(page)
    assert len(rows) == len(GOALS) == 9
    assert set(rows.values()) == {("not yet run on a GPU", "")}
    assert "Measured on: no GPU yet." in page
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize(
    ("numbers", "measured", "met"),
    [
        ({"decode-bandwidth": 0.85, "decode-peer": 1.0}, "85%; 1.00x", "yes"),
        ({"decode-bandwidth": 0.849, "decode-peer": 1.3}, "85%; 1.30x", "no"),
        ({"decode-bandwidth": 0.9, "decode-peer": 0.99}, "90%; 0.99x", "no"),
        ({"decode-bandwidth": 0.9}, "90%; not yet run on a GPU", "in part"),
        ({"decode-bandwidth": 0.5}, "50%; not yet run on a GPU", "no"),
    ],
)
def test_a_goal_is_met_when_all_of_its_numbers_are_there_and_in_bounds(
    numbers: dict[str, float], measured: str, met: str
) -> None:
    """85 % of the bandwidth and no slower than the best peer."""
    (found,) = [cells for cells in goals.cells(numbers) if cells[0].startswith("paged decode attention")]
    assert found[2:] == (measured, met)


@pytest.mark.parametrize(
    ("name", "just", "missed"),
    [
        ("decode-fp8-bandwidth", 0.75, 0.74),
        ("decode-fp8-error", 3e-4, 4e-4),
        ("decode-single-peer", 1.2, 1.21),
        ("decode-single-bandwidth", 0.6, 0.59),
        ("prefill-matmul", 0.5, 0.49),
        ("decode-roofline", 0.8, 0.79),
        ("nano-vllm", 25_000, 24_999),
        ("transformers-single", 24, 23.9),
        ("paged-contiguous", 3.5, 3.4),
        ("paged-waste", 0.03, 0.05),
        ("contiguous-waste", 0.61, 0.59),
        ("prefix", 0.45, 0.44),
    ],
)
def test_each_number_has_its_limit(name: str, just: float, missed: float) -> None:
    (need,) = (need for goal in GOALS for need in goal.needs if need.name == name)
    assert need.is_met(just)
    assert not need.is_met(missed)


# --- from a run -------------------------------------------------------------------------------------------------------


def test_a_run_on_a_gpu_fills_the_page(reports: Path) -> None:
    path = summary(reports / "summary.json", {"decode-bandwidth": 0.87, "decode-peer": 1.04, "prefill-matmul": 0.4})
    assert goals.main([str(path)]) == 0
    page = goals.PAGE.read_text()
    rows = {what.split(",")[0]: cells for what, cells in rows_of(page).items()}
    assert rows["paged decode attention"] == ("87%; 1.04x", "yes")
    assert rows["prefill attention"] == ("40%", "no")
    assert rows["decode"] == ("83%", "yes")  # a row of another stage
    assert rows["nano-vllm's workload"] == ("not yet run on a GPU", "")
    assert "Measured on: NVIDIA H200." in page
    assert "* stage decode, commit beef, 2026-11-24" in page
    assert page == goals.page(goals.read_evidence(goals.EVIDENCE))


def test_a_second_run_on_the_same_gpu_adds_and_one_on_another_begins_anew(reports: Path) -> None:
    goals.main([str(summary(reports / "a.json", {"prefill-matmul": 0.4, "prefix": 0.5}))])
    goals.main([str(summary(reports / "b.json", {"prefill-matmul": 0.6}))])
    known = goals.read_evidence(goals.EVIDENCE).measured
    assert {name: each.value for name, each in known.items()} == {
        "prefill-matmul": 0.6, "prefix": 0.5, "decode-roofline": 0.83,
    }  # fmt: skip
    goals.main([str(summary(reports / "c.json", {"prefill-matmul": 0.7}, device="NVIDIA H100"))])
    assert set(goals.read_evidence(goals.EVIDENCE).measured) == {"prefill-matmul", "decode-roofline"}


def test_a_stage_that_was_cut_off_counts_as_far_as_it_came(reports: Path) -> None:
    stage = {"name": "kernels", "status": "timeout", "numbers": {"goals": {"prefill-matmul": 0.51}}, **HOW}
    skipped: dict[str, Any] = {
        "name": "decode",
        "status": "skipped",
        "numbers": {},
        "rows": [],
        "commit": None,
        "utc": "",
    }
    document = {"schema": "kvplan/gpu@1", "device": "NVIDIA H200", "stages": [stage, skipped]}
    goals.main([str(write(reports / "summary.json", document))])
    assert goals.read_evidence(goals.EVIDENCE).measured == {"prefill-matmul": Measured(0.51, **HOW)}


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    evidence = Evidence("NVIDIA H200", {"prefix": Measured(0.5, **HOW)})
    goals.write_evidence(tmp_path / "goals.json", evidence)
    assert goals.read_evidence(tmp_path / "goals.json") == evidence


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_run_on_a_cpu_meets_no_goal(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = summary(reports / "summary.json", {"prefill-matmul": 0.9}, device="cpu")
    before = goals.EVIDENCE.read_text()
    assert goals.main([str(path)]) == 2
    assert "was measured on a CPU" in capsys.readouterr().err
    assert goals.EVIDENCE.read_text() == before
    assert not goals.PAGE.exists()


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"schema": "kvplan/run@1", "stages": []}, "is not kvplan/gpu@1; name the summary.json of benchmarks/gpu.py"),
        ({"schema": "kvplan/gpu@1", "device": "H200"}, "is not kvplan/gpu@1; name the summary.json"),
        (
            {"schema": "kvplan/gpu@1", "device": "H200", "stages": [{"name": "a", "numbers": {"goals": {"speed": 1}}}]},
            "'speed' is no goal; there are decode-bandwidth, ",
        ),
        (
            {
                "schema": "kvplan/gpu@1",
                "device": "H200",
                "stages": [{"name": "a", "numbers": {"goals": {"prefix": "1"}}}],
            },
            "prefix is no number (1); measure it anew",
        ),
        ({"schema": "kvplan/gpu@1", "device": "H200", "stages": [1]}, "stage 0 is no stage (1); name"),
        ({"schema": "kvplan/gpu@1", "device": "H200", "stages": [{"numbers": 3}]}, "stage 0 is no stage ("),
    ],
)
def test_what_is_no_summary_is_refused_in_one_line(
    reports: Path, capsys: pytest.CaptureFixture[str], document: Any, fault: str
) -> None:
    assert goals.main([str(write(reports / "summary.json", document))]) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"schema": "kvplan/goals@2", "measured": {}}, "is not kvplan/goals@1"),
        ({"schema": "kvplan/goals@1"}, "is not kvplan/goals@1"),
        ({"schema": "kvplan/goals@1", "gpu": "H200", "measured": {"prefix": {"value": 1}}}, "measured cannot be read"),
        ({"schema": "kvplan/goals@1", "gpu": "H200", "measured": {"prefix": 1}}, "measured cannot be read"),
        ({"schema": "kvplan/goals@1", "gpu": None, "measured": {"prefix": {"value": 1, **HOW}}}, "numbers and no GPU"),
        ({"schema": "kvplan/goals@1", "gpu": "H200", "measured": {"x": {"value": 1, **HOW}}}, "'x' is no goal"),
        (
            {"schema": "kvplan/goals@1", "gpu": "H200", "measured": {"prefix": {"value": True, **HOW}}},
            "prefix is no number (True)",
        ),
    ],
)
def test_damaged_evidence_is_refused_in_one_line(
    reports: Path, capsys: pytest.CaptureFixture[str], document: Any, fault: str
) -> None:
    write(goals.EVIDENCE, document)
    assert goals.main([]) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1
