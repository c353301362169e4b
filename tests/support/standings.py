"""What kvplan makes of every flag of a server, for docs/arguments.md and the tests of the tables."""

from collections.abc import Iterator, Mapping
from typing import Literal

from kvplan.servers.base import server_of
from kvplan.servers.words.arguments import ARGUMENTS, flags_of
from kvplan.servers.words.standing import REFUSED, entries

Standing = Literal["modeled", "no effect on memory", "refused"]


def standings(server: str) -> Iterator[tuple[str, Standing, str]]:
    """(name, standing, its subject or the reason for rejecting it) of every flag of a server that kvplan knows."""
    flags = flags_of(server)
    for argument, row in ARGUMENTS.items():
        flag = flags.get(argument)
        if flag is not None and (flag.printed or not flag.names):
            names = filter(None, (*(flag.names or (argument,)), flag.earlier))
            yield from ((name, "modeled", row.help.removesuffix(".")) for name in names)
    read, others = server_of(server).pasted().flags
    for what, text in read.items():
        standing: Standing = "refused" if what.startswith(REFUSED) else "modeled"
        yield from ((name, standing, what.removeprefix(REFUSED)) for name in text.split())
    for name, other in others.items():
        usual = f" (but for {', '.join(other.usual)})" if other.usual else ""
        yield name, "refused" if other.is_refused else "no effect on memory", other.reason + usual


Order = Literal["modeled", "no effect on the order", "refused"]


def orders(server: str) -> Iterator[tuple[str, Order, str]]:
    """(name, standing, reason) of the flags that affect scheduling in a simulation."""
    modeled, no_effect, refused = server_of(server).pasted().scheduling()
    lists: tuple[tuple[Order, Mapping[str, str]], ...] = (
        ("modeled", modeled), ("no effect on the order", no_effect), ("refused", refused)
    )  # fmt: skip
    for standing, names in lists:
        for name, reason, usual, _ in entries(names):
            yield name, standing, reason + (f" (but for {', '.join(usual)})" if usual else "")


def own_names(server: str) -> dict[str, str]:
    """A server's names of arguments that are options with the same values, if they are not the arguments' own."""
    names = {}
    for name, flag in flags_of(server).items():
        row = ARGUMENTS[name]
        if not flag.printed or not flag.names or flag.names[0] in ARGUMENTS:
            continue
        spelling = f"--{flag.names[0].replace('_', '-')}"
        if row.kind != "flag" and flag.on is None:
            names[name] = spelling
        elif row.kind == "flag" and flag.on is not None:
            names[name] = spelling if flag.on else f" /{spelling}"
    return names
