"""Each start in a server's log: how far it came, what it served, and how it ended.

A log is judged by its last start: an error after which the server answered, or that a request or an order to stop
explains, did not end it.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from kvplan.measure.failure_text import LogText
from kvplan.servers.logs.failures import ORDERS, WRAPPERS, Failures, Order, Phase, squeezed

End = Literal["running", "stopped", "finished", "failed", "died", "cut"]

MOST_STARTS: Final = 200
LEAP_YEAR: Final = 2024
NEAR: Final = 200  # lines between an exception and the access line of its request
TRACE: Final = 200  # lines of a traceback above its last line
TOO_LONG: Final = ("maximum context length", "longer than the maximum model", "longer than the model")
_ACCESS: Final = re.compile(r'"(GET|POST|PUT|DELETE) (/\S{0,200}) HTTP/[0-9.]{1,3}" ([1-5][0-9]{2})')
_FILE: Final = re.compile(r'File "([^"]{1,300})", line')
_CLOCK: Final = re.compile(r"(?<![0-9])([01][0-9])[-/]([0-3][0-9])[T ]([0-2][0-9]):([0-5][0-9]):([0-5][0-9])")
_CONTAINER: Final = re.compile(r"\s{0,8}([A-Za-z0-9_.-]{1,80})\s{1,20}\|(?:\s|$)")  # docker compose
_RISEN: Final = ("Application startup complete", "Uvicorn running on")
_OF_HTTP: Final = ("/starlette/", "/fastapi/", "/uvicorn/", "/entrypoints/")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server.

    first, last  its lines, counted from 1
    phase        the furthest phase of start-up that its lines show; serving if it was ready
    end          running, stopped (it was told to), finished (an offline run), failed, died, or cut: the log just ends
    order        who told it to stop, if the log says so
    answered     requests with a result; refused: those that the server rejected, by status
    too_long     refused requests that were longer than the context
    seconds      from ready to the last line of the start, or None if its lines have no time
    """

    first: int
    last: int
    phase: Phase | None
    end: End
    order: Order | None = None
    answered: int = 0
    refused: int = 0
    too_long: int = 0
    seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of one start in the squeezed text, and of its signs of life; None where it has none.

    whole     True if its first line is there
    ready     its first line that says that it serves, or its first answered request
    dead      the first report of a failed process, unless it had been told to stop by then
    ordered   the first order to stop, unless it was dead by then
    alive     the last sign of a working engine before it was dead
    finished  an offline run's end
    """

    begin: int
    end: int
    is_logged: bool
    whole: bool
    ready: int | None
    alive: int | None
    dead: int | None
    ordered: int | None
    order: Order | None
    finished: int | None

    def outlived(self, position: int) -> bool:
        """True if the server worked after this position, or had been told to stop before it."""
        return (self.alive is not None and self.alive > position) or (
            self.ordered is not None and self.ordered < position
        )

    @property
    def is_up(self) -> bool:
        """True if it served or finished, and nothing reports a failed process since."""
        return self.dead is None and (self.ready is not None or self.finished is not None or self.ordered is not None)


class States:
    """The starts of one log, by a server's own words."""

    def __init__(self, text: LogText, own: Failures, begins: list[int], ready: Iterable[str]) -> None:
        self.text, self.own = text, own
        self._ready, self._alive = [squeezed(words) for words in ready], [squeezed(words) for words in own.alive]
        words = (*own.starts, *own.engines, *(phrase for phrase, _ in own.marks))
        first = [place for phrase in words for place in text.positions(phrase, 1)]
        self._containers = {container(text.lines[text.line_of(place)]) for place in first} - {None}
        self.answers = [  # (line, status, whether it is a request of a user)
            (index, int(match[3]), match[1] == "POST")
            for index, line in enumerate(text.lines)
            if "HTTP/" in line and (match := _ACCESS.search(line)) is not None and self._is_own(index)
        ]
        self._answer_lines = [line for line, _, _ in self.answers]
        limits = self._limits(begins)
        ends = [*limits[1:], len(text.squeezed)]
        self.spans = [self._span(begin, end) for begin, end in zip(limits, ends, strict=True)]

    def _limits(self, begins: list[int]) -> list[int]:
        """Where each start begins: at its banner, or at an engine's first line after the end of the one before."""
        own = list(begins[:MOST_STARTS])
        engines = sorted(place for words in self.own.engines for place in self.text.positions(words, MOST_STARTS))
        for place in engines:
            since = max((begin for begin in own if begin <= place), default=0)
            earlier = [other for other in engines if since <= other < place]
            if earlier and any(self._first(words, earlier[-1], place) is not None for words in self._ends):
                own.append(place)
        return [0, *sorted(set(own))[1:]]

    @property
    def _ends(self) -> tuple[str, ...]:
        return (*WRAPPERS, *self.own.finished, *(order.phrase for order in (*ORDERS, *self.own.orders)))

    def span_of(self, position: int) -> Span:
        return self.spans[bisect_right([span.begin for span in self.spans], position) - 1]

    # --- signs of life

    def _is_own(self, line: int) -> bool:
        """False if another container than the server's wrote a line."""
        name = container(self.text.lines[line]) if self._containers else None
        return name is None or name in self._containers

    def _last(self, words: str, begin: int, end: int) -> int:
        """The last position of words that the server itself wrote, or -1."""
        place = self.text.squeezed.rfind(words, begin, end)
        while place >= 0 and not self._is_own(self.text.line_of(place)):
            place = self.text.squeezed.rfind(words, begin, place)
        return place

    def _first(self, words: str, begin: int, end: int) -> int | None:
        plain = squeezed(words)
        place = self.text.squeezed.find(plain, begin, end)
        while place >= 0 and not self._is_own(self.text.line_of(place)):
            place = self.text.squeezed.find(plain, place + len(plain), end)
        return None if place < 0 else place

    def _firsts(self, phrases: Iterable[str], begin: int, end: int) -> int | None:
        return min((place for words in phrases if (place := self._first(words, begin, end)) is not None), default=None)

    def _answered(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        first, last = self.text.line_of(begin), self.text.line_of(max(begin, end - 1))
        low, high = bisect_left(self._answer_lines, first), bisect_right(self._answer_lines, last)
        return self.answers[low:high]

    def _span(self, begin: int, end: int) -> Span:
        dead = self._firsts((*WRAPPERS, *self.own.deaths), begin, end)
        risen = max([begin, *(self._last(squeezed(words), begin, end) for words in _RISEN)])
        orders = [
            (place, order)
            for order in (*ORDERS, *self.own.orders)
            if (place := self._first(order.phrase, risen, end)) is not None
        ]
        ordered = min((place for place, _ in orders), default=None)
        if ordered is not None and dead is not None and dead < ordered:
            ordered = None
        elif ordered is not None:
            dead = None
        until = end if dead is None else dead  # what an engine's failure is followed by is another server's
        answers = [
            (self.text.starts[line], posted) for line, status, posted in self._answered(begin, until) if status < 300
        ]
        written = self._firsts(self._ready, begin, until)
        ready = min([*(place for place, _ in answers[:1]), *([] if written is None else [written])], default=None)
        served = [place for place, posted in answers if posted][-1:]
        alive = max([-1, *served, *(self._last(words, begin, until) for words in self._alive)])
        banner = self._firsts(self.own.starts, begin, end)
        whole = banner is not None or self._firsts(self.own.engines, begin, end) is not None
        is_offline = banner is None and not answers
        named = [order for _, order in orders if order.by]
        return Span(
            begin,
            end,
            whole or self._firsts((words for words, _ in self.own.marks), begin, end) is not None,
            whole,
            ready,
            alive if alive >= 0 else None,
            dead,
            ordered,
            None if ordered is None else next(iter(named), min(orders, key=lambda row: row[0])[1]),
            self._firsts(self.own.finished, begin, end) if is_offline else None,
        )

    # --- errors that end no server

    def is_of_a_request(self, index: int) -> bool:
        """True if an exception on this line failed a request, or is another program's, while the server was ready."""
        span = self.span_of(self.text.starts[index])
        begun = span.finished if span.ready is None else span.ready
        if begun is None or begun > self.text.starts[index]:
            return False
        line = self.text.lines[index]
        if any(words in line[:200] for words in self.own.frontend):
            return True
        files = self._files(index)
        if files and self._is_foreign(files):
            return True
        if span.ready is None and not any(words in file for file in files for words in self.own.modules):
            return True
        if span.dead is not None:
            return False
        if any(words in file for file in files for words in _OF_HTTP):
            return True
        low = bisect_left(self._answer_lines, index - NEAR)
        return any(
            status >= 400 and line <= index + NEAR and posted for line, status, posted in self.answers[low : low + NEAR]
        )

    def _is_foreign(self, files: list[str]) -> bool:
        """True if a program around the server raised it: a test, or a file neither the server's nor installed."""
        if any(words in file for file in files for words in ("/test/", "/tests/", "/unittest/")):
            return True
        inner = next((file for file in files if "-packages/" in file or "/lib/python3" not in file), files[0])
        return "-packages/" not in inner and not any(words in inner for words in self.own.modules)

    def _files(self, index: int) -> list[str]:
        """Files of the traceback that ends in a line."""
        files = list[str]()
        for line in range(index - 1, max(-1, index - TRACE), -1):
            if (match := _FILE.search(self.text.lines[line])) is not None:
                files.append(match[1])
            elif "Traceback (most recent call last)" in self.text.lines[line]:
                return files
        return []

    # --- the answer

    def starts(self, failures: Collection[int]) -> tuple[Start, ...]:
        """Every start; `failures`: positions of errors that ended one."""
        return tuple(
            self._start(span, span.dead is not None or any(span.begin <= place < span.end for place in failures))
            for span in self.spans
        )

    def _start(self, span: Span, has_failed: bool) -> Start:
        first, last = self.text.line_of(span.begin), self.text.line_of(max(span.begin, span.end - 1))
        answers = self._answered(span.begin, span.end)
        refused = [line for line, status, posted in answers if posted and 400 <= status < 500]
        end: End = "cut"
        if has_failed:
            end = "died" if span.ready is not None else "failed"
        elif span.finished is not None:
            end = "finished"
        elif span.ordered is not None:
            end = "stopped"
        elif span.ready is not None:
            end = "running"
        return Start(
            self.text.numbers[first] if self.text.numbers else 1,
            self.text.numbers[last] if self.text.numbers else 1,
            "serving" if span.ready is not None else self.phase_in(span),
            end,
            span.order,
            sum(1 for _, status, posted in answers if posted and status < 300),
            len(refused),
            self._too_long(span, refused),
            self._seconds(span, last),
        )

    def phase_in(self, span: Span) -> Phase | None:
        """The phase that follows the last healthy line of a start."""
        marks = [
            (place, phase)
            for words, phase in self.own.marks
            if (place := self.text.squeezed.rfind(squeezed(words), span.begin, span.end)) >= 0
        ]
        return max(marks)[1] if marks else "arguments" if span.is_logged else None

    def _too_long(self, span: Span, refused: list[int]) -> int:
        if not refused:
            return 0
        first, last = self.text.line_of(span.begin), self.text.line_of(max(span.begin, span.end - 1))
        texts = self.text.lines[first : last + 1]
        lines = [first + index for index, line in enumerate(texts) if any(words in line for words in TOO_LONG)]
        near = [any(abs(line - index) <= NEAR for index in lines) for line in refused]
        return Counter(near)[True]

    def _seconds(self, span: Span, last: int) -> int | None:
        if span.ready is None:
            return None
        ready = self.text.line_of(span.ready)
        ended = self.text.line_of(next((place for place in (span.dead, span.ordered) if place is not None), span.end))
        before = self._time_at(range(ready, max(-1, ready - NEAR), -1))
        after = self._time_at(range(min(last, ended), ready, -1))
        if before is None or after is None or after < before:
            return None
        return int((after - before).total_seconds())

    def _time_at(self, lines: Iterable[int]) -> datetime | None:
        """Time of the first of these lines that has one."""
        return next(filter(None, (clock(self.text.lines[index]) for index in lines)), None)


def container(line: str) -> str | None:
    """The container that docker compose names before a line, or None."""
    match = _CONTAINER.match(line)
    return None if match is None else match[1]


def clock(line: str) -> datetime | None:
    """Time of a line in any year: not all lines of a log have one."""
    match = _CLOCK.search(line[:200])
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    try:
        return datetime(LEAP_YEAR, month, day, hour, minute, second)
    except ValueError:
        return None
