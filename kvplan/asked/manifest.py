"""Manifests: the model-serving containers of a Kubernetes or compose file, each as the command that it runs.

Reads Pod, Deployment, StatefulSet, Job and whatever else holds `containers:`, LeaderWorkerSet, RoleBasedGroup, KServe's
InferenceService and LLMInferenceService, Dynamo's deployments, Helm values of vLLM's production stack, tasks of dstack
and SkyPilot, and compose files. Nothing is rendered or run. Sources: kubernetes.io (Pod v1, dependent environment
variables), the Compose specification (interpolation), lws.sigs.k8s.io, sgl-project/rbg, KServe's config/llmisvcconfig
and config/runtimes, production-stack's helm/templates/deployment-vllm-multi.yaml.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

from kvplan.asked import container, ray, tasks
from kvplan.asked.budget import Budget, check_yaml
from kvplan.asked.nodes import PRODUCT, gpu_of_labels
from kvplan.asked.snippet import flag_words
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.base import SERVERS, is_named, programs, server_of
from kvplan.servers.words.command import Resources
from kvplan.servers.words.shell import is_shell, names_server

MAX_CHARS: Final = 512 * 1024
MOST_CONTAINERS: Final = 500
MOST_DEFAULTS: Final = 3  # of a variable inside a default
TEMPLATE_CURE: Final = "give what `helm template` prints"
_TOP_KEYS: Final = (
    r"^(?:apiVersion|kind|services|servingEngineSpec|modelArtifacts|applications|llm_configs)[ \t]*:"
    r"|^image[ \t]*:[ \t]*$|^commands[ \t]*:[ \t]*(?:\[.*)?$|^run[ \t]*:[ \t]*[|>]"
)
HERE: Final = re.compile(
    r"""(?ms)^([^\n#]*<<-?[ \t]*["']?(\w+)["']?[^\n]*)\n(.*?)^[ \t]*\2[ \t]*$"""
)  # a here-document
_NUMBER: Final = r"[0-9]{1,6}"
GPU_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu", "gpu")
SLICES: Final = "nvidia.com/mig-"
RUNTIMES: Final = ("ServingRuntime", "ClusterServingRuntime")  # of KServe: the container of services that name them
CONFIGS: Final = ("LLMInferenceServiceConfig",)
TEMPLATES: Final = ("CustomResourceDefinition", "PodTemplate")  # serve nothing themselves
MOUNT: Final = "/mnt/models"  # where KServe mounts a service's model
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

    @property
    def resources(self) -> Resources:
        return Resources(self.gpu, self.gpu_label, self.num_gpus, self.num_pods, self.replicas)


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


def applied(text: str) -> str:
    """The manifests that a script passes to kubectl as here-documents; else the text itself."""
    apply = re.compile(r"\bkubectl\b.*\b(?:apply|create|replace)\b")
    parts = [match[3] for match in HERE.finditer(text) if apply.search(match[1])] if "kubectl" in text else []
    return "\n---\n".join(parts) or text


def served(text: str, where: str) -> list[ServedContainer]:
    """Return every container of a manifest that serves a model. Raise UsageError if there is none.

    where  name of the manifest in error messages
    """
    if len(text) > MAX_CHARS:
        raise UsageError(where, f"is longer than {MAX_CHARS:,} characters ({len(text):,})", "split the file")
    containers: list[ServedContainer] = []
    budget = Budget(where)
    parsed = documents(text, where)
    runtimes = runtimes_of(parsed)
    for number, document in enumerate(parsed, 1):
        for place, body, pod in serving_places(document, where, f"server-{number}", runtimes):
            containers += read_container(place, body, pod, budget)
            if len(containers) > MOST_CONTAINERS:
                raise UsageError(where, f"has more than {MOST_CONTAINERS} containers that serve", "split the file")
    if not containers:
        raise UsageError(
            where, "no container in it runs a server", f"name a manifest with a container that runs {programs()}"
        )
    return named_apart(containers)


def part(text: str, where: str) -> ServedContainer:
    """The only server in a part of a manifest: a service, a container, or only its arguments."""
    listed = [
        {"args": document} if isinstance(document, list) and isinstance(document[0], str) else document
        for document in documents(text, where)
        if document
    ]
    containers, budget = list[ServedContainer](), Budget(where)
    for node in container.nodes(listed, ("initContainers",)):
        image = node.get("image")  # Helm values have a mapping here, in some charts including the command
        if isinstance(image, dict) and not {"command", "args"} & image.keys():
            image = ":".join(str(image[key]) for key in ("repository", "tag") if image.get(key))
        if {"image", "command", "args"} & node.keys() and not isinstance(image, dict):
            place = Place("container", is_compose="args" not in node)
            containers += read_container(place, lined(node, {**node, "image": image}), Mapped(), budget)
    if len(containers) != 1:
        problem = f"{len(containers)} containers run servers" if containers else "no container in it runs a server"
        raise UsageError(where, problem, "paste the one container, or its command")
    return containers[0]


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
        text = container.quoted(text)
        check_yaml(text, where)
        return list(yaml.load_all(text, Loader=Loader))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        if re.search(r"\{\{|\{%", text):
            raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE) from None
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(where, f"is not YAML{place}", "correct it") from None


def runtimes_of(parsed: Iterable[Any]) -> dict[str, Mapped]:
    """Pods of KServe's runtimes in a file by name; those of a file without services are servers themselves."""
    kinds = {document.get("kind") for document in parsed if isinstance(document, dict)}
    if not kinds & {"InferenceService", "LLMInferenceService"}:
        return {}
    return {
        str(mapping(document, "metadata").get("name")): mapping(document, "spec")
        for document in parsed
        if isinstance(document, dict) and document.get("kind") in (*RUNTIMES, *CONFIGS)
    }


def serving_places(
    document: Any, where: str, unnamed: str, runtimes: Mapping[str, Mapped]
) -> Iterator[tuple[Place, Mapped, Mapped]]:
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
            yield from serving_places(item, where, f"{unnamed}.{number}", runtimes)
    elif kind == "LeaderWorkerSet":
        template = mapping(spec, "leaderWorkerTemplate")
        place = Place(name, count_of(spec, where), whole(template.get("size"), 1, "size", where))
        pod = mapping(mapping(template, "leaderTemplate") or mapping(template, "workerTemplate"), "spec")
        yield from of_pod(pod, place)
    elif kind == "RoleBasedGroup":
        for role in (item for item in lists(spec, "roles") if isinstance(item, dict)):
            size = whole(mapping(role, "leaderWorkerPattern").get("size"), 1, "size", where)
            place = Place(f"{name}-{role.get('name')}", count_of(role, where), size)
            yield from of_pod(next(pods(role), Mapped()), place)
    elif kind == "InferenceService":
        yield from inference_service(mapping(spec, "predictor"), name, where, runtimes)
    elif kind == "LLMInferenceService":
        yield from llm_inference_service(spec, name, where)
    elif kind in (*RUNTIMES, *CONFIGS):
        if not runtimes:
            yield from of_pod(mapping(spec, "template") or spec, Place(name))
    elif kind in TEMPLATES:
        return
    elif kind == "RayService":
        for inner in documents(str(spec.get("serveConfigV2", "")), where):
            yield from serving_places(inner, where, name, runtimes)
    elif kind is None and (configs := [*llm_configs(document)]):
        yield from configs
    elif kind is None and document.get("modelArtifacts") is not None:
        yield from model_service(document, where)
    elif kind is None and isinstance(document.get("image"), dict):
        yield chart(document, name)
    elif kind is None and tasks.is_task(document):
        body, accelerator = tasks.container_of(document)
        name = str(document.get("name") or unnamed)
        count = whole(tasks.replicas_of(document), 1, "replicas", where)
        nodes = whole(document.get("num_nodes"), 1, "num_nodes", where)
        yield Place(name, count, nodes), lined(document, body), Mapped({tasks.KEY: accelerator})
    elif isinstance(kind, str) and "{{" in kind:
        raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE)
    else:
        place = Place(name, count_of(spec, where))
        in_pods = [item for pod in pods(document) for item in of_pod(pod, place)]
        yield from in_pods or alone(document, place, where, Mapped())


def pods(document: Mapping[str, Any]) -> Iterator[Mapped]:
    """Everything in a document that has a list of containers."""
    yield from (lined(node) for node in nodes(document) if isinstance(node.get("containers"), list))


def nodes(document: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a document outside of a pod's containers."""
    return container.nodes(document, ("containers", "initContainers"))


def alone(node: Any, place: Place, where: str, above: Mapped) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """Containers under keys of their own (`mainContainer:`), with the nearest resources and replicas around them."""
    for item in node if isinstance(node, list) else ():
        yield from alone(item, place, where, above)
    if not isinstance(node, dict):
        return
    around = {key: node[key] for key in ("resources", "nodeSelector", "affinity") if key in node}
    here = lined(node, above | around)
    name = str(node.get("name") or place.name)
    num_pods = whole(mapping(node, "multinode").get("nodeCount"), place.num_pods, "nodeCount", where)
    place = place._replace(name=name, replicas=count_of(node, where, place.replicas), num_pods=num_pods)
    if {"command", "args"} & node.keys():
        yield place, lined(node, {**here, **node}), lined({**here, "resources": None})
    for key, value in node.items():
        if key not in ("initContainers", "containers"):
            is_own = isinstance(value, dict) and bool({"replicas", "resources"} & value.keys())
            yield from alone(value, place._replace(name=key) if is_own else place, where, here)


def of_pod(pod: Mapped, place: Place) -> Iterator[tuple[Place, Mapped, Mapped]]:
    for body in pod.get("containers") or ():
        if isinstance(body, dict):
            yield place, lined(body), pod


def inference_service(
    predictor: Mapped, name: str, where: str, runtimes: Mapping[str, Mapped]
) -> Iterator[tuple[Place, Mapped, Mapped]]:
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
            place = place._replace(model=model_at(uri), words=tuple(words), kserve=True, num_pods=pods_of_one)
            yield place, in_runtime(model, runtimes.get(str(model.get("runtime", "")))), predictor
    yield from of_pod(predictor, place)


def in_runtime(model: Mapped, runtime: Mapped | None) -> Mapped:
    """A predictor's model as the container of its runtime: the runtime's words come first, as in KServe."""
    first = next((item for item in lists(runtime or {}, "containers") if isinstance(item, dict)), None)
    if first is None:
        return model
    both = {key: [*lists(first, key), *lists(model, key)] for key in ("args", "env") if {*first, *model} & {key}}
    return lined(model, {**first, **model, **both})


PARALLEL: Final = {
    "tensorParallelSize": "tensor-parallel-size", "pipelineParallelSize": "pipeline-parallel-size",
    "tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size", "data": "data-parallel-size",
}  # fmt: skip


def llm_inference_service(spec: Mapped, name: str, where: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """KServe's LLMInferenceService: `template` decodes, `prefill` is a separate server."""
    model, named = model_at(str(mapping(spec, "model").get("uri", ""))), str(mapping(spec, "model").get("name", ""))
    if model is not None and model.startswith("oci://") and "/" in named:  # an image; what it holds is named beside it
        model = named
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
        bodies = [lined(body) for body in pod.get("containers") or () if isinstance(body, dict)]
        for body in [body for body in bodies if body.get("name", "main") == "main"] or bodies[:1]:
            yield place, body, pod


def model_at(uri: str) -> str | None:
    """Hub id of hf://org/name, or the address of a model stored elsewhere, whose folder may name it."""
    match = re.fullmatch(r"hf://([^/:]+/[^/:]+)(?::.*)?", uri)
    return match[1] if match is not None else uri if "/" in uri else None


def llm_configs(document: Mapping[str, Any]) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """Servers that Ray Serve starts: `llm_configs`, or those of prefill and decode, wherever they stand."""
    for config in (node for node in nodes(document) if "model_loading_config" in node):
        arguments = ray.arguments_of({key: ray.typed(config.get(key)) for key in ray.KEYS})
        model, server = str(arguments.pop("model", "")), ray.server_of(config)
        starts = server_of(server).pasted().starts
        flags = [word for key, value in arguments.items() for word in flag_words(key, value, server)]
        named = [*starts.launcher, f"--{starts.model_flag}", model]
        body = lined(config, {"name": model, "command": [*named, *flags]})
        replicas = mapping(mapping(config, "deployment_config"), "autoscaling_config").get("min_replicas")
        count = max(whole(replicas, 1, "min_replicas", ""), 1)
        yield Place(model.rpartition("/")[2], count), body, Mapped({ray.ACCELERATOR: config.get(ray.ACCELERATOR)})


def model_service(values: Mapping[str, Any], where: str) -> Iterator[tuple[Place, Mapped, Mapped]]:
    """Values of llm-d's modelservice chart: prefill and decode servers of modelArtifacts, which the chart starts with
    `vllm serve` unless modelCommand is custom. Source: llm-d-modelservice, templates/_helpers.tpl.
    """
    artifacts = mapping(values, "modelArtifacts")
    model = model_at(str(artifacts.get("uri", ""))) or str(artifacts.get("name") or "") or None
    for part in ("decode", "prefill"):
        role = mapping(values, part)
        if not role or role.get("create") == "false":
            continue
        parallel = mapping(role, "parallelism")
        words = [f"--{flag}={parallel[key]}" for key, flag in PARALLEL.items() if key in parallel]
        for body in lists(role, "containers"):
            if isinstance(body, dict):
                is_own = body.get("modelCommand") == "custom" or "command" in body
                place = Place(part, count_of(role, where), 1, model, tuple(words), kserve=not is_own)
                yield place, lined(body), role


def chart(values: Mapping[str, Any], name: str) -> tuple[Place, Mapped, Mapped]:
    """Values of a chart of one server: repository, tag and often the command stand under `image`."""
    image = mapping(values, "image")
    body = {key: image.get(key, values.get(key)) for key in ("command", "args")}
    others = {key: values[key] for key in ("env", "resources") if key in values}
    repository = f"{image.get('repository', '')}:{image.get('tag', 'latest')}"
    return Place(name), lined(image, {**others, **body, "image": repository}), lined(dict(values))


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
            command=["vllm", "serve", str(model["modelURL"]), *stack_words(mapping(model, "vllmConfig"))],
            env=[*lists(spec, "env"), *lists(model, "env")],
        )
        if "vllmConfig" not in model:
            del body["command"][3:]
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
    if not entrypoint and len(arguments) == 1 and names_server(arguments[0].split()):  # for a shell
        arguments = split_words(arguments[0])
    words = [*entrypoint, *arguments]
    options = [w for k, v in variables.items() for w in ("-e", k if v is None else f"{k}={v}") if is_name(k)]
    if is_other(image) or not serves(entrypoint, words, ["docker", "run", *options, image]):
        return []
    if not entrypoint and not names_server(words) and not is_server_image(image):
        words = [*container.server_for(words), *words]
    options += [word for key in container.ELSEWHERE if body.get(key) for word in ("-e", key)]
    script = container.script_of(words)
    if script is not None:  # the reader of scripts replaces what the container's options set
        words[words.index(script)] = with_group(script, variables)
    gpu, label = gpu_of(body, pod)
    for key in (ray.ACCELERATOR, tasks.KEY):
        if (accelerator := ray.resources_of(pod.get(key), key)) is not None:
            gpu, label = accelerator.gpu, accelerator.gpu_label
    if gpu is None and pod.get(tasks.KEY):
        notes.append(f"{tasks.KEY}: {printable(str(pod[tasks.KEY]), 60)} names no one GPU that kvplan knows; add --gpu")
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


def serves(entrypoint: list[str], words: list[str], run: list[str]) -> bool:
    """True if a container starts a server: by its words, by arguments for its image, or by what runs it alone."""
    script = container.script_of(words)
    if script is not None:
        return any(re.search(pattern, script) for pattern in server_commands())
    if names_server(words):
        return True
    if entrypoint:
        return False
    if not words:  # an image that serves without a word, its models named by requests or a variable
        pasted = ((server.starts.alone, server.start(run)) for server in (server_of(name).pasted() for name in SERVERS))
        return any(start is not None and (is_alone or start.words) for is_alone, start in pasted)
    has_model = any(re.fullmatch(r"--model(?:[-_](?:path|id))?(?:=.*)?", word, re.DOTALL) for word in words)
    return has_model or (is_server_image(run[-1]) and not is_shell(words[0]))


@cache
def server_commands() -> tuple[str, ...]:
    """Patterns of the commands that start a server: its name with `serve`, its module, or its program."""
    patterns = []
    for name in SERVERS:
        program = r"\s+".join(map(re.escape, server_of(name).launch().program))
        patterns.append(rf"(?:\b|/){name}\s+serve\b|-m\s+{name}\.(?:entrypoints|launch_server)|(?:\b|/){program}\s")
    return tuple(patterns)


def is_server_image(image: str) -> bool:
    """True if an image starts a server by itself: vllm/vllm-openai and similar."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return is_named(name) and not re.search(r"router|gateway|proxy|bench|exporter", name)


def is_other(image: str) -> bool:
    """True for an image that only imitates a server (llm-d-inference-sim), or is one with the same words (TGI)."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.search(r"(?:^|[-_])sim(?:ulator)?$|^text-(?:embeddings|generation)-inference$", name) is not None


def kserve_words(
    place: Place, entrypoint: list[str], arguments: list[str], variables: Mapping[str, str | None]
) -> tuple[list[str], list[str]]:
    """Words for KServe's runtimes, which start vLLM themselves: `--model_id`, `uri:` or `storageUri:` names the
    model.
    """
    if place.model is not None and re.fullmatch(r"[\w./:@+-]+", place.model):
        mount = re.compile(rf"(?<![\w/]){MOUNT}/?(?![\w/])")
        entrypoint, arguments = ([mount.sub(place.model, word) for word in words] for words in (entrypoint, arguments))
    if entrypoint and (names_server(entrypoint) or container.script_of(entrypoint) is not None):
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


def with_group(script: str, variables: Mapping[str, str | None]) -> str:
    """A script with the variables that LeaderWorkerSet sets."""
    return re.sub(r"\$\{?(LWS_\w+)\}?", lambda match: variables.get(match[1]) or match[0], script)


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
        name, operator, default = match.groups()
        if name is None or operator == "+":  # $$, and ${NAME:+value} of a variable that is not set
            return "" if name else "\0"
        if default:
            notes.append(f"{name} is taken as its default ({printable(default, 60)!r})")
        return str(default)

    for _ in range(MOST_DEFAULTS):
        text = re.sub(r"\$\$|\$\{([A-Za-z_]\w*):?([-+])([^{}]*)\}", value, text)
    return text.replace("\0", "$")


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
    """Number of GPUs, or of MIG slices of one, that a container requests."""
    resources = mapping(body, "resources")
    for part in (mapping(resources, "limits"), mapping(resources, "requests"), resources):
        for name, value in part.items():
            if name in GPU_RESOURCES and re.fullmatch(r"0?\.[0-9]+", str(value)):
                raise UsageError(where, f"asks for a part of a GPU ({name}: {value})", "plan it with --gpu-memory")
            if (name in GPU_RESOURCES or name.startswith(SLICES)) and value not in (None, ""):
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
        return sum(len(str(ids).split(",")) for ids in device["device_ids"])
    count = device.get("count")
    return None if count in (None, "all") else whole(count, 1, "count", where)


def gpu_of(body: Mapping[str, Any], pod: Mapping[str, Any]) -> tuple[str | None, str]:
    """(the GPU, the label that names it) of a container's node; a resource may ask for a MIG slice of it."""
    gpu, label = gpu_of_labels(labels_of(pod))
    resources = mapping(body, "resources")
    names = [name for part in ("limits", "requests") for name in mapping(resources, part) if name.startswith(SLICES)]
    if not names or gpu is None:
        return (None, "") if names else (gpu, label)
    from kvplan.hardware.names import find  # only for a slice

    with suppress(UsageError):
        spec = find(f"{gpu}-{names[0].removeprefix(SLICES)}")
        return (None if spec is None else spec.name), f"{label} and {names[0]}"
    return None, ""


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


def count_of(spec: Mapping[str, Any], where: str, default: int = 1) -> int:
    return whole(spec.get("replicas"), default, "replicas", where)


def whole(value: Any, default: int, name: str, where: str) -> int:
    """Parse a whole number; `default` if there is none."""
    if value in (None, "", "null", "~"):
        return default
    if not isinstance(value, str) or re.fullmatch(_NUMBER, value) is None:
        if "{{" in str(value):
            raise UsageError(where, "is a template, which is not rendered", TEMPLATE_CURE)
        raise UsageError(where, f"{name} is not a whole number ({printable(str(value), 40)!r})", "correct it")
    return int(value)
