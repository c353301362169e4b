"""One replica's share of a fleet's requests, simulated in a separate process."""

from array import array
from collections.abc import Callable
from dataclasses import field

from engine.scheduler import PrefixCacheStats
from kvplan.core.records import dataclass
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.counts import Counts
from kvplan.simulate.records import Records
from kvplan.simulate.runs import Run
from kvplan.simulate.timeline import Timeline
from kvplan.simulate.unshared import Unshared
from kvplan.workloads.trace import TraceRequest


@dataclass(slots=True)
class Share:
    """Picklable arrivals: the requests that a router sends to one server.

    prefixes  prefix ids of each request; empty if no request has any
    """

    times: "array[float]" = field(default_factory=lambda: array("d"))
    prompts: "array[int]" = field(default_factory=lambda: array("q"))
    outputs: "array[int]" = field(default_factory=lambda: array("q"))
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    _next: int = 0

    def __len__(self) -> int:
        return len(self.times)

    def put(self, time: float, request: TraceRequest, *, has_prefixes: bool) -> None:
        self.times.append(time)
        self.prompts.append(request.prompt_tokens)
        self.outputs.append(request.output_tokens)
        if has_prefixes:
            self.prefixes.append(request.prefix_ids)

    def next_time(self) -> float | None:
        return self.times[self._next] if self._next < len(self.times) else None

    def peek(self) -> TraceRequest:
        i = self._next
        prefixes = self.prefixes[i] if self.prefixes else ()
        return TraceRequest(self.times[i], self.prompts[i], self.outputs[i], prefixes)

    def pop(self) -> tuple[float, TraceRequest]:
        request = self.peek()
        self._next += 1
        return request.arrival_s, request

    def ended(self, time: float) -> None:
        """Do nothing: arrival times do not depend on completions."""


@dataclass(frozen=True, slots=True)
class Task:
    """A server's run factory and the requests to serve."""

    start: Callable[[Arrivals, int | None], Run]
    run_len: int | None
    share: Share


@dataclass(frozen=True, slots=True)
class Finished:
    """Picklable results of a finished run."""

    clock: float
    records: Records
    timeline: Timeline
    counts: Counts
    prefix_cache_stats: PrefixCacheStats
    num_preemptions: int

    def give(self, run: Run) -> None:
        """Copy the results into a fresh run, as if it had served the requests itself."""
        run.clock, run.records, run.timeline, run.counts = self.clock, self.records, self.timeline, self.counts
        if isinstance(run, Unshared):
            run.prefix_cache_stats, run.num_preemptions = self.prefix_cache_stats, self.num_preemptions
        else:
            run.scheduler.prefix_cache_stats = self.prefix_cache_stats
            run.scheduler.num_preemptions = self.num_preemptions


def finished(_: None, task: Task) -> Finished:
    """Run a server to the end and return its results."""
    run = task.start(task.share, task.run_len)
    run.run()
    return Finished(run.clock, run.records, run.timeline, run.counts, run.prefix_cache_stats, run.num_preemptions)
