"""What `kvplan reconcile RUN --format json` prints: kvplan/reconciliation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Size, from_fields
from kvplan.measure.reconcile import Reconciliation
from kvplan.measure.run_capacity import served
from kvplan.measure.run_manifest import inputs_of
from kvplan.measure.techniques import Technique
from kvplan.servers.logs import measurement


class ReconciliationRow(TypedDict):
    """A component of one rank's memory; `error` is predicted less measured, `relative` that over measured."""

    component: str
    predicted: float | None
    measured: float | None
    error: float | None
    relative: float | None


class Total(ReconciliationRow):
    """The rows that have a prediction, which `of` names."""

    of: list[str]


class CapacityRow(TypedDict):
    """A figure of the pool."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str


class Allocator(TypedDict):
    """How one allocator served the workload in the run's pool; `waste` is the share of the blocks handed out that held
    no token, at the densest moment.
    """

    allocator: str
    most_running: Count
    output_tokens_per_s: float
    preemptions: Count
    waste: float | None


class Saving(TypedDict):
    """What a technique saved: `saved` of `base`, and the share; negative where the other allocator takes less."""

    technique: Technique
    saved: float
    base: float
    unit: Literal["tokens", "bytes/token"]
    share: float


class ReconciliationDocument(TypedDict):
    """A run beside the plan for it, component by component; bytes of one rank. The measured rows add up to what the
    device reported and what serving did not reach again.
    """

    schema: Literal["kvplan/reconciliation@1"]
    run: str
    model: str
    device: str
    status: str
    reported: Count
    unreached: Annotated[Count, "Activations that serving did not reach again."]
    held_before: Annotated[int, "What the device held before the run."]
    rows: list[ReconciliationRow]
    tensor_parallel_size: Size
    rank: Literal[0]
    total: Total
    outside: Annotated[list[ReconciliationRow], "KV in host memory and on disk; no part of the total."]
    capacity: list[CapacityRow]
    savings: list[Saving]
    served: list[Allocator]
    gaps: Annotated[list[str], "What was not measured or predicted, and why."]


def document(result: Reconciliation) -> ReconciliationDocument:
    total: Total = {**_row(result.total), "of": [row.component for row in result.rows if row.predicted is not None]}
    return from_fields(
        ReconciliationDocument,
        result,
        schema="kvplan/reconciliation@1",
        run=str(result.run.path),
        status=result.run.status,
        rows=[_row(row) for row in result.rows],
        tensor_parallel_size=inputs_of(result.run).tensor_parallel_size,
        rank=0,
        total=total,
        outside=[_row(row) for row in result.outside],
        capacity=[from_fields(CapacityRow, row, name=row.component) for row in result.capacity],
        savings=[from_fields(Saving, saving) for saving in result.savings],
        served=[from_fields(Allocator, allocator) for allocator in served(result.run)],
        gaps=list(result.gaps),
    )


def _row(row: measurement.ComponentRow) -> ReconciliationRow:
    return from_fields(ReconciliationRow, row)
