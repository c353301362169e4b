"""What is simulated: the requests of a trace, of a named profile, or of stated lengths, and how they come."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from kvplan.core.errors import UsageError
from kvplan.simulate.arrivals import Arrivals, Closed, Open, Process, Stages, retimed
from kvplan.workloads.lengths import Lengths
from kvplan.workloads.profiles import Profile
from kvplan.workloads.trace import Trace, TraceRequest

Requests = Callable[[float], Iterator[TraceRequest]]  # at a rate in requests per second


@dataclass(frozen=True, slots=True)
class Source:
    """Requests that can be had again and again, faster or slower.

    requests  `num_requests` of them, in order, at a rate
    rate      as published or as the trace has it; None where nobody says
    run_len   tokens that one prefix id of a request stands for
    """

    name: str
    num_requests: int
    rate: float | None
    requests: Requests
    run_len: int | None
    notes: tuple[str, ...] = ()

    def open(self, rate: float) -> Arrivals:
        """By the clock, at `rate` requests per second on average."""
        return Open(islice(self.requests(rate), self.num_requests))

    def timed(self, stages: Stages, process: Process, seed: int) -> Iterator[TraceRequest]:
        """All of them at other times: by rates that follow each other, and another process."""
        return islice(retimed(self.requests(self.rate or 1.0), process.times(stages, seed)), self.num_requests)

    def closed(self, num_users: int, think_s: float, ramp_s: float, *, first_counts: bool = False) -> Arrivals:
        """From users who wait for their answers; the first starts at once, the last after `ramp_s`."""
        if num_users >= self.num_requests and not first_counts:
            raise UsageError(
                f"--users {num_users:,}",
                f"there are only {self.num_requests:,} requests, and each user's first one is not counted",
                "raise --num-requests",
            )
        return Closed(islice(self.requests(1.0), self.num_requests), num_users, think_s, ramp_s)


def from_trace(trace: Trace, num_requests: int | None) -> Source:
    """A trace's requests; another rate stretches or squeezes its times evenly."""
    rows = trace.requests[:num_requests]
    span = rows[-1].arrival_s - rows[0].arrival_s
    rate = (len(rows) - 1) / span if trace.has_arrivals and span > 0 else None
    start = rows[0].arrival_s

    def requests(amount: float) -> Iterator[TraceRequest]:
        speed = 1.0 if rate is None else amount / rate
        for number, row in enumerate(rows):
            # Without times of their own they come evenly.
            arrival = number / amount if rate is None else (row.arrival_s - start) / speed
            yield replace(row, arrival_s=arrival)

    return Source(trace.source, len(rows), rate, requests, trace.prefix_block, trace.notes)


def from_profile(profile: Profile, num_requests: int, seed: int, shared_prefix: int | None) -> Source:
    def requests(rate: float) -> Iterator[TraceRequest]:
        return profile.requests(rate, seed, shared_prefix)

    run_len = profile.prefix_block if shared_prefix is None else shared_prefix or None
    return Source(profile.name, num_requests, profile.rate_per_s, requests, run_len)


def from_lengths(prompt: Lengths, output: Lengths, num_requests: int, seed: int, shared_prefix: int) -> Source:
    """Lengths drawn from two distributions, independently, in a Poisson process."""

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
    """The same requests, the first `tokens` of every prompt alike; only for requests that say nothing of that."""
    if source.run_len is not None:
        raise UsageError("--shared-prefix", "the trace already states which prompts share a prefix", "leave it out")

    def requests(rate: float) -> Iterator[TraceRequest]:
        for row in source.requests(rate):
            # A prompt that is not longer has one token of its own, as every request computes at least one.
            yield replace(row, prompt_tokens=max(row.prompt_tokens, tokens + 1), prefix_ids=(0,))

    return replace(source, requests=requests, run_len=tokens)
