"""Pastes that were refused at first sight of public repositories, each for a cause that others share.

What a text starts is stated beside it, by the documentation of what reads it: sbatch, Dynamo, Ray Serve, Docker,
PowerShell, Modal.
"""

from pathlib import Path

import pytest

from kvplan.asked import batch, manifest
from kvplan.asked.files import from_files
from kvplan.asked.pasted import parse, parse_container, read_command
from kvplan.asked.question import Source
from kvplan.core.errors import EnvironmentProblem, NoServerError, UsageError
from kvplan.models import hub
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

SERVE = "vllm serve org/a --tensor-parallel-size 2"
DYNAMO = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Frontend:
      replicas: 1
      extraPodSpec: {mainContainer: {image: "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.2.0"}}
    DecodeWorker:
      replicas: 3
      resources: {limits: {gpu: "2"}}
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.2.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, org/a, --tensor-parallel-size, "2"]
"""
TWO = """
services:
  chat:
    image: vllm/vllm-openai:v0.20.0
    command: --model org/a --tensor-parallel-size 2
    deploy: {resources: {reservations: {devices: [{driver: nvidia, device_ids: ["1,2"], capabilities: [gpu]}]}}}
  embed:
    image: ghcr.io/huggingface/text-embeddings-inference:1.5
    command: [--model-id, /models/bge-m3]
"""
MODAL = """
import modal, subprocess

MODEL = "org/a"

@app.function(gpu="H200", timeout=60)
def serve():
    words = ["vllm", "serve", MODEL, "--tensor-parallel-size", "2", "--api-key", os.environ["KEY"]]
    subprocess.Popen(words)
"""


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m dynamo.vllm --model org/a --tensor-parallel-size 2",
        f"alias serve='{SERVE}'",
        f'tmux send-keys -t model:0.1 "source .venv/bin/activate" Enter\ntmux send-keys -t model:0.1 "{SERVE}" Enter',
        "NAME=org/a\nTP=2\nDIR=$HOME/models\n" + SERVE.replace("2", "$TP"),
        MODAL,
        TWO,
        DYNAMO,
        DYNAMO.replace("command: [python3, -m, dynamo.vllm]", "").replace(
            'args: [--model, org/a, --tensor-parallel-size, "2"]',
            'args: ["python3 -m dynamo.vllm --model org/a --tensor-parallel-size 2"]',
        ),
        "kind: inference\nenvironment:\n  command: [vllm, serve, org/a, -tp, '2']\nresources: {gpu: 2}\n",
    ],
)
def test_a_server_is_read_wherever_it_is_started(text: str) -> None:
    command = parse(text)
    assert (command.model, command.args) == ("org/a", {"tensor_parallel_size": 2})


@pytest.mark.parametrize("start", ["", "EXTRA = "])
def test_keywords_of_a_literal_are_unpacked(start: str) -> None:
    values = '{"tensor_parallel_size": 2}'
    code = f"{start}{values}\nLLM('org/a', **EXTRA)" if start else f"LLM('org/a', **{values})"
    assert parse(code).args["tensor_parallel_size"] == 2


def test_a_worker_of_dynamo_has_the_gpus_and_replicas_of_its_service() -> None:
    (worker,) = manifest.served(DYNAMO, "file")
    assert (worker.id, worker.num_gpus, worker.replicas) == ("DecodeWorker", 2, 3)
    command = parse_container(worker)
    assert command.engine is None  # 1.2.0 is Dynamo's release
    assert "what that sets itself is not read" in command.notes[0].text
    (many,) = manifest.served(DYNAMO.replace("replicas: 3", "replicas: 3\n      multinode: {nodeCount: 2}"), "file")
    assert (many.num_gpus, many.num_pods) == (2, 2)


def test_a_list_of_devices_may_stand_in_one_text() -> None:
    (chat,) = manifest.served(TWO, "file")
    assert chat.num_gpus == 2


def test_the_gpu_of_a_function_is_that_of_its_server() -> None:
    for text in (MODAL, 'gpu = "H200"\nLLM(model="org/a")'):
        resources = parse(text).resources
        assert resources is not None
        assert (resources.gpu, resources.gpu_label) == ("h200", "gpu: H200")


@pytest.mark.parametrize(
    "path", [r"C:\models\Qwen3-8B-Q4_K_M.gguf", r".\Qwen3-8B-Q4_K_M.gguf", r"<dir>\Qwen_Qwen3-8B-Q4_K_M.gguf"]
)
@pytest.mark.parametrize(
    "program", [r".\llama-server.exe", r"& 'C:\llama.cpp\llama-server.exe'", r"bin\llama-server.exe"]
)
def test_a_command_of_windows_is_read(program: str, path: str) -> None:
    command = parse(f"{program} -m {path} `\n  -c 8192")
    assert (command.engine, command.model) == ("llamacpp", "Qwen/Qwen3-8B")
    assert command.args == {"quantization": "Q4_K_M", "max_model_len": 8192}


def test_a_variable_names_llama_servers_model() -> None:
    image = "ghcr.io/ggml-org/llama.cpp:server-cuda"
    variables = "{LLAMA_ARG_MODEL: /models/Qwen3-8B-Q4_K_M.gguf}"
    command = parse(f"services:\n  llm:\n    image: {image}\n    environment: {variables}\n")
    assert (command.model, command.args) == ("Qwen/Qwen3-8B", {"quantization": "Q4_K_M"})


def test_a_folder_in_an_unknown_one_keeps_its_name() -> None:
    command = parse("DIR=$SCRATCH/models\nMODEL=$DIR/Qwen3-8B\nvllm serve $MODEL")
    assert command.model == "$SCRATCH/models/Qwen3-8B"


@pytest.mark.parametrize(
    ("lines", "per_node", "gpu"),
    [
        ("--gres=gpu:a100:4", "4", "a100-80g"),
        ("--gres=tmpdisk:9,gpu:4", "4", None),
        ("--gpus-per-node=h100:2 # two", "2", "h100-80g"),
        ("-N 2\n#SBATCH --gpus=l40s:8", "4", "l40s"),
        ("--gpus-per-task=1\n#SBATCH --ntasks-per-node=4\n#SBATCH -C h200", "4", "h200"),
        ("--nodes=2\n#SBATCH --ntasks=8\n#SBATCH --gpus-per-task=h100:1", "4", "h100-80g"),
        ("--gres=gpu", "1", None),
    ],
)
def test_a_batch_job_states_its_gpus(lines: str, per_node: str, gpu: str | None) -> None:
    """As sbatch's page has --gres, --gpus (of the whole job), --gpus-per-node and --gpus-per-task."""
    command = parse(f"#!/bin/bash\n#SBATCH {lines}\nsrun vllm serve org/a -tp $SLURM_GPUS_ON_NODE")
    assert command.args["tensor_parallel_size"] == int(per_node)
    assert (None if command.resources is None else command.resources.gpu) == gpu


def test_a_quoted_server_keeps_the_gpu_of_its_job_and_an_echo_starts_none() -> None:
    command = parse(f'#!/bin/bash\n#SBATCH --gres=gpu:h100:2\ntmux new-session -d -s v "{SERVE}"')
    assert command.resources is not None
    assert command.resources.gpu == "h100-80g"
    with pytest.raises(NoServerError):
        parse(f'python train.py\necho "{SERVE}"')


def test_a_clusters_own_name_of_a_gpu_asks_for_one() -> None:
    _, resources, notes = batch.job_of("#SBATCH --gres=gpu:h100-96:1\n")
    assert resources is None
    assert [note.text for note in notes] == ["--gres: h100-96 names no one GPU that kvplan knows; add --gpu"]


def test_ray_serve_starts_the_server_of_its_class() -> None:
    code = """
        LLMConfig(
            model_loading_config={"model_source": "org/a"}, server_cls=SGLangServer,
            engine_kwargs={"model_path": "org/a", "tp_size": 2},
        )
    """
    command = parse(code)
    assert (command.engine, command.model, command.args) == ("sglang", "org/a", {"tensor_parallel_size": 2})


def test_each_part_of_a_disaggregated_application_is_a_server() -> None:
    part = (
        "{model_loading_config: {model_source: org/a}, accelerator_type: L4, engine_kwargs: {tensor_parallel_size: %d}}"
    )
    text = f"applications:\n- args:\n    prefill_config: {part % 1}\n    decode_config: {part % 2}\n"
    servers = manifest.served(text, "file")
    assert [parse_container(server).args["tensor_parallel_size"] for server in servers] == [1, 2]


def test_a_file_of_several_servers_names_the_line_that_plans_them(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("---".join(DYNAMO.replace("org/a", "Qwen/Qwen3-8B").replace("chat", name) for name in "ab"))
    refused = run("estimate", "--from-command", str(file), "--gpu", "l40s")
    assert f"`kvplan check {file}` plans each of them" in refused.err
    assert run("check", str(file), "--gpu", "l40s").code == 0


def test_a_server_that_is_not_modeled_names_the_line_for_its_model(run: Run) -> None:
    with pytest.raises(NoServerError, match="`kvplan estimate Qwen/Qwen3-8B`"):
        read_command("trtllm-serve Qwen/Qwen3-8B --tp_size 2")
    with pytest.raises(UsageError, match=r"image$"):
        read_command("trtllm-serve org/a --tp_size 2")
    assert run("estimate", "Qwen/Qwen3-8B").code == 0


def test_a_pinned_revision_is_the_catalogs_copy_where_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise EnvironmentProblem("Qwen/Qwen3-8B", "no network", "check it")

    monkeypatch.setattr(hub, "resolve_model", unreachable)
    model = from_files("qwen3-8b", "qwen3-8b", Source(revision="b968826"))
    assert model.spec.num_layers == 36  # as in Qwen3-8B's config.json
    assert model.warnings == ["Qwen/Qwen3-8B: no network; the catalog's copy is planned, not revision b968826"]
