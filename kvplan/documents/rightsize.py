"""What `kvplan rightsize --format json` prints: kvplan/rightsize@1."""

from typing import Annotated, Literal, TypedDict


class Workload(TypedDict):
    """What a server was asked between two pages; null: not known without the time between them."""

    ended: Annotated[int, "Requests that ended; the means are theirs."]
    mean_prompt_tokens: float
    mean_output_tokens: float
    arrivals_per_second: float | None
    output_tokens_per_second: float | None
    prefix_share: Annotated[float | None, "Of prompt tokens, found in the prefix cache."]


class Use(TypedDict):
    """What that took; null: not known."""

    mean_running: Annotated[float | None, "Requests, over time."]
    mean_waiting: float | None
    queue_grows: bool
    preemptions: int
    time_used: Annotated[float | None, "Share of the time in which a step ran."]
    seconds_per_token: Annotated[float | None, "Mean time between two tokens of a request."]
    mean_ttft_seconds: float | None
    pool_tokens: Annotated[int | None, "What the KV cache holds, all engines together."]
    held_tokens: Annotated[
        float | None, "Context of running requests, over time; of a shared prefix each one's counts."
    ]
    pool_used: float | None


class Needed(TypedDict):
    """How many times today's servers; by: what decides."""

    low: float
    high: float
    by: Literal["queue", "memory"]
    text: str


class RightsizeDocument(TypedDict):
    """A live server's workload, and how much of it that used."""

    schema: Literal["kvplan/rightsize@1"]
    seconds: Annotated[float | None, "Between the pages; null: not stated, or the server began anew."]
    restarted: bool
    growth: Annotated[float, "How many times as many requests were asked about."]
    workload: Workload
    use: Use
    needed: Needed | None
    answer: str
