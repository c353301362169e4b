"""How many users a plan holds by the measure that was asked for, at its likely figure and at both ends of its range."""

from bisect import bisect
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan import users
from kvplan.plan import Plan
from kvplan.rules.vllm_pool import Pool

if TYPE_CHECKING:
    from kvplan.workload import Lengths

End = Literal["low", "likely", "high"]


def blocks_at(plan: Plan, end: End) -> int:
    """Blocks of the pool: its likely number, or that when what is estimated is at its worst or best."""
    per_request = plan.capacity.blocks_per_request
    match end:
        case "low":
            return round(plan.concurrency.low * per_request)
        case "likely":
            return plan.capacity.num_blocks
        case "high":
            return round(plan.concurrency.high * per_request)
        case _:
            assert_never(end)


def pool_users(plan: Plan, end: End) -> int:
    """Users that the pool of one replica holds: by lengths, else at the mean length, else at the full context."""
    answer, load = plan.concurrency, plan.request.load
    if not plan.fits:
        return 0
    if load.lengths is None and load.mean_tokens is None:
        return int({"low": answer.low, "likely": answer.max, "high": answer.high}[end])
    if load.lengths is not None and end == "likely" and answer.length_users is not None:
        return answer.length_users.users
    usable = blocks_at(plan, end) - 1  # all but the null block
    shared = plan.pool.shared(min(load.shared_prefix, plan.capacity.max_model_len))
    if load.lengths is not None:
        return _by_lengths(plan.pool, usable, load.lengths, load.overflow, shared)
    assert load.mean_tokens is not None
    return users.users_at(plan.pool.held, usable, load.mean_tokens, shared)


@lru_cache(maxsize=4096)
def _by_lengths(pool: Pool, usable: int, lengths: "Lengths", overflow: float, shared: int) -> int:
    return users.users_for_lengths(pool.held, usable, lengths, overflow, shared).users


def pool_holds(plan: Plan, end: End, count: int) -> bool:
    """Whether pool_users is at least `count`.

    With lengths what is known of other pools answers first: a larger pool never holds fewer users.
    """
    load = plan.request.load
    if load.lengths is None or not plan.fits:
        return pool_users(plan, end) >= count
    usable = blocks_at(plan, end) - 1
    shared = plan.pool.shared(min(load.shared_prefix, plan.capacity.max_model_len))
    known = _known(_block_counts(plan.pool, load.lengths), load.lengths, load.overflow, shared)
    at = bisect(known, (usable, 0))
    if at and known[at - 1][1] >= count:
        return True
    if at < len(known) and known[at][1] < count:
        return False
    found = _by_lengths(plan.pool, usable, load.lengths, load.overflow, shared)
    known.insert(at, (usable, found))
    return found >= count


@lru_cache(maxsize=256)
def _block_counts(pool: Pool, lengths: "Lengths") -> tuple[int, ...]:
    return tuple(pool.held(tokens) for tokens, _ in lengths.points)


@lru_cache(maxsize=64)
def _known(counts: tuple[int, ...], lengths: "Lengths", overflow: float, shared: int) -> list[tuple[int, int]]:
    """(blocks, users) found so far for requests that hold such counts of blocks, ascending."""
    return []


def running_users(plan: Plan, end: End) -> int:
    """Users of one replica that are served at once: what the pool holds, and the scheduler runs."""
    return min(pool_users(plan, end), plan.settings.max_num_seqs)


def num_gpus(plan: Plan) -> int:
    args = plan.request.args
    return args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
