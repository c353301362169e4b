"""Animation of the KV pool: the owner of each block at each step, from the scheduler's own tables."""

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Final

from engine.block_manager import NULL_BLOCK
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.records import dataclass
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source

FREE: Final = 0  # free, without cached contents
CACHED: Final = 1  # free, with contents in the prefix cache
SHARED: Final = 2  # used by several requests
EMPTY: Final = 3  # allocated to a request, nothing stored in it yet
FIRST: Final = 4  # owned by one request: its number plus FIRST
MOST_STEPS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Frame:
    """State right after a step was scheduled: seconds, requests, tokens of the step, preemptions so far."""

    seconds: float
    running: int
    waiting: int
    tokens: int
    preemptions: int


@dataclass(slots=True)
class Film:
    """Frames, and the changes of the pool at each: (block, new owner), sorted by block.

    num_blocks  usable blocks; block 0 is the null block
    """

    num_blocks: int
    block_size: int
    frames: list[Frame] = field(default_factory=list)
    changes: list[list[tuple[int, int]]] = field(default_factory=list)
    _owners: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Film":
        """Return an empty film of a scheduler's pool."""
        return cls(scheduler.blocks.num_usable_blocks, scheduler.blocks.groups[0].block_size)

    def take(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """Record a frame of the step that was just scheduled, unless the film is full."""
        if self.is_full:
            return
        before, after = self._owners, owners(scheduler)
        changes = [(block, owner) for block, owner in after.items() if before.get(block) != owner]
        changes += [(block, FREE) for block in before if block not in after]
        self.changes.append(sorted(changes))
        self._owners = after
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        tokens = sum(batch.num_tokens.values())
        self.frames.append(Frame(seconds, running, waiting, tokens, scheduler.num_preemptions))

    @property
    def is_full(self) -> bool:
        return len(self.frames) >= MOST_STEPS


def owners(scheduler: Scheduler) -> dict[int, int]:
    """Return the owner of each block that is not FREE: CACHED, SHARED, EMPTY or a request's number plus FIRST."""
    pool = scheduler.blocks.pool
    cells = dict.fromkeys(pool.key_of, CACHED)
    for seq in scheduler.running:
        owner = FIRST + number_of(seq)
        for group, table in zip(scheduler.blocks.groups, seq.block_table, strict=True):
            filled = -(-seq.num_computed_tokens // group.block_size)
            for i, block in enumerate(table):
                is_shared = pool.ref_counts[block] > 1
                cells[block] = SHARED if is_shared else owner if i < filled else EMPTY
    cells.pop(NULL_BLOCK, None)
    return cells


def number_of(seq: Sequence) -> int:
    """Return a request's number: 17 for the ids "17" and "request-17"."""
    return int(seq.request_id.rpartition("-")[2])


def filmed(setups: Iterable[tuple[str, Setup]], source: Source, arrivals_of: Callable[[], Arrivals]) -> dict[str, Film]:
    """Record the first MOST_STEPS steps of each run, without jumping over any."""
    films = {}
    for name, setup in setups:
        simulation = setup.simulation(arrivals_of(), source.run_len)
        film = Film.of(simulation.scheduler)
        simulation.jump = False
        simulation.on_step = lambda run, batch, film=film: film.take(run.scheduler, batch, run.clock)
        simulation.stop = lambda _, film=film: film.is_full
        simulation.run()
        films[name] = film
    return films
