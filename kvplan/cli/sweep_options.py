"""The options of `kvplan sweep` and `kvplan recommend`."""

from typing import ClassVar, Final, Literal

from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    RAY,
    REPORT,
    Color,
    Text,
    Texts,
    argument,
    complete_gpu,
    complete_model,
    option,
)
from kvplan.cli.options import WorkloadOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import Format

Sort = Literal["context", "users", "users-per-gpu", "users-per-dollar"]

MODELS: Final = ("MODEL...", "Catalog names (`kvplan models`), config.json files or their directories, or Hub ids.")
PRICES: Final = ("--prices FILE", "Dollars per GPU hour: h200=3.80,b200=6, or a file of `gpu: 2.50` lines or CSV.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(WorkloadOptions):
    """Options of `kvplan sweep`: comma-separated lists for MODEL, --gpu, --tp, --pp, --dp, --pcp, --dcp, --ctx,
    --kv-cache-dtype, --gpu-memory-utilization, --max-num-seqs, --max-num-batched-tokens, --block-size, --quantization,
    --dtype, --num-speculative-tokens, --mean-tokens and --engine.
    """

    models: Texts = argument(*MODELS, complete=complete_model)
    model: None = None  # several here: `models`
    pareto: bool = option(
        "--pareto",
        "Show only Pareto-optimal rows by context, users per GPU and, with --prices, users per dollar.",
        False,
    )
    prices: Text = option(*PRICES)
    figure: Text = option("--figure PATH", "Draw users per GPU (and per dollar) by context: out.png or out.svg.")
    sort: Sort = option("--sort", "Sort rows by this, best first.", "context")
    limit: Text = option("--limit N", "Maximum number of rows to show. Default: 40.")
    jobs: Text = option("--jobs N", "Maximum number of processes. Default: all cores.")
    ray: Text = option(*RAY)
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option("--exit-code", "Exit with 1 if no combination fits.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendOptions(WorkloadOptions):
    """Options of `kvplan recommend`: given values are kept, the others searched."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option(
        "--gpu NAME",
        "Check whether this GPU can serve the users, and what it needs (`kvplan gpus`).",
        complete=complete_gpu,
    )
    max_model_len: Texts = option(
        "--max-model-len, --ctx TOKENS", "Context length of each user, e.g. 16k. Default: the model's maximum."
    )
    users: Text = option("--users N", "Total number of concurrent users to serve.")
    gpus: Texts = option(
        "--gpus NAMES",
        "GPUs to choose from, separated by commas. Default: six common GPUs, or those with a price.",
        complete=complete_gpu,
    )
    num_gpus: Text = option("--num-gpus N", "Number of GPUs, with --gpu. Default: --tp, or all.")
    prices: Text = option(*PRICES)
    fp8: bool = option("--fp8/--no-fp8", "Allow proposals with an fp8 KV cache.", True)
    fp8_weights: bool = option("--fp8-weights", "Also propose quantizing the weights to fp8 while loading.", False)
    optimistic: bool = option(
        "--optimistic", "Use the likely number of users instead of the low end of the range.", False
    )
    slo: Text = option(
        "--slo TARGETS", "Latency targets, e.g. ttft.p90=2s,tpot=50ms: simulates --rate or --users on each placement."
    )
    rate: Text = option("--rate N", "Requests per second, with --slo.")
    profile: Text = option("--profile NAME", "Named workload, with --slo (`kvplan trace profiles`).")
    trace: Text = option("--trace FILE", "Trace file to replay, with --slo.")
    num_requests: Text = option("--num-requests N", "Number of requests to simulate, with --slo. Default: 2,000.")
    seed: Text = option("--seed N", "Random seed, with --slo. Default: 0.")
    spare: Text = option("--spare N", "Spare servers in addition to those needed, with --slo, e.g. 1.")
    limit: Text = option("--limit N", "Maximum number of placements to show. Default: 10.")
    output: Literal["k8s", "compose"] | None = option(
        "--output", "Print the best answer as a manifest: Kubernetes or Docker Compose."
    )
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option("--exit-code", "Exit with 1 if the answer is no.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)
