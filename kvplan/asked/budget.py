"""How much a manifest may expand to, by aliases of its YAML, variables and scripts: a kilobyte could fill a machine."""

from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass

MAX_EXPANDED: Final = 1 << 20  # characters; twice the longest file
MAX_DEPTH: Final = 100  # the C loader recurses without a limit of its own


@dataclass(slots=True)
class Budget:
    """Characters that a file's variables may still expand to and its scripts be read over; `where`: the file."""

    where: str
    left: int = MAX_EXPANDED

    def take(self, text: str) -> str:
        """Return the text, paid for. Raise UsageError if that is too much."""
        self.left -= len(text)
        if self.left < 0:
            problem = f"its variables and scripts expand to more than {MAX_EXPANDED:,} characters"
            raise UsageError(self.where, problem, "write the values out, without references to other variables")
        return text


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is not read yet: size in characters and values, aliases expanded; levels below it."""

    anchor: str | None
    size: int = 1
    height: int = 0


def check_yaml(text: str, where: str) -> None:
    """Refuse YAML whose aliases expand to too much, or that is nested too deeply. Raise yaml.YAMLError as the parser
    does; its events need no recursion.
    """
    import yaml

    loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    anchors: dict[str, _Open] = {}
    stack = [_Open(None)]
    for event in yaml.parse(text, Loader=loader):
        match event:
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                stack.append(_Open(event.anchor))
                _check(stack, stack[-1], where)
                continue
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                node = stack.pop()
            case yaml.ScalarEvent():
                node = _Open(event.anchor, 1 + len(event.value))
            case yaml.AliasEvent():
                if event.anchor not in anchors:
                    raise UsageError(
                        where, f"the alias *{str(event.anchor)[:40]} names nothing before it", "correct it"
                    )
                node = _Open(None, anchors[event.anchor].size, anchors[event.anchor].height)
            case _:
                continue
        if node.anchor is not None:
            anchors[node.anchor] = node
        stack[-1].size += node.size
        stack[-1].height = max(stack[-1].height, 1 + node.height)
        _check(stack, node, where)


def _check(stack: list[_Open], node: _Open, where: str) -> None:
    if stack[-1].size > MAX_EXPANDED:
        raise UsageError(where, f"its aliases expand to more than {MAX_EXPANDED:,} characters", "write the values out")
    if len(stack) + node.height > MAX_DEPTH:
        raise UsageError(where, f"is nested more than {MAX_DEPTH} levels deep", "correct it")
