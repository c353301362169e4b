"""Charts of an answer's page: bars that the page itself draws, and figures that are already SVG."""

from collections.abc import Iterable

from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a bar: its size in the figure's unit, and a name that selects its color and pattern; "" is plain."""

    label: str
    size: float
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, the text after it, its segments, and the position of a line across it, if any."""

    label: str
    parts: tuple[Piece, ...]
    text: str = ""
    mark: float | None = None
    room: float | None = None  # capacity: segments beyond it are hatched

    @property
    def size(self) -> float:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars on one scale, which ends at the largest; `note` explains the line across a bar."""

    title: str
    bars: tuple[Bar, ...]
    note: str = ""

    @property
    def scale(self) -> float:
        return max((bar.size for bar in self.bars), default=0.0) or 1.0

    @property
    def legend(self) -> dict[str, str]:
        """Name -> label of the segments that have their own color."""
        return {part.name: part.label for bar in self.bars for part in bar.parts if part.name}


@dataclass(frozen=True, slots=True)
class Svg:
    """An SVG figure drawn by kvplan: (sheet's name, SVG) for a wide page and a phone."""

    title: str
    sheets: tuple[tuple[str, str], ...]


Figure = Bars | Svg


def side_by_side(title: str, rows: Iterable[tuple[str, float | None, float, str, str]]) -> list[Figure]:
    """Two bars for each of (label, predicted, measured, and both as text), skipping rows that are 0 on both sides; one
    bar if there is no prediction.
    """
    drawn: list[Bar] = []
    for label, predicted, measured, predicted_text, measured_text in rows:
        if not predicted and not measured:
            continue
        if predicted is not None:
            part = Piece("predicted", max(0.0, predicted), predicted_text, "predicted")
            drawn.append(Bar(f"{label}, predicted", (part,), predicted_text))
        drawn.append(
            Bar(
                f"{label}, measured", (Piece("measured", max(0.0, measured), measured_text, "measured"),), measured_text
            )
        )
    return [Bars(title, tuple(drawn))] if any(bar.size for bar in drawn) else []


def bars(title: str, rows: Iterable[tuple[str, float, str]], most: int = 24) -> list[Figure]:
    """Plain bars of (label, value, text), the first `most` of them; none if all are 0."""
    drawn = tuple(Bar(label, (Piece(label, size, text),), text) for label, size, text in rows)[:most]
    return [Bars(title, drawn)] if any(bar.size for bar in drawn) else []
