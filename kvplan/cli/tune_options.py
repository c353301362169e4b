"""The options of `kvplan tune`."""

from dataclasses import dataclass
from typing import Annotated

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
    Texts,
    complete_gpu,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(LoadOptions):
    """Options of `kvplan tune`: given flags are fixed, the others searched; None: not given."""

    gpu: Annotated[
        Texts,
        option("--gpu", help="GPU to serve on; 8xh100-80g for eight.", metavar="NAME", complete=complete_gpu),
    ] = None
    num_gpus: Annotated[
        Text, option("--num-gpus", help="Number of GPUs, all servers together. Default: --tp, or 1.", metavar="N")
    ] = None
    max_model_len: Annotated[
        Texts,
        option(
            "--max-model-len", "--ctx", help="Context length, e.g. 32k. Default: the model's maximum.", metavar="TOKENS"
        ),
    ] = None
    rate: Annotated[
        Text,
        option(
            "--rate",
            help="Requests per second to serve, or inf (all at once). Default: the highest rate within the targets.",
            metavar="N",
        ),
    ] = None
    num_requests: Annotated[
        Text,
        option("--num-requests", help="Number of requests of a simulated run. Default: 2,000.", metavar="N"),
    ] = None
    slo: Annotated[
        Text,
        option("--slo", help="Latency targets to meet, e.g. ttft.p90=2s,tpot=50ms.", metavar="TARGETS"),
    ] = None
    tier: Annotated[
        Text,
        option("--tier", help="Host memory for KV offloading, e.g. cpu=64GiB@25GB/s.", metavar="TIER"),
    ] = None
    fp8: Annotated[bool, typer.Option("--fp8/--no-fp8", help="Allow an fp8 KV cache.")] = True
    jobs: Annotated[Text, option("--jobs", help="Maximum number of processes. Default: all cores.", metavar="N")] = None
    ray: RayOption = None
    # the answer
    limit: Annotated[Text, option("--limit", help="Maximum number of rows to show. Default: 10.", metavar="N")] = None
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 if no setting meets the targets, or meeting them at --rate is uncertain."
        ),
    ] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False
