"""The command that started a server, if its log quotes it: the same flags that a logged list of arguments has."""

import re
from itertools import takewhile

from kvplan.core.errors import UsageError
from kvplan.servers.base import logs_of
from kvplan.servers.logs.text import MAX_LINE
from kvplan.servers.words.environment import variables
from kvplan.servers.words.shell import split


def command_in(text: str, phrase: str) -> str:
    """Extract the command that begins with this phrase, up to the end of the line or of its quotes."""
    before, _, after = text.partition(phrase)
    command_text = phrase + after.rstrip("\\ \n")  # a log may end in the middle of the command
    for quote in "'\"`":
        if quote in before and command_text.count(quote) % 2 == 1:
            return command_text.rpartition(quote)[0]
    return command_text


def variables_before(text: str, phrase: str) -> dict[str, str]:
    """Variables with an effect that precede a command: assignments, or `docker run -e`."""
    before = text.partition(phrase)[0][-MAX_LINE:]
    return dict(re.findall(rf"(?<![\w-])({'|'.join(variables())})=['\"]?([\w.,-]{{1,40}})", before))


def flags_of_command(engine: str, text: str) -> tuple[dict[str, str], list[str]]:
    """Return (flags by their names in the server's list of arguments, as text; flags whose effect is not sized).

    Raises the same errors as --from-command, such as UsageError.
    """
    words = [*takewhile(lambda word: not re.fullmatch("<[^>]*>", word), split(text)[0])]  # `vllm serve <model>`: prose
    if not words or "..." in words:
        raise UsageError("--from-command", "is not a whole command", "paste the whole command")
    return logs_of(engine).command(words)
