"""Simulated backend (the twin): the engine's scheduler and pool for any planned model and GPU, with modeled step times.

No model runs. Every response is part of a fixed text; prompt and seed determine its start, so that the same request
gets the same tokens. It ends after the server's configured number of tokens, or at the request's own limits.
"""

import hashlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any, Final, Protocol, cast

from engine.config import SamplingParams
from engine.detokenizer import Detokenizer
from engine.drafting import Drafting, DraftStep
from engine.request import Request, RequestOutput, TokenUpdate, prompt_token_ids, stop_token_ids
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError
from kvplan.planning.plan import Plan
from kvplan.serve.jobs import Simulated
from kvplan.serve.kv_events import EventLog, Publisher, check_groups
from kvplan.serve.stretch import SHORTEST, Stretch, quiet_steps
from kvplan.serve.text import end_token_of
from kvplan.serve.transfer import Transfer
from kvplan.servers.base import abilities_of
from kvplan.simulate.drafts import Drafts
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler
from kvplan.simulate.setup import groups, scheduler_config
from kvplan.simulate.steptime import StepTime, attention_kinds
from kvplan.simulate.tiers import TimedTiers
from kvplan.simulate.work import batch_work

ANSWER: Final = (
    " This answer was written by no model. A scheduler gave the request its blocks of memory and its share of each "
    "step, and the clock moved as far as the plan says that a step takes. What is counted here is what a server would "
    "have to hold: the tokens of the prompt, the tokens of the answer, and the blocks in which their keys and values "
    "lie until the request ends."
)


PLAIN: Final = Simulated()
EMPTY: Final = Batch(0)  # of a step in a stretch, until the stretch ends
WINDOW: Final = 100  # steps over which the host's lag is averaged
LATE: Final = 1.1  # times the planned duration from which a warning is due
REST_S: Final = 0.005  # longest wait for a copy in a step with nothing to run


class Clock(Protocol):
    """A clock in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    is_virtual = False

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class VirtualClock:
    """A clock that only steps move: every time is the plan's, and nobody waits."""

    is_virtual = True

    def __init__(self) -> None:
        self._now = time.monotonic()

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


def unix_time(clock: "WallClock | VirtualClock") -> Callable[[], float]:
    """Return the clock as seconds since 1970."""
    offset = time.time() - clock.now()
    return lambda: clock.now() + offset


class Lag:
    """How late steps end because the host takes longer than the plan gives it; `warn` is called once, with a line."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.last = 0.0  # seconds of the last step
        self.factor = 1.0  # of the last WINDOW steps: time taken / time planned
        self._warn: Callable[[str], None] | None = warn
        self._num_steps, self._late, self._planned = 0, 0.0, 0.0

    def count(self, late: float, planned: float) -> None:
        self.last = max(0.0, late)
        self._num_steps += 1
        self._late, self._planned = self._late + self.last, self._planned + planned
        if self._num_steps < WINDOW:
            return
        self.factor = 1 + self._late / self._planned if self._planned else 1.0
        self._num_steps, self._late, self._planned = 0, 0.0, 0.0
        if self.factor > LATE and self._warn is not None:
            self._warn(f"this host falls behind: steps take {self.factor:.1f} times as long as planned; lower --speed")
            self._warn = None


@dataclass(frozen=True, slots=True)
class TwinLogprobs:
    """Log-probabilities of a token with probability 1."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch in flight until `end`."""

    batch: Batch
    end: float
    seconds: float  # that the plan gives it


@dataclass(slots=True)
class Script:
    """What a request's output will be.

    words  token ids that follow each other, again from the first after the last
    start  index of the first one
    luck   source of draft acceptance
    ends   True: the output ends after the last word; else at the server's length
    last   place of the end token; None: it takes more to know an output's tokens than their places
    tick   what its request is notified of instead of its tokens, which nobody reads before its end
    """

    words: Several[int]
    start: int
    luck: Random
    min_tokens: int = 0
    ends: bool = False
    is_pooled: bool = False
    last: int | None = None
    tick: TokenUpdate | None = None

    def word(self, place: int, stops: frozenset[int]) -> int:
        """Return the output's token at a place; before min_tokens none that ends it, as far as there is another."""
        first = (self.start + place) % len(self.words)
        if place >= self.min_tokens or self.ends or self.words[first] not in stops:
            return self.words[first]
        return next((word for word in (*self.words[first:], *self.words) if word not in stops), self.words[first])


class Twin:
    """A backend without a model.

    speed          speed-up of the clock over the plan's step times
    output_tokens  length of a response that nothing else ends
    adapters       adapter name -> path: affects batching and prefix-cache hits
    drafts         speculative decoding: draft tokens and their acceptance
    tiers          KV offloading tiers, or what hands prompts over to other servers
    noise          standard deviation of the logarithm of step times, whose mean stays the plan's
    publisher      where KV events go; None: nowhere
    warn           takes a line for whoever runs the server
    """

    grammars = None

    def __init__(
        self,
        plan: Plan,
        step_time: StepTime,
        tokenizer: Any,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        speed: float = 1.0,
        output_tokens: int = 128,
        clock: Clock | None = None,
        adapters: dict[str, str] | None = None,
        drafts: Drafts | None = None,
        tiers: TimedTiers | Transfer | None = None,
        noise: float = 0.0,
        publisher: Publisher | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        config = scheduler_config(plan, "paged")
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len
        self.tiers, self._drafts = tiers, drafts
        self._stretch: Stretch | None = None  # of quiet steps
        self._core = self._scheduler(config, plan)
        self.clock, self.lag, self._noise, self._luck = clock or WallClock(), Lag(warn), noise, Random(0)
        self._adapters = {} if adapters is None else adapters
        self._lora_ids = {name: number for number, name in enumerate(self._adapters, 1)}
        if isinstance(tiers, Transfer):
            tiers.now, tiers.is_virtual = lambda: self.clock.now() * self._speed, isinstance(self.clock, VirtualClock)
            tiers.fail = self._fail_alone
        self.publisher = publisher
        if publisher is not None:
            rules, drafts_rules = groups(plan), self.scheduler.extension(Drafting)
            check_groups(rules, plan.request.spec.name, 1 if drafts is None else drafts.num_modules)
            is_latent = all(group.first.kind == "latent" for group in plan.pool.groups)
            lookahead = 0 if drafts_rules is None else drafts_rules.rules.hash_lookahead
            self._events = EventLog(rules, lookahead, is_latent, self._lora_ids)
            self.scheduler.blocks.pool.watcher = self._events
        self._reaches = tuple(kind.reach for kind in attention_kinds(plan))
        self._step_time, self._speed = step_time, speed
        self._vocab_size = plan.request.spec.vocab_size
        own_end = end_token_of(tokenizer)
        self._eos = eos_token_ids or (frozenset() if own_end is None else frozenset([own_end]))
        self._output_tokens = output_tokens
        self._words = [0] if tokenizer is None else tokenizer.encode(ANSWER, add_special_tokens=False).ids
        self._texts = _texts(tokenizer, self._words)
        self._end_token = min(self._eos, default=0)
        self._end_text = "" if tokenizer is None else tokenizer.decode([self._end_token], skip_special_tokens=True)
        self._requests: dict[str, Request] = {}
        self._scripts: dict[str, Script] = {}  # of requests
        self._is_pooling = False
        self._readers: list[tuple[Request, Script, int]] = []  # with the place of their last token before the stretch
        self._in_flight: deque[Flight] = deque()
        self._free_at = 0.0  # time at which the simulated device becomes idle
        self._ended: list[Request] = []  # the next step returns their outputs
        self._ids = count(1)

    def _scheduler(self, config: SimulatedConfig, plan: Plan) -> Scheduler:
        if abilities_of(plan.request.release.engine).prompts_first is not None:
            from kvplan.serve.prompts_first import ServedPromptsFirst  # only with this scheduler
            from kvplan.simulate.prompts_first_run import limits_of

            return cast("Scheduler", ServedPromptsFirst(limits_of(plan)))  # has what a server calls
        if self.tiers is None and self._drafts is not None:
            config = replace(config, drafts=self._drafts.rules)
        return simulated_scheduler(config, plan.capacity.num_blocks, groups(plan), self.tiers)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, up to date."""
        self._settle()
        return self._core

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
        simulated: Simulated = PLAIN,
    ) -> Request:
        params = params or SamplingParams()
        if adapter is not None and adapter not in self._adapters:
            raise InvalidInputError("adapter", f"{adapter!r:.60} is not known", "name another, or remove it")
        keys = () if adapter is None else (("lora", adapter, self._adapters[adapter]),)
        seq = Sequence(
            request_id or f"request-{next(self._ids)}",
            prompt_token_ids(prompt, None, self._vocab_size),
            params.max_tokens,
            priority,
            extra_keys=keys if cache_salt is None else (*keys, cache_salt),
            adapter=adapter,
            stop_token_ids=stop_token_ids(params, self._eos, self.tokenizer),
            skips_cache=params.prompt_logprobs is not None,
        )
        script = self._script(seq, params, simulated)
        self._is_pooling |= script.is_pooled
        if not self._eos and (script.ends or not params.ignore_eos):  # no end token exists
            length = len(script.words) if script.ends else max(self._output_tokens, script.min_tokens)
            seq.max_tokens = max(1, min(seq.max_tokens, length))
        handover = self.tiers if isinstance(self.tiers, Transfer) else None
        if handover is not None and simulated.transfer:
            handover.check_params(simulated.transfer, seq.num_prompt_tokens)
        self.scheduler.add(seq)
        if handover is not None and simulated.transfer:
            handover.expect(seq, simulated.transfer)
        request = Request(seq, params, on_token, self.tokenizer)
        self._requests[seq.request_id], self._scripts[seq.request_id] = request, script
        if params.prompt_logprobs is not None:
            rivals = max(1, params.prompt_logprobs)
            request.prompt_logprobs += [_logprobs(token, rivals) for token in seq.token_ids[1:]]
        return request

    def _script(self, seq: Sequence, params: SamplingParams, simulated: Simulated) -> Script:
        start = _start(seq.token_ids, params.seed)
        if simulated.answer is not None:
            return Script(simulated.answer, 0, Random(start), ends=True)
        script = Script(
            self._words, start % len(self._words), Random(start), params.min_tokens, is_pooled=simulated.is_pooled
        )
        can_stop = params.stop or not seq.stop_token_ids.isdisjoint(self._words)
        if self._texts and not can_stop and params.logprobs is None and self._drafts is None:
            has_end = bool(self._eos) and not params.ignore_eos
            script.last = max(params.min_tokens, self._output_tokens - 1) if has_end else sys.maxsize
            if simulated.is_whole:
                script.tick = TokenUpdate(seq.request_id, 0, "")
        return script

    def load_adapter(self, name: str, path: str) -> None:
        """Take an adapter's name, without reading it."""
        self._adapters[name] = path
        self._lora_ids.setdefault(name, len(self._lora_ids) + 1)

    def abort(self, request_id: str) -> object:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request_id)
            request.on_token = None
            self._complete(request, self._scripts.pop(request_id))
        return request

    def delay(self, request: Request) -> float:
        """Return the current delay in seconds between a request's step and its tokens' delivery to the client."""
        host = self._step_time.host
        if host is None:
            return 0.0
        return (host.delay + host.request + host.prompt_token * request.seq.num_prompt_tokens) / self._speed

    @property
    def has_unfinished(self) -> bool:
        is_copying = self.tiers is not None and self.tiers.is_busy
        return self._core.has_unfinished or bool(self._ended) or is_copying

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule a batch; wait for the oldest one if the batch queue is full. Return outputs of ended requests."""
        if self._stretch is not None and self._run_quietly(self._stretch):
            pass
        elif self.scheduler.has_unfinished or (self.tiers is not None and self.tiers.is_busy):
            try:
                self._run()
            except Exception as error:
                self._fail(f"the step failed: {error!r:.200}")
                raise
        else:
            self._in_flight.clear()  # all their requests have ended
        if self.publisher is not None:
            self.publisher.publish(self._events.take())
        ended, self._ended = self._ended, []
        return [request.output() for request in ended]

    def _fail(self, why: str) -> None:
        """End every request with an error, as the scheduler's state can no longer be trusted."""
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self.scheduler.fail(request.seq.request_id, why)
            self._end(request)

    def close(self) -> None:
        """Close the ports of its events and handovers."""
        if self.publisher is not None:
            self.publisher.close()
        if isinstance(self.tiers, Transfer):
            self.tiers.shut()

    def _fail_alone(self, request_id: str, why: str) -> None:
        """End one request with an error."""
        self.scheduler.fail(request_id, why)
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def _run_quietly(self, stretch: Stretch) -> bool:
        """Run a step in which nothing but decoding happens; False if the next is another."""
        work = stretch.schedule() if stretch.num_left and self._stretch is stretch else None
        if work is None:
            self._settle()
            return False
        self._launch(EMPTY, self._step_time.seconds(work), self.clock.now())
        flight = self._in_flight.popleft()
        self.clock.sleep_until(flight.end)
        self.lag.count(self.clock.now() - flight.end, flight.seconds)
        stretch.update()
        for request, script, first in self._readers:
            if request.on_token is not None:
                request.on_token(script.tick or self._update(request, script, first + stretch.done))
        return True

    def _settle(self) -> None:
        """End a stretch of quiet steps."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            batch = stretch.settle()
            self._in_flight = deque(Flight(batch, flight.end, flight.seconds) for flight in self._in_flight)

    def _begin_stretch(self, batch: Batch) -> None:
        """Begin a stretch of quiet steps if the next steps are so many."""
        is_other = self.tiers is not None or self._drafts is not None or not isinstance(self._core, Scheduler)
        num_steps = 0 if is_other or self._is_pooling else quiet_steps(self._core, batch, self._num_left)
        if num_steps >= SHORTEST:
            self._stretch = Stretch(self._core, self._reaches, num_steps, self._extend)
            requests = [self._requests[seq.request_id] for seq in self._core.running]
            self._readers = [
                (request, self._scripts[request.seq.request_id], request.seq.num_output_tokens - 1)
                for request in requests
                if request.on_token is not None
            ]

    def _num_left(self, seq: Sequence) -> int:
        """Return how many tokens come before the one that ends a sequence; 0 if it takes more to know them."""
        script = self._scripts[seq.request_id]
        if script.last is None:
            return 0
        length = min(seq.num_prompt_tokens + seq.max_tokens, self.max_model_len) - 1
        return min(length, seq.num_prompt_tokens + script.last) - len(seq.token_ids)

    def _extend(self, seq: Sequence, num_tokens: int) -> None:
        """Extend a sequence's tokens to so many."""
        words, start = self._words, self._scripts[seq.request_id].start
        while (count := num_tokens - len(seq.token_ids)) > 0:
            first = (start + len(seq.token_ids) - seq.num_prompt_tokens) % len(words)
            seq.token_ids += words[first : first + count]

    def _launch(self, batch: Batch, seconds: float, begin: float) -> None:
        """Let a batch run for so long, after those before it."""
        if self._noise:
            seconds *= math.exp(self._luck.gauss(-self._noise * self._noise / 2, self._noise))
        self._free_at = max(begin, self._free_at) + seconds / self._speed
        self._in_flight.append(Flight(batch, self._free_at, seconds / self._speed))

    def _run(self) -> None:
        batch = self.scheduler.schedule()
        begin = self.clock.now() if self.tiers is None else self._copy(self.tiers, batch)
        for seq in batch.new:
            self._requests[seq.request_id].num_cached_tokens = batch.hits[seq]
        for seq in batch.failed:
            self._end(self._requests[seq.request_id])
        if batch.num_tokens:
            seconds = self._step_time.seconds(batch_work(batch, self._reaches))
            if self._drafts is not None:
                seconds += self._drafts.seconds(batch)
            self._launch(batch, seconds, begin)
        depth = self.scheduler.config.batch_queue_depth
        if self._in_flight and (len(self._in_flight) == depth or not batch.num_tokens):
            self._take_in(self._in_flight.popleft())
        elif self.tiers is not None and not self._in_flight:
            self.clock.sleep_until(self._next_copy(self.tiers))
        if self.tiers is not None:
            self.tiers.take_in_at(self.clock.now() * self._speed)
        if not (batch.new or batch.resumed or batch.preempted or batch.failed or self._ended):
            self._begin_stretch(batch)

    def _copy(self, tiers: TimedTiers | Transfer, batch: Batch) -> float:
        """Begin a step's copies; return the time at which the step may write."""
        return tiers.begin_at(self.clock.now() * self._speed, batch) / self._speed

    def _next_copy(self, tiers: TimedTiers | Transfer) -> float:
        """Return the end time of the next copy, at most REST_S from now, as requests may arrive before."""
        now, end = self.clock.now(), tiers.next_end
        return now if end is None else min(now + REST_S, end / self._speed)

    def _take_in(self, flight: Flight) -> None:
        """Wait until a batch has run, and deliver its tokens."""
        self.clock.sleep_until(flight.end)
        self.lag.count(self.clock.now() - flight.end, flight.seconds)
        for seq in flight.batch.samples if self._is_pooling else ():
            if not seq.is_finished and self._scripts[seq.request_id].is_pooled:
                self.scheduler.finish(seq.request_id, "stop")
                self._end(self._requests[seq.request_id])
        seqs = [seq for seq in flight.batch.samples if seq.status != "finished"]
        self.scheduler.update(flight.batch, self._sampled(seqs, flight.batch))
        requests, scripts = self._requests, self._scripts
        for seq in seqs:
            request, script = requests[seq.request_id], scripts[seq.request_id]
            if script.last is None:
                self._receive(request)
                continue
            if request.on_token is not None:
                place = len(seq.token_ids) - seq.num_prompt_tokens - 1
                request.on_token(script.tick or self._update(request, script, place))
            if seq.status == "finished":
                self._end(request)
        if self._drafts is not None:
            self._propose(flight.batch)

    def _sampled(self, seqs: list[Sequence], batch: Batch) -> dict[str, Several[int]]:
        """Return the sequences' tokens of a step, by request id."""
        tokens: dict[str, Several[int]] = {}
        scripts, words, end = self._scripts, self._words, (self._end_token,)
        num_words = len(words)
        for seq in seqs:
            script, place = scripts[seq.request_id], len(seq.token_ids) - seq.num_prompt_tokens
            if script.last is None:
                tokens[seq.request_id] = self._tokens(seq, batch)
            else:
                is_end = place >= script.last
                tokens[seq.request_id] = end if is_end else (words[(script.start + place) % num_words],)
        return tokens

    def _update(self, request: Request, script: Script, place: int) -> TokenUpdate:
        """Return the token of a place and its text, of a request whose output is known in advance."""
        word = (script.start + place) % len(self._words)
        token, text = (
            (self._end_token, self._end_text) if place == script.last else (self._words[word], self._texts[word])
        )
        return TokenUpdate(request.seq.request_id, token, text)

    def _complete(self, request: Request, script: Script) -> None:
        """Fill in the text of a request whose tokens nobody has read."""
        if script.last is not None:
            num_words = min(request.seq.num_output_tokens, script.last)
            places = range(script.start, script.start + num_words)
            text = "".join([self._texts[place % len(self._texts)] for place in places])
            request.text = text if num_words == request.seq.num_output_tokens else text + self._end_text

    def _tokens(self, seq: Sequence, batch: Batch) -> list[int]:
        """Return a sequence's tokens of a step: the accepted drafts and one token after them."""
        step = batch.extra(DraftStep)
        num_drafts = 0 if seq in step.padded else len(step.drafts.get(seq, ()))
        num_held = 0
        if num_drafts:
            assert self._drafts is not None
            num_held = self._drafts.num_accepted(self._scripts[seq.request_id].luck, num_drafts)
        return [self._token(seq, seq.num_output_tokens + place) for place in range(num_held + 1)]

    def _propose(self, batch: Batch) -> None:
        """Propose drafts for every running sequence, unless async scheduling has done so on the device."""
        drafting, step = self.scheduler.extension(Drafting), batch.extra(DraftStep)
        if drafting is None or drafting.is_async or step.is_last:
            return
        drafts = [0] * step.num_next  # their ids do not matter
        drafting.propose({seq: drafts for seq in batch.samples if seq.status == "running"})

    def _token(self, seq: Sequence, place: int) -> int:
        params, script = self._requests[seq.request_id].params, self._scripts[seq.request_id]
        if script.ends and place >= len(script.words):
            return self._end_token
        is_over = place >= script.min_tokens and place + 1 >= self._output_tokens and not params.ignore_eos
        if self._eos and is_over and not script.ends:
            return self._end_token
        return script.word(place, seq.stop_token_ids)

    def _receive(self, request: Request) -> None:
        """Pass a sequence's new tokens on to its request."""
        seq, params = request.seq, request.params
        for token in seq.token_ids[seq.num_prompt_tokens + request.num_received :]:
            logprobs = None if params.logprobs is None else _logprobs(token, params.logprobs)
            if request.receive(token, logprobs):
                request.forget_unreceived()
                self.scheduler.finish(seq.request_id, "stop")
                seq.finish_reason = "stop"  # even if the length limit has ended it too
            if request.on_token is not None:
                request.on_token(request.update(token))
            if not request.num_unreceived:  # cut off by a stop string
                break
        if seq.is_finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        request_id = request.seq.request_id
        if self._requests.pop(request_id, None) is not None:  # None: aborted by a callback
            self._complete(request, self._scripts.pop(request_id))
            self._ended.append(request)


def _texts(tokenizer: Any, words: list[int]) -> list[str]:
    """Return the words' texts as they follow each other; nothing if a word alone has none."""
    if tokenizer is None:
        return [""] * len(words)
    detokenizer = Detokenizer(tokenizer, words)
    texts = [detokenizer.step(word) for word in words]
    return texts if all(texts) else []


def _logprobs(token: int, num_top: int) -> Any:
    return TwinLogprobs(0.0, ((token, 0.0),)[:num_top])


def _start(prompt: list[int], seed: int | None) -> int:
    """Return a machine-independent hash of the prompt and the seed."""
    text = f"{seed or 0}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
