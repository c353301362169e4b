"""The options of `kvplan pack`."""

from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    REPORT,
    Color,
    Text,
    Texts,
    argument,
    complete_gpu,
    complete_model,
    option,
)
from kvplan.cli.sweep_options import PRICES
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


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
