"""A container of a compose file or Kubernetes manifest, as the command that it runs.

Nothing is expanded or run: `image:`, `entrypoint:`, `command:`, `args:`, `environment:` and `env:` become one shell
line, which kvplan/asked/pasted.py reads like any other. Sources: the Compose specification; kubernetes.io, Pod v1.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplan.servers.base import SERVERS, server_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import spellings
from kvplan.servers.words.shell import is_shell, script_flag

_KEYS: Final = re.compile(
    r"^[ \t]*(?:-[ \t]+)?(?:image|entrypoint|command|args|environment|env|services|containers)[ \t]*:", re.MULTILINE
)
# How the text of an argument list begins: `- --model`, `["--model"`, `args:`.
_LIST: Final = re.compile(r"-[ \t]+[\"']?--|\[\s*[\"']|(?:-[ \t]+)?(?:args|command)[ \t]*:")
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


def quoted(text: str) -> str:
    """YAML in which `key: {{NAME}}` is text: a blank to fill in, which may be of no account to the server."""
    return re.sub(r"(?m)(?<=[:-] )\{\{ *\w+ *\}\}(?= *$)", lambda blank: f"'{blank[0]}'", text)


def nodes(document: Any, closed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every mapping in a document, but for those under certain keys."""
    left: list[Any] = [document]
    for number, node in enumerate(left):
        if isinstance(node, dict):
            yield node
            left.extend(value for key, value in node.items() if key not in closed)
        elif isinstance(node, list):
            left.extend(node)
        if number > MOST_NODES:
            return


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
