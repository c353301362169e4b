"""Memory as before paged attention: each request reserves max_model_len contiguous tokens at admission."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import assert_never

from engine.block_manager import ChunkedGroup, FullGroup, Group, MambaGroup, PrefixHit, WindowGroup, cdiv
from engine.sequence import Sequence


def num_reserved_blocks(group: Group, max_model_len: int) -> int:
    """Blocks that one sequence reserves in a group from admission to its end; windows free none."""
    match group:
        case FullGroup(block_size=size) | WindowGroup(block_size=size) | ChunkedGroup(block_size=size):
            return cdiv(max_model_len, size)
        case MambaGroup():
            return 1  # one state, overwritten in place
        case _:
            assert_never(group)


class ContiguousManager:
    """Gives each sequence one region of consecutive blocks, with BlockManager's methods; nothing is shared or cached.

    All regions have one length, so a first fit never leaves a hole that the next request does not fill. The blocks
    after the last region are counted as free, though no request can have them.
    """

    enable_prefix_caching = False
    cuts_chunks = False

    def __init__(self, num_blocks: int, groups: tuple[Group, ...], *, max_model_len: int) -> None:
        self.groups = groups
        self.num_usable_blocks = num_blocks - 1  # block 0 stands for none, as in a paged pool
        self.run_lens = tuple(num_reserved_blocks(group, max_model_len) for group in groups)
        self.region_len = sum(self.run_lens)
        starts = range(1, num_blocks - self.region_len + 1, self.region_len)
        self.free_regions = list(starts)  # a heap of first blocks: the lowest is given first
        heapify(self.free_regions)
        self.num_regions = len(starts)

    @property
    def num_free_blocks(self) -> int:
        return self.num_usable_blocks - (self.num_regions - len(self.free_regions)) * self.region_len

    @property
    def num_cached_blocks(self) -> int:
        return 0

    @property
    def usage(self) -> float:
        """Reserved fraction of the pool, whether or not it is filled."""
        return 1 - self.num_free_blocks / self.num_usable_blocks

    # --- a step -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Does nothing: no block is copied."""

    def end_step(self) -> list[tuple[int, int]]:
        return []

    def cut(self, seq: Sequence, start: int, n: int, max_tokens: int) -> int:
        return n

    # --- the prefix cache, which there is none of ---------------------------------------------------------------

    def lookup(self, seq: Sequence) -> PrefixHit:
        return PrefixHit(0, tuple(() for _ in self.groups))

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Does nothing: there is no prefix cache."""

    def distrust(self, blocks: Iterable[int]) -> None:
        """Does nothing: blocks are never shared."""

    def forget(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Does nothing: blocks are never shared."""

    # --- tables -------------------------------------------------------------------------------------------------

    def num_needed(self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None) -> int:
        """Free blocks that a waiting sequence takes: a whole region, however short it is."""
        return self.region_len

    def num_reserved(self, seq: Sequence, hit: PrefixHit, num_tokens: int, *, alone: bool = False) -> int:
        return self.region_len

    def admit(self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None) -> None:
        """Open the tables of a sequence in the first free region, one run of blocks per group."""
        start = heappop(self.free_regions)
        seq.block_table = [list(range(*run)) for run in pairwise(accumulate(self.run_lens, initial=start))]
        seq.num_cached_blocks = [0] * len(self.groups)

    def grow(self, seq: Sequence, num_tokens: int, num_slots: int | None = None) -> bool:
        """True: admission reserved max_model_len tokens."""
        return True

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            heappush(self.free_regions, seq.block_table[0][0])
        seq.block_table, seq.num_cached_blocks = [], []

    def num_held(self, seq: Sequence) -> list[int]:
        """Blocks per group."""
        return [len(table) for table in seq.block_table]

    def num_to_hold(self, seq: Sequence, num_tokens: int) -> int:
        return self.region_len

    # --- what must hold after every step ------------------------------------------------------------------------

    def check_invariants(self, seqs: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every sequence holds one whole region and free + used = total."""
        taken: list[int] = []
        for seq in seqs:
            held = [block for table in seq.block_table for block in table]
            assert tuple(self.num_held(seq)) == self.run_lens, f"{seq.request_id}: holds {self.num_held(seq)} blocks"
            assert held == list(range(held[0], held[0] + self.region_len)), f"{seq.request_id}: {held} is not one run"
            taken.append(held[0])
        regions = sorted(taken + self.free_regions)
        num_whole = self.num_usable_blocks // self.region_len
        assert regions == [1 + i * self.region_len for i in range(num_whole)], f"regions {regions}"
        used = len(taken) * self.region_len
        assert self.num_free_blocks + used == self.num_usable_blocks, "free + used != total"
