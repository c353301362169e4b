"""Plan of a policy's target: its keys, its command or its container, as the form that they fill in."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvplan.asked.form import LENGTH_KEYS, LISTS, SWITCHES, Form, read_form, refuse_missing
from kvplan.asked.manifest import ServedContainer
from kvplan.asked.pasted import read_command
from kvplan.asked.question import Context, Inputs, is_path, requests
from kvplan.asked.speculation import PARTS, in_parts
from kvplan.core import files
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from kvplan.core.files import load_json, path_text, printable
from kvplan.core.strict_yaml import Items, Mark, Node, Scalar
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Load, plan
from kvplan.policy import manifests
from kvplan.policy.file import ENGINE_KEYS, Policy, Target, exists, is_within
from kvplan.policy.gauges import Case
from kvplan.policy.result import Figures, figures_by_target
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import short_flags
from kvplan.servers.words.command import ServeCommand

Loads = dict[tuple[object, ...], Load]  # by the length keys, the context, and the model's own
Tell = Callable[[str, str], None]  # prints a kind of message and its text


def planned(
    target: Target, policy: Policy, *, offline: bool, tell: Tell | None = None, loads: Loads | None = None
) -> Case:
    """Plan a target. An error in it names the file, the line and the target; it never counts as a failed rule.

    tell   takes its warnings and notes
    loads  cache of loads already read for other targets
    """
    try:
        inputs = inputs_of(target, policy, offline=offline, loads=loads)
        request = inputs.requests[0]
        the_plan = plan(replace(request, load=replace(request.load, lengths=None)))
    except KvplanError as error:
        raise located(error, target) from error
    if tell is not None:
        say(target, inputs, tell)
    return Case(target, the_plan, request.load.lengths, manifests.container_of(target, policy.folder))


def inputs_of(
    target: Target, policy: Policy, *, offline: bool, loads: Loads | None = None, engine: str | None = None
) -> Inputs:
    """Inputs of a target's plan; with `engine`, for that release."""
    known = {} if loads is None else loads
    served = manifests.container_of(target, policy.folder)
    stated = target if served is None else manifests.with_gpu(served, target)
    command = command_of(target, served)
    form = form_of(stated, command, policy.folder, offline=offline, served=served)
    if engine is not None:
        form = form.changed(engine=engine)
    refuse_files_outside(form, command, policy.root)
    query = read_form(form, command, "command" if target.manifest is None else "manifest")
    key = tuple(form.text(name) for name in LENGTH_KEYS)

    def load(context: Context, spec: ModelSpec) -> Load:
        """Read each distribution only once: targets often share one."""
        whole = (*key, context, spec.max_model_len)
        if whole not in known:
            known[whole] = query.load(context, spec)
        return known[whole]

    inputs = requests(replace(query, load=load, is_deployed=True))
    if served is not None:
        manifests.check_gpus(served, inputs)
        manifests.note_gpu(served, inputs, stated=stated is target)
    return inputs


def command_of(target: Target, served: ServedContainer | None) -> ServeCommand | None:
    """The command of a target's container, or its own, or None if it has neither."""
    if served is not None:
        return manifests.command_of(served, target.own)
    return None if target.command is None else read_command(target.command.text, target.own)


def located(error: KvplanError, target: Target) -> KvplanError:
    """Add the position in the policy to an error and its others, in the words of the target's command."""
    if target.command is not None:
        from kvplan.asked.words import pasted_words

        words = pasted_words([target.command.text])
        error = error.map_all(lambda wrong: wrong.in_words(words))
    return error.map_all(lambda wrong: located_one(wrong, target))


def located_one(error: KvplanError, target: Target) -> KvplanError:
    key = "command:" if target.manifest is None else "manifest:"
    known = error if target.command is target.manifest else error.renamed("--from-command", key)
    placed = known.within(f"target {target.id}")
    kind = EnvironmentProblem if isinstance(error, EnvironmentProblem) else InvalidInputError
    return kind(placed.subject, placed.problem, placed.remedy, mark=place_of(error, target))


NAMING_KEYS = ("model", "draft_model", "lengths", "calibration")  # their values are files and Hub ids
KEYS = {  # other names of arguments in errors -> keys
    "ctx": "max_model_len",
    "no_enable_lora": "enable_lora",
    **short_flags(DEFAULT),
}


def place_of(error: KvplanError, target: Target) -> Mark:
    """Position of the key that an error concerns: the first of its keys in the target, else in the defaults."""
    keys = [KEYS.get(key, key) for key in error.keys]
    if not set(keys) & {"from_command", *ENGINE_KEYS}:
        keys = named_by(error, target)
    stated = next((key for key in keys if key in target.own), None)
    source = target.command or target.manifest
    if stated is None and source is not None and keys:
        return source.mark
    return target.place(stated or next((key for key in keys if key in target.defaults), ""))


def named_by(error: KvplanError, target: Target) -> list[str]:
    """Keys whose value an error concerns: a file, or a model, which may have several names."""
    nodes = {**target.defaults, **target.own}
    values = {key: node.text.removeprefix("./") for key, node in nodes.items() if isinstance(node, Scalar)}
    subject = error.subject.partition(": ")[0]
    keys = [key for key in NAMING_KEYS if values.get(key) and subject.endswith(values[key])]
    return keys or (["model"] if isinstance(error, UnsupportedModelError) else [])


def form_of(
    target: Target, command: ServeCommand | None, folder: Path, *, offline: bool, served: ServedContainer | None = None
) -> Form:
    """The form that a target fills in: its own keys, then its command's, then the defaults."""
    nodes = dict(target.own)
    stated = keys_of_command(command)
    nodes |= {key: node for key, node in target.defaults.items() if key not in nodes and key not in stated}
    values: dict[str, Any] = {key: value_of(key, node, folder) for key, node in nodes.items()}
    if served is not None and command is not None:
        values |= {"from_command": served.command}
        if "model" not in values:
            manifests.check_model(served, command)
    elif target.command is not None and command is not None:
        values |= {"from_command": target.command.text}
        if "model" not in values and command.model is not None and command.model.startswith("."):
            values |= {"model": path_in(folder, command.model)}
    refuse_missing(
        (
            "model",
            "model" in values or command is not None,
            "name one, or paste the command: `command: vllm serve ...`",
        ),
        (
            "gpu",
            "gpu" in values or "gpu_memory" in values,
            "name one of `kvplan gpus`"
            if served is None
            else "no label of its node says which; add --gpu or gpu: NAME",
        ),
    )
    return Form({**values, "offline": offline})


def refuse_files_outside(form: Form, command: ServeCommand | None, root: Path) -> None:
    """Refuse a target's files that are outside the policy's repository."""
    names = {
        "model": form.text("model") or (command.model if command else None),
        "draft_model": in_parts(form).text("draft_model") or (command.draft_model if command else None),
        "lengths": form.text("lengths"),
        "calibration": form.text("calibration"),
    }
    for key, text in names.items():
        if text is not None and is_file(key, text) and not is_within(root, Path(text)):
            raise UsageError(
                key, f"points outside {path_text(root)} ({printable(text, 200)})", "keep it in the repository"
            )


def is_file(key: str, text: str) -> bool:
    """True if the value of a key is parsed as a file name."""
    from kvplan.workloads.lengths import DISTRIBUTIONS

    match key:
        case "lengths":
            return text.partition(":")[0] not in DISTRIBUTIONS
        case "calibration":
            return True
        case _:
            return catalog.listed(text) is None and is_path(text)


def keys_of_command(command: ServeCommand | None) -> set[str]:
    """Engine keys that a target's command sets: they override the policy's defaults."""
    if command is None:
        return set()
    others = {
        "model": command.model, "revision": command.revision, "draft_model": command.draft_model,
        "engine": command.engine,
    }  # fmt: skip
    stated = {*command.args, *(key for key, value in others.items() if value is not None)}
    return stated | ({"speculative_config"} if stated & {*PARTS} else set())


def value_of(key: str, node: Node, folder: Path) -> Any:
    """A key's value as a form has it; policy/file.py has already checked its type."""
    match node:
        case Items():
            return [item.text for item in node.values if isinstance(item, Scalar)]
        case Scalar() if key in SWITCHES:
            return node.text == "true"
        case Scalar() if key in LISTS:
            return [node.text]
        case Scalar() if key == "speculative_config":
            return config_in(folder, node.text)
        case Scalar() if key in ("model", "draft_model"):
            return path_in(folder, node.text) if is_path_in(folder, node.text) else node.text
        case Scalar() if key == "calibration" or (key == "lengths" and is_path_in(folder, node.text)):
            return path_in(folder, node.text)
        case _:
            assert isinstance(node, Scalar)
            return node.text


def path_in(folder: Path, text: str) -> str:
    """A path relative to the policy, keeping its leading ./, which distinguishes it from a catalog name."""
    return text if str(folder) == "." else os.path.join(folder, text)  # noqa: PTH118 -- a Path drops the ./


def config_in(folder: Path, text: str) -> str:
    """A speculative config whose draft, if it is a path, is relative to the policy; invalid text as it is."""
    from kvplan.servers.words.speculative_config import with_model  # only needed for this key

    return with_model(text, lambda model: path_in(folder, model) if is_path_in(folder, model) else model)


def is_path_in(folder: Path, text: str) -> bool:
    """True if a name is meant as a path: it looks like one, or the file exists next to the policy."""
    if text.startswith((".", "/")) or text.endswith((".json", ".csv", ".csv.gz", ".txt")):
        return True
    return catalog.listed(text) is None and files.exists(folder / text)


def say(target: Target, inputs: Inputs, tell: Tell) -> None:
    """Tell the warnings of a target, and numbers in its command that kvplan's own keys would parse differently."""
    for text in dict.fromkeys(inputs.warnings):
        tell("warning", f"target {target.id}: {text}")
    about = [*inputs.readings, *(inputs.of_command if target.manifest is not None else ())]
    for text in dict.fromkeys(inputs.notes):
        if text in about:
            tell("note", f"target {target.id}: {text}")
    if (others := overruled_model(target)) is not None:
        own, other = (printable(text, 100) for text in others)
        tell("note", f"target {target.id}: uses model: {own}, not {other} from its command")


def overruled_model(target: Target) -> tuple[str, str] | None:
    """(the target's own model, its command's) if they differ."""
    node = target.own.get("model")
    if target.command is None or not isinstance(node, Scalar):
        return None
    other = read_command(target.command.text, target.own).model
    if other is None or other == node.text:
        return None
    known = catalog.find(node.text)
    return None if known is not None and known == catalog.find(other) else (node.text, other)


def baseline_figures(policy: Policy) -> Mapping[str, Figures] | None:
    """Figures of the baseline by target, or None if there is no such file (yet)."""
    if policy.baseline is None or not exists(policy.baseline.path):
        return None
    try:
        return figures_by_target(load_json(policy.baseline.path), printable(str(policy.baseline.path), 200))
    except KvplanError as error:
        raise error.within("baseline", policy.baseline.mark) from error
