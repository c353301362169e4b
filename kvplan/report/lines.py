"""Styled lines and tables: computed once, then written in full as plain text to a pipe, or in color and wrapped to the
width of a terminal.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from kvplan.core.records import dataclass
from kvplan.core.table import Table, as_text, cut, one_line, wrapped
from kvplan.core.units import UNIT_GAP

if TYPE_CHECKING:
    from rich.console import Console

Span = tuple[str, str]  # (text, rich style); "" is no style
Line = tuple[Span, ...]
SCREEN = 100  # columns that prose is wrapped to
COMMAND = "not bold cyan"  # style of a command: wrapped so that a shell still reads one line
LABEL = 24  # maximum characters of a label
NARROWEST = 20  # columns of the narrowest supported terminal


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text wrapped to at most SCREEN characters, or to the terminal's width.

    start   prefix of the first line; later ones are indented as far, or by `indent`
    most    maximum lines of SCREEN characters; an ellipsis marks omitted text
    """

    start: str
    text: str
    style: str = ""
    indent: int | None = None
    most: int | None = None

    def lines(self, width: int | None) -> Iterator[Line]:
        indent = len(self.start) if self.indent is None else self.indent
        parts = wrapped(one_line(self.text), SCREEN, self.start, " " * indent)
        if self.most is not None and len(parts) > self.most:
            parts = [*parts[: self.most - 1], f"{parts[self.most - 1].rpartition(' ')[0]} ..."]
        if width is not None and width < SCREEN:
            text = " ".join([parts[0][len(self.start) :], *(part[indent:] for part in parts[1:])])
            room = max(0, width - NARROWEST)
            start = self.start if len(self.start) <= room else self.start.rstrip()[:room]
            parts = wrapped(text, width, start, " " * min(indent, room))
        yield from (line(part, self.style) for part in parts)


Part = Line | Table | Paragraph  # of a screen


def line(text: str = "", style: str = "") -> Line:
    return ((text, style),)


def plain(styled: Line) -> str:
    return "".join(text for text, _ in styled).rstrip()


def open_console(stream: TextIO) -> "Console | TextIO":
    """Choose where to print: a rich console for a terminal (or if the environment forces colors), else the stream."""
    import os

    forced = bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TTY_COMPATIBLE") == "1"
    if not forced and not stream.isatty():
        return stream
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def encoding_of(console: "Console | TextIO") -> str:
    return getattr(console, "encoding", None) or "ascii"


def takes_blocks(console: "Console | TextIO") -> bool:
    """True if block characters can be written."""
    try:
        "█▏".encode(encoding_of(console))
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def width_of(console: "Console | TextIO") -> int | None:
    """Columns of a terminal, or None for a pipe or a file, whose lines are not wrapped."""
    stream: TextIO = getattr(console, "file", None) or console  # type: ignore[assignment] # a console has one
    if not stream.isatty():
        return None
    width = getattr(console, "width", None)
    if width is None:
        import shutil

        width = shutil.get_terminal_size().columns
    return max(NARROWEST, int(width))


def write(screen: Iterable[Part], console: "Console | TextIO") -> None:
    """Print lines and tables: nothing truncated, markup never parsed, unencodable characters escaped."""
    encoding, lines = encoding_of(console), laid_out(screen, width_of(console))
    if not getattr(console, "is_terminal", False):
        stream: TextIO = getattr(console, "file", None) or console  # type: ignore[assignment] # a console has one
        stream.writelines(f"{_safe(plain(styled), encoding)}\n" for styled in lines)
        return
    from rich.console import Console
    from rich.text import Text

    assert isinstance(console, Console)
    for styled in lines:
        text = Text.assemble(*((_safe(part, encoding), style) for part, style in styled))
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)


def _safe(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def laid_out(screen: Iterable[Part], width: int | None = None) -> Iterator[Line]:
    """Lines of at most `width` characters, without control characters; None: not wrapped."""
    for item in screen:
        if isinstance(item, Table):
            yield from (line(text, "bold" if is_heading else "") for is_heading, text in as_text(item, width))
            continue
        if isinstance(item, Paragraph):
            yield from item.lines(width)
            continue
        styled = tuple((one_line(text), style) for text, style in item)
        if width is None or len(plain(styled)) <= width:
            yield styled
        else:
            yield from folded(styled, width)


def folded(styled: Line, width: int) -> Iterator[Line]:
    """Wrap a line at spaces; later lines are indented to the text after its label."""
    text = plain(styled)
    indent, is_command = _hanging(text, width), any(style == COMMAND for _, style in styled)
    start, mark = 0, " \\" if is_command else ""
    while start < len(text):
        room = width - (indent if start else 0)
        least = start if start else indent
        end = _division(text, start, room, least, is_command=is_command)
        last = end == len(text)
        yield ((" " * indent if start else "", ""), *_between(styled, start, end), ("" if last else mark, ""))
        start = end + len(text[end:]) - len(text[end:].lstrip(" "))


def _hanging(text: str, width: int) -> int:
    """Column at which a line's text starts after its label and figures: after the last gap in its first half, or for an
    unindented line after its label.
    """
    limit = width // 2 if text.startswith(" ") else LABEL
    gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}(?=\S)", text) if gap.end() <= limit]
    return gaps[-1] if gaps else min(len(text) - len(text.lstrip(" ")) + 2, width // 2)


def _division(text: str, start: int, room: int, least: int, *, is_command: bool) -> int:
    """Position at which to wrap a line that begins at `start`: a space, or for a command the space before an option."""
    if len(text) - start <= room:
        return len(text)
    if is_command:
        options = [gap.start() for gap in re.finditer(r" (?=--)", text) if gap.start() > least]
        fitting = [place for place in options if place - start <= room - 2]
        return fitting[-1] if fitting else next(iter(options), len(text))
    inside = {gap.start() for gap in re.finditer(UNIT_GAP, text)}
    spaces = [gap.start() for gap in re.finditer(" ", text) if least < gap.start() <= start + room]
    return max((place for place in spaces if place not in inside), default=start + cut(text[start:], room))


def _between(styled: Line, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of a part of a line."""
    place = 0
    for text, style in styled:
        part = text[max(0, start - place) : max(0, end - place)]
        if part:
            yield part, style
        place += len(text)
