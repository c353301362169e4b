"""What is drawn on an answer's page: bars that the page itself draws, and figures that are SVG already."""

from collections.abc import Iterable

from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a bar: its size in the figure's unit, and a name that gives it its color and pattern; "" is plain."""

    label: str
    size: float
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what stands before it and behind it, its parts, and where a line crosses it, if anywhere."""

    label: str
    parts: tuple[Piece, ...]
    text: str = ""
    mark: float | None = None
    room: float | None = None  # what there is: parts beyond it are hatched

    @property
    def size(self) -> float:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars of one scale, which ends with the largest; `note` says what the line across a bar means."""

    title: str
    bars: tuple[Bar, ...]
    note: str = ""

    @property
    def scale(self) -> float:
        return max((bar.size for bar in self.bars), default=0.0) or 1.0

    @property
    def legend(self) -> dict[str, str]:
        """Name -> label of the parts that have a color of their own."""
        return {part.name: part.label for bar in self.bars for part in bar.parts if part.name}


@dataclass(frozen=True, slots=True)
class Svg:
    """A figure as SVG of kvplan's own making: (sheet's name, SVG) for a wide page and a phone's."""

    title: str
    sheets: tuple[tuple[str, str], ...]


Figure = Bars | Svg


def side_by_side(title: str, rows: Iterable[tuple[str, float | None, float, str, str]]) -> list[Figure]:
    """Two bars for each of (label, predicted, measured, and both as text) but what is 0 on both sides; a row without
    a prediction has one."""
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
    """Plain bars of (label, value, text), the first `most` of them; nothing to draw where all are 0."""
    drawn = tuple(Bar(label, (Piece(label, size, text),), text) for label, size, text in rows)[:most]
    return [Bars(title, drawn)] if any(bar.size for bar in drawn) else []
