"""The options of `kvplan sweep` and `kvplan recommend`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    Text,
    Texts,
    WorkloadOptions,
    complete_gpu,
    complete_model,
    option,
)

Sort = Literal["context", "users", "users-per-gpu", "users-per-dollar"]

PricesOption = Annotated[
    Text, option("--prices", help="Dollars per GPU and hour, a file of `gpu: 2.50` lines or CSV.", metavar="FILE")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(WorkloadOptions):
    """`kvplan sweep`: lists by comma for MODEL, --gpu, --tp, --pp, --ctx, --kv-cache-dtype, --gpu-memory-utilization,
    --max-num-seqs, --block-size, --quantization, --dtype, --mean-tokens and --engine."""

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
            help="Only Pareto-optimal rows: by context, users per GPU and, with --prices, users per dollar.",
        ),
    ] = False
    prices: PricesOption = None
    figure: Annotated[
        Text,
        option("--figure", help="Draw users per GPU (and per dollar) by context: out.png or out.svg.", metavar="PATH"),
    ] = None
    sort: Annotated[Sort, typer.Option("--sort", help="What the table begins with.")] = "context"
    limit: Annotated[Text, option("--limit", help="Rows of a table, at most: 40.", metavar="N")] = None
    jobs: Annotated[Text, option("--jobs", help="Processes, at most: all cores.", metavar="N")] = None
    format: FormatOption = "table"
    report: Annotated[
        list[str] | None,
        option("--report", help="Also write the answer to a file (.json, .csv, .md); repeatable.", metavar="PATH"),
    ] = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when no combination fits.")] = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or hints on standard error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendOptions(WorkloadOptions):
    """`kvplan recommend`: what is stated is kept, what is not is sought."""

    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="Ask what this GPU needs to hold the users (`kvplan gpus`).",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    max_model_len: Annotated[
        Texts,
        option(
            "--max-model-len", "--ctx", help="Context of each user: 16k; none: the model's maximum.", metavar="TOKENS"
        ),
    ] = None
    users: Annotated[Text, option("--users", help="Users to hold at once, in all.", metavar="N")] = None
    gpus: Annotated[
        Texts,
        option(
            "--gpus",
            help="GPUs to choose from, by comma; none: six common ones, or those with a price.",
            metavar="NAMES",
            complete=complete_gpu,
        ),
    ] = None
    num_gpus: Annotated[
        Text, option("--num-gpus", help="With --gpu: how many of it there are; split by --tp, else all.", metavar="N")
    ] = None
    prices: PricesOption = None
    fp8: Annotated[bool, typer.Option("--fp8/--no-fp8", help="Whether an fp8 KV cache may be proposed.")] = True
    fp8_weights: Annotated[
        bool, typer.Option("--fp8-weights", help="Also propose to quantize the weights to fp8 while loading.")
    ] = False
    optimistic: Annotated[
        bool, typer.Option("--optimistic", help="Count users at the likely figure, not at the low end of the range.")
    ] = False
    limit: Annotated[Text, option("--limit", help="Placements shown in a table, at most: 10.", metavar="N")] = None
    format: FormatOption = "table"
    report: Annotated[
        list[str] | None,
        option("--report", help="Also write the answer to a file (.json, .csv, .md); repeatable.", metavar="PATH"),
    ] = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the answer is no.")] = False
    color: ColorOption = "auto"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes or hints on standard error.")] = False
