"""What `kvplan diff --format json` prints: kvplan/diff@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.planning import attribute
from kvplan.planning import diff as planned


class Side(TypedDict):
    """What was compared."""

    title: str
    fits: bool


class DiffChange(TypedDict):
    """An input that differs, as text; null: not given there."""

    kind: Literal["model", "files", "draft", "gpu", "engine", "argument", "setting", "workload"]
    name: str
    old: str | None
    new: str | None


class Figure(TypedDict):
    """A figure old beside new, by its path in kvplan/plan@1; null: not known or not asked for."""

    name: str
    unit: attribute.Unit
    old: float | None
    new: float | None
    delta: float | None


class DiffStep(TypedDict):
    """Inputs changed together; what that did to the figures that it changed, and every figure after it."""

    changes: Annotated[list[DiffChange], "One, or several where no plan lies between them."]
    deltas: Annotated[dict[str, float], "Path of a figure -> by how much it changed."]
    after: Annotated[dict[str, float | None], "Path of a figure -> its value after this step."]


class Comparison(TypedDict):
    """Two plans compared. The rows of memory, memory.missing subtracted, add up to memory.total; weight_groups to
    memory.weights.
    """

    key: str
    old: Side
    new: Side
    equal: bool
    worse: list[Literal["fits", "bytes_per_token", "users"]]
    changes: Annotated[list[DiffChange], "Inputs that differ, and the settings that follow from them."]
    memory: Annotated[list[Figure], "Bytes of one rank; empty where a document has no such rows."]
    weight_groups: Annotated[list[Figure], "The weights by tensor group."]
    figures: Annotated[list[Figure], "Every other figure that both sides have."]
    attribution: Annotated[list[DiffStep], "The steps from old to new, which add up; null: documents."] | None
    explanation: list[str]


class DiffDocument(TypedDict):
    """What changed between two sets of plans. Sizes are integer bytes per GPU rank."""

    schema: Literal["kvplan/diff@1"]
    old: str
    new: str
    equal: bool
    worse: bool
    order: str
    comparisons: Annotated[list[Comparison], "What both have, in the order of the new one."]
    only_old: list[str]
    only_new: list[str]


def diff_document(result: planned.Difference) -> DiffDocument:
    """A difference as JSON values (kvplan/diff@1)."""
    return {
        "schema": "kvplan/diff@1",
        "old": printable(result.old, 1000),
        "new": printable(result.new, 1000),
        "equal": result.is_equal,
        "worse": result.is_worse,
        "order": attribute.ORDER_TEXT,
        "comparisons": [_comparison_document(each) for each in result.comparisons],
        "only_old": list(result.only_old),
        "only_new": list(result.only_new),
    }


def _comparison_document(pair: planned.Comparison) -> Comparison:
    return {
        "key": pair.new.key,
        "old": {"title": pair.old.title, "fits": pair.old.fits},
        "new": {"title": pair.new.title, "fits": pair.new.fits},
        "equal": pair.is_equal and not pair.changes,
        "worse": list(pair.worse),
        "changes": [from_fields(DiffChange, change) for change in pair.changes],
        "memory": [row_document(row) for row in pair.memory],
        "weight_groups": [row_document(row) for row in pair.groups],
        "figures": [row_document(row) for row in pair.figures],
        "attribution": None if pair.steps is None else [_step_document(step) for step in pair.steps],
        "explanation": planned.explanation(pair),
    }


def row_document(row: planned.DiffRow) -> Figure:
    """A row as JSON values."""
    return from_fields(Figure, row)


def _step_document(step: attribute.InputStep) -> DiffStep:
    return {
        "changes": [from_fields(DiffChange, change) for change in step.changes],
        "deltas": step.deltas,
        "after": dict(step.after),
    }
