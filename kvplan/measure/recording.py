"""Per-step recordings of a profile run: an animation of the pool, and requests as trace tracks."""

from dataclasses import dataclass, field

from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.simulate.film import Film
from kvplan.simulate.tracks import Tracks


@dataclass(frozen=True, slots=True)
class ServingRecord:
    """Recorders for the requests and steps of one serving, in seconds since it began; empty if nothing is recorded."""

    film: Film | None = None
    tracks: Tracks | None = None

    def arrive(self, seq: Sequence, seconds: float) -> None:
        if self.tracks is not None:
            self.tracks.arrive(seq, seconds)

    def schedule(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """Record a batch right after it was scheduled; skip an empty one."""
        if not (batch.num_tokens or batch.preempted or batch.failed):
            return
        if self.film is not None:
            self.film.take(scheduler, batch, seconds)
        if self.tracks is not None:
            self.tracks.schedule(scheduler, batch, seconds)

    def update(self, scheduler: Scheduler, seconds: float) -> None:
        if self.tracks is not None:
            self.tracks.update(scheduler, seconds)


@dataclass(slots=True)
class Recording:
    """Recordings of each serving, by its allocator; empty unless requested.

    films   frames of the first steps, in seconds since the first request
    tracks  requests and counters, in the clock of the run's samples
    """

    has_film: bool = False
    has_tracks: bool = False
    films: dict[str, Film] = field(default_factory=dict)
    tracks: dict[str, Tracks] = field(default_factory=dict)

    def begin(self, allocator: str, scheduler: Scheduler, begin_s: float) -> ServingRecord:
        """Record a scheduler whose serving began at `begin_s`."""
        if self.has_film:
            self.films[allocator] = Film.of(scheduler)
        if self.has_tracks:
            self.tracks[allocator] = Tracks(allocator, begin_s)
        return ServingRecord(self.films.get(allocator), self.tracks.get(allocator))
