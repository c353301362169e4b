"""A model server as seen by the planner, and the list of those supported.

A server is a folder whose server.py defines the names of `Server`, plus its line in `SERVERS`: no class tree, no
plug-ins. Code above uses it and its wording (`Terms`) without naming a server. It is loaded on first use: planning for
vLLM does not import SGLang.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.models.spec import ModelSpec
    from kvplan.servers.logs.bench import Generator
    from kvplan.servers.logs.failures import Failures
    from kvplan.servers.logs.log import Logs
    from kvplan.servers.logs.metrics import Metrics
    from kvplan.servers.plans.plan import HostRow, Plan, Refusal, Request, Sized
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
    label_words        whether a label says more than the release (`+flashinfer`)
    budget             memory that it may use: {budget}, {share}
    log                what its log reports about users: {concurrency}, {tokens}
    logs_concurrency   whether that is a number of users
    seqs_flag          flag for the largest batch; context_flag: for the longest request
    share_argument     argument for its fraction of the memory
    slots_flag         flag that adds state slots, if these bound the batch; None: they do not
    risk, risk_row     what may happen at the low end of the range: for a plan, and for one row of several
    shorter            the remedy in that case
    checks_start       whether it checks free memory and state blocks, and refuses to start without them
    keeps_share        whether a fraction of the memory is reserved for what is not planned row by row
    simulated          whether `simulate` has its scheduler; recommended: whether `recommend` may change its arguments
    prompts_first      the release whose prefill-first scheduler is simulated; None: vLLM's is
    outside            what the memory outside the budget is
    uncompared         (text, source) about the rules of a release not compared with the server's own results: {label}
    known_by           the sources of the rules for such a release
    adapter_slots      slots for LoRA adapters if their number is not given
    program            the words that start it, before its arguments; image: its container image, with {release}
    share              the engine argument for its fraction of the memory
    port               default port
    needs_drafter      whether a number of draft tokens is refused if nothing drafts them; if not, it is ignored
    own_kv_dtypes      whether it has KV cache dtypes that no other server has
    own_flags          engine argument -> its own flag, if not the argument's name
    kv_dtype_names     kvplan's name of a KV cache dtype -> its own, if another
    lean_kernels       kernels of experts that keep workspaces of their own -> kernels that keep none
    """

    title: str
    engines: tuple[str, ...]
    example: str
    label_words: bool
    budget: str
    log: str
    logs_concurrency: bool
    seqs_flag: str
    context_flag: str
    share_argument: str
    slots_flag: str | None
    risk: str
    risk_row: str
    shorter: str
    checks_start: bool
    keeps_share: bool
    simulated: bool
    recommended: bool
    outside: str
    uncompared: tuple[str, str]
    known_by: str
    sources: Sources
    program: tuple[str, ...]
    image: str
    share: str = "gpu_memory_utilization"
    port: int = 8000
    adapter_slots: int = 1
    prompts_first: str | None = None
    needs_drafter: bool = False
    own_kv_dtypes: bool = False
    own_flags: Mapping[str, str] = field(default_factory=dict)
    kv_dtype_names: Mapping[str, str] = field(default_factory=dict)
    lean_kernels: Mapping[str, str] = field(default_factory=dict)

    def own_value(self, argument: str, value: str) -> str:
        """The server's own name of an argument's value."""
        return self.kv_dtype_names.get(value, value) if argument == "kv_cache_dtype" else value


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
    """

    launcher: tuple[str, ...]
    model_flag: str
    takes_model: bool
    call: tuple[str, tuple[str | None, ...]]
    call_args: Mapping[str, Any]
    images: tuple[str, ...] = ()


class Server(Protocol):
    """Interface of a server, as the planner uses it.

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
    starts     how it is started, and `start`: what a shell command starts of it, None if nothing
    parse      parses the words after its name
    flags      its flags that are not in kvplan's table: (those it reads, by effect; the others)
    variables  environment variables that change its memory
    read_pair  `--engine-arg k=v` if k is its own name for an argument, else None
    kept_back  bytes of each GPU that must stay free in addition to the plan's rows, for peaks it does not plan
    launch     the words of the command that starts the planned server
    explain    the formulas behind a plan
    host       its use of host memory
    logs       how its start-up log is read, or None if it is not
    failures   how it reports failures, or None if its failure logs are not read
    metrics    its metric names, or None if its /metrics page is not read
    bench      its own load generator, or None if its commands and results are not read
    """

    @property
    def name(self) -> str: ...
    @property
    def terms(self) -> Terms: ...
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
    @property
    def starts(self) -> Starts: ...
    def start(self, words: list[str]) -> "Started | None": ...
    def parse(self, words: list[str]) -> "ServeCommand": ...
    def flags(self) -> "tuple[Mapping[str, str], Mapping[str, Other]]": ...
    def scheduling(self) -> "tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]": ...
    def variables(self) -> "Mapping[str, Variable]": ...
    def read_pair(self, text: str) -> "tuple[str, Any] | None": ...
    def kept_back(self, plan: "Plan") -> int: ...
    def launch(self, plan: "Plan") -> list[str]: ...
    def explain(self, plan: "Plan") -> Explanation: ...
    def host(self, plan: "Plan") -> "tuple[HostRow, ...]": ...
    def logs(self) -> "Logs | None": ...
    def failures(self) -> "Failures | None": ...
    def metrics(self) -> "Metrics | None": ...
    def bench(self) -> "Generator | None": ...


def _listed(folder: str) -> Callable[[], Server]:
    """Return the loader of a server's folder, which imports it on first use; the folder checks that it has every
    name.
    """

    def server() -> Server:
        module: Any = import_module(f"kvplan.servers.{folder}.server")
        return cast("Server", module)

    return server


SERVERS: dict[str, Callable[[], Server]] = {
    "vllm": _listed("vllm"),
    "sglang": _listed("sglang"),
}


class Reader(Protocol):
    """A server whose logs and failures are read; it is planned by rules of its own, and --engine does not name it."""

    @property
    def name(self) -> str: ...
    @property
    def terms(self) -> Terms: ...
    def logs(self) -> "Logs | None": ...
    def failures(self) -> "Failures | None": ...


OWN: Final[dict[str, Callable[[], Reader]]] = {"kvplan": _listed("bundled")}


def readers() -> dict[str, Callable[[], Reader]]:
    """Every server whose logs may be read."""
    return {**SERVERS, **OWN}


def server_of(engine: str) -> Server:
    """Return the server of a label (`vllm@0.33+flashinfer`) or name; KeyError if it is not listed."""
    return SERVERS[engine.partition("@")[0]]()


def parse_engine(text: str) -> "Version":
    """Parse `vllm`, `vllm@0.33`, `vllm@0.11.0`, `vllm@0.9+flashinfer`, `sglang` or `sglang@0.4.3`."""
    engine, *words = text.split("+")
    name, _, number = engine.partition("@")
    if name not in SERVERS:
        *forms, last = [form for known in SERVERS for form in server_of(known).terms.engines]
        raise UsageError(f"--engine {text!r}", "is not a supported server", f"use {', '.join(forms)} or {last}")
    server = server_of(name)
    if words and not server.terms.label_words:
        others = [terms.title for terms in map(terms_of, SERVERS) if terms.label_words]
        raise UsageError(f"--engine {text}", f"+{words[0]} is supported only by {' and '.join(others)}", "remove it")
    if not number:
        return server.release(None, words)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        raise UsageError(f"--engine {text!r}", "is not a version", f"write {server.terms.example}")
    return server.release(tuple(int(field) for field in fields), words)


def terms_of(engine: str) -> Terms:
    return readers()[engine.partition("@")[0]]().terms


def titles(can: Callable[[Terms], bool]) -> tuple[str, str]:
    """Servers with a capability: (their names in prose, what --engine accepts for them)."""
    able = {name: server().terms for name, server in SERVERS.items() if can(server().terms)}
    return " and ".join(terms.title for terms in able.values()), " or ".join(able)


def programs() -> str:
    """The commands that start a supported server, for a remedy."""
    *others, last = [f"`{' '.join(server().terms.program)} ...`" for server in SERVERS.values()]
    return f"{', '.join(others)} or {last}"


def logs_of_servers() -> "dict[str, Logs]":
    """Return the log reader of each server, by server name."""
    tables = {name: reader().logs() for name, reader in readers().items()}
    return {name: table for name, table in tables.items() if table is not None}


def logs_of(engine: str) -> "Logs":
    """Return the log reader of a server, which must have one."""
    table = readers()[engine]().logs()
    assert table is not None
    return table


def generators() -> "list[Generator]":
    """The servers' own load generators."""
    return [tool for server in SERVERS.values() if (tool := server().bench()) is not None]


def failures_of_servers() -> "dict[str, Failures]":
    """Return the failure messages of each server, by server name."""
    tables = {name: reader().failures() for name, reader in readers().items()}
    return {name: table for name, table in tables.items() if table is not None}


def kind_of_cause(cause: str) -> str:
    """Map a cause that only one server has to the general kind; other causes are their own kind."""
    return next((own.causes[cause] for own in failures_of_servers().values() if cause in own.causes), cause)
