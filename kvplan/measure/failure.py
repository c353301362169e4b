"""A server's log -> what happened: whether it started, failed or died, why, and the figures that say so.

A wrong cause is worse than none: what the text does not show is asked for (`needs`), never guessed. The words are the
servers' own (kvplan/servers/*/failures.py); here is how a log is read: its lines without what collectors put before
them, what is decisive and what only repeats it, and the part of start-up that an out-of-memory error belongs to.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.measure.serverlog.log import ServerLog, parse_log, rank_of
from kvplan.measure.serverlog.text import unwrapped
from kvplan.servers.failures import (
    LEAD,
    MEMORY_CAUSES,
    NAMES,
    OUT_OF_MEMORY,
    REACH,
    SYSTEM,
    Cause,
    Figures,
    Phase,
    Wording,
    compiled,
    figure,
    squeezed,
)
from kvplan.servers.sglang import failures as sglang
from kvplan.servers.vllm import failures as vllm

Outcome = Literal["started", "failed", "died", "unknown"]
ServerName = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows the cause; its number counts from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What a log shows of how a server came to its end.

    cause            None where the text does not show it
    memory_question  whether memory and the flags that divide it have to do with it; None: it cannot be told
    phase            the part of start-up, or serving, in which it happened
    ranks            the workers that wrote a line of the cause, as their prefixes name them
    needs            what is missing where the cause cannot be told
    log              what the start-up lines say: model, arguments, weights, GPU; None where there is none
    """

    server: ServerName | None
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


MOST_HITS: Final = 200  # of one wording that are looked at
MOST_LINES: Final = 400_000
MOST_CHARACTERS: Final = 4_000  # of a line

NEEDS_TRACE: Final = "the traceback above the out-of-memory line: it names the part of start-up"
NEEDS_START: Final = "the log from the server's first line on"
NEEDS_ABOVE: Final = "the lines above: the last ones only repeat that a worker failed"
NEEDS_LOG: Final = "the server's log, not a description of it"


def read_failure(lines: Iterable[str]) -> Failure:
    """What happened to the server that wrote these lines."""
    text = _Text(lines)
    log = _start_up(text.raw)
    return _Reading(text, log).failure()


def _start_up(lines: list[str]) -> ServerLog | None:
    try:
        return parse_log("\n".join(lines))
    except KvplanError:
        return None


# --- the text ---------------------------------------------------------------------------------------------------------

_ANSI: Final = re.compile(r"(?:\x1b|\^\[|\\033|\\x1b|\\u001b)\[[0-9;?]{0,40}[A-Za-z]|\x1b|\[[0-9;]{1,8}m")
# What stands before a message: quotes, the container's name, time stamps, processes, the logger.
_PREFIX: Final = re.compile(
    r"\s{0,80}(?:"
    r">|\|(?=\s)|"
    r"[A-Za-z0-9_./-]{1,80}\s{1,20}\|(?=\s|$)|"
    r"\[?[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}[T ][0-9:]{8}(?:[.,][0-9]{1,9})?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
    r"(?: [A-Z]{2,5}[0-9]{1,4}){0,5}\]?|"
    r"\((?:[A-Za-z_][A-Za-z0-9_]{0,60} )?(?:pid|rank|ip|TP[0-9]{1,3}|[A-Za-z0-9_]{1,30} pid)\b[^()]{0,120}\)|"
    r"\[(?:pod/|rank)[^\]]{0,160}\]:?|"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [0-9]{2}-[0-9]{2} [0-9:]{8} "
    r"(?:\[[^\]\s]{1,120}\]|[\w./]{1,100}:[0-9]{1,6}\])|"
    r"[A-Z][0-9]{4} [0-9:.]{8,20} [0-9]{1,9} [^\]]{1,160}\](?: \[[0-9/]{1,12}\])?"
    r")\s{0,2}"
)
_LEVEL: Final = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b(?: [0-9]{2}-[0-9]{2} [0-9:]{8}|:? {1,9}|\])")
_FRAME: Final = re.compile(r"line [0-9]{1,6}, in [*<]{0,2}([A-Za-z_]\w{0,80})|[.\s]([a-z_]{0,40}_[a-z_]{1,60})\(")
_MOST_PREFIXES: Final = 6
_HEALTHY: Final = frozenset({"DEBUG", "INFO", "WARNING"})


@dataclass(frozen=True, slots=True)
class _Frame:
    name: str
    at: int  # in the squeezed text
    line: int
    is_call: bool  # a line of source, not "in NAME"


class _Text:
    """A log's lines, and the same as one text without white space, in which messages are looked for.

    raw       the lines without a collector's wrapping and colors
    numbers   the line of the input each came from
    squeezed  all messages without white space and prefixes, one after the other
    starts    where each line starts in it
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.raw: list[str] = []
        self.numbers: list[int] = []
        for number, line in enumerate(lines, 1):
            if number > MOST_LINES:
                break
            for part in unwrapped(line) or [""]:
                self.raw.append(_ANSI.sub("", part[:MOST_CHARACTERS]))
                self.numbers.append(number)
        self.starts: list[int] = []
        self.frames: list[_Frame] = []
        self._levels: list[tuple[int, str]] = []
        parts, end = list[str](), 0
        for index, line in enumerate(self.raw):
            self.starts.append(end)
            body = line[_prefix_end(line) :]
            offset = len(line) - len(body)
            self._levels += [(end + _squeezed_len(line, offset, m.start()), m[1]) for m in _LEVEL.finditer(line)]
            for match in _FRAME.finditer(line):
                at = end + _squeezed_len(line, offset, match.start())
                self.frames.append(_Frame(match[1] or match[2], at, index, match[1] is None))
            parts.append(squeezed(body))
            end += len(parts[-1])
        self.squeezed = "".join(parts)

    def line_of(self, at: int) -> int:
        return bisect_right(self.starts, at) - 1

    def level(self, at: int) -> str:
        """The level that the logger wrote before a message on its own line; "" for none."""
        index = bisect_right(self._levels, (at, "~")) - 1
        if index < 0 or self._levels[index][0] < self.starts[self.line_of(at)]:
            return ""
        return self._levels[index][1]

    def rank(self, line: int) -> str:
        return rank_of(self.raw[line][:300])

    def evidence(self, line: int) -> Evidence:
        return Evidence(self.numbers[line], printable(self.raw[line].strip(), 600))


def _prefix_end(line: str) -> int:
    end = 0
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line, end)
        if match is None:
            break
        end = match.end()
    return end


def _squeezed_len(line: str, start: int, end: int) -> int:
    return len(squeezed(line[start:end])) if end > start else 0


# --- what the text says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hit:
    """A message of a table, and the cause it stands for here."""

    cause: Cause | None
    wording: Wording
    at: int
    line: int
    server: ServerName | None
    phase: Phase | None = None
    proof: int | None = None  # the line that shows the phase


_SERVERS: Final = (("vllm", vllm), ("sglang", sglang))
# The part of start-up in which torch runs out of memory -> the cause.
_BY_PHASE: Final[dict[str, dict[Phase, Cause]]] = {
    "vllm": {
        "load": "oom_loading_weights",
        "profile": "oom_profile_run",
        "capture": "oom_cuda_graph_capture",
        "serving": "oom_runtime",
    },
    "sglang": {
        "load": "oom_loading_weights",
        "capture": "sglang_cuda_graph_failed",
        "serving": "oom_runtime",
    },
}
_PHASE_OF: Final[dict[str, Phase]] = {
    "oom_sampler_warmup": "warmup",
    "lora_memory": "load",
    "sglang_oom_prefill": "serving",
}
TRACE: Final = 400  # lines of a traceback above its last line that are looked at
AFTER: Final = 120  # and below it: the processes that wait for a worker repeat where it was

_WRAPPERS: Final = tuple(
    squeezed(words)
    for words in (
        "Engine core initialization failed", "WorkerProc initialization failed", "Engine process failed to start",
        "Worker failed with error", "EngineCore encountered an issue", "Background loop has errored already",
        "Engine loop is not running", "Engine loop has died", "EngineCore failed to start",
        "WorkerProc hit an exception",
        "Scheduler hit an exception", "Initialization failed", "Rank 0 scheduler is dead", "died unexpectedly",
        "Engine background task failed", "failed core proc", "cancelled", "Background task has errored",
    )
)  # fmt: skip
_WRAPPING_TYPES: Final = re.compile(
    r"(?:Engine\w*|AsyncEngine\w*|MQEngine\w*|RayTask|RayActor|ActorDied|ActorUnavailable|Cancelled|EOF|BrokenPipe|"
    r"ConnectionReset|ConnectionRefused|ClientConnector|CalledProcess|ChildFailed|ConnectTimeout|ReadTimeout|"
    r"RemoteDisconnected|ServerDisconnected|Connection|NewConnection|MaxRetry|OutOfMemory|HTTP|APIConnection|"
    r"InternalServer|ProcessRaised|KeyboardInterrupt)(?:Error|Exception)?"
)
_EXCEPTION: Final = re.compile(
    r"(?:^|[\s`(\"'>:\]])((?:[A-Za-z_]\w{0,60}\.){0,8})([A-Z]\w{0,80}(?:Error|Exception))(?:: (?=\S)|:?[\s`]{0,4}$)"
)


class _Reading:
    """One log on its way to a Failure."""

    def __init__(self, text: _Text, log: ServerLog | None) -> None:
        self.text = text
        self.log = log
        self.hits = list(self._table_hits())
        self.server = self._server()
        self.starts = self._positions([phrase for _, table in _SERVERS for phrase in table.STARTS])
        self.ready = self._ready()

    # --- messages

    def _table_hits(self) -> Iterator[_Hit]:
        for name, wordings in (
            ("vllm", vllm.WORDINGS), ("sglang", sglang.WORDINGS), (None, OUT_OF_MEMORY), (None, SYSTEM)
        ):  # fmt: skip
            for wording in wordings:
                if wording.anywhere and not compiled(wording.anywhere).search(self.text.squeezed):
                    continue
                for at in self._positions([wording.phrase]):
                    if self._applies(wording, at):
                        yield _Hit(wording.cause, wording, at, self.text.line_of(at), name, wording.phase)  # type: ignore[arg-type]

    def _positions(self, phrases: Iterable[str]) -> list[int]:
        found = list[int]()
        for phrase in phrases:
            plain = squeezed(phrase)
            at = self.text.squeezed.find(plain)
            while at >= 0 and len(found) < MOST_HITS:
                found.append(at)
                at = self.text.squeezed.find(plain, at + len(plain))
        return sorted(found)

    def _applies(self, wording: Wording, at: int) -> bool:
        if wording.strength == "decisive" and wording.fatal and self.text.level(at) in _HEALTHY:
            return False
        around = self.text.squeezed[max(0, at - LEAD) : at + REACH]
        if wording.unless and compiled(wording.unless).search(around):
            return False
        return not wording.needs or compiled(wording.needs).search(around) is not None

    def _server(self) -> ServerName | None:
        named = {hit.server for hit in self.hits if hit.server is not None and hit.wording.strength == "decisive"}
        if len(named) == 1:
            return named.pop()
        plain = self.text.squeezed.lower()
        if "sglang/srt" in plain or "sglang.launch_server" in plain:
            return "sglang"
        counts = {name: plain.count(name) for name in ("vllm", "sglang")}
        if any(counts.values()):
            return "sglang" if counts["sglang"] > counts["vllm"] else "vllm"
        if self._positions([phrase for phrase, _ in sglang.MARKS]):
            return "sglang"
        return None if self.log is None else self.log.engine

    def _ready(self) -> list[int]:
        table = sglang if self.server == "sglang" else vllm
        return self._positions(table.READY)

    # --- out of memory: which part of start-up

    def _resolved(self, hit: _Hit) -> _Hit:
        """An out-of-memory message with its cause, where the text shows the part of start-up."""
        server = self.server or "vllm"
        part = self._part_by_frames(hit) or self._part_by_words(hit) or self._part_by_marks(hit)
        if part is None:
            return hit
        name, line = part
        cause = _BY_PHASE[server].get(name, None)  # type: ignore[call-overload]
        phase = _PHASE_OF.get(name, name)
        if name in _PHASE_OF:
            cause = name
        return _Hit(cause, hit.wording, hit.at, hit.line, hit.server, phase, line)  # type: ignore[arg-type]

    def _part_by_frames(self, hit: _Hit) -> tuple[str, int] | None:
        frames, positions = self.text.frames, [frame.at for frame in self.text.frames]
        index = bisect_left(positions, hit.at)
        rank = self.text.rank(hit.line)
        before = [frame for frame in frames[max(0, index - TRACE) : index] if frame.line >= hit.line - TRACE]
        same = [frame for frame in before if not rank or self.text.rank(frame.line) in (rank, "")]
        after = [frame for frame in frames[index : index + AFTER] if frame.line <= hit.line + AFTER]
        for group in (self._last_trace(same), after):
            for calls in (False, True):
                part = self._part_of([frame for frame in group if frame.is_call <= calls])
                if part is not None:
                    return part
        return None

    def _last_trace(self, frames: list[_Frame]) -> list[_Frame]:
        """The frames since the last traceback's first line."""
        if not frames:
            return []
        last = frames[-1].line
        for line in range(last, max(frames[0].line - 1, last - TRACE), -1):
            if "Traceback (most recent call last)" in self.text.raw[line]:
                return [frame for frame in frames if frame.line >= line]
        return frames

    def _part_of(self, frames: list[_Frame]) -> tuple[str, int] | None:
        table = sglang if self.server == "sglang" else vllm
        for part, names in table.FRAMES:
            for frame in frames:
                if frame.name in names:
                    return part, frame.line
        return None

    def _part_by_words(self, hit: _Hit) -> tuple[str, int] | None:
        """What a sentence says that has the error's name in it: "crashes during graph capture with OutOfMemoryError"."""
        return next(((part, hit.line) for part in _told(self.text.raw[hit.line], self.server)), None)

    def _part_by_marks(self, hit: _Hit) -> tuple[str, int] | None:
        table = sglang if self.server == "sglang" else vllm
        if any(at < hit.at for at in self.ready):
            return "serving", self.text.line_of(max(at for at in self.ready if at < hit.at))
        marks = [(at, part) for phrase, part in table.MARKS for at in self._positions([phrase]) if at < hit.at]
        if not marks:
            return None
        at, part = max(marks)
        if part == "warmup" and self.server == "vllm":
            return "oom_sampler_warmup", self.text.line_of(at)
        return (part, self.text.line_of(at)) if part != "pool" else None

    # --- other errors

    def _other_errors(self) -> Iterator[_Hit]:
        """Exceptions that are in no table and only pass nothing on: an error of code, data or settings."""
        for index, line in enumerate(self.text.raw):
            if "Error" not in line and "Exception" not in line:
                continue
            match = _EXCEPTION.search(line)
            if match is None or _WRAPPING_TYPES.fullmatch(match[2]) or re.search(r"\b(?:raise|except)\b", line):
                continue
            at = self.text.starts[index] + _squeezed_len(line, _prefix_end(line), match.start(2))
            rest = self.text.squeezed[at : at + 240]
            if any(words in rest for words in _WRAPPERS) or self.text.level(at) in _HEALTHY:
                continue
            if re.search(r"(?i)out ?of ?memory|\boom\b|notenough|insufficient", rest):
                continue
            yield _Hit("not_memory", _OTHER, at, index, None)

    # --- words of a person

    def _told_in_words(self, hits: list[_Hit]) -> _Hit | None:
        """What a sentence of the poster says beyond doubt."""
        server = self.server or "vllm"
        for index, line in enumerate(self.text.raw):
            at = self.text.starts[index]
            if self.text.level(at) in _HEALTHY:
                continue
            if server == "sglang" and re.search(r"\bretract(?:s|ed|ion|ions|ing)?\b", line):
                return _Hit("sglang_oom_decode_retract", _WORDS, at, index, None, "serving")
            if len(line) < 600 and _KV_DTYPE.search(line) and line.count(" --") <= 1:
                return _Hit("kv_dtype_unsupported", _WORDS, at, index, None, "load")
            if not _OOM_WORDS.search(line) and not hits:
                continue
            for part in _told(line, self.server):
                cause = part if part in _PHASE_OF else _BY_PHASE[server].get(part)  # type: ignore[call-overload]
                if cause is not None:
                    return _Hit(cause, _WORDS, at, index, None, _PHASE_OF.get(part, part))  # type: ignore[arg-type]
        return None

    # --- the answer

    def failure(self) -> Failure:
        resolved = [self._resolved(hit) if hit.wording in OUT_OF_MEMORY else hit for hit in self.hits]
        decisive = [hit for hit in resolved if hit.cause is not None and hit.wording.strength == "decisive"]
        unresolved = [hit for hit in resolved if hit.wording in OUT_OF_MEMORY and hit.cause is None]
        hit = self._first(decisive)
        if hit is not None and unresolved and hit.cause not in MEMORY_CAUSES and hit.at > min(o.at for o in unresolved):
            hit = None  # the first error is one of memory, whatever came of it
        if hit is None and not unresolved:
            hit = self._first([hit for hit in resolved if hit.wording.strength == "hint"])
            if hit is None:
                hit = self._first(list(self._other_errors()))
        if hit is None:
            hit = self._told_in_words(resolved)
        if hit is not None:
            return self._answer(hit, [other for other in decisive if other.cause == hit.cause])
        return self._unanswered(sorted(unresolved, key=lambda one: one.at))

    def _first(self, hits: list[_Hit]) -> _Hit | None:
        """The first of the last start that has one."""
        if not hits:
            return None
        ordered = sorted(hits, key=lambda hit: hit.at)
        starts = [start for start in self.starts if start <= ordered[-1].at]
        return next(hit for hit in ordered if not starts or hit.at >= starts[-1])

    def _answer(self, hit: _Hit, same: list[_Hit]) -> Failure:
        lines = [hit.line, *([] if hit.proof is None else [hit.proof])]
        ranks = dict.fromkeys(rank for other in same if (rank := self.text.rank(other.line)))
        is_serving = hit.phase == "serving"
        is_ready = any(at < hit.at for at in self.ready)
        outcome: Outcome = "died" if is_serving or is_ready else "failed"
        if not hit.wording.fatal:
            outcome = "started"
        return Failure(
            self.server, self._version(), outcome, hit.cause,
            True if hit.cause is None else hit.cause in MEMORY_CAUSES, hit.phase,
            tuple(self.text.evidence(line) for line in sorted(lines)), self._figures(hit), tuple(ranks), (), self.log,
        )  # fmt: skip

    def _unanswered(self, unresolved: list[_Hit]) -> Failure:
        if unresolved:
            hit = unresolved[0]
            return Failure(
                self.server, self._version(), "failed", None, True, hit.phase, (self.text.evidence(hit.line),),
                self._figures(hit), (), (NEEDS_TRACE, NEEDS_START), self.log,
            )  # fmt: skip
        wrapped = [at for words in _WRAPPERS[:9] for at in self._positions([words])]
        if wrapped:
            line = self.text.line_of(min(wrapped))
            return Failure(
                self.server, self._version(), "failed", None, None, None, (self.text.evidence(line),), Figures(), (),
                (NEEDS_ABOVE,), self.log,
            )  # fmt: skip
        outcome: Outcome = "started" if self.ready else "unknown"
        needs = () if self.ready else ((NEEDS_START,) if self.log else (NEEDS_LOG,))
        return Failure(self.server, self._version(), outcome, None, None, None, (), Figures(), (), needs, self.log)

    def _version(self) -> str | None:
        return self.log.text("version") if self.log else None

    def _figures(self, hit: _Hit) -> Figures:
        """What the message states around its phrase."""
        around = self.text.squeezed[max(0, hit.at - LEAD) : hit.at + REACH]
        values: dict[str, Any] = {}
        for pattern in hit.wording.figures:
            match = compiled(pattern).search(around)
            for name, written in (match.groupdict() if match else {}).items():
                if name in NAMES and name not in values:
                    values[name] = figure(name, written)
        return Figures(**values)


_OTHER: Final = Wording("not_memory", "", "any", "Python")
_WORDS: Final = Wording(None, "", "any", "the poster")
_OOM_WORDS: Final = re.compile(
    r"(?i)\boom(?:s|ed|ing)?\b|out[- ]of[- ]?memory|insufficient (?:free )?memory|OutOfMemory"
)
_GRAPH_WORDS: Final = re.compile(
    r"(?i)(?:during|at|in|by|while|when|phase|large|caus\w{1,3})\b.{0,30}"
    r"(?:cuda[- ]?graphs? captur|captur\w{1,4} (?:the |of )?(?:cuda|model)|graph[- ]captur)"
)
_EAGER_WORDS: Final = re.compile(
    r"(?i)\bworks? (?:fine )?(?:with|when|if|using)\b.{0,40}(?:enforce[-_ ]eager|eager mode)"
)
_KV_DTYPE: Final = re.compile(
    r"(?i)(?:not supported?|unsupported|n't support|crash\w{0,3}|fails?)\b.{0,60}kv[-_ ]cache[-_ ]dtype|"
    r"kv[-_ ]cache[-_ ]dtype\b.{0,40}(?:not supported|unsupported|n't supported?|crash|fails)"
)


def _told(line: str, server: ServerName | None) -> Iterator[str]:
    """The part of start-up that a sentence about running out of memory names."""
    if _GRAPH_WORDS.search(line) or _EAGER_WORDS.search(line):
        yield "capture"
    if re.search(r"(?i)sampler[- ]warm|warm\w{0,7}[- ](?:the )?sampler", line):
        yield "oom_sampler_warmup"
    if server == "sglang" and re.search(
        r"(?i)\bprefill(?:ing)?[- ](?:stage |phase )?oom|oom (?:during|in|at) (?:the )?prefill", line
    ):
        yield "sglang_oom_prefill"
