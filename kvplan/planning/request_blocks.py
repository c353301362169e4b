"""What one request takes of a pool besides its tokens: what the server's log line of "tokens" does not tell."""

from fractions import Fraction

from kvplan.core.records import dataclass
from kvplan.planning.users import usable_blocks, users_at
from kvplan.servers.plans import Load, Plan


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks and state slots of one request, for a pool whose tokens do not tell them.

    fixed           blocks taken by any request before its first token: states, rings, an encoder's tokens
    windows         most blocks that its windows and chunks take before its first token
    decoding        most blocks of both kinds that it keeps while it decodes
    growth          blocks per token of everything that grows with its length
    slots           slots for states that it takes, in a server that has them beside the blocks; else 0
    most_requests   requests that the pool holds at once however short they are, whatever --max-num-seqs
    """

    fixed: int
    windows: int
    decoding: int
    growth: Fraction
    slots: int
    most_requests: int


def request_blocks(plan: Plan) -> RequestBlocks | None:
    """Blocks of one request, or None if all of them grow with its tokens or the server does not start."""
    pool, capacity, settings = plan.pool, plan.capacity, plan.settings
    fixed, windows, decoding = pool.constant_blocks(capacity.max_model_len, settings)
    if not plan.fits or not (fixed or windows or capacity.slots):
        return None
    usable = usable_blocks(pool, settings, capacity, Load(mean_tokens=1), capacity.num_blocks)
    limit = users_at(pool.allocated_blocks, usable, 1)
    if capacity.slots:
        limit = min(limit, capacity.slots // capacity.slots_per_request)
    growth = pool.growth(capacity.max_model_len)
    return RequestBlocks(fixed, windows, decoding, growth, capacity.slots_per_request, limit)
