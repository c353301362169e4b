"""What `kvplan simulate --format json` prints: kvplan/simulation@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Share, Size

Interval = list[float]  # [low, high]


class Inputs(TypedDict):
    """What was run; `unseen` names what of it no published result has that the times were fitted to, and `coverage`
    says how often the ranges held on results of its kind.
    """

    model: str
    id: str
    engine: str
    gpu: str
    num_gpus: Size
    max_model_len: Size
    num_blocks: Size
    block_size: Size
    max_num_seqs: Size
    max_num_batched_tokens: Size
    load: str
    step_time: str
    unseen: list[str]
    coverage: str


class Requests(TypedDict):
    """`judged` are those whose times count: where users wait for answers, not each one's first.

    `good` keep every promised time; `queue_grows` where more come than are served.
    """

    arrived: Count
    finished: Count
    judged: Count
    rejected: Count
    failed: Count
    preempted: Count
    arrival_rate: Number | None
    queue_grows: bool
    good: Count | None


class Spread(TypedDict):
    """Seconds; percentiles by nearest rank; ranges are [low, high]; the inputs say how often they held."""

    mean: Number
    p50: Number
    p90: Number
    p99: Number
    mean_range: Interval
    p50_range: Interval
    p90_range: Interval
    p99_range: Interval


class Times(TypedDict):
    """To the first token, per output token after it, in the queue, and of the whole request."""

    ttft: Spread
    tpot: Spread
    queue: Spread
    latency: Spread


class Level(TypedDict):
    """Number of requests."""

    mean: Number
    peak: Count


class KvUsage(TypedDict):
    """Share of the pool's blocks in use."""

    mean: Share
    peak: Share


class PrefixCache(TypedDict):
    """Prompt tokens looked up and found."""

    hit_rate: Share
    hit_tokens: Count
    looked_up: Count


class Tier(TypedDict):
    name: str
    hit_rate: Share
    hit_tokens: Count


class Throughput(TypedDict):
    """Per second, over the whole run; `goodput_per_s` counts requests that keep every promised time."""

    requests_per_s: Number
    output_tokens_per_s: Number
    prompt_tokens_per_s: Number
    requests_per_s_range: Interval
    output_tokens_per_s_range: Interval
    goodput_per_s: Number | None


class Slo(TypedDict):
    """`kept` holds of the likely value, `verdict` of its whole range."""

    promise: str
    limit: Number
    value: Number | None
    kept: bool
    low: Number | None
    high: Number | None
    verdict: Literal["kept", "broken", "too close to call"]


class Largest(TypedDict):
    """The largest load that keeps every promise, and the smallest tried that breaks one: requests per second, or
    users.
    """

    keeps: Number | None
    breaks: Number | None
    runs: Size


class Variant(TypedDict):
    """One way to run the load. Averages are over time, from the first arrival to the last end."""

    name: str
    requests: Requests
    seconds: Number
    steps: Count
    times: Times
    running: Level
    waiting: Level
    kv_usage: KvUsage
    empty_slots: Share | None
    preemptions: Count
    prefix_cache: PrefixCache
    tiers: Annotated[list[Tier], "As given, fastest first."]
    ttft_saved: Annotated[float | None, "Seconds, on average; null without tiers."]
    throughput: Throughput
    slo: Annotated[
        list[Slo], "Seconds, or shares of the requests; null where the percentile is a request that was not served."
    ]
    largest: Largest | None


class SimulationDocument(TypedDict):
    """A workload over a plan, in time; the first variant is what was asked for."""

    schema: Literal["kvplan/simulation@1"]
    inputs: Inputs
    verdict: str
    variants: Annotated[list[Variant], "One run for each."]
