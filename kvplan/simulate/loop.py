"""The simulation loop: arrivals, the engine's scheduler, and a clock that advances by each step's estimated time.

Steps in which every running sequence decodes one token and nothing else happens are run together (`_jump`): the clock
still advances step by step, with the same numbers in the same order, and the block manager is still called at every
step at which a sequence allocates, frees or publishes a block. So a jump leaves the same state as single steps: the
same block ids, the same eviction order, the same times to the last bit.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from math import inf
from typing import Any, Protocol

from engine.block_manager import Group
from engine.scheduler import Batch, PrefixCacheStats, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup
from kvplan.core.errors import InvalidInputError
from kvplan.core.records import dataclass
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.counts import Counts
from kvplan.simulate.records import Records
from kvplan.simulate.requests import Content, Prefixes, TokenCount, content_of, sequence
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler
from kvplan.simulate.steptime import StepTime
from kvplan.simulate.tiers import TimedTiers
from kvplan.simulate.timeline import Timeline
from kvplan.simulate.work import Reach, StepWork
from kvplan.workloads.trace import TraceRequest

MOST_STEPS = 512  # per jump: its events are listed in advance


class _AnyToken(Mapping[str, tuple[int, ...]]):
    """The same sampled token for every sequence; no code depends on its id."""

    def __getitem__(self, request_id: str) -> tuple[int]:
        return (0,)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_TOKEN = _AnyToken()


class Watcher(Protocol):
    """Observer of requests and of each individually scheduled batch; seconds are simulated time."""

    def arrive(self, seq: Sequence, seconds: float) -> None: ...

    def schedule(self, scheduler: Scheduler, batch: Batch, seconds: float) -> None: ...

    def update(self, scheduler: Scheduler, seconds: float) -> None: ...


@dataclass(slots=True)
class Live:
    """An unfinished request."""

    content: Content
    arrival: float
    admitted: float | None = None  # None: not admitted yet
    first_token: float | None = None
    cached: int = 0
    loaded: int = 0


@dataclass(slots=True)
class Simulation:
    """A simulated run of one server.

    run_len  tokens per prefix id of a request
    on_step  called with each individually scheduled batch, right after scheduling
    stop     polled; True ends the run early
    make_scheduler  from config, number of blocks and groups; with tiers: the simulated scheduler
    num_spare_blocks  blocks that must stay free during decode
    """

    config: SimulatedConfig
    num_blocks: int
    groups: tuple[Group, ...]
    reaches: tuple[Reach, ...]
    step_time: StepTime
    arrivals: Arrivals
    run_len: int | None = None
    tiers: TimedTiers | None = None
    jump: bool = True
    on_step: Callable[["Simulation", Batch], None] | None = None
    watcher: Watcher | None = None
    stop: Callable[[Any], bool] | None = None
    make_scheduler: Callable[[SimulatedConfig, int, tuple[Group, ...]], Scheduler] = simulated_scheduler
    num_spare_blocks: int = 0

    clock: float = 0.0
    records: Records = field(default_factory=Records)
    timeline: Timeline = field(default_factory=Timeline)
    counts: Counts = field(default_factory=Counts)
    scheduler: Scheduler = field(init=False)
    _live: dict[Sequence, Live] = field(default_factory=dict)
    _unanswered: dict[Sequence, None] = field(default_factory=dict)  # sequences without a first token
    _in_flight: deque[tuple[Batch, StepWork]] = field(default_factory=deque)
    _prefixes: Prefixes = field(default_factory=Prefixes)
    _is_stuck: bool = False  # waiting sequences cannot be admitted until blocks are freed
    _last_step_s: float = 0.01
    _until: float = inf
    _slot_group: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = (
            self.make_scheduler(self.config, self.num_blocks, self.groups)
            if self.tiers is None
            else simulated_scheduler(self.config, self.num_blocks, self.groups, self.tiers)
        )
        whole = [g for g, group in enumerate(self.groups) if not isinstance(group, MambaGroup)]
        self._slot_group = whole[0] if whole else None

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return self.scheduler.prefix_cache_stats

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def num_usable_blocks(self) -> int:
        return self.scheduler.blocks.num_usable_blocks

    def run(self, until: float = inf) -> None:
        """Run until the last request ends, no step begins before `until`, or `stop` returns True."""
        self._until = until
        while self._advance():
            if self.stop is not None and self.stop(self):
                return

    def live(self) -> list[int]:
        """Return the numbers of the unfinished requests that have arrived."""
        return [live.content.number for live in self._live.values()]

    def earliest_end(self) -> float:
        """Return a lower bound of the time at which the next request ends, or inf if there is no request."""
        if self._live:
            return self.clock
        next_at = self.arrivals.next_time()
        return inf if next_at is None else next_at

    def _advance(self) -> bool:
        """Run one step, jump over several, or wait for the next request; return False if nothing is left."""
        self._take_arrivals()
        if not self.scheduler.has_unfinished and not any(batch.num_tokens for batch, _ in self._in_flight):
            self._in_flight.clear()
            arrival = self.arrivals.next_time()
            if arrival is None or arrival >= self._until:
                return False
            if self.tiers is not None and self.tiers.is_busy:
                self._copy(self.tiers, arrival)
            else:
                self.clock = max(self.clock, arrival)
            return True
        if self.clock >= self._until:
            return False
        if not self._jump():
            self._step()
        return True

    # --- requests -----------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        while (arrival := self.arrivals.next_time()) is not None and arrival <= self.clock:
            self._add(*self.arrivals.pop())

    def _add(self, arrival: float, request: TraceRequest) -> None:
        self.counts.arrived += 1
        number = self.counts.arrived
        content = content_of(request, number, self._prefixes, self.run_len)
        sizes, ahead = {group.block_size for group in self.groups}, self.config.drafts.hash_lookahead
        seq = sequence(request, number, content, sizes, ahead)
        try:
            self._queue(seq, content)
        except InvalidInputError:
            self.counts.rejected += 1
            self.arrivals.ended(self.clock)
            return
        if self.watcher is not None:
            self.watcher.arrive(seq, arrival)
        if len(self.scheduler.waiting) == 1:  # the queue was empty: this request may be admitted at once
            self._is_stuck = False
        self._live[seq] = Live(content, arrival)
        self._unanswered[seq] = None
        if self.clock > arrival:
            self.timeline.add_wait(arrival, self.clock - arrival, len(self.scheduler.waiting))

    def _queue(self, seq: Sequence, content: Content) -> None:
        self.scheduler.add(seq)

    def _admitted(self, batch: Batch) -> None:
        for seq in (*batch.new, *batch.resumed):
            live = self._live[seq]
            if live.admitted is None:
                live.admitted, live.loaded = self.clock, seq.num_loaded_tokens
                live.cached = batch.hits[seq] - live.loaded
                if self.tiers is not None:
                    self.tiers.looked_up += seq.num_prompt_tokens

    def _end(self, seq: Sequence) -> None:
        live = self._live.pop(seq)
        self._unanswered.pop(seq, None)
        if seq.finish_reason == "out_of_blocks":
            self.counts.failed += 1
        else:
            rows = self.records
            rows.number.append(live.content.number)
            rows.arrival.append(live.arrival)
            assert live.admitted is not None  # as it has ended
            assert live.first_token is not None
            rows.admitted.append(live.admitted)
            rows.first_token.append(live.first_token)
            rows.ended.append(self.clock)
            rows.prompt.append(seq.num_prompt_tokens)
            rows.output.append(seq.num_output_tokens)
            rows.cached.append(live.cached)
            rows.loaded.append(live.loaded)
            rows.preemptions.append(seq.num_preemptions)
        self.arrivals.ended(self.clock)

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Schedule a batch; run the oldest one if the batch queue is full."""
        batch = self.scheduler.schedule()
        self._admitted(batch)
        if self.tiers is not None:
            self.clock = self.tiers.begin_at(self.clock, batch)
        for seq in batch.failed:
            self._end(seq)
        if self.on_step is not None:
            self.on_step(self, batch)
        if self.watcher is not None:
            self.watcher.schedule(self.scheduler, batch, self.clock)
        quiet = not (batch.new or batch.resumed or batch.preempted or batch.failed)
        if quiet and not batch.num_tokens and not any(ahead.num_tokens for ahead, _ in self._in_flight):
            assert self.tiers is not None, "nothing can be scheduled although requests wait"
            assert self.tiers.is_busy, "nothing can be scheduled although requests wait for copies"
            self._wait_for_copies(self.tiers, self.arrivals.next_time())
            return
        self._in_flight.append((batch, self._work(batch)))
        done: list[Sequence] = []
        while len(self._in_flight) == self.config.batch_queue_depth or (self._in_flight and not batch.num_tokens):
            done = self._run(*self._in_flight.popleft())
            if self._in_flight:
                break
        # If a prompt used up the budget, a sequence may be admitted as soon as that prompt is done.
        is_decode = len(batch.num_tokens) == sum(batch.num_tokens.values()) == len(self.scheduler.running)
        self._is_stuck = quiet and not done and is_decode and bool(self.scheduler.waiting)
        if self.tiers is not None:
            self._is_stuck &= not self.tiers.is_busy  # a finished copy may allow an admission
            self.tiers.take_in_at(self.clock)

    def _copy(self, tiers: TimedTiers, arrival: float) -> None:
        """Run a step of copies only, while no request is unfinished."""
        self.clock = tiers.begin_at(self.clock, self.scheduler.schedule())
        self._wait_for_copies(tiers, arrival)

    def _wait_for_copies(self, tiers: TimedTiers, arrival: float | None) -> None:
        """Advance the clock to the end of the next copy or to the next arrival."""
        ends = [moment for moment in (tiers.host.next_end, arrival) if moment is not None]
        if tiers.host.next_end is not None:
            self.clock = max(self.clock, min(ends))
        tiers.take_in_at(self.clock)

    def _run(self, batch: Batch, work: StepWork) -> list[Sequence]:
        """Advance the clock by a batch and process its tokens; return the sequences that ended."""
        seconds = self.step_time.seconds(work) if batch.num_tokens else 0.0
        sampled = self._sampled(batch)
        if batch.num_tokens:
            self._last_step_s = seconds
            self.counts.steps += 1
            self._note(seconds, len(batch.samples))
        self.clock += seconds
        done = self.scheduler.update(batch, sampled)
        if self.watcher is not None:
            self.watcher.update(self.scheduler, self.clock)
        if self._unanswered:
            for seq in [seq for seq in batch.samples if seq in self._unanswered]:
                live = self._live[seq]
                live.first_token = self.clock
                del self._unanswered[seq]
        for seq in done:
            self._end(seq)
        return done

    def _sampled(self, batch: Batch) -> Mapping[str, tuple[int, ...]]:
        return ANY_TOKEN

    def _note(self, seconds: float, num_tokens: int) -> None:
        scheduler = self.scheduler
        used = scheduler.blocks.num_usable_blocks - scheduler.blocks.num_free_blocks
        stored = sum([seq.num_computed_tokens for seq in scheduler.running])
        levels = (len(scheduler.running), scheduler.num_waiting, used, stored, self._slots())
        self.timeline.add(self.clock, seconds, levels, num_tokens)
        self.counts.output_tokens += num_tokens

    def _slots(self) -> int:
        """Return the token capacity of the running sequences' blocks in one group."""
        if self._slot_group is None:
            return 0
        g = self._slot_group
        return self.groups[g].block_size * sum([len(seq.block_table[g]) for seq in self.scheduler.running])

    def _work(self, batch: Batch) -> StepWork:
        """Return the batch's work; num_computed_tokens must already include its tokens."""
        read, pairs, own = [0] * len(self.reaches), [0] * len(self.reaches), [0] * len(self.reaches)
        num_tokens = num_prompts = prompt_tokens = 0
        for seq, n in batch.num_tokens.items():
            end = seq.num_computed_tokens
            if n == 1 and end > seq.num_prompt_tokens:  # the common case: decode
                num_tokens += 1
                for k, reach in enumerate(self.reaches):
                    tokens = end if reach.tokens is None or end < reach.tokens else reach.tokens
                    read[k] += tokens
                    pairs[k] += tokens
                continue
            num_tokens += n
            num_prompts += 1
            prompt_tokens += n
            self.counts.prompt_tokens += max(0, min(n, seq.num_prompt_tokens - (end - n)))
            for k, reach in enumerate(self.reaches):
                read[k] += reach.span(end, n)
                pairs[k] += (new := reach.pairs(end, n))
                own[k] += new
        return StepWork(
            num_tokens, len(batch.samples), len(batch.num_tokens), tuple(read), tuple(pairs), num_prompts,
            prompt_tokens, tuple(own),
        )  # fmt: skip

    # --- several steps at once ----------------------------------------------------------------------------------

    def _jump(self) -> int:
        """Run the steps up to the next one that may do more than decode; return their number, possibly 0."""
        if not self.jump or not self._is_steady():
            return 0
        max_steps = MOST_STEPS
        arrival = self.arrivals.next_time()
        if arrival is not None and not self._keeps_waiting():  # about as many steps as fit before the arrival
            max_steps = min(max_steps, int((arrival - self.clock) / max(self._last_step_s, 1e-9)) + 2)
        if self._until < inf:
            max_steps = min(max_steps, int((self._until - self.clock) / max(self._last_step_s, 1e-9)) + 2)
        return self._decode_together(max_steps) if max_steps > 1 else 0

    def _keeps_waiting(self) -> bool:
        """True if a request that arrives now could not be admitted."""
        return self._is_stuck or len(self.scheduler.running) >= self.config.max_num_seqs

    def _is_steady(self) -> bool:
        """True if the next step decodes one token of every running sequence and admits none."""
        scheduler, depth = self.scheduler, self.config.batch_queue_depth
        running = scheduler.running
        if self.tiers is not None and (self.tiers.is_busy or scheduler.num_deferred):
            return False
        if not running or len(running) > self.config.max_num_batched_tokens or depth > 2:
            return False
        if scheduler.waiting and not self._keeps_waiting():
            return False
        if self._unanswered and any([seq in self._unanswered for seq in running]):  # noqa: C419 -- a prompt's last token
            return False
        if depth == 1:
            return all([seq.num_computed_tokens == len(seq.token_ids) - 1 for seq in running])  # noqa: C419 -- faster
        if len(self._in_flight) != 1:
            return False
        ahead = self._in_flight[0][0]
        if ahead.samples != running or len(ahead.num_tokens) != len(running):
            return False
        return all([seq.num_computed_tokens == len(seq.token_ids) and seq.num_in_flight_tokens == 1 for seq in running])  # noqa: C419

    def _decode_together(self, max_steps: int) -> int:
        """Run up to `max_steps`; fewer if a request arrives, blocks run out, or blocks are freed that others wait for.

        Return the number of steps.
        """
        together = _Together(self, max_steps)
        next_at = self.arrivals.next_time()
        while together.done < max_steps and self.clock < self._until:
            if next_at is not None and next_at <= self.clock:
                if not self._keeps_waiting():
                    break
                self._take_arrivals()
                next_at = self.arrivals.next_time()
            if not together.step():
                break
            if together.ended:
                next_at = self.arrivals.next_time()
                if self.scheduler.waiting or not self.scheduler.running or self.tiers is not None:
                    break
        together.settle()
        return together.done


class _Together:
    """Consecutive decode-only steps of all running sequences, which touch only the sequences that a step changes."""

    def __init__(self, simulation: Simulation, max_steps: int) -> None:
        self.simulation, self.done, self.ended = simulation, 0, False
        scheduler, config = simulation.scheduler, simulation.config
        self._blocks, self._is_async = scheduler.blocks, config.batch_queue_depth == 2
        self._seqs = list(scheduler.running)
        self._computed = [seq.num_computed_tokens for seq in self._seqs]
        self._known = [len(seq.token_ids) for seq in self._seqs]
        self._left = dict.fromkeys(range(len(self._seqs)))  # places of the unfinished sequences
        self._events: dict[int, list[int]] = {}  # step -> places whose tables may change at it
        self._ends: dict[int, list[int]] = {}  # step -> places that get their last token at it
        self._is_paged = config.allocator == "paged"
        self._num_spare = simulation.num_spare_blocks
        self._can_drop = self._is_paged and bool(self._blocks.dropping)
        self._cuts_prompts = any(isinstance(group, MambaGroup) for group in simulation.groups)  # at block boundaries
        for place, seq in enumerate(self._seqs):
            if self._is_paged:
                self._plan(place, seq)
            length = min(seq.num_prompt_tokens + seq.max_tokens, config.max_model_len)
            last = length - self._known[place] - 1
            if last < max_steps:
                self._ends.setdefault(last, []).append(place)
        self._load = DecodeLoad(simulation.reaches, [computed + 1 for computed in self._computed])
        self._stored = sum(self._computed)
        self._pending = simulation._in_flight[0][1] if self._is_async else None
        self._slots = simulation._slots()
        g = simulation._slot_group
        self._group = 0 if g is None else g
        self._slot_size = 0 if g is None else simulation.groups[g].block_size

    def _plan(self, place: int, seq: Sequence) -> None:
        """Schedule the next step at which the sequence's block tables may change."""
        event = max(self.done, seq.num_tokens_until_change - self._computed[place])
        if event in self._events:
            self._events[event].append(place)
        else:
            self._events[event] = [place]

    def step(self) -> bool:
        """Run one step; return False, with nothing done, if it might preempt or admit a sequence."""
        simulation, t = self.simulation, self.done
        last = self._ends.get(t, ())
        changing = sorted(place for place in self._events.pop(t, ()) if place in self._left)
        if self._num_spare and self._blocks.num_free_blocks < len(changing) + self._num_spare:
            return False
        if (last and self._leaves_budget()) or (changing and not self._grow(changing, last)):
            return False
        count = len(self._left)
        if last and self._is_async:  # its last token is being sampled already
            for place in last:
                self._load.leave(self._computed[place] + t + 1)
        scheduled = count - len(last) if self._is_async else count
        self._stored += scheduled
        work = self._load.step(scheduled)
        run, self._pending = (work, None) if self._pending is None else (self._pending, work)
        seconds = simulation.step_time.seconds(run)
        blocks = self._blocks
        used = blocks.num_usable_blocks - blocks.num_free_blocks
        levels = (count, len(simulation.scheduler.waiting), used, self._stored, self._slots)
        simulation.timeline.add(simulation.clock, seconds, levels, count)
        simulation.clock += seconds
        simulation._last_step_s = seconds
        simulation.counts.steps += 1
        simulation.counts.jumped += 1
        simulation.counts.output_tokens += count
        self.done += 1
        self.ended = bool(last)
        if last:
            self._end(last)
        return True

    def _leaves_budget(self) -> bool:
        """True if a sequence whose last token is in flight frees token budget for which another one waits."""
        simulation, count = self.simulation, len(self._left)
        if not (self._is_async and simulation.scheduler.waiting) or count >= simulation.config.max_num_seqs:
            return False
        return count >= simulation.config.max_num_batched_tokens or self._cuts_prompts

    def _grow(self, changing: list[int], last: Iterable[int]) -> bool:
        """Allocate the blocks of every sequence whose tables may change.

        Return False if blocks might run out, or might be freed while a sequence waits for them.
        """
        simulation, blocks, t = self.simulation, self._blocks, self.done
        waits = bool(simulation.scheduler.waiting) and len(self._left) < simulation.config.max_num_seqs
        if len(changing) * len(simulation.groups) > blocks.num_free_blocks or (waits and self._can_drop):
            return False
        for place in changing:
            if self._is_async and place in last:
                continue
            seq = self._seqs[place]
            self._set(place, t)
            before = len(seq.block_table[self._group])
            has_room = blocks.grow(seq, self._computed[place] + t + 1)
            assert has_room, "a step that needs no more blocks than are free finds them"
            self._slots += (len(seq.block_table[self._group]) - before) * self._slot_size
            self.done += 1  # the next change comes after this step
            self._plan(place, seq)
            self.done -= 1
        return True

    def _end(self, last: Iterable[int]) -> None:
        """Finish the sequences whose last token this step sampled, as the scheduler does."""
        simulation, t = self.simulation, self.done
        for place in last:
            seq = self._seqs[place]
            del self._left[place]
            self._set(place, t)
            if self._is_async:
                seq.num_computed_tokens -= 1
                seq.num_in_flight_tokens = seq.num_placeholders = 0
            else:
                self._load.leave(seq.num_computed_tokens + 1)
            self._stored -= seq.num_computed_tokens
            self._slots -= len(seq.block_table[self._group]) * self._slot_size
            self._blocks.cache_full_blocks(seq, seq.num_computed_tokens)
        ended = [self._seqs[place] for place in last]
        for seq in ended:
            simulation.scheduler.finish(seq.request_id, "length")
        for seq in ended:
            simulation._end(seq)
        simulation._is_stuck = False

    def _set(self, place: int, t: int) -> None:
        """Bring a sequence to its state after t steps."""
        seq = self._seqs[place]
        seq.num_computed_tokens = self._computed[place] + t
        tokens = seq.token_ids
        assert isinstance(tokens, TokenCount)
        tokens.count = self._known[place] + t

    def settle(self) -> None:
        """Bring every sequence and the batch in flight to the state after the steps."""
        for place in self._left:
            self._set(place, self.done)
        if self._pending is not None and self.done:
            left = [self._seqs[place] for place in self._left]
            batch = Batch(self.simulation.config.max_num_batched_tokens - len(left), dict.fromkeys(left, 1), left)
            self.simulation._in_flight[0] = (batch, self._pending)


class DecodeLoad:
    """Work of consecutive decode steps of the same sequences: grows by one token per sequence, up to the reach."""

    def __init__(self, reaches: tuple[Reach, ...], context_lens: list[int]) -> None:
        """Start the steps; context_lens: context lengths at the first step, including that step's token."""
        self._read = [sum([reach.read(length) for length in context_lens]) for reach in reaches]
        self._slopes = [
            sum([reach.tokens is None or length < reach.tokens for length in context_lens]) for reach in reaches
        ]
        self._reaches = reaches
        self._ends: dict[int, list[int]] = {}  # step -> kinds in which one sequence stops growing
        for kind, reach in enumerate(reaches):
            if reach.tokens is not None:
                for length in context_lens:
                    if length < reach.tokens:
                        self._ends.setdefault(reach.tokens - length, []).append(kind)
        self._step = 0

    def leave(self, context_len: int) -> None:
        """Remove a sequence; context_len: its context length at what would be its next step."""
        for kind, reach in enumerate(self._reaches):
            self._read[kind] -= reach.read(context_len)
            if reach.tokens is None:
                self._slopes[kind] -= 1
            elif context_len - self._step < reach.tokens and context_len <= reach.tokens:  # grew so far
                self._slopes[kind] -= 1
                self._ends[self._step + reach.tokens - context_len].remove(kind)

    def step(self, count: int) -> StepWork:
        """Return the next step's work for `count` sequences."""
        for kind in self._ends.pop(self._step, ()):
            self._slopes[kind] -= 1
        read = tuple(self._read)
        self._read = [a + b for a, b in zip(self._read, self._slopes, strict=True)]
        self._step += 1
        return StepWork(count, count, count, read, read)
