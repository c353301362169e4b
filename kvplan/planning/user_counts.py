"""How many users a plan holds by the requested measure, at its likely figure and at both ends of its range."""

from bisect import bisect
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan.planning import users
from kvplan.servers.plans import Load, Plan
from kvplan.servers.pool import Pool

if TYPE_CHECKING:
    from kvplan.workloads.lengths import Lengths

End = Literal["low", "likely", "high"]


def blocks_at(plan: Plan, end: End) -> int:
    """Blocks of the pool: likely, or with all estimates at their worst or best."""
    match end:
        case "low":
            return plan.blocks_low
        case "likely":
            return plan.capacity.num_blocks
        case "high":
            return plan.blocks_high
        case _:
            assert_never(end)


def pool_users(plan: Plan, end: End) -> int:
    """Users that one replica's pool holds while decoding, by the load's measure."""
    answer, load = plan.concurrency, plan.request.load
    if load.lengths is not None:  # a search plans without lengths: the plan's own count may be of another load
        return _counted(plan, load, blocks_at(plan, end))
    users = {"low": answer.pool_low, "likely": answer.pool.users, "high": answer.pool_high}[end]
    assert users is not None
    return users


def users_at(plan: Plan, tokens: int, shared_prefix: int = 0, end: End = "likely") -> int:
    """Users that one replica's pool holds if each has `tokens`, at most the context, after a common prefix."""
    length = min(tokens, plan.capacity.max_model_len)
    load = Load(mean_tokens=length, shared_prefix=min(shared_prefix, length))
    return _counted(plan, load, blocks_at(plan, end))


def _counted(plan: Plan, load: Load, num_blocks: int) -> int:
    if not plan.fits:
        return 0
    return users.users_held(plan.pool, plan.settings, plan.capacity, load, num_blocks).users


class KnownPools:
    """User counts already computed for pools, by the block counts of requests.

    A larger pool never holds fewer users, so a search over many pools counts only a few.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[tuple[int, int]]] = {}

    def of(self, counts: tuple[int, ...], lengths: "Lengths", overflow: float, shared: int) -> list[tuple[int, int]]:
        """(blocks, users), ascending; callers add their counts to it."""
        return self._known.setdefault((counts, lengths, overflow, shared), [])


def pool_holds(plan: Plan, end: End, count: int, pools: KnownPools) -> bool:
    """True if pool_users is at least `count`; with lengths, known pools are checked first."""
    load = plan.request.load
    if load.lengths is None or not plan.fits:
        return pool_users(plan, end) >= count
    usable = users.usable_blocks(plan.pool, plan.settings, plan.capacity, load, blocks_at(plan, end))
    shared = plan.pool.shared(min(load.shared_prefix, plan.capacity.max_model_len))
    known = pools.of(_block_counts(plan.pool, load.lengths), load.lengths, load.overflow, shared)
    index = bisect(known, (usable, 0))
    if index and known[index - 1][1] >= count:
        return True
    if index < len(known) and known[index][1] < count:
        return False
    most = pool_users(plan, end)
    known.insert(index, (usable, most))
    return most >= count


@lru_cache(maxsize=256)
def _block_counts(pool: Pool, lengths: "Lengths") -> tuple[int, ...]:
    return tuple(pool.allocated_blocks(tokens) for tokens, _ in lengths.points)


def blocks_per_user(plan: Plan) -> int:
    """Blocks per additional user while decoding; with lengths, for the longest one."""
    load, context = plan.request.load, plan.capacity.max_model_len
    shared = plan.pool.shared(min(load.shared_prefix, context))
    return users.own_blocks(plan.pool.allocated_blocks, load.longest(context), shared)


APART = 1.1  # if users and the server's own figure differ by more than this factor, the answer explains it


def log_differs(plan: Plan) -> str | None:
    """Why users and the server's own figure differ by more than a factor of APART, or None if they do not.

    The server's figure has every request at the full context, at the peak of its prefill.
    """
    answer = plan.concurrency
    if not plan.fits or (answer.max <= APART * answer.users and answer.users <= APART * max(1.0, answer.max)):
        return None
    reasons = list(_differences(plan))
    return f"it differs from the users because it {'; it '.join(reasons)}" if reasons else None


def _differences(plan: Plan) -> Iterator[str]:
    answer, load, context = plan.concurrency, plan.request.load, plan.capacity.max_model_len
    if load.longest(context) < context or load.lengths is not None:
        yield f"counts every request at {context:,} tokens"
    elif load.shared_prefix:
        yield "counts the shared prefix for every request"
    kinds = {
        group.first.kind
        for group in plan.pool.groups
        if group.charged(context, plan.settings, plan.pool.dcp) > group.allocated_blocks(context, plan.pool.dcp)
    }
    if kinds & {"sliding", "chunked"}:
        tokens = plan.settings.in_flight_tokens
        yield f"charges every window for {tokens:,} tokens in flight, which only a prefill needs"
    if "state" in kinds:
        yield "charges every request state blocks that it needs only during prefill"
    if answer.pool.users > answer.max_num_seqs:
        yield f"ignores that at most {answer.max_num_seqs:,} sequences run at once"
    if int(answer.max) > answer.users == 1:
        yield "counts the null block, which no request can use"


def running_users(plan: Plan, end: End) -> int:
    """Users of one replica served at once: those that fit in the pool and that the scheduler runs."""
    return min(pool_users(plan, end), seqs_at(plan, end))


def seqs_at(plan: Plan, end: End) -> int:
    """The most sequences that the scheduler runs."""
    answer = plan.concurrency
    return {"low": answer.seqs_low, "likely": answer.max_num_seqs, "high": answer.seqs_high}[end]


def num_gpus(plan: Plan) -> int:
    return plan.request.args.num_gpus
