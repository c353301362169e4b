"""What `kvplan why` prints: kvplan/diagnosis@1."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypedDict, cast

from kvplan.core.records import from_fields
from kvplan.core.units import GIB, format_gib
from kvplan.documents.cure import CureDocument, cure_document
from kvplan.measure.diagnosis import Diagnosis
from kvplan.measure.states import Start
from kvplan.measure.why_words import summary
from kvplan.planning.plan import Plan
from kvplan.servers.logs.failures import Figures, Size
from kvplan.servers.plans.plan import BUDGET_ROWS, BudgetRows

UNEXPLAINED = GIB  # bytes that are worth a note
Value = int | float | str
TAKEN = ("weights", *BUDGET_ROWS)


class Evidence(TypedDict):
    """A line of the log that shows the cause; its number counts from 1."""

    line: int
    text: str


class Inferred(TypedDict):
    """Something the log does not say, and what it was taken from."""

    what: str
    value: str
    source: str


class Memory(BudgetRows):
    """Where the memory of one rank went, in bytes, by the plan of what was asked for; the log's own figure of what was
    free for the KV cache is in it. The rows from `weights` to `kv_available` and `unused`, less `missing`, add up to
    `total`. By the log alone there is no row between them, and `unused` is the rest.
    """

    basis: Literal["plan", "log"]
    total: int
    weights: int
    unattributed: Annotated[int, "Taken by the log's figures, and explained by no row of the plan."]
    kv_available: int
    kv_needed: int
    unused: int
    missing: int


class StartDocument(TypedDict):
    """One start of a server in the log: its lines, how far it came, how it ended, and the requests it answered."""

    first_line: int
    last_line: int
    phase: str | None
    end: Literal["running", "stopped", "finished", "failed", "died", "cut"]
    stopped_by: Annotated[str | None, "Who told it to stop, if the log says so."]
    seconds: Annotated[int | None, "From ready to its end, where the lines have a time."]
    answered: int
    refused: Annotated[int, "Requests that the server rejected; `too_long` of them were longer than the context."]
    too_long: int


class DiagnosisDocument(TypedDict):
    """Why a server did not start, or ran out of memory. Figures in bytes are of one rank, as the log rounds them."""

    schema: Literal["kvplan/diagnosis@1"]
    engine: str | None
    version: str | None
    model: str | None
    gpu: str | None
    num_gpus: int | None
    outcome: Annotated[
        Literal["started", "stopped", "finished", "failed", "died", "cut", "unknown"],
        "Of the last start. stopped: it was told to; finished: an offline run; cut: the log ends before it is ready.",
    ]
    starts: list[StartDocument]
    cause: str | None
    phase: str | None
    memory_question: bool | None
    summary: Annotated[str, "What happened, in a sentence."]
    evidence: list[Evidence]
    figures: Annotated[dict[str, Value], "What the failing lines state."]
    memory: Memory | None
    cures: list[CureDocument]
    inferred: list[Inferred]
    missing: Annotated[list[str], "Flags that say what the log leaves out."]
    needs: Annotated[list[str], "What to add where the cause cannot be told."]
    notes: list[str]


def diagnosis_document(diagnosis: Diagnosis) -> DiagnosisDocument:
    failure, plan = diagnosis.failure, diagnosis.plan
    request = diagnosis.request
    args = None if request is None else request.args
    unattributed = diagnosis.anchor.unattributed
    gpu = None if request is None or not diagnosis.case.gpu_known else request.gpu.name
    return from_fields(
        DiagnosisDocument,
        failure,
        schema="kvplan/diagnosis@1",
        engine=failure.server,
        model=request.spec.served_name if request is not None else diagnosis.log.model,
        gpu=gpu,
        num_gpus=None if args is None else args.world_size,
        starts=[start_document(start) for start in failure.starts],
        summary=summary(failure),
        evidence=[from_fields(Evidence, row) for row in failure.evidence],
        figures=stated(failure.figures),
        memory=logged_memory(diagnosis) if plan is None or gpu is None else memory_of(plan, unattributed),
        cures=[cure_document(*pair) for pair in zip(diagnosis.cures, diagnosis.commands, strict=True)],
        inferred=[from_fields(Inferred, row) for row in diagnosis.inferred],
        missing=list(diagnosis.missing),
        needs=list(failure.needs),
        notes=notes_of(diagnosis),
    )


def start_document(start: Start) -> StartDocument:
    stopped_by = None if start.order is None or not start.order.by else start.order.by
    return from_fields(StartDocument, start, first_line=start.first, last_line=start.last, stopped_by=stopped_by)


def notes_of(diagnosis: Diagnosis) -> list[str]:
    notes = [] if diagnosis.differs is None else [diagnosis.differs]
    ends = [start.end for start in diagnosis.failure.starts]
    if len(ends) > 1:
        kinds = ", ".join(f"{ends[:-1].count(end)} {end}" for end in dict.fromkeys(ends[:-1]))
        notes.append(f"the log has {len(ends)} starts; this is the last one (before it: {kinds})")
    unattributed = diagnosis.anchor.unattributed
    if diagnosis.case.gpu_known and diagnosis.plan is not None and unattributed > UNEXPLAINED:
        least = "at least " if diagnosis.failure.figures.available_bytes is None else ""
        notes.append(
            f"{least}{format_gib(unattributed)} are taken that no row of the plan explains, by another process "
            "perhaps; the cures leave them"
        )
    return notes


def stated(figures: Figures) -> dict[str, Value]:
    """Every figure that the lines state; sizes in bytes."""
    values = {field.name: getattr(figures, field.name) for field in fields(figures)}
    return {
        name: value.bytes if isinstance(value, Size) else value for name, value in values.items() if value is not None
    }


def logged_memory(diagnosis: Diagnosis) -> Memory | None:
    """What the log itself says of a GPU's memory, where no plan can be made: its total, weights and KV cache."""
    figures, log = diagnosis.failure.figures, diagnosis.log
    total, weights, pool = log.first("total_memory"), log.first("weights"), log.least("available_kv")
    size = figures.total_bytes.bytes if figures.total_bytes is not None else 0 if total is None else total.size
    free = figures.available_bytes.bytes if figures.available_bytes is not None else 0 if pool is None else pool.size
    if size <= 0 or weights is None:
        return None
    left = size - weights.size - max(0, free)
    needed = 0 if figures.needed_bytes is None else figures.needed_bytes.bytes
    rows = {"weights": weights.size, **dict.fromkeys(BUDGET_ROWS, 0)}
    return _memory("log", size, rows, 0, free=max(0, free), needed=needed, left=left)


def memory_of(plan: Plan, unattributed: int) -> Memory:
    memory = plan.memory
    kv_available = max(0, plan.available)
    rows = {name: getattr(memory, name) for name in TAKEN}
    left = memory.total - sum(rows.values()) - kv_available
    rows["non_torch"] -= unattributed
    return _memory(
        "plan", memory.total, rows, unattributed, free=kv_available, needed=plan.bytes_per_request, left=left
    )


def _memory(
    basis: Literal["plan", "log"],
    total: int,
    rows: Mapping[str, int],
    unattributed: int,
    *,
    free: int,
    needed: int,
    left: int,
) -> Memory:
    document: dict[str, Any] = {
        "basis": basis,
        "total": total,
        **rows,
        "unattributed": unattributed,
        "kv_available": free,
        "kv_needed": needed,
        "unused": max(0, left),
        "missing": max(0, -left),
    }
    return cast("Memory", document)
