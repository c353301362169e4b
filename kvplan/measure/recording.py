"""What is kept of every step of a profile run, beside its samples: the pool as a film."""

from dataclasses import dataclass, field

from engine.scheduler import Batch, Scheduler
from kvplan.simulate.film import Film, check_drawable

CURE = "lower --num-blocks"


@dataclass(slots=True)
class Recording:
    """By allocator, in the order served.

    films  frames of the first steps, seconds since the requests began to come
    """

    films: dict[str, Film] = field(default_factory=dict)

    def begin(self, allocator: str, scheduler: Scheduler) -> None:
        """Record a scheduler from now on; UsageError where its pool cannot be drawn."""
        check_drawable(scheduler.blocks.num_usable_blocks + 1, CURE)
        self.films[allocator] = Film.of(scheduler)

    def scheduled(self, allocator: str, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """Take in a batch, right after it was scheduled."""
        if batch.num_tokens or batch.preempted or batch.failed:
            self.films[allocator].take(scheduler, batch, seconds)
