"""What people type before they know the commands is read as the command that answers it, and a note says which."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

READ = "kvplan: note: read as: kvplan "
DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  selector: {matchLabels: {app: chat}}
  template:
    metadata: {labels: {app: chat}}
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.20.0
        args: [--model, Qwen/Qwen3-8B, --max-model-len, "16384"]
        resources: {limits: {nvidia.com/gpu: "1"}}
"""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-8B", "estimate Qwen/Qwen3-8B"),
        ("qwen3-8b --gpu l40s --ctx 8k", "estimate qwen3-8b --gpu l40s --ctx 8k"),
        ("qwen3-8b l40s", "estimate qwen3-8b --gpu l40s"),
        ("estimate qwen3-8b 2x4090 --context 8k", "estimate qwen3-8b --gpu 2x4090 --ctx 8k"),
        ("estimate qwen3-8b --gpu l40s --json", "estimate qwen3-8b --gpu l40s --format json"),
        ("estimate qwen3-8b --gpu l40s --users 4", "recommend qwen3-8b --gpu l40s --users 4"),
        ("estimate qwen3-8b --gpu l40s --concurrency=4", "recommend qwen3-8b --gpu l40s --users=4"),
        ("estimate qwen3-8b --gpus l40s,h200", "estimate qwen3-8b --gpu l40s,h200"),
        ("fit qwen3-8b --gpu l40s", "estimate qwen3-8b --gpu l40s"),
        ("compare qwen3-8b qwen3-14b l40s", "diff qwen3-8b qwen3-14b --gpu l40s"),
        (
            "compare qwen3-8b --gpu l40s --ctx 8k --engine vllm,sglang",
            "sweep qwen3-8b --gpu l40s --ctx 8k --engine vllm,sglang",
        ),
        ("cost qwen3-8b --users 4 --gpus l40s", "recommend qwen3-8b --users 4 --gpus l40s"),
        ("estimate qwen3-8b --gpu l40s --max-users 4", "recommend qwen3-8b --gpu l40s --users 4"),
        ("estimate qwen3-8b --gpu l40s --num-gpus 2 --ctx 8k", "estimate qwen3-8b --gpu 2xl40s --ctx 8k"),
        ("estimate qwen3-8b --gpu=l40s --n-gpus=2", "estimate qwen3-8b --gpu 2xl40s"),
        (
            "simulate qwen3-8b --gpu l40s --qps 5 --isl 1000 --osl 20 --num-requests 9",
            "simulate qwen3-8b --gpu l40s --rate 5 --prompt-tokens 1000 --output-tokens 20 --num-requests 9",
        ),
        ("estimate qwen3-8b --gpu l40s -q fp8 --ctx 8k", "estimate qwen3-8b --gpu l40s --quantization fp8 --ctx 8k"),
        (
            "estimate qwen2.5-vl-7b --gpu l40s --images 2 --ctx 8k",
            "estimate qwen2.5-vl-7b --gpu l40s --limit-mm-per-prompt image=2 --ctx 8k",
        ),
        ("estimate --model qwen3-8b --gpu l40s --ctx 8k", "estimate qwen3-8b --gpu l40s --ctx 8k"),
        ("check --model qwen3-8b --gpu l40s --ctx 8k", "estimate qwen3-8b --gpu l40s --ctx 8k --exit-code"),
        ("list", "models"),
        ("4090", "gpus 4090"),
        ("plan qwen3-8b on 2x4090 8k", "estimate qwen3-8b --gpu 2x4090 --ctx 8k"),
        ("estimate --model qwen3-8b --hardware l40s --server sglang", "estimate qwen3-8b --gpu l40s --engine sglang"),
        ("estimate qwen3-8b --gpu l40s --gpus 2 --vllm", "estimate qwen3-8b --gpu 2xl40s --engine vllm"),
        ("estimate qwen3-8b --gpu l40s --max-context", "estimate qwen3-8b --gpu l40s --ctx auto"),
        ("estimate qwen3-8b --gpu l40s --max-context 8k", "estimate qwen3-8b --gpu l40s --ctx 8k"),
        (
            "estimate qwen3-8b --gpu l40s --fp8 --colocate",
            "estimate qwen3-8b --gpu l40s --quantization fp8 --enable-sleep-mode",
        ),
        ("explain qwen3-0.6b --gpu l4", "estimate qwen3-0.6b --gpu l4 --explain"),
        ("compare l4 l40s --model qwen3-8b --ctx 8k", "sweep --gpu l4,l40s qwen3-8b --ctx 8k"),
        ("diff qwen3-8b --gpu l4,l40s --ctx 8k", "sweep qwen3-8b --gpu l4,l40s --ctx 8k"),
        (
            "simulate qwen3-8b --gpu l40s --num-prompts 9 --input-len 1000 --osl 20 --ttft 9s --itl 90ms",
            "simulate qwen3-8b --gpu l40s --num-requests 9 --prompt-tokens 1000 --output-tokens 20"
            " --slo ttft=9s,tpot=90ms --rate inf",
        ),
        (
            "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --gpu l40s",
            "estimate --from-command 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --gpu l40s",
        ),
    ],
)
def test_a_line_is_read_as_the_command_that_answers_it(run: Run, typed: str, meant: str) -> None:
    ran, stated = run(*typed.split()), run(*shlex.split(meant))
    assert READ + meant in ran.err.splitlines()[:2]
    assert (ran.code, ran.out) == (stated.code, stated.out)
    assert ran.code == 0


@pytest.mark.parametrize(
    ("typed", "stated"),
    [
        ("qwen3:32b --gpu 3090", "qwen3:32b --engine ollama --gpu 3090"),
        ("qwen3-30b-a3b --gpu m4-max-64g", "qwen3-30b-a3b --engine llamacpp --gpu m4-max-64g"),
        (
            "acme/Qwen3-8B-GGUF:Q4_K_M --gpu l4 --ctx 8k",
            "acme/Qwen3-8B-GGUF:Q4_K_M --gpu l4 --ctx 8k --engine llamacpp",
        ),
        ("qwen3-next-80b --gpu 2xh100 --ctx 8k", "qwen3-next-80b-a3b --gpu 2xh100 --ctx 8k"),
    ],
)
def test_a_name_or_a_gpu_says_which_server_or_model_is_meant(run: Run, typed: str, stated: str) -> None:
    by_name, whole = run("estimate", *typed.split()), run("estimate", *stated.split())
    assert (by_name.code, by_name.out) == (whole.code, whole.out)
    assert by_name.code == 0


def test_each_unknown_option_has_its_own_hint(run: Run) -> None:
    ran = run("estimate", "qwen3-8b", "--gpu", "l40s", "--foo", "--context", "8k", "--n-gpus", "2", "--budget", "3")
    assert ran.code == 2
    hints = dict(error.split(": ", 1) for error in (text.removeprefix("kvplan: error: ") for text in ran.errors))
    assert hints["--foo"] == "no such option; see `kvplan estimate --help`"
    assert hints["--context"] == "no such option; use --ctx"
    assert hints["--n-gpus"].endswith("--gpu 8xh100")
    line = hints["--budget"].partition("`kvplan ")[2].rstrip("`")
    assert run(*line.split()).code == 0


def test_a_servers_flag_in_a_pasted_command_stays_the_servers(run: Run) -> None:
    ran = run("estimate", "--from-command", "vllm serve --model Qwen/Qwen3-8B -q fp8", "--gpus", "l40s", "--ctx", "8k")
    assert "--from-command 'vllm serve --model Qwen/Qwen3-8B -q fp8'" in ran.err.splitlines()[0]


def test_a_quoted_command_is_planned(run: Run) -> None:
    ran = run("vllm serve Qwen/Qwen3-8B --max-model-len 8192", "--gpu", "l40s", "-q")
    assert ran.out.startswith("qwen3-8b on l40s: ")
    assert READ not in ran.err  # -q


@pytest.mark.parametrize(
    ("typed", "same"),
    [(("-h",), ("--help",)), (("help",), ("--help",)), (("estimate", "-h"), ("estimate", "--help")),
     (("help", "why"), ("why", "--help")), (("version",), ("--version",))],
)  # fmt: skip
def test_help_and_the_version_have_their_usual_names(run: Run, typed: tuple[str, ...], same: tuple[str, ...]) -> None:
    assert run(*typed).out == run(*same).out


def test_a_file_is_read_by_the_command_for_its_kind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deploy.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    Path("server.log").write_text("INFO 07-25 03:26:41 [api_server.py:677] Starting vLLM server on http://x:8000\n")
    assert "chat  qwen3-8b on l40s" in run("deploy.yaml").out
    planned = run("estimate", "deploy.yaml", "--gpu", "l40s").out
    assert planned.startswith("qwen3-8b on l40s: ")
    assert planned == run("estimate", "--from-command", DEPLOYMENT, "--gpu", "l40s").out
    assert run("server.log").out == run("why", "server.log").out
    assert refused(run("estimate", "server.log")).endswith(
        "model server.log is a log; read it with `kvplan why server.log`"
    )


def test_a_policy_is_written_for_a_manifest(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, context, release and GPU are the container's, and the policy holds."""
    monkeypatch.chdir(tmp_path)
    Path("deploy.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    assert run("check", "--init", "deploy.yaml").code == 0
    text = Path("kvplan.policy.yaml").read_text(encoding="utf-8")
    for stated in ("model: Qwen/Qwen3-8B", "gpu: l40s", "engine: vllm@0.20.0", "max_model_len: 16384"):
        assert f"    {stated}\n" in text
    assert run("check").code == 0


def test_a_log_is_a_logs_place_too(run: Run) -> None:
    example = ("examples/vllm-0.10.log", "--gpu", "a100-80g")
    assert run("reconcile", *example).out == run("reconcile", "--log", *example).out


def test_part_of_several_names_lists_them(run: Run) -> None:
    names = [row["name"] for row in run("models", "coder", "--format", "json").json["models"]]
    assert {"qwen2.5-coder-7b", "qwen3-coder-30b-a3b"} <= set(names)
    assert not {"qwen3-8b", "llama-3.1-8b"} & set(names)


@pytest.mark.parametrize(
    "typed",
    [
        "frobnicate",
        "estimate qwen3-8b foo",
        "estimate qwen3-8b --gpus 2 --gpu l40s,h200",
        "simulate qwen3-8b --gpu l40s --rate 4 --ttft 500",
        "simulate qwen3-8b --gpu l40s --rate 4 --ttft 1s --slo tpot=20ms",
        "qwen3-8b --frobnicate",
        "gpus a b",
    ],
)
def test_a_line_without_a_meaning_is_refused_as_before(run: Run, typed: str) -> None:
    assert run(*typed.split()).code == 2


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Qwen/Qwen3-8B --max-model-len 8192",
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --context-length 8192",
        "ollama run qwen3:14b",
    ],
)
def test_a_command_in_place_of_a_model_is_read_as_pasted(run: Run, command: str) -> None:
    words = ("--gpu", "rtx-3090", "--format", "json")
    pasted = run("estimate", "--from-command", command, *words).json
    assert run("estimate", command, *words).json == pasted


def test_a_number_of_a_release_is_the_servers(run: Run) -> None:
    words = ("upgrade", "qwen3-8b", "--gpu", "l40s", "--ctx", "8k")
    by_number = run(*words, "--from", "0.24", "--to", "latest")
    assert by_number.code == 0
    assert by_number.out == run(*words, "--from", "vllm@0.24", "--to", "vllm").out
    of_the_same = run(*words, "--from", "sglang@0.4.6", "--to", "0.5")
    assert of_the_same.out == run(*words, "--from", "sglang@0.4.6", "--to", "sglang@0.5").out


def test_a_page_is_written_by_the_command_that_plans(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ran = run("report", "qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "-o", str(page))
    assert ran.code == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_pipe_is_the_log() -> None:
    """`docker logs vllm | kvplan why`, as a shell starts it."""
    log = Path(__file__).parents[2] / "examples/vllm-did-not-start.log"
    words = [sys.executable, "-m", "kvplan", "why"]
    piped = subprocess.run(words, input=log.read_bytes(), capture_output=True, check=True)
    named = subprocess.run([*words, str(log)], capture_output=True, check=True)
    assert piped.stdout == named.stdout
    assert b"read as: kvplan why -" in piped.stderr
