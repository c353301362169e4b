"""Who runs in the next step, with how many tokens, and who gives way: continuous batching under one token budget.

Rules as in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `async_scheduler.py`), checked step by step against it.
"""

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Literal, assert_never

from engine.block_manager import BlockManager, Group, MambaGroup, PrefixHit, num_empty_slots
from engine.connector import NO_TRANSFERS, Transfers
from engine.contiguous import ContiguousManager
from engine.draft_rules import NO_DRAFTS, DraftRules, SpeculationStats
from engine.encoder_rules import EncoderRules
from engine.sequence import FinishReason, Sequence
from engine.states import StateBlockManager
from kvplan.core.errors import InvalidInputError, UsageError

Allocator = BlockManager | ContiguousManager
# Of a waiting sequence: it waits no more; it cannot run yet, others may; nobody else is admitted in this step.
Outcome = Literal["gone", "later", "full"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy, by their vLLM names where vLLM has them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # 0: no cap on one sequence's share of a step
    reserve_full_prompt: bool = True  # admit only when all known tokens fit, not just the first chunk
    watermark: float = 0.0  # fraction of the pool kept free at admission
    batch_queue_depth: int = 1  # 2: the next batch is scheduled before this one's tokens are known
    # contiguous: max_model_len each at admission, no prefix cache; static: and nobody joins a batch that has begun
    allocator: Literal["paged", "contiguous", "static"] = "paged"
    max_loras: int = 0  # adapters that sequences may run with at once
    drafts: DraftRules = NO_DRAFTS  # speculation: engine/drafting.py
    encoder: EncoderRules | None = None  # of images: engine/encoding.py
    enable_chunked_prefill: bool = True  # False: a prompt waits until a step has room for all of it
    adaptive_long_prefill_threshold: bool = False  # the threshold is at least an equal share of a step
    prefill_schedule_interval: int = 1  # prefills run in every n-th step only, while others decode
    prefix_match_unit: int | None = None  # with recurrent states: prefixes may end within blocks, at a multiple of it
    pipeline_stages: int = 1  # of the batches in flight; one more than there are stages: async scheduling

    @property
    def is_async(self) -> bool:
        """Whether a step may be scheduled for a token that is still being sampled."""
        return self.batch_queue_depth > self.pipeline_stages


@dataclass(slots=True)
class Batch:
    """What one step computes: tokens per sequence, in order, and how it came about."""

    budget: int  # tokens that this step still has room for
    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    samples: list[Sequence] = field(default_factory=list)  # reach their last known token, so sample the next
    new: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)  # larger than the whole pool
    hits: dict[Sequence, int] = field(default_factory=dict)  # prefix hits of the new and resumed, in tokens
    has_prefill: bool = False  # a chunk of a prompt, beside who was admitted to it
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy before it runs, (from, to) each
    transfers: Transfers = NO_TRANSFERS  # what is copied to and from memory beyond the device

    encoder_inputs: dict[Sequence, list[int]] = field(default_factory=dict)  # images to encode, engine/encoding.py
    encoder_evicted: list[str] = field(default_factory=list)  # images whose outputs make room for those

    # With speculation (engine/drafting.py):
    overhead: int = 0  # tokens of the budget that each sequence takes beside its own
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)  # the last ones of its tokens are guesses
    padded: list[Sequence] = field(default_factory=list)  # whose drafts are fillers
    skips_drafts: bool = False  # nobody can use what would be guessed after it
    num_next_drafts: int = 0  # to guess after it

    def put(self, seq: Sequence, n: int) -> None:
        """Compute the next n tokens of a sequence in this step."""
        self.num_tokens[seq] = n
        self.budget -= n + self.overhead

    def take_out(self, seq: Sequence) -> bool:
        """Undo put(); False when the sequence was not in the batch."""
        n = self.num_tokens.pop(seq, 0)
        if n:
            self.budget += n + self.overhead
        return n > 0


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and found at admission; preempted sequences that come back are counted apart."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def count(self, seq: Sequence, num_queries: int, num_hits: int) -> None:
        """Add an admission: the tokens that were looked up and those that were found."""
        if seq.num_preemptions:
            self.preempted_requests += 1
            self.preempted_queries += num_queries
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_queries
            self.hits += num_hits


def allocator(config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...]) -> Allocator:
    """The block manager that a config names, for a pool of num_blocks blocks, the null block included."""
    has_states = config.enable_prefix_caching and any(isinstance(group, MambaGroup) for group in groups)
    match config.allocator:
        case "paged" if has_states:
            if config.drafts.drops_last_block:
                raise UsageError("speculation: with recurrent states block hashes have to look ahead; let them")
            return StateBlockManager(
                num_blocks,
                groups,
                max_model_len=config.max_model_len,
                max_in_flight_tokens=config.max_num_batched_tokens * config.batch_queue_depth,
                max_step_tokens=config.max_num_batched_tokens,
                hash_lookahead=config.drafts.hash_lookahead,
                prefix_match_unit=config.prefix_match_unit,
            )
        case "paged":
            return BlockManager(
                num_blocks,
                groups,
                max_model_len=config.max_model_len,
                max_in_flight_tokens=config.max_num_batched_tokens * config.batch_queue_depth,
                max_step_tokens=config.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
                hash_lookahead=config.drafts.hash_lookahead,
                drops_last_block=config.drafts.drops_last_block,
            )
        case "contiguous" | "static":
            return ContiguousManager(num_blocks, groups, max_model_len=config.max_model_len)
        case _:
            assert_never(config.allocator)


class Scheduler:
    """Owns the waiting and the running sequences and the block manager."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...]) -> None:
        self.config = config
        self.blocks = allocator(config, num_blocks, groups)
        self.waiting: list[Sequence] = []  # the next to be admitted first
        self.running: list[Sequence] = []  # in order of admission
        self.prefix_cache_stats = PrefixCacheStats()
        self.num_preemptions = 0
        self.draft_stats: SpeculationStats | None = None  # engine/drafting.py counts
        self._unfinished: dict[str, Sequence] = {}  # waiting or running, by request id
        self._num_arrivals = 0
        self._is_forming = True  # of a static batch: whether who waits may still join it
        self._num_watermark_blocks = int(config.watermark * num_blocks)
        self._num_ahead = config.drafts.lookahead  # slots past a step's tokens
        self._is_async = config.is_async
        self._num_schedules = 0
        self._num_steps = 0  # of those, the ones that had something to do
        self._last_prefill_step = -config.prefill_schedule_interval
        self._is_behind = False  # the last step that admitted prompts could not take all that waited
        self._holds_prefills = False  # this step leaves them to a later one, see prefill_schedule_interval

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._unfinished)

    @property
    def unfinished(self) -> list[Sequence]:
        """Who waits or runs, in order of arrival."""
        return list(self._unfinished.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run."""
        return len(self.waiting)

    @property
    def num_deferred(self) -> int:
        """Of those, the ones that wait for something else than room."""
        return 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a sequence holds, each counted once, however many hold it."""
        return self.blocks.num_usable_blocks - self.blocks.num_free_blocks

    @property
    def num_filled_slots(self) -> int:
        """Token slots of the used blocks whose token is computed (or being computed), over all groups of layers.

        All slots of the used blocks but those behind each sequence's last computed token: only full blocks are shared,
        so no slot is left out twice; a block with a recurrent state is full. For groups of one block size.
        """
        size = self.blocks.groups[0].block_size
        num_slots = self.num_used_blocks * size
        for seq in self.running:
            for group, table in zip(self.blocks.groups, seq.block_table, strict=True):
                num_slots -= num_empty_slots(group, len(table) * size, seq.num_computed_tokens)
        return num_slots

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; one that could never run is refused here."""
        if seq.adapter is not None and not self.config.max_loras:
            raise InvalidInputError(
                f"{seq.request_id}: there is no slot for adapter {seq.adapter!r} (max_loras 0); raise max_loras"
            )
        if not 0 < seq.num_prompt_tokens < self.config.max_model_len:
            raise InvalidInputError(
                f"{seq.request_id}: the prompt must have 1 to {self.config.max_model_len - 1} tokens "
                f"({seq.num_prompt_tokens}); shorten it or raise max_model_len"
            )
        if seq.max_tokens < 1:
            raise InvalidInputError(f"{seq.request_id}: max_tokens must be at least 1 ({seq.max_tokens}); raise it")
        if seq.request_id in self._unfinished:
            raise InvalidInputError(f"{seq.request_id}: a request of this id has not finished; choose another id")
        self._num_arrivals += 1
        seq.arrival = self._num_arrivals
        self._queue(seq, back=True)  # raises where priorities cannot be compared
        self._unfinished[seq.request_id] = seq

    def abort(self, request_id: str) -> None:
        """End a request that its user gave up."""
        self.finish(request_id, "abort")

    def fail(self, request_id: str, error: str) -> None:
        """End a request that went wrong alone, such as with logits that are no numbers; `error` is one line."""
        self.finish(request_id, "error", error)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request now, wherever it is; tokens in flight for it are ignored. No effect on a finished one."""
        seq = self._unfinished.get(request_id)
        if seq is not None:
            seq.finish(reason, error)
            self._retire([seq])

    def preempt(self, request_id: str) -> None:
        """Take a running sequence's blocks, as when they run out: it waits and is recomputed. No effect on others."""
        seq = self._unfinished.get(request_id)
        if seq is not None and seq.status == "running":
            self._preempt(seq, Batch(0))

    def schedule(self) -> Batch:
        """Choose the next batch: first those that run, in order, then, if nobody had to give way, those that wait."""
        batch = self._new_batch()
        self._num_schedules += 1
        self.blocks.begin_step()
        self._holds_prefills = self.config.prefill_schedule_interval > 1 and self._is_between_prefills()
        self._schedule_running(batch)
        if not batch.preempted and not batch.failed and self._may_admit():
            self._schedule_waiting(batch)
            self._is_forming = batch.budget <= 0  # prompts filled the step; else the batch is full, or nobody waits
            if not self._holds_prefills:
                self._is_behind = bool(self.waiting)
        if batch.num_tokens:
            self._num_steps += 1
            if batch.has_prefill:
                self._last_prefill_step = self._num_steps
        batch.copies = self.blocks.end_step()
        self._launch(batch)
        return batch

    def _new_batch(self) -> Batch:
        return Batch(self.config.max_num_batched_tokens)

    def _launch(self, batch: Batch) -> None:
        """Count a batch's tokens as computed: the next one is scheduled as if they were."""
        next_decode = self._num_schedules + self.config.pipeline_stages
        for seq, n in batch.num_tokens.items():
            seq.num_computed_tokens += n
            seq.num_in_flight_tokens += n
            seq.is_prefill_chunk = seq.num_computed_tokens < len(seq.token_ids) + seq.num_placeholders
            if not seq.is_prefill_chunk:
                seq.num_placeholders += 1
                batch.samples.append(seq)
                seq.next_decode = next_decode

    def update(self, batch: Batch, sampled: Mapping[str, int]) -> list[Sequence]:
        """Apply a batch's sampled tokens, by request id; returns the sequences that finished."""
        for seq, n in batch.num_tokens.items():
            seq.num_in_flight_tokens -= n
        done: list[Sequence] = []
        for seq in batch.samples:
            seq.num_placeholders -= 1
            if seq.is_finished:  # aborted, or stopped one batch earlier
                continue
            self._append(seq, sampled[seq.request_id])
            if seq.is_finished:
                done.append(seq)
        if done:
            self._retire(done)
        return done

    def update_several(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> list[Sequence]:
        """Apply a batch of which a sequence may have several tokens: without drafts it has one."""
        return self.update(batch, {request_id: tokens[0] for request_id, tokens in sampled.items()})

    # --- those that run -----------------------------------------------------------------------------------------

    def _schedule_running(self, batch: Batch) -> None:
        for seq in tuple(self.running):
            if batch.budget <= 0:
                return
            if seq.status != "running":  # gave way to one before it
                continue
            n = self._num_tokens_to_run(seq, batch)
            # Most sequences decode inside a block they have: nothing is to be asked for.
            if n and (
                seq.num_computed_tokens + n + self._num_ahead <= seq.num_tokens_until_change
                or self._make_room(seq, seq.num_computed_tokens + n, batch)
            ):
                self._put(seq, n, batch)
                batch.has_prefill |= seq.is_prefill_chunk
            elif n and seq.status == "running":  # it waits for blocks that a batch in flight may still write
                return

    def _num_tokens_to_run(self, seq: Sequence, batch: Batch) -> int:
        """Tokens of a running sequence in this step; 0 when those in flight already complete it."""
        total = seq.num_prompt_tokens + seq.max_tokens
        if seq.num_placeholders:
            if seq.num_computed_tokens + 2 - seq.num_placeholders >= total:
                return 0
            if not self._is_async or self._num_schedules < seq.next_decode:  # its token is in the pipeline
                return 0
        known = len(seq.token_ids) + seq.num_placeholders + len(seq.draft_ids)
        n = min(known, self.config.max_model_len - 1) - seq.num_computed_tokens
        if self._holds_prefills and seq.is_prefill_chunk:
            return 0
        if n == 1 and not seq.encoder_inputs:
            return 1  # most: no limit cuts a single token
        return self._with_inputs(
            seq, seq.num_computed_tokens, self._chunk(seq, seq.num_computed_tokens, n, batch), batch
        )

    def _is_between_prefills(self) -> bool:
        """Whether prefills wait for the next step of theirs: not when nobody decodes, or more wait than fit."""
        is_due = self._num_steps + 1 - self._last_prefill_step >= self.config.prefill_schedule_interval
        return not is_due and not self._is_behind and any(not seq.is_prefill_chunk for seq in self.running)

    def _make_room(self, seq: Sequence, num_tokens: int, batch: Batch) -> bool:
        """Preempt others until num_tokens tokens fit; False when the sequence itself had to go, or has to wait."""
        while not self.blocks.grow(seq, num_tokens, self._num_slots(num_tokens)):
            victim = self._victim()
            if victim is seq and self._is_alone:
                if seq.num_in_flight_tokens:  # what is in flight may end it, and is its own in any case
                    return False
                self._run_out(seq, num_tokens, self.blocks.num_to_hold(seq, num_tokens), batch)
                return False
            if not self._are_free_at_once(victim):
                return False
            self._preempt(victim, batch)
            if victim is seq:
                return False
        return True

    def _num_slots(self, num_tokens: int) -> int:
        """Slots of KV that a sequence has once num_tokens of its tokens are scheduled."""
        return min(num_tokens + self._num_ahead, self.config.max_model_len)

    def _victim(self) -> Sequence:
        if self.config.policy == "priority":
            return max(self.running, key=_rank)
        return self.running[-1]

    def _preempt(self, seq: Sequence, batch: Batch) -> None:
        """Take all blocks from a running sequence; it is recomputed later."""
        if batch.take_out(seq):
            self.blocks.forget(seq, seq.num_computed_tokens)
        batch.preempted.append(seq)
        self.running.remove(seq)
        self._give_back(seq)
        seq.status = "preempted"
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(seq, back=False)

    # --- those that wait ----------------------------------------------------------------------------------------

    def _schedule_waiting(self, batch: Batch) -> None:
        adapters = {seq.adapter for seq in self.running} - {None}  # also of those that have no part in this step
        place = 0  # those before it wait: for an adapter's slot, or for what a connector brings
        while place < len(self.waiting) and batch.budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[place]
            # What it was preempted with in a pipeline may be still to come in.
            if self._lacks_slot(seq, adapters) or seq.num_in_flight_tokens:
                place += 1
                continue
            match self._try_to_admit(seq, self.blocks.lookup(seq), batch):
                case "gone" if seq.status == "running":
                    adapters |= {seq.adapter} - {None}
                case "later":
                    place += 1
                case "full":
                    return

    def _lacks_slot(self, seq: Sequence, adapters: set[str | None]) -> bool:
        """Whether others' adapters have all the slots."""
        return seq.adapter is not None and seq.adapter not in adapters and len(adapters) >= self.config.max_loras

    def _try_to_admit(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> Outcome:
        """Admit a waiting sequence, or fail it when it can never run."""
        n = self._first_chunk(seq, hit, batch)
        if n is None:
            return "full"
        if n == 0:
            return "later"
        if self._fits(seq, hit, n):
            self._admit(seq, hit, n, batch)
        elif self._has_holders:
            return "full"
        else:  # the whole pool is free and does not hold it
            self._run_out(seq, seq.num_tokens, self._num_wanted(seq, hit, n), batch)
        return "gone"

    def _first_chunk(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> int | None:
        """Tokens of a waiting sequence in this step; 0: not yet; None: nor anybody behind it."""
        n = seq.num_tokens - hit.num_tokens
        if self._holds_prefills and n > 1:
            return None
        if not self.config.enable_chunked_prefill and self._capped(n) > batch.budget:
            return None
        n = self._chunk(seq, hit.num_tokens, n, batch)
        return self._with_inputs(seq, hit.num_tokens, n, batch) if n else None

    def _may_admit(self) -> bool:
        """Always, but for a static batch: it forms when nobody runs, and then runs until its last sequence ends."""
        return self.config.allocator != "static" or self._is_forming or not self.running

    def _fits(self, seq: Sequence, hit: PrefixHit, n: int) -> bool:
        """Whether the blocks it wants leave the watermark free."""
        free = self.blocks.num_free_blocks - (self._num_watermark_blocks if self.running else 0)
        return self._num_wanted(seq, hit, n) <= free

    def _num_wanted(self, seq: Sequence, hit: PrefixHit, n: int) -> int:
        """Free blocks that admission takes: for this chunk, and with reserve_full_prompt for all known tokens."""
        num_tokens = hit.num_tokens + n
        chunk = self.blocks.num_needed(seq, hit, num_tokens, self._num_slots(num_tokens))
        if not self.config.reserve_full_prompt:
            return chunk
        return max(chunk, self.blocks.num_reserved(seq, hit, seq.num_tokens, alone=not self.running))

    def _admit(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> None:
        if self.blocks.enable_prefix_caching and not seq.skips_cache:
            self.prefix_cache_stats.count(seq, seq.num_tokens, hit.num_tokens)
        self.blocks.admit(seq, hit, hit.num_tokens + n, self._num_slots(hit.num_tokens + n))
        (batch.resumed if seq.status == "preempted" else batch.new).append(seq)
        batch.hits[seq] = seq.num_computed_tokens = hit.num_tokens
        self._put(seq, n, batch)
        batch.has_prefill |= hit.num_tokens < seq.num_tokens - 1
        seq.status = "running"
        self.waiting.remove(seq)
        self.running.append(seq)

    # --- both ---------------------------------------------------------------------------------------------------

    def _chunk(self, seq: Sequence, num_computed: int, n: int, batch: Batch) -> int:
        """n tokens cut to the long-prefill threshold, the budget left and where the blocks want a chunk to end."""
        n = max(0, min(self._capped(n), batch.budget))
        limit = self.config.max_num_batched_tokens
        return self.blocks.cut(seq, num_computed, n, min(limit, self.config.long_prefill_token_threshold or limit))

    def _capped(self, n: int) -> int:
        """n tokens cut to the long-prefill threshold, which holds where there are others."""
        threshold = self.config.long_prefill_token_threshold
        num_seqs = len(self.running) + self.num_waiting
        if not threshold or num_seqs == 1:
            return n
        if self.config.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.config.max_num_batched_tokens // num_seqs)
        return min(n, threshold)

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.append(token_id, self.config.max_model_len)
        num_tokens = seq.num_computed_tokens - seq.num_placeholders
        if num_tokens > seq.num_tokens_until_change and seq.block_table:  # it completes a block, and was not preempted
            self.blocks.cache_full_blocks(seq, num_tokens)

    def _queue(self, seq: Sequence, *, back: bool) -> None:
        if self.config.policy == "priority":
            insort(self.waiting, seq, key=_rank)
        else:
            self.waiting.insert(len(self.waiting) if back else 0, seq)

    def _run_out(self, seq: Sequence, num_tokens: int, num_blocks: int, batch: Batch) -> None:
        """Fail a sequence that has the whole pool to itself and does not fit."""
        cure = "shorten the request" if self.config.allocator == "paged" else "lower max_model_len"
        error = (
            f"{seq.request_id}: does not fit ({num_tokens} tokens need {num_blocks} blocks, the pool has "
            f"{self.blocks.num_usable_blocks}); {cure} or raise num_blocks"
        )
        self.finish(seq.request_id, "out_of_blocks", error)
        batch.failed.append(seq)

    # What a scheduler of prompts with images sees otherwise (encoding.py):

    def _with_inputs(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        """Of n tokens from `start` on those for which nothing else has to be computed first."""
        return n

    def _put(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Take a sequence into the batch."""
        batch.put(seq, n)

    # What a scheduler with memory beyond the device's sees otherwise (loading.py):

    @property
    def _is_alone(self) -> bool:
        """Whether nobody holds blocks but the one sequence that runs."""
        return len(self.running) == 1

    @property
    def _has_holders(self) -> bool:
        """Whether blocks will come free by themselves."""
        return bool(self.running)

    def _are_free_at_once(self, victim: Sequence) -> bool:
        """Whether a sequence's blocks can be another's as soon as they are given back."""
        return True

    def _give_back(self, seq: Sequence) -> None:
        self.blocks.release(seq)

    def _retire(self, seqs: list[Sequence]) -> None:
        """Take sequences that have finished out of the queues, and their blocks back."""
        for seq in seqs:
            del self._unfinished[seq.request_id]
            if seq.block_table:
                self._give_back(seq)
            else:  # only those that wait hold none
                self.waiting.remove(seq)
        self.running = [seq for seq in self.running if not seq.is_finished]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every sequence stands in one queue and the blocks add up."""
        assert all(seq.status == "running" for seq in self.running), "running holds a sequence that does not run"
        assert all(seq.status in ("waiting", "preempted") for seq in self.waiting), "waiting holds one that runs"
        assert not any(seq.block_table for seq in self.waiting), "a waiting sequence holds blocks"
        assert all(seq.block_table for seq in self.running), "a running sequence holds none"
        queued = {seq.request_id: seq for seq in (*self.waiting, *self.running)}
        assert queued == self._unfinished, "queues and unfinished requests differ"
        assert len(self.running) <= self.config.max_num_seqs, f"{len(self.running)} sequences run"
        self.blocks.check_invariants(self.running)


def _rank(seq: Sequence) -> tuple[int, int]:
    """Order under the priority policy: smaller first."""
    return (seq.priority, seq.arrival)
