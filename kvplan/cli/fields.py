"""Options and arguments as fields of a command's class, from which typer reads names, types, defaults and help."""

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any, Final, Literal, TypeVar, overload

import typer

from kvplan.core import entries
from kvplan.report.formats import SUFFIXES

Text = str | None
Texts = list[str] | None
Switch = bool | None
Color = Literal["auto", "always", "never"]


def complete_model(incomplete: str) -> list[str]:
    """Catalog names for shell completion."""
    return complete("models.yaml", incomplete)


def complete_gpu(incomplete: str) -> list[str]:
    return complete("gpus.yaml", incomplete)


def complete_profile(incomplete: str) -> list[str]:
    return complete("workloads.yaml", incomplete)


def complete_kv_dtype(incomplete: str) -> list[str]:
    from kvplan.sizing.layout import KV_DTYPES

    return [name for name in ("auto", *KV_DTYPES) if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    from kvplan.servers.base import SERVERS, server_of

    return [name for server in SERVERS for name in server_of(server).labels() if name.startswith(incomplete)]


def complete(file_name: str, incomplete: str) -> list[str]:
    try:
        names = list(entries.sections(entries.locate(file_name)))
    except OSError:  # shell completion must not print an error
        return []
    return [name for name in names if name.startswith(incomplete.lower())]


# --- options as fields ------------------------------------------------------------------------------------------------

T = TypeVar("T")
Complete = Callable[[str], list[str]]  # the names that continue a word, for shell completion
REQUIRED: Final[Any] = ...  # default of what has none, for typer


@overload
def option(usage: str, help: str, *, complete: Complete | None = None) -> None: ...
@overload
def option(usage: str, help: str, default: T, *, complete: Complete | None = None) -> T: ...
def option(usage: str, help: str, default: Any = None, *, complete: Complete | None = None) -> Any:
    """Define an option as a field of a command's class.

    usage    its names, then the placeholder of its value: "--output, -o FILE"
    default  None: not given
    """
    *names, last = usage.split(", ")
    name, _, metavar = last.partition(" ")
    return option_field((*names, name), help, metavar or None, default, complete)


def option_field(
    names: tuple[str, ...], help: str, metavar: str | None, default: Any, complete: Complete | None
) -> Any:
    show_default = "Default:" not in help  # else typer would add it once more
    info = typer.Option(default, *names, help=help, metavar=metavar, show_default=show_default, autocompletion=complete)
    return typer_field(info)


def argument(metavar: str, help: str, default: Any = None, *, complete: Complete | None = None) -> Any:
    """Define a positional argument as a field, by its placeholder; default None: not given."""
    return typer_field(typer.Argument(default, metavar=metavar, help=help, show_default=False, autocompletion=complete))


def typer_field(info: Any) -> Any:
    """Define a field that typer reads; `names` is empty for an argument."""
    default = MISSING if info.default is REQUIRED else info.default
    return field(default=default, metadata={"typer": info, "names": info.param_decls or ()})


# --- shared -----------------------------------------------------------------------------------------------------------

FORMAT: Final = ("--format", "Output format.")
COLOR: Final = ("--color", "Color the output; auto: only on a terminal, and not if NO_COLOR is set.")
FORCE: Final = ("--force", "Overwrite files that kvplan did not write.")
QUIET: Final = ("--quiet, -q", "Suppress notes and hints.")
TRACE_EVENTS: Final = (
    "--trace-events FILE.pftrace|json",
    "Write every request and counter over time for ui.perfetto.dev.",
)
REPORT: Final = ("--report PATH", f"Also write the answer to a file ({', '.join(SUFFIXES)}); repeatable.")
RAY: Final = (
    "--ray ADDRESS",
    "Distribute the work over a Ray cluster: host:port, ray://host:port, auto, or local to start one here.",
)
