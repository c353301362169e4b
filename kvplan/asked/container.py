"""A container of a compose file or Kubernetes manifest, as the command that it runs.

Nothing is expanded or run: `image:`, `entrypoint:`, `command:`, `args:`, `environment:` and `env:` become one shell
line, which kvplan/asked/pasted.py reads like any other. Sources: the Compose specification; kubernetes.io, Pod v1.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from kvplan.asked.ray import typed
from kvplan.asked.snippet import flag_words
from kvplan.core.errors import UsageError
from kvplan.servers.base import SERVERS, is_named, server_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import spellings
from kvplan.servers.words.shell import is_shell, names_server, script_flag

_KEYS: Final = re.compile(
    r"^[ \t]*(?:-[ \t]+)?(?:image|entrypoint|command|args|environment|env|services|containers)[ \t]*:", re.MULTILINE
)
# How the text of an argument list begins: `- --model`, `["--model"`, `args:`.
_LIST: Final = re.compile(r"-[ \t]+[\"']?--|\[\s*[\"']|(?:-[ \t]+)?(?:args|command)[ \t]*:")
_MODEL: Final = re.compile(r"--model(?:[-_]path)?(?:=.*)?", re.DOTALL)
ELSEWHERE: Final = ("env_file", "envFrom")  # name a file or object that holds variables
MOST_NODES: Final = 20_000  # an alias of an alias can expand to very many


def is_manifest(text: str) -> bool:
    """True if a pasted text is YAML that starts containers, or a container's argument list, rather than a shell
    line.
    """
    many = "\n" in text.strip() and len(_KEYS.findall(text)) > 1
    return many or _LIST.match(text.strip()) is not None


def server_for(words: list[str]) -> tuple[str, ...]:
    """Return the start command of the server that these arguments belong to; the default server if no flag is
    specific.
    """
    flags = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    default = spellings(DEFAULT).keys() | {server_of(DEFAULT).pasted().starts.model_flag}
    for name in SERVERS:
        own = (spellings(name).keys() | {server_of(name).pasted().starts.model_flag}) - default
        if name != DEFAULT and flags & own:
            return server_of(name).pasted().starts.launcher
    return server_of(DEFAULT).pasted().starts.launcher


def shell_line(text: str) -> tuple[str, str | None]:
    """Return (shell line, image) of the one container that runs a server."""
    every = list(_containers(_parsed(text)))
    containers = [each for each in every if _names_server(_image(each), *_words(each))]
    if not containers:  # arguments that load a model
        containers = [each for each in every if any(map(_MODEL.fullmatch, _words(each)))]
    if len(containers) != 1:
        many = "no container in it runs a server" if not containers else f"{len(containers)} containers run servers"
        raise UsageError("--from-command", f"{many}", "paste the one container, or its command")
    container = containers[0]
    words, image = _words(container), _image(container)
    if not _names_server(image, *words):  # a custom image, or none
        words = [*server_for(words), *words]
    pairs = [name if value is None else f"{name}={value}" for name, value in variables_of(container)]
    script = script_of(words)
    if script is None and image and not names_server(words):
        options = [word for pair in pairs for word in ("-e", pair)]
        return shlex.join(["docker", "run", *options, image, *words]), image
    exports = "".join(f"export {shlex.quote(pair)}; " for pair in pairs)
    has_parameters = script is not None and '"$@"' in script
    return exports + (shlex.join(words) if script is None or has_parameters else script), image or None


def settings_line(text: str) -> str | None:
    """The shell line of a file of a server's settings, such as vLLM's --config reads: `model: ...` and its flags."""
    values = None
    if re.search(r"(?m)^[{ ]*[\"']?model(?:[-_](?:path|tag))?[\"']?[ \t]*:[ \t]", text):
        with suppress(UsageError):
            values = next(iter(_parsed(text)), None)
    if not isinstance(values, dict) or not all(isinstance(key, str) and re.fullmatch(r"[\w-]+", key) for key in values):
        return None
    flags = {key.replace("-", "_"): typed(value) for key, value in values.items()}
    words = [f"--{key.replace('_', '-')}" for key in flags]
    server = next(name for name in SERVERS if server_of(name).pasted().starts.launcher == server_for(words))
    model = flags.pop("model_tag", None) or flags.pop("model_path", None) or flags.pop("model", None)
    named = [f"--{server_of(server).pasted().starts.model_flag}", str(model)]
    others = [word for key, value in flags.items() for word in flag_words(key, value, server)]
    return shlex.join([*server_for(words), *named, *others])


def _names_server(*words: str) -> bool:
    return any(map(is_named, words))


def quoted(text: str) -> str:
    """YAML in which `key: {{NAME}}` is text: a blank to fill in, which may be of no account to the server."""
    return re.sub(r"(?m)(?<=[:-] )\{\{ *\w+ *\}\}(?= *$)", lambda blank: f"'{blank[0]}'", text)


def _parsed(text: str) -> list[Any]:
    import yaml

    try:
        return list(yaml.load_all(quoted(text), Loader=yaml.BaseLoader))  # every scalar stays text
    except (yaml.YAMLError, RecursionError, ValueError):
        if "{{" in text:
            raise UsageError(
                "--from-command", "is a template, which is not rendered", "paste what `helm template` prints"
            ) from None
        raise UsageError(
            "--from-command", "looks like a manifest, but is not YAML", "paste the container's command"
        ) from None


def _containers(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Every mapping with an image, a command or arguments, except init containers."""
    left: list[Any] = [
        {"args": each} if isinstance(each, list) and all(isinstance(word, str) for word in each) else each
        for each in documents
    ]
    count = 0
    while left:
        node = left.pop()
        count += 1
        if count > MOST_NODES:
            raise UsageError("--from-command", "the manifest is too large", "paste the container's command")
        if isinstance(node, dict):
            image = node.get("image")  # Helm values have a mapping here, in some charts including the command
            is_nested = isinstance(image, dict) and bool({"command", "args"} & image.keys())
            if {"image", "command", "args"} & node.keys() and not is_nested:
                yield node
            left.extend(value for key, value in node.items() if key != "initContainers")
        elif isinstance(node, list):
            left.extend(node)


def _image(container: dict[str, Any]) -> str:
    """Image name; Helm values give repository and tag separately."""
    image = container.get("image")
    if isinstance(image, dict):
        parts = (image.get("repository"), image.get("tag"))
        return ":".join(part for part in parts if isinstance(part, str))
    return image if isinstance(image, str) else ""


def _words(container: dict[str, Any]) -> list[str]:
    """Concatenate entrypoint, command and arguments."""
    words: list[str] = []
    for key in ("entrypoint", "command", "args"):
        value = container.get(key)
        if isinstance(value, str):
            words += _split(value)
        elif isinstance(value, list):
            words += [each for each in value if isinstance(each, str)]
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError("--from-command", "the quotes of a command do not match", "paste the whole command") from None


def script_of(words: list[str]) -> str | None:
    """Return the script of `sh -c SCRIPT`."""
    flag = script_flag(words) if words and is_shell(words[0]) else None
    return None if flag is None else words[flag + 1]


def variables_of(container: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of `environment:` and `env:`; None for a value defined elsewhere (valueFrom, a bare name).

    `env_file:` and `envFrom:` stand for the variables of the file or object they name.
    """
    yield from ((key, None) for key in ELSEWHERE if container.get(key))
    for key in ("environment", "env"):
        variables = container.get(key)
        if isinstance(variables, dict):
            yield from ((name, value if isinstance(value, str) else None) for name, value in variables.items())
        for each in variables if isinstance(variables, list) else ():
            if isinstance(each, dict) and isinstance(each.get("name"), str):
                value = each.get("value")
                yield each["name"], value if isinstance(value, str) else None
            elif isinstance(each, str):
                name, equals, value = each.partition("=")
                yield name, value if equals else None
