"""What a server's start-up log says: the figures that are read of any, and what each server answers of its own.

A server's own table and readers stand in servers/<name>/log.py (`Logs`); the text is read by kvplan.measure.serverlog.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from kvplan.core.units import GIB
from kvplan.servers.arguments import ARGUMENTS, EngineArgs, spellings
from kvplan.servers.measurement import Row
from kvplan.servers.plans import Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.words import Environment

SIZE: Final = r"-?[0-9]{1,7}(?:\.[0-9]{1,8})?"
COUNT: Final = r"[0-9](?:[0-9,]{0,18}[0-9])?"
SHARE: Final = r"[0-9]{1,7}(?:\.[0-9]{1,8})?"
# Fact -> how its figure is written. Sizes are GiB of one rank.
FACTS: Final[dict[str, str]] = {
    "total_memory": SIZE,
    "free_at_start": SIZE,
    "budget": SIZE,
    "utilization": SHARE,
    "weights": SIZE,
    "consumed": SIZE,  # weights + what grew outside torch
    "activations": SIZE,
    "peak_torch": SIZE,  # weights + activations
    "non_torch": SIZE,
    "cuda_graphs": SIZE,
    "cuda_graphs_estimated": SIZE,
    "available_kv": SIZE,
    "kv_in_use": SIZE,
    "key_size": SIZE,
    "value_size": SIZE,
    "conv_state": SIZE,
    "ssm_state": SIZE,
    "free_before_load": SIZE,
    "free_after_load": SIZE,
    "free_after_pool": SIZE,
    "free_at_end": SIZE,
    "num_blocks": COUNT,
    "kv_tokens": COUNT,
    "kv_tokens_refused": COUNT,  # the pool of a server that did not start for it
    "pool_tokens": COUNT,  # of one pool; a hybrid model has several
    "full_tokens": COUNT,  # of the pool that keeps all tokens
    "max_concurrency": SHARE,
    "concurrency_context": COUNT,
    "context": COUNT,
    "max_batched_tokens": COUNT,
    "padding_layers": COUNT,
    "encoder_tokens": COUNT,
    "encoder_items": COUNT,
    "attention_block_size": COUNT,
    "context_parallel": COUNT,
    "max_running": COUNT,
    "version": r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}",
    "model": r"[^\s'\",]{1,300}",
    "gpu": r"[A-Za-z0-9][A-Za-z0-9_. -]{2,60}?",
    "engine_kind": r"V[01]|model weights take|# (?:GPU|CUDA|cuda|rocm|hpu|xpu|neuron) blocks",  # but V1, the first
    "sampler": r"Using FlashInfer|FlashInfer is not available|FlashInfer is available, but it is not enabled|"
    r"FlashInfer version >= 0\.2\.3 required",
    "graph_profiling": "enabled|disabled",
}


@dataclass(frozen=True, slots=True)
class Wording:
    """One message of a server.

    phrase    what a line must hold for the pattern to be tried, from LEAD characters before it on
    pattern   <fact> stands for its figure (FACTS); the rest is a regular expression, of bounded repetitions
    versions  the releases in which it was seen
    """

    engine: str
    phrase: str
    pattern: str
    versions: str
    source: str


LEAD: Final = 32
REACH: Final = 700  # characters of a message, at most


@cache
def compiled(wording: Wording) -> re.Pattern[str]:
    return re.compile(re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{FACTS[match[1]]})", wording.pattern))


# --- what a log says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure as a line gave it.

    rank  the process it came from, as the line's prefix names it; "" where no prefix does
    line  number of the line in what was read, from 1
    """

    fact: str
    text: str
    rank: str
    line: int

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def count(self) -> int:
        return int(self.text.replace(",", ""))

    @property
    def size(self) -> int:
        """Bytes, of a figure in GiB."""
        return round(self.value * GIB)

    @property
    def half_digit(self) -> float:
        """Half of one in the last place that was written, in the unit it was written in."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])

    @property
    def rounding(self) -> int:
        """Half of the last digit in bytes, rounded up."""
        return int(self.half_digit * GIB) + 1


@dataclass(frozen=True, slots=True)
class ServerLog:
    """The last start in a log.

    flags     arguments by name, as text; what was asked for wins over what the server resolved
    readings  every figure, in the order of the log
    starts    how many starts the log holds; first_line: where the last one begins
    called    what errors call it: a log, or a /metrics page that stands for one
    """

    engine: str
    flags: dict[str, str]
    readings: tuple[Reading, ...]
    starts: int
    first_line: int
    notes: tuple[str, ...] = field(default=())
    called: Literal["log", "page"] = "log"

    def all(self, fact: str) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.fact == fact)

    def first(self, fact: str) -> Reading | None:
        return next((reading for reading in self.readings if reading.fact == fact), None)

    def by_rank(self, fact: str) -> dict[str, Reading]:
        """The first figure of each rank that gave one."""
        by_rank: dict[str, Reading] = {}
        for reading in self.all(fact):
            by_rank.setdefault(reading.rank, reading)
        return by_rank

    def least(self, fact: str) -> Reading | None:
        """The smallest figure of any rank: the pool is as large as the rank with the least room lets it be."""
        return min(self.all(fact), key=lambda reading: reading.value, default=None)

    def text(self, fact: str) -> str | None:
        reading = self.first(fact)
        return None if reading is None else reading.text

    @property
    def ranks(self) -> tuple[str, ...]:
        """The workers that gave figures, named as the log names them."""
        return tuple(dict.fromkeys(reading.rank for reading in self.readings if reading.fact in RANK_FACTS))

    @property
    def release(self) -> tuple[int, int] | None:
        """(major, minor) of the version, None for one that names no release (a build without tags says 0.1.dev)."""
        match = re.match(r"v?([0-9]{1,3})\.([0-9]{1,3})(?!\.?dev)", self.text("version") or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def model(self) -> str | None:
        """The model as the server was told it: an id or a path of its own machine."""
        return next((self.flags[name] for name in MODEL_FLAGS if name in self.flags), None) or self.text("model")


MODEL_FLAGS: Final = ("model_tag", "model", "model_path")
RANK_FACTS: Final = frozenset(
    {
        "weights",
        "activations",
        "non_torch",
        "available_kv",
        "cuda_graphs",
        "free_after_load",
        "free_after_pool",
        "key_size",
    }
)


# --- what a server answers of its own logs ----------------------------------------------------------------------------

Context = Literal["known", "derived", "unknown"]  # derived: from the concurrency, which is then not predicted


@dataclass(frozen=True, slots=True)
class Case:
    """A log, or a /metrics page that stands for one, and what it is compared with.

    planned    the plan of a request
    gpu_known  whether the request's GPU is the log's; context: where the longest request comes from
    """

    log: ServerLog
    request: Request
    planned: Callable[[Request], Plan]
    gpu_known: bool
    context: Context


@dataclass(frozen=True, slots=True)
class Given:
    """Rows that are predicted from the pool's size as it was logged, and that size in words; "" for none."""

    rows: tuple[Row, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Tokens that a log says are drafted: the method by kvplan's name, the log's word for it, and engine arguments."""

    method: str
    called: str
    counts: Mapping[str, int] = field(default_factory=dict)


# Not taken from a list of arguments, which says them whether they were asked for or not. Drafts: `Logs.draft`.
NOT_ASKED: Final = (
    "quantization", "max_loras", "max_lora_rank", "num_speculative_tokens", "speculative_method",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip


def plain_engine(log: ServerLog) -> str | None:
    """The server's newest rules."""
    return log.engine


def plain_label(log: ServerLog, request: Request) -> str:
    return request.release.label


def plain_flags(log: ServerLog) -> dict[str, str]:
    """The arguments of a list, by the names that the table has of the server or its own, and the context as logged."""
    names, context = spellings(log.engine), log.first("context")
    flags = {} if context is None else {"max_model_len": context.text.replace(",", "")}
    named = {names.get(name, name): text for name, text in log.flags.items()}
    return flags | {name: text for name, text in named.items() if name in ARGUMENTS}


def no_environment(log: ServerLog, release: Version) -> Environment:
    return {}


def no_notes(log: ServerLog, args: EngineArgs, gpu_known: bool) -> list[str]:
    return []


def no_draft(log: ServerLog) -> Drafting | None:
    return None


def no_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    return {}, []


def no_words(text: str) -> list[str]:
    return []


def own_name(name: str) -> str:
    return name


def nothing_given(case: Case) -> Given:
    return Given()


@dataclass(frozen=True, slots=True)
class Logs:
    """How a server's logs are read.

    wordings     the messages whose figures are read
    lists        what opens a list of its arguments: the newest that a start has is read, each kind for itself
    resolved     those of them that say what it made of the arguments, not what it was told
    list_names   names of a list that count beside those of the table
    commands     what a line must hold for the command that started it to be looked for; that begins there
    first_words  phrases that a process says first; once: those, and lists, that it says once
    engine       its release as --engine takes it; None where the log names none
    label        the same as a comparison shows it
    names        its name of an argument in a list -> the argument's
    flags        engine arguments, as text: what was asked for, else what it says it resolved
    command      (flags as its lists have them, flags whose effect is not sized) of the words of a command
    words        the words of its command, of a list of arguments behind its opening; opening: that opening
    argument_of  the argument that a flag's name of its is about; takes_value: whether a value follows that flag
    draft        what it says of drafts
    environment  what the log shows of its environment, as variables
    notes        what the release and defaults taken from the log rest on, by whether the GPU is known
    rows         what takes the memory, and the pool that is left, from the inputs alone
    given        the pool's figures from its size as it was logged
    """

    wordings: tuple[Wording, ...]
    rows: Callable[[Case], tuple[Row, ...]]
    lists: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    list_names: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    first_words: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    engine: Callable[[ServerLog], str | None] = plain_engine
    label: Callable[[ServerLog, Request], str] = plain_label
    names: Mapping[str, str] = field(default_factory=dict)
    flags: Callable[[ServerLog], dict[str, str]] = plain_flags
    command: Callable[[Sequence[str]], tuple[dict[str, str], list[str]]] = no_command
    opening: str = ""
    words: Callable[[str], list[str]] = no_words
    argument_of: Callable[[str], str] = own_name
    takes_value: Callable[[str], bool] = bool
    draft: Callable[[ServerLog], Drafting | None] = no_draft
    environment: Callable[[ServerLog, Version], Environment] = no_environment
    notes: Callable[[ServerLog, EngineArgs, bool], list[str]] = no_notes
    given: Callable[[Case], Given] = nothing_given
