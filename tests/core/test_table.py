"""Every CSV is written in one place: names, logs and runs of strangers are neither formulas nor escape sequences."""

import ast
import csv
import io
from pathlib import Path

import pytest

from kvplan.core.table import csv_cell, csv_text
from tests.support.cli import Run, config_file, run
from tests.support.recorded_runs import cpu_run, rewritten
from tests.support.server_logs import LLAMA_3090

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[2]
# A directory may be called so: a formula, the title of a terminal, its bell, colors, and a line of its own.
NASTY = "=cmd|' C'!A0\x1b]0;pwned\x07\x1b[31m\r\n@SUM(1),\"x"
GPU = ("--gpu", "h200", "--ctx", "4k")


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "\x1b", "\x9b", "\u202e", "\0"])
def test_a_cell_is_no_formula_and_holds_no_control_character(sign: str) -> None:
    cell = csv_cell(f"{sign}1+1")
    assert isinstance(cell, str)
    assert cell.isprintable()
    assert cell[0] not in "=+-@＝\t\r"


def test_numbers_are_numbers() -> None:
    # What a spreadsheet takes for a number is one here: no sign is guarded, no digit lost.
    assert csv_text([(-1, 2.5, None, True, False, "a")]) == "-1,2.5,,true,false,a\n"


def commands(folder: Path) -> dict[str, list[str | Path]]:
    """A command for each kind of CSV, each with a hostile text where one can come from."""
    config_file(folder / NASTY)
    model, trace = NASTY, f"{NASTY}.csv"
    (folder / trace).write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n", encoding="utf-8")
    recorded = rewritten(cpu_run(folder / "run"), environment={"python": NASTY, "commit": NASTY, "platform": NASTY})
    log = folder / f"{NASTY}.log"
    log.write_text(f"{LLAMA_3090}{NASTY}\n", encoding="utf-8")
    return {
        "estimate": ["estimate", model, *GPU, "--format", "csv"],
        "sweep": ["sweep", model, *GPU, "--format", "csv"],
        "recommend": ["recommend", model, "--gpus", "h200", "--ctx", "4k", "--users", "3", "--format", "csv"],
        "diff": ["diff", model, "llama-3.1-8b", *GPU, "--format", "csv"],
        "simulate": ["simulate", model, *GPU, "--trace", trace, "--format", "csv"],
        "trace": ["trace", "stats", trace, "--format", "csv"],
        "models": ["models", "--format", "csv"],
        "gpus": ["gpus", "--format", "csv"],
        "report": ["report", recorded, "-o", folder / "run.csv"],
        "reconcile a run": ["reconcile", recorded, "--format", "csv"],
        "reconcile a log": ["reconcile", "--log", log, "--gpu", "rtx-3090", "--format", "csv"],
    }


@pytest.mark.parametrize("name", [
    "estimate", "sweep", "recommend", "diff", "simulate", "trace", "models", "gpus", "report", "reconcile a run",
    "reconcile a log",
])  # fmt: skip
def test_no_command_prints_a_formula_or_an_escape_sequence(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*commands(tmp_path)[name])
    assert ran.code == 0, ran.err
    text = (tmp_path / "run.csv").read_text(encoding="utf-8") if name == "report" else ran.out
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    cells = [cell for row in rows for cell in row]
    assert all(cell.isprintable() for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]
    assert not [cell for cell in cells if cell.startswith("-") and not is_number(cell)]


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_the_hostile_name_does_reach_the_tables(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    argvs = commands(tmp_path)
    for name in ("estimate", "sweep", "report"):
        ran = run(*argvs[name])
        text = (tmp_path / "run.csv").read_text(encoding="utf-8") if name == "report" else ran.out
        assert "'=cmd|" in text, name
        assert r"\x1b]0;pwned\x07\x1b[31m\r\n@SUM(1)" in text, name


def test_no_other_module_writes_csv() -> None:
    writers = [
        str(path.relative_to(ROOT))
        for folder in ("kvplan", "engine")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("csv.writer", "csv.DictWriter")
    ]
    assert writers == ["kvplan/core/table.py"]
