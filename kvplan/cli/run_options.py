"""The options of the commands that measure: profile, reconcile, report, watch, doctor."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvplan.cli.engine_options import EnableLoraOption, OffloadingDiskOption, SpeculativeConfigOption
from kvplan.cli.options import (
    ColorOption,
    ForceOption,
    FormatOption,
    PlanOptions,
    QuietOption,
    ReportOption,
    ServedContextOption,
    ServedGpuOption,
    ServedModelOption,
    Switch,
    Text,
    Texts,
    TraceEventsOption,
    complete_gpu,
    complete_model,
    option,
)
from kvplan.report.formats import SUFFIXES
from kvplan.servers.arguments import ARGUMENTS
from kvplan.servers.base import SERVERS

Allocator = Literal["paged", "contiguous", "static"]
RunDirs = Annotated[
    list[str],
    typer.Argument(metavar="RUN_DIR...", help="Directory written by `kvplan profile -o`.", show_default=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `kvplan profile`; None: not given."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="Catalog name or directory with config.json. Default: a small model on the CPU.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    run_dir: Annotated[
        Text, option("--output", "-o", help="Directory to create for the run; it must not exist.", metavar="RUN_DIR")
    ] = None
    server: Annotated[
        Text,
        option("--server", help="Address of a running server to measure instead of the bundled engine.", metavar="URL"),
    ] = None
    command: Annotated[
        Text,
        option("--command", help="Command that starts a server to measure, e.g. 'vllm serve ...'.", metavar="TEXT"),
    ] = None
    device: Annotated[
        Text, option("--device", help="cpu, cuda or cuda:N. Default: a GPU if there is one.", metavar="DEVICE")
    ] = None
    weights: Annotated[
        Text, option("--weights", help="Directory of the real weights. Default: random weights.", metavar="DIR")
    ] = None
    # the engine, by vLLM's names
    dtype: Annotated[
        Text, option("--dtype", help="Model dtype: auto, bfloat16, float16 or float32.", metavar="DTYPE")
    ] = None
    kv_cache_dtype: Annotated[
        Text,
        option(
            "--kv-cache-dtype", help="KV cache dtype: auto, float32, bfloat16, float16 or fp8_e4m3.", metavar="DTYPE"
        ),
    ] = None
    tensor_parallel_size: Annotated[
        Text, option("--tensor-parallel-size", "--tp", "-tp", help="Number of ranks; start with torchrun.", metavar="N")
    ] = None
    pipeline_parallel_size: Annotated[
        Text,
        option("--pipeline-parallel-size", "--pp", "-pp", help="Pipeline stages; more than 1 is refused.", metavar="N"),
    ] = None
    max_model_len: Annotated[
        Text,
        option(
            "--max-model-len", "--ctx", help="Context length. Default: that of the longest request.", metavar="TOKENS"
        ),
    ] = None
    max_num_seqs: Annotated[
        Text, option("--max-num-seqs", help="Maximum number of concurrent requests. Default: all.", metavar="N")
    ] = None
    max_num_batched_tokens: Annotated[
        Text, option("--max-num-batched-tokens", help="Maximum number of tokens per step.", metavar="TOKENS")
    ] = None
    block_size: Annotated[Text, option("--block-size", help="Tokens per KV cache block.", metavar="N")] = None
    num_blocks: Annotated[
        Text, option("--num-blocks", help="Number of KV cache blocks. Default: as many as fit.", metavar="N")
    ] = None
    gpu_memory_utilization: Annotated[
        Text, option("--gpu-memory-utilization", help="Fraction of the memory to use.", metavar="SHARE")
    ] = None
    memory_limit: Annotated[
        Text, option("--memory-limit", help="Limit the device memory to use, e.g. 80GiB.", metavar="SIZE")
    ] = None
    enforce_eager: Annotated[Switch, option("--enforce-eager/--no-enforce-eager", help="Run without CUDA graphs.")] = (
        None
    )
    enable_prefix_caching: Annotated[
        Switch,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse KV blocks of requests that share a prefix.",
        ),
    ] = None
    allocator: Annotated[
        Allocator | None,
        typer.Option(
            "--allocator",
            help="KV cache allocator; contiguous reserves max_model_len each, static also ends each batch first.",
            show_default=False,
        ),
    ] = None
    kv_offloading_size: Annotated[
        Text,
        option("--kv-offloading-size", help="Host memory for KV offloading, in addition to the pool.", metavar="GIB"),
    ] = None
    kv_offloading_dir: Annotated[
        Text, option("--kv-offloading-dir", help="Also keep offloaded KV in files in this directory.", metavar="PATH")
    ] = None
    kv_offloading_disk_size: OffloadingDiskOption = None
    enable_lora: EnableLoraOption = None
    lora_modules: Annotated[
        Texts,
        option(
            "--lora-modules",
            help="Adapters of peft's, which the requests name in turn; repeatable. Needs --enable-lora.",
            metavar="NAME=DIR",
        ),
    ] = None
    max_loras: Annotated[Text, option("--max-loras", help=ARGUMENTS["max_loras"].help, metavar="N")] = None
    max_lora_rank: Annotated[Text, option("--max-lora-rank", help=ARGUMENTS["max_lora_rank"].help, metavar="N")] = None
    fully_sharded_loras: Annotated[
        Switch,
        option("--fully-sharded-loras/--no-fully-sharded-loras", help=ARGUMENTS["fully_sharded_loras"].help),
    ] = None
    speculative_config: SpeculativeConfigOption = None
    baseline: Annotated[
        Texts,
        option(
            "--baseline",
            help="Serve the workload again with this allocator and the same KV cache size; repeatable.",
            metavar="contiguous|static",
        ),
    ] = None
    # the workload
    num_seqs: Annotated[Text, option("--num-seqs", help="Number of requests.", metavar="N")] = None
    prompt_tokens: Annotated[
        Text, option("--prompt-tokens", help="Prompt length of each request.", metavar="TOKENS")
    ] = None
    output_tokens: Annotated[
        Text, option("--output-tokens", help="Tokens to generate per request.", metavar="TOKENS")
    ] = None
    lengths: Annotated[
        Text, option("--lengths", help="Distribution of request lengths, as for `estimate`.", metavar="SPEC|FILE")
    ] = None
    trace: Annotated[
        Text, option("--trace", help="Trace to replay, in any format `kvplan trace` reads.", metavar="FILE")
    ] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all prompts share.", metavar="TOKENS")
    ] = None
    rate: Annotated[
        Text,
        option("--rate", help="Requests per second to a server: 4, or inf (all at once, the default).", metavar="N"),
    ] = None
    max_concurrency: Annotated[
        Text,
        option("--max-concurrency", help="Maximum number of requests sent to a server at once.", metavar="N"),
    ] = None
    duration: Annotated[
        Text, option("--duration", help="Repeat the requests for this time, e.g. 60s.", metavar="TIME")
    ] = None
    seed: Annotated[Text, option("--seed", help="Seed for weights and tokens.", metavar="N")] = None
    # measuring
    interval: Annotated[Text, option("--interval", help="Time between samples, e.g. 50ms.", metavar="TIME")] = None
    timeout: Annotated[
        Text, option("--timeout", help="Stop with an error after this time, e.g. 10m.", metavar="TIME")
    ] = None
    snapshot: Annotated[bool, option("--snapshot", help="Save torch's memory history for its viewer (GPU).")] = False
    trace_events: TraceEventsOption = None
    film: Annotated[
        Text,
        option(
            "--film",
            help="Write an animation of the KV cache blocks (first 2,000 steps), e.g. pool.html.",
            metavar="PATH",
        ),
    ] = None
    allow_shared: Annotated[bool, option("--allow-shared", help="Measure even if other processes use the GPU.")] = False
    quiet: Annotated[bool, option("--quiet", "-q", help="Hide the progress.")] = False
    force: ForceOption = False
    format: FormatOption = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOptions(PlanOptions):
    """Options of `kvplan reconcile`; None: not given.

    Plan options apply to --log and --metrics, and supply what these do not state.
    """

    run_dir: Annotated[
        Text, typer.Argument(metavar="RUN_DIR", help="Directory written by `kvplan profile -o`.", show_default=False)
    ] = None
    log: Annotated[
        Text,
        option(
            "--log",
            help=f"Startup log of a server ({', '.join(SERVERS)}) or of `kvplan serve`, optionally gzipped; - reads "
            "standard input. Add what the log lacks with --engine, --model or --config, and the flags of `estimate`.",
            metavar="FILE",
        ),
    ] = None
    metrics: Annotated[
        Text,
        option(
            "--metrics",
            help="URL or file of a server's /metrics page. For what the page lacks, add --engine with the release, "
            "--model or --config, and --ctx.",
            metavar="URL|FILE",
        ),
    ] = None
    bench: Annotated[
        Text,
        option(
            "--bench",
            help="Result file of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX, to compare "
            "with predicted times; add --gpu and the server's flags.",
            metavar="FILE",
        ),
    ] = None
    model: ServedModelOption = None
    gpu: ServedGpuOption = None
    max_model_len: ServedContextOption = None
    calibration: Annotated[
        Text, option("--calibration", help="Measured constants to use for the prediction.", metavar="FILE")
    ] = None
    calibrate: Annotated[
        Text, option("--calibrate", help="Write the constants measured in this run.", metavar="FILE")
    ] = None
    force: ForceOption = False
    max_error: Annotated[
        Texts,
        option(
            "--max-error",
            help="Exit with 1 if a row or the total is off by more than this: 2%, or total=1% for one row; repeatable.",
            metavar="[ROW=]SHARE",
        ),
    ] = None
    report: ReportOption = None
    format: FormatOption = "table"
    color: ColorOption = "auto"
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of `kvplan report`."""

    run_dirs: RunDirs
    output: Annotated[
        Texts,
        option("--output", "-o", help=f"File to write (.html, {', '.join(SUFFIXES)}); repeatable.", metavar="FILE"),
    ] = None
    force: ForceOption = False
    title: Annotated[Text, option("--title", help="Heading of the report.", metavar="TEXT")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `kvplan doctor`."""

    format: Annotated[Literal["table", "json"], typer.Option("--format", help="Output format.")] = "table"
    color: ColorOption = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of `kvplan watch`."""

    gpu_index: Annotated[
        Text,
        option(
            "--gpu-index", help="GPU index or UUID (`nvidia-smi -L`). Default: the first usable GPU.", metavar="N|UUID"
        ),
    ] = None
    pid: Annotated[Text, option("--pid", help="Process to watch.", metavar="PID")] = None
    interval: Annotated[
        Text,
        option(
            "--interval",
            help="Time between readings, e.g. 500ms. Default: 1s on a terminal, otherwise 10s.",
            metavar="TIME",
        ),
    ] = None
    duration: Annotated[Text, option("--duration", help="Stop after this time, e.g. 10m.", metavar="TIME")] = None
    csv: Annotated[Text, option("--csv", help="Also append each reading to a CSV file.", metavar="FILE")] = None
    metrics: Annotated[
        Texts,
        option(
            "--metrics",
            help="Metrics page of a server, e.g. http://localhost:8000/metrics. Repeat it for several servers.",
            metavar="URL",
        ),
    ] = None
    plan: Annotated[
        Text,
        option(
            "--plan",
            help="Plan from `estimate --format json`, to compare its KV cache and users with the server's.",
            metavar="FILE",
        ),
    ] = None
    model: Annotated[
        Text,
        option(
            "--model",
            help="Compare with a plan of this model on --gpu, as `estimate` answers with no other flags.",
            metavar="MODEL",
            complete=complete_model,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option("--gpu", help="GPU of the planned server; 8xh100-80g for eight.", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        Texts,
        option(
            "--max-model-len", "--ctx", help="Context of the planned server. Default: the model's.", metavar="TOKENS"
        ),
    ] = None
    tries: Annotated[
        Text,
        option(
            "--tries",
            help="Exit with 3 after N failed readings of the server's page in a row; 0: never. Default: 5 until the "
            "first page, then never.",
            metavar="N",
        ),
    ] = None
    color: ColorOption = "auto"
