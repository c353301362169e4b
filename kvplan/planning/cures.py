"""Fixes for a server that failed: for each cause the changes that help, best first, each with its plan.

A plan is anchored to the log: the free KV cache memory in the failing line replaces the modeled value, and flags
change it by as much as they change the model's. If no plan can be made, a fix is a kind of change, with the value that
the line itself states, if any, and marked as unchecked.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, floor
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.core.units import MIB, format_gib
from kvplan.models import catalog
from kvplan.planning.actions import LITTLE_FREE, actions, is_bfloat16, reasons
from kvplan.planning.advise import reads_fp8
from kvplan.planning.case import Args, Case, Cure
from kvplan.planning.gate import FIXED_POOL, is_of_memory, passed
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import SERVERS, abilities_of, failures_of_servers, flag_of, kind_of_cause, server_of, terms_of
from kvplan.servers.logs.failures import Figures, Size
from kvplan.servers.plans.plan import BUDGET_ROWS, Estimate
from kvplan.servers.plans.pool import blocks_in, largest_context

MOST_CURES: Final = 5
ROUND, ROUND_FROM = 256, 4096  # tokens
SHORTEST: Final = 16  # a fix keeps at least this part (1/16) of the context: less is not the requested server
MOST_SHORTENED: Final = 3  # values of a kind to combine with a shorter context
BESIDE: Final = 256 * MIB  # margin on top of a failed allocation's shortage: the next allocation is not much larger
HIGHEST_SHARE: Final = 0.98
USUAL_SHARE: Final = 0.95  # with other changes: leaves room for occasional allocations
RANKS: Final = (2, 3, 4, 5, 6, 7, 8, 12, 16)
SIBLINGS: Final = ("fp8", "awq", "gptq", "compressed-tensors", "modelopt")  # methods of quantized checkpoints
SEQS_TRIED: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
TOKENS: Final = (8192, 4096, 2048, 1024, 512)


# --- plans with the log's own figures ---------------------------------------------------------------------------------

TAKEN_FIRST: Final = ("non_torch", "activations", "cuda_graphs", "lora", "buffers")
MEASURED: Final = "by the log's own figure of the memory that is free for the KV cache"


@dataclass(frozen=True, slots=True)
class Anchor:
    """Difference between the log and each row of the model, in bytes; empty if the log states no pool.

    unattributed  memory in use by the log that no row of the model explains
    beyond        bytes of the logged pool that cannot fit next to the weights: the log is another model's
    """

    shift: Args
    unattributed: int = 0
    beyond: int = 0

    def plan(self, request: Request) -> Plan | None:
        """Return the plan of a request, its estimates shifted to the log, or None if none can be made."""
        try:
            answer = plan(request)
            if not self.shift:
                return answer
            rows = {name: answer.estimates[name].likely + self.shift.get(name, 0) for name in BUDGET_ROWS}
            points = {name: _point(max(0, size)) for name, size in rows.items()}
            return plan(replace(request, measured={**answer.estimates, **points}))
        except KvplanError:
            return None


def _point(size: int) -> Estimate:
    return Estimate(size, size, size, f"{size:,} B {MEASURED}", MEASURED, "measured")


def anchor_of(request: Request, pool: int | None) -> Anchor:
    """Rows that make the plan's pool equal the logged one: unexplained memory counts as memory outside torch."""
    if pool is None or request.args.kv_cache_memory_bytes is not None:
        return Anchor({})
    answer = plan(request)
    left = answer.available - pool  # the log's pool is smaller by this
    if left >= 0:
        return Anchor({"non_torch": left}, unattributed=left)
    shift = {}
    counted = [name for name in BUDGET_ROWS if name != "cuda_graphs" or answer.settings.graphs_in_budget]
    for name in sorted(counted, key=[*TAKEN_FIRST, *counted].index):
        taken = min(answer.estimates[name].likely, -left)
        shift[name], left = -taken, left + taken
    return Anchor(shift, beyond=-left)


def estimated_context(request: Request, pool: int) -> int:
    """The longest context, up to the requested one, that vLLM estimates for these bytes; 0 if not even one token fits.

    Source: vLLM 0.33 v1/core/kv_cache_planning.py (_estimate_max_model_len_from_groups), which first reserves the null
    block.
    """
    answer = plan(request)
    null_block = 1 if request.release.has("null_block") else 0
    stages = request.args.pipeline_parallel_size
    blocks = blocks_in(answer.pool, [pool] * stages)[0] - null_block
    return largest_context(answer.pool, answer.settings, answer.settings.max_model_len, blocks)


def estimate_range(figures: Figures, request: Request) -> tuple[int, int] | None:
    """(least, most) tokens that vLLM estimates for the rounded bytes in a failing line, or None if it states none. The
    line's bytes exclude the null block.
    """
    available = figures.available_bytes
    if available is None:
        return None
    null_block = plan(request).capacity.bytes_per_block if request.release.has("null_block") else 0
    return estimated_context(request, available.low + null_block), estimated_context(
        request, available.high + null_block
    )


def is_too_heavy(request: Request) -> bool:
    """True if a request's weights exceed its GPU's memory."""
    try:
        return plan(request).memory.weights > request.gpu.total_memory
    except KvplanError:
        return False


def stated_pool(figures: Figures, request: Request, cause: str, logged: int | None = None) -> int | None:
    """Bytes for the KV cache by the log, including the block that the check reserves, or None if it states none.

    A line is rounded; its estimate of the longest request, if stated, determines the bytes to within a block.

    logged  the smallest value of any rank in the start-up lines, rounded down
    """
    try:
        answer = plan(request)
    except KvplanError:  # the request cannot be planned; a changed one may be
        return None
    block = answer.capacity.bytes_per_block
    if cause == "mamba_blocks_below_max_num_seqs" and figures.blocks:
        return figures.blocks * block
    available = figures.available_bytes
    if available is not None:
        least = available.low
        if figures.estimated_max_len:
            charged = answer.pool.charged(figures.estimated_max_len, answer.settings) * block
            if least < charged <= available.high:
                least = charged
        return least + (block if request.release.has("null_block") else 0)
    if cause == "kv_too_small_for_max_len" and figures.kv_tokens:
        return answer.pool.charged(figures.kv_tokens, answer.settings) * block
    if logged is not None:
        return logged
    if cause == "no_kv_memory":
        return min(0, answer.available)  # the server found no memory, whatever the plan says
    return None


# --- flags ------------------------------------------------------------------------------------------------------------


def flag_text(server: str, argument: str, value: Any) -> str:
    """A flag with its value as typed on the command line; empty if it is omitted."""
    flag = flag_of(server, argument)
    if value is None:
        return ""
    if value is True:
        return flag
    if isinstance(value, float):
        return f"{flag} {value:.6g}"
    return f"{flag} {terms_of(server).own_value(argument, str(value))}"


# --- possible changes -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Search:
    """Search for fixes of one case with a request.

    base    the request's plan with the log's figures, or None if none can be made
    """

    case: Case
    request: Request
    anchor: Anchor
    base: Plan | None

    @property
    def share(self) -> float:
        """The server's --gpu-memory-utilization or equivalent."""
        stated = self.case.figures.utilization or self.case.figures.mem_fraction
        if stated is not None and stated <= 1:
            return stated
        return self.base.settings.gpu_memory_utilization if self.base is not None else 0.9

    @property
    def context(self) -> int:
        context = self.request.args.max_model_len
        if isinstance(context, int):
            return context
        return self.base.settings.max_model_len if self.base is not None else self.request.spec.max_model_len

    def resolved(self, name: str, default: int) -> int:
        """Value of an integer setting as the server resolved it."""
        value = getattr(self.base.settings if self.base is not None else self.request.args, name)
        return default if value is None else int(value)

    def answer(self, args: Args) -> Plan | None:
        """Return the plan with these changes, or None if the server does not start."""
        changed = replace(self.request, args=replace(self.request.args, **args))
        if changed.args.kv_cache_dtype not in ("auto", self.request.args.kv_cache_dtype) and not reads_fp8(changed):
            return None
        made = self.anchor.plan(changed)
        return made if made is not None and made.fits else None

    def holds(self, requests: int, context: int) -> bool:
        """True if this many requests of a context fit at once."""
        made = self.answer({"max_model_len": context})
        return made is not None and made.concurrency.max >= requests

    def with_context(self, args: Args) -> tuple[Args, Plan] | None:
        """These changes with the longest context, below the requested one, with which the server starts."""
        step = self.base.pool.block_size if self.base is not None else 16
        if args and self.context > ROUND_FROM:
            step = max(step, ROUND)  # next to another change, the exact length is not one of the log's figures
        low, high = self.context // SHORTEST // step, (self.context - 1) // step
        best = None
        while low < high:
            middle = (low + high + 1) // 2
            candidate = {**args, "max_model_len": middle * step}
            made = self.answer(candidate)
            if made is None:
                high = middle - 1
            else:
                low, best = middle, (candidate, made)
        return best


Values = Callable[[Search], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Move:
    """A kind of change, and when it is a fix.

    argument  of the engine; `share` is the server's fraction of GPU memory
    values    values to try, the nearest first
    words     what it does, if no plan gives numbers
    way       direction of the change, if no plan gives a value
    rows      rows of the plan's memory that the change must shrink by what the failing allocation lacked; empty: no
              check
    shorter   True if it may need a shorter context as well
    """

    argument: str
    values: Values
    words: str
    way: Literal["raise", "lower", "add", "change"] = "lower"
    rows: tuple[str, ...] = ()
    shorter: bool = False


def contexts(search: Search) -> Iterator[int]:
    """The longest request that fits, below the requested context: the server's own estimate if stated."""
    stated = search.case.figures.estimated_max_len
    if stated and search.answer({"max_model_len": stated}) is not None:
        yield stated
        return
    longest = search.with_context({})
    if longest is not None:
        yield longest[0]["max_model_len"]


def shares_up(search: Search) -> Iterator[float]:
    """Utilizations above the current one, up to what may be free when the server starts."""
    if search.case.gpu_known:
        most = HIGHEST_SHARE if abilities_of(search.case.server).checks_start else USUAL_SHARE
        yield from _hundredths(search.share + 0.01, most)


def shares_down(search: Search) -> Iterator[float]:
    """Utilizations below the current one, starting with the nearest that frees enough."""
    stated = search.case.figures.total_bytes
    total = stated.bytes if stated is not None else search.request.gpu.total_memory
    lacking = search.case.lacking + BESIDE if search.case.lacking else 0
    if search.case.gpu_known or stated is not None:
        least = max(0.02, lacking / total)
        yield from reversed([*_hundredths(0.1, search.share - least)])


def free_shares(search: Search) -> Iterator[float]:
    share = free_share(search.case.figures)
    if share is not None and search.case.gpu_known:
        yield share


def _hundredths(least: float, most: float) -> Iterator[float]:
    yield from (step / 100 for step in range(ceil(100 * least - 1e-6), floor(100 * most + 1e-6) + 1))


def free_share(figures: Figures) -> float | None:
    """The largest utilization, in hundredths, that passes vLLM's check of free memory with the line's rounding at its
    worst: ceil(total x utilization) <= free.
    """
    free, total = figures.free_bytes, figures.total_bytes
    if free is None or total is None or total.high <= 0:
        return None
    share = floor(100 * free.low / total.high) / 100
    return share if share > 0 else None


def fewer_seqs(search: Search) -> Iterator[int]:
    figures = search.case.figures
    most = figures.max_num_seqs or figures.dummy_requests or search.resolved("max_num_seqs", 256)
    tried, free = figures.tried_bytes, figures.free_bytes
    if search.case.cause == "oom_sampler_warmup" and tried is not None and free is not None and tried.bytes > 0:
        most = min(most, most * free.bytes // tried.bytes + 1)  # sampler memory grows with the sequences
    yield from (count for count in SEQS_TRIED if count < most)


def stated(name: str) -> Values:
    """The figure of this name in the failing line, if it has one."""
    return lambda search: filter(None, [getattr(search.case.figures, name)])


def fewer(counts: Sequence[int], current: Callable[[Search], int]) -> Values:
    """The counts below the current one."""
    return lambda search: [count for count in counts if count < current(search)]


def largest_share(search: Search) -> Iterator[float]:
    """The largest utilization that leaves room for occasional allocations."""
    yield from reversed([share for share in shares_up(search) if share <= USUAL_SHARE])


def held_seqs(search: Search) -> Iterator[int]:
    """As many requests as fit in the KV cache at full length, so that none is ever preempted."""
    most = 0 if search.base is None else floor(search.base.concurrency.max)
    if 1 <= most < search.resolved("max_num_seqs", 256):
        yield most


def held_contexts(search: Search) -> Iterator[int]:
    """The longest context at which as many requests fit as were running."""
    running, base = search.case.figures.running, search.base
    if running is None or base is None or base.concurrency.max >= running:
        return
    block = base.pool.block_size
    lengths = range(block, search.context, block)
    index = bisect_left(lengths, True, key=lambda length: not search.holds(running, length))
    if index and lengths[index - 1] > search.context // SHORTEST:
        yield lengths[index - 1]


def derived_contexts(search: Search) -> Iterator[int]:
    yield search.case.figures.derived_max_len or search.request.spec.max_model_len


def more_ranks(search: Search) -> Iterator[int]:
    several = search.request.gpu.node_gpus > 1
    yield from (count for count in RANKS if several and count > search.request.args.tensor_parallel_size)


def dividing_ranks(search: Search) -> list[int]:
    heads = search.case.figures.heads or search.request.spec.num_heads
    return [count for count in (1, *RANKS) if heads % count == 0]


def fewer_ranks(search: Search) -> Iterator[int]:
    """Numbers of ranks below the current one that divide the heads, the nearest first."""
    ranks = search.case.figures.tensor_parallel_size or search.request.args.tensor_parallel_size
    yield from (count for count in dividing_ranks(search)[::-1] if count < ranks)


def next_ranks(search: Search) -> Iterator[int]:
    ranks = search.case.figures.tensor_parallel_size or search.request.args.tensor_parallel_size
    yield from (count for count in dividing_ranks(search) if count > ranks)


def ranks_of_gpus(search: Search) -> Iterator[int]:
    gpus = search.case.figures.gpus
    if gpus:
        yield from (count for count in range(gpus, 0, -1) if search.request.spec.num_heads % count == 0)


def eager(search: Search) -> Iterator[bool]:
    if not search.request.args.enforce_eager:
        yield True


def fp8_cache(search: Search) -> Iterator[str]:
    if search.request.args.kv_cache_dtype == "auto":
        yield "fp8"


def lean_kernels(case: Case) -> str | None:
    """Kernels of the experts without the workspaces that the case's own keep, or None if these keep none."""
    stated = case.request.args.moe_backend if case.request is not None else (case.args or {}).get("moe_backend")
    return abilities_of(case.server).lean_kernels.get(str(stated))


def leaner(search: Search) -> Iterable[str]:
    return filter(None, [lean_kernels(search.case)])


def needed_pools(search: Search) -> Iterator[int]:
    needed = needed_pool(search.case.figures)
    if needed is not None:
        yield needed


def needed_pool(figures: Figures) -> int | None:
    """Bytes of a KV cache that holds the request, in whole MiB."""
    return None if figures.needed_bytes is None else -(-figures.needed_bytes.high // MIB) * MIB


def only(value: Any) -> Values:
    return lambda search: [value]


def nothing(search: Search) -> Iterable[Any]:
    """No values, because no plan models it: only the kind of change is reported."""
    return ()


BEFORE_POOL: Final = (
    "weights",
    *(name for name in BUDGET_ROWS if name != "cuda_graphs"),
)  # rows in use when memory is profiled

FEWER_TOKENS: Final = fewer(TOKENS, lambda search: search.resolved("max_num_batched_tokens", 8192))
FEWER_GRAPHS: Final = fewer((64, 32, 16, 8), lambda search: search.request.args.cuda_graph_max_bs or 160)
FEWER_LORAS: Final = fewer((8, 4, 2, 1), lambda search: search.request.args.max_loras)

CONTEXT = Move("max_model_len", contexts, "a shorter request needs less KV cache")
SHARE_UP = Move("share", shares_up, "raises the memory budget of the server", "raise", shorter=True)
SHARE_DOWN = Move("share", shares_down, "leaves more memory outside the KV cache", shorter=True)
SHARE_FREE = Move("share", free_shares, "fits the memory that is free", shorter=True)
FP8 = Move("kv_cache_dtype", fp8_cache, "halves the bytes per token, if the GPU supports it", "change", shorter=True)
RANKS_UP = Move("tensor_parallel_size", more_ranks, "splits weights and KV cache over more GPUs", "raise")
RANKS_LOAD = replace(RANKS_UP, rows=("weights",))
RANKS_PROFILE = replace(RANKS_UP, rows=BEFORE_POOL)
EAGER = Move("enforce_eager", eager, "saves the memory of CUDA graphs, and decodes slower", "add", shorter=True)
SEQS = Move("max_num_seqs", fewer_seqs, "fewer sequences at once take less memory", shorter=True)
SEQS_PROFILE = replace(SEQS, rows=BEFORE_POOL)
BATCH = Move("max_num_batched_tokens", FEWER_TOKENS, "smaller steps take less memory", shorter=True)
BATCH_PROFILE = replace(BATCH, rows=BEFORE_POOL)
IMAGES = Move("limit_mm_per_prompt", nothing, "fewer images and videos per request take less memory")
QUANTIZED = Move("quantization", nothing, "use a quantized checkpoint: its weights are smaller", "change")
OFFLOAD = Move("cpu_offload_gb", nothing, "moves part of the weights to host memory, but is slow", "add")
GRAPHS = Move("cudagraph_capture_sizes", nothing, "fewer and smaller CUDA graphs take less memory")
GRAPH_BATCH = Move("cuda_graph_max_bs", FEWER_GRAPHS, "fewer and smaller CUDA graphs take less memory")
KV_AUTO = Move("kv_cache_dtype", only("auto"), "keeps the KV cache in the model's own type", "change")
ITEM = Move("max_num_batched_tokens", stated("item_tokens"), "room for the largest image or video", "raise")
STATES = Move("max_num_seqs", stated("blocks"), "a block for the state of each sequence")
OWN_CONTEXT = Move("max_model_len", derived_contexts, "the model's own longest request")
WHOLE_BLOCKS = Move("tensor_parallel_size", nothing, "each rank's slice is then whole blocks of the quantization")
HEADS = Move("tensor_parallel_size", fewer_ranks, "a number that divides the attention heads", "lower")
MORE_HEADS = Move("tensor_parallel_size", next_ranks, "a number that divides the attention heads", "raise")
GPUS = Move("tensor_parallel_size", ranks_of_gpus, "as many ranks as there are GPUs")
POOL_UP = Move(FIXED_POOL, needed_pools, "the KV cache has these bytes, whatever the utilization", "raise")
HALF = Move("dtype", only("float16"), "a dtype that older GPUs support", "change")
RETRACT = Move("max_num_seqs", held_seqs, "no request is preempted; the others wait in the queue")
MORE_KV = Move("share", largest_share, "a larger KV cache holds more requests", "raise")
SHORT = Move("max_model_len", held_contexts, "holds as many requests as ran at once; longer ones are rejected")
SLOWER = Move("schedule_conservativeness", nothing, "above 1, requests are admitted more slowly", "raise")
KERNELS = Move("moe_backend", leaner, "kernels without a workspace of their own in every layer", "change", shorter=True)
LORAS = Move("max_loras", FEWER_LORAS, "fewer adapters at once take less memory")

OUT_OF_MEMORY: Final = "out_of_memory"
# Causes that a workspace of the experts' kernels adds to: it is taken in the profile run, before the pool.
TAKES_WORKSPACES: Final = ("kv_too_small_for_max_len", "no_kv_memory", "oom_profile_run", OUT_OF_MEMORY)
# For each cause, or server-specific kind of cause, the moves that help, best first.
MOVES: Final[Mapping[str, tuple[Move, ...]]] = {
    "kv_too_small_for_max_len": (CONTEXT, SHARE_UP, FP8, RANKS_UP, EAGER),
    "no_kv_memory": (SHARE_UP, RANKS_UP, BATCH, EAGER, SEQS, QUANTIZED),
    "free_memory_below_utilization": (SHARE_FREE,),
    "oom_loading_weights": (RANKS_LOAD, QUANTIZED, OFFLOAD),
    "oom_profile_run": (SEQS_PROFILE, BATCH_PROFILE, IMAGES, EAGER, QUANTIZED, RANKS_PROFILE),
    "oom_cuda_graph_capture": (SHARE_DOWN, EAGER, GRAPHS, SEQS),
    "oom_sampler_warmup": (SEQS, SHARE_DOWN, RANKS_UP),
    "oom_runtime": (SHARE_DOWN, BATCH, SEQS),
    "encoder_cache_too_small": (ITEM, IMAGES),
    "mamba_blocks_below_max_num_seqs": (STATES, SHARE_UP, EAGER),
    "max_len_above_model": (OWN_CONTEXT,),
    "heads_not_divisible_by_tp": (HEADS, MORE_HEADS),
    "too_few_gpus": (GPUS,),
    "dtype_or_capability": (HALF,),
    "kv_dtype_unsupported": (KV_AUTO,),
    "quantization_mismatch": (WHOLE_BLOCKS,),
    "pool_after_weights": (SHARE_UP, RANKS_UP, QUANTIZED),  # the weights leave nothing: no smaller cache fits, either
    "oom_decode": (MORE_KV, RETRACT, FP8, RANKS_UP, SHORT, SLOWER),
    "preemption": (MORE_KV, RETRACT, FP8, RANKS_UP, SHORT),
    "oom_prefill": (BATCH, SHARE_DOWN, RANKS_UP),
    "oom_graphs": (SHARE_DOWN, GRAPH_BATCH, EAGER),
    "lora_memory": (LORAS, SHARE_DOWN),
    # In an unknown phase of start-up: moves that help in most phases, and in the same direction in all. Utilization is
    # not among them: it is raised if the KV cache is short of memory, and lowered if anything else is.
    OUT_OF_MEMORY: (SEQS, EAGER, RANKS_UP, BATCH),
}


def moves(case: Case) -> Sequence[Move]:
    """The moves for a case: raise utilization if its pool is too small, lower it if memory outside the pool is."""
    if case.cause == "quantization_mismatch" and "divisible" not in case.evidence:
        return ()
    if case.cause == "dtype_or_capability" and not is_bfloat16(case):
        return ()  # the kernels of a quantization do not depend on the data type
    kind = kind_of_cause(case.cause, case.server)
    if (case.args or {}).get(FIXED_POOL) and case.cause == "kv_too_small_for_max_len":
        return (POOL_UP, *MOVES[kind])
    if kind == "oom_prefill" and case.figures.tried_tokens is not None:  # the pool ran out, not torch
        return (SHARE_UP, SEQS, BATCH)
    if case.cause == "free_memory_below_utilization" and case.figures.initial_free_bytes is not None:
        return ()  # the utilization was free; the measured memory changed
    if kind in TAKES_WORKSPACES and lean_kernels(case) is not None:
        return (KERNELS, *MOVES[kind])
    return MOVES.get(kind, ())


# --- fixes ------------------------------------------------------------------------------------------------------------


def cures(case: Case) -> list[Cure]:
    """Fixes of a case, best first: each with a plan, or if none can be made, what is known without one."""
    if case.server in SERVERS and abilities_of(case.server).fits_context:
        return (placed(case) or list(actions(case)))[:MOST_CURES]
    results = [unchecked(case, move) for move in moves(case)] if case.request is None else planned(case, case.request)
    return passed(case, reasons(case), results[:MOST_CURES], actions(case))


def placed(case: Case) -> list[Cure]:
    """Fixes of a server that places layers: those with a plan that fits in the memory that was free, else its flags for
    the buffer that failed.
    """
    server, helps = server_of(case.server), failures_of_servers()[case.server].helps.get(case.cause, ())
    texts = {help.argument: help.text for help in helps}
    if case.request is not None and case.gpu_known and helps:
        request = with_free(case.request, case.free_before_load)
        with suppress(KvplanError):
            changes = [(flag, args, replace(request, args=replace(request.args, **args)))
                       for flag, args in server.remedies(plan(request))]  # fmt: skip
            answers = ((flag, args, next(iter(args)), plan(changed)) for flag, args, changed in changes)
            cures = [Cure(name, args, (flag,), texts.get(name, ""), "change", answer)
                     for flag, args, name, answer in answers if answer.fits]  # fmt: skip
            if cures:
                return cures
    return [Cure(help.argument, {}, (help.flag,), help.text, help.way, None) for help in helps]


def with_free(request: Request, free: int | None) -> Request:
    """The request on a GPU of which so much was free before loading, with the driver's own already taken."""
    if free is None or request.memory_in_use is not None:
        return request
    taken = request.gpu.total_memory - free - plan(request).estimates["context"].likely
    return replace(request, memory_in_use=max(0, taken))


def planned(case: Case, request: Request) -> list[Cure]:
    """Fixes with a plan; those of which none can be made only if no plan can be made at all."""
    anchor = anchor_of(request, case.pool)
    search = Search(case, request, anchor, anchor.plan(request))
    results = list[Cure]()
    for move in moves(case):
        cure = checked(search, move)
        if cure is not None and not any(is_idle(cure, other) for other in results):
            results.append(cure)
    if is_of_memory(case) and not any(cure.plan is not None for cure in results):
        fits_alone = case.cause == LITTLE_FREE and search.base is not None  # once the other process is gone
        results += [cure for cure in [None if fits_alone else last_resort(search)] if cure is not None]
        if search.base is None and not any(cure.plan is not None for cure in results):
            results = [unchecked(case, move) for move in moves(case)]
    return results


def is_idle(cure: Cure, other: Cure) -> bool:
    """True if a fix makes all changes of another one and gains nothing by it."""
    if not set(other.args) <= set(cure.args) or cure.kind == other.kind:
        return cure.flags == other.flags
    if cure.plan is None or other.plan is None:
        return cure.flags == other.flags
    return (cure.plan.capacity.max_model_len, cure.plan.capacity.tokens) <= (
        other.plan.capacity.max_model_len,
        other.plan.capacity.tokens,
    )


def checked(search: Search, move: Move) -> Cure | None:
    """The smallest change of a kind with which the server starts, combined with a shorter context if needed."""
    argument = kind_of(search.case, move)
    values = list(move.values(search))
    if move is QUANTIZED:
        return quantized(search)
    if move.values is nothing:
        return unchecked(search.case, move)
    for value in values:
        made = search.answer({argument: value})
        if made is not None and frees(search, move, made):
            return cure_of(search.case, move, {argument: value}, made)
    if move.shorter and values:
        if move.values is shares_up:
            values = [value for value in values if value <= USUAL_SHARE or value == values[0]][::-1]
        for value in values[:MOST_SHORTENED]:
            longest = search.with_context({argument: value})
            if longest is not None and frees(search, move, longest[1]):
                return cure_of(search.case, move, *longest)
    return None


def quantized(search: Search) -> Cure | None:
    """A quantized checkpoint; of a model of the catalog, the first with which the server starts."""
    if search.request.spec.quantization is not None:
        return None
    cure, own = unchecked(search.case, QUANTIZED), catalog.find(search.request.spec.name)
    siblings = [catalog.quantized(own, method) for method in SIBLINGS] if own is not None else []
    for name in filter(None, siblings):
        with suppress(KvplanError):
            other = plan(replace(search.request, spec=catalog.load(name)))
            if other.fits:
                text = f"serve {catalog.facts(name)['id']}: its weights take {format_gib(other.memory.weights)}"
                return replace(cure, flags=(), text=text)
    return cure


def frees(search: Search, move: Move, made: Plan) -> bool:
    """True if a plan needs less memory at the time of the failure, by at least what the failing allocation lacked."""
    lacking = search.case.lacking
    if not move.rows or not lacking or search.base is None:
        return True
    before, after = (sum(getattr(each.memory, row) for row in move.rows) for each in (search.base, made))
    return bool(before - after >= lacking)


def last_resort(search: Search) -> Cure | None:
    """More GPUs with a shorter context, if no single change is enough."""
    for ranks in more_ranks(search):
        longest = search.with_context({"tensor_parallel_size": ranks})
        if longest is not None and frees(search, RANKS_UP, longest[1]):
            return cure_of(search.case, RANKS_UP, *longest)
    return None


def cure_of(case: Case, move: Move, args: Args, made: Plan) -> Cure:
    flags = tuple(flag_text(case.server, name, value) for name, value in args.items())
    return Cure(kind_of(case, move), args, flags, move.words, move.way, made)


def unchecked(case: Case, move: Move) -> Cure:
    """A kind of change, with the value in the failing line if it has one."""
    argument = kind_of(case, move)
    value = stated_value(case, move)
    flags = (flag_of(case.server, argument),) if value is None else (flag_text(case.server, argument, value),)
    args = {} if value is None else {argument: value}
    proof = None if value is None else proof_of(case, move, value)
    return Cure(kind_of(case, move), args, flags, move.words, move.way, None, proof)


def proof_of(case: Case, move: Move, value: Any) -> str | None:
    """The log's figures that imply a value for any model, or None if the value is a guess."""
    figures = case.figures
    match move.argument, case.cause:
        case "max_model_len", "kv_too_small_for_max_len" if value == figures.estimated_max_len:
            return "the server's own estimate for the memory that is free"
        case "max_model_len", "kv_too_small_for_max_len" if value == figures.kv_tokens:
            return "the tokens that its KV cache holds"
        case "kv_cache_memory_bytes", "kv_too_small_for_max_len":
            return f"{stated_gib(figures.needed_bytes)} are needed; no utilization changes a pool of fixed size"
        case "share", _ if value == least_share_above(case):
            return f"weights and what they leave free ask for more than {case.least_share:.4g}"
        case "max_model_len", "max_len_above_model":
            return "the model's own maximum"
        case "max_num_seqs", "mamba_blocks_below_max_num_seqs":
            return f"there are {value:,} blocks, one for each sequence"
        case "max_num_batched_tokens", "encoder_cache_too_small":
            return "the tokens of the largest item"
        case "tensor_parallel_size", "heads_not_divisible_by_tp":
            return f"{figures.heads} heads are divided by {value}"
        case "tensor_parallel_size", "too_few_gpus":
            return f"{value} GPUs are visible"
        case "share", "free_memory_below_utilization" if figures.free_bytes and figures.total_bytes:
            free = f"{stated_gib(figures.free_bytes)} of {stated_gib(figures.total_bytes)} are free"
            return f"{free}; works only if the model fits in them"
        case "share", "kv_too_small_for_max_len" if value == needed_share(case):
            needed, available = stated_gib(figures.needed_bytes), stated_gib(figures.available_bytes)
            return f"{needed} are needed and {available} free; the rest of the GPU must be free, too"
        case _:
            return None


def stated_gib(size: Size | None) -> str:
    return "?" if size is None else format_gib(size.bytes)


def needed_share(case: Case) -> float | None:
    """The utilization, in hundredths, that adds what one request lacks: the pool grows as much as the budget."""
    needed, available, total = case.figures.needed_bytes, case.figures.available_bytes, case.total
    share = case.figures.utilization or (case.args or {}).get(share_argument(case))
    if needed is None or available is None or not total or share is None or not 0 < share < 1:
        return None
    new_share = ceil(100 * (share + (needed.high - available.low) / total) - 1e-6) / 100
    return new_share if share < new_share <= HIGHEST_SHARE else None


def stated_value(case: Case, move: Move) -> Any:
    """Value of a change according to the failing line itself."""
    figures = case.figures
    match move.argument, case.cause:
        case "max_model_len", "kv_too_small_for_max_len":
            return figures.estimated_max_len or figures.kv_tokens or proportional_len(figures)
        case "max_model_len", "max_len_above_model":
            return figures.derived_max_len
        case "max_num_seqs", "mamba_blocks_below_max_num_seqs":
            return figures.blocks
        case "max_num_seqs", "oom_sampler_warmup":
            return sampled_seqs(figures)
        case "max_num_batched_tokens", "encoder_cache_too_small":
            return figures.item_tokens
        case "tensor_parallel_size", "too_few_gpus":
            return figures.gpus
        case "share", "free_memory_below_utilization":
            return free_share(figures)
        case "share", "kv_too_small_for_max_len":
            return needed_share(case) or turned_share(case, move)
        case "kv_cache_memory_bytes", "kv_too_small_for_max_len":
            return needed_pool(figures)
        case "max_model_len", _:
            return None
        case "share", _:
            return turned_share(case, move)
        case "dtype", _:
            return "float16"
        case "kv_cache_dtype", "kv_dtype_unsupported":
            return "auto"
        case "kv_cache_dtype", _:
            return "fp8"
        case "tensor_parallel_size", "heads_not_divisible_by_tp":
            return dividing(figures, more=move is MORE_HEADS)
        case "enforce_eager", _:
            return True
        case "moe_backend", _:
            return lean_kernels(case)
        case _:
            return None


def share_argument(case: Case) -> str:
    return terms_of(case.server).share_argument


def proportional_len(figures: Figures) -> int | None:
    """Context that fits in the free bytes if every token takes the same; for a model with windows or states, whose
    memory is partly fixed, a lower bound.
    """
    needed, available, context = figures.needed_bytes, figures.available_bytes, figures.context
    if needed is None or available is None or context is None or needed.high <= 0 or available.low <= 0:
        return None
    return context * available.low // needed.high // 16 * 16 or None


def sampled_seqs(figures: Figures) -> int | None:
    """Sequences whose logits fit in free memory: the sampler's memory grows with their number."""
    seqs, tried, free = figures.dummy_requests, figures.tried_bytes, figures.free_bytes
    if not seqs or tried is None or free is None or tried.bytes <= 0:
        return None
    return next((count for count in SEQS_TRIED if count < seqs and count * tried.bytes <= seqs * free.bytes), None)


def dividing(figures: Figures, *, more: bool) -> int | None:
    """The nearest number of ranks, above or below the current one, that divides the heads."""
    heads, ranks = figures.heads, figures.tensor_parallel_size
    if not heads or not ranks:
        return None
    counts = [count for count in (1, *RANKS) if heads % count == 0 and (count > ranks if more else count < ranks)]
    # The layers' other sizes are multiples of powers of two; without the model no other number is sure to divide them.
    counts = [count for count in counts if count & (count - 1) == 0]
    return (counts[0] if more else counts[-1]) if counts else None


def least_share_above(case: Case) -> float | None:
    """The next hundredth above what the weights alone take, if the log says it."""
    if case.least_share is None:
        return None
    share = floor(100 * case.least_share + 1) / 100
    return share if share <= HIGHEST_SHARE else None


def turned_share(case: Case, move: Move) -> float | None:
    """A utilization without a plan: raised to vLLM's default, or lowered by what was lacking."""
    share = case.figures.utilization or case.figures.mem_fraction or (case.args or {}).get(share_argument(case))
    total = case.figures.total_bytes
    if share is None or not 0 < share <= 1:
        return None
    if move.way == "raise":
        return least_share_above(case) or (0.9 if share < 0.9 - 1e-6 else None)
    lacking = 0 if total is None or total.bytes <= 0 else (case.lacking + BESIDE) / total.bytes
    lower = floor(100 * (share - max(0.05, lacking)) + 1e-6) / 100
    return lower if lower >= 0.1 else None


def kind_of(case: Case, move: Move) -> str:
    """The engine argument that a move changes."""
    return share_argument(case) if move.argument == "share" else move.argument
