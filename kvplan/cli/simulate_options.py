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
        option("--gpu", help="The GPU, by name (`kvplan gpus`).", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        list[str] | None,
        option(
            "--max-model-len",
            "--ctx",
            help="Context in tokens: 32k; auto (or -1) fits the memory; none: the model's maximum.",
            metavar="TOKENS",
        ),
    ] = None
    # what comes
    trace: Annotated[
        Text, option("--trace", help="Requests from a file (`kvplan trace stats FILE`).", metavar="FILE")
    ] = None
    profile: Annotated[
        Text,
        option(
            "--profile",
            help="Requests like those of a named workload (`kvplan trace profiles`).",
            metavar="NAME",
            complete=complete_profile,
        ),
    ] = None
    prompt_tokens: Annotated[
        Text, option("--prompt-tokens", help="Prompts: 3000, or lognormal:mean=2k,p95=6k.", metavar="N|DIST")
    ] = None
    output_tokens: Annotated[Text, option("--output-tokens", help="Answers, in the same forms.", metavar="N|DIST")] = (
        None
    )
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Tokens every prompt begins with.", metavar="TOKENS")
    ] = None
    num_requests: Annotated[
        Text,
        option(
            "--num-requests",
            help="Requests in all; none: the trace, or 2,000, or 10 per user (up to 20,000).",
            metavar="N",
        ),
    ] = None
    seed: Annotated[Text, option("--seed", help="Of what is drawn; none: 0.", metavar="N")] = None
    # how it comes
    rate: Annotated[Text, option("--rate", help="Requests per second; none: the trace's own.", metavar="N")] = None
    users: Annotated[
        Text, option("--users", help="Users who wait for their answer and send again, instead of --rate.", metavar="N")
    ] = None
    think: Annotated[
        Text, option("--think", help="What a user waits before sending again; none: 0s.", metavar="TIME")
    ] = None
    ramp: Annotated[Text, option("--ramp", help="Time over which the users join; none: 60s.", metavar="TIME")] = None
    # what is asked
    slo: Annotated[
        Text,
        option("--slo", help="What must hold, and the largest load that does: ttft=2s,tpot=50ms.", metavar="PROMISES"),
    ] = None
    baseline: Annotated[
        Literal["contiguous"] | None,
        typer.Option("--baseline", help="Also with memory reserved for the full context.", show_default=False),
    ] = None
    tier: Annotated[
        list[str] | None,
        option("--tier", help="KV kept off the GPU, fastest first: cpu=512GiB@25GB/s; repeatable.", metavar="TIER"),
    ] = None
    tier_chunk: Annotated[
        Text, option("--tier-chunk", help="Tokens a tier keeps as one; none: 256.", metavar="TOKENS")
    ] = None
    efficiency: Annotated[
        Text,
        option(
            "--efficiency",
            help="Shares of the GPU's figures that are reached: weights=0.7,kv=0.9,flops=0.6.",
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
    timeline: Annotated[Text, option("--timeline", help="Write what ran and waited over time.", metavar="FILE.csv")] = (
        None
    )
    requests: Annotated[Text, option("--requests", help="Write a row per request.", metavar="FILE.csv")] = None
    figure: Annotated[Text, option("--figure", help="Draw it.", metavar="FILE.png|svg")] = None
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when --slo is broken or too close.")] = (
        False
    )
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or hints on standard error.")] = False
