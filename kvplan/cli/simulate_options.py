"""The options of the commands that take a load: simulate and tune; and of calibrate."""

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    RAY,
    REPORT,
    TRACE_EVENTS,
    Color,
    Text,
    Texts,
    complete_gpu,
    complete_profile,
    option,
)
from kvplan.cli.options import PlanOptions, refuse_given
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.report.formats import Format

if TYPE_CHECKING:
    from kvplan.simulate.load import LoadWords

OF_FLEETS: Final = ("pool", "router", "disaggregate", "link", "fail", "autoscale", "jobs", "ray")
OF_ONE: Final = ("baseline", "tier", "adapters", "figure", "film", "trace_events")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(PlanOptions):
    """Options of a load, in addition to a plan; None: not given."""

    # requests
    trace: Text = option("--trace FILE", "Trace file to replay (`kvplan trace stats FILE`).")
    profile: Text = option(
        "--profile NAME", "Named workload to draw requests from (`kvplan trace profiles`).", complete=complete_profile
    )
    prompt_tokens: Text = option("--prompt-tokens N|DIST", "Prompt lengths, e.g. 3000 or lognormal:mean=2k,p95=6k.")
    output_tokens: Text = option("--output-tokens N|DIST", "Output lengths, in the same form.")
    shared_prefix: Text = option("--shared-prefix TOKENS", "Length of the prefix that all prompts share.")
    num_requests: Text = option(
        "--num-requests N", "Number of requests. Default: the whole trace, or 2,000, or 10 per user (up to 20,000)."
    )
    seed: Text = option("--seed N", "Random seed. Default: 0.")
    # arrivals
    rate: Text = option(
        "--rate N", "Requests per second: 4, inf (all at once), 2:60s,8:120s (stages). Default: the trace's own rate."
    )
    arrivals: Text = option(
        "--arrivals KIND", "Gaps between requests: poisson (default), constant, or gamma:SHAPE (below 1: in bursts)."
    )
    max_concurrency: Text = option(
        "--max-concurrency N",
        "Maximum requests in flight, as in `vllm bench serve`; the initial burst is included in the results.",
    )
    bench_command: Text = option(
        "--bench-command TEXT",
        "Read the load of a pasted `vllm bench serve ...` (or SGLang's, guidellm's, aiperf's tool).",
    )
    users: Text = option(
        "--users N", "Number of users who each wait for a response before sending again; instead of --rate."
    )
    think: Text = option("--think TIME", "Time a user waits before sending again. Default: 0s.")
    ramp: Text = option("--ramp TIME", "Time over which the users join. Default: 60s.")


def words_of(options: object) -> "LoadWords":
    """The load that options give, as far as the command has them."""
    from dataclasses import fields

    from kvplan.simulate.load import LoadWords

    return LoadWords(**{field.name: getattr(options, field.name, None) for field in fields(LoadWords)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(LoadOptions):
    """Options of `kvplan simulate`; None: not given."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option("--gpu NAME", "GPU name (`kvplan gpus`).", complete=complete_gpu)
    max_model_len: Texts = option(
        "--max-model-len, --ctx TOKENS",
        "Context length: 32k; auto (or -1): the longest that fits. Default: the model's maximum.",
    )
    # the question
    slo: Text = option(
        "--slo TARGETS", "Latency targets, e.g. ttft=2s,tpot=50ms; also finds the largest load that meets them."
    )
    baseline: Literal["contiguous"] | None = option("--baseline", "Compare with memory reserved for the full context.")
    tier: Texts = option(
        "--tier TIER", "Tier for KV offloading: host memory, then files, e.g. cpu=512GiB@25GB/s; repeatable."
    )
    tier_chunk: Text = option("--tier-chunk TOKENS", "Tokens per chunk in a tier. Default: a block.")
    efficiency: Text = option(
        "--efficiency SHARES",
        "Achieved fractions of the GPU's peak bandwidth and FLOP/s, e.g. weights=0.7,kv=0.9,flops=0.6.",
    )
    synthetic_acceptance_length: Text = option(
        "--synthetic-acceptance-length N",
        "Speculative decoding: mean tokens a step of a sequence, e.g. 2.5. Default: that of --speculative-config; if "
        "none is stated, the answer is the range from no draft accepted to all.",
    )
    synthetic_acceptance_rates: Text = option(
        "--synthetic-acceptance-rates A,B,...",
        "Instead of the length: for each draft token the share of steps that accept it and all before it.",
    )
    adapters: Text = option(
        "--adapters N[@SHARE]",
        "LoRA adapters that requests name, each as often, e.g. 8, or 8@0.5 if half of the requests name one; needs "
        "--enable-lora. Their kernels count at their least time.",
    )
    # several servers
    replicas: Text = option("--replicas N", "Simulate a fleet of this many servers behind a router.")
    pool: Texts = option("--pool GPU=N", "Servers on another GPU in addition to --replicas, e.g. l40s=4; repeatable.")
    router: Literal["round-robin", "least-loaded", "prefix", "random"] | None = option(
        "--router", "How a fleet's requests are routed. Default: least-loaded."
    )
    disaggregate: Text = option(
        "--disaggregate xPyD", "Run prefill on x servers and decode on y, e.g. 1P2D; needs --link."
    )
    link: Text = option("--link SIZE/s", "Bandwidth for KV transfer from prefill to decode servers, e.g. 50GB/s.")
    fail: Texts = option(
        "--fail N@TIME",
        "Fail a server (0-based) at a time, e.g. 3@10m, or 3@10m:5m (back after 5 minutes); repeatable.",
    )
    autoscale: Text = option(
        "--autoscale RULE",
        "Autoscale, starting at --replicas (default: min): min=1,max=8,target=20 (requests per server), every=15s, "
        "provision=3m, settle=5m.",
    )
    jobs: Text = option(
        "--jobs N", "Maximum number of processes for a fleet with random or round-robin routing. Default: all cores."
    )
    ray: Text = option(*RAY)
    # the answer
    film: Text = option("--film PATH", "Write an animation of the KV cache blocks (first 2,000 steps), e.g. pool.html.")
    trace_events: Text = option(*TRACE_EVENTS)
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    timeline: Text = option("--timeline FILE.csv", "Write running and waiting requests over time to a CSV file.")
    requests: Text = option("--requests FILE.csv|parquet", "Write one row per request, as CSV or Parquet.")
    figure: Text = option("--figure FILE.png|svg", "Draw the simulation over time.")
    exit_code: bool = option("--exit-code", "Exit with 1 if --slo is missed or too close to call.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


def is_fleet(options: SimulateOptions) -> bool:
    """True if several servers are requested. Raise UsageError for fleet options without them."""
    flags = [name for name in OF_FLEETS if getattr(options, name)]
    many = any(value is not None for value in (options.replicas, options.pool, options.disaggregate, options.autoscale))
    if flags and not many:
        raise UsageError(f"--{flags[0]}", "needs several servers", "add --replicas N")
    if not many:
        return False
    remedy = "remove it, or --replicas, --pool and --disaggregate"
    refuse_given(options, OF_ONE, "supports only one server", remedy)
    if options.disaggregate is not None and (options.replicas is not None or options.pool is not None):
        raise UsageError("--disaggregate", "states the number of servers itself", "remove --replicas and --pool")
    if options.disaggregate is not None and options.autoscale is not None:
        raise UsageError("--autoscale", "does not apply to --disaggregate", "use only one")
    if options.autoscale is not None and options.pool is not None:
        raise UsageError("--autoscale", "scales servers of one kind, and --pool names more", "use only one")
    if (options.disaggregate is None) != (options.link is None):
        raise UsageError("--disaggregate and --link", "must be used together", "set both: 1P2D and 50GB/s")
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(LoadOptions):
    """Options of `kvplan tune`: given flags are fixed, the others searched; None: not given."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option("--gpu NAME", "GPU to serve on; 8xh100-80g for eight.", complete=complete_gpu)
    num_gpus: Text = option("--num-gpus N", "Number of GPUs, all servers together. Default: --tp, or 1.")
    max_model_len: Texts = option(
        "--max-model-len, --ctx TOKENS", "Context length, e.g. 32k. Default: the model's maximum."
    )
    rate: Text = option(
        "--rate N", "Requests per second to serve, or inf (all at once). Default: the highest rate within the targets."
    )
    num_requests: Text = option("--num-requests N", "Number of requests of a simulated run. Default: 2,000.")
    slo: Text = option("--slo TARGETS", "Latency targets to meet, e.g. ttft.p90=2s,tpot=50ms.")
    tier: Text = option("--tier TIER", "Host memory for KV offloading, e.g. cpu=64GiB@25GB/s.")
    fp8: bool = option("--fp8/--no-fp8", "Allow an fp8 KV cache.", True)
    jobs: Text = option("--jobs N", "Maximum number of processes. Default: all cores.")
    ray: Text = option(*RAY)
    # the answer
    limit: Text = option("--limit N", "Maximum number of rows to show. Default: 10.")
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option(
        "--exit-code", "Exit with 1 if no setting meets the targets, or meeting them at --rate is uncertain.", False
    )
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(PlanOptions):
    """Options of `kvplan calibrate`; None: not given."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option("--gpu NAME", "The GPU that the server ran on.", complete=complete_gpu)
    max_model_len: Texts = option("--max-model-len, --ctx TOKENS", "The server's context in tokens.")
    bench: Texts = option(
        "--bench FILE",
        "Result files of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX; repeatable, and "
        "'results/*.json'.",
    )
    prompt_tokens: Text = option("--prompt-tokens N", "Mean prompt length, if a result lacks it.")
    output_tokens: Text = option("--output-tokens N", "Mean output length, if a result lacks it.")
    output: Text = option("--output, -o FILE.json", "File to write, for --calibration.")
    force: bool = option(*FORCE, False)
    quiet: bool = option(*QUIET, False)
