"""What `kvplan reconcile --bench --format json` prints: kvplan/bench-reconciliation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Number


class BenchReconciliationRow(TypedDict):
    """One figure in seconds, or tokens per second; `error` is predicted over measured less 1."""

    figure: str
    predicted: Number
    low: Number
    high: Number
    measured: Number
    error: float
    in_range: bool


class BenchReconciliationDocument(TypedDict):
    """A result of a load generator beside what kvplan predicts of that load."""

    schema: Literal["kvplan/bench-reconciliation@1"]
    model: str
    gpu: str
    tool: str
    load: str
    rows: Annotated[list[BenchReconciliationRow], "Figures that both have."]
