"""What is asked, parsed, and the one place that makes requests of it.

Each source makes an `Asked`: `form.py` of values as they are written (the options of a command line, a policy's target,
keywords of Python by `call.py`, a log by `log.py`), `pasted.py` of a command; `requests` serves them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.files import exists, printable
from kvplan.core.records import dataclass
from kvplan.core.units import format_count, format_gib
from kvplan.hardware.gpu import GpuSpec
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import parse_engine, server_of
from kvplan.servers.plans.plan import Colocated, GpuCount, Load, Request
from kvplan.servers.releases import DEFAULT, Version
from kvplan.servers.words.arguments import EngineArgs

if TYPE_CHECKING:
    from kvplan.models.hf_config import Reading
    from kvplan.models.tensors import Checkpoint
    from kvplan.servers.plans.plan import Estimate
    from kvplan.servers.words.command import Environment, Repeated, Resources, ServeCommand
    from kvplan.servers.words.speculative_config import SpeculativeConfig

PASTED: Final = "--from-command"
MODEL_CURE: Final = "name a model (`kvplan models`), a config.json or a Hub id, or paste a command with --from-command"
WEIGHT_SUFFIXES: Final = (".gguf", ".safetensors")
Context = int | Literal["auto"] | None
LoadOf = Callable[[Context, ModelSpec], Load]  # request lengths, once the context and the model are known


@dataclass(frozen=True, slots=True)
class Source:
    """How a model's config and files are read.

    config    the config itself, as JSON, with MODEL as its name; None: it is looked up by MODEL
    by_class  a type without a reader is read from transformers' class (`--reader server`)
    """

    revision: str | None = None
    offline: bool = False
    assume_dense: bool = False
    text_only: bool = False
    weights_stated: bool = False
    config: str | None = None
    by_class: bool = False

    @property
    def reading(self) -> "Reading":
        return {"assume_dense": self.assume_dense, "by_class": self.by_class, "text_only": self.text_only}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question, parsed: a plan for each context and GPU.

    model        as written: a catalog name, a path, or a Hub id
    is_pasted    the model is the command's
    is_deployed  a Hub id is what is deployed: no quantized checkpoint stands for it
    gpus         each with its number, None if the ranks say it
    contexts     None: the model's own
    context_of   instead of `contexts`: one that depends on the model
    stated       engine arguments that were given, in any form
    load         the lengths of requests
    command      a pasted command that gave some of the values; `pasted`: what notes call it
    environment  variables of the server's process
    drafts       --speculative-config
    drafts_later the drafts are read from the server's log afterwards
    options      keys that were stated outside the command
    notes        on values that could be read otherwise
    host         a cloud instance and its host memory, if one is named
    """

    model: str | None
    is_pasted: bool = False
    is_deployed: bool = False
    source: Source = Source()
    gpus: tuple[tuple[int | None, GpuSpec], ...]
    contexts: tuple[Context, ...] = (None,)
    context_of: Callable[[ModelSpec], int] | None = None
    args: EngineArgs = EngineArgs()
    release: Version
    stated: frozenset[str] = frozenset()
    load: LoadOf = lambda context, spec: Load()
    weights_bytes: int | None = None
    draft: str | None = None
    memory_in_use: int | None = None
    colocated: Colocated | None = None
    host_bandwidth: int | None = None
    calibration: str | None = None
    command: "ServeCommand | None" = None
    pasted: str = PASTED
    environment: "Environment" = field(default_factory=dict)
    drafts: "SpeculativeConfig | None" = None
    drafts_later: bool = False
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    host: tuple[str, int] | None = None


@dataclass(slots=True)
class Inputs:
    """A parsed question: one request for each context and GPU, with the GPUs of one context adjacent.

    of_command  notes on the command; readings: notes on numbers that kvplan's own flags would parse differently
    host        a cloud instance and its host memory
    """

    requests: list[Request]
    num_gpus: int
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    of_command: list[str] = field(default_factory=list)
    host: tuple[str, int] | None = None

    def only(self, subject: str, remedy: str) -> Request:
        """The request, of a command that plans one server."""
        if len(self.requests) != 1:
            raise UsageError(subject, f"{len(self.requests)} plans requested", remedy)
        return self.requests[0]

    def by_gpu(self) -> tuple[list[Request], int]:
        """(the requests with the contexts of one GPU adjacent, the number of contexts)."""
        number = self.num_gpus
        return [row for index in range(number) for row in self.requests[index::number]], len(self.requests) // number


def requests(query: Asked) -> Inputs:
    """One request for each context and GPU. Raises UsageError and similar errors for invalid input."""
    model = model_of(query)
    if query.weights_bytes is not None:
        model = replace(model, weights_bytes=query.weights_bytes, checkpoint=None)
    draft = draft_of(query)
    check_in_use(query)
    release, args, variables_note = query.release, query.args, None
    if query.environment:
        from kvplan.servers.words import environment

        release, args, variables_note = environment.applied(query.environment, release, args, model.spec)
    splits = {machine: split_over(args, count, query.stated) for count, machine in query.gpus}
    if query.drafts is not None:
        for split in splits.values():
            query.drafts.check_ranks(split.tensor_parallel_size, "--speculative-config")
    as_read = server_of(release.engine).as_read(model.spec, args)
    if as_read.quantization is not None and model.spec.quantization is None:  # quantized on load: not the files' sizes
        model.checkpoint = None
    model = replace(model, spec=as_read)
    contexts = query.contexts if query.context_of is None else (query.context_of(model.spec),)
    if contexts == (None,) and query.environment:
        contexts = (args.max_model_len,)  # of a variable
    loads = {context: query.load(context, model.spec) for context in contexts}

    def request(context: Context, machine: GpuSpec) -> Request:
        return Request(
            spec=model.spec, gpu=machine, args=replace(splits[machine], max_model_len=context), release=release,
            load=loads[context], weights_bytes=model.weights_bytes, checkpoint=model.checkpoint,
            draft=draft.spec if draft else None, draft_checkpoint=draft.checkpoint if draft else None,
            memory_in_use=query.memory_in_use, colocated=query.colocated, host_bandwidth=query.host_bandwidth,
            measured=measured_on(query.calibration, machine), repeated=repeated_by(query),
            gpu_count=gpu_count_of(query),
        )  # fmt: skip

    inputs = Inputs([request(context, machine) for context in contexts for machine in splits], num_gpus=len(splits))
    inputs.host = query.host
    inputs.notes += [] if variables_note is None else [variables_note]
    inputs.notes += resource_notes(query, inputs.requests[0])
    if not query.drafts_later:
        refuse_undrafted(inputs.requests[0])
    add_remarks(inputs, query, [model, *([draft] if draft else [])])
    inputs.notes += [f"--lengths: {note}" for load in loads.values() if load.lengths for note in load.lengths.notes]
    if contexts == (None,) and not server_of(release.engine).abilities.fits_context:
        inputs.notes.append(default_context_note(inputs.requests[0]))
    inputs.notes += query.notes
    return inputs


def check_in_use(query: Asked) -> None:
    """Raise UsageError if other processes hold all of a GPU's memory."""
    in_use = query.memory_in_use
    for _, machine in query.gpus:
        if in_use is not None and in_use >= machine.total_memory:
            raise UsageError(
                "--memory-in-use",
                f"is more than {machine.name} has ({format_gib(in_use)} of {format_gib(machine.total_memory)})",
                "use the memory that other processes hold on one GPU",
            )


def check_resources(resources: "Resources", request: Request) -> str | None:
    """Refuse a server that needs more GPUs than its pods request; returns a note of unused ones."""
    if resources.num_gpus is None:
        return None
    ranks, total = request.args.num_gpus, resources.num_gpus * resources.num_pods
    pods = f" in {resources.num_pods} pods" if resources.num_pods > 1 else ""
    if ranks > total:
        raise UsageError(
            "nvidia.com/gpu",
            f"its command needs {ranks} GPUs, and the manifest asks for {total}{pods}",
            "ask for as many, or change --tensor-parallel-size",
        )
    return f"{total - ranks} of {total} GPUs{pods} stay unused: its command uses {ranks}" if ranks < total else None


def replicas_note(replicas: int) -> str:
    return f"{replicas} replicas: the figures are of one"


def resource_notes(query: Asked, request: Request) -> list[str]:
    """Notes on what a pasted manifest asks for, beside its command."""
    resources = query.command.resources if query.command else None
    if resources is None:
        return []
    notes = [check_resources(resources, request) if "tensor_parallel_size" not in query.options else None]
    if resources.gpu is not None:
        label, names = printable(resources.gpu_label, 120), {machine.name for _, machine in query.gpus}
        is_used = names == {resources.gpu}
        other = f"gpu: {', '.join(sorted(names))} counts, not {resources.gpu} of {label}"
        notes.append(f"gpu: {resources.gpu} is inferred from {label}" if is_used else other)
    notes.append(replicas_note(resources.replicas) if resources.replicas != 1 else None)
    return [note for note in notes if note is not None]


def add_remarks(inputs: Inputs, query: Asked, models: Sequence["Resolved"]) -> None:
    """Add the notes, warnings and hints on a command and on the models."""
    command, source = query.command, query.pasted
    if command:
        inputs.readings += [note.of(source) for note in command.readings]
        inputs.of_command += [note.of(source) for note in command.notes]
    inputs.notes += [*inputs.readings, *inputs.of_command]
    for model in models:
        inputs.notes += model.notes
        inputs.warnings += model.warnings
    if command and command.unknown:
        flags = ", ".join(dict.fromkeys(command.unknown))
        inputs.warnings.append(f"{source}: unknown to kvplan and ignored: {flags}")
    if command and command.ignored:
        flags = ", ".join(dict.fromkeys(command.ignored))
        inputs.hints.append(f"{source}: no known effect on GPU memory: {flags}")


def repeated_by(query: Asked) -> "Repeated | None":
    """What printed commands repeat from a pasted command and from --speculative-config."""
    command, drafts = query.command, query.drafts
    if command is None and drafts is None:
        return None
    from kvplan.servers.words.command import Repeated

    words = tuple(command.repeated) if command else ()
    speculative = dict(drafts.unsized) if drafts else command.speculative if command else {}
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


def measured_on(file: str | None, gpu: GpuSpec) -> "dict[str, Estimate]":
    """Constants of a calibration, if it was measured on this kind of GPU."""
    if file is None:
        return {}
    from kvplan.servers.plans import calibration

    return calibration.for_gpu(calibration.read(Path(file)), gpu)


def default_context(request: Request) -> int:
    """Context that the server uses by default."""
    server = server_of(request.release.engine)
    shortened = request.args.disable_sliding_window
    return server.context(server.drafter(request)[0].spec if shortened else request.spec)


def default_context_note(request: Request) -> str:
    tokens = default_context(request)
    less = "; add --ctx 32k for less" if tokens > 32 * 1024 else ""
    return f"no --ctx: using the model's maximum of {format_count(tokens)} tokens{less}"


def gpu_count_of(query: Asked) -> GpuCount:
    """How the number of GPUs is stated, as fixes of it must be."""
    if not any(count for count, _ in query.gpus):
        return "ranks"
    return "both" if "tensor_parallel_size" in query.stated else "name"


def split_over(args: EngineArgs, count: int | None, stated: frozenset[str]) -> EngineArgs:
    """The arguments for this many GPUs: tensor parallelism over all that --pp and --dp leave."""
    if count is None:
        return args
    tp = args.tensor_parallel_size
    others = args.num_gpus // tp  # ranks of DP attention are among the tensor-parallel ranks
    if "tensor_parallel_size" in stated:
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


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Resolved:
    """A model's facts and their source.

    weights_bytes, checkpoint  sizes of the files, if the config is not enough; None: computed
    """

    spec: ModelSpec
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    weights_bytes: int | None = None
    checkpoint: "Checkpoint | None" = None


def model_of(query: Asked) -> Resolved:
    ref, source, quantization = query.model, query.source, query.args.quantization
    if ref is None:
        raise UsageError("MODEL", "missing", MODEL_CURE)
    if query.is_pasted and is_elsewhere(ref):
        from kvplan.models.lookup import in_path

        if in_path(ref) is None:
            return on_other_machine(ref, source)
    try:
        model = resolve(ref, source)
    except UnsupportedModelError:  # perhaps of a vision tower that this server does not load
        if not query.args.language_model_only or source.text_only:
            raise
        model = resolve(ref, replace(source, text_only=True))
    if not query.is_pasted and quantization is not None and not (query.is_deployed and "/" in ref):
        return quantized(model, ref, quantization, source)
    return model


def draft_of(query: Asked) -> Resolved | None:
    try:
        return None if query.draft is None else resolve(query.draft, replace(query.source, revision=None, config=None))
    except KvplanError as error:
        raise error.changed(keys=("draft_model",)) from error


def resolve(ref: str, source: Source) -> Resolved:
    """Resolve MODEL to its facts.

    A catalog name wins over a path of the same name (use `./name` for the path); a revision selects the Hub.
    Raises UsageError with near matches for an unknown name.
    """
    if source.config is not None:
        from kvplan.asked.files import from_config  # only needed for a config from Python

        return from_config(ref, source)
    if ref in ("", "-"):
        raise UsageError(
            f"model {ref!r}",
            "is not a model; models are not read from standard input",
            "name one of `kvplan models`, a config.json or a Hub id",
        )
    if "huggingface.co/" in ref.lower() or "hf.co/" in ref.lower():
        from kvplan.models.hub import ref_of_url

        ref = ref_of_url(ref) or ref
    known, note = catalog.listed(ref) if exists(ref) else catalog.find(ref), None
    if known is None and is_elsewhere(ref):
        from kvplan.models.lookup import in_path

        known = in_path(ref)
        note = None if known is None else f"{printable(ref, 200)} is not on this machine; {taken_as(known)}"
        if known is None and not is_path(ref):
            return on_other_machine(ref, source)
    if known is None or (source.revision is not None and note is None):
        from kvplan.asked.files import from_files  # not needed for the catalog

        return from_files(ref, known, source)
    if note is not None:
        return Resolved(catalog.load(known, text_only=source.text_only), [note])
    model = Resolved(called(catalog.load(known, text_only=source.text_only), ref))
    if "note" in catalog.facts(known):
        model.notes.append(catalog.facts(known)["note"])
    say_text_only(model, source)
    if is_path(ref) and Path(ref).exists():
        model.notes.append(f"{printable(ref)}: taken from the catalog; ./{printable(ref)} is the path of that name")
    return model


def taken_as(known: str) -> str:
    return f"it is taken as {catalog.facts(known)['id']}, by its name"


def on_other_machine(ref: str, source: Source) -> Resolved:
    """Facts of a folder of another machine whose name is a quantized copy's, else its error: no model has its name."""
    from kvplan.asked.files import by_name

    problem = "is a folder of another machine, and the catalog has no model of its name"
    return by_name(ref, source, UsageError(f"model {printable(ref, 200)!r}", problem, "name the model that it holds"))


def is_elsewhere(ref: str) -> bool:
    """True if MODEL is a path of another machine: it looks like one, and does not exist here."""
    is_folder = is_path(ref) or ref.startswith("$") or "\\" in ref or "://" in ref or ref.count("/") > 1
    return is_folder and not ref.endswith(WEIGHT_SUFFIXES) and not exists(ref)


def quantized(model: Resolved, name: str, method: str, source: Source) -> Resolved:
    """The catalog's checkpoint quantized with `method`, if the given catalog entry is not quantized; with a note.

    A method applied while loading and a path are unchanged.
    """
    from kvplan.servers.plans.weights import ONLINE_METHODS

    own = catalog.find(name)
    if own is None or source.revision is not None or source.config is not None or model.spec.quantization is not None:
        return model
    if method in ONLINE_METHODS:
        return model
    sibling = catalog.quantized(own, method)
    if sibling is None:
        from kvplan.models.copies import sized  # only where the catalog has no such checkpoint

        known = sized(f"{own}-{method}", text_only=source.text_only)
        is_method = known is not None and known[0].quantization is not None and known[0].quantization.method == method
        return Resolved(known[0], [f"--quantization {method}: {known[1]}"]) if known and is_method else model
    taken = resolve(sibling, source)
    hub_id = catalog.facts(sibling)["id"]
    taken.notes.append(f"--quantization {method}: using {sibling} ({hub_id}), because {own} is not quantized")
    return taken


def say_text_only(model: Resolved, source: Source) -> None:
    """Print what --text-only removed, or that there was nothing to remove."""
    if not source.text_only:
        return
    if model.spec.text_only:
        text = "--text-only: the vision or audio tower is not counted; a server that loads it needs more memory"
        model.warnings.append(text)
    else:
        model.notes.append(
            f"--text-only: {printable(model.spec.name, 200)} has no vision or audio tower; it is sized whole"
        )


def called(spec: ModelSpec, ref: str) -> ModelSpec:
    """The catalog's facts under the requested Hub id, so that the printed command serves exactly that model."""
    facts = catalog.facts(spec.served_name)
    for alias in facts.get("aliases", ()):
        if "/" in alias and alias.lower() == ref.lower():
            return replace(spec, name=alias + spec.name.removeprefix(spec.served_name))
    return spec


def is_path(ref: str) -> bool:
    """True if MODEL is meant as a path: it looks like one, or the file exists. (A shell expands `~` itself.)"""
    if ref.startswith((".", "/", "~")) or ref.endswith((".json", *WEIGHT_SUFFIXES)):
        return True
    return exists(ref)
