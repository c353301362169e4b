"""KV blocks in host memory: which chunks a step stores, what a request can load, and what has to be waited for.

Rules as in vLLM 0.33.0 (`distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`), checked step by step
against it: write-through, prompts only, a load that others do not wait for. Files below the memory are this engine's
own: what memory has lost is fetched from them when a request asks for it, and is loaded from memory then.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol

from engine.block_manager import NULL_BLOCK, BlockKey, FullGroup, Group, WindowGroup, block_hashes, cdiv
from engine.chunk_pool import Access, ChunkPool
from engine.connector import FileCopy, Transfer, Transfers
from engine.sequence import Sequence
from engine.states import MambaGroup, StoredState
from kvplan.core.errors import UnsupportedModelError


@dataclass(eq=False, slots=True)
class Offloaded:
    """A request as the connector knows it.

    keys         of each group, its whole chunks' keys
    blocks       of each group, the device's blocks it was given; those that a window has given back stay
    next_stored  of each group, the first chunk that was not offered yet
    jobs         copies under way: one load, or stores
    """

    seq: Sequence
    keys: list[list[BlockKey]]
    blocks: list[list[int]]
    next_stored: list[int]
    access: Access = field(default_factory=Access)
    jobs: set[int] = field(default_factory=set)
    is_over: bool = False
    is_distrusted: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A copy under way: watched blocks may not be given to others before it is done."""

    kind: Literal["store", "load", "save", "fetch"]
    request: Offloaded | None
    keys: tuple[BlockKey, ...]
    watched: tuple[int, ...] = ()  # of windows, which give blocks back while the request runs
    watched_at_end: tuple[int, ...] = ()  # the others


class Files(Protocol):
    """Which chunks a tier below the memory has."""

    def __contains__(self, key: BlockKey) -> bool: ...
    def drop(self, key: BlockKey) -> None: ...


class OffloadConnector:
    """Keeps the chunks of prompts in a pool beside the device's own, and in files below it."""

    def __init__(
        self, groups: tuple[Group, ...], pool: ChunkPool, *, blocks_per_chunk: int = 1, prompt_only: bool = True,
        enable_prefix_caching: bool = True, files: Files | None = None,
    ) -> None:  # fmt: skip
        for group in groups:
            kind = type(group).__name__[:-5].lower()
            if not isinstance(group, FullGroup | WindowGroup | MambaGroup):
                raise UnsupportedModelError(f"offloading: {kind} layers cannot be offloaded; remove kv_offloading_size")
            if isinstance(group, MambaGroup) and not enable_prefix_caching:
                raise UnsupportedModelError(
                    f"offloading: {kind} layers without prefix caching cannot be offloaded; "
                    "remove kv_offloading_size or enable prefix caching"
                )
        self.groups, self.pool, self.files = groups, pool, files
        self.blocks_per_chunk, self.prompt_only = blocks_per_chunk, prompt_only
        self.chunk_tokens = tuple(group.block_size * blocks_per_chunk for group in groups)
        full = [g for g, group in enumerate(groups) if isinstance(group, FullGroup)]
        # Groups of which a load brings the end: a window, or the one state there.
        self._tails = sorted(
            (g for g, group in enumerate(groups) if isinstance(group, WindowGroup | MambaGroup)),
            key=lambda g: -self._tail_chunks(g),
        )
        self._order = [*full, *self._tails]
        states = (self.chunk_tokens[g] for g, group in enumerate(groups) if isinstance(group, MambaGroup))
        self._load_unit = next(states, 1)  # tokens that a load is a multiple of
        self._alignment = _only({self.chunk_tokens[g] for g in full}, max(self.chunk_tokens))
        self._requests: dict[str, Offloaded] = {}
        self._jobs: dict[int, Job] = {}
        self._num_jobs = 0
        self._ended: list[Offloaded] = []  # since the last step
        self.num_refused = 0  # stores that the pool had no room for
        self._loads: dict[int, Transfer] = {}  # of this step
        self._saves: dict[int, FileCopy] = {}  # since the last step
        self._fetches: dict[int, FileCopy] = {}
        self._given: set[int] = set()  # blocks that this step gave to somebody
        self._watched: dict[int, set[int]] = {}  # jobs that read a block which may be given to others
        # Chunks on their way to the device, where others can share them when they are there.
        self._arriving: set[BlockKey] | None = set() if enable_prefix_caching else None

    @property
    def is_busy(self) -> bool:
        """Whether a copy is under way, or a request has ended since the last plan()."""
        return bool(self._jobs or self._ended)

    @property
    def has_jobs(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._jobs)

    def add(self, seq: Sequence) -> None:
        """Register a queued sequence."""
        keys, blocks = [list[BlockKey]() for _ in self.groups], [list[int]() for _ in self.groups]
        self._requests[seq.request_id] = Offloaded(seq, keys, blocks, [0] * len(self.groups))

    # --- loads --------------------------------------------------------------------------------------------------

    def match(self, seq: Sequence, num_tokens: int) -> int | None:
        """Number of tokens after the first num_tokens that can be loaded; None if not known before the next step."""
        request = self._requests[seq.request_id]
        for blocks in request.blocks:
            blocks.clear()
        request.next_stored = [0] * len(self.groups)  # it begins again: every chunk is offered again
        request.is_distrusted = False
        return None if request.jobs else self._num_loadable(request, num_tokens)

    def _num_loadable(self, request: Offloaded, num_tokens: int) -> int | None:
        """Shrink the hit until no group objects; None when a chunk that it needs is still being copied."""
        limit = request.seq.num_tokens - bool(self._tails)
        limit = limit // self._load_unit * self._load_unit
        hit, is_pending, again = 0, False, self._order
        while again:
            order, again, saw_tail = again, list[int](), False
            for g in order:
                size = self.chunk_tokens[g]
                keys = self._keys(request, g)
                limit = min(limit, len(keys) * size)
                if limit - num_tokens < size:
                    return 0
                first = num_tokens // size
                is_tail = g in self._tails
                keys = keys[first : cdiv(limit, size)]
                if self.files is not None:
                    self._fetch(request, keys[-self._tail_chunks_to(g, limit) :] if is_tail else keys, self.files)
                num_chunks = self._tail_end(g, keys, limit) if is_tail else self._run_len(keys)
                if num_chunks == 0:
                    return 0
                if num_chunks is None:
                    is_pending = True
                else:
                    limit = min(limit, (first + num_chunks) * size)
                if limit - num_tokens < size:
                    return 0
                if limit - num_tokens < hit:
                    if is_pending:
                        is_pending, again = False, self._order
                    elif saw_tail and not again:
                        again = self._tails
                saw_tail |= is_tail
                hit = limit - num_tokens
        if is_pending or self._is_arriving(request, num_tokens, num_tokens + hit):
            return None
        return hit

    def _fetch(self, request: Offloaded, keys: list[BlockKey], files: Files) -> None:
        """Order copies from files of what the pool lacks of these chunks, up to the first that no file has."""
        absent = list[BlockKey]()
        for key in keys:
            if self.pool.lookup(key) == "miss":
                if key not in files:
                    break
                absent.append(key)
        places = self.pool.reserve(absent, request.access, protected=keys) if absent else None
        if places:
            number = self._begin(Job("fetch", request, tuple(places)))
            self._fetches[number] = tuple(places.items())

    def _run_len(self, keys: list[BlockKey]) -> int | None:
        """Leading chunks that are here; None when one of them is still being written."""
        lookups = [self.pool.lookup(key) for key in keys]
        count = next((i for i, lookup in enumerate(lookups) if lookup == "miss"), len(lookups))
        return None if "pending" in lookups[:count] else count

    def _tail_end(self, g: int, keys: list[BlockKey], limit: int) -> int | None:
        """End of the last run of chunks that is a window, or a state; None while one of them is being written."""
        needed = self._tail_chunks_to(g, limit)
        run, is_pending = 0, False
        for i in reversed(range(len(keys))):
            lookup = self.pool.lookup(keys[i])
            if lookup == "miss":
                run, is_pending, needed = 0, False, self._tail_chunks(g)
            else:
                run, is_pending = run + 1, is_pending or lookup == "pending"
            if run == needed:
                return None if is_pending else i + needed
        return None if is_pending else run

    def _tail_chunks(self, g: int) -> int:
        """Chunks that a window is made of; one has the state."""
        group = self.groups[g]
        return cdiv(group.window, self.chunk_tokens[g]) if isinstance(group, WindowGroup) else 1

    def _tail_chunks_to(self, g: int, num_tokens: int) -> int:
        """The same of the window before token num_tokens, whose last chunk may be cut off."""
        group, size = self.groups[g], self.chunk_tokens[g]
        if not isinstance(group, WindowGroup):
            return 1
        return max(self._tail_chunks(g), cdiv(group.window - 1 + -num_tokens % size, size))

    def _is_arriving(self, request: Offloaded, start: int, end: int) -> bool:
        """Whether somebody else's load brings one of these tokens' chunks: they can be shared soon."""
        if not self._arriving:
            return False
        for g, size in enumerate(self.chunk_tokens):
            keys = self._keys(request, g)[start // size : cdiv(end, size)]
            if g in self._tails:
                keys = keys[-self._tail_chunks_to(g, end) :]
            if not self._arriving.isdisjoint(keys):
                return True
        return False

    def load(self, seq: Sequence, num_tokens: int, num_loaded: int) -> None:
        """Load num_loaded tokens after the first num_tokens into the sequence's tables, which have room for them."""
        request, end = self._requests[seq.request_id], num_tokens + num_loaded
        keys, targets = list[BlockKey](), list[tuple[int, ...]]()
        for g, group in enumerate(self.groups):
            table = seq.block_table[g]
            self._given.update(block for block in table if block != NULL_BLOCK)
            num_blocks = cdiv(end, group.block_size)
            fresh = range(cdiv(num_tokens, group.block_size), num_blocks)
            start = next((i for i in fresh if table[i] != NULL_BLOCK), num_blocks)
            for chunk in range(start // self.blocks_per_chunk, cdiv(num_blocks, self.blocks_per_chunk)):
                if start < num_blocks:
                    keys.append(self._keys(request, g)[chunk])
                    numbers = range(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)
                    targets.append(tuple(table[i] if start <= i < num_blocks else NULL_BLOCK for i in numbers))
            request.next_stored[g] = cdiv(end, self.chunk_tokens[g])
        places = self.pool.pin(keys, request.access)
        number = self._begin(Job("load", request, tuple(keys)))
        self._loads[number] = Transfer(seq.request_id, tuple(zip(places, targets, strict=True)))
        if self._arriving is not None:
            self._arriving.update(keys)

    # --- stores -------------------------------------------------------------------------------------------------

    def plan(
        self,
        num_tokens: Mapping[Sequence, int],
        new: Iterable[Sequence],
        preempted: Iterable[Sequence],
        states: Iterable[StoredState] = (),
    ) -> Transfers:
        """Copies for a step that was just scheduled; `new` are the sequences admitted in it, `states` it stores."""
        self._take_tables(num_tokens, set(new))
        transfers = self.take_orders()
        for seq in preempted:
            transfers.flush |= self._requests[seq.request_id].jobs - transfers.loads.keys()
        if self._watched:
            transfers.flush.update(*(self._watched[block] for block in self._given & self._watched.keys()))
        self._store_states(states, transfers)
        ended, self._ended = self._ended, []
        running = [self._requests[seq.request_id] for seq in num_tokens]
        for request in chain(running, ended):
            self._store(request, transfers)
        for request in ended:
            request.is_over = True
            self.pool.finish(request.access)
            self._forget(request)
        self._given = set()
        return transfers

    def take_orders(self) -> Transfers:
        """The copies ordered since the last step, without what a step stores."""
        transfers = Transfers(loads=self._loads, saves=self._saves, fetches=self._fetches)
        self._loads, self._saves, self._fetches = {}, {}, {}
        return transfers

    def _take_tables(self, num_tokens: Mapping[Sequence, int], new: set[Sequence]) -> None:
        """Note which blocks each sequence was given in this step."""
        lengths = dict[Offloaded, list[int]]()
        for seq in num_tokens:
            request = self._requests[seq.request_id]
            if seq in new:
                request.blocks = [list[int]() for _ in self.groups]
            lengths[request] = [len(blocks) for blocks in request.blocks]
            for blocks, table in zip(request.blocks, seq.block_table, strict=True):
                fresh = table[len(blocks) :]
                blocks += fresh
                self._given.update(block for block in fresh if block != NULL_BLOCK)
        if not self._tails or not self._given:
            return
        for request in chain(self._requests.values(), self._ended):  # a window's old block may be another's by now
            for g in self._tails:
                blocks = request.blocks[g]
                end = lengths[request][g] if request in lengths else len(blocks)
                for i in range(request.next_stored[g] * self.blocks_per_chunk, end):
                    if blocks[i] in self._given:
                        blocks[i] = NULL_BLOCK

    def _store(self, request: Offloaded, transfers: Transfers) -> None:
        """Order the copies of a request's chunks that are whole after this step and not in the pool."""
        if request.is_distrusted:
            return
        num_tokens = self._num_storable_tokens(request)
        ends = [self._num_storable(request, g, num_tokens) for g in range(len(self.groups))]
        if not request.seq.is_finished and all(end <= old for end, old in zip(ends, request.next_stored, strict=True)):
            return
        chunks = dict[BlockKey, tuple[int, int]]()
        for g, end in enumerate(ends):
            if isinstance(self.groups[g], MambaGroup):
                continue  # _store_states
            keys = self._keys(request, g)
            chunks |= {keys[i]: (g, i) for i in self._chunks_to_store(request, g, end)}
        places = self.pool.reserve(list(chunks), request.access) if chunks else {}
        if places is None:  # no room: they are offered again with the next step
            self.num_refused += 1
            return
        request.next_stored = [max(old, end) for old, end in zip(request.next_stored, ends, strict=True)]
        if not places:
            return
        copies, watched, watched_at_end = [], list[int](), list[int]()
        for key, place in places.items():
            g, i = chunks[key]
            blocks = request.blocks[g][i * self.blocks_per_chunk : (i + 1) * self.blocks_per_chunk]
            copies.append((place, tuple(blocks)))
            watch = watched if g in self._tails else watched_at_end
            watch += [block for block in blocks if block != NULL_BLOCK]
        number = self._begin(Job("store", request, tuple(places), tuple(watched), tuple(watched_at_end)))
        transfers.stores[number] = Transfer(request.seq.request_id, tuple(copies))
        self._watch(number, watched)
        if request.seq.is_finished:
            self._watch(number, watched_at_end)
            if not self._given.isdisjoint(watched_at_end):
                transfers.flush.add(number)

    def _store_states(self, states: Iterable[StoredState], transfers: Transfers) -> None:
        """Order a copy of each state that the step keeps for others, by itself, if it ends a chunk."""
        by_group = sorted(states, key=lambda stored: stored.group)
        order = {seq: i for i, seq in enumerate(dict.fromkeys(stored.seq for stored in by_group))}
        for stored in sorted(by_group, key=lambda stored: order[stored.seq]):
            request, seq, g = self._requests[stored.seq.request_id], stored.seq, stored.group
            last = seq.num_prompt_tokens if self.prompt_only else seq.num_tokens
            if request.is_distrusted or stored.num_tokens > last or stored.num_tokens % self.chunk_tokens[g]:
                continue
            key = self._keys(request, g)[stored.num_tokens // self.chunk_tokens[g] - 1]
            places = self.pool.reserve([key], request.access)
            if places is None:
                self.num_refused += 1
            elif places:
                number = self._begin(Job("store", request, (key,), (stored.block,)))
                blocks = (NULL_BLOCK,) * (self.blocks_per_chunk - 1) + (stored.block,)
                transfers.stores[number] = Transfer(seq.request_id, ((places[key], blocks),))
                self._watch(number, (stored.block,))

    def _num_storable_tokens(self, request: Offloaded) -> int:
        """Tokens whose KV is there after this step and is worth keeping."""
        seq = request.seq
        if seq.finish_reason in ("length", "stop"):
            computed = max(seq.num_prompt_tokens, seq.num_tokens - 1)  # the last token's is never stored
        else:
            computed = seq.num_computed_tokens
        return min(computed, seq.num_prompt_tokens if self.prompt_only else seq.num_tokens)

    def _num_storable(self, request: Offloaded, g: int, num_tokens: int) -> int:
        """Leading chunks of a group that are whole."""
        num_blocks = len(request.blocks[g])
        num_keys = request.seq.num_tokens // self.chunk_tokens[g]
        return min(num_tokens // self.chunk_tokens[g], num_blocks // self.blocks_per_chunk, num_keys)

    def _chunks_to_store(self, request: Offloaded, g: int, end: int) -> list[int]:
        """Of the chunks before `end` that were not offered, those that a load may want and that are all there."""
        chunks = []
        for i in range(request.next_stored[g], end):
            numbers = range(i * self.blocks_per_chunk, (i + 1) * self.blocks_per_chunk)
            blocks = request.blocks[g][numbers.start : numbers.stop]
            reached = [self._is_reached(request.seq, g, number) for number in numbers]
            is_whole = all(block != NULL_BLOCK or not is_read for block, is_read in zip(blocks, reached, strict=True))
            if blocks[-1] != NULL_BLOCK and any(reached) and is_whole:
                chunks.append(i)
        return chunks

    def _is_reached(self, seq: Sequence, g: int, block: int) -> bool:
        """Whether a load reads a block: of a window only where the prompt ends, or a prefix that others share."""
        group = self.groups[g]
        if not isinstance(group, WindowGroup) or self._alignment is None or self._alignment % group.block_size:
            return True
        num_blocks = cdiv(group.window - 1, group.block_size)
        for boundary in (seq.num_prompt_tokens - 1, seq.full_attention_hit_len):
            end = boundary // self._alignment * self._alignment // group.block_size
            if end - num_blocks <= block < end:
                return True
        return False

    # --- jobs ---------------------------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """Handle the end of a sequence, whose blocks are about to be freed."""
        request = self._requests[seq.request_id]
        self._ended.append(request)
        for number in request.jobs:
            self._watch(number, self._jobs[number].watched_at_end)

    def distrust(self, seq: Sequence) -> None:
        """Invalidate what a sequence has stored."""
        request = self._requests[seq.request_id]
        request.is_distrusted = True
        self.pool.drop(request.access.inserted)
        if self.files is not None:
            for key in request.access.inserted:
                self.files.drop(key)

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> list[Sequence]:
        """Complete jobs; returns the sequences whose loads are done, including sequences that have ended.

        unread  chunks that a fetch has not brought: their file was gone or damaged
        """
        loaded = []
        for number in jobs:
            job = self._jobs.pop(number)
            match job.kind:
                case "store":
                    self.pool.stored(job.keys)
                    self._save(job.keys)
                case "fetch":
                    self.pool.drop(key for key in job.keys if key in unread)
                    self.pool.stored(job.keys)
                case "save":
                    self.pool.unpin(job.keys)
                case "load":
                    self.pool.unpin(job.keys)
                    assert job.request is not None
                    loaded.append(job.request.seq)
                    if self._arriving is not None:
                        self._arriving.difference_update(job.keys)
            for block in (*job.watched, *job.watched_at_end):
                if block in self._watched:
                    self._watched[block].discard(number)
                    if not self._watched[block]:
                        del self._watched[block]
            if job.request is not None:
                job.request.jobs.remove(number)
                self._forget(job.request)
        return loaded

    def _save(self, keys: tuple[BlockKey, ...]) -> None:
        """Order copies to files of chunks that were stored just now."""
        if self.files is None:
            return
        fresh = tuple(key for key in keys if key not in self.files and self.pool.lookup(key) == "hit")
        if fresh:
            number = self._begin(Job("save", None, fresh))
            self._saves[number] = tuple(zip(fresh, self.pool.pin(fresh), strict=True))

    def _begin(self, job: Job) -> int:
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        self._jobs[number] = job
        if job.request is not None:
            job.request.jobs.add(number)
        return number

    def _watch(self, number: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._watched.setdefault(block, set()).add(number)

    def _forget(self, request: Offloaded) -> None:
        """Drop a request that is over and that nothing is copied for."""
        if request.is_over and not request.jobs and self._requests.get(request.seq.request_id) is request:
            del self._requests[request.seq.request_id]

    def _keys(self, request: Offloaded, g: int) -> list[BlockKey]:
        """Keys of a request's whole chunks: a chunk's is its last block's, which stands for all before it."""
        hashes, keys = block_hashes(request.seq, self.groups[g].block_size), request.keys[g]
        for i in range((len(keys) + 1) * self.blocks_per_chunk - 1, len(hashes), self.blocks_per_chunk):
            keys.append((hashes[i], g))
            request.access.positions[keys[-1]] = len(keys) * self.chunk_tokens[g]
        return keys


def _only(sizes: set[int], default: int) -> int | None:
    """The size that all have; None where they differ; the default where there is none."""
    return None if len(sizes) > 1 else next(iter(sizes), default)
