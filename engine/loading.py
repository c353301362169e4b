"""A scheduler whose sequences may wait for KV that a connector brings from beyond the device.

Rules as in vLLM 0.33.0's scheduler with a KV connector (`v1/core/sched/scheduler.py`), checked step by step against it.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping

from engine.block_manager import BlockKey, BlockManager, Group, PrefixHit
from engine.connector import Connector
from engine.scheduler import Batch, Outcome, PrefixCacheStats, Scheduler, SchedulerConfig
from engine.sequence import FinishReason, Sequence
from kvplan.core.errors import SettingError, UsageError


class LoadingScheduler(Scheduler):
    """A Scheduler, and the sequences that hold blocks and wait for what is loaded into them."""

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...], connector: Connector
    ) -> None:
        super().__init__(config, num_blocks, groups)
        if not isinstance(self.blocks, BlockManager):
            raise UsageError(f"offloading: allocator must be 'paged' ({config.allocator!r}); remove kv_offloading_size")
        if config.prefix_match_unit is not None:
            raise SettingError("", ("kv_offloading_size",), "cannot be combined with prefix_match_unit", "remove it")
        if config.encoder is not None:
            raise SettingError("", ("kv_offloading_size",), "cannot be combined with images in prompts", "remove it")
        self.paged = self.blocks
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

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.loading)

    @property
    def num_deferred(self) -> int:
        return len(self.loading) + self._num_later

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.connector.add(seq)

    def schedule(self) -> Batch:
        self._num_later = 0
        batch = super().schedule()
        self._num_scheduled += bool(batch.num_tokens)
        admitted = (*batch.new, *batch.resumed)
        batch.transfers = self.connector.plan(batch.num_tokens, admitted, batch.preempted, self.paged.stored_states)
        return batch

    def update(self, batch: Batch, sampled: Mapping[str, int]) -> list[Sequence]:
        self._num_applied += bool(batch.num_tokens)
        while self._detached and self._detached[0][0] <= self._num_applied:
            self.paged.pool.give_back(self._detached.popleft()[1])
        return super().update(batch, sampled)

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> None:
        """Copies are done; see Connector.complete."""
        for seq in self.connector.complete(jobs, unread):
            if seq in self._orphans:
                del self._orphans[seq]
                self.paged.release(seq)
            else:
                self._loaded[seq] = False

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """What a request that went wrong has stored is not kept."""
        seq = self._unfinished.get(request_id)
        if seq is not None and reason == "error":
            self.connector.distrust([seq])
        super().finish(request_id, reason, error)

    def preempt(self, request_id: str) -> None:
        """As a Scheduler; who is asked for by name has read what is wrong, and has perhaps stored it."""
        seq = self._unfinished.get(request_id)
        if seq is not None and seq.status == "running":
            self.connector.distrust([seq])
        super().preempt(request_id)

    # --- admission ----------------------------------------------------------------------------------------------

    def _schedule_waiting(self, batch: Batch) -> None:
        """Those that hold blocks come first; nobody else is admitted when the next of them does not fit."""
        for seq in tuple(self.loading):
            if not batch.budget or len(self.running) >= self.config.max_num_seqs:
                return
            adapters = {other.adapter for other in self.running} - {None}
            if seq in self._loaded and not self._lacks_slot(seq, adapters) and not self._run_loaded(seq, batch):
                return
        super()._schedule_waiting(batch)

    def _run_loaded(self, seq: Sequence, batch: Batch) -> bool:
        """Go on after what was loaded; False when the blocks for the rest are not free."""
        if not self._loaded[seq]:
            self._loaded[seq] = True
            self.paged.publish(seq, seq.num_computed_tokens)
            seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)  # the last one is computed
        n = self._chunk(seq, seq.num_computed_tokens, seq.num_tokens - seq.num_computed_tokens, batch)
        if n == 0 or (self.paged.num_to_finish(seq) > self._num_free and self.config.reserve_full_prompt):
            return False
        if not self.paged.grow(seq, seq.num_computed_tokens + n, num_kept=self._num_kept):
            return False
        self.loading.remove(seq)
        del self._loaded[seq]
        (batch.resumed if seq.num_preemptions else batch.new).append(seq)
        batch.hits[seq] = seq.num_computed_tokens
        batch.put(seq, n)
        seq.status = "running"
        self.running.append(seq)
        return True

    def _try_to_admit(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> Outcome:
        num_tokens = 0 if seq.skips_cache else self.connector.match(seq, hit.num_tokens)
        if num_tokens is None:
            self._num_later += 1
            return "later"
        if num_tokens and self._fits_to_load(seq, hit, hit.num_tokens + num_tokens):
            self._load(seq, hit, num_tokens)
            return "gone"
        if num_tokens and self._has_holders:
            return "full"
        queries = seq.num_tokens - hit.num_tokens
        outcome = super()._try_to_admit(seq, hit, batch)
        if outcome == "gone" and seq.status == "running" and not seq.skips_cache:
            self.external_cache_stats.count(seq, queries, 0)
        return outcome

    def _fits_to_load(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether blocks are free for what is loaded beside those that sequences admitted before it still need."""
        hit = self.paged.beyond(hit, num_tokens)
        if self.config.reserve_full_prompt and self.paged.num_reserved(seq, hit, seq.num_tokens) > self._num_free:
            return False
        promised = sum(self.paged.num_to_finish(other) for other in (*self.running, *self.loading))
        return self.paged.num_needed(seq, hit, num_tokens) <= self._num_free - promised

    def _load(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        end = hit.num_tokens + num_tokens
        if self.paged.enable_prefix_caching:
            self.prefix_cache_stats.count(seq, seq.num_tokens, hit.num_tokens)
        self.external_cache_stats.count(seq, seq.num_tokens - hit.num_tokens, num_tokens)
        self.paged.admit(seq, self.paged.beyond(hit, end), end, are_computed=False)
        self.connector.load(seq, hit.num_tokens, num_tokens)
        seq.num_computed_tokens = end
        if not seq.num_preemptions:
            seq.num_loaded_tokens = min(end, seq.num_tokens - 1) - hit.num_tokens  # the last token is computed
        seq.status = "loading"
        self.waiting.remove(seq)
        self.loading.append(seq)
        if self.config.policy == "priority":
            self.loading.sort(key=lambda other: (other.priority, other.arrival))

    @property
    def _num_free(self) -> int:
        """Free blocks that an admission may take."""
        return self.paged.num_free_blocks - self._num_kept

    @property
    def _num_kept(self) -> int:
        return self._num_watermark_blocks if self.running else 0

    # --- blocks that are not free at once -----------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        return super()._is_alone and not self.loading and not self._detached and not self._orphans

    @property
    def _has_holders(self) -> bool:
        return bool(self.running or self.loading or self._detached or self._orphans)

    def _are_free_at_once(self, victim: Sequence) -> bool:
        return self.config.batch_queue_depth == 1 or not victim.num_in_flight_tokens

    def _give_back(self, seq: Sequence) -> None:
        if seq in self._orphans:  # complete() does
            return
        if seq.is_finished:
            self.paged.drop_unread(seq)  # what a window has passed goes first
        if self._are_free_at_once(seq):
            self.paged.release(seq)
        else:
            self._detached.append((self._num_scheduled, self.paged.detach(seq)))

    def _retire(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.connector.finish(seq)
            if seq in self.loading:
                self.loading.remove(seq)
                if self._loaded.pop(seq, None) is None:
                    self._orphans[seq] = None
        super()._retire(seqs)

    def check_invariants(self) -> None:
        """As a Scheduler's, and those that load hold blocks."""
        assert all(seq.status == "running" for seq in self.running), "running holds a sequence that does not run"
        assert all(seq.status == "loading" for seq in self.loading), "loading holds a sequence that does not load"
        assert not any(seq.block_table for seq in self.waiting), "a waiting sequence holds blocks"
        queued = {seq.request_id: seq for seq in (*self.waiting, *self.running, *self.loading)}
        assert queued == self._unfinished, "queues and unfinished requests differ"
        detached = [block for _, blocks in self._detached for block in blocks]
        self.paged.check_invariants((*self.running, *self.loading, *self._orphans), detached)
