"""Which GPUs hold a number of users, with which flags; and what given GPUs need to hold them.

A placement is a number of servers, each on tensor x pipeline GPUs. Its users are those at the low end of the plan's
range, unless the likely figure is requested. Every placement is a plan() with exactly the flags that it prints.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import fsum, inf
from typing import Any, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.units import format_apart, format_gib
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.advise import is_supported, reads_fp8, supported_changes
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.planning.users import (
    End,
    KnownPools,
    blocks_at,
    num_gpus,
    own_blocks,
    pool_holds,
    pool_users,
    running_users,
)
from kvplan.servers.base import abilities_of, server_of
from kvplan.servers.words.arguments import option_words
from kvplan.workloads.lengths import Lengths

TP_SIZES = (1, 2, 4, 8)  # a node has eight GPUs
STAGE_COUNTS = range(2, 9)
MOST_STAGED_GPUS = 16  # of one server with pipeline stages: two nodes
STAGES = "pipeline stages"  # a change, as shown to the user
WIDE = "experts over data-parallel ranks"  # a change: attention and KV cache per rank, one shared set of experts
WIDE_TP_SIZES = (1, 2, 4)  # of each such rank; 8 is a node without ranks
WIDE_GPUS = (8, 16, 32)  # of all ranks of a server
SMALL_STEPS = "smaller steps"  # a change: fewer tokens per step take less memory, and prompts are computed more slowly
STEP_TOKENS = (4096, 2048, 1024)
MOST_UTILIZATION = 95  # hundredths, in the search; a single GPU may go to FULL
FULL = 99
FEWEST_SEQS = 8
MOST_USERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Question:
    """The users to serve and the constraints.

    users      in total, each as the load defines
    stated     fields of EngineArgs that are fixed; the others are searched
    fp8_kv     allow an fp8 KV cache; fp8_weights: allow quantizing while loading
    end        of the range that must hold the users
    prices     dollars per hour of a GPU, by name; empty: unknown
    pools      counts that the search has already computed
    """

    users: int
    stated: frozenset[str] = frozenset()
    fp8_kv: bool = True
    fp8_weights: bool = False
    end: Literal["low", "likely"] = "low"
    prices: "dict[str, float] | None" = None
    pools: KnownPools = field(default_factory=KnownPools, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """`replicas` servers, or ranks of WIDE ones, that follow `plan` and together hold the users.

    changes  formats less precise than the model's or the user's, STAGES, WIDE and SMALL_STEPS; empty: none
    """

    plan: Plan
    replicas: int
    price_per_hour: float | None
    changes: tuple[str, ...] = ()

    @property
    def gpu(self) -> GpuSpec:
        return self.plan.request.gpu

    @property
    def num_gpus(self) -> int:
        return self.replicas * num_ranks(self.plan.request)

    @property
    def servers(self) -> int:
        """Number of commands to start; data-parallel ranks of one server count once."""
        return self.replicas // self.plan.request.args.data_parallel_size

    @property
    def context(self) -> int:
        """Tokens available to each request."""
        return self.plan.capacity.max_model_len

    def users(self, end: End) -> int:
        """Users served at once by all replicas."""
        return self.replicas * running_users(self.plan, end)

    @property
    def total_memory(self) -> int:
        return self.num_gpus * self.gpu.total_memory


@dataclass(frozen=True, slots=True)
class PlacementFailure:
    """Why one server on this many GPUs holds no user.

    error       why it is impossible with any memory, or None if memory is the reason
    has_room    the server does not start, and not for lack of memory for one user
    is_supported  False if the server refuses the combination whatever the memory
    """

    gpu: str
    num_gpus: int
    reason: str
    error: KvplanError | None
    has_room: bool
    is_supported: bool = True

    @property
    def refused(self) -> bool:
        return self.error is not None or not self.is_supported


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best placement of each GPU, and those with less precision or pipeline stages that save a GPU: those without
    either first, then by price.
    """

    placements: tuple[Placement, ...]
    failures: tuple[PlacementFailure, ...]


def recommend(question: Question, requests: Iterable[Request]) -> Recommendation:
    """Find the cheapest placements on each request's GPU; the requests differ only in the GPU."""
    placements: list[Placement] = []
    failures: list[PlacementFailure] = []
    for request in requests:
        here: list[Placement] = []
        for changes, changed in precisions(question, request):
            choices, failed = placements_on(question, changed, changes)
            best = min(choices, key=rank, default=None)
            staged = None
            if may_be_staged(question, choices, failed):
                staged = staged_placement(question, changed, changes, best.num_gpus - 1 if best else None)
            wide = wide_placement(question, changed, changes)
            smaller = None
            if may_have_smaller_steps(question, changed, choices, failed):
                fewest_gpus = min((other.num_gpus for other in (best, wide) if other is not None), default=None)
                smaller = small_steps_placement(question, changed, changes, fewest_gpus and fewest_gpus - 1)
            for other in (best, wide, smaller, staged):
                if other is not None and is_worth_it(other, here):
                    here.append(replace(other, plan=with_load(other.plan, request.load)))
            if not changes:
                failures += failed
                if best is None and staged is None and may_be_staged(question, choices, failed):
                    failures += largest_failures(question, changed)
        placements += here
    return Recommendation(tuple(sorted(placements, key=rank)), tuple(failures))


def is_worth_it(candidate: Placement, others: Iterable[Placement]) -> bool:
    """True if it uses fewer GPUs than every placement with a subset of its changes."""
    return all(candidate.num_gpus < other.num_gpus for other in others if set(other.changes) <= set(candidate.changes))


def with_load(base: Plan, load: Load) -> Plan:
    """The same plan with the length distribution that the search ignored."""
    return base if load.lengths is None else plan(replace(base.request, load=load))


def is_unchanged(placement: Placement) -> bool:
    """True if it has neither less precision nor pipeline stages; vendors serve such models over data-parallel ranks."""
    return set(placement.changes) <= {WIDE, SMALL_STEPS}


def rank(placement: Placement) -> tuple[Any, ...]:
    """Sort key of placements, the most important first; without prices, the number of GPUs and their memory."""
    args = placement.plan.request.args
    price = placement.price_per_hour
    return (
        not is_unchanged(placement),
        price if price is not None else inf,
        placement.num_gpus,
        placement.total_memory,
        STAGES in placement.changes,
        len(placement.changes),
        args.gpu_memory_utilization or 0.0,
        args.pipeline_parallel_size,
        args.tensor_parallel_size,
        placement.gpu.name,
    )


# --- possible changes -------------------------------------------------------------------------------------------------


def with_args(request: Request, **changes: Any) -> Request:
    return replace(request, args=replace(request.args, **changes))


def precisions(question: Question, request: Request) -> Iterator[tuple[tuple[str, ...], Request]]:
    """Yield the request as it is, and with each less precise format that is allowed and not fixed."""
    kv = question.fp8_kv and "kv_cache_dtype" not in question.stated
    kv = kv and reads_fp8(request) and not is_fp8_already(request)
    weights = question.fp8_weights and "quantization" not in question.stated and request.spec.quantization is None
    yield (), request
    if kv:
        yield ("fp8 KV",), with_args(request, kv_cache_dtype="fp8")
    if weights:
        yield ("fp8 weights",), with_args(request, quantization="fp8")
    if kv and weights:
        yield ("fp8 KV", "fp8 weights"), with_args(request, kv_cache_dtype="fp8", quantization="fp8")


def is_fp8_already(request: Request) -> bool:
    """True if an fp8 KV cache would be no smaller than the one in effect."""
    current = planned(with_args(request, max_num_seqs=FEWEST_SEQS))
    other = planned(with_args(request, max_num_seqs=FEWEST_SEQS, kv_cache_dtype="fp8"))
    if isinstance(current, KvplanError) or isinstance(other, KvplanError):
        return False
    return other.bytes_per_request >= current.bytes_per_request


def splits(question: Question, request: Request) -> Iterator[Request]:
    """Yield the tensor parallel sizes of one node, or the fixed one."""
    sizes = (request.args.tensor_parallel_size,) if "tensor_parallel_size" in question.stated else TP_SIZES
    for tp in sizes:
        yield with_args(request, tensor_parallel_size=tp)


def placements_on(
    question: Question, request: Request, changes: tuple[str, ...]
) -> tuple[list[Placement], list[PlacementFailure]]:
    """One placement per tensor parallel size that holds a user, without pipeline stages unless they are fixed."""
    placements: list[Placement] = []
    failed: list[PlacementFailure] = []
    for split in splits(question, request):
        if not any(is_enough(other, split) for other in placements):
            best = placement(question, split, changes)
            if isinstance(best, Placement):
                placements.append(best)
            else:
                failed.append(best)
    return placements, failed


def is_enough(placed: Placement, split: Request) -> bool:
    """True if one server of a larger split has at least as many GPUs as the placement, which is then no worse."""
    return num_ranks(split) >= placed.num_gpus and placed.plan.request.args.gpu_memory_utilization is None


# --- pipeline stages --------------------------------------------------------------------------------------------------


def may_be_staged(question: Question, placements: list[Placement], failed: list[PlacementFailure]) -> bool:
    """True if stages should be searched: they are not fixed, and memory is all that any split lacks."""
    return "pipeline_parallel_size" not in question.stated and (
        bool(placements) or not all(each_failure.refused for each_failure in failed)
    )


def staged_splits(question: Question, request: Request) -> Iterator[Request]:
    """Yield every split with two or more stages over the GPUs of at most two nodes."""
    for stages in STAGE_COUNTS:
        for split in splits(question, with_args(request, pipeline_parallel_size=stages)):
            if num_ranks(split) <= MOST_STAGED_GPUS:
                yield split


def staged_placement(
    question: Question, request: Request, changes: tuple[str, ...], most_gpus: int | None
) -> Placement | None:
    """The best placement with stages on at most this many GPUs (None: on any number)."""
    return best_within(question, staged_splits(question, request), (*changes, STAGES), most_gpus)


def best_within(
    question: Question, requests: Iterable[Request], changes: tuple[str, ...], most_gpus: int | None
) -> Placement | None:
    """The best placement of these servers on at most this many GPUs (None: on any number)."""
    best: Placement | None = None
    for request in requests:
        replicas = question.users
        if most_gpus is not None:
            replicas = min(replicas, most_gpus // num_ranks(request))
        if not may_hold(question, request, replicas):
            continue
        candidate = placement(question, request, changes)
        if isinstance(candidate, Placement) and (best is None or rank(candidate) < rank(best)):
            best, most_gpus = candidate, candidate.num_gpus
    return best


# --- smaller steps ----------------------------------------------------------------------------------------------------


def may_have_smaller_steps(
    question: Question, request: Request, placements: list[Placement], failed: list[PlacementFailure]
) -> bool:
    """True if smaller steps should be searched: they are not fixed, and memory is all that any split lacks."""
    is_free = "max_num_batched_tokens" not in question.stated
    return is_free and (bool(placements) or not all(each_failure.refused for each_failure in failed))


def smaller_steps(request: Request) -> Iterator[Request]:
    """Yield the request with fewer tokens per step than the server's default, the most first."""
    usual = planned(with_args(request, max_num_seqs=FEWEST_SEQS))
    if isinstance(usual, Plan):
        for tokens in STEP_TOKENS:
            if tokens < usual.settings.max_num_batched_tokens:
                yield with_args(request, max_num_batched_tokens=tokens)


def small_steps_placement(
    question: Question, request: Request, changes: tuple[str, ...], most_gpus: int | None
) -> Placement | None:
    """The best placement with smaller steps on at most this many GPUs (None: on any number), with the largest of them
    that need no more GPUs.
    """
    best: Placement | None = None
    for split in splits(question, request):
        steps = list(smaller_steps(split))
        smallest = best_within(question, steps[-1:], (*changes, SMALL_STEPS), most_gpus)
        if smallest is not None:
            larger = best_within(question, steps[:-1], smallest.changes, smallest.num_gpus)
            best, most_gpus = larger or smallest, smallest.num_gpus - 1
    return best


# --- data-parallel ranks ----------------------------------------------------------------------------------------------


def shares_experts(question: Question, request: Request) -> bool:
    """True if data-parallel ranks that share experts are worth a search: no split is fixed, and attention is latent,
    whose cache every tensor-parallel rank would hold whole.
    """
    splits_stated = question.stated & {"tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"}
    return request.spec.is_mla and bool(request.spec.experts_per_token) and not splits_stated


def wide_placement(question: Question, request: Request, changes: tuple[str, ...]) -> Placement | None:
    """The fewest servers of vLLM whose data-parallel ranks share one set of experts and hold the users, or None.
    Ranks of several GPUs are chosen only where they save GPUs.
    """
    if not abilities_of(request.release.engine).recommended or not shares_experts(question, request):
        return None
    best: Placement | None = None
    for tp in WIDE_TP_SIZES:
        for gpus in WIDE_GPUS:
            ranks = gpus // tp
            share = replace(question, users=-(-question.users // ranks))  # of each rank of a single server
            wide = with_args(request, tensor_parallel_size=tp, data_parallel_size=ranks, enable_expert_parallel=True)
            if tp > 1 and best is not None and not may_hold(share, wide, (best.num_gpus - 1) // gpus):
                continue
            widened = placement(share, wide, (*changes, WIDE))
            if isinstance(widened, Placement):
                widened = replace(widened, replicas=widened.replicas * ranks)
                if best is None or (widened.num_gpus < best.num_gpus if tp > 1 else rank(widened) < rank(best)):
                    best = widened
    return best


def may_hold(question: Question, request: Request, replicas: int) -> bool:
    """True if this many servers hold the users at the default utilization or at the highest that starts: needs far
    fewer plans than a search, and rejects most splits.
    """
    if replicas < 1:
        return False
    share = -(-question.users // replicas)
    if holding(question, request, share) is not None:
        return True
    if "gpu_memory_utilization" in question.stated:
        return False
    top, default = top_utilization(question, request), round(100 * request.release.utilization)
    return 0 < top != default and holding(question, at_utilization(request, top), share) is not None


def largest_failures(question: Question, request: Request) -> list[PlacementFailure]:
    """Why the largest server with stages holds no user."""
    sizes = [(num_ranks(split), split) for split in staged_splits(question, request)]
    return [failure(question, max(sizes, key=lambda size: size[0])[1])] if sizes else []


def num_ranks(request: Request) -> int:
    return request.args.world_size


# --- one placement ----------------------------------------------------------------------------------------------------


def placement(question: Question, request: Request, changes: tuple[str, ...] = ()) -> Placement | PlacementFailure:
    """The fewest servers of one kind that hold the users, at the default utilization unless it does not start or a
    higher one needs fewer; or why there are none.
    """
    usual = fewest(question, request)
    raised = None
    if "gpu_memory_utilization" not in question.stated:
        default = round(100 * request.release.utilization)
        free = startable_utilization(question, request, default)
        if usual is None and 0 < free < default:
            usual = fewest(question, at_utilization(request, free))
        raised = fewest_raised(question, request, usual)
    best = raised or usual
    if best is None:
        return failure(question, request)
    replicas, the_plan = best
    price = (question.prices or {}).get(request.gpu.name)
    return Placement(the_plan, replicas, None if price is None else price * replicas * num_gpus(the_plan), changes)


def fewest(question: Question, request: Request) -> tuple[int, Plan] | None:
    """(smallest number of replicas that hold the users, the plan of each), or None if one holds none."""
    users = question.users

    def plan_of(replicas: int) -> Plan | None:
        return holding(question, request, -(-users // replicas))

    alone = holding(question, request, 1)
    if alone is None:
        return None
    # Fewer sequences leave the most memory: no replica holds more users than this one's pool.
    fails, step = -(-users // bound(request, alone, question.end)) - 1, 1
    while (holds := fails + step) < users:  # the answer is near: steps of 1, 2, 4 bracket it
        best = plan_of(holds)
        if best is not None:
            return least(fails, holds, plan_of, best)
        fails, step = holds, 2 * step
    return least(fails, users, plan_of, alone)


def least(fails: int, holds: int, plan_of: Callable[[int], Plan | None], best: Plan) -> tuple[int, Plan]:
    """Bisect for (the number nearest to `fails` that has a plan, that plan), between one without a plan and one that
    has `best`; `fails` may be on either side.
    """
    while abs(holds - fails) > 1:
        middle = (fails + holds) // 2
        better = plan_of(middle)
        if better is None:
            fails = middle
        else:
            holds, best = middle, better
    return holds, best


def fewest_raised(question: Question, request: Request, usual: tuple[int, Plan] | None) -> tuple[int, Plan] | None:
    """The same at the lowest utilization above the default that needs fewer replicas, or None if none does."""
    default = round(100 * request.release.utilization)
    top = top_utilization(question, request)
    if top <= default or (usual is not None and usual[0] == 1):
        return None
    fewest_at_top = fewest(question, at_utilization(request, top))
    if fewest_at_top is None or (usual is not None and fewest_at_top[0] >= usual[0]):
        return None
    replicas, the_plan = fewest_at_top
    share = -(-question.users // replicas)
    _, lowest = least(default, top, lambda step: holding(question, at_utilization(request, step), share), the_plan)
    return replicas, lowest


def at_utilization(request: Request, hundredths: int) -> Request:
    return with_args(request, gpu_memory_utilization=hundredths / 100)


def top_utilization(question: Question, request: Request) -> int:
    """The highest utilization of a search, in hundredths."""
    return startable_utilization(question, request, min(MOST_UTILIZATION, roomy_utilization(request)))


def startable_utilization(question: Question, request: Request, hundredths: int) -> int:
    """The highest utilization up to this one, in hundredths, that is free at the start, at the end requested."""
    if hundredths < 1:
        return hundredths
    server = planned(with_args(at_utilization(request, hundredths), max_num_seqs=FEWEST_SEQS))
    if not isinstance(server, Plan):
        return hundredths
    refusal = server_of(request.release.engine).gate(server, "low" if question.end == "low" else "likely")
    if refusal is None or not refusal.numbers:
        return hundredths
    return int(100 * refusal.numbers[0] + 1e-9)


def startable(question: Question, request: Request) -> Request:
    """The request, at the highest utilization that starts if none is fixed and the default does not start."""
    default = round(100 * request.release.utilization)
    if "gpu_memory_utilization" in question.stated:
        return request
    share = startable_utilization(question, request, default)
    return at_utilization(request, share) if 0 < share < default else request


def roomy_utilization(request: Request) -> int:
    """Utilization in hundredths that leaves enough for the CUDA context even at its largest."""
    smallest = planned(with_args(request, max_num_seqs=FEWEST_SEQS))
    if isinstance(smallest, KvplanError):
        return 0
    total = request.gpu.total_memory_low
    return 100 * (total - smallest.estimates["context"].high) // total


# --- whether a plan holds a number of users ---------------------------------------------------------------------------


def seqs_for(users: int) -> int:
    """--max-num-seqs for this many users: the next power of two, above 256 the next multiple of 128."""
    if users > 256:
        return -(-users // 128) * 128
    return max(FEWEST_SEQS, 1 << (users - 1).bit_length())


def holding(question: Question, request: Request, users: int) -> Plan | None:
    """The plan of one server that starts and serves this many users at once, at the requested end of the range.

    Sequences use memory themselves: if the rounded number of them is too large, the exact one is used.
    """
    if "max_num_seqs" in question.stated:
        counts = [request.args.max_num_seqs]
    else:
        counts = list(dict.fromkeys((seqs_for(users), users)))
    for seqs in counts:
        the_plan = planned(with_args(request, max_num_seqs=seqs))
        if isinstance(the_plan, Plan) and starts(the_plan, question.end) and serves(question, request, the_plan, users):
            return the_plan
    return None


def planned(request: Request) -> Plan | KvplanError:
    """The plan without its length distribution, which is expensive, or the error if there is none."""
    try:
        return plan(replace(request, load=replace(request.load, lengths=None)))
    except KvplanError as error:
        return error


def starts(the_plan: Plan, end: End) -> bool:
    """True if the server starts and one full-context request fits, at an end of the range."""
    return the_plan.fits and blocks_at(the_plan, end) > the_plan.capacity.blocks_per_request


def serves(question: Question, request: Request, the_plan: Plan, users: int) -> bool:
    if the_plan.settings.max_num_seqs < users or bound(request, the_plan, question.end) < users:
        return False
    own_load = replace(the_plan, request=replace(the_plan.request, load=request.load))
    return pool_holds(own_load, question.end, users, question.pools)


def failure(question: Question, request: Request) -> PlacementFailure:
    """Why one such server holds no user."""
    smallest = planned(request if "max_num_seqs" in question.stated else with_args(request, max_num_seqs=FEWEST_SEQS))
    if not isinstance(smallest, Plan):
        reason = str(smallest.in_words(option_words()))
        return PlacementFailure(request.gpu.name, num_ranks(request), reason, smallest, has_room=False)
    refusal = start_refusal(question, smallest)
    text = shortage(question, smallest) if refusal is None else refusal
    has_room, runs = refusal is not None, is_supported(smallest)
    return PlacementFailure(request.gpu.name, num_ranks(request), text, None, has_room=has_room, is_supported=runs)


def start_refusal(question: Question, the_plan: Plan) -> str | None:
    """Why a server with room for KV does not start, at the requested end of the range, or None if memory is short."""
    if the_plan.refusal is not None:
        return the_plan.refusal.text
    if not the_plan.fits or starts(the_plan, question.end):
        return None
    refusal = server_of(the_plan.request.release.engine).gate(the_plan, "low")
    if refusal is not None:
        return f"{refusal.text}, at the {question.end} end of the range"
    if left_at(question, the_plan) // the_plan.capacity.bytes_per_block <= the_plan.capacity.blocks_per_request:
        return None
    seqs = the_plan.settings.max_num_seqs
    return f"at the {question.end} end of the range the pool has no state block for each of {seqs:,} sequences"


def left_at(question: Question, the_plan: Plan) -> int:
    """Bytes for the pool at the requested end of the range."""
    return max(
        0, {"low": the_plan.available_low, "high": the_plan.available_high}.get(question.end, the_plan.available)
    )


def bound(request: Request, the_plan: Plan, end: End) -> int:
    """Upper bound on the users that the pool holds, at least one.

    With lengths, it avoids computing their distribution: if a sum exceeds the room with probability at most p, its mean
    is at most room + p x its largest value.
    """
    load = request.load
    if load.lengths is None:
        return max(1, pool_users(the_plan, end))
    shared = the_plan.pool.shared(min(load.shared_prefix, the_plan.capacity.max_model_len))
    blocks = [
        (own_blocks(the_plan.pool.allocated_blocks, tokens, shared), share) for tokens, share in load.lengths.points
    ]
    user_blocks = fsum(count * share for count, share in blocks) - load.overflow * blocks[-1][0]
    room = max(0, blocks_at(the_plan, end) - 1 - shared)
    return max(1, int(room / user_blocks * 1.000001)) if user_blocks > 0 else MOST_USERS


def shortage(question: Question, the_plan: Plan) -> str:
    """The memory that one user lacks, as text."""
    memory, of_each = the_plan.memory, " of each GPU" if num_gpus(the_plan) > 1 else ""
    budget = f"the budget of {format_gib(memory.budget)}{of_each}"
    if memory.weights > memory.budget:
        return f"the weights alone ({format_gib(memory.weights)}) exceed {budget}"
    if the_plan.available <= 0:
        return f"weights and overheads use up {budget}"
    request_bytes, tokens = (
        the_plan.bytes_per_request + the_plan.capacity.bytes_per_block,
        the_plan.capacity.max_model_len,
    )

    def lacks(end: str, left: int) -> str:
        needs, has = format_apart(request_bytes, left)
        return f"a request of {tokens:,} tokens needs {needs} of KV cache, {end}{has} is left{of_each}"

    if not the_plan.fits:
        return lacks("", the_plan.available)
    if not starts(the_plan, question.end):
        return lacks(f"and at the {question.end} end of the range ", left_at(question, the_plan))
    return f"the KV cache holds no user of this load with {the_plan.settings.max_num_seqs} sequences"


# --- what one placement needs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SettingAnswer:
    """A setting that holds the users, and its plan; if there is none, the most users that any setting holds."""

    value: float | int | str | None
    plan: Plan | None
    most_users: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What `replicas` servers on given GPUs need to hold the users; None for fixed settings.

    max_model_len the requested context
    current       with the flags unchanged
    utilization   the lowest, in steps of 0.01; `tight`: it leaves less than the CUDA context may need
    context       the longest, a multiple of the block size
    startable     utilization of `context` and `kv_dtypes` if the default does not start; None: the default does
    kv_dtypes     each with its answer
    solution      holds the users on the given GPUs at the requested context and precision, or None if nothing does
    cures         without a solution: every Pareto-optimal placement that holds the users, best first
    reason        why one server as requested holds no user, or None if it holds some
    refused       the server refuses the combination whatever the memory, for this reason
    """

    gpu: GpuSpec
    num_gpus: int
    replicas: int
    max_model_len: int
    current: SettingAnswer
    utilization: SettingAnswer | None
    tight: bool
    context: SettingAnswer
    startable: float | None
    kv_dtypes: tuple[SettingAnswer, ...]
    solution: Placement | None
    cures: tuple[Placement, ...]
    reason: str | None
    refused: bool


def fit(question: Question, request: Request, replicas: int) -> Fit:
    """Find the lowest utilization, the longest context and the KV dtypes that hold the users on given GPUs, or if these
    GPUs do not hold them as requested, the changes that would.

    The request's context is a number; its length distribution, if any, is not yet truncated to it.
    """
    share = -(-question.users // replicas)
    context = request.args.max_model_len
    assert isinstance(context, int)
    here = at_context(request, context)
    unchanged = plan(replace(here, load=replace(here.load, lengths=None)))  # raise an error for an impossible request
    utilization = None if "gpu_memory_utilization" in question.stated else lowest_utilization(question, here, share)
    dtypes: tuple[str, ...] = ("auto", "fp8") if question.fp8_kv and reads_fp8(here) else ("auto",)
    if "kv_cache_dtype" in question.stated:
        dtypes = (request.args.kv_cache_dtype,)
    formats = [startable(question, with_args(here, kv_cache_dtype=dtype)) for dtype in dtypes]
    current = answer(question, here, share, None)
    kv_dtypes = tuple(
        answer(question, candidate, share, candidate.args.kv_cache_dtype)
        for candidate in formats
        if isinstance(planned(candidate), Plan)
    )
    ways = [] if current.plan is not None else pareto_optimal(cures(question, request, unchanged, replicas))
    solution = Placement(current.plan, replicas, None) if current.plan is not None else None
    if ways and is_as_asked(ways[0], context, replicas * num_ranks(here)):
        solution, ways = ways[0], []
    return Fit(
        here.gpu,
        replicas * num_ranks(here),
        replicas,
        context,
        current,
        utilization,
        utilization is not None and is_tight(here, utilization),
        longest_context(question, startable(question, request), share),
        startable(question, here).args.gpu_memory_utilization if utilization is not None else None,
        kv_dtypes,
        solution,
        tuple(ways),
        None if current.most_users else failure(question, here).reason,
        not is_supported(unchanged),
    )


def is_tight(request: Request, utilization: SettingAnswer) -> bool:
    """True if the utilization leaves less than the CUDA context may need."""
    return bool(utilization.value) and round(100 * float(utilization.value or 0)) > roomy_utilization(request)


def answer(question: Question, request: Request, users: int, value: float | int | str | None) -> SettingAnswer:
    server = holding(question, request, users)
    return SettingAnswer(value, server and with_load(server, request.load), most_users(question, request))


# --- fixes ------------------------------------------------------------------------------------------------------------


def cures(question: Question, request: Request, unchanged: Plan, replicas: int) -> Iterator[Placement]:
    """Yield ways to hold users that the given GPUs do not hold as requested: for every allowed precision, the same GPUs
    at the requested or the longest possible context, and more of the same GPUs. Each is a computed plan; if the server
    refuses what is asked whatever the memory, with what it takes instead.
    """
    share = -(-question.users // replicas)
    context = request.args.max_model_len
    assert isinstance(context, int)
    instead = supported_changes(unchanged)
    for change in instead:
        request = change.applied(request)
    flags = tuple(change.flag_of(request.release.engine) for change in instead)
    for more, changed in precisions(question, request):
        changes = (*flags, *more)
        server = at_any_utilization(question, at_context(changed, context), share)
        if server is None:
            server = longest_context(question, startable(question, changed), share).plan
        if server is not None:
            yield Placement(server, replicas, None, changes)
        if "max_num_batched_tokens" not in question.stated:
            yield from on_smaller_steps(question, at_context(changed, context), replicas, changes)
    for way in recommend(replace(question, prices=None), [at_context(request, context)]).placements:
        yield replace(way, changes=(*flags, *way.changes))


def on_smaller_steps(
    question: Question, request: Request, replicas: int, changes: tuple[str, ...]
) -> Iterator[Placement]:
    """Yield the given GPUs with the largest steps, below the default, that hold the users."""
    for smaller in smaller_steps(request):
        server = at_any_utilization(question, smaller, -(-question.users // replicas))
        if server is not None:
            yield Placement(server, replicas, None, (*changes, SMALL_STEPS))
            return


def at_any_utilization(question: Question, request: Request, users: int) -> Plan | None:
    """One server that holds this many: at the default utilization, else at the lowest that leaves enough for the CUDA
    context.
    """
    server = holding(question, request, users)
    if server is None and "gpu_memory_utilization" not in question.stated:
        raised = lowest_utilization(question, request, users)
        return None if is_tight(request, raised) else raised.plan
    return server and with_load(server, request.load)


def is_as_asked(placement: Placement, context: int, num_gpus: int) -> bool:
    """True if it needs no less precision, no shorter context and no more GPUs than requested."""
    return is_unchanged(placement) and placement.context == context and placement.num_gpus <= num_gpus


def dominates(placement: Placement, other: Placement) -> bool:
    """True if its context is no shorter, its GPUs no more, it has no other change, and one of these is better."""
    merits = placement.context, -placement.num_gpus
    others = other.context, -other.num_gpus
    changes = set(placement.changes)
    if merits[0] < others[0] or merits[1] < others[1] or not changes <= set(other.changes):
        return False
    return merits != others or changes < set(other.changes)


def pareto_optimal(placements: Iterable[Placement]) -> list[Placement]:
    """Pareto-optimal placements, the first of equals: the longest context first, no pipeline stages, then the fewest
    GPUs.
    """
    ways = list(placements)
    optimal: list[Placement] = []
    for placement in ways:
        is_dominated = any(dominates(other, placement) for other in ways)
        merits = placement.context, placement.num_gpus, set(placement.changes)
        is_known = any((other.context, other.num_gpus, set(other.changes)) == merits for other in optimal)
        if not is_dominated and not is_known:
            optimal.append(placement)
    return sorted(optimal, key=lambda way: (-way.context, STAGES in way.changes, way.num_gpus, len(way.changes)))


def most_users(question: Question, request: Request) -> int:
    """The most users that one server holds, with as many sequences as they need."""
    alone = holding(question, request, 1)
    if alone is None:
        return 0
    too_many = bound(request, alone, question.end) + 1
    return least(too_many, 1, lambda users: holding(question, request, users), alone)[0]


def lowest_utilization(question: Question, request: Request, users: int) -> SettingAnswer:
    top = startable_utilization(question, request, FULL)
    highest = at_utilization(request, top)
    highest_plan = holding(question, highest, users)
    if highest_plan is None:
        return SettingAnswer(None, None, most_users(question, highest))
    step, lowest = least(0, top, lambda step: holding(question, at_utilization(request, step), users), highest_plan)
    return SettingAnswer(
        step / 100, with_load(lowest, request.load), most_users(question, at_utilization(request, step))
    )


def longest_context(question: Question, request: Request, users: int) -> SettingAnswer:
    """The longest context that holds the users, in whole blocks."""
    start = plan(replace(request, load=Load()))
    block, load = start.pool.block_size, request.load
    shortest = -(-max(load.mean_tokens or 1, load.shared_prefix + 1) // block)
    longest = request.spec.context_limit // block

    def plan_of(blocks: int) -> Plan | None:
        return holding(question, at_context(request, blocks * block), users)

    most_blocks = plan_of(shortest) if shortest <= longest else None
    if most_blocks is None:
        return SettingAnswer(None, None, most_users(question, at_context(request, shortest * block)))
    blocks, best = least(longest + 1, shortest, plan_of, most_blocks)
    there = at_context(request, blocks * block)
    return SettingAnswer(blocks * block, with_load(best, there.load), most_users(question, there))


def at_context(request: Request, context: int) -> Request:
    """The request at a context; longer lengths are truncated to it."""
    lengths = request.load.lengths
    if lengths is not None and lengths.longest > context:
        request = replace(request, load=replace(request.load, lengths=cut(lengths, context)))
    return with_args(request, max_model_len=context)


def cut(lengths: Lengths, limit: int) -> Lengths:
    within = [(tokens, share) for tokens, share in lengths.points if tokens < limit]
    beyond = fsum(share for tokens, share in lengths.points if tokens >= limit)
    return replace(lengths, points=(*within, (limit, beyond)))
