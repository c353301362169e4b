"""The options of each command: a dataclass per command, from which typer reads names, types, defaults and help.

Values stay text until `engine_args` and its like read them, so that a flag, a pasted command and --engine-arg are read
and refused by the same code (kvplan/servers/arguments.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from kvplan.core import entries
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.report.formats import SUFFIXES, Format
from kvplan.servers.arguments import ARGUMENTS, Argument, EngineArgs, read_argument, switch
from kvplan.servers.base import DEFAULT, SERVERS, server_of

if TYPE_CHECKING:
    from kvplan.servers.words import ServeCommand

Color = Literal["auto", "always", "never"]


def complete_model(incomplete: str) -> list[str]:
    """Catalog names for the shell."""
    return complete("models.yaml", incomplete)


def complete_gpu(incomplete: str) -> list[str]:
    return complete("gpus.yaml", incomplete)


def complete_kv_dtype(incomplete: str) -> list[str]:
    from kvplan.sizing.layout import KV_DTYPES

    return [name for name in ("auto", *KV_DTYPES) if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    from kvplan.servers.base import SERVERS, server_of

    return [name for server in SERVERS for name in server_of(server).labels() if name.startswith(incomplete)]


def complete(file_name: str, incomplete: str) -> list[str]:
    try:
        names = list(entries.sections(entries.locate(file_name)))
    except OSError:  # a shell's completion must not print an error
        return []
    return [name for name in names if name.startswith(incomplete.lower())]


def option(
    *names: str, help: str, metavar: str | None = None, complete: Callable[[str], list[str]] | None = None
) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, autocompletion=complete)


# --- shared ---------------------------------------------------------------------------------------------------------

FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
ColorOption = Annotated[
    Color, typer.Option("--color", help="Color the output; auto: only on a terminal, and not if NO_COLOR is set.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite files that kvplan did not write.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Suppress notes and hints.")]
Text = str | None
Texts = list[str] | None
Switch = bool | None
TraceEventsOption = Annotated[
    Text,
    option(
        "--trace-events",
        help="Write every request and counter over time for ui.perfetto.dev.",
        metavar="FILE.pftrace|json",
    ),
]
ReportOption = Annotated[
    Texts,
    option("--report", help=f"Also write the answer to a file ({', '.join(SUFFIXES)}); repeatable.", metavar="PATH"),
]
RayOption = Annotated[
    Text,
    option("--ray", help="Share the work with a Ray cluster: host:port, ray://host:port or auto.", metavar="ADDRESS"),
]
# Of a server that ran, beside its log.
ServedModelOption = Annotated[
    Text,
    typer.Option(
        "--model",
        "--config",
        metavar="MODEL",
        help="Model that was served: catalog name, Hub id, config.json or its directory.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
ServedGpuOption = Annotated[
    Texts,
    option(
        "--gpu",
        help="GPU the server ran on (`kvplan gpus`). Default: from the log.",
        metavar="NAME",
        complete=complete_gpu,
    ),
]
ServedContextOption = Annotated[
    Texts, option("--max-model-len", "--ctx", help="Context length. Default: from the log.", metavar="TOKENS")
]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_of(name: str, row: Argument) -> Any:
    """The option of an engine argument, as typer reads it."""
    flag = flag_of(name)
    if row.kind == "flag":
        return Annotated[Switch, option(f"{flag}/--no-{flag[2:]}", *row.options, help=row.help)]
    if row.kind == "choice" and row.metavar is None:
        return Annotated[Literal[row.choices] | None, option(flag, *row.options, help=row.help)]
    kind = Texts if row.many else Text
    complete = complete_kv_dtype if name == "kv_cache_dtype" else None
    return Annotated[kind, option(flag, *row.options, help=row.help, metavar=row.metavar, complete=complete)]


Options = TypeVar("Options")


def with_arguments(cls: type[Options]) -> type[Options]:
    """The class with an option for every engine argument, behind those of the machine."""
    own = dict(cls.__annotations__)
    machine = list(own).index("memory_in_use") + 1
    added = {name: option_of(name, row) for name, row in ARGUMENTS.items()}
    cls.__annotations__ = dict([*list(own.items())[:machine], *added.items(), *list(own.items())[machine:]])
    for name in added:
        setattr(cls, name, None)
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
@with_arguments
class PlanOptions:
    """Which model on which GPU with which engine arguments: what every plan is made from; None: not said."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="Catalog name (`kvplan models`), config.json or its directory, or Hub id.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    # the machine
    gpu: Annotated[
        Texts,
        option(
            "--gpu",
            help="GPU name (`kvplan gpus`); separate several with commas, or repeat. Default: compare six common GPUs.",
            metavar="NAME",
            complete=complete_gpu,
        ),
    ] = None
    gpu_memory: Annotated[
        Text, option("--gpu-memory", help="Total memory of one GPU, as CUDA reports it.", metavar="SIZE")
    ] = None
    memory_in_use: Annotated[
        Text,
        option(
            "--memory-in-use",
            help="Memory already used on each GPU by other processes (or a host that shares it).",
            metavar="SIZE",
        ),
    ] = None
    if TYPE_CHECKING:  # an option for every engine argument: `with_arguments`

        def __getattr__(self, name: str) -> Any: ...

    weights_bytes: Annotated[
        Text, option("--weights-bytes", help="Bytes of all weights, instead of computing them.", metavar="SIZE")
    ] = None
    calibration: Annotated[
        Text,
        option(
            "--calibration", help="Use constants that `reconcile --calibrate` measured on this GPU.", metavar="FILE"
        ),
    ] = None
    enable_lora: Annotated[
        Switch, option("--enable-lora/--no-enable-lora", help="Reserve memory for LoRA adapters.")
    ] = None
    draft_model: Annotated[
        Text,
        typer.Option(
            "--draft-model",
            help="Draft model for speculative decoding; same forms as MODEL.",
            metavar="MODEL",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    engine: Annotated[
        Text,
        option(
            "--engine",
            help=f"Server ({', '.join(SERVERS)}), and its release where you know it: vllm@0.33.",
            metavar="NAME",
            complete=complete_engine,
        ),
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        option("--engine-arg", help="Set any engine argument by its vLLM name; repeatable.", metavar="KEY=VALUE"),
    ] = None
    from_command: Annotated[
        Text,
        option(
            "--from-command",
            help=f"Read a pasted command that starts a server ({', '.join(SERVERS)}); options override it.",
            metavar="TEXT",
        ),
    ] = None
    # where the config comes from
    assume_dense: Annotated[
        bool, typer.Option("--assume-dense", help="Size an unknown model_type as a plain dense transformer.")
    ] = False
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Size only the language model, without its vision or audio tower.")
    ] = False
    revision: Annotated[Text, option("--revision", help="Branch, tag or commit of a Hub model.", metavar="REV")] = None
    offline: Annotated[bool, typer.Option("--offline", help="Use only the local Hub cache.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(PlanOptions):
    """How long requests are, beside what every plan is made from."""

    mean_tokens: Annotated[
        Text,
        option("--mean-tokens", help="Average number of tokens a request keeps in the KV cache.", metavar="TOKENS"),
    ] = None
    prompt_tokens: Annotated[
        Text,
        option(
            "--prompt-tokens",
            help="Mean prompt length; use with --output-tokens, instead of --mean-tokens.",
            metavar="TOKENS",
        ),
    ] = None
    output_tokens: Annotated[
        Text,
        option(
            "--output-tokens",
            help="Mean output length; half of it counts, because outputs grow step by step.",
            metavar="TOKENS",
        ),
    ] = None
    lengths: Annotated[
        Text,
        option(
            "--lengths",
            help="Distribution of request lengths: lognormal:mean=2k,sigma=1 or a CSV file.",
            metavar="DIST",
        ),
    ] = None
    overflow: Annotated[
        Text, option("--overflow", help="Accepted chance that --lengths overflow the KV cache: 1%.", metavar="SHARE")
    ] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all requests share.", metavar="TOKENS")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions(WorkloadOptions):
    """`kvplan estimate`; also what a target of a policy may say."""

    explain: Annotated[bool, typer.Option("--explain", help="Show every formula, its numbers and its source.")] = False
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if any estimate does not fit.")] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """`kvplan models`."""

    name: Annotated[
        Text,
        typer.Argument(
            metavar="NAME", help="Model to describe, with sources.", autocompletion=complete_model, show_default=False
        ),
    ] = None
    family: Annotated[
        Text, option("--family", help="List only models whose name, id or type contains TEXT.", metavar="TEXT")
    ] = None
    max_params: Annotated[
        Text, option("--max-params", help="List only models with at most N parameters: 8B.", metavar="N")
    ] = None
    format: FormatOption = "table"
    color: ColorOption = "auto"
    report: ReportOption = None
    force: ForceOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOptions:
    """`kvplan gpus`."""

    name: Annotated[
        Text,
        typer.Argument(
            metavar="NAME", help="GPU to describe, with sources.", autocompletion=complete_gpu, show_default=False
        ),
    ] = None
    format: FormatOption = "table"
    color: ColorOption = "auto"
    report: ReportOption = None
    force: ForceOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOptions:
    """`kvplan schema`."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Command (estimate, check, diff, upgrade, sweep, recommend, simulate), or plans, policy, "
            "check-failure, trace, workload, diagnosis (`why`), log-reconciliation (`reconcile --log`).",
        ),
    ]


# --- from text to engine arguments ----------------------------------------------------------------------------------

FLAGS = {"max_model_len": "--ctx"}


def given(options: PlanOptions) -> dict[str, Any]:
    """Engine arguments said by flags of their own; several contexts are left to `contexts`."""
    values: dict[str, Any] = {}
    for name in ARGUMENTS:
        value = getattr(options, name)
        if value is None or name == "max_model_len":
            continue
        values[name] = read_argument(name, value, flag_of(name)) if isinstance(value, str) else value
    return values


def usual_slots(options: PlanOptions) -> int:
    """Adapter slots where their number is not given, by the server; one that is not known is refused elsewhere."""
    name = re.split("[@+]", options.engine or DEFAULT)[0]
    return server_of(name).terms.adapter_slots if name in SERVERS else 1


def with_lora_slots(args: EngineArgs, options: PlanOptions) -> EngineArgs:
    """--enable-lora alone is as many slots as the server's default; --no-enable-lora is none."""
    if options.enable_lora is None:
        return args
    if not options.enable_lora and options.max_loras is not None:
        raise UsageError("--no-enable-lora", "contradicts --max-loras", "leave one out")
    return replace(args, max_loras=(args.max_loras or usual_slots(options)) if options.enable_lora else 0)


def engine_pair(text: str) -> tuple[str, Any]:
    """`--engine-arg k=v`, k being an argument's name or the one that a server has for it."""
    from kvplan.servers.words import pair_name, read_pair  # of no account unless one is given

    if pair_name(text) not in ARGUMENTS:
        pairs = (server_of(server).read_pair(text) for server in SERVERS)
        if pair := next((pair for pair in pairs if pair is not None), None):
            return pair
    return read_pair(text)


def engine_pairs(options: PlanOptions) -> dict[str, Any]:
    """What --engine-arg says; a repeated key must say the same."""
    pairs: dict[str, Any] = {}
    for text in options.engine_arg or []:
        key, _, value_text = text.partition("=")
        if key.strip("- ").replace("-", "_") == "enable_lora":
            on = switch(value_text, "--engine-arg enable_lora")
            name = "max_loras"
            value = (pairs.get(name) or usual_slots(options)) if on else 0
        else:
            name, value = engine_pair(text)
            if pairs.get(name, value) != value:
                raise UsageError(f"--engine-arg {name}", f"is given twice, {pairs[name]} and {value}", "leave one out")
        pairs[name] = value
    return pairs


def engine_args(options: PlanOptions, command: "ServeCommand | None") -> EngineArgs:
    """The engine's arguments but for several contexts: a pasted command's, over which --engine-arg and options win.

    Raises UsageError where --engine-arg and an option contradict each other.
    """
    pairs, flags = engine_pairs(options), given(options)
    for name in pairs.keys() & flags.keys():
        refuse_two(name, pairs[name], flags[name])
    values = (dict(command.args) if command else {}) | pairs | flags
    if pairs:
        from kvplan.servers.words import over_experts

        over_experts(values, "--engine-arg ep_size")
    args = EngineArgs(**{name: value for name, value in values.items() if name in ARGUMENTS})
    return with_lora_slots(args, options)


def refuse_two(name: str, pair: Any, flag: Any) -> None:
    if pair != flag:
        raise UsageError(
            f"{FLAGS.get(name, flag_of(name))} {flag} and --engine-arg {name}={pair}",
            "contradict each other",
            "leave one out",
        )
