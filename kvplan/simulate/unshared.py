"""Event-driven simulation of a server whose requests share no prefix, with the same steps as the engine's scheduler.

If no two prompts share a prefix, block identities do not matter: only how many blocks are free and in which order they
are evicted. Then a decode-only step is three numbers, and only sequences that allocate a block, end, begin or are
preempted need work. Rules, order and floating-point operations are those of kvplan.simulate.loop over
engine.scheduler; tests check that every figure of a run is the same to the last bit.

Only for the cases of `is_unshared`: one group of full-attention layers, first come first served, no tiers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import cycle, islice
from math import inf
from typing import Any, Final, Literal

from engine.block_manager import FullGroup, Group
from engine.extensions import ExtendedConfig
from engine.scheduler import PrefixCacheStats
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.counts import Counts
from kvplan.simulate.records import Records
from kvplan.simulate.steptime import StepTime
from kvplan.simulate.timeline import Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest

SHORT: Final = 8  # fewest steps for which counting blocks ahead pays off
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


@dataclass(slots=True)
class ScheduledStep:
    """A scheduled batch: its work, and the requests that get their first and their last token from it."""

    work: StepWork
    firsts: list[Live] = field(default_factory=list)
    lasts: list[Live] = field(default_factory=list)
    is_plain: bool = False  # all its sequences decode and none ends


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
            taken = min(count, first[0])
            first[0] -= taken
            count -= taken
            if not first[0]:
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

    def hit(self, seq: Live) -> int:
        """Return the number of blocks that still have a sequence's contents."""
        remains = self._of.get(seq)
        return remains[0] if remains else 0

    def revive(self, seq: Live) -> None:
        """Reallocate the blocks that still have a sequence's contents to it."""
        remains = self._of.pop(seq, None)
        if remains:
            self.free -= remains[0]
            remains[0] = 0  # the empty entry is dropped when its turn comes

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
    _waiting: deque[Live] = field(default_factory=deque)
    _running: list[Live] = field(default_factory=list)
    _reading: Live | None = None  # request in chunked prefill: the last one admitted
    _pending: ScheduledStep | None = None
    _number: int = 0  # number of the last scheduled step
    _admissions: int = 0
    _decoding: int = 0  # number of decoding requests; _read: their computed tokens
    _read: int = 0
    _stored: int = 0
    _growing: dict[int, list[Live]] = field(default_factory=dict)  # step -> requests that need a block then
    _ending: dict[int, list[Live]] = field(default_factory=dict)  # step -> requests that get their last token then
    _agenda: list[int] = field(default_factory=list)  # a heap of these steps

    def __post_init__(self) -> None:
        self._size = self.groups[0].block_size
        self._pool = Pool(self.num_blocks - 1, keeps=self.config.enable_prefix_caching)

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
            if not self._is_plain() or not self._decode(until if next_at is None or next_at > until else next_at):
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
        work = StepWork(self._decoding, self._decoding, self._decoding, (self._read,), (self._read,))
        return self.clock + steps * self.step_time.seconds(work) * (1 - 1e-9)

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
        self._number += 1
        step = self._schedule()
        if self.config.batch_queue_depth == 1:
            self._run(step)
            return
        before, self._pending = self._pending, step
        if before is not None:
            self._run(before)
        elif not step.work.num_tokens:
            self._pending = None

    def _schedule(self) -> ScheduledStep:
        number, size, pool = self._number, self._size, self._pool
        while self._agenda and self._agenda[0] <= number:
            heappop(self._agenda)
        growing = [
            seq
            for seq in self._growing.pop(number, ())
            if seq.offset + number - 1 == seq.blocks * size and seq.state == "decoding"
        ]
        if self.num_preemptions and len(growing) > 1:  # planned before a preemption and again after it
            growing = list(dict.fromkeys(growing))
        needed = len(growing)
        lasts = [
            seq
            for seq in self._ending.pop(number, ())
            if seq.state == "decoding" and seq.offset + number == seq.length - 1
        ]
        reading = self._reading
        part, more = 0, 0
        if reading is not None:
            part = min(reading.known - reading.computed, self.config.max_num_batched_tokens - self._decoding)
            more = max(0, -(-(reading.computed + part) // size) - reading.blocks)
        if needed + more > pool.free:
            return self._schedule_short(growing, lasts)
        if needed:
            pool.take(needed)
            for seq in growing:
                seq.blocks += 1
                self._plan_growth(seq)
        self._read += self._decoding
        self._stored += self._decoding
        step = ScheduledStep(StepWork())
        count = self._decoding
        load = [count, count, count, self._read, self._read, 0, 0, 0]
        if reading is not None:
            if more:
                pool.take(more)
                reading.blocks += more
            self._compute(reading, part, load, step)
        self._finish(lasts, step)
        self._admit(self.config.max_num_batched_tokens - load[0], load, step)
        step.is_plain = load[0] == count and not step.lasts
        self._seal(step, load)
        return step

    def _seal(self, step: ScheduledStep, load: list[int]) -> None:
        if len(step.lasts) > 1:
            step.lasts.sort(key=_order)
        tokens, samples, seqs, read, pairs, prompts, prompt_tokens, own = load
        step.work = StepWork(tokens, samples, seqs, (read,), (pairs,), prompts, prompt_tokens, (own,))

    def _finish(self, lasts: list[Live], step: ScheduledStep) -> None:
        """Remove the requests that get their last token in this step from the decoding ones."""
        for seq in lasts:
            seq.state = "ending"
            self._decoding -= 1
            self._read -= seq.length - 1
            seq.computed = seq.length - 1
        step.lasts += lasts

    def _compute(self, seq: Live, part: int, load: list[int], step: ScheduledStep) -> None:
        """Compute `part` of a sequence's known tokens."""
        start, number = seq.computed, self._number
        end = seq.computed = start + part
        self._stored += part
        self.counts.prompt_tokens += max(0, min(part, seq.prompt - start))
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
        self._plan_growth(seq)
        self._put(self._ending, seq.length - 1 - seq.offset, seq)

    def _plan_growth(self, seq: Live) -> None:
        self._put(self._growing, seq.blocks * self._size + 1 - seq.offset, seq)

    def _put(self, events: dict[int, list[Live]], number: int, seq: Live) -> None:
        there = events.get(number)
        if there is None:
            events[number] = [seq]
            heappush(self._agenda, number)
        else:
            there.append(seq)

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
            hit = pool.hit(seq) if seq.preemptions else 0
            if config.enable_prefix_caching:
                self._count(seq, hit * self._size)
            pool.revive(seq)
            start = hit * self._size if seq.preemptions else seq.loaded
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

    @property
    def _watermark(self) -> int:
        return int(self.config.watermark * self.num_blocks)

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
        work = step.work
        if work.num_tokens:
            seconds = self.step_time.seconds(work)
            self.counts.steps += 1
            used = self.num_blocks - 1 - self._pool.free
            levels = (len(self._running), len(self._waiting), used, self._stored, used * self._size)
            self.timeline.add(self.clock, seconds, levels, work.num_samples)
            self.counts.output_tokens += work.num_samples
            self.clock += seconds
        for seq in step.lasts:
            if seq.state == "ending":
                self._running.remove(seq)
                self._stored -= seq.computed
                self._pool.give_back(seq.blocks, seq.computed // self._size)
            else:  # preempted while its last token was in flight
                self._waiting.remove(seq)
        for seq in step.firsts:
            if seq.first_token is None:
                seq.first_token = self.clock
        for seq in step.lasts:
            self._end(seq)

    # --- a step for which there are too few blocks --------------------------------------------------------------

    def _schedule_short(self, growing: list[Live], lasts: list[Live]) -> ScheduledStep:
        """Schedule sequences one by one, as the engine's scheduler does, preempting the last admitted."""
        number, size, pool = self._number, self._size, self._pool
        budget = self.config.max_num_batched_tokens
        placed: dict[Live, int] = {}
        gave_way: list[Live] = []
        failed: list[Live] = []
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
        step, load = ScheduledStep(StepWork()), [0, 0, 0, 0, 0, 0, 0, 0]
        self._decoding = self._read = 0
        for seq in self._running:
            if seq.state != "decoding":
                continue
            if seq not in placed:
                seq.stalled = number
                seq.offset -= 1
                self._put(self._ending, seq.length - 1 - seq.offset, seq)
            else:
                self._stored += 1
                load[0] += 1
                load[3] += seq.offset + number
            self._decoding += 1
            self._read += seq.offset + number
        for seq in growing:
            if seq.state == "decoding":
                self._plan_growth(seq)
        load[1] = load[2] = load[0]
        load[4] = load[3]
        count = load[0]
        reading = self._reading
        if reading is not None and reading in placed:
            self._compute(reading, placed[reading], load, step)
        self._finish([seq for seq in lasts if seq.state == "decoding" and seq in placed], step)
        for seq in failed:
            self._end(seq, failed=True)
        if not gave_way and not failed:
            self._admit(budget, load, step)
        step.is_plain = load[0] == count == self._decoding and not step.lasts
        self._seal(step, load)
        return step

    def _in_flight(self, seq: Live) -> bool:
        return self.config.batch_queue_depth == 2 and seq.stalled != self._number - 1

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

    def _is_plain(self) -> bool:
        """True if the next step decodes one token of every running sequence and admits none."""
        count = self._decoding
        if not count or count != len(self._running):
            return False
        if self.config.batch_queue_depth == 2:
            pending = self._pending
            if pending is None or not pending.is_plain or pending.work.num_tokens != count:
                return False
        return not self._waiting or self._is_stuck()

    def _is_stuck(self) -> bool:
        """True if the first waiting request cannot be admitted before a running one ends."""
        if self._decoding >= min(self.config.max_num_seqs, self.config.max_num_batched_tokens):
            return True
        return -(-self._waiting[0].known // self._size) > self._pool.free - self._watermark

    def _decode(self, bound: float) -> int:
        """Run the steps before the next end of a request that begin before `bound`; return their number."""
        return self._glide(bound) or self._walk(bound)

    def _glide(self, bound: float) -> int:
        """Run the steps at once if there are enough blocks and step time grows along a line; return 0 if not, or if too
        few. Each sequence needs a block every `size` steps, so blocks are counted by the step's index modulo `size`.
        """
        size, count, pool, times = self._size, self._decoding, self._pool, self.step_time
        if self._waiting:
            return 0
        first, clock = self._number, self.clock
        steps = min(self._ending) - 1 - first
        if steps * count > size * (pool.free - count) or steps < SHORT:
            return 0
        is_late = self.config.batch_queue_depth == 2  # the step that runs was scheduled one step earlier
        now = self._read if is_late else self._read + count
        line = times.line(count, now)
        if line is None or clock + SHORT * (line.base + line.slope * now) > bound:
            return 0
        base, slope, until, least = line
        growths = [0] * size
        for seq in self._running:
            growths[(-first - seq.offset) % size] += 1  # in the step after its blocks are full
        stored, used, number, horizon = self._stored, self.num_blocks - 1 - pool.free, first, first + steps
        num_running = len(self._running)
        while clock < bound and number < horizon:
            if now > until:
                line = times.line(count, now)
                assert line is not None
                base, slope, until, least = line
            bucket, edge = self.timeline.bucket(clock)
            seconds_sum, (running_sum, waiting_sum, used_sum, stored_sum, _) = bucket.seconds, bucket.sums
            limit, begun, place = min(bound, edge), number, (number - first) % size
            # Add step by step, as the clock does: sums of products would differ in their last bits.
            for taken in islice(cycle(growths[place:] + growths[:place]), horizon - number):
                used += taken
                stored += count
                number += 1
                seconds = base + slope * now
                if seconds < least:
                    seconds = least
                now += count
                seconds_sum += seconds
                running_sum += num_running * seconds
                used_sum += used * seconds
                stored_sum += stored * seconds
                clock += seconds
                if clock >= limit or now > until:
                    break
            sums = running_sum, waiting_sum, used_sum, stored_sum, used_sum * size
            levels = num_running, 0, used, stored, used * size
            bucket.put(seconds_sum, sums, levels, (number - begun) * count)
        pool.take(used - (self.num_blocks - 1 - pool.free))
        for seq in self._running:
            blocks = -(-(seq.offset + number) // size)
            if blocks > seq.blocks:
                seq.blocks = blocks
                self._plan_growth(seq)
        while self._agenda[0] <= number:
            self._growing.pop(heappop(self._agenda), None)
        self._read += count * (number - first)
        self._number, self.clock, self._stored = number, clock, stored
        self._note_decoded(number - first, is_late=is_late)
        return number - first

    def _note_decoded(self, steps: int, *, is_late: bool) -> None:
        count, read = self._decoding, self._read
        self.counts.steps += steps
        self.counts.jumped += steps
        self.counts.output_tokens += steps * count
        if is_late:
            self._pending = ScheduledStep(StepWork(count, count, count, (read,), (read,)), is_plain=True)

    def _ahead(self, number: int) -> tuple[int, list[Live]] | None:
        """Return (last step of this kind, requests that begin a block in the next); None if that is of another kind."""
        agenda = self._agenda
        while agenda[0] <= number:
            heappop(agenda)
        if agenda[0] - 1 > number:
            return agenda[0] - 1, []
        last, size = number + 1, self._size
        if last in self._ending:
            return None
        there = self._growing.pop(last, [])
        changed = [seq for seq in there if seq.offset + number == seq.blocks * size and seq.state == "decoding"]
        if self.num_preemptions and len(changed) > 1:  # planned before a preemption and again after it
            changed = list(dict.fromkeys(changed))
        if len(changed) > self._pool.free:
            self._growing[last] = there
            return None
        return last, changed

    def _walk(self, bound: float) -> int:
        """Run the steps from one block allocation to the next; return their number."""
        size, count, pool = self._size, self._decoding, self._pool
        number, first = self._number, self._number
        clock, read, stored = self.clock, self._read, self._stored
        num_running, num_waiting = len(self._running), len(self._waiting)
        used = self.num_blocks - 1 - pool.free
        is_late = self.config.batch_queue_depth == 2  # the step that runs was scheduled one step earlier
        times = self.step_time
        line = times.line(count, read if is_late else read + count)
        base, slope, until, least = (0.0, 0.0, -1.0, 0.0) if line is None else line
        bucket, edge, limit, begun = None, clock, bound, number
        seconds_sum = running_sum = waiting_sum = used_sum = stored_sum = 0.0
        while clock < bound:
            ahead = self._ahead(number)
            if ahead is None:
                break
            last, changed = ahead
            if clock >= edge:
                if bucket is not None:
                    sums = running_sum, waiting_sum, used_sum, stored_sum, used_sum * size
                    levels = num_running, num_waiting, used, stored, used * size
                    bucket.put(seconds_sum, sums, levels, (number - begun) * count)
                bucket, edge = self.timeline.bucket(clock)
                seconds_sum, (running_sum, waiting_sum, used_sum, stored_sum, _) = bucket.seconds, bucket.sums
                limit, begun = min(bound, edge), number
            if changed:
                pool.take(len(changed))
                used += len(changed)
                for seq in changed:
                    seq.blocks += 1
                    self._plan_growth(seq)
            # Add step by step, as the clock does: sums of products would differ in their last bits.
            while number < last and clock < limit:
                number += 1
                stored += count
                if is_late:
                    now = read
                    read += count
                else:
                    now = read = read + count
                if now > until:
                    if line is not None:
                        line = times.line(count, now)
                        assert line is not None
                        base, slope, until, least = line
                        seconds = max(base + slope * now, least)
                    else:
                        seconds = times.seconds(StepWork(count, count, count, (now,), (now,)))
                else:
                    seconds = base + slope * now
                    if seconds < least:
                        seconds = least
                seconds_sum += seconds
                running_sum += num_running * seconds
                waiting_sum += num_waiting * seconds
                used_sum += used * seconds
                stored_sum += stored * seconds
                clock += seconds
        steps = number - first
        if not steps:
            return 0
        assert bucket is not None
        sums = running_sum, waiting_sum, used_sum, stored_sum, used_sum * size
        bucket.put(seconds_sum, sums, (num_running, num_waiting, used, stored, used * size), (number - begun) * count)
        self._number, self.clock, self._read, self._stored = number, clock, read, stored
        self._note_decoded(steps, is_late=is_late)
        return steps


def _order(seq: Live) -> int:
    return seq.order
