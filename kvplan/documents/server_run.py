"""What `kvplan profile --server --format json` prints: kvplan/server-run@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Share, Size


class Times(TypedDict):
    """Seconds."""

    mean: Number
    p50: Number
    p90: Number
    p99: Number


class Pool(TypedDict):
    """The server's own figures from its /metrics page; null where the page has none."""

    tokens: Size | None
    peak_usage: Share | None
    peak_running: Count | None
    peak_waiting: Count | None
    preemptions: Count | None
    hit_rate: Annotated[Share | None, "Of the tokens looked up in the prefix cache during the run."]


class ServerRunDocument(TypedDict):
    """A real server under a load that kvplan sent. Rates are per second."""

    schema: Literal["kvplan/server-run@1"]
    url: str
    model: str
    directory: str
    num_requests: Size
    num_failed: Count
    failures: Annotated[list[str], "The first few reasons, each once."]
    seconds: Number
    prompt_tokens: Count
    output_tokens: Count
    requests_per_s: Number
    output_tokens_per_s: Number
    ttft: Annotated[Times | None, "Time to first token."]
    tpot: Annotated[Times | None, "Time per output token after the first."]
    e2el: Annotated[Times | None, "Whole requests."]
    pool: Pool | None
    gpu_used: Annotated[Size | None, "Most bytes that NVML saw in use, over all GPUs of this machine."]
