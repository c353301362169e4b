"""What `kvplan tune --format json` prints: kvplan/tune@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Size
from kvplan.documents.timed import Target

Verdict = Literal["kept", "broken", "too close to call"]


class TuneQuestion(TypedDict):
    """What is to be served, and on what."""

    model: str
    engine: str
    gpu: str
    num_gpus: Size
    load: str
    targets: list[str]
    max_model_len: Size
    requests_per_s: Annotated[Number | None, "That must be served; null: as many as possible."]


class TunedSetting(TypedDict):
    """A setting that was simulated, at the largest load that keeps the targets; all servers together."""

    servers: Size
    tensor_parallel_size: Size
    data_parallel_size: Size
    flags: Annotated[dict[str, str | int | float | bool], "Engine arguments that differ from what the server takes."]
    requests_per_s: Number
    low: Annotated[Number | None, "On a server as slow as its range allows; null: not simulated."]
    high: Annotated[Number | None, "On a server as fast as its range allows; null: not simulated."]
    output_tokens_per_s: Number
    closed_form_requests_per_s: Number
    running_peak: Annotated[Count, "Requests that ran at once in one server, or in one of its data-parallel ranks."]
    kv_usage_peak: Number
    preemptions: Count
    targets: list[Target]
    on_front: Annotated[bool, "Whether no other setting is as good in every respect."]
    is_default: Annotated[bool, "What the server takes by itself."]
    command: str


class NearestSetting(TypedDict):
    """The setting that misses the targets least, where none meets them."""

    servers: Size
    tensor_parallel_size: Size
    data_parallel_size: Size
    requests_per_s: Annotated[Number | None, "Of all servers; null: of the users, or all requests at once."]
    targets: list[Target]
    command: str


class TuneFailure(TypedDict):
    """Why settings cannot be, and how many."""

    reason: str
    settings: Size


class TuneDocument(TypedDict):
    """The flags that serve the most within targets of time."""

    schema: Literal["kvplan/tune@1"]
    answer: Annotated[str, "A sentence that begins with the flags, or with Yes, No, or Too close to call."]
    verdict: Annotated[Verdict | None, "Of the load that must be served; null where none is stated and some can be."]
    question: TuneQuestion
    num_settings: Size
    num_simulated: Count
    settings: Annotated[list[TunedSetting], "The chosen one first, then by what they serve."]
    limits: Annotated[list[str], "What keeps the chosen one from serving more."]
    too_few_requests: Annotated[bool, "Whether the load is too short to show a limit, so that the defaults are kept."]
    nearest: Annotated[NearestSetting | None, "null: a setting meets the targets, or none were stated."]
    failures: list[TuneFailure]
    unseen: Annotated[list[str], "What of the chosen one no published result has that the times were fitted to."]
    coverage: Annotated[str, "How often the ranges held on unseen results of its kind; empty if none was chosen."]
