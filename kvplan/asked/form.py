"""Values as they are written, by key, and what they ask: command lines, policies and Python fill in the same form."""

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvplan.asked.question import PASTED, Asked, Context, Source, is_path
from kvplan.core.errors import Faults, KvplanError, UsageError
from kvplan.core.files import exists, printable, read_text
from kvplan.core.records import dataclass
from kvplan.core.units import (
    AUTO,
    MAX_TOKENS,
    MIB,
    parse_contexts,
    parse_fraction,
    parse_size,
    parse_tokens,
    split_list,
)
from kvplan.hardware.gpu import GpuSpec, custom_gpu, gpu, size_note, split_count, with_memory
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import SERVERS, Abilities, abilities_of, name_of, parse_engine, server_of
from kvplan.servers.plans.plan import Colocated, Load
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs, left_out
from kvplan.sizing.layout import check_dtype, check_kv_dtype

if TYPE_CHECKING:
    from kvplan.hardware.instances import Instance
    from kvplan.servers.words.command import ServeCommand

T = TypeVar("T")
# The keys of a form: of a plan, and of its request lengths.
PLAN_KEYS: Final = (
    "model", "gpu", "gpu_memory", "host_bandwidth", "memory_in_use", *ARGUMENTS, "weights_bytes", "calibration",
    "enable_lora", "draft_model", "speculative_config", "engine", "engine_arg", "from_command", "assume_dense",
    "text_only", "reader", "revision", "offline",
)  # fmt: skip
READING: Final = ("assume_dense", "text_only", "offline")  # switches of how the model's config is read
LISTS: Final = ("gpu", "engine_arg", *(name for name, row in ARGUMENTS.items() if row.many))
SWITCHES: Final = (*(name for name, row in ARGUMENTS.items() if row.kind == "flag"), "enable_lora", *READING)
LENGTH_KEYS: Final = ("mean_tokens", "prompt_tokens", "output_tokens", "lengths", "overflow", "shared_prefix")
FLAGS: Final = {"max_model_len": "--ctx"}
# One of each common size, smallest first: the table if no GPU is named.
COMMON_GPUS: Final = ("rtx-4090", "l40s", "a100-80g", "h100-80g", "h200", "b200")
SMALLEST_GPU: Final = 256 * MIB
PHASES: Final = ("awake", "asleep", "waking")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was read that was neither typed nor pasted: what an error calls it, and how to state another."""

    name: str
    remedy: str

    def named(self, error: KvplanError) -> KvplanError:
        """An error in a pasted command as one in what was read in its place."""
        return error.changed(subject=re.sub("^--from-command(?= |$)", lambda _: self.name, error.subject))


@dataclass(frozen=True, slots=True)
class Form:
    """Values by key, those that are given: texts, lists of texts, switches.

    several  True if several contexts may be named
    origins  of values that were read elsewhere, by key
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    several: bool = True
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def text(self, key: str) -> str | None:
        value: str | None = self.values.get(key)
        return value

    def texts(self, key: str) -> list[str] | None:
        value: list[str] | None = self.values.get(key)
        return value

    def parsed(self, key: str, parse: Callable[[str], T]) -> T | None:
        text = self.text(key)
        return None if text is None else parse(text)

    def is_on(self, key: str) -> bool:
        return self.values.get(key) is True

    def changed(self, **values: Any) -> "Form":
        """The form with other values; None leaves a key out."""
        merged = {**self.values, **values}
        return replace(self, values={key: value for key, value in merged.items() if value is not None})

    def named(self, error: KvplanError) -> KvplanError:
        """The error in the words of its value's origin."""
        keys = ("max_model_len" if key == "ctx" else key for key in error.keys)
        origin = next((self.origins[key] for key in keys if key in self.origins), None)
        return error if origin is None else error.changed(subject=origin.name, remedy=origin.remedy)

    def refuse_except(self, taken: Collection[str], problem: str, remedy: str) -> None:
        """Refuse the first value of any other key."""
        for key in self.values:
            if key not in taken:
                raise UsageError(FLAGS.get(key, flag_of(key)), problem, remedy)

    def command(self) -> "ServeCommand | None":
        """Its pasted command."""
        text = self.text("from_command")
        if text is None:
            return None
        from kvplan.asked.pasted import read_command  # only needed for a pasted command

        try:
            return read_command(text, self.values.keys())
        except KvplanError as error:
            origin = self.origins.get("from_command")
            raise error if origin is None else error.map_all(origin.named) from error

    @property
    def names_model(self) -> bool:
        """True if a model is named, or may be in a pasted command."""
        return bool({"model", "from_command"} & self.values.keys())

    @property
    def names_gpu(self) -> bool:
        return bool({"gpu", "gpu_memory"} & self.values.keys())


def read_form(form: Form, command: "ServeCommand | None" = None, pasted: str = PASTED) -> Asked:
    """What a form asks. Raises UsageError for values that cannot be read, all of them in one error.

    command  its pasted command, if the caller has read it; pasted: what notes call it
    """
    faults = Faults()
    with faults.part():
        command = form.command() if command is None else command
    drafts = None
    if "speculative_config" in form.values:
        from kvplan.asked.speculation import config_of, in_parts, without_drafts  # only needed for this key

        with faults.part():
            drafts = config_of(form)
            form, command = in_parts(form), None if command is None else without_drafts(command)
    with faults.part():
        args = engine_args(form, command)
    with faults.part():
        release = parse_engine(form.text("engine") or (command.engine if command else None) or DEFAULT)
    with faults.part():
        contexts = contexts_of(form)
    with faults.part():
        check_names(form)
    with faults.part():
        gpus = tuple(counted_gpus_of(with_gpu_of(command, form)))
    with faults.part():
        weights = form.parsed("weights_bytes", weights_of)
    with faults.part():
        in_use = form.parsed("memory_in_use", in_use_of) or {}
    with faults.part():
        host_bandwidth = form.parsed("host_bandwidth", bandwidth_of)
    faults.refuse()
    stated, rented = stated_arguments(form, command), instances_of(form)
    origin = form.origins.get("from_command")
    pasted = pasted if origin is None else origin.name
    gpus = within_instances(gpus, rented, args, stated)
    is_pasted = "model" not in form.values
    revision = form.text("revision") or (command.revision if command and is_pasted else None)
    return Asked(
        model=form.text("model") or (command.model if command else None), is_pasted=is_pasted,
        source=source_of(form, revision), gpus=gpus,
        contexts=contexts if "max_model_len" in form.values else (args.max_model_len,),
        args=args, release=release, stated=stated,
        load=lambda context, spec: load_of(form, context, spec), weights_bytes=weights,
        draft=form.text("draft_model") or (command.draft_model if command else None), memory_in_use=in_use.get("awake"),
        colocated=colocated_of(in_use, args, command), calibration=form.text("calibration"), command=command,
        pasted=pasted, host_bandwidth=host_bandwidth,
        environment=command.environment if command else {}, drafts=drafts,
        options=frozenset(form.values),
        notes=(*pool_notes(form, args), *size_notes(form), *(machine.text for machine in rented)),
        host=(rented[0].name, rented[0].host_memory) if len(rented) == 1 else None,
    )  # fmt: skip


MOST_PASTED: Final = 2**20  # characters of a file
PASTED_FILES: Final = (".yaml", ".yml", ".sh", ".bash", ".ps1", ".bat", ".py", ".service", ".txt", "modelfile")


def with_file(form: Form) -> Form:
    """The form, in which a file that stands for a model has a server's command, as if pasted."""
    form = with_only_engine(form)
    name = form.text("model") or ""
    if " " in name and "from_command" not in form.values and is_command(name):
        origins = {**form.origins, "from_command": Origin("MODEL", "")}
        return replace(form.changed(model=None, from_command=name), origins=origins)
    if name and "from_command" not in form.values and abilities_asked(form).file_types:
        form = with_named_file(form, name)
    looks_so = "." in name or name.lower().endswith(PASTED_FILES)
    may_be_file = looks_so and "from_command" not in form.values
    if not may_be_file or not exists(name) or not Path(name).is_file():
        return form
    path = printable(name, 200)
    if name.lower().endswith(".log"):
        raise UsageError(f"model {path}", "is a log", f"read it with `kvplan why {shlex.quote(path)}`")
    if not name.lower().endswith(PASTED_FILES):
        return form
    text = read_text(Path(name), MOST_PASTED)
    return replace(
        form.changed(model=None, from_command=text), origins={**form.origins, "from_command": Origin(path, "")}
    )


def with_only_engine(form: Form) -> Form:
    """The form with the server that alone can be meant, where none is named: that of a library's `NAME:TAG`, of a
    repository's `OWNER/NAME:TYPE`, or the first that runs on the vendor's GPUs.
    """
    name = form.text("model") or ""
    if {"engine", "from_command"} & form.values.keys():
        return form
    if re.fullmatch(r"[\w.-]+:[\w.-]+", name) and catalog.find(name) is None:
        return form.changed(engine=next(server for server in SERVERS if abilities_of(server).library))
    if re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.-]+", name):  # a repository of files and a type
        return form.changed(engine=next(server for server in SERVERS if abilities_of(server).file_types))
    with suppress(KvplanError):  # an unknown GPU is rejected elsewhere
        vendors = {gpu(split_count(text)[1]).vendor for text in form.texts("gpu") or ()}
        if vendors and not vendors & set(abilities_of(DEFAULT).vendors):
            served = (server for server in SERVERS if vendors <= set(abilities_of(server).vendors))
            return form.changed(engine=next(served, DEFAULT))
    return form


def is_command(name: str) -> bool:
    """True if a model's name is the command that starts a server, in quotes."""
    from kvplan.servers.base import program_words  # only where a name has spaces

    return any(word in name for word in program_words()) and not exists(name)


def with_named_file(form: Form, name: str) -> Form:
    """The form in which the server reads the name of a file that is not here, or of its own library."""
    if exists(name) or catalog.find(name) is not None:
        return form
    starts = server_of(form.text("engine") or DEFAULT).pasted().starts
    text = shlex.join([*starts.launcher, f"--{starts.model_flag}", name])
    origins = {**form.origins, "from_command": Origin("MODEL", "")}
    return replace(form.changed(model=None, from_command=text), origins=origins)


def with_gpu_of(command: "ServeCommand | None", form: Form) -> Form:
    """The form with the GPU that a pasted manifest names, unless one is stated."""
    resources = command.resources if command else None
    return form if form.names_gpu or resources is None or resources.gpu is None else form.changed(gpu=[resources.gpu])


def check_names(form: Form) -> None:
    """Refuse a model that can only be in the catalog and is not, and dtypes that no server has."""
    faults = Faults()
    model, dtype, kv_dtype = (form.text(key) for key in ("model", "dtype", "kv_cache_dtype"))
    with faults.part():
        if "," in (methods := form.text("quantization") or ""):
            problem = f"takes one method here ({printable(methods, 60)!r})"
            raise UsageError("--quantization", problem, "`kvplan sweep` takes several")
    with faults.part():
        is_name = "config" not in form.values
        if model is not None and is_name and is_catalog_name(model) and catalog.find(model) is None:
            from kvplan.models.copies import is_copy  # only for a name that is not in the catalog

            if not is_copy(model):
                raise catalog.unknown(model)
    with faults.part():
        if dtype is not None and dtype.isprintable():  # others are no text
            check_dtype(dtype)
    with faults.part():
        if kv_dtype is not None and not abilities_asked(form).own_kv_dtypes:
            check_kv_dtype(kv_dtype)
    faults.refuse()


def is_catalog_name(name: str) -> bool:
    """True if it can only be a catalog name, not a Hub id, file or folder."""
    return re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) is not None and not is_path(name)


def refuse_missing(*values: tuple[str, bool, str]) -> None:
    """Refuse missing values, all in one error: (what, whether it is given, what to write)."""
    missing = [(name, cure) for name, is_given, cure in values if not is_given]
    if missing:
        names, cures = zip(*missing, strict=True)
        raise UsageError(", ".join(names), "missing", "; ".join(cures))


def source_of(form: Form, revision: str | None) -> Source:
    offline, dense, text_only = (form.is_on(key) for key in ("offline", "assume_dense", "text_only"))
    reader = form.text("reader")
    if reader not in (None, "server"):
        raise UsageError("--reader", f"is server ({reader!r:.40})", "remove it to use kvplan's own readers")
    stated = "weights_bytes" in form.values
    return Source(revision, offline, dense, text_only, stated, form.text("config"), by_class=reader is not None)


def pool_notes(form: Form, args: EngineArgs) -> tuple[str, ...]:
    text = form.text("kv_cache_memory_bytes")
    if text is None:
        return ()
    from kvplan.servers.words.argument_values import is_vllm_size, vllm_size_note  # only with the flag

    size = args.kv_cache_memory_bytes or 0
    return (vllm_size_note("--kv-cache-memory-bytes", text, size),) if is_vllm_size(text) else ()


def in_use_of(text: str) -> dict[str, int]:
    """Bytes that others hold on each GPU: a size at all times, or one for each phase that is stated."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if "=" in text else [f"awake={text}"]:
        phase, _, size = part.strip().partition("=")
        if phase not in PHASES or phase in sizes:
            problem = f"names no phase, or one twice ({printable(part, 60)!r})"
            raise UsageError("--memory-in-use", problem, "write 10GiB, or awake=10GiB,asleep=60GiB,waking=30GiB")
        sizes[phase] = parse_size(size, "--memory-in-use", least=0)
    return sizes if "=" in text else dict.fromkeys(("awake", "asleep"), sizes["awake"])


def colocated_of(in_use: Mapping[str, int], args: EngineArgs, command: "ServeCommand | None") -> Colocated | None:
    """How others share the GPUs in turn: as a framework does, else a client that puts the server to sleep."""
    stated = command.colocated if command else None
    if stated is not None:
        return replace(stated, in_use=in_use)
    if args.enable_sleep_mode:
        return Colocated(in_use=in_use)
    if in_use.keys() - {"awake"} and in_use.get("awake") != in_use.get("asleep"):
        remedy = "add --enable-sleep-mode, or state one size"
        raise UsageError("--memory-in-use", "names phases of a server that does not sleep", remedy)
    return None


def weights_of(text: str) -> int:
    from kvplan.servers.words.argument_values import stated_bytes  # only with the flag

    return stated_bytes(parse_size(text, "--weights-bytes"), "--weights-bytes")


def bandwidth_of(text: str) -> int:
    """Bytes per second of "90GB/s" or "90GB"."""
    return parse_size(text.removesuffix("/s"), "--host-bandwidth")


# --- contexts and GPUs ------------------------------------------------------------------------------------------------


def contexts_of(form: Form) -> tuple[Context, ...]:
    """Contexts of --ctx, else the model's own (None)."""
    name = "max_model_len"
    stated = form.texts(name)
    if stated is None:
        return (None,)
    text = ", ".join(stated)
    if text == "0" and abilities_asked(form).fits_context:  # such a server's word for the model's own
        return (None,)
    for part in split_list(text, "--ctx", several=form.several):
        if re.fullmatch(r"[0-9]{21,}[kKmM]?i?", part):
            raise UsageError(
                "--ctx",
                f"is too large ({part[:20]}...), at most {MAX_TOKENS:,}",
                "write 32768, 32k, or auto (or -1) for the longest that fits",
            )
    parsed = parse_contexts(text, "--ctx")
    contexts: tuple[Context, ...] = tuple("auto" if context is AUTO else context for context in dict.fromkeys(parsed))
    pair = engine_pairs(form).get(name)
    if pair is not None and contexts != (pair,):
        refuse_two(name, pair, text)
    return contexts


def gpus_of(form: Form) -> list[GpuSpec]:
    """The GPUs named, for commands that set the number of GPUs elsewhere; of a cloud instance, its GPU."""
    gpus, rented = counted_gpus_of(form), instances_of(form)
    for count, spec in gpus:
        if count is not None and spec.name not in {machine.gpu for machine in rented}:
            raise UsageError(
                "--gpu", f"takes a name without a number here ({count} x {spec.name})", f"write {spec.name}"
            )
    return [spec for _, spec in gpus]


def counted_gpus_of(form: Form) -> list[tuple[int | None, GpuSpec]]:
    """(count, GPU) for every GPU named, each once; the count is None if not given: "a100-80g,8xh100"."""
    size, texts = form.text("gpu_memory"), form.texts("gpu")
    memory = None if size is None else gpu_memory(size)
    if texts is None:
        return [(None, gpu(name)) for name in COMMON_GPUS] if memory is None else [(None, custom_gpu(memory))]
    names = [name.strip() for text in texts for name in text.split(",")]
    if "" in names:
        raise UsageError(
            "--gpu",
            f"contains an empty name ({printable(','.join(texts), 60)!r})",
            "write one, or several separated by commas: a100-80g,h200",
        )
    counts, faults = dict[GpuSpec, int | None](), Faults()
    for text in names:
        with faults.part():
            count, name = split_count(text)
            spec = gpu(name) if memory is None else with_memory(gpu(name), memory)
            if counts.setdefault(spec, count) != count:
                raise UsageError("--gpu", f"names {spec.name} twice with different numbers", "use only one")
    faults.refuse()
    return [(count, spec) for spec, count in counts.items()]


def size_notes(form: Form) -> list[str]:
    """Notes on names that leave open which of several sizes of a GPU is meant."""
    texts = [name.strip() for text in form.texts("gpu") or () for name in text.split(",")]
    names = {split_count(text)[1]: None for text in texts if form.text("gpu_memory") is None}
    return [note for name in names if (note := size_note(name, gpu(name))) is not None]


def instances_of(form: Form) -> "list[Instance]":
    """The cloud instances among the GPUs named."""
    texts = [name for text in form.texts("gpu") or () for name in text.split(",")]
    if all(split_count(text)[0] is None for text in texts):
        return []
    from kvplan.hardware.names import read  # only for a name with a number

    return [machine for text in texts if split_count(text)[0] is not None and (machine := read(text).instance)]


def within_instances(
    gpus: tuple[tuple[int | None, GpuSpec], ...], rented: "list[Instance]", args: EngineArgs, stated: frozenset[str]
) -> tuple[tuple[int | None, GpuSpec], ...]:
    """The GPUs without an instance's number where the ranks are stated, which must not be more than it has."""
    if "tensor_parallel_size" not in stated:
        return gpus
    ranks = args.num_gpus
    for machine in rented:
        count = next(count or machine.count for count, spec in gpus if spec.name == machine.gpu)
        if ranks > count:
            raise UsageError(
                "--gpu", f"{machine.name} has {count} GPUs, and --tp x --pp x --dp make {ranks}", "change one of them"
            )
    kinds = {machine.gpu for machine in rented}
    return tuple((None if spec.name in kinds else count, spec) for count, spec in gpus)


def gpu_memory(text: str) -> int:
    """Bytes of a GPU; a bare "80" is rejected, because it more likely means 80 GB."""
    size = parse_size(text, "--gpu-memory")
    if size < SMALLEST_GPU:
        number = text.strip() if text.strip().isdigit() and int(text) > 0 else "24"
        raise UsageError(
            "--gpu-memory", f"is too small for a GPU ({size:,} bytes)", f"write the unit, for example {number}GiB"
        )
    return size


# --- engine arguments -------------------------------------------------------------------------------------------------


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def engine_args(form: Form, command: "ServeCommand | None") -> EngineArgs:
    """The engine's arguments, except several contexts: those of a pasted command, overridden by --engine-arg and
    flags.

    Raises UsageError if --engine-arg and a flag contradict each other.
    """
    pairs, flags, faults = dict[str, Any](), dict[str, Any](), Faults()
    with faults.part():
        pairs = engine_pairs(form)
    with faults.part():
        flags = given(form)
    faults.refuse()
    for name in pairs.keys() & flags.keys():
        refuse_two(name, pairs[name], flags[name])
    pasted = (
        left_out(parse_engine(form.text("engine") or command.engine or DEFAULT).engine) | command.args
        if command
        else {}
    )
    values = pasted | pairs | flags
    if pairs:
        from kvplan.servers.words.command import over_experts

        over_experts(values, "--engine-arg ep_size")
    args = EngineArgs(**{name: value for name, value in values.items() if name in ARGUMENTS})
    return with_lora_slots(args, form)


def stated_arguments(form: Form, command: "ServeCommand | None") -> frozenset[str]:
    """Engine arguments that are given in any form."""
    if form.text("speculative_config") is not None:
        from kvplan.asked.speculation import in_parts

        form = in_parts(form)
    return frozenset((*given(form), *engine_pairs(form), *(command.args if command else ())))


def stated_except(form: Form, sought: Mapping[str, str]) -> frozenset[str]:
    """Engine arguments that are given in any form. Refuse those that the question seeks, each with the reason."""
    stated = stated_arguments(form, form.command())
    for name, why in sought.items():
        if name in stated:
            raise UsageError(flag_of(name), why, "remove it")
    return stated


def given(form: Form) -> dict[str, Any]:
    """Engine arguments given by their own flags; several contexts are left to `contexts_of`."""
    values, faults = dict[str, Any](), Faults()
    for key in ARGUMENTS:
        if key in form.values and key != "max_model_len":
            with faults.part():
                values[key] = typed_value(key, form.values[key])
    faults.refuse()
    return values


def typed_value(name: str, value: Any) -> Any:
    """A flag's value; a text is parsed."""
    if not isinstance(value, str):
        return value
    from kvplan.servers.words.argument_values import read_argument  # only for values that were typed

    return read_argument(name, value, flag_of(name))


def abilities_asked(form: Form) -> Abilities:
    """What the server of --engine does; an unknown server is rejected elsewhere."""
    name = name_of(form.text("engine") or DEFAULT)
    return abilities_of(name) if name in SERVERS else Abilities()


def with_lora_slots(args: EngineArgs, form: Form) -> EngineArgs:
    """Apply --enable-lora without --max-loras as the server's default number of slots; --no-enable-lora is 0."""
    if "enable_lora" not in form.values:
        return args
    is_on = form.is_on("enable_lora")
    if not is_on and "max_loras" in form.values:
        raise UsageError("--no-enable-lora", "contradicts --max-loras", "use only one")
    return replace(args, max_loras=(args.max_loras or abilities_asked(form).adapter_slots) if is_on else 0)


def engine_pair(text: str) -> tuple[str, Any]:
    """Parse `--engine-arg k=v`, where k is an argument's name in kvplan or in a server."""
    from kvplan.servers.words.command import pair_name, read_pair  # only needed for --engine-arg

    if pair_name(text) not in ARGUMENTS:
        pairs = (server_of(server).pasted().read_pair(text) for server in SERVERS)
        if pair := next((pair for pair in pairs if pair is not None), None):
            return pair
    return read_pair(text)


def engine_pairs(form: Form) -> dict[str, Any]:
    """Arguments of --engine-arg; repeated keys must agree."""
    pairs, faults = dict[str, Any](), Faults()
    for text in form.texts("engine_arg") or ():
        with faults.part():
            add_pair(pairs, text, form)
    faults.refuse()
    return pairs


def add_pair(pairs: dict[str, Any], text: str, form: Form) -> None:
    key, _, value_text = text.partition("=")
    if key.strip("- ").replace("-", "_") == "enable_lora":
        from kvplan.servers.words.argument_values import switch

        on = switch(value_text, "--engine-arg enable_lora")
        name = "max_loras"
        value = (pairs.get(name) or abilities_asked(form).adapter_slots) if on else 0
    else:
        name, value = engine_pair(text)
        if pairs.get(name, value) != value:
            raise UsageError(f"--engine-arg {name}", f"is given twice, {pairs[name]} and {value}", "use only one")
    pairs[name] = value


def refuse_two(name: str, pair: Any, flag: Any) -> None:
    if pair != flag:
        raise UsageError(
            f"{FLAGS.get(name, flag_of(name))} {flag} and --engine-arg {name}={pair}",
            "contradict each other",
            "use only one",
        )


# --- request lengths --------------------------------------------------------------------------------------------------


def load_of(form: Form, context: Context, spec: ModelSpec) -> Load:
    """Length of requests: a mean, a prompt and an output, or a distribution, truncated at the context."""
    if not form.values.keys() & {*LENGTH_KEYS}:
        return Load()
    mean, prompt, distribution = (form.text(key) for key in ("mean_tokens", "prompt_tokens", "lengths"))
    mean_tokens = None if mean is None else parse_tokens(mean, "--mean-tokens")
    if form.values.keys() & {"prompt_tokens", "output_tokens"}:
        if mean is not None:
            raise UsageError("--mean-tokens", "conflicts with --prompt-tokens and --output-tokens", "use only one")
        mean_tokens = prompt_and_output(form)
    lengths = None
    if distribution is not None:
        from kvplan.workloads.lengths import parse_lengths
        from kvplan.workloads.trace import read_full_lengths

        limit = context if isinstance(context, int) else spec.max_model_len
        lengths = parse_lengths(distribution, limit, read_full_lengths)
    shared = form.text("shared_prefix")
    return Load(
        mean_tokens=mean_tokens,
        lengths=lengths,
        overflow=overflow_of(form),
        shared_prefix=0 if shared is None else parse_tokens(shared, "--shared-prefix"),
        prompt_tokens=None if prompt is None else parse_tokens(prompt, "--prompt-tokens"),
    )


def prompt_and_output(form: Form) -> int:
    """Mean tokens held: the prompt plus half the output, which grows linearly while it is generated."""
    from kvplan.workloads.lengths import in_flight

    prompt, output = form.text("prompt_tokens"), form.text("output_tokens")
    if prompt is None or output is None:
        raise UsageError(
            "--prompt-tokens and --output-tokens",
            "must be used together",
            "set both, or --mean-tokens",
            keys=("prompt_tokens", "output_tokens"),
        )
    return in_flight(parse_tokens(prompt, "--prompt-tokens"), parse_tokens(output, "--output-tokens"))


def overflow_of(form: Form) -> float:
    text = form.text("overflow")
    if text is None:
        return Load().overflow
    if "lengths" not in form.values:
        raise UsageError("--overflow", "applies only to --lengths", "set both")
    return parse_fraction(text, "--overflow")
