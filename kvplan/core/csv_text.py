"""Rows as CSV, written in this one place: no text from outside is a formula or a control character there."""

import csv
import io
from collections.abc import Iterable
from typing import Any

from kvplan.core.files import printable

_NUMBERS = (int, float)
# What makes a cell a formula in a spreadsheet; the last four are the same signs at full width. A tab or a carriage
# return does as well, and both are spelled out before.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_LONGEST = 1_000_000  # characters of a cell


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """One line per row, each cell as `csv_cell` has it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([each if type(each) in _NUMBERS else csv_cell(each) for each in row] for row in rows)
    return out.getvalue()


def csv_cell(value: Any) -> Any:
    """A value as a spreadsheet reads it: null is empty, booleans are true and false; text is one line without control
    characters, and no formula."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return value
    text = printable(str(value), _LONGEST)
    return f"'{text}" if text.startswith(_FORMULA) else text
