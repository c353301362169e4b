"""Tasks of dstack and SkyPilot, role-based groups and here-documents, each as its page documents it."""

import pytest

from kvplan.asked.manifest import applied, served
from kvplan.asked.pasted import parse
from kvplan.asked.tasks import Accelerators, accelerators

DSTACK = """
type: service
name: chat
image: lmsysorg/sglang:v0.5.9
env:
  - MODEL_ID=Qwen/Qwen3-8B
  - HF_TOKEN
commands:
  - pip install nothing
  - python3 -m sglang.launch_server --model-path $MODEL_ID
    --port 8000 --tp-size 2
port: 8000
resources:
  gpu: H100:80GB:2
  disk: 300GB
replicas: 3
"""
SKYPILOT = """
resources:
  accelerators: {L4:1, A10G:1}
envs:
  MODEL_NAME: Qwen/Qwen3-8B
setup: |
  pip install vllm
run: |
  vllm serve $MODEL_NAME --port 8081 --tensor-parallel-size $SKYPILOT_NUM_GPUS_PER_NODE 2>&1 | tee server.log
"""
GROUP = """
apiVersion: workloads.x-k8s.io/v1alpha2
kind: RoleBasedGroup
metadata:
  name: chat
spec:
  roles:
    - name: router
      replicas: 1
      standalonePattern:
        template:
          spec:
            containers: [{name: router, image: "lmsysorg/sglang-router:v0.2.4", command: [python3, -m, sglang_router]}]
    - name: backend
      replicas: 4
      leaderWorkerPattern:
        size: 2
        template:
          spec:
            containers:
              - name: engine
                image: lmsysorg/sglang:v0.5.9
                command: [python3, -m, sglang.launch_server, --model-path, Qwen/Qwen3-8B, --tp-size, "16",
                          --nnodes, $(RBG_LWP_GROUP_SIZE)]
                resources: {limits: {nvidia.com/gpu: "8"}}
"""


def test_a_task_of_dstack_is_a_container_with_its_gpus() -> None:
    (container,) = served(DSTACK, "file")
    assert (container.id, container.replicas, container.num_gpus) == ("chat", 3, 2)
    assert (container.gpu, container.gpu_label) == ("h100-80g", "resources: H100-80g")
    command = parse(DSTACK)
    assert (command.engine, command.model) == ("sglang@0.5.9", "Qwen/Qwen3-8B")
    assert command.args["tensor_parallel_size"] == 2


def test_a_task_of_skypilot_has_its_variable_where_the_number_of_gpus_is_no_choice() -> None:
    (container,) = served(SKYPILOT, "file")
    assert (container.gpu, container.num_gpus) == (None, 1)
    command = parse(SKYPILOT)
    assert (command.engine, command.model, command.args) == (None, "Qwen/Qwen3-8B", {"tensor_parallel_size": 1})


def test_a_service_of_skypilot_has_replicas_and_nodes() -> None:
    task = SKYPILOT.replace("--port", "--pipeline-parallel-size $SKYPILOT_NUM_NODES --port") + "num_nodes: 2\n"
    (container,) = served(f"{task}service: {{replicas: 3}}\n", "file")
    assert (container.replicas, container.num_pods) == (3, 2)
    assert parse(task).args["pipeline_parallel_size"] == 2
    policy = "service: {replica_policy: {min_replicas: 2, max_replicas: 5}}\n"
    assert [place.replicas for place in served(task + policy, "file")] == [2]


def test_a_role_based_group_has_servers_of_several_pods() -> None:
    (container,) = served(GROUP, "file")
    assert (container.id, container.replicas, container.num_pods, container.num_gpus) == ("chat-backend", 4, 2, 8)


@pytest.mark.parametrize("start", ["cat <<'EOF' | kubectl apply -f -", "kubectl -n chat apply -f - <<EOF"])
def test_a_here_document_for_kubectl_is_its_manifest(start: str) -> None:
    script = f"set -e\n{start}\n{GROUP}EOF\nkubectl get pods\n"
    assert applied(script) == GROUP
    assert parse(script).args == parse(GROUP).args == {"tensor_parallel_size": 16}
    assert applied("cat > notes <<EOF\nkind: of\nEOF") == "cat > notes <<EOF\nkind: of\nEOF"


def test_an_image_of_a_model_is_known_by_the_name_that_stands_with_it() -> None:
    text = """
kind: LLMInferenceService
metadata: {name: chat}
spec:
  model: {uri: "oci://registry.example.com/models/modelcar:1.4.0", name: Qwen/Qwen3-8B}
"""
    assert parse(text).model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("24GB", (None, None)),
        ("24GB..48GB", (None, None)),
        ("MI300x", ("MI300x", 1)),
        ("H100:2", ("H100", 2)),
        ("A100:40GB:4", ("A100-40g", 4)),
        ("A100-80GB:8", ("A100-80GB", 8)),
        ({"name": "H100", "count": "2", "memory": "80GB"}, ("H100-80g", 2)),
        ({"L4": "1"}, ("L4", 1)),
        ({"L4:1": "", "A10G:1": ""}, (None, 1)),
        ({"L4": "1", "A10G": "2"}, (None, None)),
        (["L4:2"], ("L4", 2)),
        (["L4", "A10G"], (None, None)),
        (None, (None, None)),
    ],
)
def test_gpus_are_read_as_the_pages_write_them(value: object, gpus: tuple[str | None, int | None]) -> None:
    assert accelerators(value) == Accelerators(*gpus)
