"""Manifests: the model-serving containers of a Kubernetes or compose file, each as the command that it runs.

Reads Pod, Deployment, StatefulSet, Job and whatever else holds `containers:`, LeaderWorkerSet, KServe's
InferenceService and LLMInferenceService, Helm values of vLLM's production stack, and compose files. Nothing is
rendered or run. Sources: kubernetes.io (Pod v1, dependent environment variables), the Compose specification
(interpolation), lws.sigs.k8s.io, KServe's config/llmisvcconfig and config/runtimes, production-stack's
helm/templates/deployment-vllm-multi.yaml.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kvplan.asked import container
from kvplan.asked.budget import Budget, check_yaml
from kvplan.asked.nodes import PRODUCT, gpu_of_labels
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.base import SERVERS, is_named, programs
from kvplan.servers.words.shell import is_shell, names_server

MAX_CHARS: Final = 512 * 1024
MOST_CONTAINERS: Final = 500
TEMPLATE_CURE: Final = "give what `helm template` prints"
_TOP_KEYS: Final = r"^(?:apiVersion|kind|services|servingEngineSpec)[ \t]*:"
_NUMBER: Final = r"[0-9]{1,6}"
GPU_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
# Templates for other objects; they serve nothing themselves.
RUNTIMES: Final = (
    "ServingRuntime", "ClusterServingRuntime", "LLMInferenceServiceConfig", "CustomResourceDefinition",
    "PodTemplate",
)  # fmt: skip
KSERVE_FORMATS: Final = ("huggingface", "vllm")
LLM_ARGUMENTS: Final = "VLLM_ADDITIONAL_ARGS"  # KServe's runtime appends it to its own `vllm serve`


@dataclass(frozen=True, slots=True)
class ServedContainer:
    """A container that serves a model.

    id         unique name within the file
    container  its own name
    line       its line in the file, from 1
    command    the shell line that starts it, read by kvplan/asked/pasted.py
    image      its image, "" if the file names none
    num_gpus   GPUs that its pod requests; None: not given
    num_pods   pods per server; replicas: servers
    gpu        the GPU by a label of its node, and `gpu_label` that label; None: no label names it
    notes      assumptions
    memory     limit of its memory in bytes, and `shm` the size of its /dev/shm; None: not stated
    """

    id: str
    container: str
    line: int
    command: str
    image: str
    num_gpus: int | None
    num_pods: int
    replicas: int
    gpu: str | None
    gpu_label: str
    notes: tuple[str, ...] = ()
    memory: int | None = None
    shm: int | None = None


class Mapped(dict[str, Any]):
    """A mapping of the file with its first line number."""

    line: int = 1


class Place(NamedTuple):
    """Settings that a container inherits from its surroundings."""

    name: str
    replicas: int = 1
    num_pods: int = 1
    model: str | None = None  # the model, if given there
    words: tuple[str, ...] = ()  # arguments added there
    kserve: bool = False
    is_compose: bool = False


def is_manifest_file(text: str) -> bool:
    """True if a file is a manifest rather than a policy."""
    return re.search(_TOP_KEYS, text, re.MULTILINE) is not None and re.search(r"^targets[ \t]*:", text, re.M) is None


def served(text: str, where: str) -> list[ServedContainer]:
    """Return every container of a manifest that serves a model. Raise UsageError if there is none.

    where  name of the manifest in error messages
    """
    if len(text) > MAX_CHARS:
        raise UsageError(where, f"is longer than {MAX_CHARS:,} characters ({len(text):,})", "split the file")
    containers: list[ServedContainer] = []
    budget = Budget(where)
    for number, document in enumerate(documents(text, where), 1):
        for place, body, pod in serving_places(document, where, f"server-{number}"):
            containers += read_container(place, body, pod, budget)
            if len(containers) > MOST_CONTAINERS:
                raise UsageError(where, f"has more than {MOST_CONTAINERS} containers that serve", "split the file")
    if not containers:
        raise UsageError(
            where,
            "no container in it runs a server",
            f"name a manifest with a container that runs {programs()}",
        )
    return named_apart(containers)


def named_apart(containers: list[ServedContainer]) -> list[ServedContainer]:
    """Give the containers unique ids: the object's name, plus the container's if an object has several."""
    counts: dict[str, int] = {}
    for item in containers:
        counts[item.id] = counts.get(item.id, 0) + 1
    ids: dict[str, int] = {}
    named: list[ServedContainer] = []
    for item in containers:
        name = item.id if counts[item.id] == 1 else f"{item.id}.{item.container}"
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:70] or "server"
        ids[name] = ids.get(name, 0) + 1
        named.append(replace(item, id=name if ids[name] == 1 else f"{name}-{ids[name]}"))
    return named


# --- documents --------------------------------------------------------------------------------------------------------


def documents(text: str, where: str) -> list[Any]:
    """Parse the documents with every scalar as text; reject a template with a one-line error."""
    import yaml

    base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

    class Loader(base):  # type: ignore[misc] # the C loader if available
        def construct_mapping(self, node: Any, deep: bool = False) -> Mapped:
            pairs = Mapped(super().construct_mapping(node, deep=True))
            pairs.line = node.start_mark.line + 1
            merged = pairs.pop("<<", None)
            for other in merged if isinstance(merged, list) else [merged]:
                if isinstance(other, dict):
                    for key, value in other.items():
                        pairs.setdefault(key, value)
            return pairs

    try:
        check_yaml(text, where)
        return list(yaml.load_all(text, Loader=Loader))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        if re.search(r"\{\{|\{%", text):
            raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE) from None
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(where, f"is not YAML{place}", "correct it") from None


def serving_places(document: Any, where: str, unnamed: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """(place, container, its pod) for everything in a document that may be a container.

    Init containers are skipped.
    """
    if not isinstance(document, dict):
        return
    kind, spec = document.get("kind"), mapping(document, "spec")
    name = str(mapping(document, "metadata").get("name") or unnamed)
    if isinstance(document.get("services"), dict) and kind is None:
        for service, body in document["services"].items():
            if isinstance(body, dict):
                count = whole(mapping(body, "deploy").get("replicas"), 1, "replicas", where)
                yield Place(service, count, is_compose=True), lined(body), lined(body)
    elif isinstance(mapping(document, "servingEngineSpec").get("modelSpec"), list) and kind is None:
        yield from production_stack(mapping(document, "servingEngineSpec"), where)
    elif kind == "List" and isinstance(document.get("items"), list):
        for number, item in enumerate(document["items"], 1):
            yield from serving_places(item, where, f"{unnamed}.{number}")
    elif kind == "LeaderWorkerSet":
        template = mapping(spec, "leaderWorkerTemplate")
        place = Place(name, count_of(spec, where), whole(template.get("size"), 1, "size", where))
        pod = mapping(mapping(template, "leaderTemplate") or mapping(template, "workerTemplate"), "spec")
        yield from of_pod(pod, place)
    elif kind == "InferenceService":
        yield from inference_service(mapping(spec, "predictor"), name, where)
    elif kind == "LLMInferenceService":
        yield from llm_inference_service(spec, name, where)
    elif kind in RUNTIMES:
        return
    elif isinstance(kind, str) and "{{" in kind:
        raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE)
    else:
        for pod in pods(document):
            yield from of_pod(pod, Place(name, count_of(spec, where)))


def pods(document: Mapping[str, Any]) -> Iterator[Mapped]:
    """Everything in a document that has a list of containers."""
    left: list[Any] = [document]
    for number, node in enumerate(left):
        if isinstance(node, dict):
            if isinstance(node.get("containers"), list):
                yield lined(node)
            left.extend(value for key, value in node.items() if key not in ("containers", "initContainers"))
        elif isinstance(node, list):
            left.extend(node)
        if number > container.MOST_NODES:
            return


def of_pod(pod: Mapped, place: Place) -> Iterator[tuple[Place, Mapped, Mapped]]:
    for body in pod.get("containers") or ():
        if isinstance(body, dict):
            yield place, lined(body), pod


def inference_service(predictor: Mapped, name: str, where: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """Return KServe predictors: a model served by its runtime, or containers."""
    place = Place(name, max(whole(predictor.get("minReplicas"), 1, "minReplicas", where), 1))
    model, workers = mapping(predictor, "model"), mapping(predictor, "workerSpec")
    if model:
        formats = str(mapping(model, "modelFormat").get("name", "")).lower()
        runtime = str(model.get("runtime", "")).lower()
        if formats in KSERVE_FORMATS or is_named(runtime):
            uri = str(model.get("storageUri", ""))
            words = [f"--{flag}={workers[key]}" for key, flag in PARALLEL.items() if key in workers]
            pods_of_one = whole(workers.get("pipelineParallelSize"), 1, "pipelineParallelSize", where)
            yield (
                place._replace(model=hub_id(uri), words=tuple(words), kserve=True, num_pods=pods_of_one),
                model,
                predictor,
            )
    yield from of_pod(predictor, place)


PARALLEL: Final = {
    "tensorParallelSize": "tensor-parallel-size", "pipelineParallelSize": "pipeline-parallel-size",
    "tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size", "data": "data-parallel-size",
}  # fmt: skip


def llm_inference_service(spec: Mapped, name: str, where: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """KServe's LLMInferenceService: `template` decodes, `prefill` is a separate server."""
    model = hub_id(str(mapping(spec, "model").get("uri", "")))
    for part, suffix in ((spec, ""), (mapping(spec, "prefill"), "-prefill")):
        pod, parallel = mapping(part, "template"), mapping(part, "parallelism")
        words = [f"--{flag}={parallel[key]}" for key, flag in PARALLEL.items() if key in parallel]
        if parallel.get("expert") == "true":
            words.append("--enable-expert-parallel")
        ranks, local = parallel.get("data"), parallel.get("dataLocal")
        num_pods = whole(ranks, 1, "data", where) // max(whole(local, 1, "dataLocal", where), 1) if local else 1
        place = Place(name + suffix, count_of(part, where), max(num_pods, 1), model, tuple(words), kserve=True)
        if part is spec and not pod:  # only KServe's own template
            pod = Mapped(containers=[Mapped(name="main")])
        for body in pod.get("containers") or ():
            if isinstance(body, dict) and body.get("name", "main") == "main":
                yield place, lined(body), pod


def hub_id(uri: str) -> str | None:
    """Hub id of hf://org/name, or None if the model is stored elsewhere."""
    match = re.fullmatch(r"hf://([^/:]+/[^/:]+)(?::.*)?", uri)
    return None if match is None else match[1]


def production_stack(spec: Mapped, where: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """Deployments that the chart renders from servingEngineSpec.modelSpec, with commands as in its template."""
    for number, model in enumerate(spec["modelSpec"], 1):
        if not isinstance(model, dict) or model.get("enabled") == "false":
            continue
        name = str(model.get("name") or f"model-{number}")
        if mapping(model, "raySpec").get("enabled") == "true":
            raise UsageError(where, f"{printable(name, 60)} runs in a Ray cluster (raySpec), not read", "remove it")
        if not model.get("modelURL"):
            raise UsageError(where, f"{printable(name, 60)} names no modelURL", "add it")
        body = Mapped(
            name=name,
            image=f"{model.get('repository', '')}:{model.get('tag', 'latest')}",
            command=["vllm", "serve", str(model.get("modelURL", "")), *stack_words(mapping(model, "vllmConfig"))],
            env=[*lists(spec, "env"), *lists(model, "env")],
        )
        if "vllmConfig" not in model:
            body["command"] = ["vllm", "serve", str(model.get("modelURL", ""))]
        if model.get("enableLoRA") == "true":
            body["command"].append("--enable-lora")
        if model.get("modelRevision"):
            body["command"] += ["--revision", str(model["modelRevision"])]
        if mapping(model, "lmcacheConfig").get("enabled") == "true":
            body["command"] += [
                "--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}',
            ]  # fmt: skip
        gpus = {str(model.get("requestGPUType") or GPU_RESOURCES[0]): str(model.get("requestGPU", ""))}
        body["resources"] = model.get("resources") or Mapped(limits=Mapped(gpus))
        body.line = getattr(model, "line", 1)
        terms = {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": model.get("nodeSelectorTerms")}
        }
        affinity = model.get("affinity") or {"nodeAffinity": terms}
        yield Place(name, whole(model.get("replicaCount"), 1, "replicaCount", where)), body, Mapped(affinity=affinity)


STACK_FLAGS: Final = {
    "maxModelLen": "max-model-len", "dtype": "dtype", "tensorParallelSize": "tensor-parallel-size",
    "maxNumSeqs": "max-num-seqs", "gpuMemoryUtilization": "gpu-memory-utilization", "maxLoras": "max-loras",
    "runner": "runner", "convert": "convert",
}  # fmt: skip


def stack_words(config: Mapped) -> list[str]:
    """Flags for vllmConfig; without enablePrefixCaching the chart turns prefix caching off."""
    words = [word for key, flag in STACK_FLAGS.items() if key in config for word in (f"--{flag}", str(config[key]))]
    if "enableChunkedPrefill" in config:
        is_on = config["enableChunkedPrefill"] == "true"
        words.append("--enable-chunked-prefill" if is_on else "--no-enable-chunked-prefill")
    is_on = config.get("enablePrefixCaching") == "true"
    words.append("--enable-prefix-caching" if is_on else "--no-enable-prefix-caching")
    return [*words, *(str(word) for word in lists(config, "extraArgs"))]


# --- containers -------------------------------------------------------------------------------------------------------


def read_container(place: Place, body: Mapped, pod: Mapped, budget: Budget) -> list[ServedContainer]:
    """Return the container if it serves a model."""
    image = str(body.get("image") or "") if not isinstance(body.get("image"), dict) else ""
    notes: list[str] = []
    if place.is_compose:
        body, image = interpolated(body, notes), interpolated_text(image, notes)
    variables = environment_of(body, place, budget)
    entrypoint = words_of(body.get("entrypoint" if place.is_compose else "command"), variables, budget)
    arguments = words_of(body.get("command" if place.is_compose else "args"), variables, budget)
    if place.kserve:
        entrypoint, arguments = kserve_words(place, entrypoint, arguments, variables)
    words = [*entrypoint, *arguments]
    if not serves(entrypoint, words, image):
        return []
    if not entrypoint and not names_server(words) and not is_server_image(image):
        words = [*container.server_for(words), *words]
    options = [w for k, v in variables.items() for w in ("-e", k if v is None else f"{k}={v}") if is_name(k)]
    options += [word for key in container.ELSEWHERE if body.get(key) for word in ("-e", key)]
    script = container.script_of(words)
    if script is not None:
        words[words.index(script)] = serving_line(script, variables, budget)
    gpu, label = gpu_of_labels(labels_of(pod))
    num_gpus = gpus_of(body, budget.where)
    return [
        ServedContainer(
            id=place.name,
            container=str(body.get("name") or body.get("container_name") or place.name),
            line=body.line,
            command=shlex.join(["docker", "run", *options, image or "image", *words]),
            image=image,
            num_gpus=num_gpus,
            num_pods=place.num_pods,
            replicas=place.replicas,
            gpu=gpu,
            gpu_label=label,
            notes=tuple(dict.fromkeys(notes)),
            memory=memory_limit(body, is_compose=place.is_compose),
            shm=shared_memory(body, pod, is_compose=place.is_compose),
        )
    ]


def serves(entrypoint: list[str], words: list[str], image: str) -> bool:
    """True if a container starts a server: by its words, or with arguments for the image's own entrypoint."""
    script = container.script_of(words)
    if script is not None:
        return any(re.search(pattern, script) for pattern in SERVER_COMMANDS)
    if names_server(words):
        return True
    if entrypoint:
        return False
    has_model = any(re.fullmatch(r"--model(?:[-_](?:path|id))?(?:=.*)?", word, re.DOTALL) for word in words)
    return bool(words) and (has_model or (is_server_image(image) and not is_shell(words[0])))


SERVER_COMMANDS: Final = (
    *(rf"(?:\b|/){server}\s+serve\b|-m\s+{server}\.(?:entrypoints|launch_server)" for server in SERVERS),
    r"(?:\b|/)llama-server\s",
)


def is_server_image(image: str) -> bool:
    """True if an image starts a server by itself: vllm/vllm-openai and similar."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return is_named(name) and not re.search(r"router|gateway|proxy|bench|exporter", name)


def kserve_words(
    place: Place, entrypoint: list[str], arguments: list[str], variables: Mapping[str, str | None]
) -> tuple[list[str], list[str]]:
    """Words for KServe's runtimes, which start vLLM themselves: `--model_id`, `uri:` or `storageUri:` names the
    model.
    """
    if entrypoint and names_server(entrypoint):
        return entrypoint, [*arguments, *place.words]
    if entrypoint:
        return entrypoint, arguments
    model, others = place.model, list[str]()
    pairs = iter(arguments)
    for word in pairs:
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        if name.startswith("--") and key in KSERVE_OWN:
            value = value if equals else next(pairs, "")
            model = value if key == "model_id" else model
        else:
            others.append(word)
    more = split_words(variables.get(LLM_ARGUMENTS) or "")
    return ["vllm", "serve", *([model] if model else [])], [*others, *place.words, *more]


KSERVE_OWN: Final = ("model_id", "model_name", "model_dir", "backend", "task_name", "http_port", "workers")


def words_of(value: Any, variables: Mapping[str, str | None], budget: Budget) -> list[str]:
    """Words of a command or its arguments, with $(NAME) expanded as in Kubernetes."""
    if isinstance(value, str):
        words = split_words(value)
    else:
        words = [item for item in value or () if isinstance(item, str)] if isinstance(value, list) else []
    return [expanded(word, variables, budget) for word in words]


def split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError("--from-command", "the quotes of a command do not match", "write the whole command") from None


def expanded(text: str, variables: Mapping[str, str | None], budget: Budget) -> str:
    """Expand $(NAME) from the container's variables; $$(NAME) is an escape, an unknown name stays."""

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return budget.take(variables.get(match[1]) or match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, text)


def with_variables(script: str, variables: Mapping[str, str | None], budget: Budget) -> str:
    """Expand a shell's $NAME, ${NAME} and ${NAME:-default} from the container's variables, as far as known."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables and variables[name] is not None:
            return budget.take(variables[name] or (default or ""))
        return default if default is not None and name not in variables else match[0]

    return re.sub(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))", value, script)


def serving_line(script: str, variables: Mapping[str, str | None], budget: Budget) -> str:
    """Return a script's exports and the statement that starts a server, with known variables expanded."""
    known, assigned = dict(variables), list[str]()
    for line in statements(script, budget):
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)=(\S*|\"[^\"]*\"|'[^']*')", line)
        if match is not None:
            known[match[1]] = with_variables(match[2].strip("\"'"), known, budget)
        text = with_variables(line, known, budget)
        if any(re.search(pattern, line) for pattern in SERVER_COMMANDS):
            return "; ".join([*assigned, text])
        if line.startswith("export "):
            assigned.append(text)
    return with_variables(script, variables, budget)


def statements(script: str, budget: Budget) -> Iterator[str]:
    """Split a script into statements, joining lines continued by a backslash or an open quote; drop comments and
    blanks.
    """
    pending = ""
    for line in re.sub(r"\\\r?\n", " ", script).splitlines():
        is_open, pending = bool(pending), f"{pending}\n{line}" if pending else line
        if is_open and "'" not in line and '"' not in line:
            continue
        try:
            words = shlex.split(budget.take(pending), comments=True)
        except ValueError:
            continue
        if words:
            end = 1 + max(pending.rfind(sign) for sign in "\n'\"")
            yield (pending[:end] + re.split(r"\s#", pending[end:], maxsplit=1)[0]).strip()
        pending = ""
    if pending:
        yield pending.strip()


def interpolated(body: Mapped, notes: list[str]) -> Mapped:
    """Return a compose service with ${NAME:-default} set to its default: the shell's own value is not known."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return interpolated_text(value, notes)
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return lined(value, {key: walk(item) for key, item in value.items()})
        return value

    result = walk(body)
    assert isinstance(result, Mapped)
    return result


def interpolated_text(text: str, notes: list[str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[2] is None:
            return match[0]
        if match[2]:
            notes.append(f"{match[1]} is taken as its default ({printable(match[2], 60)!r})")
        return match[2]

    return re.sub(r"\$\$|\$\{([A-Za-z_]\w*):?-([^{}]*)\}", value, text)


def environment_of(body: Mapping[str, Any], place: Place, budget: Budget) -> dict[str, str | None]:
    """The container's variables, None for a value defined elsewhere. LeaderWorkerSet adds three to its pods."""
    variables: dict[str, str | None] = {}
    if place.num_pods > 1:
        variables = {"LWS_GROUP_SIZE": str(place.num_pods), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
    for name, value in container.variables_of(body):
        if name not in container.ELSEWHERE:
            variables[name] = None if value is None else expanded(value, variables, budget)
    return variables


def is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None and not text.startswith("LWS_")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpus_of(body: Mapping[str, Any], where: str) -> int | None:
    """Number of GPUs that a container requests; a MIG slice is rejected."""
    resources = mapping(body, "resources")
    for part in ("limits", "requests"):
        for name, value in mapping(resources, part).items():
            if name.startswith("nvidia.com/mig-"):
                raise UsageError(
                    where, f"asks for a slice of a GPU ({printable(name, 60)})", "plan it with --gpu-memory"
                )
            if name in GPU_RESOURCES and re.fullmatch(r"0?\.[0-9]+", str(value)):
                raise UsageError(where, f"asks for a part of a GPU ({name}: {value})", "plan it with --gpu-memory")
            if name in GPU_RESOURCES and value not in (None, ""):
                return whole(value, 1, name, where)
    reservations = mapping(mapping(mapping(body, "deploy"), "resources"), "reservations")
    counts = [count for item in lists(reservations, "devices") if (count := devices_of(item, where)) is not None]
    return sum(counts) if counts else None


UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def quantity(text: Any, *, is_compose: bool) -> int | None:
    """Bytes of a size, 16Gi or 16G; None for another form. Compose's units are binary: 16g, 16gb."""
    if not is_compose and re.search("[mgtb]$", str(text)):  # m is a thousandth of a byte in Kubernetes
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]?)(i?)b?", str(text).strip().lower())
    if match is None:
        return None
    number, unit, is_binary = match.groups()
    return int(float(number) * UNITS.get(f"{unit}i" if unit and (is_binary or is_compose) else unit, 1))


def memory_limit(body: Mapping[str, Any], *, is_compose: bool) -> int | None:
    """The memory that a container may use at most."""
    parts = mapping(mapping(body, "deploy"), "resources") if is_compose else mapping(body, "resources")
    stated = mapping(parts, "limits").get("memory") or (body.get("mem_limit") if is_compose else None)
    return None if stated is None else quantity(stated, is_compose=is_compose)


def shared_memory(body: Mapping[str, Any], pod: Mapping[str, Any], *, is_compose: bool) -> int | None:
    """Size of a container's /dev/shm: compose's shm_size, or the limit of the volume that is mounted there."""
    if is_compose:
        return None if body.get("shm_size") is None else quantity(body["shm_size"], is_compose=True)
    mounts = [mount for mount in lists(body, "volumeMounts") if isinstance(mount, dict)]
    names = {mount.get("name") for mount in mounts if mount.get("mountPath") in ("/dev/shm", "/dev/shm/")}
    for volume in lists(pod, "volumes"):
        folder = mapping(volume, "emptyDir")
        if isinstance(volume, dict) and volume.get("name") in names and folder.get("sizeLimit") is not None:
            return quantity(folder["sizeLimit"], is_compose=False)
    return None


def devices_of(device: Any, where: str) -> int | None:
    """Number of GPUs of one entry in a compose file's `devices:`, or None for all of the machine's."""
    if not isinstance(device, dict):
        return None
    if isinstance(device.get("device_ids"), list):
        return len(device["device_ids"])
    count = device.get("count")
    return None if count in (None, "all") else whole(count, 1, "count", where)


def labels_of(pod: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Required labels of the pod's node, each with its allowed values; those of a compose service name its GPU."""
    for key, value in mapping(pod, "labels").items():
        if key == PRODUCT and isinstance(value, str):
            yield key, [value]
    for key, value in mapping(pod, "nodeSelector").items():
        if isinstance(value, str):
            yield key, [value]
    node = mapping(mapping(pod, "affinity"), "nodeAffinity")
    required = mapping(node, "requiredDuringSchedulingIgnoredDuringExecution")
    for term in lists(required, "nodeSelectorTerms"):
        for rule in lists(term, "matchExpressions") if isinstance(term, dict) else ():
            if isinstance(rule, dict) and rule.get("operator") == "In" and isinstance(rule.get("key"), str):
                yield rule["key"], [value for value in lists(rule, "values") if isinstance(value, str)]


# --- small --------------------------------------------------------------------------------------------------------


def mapping(node: Any, key: str) -> Mapped:
    value = node.get(key) if isinstance(node, dict) else None
    return lined(value) if isinstance(value, dict) else Mapped()


def lists(node: Mapping[str, Any], key: str) -> Iterable[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else ()


def lined(node: dict[str, Any], values: dict[str, Any] | None = None) -> Mapped:
    if isinstance(node, Mapped) and values is None:
        return node
    result = Mapped(node if values is None else values)
    result.line = getattr(node, "line", 1)
    return result


def count_of(spec: Mapping[str, Any], where: str) -> int:
    return whole(spec.get("replicas"), 1, "replicas", where)


def whole(value: Any, default: int, name: str, where: str) -> int:
    """Parse a whole number; `default` if there is none."""
    if value in (None, "", "null", "~"):
        return default
    if not isinstance(value, str) or re.fullmatch(_NUMBER, value) is None:
        if "{{" in str(value):
            raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE)
        raise UsageError(where, f"{name} is not a whole number ({printable(str(value), 40)!r})", "correct it")
    return int(value)
