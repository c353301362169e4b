"""Event-driven simulation of a server whose requests share no prefix, with the same steps as the engine's scheduler.

If no two prompts share a prefix, block identities do not matter: only how many blocks are free and in which order they
are evicted. Then a decode-only step is three numbers, and only sequences that end, begin or are preempted need work:
how many allocate a block is counted by the step's number modulo the block size. Rules, order and floating-point
operations are those of kvplan.simulate.loop over engine.scheduler; tests check that every figure of a run is the same
to the last bit.

Only for the cases of `is_unshared`: one group of full-attention layers, first come first served, no tiers.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, Literal

from engine.block_manager import FullGroup, Group
from engine.extensions import ExtendedConfig
from engine.scheduler import PrefixCacheStats
from kvplan.core.records import dataclass, field
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.counts import Counts
from kvplan.simulate.kernels.line import Line
from kvplan.simulate.records import Records
from kvplan.simulate.steptime import StepTime, line_seconds
from kvplan.simulate.timeline import Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest

State = Literal["waiting", "reading", "decoding", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class HandedOver(TraceRequest):
    """A request whose prompt was prefilled elsewhere: KV of all but its last token arrives with it."""


@dataclass(eq=False, slots=True)
class Live:
    """An unfinished request.

    length    total tokens at which it ends
    known     tokens to prefill: its prompt, and after a preemption also its output so far
    computed  computed tokens during prefill; during decode they are `offset` + the number of the last scheduled step
    blocks    allocated blocks; not kept while it decodes: they are as many as its computed tokens fill
    order     order of admission
    begun     step that computed the last of its known tokens, or None
    stalled   last step that it skipped for lack of a block, or None
    """

    number: int
    arrival: float
    request: TraceRequest
    prompt: int
    length: int
    known: int
    state: State = "waiting"
    computed: int = 0
    offset: int = 0
    blocks: int = 0
    order: int = 0
    begun: int | None = None
    stalled: int | None = None
    preemptions: int = 0
    admitted: float | None = None  # None: not admitted yet
    first_token: float | None = None
    cached: int = 0
    loaded: int = 0


class ScheduledStep:
    """A scheduled batch: seconds, tokens it samples, and the requests that get their first and last token from it.

    seconds  None: no token is computed
    """

    __slots__ = ("firsts", "lasts", "samples", "seconds")

    def __init__(self, seconds: float | None = None, samples: int = 0) -> None:
        self.seconds, self.samples = seconds, samples
        self.firsts: list[Live] = []
        self.lasts: list[Live] = []


PLAIN: Final = ScheduledStep()  # stands for a batch of all decoding requests, in which none ends


class Pool:
    """Free blocks: empty ones are allocated first, then cached ones in the order in which they were freed.

    A sequence's cached blocks are evicted from their end, so the rest is a prefix, described by its length.
    """

    def __init__(self, num_blocks: int, *, keeps: bool) -> None:
        self.free = self._empty = num_blocks
        self._keeps = keeps
        self._left: deque[list[int]] = deque()  # [cached blocks] of each sequence, next to be evicted first
        self._of: dict[Live, list[int]] = {}

    def take(self, count: int) -> None:
        self.free -= count
        if count <= self._empty:
            self._empty -= count
            return
        count -= self._empty
        self._empty = 0
        left = self._left
        while count:
            first = left[0]
            if count < first[0]:
                first[0] -= count
                return
            count -= first[0]
            first[0] = 0
            left.popleft()

    def give_back(self, count: int, cached: int) -> list[int] | None:
        """Free `count` blocks, `cached` of them with contents; return their queue entry, or None if none are kept."""
        self.free += count
        if not self._keeps or not cached:
            self._empty += count
            return None
        self._empty += count - cached
        remains = [cached]
        self._left.append(remains)
        return remains

    def leave(self, seq: Live, count: int, cached: int) -> None:
        """Free the blocks of a preempted sequence, which can reuse their contents later."""
        remains = self.give_back(count, cached)
        if remains is not None:
            self._of[seq] = remains

    def revive(self, seq: Live) -> int:
        """Reallocate the blocks that still have a sequence's contents to it; return their number."""
        remains = self._of.pop(seq, None)
        hit = remains[0] if remains else 0
        if remains:
            self.free -= hit
            remains[0] = 0  # the empty entry is dropped when its turn comes
        return hit

    def forget(self, seq: Live) -> None:
        self._of.pop(seq, None)


def is_unshared(
    config: ExtendedConfig, groups: tuple[Group, ...], reaches: tuple[Reach, ...], run_len: int | None
) -> bool:
    """True if this module can simulate a server's steps."""
    return (
        run_len is None
        and len(groups) == 1
        and isinstance(groups[0], FullGroup)
        and reaches == (Reach(None),)
        and config.allocator == "paged"
        and config.policy == "fcfs"
        and config.reserve_full_prompt
        and not config.long_prefill_token_threshold
        and config.batch_queue_depth in (1, 2)
        and config.max_num_seqs <= config.max_num_batched_tokens
    )


@dataclass(slots=True)
class Unshared:
    """A simulated run of one server; fields as in kvplan.simulate.loop.Simulation."""

    config: ExtendedConfig
    num_blocks: int
    groups: tuple[Group, ...]
    step_time: StepTime
    arrivals: Arrivals
    stop: Callable[[Any], bool] | None = None

    clock: float = 0.0
    records: Records = field(default_factory=Records)
    timeline: Timeline = field(default_factory=Timeline)
    counts: Counts = field(default_factory=Counts)
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    num_preemptions: int = 0
    tiers: None = None

    _size: int = field(init=False)
    _pool: Pool = field(init=False)
    _is_late: bool = field(init=False)  # the step that runs was scheduled one step earlier
    _watermark: int = field(init=False)
    _waiting: deque[Live] = field(default_factory=deque)
    _running: list[Live] = field(default_factory=list)
    _reading: Live | None = None  # request in chunked prefill: the last one admitted
    _pending: ScheduledStep | None = None
    _number: int = 0  # number of the last scheduled step
    _admissions: int = 0
    _decoding: int = 0  # number of decoding requests; _read: their computed tokens
    _read: int = 0
    _stored: int = 0
    _growing: list[int] = field(init=False)  # by step modulo block size: decoding requests that need a block then
    _ending: defaultdict[int, list[Live]] = field(  # step -> requests that get their last token then
        default_factory=lambda: defaultdict(list)
    )
    _agenda: list[float] = field(default_factory=lambda: [inf])  # a heap of these steps

    def __post_init__(self) -> None:
        self._size = self.groups[0].block_size
        self._pool = Pool(self.num_blocks - 1, keeps=self.config.enable_prefix_caching)
        self._growing = [0] * self._size
        self._is_late = self.config.batch_queue_depth == 2
        self._watermark = int(self.config.watermark * self.num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def run(self, until: float = inf) -> None:
        """Run until the last request ends, no step begins before `until`, or `stop` returns True."""
        arrivals = self.arrivals
        while True:
            next_at = arrivals.next_time()
            while next_at is not None and next_at <= self.clock:
                self._add(*arrivals.pop())
                next_at = arrivals.next_time()
            if not self._running and not self._waiting:
                self._pending = None
                if next_at is None or next_at >= until:
                    return
                self.clock = next_at
                continue
            if self.clock >= until:
                return
            if not self._decode(until if next_at is None or next_at > until else next_at):
                self._iterate()
            if self.stop is not None and self.stop(self):
                return

    def live(self) -> list[int]:
        """Return the numbers of the unfinished requests that have arrived."""
        return [seq.number for seq in (*self._running, *self._waiting)]

    def earliest_end(self) -> float:
        """Return a lower bound of the time at which the next request ends, or inf if there is no request."""
        if not self._running and not self._waiting:
            next_at = self.arrivals.next_time()
            return inf if next_at is None else next_at
        if self._waiting or self._decoding != len(self._running) or self.arrivals.next_time() is not None:
            return self.clock
        # No step takes less time than the next one would take now, as the KV that is read only grows.
        steps = min(self._ending) - self._number + self.config.batch_queue_depth - 1
        return self.clock + steps * (self._plain_step().seconds or 0.0) * (1 - 1e-9)

    # --- requests -----------------------------------------------------------------------------------------------

    def _add(self, arrival: float, request: TraceRequest) -> None:
        self.counts.arrived += 1
        prompt, limit = request.prompt_tokens, self.config.max_model_len
        if not 0 < prompt < limit or request.output_tokens < 1:
            self.counts.rejected += 1
            self.arrivals.ended(self.clock)
            return
        length = min(prompt + request.output_tokens, limit)
        seq = Live(self.counts.arrived, arrival, request, prompt, length, prompt)
        if isinstance(request, HandedOver):
            seq.loaded = prompt - 1
        self._waiting.append(seq)
        if self.clock > arrival:
            self.timeline.add_wait(arrival, self.clock - arrival, len(self._waiting))

    def _end(self, seq: Live, *, failed: bool = False) -> None:
        seq.state = "gone"
        if seq.preemptions:
            self._pool.forget(seq)
        if failed:
            self.counts.failed += 1
        else:
            rows = self.records
            rows.number.append(seq.number)
            rows.arrival.append(seq.arrival)
            assert seq.admitted is not None  # as it has ended
            assert seq.first_token is not None
            rows.admitted.append(seq.admitted)
            rows.first_token.append(seq.first_token)
            rows.ended.append(self.clock)
            rows.prompt.append(seq.prompt)
            rows.output.append(seq.length - seq.prompt)
            rows.cached.append(seq.cached)
            rows.loaded.append(seq.loaded)
            rows.preemptions.append(seq.preemptions)
        self.arrivals.ended(self.clock)

    # --- one step -----------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        """Schedule a step; run the oldest one if the batch queue is full."""
        before = self._pending
        if before is PLAIN:
            before = self._plain_step()
        self._number += 1
        step = self._schedule()
        if not self._is_late:
            self._run(step)
            return
        self._pending = step
        if before is not None:
            self._run(before)
        elif step.seconds is None:
            self._pending = None

    def _plain_step(self) -> ScheduledStep:
        """Return a step in which all decoding requests compute the last of their tokens."""
        count, read = self._decoding, self._read
        line = self.step_time.line(count, read) or self._flat(count, read)
        return ScheduledStep(line_seconds(line, read), count)

    def _schedule(self) -> ScheduledStep:
        number, size, pool, reading = self._number, self._size, self._pool, self._reading
        needed, lasts = self._growing[number % size], self._take_lasts() if self._agenda[0] <= number else []
        part, more = 0, 0
        if reading is not None:
            part = min(reading.known - reading.computed, self.config.max_num_batched_tokens - self._decoding)
            more = max(0, -(-(reading.computed + part) // size) - reading.blocks)
        if needed + more > pool.free:
            return self._schedule_short(lasts)
        if needed:
            pool.take(needed)
        count = self._decoding
        self._read += count
        self._stored += count
        step = ScheduledStep()
        load = [count, count, count, self._read, self._read, 0, 0, 0]
        if reading is not None:
            if more:
                pool.take(more)
                reading.blocks += more
            self._compute(reading, part, load, step)
        if lasts:
            self._finish(lasts, step)
        if self._waiting:
            self._admit(self.config.max_num_batched_tokens - load[0], load, step)
        self._seal(step, load)
        return step

    def _take_lasts(self) -> list[Live]:
        """Return the requests that get their last token in this step, which are no longer on the agenda."""
        number = self._number
        heappop(self._agenda)
        there = self._ending.pop(number)
        return [seq for seq in there if seq.state == "decoding" and seq.offset + number == seq.length - 1]

    def _seal(self, step: ScheduledStep, load: list[int]) -> None:
        tokens, samples, seqs, read, pairs, prompts, prompt_tokens, own = load
        if tokens:
            work = StepWork(tokens, samples, seqs, (read,), (pairs,), prompts, prompt_tokens, (own,))
            step.seconds, step.samples = self.step_time.seconds(work), samples

    def _finish(self, lasts: list[Live], step: ScheduledStep) -> None:
        """Remove the requests that get their last token in this step from the decoding ones."""
        for seq in lasts:
            seq.state = "ending"
            self._decoding -= 1
            self._growing[(1 - seq.offset) % self._size] -= 1
            seq.computed = seq.length - 1
            seq.blocks = -(-seq.computed // self._size)
            self._read -= seq.computed
        step.lasts += lasts

    def _compute(self, seq: Live, part: int, load: list[int], step: ScheduledStep) -> None:
        """Compute `part` of a sequence's known tokens."""
        start, number = seq.computed, self._number
        end = seq.computed = start + part
        self._stored += part
        if start < seq.prompt:
            self.counts.prompt_tokens += min(part, seq.prompt - start)
        load[0] += part
        load[2] += 1
        load[3] += end
        load[4] += (new := (start + 1 + end) * part // 2)
        if part > 1 or end <= seq.prompt:
            load[5] += 1
            load[6] += part
            load[7] += new
        if end < seq.known:
            self._reading = seq
            seq.state = "reading"
            return
        if self._reading is seq:
            self._reading = None
        load[1] += 1
        step.firsts.append(seq)
        seq.begun = number
        seq.offset = end - number
        if end == seq.length - 1:
            seq.state = "ending"
            step.lasts.append(seq)
            return
        seq.state = "decoding"
        self._decoding += 1
        self._read += end
        self._growing[(1 - seq.offset) % self._size] += 1
        self._plan_end(seq)

    def _plan_end(self, seq: Live) -> None:
        number = seq.length - 1 - seq.offset
        if number not in self._ending:
            heappush(self._agenda, number)
        self._ending[number].append(seq)

    def _admit(self, budget: int, load: list[int], step: ScheduledStep) -> None:
        waiting, running, pool, config = self._waiting, self._running, self._pool, self.config
        while waiting and budget and len(running) < config.max_num_seqs:
            seq = waiting[0]
            needed = -(-seq.known // self._size)
            if needed > pool.free - (self._watermark if running else 0):
                if running:
                    return
                waiting.popleft()
                self._end(seq, failed=True)
                continue
            waiting.popleft()
            hit, start = 0, seq.loaded
            if seq.preemptions:
                hit = pool.revive(seq)
                start = hit * self._size
            if config.enable_prefix_caching:
                self._count(seq, hit * self._size)
            part = min(seq.known - start, budget)
            seq.blocks = -(-(start + part) // self._size)
            pool.take(seq.blocks - hit)
            if seq.admitted is None:
                seq.admitted, seq.cached = self.clock, hit * self._size
            self._admissions += 1
            seq.order = self._admissions
            seq.computed = start
            self._stored += start
            running.append(seq)
            self._compute(seq, part, load, step)
            budget -= part

    def _count(self, seq: Live, hit: int) -> None:
        stats = self.prefix_cache_stats
        if seq.preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += seq.known
            stats.preempted_hits += hit
        else:
            stats.requests += 1
            stats.queries += seq.known

    def _run(self, step: ScheduledStep) -> None:
        """Advance the clock by a step and process its tokens."""
        if step.seconds is not None:
            self.counts.steps += 1
            used = self.num_blocks - 1 - self._pool.free
            levels = (len(self._running), len(self._waiting), used, self._stored, used * self._size)
            self.timeline.add(self.clock, step.seconds, levels, step.samples)
            self.counts.output_tokens += step.samples
            self.clock += step.seconds
        self._process(step)

    def _process(self, step: ScheduledStep) -> None:
        """Process the tokens of a step that has run."""
        if len(step.lasts) > 1:
            step.lasts.sort(key=_order)
        for seq in step.lasts:
            if seq.state == "ending":
                self._running.remove(seq)
                self._stored -= seq.computed
                self._pool.give_back(seq.blocks, seq.computed // self._size)
            else:  # preempted while its last token was in flight
                self._waiting.remove(seq)
        self._give_first_tokens(step)
        for seq in step.lasts:
            self._end(seq)

    def _give_first_tokens(self, step: ScheduledStep) -> None:
        for seq in step.firsts:
            if seq.first_token is None:
                seq.first_token = self.clock

    # --- a step for which there are too few blocks --------------------------------------------------------------

    def _schedule_short(self, lasts: list[Live]) -> ScheduledStep:
        """Schedule sequences one by one, as the engine's scheduler does, preempting the last admitted."""
        number, size, pool = self._number, self._size, self._pool
        budget = self.config.max_num_batched_tokens
        placed: dict[Live, int] = {}
        gave_way: list[Live] = []
        failed: list[Live] = []
        for seq in self._running:
            if seq.state == "decoding":
                seq.blocks = -(-(seq.offset + number - 1) // size)
        for seq in tuple(self._running):
            if seq.state in ("waiting", "gone", "ending"):
                continue
            is_reading = seq.state == "reading"
            start = seq.computed if is_reading else seq.offset + number - 1
            part = min(seq.known - start, budget) if is_reading else 1
            missing = max(0, -(-(start + part) // size) - seq.blocks)
            has_room = True
            while missing > pool.free:
                victim = self._running[-1]
                if victim is seq and len(self._running) == 1:
                    has_room = False
                    if self._in_flight(seq):
                        break
                    self._drop(seq)
                    failed.append(seq)
                    break
                budget += placed.get(victim, 0)
                self._give_way(victim, placed)
                gave_way.append(victim)
                if victim is seq:
                    has_room = False
                    break
            if not has_room:
                continue
            pool.take(missing)
            seq.blocks += missing
            placed[seq] = part
            budget -= part
        # Decoding sequences that were placed compute a token; the others skip this step.
        step, load = ScheduledStep(), [0, 0, 0, 0, 0, 0, 0, 0]
        self._decoding = self._read = 0
        self._growing = [0] * size
        for seq in self._running:
            if seq.state != "decoding":
                continue
            if seq not in placed:
                seq.stalled = number
                seq.offset -= 1
                self._plan_end(seq)
            else:
                self._stored += 1
                load[0] += 1
                load[3] += seq.offset + number
            self._decoding += 1
            self._growing[(1 - seq.offset) % size] += 1
            self._read += seq.offset + number
        load[1] = load[2] = load[0]
        load[4] = load[3]
        reading = self._reading
        if reading is not None and reading in placed:
            self._compute(reading, placed[reading], load, step)
        self._finish([seq for seq in lasts if seq.state == "decoding" and seq in placed], step)
        for seq in failed:
            self._end(seq, failed=True)
        if not gave_way and not failed:
            self._admit(budget, load, step)
        self._seal(step, load)
        return step

    def _in_flight(self, seq: Live) -> bool:
        return self._is_late and seq.stalled != self._number - 1

    def _computed(self, seq: Live) -> int:
        """Return a running sequence's tokens that are computed or in flight before this step."""
        return seq.offset + self._number - 1 if seq.state == "decoding" else seq.computed

    def _give_way(self, seq: Live, placed: dict[Live, int]) -> None:
        """Preempt a sequence: free its blocks and put it at the head of the queue."""
        computed = self._computed(seq)
        cached = computed // self._size
        is_sampling = seq.state in ("decoding", "ending")
        if seq in placed:
            del placed[seq]
        elif is_sampling and self._in_flight(seq) and seq.begun != self._number - 1:
            cached = (computed - 1) // self._size  # the token in flight does not fill a block yet
        self._running.remove(seq)
        self._stored -= computed
        self._pool.leave(seq, seq.blocks, min(cached, seq.blocks))
        if seq is self._reading:
            self._reading = None
        if is_sampling:
            seq.known = computed + 1
        seq.state, seq.blocks, seq.computed = "waiting", 0, 0
        seq.preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _drop(self, seq: Live) -> None:
        """Free the blocks of a sequence that is larger than the whole pool."""
        computed = self._computed(seq)
        self._running.remove(seq)
        self._stored -= computed
        self._pool.give_back(seq.blocks, computed // self._size)
        seq.state = "gone"

    # --- several steps at once ----------------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """True if the first waiting request cannot be admitted before a running one gets its last token."""
        config = self.config
        if len(self._running) >= config.max_num_seqs or self._decoding >= config.max_num_batched_tokens:
            return True
        return -(-self._waiting[0].known // self._size) > self._pool.free - self._watermark

    def _decode(self, bound: float) -> int:
        """Run the steps that begin before `bound` and schedule one token of every decoding request and nothing else,
        at most until a request ends; return their number.

        Each sequence needs a block every `size` steps, so blocks are counted by the step's index modulo `size`.
        """
        count, is_late = self._decoding, self._is_late
        if not count or self._reading is not None or (self._waiting and not self._is_stuck()):
            return 0
        if is_late and (self._pending is None or (self._pending.seconds is None and self._pending is not PLAIN)):
            return 0
        size, growing, timeline, line_of = self._size, self._growing, self.timeline, self.step_time.line
        number, first, usable = self._number, self._number, self.num_blocks - 1
        clock, read, stored, used = self.clock, self._read, self._stored, usable - self._pool.free
        num_running, num_waiting, used_before = len(self._running), len(self._waiting), used
        done: ScheduledStep | None = None
        while clock < bound and used + growing[(number + 1) % size] <= usable:
            bucket, _, edge = timeline.bucket(clock)
            seconds_sum, (running_sum, waiting_sum, used_sum, stored_sum, _) = bucket.seconds, bucket.sums
            limit, noted, tokens = min(bound, edge), number, 0
            while clock < limit:
                step = self._pending or PLAIN  # the next to run
                is_plain, begun = step is PLAIN, number
                if step.seconds is None:
                    now = read if is_late else read + count
                    base, slope, until, least = line_of(count, now) or self._flat(count, now)
                else:
                    base, slope, until, least = step.seconds, 0.0, inf, 0.0
                last = self._agenda[0] if is_plain else number + 1
                # Add step by step, as the clock does: sums of products would differ in their last bits.
                while number < last and clock < limit:
                    taken = growing[(number + 1) % size]
                    if used + taken > usable:
                        bound = limit = clock
                        break
                    number += 1
                    used += taken
                    stored += count
                    now = read if is_late else read + count
                    read += count
                    if now > until:
                        base, slope, until, least = line_of(count, now) or self._flat(count, now)
                    seconds = base + slope * now
                    if seconds < least:
                        seconds = least
                    seconds_sum += seconds
                    running_sum += num_running * seconds
                    waiting_sum += num_waiting * seconds
                    used_sum += used * seconds
                    stored_sum += stored * seconds
                    clock += seconds
                tokens += (number - begun) * (count if is_plain else step.samples)
                if number == last:
                    self._number, self.clock, self._read = number, clock, read
                    done, is_over = self._turn(step)
                    count, read = self._decoding, self._read
                    if is_over:
                        bound = limit = clock
            if number > noted:
                sums = running_sum, waiting_sum, used_sum, stored_sum, used_sum * size
                bucket.put(seconds_sum, sums, (num_running, num_waiting, used, stored, used * size), tokens)
                self.counts.output_tokens += tokens
        if used > used_before:
            self._pool.take(used - used_before)
        self._number, self.clock, self._read, self._stored = number, clock, read, stored
        self.counts.steps += number - first
        self.counts.jumped += number - first
        if done is not None:
            self._process(done)
        return number - first

    def _flat(self, count: int, read: int) -> Line:
        """Return the seconds of a step of decoding requests that reads so many tokens, where they are no line."""
        return Line(self.step_time.seconds(StepWork(count, count, count, (read,), (read,))), 0.0, read)

    def _turn(self, step: ScheduledStep) -> tuple[ScheduledStep | None, bool]:
        """Note who gets a last token from the step just scheduled, and a first one from `step`, which has run.

        Return the step whose requests end now, if any, and whether the next step may be of another kind.
        """
        done = step if step.lasts else None
        if step is not PLAIN:
            self._pending = PLAIN
            self._give_first_tokens(step)
        lasts = self._take_lasts() if self._agenda[0] <= self._number else []
        if lasts:
            ahead = self._plain_step()
            self._finish(lasts, ahead)
            if self._is_late:
                self._pending = ahead
            else:
                done = ahead
        return done, done is not None or not self._decoding or bool(lasts and self._waiting)


def _order(seq: Live) -> int:
    return seq.order
