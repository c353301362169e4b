"""Flags of a server that kvplan's table of arguments does not have: without effect on GPU memory, or refused.

The lists stand in servers/<name>/arguments.py, as names by what is said of them. In a list, `name!` takes no value,
and `name=a|b` is refused but for these values, which change nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from kvplan.servers.arguments import ARGUMENTS, spellings
from kvplan.servers.base import server_of
from kvplan.servers.words import Other

Standing = Literal["modeled", "no effect on memory", "refused"]
REFUSED: Final = "refused: "  # what is said of flags that are read, so that the plan can refuse them


def others(server: str, no_effect: Mapping[str, str], refused: Mapping[str, str]) -> dict[str, Other]:
    """Flags by name, from lists of names by reason; one that is an argument of the table is that, and no other."""
    flags: dict[str, Other] = {}
    for lists, is_refused in ((no_effect, False), (refused, True)):
        for reason, names in lists.items():
            for text in names.split():
                name, _, usual = text.partition("=")
                values = tuple(usual.split("|")) if usual else ()
                flags[name.rstrip("!")] = Other(reason, is_refused, name.endswith("!"), values)
    own = spellings(server)
    return {name: other for name, other in flags.items() if name not in own}


def standings(server: str) -> Iterator[tuple[str, Standing, str]]:
    """(name, standing, what it is about or why it is refused) of every flag of a server that kvplan knows."""
    for argument, row in ARGUMENTS.items():
        flag = row.flag(server)
        if flag is not None and (flag.printed or not flag.names):
            names = filter(None, (*(flag.names or (argument,)), flag.earlier))
            yield from ((name, "modeled", row.help.removeprefix("SGLang: ").removesuffix(".")) for name in names)
    read, others = server_of(server).flags()
    for what, text in read.items():
        standing: Standing = "refused" if what.startswith(REFUSED) else "modeled"
        yield from ((name, standing, what.removeprefix(REFUSED)) for name in text.split())
    for name, other in others.items():
        usual = f" (but for {', '.join(other.usual)})" if other.usual else ""
        yield name, "refused" if other.is_refused else "no effect on memory", other.reason + usual
