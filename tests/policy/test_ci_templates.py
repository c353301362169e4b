"""The GitHub Action, the GitLab job, the Dockerfile and the README's five minutes: their own steps are run in a shell.

What a runner does around the steps is done here: inputs become variables, files take outputs and the summary. The
network is not: the step that installs kvplan is run with a `python` that writes down what it is told, and `kvplan` on
PATH is this checkout's.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from tests.policy.test_policy_reports import read_command
from tests.support.cli import config_file
from tests.support.parts import some
from tests.support.readme_blocks import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("git") is None, reason="needs bash and git, as the runners have"
)

ACTION: Final[dict[str, Any]] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
GITLAB: Final[dict[str, Any]] = yaml.safe_load((ROOT / "examples" / "gitlab-ci.yml").read_text(encoding="utf-8"))

POLICY = """\
version: 1
targets:
- id: chat
  model: ./model
  gpu: a100-80g
  max_model_len: 32k
  rules: {fits: true, min_concurrency: 12}
"""


def git(folder: Path, *argv: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *argv], cwd=folder, check=True, capture_output=True, timeout=900)


@dataclass(frozen=True, slots=True)
class Workplace:
    """A repository, and a machine that has bash, git, a `kvplan`, and a `python` that only notes what it is told."""

    repository: Path
    tools: Path
    temp: Path

    def bash(self, script: str, variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """A script as GitHub's runners run one of `shell: bash`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GITHUB_", "RUNNER_", "CI_", "KVPLAN", "FORCE_COLOR"))
        }
        environment = {**inherited, "HF_HUB_OFFLINE": "1", **variables}
        environment["PATH"] = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        (self.temp / "script.sh").write_text(script, encoding="utf-8")
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(self.temp / "script.sh")],
            cwd=self.repository, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=900,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def installed(self) -> list[str]:
        """The words of each call of the `python` that installs."""
        log = self.temp / "python.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def rewrite(self, old: str, new: str) -> None:
        path = self.repository / "kvplan.policy.yaml"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def commit(self) -> None:
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "-qm", "change")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """Branch `main` of the repository keeps its policy: 14 requests fit at 32k, at least 12 are wanted."""
    workplace = Workplace(tmp_path / "repository", tmp_path / "tools", tmp_path / "temp")
    for folder in (workplace.repository, workplace.tools, workplace.temp):
        folder.mkdir()
    kvplan = (
        f'#!/usr/bin/env bash\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m kvplan "$@"\n'
    )
    noting = f'#!/usr/bin/env bash\necho "$@" >> {shlex.quote(str(workplace.temp / "python.log"))}\n'
    for name, text in (("kvplan", kvplan), ("python", noting)):
        (workplace.tools / name).write_text(text, encoding="utf-8")
        (workplace.tools / name).chmod(0o755)
    config_file(workplace.repository / "model")
    (workplace.repository / "kvplan.policy.yaml").write_text(POLICY, encoding="utf-8")
    git(workplace.repository, "init", "-q", "-b", "main")
    workplace.commit()
    return workplace


# --- the GitHub Action ------------------------------------------------------------------------------------------------

# What GitHub's schema of an action's metadata (json.schemastore.org/github-action.json) asks of a composite one.
STRING: Final = {"type": "string", "minLength": 1}
WORDS: Final = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
ANY_STEP: Final = {"name": STRING, "id": STRING, "if": STRING, "env": WORDS}
ACTION_SCHEMA: Final = {
    "type": "object",
    "required": ["name", "description", "runs"],
    "additionalProperties": False,
    "properties": {
        "name": STRING, "author": STRING, "description": STRING,
        "branding": {
            "type": "object", "required": ["icon", "color"],
            "properties": {
                "icon": STRING,
                "color": {"enum": ["white", "black", "yellow", "blue", "green", "orange", "red", "purple"]},
            },
        },
        "inputs": {
            "type": "object",
            "propertyNames": {"pattern": "^[_a-zA-Z][a-zA-Z0-9_-]*$"},
            "additionalProperties": {
                "type": "object", "required": ["description"], "additionalProperties": False,
                "properties": {
                    "description": STRING, "default": {"type": "string"}, "required": {"type": "boolean"},
                    "deprecationMessage": STRING,
                },
            },
        },
        "outputs": {
            "type": "object",
            "additionalProperties": {
                "type": "object", "required": ["description", "value"], "additionalProperties": False,
                "properties": {"description": STRING, "value": STRING},
            },
        },
        "runs": {
            "type": "object", "required": ["using", "steps"], "additionalProperties": False,
            "properties": {
                "using": {"const": "composite"},
                "steps": {
                    "type": "array",
                    "items": {
                        "oneOf": [
                            {
                                "type": "object", "required": ["run", "shell"], "additionalProperties": False,
                                "properties": {
                                    **ANY_STEP, "run": STRING, "shell": STRING, "working-directory": STRING,
                                    "continue-on-error": {"type": ["boolean", "string"]},
                                },
                            },
                            {
                                "type": "object", "required": ["uses"], "additionalProperties": False,
                                "properties": {
                                    **ANY_STEP, "uses": STRING, "with": WORDS,
                                    "continue-on-error": {"type": ["boolean", "string"]},
                                },
                            },
                        ]
                    },
                },
            },
        },
    },
}  # fmt: skip


def test_the_action_has_the_shape_that_github_takes() -> None:
    jsonschema.Draft202012Validator(ACTION_SCHEMA).validate(ACTION)
    assert {"policy", "base", "version", "format", "args", "python-version", "sarif"} == set(ACTION["inputs"])
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")  # an input's text must not become a script's
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+(/[\w-]+)*@v[0-9]+", step["uses"])


@dataclass(frozen=True, slots=True)
class ActionRun:
    """What a run of the action left; `uses`: what the steps that are other actions were given."""

    code: int
    out: str
    err: str
    summary: str
    outputs: Mapping[str, str]
    uses: Mapping[str, Mapping[str, str]]


def run_action(place: Workplace, **arguments: str) -> ActionRun:
    """The steps in their order, as a runner takes them: after one failed, only those whose condition says always()."""
    unknown = set(arguments) - {name.replace("-", "_") for name in ACTION["inputs"]}
    assert not unknown
    inputs = {name: arguments.get(name.replace("-", "_"), entry["default"]) for name, entry in ACTION["inputs"].items()}
    files = {name: place.temp / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("", encoding="utf-8")
    runner = {"RUNNER_TEMP": str(place.temp), "GITHUB_WORKSPACE": str(place.repository), "GITHUB_ACTIONS": "true"}
    outputs: dict[str, dict[str, str]] = {}
    uses: dict[str, dict[str, str]] = {}
    code, out, err = 0, "", ""
    for step in ACTION["runs"]["steps"]:
        condition = step.get("if", "success()")
        if (code and "always()" not in condition) or not holds(condition, inputs, outputs):
            continue
        if "uses" in step:
            uses[step["uses"]] = {key: value_of(str(text), inputs, outputs) for key, text in step["with"].items()}
            continue
        variables = {key: value_of(str(text), inputs, outputs) for key, text in step.get("env", {}).items()}
        paths = {name: str(file) for name, file in files.items()}
        done = place.bash(step["run"], {**runner, **paths, **variables})
        code, out, err = done.returncode, out + done.stdout, err + done.stderr
        if "id" in step:
            lines = files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines()
            outputs[step["id"]] = dict(line.split("=", 1) for line in lines)
    action_outputs = {name: value_of(entry["value"], inputs, outputs) for name, entry in ACTION["outputs"].items()}
    return ActionRun(code, out, err, files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8"), action_outputs, uses)


def value_of(text: str, inputs: Mapping[str, str], outputs: Mapping[str, Mapping[str, str]]) -> str:
    """A value with its expressions filled in: a name, or the first of several that is not empty."""

    def filled(match: re.Match[str]) -> str:
        parts = match.group(1).strip().split(" || ")
        return next((value for part in parts if (value := looked_up(part, inputs, outputs))), "")

    return re.sub(r"\$\{\{(.*?)\}\}", filled, text)


def looked_up(name: str, inputs: Mapping[str, str], outputs: Mapping[str, Mapping[str, str]]) -> str:
    if name == "github.action_path":
        return str(ROOT)
    if name.startswith("inputs."):
        return inputs[name.removeprefix("inputs.")]
    step, output = re.fullmatch(r"steps\.(\w+)\.outputs\.([\w-]+)", name).groups()  # type: ignore[union-attr] # or fail
    return outputs.get(step, {}).get(output, "")


def holds(condition: str, inputs: Mapping[str, str], outputs: Mapping[str, Mapping[str, str]]) -> bool:
    def part_holds(part: str) -> bool:
        if part in ("always()", "success()"):
            return True
        name, sign, text = re.fullmatch(r"(\S+) (==|!=) '(.*)'", part).groups()  # type: ignore[union-attr] # or fail
        return (looked_up(name, inputs, outputs) == text) is (sign == "==")

    return all(map(part_holds, condition.removeprefix("${{").removesuffix("}}").strip().split(" && ")))


def test_the_action_passes_a_change_that_keeps_the_policy(place: Workplace) -> None:
    ran = run_action(place)
    assert (ran.code, ran.err, ran.out) == (0, "", "kvplan check: 2 passed\n")
    assert "### kvplan check: 2 passed" in ran.summary
    assert ran.outputs["exit-code"] == "0"
    assert Path(ran.outputs["markdown"]).read_text(encoding="utf-8").startswith("<!-- kvplan-check")
    assert list(ran.uses) == ["actions/setup-python@v5"]
    assert ran.uses["actions/setup-python@v5"] == {"python-version": "3.12"}


def test_the_action_fails_a_change_that_breaks_capacity_on_its_line_and_in_the_summary(place: Workplace) -> None:
    """64k instead of 32k: 7 requests of at least 12."""
    place.rewrite("max_model_len: 32k", "max_model_len: 64k")
    place.commit()
    ran = run_action(place, base="HEAD^1", sarif="true")
    assert (ran.code, ran.err, ran.outputs["exit-code"]) == (1, "", "1")
    name, properties, data = read_command(ran.out.splitlines()[0])
    assert (name, properties["file"], properties["line"]) == ("error", "kvplan.policy.yaml", "7")
    assert properties["title"] == "KVP012 min_concurrency chat"
    assert "minimum 12" in data
    assert "| **fail** | KVP012 min\\_concurrency |" in ran.summary
    uploaded = ran.uses["github/codeql-action/upload-sarif@v3"]["sarif_file"]
    results = json.loads(Path(uploaded).read_text(encoding="utf-8"))["runs"][0]["results"]
    assert [result["ruleId"] for result in results if result["level"] == "error"] == ["KVP012"]


def test_the_action_fails_a_change_that_weakens_the_policy_where_it_knows_the_base(place: Workplace) -> None:
    place.rewrite("min_concurrency: 12", "min_concurrency: 2")
    place.commit()
    assert run_action(place).code == 0
    ran = run_action(place, base="HEAD^1")
    assert ran.code == 1
    assert "title=KVP203 change.limit (policy)::" in ran.out
    ran = run_action(place, base="origin/nowhere", sarif="true")
    assert ran.code == 2
    assert ran.out.startswith("::error file=kvplan.policy.yaml,title=kvplan::revision 'origin/nowhere': no such commit")


def test_the_action_says_why_a_policy_cannot_be_read(place: Workplace) -> None:
    place.rewrite("  model:", "  modle:")
    ran = run_action(place, sarif="true")
    assert (ran.code, ran.outputs["exit-code"]) == (2, "2")
    assert ran.out.startswith("::error file=kvplan.policy.yaml,line=4,col=3,title=kvplan::target has no key 'modle'")
    assert "could not run, no rule was checked" in ran.summary
    uploaded = Path(ran.uses["github/codeql-action/upload-sarif@v3"]["sarif_file"])
    assert '"executionSuccessful": false' in uploaded.read_text(encoding="utf-8")


@pytest.mark.parametrize("format", some(["table", "json", "junit"], ["json"]))
def test_the_action_writes_the_summary_whatever_it_prints(place: Workplace, format: str) -> None:
    ran = run_action(place, format=format)
    assert ran.code == 0
    assert ran.summary.count("### kvplan check: 2 passed") == 1


def test_the_actions_flags_are_words_and_no_script(place: Workplace) -> None:
    """An input may come from a pull request's title or branch: nothing in it is run, and no * becomes file names."""
    place.rewrite("fits: true", "fits: true, max_preemption_rate: 1%")  # skipped: there is no workload
    assert run_action(place).code == 0
    assert run_action(place, args="--strict  --today 2027-01-31").code == 1
    hostile = '$(touch stolen) "; touch stolen; " `touch stolen` *'
    assert run_action(place, policy=hostile).code == 2
    assert run_action(place, base=hostile).code == 2
    assert run_action(place, args=hostile).code == 2
    assert sorted(path.name for path in place.repository.iterdir()) == [".git", "kvplan.policy.yaml", "model"]


def test_the_action_installs_its_own_source_or_the_version_that_is_named(place: Workplace) -> None:
    run_action(place)
    run_action(place, version="git+https://git.example.com/you/kvplan.git@v2")
    own, other = place.installed()
    assert own == f"-m pip install --quiet --disable-pip-version-check {ROOT}"
    assert other == "-m pip install --quiet --disable-pip-version-check git+https://git.example.com/you/kvplan.git@v2"
    assert (ROOT / "pyproject.toml").exists()  # the action's folder is what pip can install


# --- the GitLab job ---------------------------------------------------------------------------------------------------

# What GitLab's schema of a job (gitlab.com/.../editor/schema/ci.json) asks of the keywords that are used.
JOB_SCHEMA: Final = {
    "type": "object",
    "required": ["script"],
    "additionalProperties": False,
    "properties": {
        "stage": STRING, "image": STRING, "variables": WORDS,
        "rules": {
            "type": "array",
            "items": {"type": "object", "properties": {"if": STRING}, "additionalProperties": False},
        },
        "before_script": {"type": "array", "items": STRING},
        "script": {"type": "array", "items": STRING, "minItems": 1},
        "artifacts": {
            "type": "object", "additionalProperties": False,
            "properties": {
                "when": {"enum": ["on_success", "on_failure", "always"]},
                "paths": {"type": "array", "items": STRING},
                "reports": {"type": "object", "additionalProperties": False, "properties": {"junit": STRING}},
            },
        },
    },
}  # fmt: skip


def run_job(place: Workplace, **predefined: str) -> "subprocess.CompletedProcess[str]":
    """before_script and script, one after the other in one shell, as GitLab's runners do."""
    (job,) = GITLAB.values()
    variables = {name: str(value) for name, value in job["variables"].items()}
    lines = [*job["before_script"], *job["script"]]
    return place.bash("\n".join(lines), {"CI": "true", **variables, **predefined})


def test_the_gitlab_job_has_the_shape_that_gitlab_takes() -> None:
    (job,) = GITLAB.values()
    jsonschema.Draft202012Validator(JOB_SCHEMA).validate(job)
    assert job["stage"] in (".pre", "build", "test", "deploy", ".post")  # those that need not be declared


def test_the_gitlab_job_passes_and_fails_with_a_junit_report(place: Workplace) -> None:
    (job,) = GITLAB.values()
    report = place.repository / job["artifacts"]["reports"]["junit"]
    done = run_job(place)
    assert (done.returncode, done.stderr) == (0, "")
    assert ElementTree.parse(report).getroot().get("failures") == "0"
    assert place.installed() == [f"-m pip install --quiet {job['variables']['KVPLAN']}"]

    place.rewrite("max_model_len: 32k", "max_model_len: 64k")
    done = run_job(place)
    assert done.returncode == 1
    assert "fail  KVP012 min_concurrency" in done.stdout
    root = ElementTree.parse(report).getroot()
    assert (root.get("failures"), root.get("errors")) == ("1", "0")
    assert all((place.repository / path).exists() for path in job["artifacts"]["paths"])

    place.rewrite("  model:", "  modle:")
    assert run_job(place).returncode == 2
    assert ElementTree.parse(report).getroot().get("errors") == "1"


def test_the_gitlab_job_compares_a_merge_request_with_its_base(place: Workplace) -> None:
    place.rewrite("min_concurrency: 12", "min_concurrency: 2")
    place.commit()
    assert run_job(place).returncode == 0
    done = run_job(place, CI_MERGE_REQUEST_DIFF_BASE_SHA="HEAD^1")
    assert done.returncode == 1
    assert "KVP203" in done.stdout


# --- the Dockerfile ---------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words), continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, FROM first."""
    all_stages: list[list[tuple[str, str]]] = []
    for name, words in instructions():
        if name == "FROM":
            all_stages.append([])
        all_stages[-1].append((name, words))
    return all_stages


def test_the_image_is_small_runs_as_nobody_in_particular_and_reads_what_is_mounted() -> None:
    known = {"FROM", "COPY", "RUN", "USER", "ENV", "WORKDIR", "ENTRYPOINT"}
    assert {name for name, _ in instructions()} <= known
    assert [stage[0] for stage in stages()] == [("FROM", "python:3.12-slim AS build"), ("FROM", "python:3.12-slim")]
    last = stages()[-1]
    values = dict(last)
    runs = " ".join(words for name, words in last if name == "RUN")
    assert values["USER"] == "10001"  # a number: what forbids root can tell
    order = [name for name, _ in last]
    assert order.index("USER") > max(position for position, name in enumerate(order) if name in ("RUN", "COPY"))
    assert re.search(r"apt-get install \S+ --no-install-recommends git\b", runs)
    assert "rm -rf /var/lib/apt/lists/*" in runs
    assert f"safe.directory {values['WORKDIR']} " in f"{runs} "
    assert json.loads(values["ENTRYPOINT"]) == ["kvplan", "check"]
    assert "[" not in runs  # the light install: no extras


def test_a_wheel_is_built_from_what_is_copied_and_nothing_that_is_copied_is_ignored(tmp_path: Path) -> None:
    """The build stage's COPY and pip in a folder that has only what .dockerignore lets through."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[1] == "*"
    context, source = tmp_path / "context", tmp_path / "source"
    context.mkdir()
    for name in let_through:
        copy(ROOT / name, context / name)
    for name, words in stages()[0]:
        if name == "COPY":
            *sources, target = words.split()
            for file in sources:
                into = source / Path(target).relative_to("/source")
                copy(context / file, into / file if target.endswith("/") else into)
    assert sorted(path.name for path in source.iterdir()) == sorted(let_through)
    pip = next(words for name, words in stages()[0] if name == "RUN")
    assert shlex.split(pip) == [*["pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", "/wheels", "/source"]]
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    wheels = tmp_path / "wheels"
    done = subprocess.run(
        [*build, "--wheel-dir", str(wheels), str(source)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(wheels.glob("kvplan-*.whl"))) == 1


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


def test_the_images_words_check_the_mounted_repository(place: Workplace) -> None:
    """ENTRYPOINT with the words behind `docker run IMAGE`, in the repository; no docker is needed for that."""
    entry = shlex.join(json.loads(dict(stages()[-1])["ENTRYPOINT"]))
    assert place.bash(entry, {}).returncode == 0
    place.rewrite("min_concurrency: 12", "min_concurrency: 2")
    place.commit()
    assert place.bash(f"{entry} --base HEAD^1", {}).returncode == 1
    place.rewrite("max_model_len: 32k", "max_model_len: 4m")
    assert place.bash(f"{entry} kvplan.policy.yaml", {}).returncode == 2


# --- the README's five minutes ----------------------------------------------------------------------------------------


def five_minutes() -> list[tuple[str, str]]:
    """(language, text) of each block of the section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## CI in five minutes\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_the_readmes_five_minutes_end_in_the_failing_pull_request_that_they_show(
    place: Workplace, update: bool
) -> None:
    """The section's blocks in their order: the policy, the workflow, the change; then the action as the workflow calls
    it, on the merge that GitHub checks out. What fails is what the section shows."""
    (_, policy), (_, workflow), (_, change), (_, answer_text), *_ = five_minutes()
    assert [language for language, _ in five_minutes()[:4]] == ["sh", "yaml", "sh", "text"]
    shutil.rmtree(place.repository)
    place.repository.mkdir()
    git(place.repository, "init", "-q", "-b", "main")
    git(place.repository, "config", "user.name", "a")
    git(place.repository, "config", "user.email", "a@b")
    assert place.bash(policy, {}).returncode == 0
    folder = place.repository / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "kvplan.yml").write_text(workflow, encoding="utf-8")
    place.commit()

    (job,) = yaml.safe_load(workflow)["jobs"].values()
    checkout, action = job["steps"]
    assert (checkout["uses"], checkout["with"]) == ("actions/checkout@v4", {"fetch-depth": 0})
    arguments = {name.replace("-", "_"): str(value) for name, value in action["with"].items()}
    assert set(action["with"]) <= set(ACTION["inputs"])

    def pull_request() -> ActionRun:
        git(place.repository, "checkout", "-q", "main")
        git(place.repository, "merge", "-q", "--no-ff", "-m", "merge", "longer-context")
        return run_action(place, **arguments)

    done = place.bash(change, {})
    assert done.returncode == 0, done.stderr
    ran = pull_request()
    assert ran.code == 1
    if update:
        path = ROOT / "README.md"
        path.write_text(
            path.read_text(encoding="utf-8").replace(f"```text\n{answer_text}```", f"```text\n{ran.out}```"),
            encoding="utf-8",
            newline="\n",
        )
        return
    assert ran.out == answer_text
