"""Sampling of traces: a span of time unchanged, or fewer requests over the whole time."""

import random
from collections import Counter
from collections.abc import Sequence

from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.units import plural
from kvplan.workloads.stats import prefix_chains
from kvplan.workloads.trace import Trace, TraceRequest, from_start

# A prefix run shared by more requests than this (a system prompt) does not define a family.
MAX_FAMILY = 20
MAX_FAMILY_SHARE = 0.01


def span_of(trace: Trace, length_s: float, start_s: float | None = None, seed: int = 0) -> Trace:
    """Return the requests of `length_s` seconds from `start_s` (None: random by the seed), with unchanged gaps."""
    if not trace.has_arrivals:
        raise InvalidInputError(trace.source, "has no arrival times", "use --num-requests")
    if length_s > trace.span_s:
        raise UsageError(f"--span {length_s:g}s", f"is more than the trace has ({trace.span_s:g} s)", "take less")
    start = random.Random(seed).uniform(0, trace.span_s - length_s) if start_s is None else start_s
    requests = [request for request in trace.requests if start <= request.arrival_s < start + length_s]
    if not requests:
        raise UsageError("--span", f"no request came from {start:g} s to {start + length_s:g} s", "choose another span")
    return from_first(trace, requests, f"{start:g} s to {start + length_s:g} s of {trace.source}")


def thinned(trace: Trace, num_requests: int, seed: int = 0) -> Trace:
    """Return `num_requests` random requests, drawn by whole families of shared prefixes; only the last one is partial.

    Conversations stay whole, so that prefix reuse stays about the same; the rate falls with the number of requests.
    """
    if num_requests > len(trace.requests):
        raise UsageError(
            f"--num-requests {num_requests:,}", f"the trace has {plural(len(trace.requests), 'request')}", "lower it"
        )
    members: dict[int, list[int]] = {}
    for index, family in enumerate(families(trace.requests)):
        members.setdefault(family, []).append(index)
    order = list(members.values())
    random.Random(seed).shuffle(order)
    drawn = [index for indices in order for index in indices][:num_requests]
    requests = [trace.requests[index] for index in sorted(drawn)]
    return from_first(trace, requests, f"{num_requests:,} of {trace.source}, seed {seed}")


def share_of(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Return a share (0 to 1) of the requests, at least one, drawn as in thinned."""
    return thinned(trace, max(1, round(share * len(trace.requests))), seed)


def families(requests: Sequence[TraceRequest]) -> list[int]:
    """Return a family number per request: equal for requests that share a prefix run, unless many share it."""
    chains = prefix_chains(requests)
    sharers = Counter(node for chain in chains for node in chain)
    max_sharers = max(MAX_FAMILY, MAX_FAMILY_SHARE * len(requests))
    # The first run that only a few share identifies the family; without one, a request gets a family of its own (< 0).
    return [
        next((node for node in chain if sharers[node] <= max_sharers), -1 - index) for index, chain in enumerate(chains)
    ]


def from_first(trace: Trace, requests: Sequence[TraceRequest], source: str) -> Trace:
    """Return the requests as a trace that starts at the first of them."""
    return Trace(tuple(from_start(requests, requests[0].arrival_s)), source, trace.prefix_block, trace.has_arrivals)
