"""Requests and counters over time, from a scheduler's own queues: the data of `--trace-events`."""

from dataclasses import field
from typing import Final, Literal

from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.records import dataclass
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.film import number_of
from kvplan.simulate.loop import Simulation
from kvplan.simulate.setup import Setup

Phase = Literal["queued", "prefill", "decode"]
# Counters of a step, named as in the engine's stats and vLLM's metrics.
COUNTERS: Final = (
    "num_requests_running", "num_requests_waiting", "num_used_blocks", "num_cached_blocks", "num_batched_tokens",
)  # fmt: skip


@dataclass(slots=True)
class RequestTrack:
    """Timeline of one request, in seconds.

    phases     consecutive (name, start, end); prefill lasts until the next token is sampled
    preempted  times of its preemptions
    figures    other values of the request
    """

    name: str
    arrival: float
    phases: list[tuple[Phase, float, float]] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    figures: dict[str, int | float | str] = field(default_factory=dict)
    end: float = 0.0


@dataclass(slots=True)
class _Open:
    """An unfinished request: its phase, the phase's start, and the tokens known at its last admission."""

    track: RequestTrack
    phase: Phase
    since: float
    known: int = 0


@dataclass(slots=True)
class Tracks:
    """A server's requests in the order they ended, and its counters as (seconds, value) at each change.

    begin_s  start of the server's clock, added to all seconds
    last_s   time of the last event
    """

    name: str
    begin_s: float = 0.0
    last_s: float = 0.0
    requests: list[RequestTrack] = field(default_factory=list)
    counters: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: {name: [] for name in COUNTERS})
    _open: dict[Sequence, _Open] = field(default_factory=dict)
    _admitted: dict[Sequence, None] = field(default_factory=dict)  # open requests that have been admitted

    def arrive(self, seq: Sequence, seconds: float) -> None:
        """Record a request's arrival."""
        self._open[seq] = _Open(RequestTrack(f"request {number_of(seq)}", seconds), "queued", seconds)

    def schedule(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """Record a scheduled batch: admissions, preemptions and the pool's usage."""
        self.last_s = seconds
        for seq in batch.preempted:
            self._preempt(seq, seconds)
        for seq in batch.failed:
            self._close(seq, seconds)
        for seq in (*batch.new, *batch.resumed):
            if self._open[seq].phase != "queued":  # restarted between steps
                self._preempt(seq, seconds)
            self._enter(seq, "prefill", seconds)
            self._admitted[seq] = None
            self._open[seq].known = seq.num_tokens
            self._open[seq].track.figures.setdefault("cached_tokens", batch.hits[seq])
        self._count(scheduler, sum(batch.num_tokens.values()), seconds)

    def update(self, scheduler: Scheduler, seconds: float) -> None:
        """Record a batch's results: first tokens and ends of requests."""
        self.last_s = seconds
        for seq in list(self._admitted):
            entry = self._open[seq]
            if seq.is_finished:
                self._close(seq, seconds)
            elif entry.phase == "prefill" and seq.num_tokens > entry.known:
                self._enter(seq, "decode", seconds)
        if not scheduler.has_unfinished:
            self._count(scheduler, 0, seconds)

    def finish(self) -> "Tracks":
        """Close the tracks of unfinished requests at the end of the run."""
        for seq in list(self._open):
            self._close(seq, max(self.last_s, self._open[seq].since))
        return self

    def complete(self, simulation: Simulation) -> "Tracks":
        """Close the tracks at the end of a simulation, and add the times at which users see tokens."""
        self.finish()
        by_name, records = {request.name: request for request in self.requests}, simulation.records
        for number, first_token, ended in zip(records.number, records.first_token, records.ended, strict=True):
            request = by_name[f"request {number}"]
            request.figures |= {"first_token_s": first_token, "ended_s": ended}
            request.end = max(request.end, ended)
        return self

    @property
    def num_preemptions(self) -> int:
        return sum(len(request.preempted) for request in self.requests)

    def _preempt(self, seq: Sequence, seconds: float) -> None:
        self._enter(seq, "queued", seconds)
        self._open[seq].track.preempted.append(seconds)

    def _enter(self, seq: Sequence, phase: Phase, seconds: float) -> None:
        entry = self._open[seq]
        if seconds > entry.since:
            entry.track.phases.append((entry.phase, entry.since, seconds))
        entry.phase, entry.since = phase, seconds

    def _close(self, seq: Sequence, seconds: float) -> None:
        entry = self._open[seq]
        self._enter(seq, entry.phase, seconds)
        track = entry.track
        track.end = seconds
        track.figures |= {
            "prompt_tokens": seq.num_prompt_tokens,
            "output_tokens": seq.num_output_tokens,
            "finish_reason": seq.finish_reason or "unfinished",
        }
        self.requests.append(track)
        del self._open[seq]
        self._admitted.pop(seq, None)

    def _count(self, scheduler: Scheduler, num_tokens: int, seconds: float) -> None:
        blocks = scheduler.blocks
        used = blocks.num_usable_blocks - blocks.num_free_blocks
        row = (len(scheduler.running), len(scheduler.waiting), used, blocks.num_cached_blocks, num_tokens)
        for name, value in zip(COUNTERS, row, strict=True):
            points = self.counters[name]
            if not points or points[-1][1] != value:
                points.append((seconds, value))


def follow(name: str, setup: Setup, arrivals: Arrivals, run_len: int | None) -> tuple[Simulation, Tracks]:
    """Return a new run that never jumps over steps, and the tracks that it will fill."""
    simulation, tracks = setup.simulation(arrivals, run_len), Tracks(name)
    simulation.jump, simulation.watcher = False, tracks
    return simulation, tracks
