"""What `kvplan recommend` prints of several servers, or of file types: kvplan/offers@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Size
from kvplan.documents.plan import Rate


class Offer(TypedDict):
    """What a server would serve: a file's type or a checkpoint's format. `users` at once; `context`: the longest of
    each with everything on GPUs, 0: not searched. Tokens per second of one user alone, and of each while all decode;
    null: not known.
    """

    server: str
    engine: str
    gpu: str
    num_gpus: Size
    serves: str
    holds: bool
    users: Count
    context: Count
    alone: Rate | None
    together: Rate | None
    remark: str
    command: str | None


class OffersDocument(TypedDict):
    """Which servers hold a number of users."""

    schema: Literal["kvplan/offers@1"]
    answer: Annotated[str, "A sentence that begins with Yes or No."]
    holds: bool
    model: str
    users: Size
    max_model_len: Size
    offers: list[Offer]
