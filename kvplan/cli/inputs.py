"""Parse options into requests for plans, with notes and warnings."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvplan.cli import output
from kvplan.cli.options import PlanOptions, WorkloadOptions, engine_args, engine_pairs, given, refuse_two
from kvplan.cli.resolve import Resolved, Source, quantized, resolve
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import (
    AUTO,
    MAX_TOKENS,
    MIB,
    format_count,
    format_gib,
    parse_contexts,
    parse_fraction,
    parse_size,
    parse_tokens,
    split_list,
)
from kvplan.hardware.gpu import GpuSpec, custom_gpu, gpu, split_count, with_memory
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Load, Request
from kvplan.servers.base import parse_engine, server_of
from kvplan.servers.plans.plan import GpuCount
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import EngineArgs

if TYPE_CHECKING:
    from kvplan.servers.plans.plan import Estimate
    from kvplan.servers.words.command import Repeated, ServeCommand
    from kvplan.servers.words.speculative_config import SpeculativeConfig

# One of each common size, smallest first: the table if no GPU is named.
COMMON_GPUS = ("rtx-4090", "l40s", "a100-80g", "h100-80g", "h200", "b200")
SMALLEST_GPU = 256 * MIB
Context = int | Literal["auto"] | None


@dataclass(slots=True)
class Inputs:
    """A parsed command line: one request for each context and GPU, with the GPUs of one context adjacent.

    of_command  notes on the command; readings: notes on numbers that kvplan's own flags would parse differently
    """

    requests: list[Request]
    num_gpus: int
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    of_command: list[str] = field(default_factory=list)


PASTED: Final = "--from-command"
LoadOf = Callable[[Context, ModelSpec], Load]  # request lengths, once the context and the model are known


def read(
    options: PlanOptions,
    load: LoadOf = lambda context, spec: Load(),
    command: "ServeCommand | None" = None,
    source: str = PASTED,
    *,
    of_log: bool = False,
) -> Inputs:
    """One request for each context and GPU. Raises UsageError and similar errors for invalid input.

    command  parsed options.from_command, if the caller has it; source: its origin, for notes
    of_log   the options were read from a log, whose draft is read later
    """
    if command is None and options.from_command is not None:
        from kvplan.asked.pasted import read_command  # only needed for a pasted command

        command = read_command(options.from_command)
    config = None
    if options.speculative_config is not None:
        from kvplan.cli.speculation import config_of, in_parts, without_drafts  # only needed for this option

        config = config_of(options)
        options, command = in_parts(options), None if command is None else without_drafts(command)
    args = engine_args(options, command)
    release = parse_engine(options.engine or (command.engine if command else None) or DEFAULT)
    contexts = contexts_of(options, args.max_model_len)
    gpus = counted_gpus_of(options)
    stated = None if options.weights_bytes is None else weights_of(options.weights_bytes)
    model = model_of(options, command, args)
    draft = draft_of(options, command)
    in_use = in_use_on([machine for _, machine in gpus], options.memory_in_use)
    variables_note = None
    if command and command.environment:
        from kvplan.servers.words import environment

        release, args, variables_note = environment.applied(command.environment, release, args, model.spec)
    splits = {machine: split_over(args, count, options, command) for count, machine in gpus}
    if config is not None:
        for split in splits.values():
            config.check_ranks(split.tensor_parallel_size, "--speculative-config")
    model = replace(model, spec=server_of(release.engine).as_read(model.spec, args))
    loads = {context: load(context, model.spec) for context in contexts}
    counted_by = gpu_count_of([count for count, _ in gpus], options, command)
    requests = [
        Request(
            spec=model.spec,
            gpu=machine,
            args=replace(split, max_model_len=context),
            release=release,
            load=loads[context],
            weights_bytes=model.weights_bytes if stated is None else stated,
            checkpoint=model.checkpoint if stated is None else None,
            draft=draft.spec if draft else None,
            memory_in_use=in_use,
            measured=measured_on(options, machine),
            repeated=repeated_by(command, config),
            gpu_count=counted_by,
        )
        for context in contexts
        for machine, split in splits.items()
    ]
    if not of_log:
        refuse_undrafted(requests[0])
    inputs = Inputs(requests, num_gpus=len(splits), notes=[] if variables_note is None else [variables_note])
    add_remarks(inputs, command, source, [model, *([draft] if draft else [])])
    inputs.notes += [f"--lengths: {note}" for load in loads.values() if load.lengths for note in load.lengths.notes]
    if command:
        about_flags(inputs, command, source)
    about_defaults(inputs, options, contexts, model)
    return inputs


def draft_of(options: PlanOptions, command: "ServeCommand | None") -> Resolved | None:
    name = options.draft_model or (command.draft_model if command else None)
    try:
        return None if name is None else resolve(name, source_of(options, None))
    except KvplanError as error:
        raise error.changed(keys=("draft_model",)) from error


def in_use_on(machines: Sequence[GpuSpec], text: str | None) -> int | None:
    """Bytes of each GPU that other processes hold. Raises UsageError if one has no more than that."""
    in_use = None if text is None else parse_size(text, "--memory-in-use", least=0)
    for machine in machines:
        if in_use is not None and in_use >= machine.total_memory:
            raise UsageError(
                "--memory-in-use",
                f"is more than {machine.name} has ({format_gib(in_use)} of {format_gib(machine.total_memory)})",
                "use the memory that other processes hold on one GPU",
            )
    return in_use


def add_remarks(inputs: Inputs, command: "ServeCommand | None", source: str, models: Sequence[Resolved]) -> None:
    """Add the notes and warnings of a command and of the models."""
    if command:
        inputs.readings += [note.of(source) for note in command.readings]
        inputs.of_command += [note.of(source) for note in command.notes]
    inputs.notes += [*inputs.readings, *inputs.of_command]
    for model in models:
        inputs.notes += model.notes
        inputs.warnings += model.warnings


def repeated_by(command: "ServeCommand | None", config: "SpeculativeConfig | None") -> "Repeated | None":
    """What printed commands repeat from a pasted command and from --speculative-config."""
    if command is None and config is None:
        return None
    from kvplan.servers.words.command import Repeated

    words = tuple(command.repeated) if command else ()
    speculative = dict(config.unsized) if config else command.speculative if command else {}
    return Repeated(parse_engine((command.engine if command else None) or DEFAULT).engine, words, speculative)


def refuse_undrafted(request: Request) -> None:
    """Refuse draft tokens that nothing drafts, as vLLM does.

    vLLM 0.27 config/speculative.py: "num_speculative_tokens was provided but without speculative model."
    """
    args = request.args
    if request.draft is not None or args.speculative_method is not None or not args.num_speculative_tokens:
        return
    if server_of(request.release.engine).abilities.needs_drafter:
        flag = f"--num-speculative-tokens {args.num_speculative_tokens:,}"
        problem = "needs a draft model or a method that drafts the tokens"
        raise UsageError(flag, problem, "add --draft-model or --speculative-method", keys=("num_speculative_tokens",))


def measured_on(options: PlanOptions, gpu: GpuSpec) -> "dict[str, Estimate]":
    """Constants of --calibration, if it was measured on this kind of GPU."""
    if options.calibration is None:
        return {}
    from kvplan.servers.plans import calibration

    return calibration.for_gpu(calibration.read(Path(options.calibration)), gpu)


def about_flags(inputs: Inputs, command: "ServeCommand", source: str) -> None:
    if command.unknown:
        flags = ", ".join(dict.fromkeys(command.unknown))
        inputs.warnings.append(f"{source}: unknown to kvplan and ignored: {flags}")
    if command.ignored:
        flags = ", ".join(dict.fromkeys(command.ignored))
        inputs.hints.append(f"{source}: no known effect on GPU memory: {flags}")


def default_context(request: Request) -> int:
    """Context that the server uses by default."""
    server = server_of(request.release.engine)
    shortened = request.args.disable_sliding_window
    return server.context(server.drafter(request)[0].spec if shortened else request.spec)


def about_defaults(inputs: Inputs, options: PlanOptions, contexts: Sequence[Context], model: Resolved) -> None:
    if contexts == (None,):
        most = default_context(inputs.requests[0])
        less = "; add --ctx 32k for less" if most > 32 * 1024 else ""
        inputs.notes.append(f"no --ctx: using the model's maximum of {format_count(most)} tokens{less}")
    pool = options.kv_cache_memory_bytes
    if pool is not None:
        from kvplan.servers.words.argument_values import is_vllm_size, vllm_size_note  # only with the flag

        stated = inputs.requests[0].args.kv_cache_memory_bytes or 0
        inputs.notes += [vllm_size_note("--kv-cache-memory-bytes", pool, stated)] if is_vllm_size(pool) else []


def contexts_of(options: PlanOptions, elsewhere: Context) -> tuple[Context, ...]:
    """Contexts of --ctx, else of a pasted command or --engine-arg, else the model's own (None)."""
    if options.max_model_len is None:
        return (elsewhere,)
    text = ", ".join(options.max_model_len)
    for part in split_list(text, "--ctx", several=options.takes_contexts):
        if re.fullmatch(r"[0-9]{21,}[kKmM]?i?", part):
            raise UsageError(
                "--ctx",
                f"is too large ({part[:20]}...), at most {MAX_TOKENS:,}",
                "write 32768, 32k, or auto (or -1) for the longest that fits",
            )
    parsed = parse_contexts(text, "--ctx")
    contexts: tuple[Context, ...] = tuple("auto" if context is AUTO else context for context in dict.fromkeys(parsed))
    name = "max_model_len"
    pair = engine_pairs(options).get(name)
    if pair is not None and contexts != (pair,):
        refuse_two(name, pair, text)
    return contexts


def gpus_of(options: PlanOptions) -> list[GpuSpec]:
    """The GPUs named, for commands that set the number of GPUs elsewhere."""
    gpus = counted_gpus_of(options)
    for count, spec in gpus:
        if count is not None:
            raise UsageError(
                "--gpu", f"takes a name without a number here ({count} x {spec.name})", f"write {spec.name}"
            )
    return [spec for _, spec in gpus]


def counted_gpus_of(options: PlanOptions) -> list[tuple[int | None, GpuSpec]]:
    """(count, GPU) for every GPU named, each once; the count is None if not given: "a100-80g,8xh100"."""
    memory = None if options.gpu_memory is None else gpu_memory(options.gpu_memory)
    if options.gpu is None:
        return [(None, gpu(name)) for name in COMMON_GPUS] if memory is None else [(None, custom_gpu(memory))]
    names = [name.strip() for text in options.gpu for name in text.split(",")]
    if "" in names:
        raise UsageError(
            "--gpu",
            f"contains an empty name ({printable(','.join(options.gpu), 60)!r})",
            "write one, or several separated by commas: a100-80g,h200",
        )
    counts: dict[GpuSpec, int | None] = {}
    for count, name in map(split_count, names):
        spec = gpu(name) if memory is None else with_memory(gpu(name), memory)
        if counts.setdefault(spec, count) != count:
            raise UsageError("--gpu", f"names {spec.name} twice with different numbers", "use only one")
    return [(count, spec) for spec, count in counts.items()]


def gpu_count_of(counts: Sequence[int | None], options: PlanOptions, command: "ServeCommand | None") -> GpuCount:
    """How the number of GPUs is stated, as fixes of it must be."""
    if not any(counts):
        return "ranks"
    return "both" if "tensor_parallel_size" in stated_arguments(options, command) else "name"


def split_over(args: EngineArgs, count: int | None, options: PlanOptions, command: "ServeCommand | None") -> EngineArgs:
    """The arguments for this many GPUs: tensor parallelism over all that --pp and --dp leave."""
    if count is None:
        return args
    tp = args.tensor_parallel_size
    others = args.num_gpus // tp  # ranks of DP attention are among the tensor-parallel ranks
    if "tensor_parallel_size" in stated_arguments(options, command):
        if tp * others != count:
            raise UsageError(
                "--gpu", f"says {count} GPUs, and --tp x --pp x --dp make {tp * others}", "change one of them"
            )
        return args
    if count % others:
        raise UsageError(
            "--gpu", f"says {count} GPUs, no multiple of the {others} of --pp x --dp", "change one of them"
        )
    return replace(args, tensor_parallel_size=count // others)


def stated_arguments(options: PlanOptions, command: "ServeCommand | None") -> set[str]:
    """Engine arguments that the user gave in any form."""
    if options.speculative_config is not None:
        from kvplan.cli.speculation import in_parts

        options = in_parts(options)
    return {*given(options), *engine_pairs(options), *(command.args if command else ())}


def weights_of(text: str) -> int:
    from kvplan.servers.words.argument_values import stated_bytes  # only with the flag

    return stated_bytes(parse_size(text, "--weights-bytes"), "--weights-bytes")


def gpu_memory(text: str) -> int:
    """Bytes of a GPU; a bare "80" is rejected, because it more likely means 80 GB."""
    size = parse_size(text, "--gpu-memory")
    if size < SMALLEST_GPU:
        raise UsageError(
            "--gpu-memory", f"is too small for a GPU ({size:,} bytes)", "write the unit, for example 24GiB"
        )
    return size


def source_of(options: PlanOptions, revision: str | None) -> Source:
    return Source(revision, options.offline, options.assume_dense, options.text_only, options.weights_bytes is not None)


def refuse_missing(*options: tuple[str, bool, str]) -> None:
    """Refuse missing options, all in one error: (what, whether it is given, what to write)."""
    missing = [(name, cure) for name, is_said, cure in options if not is_said]
    if missing:
        names, cures = zip(*missing, strict=True)
        raise UsageError(", ".join(names), "missing", "; ".join(cures))


MODEL_CURE = "name a model (`kvplan models`), a config.json or a Hub id, or paste a command with --from-command"


def says_model(options: PlanOptions) -> bool:
    """True if a model is named, or may be in a pasted command."""
    return options.model is not None or options.from_command is not None


def says_gpu(options: PlanOptions) -> bool:
    return options.gpu is not None or options.gpu_memory is not None


def model_of(options: PlanOptions, command: "ServeCommand | None", args: EngineArgs) -> Resolved:
    ref = options.model or (command.model if command else None)
    if ref is None:
        raise UsageError("MODEL", "missing", MODEL_CURE)
    revision = options.revision or (command.revision if command and options.model is None else None)
    source = source_of(options, revision)
    try:
        model = resolve(ref, source)
    except UnsupportedModelError:  # perhaps of a vision tower that this server does not load
        if not args.language_model_only or source.text_only:
            raise
        model = resolve(ref, replace(source, text_only=True))
    if options.model is not None and args.quantization is not None:
        return quantized(model, options.model, args.quantization, source)
    return model


def load_of(options: WorkloadOptions, context: Context, spec: ModelSpec) -> Load:
    """Length of requests: a mean, a prompt and an output, or a distribution, truncated at the context."""
    mean = None if options.mean_tokens is None else parse_tokens(options.mean_tokens, "--mean-tokens")
    if options.prompt_tokens is not None or options.output_tokens is not None:
        if mean is not None:
            raise UsageError("--mean-tokens", "conflicts with --prompt-tokens and --output-tokens", "use only one")
        mean = prompt_and_output(options)
    lengths = None
    if options.lengths is not None:
        from kvplan.workloads.lengths import parse_lengths
        from kvplan.workloads.trace import read_full_lengths

        limit = context if isinstance(context, int) else spec.max_model_len
        lengths = parse_lengths(options.lengths, limit, read_full_lengths)
    shared = 0 if options.shared_prefix is None else parse_tokens(options.shared_prefix, "--shared-prefix")
    return Load(
        mean_tokens=mean,
        lengths=lengths,
        overflow=overflow_of(options),
        shared_prefix=shared,
        prompt_tokens=None if options.prompt_tokens is None else parse_tokens(options.prompt_tokens, "--prompt-tokens"),
    )


def prompt_and_output(options: WorkloadOptions) -> int:
    """Mean tokens held: the prompt plus half the output, which grows linearly while it is generated."""
    from kvplan.workloads.lengths import in_flight

    if options.prompt_tokens is None or options.output_tokens is None:
        raise UsageError(
            "--prompt-tokens and --output-tokens",
            "must be used together",
            "set both, or --mean-tokens",
            keys=("prompt_tokens", "output_tokens"),
        )
    prompt = parse_tokens(options.prompt_tokens, "--prompt-tokens")
    return in_flight(prompt, parse_tokens(options.output_tokens, "--output-tokens"))


def overflow_of(options: WorkloadOptions) -> float:
    if options.overflow is None:
        return Load().overflow
    if options.lengths is None:
        raise UsageError("--overflow", "applies only to --lengths", "set both")
    return parse_fraction(options.overflow, "--overflow")


def say(inputs: Inputs, *, quiet: bool) -> None:
    for text in dict.fromkeys(inputs.warnings):
        output.tell("warning", text)
    if not quiet:
        for text in dict.fromkeys(inputs.notes):
            output.tell("note", text)
        for text in dict.fromkeys(inputs.hints):
            output.tell("hint", text)
