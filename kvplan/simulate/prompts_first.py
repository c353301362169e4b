"""SGLang's scheduler: chunked prefill first, else one decode step of all running requests; retraction when full.

Rules as in SGLang 0.5.23 (managers/scheduler.py, schedule_policy.py, schedule_batch.py), compared step by step with its
own code (tests/facts/sglang_schedules.jsonl). First come, first served; one KV pool.
"""

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final, cast

from engine.drafting import DraftStep
from engine.scheduler import Batch, PrefixCacheStats
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError
from kvplan.core.records import dataclass
from kvplan.core.records import dataclass as record
from kvplan.simulate.radix import Node, Radix

MOST_NEW: Final = 4096  # most output tokens to reserve for: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
FIRST_RATIO: Final = 0.7  # SGLANG_INIT_NEW_TOKEN_RATIO, times the conservativeness
LEAST_RATIO: Final = 0.14  # minimum, relative to the first ratio: SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR
DECAY_STEPS: Final = 600
REFRESH_PASSES: Final = 32  # WAITING_PREFIX_REFRESH_INTERVAL
MOST_TOUCHED: Final = 128  # WAITING_QUEUE_PREFIX_MATCH_MAX
RETRACT_STEPS: Final = 20  # tokens freed for each remaining request when one is retracted


@record(frozen=True, slots=True)
class Limits:
    """A server's scheduling limits; num_tokens: of whole pages; chunk: None without chunked prefill.

    verified  tokens of a request in a decode step: its last one and drafts; num_drafts: that are guessed in turn
    reserve   slots past a request's tokens for the drafts of this step and the next; 0: nothing is drafted
    """

    num_tokens: int
    max_running: int
    chunk: int | None
    max_prefill_tokens: int
    context_len: int
    conservativeness: float = 1.0
    overlap: bool = True
    radix: bool = True
    page_size: int = 1
    verified: int = 1
    num_drafts: int = 0
    reserve: int = 0


@dataclass(eq=False, slots=True)
class Live:
    """An unfinished request.

    prefix    tokens stored before its next chunk; end: tokens stored after it
    stored    tokens that it has pages for, `cached` of them in the tree, up to `node`; reserved: with those of drafts
    chunks    prompt chunks in flight, except the last chunk
    """

    seq: Sequence
    tokens: "array[int]"
    num_prompt: int
    max_tokens: int
    prefix: int = 0
    end: int = 0
    stored: int = 0
    reserved: int = 0
    cached: int = 0
    chunks: int = 0
    matched: Node | None = None
    node: Node | None = None
    has_row: bool = False
    is_done: bool = False
    is_retracted: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def left(self) -> int:
        """Output tokens to reserve for the rest of the request."""
        return min(self.max_tokens - self.num_output, MOST_NEW)


@dataclass(slots=True)
class BatchStep:
    """A batch in flight: decode, or prefill; goes_on: the request whose prompt continues in the next chunk."""

    members: list[Live]
    is_prefill: bool
    goes_on: Live | None = None
    batch: Batch = field(default_factory=lambda: Batch(0))


class Budget:
    """Remaining token budget of a prefill batch (PrefillAdder)."""

    def __init__(self, pool: "Pool", running: list[Live], ratio: float, limits: Limits) -> None:
        self.pool, self.total, self.current = pool, 0.0, 0
        self.total += sum([live.left * ratio for live in running])
        self.tokens, self.chunk = limits.max_prefill_tokens, limits.chunk

    @property
    def remaining(self) -> float:
        return self.pool.reachable - self.total

    @property
    def is_out(self) -> bool:
        return self.remaining <= 0 or self.pool.reachable - self.current <= 0

    @property
    def is_spent(self) -> bool:
        return not self.is_out and (self.tokens <= 0 or (self.chunk is not None and self.chunk <= 0))

    def take(self, length: int, answer: int) -> None:
        length = self.pool.paged(length)
        self.total += length + self.pool.page_size + answer  # one page more for rounding
        self.current += length + self.pool.page_size
        self.tokens -= length
        if self.chunk is not None:
            self.chunk -= length


class Pool:
    """Tokens' slots in pages, and the radix tree of cached tokens. All sizes are in tokens."""

    def __init__(self, limits: Limits) -> None:
        self.num_usable_blocks = self.free = limits.num_tokens
        self.page_size = limits.page_size
        self.tree = Radix(limits.page_size)
        self.is_shared, self.reserve = limits.radix, limits.reserve

    @property
    def reachable(self) -> int:
        return self.free + self.tree.num_evictable

    @property
    def num_free_blocks(self) -> int:
        return self.reachable

    @property
    def usage(self) -> float:
        """Share of the tokens' slots that requests hold."""
        return 1 - self.reachable / self.num_usable_blocks

    def paged(self, length: int) -> int:
        """Tokens of the pages that `length` tokens start."""
        return -(-length // self.page_size) * self.page_size

    def make(self, num_tokens: int) -> bool:
        if num_tokens > self.free:
            self.free += self.tree.evict(num_tokens - self.free)
        return self.free >= num_tokens

    def grow(self, live: Live, start: int, length: int) -> None:
        """Take the pages of a request's tokens from `start`, which it has pages for, to `length`."""
        self.free -= self.paged(length) - self.paged(start)
        assert self.free >= 0, "only what fits is scheduled"
        live.stored = live.seq.num_computed_tokens = length

    def needs(self, decoding: list[Live]) -> int:
        """Tokens of the pages that the next token of each request starts, or its next drafts."""
        if self.reserve:
            return sum([self._more(live) for live in decoding])
        return self.page_size * sum([live.stored % self.page_size == 0 for live in decoding])

    def _more(self, live: Live) -> int:
        return max(0, self.paged(live.stored + self.reserve) - self.paged(max(live.reserved, live.stored)))

    def hold(self, live: Live) -> None:
        """Take the pages of a request's next drafts."""
        self.free -= (more := self._more(live))
        assert self.free >= 0, "only what fits is scheduled"
        live.reserved = self.paged(max(live.reserved, live.stored)) + more

    def match(self, live: Live, limit: int) -> None:
        length, live.matched = self.tree.match(live.tokens[:limit]) if self.is_shared else (0, self.tree.root)
        live.prefix = live.cached = length

    def keep(self, live: Live, length: int) -> None:
        """Publish a request's first `length` tokens; free slots of tokens that another one published meanwhile."""
        if not self.is_shared:
            return
        before, node = self.tree.insert(live.tokens[:length])
        self.free += max(0, before - live.cached)
        if 0 < self.tree.whole(live.num_prompt) < self.tree.whole(length):  # the response may be evicted before it
            self.tree.insert(live.tokens[: live.num_prompt])
        self.tree.lock(node)
        self.tree.unlock(live.node or self.tree.root)
        live.node, live.cached = node, self.tree.whole(length)

    def release(self, live: Live) -> None:
        self.free += self.paged(max(live.reserved, live.stored)) - live.cached
        self.tree.unlock(live.node or self.tree.root)
        live.node, live.stored, live.reserved, live.cached, live.has_row = None, 0, 0, 0, False


class PromptsFirst:
    """The scheduler's state: waiting and running requests, and the pool."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.blocks = limits, Pool(limits)
        self.waiting: list[Live] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self.num_preemptions = 0
        self.first_ratio = min(FIRST_RATIO * limits.conservativeness, 1.0)
        self.ratio = self.first_ratio
        self._decoding: list[Live] = []
        self._is_full = False
        self._num_passes = 0  # scheduling passes with waiting requests
        self._goes_on: Live | None = None  # request whose prompt continues in the next chunk
        self._last: BatchStep | None = None
        self._in_flight: deque[BatchStep] = deque()
        self._rows: dict[Live, None] = {}
        self._unfinished: dict[Sequence, Live] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def running(self) -> list[Sequence]:
        return [live.seq for live in self._rows]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_prefill(self) -> bool:
        """True if the last batch is a prefill."""
        return self._last is not None and self._last.is_prefill

    def add(self, seq: Sequence, tokens: "array[int]") -> None:
        """Queue a request, its max_tokens clipped to the limits (init_req_max_new_tokens).

        Raise InvalidInputError if its prompt can never fit.
        """
        longest = min(self.limits.context_len - 1, self.limits.num_tokens - 1)
        room = self.limits.num_tokens - self.blocks.paged(len(tokens)) - self.limits.page_size - 1
        max_tokens = min(seq.max_tokens, longest - len(tokens) - 1, room)
        if max_tokens < 1:
            raise InvalidInputError(seq.request_id, f"a prompt of {len(tokens)} tokens does not fit", "shorten it")
        seq.max_tokens = max_tokens
        live = self._unfinished[seq] = Live(seq, tokens, len(tokens), max_tokens)
        self.waiting.append(live)

    def schedule(self) -> Batch:
        """Return the next batch; empty if nothing can run before a batch in flight ends."""
        self._merge()
        step = self._prefill()
        if step is None and self._decoding:
            step = self._decode()
        if step is None and self._last is None:
            self.ratio = self.first_ratio  # idle
        self._last = step
        if step is None:
            return Batch(0)
        self._in_flight.append(step)
        return step.batch

    def update(self, batch: Batch, sampled: Mapping[str, Any]) -> list[Sequence]:
        """Process a batch's tokens; return the sequences that ended."""
        if not batch.num_tokens:
            return []
        step = self._in_flight.popleft()
        done = list[Sequence]()
        for live in step.members:
            if live.is_done or live.is_retracted:
                continue
            if step.is_prefill and live.chunks:
                live.chunks -= 1
                continue
            num = len(sampled[live.seq.request_id]) if self.limits.reserve else 1
            for _ in range(min(num, live.max_tokens - live.num_output)):
                self._append(live, sampled)
            if self.limits.reserve and not step.is_prefill:
                live.stored = live.seq.num_computed_tokens = min(live.stored + num, len(live.tokens))
            if live.is_done:
                self.blocks.keep(live, live.stored)
                self._let_go(live)
                del self._unfinished[live.seq]
                done.append(live.seq)
            elif step.is_prefill:
                self.blocks.keep(live, live.end)
                live.prefix = live.end
        return done

    def _append(self, live: Live, sampled: Mapping[str, Any]) -> None:
        """Add a token, which no other request has, and end the request at its last one."""
        live.tokens.append(live.tokens[0] ^ (1 << 61) if not live.num_output else live.tokens[-1] + 1)
        live.seq.token_ids.append(0)
        live.is_done = live.num_output >= live.max_tokens
        if live.is_done:
            live.seq.finish("length")

    def steady_steps(self) -> int:
        """Return how many further steps decode a token of the same requests and do nothing else."""
        last = self._last
        if self.waiting or self._goes_on is not None or last is None or last.is_prefill or not self._decoding:
            return 0
        if self.limits.reserve or last.members != self._decoding:
            return 0
        if self.limits.overlap and list(self._in_flight) != [last]:
            return 0
        if any([live.is_done or live.is_retracted for live in self._decoding]):  # noqa: C419 -- faster
            return 0
        left = min([live.max_tokens - live.num_output for live in self._decoding])
        pages = self.blocks.free // (self.limits.page_size * len(self._decoding)) - 1
        return min(left - 3, pages * self.limits.page_size)

    def growths(self) -> list[int]:
        """Return the tokens of pages that each of the next steady steps begins, repeated every page."""
        page_size, growths = self.limits.page_size, [0] * self.limits.page_size
        for live in self._decoding:
            growths[-live.stored % page_size] += page_size
        return growths

    def decode_on(self, steps: int) -> None:
        """Bring every request to its state after so many steady steps."""
        for live in self._decoding:
            first = live.tokens[-1] + 1
            self.blocks.grow(live, live.stored, live.stored + steps)
            live.tokens.extend(range(first, first + steps))
            cast("Any", live.seq.token_ids).count += steps
        least = self.first_ratio * LEAST_RATIO
        for _ in range(steps):
            self.ratio = max(self.ratio - (self.first_ratio - least) / DECAY_STEPS, least)

    # --- a step ---------------------------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Merge requests whose prefill is complete into the decode batch (get_next_batch_to_run)."""
        left_out = {self._goes_on}
        if self._goes_on is not None and self._goes_on.end > self._goes_on.prefix:
            self.blocks.keep(self._goes_on, self._goes_on.end)
            self._goes_on.prefix = self._goes_on.end
        if self._last is not None and self._last.is_prefill:
            left_out.add(self._last.goes_on)
            joining = [live for live in self._last.members if not live.is_done and live not in left_out]
            if len(joining) < len(self._last.members) or (joining and not self._decoding):
                self._is_full = False
            self._decoding = self._decoding + joining
        decoding = [live for live in self._decoding if not live.is_done]
        if len(decoding) < len(self._decoding):
            self._is_full = False
        self._decoding = decoding

    def _num_rows_left(self, num_held: int = 0) -> int:
        rows = self.limits.max_running - len(self._rows) + num_held
        return min(self.limits.max_running - len(self._decoding), rows)

    def _prefill(self) -> BatchStep | None:
        if not self._decoding:
            self._is_full = False
        if (self._is_full or not self.waiting) and self._goes_on is None:
            return None
        if self._num_rows_left() <= 0 and self._goes_on is None:
            self._is_full = True
            return None
        if self.blocks.is_shared:
            self._touch_waiting()
        budget = Budget(self.blocks, self._decoding, self.ratio, self.limits)
        admitted: list[Live] = []
        if self._goes_on is not None:
            admitted.append(self._goes_on)
            self._goes_on = self._continue(self._goes_on, budget)
        cut = self._goes_on
        for live in self.waiting:
            if budget.is_spent:
                break
            if len(admitted) >= self._num_rows_left(sum([other.has_row for other in admitted])):
                self._is_full = True
            if self._is_full:
                break
            self.blocks.match(live, 0 if live.seq.skips_cache else len(live.tokens) - 1)
            verdict = self._admit(live, budget, admitted)
            if verdict == "cut":
                cut = live
            if verdict == "no room" or (verdict != "other" and budget.is_out):
                self._is_full = bool(admitted) or bool(self._decoding)
                break
            if verdict == "other" or budget.is_spent:
                break
        if not admitted:
            return None
        self.waiting = [live for live in self.waiting if live not in set(admitted)]
        self._goes_on = cut
        if cut is not None:
            cut.chunks += 1
        return self._launch_prefill(admitted)

    def _touch_waiting(self) -> None:
        """Periodically mark waiting prompts' prefixes as used, the next to run last (_touch_waiting_prefixes)."""
        if not self.waiting:
            return
        if self._num_passes % REFRESH_PASSES == 0:
            for live in reversed(self.waiting[:MOST_TOUCHED]):
                self.blocks.tree.match(live.tokens)
        self._num_passes += 1

    def _continue(self, live: Live, budget: Budget) -> Live | None:
        """Schedule the next chunk of a chunked prompt; return the request if more chunks follow, else None."""
        assert budget.chunk is not None
        room = min(budget.chunk, int(budget.remaining))
        room = room if room > 0 else budget.chunk
        length = len(live.tokens) - live.prefix
        live.end = live.prefix + min(length, room)
        budget.take(live.end - live.prefix, 0 if length > room else min(live.max_tokens, MOST_NEW))
        return live if length > room else None

    def _admit(self, live: Live, budget: Budget, admitted: list[Live]) -> str:
        assert live.matched is not None
        self.blocks.tree.lock(live.matched)  # its own prefix must not count as evictable
        length, page_size = len(live.tokens) - live.prefix, self.limits.page_size
        verdict, answer, paged = "whole", min(live.max_tokens, MOST_NEW), self.blocks.paged(length)
        if length + max(0, live.left) + page_size >= budget.remaining:
            verdict = "no room"
        elif budget.chunk is None:
            verdict = "other" if admitted and paged >= budget.tokens else verdict
        elif paged > budget.chunk:
            length = self.blocks.tree.whole(budget.chunk)
            verdict, answer = ("cut", 0) if length else ("other", answer)
        if verdict in ("no room", "other"):
            self.blocks.tree.unlock(live.matched)
            return verdict
        live.node = live.matched
        live.end = live.prefix + length
        admitted.append(live)
        budget.take(length, answer)
        return verdict

    def _launch_prefill(self, admitted: list[Live]) -> BatchStep:
        step = BatchStep(admitted, True, self._goes_on)
        spare = self.limits.page_size * len(admitted) if self.limits.page_size > 1 else 0
        self.blocks.make(sum([live.end - live.prefix for live in admitted]) + spare)
        for live in admitted:
            if not live.has_row:
                self._note_admission(live, step.batch)
            live.has_row, live.is_retracted = True, False
            self._rows[live] = None
            self.blocks.grow(live, live.prefix, live.end)
            step.batch.num_tokens[live.seq] = live.end - live.prefix
            if live is not self._goes_on:
                step.batch.samples.append(live.seq)
        return step

    def _note_admission(self, live: Live, batch: Batch) -> None:
        batch.hits[live.seq] = live.prefix
        self.prefix_cache_stats.count(live.seq, len(live.tokens), live.prefix)
        (batch.resumed if live.seq.num_preemptions else batch.new).append(live.seq)

    def _decode(self) -> BatchStep | None:
        """Schedule one token of every running request (update_running_batch)."""
        before = len(self._decoding)
        ahead = set(self._in_flight[0].members) if self.limits.overlap and self._in_flight else set()
        ending = [live for live in self._decoding if live in ahead and live.num_output + 1 >= live.max_tokens]
        self._decoding = [live for live in self._decoding if live not in ending]
        if not self._decoding:
            self._is_full = False
            return None
        step = BatchStep([], False)
        if self.blocks.make(self.blocks.needs(self._decoding)):
            least = self.first_ratio * LEAST_RATIO
            self.ratio = max(self.ratio - (self.first_ratio - least) / DECAY_STEPS, least)
        elif ending:
            self._is_full = False
            return None
        else:
            self._retract(step)
        if len(self._decoding) < before:
            self._is_full = False
        step.members = list(self._decoding)
        if self.limits.reserve:
            self._hold_drafts(step)
        else:
            self.blocks.make(len(step.members) * self.limits.page_size)
            for live in step.members:
                self.blocks.grow(live, live.stored, live.stored + 1)
                step.batch.num_tokens[live.seq] = 1
        step.batch.samples = list(step.batch.num_tokens)
        return step if step.members else None

    def _hold_drafts(self, step: BatchStep) -> None:
        """Schedule the last token of every request and its drafts."""
        page_size, paged, more = self.limits.page_size, self.blocks.paged, self.limits.reserve
        new = [max(0, paged(live.stored + more) - max(live.reserved, live.stored)) for live in step.members]
        if any(new):  # one page more for each
            self.blocks.make(sum(new) + (page_size * len(new) if page_size > 1 else 0))
        drafts = (0,) * (self.limits.verified - 1)
        step.batch.extras[DraftStep] = DraftStep(
            {live.seq: drafts for live in step.members}, num_next=self.limits.num_drafts
        )
        for live in step.members:
            self.blocks.hold(live)
            live.seq.num_computed_tokens = live.stored + self.limits.verified
            step.batch.num_tokens[live.seq] = self.limits.verified

    def _retract(self, step: BatchStep) -> None:
        """Retract requests, shortest output first, until the others can continue (retract_decode)."""
        order = sorted(self._decoding, key=lambda live: (live.num_output, -live.num_prompt), reverse=True)
        is_first = True
        while is_first or not self.blocks.make(self.blocks.needs(order)):
            if len(order) == 1:
                break
            is_first = False
            live = order.pop()
            self._let_go(live)
            self.blocks.make(len(order) * RETRACT_STEPS)
            live.prefix = live.end = live.chunks = 0
            live.is_retracted = True
            live.seq.num_computed_tokens = 0
            live.seq.num_preemptions += 1
            self.num_preemptions += 1
            step.batch.preempted.append(live.seq)
            self.waiting.append(live)
        if len(order) <= 1 and not self.blocks.make(self.blocks.needs(order)):
            [live] = order
            self._let_go(live)
            live.is_done = True
            live.seq.finish("out_of_blocks")
            del self._unfinished[live.seq]
            step.batch.failed.append(live.seq)
            order = []
        self._decoding = order
        known = sum([live.num_output for live in order]) + RETRACT_STEPS * len(order)
        self.ratio = min(1.0, known / (sum([live.max_tokens for live in order]) + 1))

    def _let_go(self, live: Live) -> None:
        self.blocks.release(live)
        del self._rows[live]
