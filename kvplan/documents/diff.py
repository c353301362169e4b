"""What `kvplan diff --format json` prints: kvplan/diff@1."""

from typing import Annotated, Literal, TypedDict


class Side(TypedDict):
    """What was compared."""

    title: str
    fits: bool


class Change(TypedDict):
    """An input that differs, as text; null: not given there."""

    kind: Literal["model", "files", "draft", "gpu", "engine", "argument", "setting", "workload"]
    name: str
    old: str | None
    new: str | None


class Figure(TypedDict):
    """A figure old beside new, by its path in kvplan/plan@1; null: not known or not asked for."""

    name: str
    unit: Literal["bytes", "bytes/token", "tokens", "blocks", "requests", "replicas"]
    old: float | None
    new: float | None
    delta: float | None


class Step(TypedDict):
    """Inputs changed together; what that did to the figures that it changed, and every figure after it."""

    changes: Annotated[list[Change], "One, or several where no plan lies between them."]
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
    changes: Annotated[list[Change], "Inputs that differ, and the settings that follow from them."]
    memory: Annotated[list[Figure], "Bytes of one rank; empty where a document has no such rows."]
    weight_groups: Annotated[list[Figure], "The weights by tensor group."]
    figures: Annotated[list[Figure], "Every other figure that both sides have."]
    attribution: Annotated[list[Step], "The steps from old to new, which add up; null: documents."] | None
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
