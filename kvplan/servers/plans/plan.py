"""Data model of an answer: the request, what a server's rules return, and the resulting plan.

Below the servers in the import order: they take a Request and return a Sized; planning.plan makes the Plan.
"""

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, TypedDict

from kvplan.core.errors import UsageError
from kvplan.core.records import Count, dataclass
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.pool import Capacity, Pool
from kvplan.servers.releases import DEFAULT, Version, newest_of
from kvplan.servers.words.arguments import EngineArgs, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.models.tensors import Checkpoint
    from kvplan.servers.words.command import Repeated
    from kvplan.workloads.lengths import Lengths


GpuCount = Literal["ranks", "name", "both"]
Kind = Literal["exact", "formula", "calibrated", "measured"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one rank, low <= likely <= high; `formula` has its numbers filled in."""

    low: int
    likely: int
    high: int
    formula: str
    source: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's refusal to start.

    by        what is missing, or "unsupported": no memory would help, so it comes before missing memory
    text      the reason in words
    argument  the engine argument that fixes it, and `values` with which it starts: likely, and certainly; if
    unsupported, values to try in order
    deficit   bytes missing on each GPU; "phase": it starts, and lacks them later beside what shares its GPUs
    """

    by: Literal["free_memory", "state_blocks", "stated_pool", "kept_back", "whole_item", "unsupported", "phase"]
    text: str
    argument: str
    values: tuple[float | int | str | None, ...]  # None: without the argument
    deficit: int

    @property
    def numbers(self) -> tuple[float | int, ...]:
        """Its values that are numbers."""
        return tuple(value for value in self.values if isinstance(value, (float, int)))

    @property
    def flags(self) -> tuple[str, ...]:
        """The argument with each value, as flags: "--max-num-seqs 64", or for a switch its name, or that of its
        negation.
        """
        name = self.argument.replace("_", "-")
        switches = {"True": f"--{name}", "False": f"--no-{name}", "None": f"without --{name}"}
        return tuple(switches.get(str(value), f"--{name} {value}") for value in self.values)

    @property
    def flag(self) -> str:
        """The likely fix; empty if there is none, or none that is known to suffice."""
        return self.flags[0] if self.flags and self.by != "unsupported" else ""


def unsupported(text: str, argument: str = "", values: tuple[float | int | str | None, ...] = ()) -> Refusal:
    """Return a refusal of what the server does not run on this GPU or with this model, whatever the memory.

    text      the reason in one line, without the server's name: "no attention backend keeps ..."
    argument  the argument to change, to one of `values` in order; each is planned before it is proposed
    """
    return Refusal("unsupported", text, argument, values, 0)


def smaller(ranks: int) -> tuple[int, ...]:
    """Smaller rank counts, the largest first."""
    return tuple(n for n in (16, 8, 4, 2, 1) if n < ranks and ranks % n == 0)


@dataclass(frozen=True, slots=True)
class Load:
    """Actual request lengths; by default every request is as long as the context.

    mean_tokens    mean tokens per request; None: not given
    lengths        their distribution, for an answer with a bound on overflow
    overflow       highest acceptable probability that the pool overflows
    shared_prefix  tokens of a prefix common to all requests
    prompt_tokens  tokens of a prompt; None: not given
    """

    mean_tokens: int | None = None
    lengths: "Lengths | None" = None
    overflow: float = 0.01
    shared_prefix: int = 0
    prompt_tokens: int | None = None

    def longest(self, context: int) -> int:
        """Tokens of the longest request."""
        if self.lengths is not None:
            return min(self.lengths.longest, context)
        return self.mean_tokens or context


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """The largest number of independent users whose blocks overflow the pool with at most the requested probability.

    overflow_probability  for `users`
    method                how it was computed, in words
    is_lower_bound        a few more may fit: the sum was computed on a grid
    """

    users: int
    overflow_probability: float
    method: str
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class Colocated:
    """What shares the GPUs of a server that sleeps while it is not needed.

    owner   the framework that puts it to sleep; "" if a client does
    level   1: its weights wait in host memory, 2: they are dropped; 0: it never sleeps
    keeps   rows that stay on the GPU besides those that always do
    in_use  bytes that others hold on each GPU, by phase; those that are stated
    """

    owner: str = ""
    level: int = 1
    keeps: tuple[str, ...] = ()
    in_use: "Mapping[str, int]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase:
    """A rank's memory while its server is awake, asleep or waking up, with that of others.

    rows    of the server, in bytes; server_low and server_high: the range of their sum
    others  bytes that others hold; None: not stated
    free    what is left of the GPU, negative if bytes are missing
    """

    name: Literal["awake", "asleep", "waking"]
    rows: dict[str, int]
    server_low: int
    server_high: int
    others: int | None
    free: int

    @property
    def server(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True, slots=True)
class Request:
    """All inputs of a plan.

    weights_bytes  bytes of the whole checkpoint if given: divided evenly among the ranks
    checkpoint     contents of the model's files; overrides the spec's own sizes
    draft          a draft model that shares the GPU; draft_checkpoint: the contents of its files
    memory_in_use  bytes that other processes hold on each GPU when the server starts; None: not given
    host_bandwidth  bytes per second of the host's memory; None: not given
    measured       measured constants of this GPU that replace modeled ones, by name
    repeated       what printed commands repeat from a pasted one
    started        the arguments are those of a server that ran: which values its flags take is not checked
    gpu_count      how the user states the number of GPUs: by the ranks, with the GPU's name (2xl40s), or both
    colocated      what shares the GPUs in turn with the server; None: nothing, or always the same
    """

    spec: ModelSpec
    gpu: GpuSpec
    args: EngineArgs = field(default_factory=EngineArgs)
    release: Version = field(default_factory=lambda: newest_of(DEFAULT))
    load: Load = field(default_factory=Load)
    weights_bytes: int | None = None
    checkpoint: "Checkpoint | None" = None
    draft: ModelSpec | None = None
    draft_checkpoint: "Checkpoint | None" = None
    memory_in_use: int | None = None
    host_bandwidth: int | None = None
    measured: "Mapping[str, Estimate]" = field(default_factory=dict)
    repeated: "Repeated | None" = None
    started: bool = False
    gpu_count: GpuCount = "ranks"
    colocated: Colocated | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """A rank's memory before the pool is allocated from it."""

    budget: int
    groups: dict[str, int]
    estimates: dict[str, Estimate]
    available: tuple[int, int, int]  # low, likely, high


class BudgetRows(TypedDict):
    """Use of a server's budget besides weights and the KV cache, in bytes of one rank. To add a row, add a key here, a
    field of MemoryBreakdown, and its estimate in a server's `size`.
    """

    buffers: Count
    activations: Count
    cuda_graphs: Count
    non_torch: Count
    lora: Count


class Rows(BudgetRows):
    """Every row of one rank's memory."""

    weights: Count
    kv_cache: Count
    unused: Count


BUDGET_ROWS: Final = tuple(BudgetRows.__annotations__)


def budget_sizes(rows: BudgetRows) -> dict[str, int]:
    """Rows of a budget by name, in order, from a record that may have more keys."""
    return {name: rows[name] for name in BUDGET_ROWS}  # type: ignore[literal-required] # its own keys


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """Images, videos and audio that a server encodes at once.

    compute_tokens, cache_tokens   most tokens that a step encodes, and that are cached from earlier steps
    profiled, items_per_batch      the modality whose largest items set its peak, and items per batch; 0: none does
    tokens_per_item, items_per_prompt  per modality: tokens of its largest item, and how many of those fit in a prompt
    """

    compute_tokens: int
    cache_tokens: int
    profiled: str
    items_per_batch: int
    tokens_per_item: dict[str, int]
    items_per_prompt: dict[str, int]


class PoolShare(NamedTuple):
    """A stage's part of the pool: its bytes on a rank, and those of them that count against the budget."""

    size: int
    given_out: int


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """A GPU or the host of a server that places a model's layers: bytes, and what was free before; 0: not known."""

    name: str
    weights: int
    context: int
    compute: int
    free: int

    @property
    def total(self) -> int:
        return self.weights + self.context + self.compute


class Rate(NamedTuple):
    """Tokens per second: low <= likely <= high."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True, slots=True)
class SlotSpeed:
    """Tokens per second of one request alone; None: not known, `lacks` says why.

    empty   decoding with an empty cache; full: with `tokens` in it
    prompt  of a prompt
    how     how they are known
    """

    tokens: int
    empty: Rate | None
    full: Rate | None
    prompt: Rate | None
    lacks: str
    how: str


@dataclass(frozen=True, slots=True)
class SlotCache:
    """A cache of fixed size that slots share or have each, in a server that places a model's layers.

    cells       tokens of one cache; caches: how many there are; slots: requests at once
    gpu_layers  of num_layers, on GPUs; the output is one of them
    host_experts  layers on GPUs whose experts are on the host
    file_type   of the file that is served
    """

    cells: int
    caches: int
    slots: int
    gpu_layers: int
    num_layers: int
    host_experts: int
    places: tuple[SlotPlace, ...]
    speed: SlotSpeed
    file_type: str

    @property
    def left(self) -> int:
        """Bytes left on the fullest GPU."""
        return min((place.free - place.total for place in self.places if place.free), default=0)


@dataclass(frozen=True, slots=True)
class Sized:
    """Result of a server's rules: its settings, its pool, each stage's memory, and what the pool holds.

    blocks    of the pool at the worst and best end of the estimates; ends: the server's own figure at those
    shares    what each stage has of the pool
    seqs      most concurrent sequences at both ends; None: as many as the settings allow
    slots     a cache of fixed size and its places, in a server that has one
    """

    settings: Settings
    pool: Pool
    stages: list[Budget]
    capacity: Capacity
    blocks: tuple[int, int]
    ends: tuple[float, float]
    shares: tuple[PoolShare, ...]
    notes: tuple[str, ...] = ()
    refusal: Refusal | None = None
    seqs: tuple[int, int] | None = None
    encoder: EncoderBudget | None = None
    slots: SlotCache | None = None


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """One rank's memory in bytes, none of it negative: the rows less `missing` add up to `total`.

    budget      total x utilization: a limit, not a row
    missing     how much the other rows exceed the GPU by; either this or `unused` is 0
    load_peak   weights while loading, if more than what stays
    context, outside_budget, slack   parts of `unused`
    over_budget, over_gpu            how much the rows exceed the budget, and budget plus context exceed the GPU;
    if either is not 0, context + outside_budget + slack is more than `unused` by that amount
    """

    total: int
    budget: int
    weights: int
    buffers: int
    activations: int
    cuda_graphs: int
    non_torch: int
    lora: int
    kv_cache: int
    unused: int
    missing: int
    context: int
    outside_budget: int
    slack: int
    over_budget: int
    over_gpu: int
    load_peak: int

    ROWS: ClassVar[tuple[str, ...]] = ("weights", *BUDGET_ROWS, "kv_cache", "unused")

    @property
    def headroom(self) -> int:
        """Bytes left on the GPU; negative if bytes are missing."""
        return self.unused - self.missing


@dataclass(frozen=True, slots=True)
class Place:
    """GPU ranks whose memory is alike: those of one pipeline stage.

    ranks          how many there are
    weight_groups  the weights by tensor group
    estimates      the modeled rows
    available      what the pool may take: at the low end of the range, likely, at its high end
    """

    ranks: int
    memory: MemoryBreakdown
    weight_groups: dict[str, int]
    estimates: dict[str, Estimate]
    available: tuple[int, int, int]


class AllUsers(NamedTuple):
    """Users of all replicas together, at both ends of the range and likely."""

    low: int | None
    likely: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Number of requests that one replica serves concurrently; there are `replicas` of them.

    max, low, high  the server's own figure, all requests at the full context in the worst moment of their prefill; low
    and high at the worst and best end of the estimates
    pool            users that the pool holds under the given load (planning.users.users_held); low and high as above,
    None for a distribution of lengths: each would take as long to compute again
    max_num_seqs    most requests that the scheduler runs; seqs_low and seqs_high at both ends: under SGLang state
    slots bound them, which take a fraction of the memory
    """

    max: float
    low: float
    high: float
    pool: UserAnswer
    pool_low: int | None
    pool_high: int | None
    max_num_seqs: int
    seqs_low: int
    seqs_high: int
    replicas: int

    @property
    def users(self) -> int:
        """Users served concurrently: the number to size hardware by."""
        return min(self.pool.users, self.max_num_seqs)

    @property
    def users_low(self) -> int | None:
        return None if self.pool_low is None else min(self.pool_low, self.seqs_low)

    @property
    def users_high(self) -> int | None:
        return None if self.pool_high is None else min(self.pool_high, self.seqs_high)

    @property
    def all_users(self) -> AllUsers:
        low, high = (None if end is None else end * self.replicas for end in (self.users_low, self.users_high))
        return AllUsers(low, self.users * self.replicas, high)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. `fits` is False if the server would refuse to start; `deficit` is then what is missing per rank.

    places   the memory of every stage's ranks; that of `stage`, the tightest, decides and is the plan's own
    refusal  why it would not start although its KV cache fits, or whatever the memory; else None
    phases   its memory awake, asleep and waking up, if something shares its GPUs
    """

    request: Request
    settings: Settings
    pool: Pool
    capacity: Capacity
    places: tuple[Place, ...]
    concurrency: Concurrency
    blocks_low: int
    blocks_high: int
    stage: int
    fits: bool
    deficit: int
    refusal: Refusal | None
    notes: tuple[str, ...]
    encoder: EncoderBudget | None = None
    slots: SlotCache | None = None
    phases: tuple[Phase, ...] = ()

    @property
    def memory(self) -> MemoryBreakdown:
        return self.places[self.stage].memory

    @property
    def weight_groups(self) -> dict[str, int]:
        return self.places[self.stage].weight_groups

    @property
    def estimates(self) -> dict[str, Estimate]:
        return self.places[self.stage].estimates

    @property
    def available(self) -> int:
        return self.places[self.stage].available[1]

    @property
    def available_low(self) -> int:
        return self.places[self.stage].available[0]

    @property
    def available_high(self) -> int:
        return self.places[self.stage].available[2]

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per additional token on one rank of `stage`, with windows not yet full; including a draft
        model's.
        """
        draft = self.request.draft
        own = self.pool.rates(self.request.spec, self.stage)[0]
        return own + (self.pool.draft_rate(draft) if draft is not None else 0)

    @property
    def state_bytes(self) -> int:
        """Constant bytes per sequence on one rank of `stage` (recurrent states)."""
        return self.pool.rates(self.request.spec, self.stage)[1]

    @property
    def bytes_per_request(self) -> int:
        """Pool bytes charged to a full-context request on one rank."""
        return self.capacity.blocks_per_request * self.capacity.bytes_per_block


MEAN_KEYS = ("mean_tokens", "prompt_tokens", "output_tokens")  # they set the mean length


@dataclass(frozen=True, slots=True)
class HostRow:
    """Host memory that a server uses, in bytes.

    per       rank, or replica
    compared  what it was compared with; empty: nothing, it is modeled
    tokens    tokens whose KV it keeps, for requests of the full context; 0: none
    in_shm    it lies in /dev/shm
    """

    name: Literal[
        "swap_space", "kv_offloading", "kv_transfer", "weights", "processor_cache", "shared_memory", "checkpoint",
        "adapters", "buffers",
    ]  # fmt: skip
    size: int
    per: Literal["rank", "replica"]
    formula: str
    source: str
    compared: str
    tokens: int = 0
    in_shm: bool = False


def check_load(request: Request, context: int) -> None:
    load = request.load
    longer = ", or raise --ctx" if context < request.spec.context_limit else ""
    if load.mean_tokens is not None and load.mean_tokens > context:
        raise UsageError(
            f"mean length {load.mean_tokens:,}",
            f"is beyond the context of {context:,} tokens",
            f"lower it{longer}",
            keys=MEAN_KEYS,
        )
    if load.mean_tokens is not None and load.shared_prefix > load.mean_tokens:
        raise UsageError(
            f"--shared-prefix {load.shared_prefix:,}",
            f"is longer than the mean length {load.mean_tokens:,}",
            "use a shorter prefix, or a longer mean length",
        )
    if load.shared_prefix >= context:
        raise UsageError(
            f"--shared-prefix {load.shared_prefix:,}",
            f"leaves no room in the context of {context:,} tokens",
            f"use a shorter prefix{longer}",
        )
