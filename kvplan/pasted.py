"""A pasted command of either server."""

import re

from kvplan import command, sglang_command
from kvplan.command import MAX_COMMAND_CHARS, ServeCommand
from kvplan.errors import UsageError
from kvplan.rules.engines import parse_engine

_IMAGE = r"(?:[\w.:-]+/)*[\w.-]*sglang[\w.-]*:v?(\d+\.\d+(?:\.\d+)?)(?:\.post\d+)?(?:-[\w.-]+)?"


def read_command(text: str) -> ServeCommand:
    """What a pasted `vllm serve ...` or `sglang serve ...` asks for; errors as of kvplan.command.read_command."""
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError(f"--from-command: {command.too_long(text)}")
    if "sglang" in text:
        for words in command.split(text):
            following = sglang_command.start(words)
            if following is not None:
                found = sglang_command.read(following)
                image = next(filter(None, (re.fullmatch(_IMAGE, word) for word in words)), None)
                if image is not None:
                    found.engine = parse_engine(f"sglang@{image[1]}").label
                return found
    return command.read_command(text)
