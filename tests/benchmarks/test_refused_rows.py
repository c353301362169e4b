"""Scripts that read files of other people's results go on after a row that is refused, NaN, or 0."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scoreboard, timeboard
from benchmarks.timing import calibrated, fit, sweeps

TIMES: dict[str, Any] = {
    "src": "here", "engine": "vllm", "version": "0.12.0", "model": "llama-3.1-8b", "gpu": "h100-80g", "tp": 1,
    "dtype": "bfloat16", "kv_dtype": "auto", "num_prompts": 6, "input_len": 64, "output_len": 8, "range": 0.0,
    "measured": {"tpot_mean": 7.0, "ttft_p50": 20.0, "out_tps": 250.0},
}  # fmt: skip
GOOD = [{**TIMES, "id": f"good {users}", "load": {"users": users}} for users in (1, 2, 3, 4, 5, 6)]
FAULTS: list[dict[str, Any]] = [
    {"gpu": "nosuch"},
    {"model": "nosuch"},
    {"engine": "nosuch", "version": "9.9"},
    {"version": ""},
    {"tp": 3},
    {"input_len": 1e6},
    {"output_len": 1},
    {"output_len": 0},
    {"input_len": math.nan},
    {"range": math.nan},
    {"load": {"users": 0}},
    {"load": {"users": math.nan}},
    {"load": {"rate": 0}},
    {"load": {"rate": 1e-12}},
    {"load": {"rate": 1e12}},
    {"measured": {"tpot_mean": 0, "ttft_p50": 20.0}},
    {"measured": {"tpot_mean": math.nan, "ttft_p50": 20.0}},
    {"measured": {"tpot_mean": math.inf, "ttft_p50": 20.0}},
    {"measured": {"tpot_mean": -7.0, "ttft_p50": 20.0}},
    {"measured": {"tpot_mean": 1e-300, "ttft_p50": 1e-300, "out_tps": 1e300}},
]


def rows_of(folder: Path, *, count: int) -> Path:
    """Rows at fault among good ones, so that a script that stops has something left to read."""
    faulty = [{**TIMES, "id": f"fault {number}", "load": {"users": 2}, **fault} for number, fault in enumerate(FAULTS)]
    path = folder / "times.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*GOOD[:1], *faulty, *GOOD[1:count]]), "utf-8")
    return path


def test_the_board_of_times_reads_the_good_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeboard.main([str(rows_of(tmp_path, count=2)), "--json", str(tmp_path / "out.json")]) == 0
    ids = {row["id"] for row in json.loads((tmp_path / "out.json").read_text("utf-8"))["points"]}
    assert {"good 1", "good 2"} <= ids
    assert "nan" not in capsys.readouterr().out


def test_calibrated_times_read_the_good_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrated.main([str(rows_of(tmp_path, count=6)), "--json", str(tmp_path / "out.json")]) == 0
    assert "here: 1 servers" in capsys.readouterr().out


def test_sweeps_read_the_good_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.main([str(rows_of(tmp_path, count=6))]) == 0
    assert "1 sweeps of users" in capsys.readouterr().out


def test_the_fit_reads_the_good_rows(tmp_path: Path) -> None:
    cases = fit.cases_of([rows_of(tmp_path, count=6)])
    assert {f"good {users}" for users in (2, 3, 4, 5, 6)} <= {case.fact.id for case in cases}
    assert all(math.isfinite(error) for case in cases for error in fit.log_errors(case, fit.START).values())


@pytest.mark.parametrize("value", ["0", "nan", "inf", "-1", "1e-300", "x"])
def test_the_scoreboard_reads_the_rest_of_a_file(
    tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scoreboard.FACTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sglang = [row for row in rows if row["engine"] == "sglang"][:2]
    drawn = [*sglang, *[row for row in rows if row["engine"] == "vllm"][:2]]
    for name in [name for name in rows[0] if name.startswith("measured.")]:
        drawn += [{**row, name: value} for row in drawn[:4] if row[name]]
    path = tmp_path / "logs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([*drawn, {**sglang[0], "gpu": "nosuch"}, sglang[1]])
    assert scoreboard.main([str(path), "--facts", str(path), "--json", str(tmp_path / "out.json")]) == 0
    assert "predicted" in capsys.readouterr().out
