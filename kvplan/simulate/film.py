"""The KV pool step by step: which block holds what, from the scheduler's own tables."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.block_manager import BlockManager
from engine.scheduler import Batch
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.loop import Simulation
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
    _cells: list[int] = field(default_factory=list)

    def take(self, simulation: Simulation, batch: Batch) -> None:
        """A frame of the step that was just scheduled."""
        scheduler = simulation.scheduler
        cells = owners(simulation, self.num_blocks)
        before = self._cells or [FREE] * len(cells)
        self.changes.append(
            [(i + 1, new) for i, (old, new) in enumerate(zip(before, cells, strict=True)) if old != new]
        )
        self._cells = cells
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        tokens = sum(batch.num_tokens.values())
        self.frames.append(Frame(simulation.clock, running, waiting, tokens, scheduler.num_preemptions))

    @property
    def is_full(self) -> bool:
        return len(self.frames) >= MOST_STEPS


def owners(simulation: Simulation, num_blocks: int) -> list[int]:
    """FREE, CACHED, SHARED, EMPTY or a request's number plus FIRST, for each usable block."""
    scheduler = simulation.scheduler
    cells = [FREE] * (num_blocks + 1)
    pool = scheduler.blocks.pool if isinstance(scheduler.blocks, BlockManager) else None
    if pool is not None:
        for block in pool.key_of:
            cells[block] = CACHED
    for seq in scheduler.running:
        owner = FIRST + int(seq.request_id)
        for group, table in zip(simulation.groups, seq.block_table, strict=True):
            filled = -(-seq.num_computed_tokens // group.block_size)
            for i, block in enumerate(table):
                is_shared = pool is not None and pool.ref_counts[block] > 1
                cells[block] = SHARED if is_shared else owner if i < filled else EMPTY
    return cells[1:]


def filmed(setups: Iterable[tuple[str, Setup]], source: Source, arrivals_of: Callable[[], Arrivals]) -> dict[str, Film]:
    """The first MOST_STEPS steps of each run, every step scheduled by itself."""
    films = {}
    for name, setup in setups:
        simulation = setup.simulation(arrivals_of(), source.run_len)
        film = Film(simulation.num_usable_blocks, simulation.groups[0].block_size)
        simulation.jump = False
        simulation.on_step = film.take
        simulation.stop = lambda _, film=film: film.is_full
        simulation.run()
        films[name] = film
    return films
