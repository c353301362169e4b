"""What a pasted command calls the arguments that it sets; imported only for an error."""

import re
from collections.abc import Sequence

from kvplan.servers.base import SERVERS
from kvplan.servers.words.arguments import ARGUMENTS, short_flags, spellings


def pasted_words(line: Sequence[str]) -> dict[str, str]:
    """Arguments set in commands, manifests or code on the line -> their flag or name there."""
    words: dict[str, str] = {}
    for text in line:
        if not re.search(r"\s", text.strip()):
            continue
        for flag in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text):
            if (name := argument_of(flag)) is not None:
                words[name] = flag
        for key in re.findall(r"(?<![\w-])([a-z]\w*)\s*=", text):
            if key in ARGUMENTS:
                words.setdefault(key, key)
    return words


def argument_of(flag: str) -> str | None:
    """The argument that a flag or a key of any server sets."""
    name = flag.lstrip("-").replace("-", "_")
    servers = (short_flags(server).get(name) or spellings(server).get(name) for server in SERVERS)
    return name if name in ARGUMENTS else next(filter(None, servers), None)
