"""A pasted command of either server."""

from kvplan import command, sglang_command
from kvplan.command import MAX_COMMAND_CHARS, ServeCommand
from kvplan.errors import UsageError


def read_command(text: str) -> ServeCommand:
    """What a pasted `vllm serve ...` or `sglang serve ...` asks for; errors as of kvplan.command.read_command."""
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError(f"--from-command: {command.too_long(text)}")
    if "sglang" in text:
        for words in command.split(text):
            following = sglang_command.start(words)
            if following is not None:
                return sglang_command.read(following)
    return command.read_command(text)
