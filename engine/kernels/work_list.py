"""Which tokens of which context each program of a decode kernel reads: planned on the host, once per step.

Contexts differ by orders of magnitude; a program for each would leave a device waiting for the longest. So long ones
are cut into items of at most one chunk, their partial outputs merged afterwards. What is planned depends on lengths
only, which the host knows: nothing is asked of the device, and every layer that sees the same tokens shares the plan.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

MIN_CHUNK_TOKENS = 128  # a shorter item is all start-up
MOST_PARTS = 6  # equal parts of the longest context that are tried
NEAR = 1.05
EXTRA_WAVES = 6  # items beyond one per sequence, in waves of programs: room that a graph pays for when it is empty
# What an item and a merge cost beside reading, as tokens read: reckoned from instructions, measured on no GPU.
ITEM_TOKENS, MERGE_TOKENS = 16, 64
MAX_CONTEXT_LEN = 2**31 - 1024  # kernels count tokens in 32 bits and look up to two tiles past an item's end
COLUMNS = 4  # int32 of a row: 16 bytes, so that a row begins where a GPU likes to read
NOT_THERE = -1


class Sizes(NamedTuple):
    """Rows of each kind, and scratch slots."""

    num_items: int
    num_merges: int
    num_slots: int

    @property
    def num_rows(self) -> int:
        return self.num_items + self.num_merges


class Plan(NamedTuple):
    """A plan on the host.

    rows  [num_items + num_merges, 4] int32. An item is (sequence, first token, token after its last, slot): with a
          slot, its output is partial and waits there; without (-1) it is its sequence's only item and its output is
          final. A merge is (sequence, first slot, slot after its last, 0). Sequence -1: the row is not there
    """

    rows: Ints
    sizes: Sizes

    def split(self) -> tuple[Ints, Ints]:
        """(items, merges)."""
        return self.rows[: self.sizes.num_items], self.rows[self.sizes.num_items :]


@dataclass(frozen=True, slots=True)
class WorkList:
    """A plan's rows on the device, for the decode kernels of every layer that sees the same tokens."""

    rows: torch.Tensor
    sizes: Sizes
    num_seqs: int
    window: int | None
    items: torch.Tensor = field(init=False)  # the rows of either kind, cut apart once for all layers
    merges: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", self.rows[: self.sizes.num_items])
        object.__setattr__(self, "merges", self.rows[self.sizes.num_items :])


@dataclass(frozen=True, slots=True)
class SplitPlanner:
    """Cuts contexts for one kind of layer on one device.

    heads         programs that read each item: KV heads, or tiles of the heads that share a latent
    num_programs  that the device runs at once
    block_n       tokens of a kernel's tile: an item begins at a multiple of it, a window's first item within one
    window        the last so many tokens are seen; None: all
    """

    heads: int
    num_programs: int
    block_n: int
    window: int | None = None

    def plan(self, context_lens: Ints) -> Plan:
        """For exactly these sequences [num_seqs]."""
        return cut(context_lens, self.window, self.chunk_tokens(context_lens), self.block_n)

    def chunk_tokens(self, context_lens: Ints) -> int:
        """Tokens of the longest item, a multiple of block_n: the chunk whose busiest program has least to read.

        Tried are no cut, up to MOST_PARTS equal parts of the longest context, an even share of all tokens, and the
        smallest chunk whose items all run at once; coarse ones first, until one is NEAR an even share, which nothing
        can beat.
        """
        seen = visible_tokens(context_lens, self.window)
        total, longest = int(seen.sum()), int(seen.max(initial=0))
        at_once, whole = self.at_once, self._tiles(longest)
        if at_once == 0:
            return whole * self.block_n
        share = self._tiles(max(MIN_CHUNK_TOKENS, -(-total // at_once)))
        least = min(whole, self._tiles(MIN_CHUNK_TOKENS))
        tried = {max(least, -(-whole // parts)) for parts in range(1, MOST_PARTS + 1)}
        tried |= {min(share, whole), min(whole, self._least_tiles(seen, at_once, share, max(share, whole)))}
        most_items = len(seen) + EXTRA_WAVES * at_once
        best, cost = whole, np.inf
        for tiles in sorted(tried, reverse=True):
            load = busiest(seen, tiles * self.block_n, longest, total, at_once, most_items)
            if load < cost:
                best, cost = tiles, load
            if cost <= NEAR * total / at_once:
                break
        return best * self.block_n

    @property
    def at_once(self) -> int:
        """Items that run at once."""
        return self.num_programs // self.heads

    def _tiles(self, tokens: int) -> int:
        return max(1, -(-tokens // self.block_n))

    def _least_tiles(self, seen: Longs, most_items: int, low: int, high: int) -> int:
        """The smallest chunk from low to high tiles that makes no more than most_items; high if none does."""
        while low < high:
            middle = (low + high) // 2
            if int((-(-seen // (middle * self.block_n))).sum()) <= most_items:
                high = middle
            else:
                low = middle + 1
        return low

    def capacity(self, num_seqs: int) -> Sizes:
        """The most that any plan for num_seqs sequences holds: what a CUDA graph, whose grid is fixed, has room for.

        Let E = EXTRA_WAVES x at_once. No chunk that makes more than num_seqs + E items is taken. A sequence of k > 1
        items has k - 1 >= 1 more than one; these are at most E, so at most E sequences are cut, into at most 2 E
        items, as k <= 2 (k - 1).
        """
        extra = EXTRA_WAVES * self.at_once
        return Sizes(num_seqs + extra, min(num_seqs, extra), min(num_seqs + extra, 2 * extra))

    def padded_plan(self, context_lens: Ints, num_seqs: int) -> Plan:
        """For these sequences and empty ones behind them, in as many rows as any plan for num_seqs has room for."""
        lens = np.zeros(num_seqs, np.int32)
        lens[: len(context_lens)] = context_lens
        plan, sizes = self.plan(lens), self.capacity(num_seqs)
        rows = np.full((sizes.num_rows, COLUMNS), NOT_THERE, np.int32)
        items, merges = plan.split()
        rows[: len(items)] = items
        rows[sizes.num_items : sizes.num_items + len(merges)] = merges
        return Plan(rows, sizes)


def busiest(seen: Longs, chunk: int, longest: int, total: int, at_once: int, most_items: int) -> float:
    """Tokens that the busiest of `at_once` programs reads, at most, when contexts [num_seqs] are cut into chunks and
    the longest items start first; what an item and a merge cost beside is in it, as tokens. inf for too many items.

    longest, total  of the contexts
    Two bounds hold for such a queue: the items at its places 0, at_once, 2 at_once, ... one after the other (whoever
    starts at the place i starts no later than those of the round before have ended); and where items queue at all, an
    even share of everything and the longest item that had to wait.
    """
    counts, rests = np.divmod(seen, chunk)
    num_full, full = int(counts.sum()), chunk + ITEM_TOKENS
    rests = np.sort(rests[rests > 0])[::-1] + ITEM_TOKENS
    num_items = num_full + len(rests)
    if chunk < longest and num_items > most_items:
        return np.inf
    load: float = -(-num_full // at_once) * full + int(rests[-num_full % at_once :: at_once].sum())
    if num_items > at_once:
        waiting = full if at_once < num_full else int(rests[at_once - num_full])
        even = (total + num_items * ITEM_TOKENS) / at_once
        load = min(load, max(full if num_full else int(rests[0]), even + waiting))
    return load + (MERGE_TOKENS if chunk < longest else 0)


def visible_tokens(context_lens: Ints, window: int | None) -> Longs:
    """Tokens that each sequence attends to, in 64 bits: their sum may need them."""
    lens = context_lens.astype(np.int64)
    return lens if window is None else np.minimum(lens, window)


def cut(context_lens: Ints, window: int | None, chunk: int, block_n: int) -> Plan:
    """The plan for chunks of so many tokens, a multiple of block_n; longest items first.

    Programs start in order, so the short ones fill the gaps at the end. An empty sequence has one item of no tokens,
    which writes zeros. Raises ValueError for a context that 32 bits do not count.
    """
    if len(context_lens) and int(context_lens.max()) > MAX_CONTEXT_LEN:
        raise ValueError(f"context_lens must be at most {MAX_CONTEXT_LEN} ({context_lens.max()})")
    lens, seen = context_lens.astype(np.int64), visible_tokens(context_lens, window)
    # Up to block_n - 1 hidden tokens share a window's first tile; they count for nothing and make no item.
    counts = np.maximum(-(-seen // chunk), 1)
    seqs = np.repeat(np.arange(len(lens)), counts)
    parts = np.arange(len(seqs)) - np.repeat(counts.cumsum() - counts, counts)
    first = lens - seen
    begins = (first // block_n * block_n)[seqs] + parts * chunk
    ends = np.where(parts == counts[seqs] - 1, lens[seqs], begins + chunk)
    begins = np.maximum(begins, first[seqs])
    is_cut = counts > 1
    slot_ends = np.where(is_cut, counts, 0).cumsum()
    slots = np.where(is_cut[seqs], (slot_ends - counts)[seqs] + parts, NOT_THERE)
    (split,) = is_cut.nonzero()
    sizes = Sizes(len(seqs), len(split), int(counts[split].sum()))
    plan = Plan(np.zeros((sizes.num_rows, COLUMNS), np.int32), sizes)
    items, merges = plan.split()
    order = np.argsort(begins - ends, kind="stable")
    for i, column in enumerate((seqs, begins, ends, slots)):
        items[:, i] = column[order]
    for i, column in enumerate((split, (slot_ends - counts)[split], slot_ends[split])):
        merges[:, i] = column
    return plan
