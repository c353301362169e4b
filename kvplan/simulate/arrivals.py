"""Arrival processes: open loop (fixed arrival times) and closed loop (users who wait for each response)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import repeat
from math import inf
from typing import Protocol

from kvplan.core.records import dataclass
from kvplan.workloads.trace import TraceRequest

Stages = tuple[tuple[float, float], ...]  # (requests per second, seconds); the last rate continues


@dataclass(frozen=True, slots=True)
class Process:
    """Gamma-distributed gaps between arrivals; `shape` is the load generators' burstiness.

    shape  1: a Poisson process; below 1: bursts; inf: constant gaps
    """

    shape: float = 1.0

    def gaps(self, seed: int) -> Iterator[float]:
        """Yield gaps with mean 1."""
        if self.shape == inf:
            yield from repeat(1.0)
        rng = random.Random(f"arrivals {seed}")
        while True:
            yield rng.gammavariate(self.shape, 1 / self.shape)

    def times(self, stages: Stages, seed: int) -> Iterator[float]:
        """Yield arrival times in seconds, the first at 0; with an infinite rate all are 0.

        A gap that spans two stages is scaled by each stage's rate in turn.
        """
        arrival = begun = 0.0
        left = iter(stages)
        rate, seconds = next(left)
        yield arrival
        for gap in self.gaps(seed):
            remainder = gap
            while (after := next(left, None) if arrival + remainder / rate > begun + seconds else None) is not None:
                remainder -= (begun + seconds - arrival) * rate
                arrival = begun = begun + seconds
                rate, seconds = after
            arrival += remainder / rate
            yield arrival


def retimed(requests: Iterator[TraceRequest], times: Iterator[float]) -> Iterator[TraceRequest]:
    """Yield the same requests with new arrival times."""
    return (replace(request, arrival_s=arrival) for request, arrival in zip(requests, times, strict=False))


class Arrivals(Protocol):
    """Requests in order of arrival."""

    def next_time(self) -> float | None:
        """Return the next request's arrival time in seconds, or None if none is left or one has to end first."""

    def peek(self) -> TraceRequest:
        """Return the next request, of which `next_time` returns the time."""

    def pop(self) -> tuple[float, TraceRequest]:
        """Return the next request and its arrival time."""

    def ended(self, time: float) -> None:
        """Note that one of these requests has ended."""


class Open:
    """Open-loop requests at their own arrival times, `speed` times as fast."""

    def __init__(self, requests: Iterator[TraceRequest], speed: float = 1.0) -> None:
        self._requests, self._speed = requests, speed
        self._next = next(requests, None)

    def next_time(self) -> float | None:
        return None if self._next is None else self._next.arrival_s / self._speed

    def peek(self) -> TraceRequest:
        assert self._next is not None
        return self._next

    def pop(self) -> tuple[float, TraceRequest]:
        request = self._next
        assert request is not None
        self._next = next(self._requests, None)
        return request.arrival_s / self._speed, request

    def ended(self, time: float) -> None:
        """Do nothing: arrival times do not depend on completions."""


class Closed:
    """`num_users` users who each send a request, wait for its end, think, and send the next; they join over `ramp_s`.

    timed  never send a request before its arrival time: a load generator's concurrency limit on top of a rate
    """

    def __init__(
        self,
        requests: Iterator[TraceRequest],
        num_users: int,
        think_s: float = 0.0,
        ramp_s: float = 0.0,
        *,
        timed: bool = False,
    ) -> None:
        self._requests, self._think_s, self._timed = requests, think_s, timed
        self._next = next(requests, None)
        self._times = [user * ramp_s / num_users for user in range(num_users)]  # heap: next send of each idle user

    def next_time(self) -> float | None:
        if not self._times or self._next is None:
            return None
        return max(self._times[0], self._next.arrival_s) if self._timed else self._times[0]

    def peek(self) -> TraceRequest:
        assert self._next is not None
        return self._next

    def pop(self) -> tuple[float, TraceRequest]:
        arrival, request = self.next_time(), self._next
        assert arrival is not None
        assert request is not None
        self._next = next(self._requests, None)
        heappop(self._times)
        return arrival, request

    def ended(self, time: float) -> None:
        heappush(self._times, time + self._think_s)
