"""The options of `kvplan simulate`."""

from typing import ClassVar, Literal

from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    RAY,
    REPORT,
    TRACE_EVENTS,
    Color,
    Text,
    Texts,
    complete_gpu,
    option,
)
from kvplan.cli.load_options import LoadOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(LoadOptions):
    """Options of `kvplan simulate`; None: not given."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option("--gpu NAME", "GPU name (`kvplan gpus`).", complete=complete_gpu)
    max_model_len: Texts = option(
        "--max-model-len, --ctx TOKENS",
        "Context length: 32k; auto (or -1): the longest that fits. Default: the model's maximum.",
    )
    # the question
    slo: Text = option(
        "--slo TARGETS", "Latency targets, e.g. ttft=2s,tpot=50ms; also finds the largest load that meets them."
    )
    baseline: Literal["contiguous"] | None = option("--baseline", "Compare with memory reserved for the full context.")
    tier: Texts = option(
        "--tier TIER", "Tier for KV offloading: host memory, then files, e.g. cpu=512GiB@25GB/s; repeatable."
    )
    tier_chunk: Text = option("--tier-chunk TOKENS", "Tokens per chunk in a tier. Default: a block.")
    efficiency: Text = option(
        "--efficiency SHARES",
        "Achieved fractions of the GPU's peak bandwidth and FLOP/s, e.g. weights=0.7,kv=0.9,flops=0.6.",
    )
    # several servers
    replicas: Text = option("--replicas N", "Simulate a fleet of this many servers behind a router.")
    pool: Texts = option("--pool GPU=N", "Servers on another GPU in addition to --replicas, e.g. l40s=4; repeatable.")
    router: Literal["round-robin", "least-loaded", "prefix", "random"] | None = option(
        "--router", "How a fleet's requests are routed. Default: least-loaded."
    )
    disaggregate: Text = option(
        "--disaggregate xPyD", "Run prefill on x servers and decode on y, e.g. 1P2D; needs --link."
    )
    link: Text = option("--link SIZE/s", "Bandwidth for KV transfer from prefill to decode servers, e.g. 50GB/s.")
    fail: Texts = option(
        "--fail N@TIME",
        "Fail a server (0-based) at a time, e.g. 3@10m, or 3@10m:5m (back after 5 minutes); repeatable.",
    )
    autoscale: Text = option(
        "--autoscale RULE",
        "Autoscale, starting at --replicas (default: min): min=1,max=8,target=20 (requests per server), every=15s, "
        "provision=3m, settle=5m.",
    )
    jobs: Text = option(
        "--jobs N", "Maximum number of processes for a fleet with random or round-robin routing. Default: all cores."
    )
    ray: Text = option(*RAY)
    # the answer
    film: Text = option("--film PATH", "Write an animation of the KV cache blocks (first 2,000 steps), e.g. pool.html.")
    trace_events: Text = option(*TRACE_EVENTS)
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    timeline: Text = option("--timeline FILE.csv", "Write running and waiting requests over time to a CSV file.")
    requests: Text = option("--requests FILE.csv|parquet", "Write one row per request, as CSV or Parquet.")
    figure: Text = option("--figure FILE.png|svg", "Draw the simulation over time.")
    exit_code: bool = option("--exit-code", "Exit with 1 if --slo is missed or too close to call.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)
