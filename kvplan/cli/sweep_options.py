"""The options of `kvplan sweep` and `kvplan recommend`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    QuietOption,
    RayOption,
    ReportOption,
    Text,
    Texts,
    WorkloadOptions,
    complete_gpu,
    complete_model,
    option,
)

Sort = Literal["context", "users", "users-per-gpu", "users-per-dollar"]

PricesOption = Annotated[
    Text, option("--prices", help="File of dollars per GPU hour: `gpu: 2.50` lines or CSV.", metavar="FILE")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(WorkloadOptions):
    """Options of `kvplan sweep`: comma-separated lists for MODEL, --gpu, --tp, --pp, --dp, --pcp, --dcp, --ctx,
    --kv-cache-dtype, --gpu-memory-utilization, --max-num-seqs, --max-num-batched-tokens, --block-size, --quantization,
    --dtype, --num-speculative-tokens, --mean-tokens and --engine.
    """

    model: Annotated[
        Texts,
        typer.Argument(
            metavar="MODEL...",
            help="Catalog names (`kvplan models`), config.json files or their directories, or Hub ids.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None  # type: ignore[assignment] # several here, where the other commands take one
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Show only Pareto-optimal rows by context, users per GPU and, with --prices, users per dollar.",
        ),
    ] = False
    prices: PricesOption = None
    figure: Annotated[
        Text,
        option("--figure", help="Draw users per GPU (and per dollar) by context: out.png or out.svg.", metavar="PATH"),
    ] = None
    sort: Annotated[Sort, typer.Option("--sort", help="Sort rows by this, best first.")] = "context"
    limit: Annotated[Text, option("--limit", help="Maximum number of rows to show. Default: 40.", metavar="N")] = None
    jobs: Annotated[Text, option("--jobs", help="Maximum number of processes. Default: all cores.", metavar="N")] = None
    ray: RayOption = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if no combination fits.")] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendOptions(WorkloadOptions):
    """Options of `kvplan recommend`: given values are kept, the others searched."""

    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="Check whether this GPU can serve the users, and what it needs (`kvplan gpus`).",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    max_model_len: Annotated[
        Texts,
        option(
            "--max-model-len",
            "--ctx",
            help="Context length of each user, e.g. 16k. Default: the model's maximum.",
            metavar="TOKENS",
        ),
    ] = None
    users: Annotated[Text, option("--users", help="Total number of concurrent users to serve.", metavar="N")] = None
    gpus: Annotated[
        Texts,
        option(
            "--gpus",
            help="GPUs to choose from, separated by commas. Default: six common GPUs, or those with a price.",
            metavar="NAMES",
            complete=complete_gpu,
        ),
    ] = None
    num_gpus: Annotated[
        Text, option("--num-gpus", help="Number of GPUs, with --gpu. Default: --tp, or all.", metavar="N")
    ] = None
    prices: PricesOption = None
    fp8: Annotated[bool, typer.Option("--fp8/--no-fp8", help="Allow proposals with an fp8 KV cache.")] = True
    fp8_weights: Annotated[
        bool, typer.Option("--fp8-weights", help="Also propose quantizing the weights to fp8 while loading.")
    ] = False
    optimistic: Annotated[
        bool, typer.Option("--optimistic", help="Use the likely number of users instead of the low end of the range.")
    ] = False
    slo: Annotated[
        Text,
        option(
            "--slo",
            help="Latency targets, e.g. ttft.p90=2s,tpot=50ms: simulates --rate or --users on each placement.",
            metavar="TARGETS",
        ),
    ] = None
    rate: Annotated[Text, option("--rate", help="Requests per second, with --slo.", metavar="N")] = None
    profile: Annotated[
        Text, option("--profile", help="Named workload, with --slo (`kvplan trace profiles`).", metavar="NAME")
    ] = None
    trace: Annotated[Text, option("--trace", help="Trace file to replay, with --slo.", metavar="FILE")] = None
    num_requests: Annotated[
        Text, option("--num-requests", help="Number of requests to simulate, with --slo. Default: 2,000.", metavar="N")
    ] = None
    seed: Annotated[Text, option("--seed", help="Random seed, with --slo. Default: 0.", metavar="N")] = None
    spare: Annotated[
        Text, option("--spare", help="Spare servers in addition to those needed, with --slo, e.g. 1.", metavar="N")
    ] = None
    limit: Annotated[
        Text, option("--limit", help="Maximum number of placements to show. Default: 10.", metavar="N")
    ] = None
    output: Annotated[
        Literal["k8s", "compose"] | None,
        option("--output", help="Print the best answer as a manifest: Kubernetes or Docker Compose."),
    ] = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the answer is no.")] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
