"""How many users a plan holds by the measure that was asked for, at its likely figure and at both ends of its range."""

from bisect import bisect
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan.planning import users
from kvplan.servers.plans import Load, Plan
from kvplan.servers.vllm.pool import Pool

if TYPE_CHECKING:
    from kvplan.workloads.lengths import Lengths

End = Literal["low", "likely", "high"]


def blocks_at(plan: Plan, end: End) -> int:
    """Blocks of the pool: its likely number, or that when what is estimated is at its worst or best."""
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
    """Users that the pool of one replica holds decoding, by the load's measure."""
    answer, load = plan.concurrency, plan.request.load
    if load.lengths is not None:  # a search plans without them: the plan's own count may be of another load
        return _counted(plan, load, blocks_at(plan, end))
    users = {"low": answer.pool_low, "likely": answer.pool.users, "high": answer.pool_high}[end]
    assert users is not None
    return users


def users_at(plan: Plan, tokens: int, shared_prefix: int = 0, end: End = "likely") -> int:
    """Users that the pool of one replica holds when each is of `tokens`, at most the context, after a common prefix."""
    length = min(tokens, plan.capacity.max_model_len)
    load = Load(mean_tokens=length, shared_prefix=min(shared_prefix, length))
    return _counted(plan, load, blocks_at(plan, end))


def _counted(plan: Plan, load: Load, num_blocks: int) -> int:
    if not plan.fits:
        return 0
    return users.users_held(plan.pool, plan.settings, plan.capacity, load, num_blocks).users


class KnownPools:
    """Users that pools were counted to hold, for each count of blocks that requests take.

    A larger pool never holds fewer users: a search asks about many pools and counts few.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[tuple[int, int]]] = {}

    def of(self, counts: tuple[int, ...], lengths: "Lengths", overflow: float, shared: int) -> list[tuple[int, int]]:
        """(blocks, users), ascending; what is counted is added to it."""
        return self._known.setdefault((counts, lengths, overflow, shared), [])


def pool_holds(plan: Plan, end: End, count: int, pools: KnownPools) -> bool:
    """Whether pool_users is at least `count`; with lengths the pools known answer first."""
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
    """Blocks that one more user takes, decoding: with lengths one of the longest."""
    load, context = plan.request.load, plan.capacity.max_model_len
    shared = plan.pool.shared(min(load.shared_prefix, context))
    return users.own_blocks(plan.pool.allocated_blocks, load.longest(context), shared)


APART = 1.5  # users and the server's own figure differ by more than this: the answer says why


def log_differs(plan: Plan) -> str | None:
    """Why the users are more than APART times the server's figure, or less than it by as much; None where they are not.

    The figure has every request at the full context, at the worst moment of its prefill.
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
        yield "stores no prefix once"
    kinds = {
        group.first.kind
        for group in plan.pool.groups
        if group.charged(context, plan.settings, plan.pool.dcp) > group.allocated_blocks(context, plan.pool.dcp)
    }
    if kinds & {"sliding", "chunked"}:
        tokens = plan.settings.in_flight_tokens
        yield f"charges every window for {tokens:,} tokens in flight, which only a prompt being computed needs"
    if "state" in kinds:
        yield "charges every request state blocks that it has only while its prompt is computed"
    if answer.pool.users > answer.max_num_seqs:
        yield f"does not know that at most {answer.max_num_seqs:,} sequences run at once"
    if int(answer.max) > answer.users == 1:
        yield "counts the null block, which no request can have"


def running_users(plan: Plan, end: End) -> int:
    """Users of one replica that are served at once: what the pool holds, and the scheduler runs."""
    return min(pool_users(plan, end), seqs_at(plan, end))


def seqs_at(plan: Plan, end: End) -> int:
    """Sequences that the scheduler runs at most."""
    answer = plan.concurrency
    return {"low": answer.seqs_low, "likely": answer.max_num_seqs, "high": answer.seqs_high}[end]


def num_gpus(plan: Plan) -> int:
    return plan.request.args.num_gpus
