"""`kvplan check MANIFEST`, and targets of a policy that name a container of one."""

import json
import shutil
from pathlib import Path

import pytest

from kvplan.asked.manifest import quantity
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

EXAMPLES = Path(__file__).parents[2] / "examples" / "manifests"
POLICY = """\
version: 1
targets:
  - id: chat
    manifest: deployment.yaml
    rules: {fits: true, min_concurrency: 2}
  - id: second
    manifest: kserve.yaml
    container: llama3
    max_model_len: 8k
    rules: {fits: true}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in EXAMPLES.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_container_of_a_manifest_is_a_target_that_must_start(run: Run) -> None:
    ran = run("check", EXAMPLES / "kserve.yaml", "--format", "json")
    rows = [(row["id"], rule["rule"], rule["outcome"]) for row in ran.json["targets"] for rule in row["findings"]]
    assert ran.code == 0
    assert rows == [("llama3", "fits", "pass"), ("qwen3", "fits", "pass")]
    assert "target llama3: gpu: l40s is inferred from node.kubernetes.io/instance-type: g6e.12xlarge" in ran.err
    assert "target qwen3: 2 replicas: the figures are of one" in ran.err


def test_a_manifest_is_planned_as_its_command_is(run: Run) -> None:
    """By another way in: the same words as a pasted command, on the GPU that the label says."""
    (target,) = run("check", EXAMPLES / "deployment.yaml", "--format", "json", "-q").json["targets"]
    pasted = "docker run vllm/vllm-openai:v0.33.0 Qwen/Qwen3-32B --max-model-len 16384 -tp 2 --max-num-seqs 64"
    plan = run("estimate", "--from-command", pasted, "--gpu", "h100-80g", "--format", "json", "-q").json
    assert target["figures"]["kv_tokens"] == plan["kv"]["tokens"]
    whole = run("estimate", "--from-command", (EXAMPLES / "deployment.yaml").read_text(), "--gpu", "h100-80g",
                "--format", "json", "-q").json  # fmt: skip
    assert whole["kv"] == plan["kv"]


def test_a_server_that_does_not_start_fails_the_check(run: Run, folder: Path) -> None:
    ran = run("check", "deployment.yaml", "--gpu", "l4", "-q")
    assert ran.code == 1
    assert "fail  KVP001 fits" in ran.out


def test_the_gpu_given_wins_over_a_label(run: Run, folder: Path) -> None:
    ran = run("check", "deployment.yaml", "--gpu", "h200")
    assert "qwen3-32b on h200" in ran.out
    assert "gpu: h200 counts, not h100-80g of nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3" in ran.err


def test_a_gpu_that_nothing_says_is_asked_for(run: Run, folder: Path) -> None:
    line = refused(run("check", "leaderworkerset.yaml"))
    assert line.startswith("leaderworkerset.yaml:13:1: target llama-405b: gpu: missing; ")
    assert "--gpu" in line


def test_a_pod_with_fewer_gpus_than_ranks_is_refused(run: Run, folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text(file.read_text().replace('nvidia.com/gpu: "2"', "nvidia.com/gpu: 1"))
    line = refused(run("check", "deployment.yaml", "-q"))
    assert "target chat: nvidia.com/gpu: its command needs 2 GPUs, and the manifest asks for 1" in line


def test_gpus_that_no_rank_takes_are_said(run: Run, folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text(file.read_text().replace('nvidia.com/gpu: "2"', "nvidia.com/gpu: 4"))
    assert "2 of 4 GPUs stay unused: its command uses 2" in run("check", "deployment.yaml").err


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: q}
spec:
  containers:
  - name: server
    image: lmsysorg/sglang:v0.5.23
    command: [python3, -m, sglang.launch_server, --model-path, Qwen/Qwen3-8B, --max-loras-per-batch, "2", --made-up,
      "7", --cuda-graph-max-bs, "8"]
"""


def test_notes_of_a_command_say_which_key_it_comes_from(run: Run, folder: Path) -> None:
    (folder / "pod.yaml").write_text(POD, encoding="utf-8")
    flags = "--made-up 7 --max-model-len 8k"
    (folder / "kvplan.yaml").write_text(
        "version: 1\ntargets:\n- {id: a, gpu: h100-80g, manifest: pod.yaml, rules: {fits: true}}\n"
        f"- {{id: b, gpu: h100-80g, command: vllm serve Qwen/Qwen3-8B {flags}, rules: {{fits: true}}}}\n",
        encoding="utf-8",
    )
    notes = [line for line in run("check", "kvplan.yaml").err.splitlines() if "target" in line]
    assert notes == [
        "kvplan: warning: target a: manifest: unknown to kvplan and ignored: --made-up",
        "kvplan: note: target a: manifest --cuda-graph-max-bs: SGLang 0.5.23 does not start with it; write "
        "--cuda-graph-max-bs-decode there",
        "kvplan: note: target a: manifest: --max-loras-per-batch without --enable-lora reserves nothing",
        "kvplan: warning: target b: command: unknown to kvplan and ignored: --made-up",
        "kvplan: note: target b: command --max-model-len 8k is 8,000 as in vLLM; 8K would be binary",
    ]
    pasted = run("estimate", "--from-command", f"vllm serve Qwen/Qwen3-8B {flags}", "--gpu", "h100-80g").err
    assert "note: --from-command --max-model-len 8k is 8,000" in pasted
    assert "warning: --from-command: unknown" in pasted


def test_two_pods_hold_one_server(run: Run, folder: Path) -> None:
    assert run("check", "leaderworkerset.yaml", "--gpu", "h100", "-q").code == 0
    file = folder / "leaderworkerset.yaml"
    file.write_text(file.read_text().replace("size: 2", "size: 1"))
    assert "needs 16 GPUs, and the manifest asks for 8;" in refused(
        run("check", "leaderworkerset.yaml", "--gpu", "h100", "-q")
    )


def test_ranks_of_dp_attention_take_no_gpus_of_their_own(run: Run, folder: Path) -> None:
    """SGLang 0.5.23 docs, "DP attention": `--tp 8 --dp 8 --enable-dp-attention` is a server of 8 GPUs, its attention's
    ranks are the tensor ranks (srt/layers/dp_attention.py: attn_tp_size = tp_size // dp_size).
    """
    ranks = 8
    words = f"--model-path Qwen/Qwen3-235B-A22B --tp {ranks} --dp {ranks} --enable-dp-attention"
    pod = POD[: POD.index("    command")] + f"    command: [sh, -c, python3 -m sglang.launch_server {words}]\n"
    for count in (ranks, ranks - 1):
        limits = f"    resources: {{limits: {{nvidia.com/gpu: {count}}}}}\n"
        (folder / f"{count}.yaml").write_text(pod + limits, encoding="utf-8")
    ran = run("check", f"{ranks}.yaml", "--gpu", "h200")
    assert (ran.code, "stay unused" in ran.err) == (0, False), ran
    fault = refused(run("check", f"{ranks - 1}.yaml", "--gpu", "h200", "-q"))
    assert f"needs {ranks} GPUs, and the manifest asks for {ranks - 1};" in fault


def test_a_model_inside_the_container_is_asked_for(run: Run, folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text(file.read_text().replace("value: Qwen/Qwen3-32B", "value: /models/mine"))
    line = refused(run("check", "deployment.yaml", "-q"))
    assert "model is a path in the container (/models/mine); name it in a policy" in line
    (folder / "kvplan.policy.yaml").write_text(
        POLICY.replace("    rules: {fits: true, m", "    model: qwen3-32b\n    rules: {fits: true, m")
    )
    assert run("check", "-q").code == 0


def test_targets_of_a_policy_name_containers(run: Run, folder: Path) -> None:
    (folder / "kvplan.policy.yaml").write_text(POLICY)
    ran = run("check", "--format", "json")
    assert ran.code == 0
    chat, second = ran.json["targets"]
    assert [rule["rule"] for rule in chat["findings"]] == ["fits", "min_concurrency"]
    assert "8,192 tokens" in second["title"]  # what a target says wins over its container


REFUSALS = [
    ("    container: llama3\n", "", "manifest has 2 containers that serve (llama3, qwen3); add container"),
    ("container: llama3", "container: nope", "names no container that serves ('nope'); write one of llama3, qwen3"),
    ("manifest: kserve.yaml", "manifest: ../x.yaml", "target second: manifest points outside"),
    ("manifest: kserve.yaml", "manifest: none.yaml", "none.yaml"),
    ("manifest: kserve.yaml", "manifest: kserve.yaml\n    command: vllm serve x", "names a manifest and a command"),
    ("manifest: kserve.yaml\n", "model: qwen3-8b\n", "names a container and no manifest"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "fault"), REFUSALS)
def test_a_target_whose_container_is_not_clear_is_refused(
    run: Run, folder: Path, old: str, new: str, fault: str
) -> None:
    assert POLICY.count(old) == 1
    (folder / "kvplan.policy.yaml").write_text(POLICY.replace(old, new))
    assert fault in refused(run("check", "-q"))


def test_options_of_a_plan_but_the_gpu_are_refused(run: Run, folder: Path) -> None:
    assert "--ctx" in refused(run("check", "deployment.yaml", "--ctx", "4k"))
    assert "compares policies, not manifests" in refused(run("check", "deployment.yaml", "--base", "HEAD"))
    assert "--gpu" in refused(run("check", "deployment.yaml", "--gpu", "h100,h200"))


def test_a_template_is_refused(run: Run, folder: Path) -> None:
    (folder / "t.yaml").write_text("apiVersion: apps/v1\nkind: Deployment\n{{- if .x }}\nspec: {}\n{{- end }}\n")
    assert "t.yaml is a template, which is not rendered" in refused(run("check", "t.yaml", "--gpu", "h100"))


def test_a_manifest_as_json_is_read(run: Run, folder: Path) -> None:
    spec = {"containers": [{"name": "c", "image": "vllm/vllm-openai:v0.33.0", "args": ["--model", "Qwen/Qwen3-8B"]}]}
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    (folder / "pod.json").write_text(text)
    ran = run("check", "pod.json", "--gpu", "h100-80g", "-q")
    assert ran.out.startswith("1 target passes\n\np  qwen3-8b on h100-80g")


def test_a_manifest_that_is_not_there_is_named(run: Run) -> None:
    """Not its --gpu, which only a manifest may have beside it."""
    ran = run("check", "nosuch.yaml", "--gpu", "l40s")
    assert ran.code == 2
    assert "nosuch.yaml: no such file or directory" in ran.err


def test_several_files_are_answered_one_after_the_other_and_the_worst_counts(run: Run, tmp_path: Path) -> None:
    files = [EXAMPLES / "deployment.yaml", EXAMPLES / "compose.yaml"]
    both = run("check", *files, "--gpu", "h100")
    answers = [run("check", file, "--gpu", "h100") for file in files]
    assert (both.code, both.out) == (0, "".join(ran.out for ran in answers))

    broken = tmp_path / "kvplan.policy.yaml"
    broken.write_text(
        "version: 1\ntargets:\n- {id: a, model: llama-3.1-70b, gpu: l4, rules: {fits: true}}\n", encoding="utf-8"
    )
    assert run("check", files[0], broken).code == run("check", broken, files[0]).code == 1
    assert run("check", broken, files[1]).code == 2  # nothing says its GPU


@pytest.mark.parametrize("words", [("--format", "json"), ("--format", "sarif"), ("--report", "x.xml"), ("--init",)])
def test_an_answer_that_is_one_document_takes_one_file(run: Run, words: tuple[str, ...]) -> None:
    ran = run("check", "a.yaml", "b.yaml", *words)
    assert ran.code == 2
    assert words[0] in ran.err


OFFLOADED = (
    "recommend",
    "llama-3.1-8b",
    "--gpus",
    "l40s",
    "--users",
    "4",
    "--ctx",
    "16k",
    "--kv-offloading-size",
    "64",
)


@pytest.mark.parametrize(
    ("output", "written", "small", "fault"),
    [
        # vLLM 0.33 maps all 64 GiB in /dev/shm and does not start with less
        # (v1/kv_offload/cpu/shared_offload_region.py); a container's memory counts /dev/shm, and 3 GB for a worker.
        ("k8s", "sizeLimit: 65Gi", "sizeLimit: 65Gi", ""),
        ("k8s", "sizeLimit: 65Gi", "sizeLimit: 8Gi", "/dev/shm is 8.00 GiB, less than 64.00 GiB for offloaded KV"),
        ("k8s", "sizeLimit: 65Gi", "sizeLimit: 63999M", "/dev/shm is 59.60 GiB, less than 64.00 GiB"),
        ("k8s", "memory: 88Gi", "memory: 32Gi", "the memory limit is 32.00 GiB, less than 66.79 GiB for offloaded"),
        ("compose", "shm_size: 65g", "shm_size: 8gb", "/dev/shm is 8.00 GiB, less than 64.00 GiB for offloaded KV"),
        ("compose", "memory: 88g", "memory: 32g", "the memory limit is 32.00 GiB, less than 66.79 GiB"),
    ],
)
def test_a_pod_must_hold_what_its_server_keeps_on_the_host(
    run: Run, tmp_path: Path, output: str, written: str, small: str, fault: str
) -> None:
    text = run(*OFFLOADED, "--output", output, "-q").out
    assert written in text
    (tmp_path / "deploy.yaml").write_text(text.replace(written, small))
    (target,) = run("check", tmp_path / "deploy.yaml", "-q", "--format", "json").json["targets"]
    (finding,) = target["findings"]
    assert finding["outcome"] == ("fail" if fault else "pass")
    assert fault in finding["message"]
    assert not fault or f"above {64 if 'shm' in fault else 67}Gi, by a few GiB for" in finding["fix"]


@pytest.mark.parametrize(
    ("text", "is_compose", "size"),
    [
        # kubernetes.io, "Resource Management for Pods and Containers": 129M and 123Mi are roughly the same; m is a
        # thousandth. The Compose specification: b, k or kb, m or mb, g or gb, in powers of 1,024.
        ("129M", False, 129_000_000),
        ("123Mi", False, 128_974_848),
        ("128974848", False, 128_974_848),
        ("400m", False, None),
        ("1gb", True, 2**30),
        ("2048k", True, 2**21),
        ("10mb", True, 10 * 2**20),
        ("${SHM}", True, None),
    ],
)
def test_sizes_of_both_formats_are_read(text: str, is_compose: bool, size: int | None) -> None:
    assert quantity(text, is_compose=is_compose) == size
