"""What `kvplan recommend --format json` prints: kvplan/recommendation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Size


class Question(TypedDict):
    """`end` of the range that holds the users."""

    model: str
    id: str
    engine: str
    users: Size
    max_model_len: Size
    mean_tokens: Size | None
    lengths: str | None
    shared_prefix: Count
    end: Literal["low", "likely"]
    prices: str | None


class Servers(TypedDict):
    gpu: str
    num_gpus: Size
    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    data_parallel_size: Annotated[Size, "Ranks of one server, each a replica; they share its experts."]
    replicas: Size
    changes: Annotated[
        list[str],
        "What is less precise than the checkpoint, pipeline stages, experts over data-parallel ranks, and smaller "
        "steps; empty: none.",
    ]
    users_low: Count
    users_likely: Count
    total_memory: Size
    price_per_hour: Number | None
    price_per_user: Number | None


class Settings(TypedDict):
    kv_dtype: str
    max_model_len: Size
    gpu_memory_utilization: Number
    max_num_seqs: Size
    max_num_batched_tokens: Size
    argv: list[str]
    command: str


class Placement(Servers, Settings):
    """`replicas` on tensor x pipeline GPUs each; `command` starts data_parallel_size of them. Users of all replicas."""


class RecommendationFailure(TypedDict):
    """Why one server on so many GPUs holds nobody. refused: it cannot be, whatever the memory; has_room: one user would
    fit, and the server does not start all the same.
    """

    gpu: str
    num_gpus: Size
    reason: str
    refused: bool
    has_room: bool


class RecommendationAnswer(TypedDict):
    """Whether a setting holds the users, the most users that it holds, and the plan that does."""

    holds: bool
    value: float | str | None
    most_users: Count
    users_low: Count | None
    users_likely: Count | None
    settings: Settings | None


class Needs(TypedDict):
    needs: Annotated[
        list[str], "What it takes, together: fewer bits, other GPUs, a shorter context, a higher utilization."
    ]


class RecommendationCure(Needs, Placement):
    """A placement that holds the users where the given GPUs do not as asked, and what it changes in words."""


class Fit(TypedDict):
    """What given GPUs need: the lowest utilization, the longest context, the KV dtypes; and what would hold the
    users.
    """

    gpu: str
    num_gpus: Size
    total_memory: Size
    replicas: Size
    users_per_replica: Size
    reason: Annotated[str | None, "Why one server holds nobody as asked; null where it holds some."]
    refused: Annotated[bool, "Whether the server refuses what was asked whatever the memory, which `reason` says."]
    as_asked: RecommendationAnswer
    utilization: RecommendationAnswer | None
    utilization_is_tight: bool
    context: RecommendationAnswer
    startable_utilization: Annotated[
        Number | None,
        "The utilization of context and kv_dtypes where the default does not start; null: the default, or what was "
        "stated.",
    ]
    kv_dtypes: Annotated[list[RecommendationAnswer], "One for each dtype."]
    solution: Annotated[RecommendationCure | None, "What holds them on these GPUs at the context and precision asked."]
    cures: Annotated[
        list[RecommendationCure],
        "Without a solution: the placements that hold them, the best first; no other one is better in everything.",
    ]


class Pace(TypedDict):
    """Milliseconds from one token of a user to the next while all users of a server decode, without prompts."""

    low_ms: float
    likely_ms: float
    high_ms: float


class RecommendationDocument(TypedDict):
    """The cheapest placements that hold so many users, those that change no precision first; or what given GPUs
    need.
    """

    schema: Literal["kvplan/recommendation@1"]
    answer: Annotated[str, "A sentence that begins with Yes, No, or the GPUs to take."]
    holds: Annotated[bool, "Whether a placement, or the given GPUs as asked, hold the users."]
    question: Question
    placements: Annotated[list[Placement], "The best of each GPU and precision."]
    failures: list[RecommendationFailure]
    fit: Fit | None
    pace: Annotated[Pace | None, "Of the first answer; null if there is none, or if its steps are not modeled."]
