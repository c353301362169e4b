"""The options of the commands that measure: profile, reconcile, report, why, preflight, rightsize, watch, doctor."""

from typing import ClassVar, Literal

from kvplan.cli.engine_options import ENABLE_LORA, OFFLOADING_DISK, SPECULATIVE_CONFIG
from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    REPORT,
    REQUIRED,
    TRACE_EVENTS,
    Color,
    Switch,
    Text,
    Texts,
    argument,
    complete_gpu,
    complete_model,
    option,
)
from kvplan.cli.options import SERVED_CONTEXT, SERVED_GPU, SERVED_MODEL, PlanOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import SUFFIXES, Format
from kvplan.servers.base import SERVERS
from kvplan.servers.words.arguments import ARGUMENTS

Allocator = Literal["paged", "contiguous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `kvplan profile`; None: not given."""

    model: Text = argument(
        "MODEL",
        "Catalog name or directory with config.json. Default: a small model on the CPU.",
        complete=complete_model,
    )
    run_dir: Text = option("--output, -o RUN_DIR", "Directory to create for the run; it must not exist.")
    server: Text = option("--server URL", "Address of a running server to measure instead of the bundled engine.")
    command: Text = option("--command TEXT", "Command that starts a server to measure, e.g. 'vllm serve ...'.")
    device: Text = option("--device DEVICE", "cpu, cuda or cuda:N. Default: a GPU if there is one.")
    weights: Text = option("--weights DIR", "Directory of the real weights. Default: random weights.")
    # the engine, by vLLM's names
    dtype: Text = option("--dtype DTYPE", "Model dtype: auto, bfloat16, float16 or float32.")
    kv_cache_dtype: Text = option(
        "--kv-cache-dtype DTYPE", "KV cache dtype: auto, float32, bfloat16, float16 or fp8_e4m3."
    )
    tensor_parallel_size: Text = option("--tensor-parallel-size, --tp, -tp N", "Number of ranks; start with torchrun.")
    pipeline_parallel_size: Text = option(
        "--pipeline-parallel-size, --pp, -pp N", "Pipeline stages; more than 1 is refused."
    )
    max_model_len: Text = option(
        "--max-model-len, --ctx TOKENS", "Context length. Default: that of the longest request."
    )
    max_num_seqs: Text = option("--max-num-seqs N", "Maximum number of concurrent requests. Default: all.")
    max_num_batched_tokens: Text = option("--max-num-batched-tokens TOKENS", "Maximum number of tokens per step.")
    block_size: Text = option("--block-size N", "Tokens per KV cache block.")
    num_blocks: Text = option("--num-blocks N", "Number of KV cache blocks. Default: as many as fit.")
    gpu_memory_utilization: Text = option("--gpu-memory-utilization SHARE", "Fraction of the memory to use.")
    memory_limit: Text = option("--memory-limit SIZE", "Limit the device memory to use, e.g. 80GiB.")
    enforce_eager: Switch = option("--enforce-eager/--no-enforce-eager", "Run without CUDA graphs.")
    enable_prefix_caching: Switch = option(
        "--enable-prefix-caching/--no-enable-prefix-caching", "Reuse KV blocks of requests that share a prefix."
    )
    allocator: Allocator | None = option(
        "--allocator", "KV cache allocator; contiguous reserves max_model_len each, static also ends each batch first."
    )
    kv_offloading_size: Text = option(
        "--kv-offloading-size GIB", "Host memory for KV offloading, in addition to the pool."
    )
    kv_offloading_dir: Text = option("--kv-offloading-dir PATH", "Also keep offloaded KV in files in this directory.")
    kv_offloading_disk_size: Text = option(*OFFLOADING_DISK)
    enable_lora: Switch = option(*ENABLE_LORA)
    lora_modules: Texts = option(
        "--lora-modules NAME=DIR",
        "Adapters of peft's, which the requests name in turn; repeatable. Needs --enable-lora.",
    )
    max_loras: Text = option("--max-loras N", ARGUMENTS["max_loras"].help)
    max_lora_rank: Text = option("--max-lora-rank N", ARGUMENTS["max_lora_rank"].help)
    fully_sharded_loras: Switch = option(
        "--fully-sharded-loras/--no-fully-sharded-loras", ARGUMENTS["fully_sharded_loras"].help
    )
    speculative_config: Text = option(*SPECULATIVE_CONFIG)
    baseline: Texts = option(
        "--baseline contiguous|static",
        "Serve the workload again with this allocator and the same KV cache size; repeatable.",
    )
    # the workload
    num_seqs: Text = option("--num-seqs N", "Number of requests.")
    prompt_tokens: Text = option("--prompt-tokens TOKENS", "Prompt length of each request.")
    output_tokens: Text = option("--output-tokens TOKENS", "Tokens to generate per request.")
    lengths: Text = option("--lengths SPEC|FILE", "Distribution of request lengths, as for `estimate`.")
    trace: Text = option("--trace FILE", "Trace to replay, in any format `kvplan trace` reads.")
    shared_prefix: Text = option("--shared-prefix TOKENS", "Length of the prefix that all prompts share.")
    rate: Text = option("--rate N", "Requests per second to a server: 4, or inf (all at once, the default).")
    max_concurrency: Text = option("--max-concurrency N", "Maximum number of requests sent to a server at once.")
    duration: Text = option("--duration TIME", "Repeat the requests for this time, e.g. 60s.")
    seed: Text = option("--seed N", "Seed for weights and tokens.")
    # measuring
    interval: Text = option("--interval TIME", "Time between samples, e.g. 50ms.")
    timeout: Text = option("--timeout TIME", "Stop with an error after this time, e.g. 10m.")
    snapshot: bool = option("--snapshot", "Save torch's memory history for its viewer (GPU).", False)
    trace_events: Text = option(*TRACE_EVENTS)
    film: Text = option("--film PATH", "Write an animation of the KV cache blocks (first 2,000 steps), e.g. pool.html.")
    allow_shared: bool = option("--allow-shared", "Measure even if other processes use the GPU.", False)
    quiet: bool = option("--quiet, -q", "Hide the progress.", False)
    force: bool = option(*FORCE, False)
    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOptions(PlanOptions):
    """Options of `kvplan reconcile`; None: not given.

    Plan options apply to --log and --metrics, and supply what these do not state.
    """

    takes_contexts: ClassVar[bool] = False

    run_dir: Text = argument("RUN_DIR", "Directory written by `kvplan profile -o`.")
    log: Text = option(
        "--log FILE",
        f"Startup log of a server ({', '.join(SERVERS)}) or of `kvplan serve`, optionally gzipped; - reads "
        "standard input. Add what the log lacks with --engine, --model or --config, and the flags of `estimate`.",
    )
    metrics: Text = option(
        "--metrics URL|FILE",
        "URL or file of a server's /metrics page. For what the page lacks, add --engine with the release, --model "
        "or --config, and --ctx.",
    )
    bench: Text = option(
        "--bench FILE",
        "Result file of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX, to compare with "
        "predicted times; add --gpu and the server's flags.",
    )
    model: Text = option(*SERVED_MODEL, complete=complete_model)
    gpu: Texts = option(*SERVED_GPU, complete=complete_gpu)
    max_model_len: Texts = option(*SERVED_CONTEXT)
    calibration: Text = option("--calibration FILE", "Measured constants to use for the prediction.")
    calibrate: Text = option("--calibrate FILE", "Write the constants measured in this run.")
    force: bool = option(*FORCE, False)
    max_error: Texts = option(
        "--max-error [ROW=]SHARE",
        "Exit with 1 if a row or the total is off by more than this: 2%, or total=1% for one row; repeatable.",
    )
    report: Texts = option(*REPORT)
    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of `kvplan report`."""

    run_dirs: list[str] = argument("RUN_DIR...", "Directory written by `kvplan profile -o`.", REQUIRED)
    output: Texts = option("--output, -o FILE", f"File to write (.html, {', '.join(SUFFIXES)}); repeatable.")
    force: bool = option(*FORCE, False)
    title: Text = option("--title TEXT", "Heading of the report.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `kvplan doctor`."""

    format: Literal["table", "json"] = option("--format", "Output format.", "table")
    color: Color = option(*COLOR, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of `kvplan watch`."""

    gpu_index: Text = option(
        "--gpu-index N|UUID", "GPU index or UUID (`nvidia-smi -L`). Default: the first usable GPU."
    )
    pid: Text = option("--pid PID", "Process to watch.")
    interval: Text = option(
        "--interval TIME", "Time between readings, e.g. 500ms. Default: 1s on a terminal, otherwise 10s."
    )
    duration: Text = option("--duration TIME", "Stop after this time, e.g. 10m.")
    csv: Text = option("--csv FILE", "Also append each reading to a CSV file.")
    metrics: Texts = option(
        "--metrics URL", "Metrics page of a server, e.g. http://localhost:8000/metrics. Repeat it for several servers."
    )
    plan: Text = option(
        "--plan FILE", "Plan from `estimate --format json`, to compare its KV cache and users with the server's."
    )
    model: Text = option(
        "--model MODEL",
        "Compare with a plan of this model on --gpu, as `estimate` answers with no other flags.",
        complete=complete_model,
    )
    gpu: Texts = option("--gpu NAME", "GPU of the planned server; 8xh100-80g for eight.", complete=complete_gpu)
    max_model_len: Texts = option(
        "--max-model-len, --ctx TOKENS", "Context of the planned server. Default: the model's."
    )
    tries: Text = option(
        "--tries N",
        "Exit with 3 after N failed readings of the server's page in a row; 0: never. Default: 5 until the first "
        "page, then never.",
    )
    color: Color = option(*COLOR, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions(PlanOptions):
    """Options of `kvplan why`; None: not given. Plan options supply what the log does not state."""

    takes_contexts: ClassVar[bool] = False

    log: Text = argument("LOG", "Server log or an excerpt, optionally gzipped; - reads standard input.")
    command: Text = option("--command COMMAND", 'Read the output of a command, e.g. "docker logs vllm".')
    follow: bool = option("--follow", "Pass standard input through; on failure, explain it on standard error.", False)
    model: Text = option(*SERVED_MODEL, complete=complete_model)
    gpu: Texts = option(*SERVED_GPU, complete=complete_gpu)
    max_model_len: Texts = option(*SERVED_CONTEXT)
    calibration: Text = option("--calibration FILE", "Measured constants to use for the plan.")
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option("--exit-code", "Exit with 1 if the log shows a failure.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """Options of `kvplan preflight`; None: not given. Those of the server stand in its command."""

    command: Text = argument(
        "COMMAND", "Server command, quoted or as the last words; or a manifest, a file with the command, or -."
    )
    gpu: Text = option(
        "--gpu NAME", "GPU, if no driver is found or its name is not known (`kvplan gpus`).", complete=complete_gpu
    )
    container: Text = option("--container NAME", "Container of a manifest with several servers.")
    model: Text = option(
        "--model MODEL", "Model, if the command names a path that is not here; as for `estimate`.",
        complete=complete_model,
    )  # fmt: skip
    engine: Text = option(
        "--engine NAME", "Release of the server, e.g. vllm@0.33. Default: by its image, or the newest."
    )
    weights_bytes: Text = option("--weights-bytes SIZE", "Size of all weights, instead of computing it.")
    strict: bool = option("--strict", "Exit with 1, too, if the server may not start.", False)
    offline: bool = option("--offline", "Use only the local Hub cache.", False)
    format: Literal["table", "json"] = option("--format", "Output format.", "table")
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsizeOptions:
    """Options of `kvplan rightsize`."""

    first: Text = argument("FIRST", "vLLM server's /metrics page: file or URL.")
    second: Text = argument("SECOND", "The same page at a later time. Default: the URL FIRST is read twice.")
    interval: Text = option(
        "--interval TIME", "Time between the two pages, e.g. 10m. A URL is read again after this time (default: 1m)."
    )
    growth: Text = option("--growth FACTOR", "Plan for this multiple of the measured load, e.g. 2.")
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
