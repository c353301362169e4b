"""`kvplan check --init`: a policy that today's plan keeps, from options, a command or a running server."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvplan.asked.pasted import read_command
from kvplan.core import strict_yaml
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.policy import init as policy_init
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import findings, follows_schema

INITS: dict[str, tuple[str, ...]] = {
    "plain": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k"),
    "own maximum": ("llama-3.1-8b", "--gpu", "h200"),
    "auto": ("llama-3.1-8b", "--gpu", "l4", "--ctx", "auto"),
    "many": ("qwen3-30b-a3b", "--gpu", "h100-80g", "--tp", "2", "--ctx", "16k", "--kv-cache-dtype", "fp8",
             "--gpu-memory-utilization", "0.85", "--enforce-eager", "--no-enable-prefix-caching", "--engine",
             "vllm@0.21", "--kv-offloading-size", "64", "--max-loras", "2", "--max-lora-rank", "32"),
    "lengths": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--lengths", "lognormal:mean=2000,p95=6000",
                "--overflow", "2%", "--shared-prefix", "500"),
    "mean": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--prompt-tokens", "2k", "--output-tokens", "500"),
    "memory": ("llama-3.1-8b", "--gpu-memory", "24GiB", "--ctx", "4k"),
    "stated pool": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--kv-cache-memory-bytes", "10G"),
    "blocks": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--num-gpu-blocks-override", "1000"),
    "states": ("qwen3-next-80b-a3b", "--gpu", "h200", "--tp", "4", "--ctx", "64k"),
    "draft": ("qwen3-32b", "--gpu", "h200", "--ctx", "8k", "--draft-model", "qwen3-0.6b"),
    "several": ("llama-3.1-8b", "--gpu", "l4,h200", "--ctx", "4k,8k"),
    "command": ("--gpu", "h200", "--from-command", "vllm serve Qwen/Qwen3-32B --max-model-len 32k -tp 2 --port 8000"),
    "offline": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--usage", "offline"),
}  # fmt: skip


@pytest.mark.parametrize("name", INITS)
def test_a_policy_that_init_writes_is_kept_at_once(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "new.yaml"
    written = run("check", "--init", *INITS[name], "-o", path, "--quiet")
    assert (written.code, written.err) == (0, "")
    assert follows_schema(path)
    ran = run("check", path, "--format", "json", "--strict")
    assert ran.code == 0, ran.out
    expected = run("estimate", *INITS[name], "--format", "json").json
    plans = expected.get("plans", [expected])
    assert len(ran.json["targets"]) == len(plans)
    by_title = sorted((target["figures"]["kv_tokens"], target["figures"]["weights"]) for target in ran.json["targets"])
    assert by_title == sorted((plan["kv"]["tokens"], plan["memory"]["weights"]) for plan in plans)


def test_the_slack_is_what_the_file_says(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    run("check", "--init", *INITS["plain"], "-o", path)
    assert "90% of today's figure" in path.read_text()
    by_rule = findings(run("check", path, "--format", "json"))
    for rule in ("min_concurrency", "min_kv_tokens"):
        actual = by_rule[rule]["actual"]
        assert by_rule[rule]["limit"] == actual * 90 // 100
    assert 1.02 <= by_rule["max_weights"]["limit"] / by_rule["max_weights"]["actual"] < 1.0201
    assert by_rule["max_kv_bytes_per_token"]["limit"] == by_rule["max_kv_bytes_per_token"]["actual"] == 131_072


def test_the_policy_of_a_local_model_names_it_from_its_own_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path / "model")
    (tmp_path / "deploy").mkdir()
    alone = refused(run("check", "--init", "./model", "--gpu", "h200", "-o", "deploy/p.yaml"))
    assert alone.startswith(f"model points outside {tmp_path}/deploy (./model)")  # what the check would refuse
    (tmp_path / ".git").mkdir()
    for model in ("./model", "model", "model/config.json"):
        assert run("check", "--init", model, "--gpu", "h200", "-o", "deploy/p.yaml", "--force").code == 0
        assert "model: ../model" in Path("deploy/p.yaml").read_text()
        assert run("check", "deploy/p.yaml").code == 0


def test_a_file_that_exists_is_kept_unless_forced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mine\n")
    assert "exists" in refused(run("check", "--init", *INITS["plain"], "-o", path))
    assert path.read_text() == "mine\n"
    assert run("check", "--init", *INITS["plain"], "-o", path, "--force").code == 0
    assert path.read_text() != "mine\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("llama-3.1-8b",), "--gpu: missing"),
        (("--gpu", "h200"), "MODEL: missing"),
        (("llama-3.1-70b", "--gpu", "l4", "--ctx", "8k"), "does not fit"),
        ((*INITS["plain"], "--strict"), "--strict checks a policy"),
        ((*INITS["plain"], "--today", "2030-01-01"), "--today checks a policy"),
        (("--gpu", "h200", "--from-pid", "1", "--from-command", "vllm serve x"), "are alternatives"),
        (("--gpu", "h200", "--from-pid", "one"), "is not a process id"),
        (("--gpu", "h200", "--from-pid", ""), "is not a process id ('')"),
    ],
)
def test_an_init_that_cannot_be_is_refused_and_writes_nothing(
    run: Run, tmp_path: Path, words: tuple[str, ...], what: str
) -> None:
    assert what in refused(run("check", "--init", *words, "-o", tmp_path / "p.yaml"))
    assert list(tmp_path.iterdir()) == []


def test_secrets_of_a_command_are_not_written(run: Run, tmp_path: Path) -> None:
    command = "HF_TOKEN=hf_secret vllm serve llama-3.1-8b --max-model-len 8192 --api-key sk-secret"
    path = tmp_path / "p.yaml"
    assert run("check", "--init", "--gpu", "h200", "--from-command", command, "-o", path).code == 0
    assert "secret" not in path.read_text()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_the_policy_of_a_running_server_is_read_from_its_process(run: Run, tmp_path: Path) -> None:
    """A child whose command line is a server's: `python .../vllm serve ...`, as its start script has it."""
    script = tmp_path / "vllm"
    script.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n")
    words = [
        sys.executable,
        str(script),
        "serve",
        "Qwen/Qwen3-32B",
        "--max-model-len",
        "16384",
        "-tp",
        "2",
        "--api-key",
        "x y",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            path = tmp_path / "p.yaml"
            ran = run("check", "--init", "--gpu", "h100-80g", "--from-pid", str(server.pid), "-o", path)
        finally:
            server.kill()
    assert ran.code == 0, ran.err
    (target,) = run("check", path, "--format", "json").json["targets"]
    assert target["title"] == "qwen3-32b on h100-80g, tp 2, 16,384 tokens"


def test_a_process_that_is_no_server_is_refused_without_its_words(run: Run, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "8").mkdir()
    (proc / "7" / "cmdline").write_bytes(b"python\0-m\0vllm.entrypoints.openai.api_server\0--model\0a b\0")
    (proc / "8" / "cmdline").write_bytes(b"")
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "a b"]
    assert policy_init.command_of("7", proc) == words
    (proc / "7" / "environ").write_bytes(b"HF_TOKEN=hf_secret\0VLLM_USE_V1=0\0PATH=/bin\0")
    assert policy_init.command_of("7", proc) == ["VLLM_USE_V1=0", *words]
    (proc / "7" / "environ").write_bytes(b"HF_TOKEN=hf_secret\0")
    (proc / "7" / "cmdline").write_bytes(b"python\0-m\0sglang.launch_server\0--model-path\0Qwen/Qwen3-8B\0")
    command = read_command(shlex.join(policy_init.command_of("7", proc)))
    assert (command.engine, command.model) == ("sglang", "Qwen/Qwen3-8B")
    with pytest.raises(EnvironmentProblem, match="no command line"):
        policy_init.command_of("8", proc)
    with pytest.raises(EnvironmentProblem, match="no such process"):
        policy_init.command_of("9", proc)
    with pytest.raises(EnvironmentProblem, match="no /proc"):
        policy_init.command_of("9", tmp_path / "none")
    with pytest.raises(UsageError, match="a process id"):
        policy_init.command_of("../7", proc)
    message = refused(
        run("check", "--init", "--gpu", "h200", "--from-pid", str(os.getpid()), "-o", tmp_path / "p.yaml")
    )
    assert message == (
        f"--from-pid {os.getpid()} starts no server that kvplan plans; name its process; "
        "`pgrep -fa 'vllm|sglang|llama-server|ollama'` lists the servers that run"
    )


@pytest.mark.parametrize(
    "text", ["010", "1e9", "yes", "null", "2026-01-01", "a: b", "#x", "é", "-x", "a #b", "", "0x1", "'", "x/y@z", "1:2"]
)
def test_a_value_that_is_written_is_read_back(text: str) -> None:
    read = strict_yaml.parse(f"k: {policy_init.quoted(text)}\n", "p").values["k"]
    assert strict_yaml.text(read, "k") == text
    assert yaml.safe_load(f"k: {policy_init.quoted(text)}\n") == {"k": text}
