"""Who runs in the next step, with how many tokens, and who gives way: continuous batching under one token budget.

Rules as in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `async_scheduler.py`), checked step by step against it. What only
some engines do (drafts, adapters, KV beyond the device, recurrent states, pipeline stages) is an Extension's.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from engine.block_manager import BlockManager, PrefixHit
from engine.sequence import FinishReason, Sequence
from kvplan.core.errors import InvalidInputError

# Of a waiting sequence: it waits no more; it cannot run yet, others may; nobody else is admitted in this step.
Outcome = Literal["gone", "later", "full"]
T = TypeVar("T")
P = ParamSpec("P")


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
    extras: dict[type[Any], Any] = field(default_factory=dict)  # what extensions add, see extra()

    def take_out(self, seq: Sequence) -> bool:
        """Compute nothing of a sequence after all; False when it was not in the batch."""
        n = self.num_tokens.pop(seq, 0)
        self.budget += n
        return n > 0

    def extra(self, kind: type[T]) -> T:
        """An extension's record of this batch; an empty one where the extension is not there."""
        extra = self.extras.get(kind)
        return extra if isinstance(extra, kind) else kind()


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


class Extension:
    """A feature's part in scheduling, in the blocks of sequences and in the engine's loop: hooks that do nothing here.

    A scheduler asks its extensions in their order. A hook that none of them overrides is never called.
    """

    scheduler: "Scheduler"
    num_ahead = 0  # slots of KV that it writes past a step's tokens

    def attach(self, scheduler: "Scheduler") -> None:
        """Join a scheduler; raises where its blocks or settings do not allow that."""
        self.scheduler = scheduler

    # --- a request

    def check(self, seq: Sequence) -> None:
        """Raise InvalidInputError for a sequence that could never run."""

    def add(self, seq: Sequence) -> None:
        """Note a sequence that was queued."""

    def preempt(self, seq: Sequence, batch: Batch) -> None:
        """Note a running sequence that is about to lose its blocks."""

    def distrust(self, seq: Sequence) -> None:
        """Note that what a sequence computed may be wrong; it is about to be preempted or ended."""

    def retire(self, seqs: list[Sequence]) -> None:
        """Note sequences that have finished and are about to lose their places and blocks."""

    # --- a step

    def begin_step(self, batch: Batch) -> None:
        """Prepare for a step, of which nothing is scheduled yet."""

    def want(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        """Tokens that a sequence asks for in this step, from `start` on; n are known."""
        return n

    def limit(self, seq: Sequence, start: int, n: int, batch: Batch) -> int | None:
        """Of n tokens from `start` on, at least one, those that this step may compute.

        0: the sequence waits; None: and nobody who waits behind it is admitted
        """
        return n

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Note a sequence that was taken into the batch."""

    def end_step(self, batch: Batch) -> None:
        """Complete a batch, whose tokens are counted as computed."""

    def update(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> None:
        """Note a batch that has run, before its tokens are applied."""

    def accept(self, seq: Sequence, num_taken: int, batch: Batch) -> None:
        """Note how many sampled tokens a sequence of the batch took."""

    # --- admission

    def may_admit(self, batch: Batch) -> bool:
        """Whether waiting sequences may be admitted in this step, now that those that run have been scheduled."""
        return True

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may be admitted; if not, those behind it may."""
        return True

    def decide(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> Outcome | None:
        """Decide on a waiting sequence that asks for n tokens after a hit; None: the scheduler does."""

    def turn_away(self, seq: Sequence) -> None:
        """Note a waiting sequence for which there are no blocks."""

    # --- blocks

    def frees_at_once(self, seq: Sequence) -> bool:
        """Whether a sequence's blocks can be another's as soon as they are given back."""
        return True

    def detain(self, seq: Sequence) -> bool:
        """Take over a sequence's blocks, to give them back later; False: the scheduler does it now."""
        return False

    def holders(self) -> tuple[list[Sequence], list[int]]:
        """Sequences that do not run and hold blocks, and blocks of nobody that are given back later."""
        return [], []

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for something else than room."""
        return 0

    # --- the engine's loop

    def launch(self, batch: Batch) -> None:
        """Begin what a batch orders; it is about to be given to the model."""

    def settle(self, batch: Batch) -> None:
        """Note a batch whose tokens have been applied and handed out."""

    def poll(self, is_idle: bool) -> None:
        """Look after what goes on beside the steps; with nothing to run, wait a moment for it."""

    @property
    def is_busy(self) -> bool:
        """Whether the loop has to go on, though nobody waits or runs."""
        return False

    def close(self) -> None:
        """Finish what goes on beside the steps."""


def _bound(extensions: Iterable[Extension], hook: Callable[Concatenate[Any, P], T]) -> tuple[Callable[P, T], ...]:
    """A hook of the extensions that override it."""
    name = hook.__name__
    return tuple(getattr(extension, name) for extension in extensions if getattr(type(extension), name) is not hook)


class Hooks:
    """What is called of a scheduler's extensions, bound once."""

    def __init__(self, extensions: tuple[Extension, ...]) -> None:
        self.check = _bound(extensions, Extension.check)
        self.add = _bound(extensions, Extension.add)
        self.preempt = _bound(extensions, Extension.preempt)
        self.distrust = _bound(extensions, Extension.distrust)
        self.retire = _bound(extensions, Extension.retire)
        self.begin_step = _bound(extensions, Extension.begin_step)
        self.want = _bound(extensions, Extension.want)
        self.limit = _bound(extensions, Extension.limit)
        self.put = _bound(extensions, Extension.put)
        self.end_step = _bound(extensions, Extension.end_step)
        self.update = _bound(extensions, Extension.update)
        self.accept = _bound(extensions, Extension.accept)
        self.may_admit = _bound(extensions, Extension.may_admit)
        self.is_ready = _bound(extensions, Extension.is_ready)
        self.decide = _bound(extensions, Extension.decide)
        self.turn_away = _bound(extensions, Extension.turn_away)
        self.frees_at_once = _bound(extensions, Extension.frees_at_once)
        self.detain = _bound(extensions, Extension.detain)
        self.holders = _bound(extensions, Extension.holders)
        self.launch = _bound(extensions, Extension.launch)
        self.settle = _bound(extensions, Extension.settle)
        self.poll = _bound(extensions, Extension.poll)
        self.close = _bound(extensions, Extension.close)


class Scheduler:
    """Owns the waiting and the running sequences and the block manager."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, extensions: tuple[Extension, ...] = ()) -> None:
        """extensions  in the order in which they are asked"""
        self.config, self.blocks, self.extensions = config, blocks, extensions
        self.waiting: list[Sequence] = []  # the next to be admitted first
        self.running: list[Sequence] = []  # in order of admission
        self.prefix_cache_stats = PrefixCacheStats()
        self.num_preemptions = 0
        self.hooks = Hooks(extensions)
        self._unfinished: dict[str, Sequence] = {}  # waiting or running, by request id
        self._num_arrivals = 0
        self._num_watermark_blocks = int(config.watermark * blocks.pool.num_blocks)
        self._num_ahead = sum(extension.num_ahead for extension in extensions)
        for extension in extensions:
            extension.attach(self)

    def extension(self, kind: type[T]) -> T | None:
        """The extension of this kind, if there is one."""
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)

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
        return len(self._unfinished) - len(self.running)

    @property
    def num_deferred(self) -> int:
        """Of those, the ones that wait for something else than room."""
        return sum(extension.num_deferred for extension in self.extensions)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a sequence holds, each counted once, however many hold it."""
        return self.blocks.num_usable_blocks - self.blocks.num_free_blocks

    @property
    def num_spare_blocks(self) -> int:
        """Free blocks that an admission leaves free."""
        return self._num_watermark_blocks if self.running else 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; one that could never run is refused here."""
        if not 0 < seq.num_prompt_tokens < self.config.max_model_len:
            raise InvalidInputError(
                f"{seq.request_id}: the prompt must have 1 to {self.config.max_model_len - 1} tokens "
                f"({seq.num_prompt_tokens}); shorten it or raise max_model_len"
            )
        if seq.max_tokens < 1:
            raise InvalidInputError(f"{seq.request_id}: max_tokens must be at least 1 ({seq.max_tokens}); raise it")
        if seq.request_id in self._unfinished:
            raise InvalidInputError(f"{seq.request_id}: a request of this id has not finished; choose another id")
        for check in self.hooks.check:
            check(seq)
        self._num_arrivals += 1
        seq.arrival = self._num_arrivals
        seq.most_tokens = min(seq.num_prompt_tokens + seq.max_tokens, self.config.max_model_len)
        self._queue(seq, back=True)  # raises where priorities cannot be compared
        self._unfinished[seq.request_id] = seq
        for add in self.hooks.add:
            add(seq)

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
            if reason == "error":
                self._distrust(seq)
            seq.finish(reason, error)
            self._retire([seq])

    def preempt(self, request_id: str) -> None:
        """Take the blocks of a running sequence that has read what is wrong: it waits and is recomputed.

        No effect on others.
        """
        seq = self._unfinished.get(request_id)
        if seq is not None and seq.status == "running":
            self._distrust(seq)
            self._preempt(seq, Batch(0))

    def _distrust(self, seq: Sequence) -> None:
        for distrust in self.hooks.distrust:
            distrust(seq)

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the next batch: first those that run, in order, then, if nobody had to give way, those that wait."""
        batch = Batch(self.config.max_num_batched_tokens)
        for begin_step in self.hooks.begin_step:
            begin_step(batch)
        self._schedule_running(batch)
        if not batch.preempted and not batch.failed and all(may_admit(batch) for may_admit in self.hooks.may_admit):
            self._schedule_waiting(batch)
        self._launch(batch)
        for end_step in self.hooks.end_step:
            end_step(batch)
        return batch

    def _launch(self, batch: Batch) -> None:
        """Count a batch's tokens as computed: the next one is scheduled as if they were."""
        samples = batch.samples
        for seq, n in batch.num_tokens.items():
            seq.num_computed_tokens = num_computed_tokens = seq.num_computed_tokens + n
            seq.num_in_flight_tokens += n
            num_placeholders = seq.num_placeholders
            seq.is_prefill_chunk = is_chunk = num_computed_tokens < len(seq.token_ids) + num_placeholders
            if not is_chunk:
                seq.num_placeholders = num_placeholders + 1
                samples.append(seq)

    def update(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> list[Sequence]:
        """Apply a batch's sampled tokens, by request id; returns the sequences that finished.

        One token each, but where an extension has more of a sequence's computed in a step
        """
        for update in self.hooks.update:
            update(batch, sampled)
        for seq, n in batch.num_tokens.items():
            seq.num_in_flight_tokens -= n
        done: list[Sequence] = []
        hooks = self.hooks.accept
        for seq in batch.samples:
            seq.num_placeholders = num_placeholders = seq.num_placeholders - 1
            if seq.status == "finished":  # aborted, or stopped one batch earlier
                continue
            tokens, known = sampled[seq.request_id], seq.token_ids
            if len(tokens) == 1 and len(known) + 1 < seq.most_tokens and tokens[0] not in seq.stop_token_ids:
                known.append(tokens[0])  # most: nothing ends here
                num_taken = 1
            else:
                num_taken = seq.extend(tokens)
                if seq.is_finished:
                    done.append(seq)
            for accept in hooks:
                accept(seq, num_taken, batch)
                num_placeholders = seq.num_placeholders
            num_tokens = seq.num_computed_tokens - num_placeholders
            if num_tokens > seq.num_tokens_until_change and seq.block_table:  # a block is full; it was not preempted
                self.blocks.cache_full_blocks(seq, num_tokens)
        if done:
            self._retire(done)
        return done

    # --- those that run -----------------------------------------------------------------------------------------

    def _schedule_running(self, batch: Batch) -> None:
        num_ahead, num_tokens, puts = self._num_ahead, batch.num_tokens, self.hooks.put
        is_plain = not (self.hooks.want or self.hooks.limit or puts)
        for seq in tuple(self.running):
            if batch.budget <= 0:
                return
            if seq.status != "running":  # gave way to one before it
                continue
            end = seq.num_computed_tokens + 1
            has_room = end + num_ahead <= seq.num_tokens_until_change
            if is_plain and end == len(seq.token_ids) + seq.num_placeholders < seq.most_tokens:
                n = 1  # most: it decodes, and does not come to its end
            else:
                n = self._num_tokens_to_run(seq, batch)
            # Most sequences decode inside a block they have: nothing is to be asked for.
            if n and ((n == 1 and has_room) or self._make_room(seq, end - 1 + n, batch)):
                num_tokens[seq] = n
                batch.budget -= n
                for put in puts:
                    put(seq, n, batch)
            elif n and seq.status == "running":  # it waits for blocks that a batch in flight may still write
                return

    def _num_tokens_to_run(self, seq: Sequence, batch: Batch) -> int:
        """Tokens of a running sequence in this step; 0 when those in flight already complete it."""
        start, hooks = seq.num_computed_tokens, self.hooks
        if seq.num_placeholders and start + 2 - seq.num_placeholders >= seq.num_prompt_tokens + seq.max_tokens:
            return 0
        n = min(len(seq.token_ids) + seq.num_placeholders, self.config.max_model_len - 1) - start
        for want in hooks.want:
            n = want(seq, start, n, batch)
        if n == 1 and not hooks.limit:
            return 1  # most: no limit cuts a single token
        return self.chunk(seq, start, n, batch) or 0

    def _make_room(self, seq: Sequence, num_tokens: int, batch: Batch) -> bool:
        """Preempt others until num_tokens tokens fit; False when the sequence itself had to go, or has to wait."""
        while not self.blocks.grow(seq, num_tokens, self._num_slots(num_tokens)):
            victim = self._victim()
            if victim is seq and len(self.running) == 1 and not self.are_blocks_due:
                if seq.num_in_flight_tokens:  # what is in flight may end it, and is its own in any case
                    return False
                self._run_out(seq, num_tokens, self.blocks.num_to_hold(seq, num_tokens), batch)
                return False
            if not all(frees_at_once(victim) for frees_at_once in self.hooks.frees_at_once):
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
        for preempt in self.hooks.preempt:
            preempt(seq, batch)
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
        place = 0  # those before it wait, for what an extension says or for what is in flight
        while place < len(self.waiting) and batch.budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[place]
            if seq.num_in_flight_tokens or not self.is_ready(seq):  # what it was preempted with may be still to come in
                place += 1
                continue
            match self._try_to_admit(seq, self.blocks.lookup(seq), batch):
                case "later":
                    place += 1
                case "full":
                    return

    def is_ready(self, seq: Sequence) -> bool:
        """Whether no extension lets a waiting sequence wait longer."""
        return all(is_ready(seq) for is_ready in self.hooks.is_ready)

    def _try_to_admit(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> Outcome:
        """Admit a waiting sequence, or fail it when it can never run."""
        n = seq.num_tokens - hit.num_tokens
        for want in self.hooks.want:
            n = want(seq, hit.num_tokens, n, batch)
        for decide in self.hooks.decide:
            outcome = decide(seq, hit, n, batch)
            if outcome is not None:
                return outcome
        chunk = self.chunk(seq, hit.num_tokens, n, batch)
        if not chunk:
            return "full" if chunk is None else "later"
        num_wanted = self._num_wanted(seq, hit, chunk)
        if num_wanted <= self.blocks.num_free_blocks - self.num_spare_blocks:
            self._admit(seq, hit, chunk, batch)
            return "gone"
        for turn_away in self.hooks.turn_away:
            turn_away(seq)
        if self.running or self.are_blocks_due:
            return "full"
        self._run_out(seq, seq.num_tokens, num_wanted, batch)  # the whole pool is free and does not hold it
        return "gone"

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
        num_tokens = hit.num_tokens + n
        self.blocks.admit(seq, hit, num_tokens, self._num_slots(num_tokens))
        seq.num_computed_tokens = hit.num_tokens
        self.waiting.remove(seq)
        self.start(seq, n, batch)

    def start(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Let a sequence that has blocks run, with its next n tokens in this step."""
        (batch.resumed if seq.num_preemptions else batch.new).append(seq)
        batch.hits[seq] = seq.num_computed_tokens
        self._put(seq, n, batch)
        seq.status = "running"
        self.running.append(seq)

    # --- both ---------------------------------------------------------------------------------------------------

    def chunk(self, seq: Sequence, start: int, n: int, batch: Batch) -> int | None:
        """n tokens from `start` on, cut to the long-prefill threshold, the budget left and the extensions' limits."""
        chunk: int | None = max(0, min(self.capped(n), batch.budget))
        for limit in self.hooks.limit:
            chunk = limit(seq, start, chunk, batch) if chunk else chunk
        return chunk

    def capped(self, n: int) -> int:
        """n tokens cut to the long-prefill threshold, which holds where there are others."""
        threshold = self.config.long_prefill_token_threshold
        return n if not threshold or len(self._unfinished) == 1 else min(n, threshold)

    def _put(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Compute a sequence's next n tokens in this step."""
        batch.num_tokens[seq] = n
        batch.budget -= n
        for put in self.hooks.put:
            put(seq, n, batch)

    def _queue(self, seq: Sequence, *, back: bool) -> None:
        if self.config.policy == "priority":
            insort(self.waiting, seq, key=_rank)
        else:
            self.waiting.insert(len(self.waiting) if back else 0, seq)

    def _run_out(self, seq: Sequence, num_tokens: int, num_blocks: int, batch: Batch) -> None:
        """Fail a sequence that has the whole pool to itself and does not fit."""
        error = (
            f"{seq.request_id}: does not fit ({num_tokens} tokens need {num_blocks} blocks, the pool has "
            f"{self.blocks.num_usable_blocks}); {self.blocks.cure} or raise num_blocks"
        )
        self.finish(seq.request_id, "out_of_blocks", error)
        batch.failed.append(seq)

    @property
    def are_blocks_due(self) -> bool:
        """Whether blocks that no running sequence holds will come free."""
        return any(seqs or blocks for seqs, blocks in (holders() for holders in self.hooks.holders))

    def _give_back(self, seq: Sequence) -> None:
        if not any(detain(seq) for detain in self.hooks.detain):
            self.blocks.release(seq)

    def _retire(self, seqs: list[Sequence]) -> None:
        """Take sequences that have finished out of the queues, and their blocks back."""
        for retire in self.hooks.retire:
            retire(seqs)
        for seq in seqs:
            del self._unfinished[seq.request_id]
            if seq.block_table:
                self._give_back(seq)
            else:  # only those that wait hold none
                self.waiting.remove(seq)
        self.running = [seq for seq in self.running if not seq.is_finished]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every sequence stands in one queue and the blocks add up."""
        others = [holders() for holders in self.hooks.holders]
        holding = [seq for seqs, _ in others for seq in seqs]
        assert all(seq.status == "running" for seq in self.running), "running holds a sequence that does not run"
        assert all(seq.status in ("waiting", "preempted") for seq in self.waiting), "waiting holds one that runs"
        assert not any(seq.block_table for seq in self.waiting), "a waiting sequence holds blocks"
        assert all(seq.block_table for seq in self.running), "a running sequence holds none"
        queued = {seq.request_id: seq for seq in (*self.waiting, *self.running, *holding) if not seq.is_finished}
        assert queued == self._unfinished, "queues and unfinished requests differ"
        assert len(self.running) <= self.config.max_num_seqs, f"{len(self.running)} sequences run"
        self.blocks.check_invariants((*self.running, *holding), [block for _, blocks in others for block in blocks])


def _rank(seq: Sequence) -> tuple[int, int]:
    """Order under the priority policy: smaller first."""
    return (seq.priority, seq.arrival)
