"""Flags of a server that are not in kvplan's table of arguments: without effect on GPU memory, or rejected.

The lists are in servers/<name>/arguments.py, as names grouped by the text about them. In a list, `name!` takes no
value, and `name=a|b` is rejected except for these values, which change nothing. servers/<name>/scheduling.py says in
the same form how they affect scheduling in a simulation.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from kvplan.servers.words.arguments import spellings
from kvplan.servers.words.command import Other

REFUSED: Final = "refused: "  # marks flags that are read so that the plan can reject them


def others(
    server: str, no_effect: Mapping[str, str], refused: Mapping[str, str], order: Mapping[str, str], omitted: str = ""
) -> dict[str, Other]:
    """Flags by name, from lists of names by reason; arguments of the table are left out.

    order    flags that a simulation rejects
    omitted  names of those that printed commands do not repeat
    """
    flags: dict[str, Other] = {}
    reorders = {name: (reason, usual) for name, reason, usual, _ in entries(order)}
    dropped = frozenset(omitted.split())
    for lists, is_refused in ((no_effect, False), (refused, True)):
        for name, reason, usual, is_switch in entries(lists):
            changes = reorders.get(name, ("", ()))
            flags[name] = Other(reason, is_refused, is_switch, usual, *changes, is_kept=name not in dropped)
    own = spellings(server)
    return {name: other for name, other in flags.items() if name not in own}


def entries(lists: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[str, ...], bool]]:
    """(name, text about it, values that change nothing, whether it takes no value)."""
    for reason, names in lists.items():
        for text in names.split():
            name, _, usual = text.partition("=")
            yield name.rstrip("!"), reason, tuple(usual.split("|")) if usual else (), name.endswith("!")
