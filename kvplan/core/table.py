"""Tables of typed values, written as text, CSV, Markdown and JSON objects.

All escaping of text of unknown origin is here, too: no cell contains control characters, spreadsheet formulas or page
markup.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import UNIT_GAP, format_size

Value = int | float | str | None

BY_ROW = "by row"  # a column whose units are in the row's cell named `unit`
UNIT = "unit"  # that column: shown with each value instead of on its own
FIGURE = "figure"  # a number already formatted as text: right-aligned
# Tables whose first column has kvplan's own names, which read better as words.
NAMED = ("memory", "outside", "pool", "savings", "stages", "run", "environment", "method")
LONGEST_CELL = 1000  # characters shown of a cell
FACTS = ("run", "environment")  # tables of a name and a value
GAP = 2  # spaces between two text columns
LONGEST_WORD = 24  # in a text column that is narrowed; longer words are broken


def flattened(document: Mapping[str, object], *, lists: bool = True) -> Iterator[tuple[str, Value]]:
    """Yield the path and value of each value in a document, for formats that contain all of it, such as CSV.

    lists  use indices as the paths of list items; if False, omit lists
    """
    yield from _flattened(document, "", lists=lists)


def _flattened(value: object, path: str, *, lists: bool) -> Iterator[tuple[str, Value]]:
    match value:
        case dict():
            inside: Iterable[tuple[object, object]] = value.items()
        case list():
            inside = enumerate(value) if lists else ()
        case None | int() | float() | str():
            yield path, value
            return
        case _:
            raise TypeError(f"{path}: {type(value).__name__} is no value of a document")
    for key, below in inside:
        yield from _flattened(below, f"{path}.{key}" if path else str(key), lists=lists)


class Markdown(str):
    """Text that is already Markdown and is not escaped."""

    __slots__ = ()


# --- escaping ---------------------------------------------------------------------------------------------------------

_NUMBERS = (int, float)
# First characters of a spreadsheet formula; the last four are their full-width forms. A tab or a carriage
# return would be one as well, but both are escaped before.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_LONGEST = 1_000_000  # characters of a cell
_MARKUP = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#&~$"})  # including GitHub's: strikethrough, formulas
_MENTION = re.compile(r"(?<!\w)@(?=\w)")


def one_line(text: str, limit: int = _LONGEST) -> str:
    """Escape text to one line without control characters, for a terminal."""
    return text if text.isprintable() and len(text) <= limit else printable(text, limit)


def csv_cell(value: Any) -> Any:
    """Convert a value for a spreadsheet: null is empty, booleans are true and false; text is one line without control
    characters, and never a formula.
    """
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return value
    text = one_line(str(value))
    return f"'{text}" if text.startswith(_FORMULA) else text


def markdown_text(text: str, limit: int = LONGEST_CELL) -> Markdown:
    """Escape text for Markdown, including @mentions."""
    if isinstance(text, Markdown):
        return text
    escaped = printable(text, limit).translate(_MARKUP)
    return Markdown(_MENTION.sub("@&#8203;", escaped))  # a zero-width space keeps @name from being a mention


# --- a table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name and the unit of its cells: text, bytes, error, relative, share, count, s, ... or BY_ROW."""

    name: str
    unit: str = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of values; the cell in the first column names the row."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str], rows: Iterable[Sequence[Any]], left: int | Iterable[int] = 1) -> Self:
        """A table of values, or of formatted cells; the first `left` columns, or those at given positions, are text."""
        places = range(left) if isinstance(left, int) else tuple(left)
        columns = (Column(name, "text" if i in places else FIGURE) for i, name in enumerate(names))
        return cls("", "", tuple(columns), tuple(map(tuple, rows)))

    @classmethod
    def of_documents(cls, paths: Sequence[str], documents: Iterable[Mapping[str, object]]) -> Self:
        """A row for each document: its values by their paths, "kv.request.fixed"; None for what it lacks."""
        return cls.of(paths, ([value_at(document, path) for path in paths] for document in documents))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def is_left(self, i: int) -> bool:
        """True if the cells of a column are left-aligned, as in text columns and tables of facts."""
        return self.columns[i].unit == "text" or self.name in FACTS

    def unit(self, row: tuple[Any, ...], i: int) -> str:
        """The unit of the i-th cell of a row."""
        unit = self.columns[i].unit
        return str(row[self.names.index(UNIT)]) if unit == BY_ROW else unit

    @property
    def shown_places(self) -> list[int]:
        """Indices of the visible columns: all but the one that holds the units of others."""
        by_row = any(column.unit == BY_ROW for column in self.columns)
        return [i for i, column in enumerate(self.columns) if not (by_row and column.name == UNIT)]


def value_at(document: Any, path: str) -> Any:
    """The value of a document at a path; None if it, or a table on the way, is missing."""
    for key in path.split("."):
        document = None if document is None else document.get(key)
    return document


# --- a cell -----------------------------------------------------------------------------------------------------------


def cell_text(table: Table, row: tuple[Any, ...], i: int) -> str:
    """Format the i-th cell of a row."""
    shown_text = text(row[i], table.unit(row, i))
    return words(shown_text) if i == 0 and table.name in NAMED else shown_text


def text(value: Any, unit: str) -> str:
    """Format a value: "513.13 MiB", "+0.31%", "3,328"; a dash if there is none."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return one_line(str(value), LONGEST_CELL)
    match unit:
        case "bytes":
            return format_size(round(value))
        case "error":
            return f"{value:+,} B" if value else "0 B"
        case "relative":
            return signed_percent(float(value))
        case "share":
            return percent(float(value))
        case "s":
            return f"{value:,.2f} s"
        case "count" | "text" | "figure" | "":
            return plain(value)
        case _:
            return f"{plain(value)} {unit.removesuffix('s') if value == 1 and '/' not in unit else unit}"


def plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def percent(share: float) -> str:
    """Format a fraction as a percentage; a very small one is not shown as zero."""
    value = 100 * share
    return "under 0.1%" if 0 < value < 0.05 else f"{value:,.1f}%"


def signed_percent(share: float) -> str:
    value = 100 * share
    if value == 0:
        return "0%"
    return f"{value:+,.2f}%" if abs(value) >= 0.005 else f"{value:+.1g}%"


def words(name: str) -> str:
    """Format a column's or a component's name: "kv_cache" -> "KV cache"."""
    if name == "non_torch":
        return "non-torch"
    spelled = {"kv": "KV", "cuda": "CUDA", "lora": "LoRA", "gpu": "GPU", "rss": "resident", "sm": "SM", "num": ""}
    words_spelled = [spelled.get(word, word) for word in name.removesuffix("_w").removesuffix("_mhz").split("_")]
    return " ".join(word for word in words_spelled if word)


# --- CSV and JSON -----------------------------------------------------------------------------------------------------


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """One line per row, each cell converted by `csv_cell`, for rows that arrive in parts."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([cell if type(cell) in _NUMBERS else csv_cell(cell) for cell in row] for row in rows)
    return out.getvalue()


def as_csv(table: Table) -> str:
    """A header line, then one line per row."""
    return csv_text([table.names, *table.rows])


def as_objects(table: Table) -> list[dict[str, Any]]:
    """The rows as JSON objects."""
    return [dict(zip(table.names, row, strict=True)) for row in table.rows]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def as_markdown(table: Table) -> Markdown:
    """Format as Markdown: text left-aligned, numbers right-aligned; cells are escaped unless they are Markdown."""
    places = table.shown_places
    head: list[str] = [markdown_text(heading(table, i)) for i in places]
    marks = ["---" if table.is_left(i) else "---:" for i in places]
    body: Iterable[list[str]] = ([_markdown_cell(table, row, i) for i in places] for row in table.rows)
    return Markdown("\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *body)))


def _markdown_cell(table: Table, row: tuple[Any, ...], i: int) -> str:
    return row[i] if isinstance(row[i], Markdown) else markdown_text(cell_text(table, row, i))


def heading(table: Table, i: int) -> str:
    """Header of a column; in a named table, which contains data, keys are spelled as words."""
    name = table.columns[i].name
    return words(name) if table.name else name


# --- text -------------------------------------------------------------------------------------------------------------


def as_text(table: Table, width: int | None = None) -> list[tuple[bool, str]]:
    """Lines of a table, and whether each is a heading: two spaces between columns.

    width  maximum characters of a line, or None for no limit. A wider table wraps its text columns and headings, then
           is split into parts, each repeating the first columns.
    """
    places = table.shown_places
    head = [heading(table, i) for i in places]
    cells = [[cell_text(table, row, i) for i in places] for row in table.rows]
    is_left = [table.is_left(i) for i in places]
    natural = [max(len(row[i]) for row in (head, *cells)) for i in range(len(places))]
    if width is None or _total(natural) <= width:
        return list(_laid_out(head, cells, is_left, natural))
    least = [_least(head[i], [row[i] for row in cells], is_text=is_left[i]) for i in range(len(places))]
    lines: list[tuple[bool, str]] = []
    for chosen in _parts(least, is_left, width):
        few = [least[i] for i in chosen]
        widths = _widened(few, [natural[i] for i in chosen], width)
        part = [[row[i] for i in chosen] for row in cells]
        lines += [(False, "")] if lines else []
        lines += _laid_out([head[i] for i in chosen], part, [is_left[i] for i in chosen], widths)
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _least(name: str, cells: Sequence[str], *, is_text: bool) -> int:
    """Minimum width of a column: its longest word, or its longest number."""
    words_of = [word for part in (name, *(cells if is_text else ())) for word in unbreakable(part)]
    longest = min(max(map(len, words_of)), LONGEST_WORD)
    return max(longest, *(() if is_text else map(len, cells)), 1)


def _parts(least: Sequence[int], is_left: Sequence[bool], width: int) -> Iterator[list[int]]:
    """Columns of each part of a table: as many as fit, after the repeated text columns at its beginning."""
    key = list(range(next((i for i, is_text in enumerate(is_left) if not is_text), 1)))
    while len(key) > 1 and _total([least[i] for i in key]) > width // 2:
        key.pop()
    left_columns = [i for i in range(len(least)) if i not in key]
    while left_columns:
        part = [*key, left_columns.pop(0)]
        while left_columns and _total([least[i] for i in (*part, left_columns[0])]) <= width:
            part.append(left_columns.pop(0))
        yield part


def _widened(least: Sequence[int], natural: Sequence[int], width: int) -> list[int]:
    """Distribute the remaining width, character by character, to the column that lacks most of its natural width."""
    widths = list(least)
    for _ in range(width - _total(widths)):
        narrow = max(range(len(widths)), key=lambda i: (natural[i] > widths[i], natural[i] / widths[i]))
        if natural[narrow] <= widths[narrow]:
            break
        widths[narrow] += 1
    return widths


def _laid_out(
    head: Sequence[str], cells: Sequence[Sequence[str]], is_left: Sequence[bool], widths: Sequence[int]
) -> Iterator[tuple[bool, str]]:
    for number, row in enumerate((head, *cells)):
        for line in _row_lines(row, is_left, widths):
            yield number == 0, line


def _row_lines(row: Sequence[str], is_left: Sequence[bool], widths: Sequence[int]) -> Iterator[str]:
    parts = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, parts))):
        yield (" " * GAP).join(
            f"{part[number] if number < len(part) else '':{'<' if is_text else '>'}{width}}"
            for part, is_text, width in zip(parts, is_left, widths, strict=True)
        )


def wrapped(text: str, width: int, start: str = "", hanging: str = "") -> list[str]:
    """Wrap text after `start` into lines of at most `width`, at spaces or within longer words, never in a number or
    before its unit; later lines begin with `hanging`.
    """
    if len(start) + len(text) <= width:
        return [start + text]
    lines, before = [start], start
    for word in unbreakable(text):
        space = "" if lines[-1] == before else " "
        if len(lines[-1]) + len(space) + len(word) <= width:
            lines[-1] += space + word
            continue
        if lines[-1] != before:
            before = hanging
            lines.append(hanging)
        while len(word) > (room := max(1, width - len(before))):
            end = cut(word, room)
            lines[-1] += word[:end]
            word, before = word[end:].lstrip(" "), hanging
            lines.append(hanging)
        lines[-1] += word
    return lines


def unbreakable(text: str) -> list[str]:
    """Words of a text, a number and its unit being one."""
    return [word.replace("\0", " ") for word in re.sub(UNIT_GAP, "\0", text).split(" ")]


def cut(text: str, room: int) -> int:
    """Position from 1 to `room` at which to cut a long word: in front of a number and its unit, not in them."""
    quantities = re.finditer(rf"[0-9][0-9.,]*(?:{UNIT_GAP}\S+)?", text)
    return next((quantity.start() for quantity in quantities if 0 < quantity.start() < room < quantity.end()), room)
