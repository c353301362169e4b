"""Flags of a server that kvplan's table of arguments does not have: without effect on GPU memory, or refused.

The lists stand in servers/<name>/arguments.py, as names by what is said of them. In a list, `name!` takes no value,
and `name=a|b` is refused but for these values, which change nothing.
"""

from collections.abc import Mapping

from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Other:
    """A flag that is no argument of the table.

    reason      what it is about, or why it is refused and what to write instead
    is_refused  it changes what is held in GPU memory in a way that kvplan does not size
    is_switch   it takes no value
    usual       values of a refused one that change nothing
    """

    reason: str
    is_refused: bool
    is_switch: bool
    usual: tuple[str, ...] = ()


def others(no_effect: Mapping[str, str], refused: Mapping[str, str]) -> dict[str, Other]:
    """Flags by name, from lists of names by reason."""
    flags: dict[str, Other] = {}
    for lists, is_refused in ((no_effect, False), (refused, True)):
        for reason, names in lists.items():
            for text in names.split():
                name, _, usual = text.partition("=")
                values = tuple(usual.split("|")) if usual else ()
                flags[name.rstrip("!")] = Other(reason, is_refused, name.endswith("!"), values)
    return flags
