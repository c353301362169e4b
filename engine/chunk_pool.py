"""The chunks of a KV tier: contents, pins for copies in flight, and the eviction order.

Rules as in vLLM 0.33.0 (`v1/kv_offload/cpu/manager.py` and its policies), checked step by step against its scheduler.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.block_manager import BlockKey

Lookup = Literal["hit", "pending", "miss"]


@dataclass(slots=True)
class Chunk:
    """A chunk of the tier; num_readers is -1 while it is being written."""

    place: int
    num_readers: int = -1
    is_doomed: bool = False  # wrong: it is dropped when nobody copies it

    @property
    def is_ready(self) -> bool:
        return self.num_readers >= 0


@dataclass(eq=False, slots=True)
class Access:
    """Chunks that one request has read and written; counted as one access when the request ends.

    positions  tokens of the request up to the end of a chunk
    """

    positions: dict[BlockKey, int] = field(default_factory=dict)
    seen: dict[BlockKey, None] = field(default_factory=dict)
    inserted: set[BlockKey] = field(default_factory=set)
    reused: set[BlockKey] = field(default_factory=set)
    missed: set[BlockKey] = field(default_factory=set)
    rank: int | None = None
    is_finished: bool = False

    def in_order(self) -> list[BlockKey]:
        """The chunks in order of position, then of group."""
        return sorted(self.seen, key=lambda key: (self.positions[key], key[1]))


class Policy(Protocol):
    """The chunks and their eviction order."""

    chunks: dict[BlockKey, Chunk]

    def insert(self, key: BlockKey, chunk: Chunk, access: Access) -> None: ...
    def remove(self, key: BlockKey) -> None: ...
    def missed(self, keys: Iterable[BlockKey]) -> None: ...
    def accessed(self, keys: Iterable[BlockKey], access: Access) -> None: ...
    def finished(self, access: Access) -> None: ...
    def pinned(self, key: BlockKey) -> None: ...
    def unpinned(self, key: BlockKey) -> None: ...
    def evict(self, n: int, protected: Collection[BlockKey]) -> list[tuple[BlockKey, Chunk]] | None: ...


class LRU:
    """Least recently used first; within a request, the end of the prefix before its beginning.

    A request in progress has one rank for all its chunks; when it ends each gets one of its own, the first the latest.
    """

    def __init__(self) -> None:
        self.chunks: dict[BlockKey, Chunk] = {}
        self._ranks: dict[BlockKey, tuple[int, int]] = {}
        self._evictable: set[BlockKey] = set()
        self._heap: list[tuple[tuple[int, int], int, BlockKey]] = []  # entries that are no longer true stay in it
        self._last_rank = 0

    def insert(self, key: BlockKey, chunk: Chunk, access: Access) -> None:
        self.chunks[key] = chunk
        self._ranks[key] = (self._rank_of(access), -access.positions[key])

    def remove(self, key: BlockKey) -> None:
        del self.chunks[key], self._ranks[key]
        self._evictable.discard(key)

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """LRU ignores misses."""

    def accessed(self, keys: Iterable[BlockKey], access: Access) -> None:
        request = self._rank_of(access)
        for key in keys:
            rank = (request, -access.positions[key])
            if key in self.chunks and self._ranks[key] < rank:
                self._set_rank(key, rank)

    def finished(self, access: Access) -> None:
        for key in reversed(access.in_order()):
            if key in self.chunks:
                self._last_rank += 1
                self._set_rank(key, (self._last_rank, 0))

    def pinned(self, key: BlockKey) -> None:
        self._evictable.discard(key)

    def unpinned(self, key: BlockKey) -> None:
        self._evictable.add(key)
        self._push(key)

    def evict(self, n: int, protected: Collection[BlockKey]) -> list[tuple[BlockKey, Chunk]] | None:
        """Evict the n first unprotected chunks; None, with nothing changed, if there are fewer."""
        chosen: dict[BlockKey, None] = {}
        popped = []
        while self._heap and len(chosen) < n:
            entry = heapq.heappop(self._heap)
            rank, _, key = entry
            if key in self._evictable and self._ranks[key] == rank and key not in chosen:
                popped.append(entry)
                if key not in protected:
                    chosen[key] = None
        is_enough = len(chosen) == n
        for entry in popped:
            if not is_enough or entry[2] not in chosen:
                heapq.heappush(self._heap, entry)
        if not is_enough:
            return None
        evicted = [(key, self.chunks[key]) for key in chosen]
        for key in chosen:
            self.remove(key)
        return evicted

    def _rank_of(self, access: Access) -> int:
        if access.rank is None:
            self._last_rank += 1
            access.rank = self._last_rank
        return access.rank

    def _set_rank(self, key: BlockKey, rank: tuple[int, int]) -> None:
        self._ranks[key] = rank
        if key in self._evictable:
            self._push(key)

    def _push(self, key: BlockKey) -> None:
        heapq.heappush(self._heap, (self._ranks[key], key[1], key))
        if len(self._heap) > max(64, 4 * len(self._evictable)):
            self._heap = [(self._ranks[key], key[1], key) for key in self._evictable]
            heapq.heapify(self._heap)


class ARC:
    """Adaptive replacement: one list of chunks used once, one of chunks used again; misses shift the balance."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[BlockKey, None] = OrderedDict()
        self._again: OrderedDict[BlockKey, None] = OrderedDict()
        self._once_gone: OrderedDict[BlockKey, None] = OrderedDict()
        self._again_gone: OrderedDict[BlockKey, None] = OrderedDict()
        self._num_once = 0.0  # how many of those used once are to be kept
        self.chunks: dict[BlockKey, Chunk] = {}

    def insert(self, key: BlockKey, chunk: Chunk, access: Access) -> None:
        self.chunks[key] = chunk
        self._once[key] = None
        self._once_gone.pop(key, None)
        self._again_gone.pop(key, None)

    def remove(self, key: BlockKey) -> None:
        del self.chunks[key]
        self._once.pop(key, None)
        self._again.pop(key, None)

    def missed(self, keys: Iterable[BlockKey]) -> None:
        for key in reversed(list(keys)):
            once, again = len(self._once_gone), len(self._again_gone)
            if key in self._once_gone:
                self._num_once = min(self._num_once + max(1, again / once), self._capacity)
                self._once_gone.move_to_end(key)
            elif key in self._again_gone:
                self._num_once = max(self._num_once - max(1, once / again), 0)
                self._again_gone.move_to_end(key)

    def accessed(self, keys: Iterable[BlockKey], access: Access) -> None:
        """Does nothing: an access is counted when its request ends."""

    def finished(self, access: Access) -> None:
        for key in reversed(access.in_order()):
            if key in access.inserted and key not in access.reused:
                if key in self.chunks:
                    (self._once if key in self._once else self._again).move_to_end(key)
            elif key in access.reused and key in self.chunks:
                self._once.pop(key, None)
                self._again[key] = None
                self._again.move_to_end(key)

    def pinned(self, key: BlockKey) -> None:
        """Does nothing: the chunks themselves count pins."""

    def unpinned(self, key: BlockKey) -> None:
        """Does nothing: the chunks themselves count pins."""

    def evict(self, n: int, protected: Collection[BlockKey]) -> list[tuple[BlockKey, Chunk]] | None:
        """As in LRU."""
        once = (key for key in self._once if self.chunks[key].num_readers == 0 and key not in protected)
        again = (key for key in self._again if self.chunks[key].num_readers == 0 and key not in protected)
        num_once, chosen = len(self._once), list[BlockKey]()
        for _ in range(n):
            key = next(once, None) if num_once >= int(self._num_once) else None
            if key is None:
                key = next(again, None)
            if key is None:
                key = next(once, None)
            if key is None:
                return None
            num_once -= key in self._once
            chosen.append(key)
        evicted = [(key, self.chunks[key]) for key in chosen]
        for key in chosen:
            (self._once_gone if key in self._once else self._again_gone)[key] = None
            self.remove(key)
        for gone in (self._once_gone, self._again_gone):
            while len(gone) > self._capacity:
                gone.popitem(last=False)
        return evicted


@dataclass(slots=True)
class ChunkPool:
    """A tier's chunks: looked up by key, pinned while being copied, evicted to make room.

    store_threshold  a chunk is kept from its so-manieth request on
    """

    num_chunks: int
    policy: Policy
    store_threshold: int = 1
    num_evictable: int = 0
    num_writing: int = 0
    _num_given: int = 0
    _free: list[int] = field(default_factory=list)
    _counts: OrderedDict[BlockKey, int] = field(default_factory=OrderedDict)

    @property
    def num_resident(self) -> int:
        """Chunks with contents, including those being written."""
        return self._num_given - len(self._free)

    def lookup(self, key: BlockKey) -> Lookup:
        chunk = self.policy.chunks.get(key)
        if chunk is None or chunk.is_doomed:
            return "miss"
        return "hit" if chunk.is_ready else "pending"

    def pin(self, keys: Collection[BlockKey], access: Access | None = None) -> list[int]:
        """Pin chunks for reading and return their slots; they stay until unpin()."""
        chunks = [self.policy.chunks[key] for key in keys]
        for key, chunk in zip(keys, chunks, strict=True):
            if chunk.num_readers == 0:
                self.policy.pinned(key)
                self.num_evictable -= 1
            chunk.num_readers += 1
        if access is not None:
            self._record(keys, access)
            access.reused.update(key for key in keys if key not in access.inserted)
        return [chunk.place for chunk in chunks]

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Unpin chunks after reading."""
        for key in keys:
            chunk = self.policy.chunks[key]
            chunk.num_readers -= 1
            if chunk.num_readers == 0:
                self._settle(key, chunk)

    def reserve(
        self, keys: list[BlockKey], access: Access, protected: Iterable[BlockKey] = ()
    ) -> dict[BlockKey, int] | None:
        """Reserve slots for those of the chunks that are not stored yet; None if no room can be made.

        protected  what does not make room, beside these chunks themselves
        """
        chunks, missing = self.policy.chunks, list[BlockKey]()
        if self.store_threshold > 1:
            self._count(keys)
        ready = [key for key in keys if key in chunks and chunks[key].is_ready]
        for key in keys:
            if key not in chunks and (self.store_threshold <= 1 or self._counts.get(key, 0) >= self.store_threshold):
                missing.append(key)
        self.policy.missed(key for key in missing if key not in access.missed)
        access.missed.update(missing)
        known = {*missing, *ready}
        self._record([key for key in keys if key in known], access)
        access.reused.update(key for key in ready if key not in access.inserted)
        if not missing:
            return {}
        if not self._make_room(len(missing), {*keys, *protected}):
            return None
        for key in missing:
            self.policy.insert(key, Chunk(self._place()), access)
        self.num_writing += len(missing)
        access.inserted.update(missing)
        return {key: chunks[key].place for key in missing}

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Mark chunks as written."""
        for key in keys:
            chunk = self.policy.chunks[key]
            chunk.num_readers = 0
            self.num_writing -= 1
            self._settle(key, chunk)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Drop chunks with bad contents, now or when their copies end."""
        for key in keys:
            chunk = self.policy.chunks.get(key)
            if chunk is not None and chunk.num_readers == 0:
                self.num_evictable -= 1
                self._remove(key, chunk)
            elif chunk is not None:
                chunk.is_doomed = True

    def finish(self, access: Access) -> None:
        """Count a finished request's chunks as used now."""
        if not access.is_finished:
            access.is_finished = True
            self.policy.finished(access)

    def check_invariants(self) -> None:
        """Raise AssertionError unless slots and counts add up."""
        chunks = list(self.policy.chunks.values())
        places = [chunk.place for chunk in chunks]
        assert len(set(places)) == len(places) == self.num_resident, "two chunks in one place, or a place lost"
        assert self.num_evictable == sum(chunk.num_readers == 0 for chunk in chunks), "evictable chunks and pins differ"
        assert self.num_writing == sum(not chunk.is_ready for chunk in chunks), "chunks being written and stores differ"
        assert not set(places) & set(self._free), "a free place is in use"

    def _settle(self, key: BlockKey, chunk: Chunk) -> None:
        """Handle the end of a chunk's last copy."""
        if chunk.is_doomed:
            self._remove(key, chunk)
        else:
            self.num_evictable += 1
            self.policy.unpinned(key)

    def _remove(self, key: BlockKey, chunk: Chunk) -> None:
        self.policy.remove(key)
        self._free.append(chunk.place)

    def _make_room(self, n: int, protected: set[BlockKey]) -> bool:
        """Evict unprotected chunks until n slots are free."""
        missing = n - (len(self._free) + self.num_chunks - self._num_given)
        if missing <= 0:
            return True
        evicted = self.policy.evict(missing, protected) if missing <= self.num_evictable else None
        if evicted is None:
            return False
        self.num_evictable -= len(evicted)
        self._free += [chunk.place for _, chunk in evicted]
        return True

    def _place(self) -> int:
        if self._num_given < self.num_chunks:
            self._num_given += 1
            return self._num_given - 1
        return self._free.pop()

    def _record(self, keys: Iterable[BlockKey], access: Access) -> None:
        fresh = [key for key in keys if key not in access.seen]
        access.seen.update(dict.fromkeys(fresh))
        if fresh:
            self.policy.accessed(fresh, access)

    def _count(self, keys: list[BlockKey]) -> None:
        """Count one more request for each chunk, and drop the counts of chunks not requested for long."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
        while len(self._counts) > MOST_COUNTS:
            self._counts.popitem(last=False)


MOST_COUNTS = 64_000  # of chunks that store_threshold has seen


def chunk_pool(num_chunks: int, policy: Literal["lru", "arc"] = "lru", store_threshold: int = 1) -> ChunkPool:
    """An empty pool."""
    return ChunkPool(num_chunks, LRU() if policy == "lru" else ARC(num_chunks), store_threshold)
