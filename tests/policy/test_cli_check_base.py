"""`kvplan check --base REV`: a change cannot make the gate weaker by itself. Each test has a git repository."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvplan.core.table import markdown_text as cell_text
from tests.support.cli import Ran, Run, config_file, refused
from tests.support.cli import run as run  # the fixture
from tests.support.parts import some
from tests.support.policies import policy
from tests.support.recorded_runs import cpu_run

POLICY = """\
version: 1
targets:
- id: a
  model: ./model
  gpu: h100-80g
  max_model_len: 8k
  rules: {fits: true, min_headroom: 5%, min_users: {mean: 10, p99: 4}}
baseline: {file: baseline.json, max_growth: {kv_bytes_per_token: 0%}, max_drop: {kv_tokens: 5%}}
"""


def git(folder: Path, *argv: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *argv], cwd=folder, check=True, capture_output=True, timeout=900)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "change")


def rewrite(folder: Path, *pairs: tuple[str, str]) -> None:
    """Change the policy's text; each text that goes must stand there."""
    path = folder / "kvplan.policy.yaml"
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def repository(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Branch `main` with a model, a policy that it keeps, and the baseline that kvplan wrote; the user stands in it."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "repository"
    config_file_in(folder)
    (folder / "kvplan.policy.yaml").write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(folder)
    assert run("check", "--update-baseline", "--quiet").code == 0
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    git(folder, "checkout", "-qb", "change")
    return folder


def config_file_in(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    config_file(folder / "model", changes)


def check(run: Run, *flags: str) -> Ran:
    return run("check", "--base", "main", "--format", "json", *flags)


def changes(ran: Ran) -> list[tuple[str, str, str]]:
    """(outcome, kind of change, message) of what is said about the policy itself."""
    (policy,) = [target for target in ran.json["targets"] if target["id"] == "(policy)"]
    return [
        (finding["outcome"], finding["rule"].removeprefix("change."), finding["message"])
        for finding in policy["findings"]
    ]


def failed(ran: Ran) -> list[tuple[str, str]]:
    assert ran.code == 1, ran
    return [(kind, message) for outcome, kind, message in changes(ran) if outcome == "fail"]


def test_a_change_that_weakens_nothing_passes(run: Run, repository: Path) -> None:
    ran = check(run)
    assert ran.code == 0
    ((outcome, kind, message),) = changes(ran)
    assert (outcome, kind) == ("pass", "base")
    assert "is weaker than in main (" in message


# --- the smuggles: an honest regression of 61% of the tokens, made to pass -------------------------------------------


def regress(folder: Path) -> None:
    """Twice the layers: twice the KV bytes of a token, 61% fewer tokens."""
    config_file_in(folder, num_hidden_layers=64)


def test_an_honest_regression_fails_by_its_own_rules(run: Run, repository: Path) -> None:
    regress(repository)
    ran = check(run)
    assert ran.code == 1
    assert not [finding for finding in changes(ran) if finding[0] == "fail"]


def test_a_renamed_target_does_not_leave_its_baseline_behind(run: Run, repository: Path) -> None:
    regress(repository)
    rewrite(repository, ("id: a", "id: a2"))
    assert run("check").code == 0  # what passed before there was --base
    assert failed(check(run)) == [("target", "target a was renamed to a2")]


def test_a_new_baseline_file_or_none_is_no_way_out(run: Run, repository: Path) -> None:
    regress(repository)
    rewrite(repository, ("file: baseline.json", "file: other.json"))
    assert run("check").code == 0
    assert failed(check(run)) == [("baseline", "baseline baseline.json was replaced by other.json")]
    rewrite(repository, ("file: other.json", "file: baseline.json"))
    (repository / "baseline.json").unlink()
    assert run("check").code == 0
    assert failed(check(run)) == [("baseline", "baseline baseline.json was deleted")]


def test_an_updated_baseline_must_not_be_worse(run: Run, repository: Path) -> None:
    regress(repository)
    assert run("check", "--update-baseline", "--quiet").code == 0
    assert run("check").code == 0
    failures = failed(check(run))
    # 2 (K and V) * 8 heads * 128 * 2 bytes = 4 KiB for each of 32 and of 64 layers
    assert failures[0] == ("baseline", "baseline of target a: KV per token 128 KiB -> 256 KiB")
    assert [kind for kind, _ in failures] == ["baseline"] * 2
    assert failures[1][1].startswith("baseline of target a: tokens in the KV cache ")


def test_a_lower_severity_and_a_waiver_are_no_way_out(run: Run, repository: Path) -> None:
    regress(repository)
    warned = "severity: {baseline.kv_tokens: warn, baseline.kv_bytes_per_token: warn}\n"
    rewrite(repository, (POLICY, POLICY + warned))
    assert run("check").code == 0
    assert [kind for kind, _ in failed(check(run))] == ["severity", "severity"]
    waived = "waivers: [{rule: a/baseline.*, reason: later, expires: 2027-01-31}]\n"
    rewrite(repository, (warned, waived))
    assert run("check", "--today", "2026-11-22").code == 0
    assert failed(check(run, "--today", "2026-11-22")) == [("waiver", "waiver a/baseline.* is new (until 2027-01-31)")]


def test_an_honest_improvement_passes_with_its_new_baseline(run: Run, repository: Path) -> None:
    rewrite(repository, ("max_model_len: 8k", "max_model_len: 8k\n  kv_cache_dtype: fp8"))
    assert run("check", "--update-baseline", "--quiet").code == 0
    ran = check(run)
    assert (ran.code, [finding for finding in changes(ran) if finding[0] == "fail"]) == (0, [])


# --- limits and rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("min_headroom: 5%", "min_headroom: 4%", "limit", "target a: min_headroom is looser: 5% -> 4%"),
        ("p99: 4", "p99: 3", "limit", "target a: min_users.p99 is looser: 4 -> 3"),
        # 5% of an H100's 79.19 GiB are 3.96 GiB
        ("min_headroom: 5%", "min_headroom: 3GiB", "limit", "target a: min_headroom is looser: 5% -> 3GiB"),
        ("kv_tokens: 5%", "kv_tokens: 6%", "limit", "baseline: max_drop.kv_tokens is looser: 5% -> 6%"),
        (", p99: 4", "", "rule", "target a: min_users.p99 is no longer required"),
        ("min_headroom: 5%, ", "", "rule", "target a: min_headroom is no longer required"),
        (", max_drop: {kv_tokens: 5%}", "", "rule", "baseline: max_drop.kv_tokens is no longer required"),
    ],
)  # fmt: skip
def test_a_looser_limit_and_a_dropped_rule_fail(
    run: Run, repository: Path, old: str, new: str, kind: str, message: str
) -> None:
    rewrite(repository, (old, new))
    assert run("check").code == 0
    assert failed(check(run)) == [(kind, message)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min_headroom: 5%", "min_headroom: 6%"),
        ("min_headroom: 5%", "min_headroom: 4GiB"),
        ("kv_tokens: 5%", "kv_tokens: 0.5%"),
        ("fits: true", "fits: true, min_kv_tokens: 1k"),
        ("baseline:", "- {id: b, model: llama-3.1-8b, gpu: l40s, max_model_len: 4k, rules: {fits: true}}\nbaseline:"),
    ],
)
def test_stricter_limits_new_rules_and_new_targets_are_fine(run: Run, repository: Path, old: str, new: str) -> None:
    rewrite(repository, (old, new))
    assert check(run).code == 0


# --- what the base allows ---------------------------------------------------------------------------------------------


def test_only_the_base_revision_allows_a_change(run: Run, repository: Path) -> None:
    rewrite(repository, ("p99: 4", "p99: 3"), ("version: 1", "version: 1\nallow_changes: [limit]"))
    assert [kind for kind, _ in failed(check(run))] == ["limit"]
    rewrite(repository, ("p99: 3", "p99: 4"))
    git(repository, "checkout", "-q", "main")
    commit(repository)
    rewrite(repository, ("p99: 4", "p99: 3"))
    ran = check(run, "--strict")
    assert ran.code == 0
    ((outcome, kind, message),) = changes(ran)
    assert (outcome, kind) == ("note", "limit")
    assert message.startswith("target a: min_users.p99 is looser: 4 -> 3 (main (")


# --- formats ----------------------------------------------------------------------------------------------------------


def test_every_format_tells_it(run: Run, repository: Path) -> None:
    rewrite(repository, ("p99: 4", "p99: 3"))
    text = "target a: min_users.p99 is looser: 4 -> 3"
    table = run("check", "--base", "main")
    assert (table.code, table.err) == (1, "")
    assert table.out.startswith("1 of 1 target passes; the policy itself fails change.limit\n")
    assert re.search(
        rf"^  fail  KVP203 change\.limit +{re.escape(text)}\n +fix: undo it, or first allow it in main \(",
        table.out,
        re.MULTILINE,
    )
    annotated = run("check", "--base", "main", "--format", "github").out
    title = "title=KVP203 change.limit (policy)::"
    assert annotated.startswith(f"::error file=kvplan.policy.yaml,line=7,col=63,{title}"), annotated
    sarif = json.loads(run("check", "--base", "main", "--format", "sarif").out)["runs"][0]
    (alert,) = [result for result in sarif["results"] if result["ruleId"] == "KVP203"]
    assert (alert["level"], sarif["tool"]["driver"]["rules"][alert["ruleIndex"]]["id"]) == ("error", "KVP203")
    suites = ElementTree.fromstring(run("check", "--base", "main", "--format", "junit").out)
    (failure,) = suites.iter("failure")
    assert (failure.get("type"), failure.get("message")) == ("KVP203", text)
    assert f"| (policy) | {cell_text(text)} |" in run("check", "--base", "main", "--format", "markdown").out


# --- the base itself --------------------------------------------------------------------------------------------------


def test_a_policy_that_the_base_does_not_have_is_noted(run: Run, repository: Path) -> None:
    (repository / "new.policy.yaml").write_text(POLICY.partition("baseline:")[0], encoding="utf-8")
    ran = run("check", "new.policy.yaml", "--base", "main", "--format", "json", "--strict")
    assert ran.code == 0
    ((outcome, kind, message),) = changes(ran)
    assert (outcome, kind) == ("note", "base")
    assert " has no policy new.policy.yaml, so there is nothing to compare with" in message


def test_an_unknown_revision_is_2_and_says_how_to_have_it(run: Run, repository: Path, tmp_path: Path) -> None:
    message = refused(run("check", "--base", "nope"))
    assert "revision 'nope': no such commit" in message
    assert "fetch-depth: 0" in message
    clone = tmp_path / "clone"
    commit_more(repository)
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(clone))
    assert "fetch-depth: 0" in refused(run("check", clone / "kvplan.policy.yaml", "--base", "HEAD~1"))


def commit_more(folder: Path) -> None:
    (folder / "more").write_text("more", encoding="utf-8")
    commit(folder)


def test_outside_a_repository_base_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    config_file(tmp_path / "model")
    (tmp_path / "kvplan.policy.yaml").write_text(POLICY, encoding="utf-8")
    assert "not a git repository" in refused(run("check", "--base", "main"))


# --- waivers end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("today", "last", "too_late"),
    [
        ("2026-11-22", "2027-11-22", "2027-11-23"),
        ("2028-02-29", "2029-02-28", "2029-03-01"),
        ("2026-11-22", "2026-01-01", "9999-12-31"),  # expired, and never
    ],
)
def test_a_waiver_ends_within_a_year(run: Run, tmp_path: Path, today: str, last: str, too_late: str) -> None:
    def waived(day: str) -> Path:
        return policy(tmp_path, more=f"waivers:\n- rule: chat/fits\n  reason: later\n  expires: {day}\n")

    assert run("check", waived(last), "--today", today).code == 0
    message = refused(run("check", waived(too_late), "--today", today))
    assert "kvplan.policy.yaml:11:12: waiver: expires is more than a year away" in message


# --- files outside ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        ("max_model_len: 8k", "max_model_len: 8k\n  lengths: OUTSIDE/secret.txt"),
        ("max_model_len: 8k", "max_model_len: 8k\n  workload: {trace: OUTSIDE/secret.txt}"),
        ("max_model_len: 8k", "max_model_len: 8k\n  workload: {lengths: OUTSIDE/secret.txt}"),
        ("max_model_len: 8k", "max_model_len: 8k\n  calibration: OUTSIDE/secret.txt"),
        ("max_model_len: 8k", "max_model_len: 8k\n  draft_model: OUTSIDE/secret.json"),
        ("model: ./model", "model: OUTSIDE"),
        ("model: ./model", "command: vllm serve OUTSIDE"),
        ("file: baseline.json", "file: OUTSIDE/secret.json"),
        ("baseline:", "measured: {file: OUTSIDE/run}\nbaseline:"),
    ],
)
@pytest.mark.parametrize("way", some(["absolute", "relative", "link", "git"], ["relative", "link"]))
def test_files_of_a_policy_lie_in_its_repository(
    run: Run, repository: Path, tmp_path: Path, change: tuple[str, str], way: str
) -> None:
    """By a name, or by a link: nothing is opened, so nothing of it is told."""
    outside = repository / ".git" if way == "git" else tmp_path / "outside"
    (outside / "run").mkdir(parents=True)
    for name in ("secret.txt", "secret.json", "config.json", "run/run.json"):
        (outside / name).write_text("root:x:0:0:root", encoding="utf-8")
    (repository / "link").symlink_to(outside)
    text = {"absolute": str(outside), "relative": "../outside", "link": "./link", "git": "./.git"}[way]
    old, new = change
    rewrite(repository, (old, new.replace("OUTSIDE", text)))
    for flags in ((), ("--update-baseline",)):
        message = refused(run("check", *flags))
        assert f" points outside {repository} (" in message
        assert message.startswith("kvplan.policy.yaml:")
        assert "root:x" not in message
    assert (outside / "secret.json").read_text(encoding="utf-8") == "root:x:0:0:root"


def test_a_link_in_a_models_folder_leads_nowhere_else(run: Run, repository: Path, tmp_path: Path) -> None:
    config_file(tmp_path / "outside")
    (repository / "model" / "config.json").unlink()
    (repository / "model" / "config.json").symlink_to(tmp_path / "outside" / "config.json")
    assert "kvplan.policy.yaml:4:10: target a: model points outside" in refused(run("check"))
    (repository / "shared").mkdir()
    shutil.copy(tmp_path / "outside" / "config.json", repository / "shared")
    (repository / "model" / "config.json").unlink()
    (repository / "model" / "config.json").symlink_to("../shared/config.json")
    assert run("check").code == 0


def test_a_policy_that_is_a_link_out_of_its_repository_is_not_read(run: Run, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0:0:root", encoding="utf-8")
    (repository / "kvplan.policy.yaml").unlink()
    (repository / "kvplan.policy.yaml").symlink_to(tmp_path / "secret")
    message = refused(run("check"))
    assert "points outside" in message
    assert "root:x" not in message


def test_outside_of_a_repository_a_policys_own_folder_is_the_limit(run: Run, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    config_file(tmp_path / "model")
    path = policy(deploy, "  model: ../model\n  gpu: h200\n  max_model_len: 8k\n")
    assert f"points outside {deploy}" in refused(run("check", path))
    git(tmp_path, "init", "-q")
    assert run("check", path).code == 0


SECRET = "s3cr3t-t0k3n"


@pytest.mark.parametrize("key", ["workload: {trace: ./data.csv}", "lengths: ./data.csv"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{SECRET}\n", 1),
        (f"{SECRET},x\n1,2\n", 1),
        (f"prompt_tokens,output_tokens\n1,{SECRET}\n", 2),
        (f"prompt_tokens,output_tokens,timestamp\n1,1,{SECRET}\n", 2),
        (f"prompt_tokens,output_tokens,arrival_s\n1,1,{SECRET}\n", 2),
        (f'{{"input_length": 1, "output_length": 1}}\n{{"input_length": "{SECRET}", "output_length": 1}}\n', 2),
        (f'{{"{SECRET}": 1, "{SECRET}": 2}}\n', 1),
        (f'{{"{SECRET}": 1}}\n', 1),
        (f'{{"input_length": 1, "output_length": 1, "timestamp": "{SECRET}"}}\n', 1),
    ],
)
def test_what_stands_in_a_file_of_a_policy_is_not_quoted(
    run: Run, repository: Path, key: str, text: str, line: int
) -> None:
    """A log may be public, and a checkout holds more than what was committed. The line is named all the same."""
    (repository / "data.csv").write_text(text, encoding="utf-8")
    rewrite(repository, ("max_model_len: 8k", f"max_model_len: 8k\n  {key}"))
    ran = run("check", "--format", "github")
    if ran.code == 0:  # the time of a request says nothing of its length
        assert "timestamp" in text or "arrival_s" in text
    assert SECRET not in ran.out + ran.err
    if ran.code:
        assert ran.code == 2
        assert f"data.csv: line {line}" in ran.err


def test_a_config_with_a_key_twice_names_the_place_only(run: Run, repository: Path) -> None:
    (repository / "model" / "config.json").write_text(f'{{"{SECRET}": 1,\n"{SECRET}": 2}}', encoding="utf-8")
    message = refused(run("check"))
    assert "model/config.json: a key twice, or a number" in message
    assert SECRET not in message
    assert SECRET in refused(run("estimate", "./model", "--gpu", "h200"))


# --- what an id stands for --------------------------------------------------------------------------------------------


def notes(ran: Ran) -> list[tuple[str, str]]:
    assert ran.code == 0, ran
    return [(kind, message) for outcome, kind, message in changes(ran) if outcome == "note"]


@pytest.mark.parametrize(
    ("old", "new", "meaning"),
    [
        ("gpu: h100-80g", "gpu: h200", "GPU h100-80g -> h200"),
        ("max_model_len: 8k", "max_model_len: 8k\n  kv_cache_dtype: fp8", "--kv-cache-dtype auto -> fp8"),
        ("max_model_len: 8k", "max_model_len: 8k\n  mean_tokens: 100", "--mean-tokens not given -> 100"),
        ("max_model_len: 8k", "max_model_len: 8k\n  lengths: const:100", "lengths"),
        ("max_model_len: 8k", "max_model_len: 8k\n  workload: {rate: 2/s}", "workload: rate not given -> 2.0"),
        ("max_model_len: 8k", "max_model_len: 8192", None),  # the same number
    ],
)
def test_an_id_that_stands_for_another_server_is_noted(
    run: Run, repository: Path, old: str, new: str, meaning: str | None
) -> None:
    rewrite(repository, (old, new))
    assert run("check", "--update-baseline", "--quiet").code == 0
    message = f"target a now means another server: {meaning}"
    assert notes(check(run)) == ([] if meaning is None else [("server", message)])


def test_a_model_whose_config_changed_is_noted_with_what_changed(run: Run, repository: Path) -> None:
    config_file_in(repository, num_hidden_layers=16, intermediate_size=8192)
    message = "target a now means another server: intermediate_size 14336 -> 8192, num_hidden_layers 32 -> 16"
    assert notes(check(run)) == [("server", message)]
    annotated = run("check", "--base", "main", "--format", "github")
    assert annotated.out.startswith(
        "::notice file=kvplan.policy.yaml,line=3,col=3,title=KVP207 change.server (policy)::"
    )
    # from elsewhere, by its whole path
    ran = run("check", repository / "kvplan.policy.yaml", "--base", "main", "--format", "json")
    assert notes(ran) == [("server", message)]


def test_a_trace_with_other_rows_is_noted(run: Run, repository: Path) -> None:
    (repository / "trace.csv").write_text("prompt_tokens,output_tokens\n100,100\n", encoding="utf-8")
    rewrite(repository, ("max_model_len: 8k", "max_model_len: 8k\n  workload: {trace: trace.csv}"))
    git(repository, "checkout", "-q", "main")
    commit(repository)
    assert notes(check(run)) == []
    (repository / "trace.csv").write_text("prompt_tokens,output_tokens\n10,10\n", encoding="utf-8")
    message = "target a now means another server: workload: the contents of its trace"
    assert notes(check(run)) == [("server", message)]


def test_what_a_change_allows_later_ones_is_noted(run: Run, repository: Path) -> None:
    rewrite(repository, ("version: 1", "version: 1\nallow_changes: [limit, waiver]"))
    assert notes(check(run)) == [("base", "allow_changes: later changes may weaken limit, waiver")]
    rewrite(repository, ("[limit, waiver]", "[limits]"))
    assert "kvplan.policy.yaml:2:17: allow_changes has no kind 'limits'; did you mean limit?" in refused(run("check"))


# --- names and links --------------------------------------------------------------------------------------------------


def test_a_folder_that_became_a_link_is_compared_by_its_name(
    run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the policy lay in deploy/, deploy -> lax is no new policy."""
    deploy = repository / "deploy"
    shutil.copytree(repository, deploy, ignore=shutil.ignore_patterns(".git"))
    commit(repository)
    git(repository, "branch", "-f", "main")
    deploy.rename(repository / "lax")
    rewrite(repository / "lax", ("p99: 4", "p99: 3"))
    deploy.symlink_to("lax")
    ran = run("check", "deploy/kvplan.policy.yaml", "--base", "main", "--format", "json")
    assert [kind for kind, _ in failed(ran)] == ["limit"]
    commit(repository)  # and where it was a link at the base, that is followed
    ran = run("check", "deploy/kvplan.policy.yaml", "--base", "HEAD", "--format", "json")
    assert (ran.code, [outcome for outcome, _, _ in changes(ran)]) == (0, ["pass"])
    (repository / "laxer").mkdir()
    shutil.copytree(repository / "lax", repository / "laxer", dirs_exist_ok=True)
    rewrite(repository / "laxer", ("p99: 3", "p99: 2"))
    deploy.unlink()
    deploy.symlink_to("laxer")
    ran = run("check", "deploy/kvplan.policy.yaml", "--base", "HEAD", "--format", "json")
    assert [kind for kind, _ in failed(ran)] == ["limit"]
    monkeypatch.chdir(repository / "model")  # from another folder of the same repository
    ran = run("check", "../deploy/kvplan.policy.yaml", "--base", "HEAD", "--format", "json")
    assert [kind for kind, _ in failed(ran)] == ["limit"]


def test_a_base_policy_that_cannot_be_read_is_skipped_and_strict_fails(run: Run, repository: Path) -> None:
    good = (repository / "kvplan.policy.yaml").read_text(encoding="utf-8")
    rewrite(repository, ("version: 1", "version: 1\nextends: other"))
    commit(repository)
    (repository / "kvplan.policy.yaml").write_text(good, encoding="utf-8")
    for flags, code in (((), 0), (("--strict",), 1)):
        ran = run("check", "--base", "HEAD", "--format", "json", *flags)
        assert ran.code == code
        ((outcome, _, message),) = changes(ran)
        assert (outcome, "HEAD:kvplan.policy.yaml:2:1: policy has no key 'extends'" in message) == ("skip", True)


def test_defaults_that_weaken_many_targets_are_one_finding(run: Run, repository: Path) -> None:
    ids = "".join(f"- {{id: t{i}}}\n" for i in range(5))
    defaults = "{model: ./model, gpu: h200, max_model_len: 8k, rules: {min_users: 9}}"
    text = f"version: 1\ndefaults: {defaults}\ntargets:\n{ids}"
    (repository / "kvplan.policy.yaml").write_text(text, encoding="utf-8")
    commit(repository)
    rewrite(repository, ("min_users: 9", "min_users: 8"))
    ran = run("check", "--base", "HEAD", "--format", "json")
    message = "target t0, target t1, target t2 and 2 more: min_users.mean is looser: 9 -> 8"
    assert failed(ran) == [("limit", message)]


def test_a_waiver_that_is_longer_or_wider_fails_and_a_shorter_one_passes(run: Run, repository: Path) -> None:
    today = ("--today", "2026-11-22")
    rewrite(repository, ("baseline:", "waivers: [{rule: a/fits, reason: later, expires: 2027-01-31}]\nbaseline:"))
    commit(repository)
    git(repository, "branch", "-f", "main")
    rewrite(repository, ("2027-01-31", "2027-02-28"))
    assert failed(check(run, *today)) == [("waiver", "waiver a/fits was extended: 2027-01-31 -> 2027-02-28")]
    rewrite(repository, ("2027-02-28", "2027-01-31"), ("a/fits", "a/*"))
    assert failed(check(run, *today)) == [("waiver", "waiver a/* is new (until 2027-01-31)")]
    rewrite(repository, ("2027-01-31", "2026-12-31"), ("a/*", '"*/fits"'))
    assert check(run, *today).code == 0


def test_a_base_that_would_be_an_option_of_git_is_refused(run: Run, repository: Path) -> None:
    for name in ("--upload-pack=x", "", "-x", "a\nb"):
        assert "is not a valid revision name" in refused(run("check", f"--base={name}"))
    assert "--base checks a policy" in refused(
        run("check", "--init", "llama-3.1-8b", "--gpu", "h200", "--base", "main")
    )


def test_a_model_that_is_read_otherwise_is_noted_by_its_key(run: Run, repository: Path) -> None:
    """Text only: Qwen3.5's config is the same, and its tower is left out."""
    policy(repository, "  model: qwen3.5-9b\n  gpu: h100-80g\n  max_model_len: 8k\n")
    commit(repository)
    rewrite(repository, ("model: qwen3.5-9b", "model: qwen3.5-9b\n  text_only: true"))
    message = "target chat now means another server: text_only not given -> true"
    assert notes(run("check", "--base", "HEAD", "--format", "json")) == [("server", message)]


def test_a_baseline_that_was_damaged_does_not_hide_what_is_weaker(run: Run, repository: Path) -> None:
    good = (repository / "baseline.json").read_text(encoding="utf-8")
    (repository / "baseline.json").write_text("{", encoding="utf-8")
    commit(repository)
    (repository / "baseline.json").write_text(good, encoding="utf-8")
    rewrite(repository, ("p99: 4", "p99: 3"))
    ran = run("check", "--base", "HEAD", "--format", "json")
    assert [kind for kind, _ in failed(ran)] == ["limit"]
    assert [(outcome, kind) for outcome, kind, _ in changes(ran)] == [("fail", "limit"), ("skip", "baseline")]


def test_a_run_that_is_deleted_or_named_otherwise_takes_its_rules_with_it(run: Run, repository: Path) -> None:
    """Where it never was there, nothing is lost."""
    measured = "measured: {file: runs/latest, max_age: 30w}\nbaseline:"
    rewrite(repository, ("baseline:", measured))
    commit(repository)
    assert run("check", "--base", "HEAD").code == 0
    cpu_run(repository / "runs" / "latest")
    commit(repository)
    assert run("check", "--base", "HEAD").code == 0
    rewrite(repository, ("runs/latest", "runs/other"))
    assert run("check").code == 0
    text = "measured: runs/other is missing, but the base revision has this run; its rules are not checked"
    assert failed(run("check", "--base", "HEAD", "--format", "json")) == [("rule", text)]
    (repository / "runs" / "latest").rename(repository / "runs" / "other")
    ran = run("check", "--base", "HEAD", "--format", "json")
    assert notes(ran) == [("base", "measured: the evidence file changed: runs/latest -> runs/other")]


# --- a clone that lacks objects ---------------------------------------------------------------------------------------


def oid(folder: Path, name: str) -> str:
    words = ["git", "rev-parse", f"main:{name}"]
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("name", ["kvplan.policy.yaml", "baseline.json", "model/config.json"])
def test_an_object_that_the_clone_lacks_is_one_line(run: Run, repository: Path, name: str) -> None:
    missing = oid(repository, name)
    (repository / ".git" / "objects" / missing[:2] / missing[2:]).unlink()
    line = refused(run("check", "--base", "main"), 3)
    assert line.startswith(f"main:{name}: this clone does not have it (")


def test_a_partial_clone_fetches_nothing_by_itself_and_the_remedy_does(
    run: Run, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "config", "uploadpack.allowFilter", "true")
    git(repository, "checkout", "-q", "main")
    part, mark = tmp_path / "part", tmp_path / "fetched"
    git(tmp_path, "clone", "-q", "--filter=blob:none", "--no-checkout", f"file://{repository}", str(part))
    shutil.copytree(repository / "model", part / "model")
    for name in ("kvplan.policy.yaml", "baseline.json"):
        shutil.copy(repository / name, part / name)
    git(part, "config", "remote.origin.uploadpack", f"touch {mark} && git-upload-pack")
    monkeypatch.chdir(part)
    for name in ("kvplan.policy.yaml", "baseline.json", "model/config.json"):
        line = refused(run("check", "--base", "main"), 3)
        assert not mark.exists()
        remedy = line.split("`")[1]
        assert remedy == f"git show main:{name}"
        subprocess.run(remedy.split(), cwd=part, check=True, capture_output=True)
        assert mark.exists()
        mark.unlink()
    assert run("check", "--base", "main").code == 0


def test_a_replaced_commit_is_compared_as_itself(run: Run, repository: Path) -> None:
    """refs/replace of this clone puts the weaker policy in the place of main's."""
    rewrite(repository, ("min_headroom: 5%", "min_headroom: 4%"))
    commit(repository)
    git(repository, "replace", "main", "change")
    assert [kind for kind, _ in failed(check(run))] == ["limit"]


@pytest.mark.parametrize(
    ("limit", "problem"), [("MAX_FILES", "files are named, more than 1"), ("MAX_BYTES", "1 bytes")]
)
def test_files_of_a_revision_have_a_budget(
    run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch, limit: str, problem: str
) -> None:
    monkeypatch.setattr(f"kvplan.core.git.{limit}", 1)
    (message,) = [message for outcome, kind, message in changes(check(run)) if (outcome, kind) == ("note", "server")]
    assert problem in message
