"""The options of each command: a dataclass per command, from which typer reads names, types, defaults and help.

Values stay text until `engine_args` and similar functions parse them, so that a flag, a pasted command and --engine-arg
are parsed and rejected by the same code (kvplan/servers/argument_values.py).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from kvplan.core import entries
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.report.formats import SUFFIXES, Format
from kvplan.servers.argument import Argument
from kvplan.servers.argument_values import read_argument, switch
from kvplan.servers.arguments import ARGUMENTS, EngineArgs, left_out
from kvplan.servers.base import SERVERS, parse_engine, server_of
from kvplan.servers.releases import DEFAULT

if TYPE_CHECKING:
    from kvplan.servers.words import ServeCommand

Color = Literal["auto", "always", "never"]


def complete_model(incomplete: str) -> list[str]:
    """Catalog names for shell completion."""
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
    except OSError:  # shell completion must not print an error
        return []
    return [name for name in names if name.startswith(incomplete.lower())]


def option(
    *names: str, help: str, metavar: str | None = None, complete: Callable[[str], list[str]] | None = None
) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, autocompletion=complete)


# --- shared -----------------------------------------------------------------------------------------------------------

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
    option(
        "--ray",
        help="Distribute the work over a Ray cluster: host:port, ray://host:port, auto, or local to start one here.",
        metavar="ADDRESS",
    ),
]
# Options about a server that ran, in addition to its log.
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
    """Typer option of an engine argument."""
    flag, others = flag_of(name), (*row.options, *own_names(name, row))
    if row.kind == "flag":
        return Annotated[Switch, option(f"{flag}/--no-{flag[2:]}", *others, help=row.help)]
    if row.kind == "choice" and row.metavar is None:
        return Annotated[Literal[row.choices] | None, option(flag, *others, help=row.help)]
    kind = Texts if row.many else Text
    complete = complete_kv_dtype if name == "kv_cache_dtype" else None
    return Annotated[kind, option(flag, *others, help=row.help, metavar=row.metavar, complete=complete)]


def own_names(name: str, row: Argument) -> Iterator[str]:
    """Names of an argument in servers other than vLLM, if they are options with the same values."""
    for server in SERVERS:
        flag = row.flag(server)
        if server == DEFAULT or flag is None or not flag.printed or not flag.names or flag.names[0] in ARGUMENTS:
            continue
        if row.kind != "flag" and flag.on is None:
            yield flag_of(flag.names[0])
        elif row.kind == "flag" and flag.on is not None:
            yield flag_of(flag.names[0]) if flag.on else f" /{flag_of(flag.names[0])}"


Options = TypeVar("Options")


def with_arguments(cls: type[Options]) -> type[Options]:
    """Add an option for every engine argument to the class, after those of the machine."""
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
    """Model, GPU and engine arguments: the inputs of every plan; None: not given."""

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
            help="Memory already used on each GPU by other processes (or by the host, if shared).",
            metavar="SIZE",
        ),
    ] = None
    if TYPE_CHECKING:  # an option for every engine argument: `with_arguments`

        def __getattr__(self, name: str) -> Any: ...

    weights_bytes: Annotated[
        Text, option("--weights-bytes", help="Size of all weights, instead of computing it.", metavar="SIZE")
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
    speculative_config: Annotated[
        Text,
        option(
            "--speculative-config",
            help='Speculative decoding as vLLM takes it, e.g. \'{"method": "mtp", "num_speculative_tokens": 1}\'.',
            metavar="JSON",
        ),
    ] = None
    engine: Annotated[
        Text,
        option(
            "--engine",
            help=f"Server ({', '.join(SERVERS)}) and its release if known, e.g. vllm@0.33.",
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
    """Request lengths, in addition to the inputs of every plan."""

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
            help="Mean output length (half is added to the mean KV cache use, as outputs grow step by step).",
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
        Text,
        option(
            "--overflow",
            help="Acceptable probability of exceeding the KV cache with --lengths, e.g. 1%.",
            metavar="SHARE",
        ),
    ] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all requests share.", metavar="TOKENS")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions(WorkloadOptions):
    """Options of `kvplan estimate`; also the keys of a policy's target."""

    explain: Annotated[bool, typer.Option("--explain", help="Show every formula, its numbers and its source.")] = False
    format: FormatOption = "table"
    report: ReportOption = None
    force: ForceOption = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if any estimate does not fit.")] = False
    color: ColorOption = "auto"
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Options of `kvplan models`."""

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
        Text, option("--max-params", help="List only models with at most N parameters, e.g. 8B.", metavar="N")
    ] = None
    format: FormatOption = "table"
    color: ColorOption = "auto"
    report: ReportOption = None
    force: ForceOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOptions:
    """Options of `kvplan gpus`."""

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
    """Options of `kvplan schema`."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Command (estimate, check, diff, upgrade, sweep, recommend, simulate), or plans, policy, "
            "check-failure, trace, workload, diagnosis (`why`), log-reconciliation (`reconcile --log`).",
        ),
    ]


# --- from text to engine arguments ------------------------------------------------------------------------------------

FLAGS = {"max_model_len": "--ctx"}


def given(options: PlanOptions) -> dict[str, Any]:
    """Engine arguments given by their own flags; several contexts are left to `contexts`."""
    values: dict[str, Any] = {}
    for name in ARGUMENTS:
        value = getattr(options, name)
        if value is None or name == "max_model_len":
            continue
        values[name] = read_argument(name, value, flag_of(name)) if isinstance(value, str) else value
    return values


def usual_slots(options: PlanOptions) -> int:
    """The server's default number of adapter slots; an unknown server is rejected elsewhere."""
    name = re.split("[@+]", options.engine or DEFAULT)[0]
    return server_of(name).terms.adapter_slots if name in SERVERS else 1


def with_lora_slots(args: EngineArgs, options: PlanOptions) -> EngineArgs:
    """Apply --enable-lora without --max-loras as the server's default number of slots; --no-enable-lora is 0."""
    if options.enable_lora is None:
        return args
    if not options.enable_lora and options.max_loras is not None:
        raise UsageError("--no-enable-lora", "contradicts --max-loras", "use only one")
    return replace(args, max_loras=(args.max_loras or usual_slots(options)) if options.enable_lora else 0)


def engine_pair(text: str) -> tuple[str, Any]:
    """Parse `--engine-arg k=v`, where k is an argument's name in kvplan or in a server."""
    from kvplan.servers.words import pair_name, read_pair  # only needed for --engine-arg

    if pair_name(text) not in ARGUMENTS:
        pairs = (server_of(server).read_pair(text) for server in SERVERS)
        if pair := next((pair for pair in pairs if pair is not None), None):
            return pair
    return read_pair(text)


def engine_pairs(options: PlanOptions) -> dict[str, Any]:
    """Arguments of --engine-arg; repeated keys must agree."""
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
                raise UsageError(f"--engine-arg {name}", f"is given twice, {pairs[name]} and {value}", "use only one")
        pairs[name] = value
    return pairs


def engine_args(options: PlanOptions, command: "ServeCommand | None") -> EngineArgs:
    """The engine's arguments, except several contexts: those of a pasted command, overridden by --engine-arg and
    options.

    Raises UsageError if --engine-arg and an option contradict each other.
    """
    pairs, flags = engine_pairs(options), given(options)
    for name in pairs.keys() & flags.keys():
        refuse_two(name, pairs[name], flags[name])
    pasted = (
        left_out(parse_engine(options.engine or command.engine or DEFAULT).engine) | command.args if command else {}
    )
    values = pasted | pairs | flags
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
            "use only one",
        )
