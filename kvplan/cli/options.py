"""The options of each command: a dataclass per command, from which typer reads names, types, defaults and help.

Values stay text until kvplan/asked/form.py parses them, so that a flag, a pasted command and --engine-arg are parsed
and rejected by the same code (kvplan/servers/words/argument_values.py).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from kvplan.asked.form import LENGTH_KEYS, PLAN_KEYS, READING, Form, flag_of, read_form, stated_except, with_file
from kvplan.asked.question import Inputs, requests
from kvplan.cli.fields import (
    COLOR,
    FORCE,
    FORMAT,
    QUIET,
    REPORT,
    REQUIRED,
    Color,
    Switch,
    Text,
    Texts,
    argument,
    complete_engine,
    complete_gpu,
    complete_kv_dtype,
    complete_model,
    option,
    option_field,
)
from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.report.formats import Format
from kvplan.servers.base import SERVERS
from kvplan.servers.words.arguments import ARGUMENTS, OWN_NAMES, Argument

# Options about a server that ran, in addition to its log.
SERVED_MODEL: Final = (
    "--model, --config MODEL",
    "Model that was served: catalog name, Hub id, config.json or its directory.",
)
SERVED_GPU: Final = ("--gpu NAME", "GPU the server ran on (`kvplan gpus`). Default: from the log.")
SERVED_CONTEXT: Final = ("--max-model-len, --ctx TOKENS", "Context length. Default: from the log.")


def option_of(name: str, row: Argument) -> tuple[Any, Any]:
    """Type and field of an engine argument's option."""
    flag = flag_of(name)
    kind: Any = Texts if row.many else Text
    if row.kind == "flag":
        flag, kind = f"{flag}/--no-{flag[2:]}", Switch
    elif row.kind == "choice" and row.metavar is None:
        kind = Literal[row.choices] | None
    names = (flag, *row.options, *OWN_NAMES.get(name, ()))
    complete = complete_kv_dtype if name == "kv_cache_dtype" else None
    return kind, option_field(names, row.help, row.metavar, None, complete)


Options = TypeVar("Options")


def with_arguments(cls: type[Options]) -> type[Options]:
    """Add an option for every engine argument to the class, after those of the machine."""
    own = dict(cls.__annotations__)
    machine = list(own).index("memory_in_use") + 1
    added = {name: option_of(name, row) for name, row in ARGUMENTS.items()}
    kinds = {name: kind for name, (kind, _) in added.items()}
    cls.__annotations__ = dict([*list(own.items())[:machine], *kinds.items(), *list(own.items())[machine:]])
    for name, (_, defined) in added.items():
        setattr(cls, name, defined)
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
@with_arguments
class PlanOptions:
    """Model, GPU and engine arguments: the inputs of every plan; None: not given.

    takes_contexts  False if the command plans one server, with one context
    """

    takes_contexts: ClassVar[bool] = True

    model: Text = argument(
        "MODEL", "Catalog name (`kvplan models`), config.json or its directory, or Hub id.", complete=complete_model
    )
    # the machine
    gpu: Texts = option(
        "--gpu NAME",
        "GPU name (`kvplan gpus`); separate several with commas, or repeat. Default: compare six common GPUs.",
        complete=complete_gpu,
    )
    gpu_memory: Text = option("--gpu-memory SIZE", "Total memory of one GPU, as CUDA reports it.")
    host_bandwidth: Text = option(
        "--host-bandwidth SIZE", "Bytes per second of the host's memory, for the speed of layers on it, e.g. 90GB/s."
    )
    memory_in_use: Text = option(
        "--memory-in-use SIZE",
        "Memory already used on each GPU by other processes (or by the host, if shared); "
        "by a trainer in turn with a server that sleeps: awake=10GiB,asleep=60GiB.",
    )

    @property
    def reads_file(self) -> bool:
        """True if a file in place of a model may contain a server's command."""
        return True

    if TYPE_CHECKING:  # an option for every engine argument: `with_arguments`

        def __getattr__(self, name: str) -> Any: ...

    weights_bytes: Text = option("--weights-bytes SIZE", "Size of all weights, instead of computing it.")
    calibration: Text = option("--calibration FILE", "Use constants that `reconcile --calibrate` measured on this GPU.")
    enable_lora: Switch = option("--enable-lora/--no-enable-lora", "Reserve memory for LoRA adapters.")
    draft_model: Text = option(
        "--draft-model MODEL", "Draft model for speculative decoding; same forms as MODEL.", complete=complete_model
    )
    speculative_config: Text = option(
        "--speculative-config JSON",
        'Speculative decoding as vLLM takes it, e.g. \'{"method": "mtp", "num_speculative_tokens": 1}\'.',
    )
    engine: Text = option(
        "--engine NAME",
        f"Server ({', '.join(SERVERS)}) and its release if known, e.g. vllm@0.33.",
        complete=complete_engine,
    )
    engine_arg: Texts = option("--engine-arg KEY=VALUE", "Set any engine argument by its vLLM name; repeatable.")
    from_command: Text = option(
        "--from-command TEXT",
        f"Read a pasted command that starts a server ({', '.join(SERVERS)}); options override it.",
    )
    # where the config comes from
    assume_dense: bool = option("--assume-dense", "Size an unknown model_type as a plain dense transformer.", False)
    text_only: bool = option("--text-only", "Size only the language model, without its vision or audio tower.", False)
    reader: Text = option(
        "--reader server", "Read a model_type without a reader from transformers' own class, if that is installed."
    )
    revision: Text = option("--revision REV", "Branch, tag or commit of a Hub model.")
    offline: bool = option("--offline", "Use only the local Hub cache.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(PlanOptions):
    """Request lengths, in addition to the inputs of every plan."""

    mean_tokens: Text = option("--mean-tokens TOKENS", "Average number of tokens a request keeps in the KV cache.")
    prompt_tokens: Text = option(
        "--prompt-tokens TOKENS", "Mean prompt length; use with --output-tokens, instead of --mean-tokens."
    )
    output_tokens: Text = option(
        "--output-tokens TOKENS",
        "Mean output length (half is added to the mean KV cache use, as outputs grow step by step).",
    )
    lengths: Text = option(
        "--lengths DIST", "Distribution of request lengths: lognormal:mean=2k,sigma=1 or a CSV file."
    )
    overflow: Text = option(
        "--overflow SHARE", "Acceptable probability of exceeding the KV cache with --lengths, e.g. 1%."
    )
    shared_prefix: Text = option("--shared-prefix TOKENS", "Length of the prefix that all requests share.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions(WorkloadOptions):
    """Options of `kvplan estimate`."""

    explain: bool = option("--explain", "Show every formula, its numbers and its source.", False)
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    exit_code: bool = option("--exit-code", "Exit with 1 if any estimate does not fit.", False)
    color: Color = option(*COLOR, "auto")
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Options of `kvplan models`."""

    name: Text = argument("NAME", "Model to describe, with sources.", complete=complete_model)
    family: Text = option("--family TEXT", "List only models whose name, id or type contains TEXT.")
    max_params: Text = option("--max-params N", "List only models with at most N parameters, e.g. 8B.")
    gpu: Text = option(
        "--gpu NAME", "List only models that fit on this GPU, or on several: 2xl40s.", complete=complete_gpu
    )
    gpu_memory: Text = option("--gpu-memory SIZE", "Total memory of that GPU, or of one without a name.")
    ctx: Text = option("--ctx N", "Context for --gpu.  [default: 8k]")
    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOptions:
    """Options of `kvplan gpus`."""

    name: Text = argument("NAME", "GPU to describe, with sources.", complete=complete_gpu)
    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOptions:
    """Options of `kvplan schema`."""

    name: str = argument(
        "NAME",
        "Command (estimate, check, diff, upgrade, sweep, recommend, simulate), or plans, policy, check-failure, "
        "trace, workload, diagnosis (`why`), log-reconciliation (`reconcile --log`).",
        REQUIRED,
    )


# --- what options ask -------------------------------------------------------------------------------------------------


def form_of(options: PlanOptions) -> Form:
    """The values that a plan's options give."""
    keys = (*PLAN_KEYS, *(LENGTH_KEYS if isinstance(options, WorkloadOptions) else ()))
    values = {key: getattr(options, key) for key in keys}
    given = {key: value for key, value in values.items() if value is not None and (value or key not in READING)}
    return Form(given, options.takes_contexts)


def whole_form(options: PlanOptions) -> Form:
    """The values that a plan's options give; a file that stands for a model has a server's command, as if pasted."""
    form = form_of(options)
    return with_file(form) if options.reads_file else form


def stated_by(options: PlanOptions, sought: Mapping[str, str]) -> frozenset[str]:
    """Engine arguments that are given in any form. Refuse those that the command seeks itself, each with the reason."""
    return stated_except(whole_form(options), sought)


def refuse_given(options: object, names: Iterable[str], problem: str, remedy: str) -> None:
    """Refuse the first of these options that is given."""
    for name in names:
        if getattr(options, name, None) not in (None, False, []):
            raise UsageError(flag_of(name), problem, remedy)


def inputs_of(options: PlanOptions) -> Inputs:
    """The requests of a plan's options."""
    return requests(read_form(whole_form(options)))
