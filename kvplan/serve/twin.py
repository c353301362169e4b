"""A server's twin: the engine's scheduler and pool for any planned model and GPU, its steps as long as the plan says.

Nothing is computed. The answer is a fixed text, begun where the prompt and the seed say, so that the same request gets
the same tokens; it ends after as many as the server was told to give, or where the request says.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, Final, Protocol

from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate, prompt_token_ids, stop_token_ids
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError
from kvplan.planning.plan import Plan
from kvplan.serve.text import end_token_of
from kvplan.simulate.setup import groups, scheduler_config
from kvplan.simulate.steptime import StepTime, attention_kinds, outside
from kvplan.simulate.work import Reach, StepWork

ANSWER: Final = (
    " This answer was written by no model. A scheduler gave the request its blocks of memory and its share of each "
    "step, and the clock moved as far as the plan says that a step takes. What is counted here is what a server would "
    "have to hold: the tokens of the prompt, the tokens of the answer, and the blocks in which their keys and values "
    "lie until the request ends."
)


class Clock(Protocol):
    """Seconds that go by."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None: ...


class WallClock:
    """The machine's own."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


@dataclass(frozen=True, slots=True)
class TwinLogprobs:
    """Of a token that had no rival."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that runs until `end`."""

    batch: Batch
    end: float


class Twin:
    """A backend without a model.

    speed          how much faster than the plan its clock runs
    output_tokens  of an answer that nothing else ends
    adapters       paths by name: they decide who runs beside whom, and what is found in the prefix cache
    """

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
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        config = scheduler_config(plan, "paged")
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len
        self.scheduler = Scheduler(config, plan.capacity.num_blocks, groups(plan))
        self._clock = clock or WallClock()
        self._reaches = tuple(kind.reach for kind in attention_kinds(plan))
        self._step_time, self._outside, self._speed = step_time, outside(step_time), speed
        self._vocab_size = plan.request.spec.vocab_size
        own_end = end_token_of(tokenizer)
        self._eos = eos_token_ids or (frozenset() if own_end is None else frozenset([own_end]))
        self._output_tokens = output_tokens
        self._words = [0] if tokenizer is None else tokenizer.encode(ANSWER, add_special_tokens=False).ids
        self._adapters = adapters
        self._requests: dict[str, Request] = {}
        self._starts: dict[str, int] = {}  # where in the text a request's answer begins
        self._in_flight: deque[Flight] = deque()
        self._free_at = 0.0  # when the device will have run all that it was given
        self._ended: list[Request] = []  # the next step gives their outputs
        self._ids = count(1)

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
    ) -> Request:
        params = params or SamplingParams()
        if params.logit_bias:
            raise InvalidInputError(
                "logit_bias",
                "this server simulates and has no logits: its answer is a fixed text",
                "leave it out, or serve a model",
            )
        if adapter is not None and adapter not in self._adapters:
            raise InvalidInputError("adapter", f"{adapter!r:.60} is not known", "name another, or leave it out")
        keys = () if adapter is None else (("lora", adapter, self._adapters[adapter]),)
        seq = Sequence(
            request_id or f"request-{next(self._ids)}",
            prompt_token_ids(prompt, None, self._vocab_size),
            params.max_tokens,
            priority,
            extra_keys=keys if cache_salt is None else (*keys, cache_salt),
            adapter=adapter,
            stop_token_ids=stop_token_ids(params, self._eos, self.tokenizer),
        )
        if not self._eos and not params.ignore_eos:  # no token could end it
            seq.max_tokens = min(seq.max_tokens, self._output_tokens)
        self.scheduler.add(seq)
        request = self._requests[seq.request_id] = Request(seq, params, on_token, self.tokenizer)
        self._starts[seq.request_id] = _start(seq.token_ids, params.seed) % len(self._words)
        return request

    def abort(self, request_id: str) -> object:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request_id)
            request.on_token = None
            del self._starts[request_id]
        return request

    def delay(self, request: Request) -> float:
        """Seconds by which its user sees tokens later than the steps give them, as of now."""
        request_s, crowd_s, prompt_token_s = self._outside
        others = max(0, len(self.scheduler.running) - 1)
        return (request_s + crowd_s * others + prompt_token_s * request.seq.num_prompt_tokens) / self._speed

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._ended)

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule a batch, and wait for the oldest one where as many are in flight as may be."""
        if self.scheduler.has_unfinished:
            try:
                self._run()
            except Exception as error:
                self._fail(f"the step failed: {error!r:.200}")
                raise
        else:
            self._in_flight.clear()  # of requests that have all ended
        ended, self._ended = self._ended, []
        return [request.output() for request in ended]

    def _fail(self, why: str) -> None:
        """End every request: what the scheduler believes of them can no longer be trusted."""
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self.scheduler.fail(request.seq.request_id, why)
            self._end(request)

    def _run(self) -> None:
        batch = self.scheduler.schedule()
        for seq in batch.new:
            self._requests[seq.request_id].num_cached_tokens = batch.hits[seq]
        for seq in batch.failed:
            self._end(self._requests[seq.request_id])
        if batch.num_tokens:
            seconds = self._step_time.seconds(batch_work(batch, self._reaches)) / self._speed
            self._free_at = max(self._clock.now(), self._free_at) + seconds
            self._in_flight.append(Flight(batch, self._free_at))
        depth = self.scheduler.config.batch_queue_depth
        if self._in_flight and (len(self._in_flight) == depth or not batch.num_tokens):
            self._take_in(self._in_flight.popleft())

    def _take_in(self, flight: Flight) -> None:
        """Wait until a batch has run, and give its tokens."""
        self._clock.sleep_until(flight.end)
        seqs = [seq for seq in flight.batch.samples if not seq.is_finished]
        tokens = {seq.request_id: self._token(seq) for seq in seqs}
        self.scheduler.update(flight.batch, tokens)
        for seq in seqs:
            self._receive(self._requests[seq.request_id], tokens[seq.request_id])

    def _token(self, seq: Sequence) -> int:
        place, params = seq.num_output_tokens, self._requests[seq.request_id].params
        if self._eos and not params.ignore_eos and place + 1 >= self._output_tokens:
            return min(self._eos)
        token: int = self._words[(self._starts[seq.request_id] + place) % len(self._words)]
        return token

    def _receive(self, request: Request, token: int) -> None:
        seq, params = request.seq, request.params
        logprobs: Any = None if params.logprobs is None else TwinLogprobs(0.0, ((token, 0.0),)[: params.logprobs])
        if request.receive(token, logprobs):
            self.scheduler.finish(seq.request_id, "stop")
            seq.finish_reason = "stop"  # also where its length has ended it
        if request.on_token is not None:
            request.on_token(request.update(token))
        if seq.is_finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        request_id = request.seq.request_id
        if self._requests.pop(request_id, None) is not None:  # else a callback has aborted it
            del self._starts[request_id]
            self._ended.append(request)


def batch_work(batch: Batch, reaches: tuple[Reach, ...]) -> StepWork:
    """What a batch computes and reads; its tokens are counted as computed already."""
    spans = [(seq.num_computed_tokens, n) for seq, n in batch.num_tokens.items()]
    return StepWork(
        num_tokens=sum(n for _, n in spans),
        num_samples=len(batch.samples),
        num_seqs=len(spans),
        read=tuple(sum(reach.span(end, n) for end, n in spans) for reach in reaches),
        pairs=tuple(sum(reach.pairs(end, n) for end, n in spans) for reach in reaches),
    )


def _start(prompt: list[int], seed: int | None) -> int:
    """A number of the prompt and the seed, the same on every machine."""
    text = f"{seed or 0}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
