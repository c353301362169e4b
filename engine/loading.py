"""Sequences that wait for KV which a connector brings from beyond the device.

Rules as in vLLM 0.33.0's scheduler with a KV connector (`v1/core/sched/scheduler.py`), checked step by step against it.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import Protocol

from engine.block_manager import NULL_BLOCK, BlockKey, Group, PrefixHit
from engine.connector import Transfers
from engine.contiguous import ContiguousManager
from engine.scheduler import Batch, Extension, Outcome, PrefixCacheStats, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup, StateStep, StoredState
from kvplan.core.errors import UsageError


class Connector(Protocol):
    """Whoever knows what can be loaded, and orders it; see OffloadConnector."""

    def add(self, seq: Sequence) -> None: ...
    def distrust(self, seq: Sequence) -> None: ...
    def match(self, seq: Sequence, num_tokens: int) -> int | None: ...
    def load(self, seq: Sequence, num_tokens: int, num_loaded: int) -> None: ...
    def plan(
        self, num_tokens: Mapping[Sequence, int], new: Iterable[Sequence], preempted: Iterable[Sequence],
        states: Iterable[StoredState] = (),
    ) -> Transfers: ...  # fmt: skip
    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> list[Sequence]: ...
    def finish(self, seq: Sequence) -> None: ...


class Loading(Extension):
    """Asks the connector at admission, and keeps the sequences that wait, with blocks, for what is loaded into them."""

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.loading: list[Sequence] = []  # the next to run first
        self.external_cache_stats = PrefixCacheStats()  # tokens looked up in and found by the connector
        self._loaded: dict[Sequence, bool] = {}  # of those, the ones whose load is done; whether others can share it
        self._orphans: dict[Sequence, None] = {}  # ended while they were loading: their blocks are still written to
        # With several batches in flight: blocks that one of them may still write, which a load must not be given.
        self._detached: deque[tuple[int, list[int]]] = deque()
        self._num_scheduled = 0  # batches with tokens
        self._num_applied = 0
        self._num_later = 0  # that wait, since the last step, for chunks that others are storing or loading

    def attach(self, scheduler: Scheduler) -> None:
        super().attach(scheduler)
        self.blocks = scheduler.blocks
        if isinstance(self.blocks, ContiguousManager):
            raise UsageError("offloading: allocator must be 'paged'; remove kv_offloading_size")

    @property
    def num_deferred(self) -> int:
        return len(self.loading) + self._num_later

    def holders(self) -> tuple[list[Sequence], list[int]]:
        return [*self.loading, *self._orphans], [block for _, blocks in self._detached for block in blocks]

    def add(self, seq: Sequence) -> None:
        self.connector.add(seq)

    def distrust(self, seq: Sequence) -> None:
        """What it has stored is not kept."""
        self.connector.distrust(seq)

    def begin_step(self, batch: Batch) -> None:
        self._num_later = 0

    def end_step(self, batch: Batch) -> None:
        self._num_scheduled += bool(batch.num_tokens)
        admitted, states = (*batch.new, *batch.resumed), batch.extra(StateStep).stored
        batch.extras[Transfers] = self.connector.plan(batch.num_tokens, admitted, batch.preempted, states)

    def update(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> None:
        self._num_applied += bool(batch.num_tokens)
        while self._detached and self._detached[0][0] <= self._num_applied:
            self.blocks.pool.give_back(self._detached.popleft()[1])

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> None:
        """Copies are done; see OffloadConnector.complete."""
        for seq in self.connector.complete(jobs, unread):
            if seq in self._orphans:
                del self._orphans[seq]
                self.blocks.release(seq)
            else:
                self._loaded[seq] = False

    # --- admission ----------------------------------------------------------------------------------------------

    def may_admit(self, batch: Batch) -> bool:
        """Those that hold blocks come first; nobody else is admitted when the next of them does not fit."""
        for seq in tuple(self.loading):
            if not batch.budget or len(self.scheduler.running) >= self.scheduler.config.max_num_seqs:
                return False
            if seq in self._loaded and self.scheduler.is_ready(seq) and not self._run_loaded(seq, batch):
                return False
        return True

    def _run_loaded(self, seq: Sequence, batch: Batch) -> bool:
        """Go on after what was loaded; False when the blocks for the rest are not free."""
        scheduler = self.scheduler
        if not self._loaded[seq]:
            self._loaded[seq] = True
            self.blocks.publish(seq, seq.num_computed_tokens)
            seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)  # the last one is computed
        start = seq.num_computed_tokens
        n = scheduler.chunk(seq, start, seq.num_tokens - start, batch)
        if not n or (self.blocks.num_to_finish(seq) > self._num_free and scheduler.config.reserve_full_prompt):
            return False
        if not self.blocks.grow(seq, start + n, num_kept=scheduler.num_spare_blocks):
            return False
        self.loading.remove(seq)
        scheduler.start(seq, n, batch)
        del self._loaded[seq]
        return True

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Count what an admitted sequence looked up and did not find; one that was loaded is counted already."""
        if seq in batch.hits and seq not in self._loaded and not seq.skips_cache:
            self.external_cache_stats.count(seq, seq.num_tokens - batch.hits[seq], 0)

    def decide(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> Outcome | None:
        num_tokens = 0 if seq.skips_cache else self.connector.match(seq, hit.num_tokens)
        if num_tokens is None:
            self._num_later += 1
            return "later"
        if not num_tokens:
            return None
        end = hit.num_tokens + num_tokens
        hit_to_load = beyond(hit, end, self.blocks.groups)
        if self._fits_to_load(seq, hit_to_load, end):
            self._load(seq, hit, hit_to_load, num_tokens)
            return "gone"
        return "full" if self.scheduler.running or self.scheduler.are_blocks_due else None

    def _fits_to_load(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether blocks are free for what is loaded beside those that sequences admitted before it still need."""
        reserves = self.scheduler.config.reserve_full_prompt
        if reserves and self.blocks.num_reserved(seq, hit, seq.num_tokens) > self._num_free:
            return False
        promised = sum(self.blocks.num_to_finish(other) for other in (*self.scheduler.running, *self.loading))
        return self.blocks.num_needed(seq, hit, num_tokens) <= self._num_free - promised

    def _load(self, seq: Sequence, hit: PrefixHit, hit_to_load: PrefixHit, num_tokens: int) -> None:
        scheduler, end = self.scheduler, hit_to_load.num_tokens
        if self.blocks.enable_prefix_caching:
            scheduler.prefix_cache_stats.count(seq, seq.num_tokens, hit.num_tokens)
        self.external_cache_stats.count(seq, seq.num_tokens - hit.num_tokens, num_tokens)
        self.blocks.admit(seq, hit_to_load, end, are_computed=False)
        self.connector.load(seq, hit.num_tokens, num_tokens)
        seq.num_computed_tokens = end
        if not seq.num_preemptions:
            seq.num_loaded_tokens = min(end, seq.num_tokens - 1) - hit.num_tokens  # the last token is computed
        seq.status = "loading"
        scheduler.waiting.remove(seq)
        self.loading.append(seq)
        if scheduler.config.policy == "priority":
            self.loading.sort(key=lambda other: (other.priority, other.arrival))

    @property
    def _num_free(self) -> int:
        """Free blocks that an admission may take."""
        return self.blocks.num_free_blocks - self.scheduler.num_spare_blocks

    # --- blocks that are not free at once -----------------------------------------------------------------------

    def frees_at_once(self, seq: Sequence) -> bool:
        return self.scheduler.config.batch_queue_depth == 1 or not seq.num_in_flight_tokens

    def detain(self, seq: Sequence) -> bool:
        if seq in self._orphans:  # complete() does
            return True
        if seq.is_finished:
            self.blocks.drop_unread(seq)  # what a window has passed goes first
        if self.frees_at_once(seq):
            return False
        self._detached.append((self._num_scheduled, self.blocks.detach(seq)))
        return True

    def retire(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.connector.finish(seq)
            if seq in self.loading:
                self.loading.remove(seq)
                if self._loaded.pop(seq, None) is None:
                    self._orphans[seq] = None


def beyond(hit: PrefixHit, num_tokens: int, groups: tuple[Group, ...]) -> PrefixHit:
    """The same hit for a sequence whose next token is at num_tokens, later: windows and states read less of it."""
    blocks, passed = list[tuple[int, ...]](), list[int]()
    for group, own in zip(groups, hit.blocks, strict=True):
        num_skipped = group.num_skipped_tokens(num_tokens) // group.block_size
        blocks.append((NULL_BLOCK,) * num_skipped + own[num_skipped:])
        passed += own[-1:] if isinstance(group, MambaGroup) else ()
    return PrefixHit(num_tokens, tuple(blocks), tuple(passed))
