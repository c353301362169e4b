"""A server whose requests share nothing, run by what changes: the same steps as the engine's scheduler takes.

Where no two prompts begin alike, a block's name tells nobody anything: how many are free, and in which order they are
evicted, is all that matters. Then a step in which sequences only decode is three numbers, and only those sequences
are touched that take a block, end, begin or give way. Rules, order and floating-point operations are those of
kvplan.simulate.loop over engine.scheduler, and tests hold every figure of a run to be the same to the last bit.

Only for what `is_unshared` says: one group of layers that keep every token, first come first served, no tiers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, Literal

from engine.block_manager import FullGroup, Group
from engine.scheduler import PrefixCacheStats, SchedulerConfig
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.counts import Counts
from kvplan.simulate.records import Records
from kvplan.simulate.steptime import Roofline, StepTime
from kvplan.simulate.timeline import Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest

SURE: Final = 1 + 1e-9
State = Literal["waiting", "reading", "decoding", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class HandedOver(TraceRequest):
    """A request whose prompt was computed elsewhere: all but its last token is here when it comes."""


@dataclass(eq=False, slots=True)
class Live:
    """A request that has not ended.

    length    tokens at which it ends
    known     tokens that are computed before it decodes: its prompt, and after a preemption its answer so far
    computed  while it reads; a decoding one has `offset` + the number of the last step scheduled
    order     of admission
    begun     the step that computed the last of its known tokens
    stalled   the step that it sat out for want of a block
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
    begun: int = -1
    stalled: int = -1
    preemptions: int = 0
    admitted: float | None = None  # until it is
    first_token: float | None = None
    cached: int = 0
    loaded: int = 0
    outside: float = 0.0


@dataclass(slots=True)
class Step:
    """A batch that is scheduled: its work, who gets a first token by it, and whose last token it gives."""

    work: StepWork
    firsts: list[Live] = field(default_factory=list)
    lasts: list[Live] = field(default_factory=list)
    is_plain: bool = False  # every one of `work` decodes and goes on


class Pool:
    """Free blocks: those without contents first, then contents in the order in which they were given up.

    A sequence's contents are evicted from their end, so what is left of them is a beginning, a length.
    """

    def __init__(self, num_blocks: int, *, keeps: bool) -> None:
        self.free = self._empty = num_blocks
        self._keeps = keeps
        self._left: deque[list[int]] = deque()  # [blocks] of contents, the next to be evicted first
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
        """`cached` of the blocks have contents; returns those where they are kept."""
        self.free += count
        if not self._keeps or not cached:
            self._empty += count
            return None
        self._empty += count - cached
        remains = [cached]
        self._left.append(remains)
        return remains

    def leave(self, seq: Live, count: int, cached: int) -> None:
        """Blocks of a sequence that will come back for their contents."""
        remains = self.give_back(count, cached)
        if remains is not None:
            self._of[seq] = remains

    def hit(self, seq: Live) -> int:
        """Blocks that still have a sequence's contents."""
        remains = self._of.get(seq)
        return remains[0] if remains else 0

    def revive(self, seq: Live) -> None:
        """It takes them."""
        remains = self._of.pop(seq, None)
        if remains:
            self.free -= remains[0]
            remains[0] = 0  # an empty entry goes when its turn comes

    def forget(self, seq: Live) -> None:
        self._of.pop(seq, None)


def is_unshared(
    config: SchedulerConfig, groups: tuple[Group, ...], reaches: tuple[Reach, ...], run_len: int | None
) -> bool:
    """Whether a server's steps are those of this module."""
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
    """One run; fields as those of kvplan.simulate.loop.Simulation."""

    config: SchedulerConfig
    num_blocks: int
    groups: tuple[Group, ...]
    step_time: StepTime
    arrivals: Arrivals
    stop: Callable[[Any], bool] | None = None
    request_s: float = 0.0
    crowd_s: float = 0.0
    prompt_token_s: float = 0.0

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
    _reading: Live | None = None  # the one whose known tokens are computed in parts: the last that was admitted
    _pending: Step | None = None
    _number: int = 0  # of the last step scheduled
    _admissions: int = 0
    _decoding: int = 0  # how many decode, and their computed tokens
    _read: int = 0
    _stored: int = 0
    _growing: dict[int, list[Live]] = field(default_factory=dict)  # step -> who wants a block then
    _ending: dict[int, list[Live]] = field(default_factory=dict)  # step -> whose last token it gives
    _agenda: list[int] = field(default_factory=list)  # a heap of these steps
    _fixed: dict[int, tuple[float, float, float]] = field(default_factory=dict)

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
        """To the end of the last request, to the last step that begins before `until`, or as `stop` says."""
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
        """Numbers of the requests that have come and not ended."""
        return [seq.number for seq in (*self._running, *self._waiting)]

    def earliest_end(self) -> float:
        """A time before which no request of those here ends; inf of none."""
        if not self._running and not self._waiting:
            next_at = self.arrivals.next_time()
            return inf if next_at is None else next_at
        if self._waiting or self._decoding != len(self._running) or self.arrivals.next_time() is not None:
            return self.clock
        # A step takes no less than the next, as what is read only grows.
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
            self.timeline.add_wait(arrival, self.clock - arrival)

    def _end(self, seq: Live, *, failed: bool = False) -> None:
        seq.state = "gone"
        self._pool.forget(seq)
        if failed:
            self.counts.failed += 1
        else:
            rows = self.records
            rows.number.append(seq.number)
            rows.arrival.append(seq.arrival)
            assert seq.admitted is not None  # it has ended
            assert seq.first_token is not None
            rows.admitted.append(seq.admitted)
            rows.first_token.append(seq.first_token)
            rows.ended.append(self.clock + seq.outside)
            rows.prompt.append(seq.prompt)
            rows.output.append(seq.length - seq.prompt)
            rows.cached.append(seq.cached)
            rows.loaded.append(seq.loaded)
            rows.preemptions.append(seq.preemptions)
        self.arrivals.ended(self.clock + seq.outside)

    # --- one step -----------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        """Schedule a step; run the oldest when as many are in flight as may be."""
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

    def _schedule(self) -> Step:
        number, size, pool = self._number, self._size, self._pool
        while self._agenda and self._agenda[0] <= number:
            heappop(self._agenda)
        growing = [
            seq
            for seq in self._growing.pop(number, ())
            if seq.offset + number - 1 == seq.blocks * size and seq.state == "decoding"
        ]
        if self.num_preemptions and len(growing) > 1:  # planned before it gave way, and again after
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
        step = Step(StepWork())
        count = self._decoding
        load = [count, count, count, self._read, self._read]
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

    def _seal(self, step: Step, load: list[int]) -> None:
        if len(step.lasts) > 1:
            step.lasts.sort(key=_order)
        tokens, samples, seqs, read, pairs = load
        step.work = StepWork(tokens, samples, seqs, (read,), (pairs,))

    def _finish(self, lasts: list[Live], step: Step) -> None:
        """Those whose last token this step gives decode no more."""
        for seq in lasts:
            seq.state = "ending"
            self._decoding -= 1
            self._read -= seq.length - 1
            seq.computed = seq.length - 1
        step.lasts += lasts

    def _compute(self, seq: Live, part: int, load: list[int], step: Step) -> None:
        """Compute so many of a sequence's known tokens."""
        start, number = seq.computed, self._number
        end = seq.computed = start + part
        self._stored += part
        self.counts.prompt_tokens += max(0, min(part, seq.prompt - start))
        load[0] += part
        load[2] += 1
        load[3] += end
        load[4] += (start + 1 + end) * part // 2
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

    def _admit(self, budget: int, load: list[int], step: Step) -> None:
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

    def _run(self, step: Step) -> None:
        """Let the clock move by a step; its tokens are there."""
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
            else:  # it gave way while its last token was on its way
                self._waiting.remove(seq)
        for seq in step.firsts:
            if seq.first_token is None:
                others = self.crowd_s * (len(self._running) - 1) if self.crowd_s else 0.0
                seq.outside = self.request_s + max(0.0, others) + self.prompt_token_s * seq.prompt
                seq.first_token = self.clock + seq.outside
        for seq in step.lasts:
            self._end(seq)

    # --- a step for which there are too few blocks --------------------------------------------------------------

    def _schedule_short(self, growing: list[Live], lasts: list[Live]) -> Step:
        """One after another, as the scheduler goes through them; the last admitted gives way."""
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
        # Whoever decodes and was placed computes a token; whoever decodes and was not sits this step out.
        step, load = Step(StepWork()), [0, 0, 0, 0, 0]
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
        """Tokens of a running sequence that are computed, or in flight, before this step."""
        return seq.offset + self._number - 1 if seq.state == "decoding" else seq.computed

    def _give_way(self, seq: Live, placed: dict[Live, int]) -> None:
        """Take a sequence's blocks; it waits, before all others, to be computed again."""
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
        """Take the blocks of a sequence that the whole pool does not hold."""
        computed = self._computed(seq)
        self._running.remove(seq)
        self._stored -= computed
        self._pool.give_back(seq.blocks, computed // self._size)
        seq.state = "gone"

    # --- several steps at once ----------------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        """Whether the next step decodes one token of every running sequence and admits nobody."""
        count = self._decoding
        if not count or count != len(self._running):
            return False
        if self.config.batch_queue_depth == 2:
            pending = self._pending
            if pending is None or not pending.is_plain or pending.work.num_tokens != count:
                return False
        return not self._waiting or self._is_stuck()

    def _is_stuck(self) -> bool:
        """Whether the first that waits cannot be admitted before somebody ends."""
        if self._decoding >= min(self.config.max_num_seqs, self.config.max_num_batched_tokens):
            return True
        return -(-self._waiting[0].known // self._size) > self._pool.free - self._watermark

    def _decode(self, bound: float) -> int:
        """Run the steps up to the next at which somebody ends, or which begins at `bound`; returns how many."""
        size, count, pool = self._size, self._decoding, self._pool
        number, first = self._number, self._number
        clock, read, stored = self.clock, self._read, self._stored
        num_running, num_waiting = len(self._running), len(self._waiting)
        used = self.num_blocks - 1 - pool.free
        is_late = self.config.batch_queue_depth == 2  # the step that runs was scheduled one earlier
        agenda, growing, ending = self._agenda, self._growing, self._ending
        times = self.step_time
        line = times if isinstance(times, Roofline) and len(times.kinds) == 1 else None
        if line is not None:
            kind_bytes, state_bytes = line.kinds[0].token_bytes, 2 * line.state_bytes * count
            byte_s, pair_s = line.kv_byte, line.pairs[0]
            fixed = self._fixed.get(count)
            if fixed is None:
                fixed = self._fixed[count] = line.decode_terms(count)
            weights_s, server_s, large_s = fixed
        bucket, edge, limit, begun = None, clock, bound, number
        seconds_sum = running_sum = waiting_sum = used_sum = stored_sum = 0.0
        while clock < bound:
            while agenda[0] <= number:
                heappop(agenda)
            last = agenda[0] - 1
            changed: list[Live] = []
            if last == number:
                last = number + 1
                if last in ending:
                    break
                there = growing.pop(last, [])
                changed = [seq for seq in there if seq.offset + number == seq.blocks * size and seq.state == "decoding"]
                if self.num_preemptions and len(changed) > 1:  # planned before it gave way, and again after
                    changed = list(dict.fromkeys(changed))
                if len(changed) > pool.free:
                    growing[last] = there
                    break
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
            # The clock's own arithmetic, step by step: sums of products would differ in their last bits.
            if line is not None and not num_waiting and not large_s:
                now = read if is_late else read + count
                far = now + count * (last - number)
                kv, growth = state_bytes + kind_bytes * now, kind_bytes * count
                # Both grow evenly, so that what is larger at both ends, and clearly, is larger in between.
                if (
                    kv * byte_s > SURE * pair_s * now
                    and (state_bytes + kind_bytes * far) * byte_s > SURE * pair_s * far
                ):
                    taken = 0
                    for taken in range(1, last - number + 1):  # noqa: B007 -- used behind the loop
                        stored += count
                        seconds = kv * byte_s + weights_s + server_s
                        kv += growth
                        seconds_sum += seconds
                        running_sum += num_running * seconds
                        used_sum += used * seconds
                        stored_sum += stored * seconds
                        clock += seconds
                        if clock >= limit:
                            break
                    number += taken
                    read += count * taken
                    continue
            while number < last and clock < limit:
                number += 1
                stored += count
                if is_late:
                    now = read
                    read += count
                else:
                    now = read = read + count
                if line is not None:
                    memory, arithmetic = (state_bytes + kind_bytes * now) * byte_s, pair_s * now
                    seconds = (memory if memory >= arithmetic else arithmetic) + weights_s + server_s + large_s
                else:
                    seconds = times.seconds(StepWork(count, count, count, (now,), (now,)))
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
        self.counts.steps += steps
        self.counts.jumped += steps
        self.counts.output_tokens += steps * count
        if is_late:
            work = StepWork(count, count, count, (read,), (read,))
            self._pending = Step(work, is_plain=True)
        return steps


def _order(seq: Live) -> int:
    return seq.order
