"""The KV pool step by step: which block holds what, from the scheduler's own tables."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.block_manager import NULL_BLOCK, BlockManager
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import UsageError
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source

FREE: Final = 0  # nobody's, and nothing of use in it
CACHED: Final = 1  # free, and a prompt that begins alike would find it
SHARED: Final = 2  # of several requests
EMPTY: Final = 3  # reserved for a request, and nothing stored in it yet
FIRST: Final = 4  # from here on: the number of the request, plus this
MOST_STEPS: Final = 2_000
MOST_BLOCKS: Final = 65_535  # that a page can draw


@dataclass(frozen=True, slots=True)
class Frame:
    """The state right after a step was scheduled: seconds, requests, tokens of the step, preemptions so far."""

    seconds: float
    running: int
    waiting: int
    tokens: int
    preemptions: int


@dataclass(slots=True)
class Film:
    """Frames, and what changes in the pool at each: (block, its new owner), block 1 first.

    num_blocks  usable ones; block 0 is nobody's
    """

    num_blocks: int
    block_size: int
    frames: list[Frame] = field(default_factory=list)
    changes: list[list[tuple[int, int]]] = field(default_factory=list)
    _owners: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Film":
        """An empty film of a scheduler's pool."""
        return cls(scheduler.blocks.num_usable_blocks, scheduler.blocks.groups[0].block_size)

    def take(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None:
        """A frame of the step that was just scheduled; no effect on a film that is full."""
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
    """CACHED, SHARED, EMPTY or a request's number plus FIRST, for each block that is not FREE."""
    pool = scheduler.blocks.pool if isinstance(scheduler.blocks, BlockManager) else None
    cells = {} if pool is None else dict.fromkeys(pool.key_of, CACHED)
    for seq in scheduler.running:
        owner = FIRST + number_of(seq)
        for group, table in zip(scheduler.blocks.groups, seq.block_table, strict=True):
            filled = -(-seq.num_computed_tokens // group.block_size)
            for i, block in enumerate(table):
                is_shared = pool is not None and pool.ref_counts[block] > 1
                cells[block] = SHARED if is_shared else owner if i < filled else EMPTY
    cells.pop(NULL_BLOCK, None)
    return cells


def number_of(seq: Sequence) -> int:
    """A request's number: of "17" and of "request-17" it is 17."""
    return int(seq.request_id.rpartition("-")[2])


def check_drawable(num_blocks: int, cure: str) -> None:
    """Refuse a film of a pool of so many blocks, block 0 included, where a page cannot draw them all."""
    if num_blocks > MOST_BLOCKS + 1:
        problem = f"a pool of {num_blocks:,} blocks is more than the {MOST_BLOCKS:,} that a page draws"
        raise UsageError("--film", problem, cure)


def filmed(setups: Iterable[tuple[str, Setup]], source: Source, arrivals_of: Callable[[], Arrivals]) -> dict[str, Film]:
    """The first MOST_STEPS steps of each run, every step scheduled by itself."""
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
