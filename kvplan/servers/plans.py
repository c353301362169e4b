"""The nouns of an answer: what is asked of a server, what its rules say, and the plan that comes of it.

They stand below the servers, which are handed a Request and give back a Sized; planning.plan makes the Plan.
"""

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypedDict

from kvplan.core.errors import UsageError
from kvplan.core.field_types import Count
from kvplan.core.records import dataclass
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.estimates import Estimate
from kvplan.servers.releases import Version
from kvplan.servers.settings import Settings
from kvplan.servers.start import Refusal
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.pool import Capacity, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.models.tensors import Checkpoint
    from kvplan.workloads.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Load:
    """How long requests really are; where nothing is stated every one is as long as the context.

    mean_tokens    tokens a request holds on average; None: not stated
    lengths        a distribution of them, for an answer with a bound on overflow
    overflow       probability that the pool overflows, at most
    shared_prefix  tokens every request starts with
    """

    mean_tokens: int | None = None
    lengths: "Lengths | None" = None
    overflow: float = 0.01
    shared_prefix: int = 0

    def longest(self, context: int) -> int:
        """Tokens of the longest request there is."""
        if self.lengths is not None:
            return min(self.lengths.longest, context)
        return self.mean_tokens or context


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """The largest number of independent users whose blocks overflow the pool with at most the probability asked for.

    overflow_probability  that of `users`
    method                how it was computed, for the reader
    is_lower_bound        a few more may fit: the sum was taken on a grid
    """

    users: int
    overflow_probability: float
    method: str
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan is made from.

    weights_bytes  the whole checkpoint's bytes when the user states them: spread evenly over the ranks
    checkpoint     what the model's files hold; wins over the spec's own sizes
    draft          a speculative model that shares the GPU
    memory_in_use  bytes that other processes hold on each GPU when the server starts; None: not stated
    measured       constants of this GPU in place of modeled ones, by name
    """

    spec: ModelSpec
    gpu: GpuSpec
    args: EngineArgs = field(default_factory=EngineArgs)
    release: Version = field(default_factory=lambda: vllm.version(vllm.NEWEST))
    load: Load = field(default_factory=Load)
    weights_bytes: int | None = None
    checkpoint: "Checkpoint | None" = None
    draft: ModelSpec | None = None
    memory_in_use: int | None = None
    measured: "Mapping[str, Estimate]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Budget:
    """A rank's memory before the pool is cut from it."""

    budget: int
    groups: dict[str, int]
    estimates: dict[str, Estimate]
    available: tuple[int, int, int]  # low, likely, high


class BudgetRows(TypedDict):
    """What a server's budget is spent on beside weights and the KV cache, in bytes of one rank. One more row is a key
    here, a field of MemoryBreakdown, and its estimate in a server's `size`.
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


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """Images, videos and sounds that a server encodes at once.

    compute_tokens, cache_tokens   that a step encodes at most, and that are kept of earlier ones
    profiled, items_per_batch      the input whose largest items set its peak, and how many at once; 0: none does
    tokens_per_item, items_per_prompt  of the largest item of each input, and how many of these a prompt has room for
    """

    compute_tokens: int
    cache_tokens: int
    profiled: str
    items_per_batch: int
    tokens_per_item: dict[str, int]
    items_per_prompt: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sized:
    """What a server's rules say: its settings, its pool, each stage's memory, and what that holds.

    blocks    of the pool when what is estimated is at its worst and best; ends: the server's figure then
    kv_cache  bytes of the pool on the rank that decides
    given_out what of them counts against the budget; None: all
    seqs      sequences that run at most at both ends; None: as many as the settings say
    """

    settings: Settings
    pool: Pool
    stages: list[Budget]
    capacity: Capacity
    blocks: tuple[int, int]
    ends: tuple[float, float]
    kv_cache: int
    notes: tuple[str, ...] = ()
    given_out: int | None = None
    refusal: Refusal | None = None
    seqs: tuple[int, int] | None = None
    encoder: EncoderBudget | None = None


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """One rank's memory in bytes, none of it negative: the rows less `missing` add up to `total`.

    budget      total x utilization: a limit, not a row
    missing     by how much the other rows exceed the GPU; either this or `unused` is 0
    load_peak   weights while they load, when that is more than what stays
    context, outside_budget, slack   what `unused` consists of
    over_budget, over_gpu            by how much the rows exceed the budget, and the budget with the context the GPU;
                                     where either is not 0, context + outside_budget + slack is more than `unused` by it
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
        """What is left of the GPU; negative by what is missing."""
        return self.unused - self.missing


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests one replica serves at once; `replicas` of them run side by side.

    max, low, high  the server's own figure, all requests at the full context in the worst moment of their prefill; low
                    and high where what is estimated is at its worst and best
    pool            users that the pool holds by the load's measure (planning.users.users_held); low and high as above,
                    None for a distribution of lengths: each would cost as much again
    max_num_seqs    requests that the scheduler runs at most; seqs_low and seqs_high at both ends: under SGLang slots
                    for states bound them, which are a share of the memory
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
        """The number to buy by: users served at once."""
        return min(self.pool.users, self.max_num_seqs)

    @property
    def users_low(self) -> int | None:
        return None if self.pool_low is None else min(self.pool_low, self.seqs_low)

    @property
    def users_high(self) -> int | None:
        return None if self.pool_high is None else min(self.pool_high, self.seqs_high)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `fits` is False when the server would refuse to start; `deficit` is then what is missing per rank.

    refusal  why it would not start although its KV cache has room; None where it starts, or the cache has no room
    """

    request: Request
    settings: Settings
    pool: Pool
    capacity: Capacity
    memory: MemoryBreakdown
    weight_groups: dict[str, int]
    estimates: dict[str, Estimate]
    concurrency: Concurrency
    available: int
    available_low: int
    available_high: int
    blocks_low: int
    blocks_high: int
    stage: int
    fits: bool
    deficit: int
    refusal: Refusal | None
    notes: tuple[str, ...]
    encoder: EncoderBudget | None = None

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one more token adds on one rank of `stage`, windows counted as open; a draft's included."""
        draft = self.request.draft
        own = vllm_pages.rates(self.request.spec, self.pool.how, self.stage)[0]
        return own + (vllm_pages.rates(draft, self.pool.how, 0)[0] if draft is not None else 0)

    @property
    def state_bytes(self) -> int:
        """Constant bytes per sequence on one rank of `stage` (recurrent states)."""
        return vllm_pages.rates(self.request.spec, self.pool.how, self.stage)[1]

    @property
    def bytes_per_request(self) -> int:
        """Pool bytes a full-context request is charged on one rank."""
        return self.capacity.blocks_per_request * self.capacity.bytes_per_block


MEAN_KEYS = ("mean_tokens", "prompt_tokens", "output_tokens")  # what states the mean length


@dataclass(frozen=True, slots=True)
class HostRow:
    """Bytes that a server takes of the host's memory.

    per       of each rank, or once of each replica
    compared  with what somebody else's server said of it; empty: with nothing, it is modeled
    tokens    whose KV it keeps for later, of requests of the full context; 0: none
    """

    name: Literal["swap_space", "kv_offloading", "kv_transfer", "weights", "shared_memory", "checkpoint", "adapters"]
    size: int
    per: Literal["rank", "replica"]
    formula: str
    source: str
    compared: str
    tokens: int = 0


def check_load(request: Request, context: int) -> None:
    load = request.load
    if load.mean_tokens is not None and load.mean_tokens > context:
        raise UsageError(
            f"mean length {load.mean_tokens:,}",
            f"is beyond the context of {context:,} tokens",
            "lower it, or raise --ctx",
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
            "use a shorter prefix, or raise --ctx",
        )
