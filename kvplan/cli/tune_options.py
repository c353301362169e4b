"""The options of `kvplan tune`."""

from typing import ClassVar

from kvplan.cli.fields import COLOR, FORCE, FORMAT, QUIET, RAY, REPORT, Color, Text, Texts, complete_gpu, option
from kvplan.cli.load_options import LoadOptions
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


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
