"""Contents of a server's start-up log: the figures read from any server, and what each server reads from its own.

A server's own table and readers are in servers/<name>/log.py (`Logs`); kvplan.measure.serverlog reads the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from kvplan.core.units import GIB
from kvplan.servers.logs.measurement import ComponentRow, Measurement
from kvplan.servers.plans.plan import Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs, spellings
from kvplan.servers.words.command import Environment

WHOLE: Final = r"(?!\.?[0-9])"  # no digits left over: a longer figure is not read, rather than its first digits
SIZE: Final = r"-?[0-9]{1,7}(?:\.[0-9]{1,8})?" + WHOLE
COUNT: Final = r"[0-9](?:[0-9,]{0,17}[0-9])?" + WHOLE
SHARE: Final = r"[0-9]{1,7}(?:\.[0-9]{1,8})?" + WHOLE
NUMBERS: Final = (SIZE, COUNT, SHARE)
# Fact -> format of its figure. Sizes are GiB per rank.
SIZES: Final = """
    total_memory free_at_start budget weights consumed activations peak_torch non_torch cuda_graphs
    cuda_graphs_estimated available_kv kv_in_use key_size value_size conv_state ssm_state free_before_load
    free_after_load free_after_pool free_at_end weights_mib cache_mib compute_mib free_mib weights_now_mib cache_now_mib
    compute_now_mib outside_mib
"""  # consumed: weights and non-torch growth; peak_torch: weights and activations; in MiB: of a place's buffers
COUNTS: Final = """
    num_blocks kv_tokens kv_tokens_refused pool_tokens full_tokens concurrency_context context max_batched_tokens
    padding_layers encoder_tokens encoder_items attention_block_size context_parallel max_running
    weights_bytes buffers_bytes activations_bytes lora_bytes kv_cache_bytes kv_offload_bytes total_bytes
    non_torch_bytes host_free_bytes host_ranks batches_in_flight layers_on_gpu layers micro_batch outputs
"""  # kv_tokens_refused: of a start that was refused with it; pool_tokens: of one pool of several; *_bytes: whole ones
FACTS: Final[dict[str, str]] = {
    **dict.fromkeys(SIZES.split(), SIZE),
    **dict.fromkeys(COUNTS.split(), COUNT),
    "utilization": SHARE,
    "max_concurrency": SHARE,
    "before": "bytes {1,40}planned {1,40}measured",  # a table of releases whose lines are not read
    "engine_device": r"cpu|cuda(?::[0-9]{1,3})?",
    "backend": "torch|triton",
    "simulated": r"[a-z][a-z0-9.@+]{1,60}",
    # of a server that logs each buffer with its place
    "place": r"[A-Za-z][A-Za-z0-9]{1,15}(?:_[A-Za-z0-9]{1,15}){0,2}",
    "unified": "true|false",
    "flash": "enabled|disabled|auto|[01]",
    **dict.fromkeys(("k_type", "v_type"), "[a-z0-9_]{2,8}"),
    "model_name": r"[^\r\n]{1,200}?",
    "file_type": r"[A-Za-z0-9_ -]{2,40}?",
    "version": r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}",
    "model": r"[^\s'\",]{1,300}",
    "gpu": r"[A-Za-z0-9][A-Za-z0-9_. -]{2,60}?",
    "engine_kind": r"V[01]|model weights take|# (?:GPU|CUDA|cuda|rocm|hpu|xpu|neuron) blocks",  # not the first V1
    "sampler": r"Using FlashInfer|FlashInfer is not available|FlashInfer is available, but it is not enabled|"
    r"FlashInfer version >= 0\.2\.3 required",
    "graph_profiling": "enabled|disabled|will be",
}


@dataclass(frozen=True, slots=True)
class Wording:
    """One message of a server.

    phrase    text that a line must contain before the pattern is tried, starting LEAD characters before it
    pattern   <fact> stands for its figure (FACTS); the rest is a regular expression with bounded repetition
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
    """One figure from a line.

    rank  the process that wrote it, as in the line's prefix; "" if there is none
    line  line number in the text that was read, from 1
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
        """Bytes of a figure given in GiB."""
        return round(self.value * GIB)

    @property
    def half_digit(self) -> float:
        """Half a unit of the last written digit, in the unit it was written in."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])

    @property
    def rounding(self) -> int:
        """Half of the last digit in bytes, rounded up."""
        return int(self.half_digit * GIB) + 1


@dataclass(frozen=True, slots=True)
class ServerLog:
    """The last start in a log.

    flags     arguments by name, as text; requested values win over those the server resolved
    readings  every figure, in log order
    starts    number of starts in the log; first_line: where the last one begins
    called    its name in error messages: a log, or a /metrics page used as one
    spans     the releases of each of its messages (Wording.versions)
    """

    engine: str
    flags: dict[str, str]
    readings: tuple[Reading, ...]
    starts: int
    first_line: int
    notes: tuple[str, ...] = field(default=())
    called: Literal["log", "page"] = "log"
    spans: frozenset[str] = frozenset()

    def all(self, fact: str) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.fact == fact)

    def first(self, fact: str) -> Reading | None:
        return next((reading for reading in self.readings if reading.fact == fact), None)

    def by_rank(self, fact: str) -> dict[str, Reading]:
        """The first figure of each rank that has one."""
        by_rank: dict[str, Reading] = {}
        for reading in self.all(fact):
            by_rank.setdefault(reading.rank, reading)
        return by_rank

    def least(self, fact: str) -> Reading | None:
        """The smallest figure of any rank: the rank with the least room limits the pool."""
        return min(self.all(fact), key=lambda reading: reading.value, default=None)

    def text(self, fact: str) -> str | None:
        reading = self.first(fact)
        return None if reading is None else reading.text

    @property
    def ranks(self) -> tuple[str, ...]:
        """The workers with figures, named as in the log."""
        return tuple(dict.fromkeys(reading.rank for reading in self.readings if reading.fact in RANK_FACTS))

    @property
    def release(self) -> tuple[int, int] | None:
        """(major, minor) of the version, or None if it names no release (a build without tags says 0.1.dev)."""
        match = re.match(r"v?([0-9]{1,3})\.([0-9]{1,3})(?!\.?dev)", self.text("version") or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def last_release(self) -> tuple[int, int] | None:
        """(major, minor) of the last release that writes all of its messages, or None if no release does."""
        ends = [re.findall(r"(\d{1,3})\.(\d{1,3})", span) for span in self.spans if span[:1].isdigit()]
        releases = [[(int(major), int(minor)) for major, minor in end] for end in ends]
        first, last = max((low for low, *_ in releases), default=None), min((end[-1] for end in releases), default=None)
        return last if first is not None and last is not None and first <= last else None

    @property
    def model(self) -> str | None:
        """The model as given to the server: an id, or a path on its own machine."""
        return next((self.flags[name] for name in MODEL_FLAGS if name in self.flags), None) or self.text("model")


def simulated_notes(readings: Sequence[Reading]) -> list[str]:
    """A note on a simulated server, which has measured nothing."""
    names = [reading.text for reading in readings if reading.fact == "simulated"]
    return [f"the server is simulated ({name}): its figures are its plan's own, nothing was measured" for name in names]


MODEL_FLAGS: Final = ("model_tag", "model", "model_path")
RANK_FACTS: Final = (
    "weights", "activations", "non_torch", "available_kv", "cuda_graphs", "free_after_load", "free_after_pool",
    "key_size",
)  # fmt: skip


# --- what a server answers of its own logs ----------------------------------------------------------------------------

Context = Literal["known", "derived", "unknown"]  # derived: from the logged concurrency, which is then not predicted


@dataclass(frozen=True, slots=True)
class Case:
    """A log, or a /metrics page used as one, and what it is compared with.

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
    """Rows predicted from the pool's logged size, and that size in words; "" for none."""

    rows: tuple[ComponentRow, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Logged speculative decoding: kvplan's name of the method, the log's word for it, and engine arguments."""

    method: str
    called: str
    counts: Mapping[str, int] = field(default_factory=dict)


# Not taken from an argument list, which includes them whether requested or not. Drafts: `Logs.draft`.
NOT_ASKED: Final = (
    "quantization", "max_loras", "max_lora_rank", "num_speculative_tokens", "speculative_method",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip


def plain_engine(log: ServerLog) -> str | None:
    """The server's name, which stands for its newest rules."""
    return log.engine


def plain_flags(log: ServerLog) -> dict[str, str]:
    """Listed arguments, under the names in the table or the server's own, and the context as logged."""
    names, context = spellings(log.engine), log.first("context")
    flags = {} if context is None else {"max_model_len": context.text.replace(",", "")}
    named = {names.get(name, name): text for name, text in log.flags.items()}
    return flags | {name: text for name, text in named.items() if name in ARGUMENTS}


@dataclass(frozen=True, slots=True)
class Logs:
    """Log reader of a server.

    wordings     the messages whose figures are read
    lists        what opens an argument list: the newest of each kind in a start is read
    resolved     those lists that show resolved settings rather than requested ones
    list_names   names in a list that count in addition to the table's
    commands     text that a line must contain to be searched for the start command, which begins there
    first_words  phrases that a process logs first; once: those, and lists, that it logs once
    engine       its release as --engine takes it, or None if the log names none
    label        the same as shown in a comparison
    names        its name of an argument in a list -> the argument's
    model        the model that was served, as --model takes it, or None
    flags        engine arguments, as text: requested values, else the resolved ones it logs
    command      parses a command's words: (flags as in its lists, flags whose effect is not sized)
    words        builds its command from an argument list after its opening; opening: that opening
    argument_of  the argument that one of its flags sets; takes_value: whether a value follows that flag
    draft        what it logs about speculative decoding
    environment  the environment that the log implies, as variables
    notes        the basis of the release and defaults taken from the log, by whether the GPU is known
    figures      what it logged of its memory and pool, without a plan
    rows         memory use and the remaining pool, from the inputs alone
    given        the pool's figures from its size as logged
    lines        what the start of a planned server would log
    """

    wordings: tuple[Wording, ...]
    figures: Callable[[ServerLog], Measurement]
    rows: Callable[[Case], tuple[ComponentRow, ...]]
    lists: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    list_names: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    first_words: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    engine: Callable[[ServerLog], str | None] = plain_engine
    label: Callable[[ServerLog, Request], str] = lambda log, request: request.release.label
    names: Mapping[str, str] = field(default_factory=dict)
    model: Callable[[ServerLog], str | None] = lambda log: log.model
    flags: Callable[[ServerLog], dict[str, str]] = plain_flags
    command: Callable[[Sequence[str]], tuple[dict[str, str], list[str]]] = lambda _: ({}, [])
    opening: str = ""
    words: Callable[[str], list[str]] = lambda _: []
    argument_of: Callable[[str], str] = lambda name: name
    takes_value: Callable[[str], bool] = bool
    draft: Callable[[ServerLog], Drafting | None] = lambda _: None
    environment: Callable[[ServerLog, Version], Environment] = lambda *_: {}
    notes: Callable[[ServerLog, EngineArgs, bool], list[str]] = lambda *_: []
    given: Callable[[Case], Given] = lambda _: Given()
    lines: Callable[[Plan], list[str]] = lambda _: []
