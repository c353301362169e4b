"""What `kvplan preflight --format json` prints: kvplan/preflight@1."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Literal, TypedDict, cast

from kvplan.core.units import plural
from kvplan.documents.cure import CureDocument, cure_document
from kvplan.measure.machine import Machine
from kvplan.measure.preflight import MEMORY, Check, Outcome, Verdict


class PreflightDocument(TypedDict):
    """Whether a server starts on this machine now."""

    schema: Literal["kvplan/preflight@1"]
    outcome: Annotated[Outcome, "may not start: the range of the estimates has both answers."]
    answer: Annotated[str, "The first line: yes or no, and why."]
    model: str
    engine: str
    gpu: str
    num_gpus: int
    max_model_len: int
    users: Annotated[int, "Requests that run at once, of the full context; 0 if it does not start."]
    machine: Annotated[Machine, "As it was read, in bytes; null: it does not say."]
    checks: Annotated[list[Check], "unknown: the machine does not say."]
    cures: Annotated[list[CureDocument], "Best first; empty if it starts, or if no flag helps."]


def preflight_document(result: Verdict, words: Sequence[str] | None) -> PreflightDocument:
    """Build the document.

    words  of the command, in which fixes change flags; None: fixes have whole commands
    """
    answer = result.plan
    answers = {
        "schema": "kvplan/preflight@1",
        "outcome": result.outcome,
        "answer": answer_text(result),
        "model": answer.request.spec.served_name,
        "engine": answer.request.release.label,
        "gpu": answer.request.gpu.name,
        "num_gpus": answer.request.args.num_gpus,
        "max_model_len": answer.settings.max_model_len,
        "users": answer.concurrency.all_users.likely,
        "cures": cures_of(result, words),
    }
    records = {"machine": asdict(result.machine), "checks": list(map(asdict, result.checks))}
    return cast("PreflightDocument", {**answers, **records})  # records become objects


def cures_of(result: Verdict, words: Sequence[str] | None) -> list[CureDocument]:
    """Fixes that the plan has, if GPUs or their memory decide."""
    if result.decisive is None or result.decisive.name not in ("GPUs", MEMORY):
        return []
    from kvplan.measure.serverlog.asked import cured  # only if something is to be fixed
    from kvplan.planning.live import fixes

    case, cures = fixes(result.plan, len(result.machine.gpus) or None)
    return [cure_document(cure, cured(case, cure, words)) for cure in cures]


def answer_text(result: Verdict) -> str:
    """ "Yes: qwen3-8b starts on l40s (vllm@0.33), for 12 users of 8,192 tokens"."""
    request, users, check = result.plan.request, result.plan.concurrency, result.decisive
    count = "" if request.args.num_gpus == 1 else f"{request.args.num_gpus} x "
    where = f"on {count}{request.gpu.name} ({request.release.label})"
    if check is not None and (result.outcome == "does not start" or not result.plan.fits):
        word = "No" if result.outcome == "does not start" else "Perhaps"
        return f"{word}: {request.spec.served_name} {result.outcome} {where}: {check.text}"
    number = plural(users.all_users.likely, "user")
    text = f"{request.spec.served_name} starts {where}, for {number} of {result.plan.settings.max_model_len:,} tokens"
    return f"Yes: {text}" if check is None else f"Yes, at a risk: {text}: {check.text}"
