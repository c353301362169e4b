"""plan(): a model, a GPU and flags -> where the memory goes and how many requests fit."""

from dataclasses import field, replace
from math import ceil, floor
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import MIB
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.planning.users import Load as Load
from kvplan.planning.users import UserAnswer, users_held
from kvplan.servers import start
from kvplan.servers.base import server_of
from kvplan.servers.releases import SGLANG_SOURCE, Version
from kvplan.servers.start import Refusal
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import pool as vllm_pool
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.overheads import Estimate
from kvplan.servers.vllm.pool import Capacity, Pool
from kvplan.servers.vllm.rules import EngineArgs, Settings
from kvplan.sizing import weights
from kvplan.sizing.allocator import weights_reserved
from kvplan.sizing.weights import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.models.tensors import Checkpoint


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan is made from.

    weights_bytes  the whole checkpoint's bytes when the user states them: spread evenly over the ranks
    checkpoint     what the model's files hold; wins over the spec's own sizes
    draft          a speculative model that shares the GPU
    memory_in_use  bytes that other processes hold on each GPU when the server starts; None: not stated
    measured       constants of this GPU in place of modelled ones, by name
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
class MemoryBreakdown:
    """One rank's memory in bytes, none of it negative: the rows less `missing` add up to `total`.

    budget      total x utilisation: a limit, not a row
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

    ROWS = ("weights", "buffers", "activations", "cuda_graphs", "non_torch", "lora", "kv_cache", "unused")

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


def weight_layout(request: Request, stage: int, *, online: bool = True) -> Layout:
    args = request.args
    ep = args.tensor_parallel_size * args.data_parallel_size if args.enable_expert_parallel else 1
    return Layout(
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        stage=stage,
        ep=ep,
        dp=args.data_parallel_size,
        sm=request.gpu.sm,
        dtype=vllm.resolve_dtype(request.spec, args.dtype, request.gpu.sm, request.release),
        online=online_scheme(request) if online else None,
        rest_last=request.release.engine == "sglang",
        left_out=vllm.left_out(request.spec, args, request.release),
        whole_towers=args.mm_encoder_tp_mode == "data",
        expert_tile=vllm.expert_tile(request.spec, args, request.gpu.sm, request.release),
    )


def own_layout(request: Request, stage: int) -> Layout | None:
    """The layout of weights that the spec itself sizes; None for a checkpoint's own sizes and stated bytes."""
    sized = request.weights_bytes is None and request.checkpoint is None
    return weight_layout(request, stage) if sized else None


ONLINE_METHODS = ("fp8", "experts_int8")


def online_scheme(request: Request) -> str | None:
    """The scheme a server quantises to while loading; None when the checkpoint is taken as it is.

    Raises UsageError for a --quantization that contradicts the checkpoint or cannot be done while loading.
    """
    asked, stored = request.args.quantization, request.spec.quantization
    if asked is None:
        return None
    if stored is not None:
        if asked.removesuffix("_marlin") != stored.method.removesuffix("_marlin"):
            raise UsageError(
                f"--quantization {asked}: {request.spec.name} is stored as {stored.method}; leave the flag out"
            )
        return None
    if asked not in ONLINE_METHODS:
        raise UsageError(
            f"--quantization {asked}: {request.spec.name} is not quantised, and only {' or '.join(ONLINE_METHODS)} can "
            "be made while loading; name a quantised checkpoint"
        )
    return asked


def takes_headers(request: Request) -> bool:
    """Whether the files' own sizes are what a server keeps: not when it quantises while loading, nor for MXFP4, which
    it pads for its kernels."""
    assert request.checkpoint is not None
    padded = "mxfp4" in vllm.scheme_kinds(request.spec)
    return bool(request.checkpoint.tensors) and not padded and online_scheme(request) is None


def rank_weights(request: Request, stage: int) -> dict[str, int]:
    """Weight bytes of one rank by tensor group; a draft model's are `draft`, a stated total is `stated`."""
    args = request.args
    if request.weights_bytes is not None:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        groups = {"stated": ceil(request.weights_bytes / ranks)}
    elif request.checkpoint is not None and takes_headers(request):
        from kvplan.sizing.stored import stored_weights

        groups = dict(stored_weights(request.spec, request.checkpoint, weight_layout(request, stage)))
    else:
        groups = dict(weights.rank_weights(request.spec, weight_layout(request, stage)))
    if request.draft is not None:
        layout = Layout(tp=args.tensor_parallel_size, sm=request.gpu.sm)
        groups["draft"] = weights.total_weights(request.draft, layout)
    return groups


@dataclass(frozen=True, slots=True)
class _Budget:
    """A rank's memory before the pool is cut from it."""

    budget: int
    groups: dict[str, int]
    estimates: dict[str, Estimate]
    available: tuple[int, int, int]  # low, likely, high


BUDGET_ROWS = ("buffers", "activations", "cuda_graphs", "non_torch", "lora")


def budget_of(request: Request, settings: Settings, stage: int) -> _Budget:
    """What one stage's rank has left for KV. Source: vLLM 0.33 v1/worker/gpu_worker.py."""
    gpu, spec, args, release = request.gpu, request.spec, request.args, request.release
    budget = ceil(gpu.total_memory * settings.gpu_memory_utilization)
    groups = rank_weights(request, stage)
    estimates = {
        "buffers": overheads.buffers(spec, settings, args, own_layout(request, stage), stage=stage, sm=gpu.sm),
        "activations": overheads.activations(spec, settings, args, release, stage=stage),
        "cuda_graphs": overheads.cuda_graphs(spec, settings, args, release, sm=gpu.sm),
        "non_torch": overheads.non_torch(spec, settings, args, gpu),
        "lora": overheads.lora(spec, settings, args),
        "context": overheads.context(gpu, args),
        "in_use": overheads.in_use(gpu, request.memory_in_use),
        **request.measured,
    }
    fixed = sum(groups.values())
    if args.kv_cache_memory_bytes is not None:
        stated = args.kv_cache_memory_bytes
        return _Budget(budget, groups, estimates, (stated, stated, stated))
    rows = [estimates[name] for name in BUDGET_ROWS]
    if not settings.graphs_in_budget:  # the graphs come on top of the budget, not out of it
        rows.remove(estimates["cuda_graphs"])
    low_total = ceil(gpu.total_memory_low * settings.gpu_memory_utilization)
    high_total = ceil(gpu.total_memory_high * settings.gpu_memory_utilization)
    return _Budget(
        budget,
        groups,
        estimates,
        (
            low_total - fixed - sum(row.high for row in rows),
            budget - fixed - sum(row.likely for row in rows),
            high_total - fixed - sum(row.low for row in rows),
        ),
    )


KEPT_BACK = "within what SGLang keeps back; it measures none"


def loaded_beside(request: Request, settings: Settings, stage: int, held: int) -> int:
    """What the device has less of once the weights are loaded, beyond them: SGLang measures whole segments."""
    spec, layout = request.spec, own_layout(request, stage)
    known = spec.quantization is None or spec.quantization.known
    if layout is None or not known:
        return overheads.loaded(spec, settings, request.args, layout).total
    return max(0, weights_reserved(spec, layout) - held)


def sglang_budget(request: Request, settings: Settings, stage: int) -> _Budget:
    """What one stage's rank has left for KV under SGLang: a share of what was free before loading, less what loads.

    Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes).
    """

    gpu, args = request.gpu, request.args
    groups = rank_weights(request, stage)
    held = sum(groups.values())
    loaded = loaded_beside(request, settings, stage, held)
    context = request.measured.get("context", overheads.context(gpu, args))
    in_use = overheads.in_use(gpu, request.memory_in_use)
    none = Estimate(0, 0, 0, KEPT_BACK, SGLANG_SOURCE, "exact")
    estimates = {
        "buffers": Estimate(
            loaded,
            loaded,
            loaded,
            f"{loaded:,} B: rotary tables, and what torch's segments round up",
            SGLANG_SOURCE,
            "formula",
        ),
        **dict.fromkeys(("activations", "cuda_graphs", "non_torch", "lora"), none),
        "context": context,
        "in_use": in_use,
    }

    def share(total: int, taken: int) -> int:
        return floor((total - taken) * settings.gpu_memory_utilization)

    from kvplan.servers.sglang import rules as sglang

    images = sglang.image_reservation(request.spec, gpu, args, request.release)
    budget = share(gpu.total_memory, context.likely + in_use.likely)
    ends = (
        share(gpu.total_memory_low, context.high + in_use.high),
        budget,
        share(gpu.total_memory_high, context.low + in_use.low),
    )
    low, likely, high = (end - held - loaded - images for end in ends)
    return _Budget(max(0, budget), groups, estimates, (low, likely, high))


def breakdown(
    request: Request, stage: _Budget, kv_cache: int, given_out: int | None, *, load_peak: int
) -> MemoryBreakdown:
    total = request.gpu.total_memory
    rows = {name: stage.estimates[name].likely for name in BUDGET_ROWS}
    held = sum(stage.groups.values())
    left = total - held - sum(rows.values()) - kv_cache
    context = stage.estimates["context"].likely
    slack = stage.available[1] - (kv_cache if given_out is None else given_out)
    outside_budget = left - context - slack
    return MemoryBreakdown(
        total=total,
        budget=stage.budget,
        weights=held,
        **rows,
        kv_cache=kv_cache,
        unused=max(0, left),
        missing=max(0, -left),
        context=context,
        outside_budget=max(0, outside_budget),
        slack=max(0, slack),
        over_budget=max(0, -slack),
        over_gpu=max(0, -outside_budget),
        load_peak=load_peak,
    )


def users_of(request: Request, answer: "_Answer", *, fits: bool) -> Concurrency:
    """Users by the server's figure and by the load; all zero when the server does not start."""
    load, capacity = request.load, answer.capacity

    def users(num_blocks: int) -> UserAnswer:
        if not fits:
            return UserAnswer(0, 0.0, "does not start")
        return users_held(answer.pool, answer.settings, capacity, load, num_blocks)

    low, high = (None if load.lengths is not None else users(count).users for count in answer.blocks)
    return Concurrency(
        max=capacity.max_concurrency if fits else 0.0,
        low=answer.ends[0] if fits else 0.0,
        high=answer.ends[1] if fits else 0.0,
        pool=users(capacity.num_blocks),
        pool_low=low,
        pool_high=high,
        max_num_seqs=answer.settings.max_num_seqs,
        seqs_low=answer.seqs[0] if answer.seqs is not None else answer.settings.max_num_seqs,
        seqs_high=answer.seqs[1] if answer.seqs is not None else answer.settings.max_num_seqs,
        replicas=request.args.data_parallel_size,
    )


def check_load(request: Request, context: int) -> None:
    load = request.load
    if load.mean_tokens is not None and load.mean_tokens > context:
        raise UsageError(f"mean length {load.mean_tokens:,}: is beyond the context of {context:,} tokens")
    if load.mean_tokens is not None and load.shared_prefix > load.mean_tokens:
        raise UsageError(f"--shared-prefix {load.shared_prefix:,}: is longer than the mean length {load.mean_tokens:,}")
    if load.shared_prefix >= context:
        raise UsageError(f"--shared-prefix {load.shared_prefix:,}: leaves no room in the context of {context:,} tokens")
    if request.draft is not None and request.args.pipeline_parallel_size > 1:
        raise UsageError("--draft-model: with pipeline parallelism is not modelled; use --tp")


DRAFT_TOKENS = 5  # of a draft model that comes without --num-speculative-tokens; a common choice


def gate(request: Request, settings: Settings, estimates: "Mapping[str, Estimate]", end: int) -> Refusal | None:
    """vLLM's look at the free memory before it loads; `end` 0 where others hold the most that they may, 1 likely."""
    if settings.first_engine or not request.release.has("start_gate"):
        return None
    in_use, total = estimates["in_use"], request.gpu.total_memory
    room = total - estimates["context"].likely
    others = (in_use.high, in_use.likely)[end]
    return start.free_memory(total, settings.gpu_memory_utilization, room - others, room - in_use.high, others)


def needs_state_blocks(request: Request) -> bool:
    """Whether every sequence that the server may run needs a block from the start."""
    return request.release.has("state_blocks") and vllm.has_states(request.spec) and not request.args.enforce_eager


def stating_argument(args: EngineArgs) -> str | None:
    """The argument that says how large the pool is; None where memory decides."""
    stating = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
    return next((name for name in stating if getattr(args, name) is not None), None)


def rest_of_gpu(stage: _Budget, end: Literal["low", "likely"]) -> int:
    """Bytes of a GPU that are not the pool's: weights and what is estimated, at that end of its range."""
    rows = [stage.estimates[name] for name in BUDGET_ROWS]
    return sum(stage.groups.values()) + sum(row.low if end == "low" else row.likely for row in rows)


def stated_pool(request: Request, stage: _Budget, capacity: Capacity) -> Refusal | None:
    """Why a pool that was stated cannot be allocated."""
    argument = stating_argument(request.args)
    if argument is None:
        return None
    stated, total = capacity.num_blocks * capacity.bytes_per_block, request.gpu.total_memory
    unit = capacity.bytes_per_block if argument == "num_gpu_blocks_override" else 1
    likely, most = (total - rest_of_gpu(stage, "likely"), request.gpu.total_memory_high - rest_of_gpu(stage, "low"))
    return start.stated_pool(stated, likely, most, argument, unit)


def start_notes(request: Request, settings: Settings, capacity: Capacity, stage: _Budget) -> list[str]:
    """What keeps a server that has room from starting, or from holding what it was told to."""
    args = request.args
    notes = vllm.mm_notes(request.spec, args, request.release)
    if settings.backend is not None:
        notes += vllm_pages.backend_notes(request.spec, settings, args, request.gpu.sm)
    unnamed = stage.groups.get("other", 0)
    if args.tensor_parallel_size > 1 and 100 * unnamed > sum(stage.groups.values()):
        notes.append(
            f"{unnamed:,} bytes of the files' tensors have names that kvplan cannot split: counted whole on every rank"
        )
    is_stated = stating_argument(args) is not None
    stated, others = capacity.num_blocks * capacity.bytes_per_block, rest_of_gpu(stage, "likely")
    if stated + others > request.gpu.total_memory and is_stated and stated_pool(request, stage, capacity) is None:
        notes.append(
            f"the pool that was stated takes {stated:,} bytes and the rest {others:,}: more than the GPU's "
            f"{request.gpu.total_memory:,}"
        )
    wide = overheads.wide_by_graphs(stage.estimates, stage.available, in_budget=settings.graphs_in_budget)
    if wide is not None and not is_stated:
        notes.append(wide)
    return notes


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server's rules say: its settings, its pool, each stage's memory, and what that holds.

    blocks    of the pool when what is estimated is at its worst and best; ends: the server's figure then
    kv_cache  bytes of the pool on the rank that decides
    given_out what of them counts against the budget; None: all
    seqs      sequences that run at most at both ends; None: as many as the settings say
    """

    settings: Settings
    pool: Pool
    stages: list[_Budget]
    capacity: Capacity
    blocks: tuple[int, int]
    ends: tuple[float, float]
    kv_cache: int
    notes: tuple[str, ...] = ()
    given_out: int | None = None
    refusal: Refusal | None = None
    seqs: tuple[int, int] | None = None


def vllm_answer(request: Request) -> _Answer:
    """vLLM's answer; its default batch is lowered to what starts, where there are fewer state blocks than sequences."""
    return sure_start(request, largest_batch(request))


def sure_start(request: Request, answer: _Answer) -> _Answer:
    """The answer with an empty pool at the low end of the range, where the sequences have no block each there."""
    if not needs_state_blocks(request) or answer.settings.max_num_seqs <= answer.blocks[0]:
        return answer
    return replace(answer, blocks=(0, answer.blocks[1]), ends=(0.0, answer.ends[1]))


def largest_batch(request: Request) -> _Answer:
    """What starts with the batch asked for; where none is, with the largest that does."""
    answer = vllm_start(request)
    refusal, most = answer.refusal, answer.settings.max_num_seqs
    if request.args.max_num_seqs is not None or refusal is None or refusal.by != "state_blocks":
        return answer
    holds, fails, best = 0, most, answer
    while fails - holds > 1:  # a smaller batch leaves more room
        middle = (holds + fails) // 2
        tried = vllm_start(replace(request, args=replace(request.args, max_num_seqs=middle)))
        if surely_starts(tried, middle):
            holds, best = middle, tried
        else:
            fails = middle
    if not holds:
        return answer
    note = f"no --max-num-seqs: {holds:,} are planned, the most that starts; by default {most:,}: {refusal.text}"
    return replace(best, notes=(*best.notes, note))


def surely_starts(answer: _Answer, max_num_seqs: int) -> bool:
    """Whether every sequence has its state block, also where what is estimated is at its worst if it fits then."""
    low, likely = answer.blocks[0], answer.capacity.num_blocks
    blocks = low if low > answer.capacity.blocks_per_request else likely
    return answer.refusal is None and answer.capacity.fits and max_num_seqs <= blocks


def vllm_start(request: Request) -> _Answer:
    args, spec = request.args, request.spec
    settings = vllm.resolve(spec, request.gpu, args, request.release)
    vllm.check_architecture(spec, request.release)
    vllm.check_parallel(spec, args)
    vllm.check_capability(spec, args, request.gpu.sm)
    check_load(request, settings.max_model_len)
    pool = vllm_pool.pool(spec, vllm_pages.paging(spec, settings, args, request.gpu.sm), request.draft)
    stages = [budget_of(request, settings, stage) for stage in range(args.pipeline_parallel_size)]
    capacity = vllm_pool.capacity(pool, settings, args, [stage.available[1] for stage in stages])
    low, high = (vllm_pool.blocks_in(pool, [stage.available[end] for stage in stages])[0] for end in (0, 2))
    if args.num_gpu_blocks_override is not None:
        low = high = capacity.num_blocks
    if gate(request, settings, stages[0].estimates, 0) is not None:
        low = 0
    seqs, refusal = settings.max_num_seqs, gate(request, settings, stages[0].estimates, 1)
    if refusal is None and capacity.fits and needs_state_blocks(request):
        refusal = start.state_blocks(seqs, capacity.num_blocks, low, capacity.bytes_per_block)
    if refusal is None and capacity.fits:
        refusal = stated_pool(request, stages[capacity.stage], capacity)
    kv_cache = capacity.num_blocks * capacity.bytes_per_block
    return _Answer(
        settings, pool, stages, capacity, (low, high),
        (low / capacity.blocks_per_request, high / capacity.blocks_per_request), kv_cache,
        tuple(start_notes(request, settings, capacity, stages[capacity.stage])), refusal=refusal,
    )  # fmt: skip


def sglang_answer(request: Request) -> _Answer:
    from kvplan.servers.sglang import pool as sglang_pool
    from kvplan.servers.sglang import rules as sglang  # vLLM is planned without them

    if request.draft is not None:
        raise UsageError("--draft-model: drafts in SGLang are not modelled; leave it out")
    settings = sglang.resolve(request.spec, request.gpu, request.args, request.release)
    replicas, ranks = request.args.data_parallel_size, request.args.tensor_parallel_size
    # Replicas are servers of their own, which share nothing: each is planned alone.
    request = replace(request, args=replace(request.args, data_parallel_size=1))
    args, spec, gpu = request.args, request.spec, request.gpu
    sglang.check_model(spec, args, gpu.sm)
    check_load(request, settings.max_model_len)
    pool = sglang_pool.pool(spec, settings, args, gpu.sm)
    stages = [sglang_budget(request, settings, stage) for stage in range(args.pipeline_parallel_size)]
    rooms = [[stage.available[end] for stage in stages] for end in range(3)]
    capacity = sglang_pool.capacity(pool, settings, args, rooms[1])
    pages, slots, worst = sglang_pool.pages_in(pool, args, rooms[1])
    most = sglang_pool.max_requests(pool, settings, args, pages, slots)
    ends = [sglang_pool.pages_in(pool, args, rooms[end]) for end in (0, 2)]
    low, high = (pages for pages, _, _ in ends)
    fewest, largest = (sglang_pool.max_requests(pool, settings, args, *counts[:2]) for counts in ends)
    reserved = int(sglang.reserved_mib(spec, gpu, args, request.release) * MIB)
    taken = sum(stages[worst].estimates[name].likely for name in ("context", "in_use"))
    kept = gpu.total_memory - taken - stages[worst].budget
    images = sglang.image_reservation(spec, gpu, args, request.release)
    given_out = pool.given_out(pages, slots, worst)
    refusal = start.kept_back(
        settings.gpu_memory_utilization,
        kept + images + rooms[1][worst] - given_out,
        pool.kept_from_requests(pages, slots, worst) + sglang_pool.request_table(settings, most),
        sglang.usual_fraction(spec, gpu, args, request.release),
    )
    notes = [
        *sglang.notes(args, settings, kept, reserved, images),
        *sglang_pool.pool_notes(pool, spec, args, slots),
        *([] if replicas == 1 else [sglang.replicas_note(replicas, ranks * args.pipeline_parallel_size)]),
    ]
    return _Answer(
        replace(settings, max_num_seqs=max(1, most)), pool, stages, capacity, (low + 1, high + 1),
        (low / capacity.blocks_per_request, high / capacity.blocks_per_request),
        pool.num_bytes(pages, slots, worst), tuple(notes), given_out=given_out, refusal=refusal,
        seqs=(fewest, max(1, largest)),
    )  # fmt: skip


def settings_of(request: Request) -> Settings:
    """What the server runs with, its pool not yet known."""
    if request.release.engine == "vllm":
        return vllm.resolve(request.spec, request.gpu, request.args, request.release)
    from kvplan.servers.sglang import rules as sglang

    return sglang.resolve(request.spec, request.gpu, request.args, request.release)


def answer_of(request: Request) -> _Answer:
    match request.release.engine:
        case "vllm":
            return vllm_answer(request)
        case "sglang":
            return sglang_answer(request)
        case _:
            assert_never(request.release.engine)


def plan(request: Request) -> Plan:
    """Size a model on a GPU.

    Raises UsageError for flags that contradict each other, UnsupportedModelError for what kvplan cannot size.
    """
    notes: list[str] = []
    if request.draft is not None and not request.args.num_speculative_tokens:
        request = replace(request, args=replace(request.args, num_speculative_tokens=DRAFT_TOKENS))
        title = server_of(request.release.engine).terms.title
        notes.append(f"no --num-speculative-tokens: {DRAFT_TOKENS} are taken; {title} wants a number")
    answer = answer_of(request)
    capacity = answer.capacity
    refusal = answer.refusal if capacity.fits else None
    fits = capacity.fits and capacity.num_blocks > 0 and refusal is None
    worst = capacity.stage
    stage = answer.stages[worst]
    held = sum(stage.groups.values())
    peak = held
    if online_scheme(request) and request.weights_bytes is None:
        peak = weights.total_weights(request.spec, weight_layout(request, worst, online=False))
    kv_cache = answer.kv_cache if fits else 0
    return Plan(
        request=request,
        settings=answer.settings,
        pool=answer.pool,
        capacity=capacity,
        memory=breakdown(request, stage, kv_cache, answer.given_out if fits else None, load_peak=max(peak, held)),
        weight_groups=stage.groups,
        estimates=stage.estimates,
        concurrency=users_of(request, answer, fits=fits),
        available=stage.available[1],
        available_low=stage.available[0],
        available_high=stage.available[2],
        blocks_low=answer.blocks[0],
        blocks_high=answer.blocks[1],
        stage=worst,
        fits=fits,
        deficit=0 if fits else (refusal.deficit if refusal is not None else capacity.deficit),
        refusal=refusal,
        notes=(*request.spec.notes, *notes, *answer.notes),
    )
