"""The command that started a server, word by word as in its log, and the same command with some flags changed."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

from kvplan.core.errors import KvplanError
from kvplan.measure.serverlog.command import command_in, variables_before
from kvplan.planning.case import Case, Cure
from kvplan.planning.cures import flag_text
from kvplan.planning.plan import serve_command
from kvplan.servers.base import logs_of
from kvplan.servers.logs.log import Logs
from kvplan.servers.logs.text import MAX_LINE
from kvplan.servers.words.arguments import ARGUMENTS
from kvplan.servers.words.command import flag_name, is_value
from kvplan.servers.words.shell import split

# Flags of every server whose values no command should show.
SECRETS: Final = ("api_key", "hf_token")
MOST_PLAIN: Final = 3  # words before the first flag: `vllm serve MODEL`
MOST_JOINED: Final = 40  # lines of one command that end in a backslash


def asked_words(lines: Sequence[str], engine: str) -> list[str] | None:
    """Words of the command that started the server: as the log quotes it, else from its list of arguments, or None
    if it has neither. A list after the command wins: it is what the server received.
    """
    table = logs_of(engine)
    words: list[str] | None = None
    for number, line in enumerate(lines):
        position = line.find(table.opening) if table.opening else -1
        if position >= 0:
            words = table.words(line[position + len(table.opening) : position + MAX_LINE]) or words
        for phrase in table.commands:
            if phrase in line:
                quoted = _quoted(table, lines, number, phrase)
                words = quoted if quoted is not None and words is None else words
    return words


def _quoted(table: Logs, lines: Sequence[str], number: int, phrase: str) -> list[str] | None:
    """Words of a command that begins on a line, with its leading variables and continuation lines."""
    joined = [lines[number]]
    while joined[-1].rstrip().endswith("\\") and number + len(joined) < len(lines) and len(joined) < MOST_JOINED:
        joined.append(lines[number + len(joined)])
    text = " ".join(line.rstrip().removesuffix("\\") for line in joined)[:MAX_LINE]
    try:
        words = split(command_in(text, phrase))[0]
    except KvplanError:
        return None
    if "..." in words or not any(word.startswith("--") or "/" in word for word in words[2:]):
        return None
    if sum(1 for _ in takewhile(is_value, words)) > MOST_PLAIN:
        return None  # a sentence that begins like a command
    if not all(word.isascii() for word in words[1:]):
        return None  # prose continues on the same line
    words = _changed(table, _without_prose(table, words), dict.fromkeys(SECRETS, ()))
    variables = [f"{name}={value}" for name, value in variables_before(text, phrase).items()]
    return [*variables, *(["python"] if words[0] == "-m" else []), *words]


def _without_prose(table: Logs, words: list[str]) -> list[str]:
    """Cut a command at the first word after a flag that is neither a flag nor its value: prose starts there."""
    is_open = is_single = False  # whether a value may follow, and at most one
    models = 0  # words without a flag: program, serve, model
    for index, word in enumerate(words):
        if not is_value(word):
            name, value = flag_name(word)
            is_open, models = value is None and table.takes_value(name), MOST_PLAIN
            is_single = name in ARGUMENTS
        elif models < MOST_PLAIN:
            models += 1
        elif not is_open:
            return words[:index]
        else:
            is_open = not is_single
    return words


# --- changing flags -------------------------------------------------------------------------------------------------


def changed(words: Sequence[str], engine: str, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Change some engine arguments in a command's words: argument -> the words of its flag, none to drop it."""
    return _changed(logs_of(engine), words, changes)


def cured(case: Case, cure: Cure, words: Sequence[str] | None) -> str | None:
    """The server's own command with a fix applied, to paste; None if it cannot be written."""
    if not cure.args:
        return None
    changes = {name: flag_text(case.server, name, value).split() for name, value in cure.args.items()}
    if words is not None and (None not in cure.args.values() or any("quantization" in word for word in words)):
        return shlex.join(changed(words, case.server, changes))
    return None if cure.plan is None else shlex.join(serve_command(cure.plan))


def _changed(table: Logs, words: Sequence[str], changes: Mapping[str, Sequence[str]]) -> list[str]:
    rest_of: list[str] = []
    waiting: str | None = None  # the previous flag's argument, if a value may follow
    for word in words:
        if is_value(word):
            if waiting not in changes:
                rest_of.append(word)
            waiting = None if waiting in changes else waiting  # one value each: what follows is the model's
            continue
        name, value = flag_name(word)
        argument = table.argument_of(name)
        waiting = argument if value is None and table.takes_value(name) else None
        if argument not in changes:
            rest_of.append(word)
    return [*rest_of, *(word for flag in changes.values() for word in flag)]
