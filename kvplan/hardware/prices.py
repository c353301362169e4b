"""GPU prices: a file of `gpu: dollars per hour`, read strictly. kvplan has no prices of its own.

A cloud instance has a price, too: that of all its GPUs, which is divided by their number.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvplan.core import strict_yaml
from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, printable, read_text
from kvplan.core.strict_yaml import Mark
from kvplan.hardware.gpu import gpu, split_count

MAX_BYTES = 256 * 1024
CSV_HEADER = ["gpu", "dollars_per_hour"]
_DOLLARS = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per hour of one GPU, by the GPU's own name, in the file's order."""

    per_hour: dict[str, float]
    source: str


def read(path: Path) -> Prices:
    """Read prices from a YAML file, a CSV file with the header gpu,dollars_per_hour, or the text itself
    (h200=3.80,b200=6); errors name the line.
    """
    is_text = "=" in str(path) and not path.exists()
    pairs = _stated(str(path)) if is_text else _csv_pairs(path) if path.suffix.lower() == ".csv" else _yaml_pairs(path)
    prices: dict[str, float] = {}
    first: dict[str, Mark] = {}
    for mark, name, text in pairs:
        with strict_yaml.located(mark):
            own, count = priced(name)
        if own in prices:
            raise strict_yaml.wrong(mark, f"{own} has a price in line {first[own].line} already; keep one of them")
        prices[own], first[own] = _dollars(mark, own, text) / count, mark
    if not prices:
        raise InvalidInputError(path_text(path), "contains no price", "write lines such as `a100-80g: 2.50`")
    return Prices(prices, "as stated by --prices" if is_text else path_text(path))


def _stated(text: str) -> Iterator[tuple[Mark, str, str]]:
    for part in text.split(","):
        name, _, dollars = part.partition("=")
        yield Mark("--prices", 1, 1), name.strip(), dollars.strip().removeprefix("$")


def priced(name: str) -> tuple[str, int]:
    """(the GPU's own name, how many of them the price is of): one, or those of a cloud instance."""
    if split_count(name)[0] is None:
        return gpu(name).name, 1
    from kvplan.hardware.instances import instance  # only for a name with a number

    machine = instance(name)
    return (gpu(name).name, 1) if machine is None else (machine.gpu, machine.count)


def _dollars(mark: Mark, name: str, text: str) -> float:
    value = float(text) if re.fullmatch(_DOLLARS, text) else 0.0
    if value <= 0:
        raise strict_yaml.wrong(
            mark,
            f"{name}: its price is no positive number of dollars ({printable(text, 40)!r}); write dollars per GPU and "
            "hour without a unit: 2.50",
        )
    return value


def _yaml_pairs(path: Path) -> Iterator[tuple[Mark, str, str]]:
    table = strict_yaml.read(path)
    for name, node in table.values.items():
        mark = table.keys[name]
        yield mark, name, strict_yaml.text(node, f"the price of {printable(name, 60)}")


def _csv_pairs(path: Path) -> Iterator[tuple[Mark, str, str]]:
    lines = read_text(path, MAX_BYTES).splitlines()
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows, [])
        if header != CSV_HEADER:
            raise strict_yaml.wrong(
                Mark(path_text(path), 1, 1), f"the header is not {','.join(CSV_HEADER)}; write that"
            )
        for row in rows:
            mark = Mark(path_text(path), rows.line_num, 1)
            if row and len(row) != len(CSV_HEADER):
                raise strict_yaml.wrong(
                    mark, f"has {len(row)} columns, not {len(CSV_HEADER)}; write a name and a price"
                )
            if row:
                yield mark, row[0].strip(), row[1].strip()
    except csv.Error as error:
        raise strict_yaml.wrong(Mark(path_text(path), rows.line_num, 1), f"is not CSV ({error}); correct it") from None
