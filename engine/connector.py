"""Copies between the device and KV memory beyond it, as a scheduler orders them."""

from dataclasses import dataclass, field

from engine.block_manager import BlockKey

FileCopy = tuple[tuple[BlockKey, int], ...]  # chunks, and their places in memory


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of a tier, and the device blocks that they are copied from or to.

    chunks  places in the tier, and of each the blocks in order, NULL_BLOCK where nothing is copied
    """

    request_id: str
    chunks: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_blocks(self) -> int:
        """Device blocks to copy."""
        return sum(block != 0 for _, blocks in self.chunks for block in blocks)


@dataclass(eq=False, slots=True)
class Transfers:
    """Copies that a step starts, by job number.

    stores   from the device, once the step has run
    loads    to the device, at once
    saves    from memory to files; fetches: back
    flush    stores that must be done before the step runs: it writes over what they read
    """

    stores: dict[int, Transfer] = field(default_factory=dict)
    loads: dict[int, Transfer] = field(default_factory=dict)
    saves: dict[int, FileCopy] = field(default_factory=dict)
    fetches: dict[int, FileCopy] = field(default_factory=dict)
    flush: set[int] = field(default_factory=set)
