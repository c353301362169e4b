"""The options of `kvplan preflight`."""

from typing import Literal

from kvplan.cli.fields import COLOR, QUIET, Color, Text, argument, complete_gpu, complete_model, option
from kvplan.core.records import dataclass


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
