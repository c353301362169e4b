"""What a row of the table of engine arguments says: how it is parsed, shown in help, and what each server calls it."""

from collections.abc import Mapping
from dataclasses import field
from typing import Final, Literal, TypeVar

from kvplan.core.records import dataclass

Kind = Literal[
    "context", "tokens", "count", "bytes", "gib", "fraction", "ratio", "flag", "text", "choice", "limits", "json",
    "names",
]  # fmt: skip
COMMON: Final = "Model, GPU and server"
Panel = Literal["Model, GPU and server", "Parallelism", "Quantization", "Adapters and drafts"]
LARGEST: Final = 2**31 - 1  # of a count without a limit of its own


@dataclass(frozen=True, slots=True)
class Flag:
    """A server's name and syntax for an argument.

    names    with underscores; the first is used in printed commands and in the server's log
    short    single-dash form
    on       the value that a switch sets; None: it has a --no-... counterpart, or takes a value
    values   the server's words for a value -> kvplan's
    since    the release change that introduced the first name; `earlier`: its name before that, "" for none
    beside   a switch without which it has no effect
    printed  whether it is a separate flag in a printed command
    off      the value that is equivalent to leaving it out
    """

    names: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    on: bool | str | None = None
    values: Mapping[str, str] | None = None
    since: str = ""
    earlier: str = ""
    beside: str = ""
    printed: bool = True
    off: str = ""


OWN_NAME: Final = Flag()


@dataclass(frozen=True, slots=True)
class Argument:
    """One engine argument: how it is parsed, shown in help, and what each server calls it.

    help, metavar  of its option
    options        option names besides the long one
    choices        its values, if there are few
    largest        the largest sensible count; anything above is treated as a typo
    many           whether its option takes several values
    sglang, vllm   None: that server has no such argument; for vLLM, a Flag without names uses the argument's own name
    """

    kind: Kind
    help: str
    metavar: str | None = None
    options: tuple[str, ...] = ()
    panel: Panel = COMMON
    choices: tuple[str, ...] = ()
    largest: int = LARGEST
    many: bool = False
    vllm: Flag | None = OWN_NAME
    sglang: Flag | None = None

    def flag(self, server: str) -> Flag | None:
        flag: Flag | None = getattr(self, server, None)
        return flag


T = TypeVar("T")


def argument(
    default: T,
    kind: Kind,
    help: str,
    metavar: str | None = None,
    options: tuple[str, ...] = (),
    panel: Panel = COMMON,
    choices: tuple[str, ...] = (),
    *,
    largest: int = LARGEST,
    many: bool = False,
    vllm: Flag | None = OWN_NAME,
    sglang: Flag | None = None,
) -> T:
    """Define a field of `EngineArgs`: its default and its row."""
    row = Argument(kind, help, metavar, options, panel, choices, largest, many, vllm, sglang)
    defined: T = field(default=default, metadata={"row": row})
    return defined


def sglang_argument(
    default: T,
    kind: Kind,
    name: str,
    help: str,
    metavar: str | None = None,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    on: bool | None = None,
    off: str = "",
    since: str = "",
    earlier: str = "",
) -> T:
    """Define an argument that only SGLang has, by its name there and other spellings of it."""
    flag = Flag((name, *aliases), on=on, off=off, since=since, earlier=earlier)
    return argument(default, kind, f"SGLang: {help}", metavar, choices=choices, vllm=None, sglang=flag)
