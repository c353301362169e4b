"""What `kvplan trace stats --format json` prints: kvplan/trace@1 of a file, kvplan/workload@1 of a named workload."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Correlation, Count, Number, Size


class Arrivals(TypedDict):
    """Null where the file has lengths only."""

    span_s: Number
    rate_per_s: Number | None
    interarrival_cv: Number | None
    peak_minute_per_s: Number | None
    peak_second: Size


class Lengths(TypedDict):
    """Tokens; percentiles by nearest rank."""

    mean: Number
    p50: Size
    p90: Size
    p99: Size
    most: Size


class CurvePoint(TypedDict):
    tokens: Size
    share: Number


class Prefix(TypedDict):
    """Shares of all prompt tokens that a prefix cache finds again; `repeated` with everything held."""

    block: Size
    distinct_tokens: Count
    repeated: Number
    curve: Annotated[list[CurvePoint], "By the tokens held, least recently used first out."]


class TraceDocument(TypedDict):
    """What a request trace looks like (kvplan trace stats FILE). Times in seconds, lengths in tokens."""

    schema: Literal["kvplan/trace@1"]
    source: str
    num_requests: Size
    arrivals: Arrivals | None
    prompt: Lengths
    output: Lengths
    rank_correlation: Correlation | None
    prefix: Prefix | None
    notes: list[str]


class Point(TypedDict):
    percent: Number
    tokens: Size


Tenths = Annotated[list[Count], "By tenth of the output."]


class WorkloadDocument(TypedDict):
    """What is published of a named workload (kvplan trace stats PROFILE); null where nobody states a figure."""

    schema: Literal["kvplan/workload@1"]
    name: str
    kind: Literal["published", "assumed"]
    summary: str
    source: str
    licence: str
    num_requests: Size | None
    prompt: Annotated[list[Point], "Lengths that a percentage of the requests does not exceed."]
    output: Annotated[list[Point], "Lengths that a percentage of the requests does not exceed."]
    prompt_mean: Number
    output_mean: Number
    joint: Annotated[list[Tenths], "Requests by tenth of the prompt; empty: drawn apart."]
    rank_correlation: Correlation | None
    rate_per_s: Number | None
    span_s: Number | None
    interarrival_cv: Number | None
    peak_minute_per_s: Number | None
    peak_second: Size | None
    shared_prefix: Size | None
    prefix_requests: Annotated[list[Size], "How many requests share each beginning."]
    notes: list[str]
