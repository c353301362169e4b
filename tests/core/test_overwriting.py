"""What --report and its kin may write over: kvplan's own documents, and with --force the rest; never an input."""

import json
from pathlib import Path

import pytest

from tests.support.cli import Run, config_file, refused, run
from tests.support.parts import some
from tests.support.recorded_runs import cpu_run

__all__ = ["run"]

GPU = ("--gpu", "h200", "--ctx", "4k")
USERS = ("--ctx", "4k", "--users", "3")
TRACE = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n"
POLICY = """\
version: 1
targets:
  - {id: a, model: llama-3.1-8b, gpu: h200, max_model_len: 4k, rules: {fits: true}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path / "m")
    cpu_run(tmp_path / "run")
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    (tmp_path / "kvplan.policy.yaml").write_text(POLICY, encoding="utf-8")
    (tmp_path / "prices.yaml").write_text("h200: 3.5\n", encoding="utf-8")
    return tmp_path


# Every command that writes a file, with the option it does that with, and the suffixes of its formats.
WRITERS = {
    "estimate": (("estimate", "m", *GPU), "--report", ("json", "csv", "md")),
    "sweep": (("sweep", "m", *GPU), "--report", ("json", "csv", "md")),
    "sweep's figure": (("sweep", "m", *GPU), "--figure", ("svg", "png")),
    "recommend": (("recommend", "m", "--gpus", "h200", *USERS), "--report", ("json", "csv", "md")),
    "fit": (("recommend", "m", "--gpu", "h200", *USERS), "--report", ("json", "csv", "md")),
    "diff": (("diff", "m", "llama-3.1-8b", *GPU), "--report", ("json", "csv", "md")),
    "simulate": (("simulate", "m", *GPU, "--trace", "trace.csv"), "--report", ("json", "csv", "md")),
    "its timeline": (("simulate", "m", *GPU, "--trace", "trace.csv"), "--timeline", ("csv",)),
    "its requests": (("simulate", "m", *GPU, "--trace", "trace.csv"), "--requests", ("csv",)),
    "its figure": (("simulate", "m", *GPU, "--trace", "trace.csv"), "--figure", ("svg", "png")),
    "check": (("check",), "--report", ("json", "md", "xml", "sarif")),
    "report": (("report", "run"), "-o", ("html", "json", "csv", "md")),
    "calibrate": (("reconcile", "run"), "--calibrate", ("json",)),
}  # fmt: skip
FOREIGN = {
    "json": '{"model_type": "llama", "schema": "kvplan/plan@1"}', "csv": TRACE, "md": "# Notes\n", "html": "<html>",
    "svg": "<svg/>", "png": "\x89PNG", "xml": '<testsuites name="pytest">', "sarif": '{"$schema": "sarif", "runs": []}',
}  # fmt: skip


@pytest.mark.parametrize("name", some(WRITERS, WRITERS.keys() - {"its figure", "its requests", "report"}))
def test_own_documents_are_replaced_and_nothing_else_is(name: str, here: Path, run: Run) -> None:
    argv, flag, suffixes = WRITERS[name]
    targets = [here / f"out.{suffix}" for suffix in suffixes]
    are_repeatable = flag in ("--report", "-o")
    for together in [targets] if are_repeatable else [[target] for target in targets]:
        command = [*argv, *(word for target in together for word in (flag, target))]
        assert run(*command).code == 0
        assert run(*command).code == 0, "its own document, written a moment ago"
    for target, suffix in zip(targets, suffixes, strict=True):
        target.write_text(FOREIGN[suffix], encoding="utf-8")
        message = refused(run(*argv, flag, target))
        assert message.endswith(
            "already exists and was not written by kvplan; name another file, or replace it with --force"
        ), message
        assert target.read_text(encoding="utf-8") == FOREIGN[suffix]
    assert run(*argv, flag, targets[0], "--force").code == 0
    assert targets[0].read_bytes() != FOREIGN[suffixes[0]].encode()


@pytest.mark.parametrize(
    ("argv", "target"),
    [
        (("estimate", "m/config.json", *GPU), "m/config.json"),
        (("estimate", "m", *GPU), "run/run.json"),
        (("report", "run"), "run/run.json"),
        (("simulate", "m", *GPU, "--trace", "trace.csv"), "trace.csv"),
    ],
)
def test_inputs_and_runs_stay_as_they_are(argv: tuple[str, ...], target: str, here: Path, run: Run) -> None:
    before = (here / target).read_bytes()
    message = refused(run(*argv, "-o" if argv[0] == "report" else "--report", target))
    assert message.startswith(("--report ", "--output "))
    assert (here / target).read_bytes() == before


def test_an_own_document_that_is_an_input_is_kept(here: Path, run: Run) -> None:
    assert run("estimate", "m", *GPU, "--report", "old.json").code == 0
    assert run("estimate", "m", *GPU, "--report", "new.json").code == 0
    (here / "link.json").symlink_to("old.json")
    before = (here / "old.json").read_bytes()
    for target in ("old.json", "./old.json", here / "old.json", "link.json"):
        message = refused(run("diff", "old.json", "new.json", "--report", target))
        assert message == f"--report {target} is an input of this command; name another file"
        assert (here / "old.json").read_bytes() == before
    assert run("diff", "old.json", "new.json", "--report", "old.json", "--force").code == 0
    assert json.loads((here / "old.json").read_text(encoding="utf-8"))["schema"] == "kvplan/diff@1"


def test_the_baseline_is_no_place_for_a_report_but_for_its_update(here: Path, run: Run) -> None:
    (here / "kvplan.policy.yaml").write_text(POLICY + "baseline: {file: base.json}\n", encoding="utf-8")
    assert run("check", "--update-baseline").code == 0
    assert run("check", "--update-baseline").code == 0
    assert "is an input" in refused(run("check", "--report", "base.json"))
    assert run("check").code == 0


def test_what_one_command_read_another_may_replace(here: Path, run: Run) -> None:
    assert run("estimate", "m", *GPU, "--report", "old.json").code == 0
    assert run("diff", "old.json", "old.json").code == 0
    assert run("estimate", "m", *GPU, "--report", "old.json").code == 0


def test_an_empty_file_is_no_loss(here: Path, run: Run) -> None:
    (here / "new.json").touch()
    assert run("estimate", "m", *GPU, "--report", "new.json").code == 0
