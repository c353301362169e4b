"""`kvplan estimate`: flags -> requests -> plans -> the answer, and the exit code it means."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvplan.cli import output
from kvplan.cli.options import EstimateOptions, engine_args
from kvplan.cli.resolve import Resolved, Source, resolve
from kvplan.command import ServeCommand, read_command
from kvplan.errors import KvplanError, UsageError
from kvplan.gpu import GpuSpec, custom_gpu, gpu, with_memory
from kvplan.plan import Load, Plan, Request, plan
from kvplan.rules.vllm import parse_engine
from kvplan.spec import ModelSpec
from kvplan.units import (
    AUTO,
    MIB,
    format_count,
    parse_contexts,
    parse_fraction,
    parse_size,
    parse_tokens,
)
from kvplan.workload import in_flight, parse_lengths

# One of each size that people rent or own, smallest first: the table where no GPU is named.
COMMON_GPUS = ("rtx-4090", "l40s", "a100-80g", "h100-80g", "h200", "b200")
DEFAULT_GPU = "a100-80g"  # where several contexts are compared and no GPU is named
SMALLEST_GPU = 256 * MIB
Context = int | Literal["auto"] | None
Outcome = tuple[GpuSpec, Plan | KvplanError]


@dataclass(slots=True)
class Asked:
    """A command line, read: one request for each GPU and context."""

    requests: list[Request]
    over_gpus: bool
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def estimate(options: EstimateOptions) -> int:
    """Answer, and return the exit code: 0, or with --exit-code 1 where nothing fits."""
    with output.report_files(options.report or []) as reports:
        asked = read(options)
        say(asked, quiet=options.quiet)
        if asked.over_gpus:
            outcomes = over_gpus(asked.requests)
            plans = [answer for _, answer in outcomes if isinstance(answer, Plan)]
        else:
            plans = [plan(request) for request in asked.requests]
            outcomes = []
        for report in reports:
            report.save(render(report.format, plans, outcomes, options))
        show(plans, outcomes, options)
    return int(options.exit_code and not (any if asked.over_gpus else all)(answer.fits for answer in plans))


# --- reading ----------------------------------------------------------------------------------------------------------


def read(options: EstimateOptions) -> Asked:
    command = read_command(options.from_command) if options.from_command is not None else None
    args = engine_args(options, command)
    release = parse_engine(options.engine or (command.engine if command else None) or "vllm")
    contexts = contexts_of(options, args.max_model_len)
    gpus = gpus_of(options, len(contexts))
    stated = None if options.weights_bytes is None else parse_size(options.weights_bytes, "--weights-bytes")
    model = model_of(options, command, stated is not None)
    draft_name = options.draft_model or (command.draft_model if command else None)
    draft = None if draft_name is None else resolve(draft_name, source_of(options, None))
    loads = {context: load_of(options, context, model.spec) for context in contexts}
    requests = [
        Request(
            spec=model.spec,
            gpu=one,
            args=replace(args, max_model_len=context),
            release=release,
            load=loads[context],
            weights_bytes=model.weights_bytes if stated is None else stated,
            checkpoint=model.checkpoint if stated is None else None,
            draft=draft.spec if draft else None,
        )
        for one in gpus
        for context in contexts
    ]
    asked = Asked(requests, over_gpus=len(gpus) > 1)
    asked.notes += [*(command.notes if command else ()), *model.notes, *(draft.notes if draft else ())]
    asked.notes += [f"--lengths: {note}" for load in loads.values() if load.lengths for note in load.lengths.notes]
    asked.warnings += [*model.warnings, *(draft.warnings if draft else ())]
    if command:
        about_flags(asked, command)
    about_defaults(asked, options, contexts, model)
    return asked


def about_flags(asked: Asked, command: ServeCommand) -> None:
    if command.unmodelled:
        flags = ", ".join(dict.fromkeys(command.unmodelled))
        asked.warnings.append(f"--from-command: what {flags} does to memory is not modelled; answered as without")
    if command.ignored:
        flags = ", ".join(dict.fromkeys(command.ignored))
        asked.hints.append(f"--from-command: no effect on GPU memory that kvplan knows of: {flags}")


def about_defaults(asked: Asked, options: EstimateOptions, contexts: Sequence[Context], model: Resolved) -> None:
    if contexts == (None,):
        tokens = format_count(model.spec.max_model_len)
        asked.notes.append(f"no --ctx: the model's maximum of {tokens} tokens is taken; --ctx 32k asks for less")
    if options.gpu is None and options.gpu_memory is None and len(contexts) > 1:
        asked.notes.append(f"no --gpu: users are for one {DEFAULT_GPU}")


def contexts_of(options: EstimateOptions, elsewhere: Context) -> tuple[Context, ...]:
    """--ctx, else what a pasted command or --engine-arg said, else the model's own (None)."""
    if options.max_model_len is None:
        return (elsewhere,)
    found = parse_contexts(options.max_model_len, "--ctx")
    return tuple("auto" if context is AUTO else context for context in dict.fromkeys(found))


def gpus_of(options: EstimateOptions, num_contexts: int) -> list[GpuSpec]:
    memory = None if options.gpu_memory is None else gpu_memory(options.gpu_memory)
    if options.gpu is None:
        if memory is not None:
            return [custom_gpu(memory)]
        return [gpu(name) for name in (COMMON_GPUS if num_contexts == 1 else (DEFAULT_GPU,))]
    found = [gpu(name) for name in dict.fromkeys(options.gpu.split(","))]
    if len(found) > 1 and num_contexts > 1:
        raise UsageError(f"--gpu {options.gpu}: several GPUs go with one context; give one --gpu or one --ctx")
    return found if memory is None else [with_memory(one, memory) for one in found]


def gpu_memory(text: str) -> int:
    """Bytes of a GPU; a bare "80" is more likely 80 GB than 80 bytes, and is asked back."""
    size = parse_size(text, "--gpu-memory")
    if size < SMALLEST_GPU:
        raise UsageError(f"--gpu-memory: is too small for a GPU ({size:,} bytes); write the unit, for example 24GiB")
    return size


def source_of(options: EstimateOptions, revision: str | None) -> Source:
    return Source(revision, options.offline, options.assume_dense, options.weights_bytes is not None)


def model_of(options: EstimateOptions, command: ServeCommand | None, weights_stated: bool) -> Resolved:
    ref = options.model or (command.model if command else None)
    if ref is None:
        raise UsageError(
            "MODEL: is missing; name one (`kvplan models` lists them), a config.json or a Hub id, "
            "or paste a command with --from-command"
        )
    revision = options.revision or (command.revision if command and options.model is None else None)
    return resolve(ref, source_of(options, revision))


def load_of(options: EstimateOptions, context: Context, spec: ModelSpec) -> Load:
    """How long requests are: a mean, or a prompt and an answer, or a distribution, which ends at the context."""
    mean = None if options.mean_tokens is None else parse_tokens(options.mean_tokens, "--mean-tokens")
    if options.prompt_tokens is not None or options.output_tokens is not None:
        if mean is not None:
            raise UsageError("--mean-tokens: says the same as --prompt-tokens and --output-tokens; leave one out")
        mean = prompt_and_output(options)
    longest = context if isinstance(context, int) else spec.max_model_len
    shared = 0 if options.shared_prefix is None else parse_tokens(options.shared_prefix, "--shared-prefix")
    return Load(
        mean_tokens=mean,
        lengths=None if options.lengths is None else parse_lengths(options.lengths, longest),
        overflow=overflow_of(options),
        shared_prefix=shared,
    )


def prompt_and_output(options: EstimateOptions) -> int:
    """Tokens held on average: the prompt, and half the answer, as it grows from nothing to all while it is written."""
    if options.prompt_tokens is None or options.output_tokens is None:
        raise UsageError("--prompt-tokens and --output-tokens: go together; give both, or --mean-tokens")
    prompt = parse_tokens(options.prompt_tokens, "--prompt-tokens")
    return in_flight(prompt, parse_tokens(options.output_tokens, "--output-tokens"))


def overflow_of(options: EstimateOptions) -> float:
    if options.overflow is None:
        return Load().overflow
    if options.lengths is None:
        raise UsageError("--overflow: bounds what --lengths may do; give both")
    return parse_fraction(options.overflow, "--overflow")


# --- answering --------------------------------------------------------------------------------------------------------


def over_gpus(requests: list[Request]) -> list[Outcome]:
    """A plan for each GPU, or why there is none; where none can be made, the first reason is the answer."""
    found: list[Outcome] = []
    for request in requests:
        try:
            found.append((request.gpu, plan(request)))
        except KvplanError as error:
            found.append((request.gpu, error))
    errors = [answer for _, answer in found if isinstance(answer, KvplanError)]
    if len(errors) == len(found):
        raise errors[0]
    return found


def say(asked: Asked, *, quiet: bool) -> None:
    for text in dict.fromkeys(asked.warnings):
        output.tell("warning", text)
    if not quiet:
        for text in dict.fromkeys(asked.notes):
            output.tell("note", text)
        for text in dict.fromkeys(asked.hints):
            output.tell("hint", text)


def show(plans: list[Plan], outcomes: list[Outcome], options: EstimateOptions) -> None:
    if options.format != "table":
        output.write(render(options.format, plans, outcomes, options))
        return
    from kvplan.report import console as tables

    with output.standard_output():
        console = output.console(options.color)
        if outcomes:
            tables.print_gpus(outcomes, console)
        elif len(plans) > 1:
            tables.print_contexts(plans, console)
            if options.explain:
                for one in plans:
                    tables.print_plan(one, console, explain=True)
        else:
            tables.print_plan(plans[0], console, explain=options.explain)


def render(format: str, plans: list[Plan], outcomes: list[Outcome], options: EstimateOptions) -> str:
    """The answer as text in a machine format."""
    from kvplan import artifact

    for one, answer in outcomes:
        if isinstance(answer, KvplanError) and not options.quiet:
            output.tell("warning", f"{one.name}: left out: {answer}")
    if format == "json":
        single = len(plans) == 1 and not outcomes
        return artifact.dumps(artifact.plan_document(plans[0]) if single else artifact.plans_document(plans)) + "\n"
    from kvplan.report import text

    return text.plans_csv(plans) if format == "csv" else text.plans_markdown(plans, explain=options.explain)
