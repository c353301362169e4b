"""Request sources: a trace, a named profile or stated lengths, with their arrivals."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, islice

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.simulate.arrivals import Arrivals, Closed, Open, Process, Stages, retimed
from kvplan.workloads.lengths import Lengths
from kvplan.workloads.profiles import Profile
from kvplan.workloads.trace import Trace, TraceRequest

Requests = Callable[[float], Iterator[TraceRequest]]  # at a rate in requests per second


@dataclass(frozen=True, slots=True)
class Source:
    """A replayable request stream with an adjustable rate.

    requests  makes the stream, in order of arrival, at a rate
    rate      requests per second as published or as in the trace; None if unknown
    run_len   tokens per prefix id of a request
    """

    name: str
    num_requests: int
    rate: float | None
    requests: Requests
    run_len: int | None
    notes: tuple[str, ...] = ()

    def open(self, rate: float) -> Arrivals:
        """Return open-loop arrivals at `rate` requests per second on average."""
        return Open(islice(self.requests(rate), self.num_requests))

    def timed(self, stages: Stages, process: Process, seed: int) -> Iterator[TraceRequest]:
        """Yield all requests with the arrival times of another process and consecutive stages of rates."""
        return islice(retimed(self.requests(self.rate or 1.0), process.times(stages, seed)), self.num_requests)

    def closed(self, num_users: int, think_s: float, ramp_s: float, *, first_counts: bool = False) -> Arrivals:
        """Return closed-loop arrivals; the first user starts at once, the last after `ramp_s`."""
        if num_users >= self.num_requests and not first_counts:
            raise UsageError(
                f"--users {num_users:,}",
                f"there are only {self.num_requests:,} requests, and each user's first request is not counted",
                "raise --num-requests",
            )
        return Closed(islice(self.requests(1.0), self.num_requests), num_users, think_s, ramp_s)


def from_trace(trace: Trace, num_requests: int | None) -> Source:
    """Return a trace as a source; another rate scales its arrival times."""
    rows = trace.requests[:num_requests]
    span = rows[-1].arrival_s - rows[0].arrival_s
    rate = (len(rows) - 1) / span if trace.has_arrivals and span > 0 else None
    start = rows[0].arrival_s

    def requests(amount: float) -> Iterator[TraceRequest]:
        speed = 1.0 if rate is None else amount / rate
        for number, row in enumerate(rows):
            # Requests without arrival times are spaced evenly.
            arrival = number / amount if rate is None else (row.arrival_s - start) / speed
            yield replace(row, arrival_s=arrival)

    return Source(trace.source, len(rows), rate, requests, trace.prefix_block, trace.notes)


def from_profile(profile: Profile, num_requests: int, seed: int, shared_prefix: int | None) -> Source:
    def requests(rate: float) -> Iterator[TraceRequest]:
        return profile.requests(rate, seed, shared_prefix)

    run_len = profile.prefix_block if shared_prefix is None else shared_prefix or None
    return Source(profile.name, num_requests, profile.rate_per_s, requests, run_len)


def from_lengths(prompt: Lengths, output: Lengths, num_requests: int, seed: int, shared_prefix: int) -> Source:
    """Return a source of independently drawn lengths, in a Poisson process."""

    def requests(rate: float) -> Iterator[TraceRequest]:
        rng = random.Random(seed)
        draw_prompt, draw_output = _drawn(prompt, rng), _drawn(output, rng)
        arrival = 0.0
        while True:
            tokens = max(next(draw_prompt), shared_prefix + 1)
            yield TraceRequest(arrival, tokens, next(draw_output), (0,) if shared_prefix else ())
            arrival += rng.expovariate(rate)

    name = f"{prompt.source} in, {output.source} out"
    return Source(name, num_requests, None, requests, shared_prefix or None)


def _drawn(lengths: Lengths, rng: random.Random) -> Iterator[int]:
    sums = list(accumulate(probability for _, probability in lengths.points))
    last = len(sums) - 1
    while True:
        yield lengths.points[min(bisect_right(sums, rng.random() * sums[-1]), last)][0]


def with_shared_prefix(source: Source, tokens: int) -> Source:
    """Return the source with the first `tokens` of every prompt shared; raise UsageError if it has prefix ids."""
    if source.run_len is not None:
        raise UsageError("--shared-prefix", "the trace already states which prompts share a prefix", "remove it")

    def requests(rate: float) -> Iterator[TraceRequest]:
        for row in source.requests(rate):
            # A shorter prompt is extended by one token of its own, as every request computes at least one.
            yield replace(row, prompt_tokens=max(row.prompt_tokens, tokens + 1), prefix_ids=(0,))

    return replace(source, requests=requests, run_len=tokens)
