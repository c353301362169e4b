"""Measured figures by component, from any source (a profile run, a server's log or its /metrics page), and their
reconciliation with a plan's predictions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvplan.core.limits import Limits
from kvplan.servers.plans.plan import Kind

Source = Literal["run", "log", "page"]
WHERE: Final[Mapping[Source, str]] = {"run": "in the run", "log": "in the log", "page": "on the page"}
SMALLEST_SHARE: Final = 0.0005  # smallest share not shown as 0.0%


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure of a component; None if there is none: then `note` says why.

    rounding  half of the last written digit
    note      how it was measured, if not obvious
    """

    component: str
    unit: str
    value: float | None
    rounding: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one source, one per component."""

    source: Source
    figures: tuple[Figure, ...]

    def __getitem__(self, component: str) -> Figure:
        return next(figure for figure in self.figures if figure.component == component)

    @property
    def missing(self) -> str:
        """Reason for a figure that the source could have had but lacks: "not in the log"."""
        return not_in(self.source)


def not_in(source: Source) -> str:
    return f"not {WHERE[source]}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's prediction for a component; None if there is none.

    low, high  its range, if rounded inputs leave it open
    kind       how it was predicted
    why        the known reason for a difference, or why nothing is predicted
    """

    value: float | None
    kind: Kind | None = None
    why: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """A component, predicted and measured; None for a missing figure: then `why` says so.

    low, high  range of the prediction, if rounded inputs leave it open
    rounding   half of the last measured digit
    kind       how it was predicted
    why        the known reason for a difference, or for a missing figure
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
        """Measured bytes of a row, 0 if there are none."""
        return int(self.measured or 0)

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or self.measured is None else self.predicted - self.measured

    @property
    def relative(self) -> float | None:
        """Error over measured; 0 if both are 0, None if only the measured value is."""
        if self.error is None or (not self.measured and self.error):
            return None
        return self.error / abs(self.measured) if self.measured else 0.0

    @property
    def is_exact(self) -> bool | None:
        """True if prediction and measurement agree to the measured digits, or None if one is missing."""
        if self.predicted is None or self.measured is None:
            return None
        low = self.predicted if self.low is None else self.low
        high = self.predicted if self.high is None else self.high
        return low - self.rounding <= self.measured <= high + self.rounding


def reconcile(predictions: Mapping[str, Prediction], measurement: Measurement) -> tuple[ComponentRow, ...]:
    """Return a row per component: measured figure and prediction."""
    return tuple(_row(figure, predictions.get(figure.component, Prediction(None))) for figure in measurement.figures)


def _row(figure: Figure, prediction: Prediction) -> ComponentRow:
    why = figure.note if figure.value is None else prediction.why or figure.note
    return ComponentRow(
        figure.component, figure.unit, prediction.value, figure.value, figure.rounding, prediction.kind, why,
        prediction.low, prediction.high,
    )  # fmt: skip


# --- the verdict ------------------------------------------------------------------------------------------------------


def compared(rows: Iterable[ComponentRow]) -> list[ComponentRow]:
    """Rows with both figures."""
    return [row for row in rows if row.error is not None]


def exceeds(rows: Sequence[tuple[str, ComponentRow]], limits: Limits) -> list[str]:
    """Rows whose error exceeds both their limit and the rounding of the measurement, each as `name +3.2%` with the name
    it has in a sentence.
    """
    over = []
    for name, row in rows:
        limit = limits.of(row.component)
        if limit is None or not row.error or row.is_exact:
            continue
        if row.relative is None or abs(row.relative) > limit:
            over.append(f"{name} {error_text(row)}")
    return over


def error_text(row: ComponentRow) -> str:
    """Error of a row: a percentage, or in its unit if the percentage would round to zero."""
    short = "B" if row.unit == "bytes" else row.unit
    if row.relative is None:
        return f"{_digits(row.predicted or 0)} {short}, measured none"
    return f"{row.relative:+.1%}" if abs(row.relative) >= SMALLEST_SHARE else f"{_digits(row.error or 0, '+')} {short}"


def _digits(value: float, sign: str = "") -> str:
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign},.6g}"
