"""Requests and counters over time, from a scheduler's own queues: what `--trace-events` writes."""

from dataclasses import dataclass, field
from typing import Final, Literal

from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.film import number_of
from kvplan.simulate.loop import Simulation
from kvplan.simulate.setup import Setup

Phase = Literal["queued", "prefill", "decode"]
# Those of a step, by the names of the engine's figures and vLLM's metrics.
COUNTERS: Final = (
    "num_requests_running", "num_requests_waiting", "num_used_blocks", "num_cached_blocks", "num_batched_tokens",
)  # fmt: skip


@dataclass(slots=True)
class RequestTrack:
    """One request: the phases it went through, in seconds.

    phases     (name, start, end), one after the other; prefill lasts until the next token is sampled
    preempted  when its blocks were taken
    figures    what is known of it beside times
    """

    name: str
    arrival: float
    phases: list[tuple[Phase, float, float]] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    figures: dict[str, int | float | str] = field(default_factory=dict)
    end: float = 0.0


@dataclass(slots=True)
class _Open:
    """A request that has not ended: its phase, since when, and the tokens known at its last admission."""

    track: RequestTrack
    phase: Phase
    since: float
    known: int = 0


@dataclass(slots=True)
class Tracks:
    """A server's requests in the order they ended, and its counters: (seconds, value) where the value changes.

    begin_s  added to all seconds: when the server's clock began
    last_s   when something happened last
    """

    name: str
    begin_s: float = 0.0
    last_s: float = 0.0
    requests: list[RequestTrack] = field(default_factory=list)
    counters: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: {name: [] for name in COUNTERS})
    _open: dict[Sequence, _Open] = field(default_factory=dict)
    _admitted: dict[Sequence, None] = field(default_factory=dict)  # of those, the ones that were admitted before

    def arrive(self, seq: Sequence, seconds: float) -> None:
        """A request has come."""
        self._open[seq] = _Open(RequestTrack(f"request {number_of(seq)}", seconds), "queued", seconds)

    def schedule(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """A batch was chosen: who is admitted, who gives way, and what the pool holds now."""
        self.last_s = seconds
        for seq in batch.preempted:
            self._preempt(seq, seconds)
        for seq in batch.failed:
            self._close(seq, seconds)
        for seq in (*batch.new, *batch.resumed):
            if self._open[seq].phase != "queued":  # it began again between steps
                self._preempt(seq, seconds)
            self._enter(seq, "prefill", seconds)
            self._admitted[seq] = None
            self._open[seq].known = seq.num_tokens
            self._open[seq].track.figures.setdefault("cached_tokens", batch.hits[seq])
        self._count(scheduler, sum(batch.num_tokens.values()), seconds)

    def update(self, scheduler: Scheduler, seconds: float) -> None:
        """A batch's tokens were taken in: who has a first token, and who ended."""
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
        """The run is over; so are the tracks of requests that did not end."""
        for seq in list(self._open):
            self._close(seq, max(self.last_s, self._open[seq].since))
        return self

    def complete(self, simulation: Simulation) -> "Tracks":
        """The same at the end of a simulation, with the times at which users see tokens beside those of the steps."""
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
    """A fresh run, every step scheduled by itself, and the tracks that it will fill."""
    simulation, tracks = setup.simulation(arrivals, run_len), Tracks(name)
    simulation.jump, simulation.watcher = False, tracks
    return simulation, tracks
