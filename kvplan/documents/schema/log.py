"""The JSON Schema of what `reconcile --log` and `--metrics` print (draft 2020-12)."""

from typing import Final

from kvplan.documents.schema.core import FLAG, NUMBER, SIZE, TEXT, TEXTS, Schema, maybe, record, rows
from kvplan.measure.serverlog.rows import PARTS, POOL, RUNNING

_SIGNED: Final[Schema] = {"type": "number"}
ROW: Final = record(
    "A figure, predicted and logged; null where there is none, and `why` says so. `low` and `high` are what the "
    "prediction may be under the log's rounding of its inputs, `rounding` half of the logged figure's last digit.",
    name={"enum": [*PARTS, *POOL, RUNNING]},
    unit={"enum": ["bytes", "blocks", "tokens", "requests"]},
    predicted=maybe(_SIGNED),
    low=maybe(_SIGNED),
    high=maybe(_SIGNED),
    logged=maybe(_SIGNED),
    rounding=NUMBER,
    error=maybe(_SIGNED),
    relative=maybe(_SIGNED),
    exact=maybe(FLAG),
    kind={"enum": ["exact", "formula", "calibrated", "measured", None]},
    why=maybe(TEXT),
)
LOG_RECONCILIATION: Final = record(
    "A server's log, or its /metrics page, beside the plan for it; bytes are of one rank. `rows` are predicted from "
    "the inputs alone, `given` from the size of the pool as it was logged (`given_from`).",
    schema={"const": "kvplan/log-reconciliation@1"},
    engine=TEXT,
    model=TEXT,
    gpus=TEXTS,
    total_memory=maybe(SIZE),
    tensor_parallel_size=SIZE,
    pipeline_parallel_size=SIZE,
    data_parallel_size=SIZE,
    max_model_len=SIZE,
    rows=rows(ROW, "From the inputs alone."),
    given_from=maybe(TEXT),
    given=rows(ROW, "From the pool's bytes, or its blocks, as they were logged."),
    notes=TEXTS,
)
SCHEMAS: Final = {"log-reconciliation": LOG_RECONCILIATION}
