"""The JSON Schema of what `kvplan diff --format json` prints (draft 2020-12)."""

from typing import Final

from kvplan.documents.schema.core import FLAG, TEXT, TEXTS, Schema, maybe, record, rows, table

DELTA: Final[Schema] = {"type": "number"}
CHANGE: Final = record(
    "An input that differs, as text; null: not given there.",
    kind={"enum": ["model", "files", "draft", "gpu", "engine", "argument", "setting", "workload"]},
    name=TEXT,
    old=maybe(TEXT),
    new=maybe(TEXT),
)
ROW: Final = record(
    "A figure old beside new, by its path in kvplan/plan@1; null: not known or not asked for.",
    name=TEXT,
    unit={"enum": ["bytes", "bytes/token", "tokens", "blocks", "requests", "replicas"]},
    old=maybe(DELTA),
    new=maybe(DELTA),
    delta=maybe(DELTA),
)
STEP: Final = record(
    "Inputs changed together; what that did to the figures that it changed, and every figure after it.",
    changes=rows(CHANGE, "One, or several where no plan lies between them."),
    deltas=table(DELTA, "Path of a figure -> by how much it changed."),
    after=table(maybe(DELTA), "Path of a figure -> its value after this step."),
)
SIDE: Final = record("What was compared.", title=TEXT, fits=FLAG)
COMPARISON: Final = record(
    "Two plans compared. The rows of memory, memory.missing subtracted, add up to memory.total; weight_groups to "
    "memory.weights.",
    key=TEXT,
    old=SIDE,
    new=SIDE,
    equal=FLAG,
    worse={"type": "array", "items": {"enum": ["fits", "bytes_per_token", "users"]}},
    changes=rows(CHANGE, "Inputs that differ, and the settings that follow from them."),
    memory=rows(ROW, "Bytes of one rank; empty where a document has no such rows."),
    weight_groups=rows(ROW, "The weights by tensor group."),
    figures=rows(ROW, "Every other figure that both sides have."),
    attribution={"anyOf": [rows(STEP, "The steps from old to new, which add up; null: documents."), {"type": "null"}]},
    explanation=TEXTS,
)
DIFF: Final = record(
    "What changed between two sets of plans. Sizes are integer bytes per GPU rank.",
    schema={"const": "kvplan/diff@1"},
    old=TEXT,
    new=TEXT,
    equal=FLAG,
    worse=FLAG,
    order=TEXT,
    comparisons=rows(COMPARISON, "What both have, in the order of the new one."),
    only_old=TEXTS,
    only_new=TEXTS,
)
SCHEMAS: Final = {"diff": DIFF}
