"""A fix in JSON, as the documents of `why` and `preflight` have it."""

from math import floor
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from kvplan.core.records import from_fields

if TYPE_CHECKING:
    from kvplan.planning.case import Cure
    from kvplan.planning.plan import Plan


class Effect(TypedDict):
    """What the server has then: requests of the full context at once, tokens in its KV cache, and the context."""

    users: float
    tokens: int
    max_model_len: int


class CureDocument(TypedDict):
    """A change that helps. `starts` is true where a plan was made of it that starts, null where none could be made;
    `effect` is of that plan.
    """

    kind: Annotated[str, "The engine argument that is changed."]
    way: Annotated[str, "How the flag is turned: raise, lower, add or change."]
    flags: list[str]
    text: str
    command: Annotated[str | None, "The server's own command with the change in it."]
    effect: Effect | None
    starts: Literal[True] | None
    proof: Annotated[str | None, "Figures of the log from which the value follows, where no plan was made."]


def cure_document(cure: "Cure", command: str | None) -> CureDocument:
    effect = None if cure.plan is None else effect_of(cure.plan)
    starts = True if cure.starts else None
    return from_fields(CureDocument, cure, flags=list(cure.flags), command=command, effect=effect, starts=starts)


def effect_of(plan: "Plan") -> Effect:
    users = min(plan.concurrency.max, plan.concurrency.max_num_seqs)
    return {
        "users": floor(100 * users) / 100,
        "tokens": plan.capacity.tokens,
        "max_model_len": plan.capacity.max_model_len,
    }
