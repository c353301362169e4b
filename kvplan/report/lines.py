"""Styled lines: computed once as plain text with styles, then written plain to a pipe and coloured to a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

Span = tuple[str, str]  # (text, rich style); "" is no style
Line = tuple[Span, ...]


def line(text: str = "", style: str = "") -> Line:
    return ((text, style),)


def plain(styled: Line) -> str:
    return "".join(text for text, _ in styled).rstrip()


def open_console(stream: TextIO) -> "Console | TextIO":
    """What to print on: a rich console for a terminal (or where the environment forces colours), else the stream."""
    import os

    forced = bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TTY_COMPATIBLE") == "1"
    if not forced and not stream.isatty():
        return stream
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def encoding_of(console: "Console | TextIO") -> str:
    return getattr(console, "encoding", None) or "ascii"


def takes_blocks(console: "Console | TextIO") -> bool:
    """Whether block characters can be written."""
    try:
        "█▏".encode(encoding_of(console))
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def write(lines: Iterable[Line], console: "Console | TextIO") -> None:
    """Print lines: untruncated, markup never parsed, what the encoding lacks as an escape."""
    encoding = encoding_of(console)
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


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[Line]:
    """A table as lines: the first `left` columns to the left, the rest to the right, two spaces between."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def padded(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )

    return [line(padded(headers), "bold"), *(line(padded(row)) for row in rows)]
