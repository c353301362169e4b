"""Files that start a server in other words than a shell's, as a shell script: a Dockerfile, a unit of systemd."""

import json
import re
import shlex
from typing import Final

_LINE: Final = r"(?m)^[ \t]*(FROM|ENV|ARG|ENTRYPOINT|CMD|Environment=|ExecStart=)[ \t]*(.*)$"


def line_of(text: str) -> str:
    """The script of a Dockerfile (its image, variables, entry point and command) or of a unit's ExecStart.

    The last ENTRYPOINT and CMD count, as in Docker. Sources: docs.docker.com/reference/dockerfile; systemd.service(5).
    """
    image, starts, lines, pairs = "", dict[str, list[str] | str](), list[str](), list[str]()
    for key, value in re.findall(_LINE, re.sub(r"\\[ \t]*\r?\n[ \t]*", " ", text)):
        match key:
            case "FROM":
                image = next((word for word in value.split() if not word.startswith("--")), "")
            case "ENV" | "ARG" | "Environment=":
                pairs += assignments(value)
            case "ExecStart=":
                lines.append(value.lstrip("-@:+!"))
            case _:
                starts[key] = exec_form(value)
    words = [starts[key] for key in ("ENTRYPOINT", "CMD") if key in starts]
    if words:
        options = " ".join(f"-e {shlex.quote(pair)}" for pair in pairs)
        command = " ".join(part if isinstance(part, str) else shlex.join(part) for part in words)
        lines.append(f"docker run {options} {image} {command}" if image else command)
    return "\n".join([*(f"export {shlex.quote(pair)}" for pair in pairs), *lines])


def assignments(value: str) -> list[str]:
    """The pairs of `ENV A=1 B=2`, of its earlier form `ENV A 1`, and of `Environment="A=1"`."""
    try:
        words = shlex.split(value)
    except ValueError:
        return []
    if words and "=" not in words[0]:
        return [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else []
    return [word for word in words if re.match(r"[A-Za-z_]\w*=", word)]


def exec_form(value: str) -> list[str] | str:
    """The words of ["vllm", "serve"], or a shell's line."""
    try:
        words = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return [str(word) for word in words] if isinstance(words, list) else value
