"""A plan as a manifest that runs it: Kubernetes or compose, with GPUs, host memory, /dev/shm, probes and a model cache.

`kvplan check` reads it back as the same plan. Values that the plan does not determine are assumptions, which the
manifest names.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

from kvplan.asked.nodes import PRODUCT, product_of
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import GIB, format_gib
from kvplan.models.catalog import model_id
from kvplan.planning.plan import Plan, assignments, host_rows, kept_rows
from kvplan.servers.base import Launch, server_of

Output = Literal["k8s", "compose"]
PROCESS: Final = 4 * GIB  # of host memory per process; assumed, not measured
SHARED_EXTRA: Final = GIB  # of /dev/shm for NCCL and others; assumed: KServe's runtime gives 1 GiB for all
DOWNLOAD: Final = 100 * 10**6  # bytes per second from the Hub; assumed
START_S: Final = 600  # to load, compile and capture; assumed: KServe's runtime allows 600 s for all
PROBE_S: Final = 10
PORT: Final = 8000
CACHE: Final = "/root/.cache/huggingface"  # model folder in the image: its user is root


@dataclass(frozen=True, slots=True)
class Needs:
    """A server's host resources, in whole GiB except `start_s`.

    shared   /dev/shm; included in `request`
    request  memory of its processes; limit: plus the checkpoint's files in the page cache
    storage  the model cache
    """

    shared: int
    request: int
    limit: int
    storage: int
    start_s: int


def needs_of(plan: Plan) -> Needs:
    ranks, cores = ranks_of(plan), cores_of(plan)
    checkpoint, sizes = sum(row.size for row in host_rows(plan) if row.name == "checkpoint"), kept_rows(plan)
    shared = whole_gib(sum(size for row, size in sizes if row.in_shm) + SHARED_EXTRA)
    resident = sum(size for row, size in sizes if not row.in_shm)
    workers = 0 if ranks == cores else ranks  # an engine core with one rank computes in its own process
    processes = 2 * cores + workers + (cores > 1)  # as many API servers as engine cores, and their coordinator
    request = whole_gib(resident + processes * PROCESS) + shared
    return Needs(
        shared=shared,
        request=request,
        limit=request + whole_gib(checkpoint),
        storage=whole_gib(checkpoint + checkpoint // 10) + 1,
        start_s=START_S + checkpoint // DOWNLOAD,
    )


SEVERAL_NODES: Final = "remove it and use the printed command on each machine, or add --tp 8 --pp 1"


def manifest(plan: Plan, replicas: int, output: Output, question: str) -> str:
    """Write the manifest. Raise UsageError for a server that does not fit on one machine."""
    ranks = ranks_of(plan)
    gpu = plan.request.gpu
    if gpu.vendor not in ("nvidia", "unknown"):
        raise UsageError("--output", f"writes manifests only for NVIDIA GPUs ({gpu.name} is {gpu.vendor})", "remove it")
    if ranks > gpu.node_gpus:
        raise UsageError(
            "--output",
            f"writes servers of one machine with at most {gpu.node_gpus} GPUs ({ranks:,} here)",
            SEVERAL_NODES if plan.request.args.data_parallel_size > 1 else "use the printed command",
        )
    if re.search(r"^\.{0,2}/|\.json$", model_id(plan.request.spec)):
        raise UsageError("--output", f"needs a model from the Hub ({model_id(plan.request.spec)})", "use its Hub id")
    return WRITERS[output](plan, replicas, question)


def kubernetes(plan: Plan, replicas: int, question: str) -> str:
    """Write a claim for the models, a deployment and a service."""
    needs, name = needs_of(plan), name_of(plan)
    mode = "ReadWriteOnce" if replicas == 1 else "ReadWriteMany"
    return f"""\
# {question}
# Sizes of the host: {about(plan, needs)}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}-models
spec:
  accessModes: [{mode}]
  resources:
    requests:
      storage: {needs.storage}Gi
---
{deployment(plan, replicas)}---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector:
    app: {name}
  ports:
    - name: http
      port: 80
      targetPort: http
"""


def deployment(plan: Plan, replicas: int) -> str:
    needs, name = needs_of(plan), name_of(plan)
    selector = ""
    if plan.request.gpu.vendor == "nvidia":
        selector = f"\n      nodeSelector:\n        {PRODUCT}: {product_of(plan.request.gpu.device_name)}"
    return f"""\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels:
    app: {name}
spec:
  replicas: {replicas}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: 0
      maxUnavailable: 1
  selector:
    matchLabels:
      app: {name}
  template:
    metadata:
      labels:
        app: {name}
    spec:{selector}
      containers:
{container(plan, needs)}      volumes:
        - name: models
          persistentVolumeClaim:
            claimName: {name}-models
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {needs.shared}Gi
"""


def container(plan: Plan, needs: Needs) -> str:
    variables = "".join(
        f"\n            - name: {key}\n              value: {quoted(value)}"
        for key, value in variables_of(plan).items()
    )
    arguments = "".join(f"\n            - {quoted(word)}" for word in arguments_of(plan))
    return f"""\
        - name: {plan.request.release.engine}
          image: {image_of(plan)}
          command: {program_of(plan)}
          args:{arguments}
          env:
            - name: HF_TOKEN
              valueFrom:
                secretKeyRef:
                  name: hf-token
                  key: token
                  optional: true{variables}
          ports:
            - name: http
              containerPort: {PORT}
          resources:
            requests:
              memory: {needs.request}Gi
            limits:
              memory: {needs.limit}Gi
              nvidia.com/gpu: {ranks_of(plan)}
          startupProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: {PROBE_S}
            failureThreshold: {-(-needs.start_s // PROBE_S)}
          readinessProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: {PROBE_S}
          livenessProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: {PROBE_S}
            timeoutSeconds: 5
            failureThreshold: 6
          volumeMounts:
            - name: models
              mountPath: {CACHE}
            - name: shm
              mountPath: /dev/shm
"""


def compose(plan: Plan, replicas: int, question: str) -> str:
    """Write a compose file with one service per replica, each on its own GPUs."""
    needs, name, ranks = needs_of(plan), name_of(plan), ranks_of(plan)
    most = plan.request.gpu.node_gpus
    if ranks * replicas > most:
        raise UsageError(
            "--output compose",
            f"supports one machine of at most {most} GPUs ({replicas:,} servers need {ranks * replicas:,} here)",
            "use --output k8s",
        )
    services = ""
    for number in range(replicas):
        service = name if replicas == 1 else f"{name}-{number + 1}"
        devices = ", ".join(quoted(str(number * ranks + rank)) for rank in range(ranks))
        words = "".join(f"\n      - {quoted(word)}" for word in arguments_of(plan))
        variables = "".join(f"\n      {key}: {quoted(value)}" for key, value in variables_of(plan).items())
        labels = ""
        if plan.request.gpu.vendor == "nvidia":
            labels = f"\n    labels:\n      {PRODUCT}: {product_of(plan.request.gpu.device_name)}"
        services += f"""\
  {service}:
    image: {image_of(plan)}
    entrypoint: {program_of(plan)}
    command:{words}
    environment:
      HF_TOKEN: ${{HF_TOKEN:-}}{variables}{labels}
    ports:
      - "{PORT + number}:{PORT}"
    shm_size: {needs.shared}g
    volumes:
      - models:{CACHE}
    healthcheck:
      test: [CMD, curl, --fail, --silent, "http://localhost:{PORT}/health"]
      interval: {PROBE_S}s
      timeout: 5s
      retries: 6
      start_period: {needs.start_s}s
    restart: unless-stopped
    deploy:
      resources:
        limits:
          memory: {needs.limit}g
        reservations:
          memory: {needs.request}g
          devices:
            - driver: nvidia
              device_ids: [{devices}]
              capabilities: [gpu]
"""
    return f"""\
# {question}
# Sizes of the host: {about(plan, needs)}
services:
{services}
volumes:
  models:
"""


WRITERS: Final[Mapping[Output, Callable[[Plan, int, str], str]]] = {"k8s": kubernetes, "compose": compose}


def about(plan: Plan, needs: Needs) -> str:
    """One comment line that explains the host's sizes."""
    checkpoint = needs.limit - needs.request
    offloaded = "offloaded KV, " if any(row.in_shm and row.name == "kv_offloading" for row in host_rows(plan)) else ""
    return (
        f"{needs.request} GiB are {format_gib(PROCESS)} for each process (assumed), pinned memory, and {needs.shared} "
        f"GiB of /dev/shm (the server's queues, {offloaded}and {format_gib(SHARED_EXTRA)} assumed for NCCL); the limit "
        f"adds the checkpoint's {checkpoint} GiB in the page cache."
    )


def launch_of(plan: Plan) -> Launch:
    return server_of(plan.request.release.engine).launch()


def program_of(plan: Plan) -> str:
    """Words that start the server, as a YAML list."""
    return f"[{', '.join(launch_of(plan).program)}]"


def arguments_of(plan: Plan) -> list[str]:
    """Arguments after the program's own words."""
    return launch_of(plan).words(plan)[len(launch_of(plan).program) :]


def variables_of(plan: Plan) -> dict[str, str]:
    words = assignments(plan.request.release, plan.request.args)
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def image_of(plan: Plan) -> str:
    """Image of the release; without a patch number, that of patch 0."""
    release = plan.request.release.label.partition("@")[2].partition("+")[0]
    return launch_of(plan).image.format(release=release + ".0" * (release.count(".") == 1))


def name_of(plan: Plan) -> str:
    """The model's name as a Kubernetes name (RFC 1123, with room for a suffix)."""
    name = re.sub(r"[^a-z0-9]+", "-", model_id(plan.request.spec).rpartition("/")[2].lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".strip("-")


def ranks_of(plan: Plan) -> int:
    """Number of GPUs of a server, of all data-parallel ranks."""
    return plan.request.args.num_gpus


def cores_of(plan: Plan) -> int:
    """Number of engine cores: a data-parallel rank has its own, except with DP attention, in which they share one."""
    args = plan.request.args
    return 1 if args.enable_dp_attention else args.data_parallel_size


def whole_gib(size: int) -> int:
    return -(-size // GIB)


def quoted(word: str) -> str:
    """Quote a word for YAML, which includes JSON's strings."""
    return json.dumps(word)
