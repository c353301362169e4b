"""A command that fails under --format json says why as JSON, too; the line and the exit code are as without it."""

from pathlib import Path

import jsonschema
import pytest

from kvplan.cli import estimate
from kvplan.documents.schema import document_schema
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FAILING = [
    ("estimate", "llama-9"),
    ("estimate", "llama-3.1-8b", "--gpu", "a1000"),
    ("estimate", "llama-3.1-8b", "--gpuz", "a100-80g"),
    ("sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--tp", "x"),
    ("recommend", "llama-3.1-8b", "--users", "0"),
    ("simulate", "llama-3.1-8b", "--gpu", "a100-80g"),
    ("models", "llama-9"),
    ("gpus", "a1000"),
    ("diff", "none.json", "other.json"),
    ("reconcile", "no-such-run"),
    ("reconcile", "--log", "no-such.log"),
    ("trace", "stats", "no-such-trace.csv"),
]  # fmt: skip


@pytest.mark.parametrize("line", FAILING, ids=" ".join)
def test_why_a_command_fails_is_a_document(line: tuple[str, ...], run: Run) -> None:
    plain, ran = run(*line), run(*line, "--format", "json")
    assert (ran.code, ran.err) == (plain.code, plain.err)
    assert plain.out == ""
    jsonschema.Draft202012Validator(document_schema("error")).validate(ran.json)
    assert ran.json["exit_code"] == ran.code
    words = [ran.json["subject"], ran.json["problem"], ran.json["remedy"]]
    colon = "" if words[1].startswith(("is ", "must ")) else ":"  # none between a subject and its verb
    assert ran.errors == [f"kvplan: error: {words[0]}{colon} {words[1]}; {words[2]}"]


def test_the_place_in_a_file_is_a_field(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{", encoding="utf-8")
    ran = run("estimate", config, "--gpu", "a100-80g", "--format=json")
    assert ran.json["subject"].startswith(str(config))
    assert ran.json["mark"] is None


def test_a_crash_is_a_document_of_its_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: object) -> int:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(estimate, "estimate", broken)
    ran = run("estimate", "llama-3.1-8b", "--format", "json")
    assert (ran.code, ran.json["exit_code"], ran.json["subject"]) == (70, 70, "internal error")


def test_a_check_that_fails_has_one_document(run: Run) -> None:
    ran = run("check", "no-such.yaml", "--format", "json")
    assert ran.json["schema"] == "kvplan/check-failure@1"


def test_nothing_is_added_in_another_format(run: Run) -> None:
    assert run("estimate", "llama-9", "--format", "csv").out == ""
    assert run("estimate", "llama-9", "--format", "json", "--format", "table").out == ""
