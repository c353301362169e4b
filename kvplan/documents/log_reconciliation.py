"""What `reconcile --log` and `--metrics` print: kvplan/log-reconciliation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Keyword, Number, Size
from kvplan.servers.logs.rows import PARTS, UNITS


class LogReconciliationRow(TypedDict):
    """A figure, predicted and logged; null where there is none, and `why` says so. `low` and `high` are what the
    prediction may be under the log's rounding of its inputs, `rounding` half of the logged figure's last digit.
    """

    name: Annotated[str, Keyword("enum", (*PARTS, *UNITS))]
    unit: Literal["bytes", "blocks", "tokens", "requests"]
    predicted: float | None
    low: float | None
    high: float | None
    logged: float | None
    rounding: Number
    error: float | None
    relative: float | None
    exact: bool | None
    kind: Literal["exact", "formula", "calibrated", "measured", None]
    why: str | None


class AllowedGpu(TypedDict):
    """A GPU on which the logged KV cache memory lies in the plan's range, and the rows that the plan has there."""

    gpu: str
    rows: list[LogReconciliationRow]


class LogReconciliationDocument(TypedDict):
    """A server's log, or its /metrics page, beside the plan for it; bytes are of one rank. `rows` are predicted from
    the inputs alone; none is if no plan can be made of what the log says, which the last of `notes` names. `given` are
    predicted from the size of the pool as it was logged (`given_from`).
    """

    schema: Literal["kvplan/log-reconciliation@1"]
    engine: str
    model: str
    gpus: list[str]
    total_memory: Size | None
    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    data_parallel_size: Size
    max_model_len: Size | None
    rows: Annotated[list[LogReconciliationRow], "From the inputs alone."]
    allowed: Annotated[list[AllowedGpu], "If the log names no GPU: those that its KV cache allows, nearest first."]
    given_from: str | None
    given: Annotated[list[LogReconciliationRow], "From the pool's bytes, or its blocks, as they were logged."]
    notes: list[str]
