"""The engine: `step()` schedules, runs and updates; everything else is getting requests in and outputs out."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, count
from pathlib import Path
from threading import RLock

import torch

from engine.batch import BatchArrays, BatchBuilder
from engine.block_manager import NULL_BLOCK
from engine.config import EngineConfig, SamplingParams
from engine.directory import read_eos_token_ids, read_spec, read_tokenizer
from engine.loader import Checkpoint, RandomWeights, WeightSource
from engine.memory import MemoryReport
from engine.model_runner import ModelRunner
from engine.request import (
    Prompt,
    Request,
    RequestOutput,
    TokenUpdate,
    as_prompts,
    check_options,
    prompt_token_ids,
    stop_token_ids,
)
from engine.sampler import SampledAhead, SampledTokens, TokenLogprobs
from engine.scheduler import Batch, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.tp import join, local_rank
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine now and since it started; names as in vLLM's metrics where vLLM has them.

    kv_cache_usage_perc   share of the pool's blocks in use, 0 to 1
    num_cached_tokens     prompt tokens that requests found in the prefix cache
    num_cached_blocks     blocks in which a prefix can be found, in use or free
    num_kv_tokens         tokens whose KV the running sequences have, shared ones counted in each, and those that a
                          window has passed; num_used_blocks: blocks they hold, shared ones counted once
    num_filled_slots      slots of those blocks, over all groups of layers, that hold a computed token; of
                          num_used_blocks x block_size
    generation_tokens, prompt_tokens  computed since the start; busy_s: seconds spent in steps
    """

    kv_cache_usage_perc: float
    num_used_blocks: int
    num_cached_blocks: int
    num_kv_tokens: int
    num_filled_slots: int
    num_requests_running: int
    num_requests_waiting: int
    num_preemptions: int
    num_cached_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    busy_s: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping."""
        return self.generation_tokens / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that the device has been given and whose tokens are still to be taken in."""

    batch: Batch
    arrays: BatchArrays
    sampled: SampledAhead | SampledTokens
    num_prompt_tokens: int
    disowned: set[Sequence] = field(default_factory=set)  # what it computes for these means nothing, and is known to

    @property
    def is_wanted(self) -> bool:
        return not all(seq.is_finished for seq in self.arrays.seqs)


class Engine:
    """A model that serves requests; under torchrun every rank has one and calls it alike, and rank 0's requests run.

    Not for several threads at once: whoever comes while another thread's call runs gets a UsageError, and nothing is
    changed. Callbacks, which run within a call, may add and abort requests.
    """

    def __init__(
        self,
        spec_or_dir: ModelSpec | str | Path,
        config: EngineConfig | None = None,
        on_stage: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Load the model and size the pool.

        spec_or_dir  a Hugging Face directory (config.json, safetensors, perhaps tokenizer.json), or a ModelSpec with
                     load_format="dummy"
        on_stage     called as each stage of the start begins: weights, profile_run, pool, graphs
        Raises UnsupportedModelError for what it cannot run, InvalidInputError for damaged files, EnvironmentProblem
        for a device that is missing or too small.
        """
        self.config = config = config or EngineConfig()
        self.device = _device(config.device, config.tensor_parallel_size)
        directory = None if isinstance(spec_or_dir, ModelSpec) else Path(spec_or_dir)
        self.spec = spec_or_dir if isinstance(spec_or_dir, ModelSpec) else read_spec(Path(spec_or_dir))
        self.max_model_len = _max_model_len(self.spec, config.max_model_len)
        self._tp = tp = join(config.tensor_parallel_size, self.device)
        source = _weight_source(directory, config, self.device)
        self.runner = ModelRunner(self.spec, config, source, tp, self.device, self.max_model_len, on_stage)
        rules = tuple(group.rule for group in self.runner.groups)
        limits = _scheduler_config(config, self.max_model_len, config.batches_in_flight(self.device.type))
        self.scheduler = Scheduler(limits, self.runner.memory.num_blocks, rules)
        self._batches = BatchBuilder(rules, config.num_seqs, self.max_model_len)
        self.tokenizer = None if directory is None else read_tokenizer(directory)
        self.eos_token_ids = frozenset[int]() if directory is None else read_eos_token_ids(directory)
        self.on_step: Callable[[Stats], None] | None = None  # called after every step
        # Called before each batch is given to the device, with the prompt tokens of all batches then in flight.
        self.on_launch: Callable[[int], None] | None = None
        self._in_flight: deque[Flight] = deque()  # the oldest first; after a step at most one, of async scheduling
        self._requests: dict[str, Request] = {}  # waiting or running, by id
        self._unclaimed: list[Request] = []  # ended; the next step() gives their outputs
        self._updates: deque[tuple[Request, TokenUpdate]] = deque()  # that callbacks are still to see
        self._new_ids = (f"request-{n}" for n in count(1))
        self._num_steps = self._prompt_tokens = self._generation_tokens = 0
        self._num_cached_tokens = 0
        self._busy_s = 0.0
        self._in_use = RLock()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads out; they are refused, not made to wait."""
        if not self._in_use.acquire(blocking=False):
            raise UsageError(
                "Engine: another thread is using it; give the engine a thread of its own and pass requests to that"
            )
        try:
            yield
        finally:
            self._in_use.release()

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, in one continuous batch; outputs in the order of the prompts.

        prompts  texts or lists of token ids (arrays too); params: one for all, or one each
        """
        prompts, params = self._tp.from_first((prompts, params))
        several = as_prompts(prompts)
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Many) else list(params)
        if len(each) != len(several):
            raise UsageError(f"generate: {len(each)} params for {len(several)} prompts; give one, or one each")
        with self._exclusive():
            return self._generate(several, each, on_token)

    def _generate(
        self, prompts: list[Prompt], params: list[SamplingParams], on_token: Callable[[TokenUpdate], None] | None
    ) -> list[RequestOutput]:
        requests: list[Request] = []
        try:
            for prompt, chosen in zip(prompts, params, strict=True):
                requests.append(self._add(prompt, chosen, None, 0, None, on_token))
            while not all(request.seq.is_finished for request in requests):
                self._step()
        finally:  # also after an error or Ctrl-C: the engine goes on without these requests
            own = set(requests)
            for request in own:
                request.on_token = None
                if not request.seq.is_finished:
                    self.abort(request.seq.request_id)
            self._unclaimed = [request for request in self._unclaimed if request not in own]
        return [request.output() for request in requests]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
    ) -> str:
        """Queue a request and return its id; one that can never run is refused here.

        cache_salt  prefixes are shared only among requests of the same salt
        on_token    called after each step that gave the request a token; it may add and abort requests
        """
        with self._exclusive():
            prompt, params, request_id, priority, cache_salt = self._tp.from_first(
                (prompt, params, request_id, priority, cache_salt)
            )
            check_options(request_id, priority, cache_salt)
            return self._add(prompt, params, request_id, priority, cache_salt, on_token).seq.request_id

    def _add(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int,
        cache_salt: str | None, on_token: Callable[[TokenUpdate], None] | None,
    ) -> Request:  # fmt: skip
        params = params or SamplingParams()
        seq = Sequence(
            request_id or self._new_id(),
            prompt_token_ids(prompt, self.tokenizer, self.spec.vocab_size),
            params.max_tokens,
            priority,
            extra_keys=() if cache_salt is None else (cache_salt,),
            stop_token_ids=stop_token_ids(params, self.eos_token_ids, self.tokenizer),
        )
        self.scheduler.add(seq)
        request = self._requests[seq.request_id] = Request(seq, params, on_token, self.tokenizer)
        return request

    def _new_id(self) -> str:
        """An id that no request has, nor an output that is still to be given."""
        taken = {request.seq.request_id for request in self._unclaimed}
        return next(name for name in self._new_ids if name not in self._requests and name not in taken)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None when it is not running or waiting."""
        with self._exclusive():
            request = self._requests.pop(request_id, None)
            if request is None:
                return None
            self.scheduler.abort(request_id)
            request.on_token = None
            return request.output()

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything to do, or an output to give."""
        return self.scheduler.has_unfinished or bool(self._unclaimed)

    # --- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One batch; returns the outputs of the requests that ended since the last call.

        Nothing is lost to an exception, of a callback or of the step itself: what has ended comes with the next call.
        """
        with self._exclusive():
            self._step()
            ended, self._unclaimed = self._unclaimed, []
            return [request.output() for request in ended]

    def _step(self) -> None:
        """Launch batches until as many are in flight as may be, take the oldest one's tokens in, tell the callbacks."""
        start = time.perf_counter()
        if self._in_flight and not self._in_flight[0].is_wanted:  # all its sequences ended with the batch before it
            self._take_in()
        while len(self._in_flight) < self.scheduler.config.batch_queue_depth and self._launch():
            pass
        if self._in_flight:
            self._take_in()
        self._num_steps += 1
        self._busy_s += time.perf_counter() - start
        self._tell()

    def _launch(self) -> bool:
        """Schedule a batch and give it to the device; False when there is none."""
        batch = self.scheduler.schedule()
        for seq in batch.failed:
            self._end(seq)
        for seq in batch.new:
            self._requests[seq.request_id].num_cached_tokens = batch.hits[seq]
        if not batch.num_tokens:
            return False
        with self._failing(batch, settle=True):
            num_prompt_tokens = _num_prompt_tokens(batch)
            if self.on_launch is not None:
                self.on_launch(num_prompt_tokens + sum(flight.num_prompt_tokens for flight in self._in_flight))
            arrays = self._batches.build(batch)
            sampled = self.runner.run(arrays, [self._requests[seq.request_id].params for seq in arrays.seqs])
            self._in_flight.append(Flight(batch, arrays, sampled, num_prompt_tokens))
        return True

    def _take_in(self) -> None:
        """Wait for the oldest batch's tokens and give them to their requests; those that ended meanwhile get none."""
        flight = self._in_flight[0]
        batch, arrays = flight.batch, flight.arrays
        with self._failing(batch):
            self._in_flight.popleft()
            sampled = flight.sampled.wait()
            bad = list(compress(arrays.seqs, sampled.is_bad))
            if bad:
                self._contain(flight, [seq for seq in bad if seq not in flight.disowned])
            rows = dict(zip(arrays.seqs, zip(sampled.token_ids, sampled.logprobs, strict=True), strict=True))
            self.scheduler.update(batch, {seq.request_id: rows[seq][0] for seq in batch.samples})
            for seq in batch.samples:
                request = self._requests.get(seq.request_id)
                if request is not None and request.seq is seq:
                    self._receive(request, *rows[seq])
            self._prompt_tokens += flight.num_prompt_tokens
            self._num_cached_tokens += sum(batch.hits[seq] for seq in batch.new)

    def _request_of(self, seq: Sequence) -> Request | None:
        """Its request while that runs or waits; another one may have its id by now."""
        request = self._requests.get(seq.request_id)
        return request if request is not None and request.seq is seq else None

    def _receive(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take in a token that the request's sequence has already."""
        seq = request.seq
        self._generation_tokens += 1
        if request.receive(token, logprobs):
            self.scheduler.finish(seq.request_id, "stop")
            seq.finish_reason = "stop"  # also where its length has ended it
        if request.on_token is not None:
            self._updates.append((request, request.update(token)))
        if seq.is_finished:
            self._end(seq)

    @contextmanager
    def _failing(self, batch: Batch, *, settle: bool = False) -> Iterator[None]:
        """Whatever is raised inside ends the batch's sequences: their KV is not what the scheduler believes.

        settle  first take in the batches before it, which are as good as ever
        """
        try:
            yield
        except BaseException as error:
            try:
                while settle and self._in_flight:
                    self._take_in()
            finally:
                self.scheduler.blocks.distrust(self._own_blocks(list(batch.num_tokens)))
                for seq in batch.num_tokens:
                    self._fail(seq, f"the step failed: {error!r:.200}")
            raise

    def _contain(self, flight: Flight, bad: list[Sequence]) -> None:
        """End the sequences of a step whose logits are no numbers, and let their nan spread to nobody.

        Whoever shares or has taken over a block that they wrote, in this step or in a batch launched since, begins
        again, and what was sampled for it is forgotten: attention gives a masked key the weight 0, and 0 x nan is nan,
        so that even the blocks before the bad token are spoilt from the second layer on.
        """
        ahead = tuple(self._in_flight)
        victims = _victims(flight, bad)
        bad = [seq for seq in bad if seq not in victims]
        tainted, known = _written((flight, *ahead), bad), set[int]()
        touched: list[Sequence] = []
        while tainted != known:
            known = tainted
            touched = [seq for seq in self.scheduler.running if seq not in bad and _blocks([seq]) & tainted]
            tainted = tainted | _written(ahead, touched)
        spoilt = tainted | self._own_blocks([*bad, *touched])
        self.scheduler.blocks.distrust(spoilt)
        for seq in bad:
            num_tokens = flight.arrays.context_lens[flight.arrays.seqs.index(seq)]
            self._fail(seq, f"its logits are not numbers after {num_tokens} tokens; check the weights and the dtype")
        for seq in touched:
            self.scheduler.preempt(seq.request_id)
        for later in ahead:
            later.disowned.update(bad, touched)
            _forget_samples(later.batch, touched)
        _forget_samples(flight.batch, victims)  # the others' logits are as good as ever
        self.runner.scrub(sorted(spoilt))

    def _own_blocks(self, seqs: list[Sequence]) -> set[int]:
        """Blocks that these sequences hold and no other does."""
        return _blocks(seqs) - _blocks(seq for seq in self.scheduler.running if seq not in seqs)

    def _fail(self, seq: Sequence, why: str) -> None:
        """End a sequence that went wrong, unless it has ended."""
        if not seq.is_finished:
            self.scheduler.fail(seq.request_id, f"{seq.request_id}: {why}")
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        """Keep the output of a request that has ended for the next step(); no effect on one that is kept already."""
        request = self._request_of(seq)
        if request is not None:
            self._unclaimed.append(self._requests.pop(seq.request_id))

    def _tell(self) -> None:
        """Call the callbacks; if one raises, the next step tells the rest."""
        while self._updates:
            request, update = self._updates.popleft()
            if request.on_token is not None:  # None: aborted meanwhile
                request.on_token(update)
        if self.on_step is not None:
            self.on_step(self.stats())

    # --- figures ------------------------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """What each part of start-up took, from tensors and the allocator."""
        return self.runner.memory

    def stats(self) -> Stats:
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache_stats
        return Stats(
            kv_cache_usage_perc=scheduler.blocks.usage,
            num_used_blocks=scheduler.num_used_blocks,
            num_cached_blocks=scheduler.blocks.num_cached_blocks,
            num_kv_tokens=sum(seq.num_computed_tokens for seq in scheduler.running),
            num_filled_slots=scheduler.num_filled_slots,
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=self._num_cached_tokens,
            prefix_cache_queries=cache.queries + cache.preempted_queries,
            prefix_cache_hits=cache.hits + cache.preempted_hits,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            busy_s=self._busy_s,
        )


def _num_prompt_tokens(batch: Batch) -> int:
    """Tokens of prompts that a batch computes, which was scheduled just now."""
    total = 0
    for seq, n in batch.num_tokens.items():
        left = seq.num_prompt_tokens - seq.num_computed_tokens + n  # before the batch
        if left > 0:
            total += min(n, left)
    return total


def _blocks(seqs: Iterable[Sequence]) -> set[int]:
    """The blocks these sequences hold."""
    return {block for seq in seqs for table in seq.block_table for block in table} - {NULL_BLOCK}


def _victims(flight: Flight, bad: list[Sequence]) -> list[Sequence]:
    """Those among `bad` whose nan may be another's: they hold a block that another wrote in the same step.

    Blocks are shared forwards only, so that somebody remains to be blamed; a victim that is bad itself fails when it
    runs again.
    """
    written = {seq: flight.arrays.written_blocks(seq) for seq in bad}
    return [seq for seq in bad if any(_blocks([seq]) & written[other] for other in bad if other is not seq)]


def _forget_samples(batch: Batch, seqs: Iterable[Sequence]) -> None:
    """Take no token from a batch for these sequences."""
    for seq in seqs:
        if seq in batch.samples:
            batch.samples.remove(seq)
            seq.num_placeholders -= 1


def _written(flights: Iterable[Flight], seqs: list[Sequence]) -> set[int]:
    """The blocks that these sequences write in these batches."""
    return {block for flight in flights for seq in seqs for block in flight.arrays.written_blocks(seq)}


# --- what a config says -----------------------------------------------------------------------------------------


def _device(name: str, num_ranks: int = 1) -> torch.device:
    """The device that a config names; of several ranks, each has the GPU of its own number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        return _gpu(device.index if num_ranks == 1 else local_rank())
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: the engine runs on cpu and cuda ({name})")
    return device


def _gpu(index: int | None) -> torch.device:
    """A GPU with its number: "cuda" alone is the current one."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem("device: no CUDA GPU is usable here; use device cpu")
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise EnvironmentProblem(f"device: cuda:{index} is not there ({count} GPUs: cuda:0 to cuda:{count - 1})")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    if wanted is not None and wanted > spec.context_limit:
        raise UsageError(f"max_model_len: {spec.name} has {spec.context_limit} positions ({wanted}); use at most that")
    return wanted or spec.max_model_len


def _weight_source(directory: Path | None, config: EngineConfig, device: torch.device) -> WeightSource:
    if config.load_format == "dummy":
        return RandomWeights(config.seed, device)
    if directory is None:
        raise UsageError("load_format: a ModelSpec has no weights; give a directory, or load_format='dummy'")
    return Checkpoint(directory)


def _scheduler_config(config: EngineConfig, max_model_len: int, batch_queue_depth: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.num_seqs,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        reserve_full_prompt=config.reserve_full_prompt,
        watermark=config.watermark,
        batch_queue_depth=batch_queue_depth,
        allocator=config.allocator,
    )
