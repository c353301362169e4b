"""What `kvplan simulate --replicas N --format json` prints: kvplan/fleet@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Share, Size
from kvplan.documents.simulation import Inputs, KvUsage, Level, Variant


class Times(TypedDict):
    """Seconds, from the moment at which the router sent a request."""

    ttft_p50: Number
    ttft_p99: Number
    tpot_p50: Number
    tpot_p99: Number


class Replica(TypedDict):
    """One server; averages are over `seconds`, the time in which it was neither starting nor down."""

    index: Count
    gpu: str
    role: Literal["server", "prefill", "decode"]
    state: Literal["starting", "serving", "draining", "down", "gone"]
    seconds: Number
    failures: Count
    requests: Count
    times: Times
    busy: Share
    running: Level
    waiting: Level
    kv_usage: KvUsage
    preemptions: Count
    prefix_hit_rate: Share


class FleetChange(TypedDict):
    """From `seconds` on so many servers take requests."""

    seconds: Number
    servers: Count


class FleetDocument(TypedDict):
    """A workload over many servers behind a router, in time; `fleet` has the figures of all of them together, the
    highest levels being those of one.
    """

    schema: Literal["kvplan/fleet@1"]
    inputs: Inputs
    servers: str
    router: Literal["round-robin", "least-loaded", "prefix", "random"]
    verdict: str
    fleet: Variant
    resent: Annotated[Count, "Requests sent again because their server failed."]
    unserved: Annotated[Count, "Requests that no server could take."]
    servers_mean: Number
    servers_peak: Size
    gpu_hours: Number
    replicas: Annotated[list[Replica], "In the order in which they came."]
    sizes: list[FleetChange]
