"""Parsing of a pasted load-generator command into flags."""

import re
import shlex
from collections.abc import Mapping, Set
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass

OPTION: Final = "--bench-command"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The flags of one tool: long flags without dashes, short flags with their dash.

    read      spelling -> canonical name
    values    flags with a value that change neither lengths nor arrivals; switches: such flags without a value
    several   names that take all words up to the next flag
    """

    tool: str
    read: Mapping[str, str]
    values: Set[str]
    switches: Set[str]
    several: Set[str] = frozenset()


def dashed(flag: str) -> str:
    return f"{'' if flag.startswith('-') else '--'}{printable(flag, 60)}"


def words_of(text: str) -> list[str]:
    try:
        return shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UsageError(OPTION, f"the quotes do not match ({str(error).lower()})", "paste the whole command") from None


def values_of(words: list[str], grammar: Grammar) -> dict[str, list[str]]:
    """Return name -> values in order of appearance; raise UsageError for a flag that cannot be simulated."""
    values: dict[str, list[str]] = {}
    known = grammar.read.keys() | grammar.values | grammar.switches
    name: str | None = None
    for word in words:
        if word.startswith("--") or (word[:1] == "-" and word in known):
            flag, equals, value = word.removeprefix("--").partition("=")
            flag = flag.replace("_", "-")
            if flag in grammar.switches:
                name = None
            elif flag not in known:
                raise UsageError(
                    OPTION, f"{dashed(flag)} of {grammar.tool} has no counterpart in a simulation",
                    "remove it from the command",
                )  # fmt: skip
            else:
                name = grammar.read.get(flag, flag)
                if equals:
                    values.setdefault(name, []).append(value)
                    name = None
        elif name is not None:
            values.setdefault(name, []).append(word)
            name = name if name in grammar.several else None
    return values


def whole(stated: Mapping[str, str], name: str, default: int) -> int:
    text = stated.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(OPTION, f"--{name} {printable(text, 60)} is no whole number", "write plain digits")
    return int(text)


def uniform(low: int, high: int) -> str:
    return str(low) if low == high else f"uniform:{low}-{high}"


def promise(text: str, names: Mapping[str, str], example: str) -> str:
    """Convert `ttft:2000` (milliseconds) to `ttft=2000ms`; names: the tool's metric -> that of `--slo`."""
    name, _, limit = text.partition(":")
    if name not in names or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", limit):
        raise UsageError(OPTION, f"--goodput {printable(text, 60)} is not understood", f"write {example}")
    return f"{names[name]}={limit}ms"
