"""A check that could not be made says so in every format, and where: none of them reads as a check that passed."""

import datetime
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import JUnitXml
from junitparser.junitparser import Error
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as SarifLog

from kvplan.cli import check
from kvplan.cli.check import rendered as rendered_failure
from kvplan.core.errors import InvalidInputError, Mark
from kvplan.core.files import path_text
from kvplan.documents.schema import document_schema
from kvplan.policy.result import CHECK, CheckFailure, figures_by_target
from tests.policy.test_policy_reports import NASTY, anything, read_command, rendered
from tests.support.cli import Ran, Run
from tests.support.cli import run as run  # the fixture
from tests.support.policies import policy

FORMATS = ("json", "markdown", "github", "junit", "sarif")

SOON = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)
# What is wrong -> the policy's text, the place of the fault, and how its one line begins behind that place.
FAULTS = {
    "an unknown key": ("version: 1\ntargets: [{id: a, modle: x}]\n", (2, 19), "target has no key 'modle'"),
    "no YAML": ("version: 1\ntargets: [\n", (3, 1), "the file is not YAML"),
    "an unknown model": (
        "version: 1\ntargets:\n- id: a\n  model: lama, 50%:x\n  gpu: l4\n  rules: {fits: true}\n",
        (4, 10), "target a: model 'lama, 50%:x': not in the catalog",
    ),
    "a damaged baseline": (
        "version: 1\ntargets:\n- {id: a, model: llama-3.1-8b, gpu: l4, rules: {fits: true}}\n"
        "baseline: {file: kvplan.policy.yaml, max_growth: {weights: 1%}}\n",
        (4, 12), "baseline: kvplan.policy.yaml: line 1 column 1: not JSON",
    ),
    "an idle waiver": (
        "version: 1\ntargets:\n- {id: a, model: llama-3.1-8b, gpu: l4, rules: {fits: true}}\n"
        f"waivers: [{{rule: b/fits, reason: x, expires: {SOON}}}]\n",
        (4, 18), "waiver b/fits: matches no rule",
    ),
    "no file": (None, None, "kvplan.policy.yaml: no such file or directory; check the path"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


def broken(folder: Path, text: str | None) -> str:
    if text is not None:
        (folder / "kvplan.policy.yaml").write_text(text, encoding="utf-8")
    return "kvplan.policy.yaml"


def line_of(ran: Ran) -> str:
    """The one line on standard error, which no format changes."""
    (line,) = ran.errors
    assert ran.err == f"{line}\n"
    return line.removeprefix("kvplan: error: ")


@pytest.mark.parametrize("fault", FAULTS)
def test_github_annotates_what_cannot_be_read_at_its_place(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    text, place, begins = FAULTS[fault]
    path = broken(folder, text)
    summary = folder / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ran = run("check", path, "--format", "github")
    assert ran.code == 2
    message = line_of(ran)
    prefix = "" if place is None else f"{path}:{place[0]}:{place[1]}: "
    assert message.startswith(prefix + begins)
    name, properties, data = read_command(ran.out.removesuffix("\n"))
    where = {} if place is None else {"line": str(place[0]), "col": str(place[1])}
    assert (name, properties) == ("error", {"file": path, **where, "title": "kvplan"})
    assert prefix + data == message
    assert "could not run, no rule was checked" in summary.read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_format_and_report_says_that_the_check_failed_and_why(run: Run, folder: Path, fault: str) -> None:
    text, place, begins = FAULTS[fault]
    path = broken(folder, text)
    plain = run("check", path)
    assert (plain.code, plain.out) == (2, "")  # a person reads standard error
    reports = {"json": "a.json", "markdown": "a.md", "junit": "a.xml", "sarif": "a.sarif"}
    words = [word for name in reports.values() for word in ("--report", name)]
    outputs = {form: run("check", path, "--format", form, *words) for form in FORMATS}
    for form, ran in outputs.items():
        assert (ran.code, ran.err) == (2, plain.err)
        if form in reports:
            assert (folder / reports[form]).read_text(encoding="utf-8") == ran.out

    document = outputs["json"].json
    jsonschema.Draft202012Validator(document_schema("check-failure")).validate(document)
    assert document["message"].startswith(begins)
    assert (document["line"], document["column"], document["exit_code"]) == (*(place or (None, None)), 2)
    assert document["schema"] != CHECK  # no reader of answers takes it for one
    with pytest.raises(InvalidInputError):
        figures_by_target(document, "a.json")

    (suite,) = JUnitXml.fromstring(outputs["junit"].out.encode())
    assert (suite.tests, suite.errors, suite.failures) == (1, 1, 0)
    ((case,),) = [list(suite)]
    (error,) = case.result
    assert isinstance(error, Error)
    assert error.message == document["message"]

    sarif = read_sarif(outputs["sarif"].out)
    (invocation,) = sarif["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"], sarif["results"]) == (False, 2, [])
    (notification,) = invocation["toolExecutionNotifications"]
    assert (notification["level"], notification["message"]["text"]) == ("error", document["message"])
    (location,) = notification["locations"]
    region = {} if place is None else {"region": {"startLine": place[0], "startColumn": place[1]}}
    artifact = {"uri": path, "uriBaseId": "%SRCROOT%"}
    assert location["physicalLocation"] == {"artifactLocation": artifact, **region}

    assert outputs["markdown"].out.splitlines()[0] == f"<!-- kvplan-check: {path} -->"  # replaces an earlier comment


def read_sarif(text: str) -> dict[str, Any]:
    SarifLog.model_validate_json(text)
    (only,) = json.loads(text)["runs"]
    return dict(only)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--today", "soon"), "--today: not a date"),
        (("--tp", "2"), "--tp works only with --init"),
        (("--report", "a.txt"), "--report a.txt: unknown file type"),
    ],
)
def test_a_flag_that_cannot_be_used_is_annotated_too(
    run: Run, folder: Path, words: tuple[str, ...], message: str
) -> None:
    ran = run("check", policy(folder), "--format", "github", *words)
    assert ran.code == 2
    assert line_of(ran).startswith(message)
    assert read_command(ran.out.strip())[2] == line_of(ran)


def test_a_hub_out_of_reach_and_a_bug_are_no_answers_either(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = policy(folder, "  model: nobody/nothing-of-that-name\n  gpu: l4\n")
    ran = run("check", path, "--offline", "--format", "json", "--report", "a.sarif")
    assert (ran.code, ran.json["exit_code"], ran.json["line"]) == (3, 3, 4)
    assert read_sarif((folder / "a.sarif").read_text(encoding="utf-8"))["invocations"][0]["exitCode"] == 3

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(check, "checked", fails)
    ran = run("check", path, "--format", "json", "--report", "a.sarif")
    assert (ran.code, ran.json["exit_code"]) == (70, 70)
    assert ran.json["message"].startswith("internal error: ZeroDivisionError: planted; a bug in kvplan")
    assert read_sarif((folder / "a.sarif").read_text(encoding="utf-8"))["invocations"][0]["exitCode"] == 70


def test_a_report_of_an_earlier_check_does_not_stand_beside_one_that_failed(run: Run, folder: Path) -> None:
    path = policy(folder)
    words = ("check", path, "--report", "a.xml", "--report", "a.json")
    assert run(*words).code == 0
    path.write_text("version: 1\n", encoding="utf-8")
    assert run(*words).code == 2
    assert '<error message="policy has no targets' in (folder / "a.xml").read_text(encoding="utf-8")
    assert sorted(file.name for file in folder.iterdir()) == ["a.json", "a.xml", "kvplan.policy.yaml"]


@settings(max_examples=100, deadline=None)
@given(anything, anything.map(lambda path: path_text(Path(path))), st.booleans())
def test_any_message_and_path_is_written_in_every_format_and_read_back(message: str, path: str, marked: bool) -> None:
    failure = CheckFailure(path, message, 2, Mark(path, 3, 4) if marked else None)
    assert json.loads(rendered_failure("json", failure))["message"] == message
    line = rendered_failure("github", failure).removesuffix("\n")
    assert line.isprintable()
    assert read_command(line)[0] == "error"
    (suite,) = JUnitXml.fromstring(rendered_failure("junit", failure).encode())
    assert suite.errors == 1
    assert read_sarif(rendered_failure("sarif", failure))["results"] == []
    page = rendered(rendered_failure("markdown", CheckFailure(path, NASTY + message, 2)))
    assert not set(page.tags) & {"a", "img", "script", "em", "code", "s"}
