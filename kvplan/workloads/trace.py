"""Request traces: arrival times, lengths and shared prefixes.

Formats: CSV files by their header (Azure, BurstGPT, vidur, or plain columns), JSON Lines (Mooncake, Qwen-Bailian) and
the saved result of `vllm bench serve`. The first line determines the format, the first bytes gzip. Files are streamed;
the numbers of lines, requests and prefix ids are limited. A missing unit of time is an error, never guessed.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import parse_json, printable
from kvplan.core.records import dataclass
from kvplan.core.units import MIB, plural
from kvplan.workloads.lengths import PAIRS, TOTALS, Lengths, clipped, read_csv, read_lines

MAX_REQUESTS = 6_000_000  # BurstGPT's three files have up to 5.3 million rows
MAX_PREFIX_IDS = 20_000_000
MAX_TOKENS = 2**24  # per request; no served model has a longer context
MAX_SECONDS = 1e10  # largest accepted time; seconds since 1970 are below 2e9
MAX_LINE_BYTES = MIB  # a prompt of a million tokens in runs of 16 has 65,536 ids
MAX_DOCUMENT_BYTES = 64 * MIB  # for a result that is one JSON object
MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
NAMES = "prompt_tokens and output_tokens, and arrival_s in seconds where there are times"

# Time columns: seconds per unit. `timestamp` has no fixed unit: see `_time_column`.
TIMES = {
    "arrival_s": 1.0,
    "arrival": 1.0,
    "arrived_at": 1.0,  # vidur
    "timestamp_s": 1.0,
    "arrival_ms": 0.001,
    "timestamp_ms": 0.001,
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: seconds since the trace's first request, prompt tokens, output tokens.

    prefix_ids  ids of the prompt's leading runs of `Trace.prefix_block` tokens: requests whose ids agree up to some run
                have the same tokens up to its end; the last run may be partial; tokens after the runs are unique to
                the request
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    source        description for reports
    prefix_block  tokens per prefix id; None: no ids
    has_arrivals  False: the file has lengths only, and every arrival_s is 0
    notes         changes made while reading
    """

    requests: tuple[TraceRequest, ...]
    source: str
    prefix_block: int | None = None
    has_arrivals: bool = True
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s


def read(path: Path, max_requests: int = MAX_REQUESTS) -> Trace:
    """Read a trace file, sorted by arrival. Raise InvalidInputError with the line number of an error."""
    where = printable(str(path), 400)
    lines = _filled(path, where, max_requests)
    first = next(lines, None)
    if first is None:
        raise InvalidInputError(where, "is empty", f"give a trace with {NAMES}")
    rows = _Rows(where, max_requests=max_requests)
    is_json = first[1].lstrip().startswith(("{", "["))
    return _read_json(rows, first, lines) if is_json else _read_csv(rows, first, lines)


def _filled(path: Path, where: str, max_requests: int = MAX_REQUESTS) -> Iterator[tuple[int, str]]:
    """Yield the numbered non-blank lines, up to two for each request."""
    for number, line in read_lines(path, where, MAX_DOCUMENT_BYTES):
        if number > 2 * max_requests:
            raise InvalidInputError(
                f"{where}: line {number}", f"more than {2 * max_requests:,} lines", "use a part of the file"
            )
        if line and not line.isspace():
            yield number, line


def read_full_lengths(path: Path, limit: int) -> Lengths:
    """Read full lengths (prompt + output) from a trace or a CSV of lengths; lengths above `limit` count as `limit`."""
    where = printable(str(path), 400)
    first = next((line for _, line in _filled(path, where)), "")
    if not first.lstrip().startswith(("{", "[")):
        return read_csv(path, limit)
    trace = read(path)
    counts = Counter(request.prompt_tokens + request.output_tokens for request in trace.requests)
    weights = {tokens: float(count) for tokens, count in counts.items()}
    return clipped(weights, limit, trace.source, "a request counts at its full length, prompt + output", *trace.notes)


@dataclass(slots=True)
class _Rows:
    """Requests of a file that is being read."""

    where: str
    noun: str = "line"  # unit of the numbers in errors
    requests: list[TraceRequest] = field(default_factory=list)
    num_empty: int = 0
    num_ids: int = 0
    max_requests: int = MAX_REQUESTS

    def fault(self, number: int, what: str, cure: str = "") -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {self.noun} {number}", what, cure)

    def bad_value(self, number: int, what: str, value: str, cure: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {self.noun} {number}", f"{what} ({value})", cure, public=what)

    def add(self, number: int, arrival: float, prompt: int, output: int, ids: tuple[int, ...] = ()) -> None:
        """Add a request unless it has no output, which in BurstGPT and vLLM's benchmark marks a failed request."""
        if output == 0:
            self.num_empty += 1
            return
        if prompt == 0:
            raise self.fault(number, "a prompt of 0 tokens", "remove the row")
        if prompt + output > MAX_TOKENS:
            raise self.fault(number, f"a request of more than {MAX_TOKENS:,} tokens ({prompt + output})", "correct it")
        self.num_ids += len(ids)
        if len(self.requests) >= self.max_requests or self.num_ids > MAX_PREFIX_IDS:
            raise self.fault(
                number,
                f"more than {self.max_requests:,} requests or {MAX_PREFIX_IDS:,} prefix ids",
                "use a part of the file",
            )
        self.requests.append(TraceRequest(arrival, prompt, output, ids))

    def trace(self, *, has_arrivals: bool, prefix_block: int | None = None) -> Trace:
        """Return the requests as a trace, sorted by arrival, with times from the first request."""
        if not self.requests:
            none = "no request has any output" if self.num_empty else "no rows below the header"
            raise InvalidInputError(self.where, f"{none}", "give a trace with at least one request")
        notes = []
        if self.num_empty:
            total = self.num_empty + len(self.requests)
            notes.append(
                f"left out {self.num_empty:,} of {total:,} requests, with 0 output tokens: so are failed ones recorded"
            )
        if any(a.arrival_s > b.arrival_s for a, b in pairwise(self.requests)):
            self.requests.sort(key=lambda request: request.arrival_s)
            notes.append("the rows were not in order of time and are sorted by arrival")
        start = self.requests[0].arrival_s
        if start:
            self.requests = from_start(self.requests, start)
        source = f"{self.where} ({plural(len(self.requests), 'request')})"
        return Trace(tuple(self.requests), source, prefix_block, has_arrivals, tuple(notes))


def from_start(requests: Sequence[TraceRequest], start_s: float) -> list[TraceRequest]:
    """Return the same requests with times relative to `start_s`."""
    return [
        TraceRequest(request.arrival_s - start_s, request.prompt_tokens, request.output_tokens, request.prefix_ids)
        for request in requests
    ]


# --- CSV ----------------------------------------------------------------------------------------------------------


def _read_csv(rows: _Rows, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Trace:
    names = [name.strip().lower() for name in _fields(rows, *first)]
    prompt, output = _length_columns(rows, first[0], names)
    time = _time_column(rows, first[0], names)
    seconds_of = _Clock(rows, time[1] if time else None)
    last = max(prompt, output, time[0] if time else 0)
    for number, line in lines:
        fields = _fields(rows, number, line)
        if len(fields) <= last:
            raise rows.fault(number, f"too few columns ({len(fields)} of {len(names)})", "correct the row")
        if len(fields) > len(names):
            raise rows.fault(
                number, f"more columns than the header ({len(fields)}, not {len(names)})", "correct the row"
            )
        arrival = seconds_of(fields[time[0]], number) if time else 0.0
        rows.add(number, arrival, _tokens(rows, number, fields[prompt]), _tokens(rows, number, fields[output]))
    return rows.trace(has_arrivals=time is not None)


def _fields(rows: _Rows, number: int, line: str) -> list[str]:
    if len(line) > MAX_LINE_BYTES:
        raise rows.fault(number, f"longer than {MAX_LINE_BYTES:,} characters", "is it a trace?")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise rows.fault(number, f"is not CSV ({error})", "correct the line") from None


def _length_columns(rows: _Rows, number: int, names: list[str]) -> tuple[int, int]:
    """Return the column indices of prompt and output tokens."""
    columns = printable(",".join(names), 80)
    pairs = [pair for pair in PAIRS if pair[0] in names and pair[1] in names]
    for pair in pairs[:1]:
        if names.count(pair[0]) > 1 or names.count(pair[1]) > 1:
            raise rows.bad_value(number, "the header names a column of tokens twice", repr(columns), "leave one")
        return names.index(pair[0]), names.index(pair[1])
    if len(names) > 1 and all(is_number(name) for name in names):
        what = f"{len(names)} columns of numbers and no header"
        raise rows.bad_value(number, what, repr(columns), f"put a line above that names them: {NAMES}")
    if any(total in names for total in TOTALS) or all(name.isdigit() for name in names):
        raise rows.bad_value(
            number,
            "one length per request and no header of two",
            repr(columns),
            f"a trace has the columns {NAMES}, and `kvplan estimate --lengths` reads plain lengths",
        )
    raise rows.bad_value(number, "no columns of lengths in the header", repr(columns), f"name the columns {NAMES}")


def is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", text) is not None


def _time_column(rows: _Rows, number: int, names: list[str]) -> tuple[int, float | None] | None:
    """Return (time column, seconds per unit or None for dates), or None without a time column."""
    for name, unit in TIMES.items():
        if name in names:
            return names.index(name), unit
    if "timestamp" not in names:
        return None
    # BurstGPT's README: seconds since midnight of the first day. Azure writes dates, which need no unit.
    return names.index("timestamp"), 1.0 if "request tokens" in names else None


def _tokens(rows: _Rows, number: int, text: str) -> int:
    text = text.strip()
    if not text.isdigit() or not text.isascii() or len(text) > 20:
        raise rows.bad_value(number, "not a whole number of tokens", repr(printable(text, 40)), "correct the row")
    return int(text)


class _Clock:
    """Conversion of a time column to seconds: numbers in a unit, or dates relative to the first one."""

    def __init__(self, rows: _Rows, unit: float | None) -> None:
        self.rows, self.unit = rows, unit
        self.start: datetime | None = None

    def __call__(self, text: str, number: int) -> float:
        return self._of_date(text.strip(), number) if self.unit is None else self._of_number(text, number, self.unit)

    def _of_number(self, text: str, number: int, unit: float) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else -1.0
        except ValueError:
            value = -1.0
        if not 0 <= value * unit < MAX_SECONDS:
            raise self.rows.bad_value(number, "not a time of 0 or more", repr(printable(text, 40)), "correct the row")
        return value * unit

    def _of_date(self, text: str, number: int) -> float:
        try:
            if len(text) < 19 or text[4] != "-" or text[10] not in " T":  # stricter than fromisoformat
                raise ValueError
            value = datetime.fromisoformat(text)
            self.start = self.start or value
            since = (value - self.start).total_seconds()
            if abs(since) >= MAX_SECONDS:
                raise ValueError
            return since
        except (ValueError, TypeError, OverflowError):  # TypeError: some dates with a time zone, some without
            raise self.rows.bad_value(number, self._what(text), repr(printable(text, 40)), self.CURE) from None

    CURE = "write 2023-11-16 18:15:46.68, or name a column of seconds arrival_s, of milliseconds arrival_ms"

    def _what(self, text: str) -> str:
        """Return the error message for a timestamp that is not a date."""
        if is_number(text):
            return "the timestamp is a number without a unit"
        return "the timestamp is not a date" + ("" if self.start is None else " as in the rows before")


# --- JSON ---------------------------------------------------------------------------------------------------------


def _read_json(rows: _Rows, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Trace:
    number, line = first
    if line.lstrip().startswith("["):
        raise rows.fault(number, "a JSON list", "write one object per line (jq -c '.[]' does)")
    if line.strip() == "{":  # indented: the object ends at the end of the file
        return _read_result(rows, parse_json(_rest(rows, line, lines), rows.where))
    record = _record(rows, number, line)
    if "input_lens" in record or "total_input_tokens" in record:
        if (more := next(lines, None)) is not None:
            raise rows.fault(more[0], "more after the first result", "give one result per file")
        return _read_result(rows, record)
    return _read_records(rows, number, record, lines)


def _rest(rows: _Rows, line: str, lines: Iterator[tuple[int, str]]) -> str:
    size, parts = 0, [line]
    for number, part in lines:
        size += len(part)
        if size > MAX_DOCUMENT_BYTES:
            raise rows.fault(number, f"more than {MAX_DOCUMENT_BYTES:,} characters of one JSON object", "shorten it")
        parts.append(part)
    return "\n".join(parts)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key twice")
    return record


def _no_constant(name: str) -> float:
    raise ValueError(name)


# As strict as parse_json for these files, and several times as fast; parse_json reports the errors.
_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)


def _record(rows: _Rows, number: int, line: str) -> dict[str, Any]:
    try:
        record = _DECODER.decode(line)
        if isinstance(record, dict):
            return record
    except (ValueError, RecursionError):
        pass
    return parse_json(line, rows.where, first_line=number)


def _read_records(rows: _Rows, number: int, record: dict[str, Any], lines: Iterator[tuple[int, str]]) -> Trace:
    """Read one request per line in the form of Mooncake (milliseconds, runs of 512) or Qwen-Bailian (seconds, 16)."""
    form = _Form.of(rows, number, record)
    form.add(rows, number, record)
    for later, line in lines:
        if len(line) > MAX_LINE_BYTES:
            raise rows.fault(later, f"longer than {MAX_LINE_BYTES:,} characters", "is it a trace?")
        form.add(rows, later, _record(rows, later, line))
    return rows.trace(has_arrivals=form.time is not None, prefix_block=form.block if rows.num_ids else None)


@dataclass(frozen=True, slots=True)
class _Form:
    """Keys and units of a JSON Lines trace, from its first line.

    unit       seconds per unit of time
    block      tokens per prefix id
    is_stated  True if the block size is certain (stated, or Qwen-Bailian's); if not, the number of ids must fit it
    """

    prompt: str
    output: str
    time: str | None
    unit: float
    block: int
    is_stated: bool

    @staticmethod
    def of(rows: _Rows, number: int, record: dict[str, Any]) -> "_Form":
        pair = next((pair for pair in PAIRS if pair[0] in record and pair[1] in record), None)
        if pair is None:
            keys = printable(", ".join(record), 80)
            raise rows.bad_value(number, "no lengths among the keys", keys, "name them input_length and output_length")
        is_bailian = "chat_id" in record or "parent_chat_id" in record
        time = next((name for name in (*TIMES, "timestamp") if name in record), None)
        unit = TIMES.get(time or "", 1.0 if is_bailian else 0.001)
        block = BAILIAN_BLOCK if is_bailian else MOONCAKE_BLOCK
        if "block_size" not in record:
            return _Form(*pair, time, unit, block, is_bailian)
        stated = _count(rows, number, record, "block_size")
        if not 1 <= stated <= MAX_TOKENS:
            raise rows.fault(number, f"block_size: must be at least 1 token ({stated})", "correct it")
        return _Form(*pair, time, unit, stated, True)

    def add(self, rows: _Rows, number: int, record: dict[str, Any]) -> None:
        prompt, output = _count(rows, number, record, self.prompt), _count(rows, number, record, self.output)
        if record.get("block_size", self.block) != self.block:
            raise rows.fault(number, "another block_size than in the lines before", "give one form per file")
        if record.get("delay") is not None:  # AIPerf: later turns of a session, with lengths without the history
            raise rows.fault(
                number, "delay: a time after another request", "give each request its timestamp and its length"
            )
        arrival = 0.0
        if self.time is not None:
            arrival = _seconds(rows, number, record.get(self.time), self.time, self.unit)
        elif any(name in record for name in (*TIMES, "timestamp")):
            raise rows.fault(number, "has a time, which the first line lacks", "give all lines one or none")
        rows.add(number, arrival, prompt, output, self._ids(rows, number, record, prompt))

    def _ids(self, rows: _Rows, number: int, record: dict[str, Any], prompt: int) -> tuple[int, ...]:
        ids = record.get("hash_ids")
        if ids is None:
            return ()
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise rows.fault(number, "hash_ids: not a list of whole numbers", "correct the line")
        runs = -(-prompt // self.block)
        least = 0 if self.is_stated or not ids else prompt // self.block
        if not least <= len(ids) <= runs:
            raise rows.fault(
                number,
                f"hash_ids: {len(ids):,} of them do not go with {prompt:,} tokens in runs of {self.block:,} ({runs:,})",
                'state the runs\' length: "block_size": N in each line',
            )
        return tuple(ids)


def _count(rows: _Rows, number: int, record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 10**20:
        raise rows.bad_value(number, f"{key}: not a whole number of tokens", printable(repr(value), 40), "correct it")
    return value


def _seconds(rows: _Rows, number: int, value: Any, key: str, unit: float) -> float:
    if type(value) not in (int, float) or not 0 <= value < MAX_SECONDS / unit:
        raise rows.bad_value(number, f"{key}: not a time of 0 or more", printable(repr(value), 40), "correct it")
    return float(value) * unit


def _read_result(rows: _Rows, result: dict[str, Any]) -> Trace:
    """Read a result of `vllm bench serve --save-result --save-detailed`: one list per figure, times in seconds."""
    prompts, outputs = result.get("input_lens"), result.get("output_lens")
    if not isinstance(prompts, list) or not isinstance(outputs, list):
        raise InvalidInputError(
            rows.where, "a result without its requests' input_lens and output_lens", "save it with --save-detailed"
        )
    starts = result.get("start_times")
    times = starts if isinstance(starts, list) else [0.0] * len(prompts)
    if not len(prompts) == len(outputs) == len(times):
        raise InvalidInputError(
            rows.where,
            f"input_lens, output_lens and start_times differ in length ({len(prompts):,}, {len(outputs):,}, "
            f"{len(times):,})",
            "save the result again",
        )
    rows.noun = "request"
    for number, (prompt, output, start) in enumerate(zip(prompts, outputs, times, strict=True), 1):
        figures = {"input_lens": prompt, "output_lens": output}
        arrival = _seconds(rows, number, start, "start_times", 1.0)
        rows.add(
            number, arrival, _count(rows, number, figures, "input_lens"), _count(rows, number, figures, "output_lens")
        )
    return rows.trace(has_arrivals=isinstance(starts, list))


# --- writing ------------------------------------------------------------------------------------------------------


def csv_text(trace: Trace) -> str:
    """Return plain CSV: arrival_s (to the microsecond), prompt_tokens, output_tokens. Prefix ids are dropped."""
    if not trace.has_arrivals:
        rows = [f"{request.prompt_tokens},{request.output_tokens}\n" for request in trace.requests]
        return "".join(["prompt_tokens,output_tokens\n", *rows])
    rows = [
        f"{_plain(request.arrival_s, 6)},{request.prompt_tokens},{request.output_tokens}\n"
        for request in trace.requests
    ]
    return "".join(["arrival_s,prompt_tokens,output_tokens\n", *rows])


def jsonl_text(trace: Trace) -> str:
    """Return JSON Lines in Mooncake's form: milliseconds, ids of runs of 512 tokens; other sizes as `block_size`."""
    is_plain = trace.prefix_block in (None, MOONCAKE_BLOCK) and all(
        not request.prefix_ids or len(request.prefix_ids) >= request.prompt_tokens // MOONCAKE_BLOCK
        for request in trace.requests
    )
    extra = {} if is_plain else {"block_size": trace.prefix_block}
    return "".join(json.dumps(_json_row(request, trace) | extra) + "\n" for request in trace.requests)


def _json_row(request: TraceRequest, trace: Trace) -> dict[str, Any]:
    row: dict[str, Any] = {"input_length": request.prompt_tokens, "output_length": request.output_tokens}
    if trace.has_arrivals:
        text = _plain(request.arrival_s * 1000, 3)
        row = {"timestamp": float(text) if "." in text else int(text), **row}
    return row if trace.prefix_block is None else {**row, "hash_ids": list(request.prefix_ids)}


def _plain(number: float, digits: int) -> str:
    """Format a number without trailing zeros: "0", "12.5"."""
    return f"{number:.{digits}f}".rstrip("0").rstrip(".")


WRITERS: dict[str, Callable[[Trace], str]] = {"csv": csv_text, "jsonl": jsonl_text}
