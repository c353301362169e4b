"""`kvplan diff` as one types it: kinds of operands, revisions of a repository, exit codes, and what is refused."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvplan.documents.schema import document_schema
from tests.support.cli import Run, config_file, refused, run

__all__ = ["run"]

FLAGS = ("--gpu", "a100-80g", "--ctx", "32k")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models: Llama-3.1-8B's config, and that with half the KV heads."""
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path / "old")
    config_file(tmp_path / "new", {"num_key_value_heads": 4})
    return tmp_path


def document_of(ran: Any) -> dict[str, Any]:
    document: dict[str, Any] = ran.json
    Draft202012Validator(document_schema("diff")).validate(document)
    return document


def figure(document: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    (comparison,) = document["comparisons"]
    (row,) = [row for part in ("memory", "weight_groups", "figures") for row in comparison[part] if row["name"] == name]
    return row["old"], row["new"], row["delta"]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [("./old", "./new"), ("old/config.json", "new/config.json"), ("old", "./new")])
def test_two_configs_are_compared_with_the_same_flags(run: Run, models: Path, old: str, new: str) -> None:
    document = document_of(run("diff", old, new, *FLAGS, "--format", "json"))
    assert figure(document, "kv.bytes_per_token") == (131_072, 65_536, -65_536)  # 32 x 2 x 8 (4) x 128 x 2
    (comparison,) = document["comparisons"]
    assert comparison["changes"] == [{"kind": "model", "name": "num_key_value_heads", "old": "8", "new": "4"}]
    assert (
        comparison["explanation"][0] == "KV per token: num_key_value_heads 8 -> 4 halves it (131,072 to 65,536 bytes)"
    )
    assert [step["deltas"]["kv.bytes_per_token"] for step in comparison["attribution"]] == [-65_536]


def test_the_table_says_what_changed_and_why(run: Run, models: Path) -> None:
    ran = run("diff", "./old", "./new", *FLAGS)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "28 users instead of 14"
    assert lines[2] == "./old on a100-80g, 32,768 tokens  ->  ./new on a100-80g, 32,768 tokens"
    assert "  model: num_key_value_heads 8 -> 4" in lines
    assert any(
        line.split() == ["KV", "per", "token", "128", "KiB", "64", "KiB", "-64", "KiB", "(-50.0%)"] for line in lines
    )
    assert "  KV per token: num_key_value_heads 8 -> 4 halves it (131,072 to 65,536 bytes)" in lines


def test_several_gpus_and_contexts_pair_up(run: Run, models: Path) -> None:
    document = document_of(
        run("diff", "./old", "./new", "--gpu", "h200,a100-80g", "--ctx", "8k,32k", "--format", "json")
    )
    assert [comparison["key"] for comparison in document["comparisons"]] == [
        "h200, 8,192 tokens",
        "a100-80g, 8,192 tokens",
        "h200, 32,768 tokens",
        "a100-80g, 32,768 tokens",
    ]


def test_the_same_model_twice_has_no_difference(run: Run, models: Path) -> None:
    ran = run("diff", "./old", "./old", *FLAGS, "--exit-code")
    assert (ran.code, ran.out) == (0, "No difference: ./old on a100-80g, 32,768 tokens\n")


def test_catalog_names_do_and_what_changed_is_shown_the_other_way_round_too(run: Run) -> None:
    there, back = (
        document_of(run("diff", *pair, *FLAGS, "--format", "json"))["comparisons"][0]
        for pair in (("llama-3.1-8b", "llama-3.1-70b"), ("llama-3.1-70b", "llama-3.1-8b"))
    )
    assert [row["delta"] for row in there["memory"]] == [-row["delta"] for row in back["memory"]]
    assert there["worse"] == ["fits", "bytes_per_token", "users"]
    assert back["worse"] == []


def test_of_many_targets_without_a_difference_a_screen_names_ten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    targets = "".join(
        f"- {{id: t{i:03}, model: llama-3.1-8b, gpu: h200, max_model_len: 8k, rules: {{fits: true}}}}\n"
        for i in range(100)
    )
    path.write_text(f"version: 1\ntargets:\n{targets}", encoding="utf-8")
    lines = run("diff", path, path).out.splitlines()
    assert lines == [
        "No difference in 100 plans",
        "",
        "Equal",
        *(f"  t{i:03}" for i in range(10)),
        "  and 90 more",
    ]
    assert len(document_of(run("diff", path, path, "--format", "json"))["comparisons"]) == 100


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [("./old", "./new", 0), ("./new", "./old", 1), ("./old", "./old", 0), ("./old", "llama-3.1-70b", 1)],
)
def test_exit_code_is_1_only_where_new_is_worse(run: Run, models: Path, old: str, new: str, code: int) -> None:
    assert run("diff", old, new, *FLAGS, "--exit-code").code == code
    assert run("diff", old, new, *FLAGS).code == 0


def test_one_user_fewer_is_worse_and_none_fewer_is_not(run: Run, models: Path) -> None:
    # Two users of 2,048 blocks of 2 MiB and the null block, which is nobody's: 8,194 MiB.
    for pool, code in (("8194MiB", 0), ("8195MiB", 0), ("8193MiB", 1)):
        run("estimate", "./old", *FLAGS, "--kv-cache-memory-bytes", "8194MiB", "--report", "a.json")
        run("estimate", "./old", *FLAGS, "--kv-cache-memory-bytes", pool, "--report", "b.json")
        assert run("diff", "a.json", "b.json", "--exit-code").code == code


# --- documents --------------------------------------------------------------------------------------------------------


def test_answers_of_estimate_are_compared(run: Run, models: Path) -> None:
    run("estimate", "./old", *FLAGS, "--report", "a.json")
    run("estimate", "./new", *FLAGS, "--report", "b.json")
    from_files = document_of(run("diff", "a.json", "b.json", "--format", "json"))
    from_models = document_of(run("diff", "./old", "./new", *FLAGS, "--format", "json"))
    for part in ("memory", "weight_groups", "figures"):
        assert from_files["comparisons"][0][part] == from_models["comparisons"][0][part]
    assert from_files["comparisons"][0]["attribution"] is None
    assert run("diff", "a.json", "a.json").out == "No difference: ./old on a100-80g, 32,768 tokens\n"


def test_answers_of_check_are_compared_by_target_and_with_a_policy(run: Run, models: Path) -> None:
    policy(models, "chat", "./old")
    run("check", "kvplan.policy.yaml", "--report", "a.json")
    policy(models, "chat", "./new")
    run("check", "kvplan.policy.yaml", "--report", "b.json")
    for new in ("b.json", "kvplan.policy.yaml"):
        document = document_of(run("diff", "a.json", new, "--format", "json"))
        assert figure(document, "kv.bytes_per_token") == (131_072, 65_536, -65_536)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty file"),
        ("{", "not JSON"),
        ("[]", "the top level is a list"),
        ('{"schema": "kvplan/plan@1", "a": NaN}', "non-finite"),
        ('{"schema": "kvplan/plan@1", "schema": 1}', "duplicate key"),
        ('{"schema": "kvplan/plan@1"}', "is missing; it may come from another release of kvplan"),
        ('{"schema": "kvplan/plan@9"}', "is not a document that can be compared"),
        ('{"schema": {}}', "is not a document that can be compared"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_what_is_no_answer_is_refused_in_one_line(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert problem in refused(run("diff", file, file))


def test_a_huge_file_is_refused_before_it_is_read(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 30)
    assert "too large" in refused(run("diff", tmp_path / "x.json", tmp_path / "x.json"))


def test_things_of_two_kinds_are_not_compared(run: Run, models: Path) -> None:
    run("estimate", "./old", *FLAGS, "--report", "a.json")
    policy(models, "chat", "./old")
    run("check", "kvplan.policy.yaml", "--report", "c.json")
    assert refused(run("diff", "a.json", "./old", *FLAGS)) == (
        "OLD and NEW: a.json is a plan (JSON of `kvplan estimate`) and ./old is a model; compare two of the same kind"
    )
    for pair in (("./old", "a.json"), ("a.json", "c.json"), ("kvplan.policy.yaml", "a.json"), ("c.json", "./old")):
        assert "compare two of the same kind" in refused(run("diff", *pair))


def test_flags_that_would_be_ignored_are_refused(run: Run, models: Path) -> None:
    run("estimate", "./old", *FLAGS, "--report", "a.json")
    assert refused(run("diff", "a.json", "a.json", "--tp", "2")) == (
        "--tp works only with two models; documents and policies contain it"
    )
    for flag in (("--ctx", "4k"), ("--no-enable-prefix-caching",), ("--assume-dense",)):
        assert "works only with two models" in refused(run("diff", "a.json", "a.json", *flag))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "OLD: missing"),
        (("./old",), "NEW: missing"),
        (("./old", "./new"), "--gpu: missing"),
        (("./old", "nope.json", *FLAGS), "nope.json: no such file or directory"),
        (("./old", "nothing", *FLAGS), "model 'nothing': not in the catalog"),
        (("./old", "", *FLAGS), "OLD, NEW: one of them is empty ('')"),
        (("./old", "[/bold]\x1b", *FLAGS), r"[/bold]\x1b"),
        (("./old", "./new", *FLAGS, "--tp", "3"), "--tp 3 does not divide"),
        (("./old", "./new", *FLAGS, "--report", "x.txt"), "--report x.txt: unknown file type"),
        (("a\0b", "./new", *FLAGS), "not in the catalog"),
    ],
)
def test_what_cannot_be_compared_is_refused(run: Run, models: Path, argv: tuple[str, ...], problem: str) -> None:
    assert problem in refused(run("diff", *argv))


def test_every_format_is_written_and_reported(run: Run, models: Path) -> None:
    ran = run("diff", "./old", "./new", *FLAGS, "--format", "csv", "--report", "d.json", "--report", "d.md")
    table = list(csv.DictReader(io.StringIO(ran.out)))
    deltas = {(row["part"], row["name"]): row["delta"] for row in table}
    assert deltas["figure", "kv.bytes_per_token"] == "-65536"
    assert deltas["step", "kv.bytes_per_token by num_key_value_heads"] == "-65536"
    memory = {row["name"]: int(row["delta"]) for row in table if row["part"] == "memory"}
    assert sum(memory.values()) - memory["memory.total"] == memory["memory.total"]
    Draft202012Validator(document_schema("diff")).validate(json.loads((models / "d.json").read_text(encoding="utf-8")))
    assert "| KV per token | 128 KiB | 64 KiB | -64 KiB (-50.0%) |" in (models / "d.md").read_text(encoding="utf-8")


# --- revisions --------------------------------------------------------------------------------------------------------


def policy(folder: Path, target: str, model: str, more: str = "") -> None:
    (folder / "kvplan.policy.yaml").write_text(
        "version: 1\ndefaults: {gpu: a100-80g, max_model_len: 32k}\ntargets:\n"
        f"  - {{id: {target}, model: {model}, rules: {{fits: true}}}}\n{more}",
        encoding="utf-8",
    )


def git(folder: Path, *argv: str) -> None:
    settings = (
        "-c",
        "user.name=n",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "init.defaultBranch=main",
    )
    subprocess.run(["git", *settings, *argv], cwd=folder, check=True, capture_output=True, timeout=900)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, tagged v1 and v2: in deploy/ a policy with a model beside it, whose KV heads are halved in v2."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in list(os.environ):
        if name.startswith("GIT_"):  # a hook's own repository must not be taken for this one
            monkeypatch.delenv(name)
    deploy = tmp_path / "repo" / "deploy"
    deploy.mkdir(parents=True)
    git(deploy.parent, "init", "-q")
    config_file(deploy / "model")
    policy(deploy, "chat", "./model/config.json", "  - {id: gone, model: llama-3.1-8b, rules: {fits: true}}\n")
    git(deploy.parent, "add", "-A")
    git(deploy.parent, "commit", "-qm", "one")
    git(deploy.parent, "tag", "v1")
    config_file(deploy / "model", {"num_key_value_heads": 4})
    policy(deploy, "chat", "./model/config.json", "  - {id: fresh, model: llama-3.1-8b, rules: {fits: true}}\n")
    git(deploy.parent, "commit", "-qam", "two")
    git(deploy.parent, "tag", "v2")
    monkeypatch.chdir(deploy)
    return deploy.parent


@pytest.mark.parametrize(
    "argv",
    [
        ("v1", "v2", "--policy", "kvplan.policy.yaml"),
        ("v1", "HEAD", "--policy", "./kvplan.policy.yaml"),
        ("v1", "--policy", "kvplan.policy.yaml"),  # with the file as it is now
        ("v1:deploy/kvplan.policy.yaml", "v2:deploy/kvplan.policy.yaml"),  # from the top, as git has it
        ("v1:./kvplan.policy.yaml", "v2:./kvplan.policy.yaml"),
        ("HEAD~1:./kvplan.policy.yaml", "kvplan.policy.yaml"),
        ("v1:./kvplan.policy.yaml",),
    ],
)
def test_a_policy_and_the_models_beside_it_are_read_at_each_revision(
    run: Run, repository: Path, argv: tuple[str, ...]
) -> None:
    document = document_of(run("diff", *argv, "--format", "json"))
    assert figure(document, "kv.bytes_per_token") == (131_072, 65_536, -65_536)
    assert (document["only_old"], document["only_new"]) == (["gone"], ["fresh"])
    (comparison,) = document["comparisons"]
    assert comparison["changes"] == [{"kind": "model", "name": "num_key_value_heads", "old": "8", "new": "4"}]
    assert (
        comparison["old"]["title"].removeprefix("chat: ").removeprefix("./").startswith("model/config.json on a100-80g")
    )


def test_from_the_top_the_policy_reads_the_same(run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    document = document_of(run("diff", "v1", "v2", "--policy", "deploy/kvplan.policy.yaml", "--format", "json"))
    assert figure(document, "kv.bytes_per_token") == (131_072, 65_536, -65_536)


def test_a_model_is_read_at_a_revision_too(run: Run, repository: Path) -> None:
    for old, new in (("v1:./model", "v2:./model"), ("v1:deploy/model/config.json", "./model/config.json")):
        document = document_of(run("diff", old, new, *FLAGS, "--format", "json"))
        assert figure(document, "kv.bytes_per_token") == (131_072, 65_536, -65_536)


def test_a_config_at_a_revision_is_read_with_the_files_beside_it(run: Run, repository: Path) -> None:
    """ModelOpt's fp8 cache has half the bytes of a bfloat16 one: 4 KV heads as above, then 1 byte a value."""
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    side = {"producer": {"name": "modelopt"}, "quantization": stated}
    (repository / "deploy/model/hf_quant_config.json").write_text(json.dumps(side), encoding="utf-8")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "three")
    places = ("v2:./model/config.json", "HEAD:./model/config.json")
    document = document_of(run("diff", *places, *FLAGS, "--format", "json"))
    assert figure(document, "kv.bytes_per_token") == (65_536, 32_768, -32_768)


def test_files_that_flags_name_are_those_that_lie_here(run: Run, repository: Path) -> None:
    (repository / "deploy" / "lengths.csv").write_text("1000\n2000\n3000\n", encoding="utf-8")  # not committed
    flags = (*FLAGS, "--lengths", "lengths.csv", "--format", "json")
    at_revisions = document_of(run("diff", "v1:./model", "v2:./model", *flags))
    old, new, _ = figure(at_revisions, "concurrency.users")
    assert 0 < old < new
    (comparison,) = at_revisions["comparisons"]
    assert [change["name"] for change in comparison["changes"]] == ["num_key_value_heads"]


def test_what_is_not_committed_counts_only_for_the_file_as_it_is_now(run: Run, repository: Path) -> None:
    config_file(repository / "deploy" / "model", {"num_key_value_heads": 2})
    committed = document_of(run("diff", "v1", "HEAD", "--policy", "kvplan.policy.yaml", "--format", "json"))
    now = document_of(run("diff", "v1", "--policy", "kvplan.policy.yaml", "--format", "json"))
    assert figure(committed, "kv.bytes_per_token")[1] == 65_536
    assert figure(now, "kv.bytes_per_token")[1] == 32_768


def test_nothing_of_a_revision_is_left_behind(run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    folder = repository.parent / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    here = Path.cwd()
    assert run("diff", "v1", "v2", "--policy", "kvplan.policy.yaml").code == 0
    assert run("diff", "v1", "v2:deploy/nope.json").code == 2
    assert list(folder.iterdir()) == []
    assert Path.cwd() == here


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("nope", "v2", "--policy", "kvplan.policy.yaml"), "revision 'nope': no such commit"),
        (("v1", "", "--policy", "kvplan.policy.yaml"), "revision '' is not a valid revision name"),
        (("v1", "v2", "--policy", "nope.yaml"), "v1:nope.yaml: there is no such file at that revision"),
        (("v1", "v2", "--policy", "/etc/passwd.yaml"), "lies outside the repository"),
        (("v1", "v2", "--policy", "../../x.yaml"), "lies outside the repository"),
        (("v1", "--policy", "model"), "v1: model is a directory, not a file"),
        (("v1:nope", "v2:nope"), "v1:nope: there is no such file at that revision"),
        (("v1", "v2"), "revisions of a policy need --policy PATH"),
        (("v1\x1b", "v2", "--policy", "kvplan.policy.yaml"), r"revision 'v1\x1b' is not a valid revision name"),
    ],
)
def test_a_revision_or_file_that_is_not_there_is_refused(
    run: Run, repository: Path, argv: tuple[str, ...], problem: str
) -> None:
    assert problem in refused(run("diff", *argv, *(FLAGS if argv == ("v1", "v2") else ())))


@pytest.mark.parametrize("name", ["-x", "--output=stolen", "--upload-pack=x"])
def test_a_revision_is_never_an_option_of_git(run: Run, repository: Path, name: str) -> None:
    message = refused(run("diff", "--policy", "kvplan.policy.yaml", "--", name, "v2"))
    assert message == f"revision '{name}' is not a valid revision name; write a branch, a tag or a commit: main, HEAD~1"
    assert not (repository / "deploy" / "stolen").exists()


def test_outside_a_repository_and_without_git_one_line_says_so(
    run: Run, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "not a git repository" in refused(run("diff", "v1", "v2", "--policy", "kvplan.policy.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in refused(run("diff", "v1", "v2", "--policy", "kvplan.policy.yaml"), 3)


def test_a_fault_of_an_old_policy_names_the_revision_and_the_line(run: Run, repository: Path) -> None:
    policy(repository / "deploy", "chat", "./nothing.json")
    git(repository, "commit", "-qam", "three")
    message = refused(run("diff", "v1", "HEAD", "--policy", "kvplan.policy.yaml"))
    assert message.startswith("HEAD: kvplan.policy.yaml:4:")
    assert "target chat: " in message
    (repository / "deploy" / "kvplan.policy.yaml").write_text("version: 1\nversion: 1\n", encoding="utf-8")
    git(repository, "commit", "-qam", "four")
    message = refused(run("diff", "v1", "HEAD", "--policy", "kvplan.policy.yaml"))
    assert message.startswith("HEAD: kvplan.policy.yaml:2:1: ")
    (repository / "deploy" / "kvplan.policy.yaml").write_bytes(b"\xff")
    git(repository, "commit", "-qam", "five")
    message = refused(run("diff", "v1", "HEAD", "--policy", "kvplan.policy.yaml"))
    assert message == "HEAD: kvplan.policy.yaml: not UTF-8 (byte 0 is 0xff); convert it"  # and no name of a copy


def test_a_command_names_files_by_its_words(run: Run, repository: Path) -> None:
    for name, heads in (("one", 8), ("two", 2)):
        config_file(repository / "a b", {"num_key_value_heads": heads})
        (repository / "deploy" / "kvplan.policy.yml").write_text(
            "version: 1\ntargets:\n  - {id: chat, gpu: a100-80g, rules: {fits: true},\n"
            "     command: \"vllm serve '../a b' --max-model-len 8192\"}\n",
            encoding="utf-8",
        )
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", name)
    shutil.rmtree(repository / "a b")  # neither revision is read from the work tree
    document = document_of(run("diff", "HEAD~1", "HEAD", "--policy", "kvplan.policy.yml", "--format", "json"))
    assert figure(document, "kv.bytes_per_token") == (131_072, 32_768, -98_304)


def test_a_link_in_a_revision_is_not_followed(run: Run, repository: Path) -> None:
    (repository / "deploy" / "link.json").symlink_to("/etc/passwd")
    policy(repository / "deploy", "chat", "./link.json")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "link")
    message = refused(run("diff", "v1", "HEAD", "--policy", "kvplan.policy.yaml"))
    assert "HEAD:deploy/link.json is a symbolic link" in message


def test_a_diff_loads_no_heavy_library(models: Path) -> None:
    code = (
        "import sys\nfrom kvplan.cli.main import main\n"
        "code = main(['diff', './old', './new', '--gpu', 'h200', '--ctx', '8k', '--quiet'])\n"
        "print(code, *sorted({'numpy', 'pandas', 'torch', 'matplotlib', 'jinja2', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "0"
