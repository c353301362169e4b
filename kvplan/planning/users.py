"""How many requests a pool holds at once: block arithmetic, independent of the server.

`held(tokens)` is the blocks that a request of `tokens` holds, monotone; `usable` is the pool's blocks available to
requests (all but the null block). A prefix shared by all requests is stored once: `shared_blocks` of each request.

`users_held` is the number that every command reports: users that decode, with one chunk of prefill in flight. At the
end: the same of a plan, at both ends of its range, and what a request takes of the pool besides its tokens.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, assert_never

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.servers.plans.plan import Load, Plan, UserAnswer
from kvplan.servers.plans.pool import Pool

if TYPE_CHECKING:
    from kvplan.servers.plans.pool import Capacity
    from kvplan.servers.words.arguments import Settings
    from kvplan.workloads.lengths import Lengths

Held = Callable[[int], int]

BITS = 64  # probabilities are integers of 2^-64
ONE = 1 << BITS
SLOT = 18  # bytes per coefficient of a product: 2 x 64 bits, and 16 bits for sums of up to 65,536 terms
EXACT_CELLS = 3072  # a pool of at most this many cells is convolved without rounding block counts: 0.2 s
COARSE_CELLS = 2048
NEGLIGIBLE = ONE >> 45  # tail mass that is moved inward (3e-14)


def users_held(pool: Pool, settings: "Settings", capacity: "Capacity", load: Load, num_blocks: int) -> UserAnswer:
    """Users that a pool of `num_blocks` blocks holds decoding, each at its stated length, while one of them prefills.

    The scheduler admits and runs this many without preemption as long as one prompt is prefilled at a time
    (tests/planning/test_users_exact.py runs it). The server's limit on sequences is not applied here.
    """
    return counter(pool, settings, capacity, load)(num_blocks)


def counter(pool: Pool, settings: "Settings", capacity: "Capacity", load: Load) -> Callable[[int], UserAnswer]:
    """`users_held` of any number of blocks."""
    context = capacity.max_model_len
    shared, longest = pool.shared(min(load.shared_prefix, context)), load.longest(context)
    kept_back, each = 1 + pool.in_flight(longest, context, settings), own_blocks(pool.allocated_blocks, longest, shared)

    def users(num_blocks: int) -> UserAnswer:
        holds_one = num_blocks > capacity.blocks_per_request
        if not holds_one and num_blocks < capacity.num_blocks:  # a smaller pool than planned: the server does not start
            return UserAnswer(0, 0.0, "not even one request of the full context fits")
        usable = num_blocks - kept_back
        if load.lengths is not None:
            answer = users_for_lengths(pool.allocated_blocks, usable, load.lengths, load.overflow, shared)
        else:
            answer = UserAnswer(max(0, usable - shared) // each, 0.0, "all users hold the same number of blocks")
        # One request of the full context is admitted on its own, whatever its prefill takes.
        return replace(answer, users=1) if holds_one and not answer.users else answer

    return users


def usable_blocks(pool: Pool, settings: "Settings", capacity: "Capacity", load: Load, num_blocks: int) -> int:
    """Blocks for decoding users: all but the null block and those of a prefill in flight."""
    context = capacity.max_model_len
    return num_blocks - 1 - pool.in_flight(load.longest(context), context, settings)


def own_blocks(blocks_of: Held, tokens: int, shared_blocks: int) -> int:
    """Blocks of one request that are not shared; at least one, for the token it is about to write."""
    return max(1, blocks_of(tokens) - shared_blocks)


def most_users(blocks_of: Held, usable: int, tokens: int, shared_blocks: int = 0) -> int:
    """Users if each holds `tokens`: the largest n with shared_blocks + n x own blocks <= usable."""
    return max(0, usable - shared_blocks) // own_blocks(blocks_of, tokens, shared_blocks)


def users_for_lengths(
    blocks_of: Held, usable: int, lengths: "Lengths", overflow: float, shared_blocks: int = 0
) -> UserAnswer:
    """The largest n such that n independent users need more than the pool with probability at most `overflow`.

    A length is what a request holds at a random moment: use total lengths for requests at their end (never too
    many users) and `workload.in_flight` of prompt and output for requests in the middle of decoding.
    """
    if not 0 <= overflow < 1:
        raise UsageError(f"--overflow {overflow}", "must be at least 0 and below 1", "write 1% or 0.01")
    room = max(0, usable - shared_blocks)
    blocks = block_counts(blocks_of, lengths, shared_blocks)
    if len(blocks) == 1:
        return UserAnswer(room // blocks[0][0], 0.0, "all users hold the same number of blocks")
    if overflow == 0:
        return UserAnswer(room // blocks[-1][0], 0.0, "every user at the longest length")
    cell = math.gcd(*(count for count, _ in blocks))
    exact = room // cell <= EXACT_CELLS
    first = Sums.of(blocks, cell, room, exact=exact)
    users, fit = _search(first, overflow, room // blocks[0][0])
    method = "exact convolution of the users' block counts"
    if not exact:
        method = (
            f"convolution of the users' block counts on a grid of up to {fit.cell} blocks: counts between "
            "two grid points are spread over both with the mean kept, and one grid step of the pool is left unused"
        )
    return UserAnswer(users, fit.overflow / ONE if users else 0.0, method, is_lower_bound=not exact)


def block_counts(blocks_of: Held, lengths: "Lengths", shared_blocks: int) -> list[tuple[int, int]]:
    """(blocks, probability in units of 2^-64), ascending, summing to exactly one."""
    masses: dict[int, int] = {}
    for tokens, probability in lengths.points:
        if mass := int(probability * ONE):
            blocks = own_blocks(blocks_of, tokens, shared_blocks)
            masses[blocks] = masses.get(blocks, 0) + mass
    counts = sorted(masses.items())
    likeliest = max(range(len(counts)), key=lambda i: counts[i][1])
    blocks, mass = counts[likeliest]
    counts[likeliest] = blocks, mass + ONE - sum(masses.values())
    return counts


@dataclass(frozen=True, slots=True)
class Sums:
    """The distribution of the total blocks of some users.

    masses    of (start + i) x cell blocks, in units of 2^-64
    overflow  mass that does not fit in `room` blocks; with `masses` it sums to one
    exact     block counts are never rounded
    """

    start: int
    cell: int
    masses: tuple[int, ...]
    overflow: int
    room: int
    exact: bool

    @classmethod
    def of(cls, blocks: list[tuple[int, int]], cell: int, room: int, *, exact: bool) -> "Sums":
        """One user, truncated at the pool's end; unless exact, counts between grid points go to both neighbors."""
        fitting = [(count, mass) for count, mass in blocks if count <= room]
        overflow = ONE - sum(mass for _, mass in fitting)
        start, span = blocks[0][0], (fitting or blocks)[-1][0] - blocks[0][0]
        while not exact and span > cell * (COARSE_CELLS - 2):
            cell *= 2
        start //= cell
        masses = [0] * (span // cell + 3)
        for count, mass in fitting:
            low, rest = divmod(count, cell)
            up = mass * rest // cell
            masses[low - start] += mass - up
            masses[low - start + 1] += up
        return cls(start, cell, tuple(masses), overflow, room, exact).trimmed()

    def trimmed(self) -> "Sums":
        """Truncate at the pool's end; unless exact, drop negligible tails and use at most COARSE_CELLS grid points."""
        sums = self
        while not sums.exact and len(sums.masses) > COARSE_CELLS:
            sums = sums.coarser()
        # A rounded sum must stay one step away from the end, because rounding may have moved it down.
        room = sums.room // sums.cell - (0 if sums.exact else 1)
        keep = max(0, room - sums.start + 1)
        masses, overflow = list(sums.masses[:keep]), sums.overflow + sum(sums.masses[keep:])
        start = sums.start
        if not sums.exact:
            tail = 0
            while masses and tail + masses[-1] < NEGLIGIBLE:
                tail += masses.pop()
            head = count = 0
            while count < len(masses) - 1 and head + masses[count] < NEGLIGIBLE:
                head += masses[count]
                count += 1
            if count:
                masses = masses[count:]
                masses[0] += head
                start += count
            overflow += tail
        return Sums(start, sums.cell, tuple(masses), overflow, sums.room, sums.exact)

    def coarser(self) -> "Sums":
        """Double the grid's step: odd points go half down, half up, which keeps the mean and widens the rest."""
        start = self.start // 2
        masses = [0] * ((self.start + len(self.masses)) // 2 - start + 1)
        for i, mass in enumerate(self.masses, self.start):
            if i % 2:
                masses[i // 2 - start] += mass // 2
                masses[i // 2 + 1 - start] += mass - mass // 2
            else:
                masses[i // 2 - start] += mass
        return Sums(start, 2 * self.cell, tuple(masses), self.overflow, self.room, self.exact)

    def __add__(self, other: "Sums") -> "Sums":
        """Distribution of both groups of users together."""
        left, right = self, other
        while left.cell < right.cell:
            left = left.coarser()
        while right.cell < left.cell:
            right = right.coarser()
        masses = convolved(left.masses, right.masses)
        fits = sum(masses)
        # Mass not among the sums overflowed on one side or was rounded off: it counts as overflow.
        return Sums(left.start + right.start, left.cell, masses, ONE - fits, self.room, self.exact).trimmed()


def convolved(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Convolve masses, rounded down: one product of integers whose digits are the masses (Kronecker)."""
    if not left or not right:
        return ()
    packed = _packed(left) if left is right else None
    product = packed * packed if packed is not None else _packed(left) * _packed(right)
    count = len(left) + len(right) - 1
    raw = product.to_bytes(count * SLOT + SLOT, "little")
    unpack = int.from_bytes
    return tuple([unpack(raw[i : i + SLOT], "little") >> BITS for i in range(0, count * SLOT, SLOT)])


def _packed(masses: tuple[int, ...]) -> int:
    return int.from_bytes(b"".join([mass.to_bytes(SLOT, "little") for mass in masses]), "little")


def _search(first: Sums, overflow: float, most: int) -> tuple[int, Sums]:
    """Return the largest number of users, at most `most`, whose overflow is within the bound, and their distribution.

    More users never overflow less, so: double while it fits, then add the smaller powers from the largest down.
    """
    bound = int(overflow * ONE)
    if first.overflow > bound or most < 1:
        return 0, first
    powers = [first]
    while 2 ** len(powers) <= most:
        doubled = powers[-1] + powers[-1]
        if doubled.overflow > bound:
            break
        powers.append(doubled)
    users, best = 2 ** (len(powers) - 1), powers[-1]
    for i in range(len(powers) - 2, -1, -1):
        if users + 2**i > most:
            continue
        more = best + powers[i]
        if more.overflow <= bound:
            users, best = users + 2**i, more
    return users, best


# --- of a plan, at both ends of its range -----------------------------------------------------------------------------

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
    return users_held(plan.pool, plan.settings, plan.capacity, load, num_blocks).users


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
    usable = usable_blocks(plan.pool, plan.settings, plan.capacity, load, blocks_at(plan, end))
    shared = plan.pool.shared(min(load.shared_prefix, plan.capacity.max_model_len))
    known = pools.of(_block_counts(plan.pool, load.lengths), load.lengths, load.overflow, shared)
    index = bisect(known, (usable, 0))
    if index and known[index - 1][1] >= count:
        return True
    if index < len(known) and known[index][1] < count:
        return False
    highest = pool_users(plan, end)
    known.insert(index, (usable, highest))
    return highest >= count


@lru_cache(maxsize=256)
def _block_counts(pool: Pool, lengths: "Lengths") -> tuple[int, ...]:
    return tuple(pool.allocated_blocks(tokens) for tokens, _ in lengths.points)


def blocks_per_user(plan: Plan) -> int:
    """Blocks per additional user while decoding; with lengths, for the longest one."""
    load, context = plan.request.load, plan.capacity.max_model_len
    shared = plan.pool.shared(min(load.shared_prefix, context))
    return own_blocks(plan.pool.allocated_blocks, load.longest(context), shared)


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
    limit = most_users(pool.allocated_blocks, usable, 1)
    if capacity.slots:
        limit = min(limit, capacity.slots // capacity.slots_per_request)
    growth = pool.growth(capacity.max_model_len)
    return RequestBlocks(fixed, windows, decoding, growth, capacity.slots_per_request, limit)
