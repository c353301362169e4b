"""The command that started a server, word by word as its log has it, and the same with some flags changed."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

from kvplan.core.errors import KvplanError
from kvplan.measure.serverlog.command import COMMANDS, command_in, variables_before
from kvplan.measure.serverlog.text import MAX_LINE, arguments
from kvplan.measure.serverlog.wordings import Engine
from kvplan.servers.arguments import ARGUMENTS
from kvplan.servers.sglang.command import NAMES as SGLANG_NAMES
from kvplan.servers.shell import split
from kvplan.servers.vllm.command import takes_value
from kvplan.servers.words import flag_name, is_value

LIST: Final = "non-default args: {"
# Values that a list has and no command should show, or that no command takes.
SECRETS: Final = ("api_key", "hf_token")
LEFT_OUT: Final = frozenset({*SECRETS, "usage_context", "model_tag", "model", "dispatch_function", "subparser"})
MOST_PLAIN: Final = 3  # words in front of the first flag: `vllm serve MODEL`
MOST_JOINED: Final = 40  # lines of one command that end in a backslash


def asked_words(lines: Sequence[str], engine: Engine) -> list[str] | None:
    """The words of the command that started the server: as the log quotes it, else of its list of arguments; None
    where it has neither. A list wins where it stands behind the command: it is what the server was told."""
    words: list[str] | None = None
    for number, line in enumerate(lines):
        position = line.find(LIST)
        if position >= 0 and engine == "vllm":
            words = _of_list(line[position + len(LIST) : position + MAX_LINE]) or words
        for server, phrase in COMMANDS:
            if server == engine and phrase in line:
                quoted = _quoted(lines, number, phrase)
                words = quoted if quoted is not None and words is None else words
    return words


def _quoted(lines: Sequence[str], number: int, phrase: str) -> list[str] | None:
    """The words of a command that begins on a line, with the variables in front of it and the lines it goes on in."""
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
        return None  # a sentence goes on in the same line
    words = changed(_without_prose(words), "vllm", dict.fromkeys(SECRETS, ()))
    variables = [f"{name}={value}" for name, value in variables_before(text, phrase).items()]
    return [*variables, *(["python"] if words[0] == "-m" else []), *words]


def _without_prose(words: list[str]) -> list[str]:
    """A command up to the first word behind a whole flag that is neither a flag nor its value: text goes on there."""
    is_open = is_single = False  # whether a value may follow, and no more than one
    models = 0  # words that stand for themselves: program, serve, model
    for index, word in enumerate(words):
        if not is_value(word):
            name, value = flag_name(word)
            is_open, models = value is None and takes_value(name), MOST_PLAIN
            is_single = name in ARGUMENTS
        elif models < MOST_PLAIN:
            models += 1
        elif not is_open:
            return words[:index]
        else:
            is_open = not is_single
    return words


def _of_list(text: str) -> list[str]:
    """`{'model_tag': 'Qwen/Qwen3-8B', 'max_model_len': 16384, ...}` as a command."""
    stated = arguments(text)
    model = stated.get("model_tag") or stated.get("model")
    if model is None:
        return []
    words = ["vllm", "serve", model]
    for name, value in stated.items():
        if name not in LEFT_OUT:
            words += _flag(name, value)
    return words


def _flag(name: str, text: str) -> list[str]:
    """One argument of a list as words; nothing for a value that no command can have."""
    flag = f"--{name.replace('_', '-')}"
    if text in ("True", "False"):
        return [flag] if text == "True" else [f"--no-{flag[2:]}"]
    if text[:1] not in "[{(":
        return [] if re.search(r"[<>()]", text) else [flag, text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if all(isinstance(item, str | int) for item in value) and value else []
    try:
        return [flag, json.dumps(value, allow_nan=False)]
    except (TypeError, ValueError, RecursionError):  # a set, or keys that are no text: a log that is damaged
        return []


# --- changing flags ---------------------------------------------------------------------------------------------------


def changed(words: Sequence[str], engine: Engine, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """A command's words with some engine arguments changed: argument -> the words of its flag, none to drop it."""
    kept: list[str] = []
    waiting: str | None = None  # the argument of the flag before, where a value may follow
    for word in words:
        if is_value(word):
            if waiting not in changes:
                kept.append(word)
            waiting = None if waiting in changes else waiting  # one value each: what follows is the model's
            continue
        name, value = flag_name(word)
        argument = argument_of(name, engine)
        waiting = argument if value is None and takes_value(name) else None
        if argument not in changes:
            kept.append(word)
    return [*kept, *(word for flag in changes.values() for word in flag)]


def argument_of(name: str, engine: Engine) -> str:
    """vLLM's name of the argument that a flag of either server is about."""
    if engine == "sglang":
        return SGLANG_NAMES.get(name, name)
    return name.removeprefix("no_") if name not in ARGUMENTS else name
