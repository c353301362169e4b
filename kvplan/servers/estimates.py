"""Modeled bytes: range, formula with numbers filled in, source, and how it is known."""

from typing import Literal

from kvplan.core.records import dataclass

Kind = Literal["exact", "formula", "calibrated", "measured"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one rank, low <= likely <= high; `formula` has its numbers filled in."""

    low: int
    likely: int
    high: int
    formula: str
    source: str
    kind: Kind
