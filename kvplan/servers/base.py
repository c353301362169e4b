"""A model server as seen by the planner, and the list of those supported.

A server is a folder whose server.py defines the names of `Server`, plus its line in `SERVERS`: no class tree, no
plug-ins. Code above uses it and its wording (`Terms`) without naming a server. It is loaded on first use: planning for
vLLM does not import SGLang.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.models.spec import ModelSpec
    from kvplan.servers.logs.bench import Generator
    from kvplan.servers.logs.failures import Failures
    from kvplan.servers.logs.log import Logs
    from kvplan.servers.logs.metrics import Metrics
    from kvplan.servers.plans.plan import Estimate, HostRow, Plan, Refusal, Request, Sized
    from kvplan.servers.releases import Version
    from kvplan.servers.words.arguments import EngineArgs, Settings
    from kvplan.servers.words.command import Other, ServeCommand, Started, Variable
    from kvplan.sizing.weights import Layout


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of a server's numbers, for provenance.

    charge     bytes and blocks charged for tokens and requests
    pool       number of blocks
    budget     bytes that the server may allocate
    users      concurrent decoding requests
    arguments  defaults of its arguments
    described  of a release that was not compared with the server's own results, `{label}`; None: formulas only
    """

    charge: str
    pool: str
    budget: str
    users: str
    arguments: str
    described: str | None


@dataclass(frozen=True, slots=True)
class Terms:
    """A server's own wording. Braces are filled in by a view.

    title              its name in prose
    engines            what --engine accepts for it, in a message; example: of its versions
    budget             memory that it may use: {budget}, {share}
    log                what its log reports about users: {concurrency}, {tokens}
    share_argument     argument for its fraction of the memory
    slots_flag         flag that adds state slots, if these bound the batch; None: they do not
    risk, risk_row     what may happen at the low end of the range: for a plan, and for one row of several
    shorter            the remedy in that case
    outside            what the memory outside the budget is
    uncompared         (text, source) about the rules of a release not compared with the server's own results: {label}
    known_by           the sources of the rules for such a release
    own_flags          engine argument -> its own flag, if not the argument's name
    kv_dtype_names     kvplan's name of a KV cache dtype -> its own, if another
    """

    title: str
    engines: tuple[str, ...]
    example: str
    budget: str
    log: str
    share_argument: str
    slots_flag: str | None
    risk: str
    risk_row: str
    shorter: str
    outside: str
    uncompared: tuple[str, str]
    known_by: str
    sources: Sources
    own_flags: Mapping[str, str] = field(default_factory=dict)
    kv_dtype_names: Mapping[str, str] = field(default_factory=dict)

    def own_value(self, argument: str, value: str) -> str:
        """The server's own name of an argument's value."""
        return self.kv_dtype_names.get(value, value) if argument == "kv_cache_dtype" else value


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server does that not every server does.

    label_words       a label may say more than the release (`+flashinfer`)
    logs_concurrency  its log states a number of users
    checks_start      it checks free memory and state blocks, and refuses to start without them
    keeps_share       a fraction of the memory is reserved for what is not planned row by row
    simulated         `simulate` has its scheduler; recommended: `recommend` may change its arguments
    prompts_first     the release whose prefill-first scheduler is simulated; None: vLLM's is
    needs_drafter     a number of draft tokens is refused if nothing drafts them; if not, it is ignored
    own_kv_dtypes     it has KV cache dtypes that no other server has
    adapter_slots     slots for LoRA adapters if their number is not given
    lean_kernels      kernels of experts that keep workspaces of their own -> kernels that keep none
    vendors           makers of GPUs that it serves on by rules that are known
    fits_context      without a context it chooses one that fits
    one_machine       a server's GPUs are those of one machine
    shares_experts    its data-parallel replicas keep one set of experts and exchange tokens for them
    file_types        --quantization is the type of the file that it loads, one of these, the largest first; none: it
                     changes the weights while loading
    library           it names models `NAME:TAG`, by a library of its own
    """

    label_words: bool = False
    logs_concurrency: bool = False
    checks_start: bool = False
    keeps_share: bool = False
    simulated: bool = False
    recommended: bool = False
    prompts_first: str | None = None
    needs_drafter: bool = False
    own_kv_dtypes: bool = False
    adapter_slots: int = 1
    lean_kernels: Mapping[str, str] = field(default_factory=dict)
    vendors: tuple[str, ...] = ("nvidia", "amd")
    fits_context: bool = False
    one_machine: bool = False
    shares_experts: bool = False
    file_types: tuple[str, ...] = ()
    library: bool = False


def face_of(engine: str) -> ModuleType | None:
    """What clients see of a server, its face.py; None: they see what the bundled server shows."""
    package = f"{__package__}.{engine}"
    has_face = find_spec(package) is not None and find_spec(f"{package}.face") is not None
    return import_module(f"{package}.face") if has_face else None


@dataclass(frozen=True, slots=True)
class Section:
    """One step of the explanation: a title and plain-text lines."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A server's own part of --explain, with its numbers filled in.

    block_size  why blocks have this size
    pools       how blocks and states share memory
    budget      from the GPU's total to the bytes of the KV cache
    users       from these bytes to requests
    more        additional sections
    """

    block_size: str
    pools: tuple[str, ...]
    budget: tuple[str, ...]
    users: tuple[str, ...]
    more: tuple[Section, ...] = ()


@dataclass(frozen=True, slots=True)
class Starts:
    """Commands and calls that start a server.

    launcher     the words before its flags
    model_flag   the flag that names the model
    takes_model  whether its engine's constructor takes the model as a positional argument
    call         its engine in Python: the class, and the module prefixes it may be called with
    call_args    arguments implied by such a call
    images       substrings of its images' names, besides its own name
    classes      other classes in Python whose keywords are the engine's arguments
    reading      words for its parser of a text that is no command (a file of settings), None for another; None: no such
    alone        its image serves without a word: requests name the models
    """

    launcher: tuple[str, ...]
    model_flag: str
    takes_model: bool
    call: tuple[str, tuple[str | None, ...]]
    call_args: Mapping[str, Any]
    images: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    reading: Callable[[str], list[str] | None] | None = None
    alone: bool = False


class Pasted(Protocol):
    """The part of a server that reads commands: its command.py, loaded if one is pasted.

    starts      how it is started, and `start`: what a shell command starts of it, None if nothing
    parse       parses the words after its name
    flags       its flags that are not in kvplan's table: (those it reads, by effect; the others)
    variables   environment variables that change its memory
    read_pair   `--engine-arg k=v` if k is its own name for an argument, else None
    scheduling  its flags by their effect on the order of requests: (modeled, without effect, refused)
    """

    @property
    def starts(self) -> Starts: ...
    @property
    def flags(self) -> "tuple[Mapping[str, str], Mapping[str, Other]]": ...
    @property
    def variables(self) -> "Mapping[str, Variable]": ...
    def start(self, words: list[str]) -> "Started | None": ...
    def parse(self, words: list[str]) -> "ServeCommand": ...
    def read_pair(self, text: str) -> "tuple[str, Any] | None": ...
    def scheduling(self) -> "tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]": ...


class Outputs(Protocol):
    """The part of a server that reads what it prints: its outputs.py, loaded if such a text is given.

    logs      how its start-up log is read
    failures  how it reports failures
    metrics   its metric names, or None if its /metrics page is not read
    bench     its own load generator, or None if its commands and results are not read
    """

    @property
    def logs(self) -> "Logs": ...
    @property
    def failures(self) -> "Failures": ...
    @property
    def metrics(self) -> "Metrics | None": ...
    @property
    def bench(self) -> "Generator | None": ...


class Launch(Protocol):
    """The part of a server that starts it: its launch.py.

    program  the words before its arguments; image: its container image, with {release}
    port     default port
    worker   bytes of host memory of a rank's process itself that were measured, the least; 0: never
    words    the words of the command that starts the planned server
    """

    @property
    def program(self) -> tuple[str, ...]: ...
    @property
    def image(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def worker(self) -> int: ...
    def words(self, plan: "Plan") -> list[str]: ...


class Reader(Protocol):
    """A server whose logs and failures are read."""

    @property
    def name(self) -> str: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def abilities(self) -> Abilities: ...
    def outputs(self) -> Outputs: ...


class Server(Reader, Protocol):
    """A server as the planner uses it, and its three parts that few commands load.

    release    the release by number (None: the newest known), with the words of its label (`+flashinfer`)
    labels     completions for --engine
    context    tokens of the longest request if none is given
    seqs_cure  the flag that lets more requests run at once, when `max_num_seqs` run
    rest_last  whether layers that do not divide evenly among stages go to the last ones
    as_read    the model as it reads its config: with the changes that a flag states, without what its class ignores
    drafter    the request with the draft model that is actually loaded, and what was decided for the user
    settings   the settings it runs with, before its pool is known
    gate       why it would refuse to start with the memory free before loading, at that end of a plan's range
    layout     how it shards a model over ranks: the request's, or a draft's, in the dtype of the request's
    size       its memory on each stage, its pool, and what the pool holds
    kept_back  bytes of each GPU that must stay free in addition to the plan's rows, for peaks it does not plan
    asleep     rows that stay on a GPU while it sleeps, besides what the owner keeps; empty if it never sleeps
    remedies   of a server that places layers: flags, and the arguments they set, each with which a plan fits; else ()
    host       its use of host memory
    explain    the formulas behind a plan
    """

    @property
    def rest_last(self) -> bool: ...
    def release(self, numbers: tuple[int, ...] | None, words: list[str]) -> "Version": ...
    def labels(self) -> tuple[str, ...]: ...
    def context(self, spec: "ModelSpec") -> int: ...
    def seqs_cure(self, spec: "ModelSpec", args: "EngineArgs", max_num_seqs: int) -> str: ...
    def as_read(self, spec: "ModelSpec", args: "EngineArgs") -> "ModelSpec": ...
    def drafter(self, request: "Request") -> tuple["Request", list[str]]: ...
    def settings(self, request: "Request") -> "Settings": ...
    def layout(self, request: "Request", spec: "ModelSpec") -> "Layout": ...
    def size(self, request: "Request") -> "Sized": ...
    def gate(self, plan: "Plan", end: Literal["low", "likely"]) -> "Refusal | None": ...
    def kept_back(self, plan: "Plan") -> int: ...
    def asleep(self, plan: "Plan") -> "Mapping[str, Estimate]": ...
    def remedies(self, plan: "Plan") -> "Iterable[tuple[str, dict[str, Any]]]": ...
    def host(self, plan: "Plan") -> "tuple[HostRow, ...]": ...
    def explain(self, plan: "Plan") -> Explanation: ...
    def pasted(self) -> Pasted: ...
    def launch(self) -> Launch: ...


def later(module: str) -> Callable[[], Any]:
    """Return the loader of a module of `servers`, imported on first use; a server's folder checks that it is whole."""
    return lambda: import_module(f"kvplan.servers.{module}")


SERVERS: dict[str, Callable[[], Server]] = {
    "vllm": later("vllm.server"),
    "sglang": later("sglang.server"),
    "llamacpp": later("llamacpp.server"),
    "ollama": later("ollama.server"),
}
# Other names of a server in --engine.
ALIASES: Final = {"llama.cpp": "llamacpp", "llama-server": "llamacpp"}


# Planned by rules of its own; --engine does not name it.
OWN: Final[dict[str, Callable[[], Reader]]] = {"kvplan": later("bundled.server")}


def readers() -> dict[str, Callable[[], Reader]]:
    """Every server whose logs may be read."""
    return {**SERVERS, **OWN}


def server_of(engine: str) -> Server:
    """Return the server of a label (`vllm@0.33+flashinfer`) or name; KeyError if it is not listed."""
    return SERVERS[name_of(engine)]()


def name_of(engine: str) -> str:
    """A server's name in `SERVERS`, of a label or another of its names; what is no server's is returned as it is."""
    name = re.split("[@+]", engine)[0]
    return ALIASES.get(name, name)


def parse_engine(text: str) -> "Version":
    """Parse `vllm`, `vllm@0.33`, `vllm@0.11.0`, `vllm@0.9+flashinfer`, `sglang` or `sglang@0.4.3`."""
    engine, *words = text.split("+")
    name, number = name_of(engine), engine.partition("@")[2]
    if name not in SERVERS:
        *forms, last = [form for known in SERVERS for form in server_of(known).terms.engines]
        raise UsageError(f"--engine {text!r}", "is not a supported server", f"use {', '.join(forms)} or {last}")
    server = server_of(name)
    if words and not server.abilities.label_words:
        others, _ = titles(lambda can: can.label_words)
        raise UsageError(f"--engine {text}", f"+{words[0]} is supported only by {others}", "remove it")
    if not number:
        return server.release(None, words)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        raise UsageError(f"--engine {text!r}", "is not a version", f"write {server.terms.example}")
    return server.release(tuple(int(field) for field in fields), words)


def called(name: str) -> str:
    """What --engine calls a server; its name if it does not."""
    return next(iter(terms_of(name).engines), name)


def terms_of(engine: str) -> Terms:
    return readers()[name_of(engine)]().terms


def flag_of(engine: str, argument: str) -> str:
    """A server's own flag for an engine argument: `--max-model-len`, `--context-length`."""
    return terms_of(engine).own_flags.get(argument, f"--{argument.replace('_', '-')}")


def abilities_of(engine: str) -> Abilities:
    return readers()[name_of(engine)]().abilities


def titles(has: Callable[[Abilities], bool]) -> tuple[str, str]:
    """Servers with an ability: (their names in prose, what --engine accepts for them)."""
    able = {name: server().terms.title for name, server in SERVERS.items() if has(server().abilities)}
    return " and ".join(able.values()), " or ".join(able)


def is_named(text: str) -> bool:
    """True if a word or an image's name has the name of a supported server."""
    return any(word in text for name in SERVERS for word in (name, *server_of(name).pasted().starts.images))


def program_words() -> list[str]:
    """A word of each server's process: its own name, or its program's if that does not contain it."""
    programs = {name: server().launch().program for name, server in SERVERS.items()}
    return [name if any(name in word for word in words) else words[0] for name, words in programs.items()]


def programs() -> str:
    """The commands that start a supported server, for a remedy."""
    *others, last = [f"`{' '.join(server().launch().program)} ...`" for server in SERVERS.values()]
    return f"{', '.join(others)} or {last}"


def logs_of_servers() -> "dict[str, Logs]":
    """Return the log reader of each server, by server name."""
    return {name: reader().outputs().logs for name, reader in readers().items()}


def logs_of(engine: str) -> "Logs":
    """Return the log reader of a server."""
    return readers()[engine]().outputs().logs


def generators() -> "list[Generator]":
    """The servers' own load generators."""
    return [tool for server in SERVERS.values() if (tool := server().outputs().bench) is not None]


def failures_of_servers() -> "dict[str, Failures]":
    """Return the failure messages of each server, by server name."""
    return {name: reader().outputs().failures for name, reader in readers().items()}


def kind_of_cause(cause: str, engine: str | None = None) -> str:
    """Map a cause that only one server has to the general kind; other causes are their own kind.

    engine  the server that failed; only its messages are loaded. None: any
    """
    names = readers() if engine is None else [engine]
    tables = (readers()[name]().outputs().failures for name in names)
    return next((own.causes[cause] for own in tables if cause in own.causes), cause)
