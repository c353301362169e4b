"""Manifests: which containers serve, with which command, on which GPUs.

Expected words are those that the objects' own controllers start: the kubelet's expansion of $(NAME), KServe's runtimes
(config/llmisvcconfig, config/runtimes), production-stack's helm/templates/deployment-vllm-multi.yaml, lws.sigs.k8s.io.
"""

import textwrap
from pathlib import Path

import pytest

import kvplan
from kvplan.asked import manifest, nodes
from kvplan.asked.budget import MAX_EXPANDED, Budget
from kvplan.asked.form import Form, read_form
from kvplan.asked.manifest import ServedContainer
from kvplan.asked.pasted import parse_container, read_command
from kvplan.asked.question import requests
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import GpuSpec, gpu, gpu_names
from kvplan.servers.words.command import ServeCommand

EXAMPLES = Path(__file__).parents[2] / "examples" / "manifests"
IMAGE = "vllm/vllm-openai:v0.33.0"


def served(text: str) -> list[ServedContainer]:
    return manifest.served(textwrap.dedent(text), "f.yaml")


def command(text: str) -> ServeCommand:
    (container,) = served(text)
    return parse_container(container)


def pod(container: str, kind: str = "Pod", more: str = "") -> str:
    body = textwrap.indent(textwrap.dedent(container).strip(), "      ")
    return f"apiVersion: v1\nkind: {kind}\nmetadata: {{name: p}}\nspec:\n{more}  containers:\n    - name: c\n{body}\n"


# (example, container, model, release, GPUs of a pod, pods, replicas, GPU by its labels, arguments)
EXPECTED = [
    ("deployment", "chat", "Qwen/Qwen3-32B", "vllm@0.33.0", 2, 1, 3, "h100-80g",
     {"max_model_len": 16384, "tensor_parallel_size": 2, "max_num_seqs": 64}),
    ("leaderworkerset", "llama-405b", "meta-llama/Llama-3.1-405B", "vllm@0.33.0", 8, 2, 2, None,
     {"max_model_len": 16384, "tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
    ("sglang-leaderworkerset", "deepseek", "deepseek-ai/DeepSeek-V3", "sglang@0.5.23", 8, 2, 1, "h200",
     {"max_model_len": 32768, "tensor_parallel_size": 16}),
    ("kserve", "llama3", "meta-llama/Llama-3.1-8B-Instruct", None, 2, 1, 2, "l40s",
     {"max_model_len": 16384, "tensor_parallel_size": 2}),
    ("kserve", "qwen3", "Qwen/Qwen3-30B-A3B", None, 2, 1, 2, "a100-80g",
     {"max_model_len": 32768, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.9}),
    ("production-stack.values", "llama3", "meta-llama/Llama-3.1-8B-Instruct", "vllm@0.33.0", 1, 1, 2, "l40s",
     {"max_model_len": 32768, "gpu_memory_utilization": 0.9, "enable_chunked_prefill": True,
      "enable_prefix_caching": True, "max_num_batched_tokens": 4096}),
    ("production-stack.values", "phi4", "microsoft/phi-4", "vllm@0.33.0", 2, 1, 1, None,
     {"max_model_len": 16384, "tensor_parallel_size": 2, "enable_prefix_caching": False}),
    ("compose", "chat", "Qwen/Qwen3-8B", "vllm@0.33.0", 1, 1, 1, None,
     {"max_model_len": 16384, "gpu_memory_utilization": 0.85}),
    ("compose", "coder", "Qwen/Qwen3-14B", "sglang@0.5.23", 1, 1, 1, None, {"max_model_len": 16384}),
    ("dstack", "coder", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "vllm@0.33.0", 2, 1, 2, "l40s",
     {"max_model_len": 32768, "tensor_parallel_size": 2}),
    ("skypilot", "chat", "meta-llama/Llama-3.3-70B-Instruct", None, 4, 1, 1, "h100-80g",
     {"max_model_len": 16384, "tensor_parallel_size": 4}),
]  # fmt: skip


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_container_of_the_examples_is_read_as_its_controller_starts_it(expected: tuple[object, ...]) -> None:
    name, container, *figures = expected
    by_id = {entry.id: entry for entry in manifest.served((EXAMPLES / f"{name}.yaml").read_text(), f"{name}.yaml")}
    entry = by_id[str(container)]
    parsed = parse_container(entry)
    assert [
        parsed.model, parsed.engine, entry.num_gpus, entry.num_pods, entry.replicas, entry.gpu, parsed.args
    ] == figures  # fmt: skip
    assert not parsed.unknown
    assert not parsed.refused


def test_the_examples_serve_nothing_else() -> None:
    files = sorted(EXAMPLES.glob("*.yaml"))
    ids = [(file.stem, server.id) for file in files for server in manifest.served(file.read_text(), file.name)]
    assert sorted(ids) == sorted((row[0], row[1]) for row in EXPECTED)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Job", "DaemonSet"])
def test_a_pod_template_is_read_in_any_workload(kind: str) -> None:
    inner = textwrap.indent(pod(f'image: {IMAGE}\nargs: [--model, m/x, --max-model-len, "4096"]'), "  ")
    spec = inner[inner.index("  spec:") :]
    text = (
        f"apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: w}}\nspec:\n  template:\n{textwrap.indent(spec, '  ')}"
    )
    assert command(text).args == {"max_model_len": 4096}


def test_kubernetes_expands_its_variables_and_a_shell_its_own() -> None:
    text = pod(f"""
        image: {IMAGE}
        command: [bash, -c]
        args:
          - |
            set -e
            export NAME=m/y   # the model
            exec vllm serve $NAME --max-model-len $(LENGTH) --max-num-seqs ${{SEQS:-7}} \\
              --tensor-parallel-size "$TP"
            wait
        env:
          - {{name: LENGTH, value: "8192"}}
          - {{name: HALF, value: "1"}}
          - {{name: TP, value: $(HALF)}}
    """)
    parsed = command(text)
    assert parsed.model == "m/y"
    assert parsed.args == {"max_model_len": 8192, "max_num_seqs": 7, "tensor_parallel_size": 1}


def test_two_dollars_keep_a_variable_as_it_is() -> None:
    assert manifest.expanded("$$(A) $(A) $(B)", {"A": "1"}, Budget("f.yaml")) == "$(A) 1 $(B)"


def test_a_variable_of_a_secret_is_not_known_and_refused_where_it_matters() -> None:
    text = pod(f"""
        image: {IMAGE}
        args: [--model, $(MODEL)]
        env: [{{name: MODEL, valueFrom: {{secretKeyRef: {{name: a, key: b}}}}}}]
    """)
    with pytest.raises(UsageError, match=r"no value in the text for \$\(MODEL\) \(MODEL\)"):
        command(text)


def test_variables_that_change_memory_reach_the_plan() -> None:
    text = pod(f'image: {IMAGE}\nargs: [--model, m/x]\nenv: [{{name: VLLM_USE_V1, value: "0"}}]')
    assert command(text).environment == {"VLLM_USE_V1": "0"}


@pytest.mark.parametrize(
    "container",
    [
        "image: postgres:17",
        f"image: {IMAGE}\ncommand: [bash, /vllm-workspace/multi-node-serving.sh, worker]",
        f"image: {IMAGE}\ncommand: [sh, -c, 'ray start --address=$(LWS_LEADER_ADDRESS) --block']",
        "image: lmcache/lmstack-router:latest\nargs: [--port, '8000', --service-discovery, k8s]",
        "image: vllm/vllm-router:v0.1\nargs: [--policy, round_robin]",
    ],
)
def test_what_serves_no_model_is_no_target(container: str) -> None:
    with pytest.raises(UsageError, match="no container in it runs a server"):
        served(pod(container))


def test_an_init_container_is_no_target_whatever_it_runs() -> None:
    more = f"  initContainers: [{{name: warm, image: '{IMAGE}', args: [--model, m/x]}}]\n"
    with pytest.raises(UsageError, match="no container in it runs a server"):
        served(pod("image: postgres:17", more=more))


TEMPLATES = [
    "apiVersion: v1\nkind: Pod\nspec:\n{{- if .Values.x }}\n  containers: []\n{{- end }}\n",
    "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\nspec:\n  replicas: {{ .Values.n }}\n",
    pod(f"image: {IMAGE}\nargs: [--model, m/x]\nresources: {{limits: {{nvidia.com/gpu: '{{{{ .n }}}}'}}}}"),
    "services:\n  {% for x in y %}\n  a: {image: b}\n  {% endfor %}\n",
]


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is a template, which is not rendered; give what `helm template` prints") as e:
        served(text)
    assert "\n" not in str(e.value)


def test_a_blank_to_fill_in_is_of_no_account_outside_the_server() -> None:
    """GKE's samples end with a Secret that has one."""
    secret = "---\nkind: Secret\nstringData:\n  hf_api_token: {{HF_TOKEN}}\n"
    assert command(pod(f"image: {IMAGE}\nargs: [--model, m/x]") + secret).model == "m/x"


def test_a_chat_template_among_the_arguments_is_none_of_ours() -> None:
    text = pod(f"image: {IMAGE}\nargs: [--model, m/x, --chat-template, '{{{{ bos_token }}}}']")
    assert command(text).model == "m/x"


def test_a_part_of_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="asks for a part of a GPU"):
        served(pod(f"image: {IMAGE}\nargs: [--model, m/x]\nresources: {{limits: {{nvidia.com/gpu: 0.5}}}}"))


def test_a_mig_slice_is_that_of_the_nodes_gpu() -> None:
    container = f"image: {IMAGE}\nargs: [--model, m/x]\nresources: {{limits: {{nvidia.com/mig-1g.10gb: 1}}}}"
    labels = "  nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}\n"
    (server,) = served(pod(container, more=labels))
    assert (server.gpu, server.num_gpus) == ("h100-80g-1g.10gb", 1)
    assert server.gpu_label == "nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3 and nvidia.com/mig-1g.10gb"
    (server,) = served(pod(container))  # of which GPU, nothing says
    assert (server.gpu, server.num_gpus) == (None, 1)


def test_a_list_and_many_documents_give_every_server() -> None:
    single = pod(f"image: {IMAGE}\nargs: [--model, m/x]")
    two = "---\n".join([single, single, "# nothing\n"])
    assert [server.id for server in served(two)] == ["p.c", "p.c-2"]
    items = textwrap.indent(single, "    ").replace("    apiVersion", "  - apiVersion", 1)
    assert [server.id for server in served(f"apiVersion: v1\nkind: List\nitems:\n{items}")] == ["p"]


def test_the_charts_default_turns_prefix_caching_off() -> None:
    text = """
        servingEngineSpec:
          modelSpec:
            - {name: a, repository: lmcache/vllm-openai, tag: v0.3.9, modelURL: m/x, requestGPU: 1, vllmConfig: {dtype: bfloat16}}
            - {name: b, repository: vllm/vllm-openai, tag: v0.9.2, modelURL: m/x, requestGPU: 1}
            - {name: c, enabled: false}
    """  # noqa: E501 -- one model a line
    first, second = map(parse_container, served(text))
    assert (first.engine, first.args) == (None, {"dtype": "bfloat16", "enable_prefix_caching": False})
    assert (second.engine, second.args) == ("vllm@0.9.2", {})


def test_kserve_names_the_model_by_its_uri() -> None:
    text = """
        apiVersion: serving.kserve.io/v1beta1
        kind: InferenceService
        metadata: {name: a}
        spec:
          predictor:
            workerSpec: {tensorParallelSize: 8, pipelineParallelSize: 2}
            model:
              modelFormat: {name: huggingface}
              storageUri: hf://m/x
              resources: {limits: {nvidia.com/gpu: 8}}
    """
    (server,) = served(text)
    parsed = parse_container(server)
    assert (parsed.model, server.num_gpus, server.num_pods) == ("m/x", 8, 2)
    assert parsed.args == {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    with pytest.raises(UsageError, match="no container"):
        served(text.replace("huggingface", "sklearn"))


LABELS = [
    ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB", "a100-80g"),
    ("nvidia.com/gpu.product", "NVIDIA-A100-80GB-PCIe", "a100-pcie-80g"),
    ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3", "h100-80g"),
    ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3-SHARED", "h100-80g"),
    ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "h100-80g-1g.10gb"),
    ("nvidia.com/gpu.product", "NVIDIA-H200", "h200"),
    ("nvidia.com/gpu.product", "Tesla-T4", "t4"),
    ("nvidia.com/gpu.product", "NVIDIA-Something-New", None),
    ("cloud.google.com/gke-accelerator", "nvidia-l4", "l4"),
    ("cloud.google.com/gke-accelerator", "nvidia-tesla-a100", "a100-40g"),
    ("karpenter.k8s.aws/instance-gpu-name", "l40s", "l40s"),
    ("karpenter.k8s.aws/instance-gpu-name", "a100", None),  # of 40 or 80 GB
    ("karpenter.k8s.aws/instance-family", "g6e", "l40s"),
    ("node.kubernetes.io/instance-type", "p4d.24xlarge", "a100-40g"),
    ("node.kubernetes.io/instance-type", "p4de.24xlarge", "a100-80g"),
    ("node.kubernetes.io/instance-type", "g6.12xlarge", "l4"),
    ("node.kubernetes.io/instance-type", "a3-ultragpu-8g", "h200"),
    ("kubernetes.io/hostname", "h100-1", None),
]


@pytest.mark.parametrize(("key", "value", "name"), LABELS)
def test_a_nodes_label_names_the_gpu_or_nothing(key: str, value: str, name: str | None) -> None:
    assert nodes.gpu_of_labels([(key, [value])])[0] == name


def test_a_choice_of_gpus_names_none() -> None:
    values = ["NVIDIA-L40S", "NVIDIA-L4"]
    assert nodes.gpu_of_labels([(nodes.PRODUCT, values)]) == (None, "")


def same_device(name: str | None, spec: GpuSpec) -> bool:
    """True if a label's GPU is this one, or one of several with its device name, of which it may name none."""
    several = [other for other in gpu_names() if gpu(other).device_name == spec.device_name]
    return name in several or (name is None and len(several) > 1)


def test_every_gpu_of_the_list_that_kubernetes_can_label_is_read_back() -> None:
    for name in gpu_names():
        spec = gpu(name)
        if spec.vendor == "nvidia":
            assert same_device(nodes.gpu_of_labels([(nodes.PRODUCT, [nodes.product_of(spec.device_name)])])[0], spec)


def test_a_pasted_manifest_with_several_servers_names_them() -> None:
    with pytest.raises(UsageError, match=r"2 containers run servers \(llama3, qwen3\); save it and give `kvplan check"):
        read_command((EXAMPLES / "kserve.yaml").read_text())


def test_a_pasted_manifest_with_one_server_is_its_command() -> None:
    assert read_command((EXAMPLES / "deployment.yaml").read_text()).args["max_num_seqs"] == 64


@pytest.mark.parametrize(
    "text",
    ["kind: [", "kind: &a [*a]\napiVersion: *a", "services: {a: {<<: {b: c}, image: 3, command: {x: y}}}",
     "apiVersion: 1\nkind: Pod\nspec: {containers: 3}", "kind: InferenceService\nspec: {predictor: {model: []}}",
     "services: {a: null, b: [], c: {deploy: [], image: []}}", "servingEngineSpec: {modelSpec: [null, 3, {}]}",
     "kind: LeaderWorkerSet\nspec: {leaderWorkerTemplate: {size: x}}", "kind: List\nitems: [[[]]]\napiVersion: v1",
     "kind: Pod\nspec: {containers: [{image: vllm/vllm-openai, args: [[]], command: 'a \"b'}]}"],
)  # fmt: skip
def test_odd_manifests_are_refused_not_crashed_on(text: str) -> None:
    with pytest.raises(UsageError):
        served(text)


# --- what a manifest may cost -----------------------------------------------------------------------------------------

SERVE = "image: vllm/vllm-openai\ncommand: [vllm, serve, Qwen/Qwen3-8B]"
SCRIPT = "image: vllm\ncommand:\n- bash\n- -c\n- |\n"
LINKS = range(1, 40)  # each is twice the one before: 2**39 times eight characters
VARIABLES = "- {name: A0, value: eight_of}\n"
VARIABLES += "".join(f"- {{name: A{i}, value: $(A{i - 1})$(A{i - 1})}}\n" for i in LINKS)
ASSIGNED = "  A0=eight_of\n" + "".join(f"  export A{i}=$A{i - 1}$A{i - 1}\n" for i in LINKS)
BOMB = "x0: &x0 [a, a]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in LINKS)
CHAIN = "x0: &x0 []\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 101))
EXPANDED, ALIASES = "its variables and scripts expand to more", "its aliases expand to more"
DEEP = "is nested more than 100 levels"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (pod(f"{SERVE[:-1]}, $(A39)]\nenv:\n{VARIABLES}"), EXPANDED),
        (BOMB + pod(SERVE).replace("name: p", "name: *x39"), ALIASES),
        (BOMB + pod(SERVE.replace("vllm/vllm-openai", "*x39")), ALIASES),
        (f"{BOMB}services: {{a: {{image: vllm, command: vllm serve m, labels: *x39}}}}", ALIASES),
        (f"s: &s {'x' * 10**5}\n{pod(SERVE[:-1] + ', *s' * 50 + ']')}", ALIASES),
        (pod(SERVE) + "x: " + "[" * 10**5 + "]" * 10**5, DEEP),
        (pod(SERVE) + "x: " + "{a: " * 10**5 + "}" * 10**5, DEEP),
        (CHAIN + pod(SERVE), DEEP),
        ("x: &x [*x]\n" + pod(SERVE), r"the alias \*x names nothing before it"),
    ],
)
def test_no_manifest_expands_to_more_than_its_budget(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        manifest.served(text, "f.yaml")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f"{ASSIGNED}  vllm serve $A39", "its variables expand to too much text"),
        ("  echo '\n" + '  "\n' * 2000 + "  vllm serve m", "the quotes do not match"),
    ],
)
def test_no_script_of_a_manifest_expands_without_bound(script: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        command(pod(SCRIPT + script))


def test_a_long_comment_is_read_once() -> None:
    script = f"  echo a{' #' * 100_000} 'b'\n  vllm serve Qwen/Qwen3-8B # 'large'\n"
    assert command(pod(SCRIPT + script)).model == "Qwen/Qwen3-8B"


def test_what_a_manifest_repeats_is_within_its_budget() -> None:
    env = "&env\n- {name: A, value: '4096'}\n- {name: B, value: $(A)}\n"
    container = f"{SERVE[:-1]}, --max-model-len, $(B)]\nenv: "
    both = pod(container + env) + "---\n" + pod(container + env)
    assert [parse_container(container).args["max_model_len"] for container in manifest.served(both, "f.yaml")] == [
        4096
    ] * 2
    assert Budget("f.yaml").take("a" * MAX_EXPANDED)


# --- runtimes, charts and Ray Serve -----------------------------------------------------------------------------------

RUNTIME = """
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: runtime}
spec:
  containers:
  - name: kserve-container
    image: vllm/vllm-openai:v0.11.0
    command: [python, -m, vllm.entrypoints.openai.api_server]
    args: [--model=/mnt/models, "--served-model-name={{.Name}}", --max-model-len=8192]
"""
SERVICE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: service}
spec:
  predictor:
    model:
      modelFormat: {name: vLLM}
      runtime: runtime
      storageUri: s3://bucket/Qwen3-8B
      args: [--max-num-seqs=8]
"""


def test_a_service_runs_in_the_runtime_of_its_file() -> None:
    words = command(f"{RUNTIME}---{SERVICE}")
    assert (words.model, words.engine) == ("s3://bucket/Qwen3-8B", "vllm@0.11.0")
    assert words.args == {"max_model_len": 8192, "max_num_seqs": 8}


def test_a_runtime_alone_takes_its_model_from_an_option() -> None:
    assert command(RUNTIME).model == "/mnt/models"
    plan = kvplan.estimate("qwen3-8b", gpu="h100", command=RUNTIME).plan
    assert (plan.request.spec.name, plan.request.args.max_model_len) == ("qwen3-8b", 8192)
    with pytest.raises(UsageError, match="'/mnt/models' is a folder of another machine"):
        kvplan.estimate(gpu="h100", command=RUNTIME)


RAY = """
applications:
- args:
    llm_configs:
    - model_loading_config: {model_id: mine, model_source: org/a}
      accelerator_type: L4
      deployment_config: {autoscaling_config: {min_replicas: 2}}
      engine_kwargs: {max_model_len: 8192, enforce_eager: true, enable_prefix_caching: false}
"""


def test_a_configuration_of_ray_serve_is_read() -> None:
    (server,) = manifest.served(RAY, "f.yaml")
    words = parse_container(server)
    assert (words.model, server.gpu, server.replicas) == ("org/a", "l4", 2)
    assert words.args == {"max_model_len": 8192, "enforce_eager": True, "enable_prefix_caching": False}
    inner = "".join(f"    {line}\n" for line in RAY.splitlines())
    service = f"apiVersion: ray.io/v1\nkind: RayService\nmetadata: {{name: a}}\nspec:\n  serveConfigV2: |\n{inner}"
    assert [parse_container(server).model for server in manifest.served(service, "f.yaml")] == ["org/a"]


def test_values_of_llm_ds_chart_are_read() -> None:
    values = """
modelArtifacts: {uri: "hf://org/a", name: org/a}
decode:
  replicas: 2
  parallelism: {tensor: 2}
  containers:
  - {name: vllm, image: "ghcr.io/llm-d/llm-d:v0.2.0", modelCommand: vllmServe, args: [--max-model-len, "8192"]}
prefill: {create: false}
"""
    (server,) = manifest.served(values, "values.yaml")
    words = parse_container(server)
    assert (words.model, server.replicas) == ("org/a", 2)
    assert words.args == {"max_model_len": 8192, "tensor_parallel_size": 2}


def test_values_of_a_chart_with_one_server_are_read() -> None:
    values = """
image:
  repository: vllm/vllm-openai
  tag: v0.11.0
  command: [vllm, serve, org/a, --max-model-len, "8192"]
resources: {limits: {nvidia.com/gpu: 1}}
"""
    (server,) = manifest.served(values, "values.yaml")
    assert (parse_container(server).model, server.num_gpus, server.image) == ("org/a", 1, "vllm/vllm-openai:v0.11.0")


def test_a_simulator_of_a_server_takes_no_memory() -> None:
    with pytest.raises(UsageError, match="no container in it runs a server"):
        command(pod("image: ghcr.io/llm-d/llm-d-inference-sim:v0.3\nargs: [--model, org/a, --v=4]"))


def test_a_pasted_manifest_names_its_gpu() -> None:
    text = pod(f"image: {IMAGE}\nargs: [--model, qwen3-8b]\nresources: {{limits: {{nvidia.com/gpu: 2}}}}").replace(
        "spec:", "spec:\n  nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4}", 1
    )
    inputs = requests(read_form(Form({"from_command": text, "max_model_len": ["8192"]})))
    (request,) = inputs.requests
    assert request.gpu.name == "l4"
    assert "gpu: l4 is inferred from cloud.google.com/gke-accelerator: nvidia-l4" in inputs.notes
    assert "1 of 2 GPUs stay unused: its command uses 1" in inputs.notes
    other = requests(read_form(Form({"from_command": text, "gpu": ["h100"]})))
    assert other.requests[0].gpu.name == "h100-80g"
    assert any(note.startswith("gpu: h100-80g counts, not l4 of ") for note in other.notes)
    with pytest.raises(UsageError, match="its command needs 4 GPUs, and the manifest asks for 2"):
        requests(read_form(Form({"from_command": text.replace("qwen3-8b]", "qwen3-8b, -tp, '4']")})))
