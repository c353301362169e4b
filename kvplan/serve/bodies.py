"""Bodies of requests: JSON whose cost is bounded before it is parsed.

The parser holds the interpreter's lock until it has made the last value, so a body with too many holds up every client.
"""

import json
import re
from typing import Any, Final

from kvplan.serve.fields import ApiError

SMALL: Final = 64 << 10  # bytes that are parsed in milliseconds whatever they hold
MOST_PARTS: Final = 1 << 16  # lists, objects, their keys and texts: a chat of 10,000 messages has 50,000
MOST_VALUES: Final = 1 << 21  # twice the token ids that /detokenize takes
LONG_NUMBER: Final = re.compile("[0-9]{40}")  # which take the square of their length
SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
MOST_EXACT: Final = 2**53


def parsed(data: bytes, context: int = 0) -> dict[str, Any]:
    """Parse a body. Raise ApiError if it is not a JSON object, holds half of a surrogate pair, or more values than a
    request for `context` tokens can have.
    """
    try:
        text = data.decode(json.detect_encoding(data))
        if len(data) > SMALL:
            check_cost(text, max(MOST_VALUES, context + SMALL))
        value = json.loads(text, parse_float=_number, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({str(error)[:120]}); send a JSON object") from error
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    if SURROGATE.search(text):  # an escape, whole pairs included
        for name, part in value.items():
            if not is_unicode(name):
                raise ApiError(f"{name[:80]!a}: unknown field; remove it")
            if not is_unicode(json.dumps(part, ensure_ascii=False)):
                raise ApiError(f"{name[:80]}: the text is not valid Unicode; fix it", param=name[:80])
    return value


def check_cost(text: str, most_values: int) -> None:
    """Raise ApiError for a JSON text that takes long to parse: many small values, or numbers of many digits. What is
    within quotes costs next to nothing.
    """
    plain = text.replace("\\\\", "").replace('\\"', "")
    num_texts = plain.count('"') // 2
    outside = "".join(plain.split('"')[::2]) if num_texts <= MOST_PARTS else ""
    if num_texts + outside.count("[") + outside.count("{") > MOST_PARTS:
        raise ApiError(f"the body has more than {MOST_PARTS:,} lists, objects and texts; send fewer at once")
    if outside.count(",") > most_values:
        raise ApiError(f"the body has more than {most_values:,} values; send fewer at once")
    if LONG_NUMBER.search(outside):
        raise ApiError("the body has a number of 40 digits or more; shorten it")


def is_unicode(text: str) -> bool:
    """False for a text with half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(text: str) -> float:
    """Parse a number with a decimal point or exponent; 1.0 is an integer in JSON."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < MOST_EXACT else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
