"""The options of the commands that measure: profile, reconcile, report, watch, doctor."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    PlanOptions,
    Switch,
    Text,
    Texts,
    complete_gpu,
    complete_model,
    option,
)

Allocator = Literal["paged", "contiguous"]
RunDirs = Annotated[
    list[str], typer.Argument(metavar="RUN_DIR...", help="What `kvplan profile -o` wrote.", show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Everything that can be said to `kvplan profile`; None: not said."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="A catalog name, or a directory with config.json; none: a small model on the CPU.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    run_dir: Annotated[
        Text, option("--output", "-o", help="Directory for the run; it must not exist.", metavar="RUN_DIR")
    ] = None
    device: Annotated[
        Text, option("--device", help="cpu, cuda or cuda:N; none: a GPU if there is one.", metavar="DEVICE")
    ] = None
    weights: Annotated[
        Text, option("--weights", help="Directory of the real weights; none: random ones.", metavar="DIR")
    ] = None
    # the engine, by the server's names
    dtype: Annotated[Text, option("--dtype", help="auto, bfloat16, float16 or float32.", metavar="DTYPE")] = None
    kv_cache_dtype: Annotated[
        Text, option("--kv-cache-dtype", help="auto, float32, bfloat16, float16 or fp8_e4m3.", metavar="DTYPE")
    ] = None
    tensor_parallel_size: Annotated[
        Text, option("--tensor-parallel-size", "--tp", "-tp", help="Ranks; start with torchrun.", metavar="N")
    ] = None
    max_model_len: Annotated[
        Text, option("--max-model-len", "--ctx", help="Context in tokens; none: the longest request.", metavar="TOKENS")
    ] = None
    max_num_seqs: Annotated[
        Text, option("--max-num-seqs", help="Requests that run at once, at most; none: all.", metavar="N")
    ] = None
    max_num_batched_tokens: Annotated[
        Text, option("--max-num-batched-tokens", help="Tokens of one step, at most.", metavar="TOKENS")
    ] = None
    block_size: Annotated[Text, option("--block-size", help="Tokens of one KV block.", metavar="N")] = None
    num_blocks: Annotated[
        Text, option("--num-blocks", help="Blocks of the KV pool; none: what the memory leaves.", metavar="N")
    ] = None
    gpu_memory_utilization: Annotated[
        Text, option("--gpu-memory-utilization", help="Share of the memory to use.", metavar="SHARE")
    ] = None
    memory_limit: Annotated[Text, option("--memory-limit", help="Play a smaller device: 80GiB.", metavar="SIZE")] = None
    enforce_eager: Annotated[Switch, option("--enforce-eager/--no-enforce-eager", help="Run without CUDA graphs.")] = (
        None
    )
    enable_prefix_caching: Annotated[
        Switch,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep blocks for requests with the same beginning.",
        ),
    ] = None
    allocator: Annotated[
        Allocator | None,
        typer.Option("--allocator", help="contiguous: max_model_len per request up front.", show_default=False),
    ] = None
    baseline: Annotated[
        Literal["contiguous"] | None,
        typer.Option("--baseline", help="Serve the workload again with this allocator, same pool.", show_default=False),
    ] = None
    # the workload
    num_seqs: Annotated[Text, option("--num-seqs", help="Requests.", metavar="N")] = None
    prompt_tokens: Annotated[Text, option("--prompt-tokens", help="Tokens of each prompt.", metavar="TOKENS")] = None
    output_tokens: Annotated[Text, option("--output-tokens", help="Tokens to generate.", metavar="TOKENS")] = None
    lengths: Annotated[
        Text, option("--lengths", help="Distribution of full lengths, as for estimate.", metavar="SPEC|FILE")
    ] = None
    trace: Annotated[Text, option("--trace", help="Requests to replay: what `kvplan trace` reads.", metavar="FILE")] = (
        None
    )
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Tokens that every prompt starts with.", metavar="TOKENS")
    ] = None
    duration: Annotated[Text, option("--duration", help="Repeat the requests for so long: 60s.", metavar="TIME")] = None
    seed: Annotated[Text, option("--seed", help="Of weights and tokens.", metavar="N")] = None
    # measuring
    interval: Annotated[Text, option("--interval", help="Between samples: 50ms.", metavar="TIME")] = None
    timeout: Annotated[Text, option("--timeout", help="Give up after: 10m.", metavar="TIME")] = None
    snapshot: Annotated[bool, option("--snapshot", help="Keep torch's memory history for its viewer (GPU).")] = False
    perfetto: Annotated[bool, option("--perfetto", help="Write counters for ui.perfetto.dev.")] = False
    allow_shared: Annotated[bool, option("--allow-shared", help="Measure although others use the GPU.")] = False
    quiet: Annotated[bool, option("--quiet", "-q", help="No progress.")] = False
    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOptions(PlanOptions):
    """Everything that can be said to `kvplan reconcile`; None: not said.

    What a plan is made from goes with --log and --metrics, in place of what these do not say.
    """

    run_dir: Annotated[
        Text, typer.Argument(metavar="RUN_DIR", help="What `kvplan profile -o` wrote.", show_default=False)
    ] = None
    log: Annotated[
        Text,
        option(
            "--log",
            help="A vLLM or SGLang server's start-up log, .gz too; - reads it. --engine, --model or --config, and the "
            "flags of `estimate` fill in what it does not say.",
            metavar="FILE",
        ),
    ] = None
    metrics: Annotated[
        Text,
        option(
            "--metrics",
            help="A server's /metrics page, by its URL or as a file; it names no release: add --engine. --model or "
            "--config and --ctx fill in what else it does not say.",
            metavar="URL|FILE",
        ),
    ] = None
    bench: Annotated[
        Text,
        option(
            "--bench",
            help="A result of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX, beside the times "
            "that kvplan predicts; with --gpu and the server's flags.",
            metavar="FILE",
        ),
    ] = None
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "--config",
            metavar="MODEL",
            help="The model that was served: a catalog name, a Hub id, a config.json or its directory.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option("--gpu", help="GPU it ran on (`kvplan gpus`); none: by the log.", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        Texts, option("--max-model-len", "--ctx", help="Context in tokens; none: by the log.", metavar="TOKENS")
    ] = None
    calibration: Annotated[
        Text, option("--calibration", help="Measured constants to predict with.", metavar="FILE")
    ] = None
    calibrate: Annotated[Text, option("--calibrate", help="Write this run's measured constants.", metavar="FILE")] = (
        None
    )
    force: ForceOption = False
    max_error: Annotated[
        Texts,
        option(
            "--max-error",
            help="Exit 1 where a row or the total is off by more: 2%, or by row: total=1%; repeatable.",
            metavar="[ROW=]SHARE",
        ),
    ] = None
    format: FormatOption = "table"
    color: ColorOption = "auto"
    quiet: Annotated[bool, option("--quiet", "-q", help="No notes or hints on standard error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Everything that can be said to `kvplan report`."""

    run_dirs: RunDirs
    output: Annotated[
        Texts, option("--output", "-o", help="File to write; .html, .md, .json or .csv; repeatable.", metavar="FILE")
    ] = None
    force: ForceOption = False
    title: Annotated[Text, option("--title", help="Heading of the report.", metavar="TEXT")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """`kvplan doctor`."""

    format: Annotated[Literal["table", "json"], typer.Option("--format", help="How the answer is written.")] = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """`kvplan watch`."""

    gpu_index: Annotated[
        Text,
        option("--gpu-index", help="GPU by index or UUID (`nvidia-smi -L`); none: the first usable.", metavar="N|UUID"),
    ] = None
    pid: Annotated[Text, option("--pid", help="Process whose share is shown.", metavar="PID")] = None
    interval: Annotated[
        Text,
        option("--interval", help="Time between readings: 500ms; none: 1s, without a terminal 10s.", metavar="TIME"),
    ] = None
    duration: Annotated[Text, option("--duration", help="Stop after so long: 10m.", metavar="TIME")] = None
    csv: Annotated[Text, option("--csv", help="Also append each reading to a CSV file.", metavar="FILE")] = None
    metrics: Annotated[
        Text,
        option("--metrics", help="A vLLM or SGLang server's page: http://localhost:8000/metrics.", metavar="URL"),
    ] = None
    plan: Annotated[
        Text,
        option("--plan", help="What `estimate --format json` wrote: its pool beside the server's.", metavar="FILE"),
    ] = None
    tries: Annotated[
        Text,
        option(
            "--tries",
            help="Exit 3 after so many readings in a row without the server's page; 0: never. Not set: 5 until the "
            "first page, then never.",
            metavar="N",
        ),
    ] = None
    color: ColorOption = "auto"
