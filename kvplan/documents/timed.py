"""What `kvplan recommend --slo --format json` prints: kvplan/timed-recommendation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Size


class TimedQuestion(TypedDict):
    """`strict`: the whole range of every time must keep its promise."""

    model: str
    engine: str
    load: str
    targets: list[str]
    users: Count | None
    rate: Number | None
    prices: Annotated[str | None, "Where the prices come from."]
    max_model_len: Size
    spare: Count
    strict: bool


class Target(TypedDict):
    """Seconds, or a share of the requests; low and high are the ends of its range."""

    promise: str
    limit: Number
    value: Number | None
    low: Number | None
    high: Number | None


class TimedPlacement(TypedDict):
    """Servers that were simulated, each at its share of the load; `servers` includes the spare ones."""

    gpu: str
    servers: Size
    spare: Count
    num_gpus: Size
    tensor_parallel_size: Size
    changes: list[str]
    price_per_hour: Number | None
    price_per_million_output_tokens: Number | None
    output_tokens_per_s: Annotated[Number, "Of all servers together; the spare ones serve nothing."]
    server_output_tokens_per_s: Annotated[Number, "Of one server."]
    kv_usage_peak: Number
    targets: list[Target]
    warnings: list[str]
    command: str


class Bounded(TypedDict):
    """A placement that was not simulated: it needs at least so many servers by the closed form."""

    gpu: str
    servers: Size
    num_gpus: Size
    tensor_parallel_size: Size
    changes: list[str]
    price_per_hour: Number | None


class TimedFailure(TypedDict):
    """Why servers on so many of these GPUs do not do, however many there are."""

    gpu: str
    num_gpus: Size
    reason: str


class TimedRecommendationDocument(TypedDict):
    """The cheapest servers that keep targets of time for a load."""

    schema: Literal["kvplan/timed-recommendation@1"]
    answer: Annotated[str, "A sentence that begins with Yes, No, or the GPUs to take."]
    holds: bool
    question: TimedQuestion
    placements: list[TimedPlacement]
    bounded: list[Bounded]
    failures: list[TimedFailure]
    shares_experts: Annotated[
        bool,
        "Whether data-parallel ranks that share experts might serve this model cheaper; their steps are not timed.",
    ]
    unseen: Annotated[list[str], "What of the placements no published result has that the times were fitted to."]
    coverage: Annotated[list[str], "How often the ranges held on unseen results of the placements' kinds."]
