"""The options of `kvplan pack`."""

from kvplan.cli.fields import COLOR, FORCE, FORMAT, QUIET, REPORT, Color, Text, Texts, argument, complete_gpu, option
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of `kvplan pack`."""

    policy: Text = argument(
        "POLICY", "Policy whose targets share one GPU; each target's min_users is the number it must serve."
    )
    server: Texts = option(
        "--server SERVER",
        "Server to place: 'NAME=MODEL flags --users N' or 'NAME=vllm serve ...', with its own flags; repeatable.",
    )
    gpu: Text = option("--gpu NAME", "GPU shared by all servers (`kvplan gpus`).", complete=complete_gpu)
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
