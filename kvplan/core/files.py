"""Safe reading of untrusted files and JSON: an error is one `KvplanError` line, never a hang or a crash.

A config.json, a weight index or a trace may come from anywhere. This module rejects what `json` accepts silently and
would end as a wrong number (duplicate keys, NaN, 1e999), and what makes readers hang or crash (a FIFO, a 1 GiB file,
100,000 nested brackets).
"""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UsageError

MIB = 1024 * 1024
MAX_CONFIG_BYTES = 10 * MIB
MAX_DEPTH = 100  # levels of nesting; real configs and weight indexes stay under ten
MAX_DIGITS = 30  # digits of an integer; 2^63 has 19
# The only infinity in published configs: the clip of Mamba2's time step (nvidia/Nemotron-H-56B-Base-8K
# and its successors write [0.0, Infinity]). No size depends on it.
MAY_BE_INFINITE = frozenset({"time_step_limit"})

_WHERE_LIMIT = 400  # characters of a path in a message; paths into the Hub's cache are long
_NO_FILE = {
    errno.ENOENT: "no such file or directory",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ELOOP: "the symbolic links form a loop",
    errno.ENAMETOOLONG: "the name is too long",
}
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")  # UTF-16 LE and BE, UTF-32 BE (UTF-32 LE starts as UTF-16)


class _Refused(Exception):
    """Rejection by a hook: (what is wrong, the next step)."""


def printable(text: str, limit: int = 120) -> str:
    """Make an untrusted name safe to print: one line, no control or bidirectional characters, at most `limit` long.

    Bytes of a file name that are not valid text in this locale are shown as bytes: `\\xc3\\xa9`. Terminal markup such
    as `[bold]` is kept: rich must print it with markup off.
    """
    # Escape only what will be shown: a name of megabytes costs no more than a short one.
    text_shown = "".join(ch if ch.isprintable() else escaped(ch) for ch in text[: limit + 1])
    return text_shown if len(text) <= limit and len(text_shown) <= limit else text_shown[: max(limit - 3, 0)] + "..."


def escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that could not be decoded (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def exists(path: str | Path) -> bool:
    """True if a file or folder exists; False for a name that no file has: too long, or with a null byte."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def path_text(path: Path) -> str:
    """Format a path for messages."""
    return printable(str(path), 400)


def os_problem(path: Path, error: OSError) -> KvplanError:
    """Error for a failed system call on `path`: a wrong path is an input error, anything else an environment error."""
    where = printable(str(path), _WHERE_LIMIT)
    if error.errno in _NO_FILE:
        return InvalidInputError(where, f"{_NO_FILE[error.errno]}", "check the path")
    if isinstance(error, PermissionError):
        return EnvironmentProblem(where, "permission denied", "make it readable for this user")
    return EnvironmentProblem(where, f"cannot be read ({error.strerror or type(error).__name__})", "check the disk")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes; reject a directory, FIFO or device instead of blocking."""
    where = printable(str(path), _WHERE_LIMIT)
    try:
        _refuse_irregular(where, path.stat().st_mode)
        _note_input(path)
        # The file may have been replaced since: a FIFO must not block the open, so check again after it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise os_problem(path, error) from error
    except ValueError as error:  # a NUL in the path itself
        raise InvalidInputError(where, f"not a file name ({error})", "check the path") from error
    try:
        _refuse_irregular(where, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


# Files are identified by device and inode, whatever path leads to them.
_inputs: set[tuple[int, int]] = set()  # read by this command
_outputs: dict[tuple[int, int], UsageError] = {}  # to be replaced by this command -> the error if it reads them


def start_command() -> None:
    """Forget the files that the last command in this process has read."""
    _inputs.clear()
    _outputs.clear()


def announce_output(path: Path, refusal: UsageError) -> None:
    """Declare that an existing file will be replaced. Raise UsageError if this command reads it, before or later."""
    _outputs[_identity(path)] = refusal
    if _identity(path) in _inputs:
        raise refusal


def forget_output(path: Path) -> None:
    with suppress(OSError):
        _outputs.pop(_identity(path), None)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _note_input(path: Path) -> None:
    _inputs.add(_identity(path))
    if refusal := _outputs.get(_identity(path)):
        raise refusal


def _refuse_irregular(where: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise InvalidInputError(where, "is a directory, not a file", "name the file in it")
    if not stat.S_ISREG(mode):
        raise InvalidInputError(where, "not a regular file", "copy its content to a file first")


def read_text(path: Path, max_bytes: int) -> str:
    """Text of a UTF-8 file of at most `max_bytes`, checked before reading; a byte order mark is dropped."""
    where = printable(str(path), _WHERE_LIMIT)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
        except OSError as error:
            raise os_problem(path, error) from error
    if size > max_bytes or len(data) > max_bytes:
        size = max(size, len(data))
        raise InvalidInputError(where, f"too large ({size:,} bytes, at most {max_bytes:,})", "is it the right file?")
    return _decoded(data, where)


def _decoded(data: bytes, where: str) -> str:
    if data.startswith(_WIDE_BOMS):
        raise InvalidInputError(where, "UTF-16 or UTF-32 text, not UTF-8 (byte 0)", "convert it to UTF-8")
    if (nul := data.find(b"\0")) >= 0:
        raise InvalidInputError(where, f"not text, contains a NUL (byte {nul})", "expected UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec's position excludes the byte order mark it dropped.
        start = error.start + (len(data) - len(error.object))
        raise InvalidInputError(where, f"not UTF-8 (byte {start} is 0x{data[start]:02x})", "convert it") from error


def load_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Parse the JSON object in a file strictly."""
    return parse_json(read_text(path, max_bytes), str(path))


def parse_json(text: str, where: str, first_line: int | None = None) -> dict[str, Any]:
    """Parse the JSON object in `text`; `where`, and the line number if it is one of several lines, locate errors.

    Rejected in addition to what `json` rejects: duplicate keys, NaN and infinities (except MAY_BE_INFINITE), integers
    over 30 digits, more than 100 levels, text that is not valid Unicode, and a top level that is not an object.
    """
    where = printable(where, _WHERE_LIMIT)
    place = where if first_line is None else f"{where}: line {first_line}"
    if not text.strip():
        raise InvalidInputError(where, "empty file (line 1 column 1)", "expected a JSON object")
    try:
        parsed = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=float)
    except json.JSONDecodeError as error:
        _refuse(text, where, error.pos, _complaint(text, error), first_line or 1)
    except _Refused as fault:
        public = "a key twice, or a number kvplan does not take"
        raise InvalidInputError(place, *fault.args, public=public) from None
    except RecursionError:
        raise _too_deep(place) from None
    if not isinstance(parsed, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(parsed), "a number")
        raise InvalidInputError(
            where, f"the top level is {kind} (line {first_line or 1} column 1)", "expected a JSON object"
        )
    if is_deeper_than(parsed, MAX_DEPTH):
        raise _too_deep(place)
    if "\\ud" in text.lower():
        _refuse_lone_surrogates(parsed, text, where, first_line or 1)
    return parsed


def _too_deep(where: str) -> InvalidInputError:
    return InvalidInputError(where, f"nested more than {MAX_DEPTH} levels deep", "no config is")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"duplicate key '{printable(twice, 60)}'", "keep one of them")
    for key, value in pairs:
        if isinstance(value, float | list) and not _is_finite(value, key in MAY_BE_INFINITE):
            raise _Refused(f"{printable(key, 60)}: non-finite number", "write a finite number or null")
    return made


def _is_finite(value: Any, or_infinite: bool) -> bool:
    """True if a number, or every number of a list, is finite (`or_infinite`: not NaN); objects check themselves."""
    if isinstance(value, list):
        return all(_is_finite(item, or_infinite) for item in value)
    return not isinstance(value, float) or math.isfinite(value) or (or_infinite and not math.isnan(value))


def _integer(token: str) -> int:
    if len(token) > MAX_DIGITS:
        digits = len(token.lstrip("-"))
        raise _Refused(f"an integer of {digits:,} digits ({printable(token, 24)}), at most {MAX_DIGITS}", "correct it")
    return int(token)


def _complaint(text: str, error: json.JSONDecodeError) -> str:
    what = error.msg[:1].lower() + error.msg[1:].removesuffix(" starting at").removesuffix(
        " at"
    )  # the position precedes it
    partial_word_left = re.compile(r"[\w.+-]*\s*").fullmatch(text, error.pos) and error.msg != "Extra data"
    if partial_word_left or error.msg.startswith("Unterminated"):
        return f"not JSON, {what}; the file is cut short, fetch it again"
    return f"not JSON, {what}; correct it"


def _refuse(text: str, where: str, position: int, complaint: str, first_line: int) -> NoReturn:
    """Raise an error for `complaint` (what is wrong, then the next step) at a character of `text`."""
    line = text.count("\n", 0, position) + first_line
    column = position - text.rfind("\n", 0, position)
    place = f"{where}: line {line} column {column}"
    problem, _, remedy = complaint.rpartition("; ")
    raise InvalidInputError(place, problem, remedy) from None


def is_deeper_than(parsed: object, depth: int) -> bool:
    """True if lists and objects nest more than `depth` levels; not recursive, so any depth is safe."""
    level = [parsed]
    for _ in range(depth):
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [child for value in nested for child in (value.values() if isinstance(value, dict) else value)]
    return any(isinstance(value, dict | list) for value in level)


def _refuse_lone_surrogates(parsed: dict[str, Any], text: str, where: str, first_line: int) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse(
            text, where, text.lower().find("\\ud"), "half of a surrogate pair, not a character; correct it", first_line
        )
