"""Operating limits of a target: how full its pool, its sequences and its queue may be before requests suffer.

A pool is sized in blocks, and a request's blocks vary. With n independent requests that hold b blocks on average and b2
in the mean square, blocks in use are a compound Poisson sum: mean n b, variance n b2. The limit is the usage from which
MARGIN standard deviations lead to a full pool, where the server begins to preempt; sequences likewise, one each. Where
a target does not state how its requests vary, it is the usage that leaves room for one more of the full context.
Compared with simulated days in benchmarks/alerts.py.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from typing import TYPE_CHECKING, Final

from kvplan.models.catalog import model_id
from kvplan.planning import users
from kvplan.planning.plan import Plan
from kvplan.policy.file import exists
from kvplan.policy.gauges import DRAWN, Case, located, prefix_tokens, read_trace, request_tokens, states_a_length
from kvplan.servers.base import server_of, terms_of
from kvplan.servers.logs.metrics import Metrics
from kvplan.workloads.trace import TraceRequest

if TYPE_CHECKING:
    from kvplan.simulate.preempted import Kept

MARGIN: Final = 3.0  # standard deviations: a normal sum exceeds them once in 740 looks
PARTS: Final = 4  # moments of a request's output at which its blocks are counted
SERVED: Final = re.compile(r"""--served[-_]model[-_]name[ =]["']?([^\s"']+)""")
PREEMPTED: Final = 0.01  # share of requests, where a policy states no max_preemption_rate


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one replica (or data-parallel rank) of a target.

    model        the name under which it is served, as its metrics label it
    metrics      the server's names for its metrics
    blocks       of its pool: low, likely, high; tokens likewise
    sequences    that it runs at once, at most
    usage        share of the pool from which it may fill up; None: sequences run out first, or one request fills it
    running      running requests at that share, or from which sequences run out
    sequences_first  sequences run out before the pool does
    preempted    share of requests that may be preempted; is_stated: by the policy
    requests     which requests were counted, in words
    targets      the workload's latency targets, and the largest load that keeps them, or why it is not known
    """

    target: str
    title: str
    server: str
    model: str
    metrics: Metrics
    blocks: tuple[int, int, int]
    tokens: tuple[int, int, int]
    sequences: int
    usage: float | None
    running: int
    sequences_first: bool
    preempted: float
    is_stated: bool
    requests: str
    targets: "tuple[str, Kept | str] | None" = None

    @property
    def in_flight(self) -> int:
        """Requests in flight on one replica that neither its memory nor its latency targets forbid."""
        if self.targets is None or isinstance(self.targets[1], str):
            return self.running
        return max(1, min(self.running, int(self.targets[1].in_flight)))


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks of one running request at a random moment: mean, mean square (None: not stated), and whose, in words."""

    mean: float
    square: float | None
    requests: str


def level(share: float) -> float:
    """The mean u that leaves MARGIN deviations to 1: u + MARGIN sqrt(u share) = 1; share: of one typical unit."""
    margin = MARGIN * sqrt(share)
    return ((sqrt(margin * margin + 4) - margin) / 2) ** 2


def limits_of(case: Case, largest: "Kept | str | None" = None) -> Limits | str:
    """The limits of a target, or why it has none; largest: the largest load that keeps its latency targets."""
    plan, engine = case.plan, case.plan.request.release.engine
    metrics = server_of(engine).outputs().metrics
    if metrics is None:
        return f"kvplan does not read the metrics of {terms_of(engine).title}"
    if not plan.fits:
        return "it does not fit"
    blocks_of_one = held_blocks(case)
    if isinstance(blocks_of_one, str):
        return blocks_of_one
    shared, whole = shared_blocks(case), own_blocks(case, plan.capacity.max_model_len)
    usable = plan.capacity.num_blocks - 1
    room, sequences = usable - shared, plan.settings.max_num_seqs
    square = blocks_of_one.square
    share = 1 - whole / room if square is None else level(square / blocks_of_one.mean / room)
    sequences_first = fills(blocks_of_one, sequences) < room
    has_level = not sequences_first and (square is not None or room >= 2 * whole)
    seats = sequences * level(1 / sequences)
    rates = [rule.limit for rule in case.target.rules if rule.name == "max_preemption_rate"]
    low, high = users.blocks_at(plan, "low"), users.blocks_at(plan, "high")
    return Limits(
        target=case.target.id,
        title=f"{plan.request.spec.name} on {plan.request.gpu.name}",
        server=plan.request.release.label,
        model=served_name(case),
        metrics=metrics,
        blocks=(low, plan.capacity.num_blocks, high),
        tokens=(tokens_in(plan, low), plan.capacity.tokens, tokens_in(plan, high)),
        sequences=sequences,
        usage=(shared + room * share) / usable if has_level else None,
        running=max(1, int(min(room * share / blocks_of_one.mean, seats))),
        sequences_first=sequences_first,
        preempted=float(rates[0]) if rates else PREEMPTED,
        is_stated=bool(rates),
        requests=blocks_of_one.requests,
        targets=None if largest is None or case.target.workload is None else (case.target.workload.slo or "", largest),
    )


def served_name(case: Case) -> str:
    """The model's name for clients: the target's, the command's --served-model-name, else the model as it is given."""
    if case.target.served_model_name is not None:
        return case.target.served_model_name
    text = case.served.command if case.served is not None else ""
    if case.target.command is not None:
        text = case.target.command.text
    name = SERVED.search(text)
    return name[1] if name else model_id(case.plan.request.spec)


def fills(blocks_of_one: Held, sequences: int) -> float:
    """Blocks that all sequences together may hold: MARGIN deviations above their mean, if these are known."""
    variance = 0.0 if blocks_of_one.square is None else max(0.0, blocks_of_one.square - blocks_of_one.mean**2)
    return sequences * blocks_of_one.mean + MARGIN * sqrt(sequences * variance)


def shared_blocks(case: Case) -> int:
    return case.plan.pool.shared(min(prefix_tokens(case), case.plan.capacity.max_model_len))


def own_blocks(case: Case, tokens: int) -> int:
    plan = case.plan
    return users.own_blocks(plan.pool.allocated_blocks, min(tokens, plan.capacity.max_model_len), shared_blocks(case))


def tokens_in(plan: Plan, num_blocks: int) -> int:
    return plan.capacity.tokens * num_blocks // plan.capacity.num_blocks


def held_blocks(case: Case) -> Held | str:
    """Blocks of a running request, from the lengths that the target states; a text if they cannot be read.

    A workload's requests hold their prompt and, at a random moment, part of their output; of lengths only the total is
    known.
    """
    workload, context = case.target.workload, case.plan.capacity.max_model_len
    if workload is not None and workload.profile is not None:
        from kvplan.workloads import profiles

        with located(workload, case.target):
            drawn = islice(profiles.profile(workload.profile).requests(rate=1.0, seed=0), DRAWN)
            return in_flight(case, drawn, workload.profile)
    if workload is not None and workload.trace is not None:
        if not exists(workload.trace):
            return str(request_tokens(case, "mean"))
        return in_flight(case, read_trace(workload.trace).requests, "the trace")
    if case.lengths is not None:
        counts = [(own_blocks(case, tokens), share) for tokens, share in case.lengths.points]
        mean = sum(count * share for count, share in counts)
        return Held(mean, sum(count**2 * share for count, share in counts), "requests of the stated lengths")
    tokens = request_tokens(case, "mean")
    assert isinstance(tokens, int)
    name = "in the mean" if states_a_length(case) else "each, as no lengths are stated"
    return Held(own_blocks(case, tokens), None, f"requests of {min(tokens, context):,} tokens {name}")


def in_flight(case: Case, requests: Iterable[TraceRequest], name: str) -> Held:
    """Blocks of running requests: each counts for as long as it decodes, in PARTS moments."""
    known: dict[int, int] = {}
    weight = first = second = 0.0
    for request in requests:
        for part in range(PARTS):
            tokens = request.prompt_tokens + request.output_tokens * (2 * part + 1) // (2 * PARTS)
            if tokens not in known:
                known[tokens] = own_blocks(case, tokens)
            weight += request.output_tokens
            first += request.output_tokens * known[tokens]
            second += request.output_tokens * known[tokens] ** 2
    return Held(first / weight, second / weight, f"requests of {name}")
