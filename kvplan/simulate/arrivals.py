"""When requests come: by the clock, whatever the server does, or from users who wait for their answers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import repeat
from math import inf
from typing import Protocol

from kvplan.workloads.trace import TraceRequest

Stages = tuple[tuple[float, float], ...]  # (requests per second, seconds); the last rate goes on


@dataclass(frozen=True, slots=True)
class Process:
    """Gaps between arrivals: gamma-distributed, `shape` as the load generators' burstiness.

    shape  1: a Poisson process; less: bursts; inf: all gaps alike
    """

    shape: float = 1.0

    def gaps(self, seed: int) -> Iterator[float]:
        """Gaps of mean 1."""
        if self.shape == inf:
            yield from repeat(1.0)
        rng = random.Random(f"arrivals {seed}")
        while True:
            yield rng.gammavariate(self.shape, 1 / self.shape)

    def times(self, stages: Stages, seed: int) -> Iterator[float]:
        """Seconds at which requests come, the first at 0; a rate of infinity is all at once.

        A gap is passed at the rate of the stage it lies in: the rest of it at the next stage's.
        """
        arrival = begun = 0.0
        left = iter(stages)
        rate, seconds = next(left)
        yield arrival
        for gap in self.gaps(seed):
            rest = gap
            while (after := next(left, None) if arrival + rest / rate > begun + seconds else None) is not None:
                rest -= (begun + seconds - arrival) * rate
                arrival = begun = begun + seconds
                rate, seconds = after
            arrival += rest / rate
            yield arrival


def retimed(requests: Iterator[TraceRequest], times: Iterator[float]) -> Iterator[TraceRequest]:
    """The same requests at other times."""
    return (replace(request, arrival_s=arrival) for request, arrival in zip(requests, times, strict=False))


class Arrivals(Protocol):
    """Requests in the order they come."""

    def next_time(self) -> float | None:
        """Seconds at which the next request comes; None: no more, unless one ends first."""

    def pop(self) -> tuple[float, TraceRequest]:
        """The next request and its time."""

    def ended(self, time: float) -> None:
        """A request of theirs has ended."""


class Open:
    """Requests at their own times, `speed` times as fast."""

    def __init__(self, requests: Iterator[TraceRequest], speed: float = 1.0) -> None:
        self._requests, self._speed = requests, speed
        self._next = next(requests, None)

    def next_time(self) -> float | None:
        return None if self._next is None else self._next.arrival_s / self._speed

    def pop(self) -> tuple[float, TraceRequest]:
        request = self._next
        assert request is not None
        self._next = next(self._requests, None)
        return request.arrival_s / self._speed, request

    def ended(self, time: float) -> None:
        """The clock does not care."""


class Closed:
    """`num_users` who each send a request, wait for its end, think, and send the next; they join over `ramp_s`.

    timed  no request is sent before its own time: a load generator's limit of concurrent requests over a rate
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
        self._times = [user * ramp_s / num_users for user in range(num_users)]  # a heap: when each idle user sends

    def next_time(self) -> float | None:
        if not self._times or self._next is None:
            return None
        return max(self._times[0], self._next.arrival_s) if self._timed else self._times[0]

    def pop(self) -> tuple[float, TraceRequest]:
        arrival, request = self.next_time(), self._next
        assert arrival is not None
        assert request is not None
        self._next = next(self._requests, None)
        heappop(self._times)
        return arrival, request

    def ended(self, time: float) -> None:
        heappush(self._times, time + self._think_s)
