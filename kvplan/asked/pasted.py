"""A pasted command of any server: a shell line, a compose file, a Kubernetes manifest, or a piece of Python.

The text is split like a shell line and never run. A flag whose effect on memory kvplan does not size is rejected.
"""

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.core.errors import KvplanError, NoServerError, UsageError
from kvplan.core.files import exists, printable, read_text
from kvplan.models.catalog import find
from kvplan.servers.base import ALIASES, SERVERS, is_named, programs, server_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words import environment, shell
from kvplan.servers.words.command import VARIABLE, Note, ServeCommand, Started, refuse

if TYPE_CHECKING:
    from kvplan.asked.manifest import ServedContainer
    from kvplan.servers.base import Pasted

_ROLLOUT = (
    r"actor_rollout_ref|openrlhf|--vllm[._]|skyrl|generator[.:]|vllm[-_]serve|\w\wConfig\s*\(|use_vllm|fast_inference|"
    r"--rollout-num|--\w+-mem-fraction|generation[.:]"
)
_UNIT = r"(?m)^[ \t]*(?:ExecStart=|(?:CMD|ENTRYPOINT)[ \t])"  # a Dockerfile, a unit of systemd
_SETTINGS = r"(?mi)^[ \t]*(?:FROM|quantization|\{)|\sload\s"  # what may be no command: lines of settings, an object
SEVERAL = "save it and give `kvplan check FILE`, or paste one of them"
MAX_COMMAND_CHARS = 64 * 1024  # room for a script or a manifest


def too_long(text: str) -> tuple[str, str]:
    """(problem, remedy) for a text of more than MAX_COMMAND_CHARS."""
    return f"is longer than {MAX_COMMAND_CHARS:,} characters ({len(text):,})", "paste only the server's command"


def read_command(text: str, options: Collection[str] = ()) -> ServeCommand:
    """Parse a pasted server command.

    options  keys that are stated outside the text, so that their values in it may be left open: model, ...

    Raise UsageError for a command without a server, a misspelled flag, a value the server would reject, and for flags
    whose effect on memory kvplan does not size.
    """
    command = parse(text, options)
    refuse(command)
    return command


def parse(text: str, options: Collection[str] = ()) -> ServeCommand:
    """Parse a pasted command, or a framework's rollout engine, listing rejected flags in the result, not raising."""
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError("--from-command", *too_long(text))
    if re.search(_ROLLOUT, text):
        from kvplan.asked import rollout

        if (framework := rollout.framework_of(text)) is not None:
            return rollout.read_rollout(text, framework, options)
    for name in SERVERS if re.search(_SETTINGS, text) else ():
        server = server_of(name).pasted()
        if (reading := server.starts.reading) is not None and (words := reading(text)) is not None:
            return server.parse(words)
    if re.search(_UNIT, text):
        from kvplan.asked.units import line_of

        text = line_of(text)
    if is_line(text):
        return _parse_line(text, options)
    from kvplan.asked import container, manifest, snippet

    text = manifest.applied(text)
    if snippet.is_snippet(text):
        return parse_snippet(text, options)
    if (words := snippet.listed(text)) is not None:
        return on_gpu(_parse_line(shlex.join(words), options), text)
    if manifest.is_manifest_file(text):
        return parse_manifest(text, options)
    if not container.is_manifest(text):
        return _parse_line(text, options)
    served = manifest.part(text, "--from-command")
    command = parse_container(served, options)
    if served.image and not is_named(text):
        title = server_of(command.engine or DEFAULT).terms.title
        command.notes.append(Note(f"{printable(served.image, 100)}: its arguments are read as {title}'s"))
    return command


def parse_snippet(text: str, options: Collection[str]) -> ServeCommand:
    """Parse a call in Python that builds a server's engine."""
    from kvplan.asked import ray, snippet
    from kvplan.asked.left import parsed

    call = snippet.call_in(text, options)
    server = server_of(call.server).pasted()
    command = parsed(server.parse, call.words, options)
    command.args = {**call.args, **command.args}
    command.notes += map(Note, call.notes)
    if call.accelerator is not None:
        command.resources = ray.resources_of(call.accelerator)
    return on_gpu(command, text)


def on_gpu(command: ServeCommand, text: str) -> ServeCommand:
    """The command with the GPU that a keyword of the code around it names: `gpu="H200"` of a Modal function."""
    from kvplan.asked import ray

    match = re.search(r"""(?i)\bgpu\s*=\s*["']([a-z][\w-]*)["':!]""", text)
    if match is not None and command.resources is None:
        command.resources = ray.resources_of(match[1], "gpu")
    return command


def is_line(text: str) -> bool:
    """True if a text can only be a shell line: neither YAML nor JSON, no list of arguments, no call in Python."""
    return "\n" not in text.strip() and re.match(r"""\s*(?:[-\[{"']|\w+[ \t]*:[ \t]|$)|[^(]*\(""", text) is None


def parse_manifest(text: str, options: Collection[str] = ()) -> ServeCommand:
    """Parse the command of the only serving container in a manifest; if there are several, raise an error naming
    them.
    """
    from kvplan.asked import manifest

    containers = manifest.served(text, "--from-command")
    if len(containers) > 1:
        names = ", ".join(each.id for each in containers[:5])
        raise UsageError(
            "--from-command",
            f"{len(containers)} containers run servers ({names})",
            SEVERAL,
        )
    return parse_container(containers[0], options)


def parse_container(served: "ServedContainer", options: Collection[str] = ()) -> ServeCommand:
    """Parse the command of a manifest's container; its image implies the release."""
    command = _parse_line(served.command, options)
    command.resources = served.resources
    command.notes += map(Note, served.notes)
    return command


WRAPPERS = ("docker", "podman", "sudo", "env")
QUOTING = ("alias", "tmux", "screen")  # take a server's command as one word: NAME='...', send-keys "..."


def is_command(words: list[str]) -> bool:
    """True if words are a whole command rather than a model and flags."""
    is_wrapped = words[0] in WRAPPERS or "=" in words[0]
    return is_wrapped or any(server_of(name).pasted().start(words) is not None for name in SERVERS)


def served_by(engine: str, words: list[str]) -> list[str]:
    """Return the command of a server (`vllm@0.33`) for a model and its flags."""
    name = engine.partition("@")[0]
    if name not in SERVERS and name not in ALIASES:
        return words  # the reader of --engine reports it
    starts = server_of(name).pasted().starts
    return [*starts.launcher, f"--{starts.model_flag.replace('_', '-')}", *words]


def _parse_line(text: str, options: Collection[str] = ()) -> ServeCommand:
    """Parse the server's command in a shell script and ignore the rest of it."""
    from kvplan.asked import batch

    variables, resources, notes = batch.job_of(text) if "#SBATCH" in text else ({}, None, list[Note]())
    commands = shell.split(text, variables=variables)
    if text.lstrip().startswith("--") and commands:
        from kvplan.asked.container import server_for

        commands[0] = [*server_for(commands[0]), *commands[0]]
    number, name, started = first_start(commands)
    if started is not None:
        server, words = server_of(name).pasted(), commands[number]
        command = _parsed(server, started.words, options)
        command.engine = started.engine or command.engine
        command.args = {**started.args, **command.args}
        command.notes += map(Note, started.notes)
        command.resources = resources
        command.notes += notes
        command.environment = environment.given(commands[:number], words[: len(words) - len(started.words)])
        refuse_second(command, commands[number + 1 :], name)
        return command
    quoted = (word for words in commands if words and words[0] in QUOTING for word in words if " " in word)
    for word in (re.sub(r"^\w+=", "", word) for word in quoted):
        if first_start(shell.split(word))[2] is not None:
            command = _parse_line(word, options)
            command.resources = command.resources or resources
            command.notes += notes
            return command
    if len(commands) == 1 and len(commands[0]) == 1 and exists(commands[0][0]) and Path(commands[0][0]).is_file():
        return _parse_file(Path(commands[0][0]), options)
    remedy = f"paste {programs()}, or the `docker run ...` of its image"
    if (model := next((word for words in commands for word in words if "/" in word and find(word)), None)) is not None:
        remedy += f"; or plan its model on one of them: `kvplan estimate {model}`"
    raise NoServerError(
        "--from-command",
        f"contains no server command ({printable(' '.join(commands[0] if commands else ()), 60)!r})",
        remedy,
    )


def _parse_file(path: Path, options: Collection[str]) -> ServeCommand:
    """Parse what stands in a file that is named in place of a command."""
    text = read_text(path, MAX_COMMAND_CHARS)
    if len(text.split()) < 2:
        raise NoServerError(
            "--from-command", f"{printable(str(path), 60)} contains no server command", f"use {programs()}"
        )
    try:
        command = parse(text, options)
    except UsageError as error:
        if error.remedy != SEVERAL:
            raise
        raise error.changed(remedy=f"`kvplan check {printable(str(path), 400)}` plans each of them") from error
    command.notes.append(Note(f"what stands in {printable(str(path), 100)}"))
    return command


def _parsed(server: "Pasted", words: list[str], options: Collection[str]) -> ServeCommand:
    if not any(re.search(VARIABLE, word) or isinstance(word, shell.Word) for word in words):
        return server.parse(words)
    from kvplan.asked.left import parsed

    return parsed(server.parse, words, options)


def first_start(commands: list[list[str]]) -> tuple[int, str, "Started | None"]:
    """(number of the first command that starts a server, the server's name, how)."""
    for number, words in enumerate(commands):
        for name in SERVERS:
            started = server_of(name).pasted().start(words)
            if started is not None:
                return number, name, started
    return 0, "", None


def refuse_second(command: ServeCommand, later: list[list[str]], server: str) -> None:
    """Refuse a script that starts another model's server, too: which is meant is not known.

    A server that was started without a model loads that of its next command.
    """
    _, name, started = first_start(later)
    if started is None:
        return
    try:
        second = server_of(name).pasted().parse(started.words)
    except KvplanError:
        if command.model is None and name == server:
            raise
        return
    other = second.model
    if command.model is None and name == server:
        command.model, command.args = other, {**second.args, **command.args}
        command.notes += second.notes
        return
    if command.model != other and None not in (command.model, other):
        names = f"{printable(str(command.model), 60)} and {printable(str(other), 60)}"
        raise UsageError("--from-command", f"starts servers of two models ({names})", "paste one of the commands")
