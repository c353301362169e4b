"""Memory as before paged attention: each request reserves max_model_len contiguous tokens at admission."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from engine.block_manager import BlockManager, Group, PrefixHit
from engine.sequence import Sequence


class ContiguousManager(BlockManager):
    """Gives each sequence one region of consecutive blocks; nothing is shared or cached, and windows free nothing.

    All regions have one length, so a first fit never leaves a hole that the next request does not fill. The blocks
    after the last region are counted as free, though no request can have them.
    """

    cure = "lower max_model_len"

    def __init__(self, num_blocks: int, groups: tuple[Group, ...], *, max_model_len: int) -> None:
        super().__init__(
            num_blocks, groups, max_model_len=max_model_len, max_in_flight_tokens=max_model_len,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.max_model_len = max_model_len
        self.run_lens = tuple(group.table_len(max_model_len) for group in groups)
        self.region_len = sum(self.run_lens)
        starts = range(1, num_blocks - self.region_len + 1, self.region_len)
        self.free_regions = list(starts)  # a heap of first blocks: the lowest is given first
        heapify(self.free_regions)
        self.num_regions = len(starts)

    @property
    def num_free_blocks(self) -> int:
        return self.num_usable_blocks - (self.num_regions - len(self.free_regions)) * self.region_len

    def num_needed(self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None) -> int:
        """Free blocks that a waiting sequence takes: a whole region, however short it is."""
        return self.region_len

    def num_reserved(self, seq: Sequence, hit: PrefixHit, num_tokens: int, *, alone: bool = False) -> int:
        return self.region_len

    def admit(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None, *, are_computed: bool = True
    ) -> None:
        """Open the tables of a sequence in the first free region, one run of blocks per group."""
        start = heappop(self.free_regions)
        seq.block_table = [list(range(*run)) for run in pairwise(accumulate(self.run_lens, initial=start))]
        seq.num_cached_blocks = [0] * len(self.groups)
        seq.num_tokens_until_change = self.max_model_len

    def grow(self, seq: Sequence, num_tokens: int, num_slots: int | None = None, *, num_kept: int = 0) -> bool:
        """True: admission reserved max_model_len tokens."""
        return True

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            heappush(self.free_regions, seq.block_table[0][0])
        self._close(seq)

    def num_to_hold(self, seq: Sequence, num_tokens: int) -> int:
        return self.region_len

    def check_invariants(self, seqs: Iterable[Sequence], detached: Iterable[int] = ()) -> None:
        """Raise AssertionError unless every sequence holds one whole region and free + used = total."""
        taken: list[int] = []
        for seq in seqs:
            blocks = [block for table in seq.block_table for block in table]
            assert tuple(self.num_held(seq)) == self.run_lens, f"{seq.request_id}: holds {self.num_held(seq)} blocks"
            run = list(range(blocks[0], blocks[0] + self.region_len))
            assert blocks == run, f"{seq.request_id}: {blocks} is not one run"
            taken.append(blocks[0])
        regions = sorted(taken + self.free_regions)
        num_whole = self.num_usable_blocks // self.region_len
        assert regions == [1 + i * self.region_len for i in range(num_whole)], f"regions {regions}"
        used = len(taken) * self.region_len
        assert self.num_free_blocks + used == self.num_usable_blocks, "free + used != total"
