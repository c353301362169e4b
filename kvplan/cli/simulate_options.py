"""The options of `kvplan simulate`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.load_options import LoadOptions
from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    QuietOption,
    RayOption,
    ReportOption,
    Text,
    TraceEventsOption,
    complete_gpu,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(LoadOptions):
    """Options of `kvplan simulate`; None: not given."""

    gpu: Annotated[
        list[str] | None,
        option("--gpu", help="GPU name (`kvplan gpus`).", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        list[str] | None,
        option(
            "--max-model-len",
            "--ctx",
            help="Context length: 32k; auto (or -1): the longest that fits. Default: the model's maximum.",
            metavar="TOKENS",
        ),
    ] = None
    # the question
    slo: Annotated[
        Text,
        option(
            "--slo",
            help="Latency targets, e.g. ttft=2s,tpot=50ms; also finds the largest load that meets them.",
            metavar="TARGETS",
        ),
    ] = None
    baseline: Annotated[
        Literal["contiguous"] | None,
        typer.Option("--baseline", help="Compare with memory reserved for the full context.", show_default=False),
    ] = None
    tier: Annotated[
        list[str] | None,
        option(
            "--tier",
            help="Tier for KV offloading: host memory, then files, e.g. cpu=512GiB@25GB/s; repeatable.",
            metavar="TIER",
        ),
    ] = None
    tier_chunk: Annotated[
        Text, option("--tier-chunk", help="Tokens per chunk in a tier. Default: a block.", metavar="TOKENS")
    ] = None
    efficiency: Annotated[
        Text,
        option(
            "--efficiency",
            help="Achieved fractions of the GPU's peak bandwidth and FLOP/s, e.g. weights=0.7,kv=0.9,flops=0.6.",
            metavar="SHARES",
        ),
    ] = None
    # several servers
    replicas: Annotated[
        Text, option("--replicas", help="Simulate a fleet of this many servers behind a router.", metavar="N")
    ] = None
    pool: Annotated[
        list[str] | None,
        option(
            "--pool", help="Servers on another GPU in addition to --replicas, e.g. l40s=4; repeatable.", metavar="GPU=N"
        ),
    ] = None
    router: Annotated[
        Literal["round-robin", "least-loaded", "prefix", "random"] | None,
        typer.Option("--router", help="How a fleet's requests are routed. Default: least-loaded.", show_default=False),
    ] = None
    disaggregate: Annotated[
        Text,
        option(
            "--disaggregate",
            help="Run prefill on x servers and decode on y, e.g. 1P2D; needs --link.",
            metavar="xPyD",
        ),
    ] = None
    link: Annotated[
        Text,
        option(
            "--link",
            help="Bandwidth for KV transfer from prefill to decode servers, e.g. 50GB/s.",
            metavar="SIZE/s",
        ),
    ] = None
    fail: Annotated[
        list[str] | None,
        option(
            "--fail", help="Fail a server (0-based) at a time, e.g. 3@10m, or 3@10m:5m (back after 5 minutes); "
            "repeatable.",
            metavar="N@TIME",
        ),
    ] = None  # fmt: skip
    autoscale: Annotated[
        Text,
        option(
            "--autoscale",
            help="Autoscale, starting at --replicas: min=1,max=8,target=20 (requests per server), every=15s, "
            "provision=3m, settle=5m.",
            metavar="RULE",
        ),
    ] = None
    jobs: Annotated[
        Text,
        option(
            "--jobs",
            help="Maximum number of processes for a fleet with random or round-robin routing. Default: all cores.",
            metavar="N",
        ),
    ] = None
    ray: RayOption = None
    # the answer
    film: Annotated[
        Text,
        option(
            "--film",
            help="Write an animation of the KV cache blocks (first 2,000 steps), e.g. pool.html.",
            metavar="PATH",
        ),
    ] = None
    trace_events: TraceEventsOption = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    timeline: Annotated[
        Text,
        option("--timeline", help="Write running and waiting requests over time to a CSV file.", metavar="FILE.csv"),
    ] = None
    requests: Annotated[
        Text, option("--requests", help="Write one row per request, as CSV or Parquet.", metavar="FILE.csv|parquet")
    ] = None
    figure: Annotated[Text, option("--figure", help="Draw the simulation over time.", metavar="FILE.png|svg")] = None
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if --slo is missed or too close to call.")
    ] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
