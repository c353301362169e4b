"""The seam to KV memory beyond the device: what a scheduler asks of it, and what it gives a worker to copy."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.block_manager import BlockKey
from engine.sequence import Sequence

FileCopy = tuple[tuple[BlockKey, int], ...]  # chunks, and their places in memory


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of a tier and the device's blocks that they are copied from or to.

    chunks  places in the tier, and of each the blocks in order, NULL_BLOCK where nothing is copied
    """

    request_id: str
    chunks: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the device that are copied."""
        return sum(block != 0 for _, blocks in self.chunks for block in blocks)


@dataclass(eq=False, slots=True)
class Transfers:
    """What a step begins to copy, by job number.

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
    """The scheduler's side of a tier: which tokens it can bring back, and what each step copies."""

    @property
    def is_busy(self) -> bool:
        """Whether a copy is under way, or a request has ended that plan() was not asked about."""

    def add(self, seq: Sequence) -> None:
        """A sequence is queued."""

    def match(self, seq: Sequence, num_tokens: int) -> int | None:
        """Tokens after the first num_tokens that can be loaded; None: not known yet, ask at the next step."""

    def load(self, seq: Sequence, num_tokens: int, num_loaded: int) -> None:
        """Load num_loaded tokens after the first num_tokens into the sequence's tables, which have room for them."""

    def plan(
        self, num_tokens: Mapping[Sequence, int], new: Iterable[Sequence], preempted: Iterable[Sequence]
    ) -> Transfers:
        """What to copy in a step that was just scheduled; `new` have a table of their own since this step."""

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended; its blocks are about to be given back."""

    def distrust(self, seqs: Iterable[Sequence]) -> None:
        """What these sequences have stored is wrong."""

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> list[Sequence]:
        """These jobs are done; returns the sequences whose load is, also of those that have ended meanwhile.

        unread  chunks that a fetch has not brought: their file was gone or damaged
        """
