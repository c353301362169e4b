"""Statistics of a trace: rates, lengths, and the prefix-cache hit rate of its prompts."""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvplan.workloads.trace import Trace, TraceRequest

CURVE_POINTS = 6  # cache sizes in the table, in addition to an unlimited cache


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Token counts of prompts or outputs; percentiles by nearest rank."""

    mean: float
    p50: int
    p90: int
    p99: int
    most: int


@dataclass(frozen=True, slots=True)
class ArrivalStats:
    """Arrival statistics in seconds and requests per second.

    span_s             seconds from the first request to the last
    rate_per_s         requests per second; None if all arrived at once
    interarrival_cv    standard deviation of the gaps over their mean: 1 for a Poisson process, more for bursts
    peak_minute_per_s  rate in the busiest minute, counted from the first request; None for less than a minute
    peak_second        requests in the busiest second
    """

    span_s: float
    rate_per_s: float | None
    interarrival_cv: float | None
    peak_minute_per_s: float | None
    peak_second: int


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Hit rates of a cache of whole prefix runs, as shares of all prompt tokens.

    block            tokens per run
    distinct_tokens  size in tokens of an unlimited cache
    repeated         hit rate of an unlimited cache
    curve            (cache size in tokens, hit rate) with LRU eviction
    """

    block: int
    distinct_tokens: int
    repeated: float
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Statistics of a trace; rank_correlation: Spearman's, of prompt and output; None if either is constant."""

    source: str
    num_requests: int
    arrivals: ArrivalStats | None
    prompt: LengthStats
    output: LengthStats
    rank_correlation: float | None
    prefix: PrefixStats | None


def trace_stats(trace: Trace) -> TraceStats:
    """Return the statistics of a trace."""
    prompts = [request.prompt_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]
    return TraceStats(
        source=trace.source,
        num_requests=len(trace.requests),
        arrivals=arrival_stats([request.arrival_s for request in trace.requests]) if trace.has_arrivals else None,
        prompt=length_stats(prompts),
        output=length_stats(outputs),
        rank_correlation=rank_correlation(prompts, outputs),
        prefix=None if trace.prefix_block is None else prefix_stats(trace.requests, trace.prefix_block),
    )


def length_stats(lengths: Sequence[int]) -> LengthStats:
    ordered = sorted(lengths)

    def percentile(percent: int) -> int:
        return ordered[-(-percent * len(ordered) // 100) - 1]  # nearest rank: ceil(share x n), from 1

    return LengthStats(sum(ordered) / len(ordered), percentile(50), percentile(90), percentile(99), ordered[-1])


def arrival_stats(times: Sequence[float]) -> ArrivalStats:
    """Return the arrival statistics of ascending `times`."""
    span = times[-1] - times[0]
    gaps = [b - a for a, b in pairwise(times)]
    mean = span / len(gaps) if gaps else 0.0
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) if gaps else 0.0
    return ArrivalStats(
        span_s=span,
        rate_per_s=len(gaps) / span if span else None,
        interarrival_cv=deviation / mean if mean else None,
        peak_minute_per_s=busiest(times, 60) / 60 if span >= 60 else None,
        peak_second=busiest(times, 1),
    )


def busiest(times: Sequence[float], seconds: float) -> int:
    """Return the most requests in any of the consecutive windows that start at the first request."""
    return max(Counter(int((time - times[0]) // seconds) for time in times).values())


def rank_correlation(first: Sequence[int], second: Sequence[int]) -> float | None:
    """Return Spearman's rank correlation, ties sharing their mean rank, or None if either side is constant."""
    a, b = ranks(first), ranks(second)
    middle = (len(a) - 1) / 2
    spread = math.fsum((x - middle) ** 2 for x in a) * math.fsum((y - middle) ** 2 for y in b)
    if not spread:
        return None
    return math.fsum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / math.sqrt(spread)


def ranks(values: Sequence[int]) -> list[float]:
    """Return the ascending rank of each value, from 0; ties share their mean rank."""
    counts = Counter(values)
    rank_of: dict[int, float] = {}
    below = 0
    for value in sorted(counts):
        rank_of[value] = below + (counts[value] - 1) / 2
        below += counts[value]
    return [rank_of[value] for value in values]


# --- prefix reuse -------------------------------------------------------------------------------------------------


def prefix_stats(requests: Sequence[TraceRequest], block: int) -> PrefixStats:
    chains = prefix_chains(requests)
    num_nodes = max((node for chain in chains for node in chain), default=-1) + 1
    total = sum(request.prompt_tokens for request in requests)
    repeated = found_again(requests, chains, block, num_nodes) / total
    sizes = [block * size for size in curve_sizes(num_nodes)]
    curve = [(size, found_again(requests, chains, block, size // block) / total) for size in sizes]
    return PrefixStats(block, num_nodes * block, repeated, tuple(curve))


def curve_sizes(num_nodes: int) -> list[int]:
    """Return cache sizes in runs: the largest CURVE_POINTS powers of four below `num_nodes`."""
    sizes = [4**power for power in range(40) if 4**power < num_nodes]
    return sizes[-CURVE_POINTS:]


def prefix_chains(requests: Sequence[TraceRequest]) -> list[tuple[int, ...]]:
    """Return each request's numbered runs; two runs have the same number if they and all runs before them are equal."""
    nodes: dict[tuple[int, int], int] = {}
    chains = []
    for request in requests:
        node, chain = -1, []
        for prefix_id in request.prefix_ids:
            node = nodes.setdefault((node, prefix_id), len(nodes))
            chain.append(node)
        chains.append(tuple(chain))
    return chains


def found_again(requests: Sequence[TraceRequest], chains: Sequence[tuple[int, ...]], block: int, size: int) -> int:
    """Return the prompt tokens found in an LRU cache of `size` runs; the last run of a prompt may be partial.

    Of one request's runs the last counts as the oldest, as in servers' eviction order, so the cache always holds
    prefixes.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    tokens = 0
    for request, chain in zip(requests, chains, strict=True):
        hits = 0
        while hits < len(chain) and chain[hits] in cached:
            hits += 1
        tokens += min(hits * block, request.prompt_tokens)
        for node in reversed(chain[:size]):  # runs beyond the cache size would evict themselves
            cached[node] = None
            cached.move_to_end(node)
        while len(cached) > size:
            cached.popitem(last=False)
    return tokens
