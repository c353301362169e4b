"""Which block holds what: one pool for all groups of layers, reference counts, and a prefix cache over full blocks.

Rules as in vLLM 0.33.0 (`v1/core/block_pool.py`, `kv_cache_manager.py`), checked step by step against its scheduler.
"""

import hashlib
import math
import pickle
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence

NULL_BLOCK = 0  # stands where a block was given back or never needed; never written, never free
BlockKey = tuple[bytes, int]  # chained content hash, group: a block serves one group's layers


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Group(ABC):
    """Layers that keep the same tokens, and so share a block table. Each kind says which blocks a sequence needs."""

    block_size: int

    @abstractmethod
    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Leading tokens that the query at position num_tokens no longer reads."""

    @abstractmethod
    def next_drop(self, num_tokens: int) -> int | None:
        """The smallest number of tokens above num_tokens at which one more block lies wholly before what is read.

        None: blocks stay until the sequence ends
        """

    @abstractmethod
    def num_tail_blocks(self) -> int | None:
        """Cached blocks that a hit needs right before its end; None where it needs all of them."""

    @abstractmethod
    def max_blocks_held(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks that one sequence is charged, tokens in flight included."""

    def table_len(self, num_tokens: int) -> int:
        """Entries of a table that covers num_tokens tokens."""
        return cdiv(num_tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class FullGroup(Group):
    """Layers that keep every token (MHA, GQA, MLA)."""

    def num_skipped_tokens(self, num_tokens: int) -> int:
        return 0

    def next_drop(self, num_tokens: int) -> int | None:
        return None

    def num_tail_blocks(self) -> int | None:
        return None

    def max_blocks_held(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True, slots=True)
class WindowGroup(Group):
    """Layers that see the last `window` tokens, the query included."""

    window: int

    def num_skipped_tokens(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1)

    def next_drop(self, num_tokens: int) -> int | None:
        return (self.num_skipped_tokens(num_tokens) // self.block_size + 1) * self.block_size + self.window - 1

    def num_tail_blocks(self) -> int | None:
        return cdiv(self.window - 1, self.block_size)

    def max_blocks_held(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        # The window need not start on a block boundary: one more block.
        return cdiv(min(self.window - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1


def block_hashes(seq: Sequence, block_size: int, lookahead: int = 0) -> list[bytes]:
    """Chained hashes of the full blocks of all known tokens: sha256 of the parent's hash, for the first block of the
    extra keys, and the tokens.

    lookahead  tokens after a block that belong to its content too
    """
    hashes = seq.block_hashes.setdefault(block_size, [])
    for start in range(len(hashes) * block_size, seq.num_tokens - block_size - lookahead + 1, block_size):
        before = hashes[-1] if hashes else pickle.dumps(seq.extra_keys)
        tokens = array("q", seq.token_ids[start : start + block_size + lookahead])
        hashes.append(hashlib.sha256(before + tokens.tobytes()).digest())
    return hashes


class Watcher(Protocol):
    """Who is told what the prefix cache holds; a hash is chained, a group's number is its place."""

    def stored(self, seq: Sequence, group: int, numbers: range, findable: list[int], hashes: list[bytes]) -> None:
        """A sequence's full blocks of these numbers were taken in; `findable`: those that can be found, at `hashes`."""

    def removed(self, key: BlockKey) -> None: ...

    def cleared(self) -> None: ...


class BlockPool:
    """Blocks 1..num_blocks-1: a free list in eviction order, reference counts, and content key -> blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.ref_counts = [0] * num_blocks
        self.key_of: dict[int, BlockKey] = {}
        self.cached: dict[BlockKey, dict[int, None]] = {}  # equal blocks, in the order they came
        self.num_evictions = 0
        self.watcher: Watcher | None = None

    def take(self, n: int) -> list[int]:
        """The n least recently used free blocks, their old contents forgotten."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            if block in self.key_of:
                self.num_evictions += 1
                self.forget(block)
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these cached blocks."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free[block]
            self.ref_counts[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One table fewer holds these blocks; those with contents worth finding are evicted last, the others next."""
        first = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                if block not in self.key_of:
                    first.append(block)
        for block in reversed(first):
            self.free.move_to_end(block, last=False)

    def remember(self, block: int, key: BlockKey) -> None:
        if block not in self.key_of:
            self.key_of[block] = key
            equal = self.cached.get(key)
            if equal is None:
                self.cached[key] = {block: None}
            else:
                equal[block] = None

    def find(self, key: BlockKey) -> int | None:
        return next(iter(self.cached.get(key, ())), None)

    def forget(self, block: int) -> None:
        """Stop offering a block's contents."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.cached[key][block]
            if not self.cached[key]:
                del self.cached[key]
            if self.watcher is not None:
                self.watcher.removed(key)

    @property
    def is_consistent(self) -> bool:
        """Whether every block is found by the keys that it is offered under, and by no other."""
        return {b: key for key, blocks in self.cached.items() for b in blocks} == self.key_of


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a sequence: its length and, per group, the blocks that hold it."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    passed: tuple[int, ...] = ()  # states that a load goes past: vLLM counts them as if they were shared


class BlockManager:
    """Gives each sequence its blocks, one table per group, out of one pool."""

    cure = "shorten the request"  # where one does not fit into the whole pool

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Group, ...],
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        max_step_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        hash_lookahead: int = 0,
        num_read_again: int = 0,
        drops_last_block: bool = False,
    ) -> None:
        """max_step_tokens: of those in flight, the ones of a single step; None: all of them.

        hash_lookahead, num_read_again, drops_last_block  see engine/draft_rules.py
        """
        self.pool = BlockPool(num_blocks)
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_lookahead, self.drops_last_block = hash_lookahead, drops_last_block
        self.num_read_again = num_read_again
        self.hit_alignment = math.lcm(*(group.block_size for group in groups))
        self.dropping = tuple(g for g, group in enumerate(groups) if group.next_drop(0) is not None)
        self._only = groups[0] if len(groups) == 1 and isinstance(groups[0], FullGroup) else None
        self.max_held = tuple(group.max_blocks_held(max_model_len, max_in_flight_tokens) for group in groups)
        step = max_step_tokens or max_in_flight_tokens
        self.max_held_alone = tuple(group.max_blocks_held(max_model_len, step) for group in groups)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; some may still be cached."""
        return len(self.pool.free)

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prefix can be found in, held by someone or free."""
        return len(self.pool.key_of)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that sequences hold, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_usable_blocks

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest cached prefix that every group accepts; the last known token is always recomputed."""
        if not self.enable_prefix_caching or seq.skips_cache:
            return PrefixHit(0, tuple(() for _ in self.groups))
        limit = self._aligned(seq.num_tokens - 1)
        full = [g for g, group in enumerate(self.groups) if isinstance(group, FullGroup)]
        full_len = self._agreed_len(seq, full, limit) if full else 0
        num_tokens = self._agreed_len(seq, range(len(self.groups)), limit)
        seq.full_attention_hit_len = full_len if full_len > num_tokens else 0
        return PrefixHit(num_tokens, tuple(self._hit_blocks(seq, g, num_tokens) for g in range(len(self.groups))))

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks of the first num_tokens tokens findable; they may still be in flight."""
        if not self.enable_prefix_caching or num_tokens <= seq.num_tokens_until_change:
            return
        for g in range(len(self.groups)):
            self._cache_group(seq, g, num_tokens)

    def _cache_group(self, seq: Sequence, g: int, num_tokens: int) -> None:
        num_final = min(num_tokens - self.num_read_again, len(seq.token_ids) - self.hash_lookahead)
        start, end = seq.num_cached_blocks[g], num_final // self.groups[g].block_size
        if end > start:
            self._cache_blocks(seq, g, range(start, end))
            seq.num_cached_blocks[g] = end

    def _cache_blocks(self, seq: Sequence, g: int, numbers: range) -> None:
        group, table = self.groups[g], seq.block_table[g]
        hashes = self._hashes(seq, group)
        keeps_all = group.num_tail_blocks() is None
        findable = [i for i in numbers if table[i] != NULL_BLOCK and (keeps_all or self._is_kept(seq, group, i))]
        for i in findable:
            self.pool.remember(table[i], (hashes[i], g))
        if self.pool.watcher is not None:
            self.pool.watcher.stored(seq, g, numbers, findable, hashes)

    def forget(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Withdraw the blocks past num_computed_tokens: they were promised, and are not computed after all."""
        for group, table in zip(self.groups, seq.block_table, strict=True):
            for block in table[num_computed_tokens // group.block_size :]:
                self.pool.forget(block)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Withdraw blocks, none of them shared, whose contents turned out wrong."""
        for block in blocks:
            self.pool.forget(block)

    def reset_prefix_cache(self) -> bool:
        """Forget the contents of every block; False, and none forgotten, while a sequence holds one."""
        if self.num_free_blocks < self.num_usable_blocks:
            return False
        watcher, self.pool.watcher = self.pool.watcher, None
        for block in list(self.pool.key_of):
            self.pool.forget(block)
        self.pool.watcher = watcher
        if watcher is not None:
            watcher.cleared()
        return True

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self.hit_alignment * self.hit_alignment

    def _agreed_len(self, seq: Sequence, groups: Iterable[int], limit: int) -> int:
        """Shrink the limit until no group objects."""
        agreed = limit
        for g in groups:
            agreed = self._aligned(self._hit_len(seq, g, agreed))
        return agreed if agreed == limit else self._agreed_len(seq, groups, agreed)

    def _hit_len(self, seq: Sequence, g: int, limit: int) -> int:
        """Longest prefix of at most `limit` tokens that group g could go on from."""
        group = self.groups[g]
        hashes = self._hashes(seq, group)
        end = min(limit // group.block_size, len(hashes))
        tail = group.num_tail_blocks()
        if tail is None:
            start = group.num_skipped_tokens(limit) // group.block_size
            run_end = self._run_end(hashes, g, start, end)
            return max(start, run_end - self.drops_last_block) * group.block_size
        run = 0
        for i in reversed(range(end)):
            if run == tail:
                return (i + 1 + tail) * group.block_size
            run = run + 1 if self.pool.find((hashes[i], g)) is not None else 0
        return run * group.block_size

    def _hashes(self, seq: Sequence, group: Group) -> list[bytes]:
        return block_hashes(seq, group.block_size, self.hash_lookahead)

    def _run_end(self, hashes: list[bytes], g: int, start: int, end: int) -> int:
        """Index after the cached run that begins at block `start`."""
        return next((i for i in range(start, end) if self.pool.find((hashes[i], g)) is None), end)

    def _hit_blocks(self, seq: Sequence, g: int, num_tokens: int) -> tuple[int, ...]:
        group = self.groups[g]
        hashes = self._hashes(seq, group)
        first = group.num_skipped_tokens(num_tokens) // group.block_size
        blocks = (self.pool.find((hashes[i], g)) for i in range(first, num_tokens // group.block_size))
        return (NULL_BLOCK,) * first + tuple(NULL_BLOCK if block is None else block for block in blocks)

    def _is_kept(self, seq: Sequence, group: Group, i: int) -> bool:
        """Whether block i is worth finding: windows and states only before a prompt's last token, or an earlier end."""
        tail = group.num_tail_blocks()
        if tail is None:
            return True
        ends = (self._aligned(seq.num_prompt_tokens - 1), seq.full_attention_hit_len)
        return any(end // group.block_size - tail <= i < end // group.block_size for end in ends)

    # --- tables -------------------------------------------------------------------------------------------------

    def num_needed(self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None) -> int:
        """Free blocks that a waiting sequence takes to hold num_tokens tokens, the free ones it hits included.

        num_slots  what to make room for; None: these tokens
        """
        needed = self._num_revived(hit)
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            needed += self._num_new(group, len(blocks), num_slots or num_tokens)
        return needed

    def num_reserved(self, seq: Sequence, hit: PrefixHit, num_tokens: int, *, alone: bool = False) -> int:
        """The same when it may be computed in several steps, so that windows give blocks back on the way.

        alone  nobody else has blocks: it can wait for one step to end before the next, so one is in flight
        """
        needed = self._num_revived(hit)
        bounds = self.max_held_alone if alone else self.max_held
        for group, blocks, bound in zip(self.groups, hit.blocks, bounds, strict=True):
            needed += max(0, min(self._num_new(group, len(blocks), num_tokens), bound - len(blocks)))
        return needed

    def _num_revived(self, hit: PrefixHit) -> int:
        """Blocks of the hit that lie in the free list."""
        return sum(block in self.pool.free for blocks in (*hit.blocks, hit.passed) for block in blocks)

    def admit(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None, *, are_computed: bool = True
    ) -> None:
        """Open the tables of a sequence whose first num_tokens tokens fit, beginning with the hit.

        num_slots     what to make room for; None: these tokens
        are_computed  they are, or will be in the next step; else publish() says when
        """
        for blocks in hit.blocks:
            self.pool.share(block for block in blocks if block != NULL_BLOCK)
        seq.block_table = [list(blocks) for blocks in hit.blocks]
        seq.num_cached_blocks = [len(blocks) for blocks in hit.blocks]
        self._extend(seq, num_slots or num_tokens)
        if are_computed:
            self.publish(seq, num_tokens)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Make what an admitted sequence's first num_tokens tokens fill findable."""
        self.cache_full_blocks(seq, min(num_tokens, seq.num_tokens))
        seq.num_tokens_until_change = self._num_tokens_until_change(seq)

    def grow(self, seq: Sequence, num_tokens: int, num_slots: int | None = None, *, num_kept: int = 0) -> bool:
        """Make room for num_tokens tokens in all; False, and no block taken, when the pool lacks them.

        num_slots  what to make room for; None: these tokens
        num_kept   blocks that have to stay free
        """
        num_slots = num_slots or num_tokens
        if num_slots <= seq.num_tokens_until_change:
            return True
        if self._only is not None:
            return self._grow_only(self._only, seq, num_tokens, num_slots, num_kept)
        self.drop_unread(seq)
        num_missing = self._num_missing(seq, num_slots)
        if num_missing > self.num_free_blocks - num_kept:
            return False
        if num_missing:
            self._extend(seq, num_slots)
        self.cache_full_blocks(seq, min(num_tokens, seq.num_tokens))
        seq.num_tokens_until_change = self._num_tokens_until_change(seq)
        return True

    def _grow_only(self, group: Group, seq: Sequence, num_tokens: int, num_slots: int, num_kept: int) -> bool:
        """The same with one group that keeps every token, as most models have: a step does this for each block."""
        table, size = seq.block_table[0], group.block_size
        num_missing = -(-num_slots // size) - len(table)
        if num_missing > 0:
            if num_missing > len(self.pool.free) - num_kept:
                return False
            table += self.pool.take(num_missing)
        change = len(table) * size
        if self.enable_prefix_caching:
            full = (seq.num_cached_blocks[0] + 1) * size  # tokens with which the next block can be found
            if num_tokens >= full:
                self._cache_group(seq, 0, min(num_tokens, len(seq.token_ids)))
                full = (seq.num_cached_blocks[0] + 1) * size
            change = min(change, full - 1)
        seq.num_tokens_until_change = change
        return True

    def release(self, seq: Sequence) -> None:
        """Give back every block, tail first: the beginning of a sequence is what others share."""
        for table in seq.block_table:
            self.pool.give_back(block for block in reversed(table) if block != NULL_BLOCK)
        self._close(seq)

    def detach(self, seq: Sequence) -> list[int]:
        """Take a sequence's blocks from it, to be given back later, in this order."""
        blocks = [block for table in reversed(seq.block_table) for block in reversed(table) if block != NULL_BLOCK]
        self._close(seq)
        return blocks

    def _close(self, seq: Sequence) -> None:
        seq.block_table, seq.num_cached_blocks, seq.num_tokens_until_change = [], [], 0

    def num_held(self, seq: Sequence) -> list[int]:
        """Real blocks per group."""
        return [sum(block != NULL_BLOCK for block in table) for table in seq.block_table]

    def num_to_finish(self, seq: Sequence) -> int:
        """Blocks that an admitted sequence still takes to hold all its known tokens."""
        return sum(self._num_to_finish(seq, g) for g in range(len(self.groups)))

    def _num_to_finish(self, seq: Sequence, g: int) -> int:
        num_places = min(self.groups[g].table_len(seq.num_tokens), self.max_held[g])
        return max(0, num_places - len(seq.block_table[g]))

    def num_to_hold(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that an admitted sequence holds once it has room for num_tokens tokens."""
        return sum(self.num_held(seq)) + self._num_missing(seq, num_tokens)

    def _num_missing(self, seq: Sequence, num_tokens: int) -> int:
        missing = 0
        for group, table in zip(self.groups, seq.block_table, strict=True):
            missing += self._num_new(group, len(table), num_tokens)
        return missing

    def _num_new(self, group: Group, num_held: int, num_tokens: int) -> int:
        """Blocks to take so that a table of num_held entries covers num_tokens tokens."""
        return max(0, group.table_len(num_tokens) - num_held)

    def _extend(self, seq: Sequence, num_tokens: int) -> None:
        for group, table in zip(self.groups, seq.block_table, strict=True):
            table += self.pool.take(self._num_new(group, len(table), num_tokens))

    def _num_tokens_until_change(self, seq: Sequence) -> int:
        """Tokens up to which no group takes a block, publishes one or gives one back: what most steps find."""
        changes = []
        for g, group in enumerate(self.groups):
            changes.append(len(seq.block_table[g]) * group.block_size)
            if self.enable_prefix_caching:
                changes.append((seq.num_cached_blocks[g] + 1) * group.block_size - 1)
        # The query stands before the last token, so nothing is dropped before the token after the boundary.
        drops = [self.groups[g].next_drop(seq.num_settled_tokens) for g in self.dropping]
        return min(changes + [drop for drop in drops if drop is not None])

    def drop_unread(self, seq: Sequence) -> None:
        """Give back the blocks that lie wholly before what the next query reads."""
        for g in self.dropping:
            self._drop(seq, g)

    def _drop(self, seq: Sequence, g: int) -> None:
        group, table = self.groups[g], seq.block_table[g]
        end = min(group.num_skipped_tokens(seq.num_settled_tokens) // group.block_size, len(table))
        blocks = []
        for i in reversed(range(end)):
            if table[i] == NULL_BLOCK:
                break
            blocks.append(table[i])
            table[i] = NULL_BLOCK
        self.pool.give_back(blocks)

    # --- what must hold after every step ------------------------------------------------------------------------

    def check_invariants(self, seqs: Iterable[Sequence], detached: Iterable[int] = ()) -> None:
        """Raise AssertionError unless free + used + cached = total and every reference is a table's, or detached."""
        pool = self.pool
        refs = [0] * pool.num_blocks
        for block in detached:
            refs[block] += 1
        for seq in seqs:
            blocks = [block for table in seq.block_table for block in table if block != NULL_BLOCK]
            assert len(blocks) == len(set(blocks)), f"{seq.request_id}: holds a block twice ({blocks})"
            for block in blocks:
                refs[block] += 1
        assert refs == pool.ref_counts, f"reference counts {pool.ref_counts} for {refs} tables"
        assert set(pool.free) == {b for b in range(1, pool.num_blocks) if refs[b] == 0}, "free list and counts differ"
        assert all(refs[b] <= 1 or b in pool.key_of for b in range(pool.num_blocks)), "shared, yet not findable"
        assert pool.is_consistent, "cache and keys differ"
        cached = sum(block in pool.key_of for block in pool.free)
        used = sum(count > 0 for count in refs)
        assert (len(pool.free) - cached) + cached + used == self.num_usable_blocks, "free + cached + used != total"
