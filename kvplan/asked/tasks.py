"""A task of dstack or SkyPilot: a file with a script, its variables and the GPU to run it on, as a container.

Sources: dstack.ai/docs, `service` (image, env, commands, resources.gpu: 24GB, H100:2, A100:80GB or name, count and
memory); docs.skypilot.co, "Task YAML" (resources.accelerators, envs, secrets, num_nodes, run, and its SKYPILOT_
variables) and "Service YAML" (service.replicas, service.replica_policy.min_replicas).
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

KEY: Final = "resources"  # of a pod, the name of its GPU
NUM_GPUS: Final = ("SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_NUM")
NUM_NODES: Final = "SKYPILOT_NUM_NODES"
_COUNT: Final = re.compile(r"[0-9]{1,4}")
_MEMORY: Final = re.compile(r"([0-9]{1,4})[Gg][Bb]")


class Accelerators(NamedTuple):
    """GPUs that a task asks for: their name and number where the task leaves no choice."""

    name: str | None = None
    number: int | None = None


def is_task(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("commands"), list) or (
        isinstance(document.get("run"), str) and ("resources" in document or "envs" in document)
    )


def replicas_of(document: Mapping[str, Any]) -> Any:
    """What a task states of its servers' number: dstack's replicas, or those of SkyPilot's service, of a range the
    least.
    """
    service = document.get("service")
    if not isinstance(service, Mapping):
        return document.get("replicas") if service is None else service
    policy = service.get("replica_policy")
    return policy.get("min_replicas") if isinstance(policy, Mapping) else service.get("replicas")


def container_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(the container, the name of its GPU, or what is stated of GPUs where that is no single name)."""
    resources = document.get("resources")
    stated = resources if isinstance(resources, Mapping) else {}
    words = stated.get("gpu", stated.get("accelerators"))
    gpus = accelerators(words)
    lines = document.get("commands")
    script = "\n".join(map(str, lines)) if isinstance(lines, list) else str(document.get("run"))
    variables = {} if gpus.number is None else {NUM_GPUS[isinstance(lines, list)]: str(gpus.number)}
    if not isinstance(lines, list):
        variables[NUM_NODES] = str(document.get("num_nodes") or 1)
    for key in ("env", "envs", "secrets"):
        pairs = document.get(key)
        if isinstance(pairs, Mapping):
            variables |= {str(name): str(value) for name, value in pairs.items() if value}
        elif isinstance(pairs, list):
            variables |= dict(str(pair).split("=", 1) for pair in pairs if "=" in str(pair))
    used = set(re.findall(r"\$\{?(\w+)", script))  # the others are the server's
    starts = [
        f"{'' if name in used else 'export '}{name}={shlex.quote(value)}\n"
        for name, value in variables.items()
        if name in used or name not in (*NUM_GPUS, NUM_NODES)
    ]
    body: dict[str, Any] = {"image": document.get("image"), "command": ["sh", "-c", "".join(starts) + script]}
    if gpus.number is not None:
        body["resources"] = {"limits": {"nvidia.com/gpu": str(gpus.number)}}
    stated_text = words if isinstance(words, str) else ", ".join(map(str, words or ()))
    return body, gpus.name or stated_text or None


def accelerators(value: Any) -> Accelerators:
    """The GPUs of `H100:2`, `A100:80GB:2`, `{H100: 2}` or name, count and memory; a choice of several has no name."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return _of_words(value.split(":"))
    if not isinstance(value, Mapping):
        return Accelerators()
    if "name" in value or "count" in value:
        return _of_words([str(value[key]) for key in ("name", "memory", "count") if key in value])
    choices = [_of_words([*str(name).split(":"), str(count)]) for name, count in value.items()]  # {L4:1} has no values
    counts = {choice.number for choice in choices}
    return choices[0] if len(choices) == 1 else Accelerators(None, counts.pop() if len(counts) == 1 else None)


def _of_words(words: list[str]) -> Accelerators:
    name, memory, count = None, "", None
    for word in (word.strip() for word in words):
        if _COUNT.fullmatch(word):
            count = int(word)
        elif size := _MEMORY.fullmatch(word):
            memory = f"-{size[1]}g"
        elif re.fullmatch(r"[\w.-]*[A-Za-z][\w.-]*", word) and ".." not in word:
            name = word
    return Accelerators(None if name is None else name + memory, count or (1 if name else None))
