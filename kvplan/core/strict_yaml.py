"""Strict YAML reader with the line and column of every key and value.

Values stay text until code that knows their unit parses them, so `32k` and `5%` need no quotes. Values that YAML 1.1
would read unexpectedly are rejected, not guessed: `010` (8), `1:30` (90), `no` (false), `1e9` (text), `0x10`, `1_000`,
`.nan`, `~`; so are anchors, aliases, merge keys, tags, directives, duplicate keys, tabs as indentation, several
documents, and input that makes readers hang (depth, size). Parsing is event-based, without recursion, so any depth is
safe.
"""

import datetime
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from kvplan.core.errors import Faults, InvalidInputError, UsageError
from kvplan.core.errors import Mark as Mark  # what readers of YAML know it by
from kvplan.core.files import path_text, printable, read_text

if TYPE_CHECKING:
    import yaml

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 50

# Characters that YAML forbids, and line breaks that editors do not count as lines.
_STRANGE: Final = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_TAB_INDENT: Final = re.compile(r"^ *\t", re.MULTILINE)
_DATE: Final = re.compile(r"\d{4}-\d\d?-\d\d?(?:[Tt ].*)?")
# Plain scalars whose meaning depends on the reader: (what it looks like, why it is rejected, what to write). No pattern
# can match the same characters in two ways: a long value would take quadratic time.
_NUMBER: Final = "is read as a number by some YAML parsers"
ODD: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), why, cure)
    for pattern, why, cure in (
        (r"~|null", "is not a value", "write a value, or remove the key"),
        (r"yes|no|on|off|y|n", "is read as true or false by some YAML parsers", "write true or false, or quote it"),
        (r"[-+]?0[0-9_]+", "is read as octal by some YAML parsers", "write it without the leading 0, or quote it"),
        (r"[-+]?0[xob][0-9a-f_]*", _NUMBER, "write plain digits, or quote it"),
        (r"[-+]?[0-9][0-9.]*_[0-9_.]*", _NUMBER, "write it without _, or quote it"),
        (r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)e[-+]?[0-9]+", _NUMBER, "write its digits, or quote it"),
        (r"[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?", "is read as a base-60 number by some YAML parsers", "quote it"),
        (r"[-+]?\.inf|\.nan", "is not a finite number", "write a number"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as written; `is_plain`: without quotes."""

    text: str
    is_plain: bool
    mark: Mark

    @property
    def is_date(self) -> bool:
        return self.is_plain and _DATE.fullmatch(self.text) is not None


@dataclass(frozen=True, slots=True)
class Items:
    values: tuple["Node", ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping; `keys` has the position of each key of `values`, in file order."""

    values: Mapping[str, "Node"]
    keys: Mapping[str, Mark]
    mark: Mark


Node = Scalar | Items | Table


def wrong(mark: Mark, subject: str, problem: str | None = None, remedy: str = "") -> InvalidInputError:
    """Error at a position; without a subject it concerns the position itself."""
    return InvalidInputError(subject, problem, remedy, mark=mark)


def read(path: Path) -> Table:
    """Parse the table in a file. Raise InvalidInputError with the file, line and column of an error."""
    return parse(read_text(path, MAX_BYTES), path_text(path))


def parse(text: str, where: str) -> Table:
    """Parse the table in `text`; `where` names it in errors."""
    refuse_characters(text, where)
    import yaml

    try:
        node = _built(text, where)
    except yaml.MarkedYAMLError as error:
        problem_mark = error.problem_mark or error.context_mark
        mark = Mark(where, problem_mark.line + 1, problem_mark.column + 1) if problem_mark else Mark(where, 1, 1)
        problem = printable(str(error.problem), 120)
        cure = "quote a value that contains `: `" if "mapping values" in problem else "correct it"
        raise wrong(mark, "the file", f"is not YAML ({problem})", cure) from None
    except yaml.YAMLError as error:
        raise wrong(
            Mark(where, 1, 1), "the file", f"is not YAML ({printable(str(error), 120)})", "correct it"
        ) from None
    if node is None:
        raise wrong(Mark(where, 1, 1), "the file", "is empty", "write `key: value` lines")
    if not isinstance(node, Table):
        raise wrong(node.mark, "", f"the top level is {kind_of(node)}", "write `key: value` lines")
    return node


def refuse_characters(text: str, where: str) -> None:
    strange = _STRANGE.search(text)
    if strange is not None:
        code = f"U+{ord(strange.group()):04X}"
        raise wrong(
            _place(text, strange.start(), where),
            "the file",
            f"contains a character that YAML does not allow ({code})",
            "delete it",
        )
    tab = _TAB_INDENT.search(text)
    if tab is not None:
        raise wrong(_place(text, tab.end() - 1, where), "", "a tab indents this line", "use spaces")


def _place(text: str, position: int, where: str) -> Mark:
    before = text[:position].replace("\r\n", "\n").replace("\r", "\n")
    return Mark(where, before.count("\n") + 1, len(before) - before.rfind("\n"))


# --- building ---------------------------------------------------------------------------------------------------------


class _Open:
    """A list or table that is still open."""

    def __init__(self, mark: Mark, is_table: bool) -> None:
        self.mark, self.is_table = mark, is_table
        self.values: list[Node] = []
        self.keys: dict[str, Mark] = {}
        self.awaits_value = False

    def add(self, node: Node) -> None:
        if self.is_table and not self.awaits_value:
            self._add_key(node)
        else:
            self.values.append(node)
            self.awaits_value = False

    def _add_key(self, node: Node) -> None:
        if not isinstance(node, Scalar) or not node.text:
            raise wrong(node.mark, "", f"{kind_of(node)} is used as a key", "a key is one word")
        if node.text == "<<" and node.is_plain:
            raise not_plain(node.mark, "a merge key (<<)")
        if node.text in self.keys:
            first = self.keys[node.text].line
            raise wrong(
                node.mark, "", f"duplicate key {printable(node.text, 60)!r}, first in line {first}", "keep one of them"
            )
        self.keys[node.text] = node.mark
        self.awaits_value = True

    def closed(self) -> Node:
        if self.is_table:
            return Table(dict(zip(self.keys, self.values, strict=True)), self.keys, self.mark)
        return Items(tuple(self.values), self.mark)


def _built(text: str, where: str) -> Node | None:
    """The single document of the text, or None if it is empty."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    stack: list[_Open] = []
    root: Node | None = None
    num_documents = 0
    for event in yaml.parse(text, Loader=loader):
        start = cast(Any, event.start_mark)  # every parsed event has one
        mark = Mark(where, start.line + 1, start.column + 1)
        done: Node | None = None
        match event:
            case yaml.DocumentStartEvent():
                num_documents += 1
                if num_documents > 1:
                    raise not_plain(mark, "a second document")
                if event.version or event.tags:
                    raise not_plain(mark, "a % directive")
            case yaml.AliasEvent():
                raise not_plain(mark, f"the alias *{printable(str(event.anchor), 40)}")
            case yaml.ScalarEvent():
                _refuse_decorations(event, mark)
                done = _scalar(event, mark)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                _refuse_decorations(event, mark)
                if len(stack) >= MAX_DEPTH:
                    raise wrong(mark, "the file", f"is nested more than {MAX_DEPTH} levels deep", "correct it")
                stack.append(_Open(mark, isinstance(event, yaml.MappingStartEvent)))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = stack.pop().closed()
        if done is not None and stack:
            stack[-1].add(done)
        elif done is not None:
            root = done
    return None if isinstance(root, Scalar) and root.is_plain and not root.text else root


def not_plain(mark: Mark, what: str) -> InvalidInputError:
    return wrong(mark, "", f"{what} is not plain YAML", "write keys and values out, in one document")


def _refuse_decorations(
    event: "yaml.ScalarEvent | yaml.MappingStartEvent | yaml.SequenceStartEvent", mark: Mark
) -> None:
    if event.anchor:
        raise not_plain(mark, f"the anchor &{printable(str(event.anchor), 40)}")
    if event.tag:
        raise not_plain(mark, f"the tag {printable(str(event.tag).replace('tag:yaml.org,2002:', '!!'), 60)}")


def _scalar(event: "yaml.ScalarEvent", mark: Mark) -> Scalar:
    is_plain = event.style is None or event.style == ""
    if is_plain:
        for pattern, why, cure in ODD:
            if pattern.fullmatch(event.value):
                raise wrong(mark, "", f"{printable(event.value, 40)} {why}", cure)
    escaped = _STRANGE.search(event.value)
    if escaped is not None:
        code = f"U+{ord(escaped.group()):04X}"
        raise wrong(mark, "", f"an escape sequence produces a control character ({code})", "delete it")
    return Scalar(event.value, is_plain, mark)


# --- values -----------------------------------------------------------------------------------------------------------


def kind_of(node: Node) -> str:
    match node:
        case Table():
            return "a mapping"
        case Items():
            return "a list"
        case Scalar(text="", is_plain=True):
            return "nothing"
        case Scalar():
            return f"the value {printable(node.text, 40)!r}"


def table(
    node: Node,
    what: str,
    known: Collection[str] = (),
    hints: Mapping[str, str] | None = None,
    faults: Faults | None = None,
) -> Table:
    """Require a table with only known keys (none given: any); `hints`: wrong key -> right one.

    faults  collects unknown keys, which are then omitted from the table; None: they are raised
    """
    if not isinstance(node, Table):
        raise wrong(node.mark, what, f"is {kind_of(node)}", "write `key: value` lines")
    strange = {key: mark for key, mark in node.keys.items() if known and key not in known}
    if not strange:
        return node
    collected = Faults() if faults is None else faults
    for key, mark in strange.items():
        with collected.part():
            raise wrong(mark, what, f"has no key {printable(key, 60)!r}", f"{nearest(key, known, hints or {})}")
    if faults is None:
        collected.refuse()
    values = {key: value for key, value in node.values.items() if key not in strange}
    return Table(values, node.keys, node.mark)


MOST_NAMED: Final = 40  # keys that an error lists


def nearest(key: str, known: Collection[str], hints: Mapping[str, str]) -> str:
    """Suggestion for an unknown key or name."""
    from kvplan.core.near import meant, near_names

    plain = key.strip().replace("-", "_").lower()[:100]
    near = [hints[plain]] if hints.get(plain) in known else near_names(plain, known, 2)
    names = list(known)
    more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return meant(near, f"known keys: {', '.join(names[:MOST_NAMED])}{more}", " or ")


def items(node: Node, what: str) -> tuple[Node, ...]:
    if not isinstance(node, Items):
        raise wrong(node.mark, what, f"is {kind_of(node)}", "write a list, with one `- ` line per item")
    return node.values


def scalar(node: Node, what: str) -> Scalar:
    """Require a single value; a date must be quoted."""
    if not isinstance(node, Scalar):
        raise wrong(node.mark, what, f"is {kind_of(node)}", "write one value")
    if node.is_plain and not node.text:
        raise wrong(node.mark, what, "has no value", "write a value, or remove the key")
    if node.is_date:
        raise wrong(
            node.mark,
            what,
            f"is a date ({printable(node.text, 40)}), which does not belong here",
            "quote it if you mean text",
        )
    return node


def text(node: Node, what: str) -> str:
    return scalar(node, what).text


def switch(node: Node, what: str) -> bool:
    """Parse true or false."""
    value = {"true": True, "false": False}.get(text(node, what))
    if value is None:
        raise wrong(
            node.mark, what, f"is neither true nor false ({printable(text(node, what), 40)!r})", "write one of them"
        )
    return value


def date(node: Node, what: str) -> datetime.date:
    """Parse a date such as 2027-01-31, quoted or not."""
    if isinstance(node, Scalar) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", node.text):
        try:
            return datetime.date.fromisoformat(node.text)
        except ValueError:
            pass
    raise wrong(
        node.mark,
        what,
        f"not a date ({printable(getattr(node, 'text', kind_of(node)), 40)})",
        "write one like 2027-01-31",
    )


@contextmanager
def located(mark: Mark) -> Iterator[None]:
    """Add the position in the file to errors of value parsers."""
    try:
        yield
    except UsageError as error:
        raise InvalidInputError(error.subject, error.problem, error.remedy, public=error.public, mark=mark) from None
