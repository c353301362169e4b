"""A plan: kvplan/plan@1, and several: kvplan/plans@1. Written by kvplan.documents.artifact."""

from typing import Annotated, Any, Literal, TypedDict, assert_never

from kvplan.core.records import Count, Number, Size
from kvplan.documents.schema import Schema, keys, schema_of
from kvplan.hardware.gpu import TotalKind
from kvplan.servers.plans.plan import Kind, Rows
from kvplan.servers.words.arguments import ARGUMENTS, DEFAULTS, Argument


class Model(TypedDict):
    """The model's facts; `id` is what the server loads, `scheme` how its linear layers are stored."""

    name: str
    id: str
    architecture: str
    model_type: str
    dtype: str
    quantization: str | None
    scheme: str | None
    num_layers: Size
    max_model_len: Size
    source: str


class Gpu(TypedDict):
    """One GPU; total_memory is what CUDA reports, low and high what was seen or the rule's range."""

    name: str
    device_name: str
    total_memory: Size
    total_memory_low: Size
    total_memory_high: Size
    total_memory_kind: TotalKind
    total_memory_source: str
    nominal_memory: Size | None
    compute_capability: str | None


class Args(TypedDict):
    """What was asked for; null: not given, the server decides."""

    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    data_parallel_size: Size
    quantization: str | None
    kv_cache_memory_bytes: Count | None
    num_gpu_blocks_override: Count | None
    enable_dp_attention: bool | None


def engine_args(args: Schema) -> Schema:
    """The schema of `args` with every engine argument; the type has those that reports read."""
    return args | keys({name: engine_argument(row, DEFAULTS[name]) for name, row in ARGUMENTS.items()})


def engine_argument(row: Argument, default: object) -> Schema:
    """What a plan says of an engine argument; null where it was not given."""
    match row.kind:
        case "context":
            return schema_of(Size | Literal["auto"] | None)
        case "choice":
            if default is None:
                return {"enum": [*row.choices, None]}
            return {"enum": list(row.choices)} if isinstance(default, str) else schema_of(Size)
        case "flag":
            kind: Any = bool
        case "text" | "pattern" | "limits" | "json" | "names":
            kind = str
        case "fraction" | "ratio":
            kind = Number
        case "bytes" | "gib":
            kind = Count
        case "count" | "tokens":
            kind = Count if default == 0 else Size
        case _:
            assert_never(row.kind)
    return schema_of(kind | None if default is None else kind)


class Settings(TypedDict):
    """What the server runs with."""

    max_model_len: Size
    auto_fit: bool
    max_num_batched_tokens: Size
    max_num_seqs: Size
    in_flight_tokens: Size
    gpu_memory_utilization: Number
    kv_dtype: str
    dtype: str


class Workload(TypedDict):
    mean_tokens: Size | None
    lengths: str | None
    overflow: Number
    shared_prefix: Count


class Inputs(TypedDict):
    """Everything the plan was made from, resolved."""

    model: Model
    engine: str
    gpu: Gpu
    num_gpus: Size
    args: Annotated[Args, engine_args]
    settings: Settings
    weights_bytes: Count | None
    memory_in_use: Count | None
    draft: Model | None
    workload: Workload


class Refusal(TypedDict):
    """Why the server would not start, and the flag that cures it."""

    by: str
    text: str
    flag: str | None


class UnusedDetail(TypedDict):
    """unused - missing = context + outside_budget + slack - over_budget - over_gpu. over_budget: by how much the rows
    exceed the budget; over_gpu: by how much budget and context exceed the GPU.
    """

    context: Count
    outside_budget: Count
    slack: Count
    over_budget: Count
    over_gpu: Count


class Memory(Rows):
    """Bytes of one rank. weights + buffers + activations + cuda_graphs + non_torch + lora + kv_cache + unused - missing
    = total, where unused or missing is 0; budget is a limit, not a row. Documents of earlier releases have no
    missing, over_budget and over_gpu: there unused, slack and outside_budget were negative instead.
    """

    total: Size
    budget: Count
    missing: Count
    unused_detail: UnusedDetail
    in_use: Count
    load_peak: Count
    weight_groups: Annotated[dict[str, Count], "The weights by tensor group."]
    draft_weights: Annotated[Count, "Those of `weights` that a draft model or head adds."]
    available: int
    available_low: int
    available_high: int


class Place(TypedDict):
    """GPU ranks whose memory is alike, or the host with what all ranks of a replica and the replica itself use: the
    rows less `missing` add up to `total`. The place that `decides` is that of `memory`.
    """

    name: str
    kind: Literal["gpu", "host"]
    ranks: Size
    decides: bool
    rows: dict[str, Count]
    missing: Count
    total: Count


class Group(TypedDict):
    """Layers that share one block table; bytes_per_block of this rank's share of them."""

    kind: str
    num_layers: Count
    window: Size | None
    block_size: Size
    bytes_per_block: Count
    blocks_per_request: Count


class RequestBlocks(TypedDict):
    """What one request takes besides its tokens. `fixed`: blocks of states, rings and an encoder's tokens before its
    first token, and `windows` the most of windows and chunks; `decoding`: the most of both that it keeps while it
    decodes. Everything else grows by growth_blocks per growth_tokens. `slots` of `num_slots` slots for states, where
    the server has them beside the blocks. most_requests: what the pool holds at once, however short each is.
    """

    fixed: Count
    windows: Count
    decoding: Count
    growth_blocks: Count
    growth_tokens: Size
    slots: Count
    num_slots: Count
    most_requests: Count


class KvCache(TypedDict):
    """The KV cache of one rank; num_blocks and tokens are 0 where the plan does not fit. `request` is null where all
    blocks of a request grow with its tokens, and where the plan does not fit.
    """

    max_model_len: Size
    dtype: str
    bytes_per_token: Count
    bytes_per_request: Count
    state_bytes_per_request: Count
    block_size: Size
    bytes_per_block: Count
    blocks_per_request: Size
    num_blocks: Count
    tokens: Count
    groups: Annotated[list[Group], "The groups that share the pool's block ids."]
    request: RequestBlocks | None


class Concurrency(TypedDict):
    """Requests of one replica. `users` is the number to buy by: served at once, each at the length that the workload
    states (else the full context), decoding while one prompt is computed, at most max_num_seqs; users_low and
    users_high its range (null for a distribution of lengths); pool_users the same whatever max_num_seqs. `max` is
    the server's own figure, which its log prints; low and high its range. `lower_bound`: a few users more may fit.
    `log_differs` says why the two are more than 1.1x apart.
    """

    users: Count
    users_low: Count | None
    users_high: Count | None
    pool_users: Count
    lower_bound: bool
    max_num_seqs: Size
    replicas: Size
    max: Number
    low: Number
    high: Number
    log_differs: str | None


class HostMemory(TypedDict):
    """Host bytes of all `ranks` of a replica that the settings ask for, which add up to `total`; `blocks` and `users`
    are blocks and full-context requests that the KV there holds.
    """

    ranks: Size
    weights: Count
    kv_offloading: Count
    kv_transfer: Count
    adapters: Count
    total: Count
    blocks: Count
    users: Count


class HostRow(TypedDict):
    """Host memory of each rank, or once of each replica; `compared` is empty where nothing was compared with it."""

    name: Literal[
        "swap_space", "kv_offloading", "kv_transfer", "weights", "processor_cache", "shared_memory", "checkpoint",
        "adapters", "buffers",
    ]  # fmt: skip
    bytes: Count
    per: Literal["rank", "replica"]
    formula: str
    source: str
    compared: str


class Host(TypedDict):
    """Host memory that is modeled, and what is not; `per_rank` adds up the rows of a rank."""

    per_rank: Count
    rows: list[HostRow]
    not_modeled: str


class Parameters(TypedDict):
    """The model's parameters; `active` counts of the experts those a token uses."""

    total: Count
    active: Count
    groups: Annotated[dict[str, Count], "Parameters by tensor group."]


class Limit(TypedDict):
    by: str
    text: str


class Fix(TypedDict):
    """One change that makes it fit."""

    flag: str
    model: Annotated[str, "Name of the checkpoint that is served then."]
    users: Count
    users_low: Count | None
    max_model_len: Size
    gpu: str
    num_gpus: Size
    command: str


class Assumption(TypedDict):
    """What is modeled, not derived: bytes of one rank, or null for a statement about the facts or rules used."""

    name: str
    low: int | None
    likely: int | None
    high: int | None
    formula: str
    source: str


class Origin(TypedDict):
    kind: Kind
    source: str


class Flags(TypedDict):
    """The command that serves this plan."""

    argv: list[str]
    command: str


class Encoder(TypedDict):
    """Images, videos and sounds that the server encodes at once, in tokens of the language model; cache_tokens are kept
    of earlier ones. items_per_batch of the largest items of the input `profiled` set the encoder's peak.
    """

    compute_tokens: Count
    cache_tokens: Count
    profiled: str
    items_per_batch: Count
    tokens_per_item: Annotated[dict[str, Count], "Tokens of the largest item of each input."]
    items_per_prompt: Annotated[dict[str, Count], "How many of these a prompt has at most."]


class SlotPlace(TypedDict):
    """A GPU, or the host, of a server that places layers; `free` before it starts, 0 where it is not known."""

    name: str
    weights: Count
    context: Count
    compute: Count
    total: Count
    free: Count


class Rate(TypedDict):
    """Tokens per second, low <= likely <= high."""

    low: Number
    likely: Number
    high: Number


class SlotSpeed(TypedDict):
    """Tokens per second of one request: decoding with an `empty` cache and with `tokens` in it (`full`), and of a long
    prompt; null: not known, for decoding because of what `lacks` says. `how`: how they are known.
    """

    tokens: Count
    empty: Rate | None
    full: Rate | None
    prompt: Rate | None
    lacks: str
    how: str


class SlotCache(TypedDict):
    """Caches of `cells` tokens that are allocated whole, for `slots` requests at once, and the layers on GPUs, the
    output one of them; host_experts: layers on GPUs whose experts are on the host.
    """

    cells: Size
    caches: Size
    slots: Size
    gpu_layers: Count
    num_layers: Size
    host_experts: Count
    places: list[SlotPlace]
    speed: SlotSpeed
    file_type: str


class Phase(TypedDict):
    """One rank while its server is awake, asleep, or has its weights back: server, the sum of `rows`, and others make
    the GPU's memory with free, which is negative if bytes are missing. others is null where it is not stated.
    """

    name: Literal["awake", "asleep", "waking"]
    rows: dict[str, Count]
    server: Count
    server_low: Count
    server_high: Count
    others: Count | None
    free: int


class Colocation(TypedDict):
    """How a server shares its GPUs in turn. sleep_level 1 keeps its weights on the host, 2 drops them, 0: it never
    sleeps. phases is empty where the server does not start.
    """

    owner: Annotated[str, "The framework that puts it to sleep; empty: a client does."]
    sleep_level: Literal[0, 1, 2]
    phases: list[Phase]


class PlanDocument(TypedDict):
    """One plan of kvplan. Sizes are integer bytes per GPU rank."""

    schema: Literal["kvplan/plan@1"]
    inputs: Inputs
    fits: bool
    deficit: Count
    refusal: Refusal | None
    memory: Memory
    places: Annotated[
        list[Place], "Each pipeline stage's ranks, and the host; documents of earlier releases have none."
    ]
    kv: KvCache
    concurrency: Concurrency
    host_memory: HostMemory
    host: Host
    encoder: Encoder | None
    slots: Annotated[SlotCache | None, "Of a server that places layers; null for others."]
    colocation: Annotated[Colocation | None, "Of a server that shares its GPUs in turn; null for others."]
    parameters: Parameters
    limits: Annotated[list[Limit], "What limits the answer, the first one first."]
    fixes: Annotated[
        list[Fix], "What would make it fit, the best first: one change or several together; empty where it fits."
    ]
    assumptions: Annotated[list[Assumption], "What is modeled rather than derived."]
    provenance: Annotated[
        dict[str, Origin], "JSON path of each number of memory, kv and concurrency -> where it comes from."
    ]
    flags: Flags
    notes: list[str]


class PlansDocument(TypedDict):
    """Several plans of kvplan."""

    schema: Literal["kvplan/plans@1"]
    plans: Annotated[list[PlanDocument], "The plans, in the order asked."]
