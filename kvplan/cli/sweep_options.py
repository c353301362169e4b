"""The options of the commands that compare plans: sweep, recommend, explore, atlas, diff, upgrade, pack."""

import re
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
from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.report.formats import Format
from kvplan.servers.base import parse_engine
from kvplan.servers.releases import DEFAULT, Version

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
    num_requests: Text = option(
        "--num-requests N",
        "Number of requests to simulate, with --slo. Default: 10 for each user of a server, at least 2,000.",
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions(WorkloadOptions):
    """Options of `kvplan explore`: given values become the choices on the page; the rest have default choices."""

    models: Texts = argument(*MODELS, complete=complete_model)
    model: None = None  # several here: `models`
    users: Text = option("--users N", "Users at once at which the page opens. Default: 16.")
    output: str = option("--output, -o FILE", "The page to write. Default: explore.html.", "explore.html")
    prices: Text = option(*PRICES)
    force: bool = option(*FORCE, False)
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasOptions:
    """Options of `kvplan atlas`: which models and GPUs, and where the pages go."""

    output: str = option("--output, -o FOLDER", "Folder of the pages. Default: site.", "site")
    models: Text = option(
        "--models NAMES", "Models, separated by commas. Default: every model of the catalog.", complete=complete_model
    )
    gpus: Text = option(
        "--gpus NAMES",
        "GPUs, separated by commas. Default: those on sale whose memory a driver reported.",
        complete=complete_gpu,
    )
    engine: Text = option("--engine NAMES", "Servers and releases, e.g. vllm@0.30,vllm@0.33. Default: newest of each.")
    prices: Text = option(*PRICES)
    url: Text = option("--url ADDRESS", "Address that the site will have: writes sitemap.xml.")
    jobs: Text = option("--jobs N", "Maximum number of processes. Default: all cores.")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions(WorkloadOptions):
    """Options of `kvplan diff`; plan options apply to models only. `model` is OLD."""

    model: Text = argument(
        "OLD",
        "JSON output of `estimate` or `check`, a policy, or a model as for `estimate`; REV:PATH reads a file from "
        "git. With --policy: a revision.",
        complete=complete_model,
    )
    new: Text = argument(
        "NEW",
        "What to compare with OLD. Default: the current file of OLD's REV:PATH or of --policy.",
        complete=complete_model,
    )
    policy: Text = option("--policy PATH", "Compare this policy file between the revisions OLD and NEW.")
    gpu: Texts = option(
        "--gpu NAME",
        "GPU to compare the models on (`kvplan gpus`); separate several with commas, or repeat.",
        complete=complete_gpu,
    )
    # the answer
    exit_code: bool = option(
        "--exit-code",
        "Exit with 1 if NEW no longer fits, needs more KV bytes per token, or serves fewer users (at full context "
        "or at the given lengths, all replicas together).",
        False,
    )
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)

    @property
    def reads_file(self) -> bool:
        """A file is one side of what is compared."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeOptions(WorkloadOptions):
    """Options of `kvplan upgrade`; plan options apply to a command or a model. `model` is SERVER."""

    takes_contexts: ClassVar[bool] = False

    model: Text = argument(
        "SERVER",
        "Policy file (all its targets), quoted command ('vllm serve ...'), or model as for `estimate`.",
        complete=complete_model,
    )
    old: Text = option("--from RELEASE", "Current release, e.g. vllm@0.24. Default: from the policy or command.")
    new: Text = option("--to RELEASE", "Release to upgrade to. Default: the newest that kvplan knows.")
    # the answer
    exit_code: bool = option(
        "--exit-code", "Exit with 1 if a server that starts now would not start or would serve fewer users.", False
    )
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)

    @property
    def reads_file(self) -> bool:
        """A file is one side of what is compared."""
        return False


def release_of(text: str, flag: str, server: str | None = None) -> Version:
    """Parse the value of --from or --to: a release, or only its number."""
    try:
        is_number = re.match(r"v?\d", text) is not None
        return parse_engine(f"{(server or DEFAULT).partition('@')[0]}@{text}" if is_number else text)
    except KvplanError as error:
        raise error.renamed("--engine", flag) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of `kvplan pack`."""

    models: Texts = argument(
        "[POLICY | MODEL...]",
        "Models, each as for --server; or a policy whose targets share one GPU, each with its min_users.",
        complete=complete_model,
    )
    server: Texts = option(
        "--server SERVER",
        "Server to place: 'NAME=MODEL flags --users N' or 'NAME=vllm serve ...', with its own flags; repeatable.",
    )
    gpu: Text = option(
        "--gpu NAME", "GPU shared by all servers, or several to assign: 2xl40s,h100-80g.", complete=complete_gpu
    )
    gpu_memory: Text = option("--gpu-memory SIZE", "Total memory of one GPU, as CUDA reports it.")
    prices: Text = option(*PRICES)
    memory_in_use: Text = option("--memory-in-use SIZE", "GPU memory already used by a desktop and other processes.")
    engine: Text = option(
        "--engine ENGINE", "Server and release for each --server that is not a full command, e.g. vllm@0.33."
    )
    rest: Text = option("--rest NAME", "Server that gets the remaining memory. Default: the first.")
    exit_code: bool = option("--exit-code", "Exit with 1 if any server does not start.", False)
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)
    offline: bool = option("--offline", "Use only the local Hub cache.", False)
