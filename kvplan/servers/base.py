"""A server of models as the planner sees it, and the one list of those it knows.

A server is a folder whose server.py has the names of `Server`, and its line in `SERVERS`: no class tree, no plug-ins.
Rooms above ask it and its words (`Terms`); they name none. It is loaded when it is first asked for: vLLM is planned
without SGLang.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.models.spec import ModelSpec
    from kvplan.servers.arguments import EngineArgs
    from kvplan.servers.bench import Generator
    from kvplan.servers.failures import Failures
    from kvplan.servers.logs import Logs
    from kvplan.servers.metrics import Metrics
    from kvplan.servers.plans import HostRow, Plan, Request, Sized
    from kvplan.servers.releases import Version
    from kvplan.servers.settings import Settings
    from kvplan.servers.words import Other, ServeCommand, Started, Variable


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a server's numbers come from, for provenance.

    charge     bytes and blocks of tokens and requests
    pool       number of blocks
    budget     bytes that the server may use
    users      requests that decode at once
    arguments  defaults of its arguments
    described  of a release whose own answers were not compared, `{label}`; None: no release's were, all is formula
    """

    charge: str
    pool: str
    budget: str
    users: str
    arguments: str
    described: str | None


@dataclass(frozen=True, slots=True)
class Terms:
    """A server's own words. In braces: what a view fills in.

    title              its name in prose
    engines            what --engine takes of it, in a message; example: of its versions
    label_words        whether a label says more of it than its release (`+flashinfer`)
    budget             what it may use: {budget}, {share}
    log                what its log says of users: {concurrency}, {tokens}
    logs_concurrency   whether that is a number of users
    seqs_flag          flag of the largest batch; context_flag: of the longest request
    share_argument     argument that says how much of the memory it may use
    slots_flag         flag that gives states more slots, where these bound the batch; None: they do not
    risk, risk_row     what may happen at the low end of the range: of a plan, and of a row of several
    shorter            what then helps
    checks_start       whether it looks for free memory and state blocks, and refuses to start without
    keeps_share        whether a share of memory is kept back for what is not planned row by row
    simulated          whether `simulate` has its scheduler; recommended: whether `recommend` may turn its arguments
    prompts_first      the release whose scheduler, which runs prompts before it decodes, is simulated; None: vLLM's is
    outside            what the memory outside the budget is
    uncompared         (text, source) about the rules of a release whose own answers were not compared: {label}
    known_by           what the rules of such a release are taken from
    adapter_slots      slots for LoRA adapters where their number is not given
    program            the words that start it, before its arguments; image: its container image, with {release}
    share              the engine argument that says its share of the memory
    port               that it listens on unless told
    own_flags          engine argument -> its own flag, where that is not the argument's name; own_values: of values
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
    own_flags: Mapping[str, str] = field(default_factory=dict)
    own_values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """One step of the explanation: a title and lines of plain text."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A server's own part of --explain, its numbers put in.

    block_size  why its blocks are that large
    pools       how blocks and states share its memory
    budget      from the GPU's total to the bytes of the KV cache
    users       from these to requests
    more        sections of its own
    """

    block_size: str
    pools: tuple[str, ...]
    budget: tuple[str, ...]
    users: tuple[str, ...]
    more: tuple[Section, ...] = ()


@dataclass(frozen=True, slots=True)
class Starts:
    """How a server is started.

    launcher     the words in front of its flags
    model_flag   the flag that names the model
    takes_model  whether its engine's call takes the model without a name
    call         its engine in Python: the class, and what the module may be called in front of it
    call_args    what such a call says of the arguments
    images       what names of its images contain, beside its own
    """

    launcher: tuple[str, ...]
    model_flag: str
    takes_model: bool
    call: tuple[str, tuple[str | None, ...]]
    call_args: Mapping[str, Any]
    images: tuple[str, ...] = ()


class Server(Protocol):
    """What the planner asks of a server.

    release    the release by its number (None: the newest known), with the words of its label (`+flashinfer`)
    labels     what a shell's completion of --engine offers
    context    tokens of the longest request where none is asked for
    seqs_cure  the flag that lets more requests run at once, where `max_num_seqs` run
    rest_last  whether layers that stages cannot share evenly go to the last ones
    drafter    the request with the draft that really stands beside the model, and what was decided for the user
    settings   what it runs with, its pool not yet known
    size       its memory on each stage, its pool, and what that holds
    starts     how it is started, and `start`: what a shell's command starts of it, None for nothing
    parse      what the words behind its name say
    flags      its flags that are no argument of kvplan's table: (those it reads, by what it makes of them; the others)
    variables  environment variables that change its memory
    read_pair  `--engine-arg k=v` where k is its own name of an argument; None where it is none
    kept_back  bytes of each GPU that must stay free beside what the plan's rows say, for peaks it does not plan
    launch     the words of the command that starts what was planned
    explain    the formulas behind a plan
    host       what it takes of the host's memory
    logs       how its start-up log is read; None where it is not
    failures   how it tells of its failures; None where its logs of them are not read
    metrics    its names on a /metrics page; None where its page is not read
    bench      its own load generator; None where its commands and results are not read
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
    def drafter(self, request: "Request") -> tuple["Request", list[str]]: ...
    def settings(self, request: "Request") -> "Settings": ...
    def size(self, request: "Request") -> "Sized": ...
    @property
    def starts(self) -> Starts: ...
    def start(self, words: list[str]) -> "Started | None": ...
    def parse(self, words: list[str]) -> "ServeCommand": ...
    def flags(self) -> "tuple[Mapping[str, str], Mapping[str, Other]]": ...
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
    """The server of a folder, loaded when it is asked for; that it has every name is checked in the folder itself."""

    def server() -> Server:
        module: Any = import_module(f"kvplan.servers.{folder}.server")
        return cast("Server", module)

    return server


SERVERS: dict[str, Callable[[], Server]] = {
    "vllm": _listed("vllm"),
    "sglang": _listed("sglang"),
}


def server_of(engine: str) -> Server:
    """The server of a label (`vllm@0.33+flashinfer`) or a name; KeyError for one that is not listed."""
    return SERVERS[engine.partition("@")[0]]()


DEFAULT: Final = "vllm"


def parse_engine(text: str) -> "Version":
    """`vllm`, `vllm@0.33`, `vllm@0.11.0`, `vllm@0.9+flashinfer`, `sglang`, `sglang@0.4.3`."""
    engine, *words = text.split("+")
    name, _, number = engine.partition("@")
    if name not in SERVERS:
        *forms, last = [form for known in SERVERS for form in server_of(known).terms.engines]
        raise UsageError(
            f"--engine {text!r}", "is not a server that kvplan models", f"use {', '.join(forms)} or {last}"
        )
    server = server_of(name)
    if words and not server.terms.label_words:
        others = [terms.title for terms in map(terms_of, SERVERS) if terms.label_words]
        raise UsageError(f"--engine {text}", f"+{words[0]} is of {' and '.join(others)} alone", "leave it out")
    if not number:
        return server.release(None, words)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        raise UsageError(f"--engine {text!r}", "is not a version", f"write {server.terms.example}")
    return server.release(tuple(int(field) for field in fields), words)


def terms_of(engine: str) -> Terms:
    return server_of(engine).terms


def titles(can: Callable[[Terms], bool]) -> tuple[str, str]:
    """The servers that can do something: (their names in prose, what --engine takes of them)."""
    able = {name: server().terms for name, server in SERVERS.items() if can(server().terms)}
    return " and ".join(terms.title for terms in able.values()), " or ".join(able)


def logs_of_servers() -> "dict[str, Logs]":
    """How each server's start-up log is read, by its name."""
    tables = {name: server().logs() for name, server in SERVERS.items()}
    return {name: table for name, table in tables.items() if table is not None}


def logs_of(engine: str) -> "Logs":
    """How the logs of a server are read that reads any."""
    table = server_of(engine).logs()
    assert table is not None
    return table


def generators() -> "list[Generator]":
    """The servers' own load generators."""
    return [tool for server in SERVERS.values() if (tool := server().bench()) is not None]


def failures_of_servers() -> "dict[str, Failures]":
    """How each server tells of its failures, by its name."""
    tables = {name: server().failures() for name, server in SERVERS.items()}
    return {name: table for name, table in tables.items() if table is not None}


def kind_of_cause(cause: str) -> str:
    """What a cause of one server alone is called by what speaks of any; other causes are their own kind."""
    return next((own.causes[cause] for own in failures_of_servers().values() if cause in own.causes), cause)
