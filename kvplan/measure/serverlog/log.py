"""Parse a server's start-up log: release, model, flags, memory per rank, and the KV pool.

The wordings are data (servers/<name>/log_wordings.py). A log is untrusted: it is read in bounded pieces, only lines
with a known phrase are parsed, and nothing in it is opened or run.
"""

import gzip
import io
import json
import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final

from kvplan.core.errors import InvalidInputError, KvplanError
from kvplan.core.files import open_regular, os_problem, printable
from kvplan.measure.serverlog.command import command_in, flags_of_command, variables_before
from kvplan.servers.base import OWN, logs_of_servers, readers, terms_of
from kvplan.servers.logs.log import LEAD, MODEL_FLAGS, REACH, Reading, ServerLog, Wording, compiled, simulated_notes
from kvplan.servers.logs.text import MAX_LINE, arguments, unwrapped
from kvplan.servers.words.arguments import listed_names
from kvplan.servers.words.environment import variables

Engine = str  # the name of a server

MAX_BYTES: Final = 64 << 20  # of text; of a longer file the first and the last half of this
# Limit on lines with a phrase: real logs have some hundreds, a hundred restarts some ten thousand.
MAX_LINES: Final = 40_000
MAX_LOOKED_AT: Final = 8 << 20
MAX_PHRASES: Final = 60_000  # on those lines: a server's line holds one, rarely two
PIECE: Final = 1 << 20
_MOST_ON_A_LINE: Final = 4  # of one phrase: messages pasted onto one line

POOL_FACTS: Final = frozenset({"num_blocks", "kv_tokens", "max_concurrency"})


@dataclass(frozen=True, slots=True)
class _Phrases:
    """Phrases to search for in a log, of all servers.

    lists        (server, prefix of its list of arguments); asked: those that list the arguments as received
    commands     (server, prefix of its command)
    first_words  what a process logs first; once: phrases, of these and of the lists, that it logs only once
    flags        flags to keep: those an estimate accepts, and those that explain a difference
    in_bytes     all phrases, as text and as JSON has them; in_commands: those of commands
    """

    wordings: tuple[tuple[str, re.Pattern[str], Wording], ...]
    lists: tuple[tuple[str, str], ...]
    asked_for: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]
    first_words: frozenset[str]
    once: frozenset[str]
    flags: frozenset[str]
    in_bytes: tuple[bytes, ...]
    in_commands: frozenset[bytes]


def phrases() -> _Phrases:
    return _phrases(tuple(readers().items()))


@cache
def _phrases(servers: tuple[tuple[str, Callable[[], object]], ...]) -> _Phrases:
    tables = logs_of_servers()
    wordings = [wording for table in tables.values() for wording in table.wordings]
    lists = [(name, opening) for name, table in tables.items() for opening in table.lists]
    commands = [(name, phrase) for name, table in tables.items() for phrase in table.commands]
    list_names = [name for table in tables.values() for name in table.list_names]
    plain = dict.fromkeys([*(wording.phrase for wording in wordings), *(text for _, text in (*lists, *commands))])
    in_json = (json.dumps(text)[1:-1] for text in plain)  # a collector may escape other characters
    return _Phrases(
        wordings=tuple((wording.phrase, compiled(wording), wording) for wording in wordings),
        lists=tuple(lists),
        asked_for=tuple((name, opening) for name, opening in lists if opening not in tables[name].resolved),
        commands=tuple(commands),
        first_words=frozenset(text for table in tables.values() for text in table.first_words),
        once=frozenset(text for table in tables.values() for text in table.once),
        flags=frozenset(
            [*MODEL_FLAGS, *(own for name in tables for own in listed_names(name)), *variables(), *list_names]
        ),
        in_bytes=tuple(text.encode() for text in dict.fromkeys([*plain, *in_json])),
        in_commands=frozenset(phrase.encode() for _, phrase in commands),
    )


_ANSI: Final = re.compile(r"\x1b\[[0-9;?]{0,40}[A-Za-z]|\[[0-9;]{1,8}m|\x1b")
# A worker, by the prefix of its line: "(Worker_TP1_EP1 pid=5)", "(VllmWorker rank=1 pid=5)", "(VllmWorker TP0 pid=5)",
# "(RayWorkerWrapper pid=5, ip=10.0.0.1)"; "[2025-04-23 16:14:47 DP0 TP1]", "[gpu=7]", "[gpu_id=7]".
_WORKER: Final = re.compile(
    r"\((?:Vllm|Ray)?Worker(?:Process|Wrapper|Proc)?(?:_([A-Z][A-Z0-9_]{1,40}))? ([^()]{3,80})\)"
)
_CORE: Final = re.compile(r"\(EngineCore_(DP[0-9]{1,4}) ")
_RANK: Final = re.compile(r"\[(rank [0-9]{1,4})\]")  # of the bundled engine
_BRACKET: Final = re.compile(
    r"\[(?:[0-9-]{10} [0-9:]{8} ([A-Z]{2,5}[0-9]{1,4}(?: [A-Z]{2,5}[0-9]{1,4}){0,4})|gpu(?:_id)?=([0-9]{1,4}))\]"
)


def rank_of(prefix: str) -> str:
    """Rank of a line, from its prefix; the last one named counts."""
    for pattern in (_WORKER, _BRACKET, _CORE, _RANK):
        matches = list(pattern.finditer(prefix[-600:]))
        if matches and pattern is _WORKER:
            named, rank_words = matches[-1][1], matches[-1][2]
            if named:
                return str(named)
            rank = re.search(r"\b(?:rank=([0-9]{1,4})|([A-Z]{2,4}[0-9]{1,4}))\b", rank_words)
            if rank:
                return f"rank {rank[1]}" if rank[1] else str(rank[2])
            return printable(", ".join(part.strip().replace("=", " ") for part in rank_words.split(",")), 60)
        if matches and pattern is _BRACKET:
            return matches[-1][1] or f"gpu {matches[-1][2]}"
        if matches:
            return str(matches[-1][1])
    return ""


def read_log(source: str) -> ServerLog:
    """Read the last start in a log file, gzipped or not; `-` is standard input.

    Raises InvalidInputError if it is not text, not a server's log, or too long, and EnvironmentProblem if the file
    cannot be read.
    """
    if source == "-":
        stream = getattr(sys.stdin, "buffer", None)
        if stream is None:
            raise InvalidInputError("--log -", "standard input is closed", "name a file")
        reader = _Reader("standard input")
        _take_stream(reader, stream)
        return reader.result()
    path = Path(source)
    reader = _Reader(printable(source, 400))
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_BYTES or _is_gzip(file):
                _take_stream(reader, file)
            else:
                reader.take(file.read, MAX_BYTES // 2)
                file.seek(size - MAX_BYTES // 2)
                reader.skipped = f"{size:,} bytes: only the first and the last {MAX_BYTES // 2 >> 20} MiB are read"
                reader.take(file.read)
        except OSError as error:
            raise os_problem(path, error) from error
    return reader.result()


def read_text(source: str) -> str:
    """Text of a log file, gzipped or not, or of standard input for `-`; only the first and last parts of a long one.
    Raises the same errors as read_log.
    """
    if source == "-":
        stream = getattr(sys.stdin, "buffer", None)
        if stream is None:
            raise InvalidInputError("LOG -", "standard input is closed", "name a file")
        return _text_of("standard input", stream)
    path = Path(source)
    with open_regular(path) as file:
        try:
            return _text_of(printable(source, 400), file)
        except OSError as error:
            raise os_problem(path, error) from error


def _text_of(where: str, stream: BinaryIO) -> str:
    begun = _Begun(stream)
    unpacked: io.RawIOBase | gzip.GzipFile = begun if begun.head != GZIP else gzip.GzipFile(fileobj=begun)
    head, tail = bytearray(), bytearray()
    try:
        while piece := unpacked.read(PIECE):
            if not head:
                _check_text(where, piece)
            if len(head) < MAX_BYTES // 2:
                head += piece
            else:
                tail = (tail + piece)[-MAX_BYTES // 2 :]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInputError(where, f"damaged gzip file ({error})", "fetch it again") from error
    return bytes(head + tail).replace(b"\0", b"").decode("utf-8", "replace")


_HOLE: Final = re.compile(rb"\0{16,}")  # what a log holds where it was truncated under its writer


def _check_text(where: str, piece: bytes) -> None:
    if piece.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InvalidInputError(where, "UTF-16 text, not UTF-8", "save it as UTF-8")
    if b"\0" in _HOLE.sub(b"", piece)[: 4 << 10]:
        raise InvalidInputError(where, "not text, contains a NUL", "name the server's log")


GZIP: Final = b"\x1f\x8b"


def _is_gzip(file: BinaryIO) -> bool:
    """True if a file begins as a gzip file does; leaves it at the start."""
    head = file.read(len(GZIP))
    file.seek(0)
    return head == GZIP


def _take_stream(reader: "_Reader", stream: BinaryIO) -> None:
    """Read a stream to its end, unpacked if it begins as a gzip file does; it need not be seekable."""
    begun = _Begun(stream)
    if begun.head != GZIP:
        reader.take(begun.read)
        return
    try:
        with gzip.GzipFile(fileobj=begun) as unpacked:
            reader.take(unpacked.read)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInputError(reader.where, f"damaged gzip file ({error})", "fetch it again") from error


class _Begun(io.RawIOBase):
    """A stream whose first two bytes have been read ahead."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self.head = self._left = stream.read(len(GZIP))

    def read(self, size: int = -1) -> bytes:
        left, self._left = self._left, b""
        return left + self._stream.read(size if size < 0 else max(0, size - len(left)))


def parse_log(text: str, where: str = "log", *, bare: bool = False) -> ServerLog:
    """Parse the last start in a log's text; `bare`: also accept text without a start-up line, such as a command."""
    data, offset = text.encode("utf-8", "surrogatepass"), 0
    reader = _Reader(where)

    def read(size: int) -> bytes:
        nonlocal offset
        offset += size
        return data[offset - size : offset]

    reader.take(read)
    return reader.result(bare=bare)


class _Reader:
    """Takes a log piece by piece and keeps what its last start says."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.skipped: str | None = None
        self._starts = 1
        self._first_line = 1
        self._known: set[str] = set()
        self._spans: dict[Engine, set[str]] = defaultdict(set)
        self._said: set[tuple[str, str]] = set()
        self._readings: list[Reading] = []
        self._lists: dict[tuple[Engine, str], str] = {}
        self._command: tuple[Engine, str, int] | None = None  # with its line number; precedes its start
        self._variables: dict[str, str] = {}  # variables of that command with an effect
        self._phrases = phrases()
        self._engines: dict[Engine, int] = dict.fromkeys(logs_of_servers(), 0)
        self._line = 1
        self._num_looked_at = self._looked_at = self._num_phrases = 0
        self._is_first_piece = True

    # --- pieces and lines

    def take(self, read: Callable[[int], bytes], most: int | None = None) -> None:
        """Search at most `most` bytes of what `read` returns; None: MAX_BYTES."""
        left, tail = MAX_BYTES if most is None else most, b""
        while left > 0 and (piece := read(min(PIECE, left))):
            left -= len(piece)
            if self._is_first_piece:
                _check_text(self.where, piece)
                self._is_first_piece = False
            piece = tail + piece.replace(b"\0", b"").replace(b"\r\n", b"\n").replace(
                b"\r", b"\n"
            )  # progress bars overwrite their line
            end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) > max(PIECE, MAX_LINE) else 0)
            tail = piece[end:]
            self._look_through(piece[:end])
        self._look_through(tail)
        if left <= 0 and most is None and read(1):
            self.skipped = f"more than {MAX_BYTES >> 20} MiB of text: the rest is not read"

    def _look_through(self, piece: bytes) -> None:
        position = 0
        lines, num_phrases = _lines_of_worth(piece)
        self._num_phrases += num_phrases
        if self._num_phrases > MAX_PHRASES:
            raise InvalidInputError(
                self.where,
                f"holds {self._num_phrases:,} phrases of servers on {self._num_looked_at + len(lines):,} lines",
                "trim it to one start",
            )
        for start, end in sorted(lines):
            self._line += piece.count(b"\n", position, start)
            position = start
            self._num_looked_at += 1
            self._looked_at += end - start
            if self._num_looked_at > MAX_LINES or self._looked_at > MAX_LOOKED_AT:
                raise InvalidInputError(
                    self.where,
                    f"more than {self._num_looked_at - 1:,} lines that could be a server's",
                    "trim it to one start",
                )
            for line in unwrapped(_ANSI.sub("", piece[start:end].decode("utf-8", "replace"))):
                self._look_at(line)
        self._line += piece.count(b"\n", position)

    # --- one line

    def _look_at(self, text: str) -> None:
        matches: list[tuple[int, Wording, dict[str, str]]] = []
        for phrase, pattern, wording in self._phrases.wordings:
            position = text.find(phrase)
            for _ in range(_MOST_ON_A_LINE):
                if position < 0:
                    break
                match = pattern.search(text, max(0, position - LEAD), position + REACH)
                if match:
                    matches.append((match.start(), wording, match.groupdict()))
                position = text.find(phrase, position + len(phrase))
        for position, wording, facts in sorted(matches, key=lambda match: match[0]):
            self._keep(wording, facts, rank_of(text[:position]))
        for engine, opening in self._phrases.lists:
            position = text.find(opening)
            if position >= 0 and not text.endswith("non-default ", 0, position):
                self._begin_where_needed(opening, rank_of(text[:position]))
                self._lists[engine, opening] = text[position + len(opening) : position + MAX_LINE]
        for engine, phrase in self._phrases.commands:
            if phrase in text:
                self._command = (engine, command_in(text, phrase), self._line)
                self._variables = variables_before(text, phrase)

    def _keep(self, wording: Wording, facts: dict[str, str], rank: str) -> None:
        if wording.phrase in self._phrases.first_words:
            self._begin_where_needed(wording.phrase, rank)
        self._engines[wording.engine] += 1
        self._spans[wording.engine].add(wording.versions)
        self._known |= facts.keys()
        self._readings += [Reading(fact, text, rank, self._line) for fact, text in facts.items() if text is not None]

    def _begin_where_needed(self, phrase: str, rank: str) -> None:
        """Begin a new start if a process repeats what it logs first.

        A once-only phrase repeats only after a restart, also after a failed start. Other phrases (a draft's weights are
        loaded too) begin a new start only if the last start's pool was sized; for unnamed processes, the repeat may be
        another process's first.
        """
        is_again = (phrase, rank) in self._said
        is_sized = bool(self._known & POOL_FACTS)
        if (is_again and phrase in self._phrases.once) or (is_sized and (is_again or rank == "")):
            self._starts += 1
            self._first_line = self._line
            self._readings.clear()
            self._lists.clear()
            self._known.clear()
            self._spans.clear()
            self._said.clear()
            self._engines = dict.fromkeys(logs_of_servers(), 0)
        self._said.add((phrase, rank))

    # --- the end

    def result(self, *, bare: bool = False) -> ServerLog:
        if not self._readings and not self._lists and not bare:
            *titles, last = [terms_of(name).title for name, logs in logs_of_servers().items() if logs.wordings]
            raise InvalidInputError(
                self.where,
                f"holds no line that {', '.join(titles)} or {last} writes at start-up",
                "name its log, from the first line",
            )
        for kind, _ in self._lists:
            self._engines[kind] += 1
        if not any(self._engines.values()) and self._command is not None:
            self._engines[self._command[0]] += 1
        likeliest = max(self._engines, key=lambda name: self._engines[name])
        engine = next((name for name in OWN if self._engines.get(name)), likeliest)  # nobody else has its lines
        notes = [] if self.skipped is None else [f"{self.where}: {self.skipped}"]
        if self._starts > 1:
            notes.append(f"{self._starts} starts in the log; the last one, from line {self._first_line:,} on, is taken")
        notes += simulated_notes(self._readings)[:1]
        flags = dict[str, str]()
        for opening in self._phrases.lists:
            if opening in self._lists and opening[0] == engine:
                flags |= arguments(self._lists[opening])
        if not any(opening in self._lists for opening in self._phrases.asked_for):
            flags |= self._command_flags(engine, notes)
        if self._command is not None and self._command[0] == engine:
            flags |= self._variables
        read_flags = {name: text for name, text in flags.items() if name in self._phrases.flags}
        return ServerLog(
            engine, read_flags, tuple(self._readings), self._starts, self._first_line, tuple(notes),
            spans=frozenset(self._spans[engine]),
        )  # fmt: skip

    def _command_flags(self, engine: Engine, notes: list[str]) -> dict[str, str]:
        """Flags of the command that the log quotes, with notes on it."""
        if self._command is None or self._command[0] != engine:
            return {}
        _, text, number = self._command
        where = f"the command on line {number:,} of the log"
        try:
            flags, unsized = flags_of_command(engine, text)
        except KvplanError as error:
            notes.append(f"{where} is not read: {error.renamed('--from-command', '')}")
            return {}
        if not flags:  # only a mention of the command
            return {}
        notes.append(f"no list of arguments in the log: they are taken from {where}")
        if unsized:
            unsized_text = ", ".join(printable(flag, 60) for flag in dict.fromkeys(unsized))
            notes.append(f"{where}: what {unsized_text} does to memory is not modeled")
        return flags


def _lines_of_worth(piece: bytes) -> tuple[set[tuple[int, int]], int]:
    """Return (start, end) of the lines with a phrase, and the number of phrases on them, each counted once per line; a
    line longer than MAX_LINE is cut there.
    """
    spans: set[tuple[int, int]] = set()
    num_phrases, known = 0, phrases()
    for phrase in known.in_bytes:
        position = piece.find(phrase)
        while position >= 0:
            start = piece.rfind(b"\n", max(0, position - MAX_LINE), position) + 1
            if start == 0 and position > MAX_LINE:
                start = position - position % MAX_LINE
            end = piece.find(b"\n", position, start + MAX_LINE)
            end = end if end >= 0 else min(len(piece), start + MAX_LINE)
            while phrase in known.in_commands and piece[end - 1 : end + 1] == b"\\\n" and end - start < MAX_LINE:
                following = piece.find(b"\n", end + 1, start + MAX_LINE)
                end = following if following >= 0 else min(len(piece), start + MAX_LINE)
            spans.add((start, end))
            num_phrases += 1
            position = piece.find(phrase, max(end, position + 1))
    return spans, num_phrases
