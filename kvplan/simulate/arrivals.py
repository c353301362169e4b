"""When requests come: by the clock, whatever the server does, or from users who wait for their answers."""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

from kvplan.workloads.trace import TraceRequest


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
    """`num_users` who each send a request, wait for its end, think, and send the next; they join over `ramp_s`."""

    def __init__(
        self, requests: Iterator[TraceRequest], num_users: int, think_s: float = 0.0, ramp_s: float = 0.0
    ) -> None:
        self._requests, self._think_s = requests, think_s
        self._next = next(requests, None)
        self._times = [user * ramp_s / num_users for user in range(num_users)]  # a heap: when each idle user sends

    def next_time(self) -> float | None:
        return self._times[0] if self._times and self._next is not None else None

    def pop(self) -> tuple[float, TraceRequest]:
        request = self._next
        assert request is not None
        self._next = next(self._requests, None)
        return heappop(self._times), request

    def ended(self, time: float) -> None:
        heappush(self._times, time + self._think_s)
