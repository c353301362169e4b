"""The seam to KV memory beyond the device: the scheduler's questions, and the copies it orders."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.block_manager import BlockKey, StoredState
from engine.sequence import Sequence

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


NO_TRANSFERS = Transfers()


class Connector(Protocol):
    """The scheduler's side of a tier: which tokens it can load, and what each step copies."""

    @property
    def is_busy(self) -> bool:
        """True if a copy is in flight, or a request has ended since the last plan()."""

    def add(self, seq: Sequence) -> None:
        """Register a queued sequence."""

    def match(self, seq: Sequence, num_tokens: int) -> int | None:
        """Number of tokens after the first num_tokens that can be loaded; None if not known before the next step."""

    def load(self, seq: Sequence, num_tokens: int, num_loaded: int) -> None:
        """Load num_loaded tokens after the first num_tokens into the sequence's tables, which have room for them."""

    def plan(
        self,
        num_tokens: Mapping[Sequence, int],
        new: Iterable[Sequence],
        preempted: Iterable[Sequence],
        states: Iterable[StoredState] = (),
    ) -> Transfers:
        """Copies for a step that was just scheduled; `new` are the sequences admitted in it, `states` it stores."""

    def finish(self, seq: Sequence) -> None:
        """Handle the end of a sequence, whose blocks are about to be freed."""

    def distrust(self, seqs: Iterable[Sequence]) -> None:
        """Invalidate what these sequences have stored."""

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> list[Sequence]:
        """Complete jobs; returns the sequences whose loads are done, including sequences that have ended.

        unread  chunks that a fetch has not brought: their file was gone or damaged
        """
