"""What was measured, by component, whoever measured it: a profile run, a server's log or its /metrics page; and one
reconciliation of it with what a plan predicted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvplan.core.limits import Limits
from kvplan.servers.estimates import Kind

Source = Literal["run", "log", "page"]
WHERE: Final[Mapping[Source, str]] = {"run": "in the run", "log": "in the log", "page": "on the page"}
SMALLEST_SHARE: Final = 0.0005  # that is not shown as 0.0 %


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure of a component; None where there is none, and then `note` says why.

    rounding  half of the last digit that was written
    note      how it was measured, where that is not plain
    """

    component: str
    unit: str
    value: float | None
    rounding: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one source, a component each."""

    source: Source
    figures: tuple[Figure, ...]

    def __getitem__(self, component: str) -> Figure:
        return next(figure for figure in self.figures if figure.component == component)

    @property
    def missing(self) -> str:
        """Why a figure is missing that the source may hold: "not in the log"."""
        return not_in(self.source)


def not_in(source: Source) -> str:
    return f"not {WHERE[source]}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan predicts of a component; None where it cannot.

    low, high  what it may be, where the rounding of measured inputs leaves it open
    kind       how it was predicted
    why        what is known of a difference, or why nothing is predicted
    """

    value: float | None
    kind: Kind | None = None
    why: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A component, predicted and measured; None where there is no such figure, and then `why` says so.

    low, high  what the prediction may be, where the rounding of its inputs leaves it open
    rounding   half of the last digit that was measured
    kind       how it was predicted
    why        the reason for a difference, where it is known, or for a missing figure
    """

    component: str
    unit: str
    predicted: float | None
    measured: float | None
    rounding: float = 0.0
    kind: Kind | None = None
    why: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def size(self) -> int:
        """The measured figure of a row of bytes; 0 where there is none."""
        return int(self.measured or 0)

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or self.measured is None else self.predicted - self.measured

    @property
    def relative(self) -> float | None:
        """Error over measured; 0 where both are 0, None where only the measured is."""
        if self.error is None or (not self.measured and self.error):
            return None
        return self.error / abs(self.measured) if self.measured else 0.0

    @property
    def is_exact(self) -> bool | None:
        """Whether the two agree as far as the measured digits go; None where one is missing."""
        if self.predicted is None or self.measured is None:
            return None
        low = self.predicted if self.low is None else self.low
        high = self.predicted if self.high is None else self.high
        return low - self.rounding <= self.measured <= high + self.rounding


def reconcile(predictions: Mapping[str, Prediction], measurement: Measurement) -> tuple[Row, ...]:
    """A row for each component: the measured figure beside what was predicted of it."""
    return tuple(_row(figure, predictions.get(figure.component, Prediction(None))) for figure in measurement.figures)


def _row(figure: Figure, prediction: Prediction) -> Row:
    why = figure.note if figure.value is None else prediction.why or figure.note
    return Row(
        figure.component, figure.unit, prediction.value, figure.value, figure.rounding, prediction.kind, why,
        prediction.low, prediction.high,
    )  # fmt: skip


# --- the verdict ------------------------------------------------------------------------------------------------------


def compared(rows: Iterable[Row]) -> list[Row]:
    """The rows with two figures to hold against each other."""
    return [row for row in rows if row.error is not None]


def exceeds(rows: Sequence[tuple[str, Row]], limits: Limits) -> list[str]:
    """The rows that are off by more than their limit and by more than what was measured is rounded to, each under the
    name it has in a sentence, as `name +3.2%`."""
    over = []
    for name, row in rows:
        limit = limits.of(row.component)
        if limit is None or not row.error or row.is_exact:
            continue
        if row.relative is None or abs(row.relative) > limit:
            over.append(f"{name} {error_text(row)}")
    return over


def error_text(row: Row) -> str:
    """How far off a row is: a share, or its unit where the share would read as none."""
    short = "B" if row.unit == "bytes" else row.unit
    if row.relative is None:
        return f"{_digits(row.predicted or 0)} {short}, measured none"
    return f"{row.relative:+.1%}" if abs(row.relative) >= SMALLEST_SHARE else f"{_digits(row.error or 0, '+')} {short}"


def _digits(value: float, sign: str = "") -> str:
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign},.6g}"
