"""The command that started a server, where its log quotes it: the flags that a log's list of arguments gives."""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.measure.serverlog.text import MAX_LINE
from kvplan.measure.serverlog.wordings import Engine
from kvplan.servers.environment import variables
from kvplan.servers.pasted import parse
from kvplan.servers.sglang.arguments import OTHERS
from kvplan.servers.sglang.command import MODEL, NAMES, flag_of
from kvplan.servers.shell import split
from kvplan.servers.words import ServeCommand, flag_name, flag_text, is_value

# What a line must hold for a command to be looked for; it begins there.
COMMANDS: Final[tuple[tuple[Engine, str], ...]] = (
    ("vllm", "vllm serve "),
    ("vllm", "-m vllm.entrypoints."),
    ("sglang", "-m sglang.launch_server "),
    ("sglang", "sglang serve "),
)
# SGLang's flags -> the name in its list of arguments. Source: sglang 0.5 srt/server_args.py.
SGLANG_FLAGS: Final = {
    name: flag.names[0] for name, flag in ((name, flag_of(argument)) for name, argument in NAMES.items())
    if name != flag.earlier
} | {"model": "model_path"}  # fmt: skip
# What a comparison says by itself of DP attention and of drafts is not said twice.
SAID_ELSEWHERE: Final = ("enable_dp_attention", "speculative_")
# Flags that a plan refuses, but that a log may have: they explain a difference.
EXPLAINING: Final = ("speculative_config", "cpu_offload_gb")


def command_in(text: str, phrase: str) -> str:
    """The command that begins with this phrase, up to the end of the line, or of the quotes it stands in."""
    before, _, after = text.partition(phrase)
    found = phrase + after.rstrip("\\ \n")  # a log may end where the command goes on
    for quote in "'\"`":
        if quote in before and found.count(quote) % 2 == 1:
            return found.rpartition(quote)[0]
    return found


def variables_before(text: str, phrase: str) -> dict[str, str]:
    """The variables with an effect that a command is given in front of it: assignments, or `docker run -e`."""
    before = text.partition(phrase)[0][-MAX_LINE:]
    return dict(re.findall(rf"(?<![\w-])({'|'.join(variables())})=['\"]?([\w.,-]{{1,40}})", before))


def flags_of_command(engine: Engine, text: str) -> tuple[dict[str, str], list[str]]:
    """(flags by the names that the server's list of arguments has, as text; those whose effect is not sized).

    Raises UsageError and its like for a command that --from-command would not take either.
    """
    words = split(text)[0]
    if not words or "..." in words:
        raise UsageError("--from-command", "is not a whole command", "paste the whole command")
    if engine == "sglang":
        return _sglang_flags(words), _unsized(words)
    explaining, rest = _lifted(words)
    command = parse(shlex.join(rest))
    return _vllm_flags(command) | explaining, [*command.refused, *command.unknown]


def _lifted(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(the flags that explain, the other words)."""
    found: dict[str, str] = {}
    rest: list[str] = []
    waiting: str | None = None
    for word in words:
        name, value = ("", None) if is_value(word) else flag_name(word)
        if waiting is not None and is_value(word):
            found[waiting] = word
            waiting = None
        elif name in EXPLAINING and value is not None:
            found[name] = value
        elif name in EXPLAINING:
            waiting = name
        else:
            waiting = None
            rest.append(word)
    return found, rest


def _vllm_flags(command: ServeCommand) -> dict[str, str]:
    found = {name: str(value) for name, value in command.args.items() if name != "usage"}
    if "max_loras" in found:
        found["enable_lora"] = "True"
    if command.draft_model is not None:
        found["speculative_model"] = command.draft_model
    if command.model is not None:
        found["model"] = command.model
    return found


def _sglang_flags(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if not word.startswith("--"):
            continue
        name, value = flag_name(word)
        if value is None:
            value = following if is_value(following) and following != "-" else "True"
        found[SGLANG_FLAGS.get(name, name)] = value
    return found


def _unsized(words: Sequence[str]) -> list[str]:
    """The flags of SGLang's that are not modelled, as they were typed."""
    found = []
    for word in words:
        name = flag_name(word)[0] if word.startswith("--") and not is_value(word) else ""
        known = name in (*NAMES, *MODEL, "revision") or (name in OTHERS and not OTHERS[name].is_refused)
        if name and not known and not name.startswith(SAID_ELSEWHERE):
            found.append(flag_text(word))
    return found
