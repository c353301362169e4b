"""A log's text, independent of the server: removing a log collector's wrapping, and parsing argument lists."""

import json
import re
from collections.abc import Iterable
from typing import Final

MAX_LINE: Final = 64 << 10  # the list of arguments of SGLang 0.5.23 has 20,000 characters

# --- what a collector put around a line -------------------------------------------------------------------------------

MOST_LINES_OF_A_RECORD: Final = 16  # a record is one line; some collectors join a few
MOST_WRAPPINGS: Final = 3  # a collector's records, collected again by another
# Kubernetes: "2025-08-21T18:18:05.123456789Z stderr F text" (kubernetes.io, CRI logging format).
_CRI: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,9})?(?:Z|[+-][0-9]{2}:[0-9]{2}) std(?:out|err) "
    r"[A-Z](?::\S{1,9})? "
)
# Docker's json-file driver: {"log":"text\n","stream":"stderr","time":"..."}; structured logs call it "message", "msg"
# or "textPayload". Matched by key, so that a truncated record is read as far as it goes.
_JSON: Final = re.compile(r'"(?:log|message|msg|textPayload)"\s{0,4}:\s{0,4}"((?:[^"\\]|\\.)*)', re.DOTALL)


def unwrapped(text: str) -> list[str]:
    """Return a line as the server wrote it, without Docker's or Kubernetes' wrapping; several if a record has
    several.
    """
    for _ in range(MOST_WRAPPINGS):
        match = _CRI.match(text)
        if match is not None:
            text = text[match.end() :]
            continue
        record = _JSON.search(text) if text.lstrip().startswith('{"') else None
        message = None if record is None else _from_json(record[1])
        if message is None:
            break
        text = message
    return [line for line in re.split(r"(?<!\\)[\r\n]+", text, maxsplit=MOST_LINES_OF_A_RECORD - 1) if line]


def _from_json(text: str) -> str | None:
    """Decode a JSON string without a truncated escape at its end, or None if it is not one."""
    for cut in (0, *range(1, 7)):
        try:
            plain = json.loads(f'"{text[: len(text) - cut]}"', strict=False)
        except ValueError:
            continue
        return str(plain).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be printed
    return None


# --- lists of arguments -----------------------------------------------------------------------------------------------


_TOKEN: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){},'"]|[^][(){},'"]+""")
_ITEM: Final = re.compile(r"""\s{0,4}(['"]?)([A-Za-z_]\w{0,60})\1\s{0,4}[=:]\s{0,4}(.*)""", re.DOTALL)


def arguments(text: str) -> dict[str, str]:
    """Parse `name=value` or `'name': value` up to the closing bracket or the end; values are text, `None` is omitted.

    Quotes are removed; a nested list or object stays as written. Nothing is evaluated.
    """
    values: dict[str, str] = {}
    for item in _items(text):
        match = _ITEM.match(item)
        value = _plain(match[3]) if match else None
        if match and value is not None:
            values[match[2]] = value
    return values


def _items(text: str) -> Iterable[str]:
    """Split at commas outside brackets."""
    depth, parts = 0, list[str]()
    for token in _TOKEN.finditer(text[:MAX_LINE]):
        word = token[0]
        if word in ("'", '"'):  # unterminated quote: the rest cannot be split
            break
        if word in "([{":
            depth += 1
        elif word in ")]}":
            depth -= 1
            if depth < 0:
                break
        elif word == "," and depth == 0:
            yield "".join(parts)
            parts.clear()
            continue
        parts.append(word)
    yield "".join(parts)


def _plain(value: str) -> str | None:
    value = value.strip()
    if value[:1] in ("'", '"') and len(value) > 1 and value[-1] == value[0]:
        return value[1:-1].replace("\\\\", "\\")
    if value[:1] not in ("(", "[", "{") and "(" not in value:
        value = value.split(None, 1)[0] if value else ""
    return None if value in ("None", "null", "") else value
