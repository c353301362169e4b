"""Classify a server's log: whether the server started, failed or died, why, and the log lines that show it.

A wrong cause is worse than none: what the text does not show is requested (`needs`), never guessed. The wordings are
the servers' own (kvplan/servers/*/failures.py); this module decides which message is decisive, which ones repeat it,
and in which phase of start-up an out-of-memory error occurred.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.measure.failure_messages import cause_of
from kvplan.measure.failure_text import Evidence, Frame, LogText, prefix_end
from kvplan.measure.failure_words import LONGEST_SENTENCE, parts_told, tells_of
from kvplan.measure.serverlog.log import parse_log
from kvplan.measure.states import End, Span, Start, States
from kvplan.servers.base import OWN, failures_of_servers
from kvplan.servers.logs.failures import (
    LEAD,
    MEMORY_CAUSES,
    NAMES,
    ORDERS,
    OUT_OF_MEMORY,
    REACH,
    SYSTEM,
    WRAPPERS,
    Cause,
    Failures,
    Figures,
    Phase,
    Size,
    Wording,
    compiled,
    figure,
    squeezed,
)
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.logs.obstacles import OF_CAUSE
from kvplan.servers.logs.obstacles import WORDINGS as OBSTACLES
from kvplan.servers.releases import DEFAULT

Outcome = Literal["started", "stopped", "finished", "failed", "died", "cut", "unknown"]
OUTCOMES: Final[Mapping[End, Outcome]] = {
    "running": "started", "stopped": "stopped", "finished": "finished", "failed": "failed", "died": "died", "cut": "cut"
}  # fmt: skip
HEALTHY: Final = ("started", "stopped", "finished")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a server came to its end, as its log shows.

    outcome          of its last start. started: it runs; stopped: it was told to; finished: an offline run;
                     failed: it did not come up; died: it ran before; cut: the log ends before it is ready
    cause            None if the text does not show it
    memory_question  True if memory and the flags that divide it are involved, or None if unknown
    phase            the phase of start-up, or serving, in which it happened
    evidence         the lines that show it, in log order
    ranks            the workers that logged the cause, by their prefixes
    needs            what is missing if the cause is unknown
    releases         first and last release with all of these wordings, or None if every release has them
    log              the start-up lines (model, arguments, weights, GPU), or None if there are none
    starts           every start in the log, in order; empty if the text is no log
    settings         arguments that a line says were given, besides the start-up's list
    """

    server: str | None
    version: str | None
    outcome: Outcome
    cause: Cause | None
    memory_question: bool | None
    phase: Phase | None
    evidence: tuple[Evidence, ...]
    figures: Figures
    ranks: tuple[str, ...]
    needs: tuple[str, ...]
    log: ServerLog | None
    releases: tuple[str, str] | None = None
    starts: tuple[Start, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def start(self) -> Start | None:
        """The start that is judged: the last one."""
        return self.starts[-1] if self.starts else None


NEEDS_TRACE: Final = "the traceback above the out-of-memory line, which names the part of start-up"
NEEDS_START: Final = "the whole log, from the server's first line"
NEEDS_ABOVE: Final = "the lines above it, because the last ones only repeat that a worker failed"
NEEDS_BELOW: Final = "the lines below it, because the log ends inside a traceback, whose last line says why"
NEEDS_WORKER: Final = (
    "the log of the process that died (of Ray: /tmp/ray/session_latest/logs/worker-*.err, on its node)"
)
NEEDS_LOG: Final = "the server's full start-up log"
LOCKS: Final = ("waiting for baton release",)  # torch and aiter: a kernel's build waits for another process's
NEEDS_LOCK: Final = "whether another process builds kernels; if none does, remove the lock that the last line names"
NEEDS_SENDER: Final = (
    "who stopped it before it was ready: in Kubernetes a start-up probe that failed (`kubectl describe pod`), else the "
    "supervisor's own log"
)
BY_HAND: Final = [order for order in ORDERS if order.by == "Ctrl-C"]
NEEDS_END: Final = (
    "the exit code (137: killed by the system) and the kernel's log of that time "
    "(`dmesg -T | grep -iE 'oom|killed|Xid'`)"
)

MOST_HITS: Final = 200  # matches of one phrase to inspect
TRACE: Final = 400  # lines of a traceback above its last line to inspect
AFTER: Final = 120  # and below it: processes that wait for a worker repeat its traceback
NEAR: Final = 12  # lines between a trace's last function and its message
LONGEST_LEAD: Final = 60  # squeezed characters between an exception's type and the message it wraps
FRAME: Final = re.compile(r'File "[^"]+", line \d+|Traceback \(most recent call last\)')
ANY_PATCH: Final = 999  # "0.10" as an upper end includes 0.10.2
MOST_PREFIX: Final = 240  # characters of a process's prefix
MOST_WORDS: Final = 300  # lines at either end of a text that are searched for a person's words


def read_failure(lines: Iterable[str]) -> Failure:
    """Return what happened to the server that wrote these lines."""
    text = LogText(lines)
    return _Reading(text, _start_up(text.lines)).failure()


def _start_up(lines: list[str]) -> ServerLog | None:
    try:
        return parse_log("\n".join(lines))
    except KvplanError:
        return None


# --- messages of the tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hit:
    """A matched message and its cause in this log.

    start  its position in the squeezed text
    proof  the line that shows its phase of start-up
    """

    wording: Wording
    cause: Cause | None
    start: int
    line: int
    server: str | None = None
    phase: Phase | None = None
    proof: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A phase of start-up as a table names it, and the line that shows it."""

    name: str
    line: int


# --- exceptions that are in no table --------------------------------------------------------------------------------

# Types that report another process's failure, a keyboard interrupt or a signal to a launcher (torchrun), never the
# cause.
_WRAPPING_TYPES: Final = re.compile(
    r"(?:Engine\w*|AsyncEngine\w*|MQEngine\w*|RayTask|RayActor|ActorDied|ActorUnavailable|Cancelled|EOF|BrokenPipe|"
    r"ConnectionReset|ConnectionRefused|ClientConnector|CalledProcess|ChildFailed|ConnectTimeout|ReadTimeout|"
    r"RemoteDisconnected|ServerDisconnected|Connection|NewConnection|MaxRetry|OutOfMemory|HTTP|APIConnection|"
    r"InternalServer|ProcessRaised|KeyboardInterrupt|Signal)(?:Error|Exception)?"
)
_EXCEPTION: Final = re.compile(
    r"(?<![A-Za-z0-9_.])(?:(?:[A-Za-z_]\w{0,60}\.){0,8}(?P<type>[A-Z]\w{0,80}(?:Error|Exception)|Exception)"
    r"(?:: (?=\S)|:?[\s`]{0,4}$)|(?P<value>Value error), (?=\S))"  # the second is pydantic's
)
_FIELDS: Final = re.compile(r"[0-9]{1,4} validation errors? for ")  # pydantic's header
_FIELD: Final = re.compile(r"\S.{0,600}\[type=(?!value_error)\w{1,60}, input_value=")  # and its line of a field
_SHAPE: Final = re.compile(
    r"(?i)shape|dimension size|size of tensor|size mismatch|\.size\(|vocab_size|for input of size"
)
_LOADER: Final = re.compile(r"weight_loader|load_\w{0,60}weights?|load_\w{1,60}_weight")
_TENSOR: Final = re.compile(
    r"['\"][\w.]{1,120}\.(?:\w{0,20}weight\w{0,20}|bias|\w{0,20}scale\w{0,20}|qzeros|g_idx)['\"]"
)
_OF_A_WORKER: Final = re.compile(r"Worker failed with error ['\"\u2018](.{3,400}?)['\"\u2019](?:, please check|$)")
_MAYBE_MEMORY: Final = re.compile(r"(?i)memory|(?<![a-z])kv[- ]?cache|\boom\b|notenough|insufficient")
# Of 510 messages in servers' code that name memory or a cache and stand in no table, 446 have none of these words
# (reports/LOG.md, 2026-11-30).
_SHORT: Final = re.compile(
    r"(?i)not ?enough|insufficient|exceed|(?:larg|great|small)er than|too (?:small|large|big|few|little|many)|out of|"
    r"\bno (?:available|free|memory|room|space)|increas|decreas|reduc|rais|lower|alloc|\bleft\b|leav|\bfit\b|"
    r"less than|oom\b"
)
_OTHER: Final = Wording("not_memory", "", "any", "an exception of Python")
_WORDS: Final = Wording(None, "", "any", "a person's words")


class _Reading:
    """Analyzes one log into a Failure."""

    def __init__(self, text: LogText, log: ServerLog | None) -> None:
        self.text = text
        self.log = log
        self._servers = failures_of_servers()
        self.hits = list(self._hits())
        self.hits = self._fatal_to_its_start(self.hits)

    # --- messages of the tables

    def _hits(self) -> Iterator[_Hit]:
        own = [(name, failures.wordings) for name, failures in self._servers.items()]
        shared = (SYSTEM, OBSTACLES, OUT_OF_MEMORY)
        tables: list[tuple[str | None, tuple[Wording, ...]]] = [*own, *((None, rows) for rows in shared)]
        lines_told = set[int]()  # torch's message counts once per line, and not if the server names the cause
        for server, wordings in tables:
            for wording in wordings:
                places = self.text.positions(wording.phrase, MOST_HITS)
                if places and wording.anywhere and not compiled(wording.anywhere).search(self.text.squeezed):
                    continue
                for start in places:
                    line = self.text.line_of(start)
                    if not self._applies(wording, start) or (_is_torch(wording) and line in lines_told):
                        continue
                    if _is_torch(wording) or wording.cause in MEMORY_CAUSES:
                        lines_told.add(line)
                    yield _Hit(wording, wording.cause, start, line, server, wording.phase)

    def _applies(self, wording: Wording, start: int) -> bool:
        if wording.strength != "hint" and wording.fatal and self.text.is_healthy(start):
            return False
        if wording.waits and self._positions(LOCKS):
            return False
        around = self._around(start)
        if wording.unless and compiled(wording.unless).search(around):
            return False
        return not wording.needs or compiled(wording.needs).search(around) is not None

    def _around(self, start: int) -> str:
        return self.text.squeezed[max(0, start - LEAD) : start + REACH]

    # --- which server wrote the log

    @cached_property
    def server(self) -> str | None:
        """Name of the server whose processes wrote the text; else by its wordings, its files, or its name."""
        wrote = [name for name, failures in self._servers.items() if self._has_a_line(failures.processes)]
        if len(wrote) == 1:
            return wrote[0]
        named = {hit.server for hit in self.hits if hit.server is not None and hit.wording.strength == "decisive"}
        if len(named) == 1:
            return named.pop()
        plain = self.text.squeezed.lower()
        for name, failures in self._servers.items():
            if any(words in plain for words in failures.files):
                return name
        counts = {name: plain.count(name) for name in self._servers}
        if any(counts.values()):
            return max(counts, key=counts.__getitem__)
        for name, failures in self._servers.items():
            if failures.own_marks and self._positions(phrase for phrase, _ in failures.marks):
                return name
        return None if self.log is None else self.log.engine

    def _has_a_line(self, patterns: tuple[str, ...]) -> bool:
        joined = re.compile("|".join(patterns)) if patterns else None
        return joined is not None and any(joined.search(line[:MOST_PREFIX]) for line in self.text.lines)

    @property
    def _own(self) -> Failures:
        """Tables of the server, or of the default server if none is named."""
        return self._servers.get(self.server or DEFAULT) or self._servers[DEFAULT]

    # --- the starts in it

    @cached_property
    def states(self) -> States:
        """Its starts; a simulated server is ready in kvplan's words."""
        is_simulated = self.log is not None and self.log.first("simulated") is not None
        own = [words for name in OWN for words in self._servers[name].ready] if is_simulated else []
        begins = self._positions(words for failures in self._servers.values() for words in failures.starts)
        return States(self.text, self._own, begins, [*self._own.ready, *own])

    @property
    def _last(self) -> Span:
        return self.states.spans[-1]

    def _fatal_to_its_start(self, hits: list[_Hit]) -> list[_Hit]:
        """Leave out what the server outlived, or what only the end of another process explains."""
        fatal = [hit for hit in hits if not hit.wording.fatal or not self._is_outlived(hit)]
        for span in self.states.spans:
            outlived = [hit for hit in hits if span.begin <= hit.start < span.end and hit not in fatal]
            if span.dead is not None and outlived and not any(span.begin <= hit.start < span.end for hit in fatal):
                fatal.append(max(outlived, key=_by_start))  # requests in flight were answered after it
        return fatal

    def _is_outlived(self, hit: _Hit) -> bool:
        span = self.states.span_of(hit.start)
        if span.outlived(hit.start) and (span.whole or prefix_end(self.text.lines[hit.line])):
            return True  # not a title above an excerpt
        # A server takes its port before it is ready.
        return hit.cause == "port_in_use" and span.dead is None and span.ready is not None and span.ready < hit.start

    @cached_property
    def _marks(self) -> list[tuple[int, Phase]]:
        """(position, phase) of each normal start-up line, in order."""
        return sorted((start, phase) for phrase, phase in self._own.marks for start in self._positions([phrase]))

    def _positions(self, phrases: Iterable[str]) -> list[int]:
        return sorted(start for phrase in phrases for start in self.text.positions(phrase, MOST_HITS))

    # --- out of memory: in which phase of start-up

    def _resolved(self, hit: _Hit) -> _Hit:
        """Add the cause to an out-of-memory message if the text shows the phase of start-up."""
        if not _is_torch(hit.wording):
            return hit
        part = (
            self._part_by_frames(hit) or self._part_by_words(hit) or self._part_by_marks(hit) or self._part_by_size(hit)
        )
        if part is None:
            return hit
        cause, phase = self._cause_in(part)
        return replace(hit, cause=cause, phase=phase, proof=part.line)

    @property
    def _sent_back(self) -> Cause | None:
        """Cause of preempted requests: the server's, or that of the only server with one if no server is named."""
        if self.server is not None:
            return self._own.sent_back
        return next((own.sent_back for own in self._servers.values() if own.sent_back is not None), None)

    def _cause_in(self, part: _Part) -> tuple[Cause | None, Phase | None]:
        return self._own.parts.get(part.name, (None, None))

    @cached_property
    def _frame_starts(self) -> list[int]:
        return [frame.start for frame in self.text.frames]

    def _part_by_frames(self, hit: _Hit) -> _Part | None:
        """Find the phase by the traceback that ends in the message, else by waiting processes' repeats below it."""
        frames, index = self.text.frames, bisect_left(self._frame_starts, hit.start)
        above = [frame for frame in frames[max(0, index - TRACE) : index] if frame.line >= hit.line - TRACE]
        if rank := self.text.rank(hit.line):
            above = [frame for frame in above if self.text.rank(frame.line) in (rank, "")]
        below = [frame for frame in frames[index : index + AFTER] if frame.line <= hit.line + AFTER]
        return self._part_of(self._last_trace(above)) or self._part_of_a_second_error(hit) or self._part_of(below)

    def _part_of_a_second_error(self, hit: _Hit) -> _Part | None:
        """Find the phase by an error raised while handling this one, if only one phase does so in these functions."""
        for line in range(hit.line + 1, min(hit.line + NEAR, len(self.text.lines))):
            if "During handling of the above exception" in self.text.lines[line]:
                start = bisect_left(self._frame_starts, self.text.starts[line])
                names = {frame.name for frame in self.text.frames[start : start + AFTER] if frame.line <= line + AFTER}
                raised = (part for part, functions in self._own.raised_again.items() if functions & names)
                return next((_Part(part, line) for part in raised), None)
        return None

    def _last_trace(self, frames: list[Frame]) -> list[Frame]:
        """Frames since the last traceback's first line."""
        if not frames:
            return []
        for line in range(frames[-1].line, max(frames[0].line, frames[-1].line - TRACE) - 1, -1):
            if "Traceback (most recent call last)" in self.text.lines[line]:
                return [frame for frame in frames if frame.line >= line]
        return frames

    def _part_of(self, frames: list[Frame]) -> _Part | None:
        """First row of the server's table that matches a trace; source lines count only if no frame matches."""
        for with_calls in (False, True):
            for name, functions in self._own.frames:
                for frame in frames:
                    if frame.is_call > with_calls or frame.name not in functions:
                        continue
                    if name != "executing" or "/v1/" in self.text.lines[frame.line]:
                        return _Part(name, frame.line)
        return None

    def _part_by_words(self, hit: _Hit) -> _Part | None:
        """Find the phase by a sentence with the error's name: "crashes in graph capture with OutOfMemoryError"."""
        parts = (_Part(name, hit.line) for name in parts_told(self.text.lines[hit.line]))
        return next((part for part in parts if self._cause_in(part)[0] is not None), None)

    def _part_by_marks(self, hit: _Hit) -> _Part | None:
        """Find the phase by the normal lines before it; for a title, by those of the log below with an error."""
        ready = self.states.span_of(hit.start).ready
        if ready is not None and ready < hit.start:
            return _Part("serving", self.text.line_of(ready))
        marks = [mark for mark in self._marks if mark[0] < hit.start]
        if not marks and not self.text.rank(hit.line) and self._last.ready is None and self._marks:
            last = self._marks[-1][0]
            marks = self._marks if any(start > last for start in self.text.errors) else []
        if not marks or marks[-1][1] == "pool":  # after the pool's size come its allocation, warm-up and capture
            return None
        start, phase = marks[-1]
        name = phase if self.server is None else self._own.last_part.get(phase, phase)
        return _Part(name, self.text.line_of(start))

    def _part_by_size(self, hit: _Hit) -> _Part | None:
        """Find the phase by the allocation size after graph capture: the sampler warm-up's sort has its own."""
        figures = self._figures(hit)
        index = bisect_left(self._frame_starts, hit.start)
        functions = frozenset(frame.name for frame in self.text.frames[max(0, index - TRACE) : index])
        if self.server is None or self._own.of_size is None:
            return None
        name = self._own.of_size(figures.tried_bytes, bool(figures.private_pools_bytes), functions)
        return None if name is None else _Part(name, hit.line)

    # --- other errors

    def _other_errors(self) -> Iterator[_Hit]:
        """Yield unknown exceptions that wrap no other, by topic of their message, else as code, data or settings."""
        for index, line in enumerate(self.text.lines):
            if "rror" in line or "Exception" in line or "[type=" in line:
                error = self._exception(index, line) or self._of_a_worker(index, line) or self._of_a_field(index, line)
                if error is None:
                    continue
                start, message = error
                if self.states.span_of(start).outlived(start) or self.states.is_of_a_request(index):
                    continue
                cause = cause_of(message, self._own.kinds) or self._of_a_checkpoint(index, message)
                yield _Hit(_OTHER, cause or (None if _is_of_memory(message) else "not_memory"), start, index)

    def _of_a_checkpoint(self, index: int, message: str) -> Cause | None:
        """Cause of an error in a function that loads weights: a tensor's shape, or its name."""
        line = self.text.lines[index]
        if "KeyError: " in line and _TENSOR.search(message):
            return "checkpoint_names"
        wording = self.text.lines[index - 1] if index and line.rstrip().endswith("AssertionError") else message
        near = (frame.name for frame in self.text.frames if index - NEAR < frame.line < index and not frame.is_call)
        last = next(iter(reversed(list(near))), "")
        return "checkpoint_shapes" if _LOADER.fullmatch(last) and _SHAPE.search(wording) else None

    def _of_a_field(self, index: int, line: str) -> tuple[int, str] | None:
        """Position and message of a field that pydantic refuses; the line above names it."""
        match = _FIELD.search(line)
        return None if match is None or not index else (self.text.place(index, match.start()), match[0])

    def _exception(self, index: int, line: str) -> tuple[int, str] | None:
        """Position and message of a line's exception, or None if it has none or reports another process's."""
        match = _EXCEPTION.search(line)
        if match is None or re.search(r"\b(?:raise|except)\b", line):
            return None
        name = match["type"] or match["value"]
        if _FIELDS.match(line, match.end()):
            return None  # the lines below it say what is wrong
        start = self.text.place(index, match.start("type" if match["type"] else "value"))
        passed_on = self.text.squeezed[start : start + len(name) + LONGEST_LEAD]
        if _WRAPPING_TYPES.fullmatch(name) or self.text.is_healthy(start):
            return None
        if any(squeezed(words) in passed_on for words in WRAPPERS):
            return None
        return start, line[match.end() :] or " ".join(self.text.lines[index + 1 : index + 2])

    def _of_a_worker(self, index: int, line: str) -> tuple[int, str] | None:
        """Position and message of a worker's exception that its parent quotes."""
        match = _OF_A_WORKER.search(line)
        return None if match is None else (self.text.place(index, match.start(1)), match[1])

    @cached_property
    def _has_a_crash(self) -> bool:
        """True if the log has an error or a crash, after which servers kill their own processes."""
        return re.search(r"Traceback|[Ss]egmentation ?fault|SIGSEGV|Fatal ?Python", self.text.squeezed) is not None

    # --- a person's words

    def _told(self, unresolved: list[_Hit]) -> _Hit | None:
        """What the poster states clearly, without a log or with the trace of an error whose line is not quoted."""
        of_memory, num_lines = unresolved[0].line if unresolved else None, len(self.text.lines)
        for index, line in enumerate(self.text.lines):
            start = self.text.starts[index]
            if MOST_WORDS <= index < num_lines - MOST_WORDS:
                continue
            if len(line) > LONGEST_SENTENCE or self.text.is_healthy(start):
                continue
            if (sent_back := self._sent_back) is not None and tells_of("retraction", line):
                return _Hit(_WORDS, sent_back, start, index, phase="serving")
            if not unresolved and not self._has_a_crash and tells_of("kill", line):
                return _Hit(_WORDS, "host_memory_or_shm", start, index)
            if not unresolved and tells_of("host", line):
                return _Hit(_WORDS, "host_memory_or_shm", start, index)
            if tells_of("kv check", line):
                return _Hit(_WORDS, "kv_too_small_for_max_len", start, index, phase="pool")
            if tells_of("kv dtype", line):
                return _Hit(_WORDS, "kv_dtype_unsupported", start, index, phase="load")
            if of_memory is None and tells_of("memory", line):
                of_memory = index
            for name in parts_told(line) if of_memory is not None else ():
                cause, phase = self._cause_in(_Part(name, index))
                if cause is not None:
                    return _Hit(_WORDS, cause, start, index, phase=phase)
        part = self._part_of(self._last_trace(self.text.frames)) if of_memory is not None and not unresolved else None
        if of_memory is None or part is None:
            return None
        cause, phase = self._cause_in(part)
        return (
            _Hit(_WORDS, cause, self.text.starts[of_memory], of_memory, phase=phase, proof=part.line) if cause else None
        )

    def _line_of_memory(self) -> int | None:
        """Line that says that memory ran out, in a person's words."""
        lines = enumerate(self.text.lines[:MOST_WORDS])
        return next(
            (
                index
                for index, line in lines
                if len(line) <= LONGEST_SENTENCE
                and tells_of("memory", line)
                and not self.text.is_healthy(self.text.starts[index])
            ),
            None,
        )

    # --- the result

    def failure(self) -> Failure:
        failure = self._failure()
        failed = {hit.start for hit in self.hits if hit.wording.fatal and hit.wording.strength != "hint"}
        if failure.outcome in ("failed", "died") and failure.evidence:
            failed.add(self.text.starts[self.text.numbers.index(failure.evidence[0].line)])
        is_logged = any(span.is_logged for span in self.states.spans)
        starts = self.states.starts(failed) if is_logged else ()
        stated = tuple(name for words, name in self._own.settings if compiled(words).search(self.text.squeezed))
        return replace(failure, releases=self._releases(), starts=starts, settings=stated)

    def _releases(self) -> tuple[str, str] | None:
        """Releases that have every matched message, or None if all releases or none do."""
        spans = {hit.wording.releases.split(" ")[0] for hit in self.hits if hit.server == self.server}
        for pattern, span in self._own.of_releases if self.server is not None else ():
            if compiled(pattern).search(self.text.squeezed):
                spans.add(span)
        ends = [(low, high or low) for low, _, high in (span.partition("-") for span in spans) if low[:1].isdigit()]
        if not ends:
            return None
        first, last = max((low for low, _ in ends), key=_number), min((high for _, high in ends), key=_number)
        return (first, last) if _number(first) <= (*_number(last), ANY_PATCH) else None

    def _failure(self) -> Failure:
        hits = [self._resolved(hit) for hit in self.hits if hit.start >= self._last.begin or not self._last.is_up]
        unresolved = sorted((hit for hit in hits if _is_torch(hit.wording) and hit.cause is None), key=_by_start)
        hit = self._decisive(hits, unresolved)
        others = list[_Hit]()
        if hit is None and not unresolved:
            others = [
                other for other in self._other_errors() if other.start >= self._last.begin or not self._last.is_up
            ]
            hit = (
                self._first([other for other in hits if other.wording.strength == "general"])
                or self._first([other for other in others if other.cause is not None])
                or self._first([other for other in hits if other.wording.strength == "hint"])
            )
        is_whole = self._last.whole and self._last.is_up
        if hit is None and not is_whole and (stated := self._told(unresolved)) is not None:
            # For an error whose line has the numbers, a sentence may supply the phase of start-up.
            hit = (
                replace(unresolved[0], cause=stated.cause, phase=stated.phase, proof=stated.line)
                if unresolved
                else stated
            )
        if hit is not None:
            return self._answer(hit, [other for other in hits if other.cause == hit.cause or _echoes(other, hit)])
        return self._unanswered(unresolved, self._first(others))

    def _decisive(self, hits: list[_Hit], unresolved: list[_Hit]) -> _Hit | None:
        """Return the first decisive message, or None if memory ran out above it in an unknown phase of start-up."""
        decisive = [hit for hit in hits if hit.cause is not None and hit.wording.strength == "decisive"]
        hit = self._first([other for other in decisive if other.wording.fatal]) or self._first(decisive)
        if hit is not None and unresolved and hit.cause not in MEMORY_CAUSES and hit.start > unresolved[0].start:
            return None
        return hit

    def _first(self, hits: list[_Hit]) -> _Hit | None:
        """Return the first hit of the last attempt that has one."""
        if not hits:
            return None
        ordered = sorted(hits, key=_by_start)
        begin = self.states.span_of(ordered[-1].start).begin
        return next(hit for hit in ordered if hit.start >= begin)

    def _answer(self, hit: _Hit, same: list[_Hit]) -> Failure:
        lines = dict.fromkeys([hit.line, *([] if hit.proof is None else [hit.proof]), *self._lines_of_details(hit)])
        ranks = dict.fromkeys(rank for other in same if (rank := self.text.rank(other.line)))
        ready = self.states.span_of(hit.start).ready
        outcome: Outcome = "failed"
        if hit.wording.waits:
            outcome = "cut" if ready is None else "started"
        elif not hit.wording.fatal:
            outcome = "started"
        elif hit.phase == "serving" or (ready is not None and ready < hit.start):
            outcome = "died"
        return Failure(
            self.server, self._version, outcome, hit.cause,
            hit.cause is None or hit.cause in MEMORY_CAUSES, hit.phase,
            tuple(self.text.evidence(line) for line in sorted(lines)), self._figures_of(hit, same), tuple(ranks), (),
            self.log,
        )  # fmt: skip

    def _lines_of_details(self, hit: _Hit) -> Iterator[int]:
        """The first line near an obstacle's message that states its details, if the message's own does not; the source
        line of a bare assertion.
        """
        if hit.wording is _OTHER and _FIELD.search(self.text.lines[hit.line]):
            yield hit.line - 1
        if hit.wording is _OTHER and self.text.lines[hit.line].rstrip().endswith("AssertionError"):
            above = range(max(0, hit.line - 2), hit.line)
            yield from [line for line in above if " assert " in self.text.lines[line]][-1:]
        obstacle = OF_CAUSE.get(hit.cause or "")
        if obstacle is not None and not obstacle.details_in(self.text.lines[hit.line]):
            near = range(max(0, hit.line - 2), min(len(self.text.lines), hit.line + NEAR))
            yield from [line for line in near if obstacle.details_in(self.text.lines[line])][:1]

    def _unanswered(self, unresolved: list[_Hit], unclear: _Hit | None) -> Failure:
        nothing = Failure(self.server, self._version, "unknown", None, None, None, (), Figures(), (), (), self.log)
        if unresolved:
            hit = unresolved[0]
            evidence = (self.text.evidence(hit.line),)
            needs = (NEEDS_TRACE, NEEDS_START) if hit.phase is None else ()
            return replace(
                nothing, outcome="failed", memory_question=True, phase=hit.phase, evidence=evidence,
                figures=self._figures(hit), needs=needs,
            )  # fmt: skip
        last = self._last
        if last.dead is not None:
            evidence = (self.text.evidence(self.text.line_of(last.dead)),)
            outcome: Outcome = "failed" if last.ready is None else "died"
            phase = self.states.phase_in(last)
            if unclear is not None:
                return replace(nothing, outcome=outcome, phase=phase, evidence=(self.text.evidence(unclear.line),))
            lacking = [NEEDS_BELOW if self._ends_in_traceback else NEEDS_ABOVE]
            if "died unexpectedly" in evidence[0].text:
                lacking = [NEEDS_WORKER, NEEDS_END]
            return replace(nothing, outcome=outcome, phase=phase, evidence=evidence, needs=tuple(lacking))
        (start,) = self.states.starts(())[-1:]
        if start.end in ("running", "stopped", "finished"):
            is_early = start.end == "stopped" and start.phase != "serving" and start.order not in BY_HAND
            return replace(nothing, outcome=OUTCOMES[start.end], needs=(NEEDS_SENDER,) if is_early else ())
        if (line := self._line_of_memory()) is not None:
            evidence = (self.text.evidence(line),)
            return replace(nothing, memory_question=True, evidence=evidence, needs=(NEEDS_TRACE, NEEDS_START))
        if last.is_logged:
            locks = tuple(self.text.evidence(self.text.line_of(place)) for place in self._positions(LOCKS)[-1:])
            end = NEEDS_LOCK if locks else NEEDS_END
            return replace(nothing, outcome="cut", phase=start.phase, evidence=locks, needs=(end,))
        return replace(nothing, needs=(NEEDS_LOG,))

    @property
    def _ends_in_traceback(self) -> bool:
        """Whether the last lines are a function of a traceback, which its error's own line would follow."""
        lines = [line for line in self.text.lines if line.strip()]
        return any(FRAME.search(line) for line in lines[-1:]) or (
            len(lines) > 1 and FRAME.search(lines[-2]) is not None and "Error" not in lines[-1]
        )

    @property
    def _version(self) -> str | None:
        return None if self.log is None else self.log.text("version")

    def _figures_of(self, hit: _Hit, same: list[_Hit]) -> Figures:
        """Numbers in the message, or in the next one for the same cause, because a trace ends in the message."""
        figures = self._figures(hit)
        following = sorted((other for other in same if 0 < other.line - hit.line <= NEAR), key=_by_start)
        return self._figures(following[0]) if figures == Figures() and following else figures

    def _figures(self, hit: _Hit) -> Figures:
        """Numbers in the message around its phrase."""
        around, values = self._around(hit.start), dict[str, Any]()
        for pattern in hit.wording.figures:
            match = compiled(pattern).search(around)
            for name, written in (match.groupdict() if match else {}).items():
                if name in NAMES and name not in values:
                    values[name] = figure(name, written)
        return Figures(**values)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _is_of_memory(message: str) -> bool:
    """True if a message may say that memory is short."""
    return _MAYBE_MEMORY.search(message.partition(". ")[0]) is not None and _SHORT.search(message) is not None


def _is_torch(wording: Wording) -> bool:
    return wording in OUT_OF_MEMORY


def _echoes(other: _Hit, hit: _Hit) -> bool:
    """True if another rank's error is the same one, and the log does not show where it occurred."""
    return _is_torch(other.wording) and other.cause is None and _is_torch(hit.wording)


def _by_start(hit: _Hit) -> int:
    return hit.start


__all__ = ["Evidence", "Failure", "Figures", "Outcome", "Size", "read_failure"]
