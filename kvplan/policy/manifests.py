"""Containers of manifests as targets of a check: make a policy from a file, or find the command of a target."""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kvplan.asked import manifest
from kvplan.asked.manifest import ServedContainer
from kvplan.asked.pasted import parse_container
from kvplan.asked.question import Inputs, check_resources, is_elsewhere, replicas_note
from kvplan.core.errors import UsageError
from kvplan.core.files import path_text, printable, read_text
from kvplan.core.strict_yaml import Mark, Node, Scalar
from kvplan.models.lookup import in_path
from kvplan.policy.file import Policy, Rule, Target, check_engine_value, root_of
from kvplan.servers.words.command import ServeCommand, refuse

MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")


def is_manifest(path: Path) -> bool:
    """True if a checked file is a manifest; if it cannot be read, the policy's reader reports why."""
    if path.suffix.lower() not in MANIFEST_SUFFIXES:
        return False
    try:
        if not path.is_file() or path.stat().st_size > manifest.MAX_CHARS:
            return False
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return False
    return manifest.is_manifest_file(text) or is_json_manifest(text)


def is_json_manifest(text: str) -> bool:
    return text.lstrip().startswith("{") and '"apiVersion"' in text and '"targets"' not in text


def policy_of(path: Path, gpu: str | None) -> Policy:
    """Policy whose targets are a manifest's containers, each of which must start; `gpu` overrides nodes' labels."""
    targets = []
    for container in containers(path):
        mark = Mark(path_text(path), container.line, 1)
        own: dict[str, Node] = {}
        if gpu is not None:
            own["gpu"] = Scalar(gpu, is_plain=False, mark=mark)
            check_engine_value("gpu", own["gpu"], "--gpu")
        target = Target(
            id=container.id, mark=mark, own=own, defaults={}, command=None, workload=None,
            rules=(Rule("fits", limit=True, text="true", mark=mark),), severity={},
            manifest=Scalar(path.name, is_plain=False, mark=mark),
            container=Scalar(container.id, is_plain=False, mark=mark),
        )  # fmt: skip
        targets.append(target)
    return Policy(
        path=path_text(path), folder=path.parent, root=root_of(path), targets=tuple(targets), baseline=None,
        measured=None, severity={}, waivers=(),
    )  # fmt: skip


def containers(path: Path) -> list[ServedContainer]:
    """Every server in a manifest."""
    return _served(read_text(path, manifest.MAX_CHARS), path_text(path))


@lru_cache(maxsize=8)
def _served(text: str, where: str) -> list[ServedContainer]:
    return manifest.served(text, where)


def container_of(target: Target, folder: Path) -> ServedContainer | None:
    """The container that starts a target, or None if the target names no manifest."""
    if target.manifest is None:
        return None
    every = containers(folder / target.manifest.text)
    if target.container is None:
        if len(every) > 1:
            names = ", ".join(container.id for container in every[:5])
            raise UsageError("manifest", f"has {len(every)} containers that serve ({names})", "add container: NAME")
        return every[0]
    name = target.container.text
    matching = [container for container in every if container.id == name] or [
        container for container in every if container.container == name
    ]
    if len(matching) != 1:
        problem = "names no container that serves" if not matching else "names several containers"
        names = ", ".join(container.id for container in every[:5])
        raise UsageError("container", f"{problem} ({printable(name, 60)!r})", f"write one of {names}")
    return matching[0]


def command_of(served: ServedContainer, stated: Collection[str] = ()) -> ServeCommand:
    """Command of a container, without the values that a target states."""
    command = parse_container(served, stated)
    command.resources = None  # `check_gpus` and `note_gpu` say what they mean for a target
    refuse(command)
    return command


def check_model(served: ServedContainer, command: ServeCommand) -> None:
    """Refuse a model inside the container, unless its folder's name identifies it."""
    if command.model is None or (is_elsewhere(command.model) and in_path(command.model) is None):
        where = (
            "is not named" if command.model is None else f"is a path in the container ({printable(command.model, 80)})"
        )
        raise UsageError(
            "model", f"{where}", f"name it in a policy: a target with manifest:, container: {served.id} and model:"
        )


def check_gpus(served: ServedContainer, inputs: Inputs) -> None:
    """Refuse a server that needs more GPUs than its pods request, and note unused ones."""
    note = check_resources(served.resources, inputs.requests[0])
    if note is not None:
        add_note(inputs, note)


def note_gpu(served: ServedContainer, inputs: Inputs, *, stated: bool) -> None:
    if stated and served.gpu is not None and served.gpu != inputs.requests[0].gpu.name:
        add_note(inputs, f"gpu: {inputs.requests[0].gpu.name} counts, not {served.gpu} of {served.gpu_label}")
    elif not stated and served.gpu is not None:
        add_note(inputs, f"gpu: {served.gpu} is inferred from {printable(served.gpu_label, 120)}")
    if served.replicas != 1:
        add_note(inputs, replicas_note(served.replicas))


def add_note(inputs: Inputs, text: str) -> None:
    inputs.notes.append(text)
    inputs.readings.append(text)


def with_gpu(served: ServedContainer, target: Target) -> Target:
    """The target on the GPU of the container's node, unless it states its own."""
    nodes = {**target.defaults, **target.own}
    if served.gpu is None or "gpu" in nodes or "gpu_memory" in nodes:
        return target
    place = target.manifest.mark if target.manifest else target.mark
    return replace(target, own={**target.own, "gpu": Scalar(served.gpu, is_plain=False, mark=place)})
