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
    """`kvplan simulate`; None: not said."""

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
    # what is asked
    slo: Annotated[
        Text,
        option(
            "--slo",
            help="Latency targets, ttft=2s,tpot=50ms; also finds the largest load that meets them.",
            metavar="PROMISES",
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
            help="Tier for KV cache outside the GPU, fastest first: cpu=512GiB@25GB/s; repeatable.",
            metavar="TIER",
        ),
    ] = None
    tier_chunk: Annotated[
        Text, option("--tier-chunk", help="Tokens per chunk in a tier. Default: 256.", metavar="TOKENS")
    ] = None
    efficiency: Annotated[
        Text,
        option(
            "--efficiency",
            help="Fractions of the GPU's peak figures that are reached: weights=0.7,kv=0.9,flops=0.6.",
            metavar="SHARES",
        ),
    ] = None
    # many servers
    replicas: Annotated[
        Text, option("--replicas", help="Simulate a fleet of so many servers behind a router.", metavar="N")
    ] = None
    pool: Annotated[
        list[str] | None,
        option("--pool", help="More servers of another GPU, beside --replicas: l40s=4; repeatable.", metavar="GPU=N"),
    ] = None
    router: Annotated[
        Literal["round-robin", "least-loaded", "prefix", "random"] | None,
        typer.Option("--router", help="How a fleet's requests are routed. Default: least-loaded.", show_default=False),
    ] = None
    disaggregate: Annotated[
        Text,
        option(
            "--disaggregate",
            help="Compute prompts on x servers and answers on y others, 1P2D; needs --link.",
            metavar="xPyD",
        ),
    ] = None
    link: Annotated[
        Text,
        option(
            "--link",
            help="Speed at which a prefill server sends KV cache to decode servers: 50GB/s.",
            metavar="SIZE/s",
        ),
    ] = None
    fail: Annotated[
        list[str] | None,
        option(
            "--fail", help="Lose a server, from 0 on, at a time: 3@10m, 3@10m:5m (back 5 minutes later); repeatable.",
            metavar="N@TIME",
        ),
    ] = None  # fmt: skip
    autoscale: Annotated[
        Text,
        option(
            "--autoscale",
            help="Grow and shrink from --replicas on: min=1,max=8,target=20 (requests per server), every=15s, "
            "provision=3m, settle=5m.",
            metavar="RULE",
        ),
    ] = None
    jobs: Annotated[
        Text,
        option(
            "--jobs",
            help="Maximum number of processes for a fleet routed at random or in turn. Default: all cores.",
            metavar="N",
        ),
    ] = None
    ray: RayOption = None
    # the answer
    film: Annotated[
        Text,
        option("--film", help="Write the KV pool as a film, block by block: pool.html; 2,000 steps.", metavar="PATH"),
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
