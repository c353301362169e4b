"""A report's tables: a cell holds the number itself, and what a reader sees of it is `text` alone."""

from dataclasses import dataclass

from kvplan.core.files import printable
from kvplan.core.units import format_size

Value = int | float | str | None

BY_ROW = "by row"  # a column whose units stand in the row's cell named `unit`
UNIT = "unit"  # that column: said with each value, so not shown by itself
# Tables whose first column holds names of kvplan's own, which read better as words.
NAMED = ("memory", "pool", "stages", "run", "environment", "method")


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
    rows: tuple[tuple[Value, ...], ...]

    def unit(self, row: tuple[Value, ...], i: int) -> str:
        """The unit of the i-th cell of a row."""
        unit = self.columns[i].unit
        return str(row[[column.name for column in self.columns].index(UNIT)]) if unit == BY_ROW else unit

    @property
    def shown_places(self) -> list[int]:
        """Which columns a reader sees: all but the one that holds the units of others."""
        return [i for i, column in enumerate(self.columns) if column.name != UNIT]


def cell_text(table: Table, row: tuple[Value, ...], i: int) -> str:
    """The i-th cell of a row for a reader."""
    shown_text = text(row[i], table.unit(row, i))
    return words(shown_text) if i == 0 and table.name in NAMED else shown_text


def text(value: Value, unit: str) -> str:
    """A cell for a reader: "513.13 MiB", "+0.31 %", "3,328"; a dash where there is no value."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return printable(str(value), 1000)
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
        case "count" | "text" | "":
            return plain(value)
        case _:
            return f"{plain(value)} {unit.removesuffix('s') if value == 1 and '/' not in unit else unit}"


def plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def percent(share: float) -> str:
    """A share in percent; one too small for a decimal is not written as zero."""
    value = 100 * share
    return "under 0.1 %" if 0 < value < 0.05 else f"{value:,.1f} %"


def signed_percent(share: float) -> str:
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:+,.2f} %" if abs(value) >= 0.005 else f"{value:+.1g} %"


def words(name: str) -> str:
    """A column's or a component's name for a reader: "kv_cache" -> "KV cache"."""
    if name == "non_torch":
        return "non-torch"
    spelled = {"kv": "KV", "cuda": "CUDA", "lora": "LoRA", "gpu": "GPU", "rss": "resident", "sm": "SM", "num": ""}
    found = [spelled.get(word, word) for word in name.removesuffix("_w").removesuffix("_mhz").split("_")]
    return " ".join(word for word in found if word)
