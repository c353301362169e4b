"""The command that started a server, where its log quotes it: the flags that a log's list of arguments gives."""

import re

from kvplan.core.errors import UsageError
from kvplan.servers.base import logs_of
from kvplan.servers.environment import variables
from kvplan.servers.log_text import MAX_LINE
from kvplan.servers.shell import split


def command_in(text: str, phrase: str) -> str:
    """The command that begins with this phrase, up to the end of the line, or of the quotes it stands in."""
    before, _, after = text.partition(phrase)
    command_text = phrase + after.rstrip("\\ \n")  # a log may end where the command goes on
    for quote in "'\"`":
        if quote in before and command_text.count(quote) % 2 == 1:
            return command_text.rpartition(quote)[0]
    return command_text


def variables_before(text: str, phrase: str) -> dict[str, str]:
    """The variables with an effect that a command is given in front of it: assignments, or `docker run -e`."""
    before = text.partition(phrase)[0][-MAX_LINE:]
    return dict(re.findall(rf"(?<![\w-])({'|'.join(variables())})=['\"]?([\w.,-]{{1,40}})", before))


def flags_of_command(engine: str, text: str) -> tuple[dict[str, str], list[str]]:
    """(flags by the names that the server's list of arguments has, as text; those whose effect is not sized).

    Raises UsageError and its like for a command that --from-command would not take either.
    """
    words = split(text)[0]
    if not words or "..." in words:
        raise UsageError("--from-command", "is not a whole command", "paste the whole command")
    return logs_of(engine).command(words)
