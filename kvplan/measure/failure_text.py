"""A pasted log as text: its lines without collectors' prefixes, and the frames of its tracebacks.

Messages are searched in the whole text without white space (`squeezed`), so that a match survives lines that a
terminal wrapped inside a word and text that lost its newlines.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvplan.core.files import printable
from kvplan.measure.serverlog.log import rank_of
from kvplan.servers.logs.failures import squeezed
from kvplan.servers.logs.text import unwrapped

MOST_LINES: Final = 40_000  # of a longer log the first quarter and the last three
MOST_CHARACTERS: Final = 4_000  # of a line
MOST_FRAMES: Final = 20_000

_ANSI: Final = re.compile(
    r"(?:\x1b|\^\[|ESC(?=\[[0-9;]{0,8}m)|\\033|\\x1b|\\u001b)\[[0-9;?]{0,40}[A-Za-z]|\x1b|\[[0-9;]{1,8}m"
)
# Prefixes of a message: quotes, the container's name, the stream, a journal, time stamps, processes, the logger.
_PREFIX: Final = re.compile(
    r"\s{0,80}(?:"
    r">|\|(?=\s)|"
    r"[A-Za-z0-9_./-]{1,80}\s{1,20}\|(?=\s|$)|"
    r"(?:stdout|stderr) [FP](?=\s|$)|"
    r"[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [\w.-]{1,60} [\w.@-]{1,60}(?:\[[0-9]{1,9}\])?:(?=\s|$)|"
    r"\[?[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}[T ][0-9:]{8}(?:[.,][0-9]{1,9})?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
    r"(?: [A-Z]{2,5}[0-9]{1,4}){0,5}\]?|"
    r"\((?:[A-Za-z_][A-Za-z0-9_]{0,60} )?(?:pid|rank|ip|TP[0-9]{1,3}|[A-Za-z0-9_]{1,30} pid)\b[^()]{0,120}\)|"
    r"\[(?:pod/|rank)[^\]]{0,160}\]:?|"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [0-9]{2}-[0-9]{2} [0-9:]{8} "
    r"(?:\[[^\]\s]{1,120}\]|[\w./]{1,100}:[0-9]{1,6}\])|"
    r"[A-Z][0-9]{4} [0-9:.]{8,20} [0-9]{1,9} [^\]]{1,160}\](?: \[[0-9/]{1,12}\])?"
    r")\s{0,2}"
)
_MOST_PREFIXES: Final = 6
_LEVEL: Final = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b(?: [0-9]{2}-[0-9]{2} [0-9:]{8}|:? {1,9}|\])")
_FAILED: Final = re.compile(r"\berr(?:or)?=\"")  # of Go's slog: "Load failed" at level INFO
HEALTHY: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_FRAME: Final = re.compile(r"line [0-9]{1,6}, in [*<]{0,2}([A-Za-z_]\w{0,80})|[.\s]([a-z_]{0,40}_[a-z_]{1,60})\(")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows the cause; its number counts from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A function in a traceback.

    start    position of its name in the squeezed text
    is_call  named by a source line, not by Python's "in NAME"
    """

    name: str
    start: int
    line: int
    is_call: bool


class LogText:
    """The lines of a log, and the same as one text.

    lines     without a collector's wrapping and colors
    numbers   input line number of each
    squeezed  all messages without white space and prefixes, concatenated
    starts    position of each line in it
    frames    the functions of every traceback, in order
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines: list[str] = []
        self.numbers: list[int] = []
        for number, line in _bounded(lines):
            for part in (unwrapped(line) or [""]) if _may_be_wrapped(line) else [line]:
                self.lines.append(_ANSI.sub("", part[:MOST_CHARACTERS]))
                self.numbers.append(number)
        self.starts: list[int] = []
        self.frames: list[Frame] = []
        self._levels: list[tuple[int, str]] = []
        parts, end = list[str](), 0
        for index, line in enumerate(self.lines):
            self.starts.append(end)
            body = prefix_end(line)
            self._note(line, index, end, body)
            parts.append(squeezed(line[body:]))
            end += len(parts[-1])
        self.squeezed = "".join(parts)

    def _note(self, line: str, index: int, end: int, body: int) -> None:
        """Record the log levels and frames of a line, each with its position in the squeezed text."""
        for match in _LEVEL.finditer(line):
            level = "ERROR" if _FAILED.search(line, match.end()) else match[1]
            self._levels.append((end + _squeezed_len(line, body, match.start()), level))
        if "(" not in line and " in " not in line:
            return
        for match in _FRAME.finditer(line):
            start = end + _squeezed_len(line, body, match.start())
            if len(self.frames) < MOST_FRAMES:
                self.frames.append(Frame(match[1] or match[2], start, index, match[1] is None))

    def line_of(self, start: int) -> int:
        return bisect_right(self.starts, start) - 1

    def place(self, line: int, column: int) -> int:
        """Position in the squeezed text of a column of a line."""
        return self.starts[line] + _squeezed_len(self.lines[line], prefix_end(self.lines[line]), column)

    def positions(self, phrase: str, limit: int) -> list[int]:
        """First positions of a phrase, ignoring white space."""
        plain, places = squeezed(phrase), list[int]()
        start = self.squeezed.find(plain)
        while start >= 0 and len(places) < limit:
            places.append(start)
            start = self.squeezed.find(plain, start + len(plain))
        return places

    def is_healthy(self, start: int) -> bool:
        """True if the logger wrote a message at INFO or WARNING level, on its own line."""
        index = bisect_right(self._levels, (start, "~")) - 1
        if index < 0 or self._levels[index][0] < self.starts[self.line_of(start)]:
            return False
        return self._levels[index][1] in HEALTHY

    @property
    def errors(self) -> list[int]:
        """Positions of the lines that the logger wrote as errors."""
        return [start for start, level in self._levels if level in ("ERROR", "CRITICAL")]

    def rank(self, line: int) -> str:
        return rank_of(self.lines[line][:300])

    def evidence(self, line: int) -> Evidence:
        return Evidence(self.numbers[line], printable(self.lines[line].strip(), 600))


def _may_be_wrapped(line: str) -> bool:
    """True if a collector may have wrapped a line in a record, or a progress bar may have overwritten it."""
    return line[:1].isdigit() or "{" in line[:8] or "\r" in line or "\n" in line


def _bounded(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    numbered = list(enumerate(lines, 1))
    if len(numbered) <= MOST_LINES:
        return numbered
    return [*numbered[: MOST_LINES // 4], *numbered[-3 * MOST_LINES // 4 :]]


def prefix_end(line: str) -> int:
    """Column at which a line's message begins."""
    end = 0
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line, end)
        if match is None:
            break
        end = match.end()
    return end


def _squeezed_len(line: str, start: int, end: int) -> int:
    return len(squeezed(line[start:end])) if end > start else 0
