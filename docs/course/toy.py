"""What the chapters share: a model that reads paged memory and nothing else, and a picture of a pool over time."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.block_manager import BlockManager, FullGroup
from engine.contiguous import ContiguousManager
from engine.engine import EngineCore
from engine.scheduler import Batch, Extension, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from kvplan.simulate.film import CACHED, EMPTY, FIRST, FREE, SHARED, Film

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {FREE: "#fcfcfb", CACHED: "#a9c7b9", SHARED: "#e09f1f", EMPTY: "#d9a6c6"}
NAMES = {CACHED: "cached, nobody's", SHARED: "shared", EMPTY: "reserved, empty"}


class Toy(EngineCore[Any]):
    """An engine whose next token is the sum of all that its model reads, modulo 97; it films its pool.

    memory  (block, place in it) -> the token there, where an engine has keys and values
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, self.launch)
        self.memory: dict[tuple[int, int], int] = {}
        self.film = Film.of(scheduler)
        self.batches: list[dict[str, int]] = []  # of each step, tokens by request

    def launch(self, batch: Batch) -> "Sums":
        self.batches.append({seq.request_id: n for seq, n in batch.num_tokens.items()})
        self.film.take(self.scheduler, batch, float(len(self.batches)))
        return Sums(batch, self.memory, self.scheduler.blocks.groups[0].block_size)


class Sums:
    """A batch that the model has run: for each sequence it reads its tokens from memory, and from nowhere else."""

    def __init__(self, batch: Batch, memory: dict[tuple[int, int], int], size: int) -> None:
        self.batch, self.tokens = batch, dict[str, list[int]]()
        for seq, n in batch.num_tokens.items():
            end = seq.num_computed_tokens  # the scheduler has counted the step's n tokens already
            slots = [(seq.block_table[0][place // size], place % size) for place in range(end)]
            memory.update(zip(slots[end - n :], seq.token_ids[end - n : end], strict=True))
            self.tokens[seq.request_id] = [sum(memory[slot] for slot in slots) % 97]

    def wait(self) -> dict[str, list[int]]:
        return self.tokens


def toy(
    num_blocks: int, block_size: int = 4, extensions: tuple[Extension, ...] = (), *, is_contiguous: bool = False,
    max_num_batched_tokens: int = 16, max_num_seqs: int = 8, max_model_len: int = 64, **config: Any,
) -> Toy:  # fmt: skip
    """An engine with a pool of num_blocks blocks, the null block among them.

    is_contiguous  each request reserves a region for max_model_len tokens, as before paging
    """
    limits = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, **config)
    groups = (FullGroup(block_size),)
    if is_contiguous:
        return Toy(Scheduler(limits, ContiguousManager(num_blocks, groups, max_model_len=max_model_len), extensions))
    blocks = BlockManager(
        num_blocks, groups, max_model_len=max_model_len, max_in_flight_tokens=max_num_batched_tokens,
        enable_prefix_caching=limits.enable_prefix_caching,
    )  # fmt: skip
    return Toy(Scheduler(limits, blocks, extensions))


def request(number: int, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
    return Sequence(f"request-{number}", prompt, max_tokens, **options)


def strip(films: Mapping[str, Film]) -> "Figure":
    """A film on paper: steps from left to right, blocks from top to bottom, a color for each owner."""
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 0.6 + 2.2 * len(films)), layout="constrained")
    places = figure.subplots(len(films), squeeze=False, sharex=True)
    seen: set[int] = set()
    for axes, (name, film) in zip(np.ravel(places), films.items(), strict=True):
        cells = np.zeros((film.num_blocks, len(film.changes)), dtype=int)
        for step, changes in enumerate(film.changes):
            for block, owner in changes:
                cells[block - 1, step:] = owner
        seen |= set(cells.flat)
        image = np.array([[to_rgb(color_of(owner)) for owner in row] for row in cells])
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, len(film.changes), film.num_blocks, 0))
        counts = [0, *(frame.preemptions for frame in film.frames)]
        gave_way = [step + 0.5 for step, (before, after) in enumerate(pairwise(counts)) if after > before]
        if gave_way:
            axes.plot(gave_way, [-0.03 * film.num_blocks] * len(gave_way), "v", color="#d9534f", clip_on=False)
        num_steps = max(len(other.changes) for other in films.values())
        axes.set(ylabel="block", xlim=(0, num_steps), ylim=(film.num_blocks, 0))
        axes.set_title(name, loc="left", fontsize="medium", pad=12 if gave_way else 6)
        axes.tick_params(left=False, labelleft=False)
    axes.set_xlabel("step; a triangle: somebody is preempted")
    owners = sorted(owner for owner in seen if owner >= FIRST)
    patches = [Patch(facecolor=color_of(owner), label=f"request {owner - FIRST}") for owner in owners]
    patches += [Patch(facecolor=COLORS[owner], label=name) for owner, name in NAMES.items() if owner in seen]
    figure.legend(handles=patches, loc="outside right upper", fontsize="small", frameon=False)
    return figure


def color_of(owner: int) -> str:
    """The colors of `--film`: requests in blues and purples."""
    import colorsys

    if owner < FIRST:
        return COLORS[owner]
    hue, light = (180 + (owner - FIRST) * 47 % 130) / 360, 0.42 + 0.06 * ((owner - FIRST) % 4)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, 0.6))
