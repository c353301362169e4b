"""What is documented of `kvplan check` holds: its schema, the example, the workflow and the hook."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvplan.documents.schema import document_schema
from kvplan.report.policy_text import marker
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import EXAMPLE, EXAMPLE_DAY, follows_schema, policy
from tests.support.readme_blocks import ROOT


def test_the_example_follows_the_schema_of_a_policy() -> None:
    jsonschema.Draft202012Validator.check_schema(document_schema("policy"))
    assert follows_schema(EXAMPLE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("version: 1", "version: 2"),
        ("id: chat-prod", "id: chat prod"),
        ("fits: true", "fits: no"),
        ("min_concurrency: 12", "min_concurency: 12"),
        ("max_num_seqs: 128", "max_num_seqs: many"),
        ("max_weights: 16GiB", "max_weights: 5 potatoes"),
        ("min_headroom: warn", "min_headroom: error"),
        ("expires: 2027-03-31", "until: 2027-03-31"),
        ("kv_tokens: 5%", "tokens: 5%"),
    ],
)
def test_what_the_reader_refuses_does_not_follow_the_schema(run: Run, tmp_path: Path, right: str, wrong: str) -> None:
    path = tmp_path / "p.yaml"
    text = EXAMPLE.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    refused(run("check", path, "--today", EXAMPLE_DAY))
    assert not follows_schema(path)


def workflow() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kvplan-check.yml").read_text(encoding="utf-8"))
    return content


def steps_of_check() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = workflow()["jobs"]["check"]["steps"]
    return steps


def kvplan_words(command: str) -> list[str]:
    words = shlex.split(os.path.expandvars(command))
    assert words[:2] == ["kvplan", "check"]
    return words[1:]


def test_the_workflow_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one kvplan command, in a repository that has a policy; every file that later steps name is written."""
    assert set(workflow()["on"]) == {"pull_request", "push"}
    steps = steps_of_check()
    (command,) = [step["run"] for step in steps if step.get("run", "").startswith("kvplan")]
    later = steps[1 + next(i for i, step in enumerate(steps) if step.get("run") == command) :]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "kvplan.policy.yaml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    merge_request(tmp_path, monkeypatch)
    ran = run(*kvplan_words(command), "--today", EXAMPLE_DAY)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("::error file=kvplan.policy.yaml,line=")
    named = {step["with"]["sarif_file"] for step in steps if "sarif_file" in step.get("with", {})}
    named |= {name for step in steps for name in re.findall(r"[\w.]+\.(?:md|sarif|xml)", step.get("run", ""))}
    assert named == {"kvplan.md", "kvplan.sarif", "kvplan.xml"}
    assert all((tmp_path / name).stat().st_size for name in named)
    assert (tmp_path / "summary.md").stat().st_size
    assert all(runs_after(step["if"], tmp_path) for step in later)


def git(folder: Path, *argv: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *argv], cwd=folder, check=True, capture_output=True, timeout=900)


def merge_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's files on a branch, and a merge of a change into it, as GitHub checks a pull request out."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    git(folder, "checkout", "-qb", "change")
    git(folder, "commit", "-qm", "change", "--allow-empty")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "-m", "merge", "change")
    step = next(step for step in steps_of_check() if step.get("run", "").startswith("kvplan"))
    assert step["env"] == {"BASE": "${{ github.event_name == 'pull_request' && 'HEAD^1' || 'HEAD' }}"}
    assert steps_of_check()[0]["with"] == {"fetch-depth": 0}
    monkeypatch.setenv("BASE", "HEAD^1")


def test_the_workflow_refuses_a_pull_request_that_weakens_the_policy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It allows itself what it does; on the branch that it goes to the same is no change."""
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, rules="fits: true, min_concurrency: 12")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    git(tmp_path, "checkout", "-qb", "change")
    policy(tmp_path, rules="fits: true, min_concurrency: 2", more="allow_changes: [limit]\n")
    git(tmp_path, "commit", "-qam", "change")
    git(tmp_path, "checkout", "-q", "main")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", "change")
    (command,) = [step["run"] for step in steps_of_check() if step.get("run", "").startswith("kvplan")]
    monkeypatch.setenv("BASE", "HEAD^1")
    ran = run(*kvplan_words(command))
    assert ran.code == 1
    assert "::error file=kvplan.policy.yaml,line=7,col=23,title=KVP203 change.limit (policy)::" in ran.out
    monkeypatch.setenv("BASE", "HEAD")
    assert run(*kvplan_words(command)).code == 0


def runs_after(condition: str, folder: Path) -> bool:
    """Whether a step of a pull request runs: always(), the event, and hashFiles of what lies in the folder."""
    expression = condition.removeprefix("${{").removesuffix("}}").strip()

    def holds(part: str) -> bool:
        file = re.fullmatch(r"hashFiles\('([\w.]+)'\) != ''", part)
        if file:
            return (folder / file.group(1)).exists()
        return {"always()": True, "github.event_name == 'pull_request'": True}[part]

    return all(holds(part) for part in expression.split(" && "))


def test_a_broken_policy_is_told_wherever_a_kept_one_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Annotation, comment and code scanning: none keeps the answer of an earlier, readable policy."""
    steps = steps_of_check()
    step_index = next(i for i, step in enumerate(steps) if step.get("run", "").startswith("kvplan"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvplan.policy.yaml").write_text("version: 1\ntargets: [{id: a, modle: x}]\n", encoding="utf-8")
    ran = run(*kvplan_words(steps[step_index]["run"]))
    assert (ran.code, ran.out.splitlines()) == (
        2,
        ["::error file=kvplan.policy.yaml,line=2,col=19,title=kvplan::target has no key 'modle'; did you mean model?"],
    )
    assert all(runs_after(step["if"], tmp_path) for step in steps[step_index + 1 :])
    assert "has no key 'modle'" in (tmp_path / "kvplan.md").read_text(encoding="utf-8")
    assert '"executionSuccessful": false' in (tmp_path / "kvplan.sarif").read_text(encoding="utf-8")


FAKE_GH = """#!/usr/bin/env bash
if [ "$3" = --paginate ]; then cat "$PAGES"; else echo "$@" >> "$CALLS"; fi
"""


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("bash") is None, reason="needs jq, as GitHub's runners")
@pytest.mark.parametrize(
    ("comments", "call"),
    [
        ([], "api repos/o/r/issues/7/comments --method POST --field body=@kvplan.md"),
        # A person who quotes the mark, another bot's comment, that of another policy, then ours twice on two pages.
        (
            [
                [("someone", "MARK\nmine", "u1"), ("github-actions[bot]", "deployed", "u2")],
                [("github-actions[bot]", "<!-- kvplan-check: other.yaml -->\nx", "u3")],
                [("github-actions[bot]", "MARK\r\nold", "u4"), ("github-actions[bot]", "MARK\nolder", "u5")],
            ],
            "api u4 --method PATCH --field body=@kvplan.md",
        ),
    ],
)
def test_the_workflow_finds_its_earlier_comment_by_its_mark(
    tmp_path: Path, comments: list[list[tuple[str, str, str]]], call: str
) -> None:
    steps = steps_of_check()
    (step,) = [step for step in steps if step.get("name") == "Tell the pull request"]
    mark = marker("kvplan.policy.yaml")
    (tmp_path / "kvplan.md").write_text(f"{mark}\n### new\n", encoding="utf-8")
    pages = [
        [{"user": {"login": who}, "body": body.replace("MARK", mark), "url": url} for who, body, url in page]
        for page in comments
    ]
    (tmp_path / "pages").write_text("".join(json.dumps(page) for page in pages or [[]]), encoding="utf-8")
    (tmp_path / "gh").write_text(FAKE_GH, encoding="utf-8")
    (tmp_path / "gh").chmod(0o755)
    places = {"PAGES": str(tmp_path / "pages"), "CALLS": str(tmp_path / "calls")}
    environment = {**os.environ, **places, "COMMENTS": "repos/o/r/issues/7/comments"}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "calls").read_text(encoding="utf-8").splitlines() == [call]


def test_the_hook_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("kvplan-check", "python", False)
    for name, matches in (("kvplan.policy.yaml", True), ("deploy/my.kvplan.policy.yml", True), ("a/config.json", True),
                          ("README.md", False), ("tsconfig.json", False)):  # fmt: skip
        assert bool(re.search(hook["files"], name)) is matches
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, rules="fits: true, min_concurrency: 12")
    git(tmp_path, "init", "-q", "-b", "main")
    assert run(*kvplan_words(hook["entry"])).code == 0  # the first commit, which nothing comes before
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    assert run(*kvplan_words(hook["entry"])).code == 0
    policy(tmp_path, rules="fits: true, min_concurrency: 2")
    assert run(*kvplan_words(hook["entry"])).code == 1
    git(tmp_path, "branch", "other")
    assert run(*kvplan_words(hook["entry"]), "--base", "other").code == 1  # as `args:` says it
