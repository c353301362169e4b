"""The options of `kvplan simulate`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import ColorOption, ForceOption, FormatOption, PlanOptions, Text, complete, complete_gpu, option


def complete_profile(incomplete: str) -> list[str]:
    return complete("workloads.yaml", incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(PlanOptions):
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
    # what comes
    trace: Annotated[
        Text, option("--trace", help="Trace file to replay (`kvplan trace stats FILE`).", metavar="FILE")
    ] = None
    profile: Annotated[
        Text,
        option(
            "--profile",
            help="Named workload to draw requests from (`kvplan trace profiles`).",
            metavar="NAME",
            complete=complete_profile,
        ),
    ] = None
    prompt_tokens: Annotated[
        Text, option("--prompt-tokens", help="Prompt lengths: 3000, or lognormal:mean=2k,p95=6k.", metavar="N|DIST")
    ] = None
    output_tokens: Annotated[
        Text, option("--output-tokens", help="Output lengths, in the same forms.", metavar="N|DIST")
    ] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all prompts share.", metavar="TOKENS")
    ] = None
    num_requests: Annotated[
        Text,
        option(
            "--num-requests",
            help="Number of requests. Default: the whole trace, or 2,000, or 10 per user (up to 20,000).",
            metavar="N",
        ),
    ] = None
    seed: Annotated[Text, option("--seed", help="Random seed. Default: 0.", metavar="N")] = None
    # how it comes
    rate: Annotated[Text, option("--rate", help="Requests per second. Default: the trace's own rate.", metavar="N")] = (
        None
    )
    users: Annotated[
        Text,
        option(
            "--users",
            help="Number of users who each wait for an answer before sending again; instead of --rate.",
            metavar="N",
        ),
    ] = None
    think: Annotated[
        Text, option("--think", help="Time a user waits before sending again. Default: 0s.", metavar="TIME")
    ] = None
    ramp: Annotated[Text, option("--ramp", help="Time over which the users join. Default: 60s.", metavar="TIME")] = None
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
    # the answer
    format: FormatOption = "table"
    report: Annotated[
        list[str] | None,
        option("--report", help="Also write the answer to a file (.json, .csv, .md); repeatable.", metavar="PATH"),
    ] = None
    force: ForceOption = False
    timeline: Annotated[
        Text,
        option("--timeline", help="Write running and waiting requests over time to a CSV file.", metavar="FILE.csv"),
    ] = None
    requests: Annotated[
        Text, option("--requests", help="Write one row per request to a CSV file.", metavar="FILE.csv")
    ] = None
    figure: Annotated[Text, option("--figure", help="Draw the simulation over time.", metavar="FILE.png|svg")] = None
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if --slo is missed or too close to call.")
    ] = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Suppress notes and hints.")] = False
