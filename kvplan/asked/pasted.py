"""A pasted command of any server: a shell line, a compose file, a Kubernetes manifest, or a piece of Python.

The text is split like a shell line and never run. A flag whose effect on memory kvplan does not size is rejected.
"""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.core.errors import NoServerError, UsageError
from kvplan.core.files import exists, printable
from kvplan.servers.base import ALIASES, SERVERS, is_named, programs, server_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words import environment, shell
from kvplan.servers.words.command import Note, ServeCommand, refuse

if TYPE_CHECKING:
    from kvplan.asked.manifest import ServedContainer

MAX_COMMAND_CHARS = 16 * 1024  # room for every flag of a server at once


def too_long(text: str) -> tuple[str, str]:
    """(problem, remedy) for a text of more than MAX_COMMAND_CHARS."""
    return f"is longer than {MAX_COMMAND_CHARS:,} characters ({len(text):,})", "paste only the server's command"


def read_command(text: str) -> ServeCommand:
    """Parse a pasted server command.

    Raise UsageError for a command without a server, a misspelled flag, a value the server would reject, and for flags
    whose effect on memory kvplan does not size.
    """
    command = parse(text)
    refuse(command)
    return command


def parse(text: str) -> ServeCommand:
    """Parse a pasted server command, listing rejected flags in the result instead of raising."""
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError("--from-command", *too_long(text))
    if is_line(text):
        return _parse_line(text)
    from kvplan.asked import container, manifest, snippet
    from kvplan.servers.words import images

    if snippet.is_snippet(text):
        name, words = snippet.words_of(text)
        command = server_of(name).pasted().parse(words)
        command.args = {**server_of(name).pasted().starts.call_args, **command.args}
        return command
    if manifest.is_manifest_file(text):
        return parse_manifest(text)
    if not container.is_manifest(text):
        return _parse_line(text)
    line, image = container.shell_line(text)
    command = _parse_line(line)
    if image is not None and not is_named(text):
        title = server_of(command.engine or DEFAULT).terms.title
        command.notes.append(Note(f"{printable(image, 100)}: its arguments are read as {title}'s"))
    for name in SERVERS:
        label = images.of_words(name, [image or ""]).label
        if label is not None and (command.engine or name) == name:
            command.engine = label
    return command


def is_line(text: str) -> bool:
    """True if a text can only be a shell line: neither YAML nor JSON, no list of arguments, no call in Python."""
    return "\n" not in text.strip() and re.match(r"""\s*(?:[-\[{"']|\w+[ \t]*:[ \t]|$)|[^(]*\(""", text) is None


def parse_manifest(text: str) -> ServeCommand:
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
            "save it and give `kvplan check FILE`, or paste one of them",
        )
    return parse_container(containers[0])


def parse_container(served: "ServedContainer") -> ServeCommand:
    """Parse the command of a manifest's container; its image implies the release."""

    command = _parse_line(served.command)
    command.notes += map(Note, served.notes)
    if served.image and not is_named(served.command):
        title = server_of(command.engine or DEFAULT).terms.title
        command.notes.append(Note(f"{printable(served.image, 100)}: its arguments are read as {title}'s"))
    return command


WRAPPERS = ("docker", "podman", "sudo", "env")


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


def _parse_line(text: str) -> ServeCommand:
    """Parse the server's command in a shell line and ignore the rest of it."""
    if text.lstrip().startswith("--"):
        from kvplan.asked.container import server_for

        text = f"{shlex.join(server_for(shell.split(text)[0]))} {text}"
    commands = shell.split(text)
    for number, words in enumerate(commands):
        for name in SERVERS:
            server = server_of(name).pasted()
            started = server.start(words)
            if started is None:
                continue
            command = server.parse(started.words)
            command.engine = started.engine or command.engine
            command.args = {**started.args, **command.args}
            command.notes += map(Note, started.notes)
            command.environment = environment.given(commands[:number], words[: len(words) - len(started.words)])
            return command
    if len(commands) == 1 and len(commands[0]) == 1 and exists(commands[0][0]) and Path(commands[0][0]).is_file():
        name = shlex.quote(commands[0][0])
        remedy = f'paste what is in it (`--from-command "$(cat {name})"`), or `kvplan check {name}`'
        raise NoServerError("--from-command", f"names a file ({printable(name, 60)})", remedy)
    raise NoServerError(
        "--from-command",
        f"contains no server command ({printable(' '.join(commands[0]), 60)!r})",
        f"paste {programs()}, or the `docker run ...` of its image",
    )
