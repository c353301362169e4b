"""The engine with a model: requests in, outputs out, and what happens to a request whose step goes wrong."""

import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import contextmanager
from functools import cached_property
from itertools import compress, count
from pathlib import Path
from threading import RLock

from engine.batch import BatchBuilder
from engine.config import EngineConfig, SamplingParams
from engine.directory import read_eos_token_ids, read_spec, read_tokenizer
from engine.draft_rules import SpeculationStats
from engine.drafting import Drafting
from engine.engine import EngineCore
from engine.extensions import scheduler_of
from engine.flight import Damage, Flight, num_prompt_tokens, own_blocks
from engine.kv_cache import group_layers
from engine.masks import Grammars, TokenMask
from engine.memory import MemoryReport
from engine.model_runner import ModelRunner
from engine.quantized import check_runs
from engine.request import (
    Prompt,
    Request,
    RequestOutput,
    TokenUpdate,
    as_prompts,
    check_biases,
    check_options,
    prompt_token_ids,
    stop_token_ids,
)
from engine.resolve import check_states, device, max_model_len, scheduler_config, weight_source
from engine.sampler import TokenLogprobs
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.speculation import companions_of, speculation_of
from engine.stages import StageRunner
from engine.state_slots import with_room_for_states
from engine.stats import Counters, Stats
from engine.tier_setup import disk_of, tiers_of
from engine.tp import join
from kvplan.core.errors import SettingError, UsageError
from kvplan.models.spec import ModelSpec


def _check_runs(spec: ModelSpec, block_size: int) -> None:
    """Name a model that does not run before its checkpoint is opened: by family, kinds of layers or quantization."""
    if not spec.has_states:  # those are named by the kind of state
        _ = spec.decoder
    group_layers(spec, block_size)
    check_runs(spec)


class Engine(EngineCore[Flight]):
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
        config = config or EngineConfig()
        self.device = device(config.device, config.tensor_parallel_size * config.pipeline_parallel_size)
        directory = None if isinstance(spec_or_dir, ModelSpec) else Path(spec_or_dir)
        self.spec = spec_or_dir if isinstance(spec_or_dir, ModelSpec) else read_spec(Path(spec_or_dir))
        _check_runs(self.spec, config.block_size)
        check_states(self.spec, config)
        self.config = config = with_room_for_states(self.spec, config)
        self.max_model_len = max_model_len(self.spec, config.max_model_len)
        self.tp = tp = join(config.tensor_parallel_size, self.device, config.pipeline_parallel_size)
        source = weight_source(directory, config, self.device)
        companions, disk = companions_of(config), disk_of(self.spec, config, tp, directory)
        runner = ModelRunner if tp.num_stages == 1 else StageRunner
        self.runner = runner(self.spec, config, source, tp, self.device, self.max_model_len, on_stage, companions)
        rules = tuple(group.rule for group in self.runner.groups)
        limits = scheduler_config(config, self.max_model_len, config.batches_in_flight(self.device.type))
        self.tiers, self._speculation = tiers_of(config, self.runner, disk), speculation_of(config, self.runner)
        others = tuple(extension for extension in (self.tiers, self._speculation) if extension is not None)
        super().__init__(scheduler_of(limits, self.runner.memory.num_blocks, rules, *others), self._launched)
        self._batches = BatchBuilder(rules, config.num_seqs, self.max_model_len, has_states=self.spec.has_states)
        self.tokenizer = None if directory is None else read_tokenizer(directory)
        self.eos_token_ids = frozenset[int]() if directory is None else read_eos_token_ids(directory)
        self.on_step: Callable[[Stats], None] | None = None  # called after every step
        self.on_schedule: Callable[[Batch], None] | None = None  # called with each batch, right after it is chosen
        # Called before each batch is given to the device, with the prompt tokens of all batches then in flight.
        self.on_launch: Callable[[int], None] | None = None
        self._requests: dict[str, Request] = {}  # waiting or running, by id
        self._unclaimed: list[Request] = []  # ended; the next step() gives their outputs
        self._updates: deque[tuple[Request, TokenUpdate]] = deque()  # that callbacks are still to see
        self._new_ids = (f"request-{n}" for n in count(1))
        self._counters = Counters()
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

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles the constraints of outputs."""
        return Grammars(self.tokenizer, self.spec.vocab_size, self.eos_token_ids)

    # --- requests -----------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Read an adapter of peft's (adapter_config.json, safetensors), which requests then name; on every rank."""
        with self._exclusive():
            self.runner.model.adapters.add(name, Path(path))

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, in one continuous batch; outputs in the order of the prompts.

        prompts  texts or lists of token ids (arrays too); params: one for all, or one each; adapter: for all
        """
        prompts, params, adapter = self.tp.from_first((prompts, params, adapter))
        several = as_prompts(prompts)
        if not isinstance(params, abc.Sequence):
            params = [params or SamplingParams()] * len(several)
        if len(params) != len(several):
            raise UsageError(f"generate: {len(params)} params for {len(several)} prompts; give one, or one each")
        with self._exclusive():
            return self._generate(several, params, adapter, on_token)

    def _generate(
        self, prompts: list[Prompt], params: Several[SamplingParams], adapter: str | None,
        on_token: Callable[[TokenUpdate], None] | None,
    ) -> list[RequestOutput]:  # fmt: skip
        requests: list[Request] = []
        try:
            for prompt, chosen in zip(prompts, params, strict=True):
                requests.append(self._add(prompt, chosen, None, 0, None, adapter, on_token))
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
        adapter: str | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
    ) -> str:
        """Queue a request and return its id; one that can never run is refused here.

        cache_salt  prefixes are shared only among requests of the same salt
        adapter     name of one that load_adapter has read; None: the model's own weights alone
        on_token    called after each step that gave the request a token; it may add and abort requests
        """
        request = self.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter,
            on_token=on_token,
        )  # fmt: skip
        return request.seq.request_id

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
    ) -> Request:
        """Queue a request as add_request does and return it whole: a server reads on what its output does not say."""
        with self._exclusive():
            prompt, params, request_id, priority, cache_salt, adapter = self.tp.from_first(
                (prompt, params, request_id, priority, cache_salt, adapter)
            )
            check_options(request_id, priority, cache_salt, adapter)
            return self._add(prompt, params, request_id, priority, cache_salt, adapter, on_token)

    def _add(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int,
        cache_salt: str | None, adapter: str | None, on_token: Callable[[TokenUpdate], None] | None,
    ) -> Request:  # fmt: skip
        params = params or SamplingParams()
        check_biases(params, self.spec.vocab_size)
        if params.prompt_logprobs is not None and self.config.speculative_config is not None:
            problem = "cannot be combined with {1}"
            raise SettingError("", ("prompt_logprobs", "speculative_config"), problem, "use only one")
        stops = stop_token_ids(params, self.eos_token_ids, self.tokenizer)
        mask = TokenMask.of(params, stops | self.eos_token_ids, self.grammars, self.tokenizer)
        keys = () if adapter is None else self.runner.model.adapters.cache_keys(adapter)
        seq = Sequence(
            request_id or self._new_id(),
            prompt_token_ids(prompt, self.tokenizer, self.spec.vocab_size),
            params.max_tokens,
            priority,
            extra_keys=keys if cache_salt is None else (*keys, cache_salt),
            adapter=adapter,
            stop_token_ids=stops,
            skips_cache=params.prompt_logprobs is not None,
        )
        self.scheduler.add(seq)
        request = self._requests[seq.request_id] = Request(seq, params, on_token, self.tokenizer, mask=mask)
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
        return super().has_unfinished or bool(self._unclaimed)

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
        start = time.perf_counter()
        self.advance()
        self._counters.count_step(start)
        self._tell()

    def _schedule(self) -> Batch:
        for flight in self._in_flight:
            with self._failing(flight.batch):
                flight.choose()
        batch = super()._schedule()
        if self.on_schedule is not None:
            self.on_schedule(batch)
        for seq in batch.failed:
            self._end(seq)
        for seq in batch.new:
            self._requests[seq.request_id].num_cached_tokens = batch.hits[seq]
        return batch

    def _run(self, batch: Batch) -> None:
        with self._failing(batch, settle=True):
            super()._run(batch)

    def _launched(self, batch: Batch) -> Flight:
        """Give a batch to the device."""
        prompt_tokens = num_prompt_tokens(batch)
        if self.on_launch is not None:
            self.on_launch(prompt_tokens + sum(flight.num_prompt_tokens for flight in self._in_flight))
        arrays = self._batches.build(batch)
        requests = [self._requests[seq.request_id] for seq in arrays.seqs]
        params, masks = [request.params for request in requests], [request.mask for request in requests]
        run = (self._speculation or self.runner).run
        ahead = run(arrays, params, masks) if any(masks) else run(arrays, params)
        return Flight(batch, arrays, ahead, prompt_tokens)

    def _postprocess(self) -> None:
        with self._failing(self._in_flight[0].batch):
            super()._postprocess()

    def _tokens(self, flight: Flight) -> Mapping[str, Several[int]]:
        """The tokens of a batch, without those of sequences whose logits are not numbers."""
        tokens = flight.wait()
        bad = list(compress(flight.arrays.seqs, flight.sampled.is_bad))
        if bad:
            self._contain(flight, [seq for seq in bad if seq not in flight.discarded])
        self._receive_prompts(flight, flight.sampled.prompts)
        return tokens

    def _hand_out(self, flight: Flight) -> None:
        for seq in flight.batch.samples:
            self._receive(seq, flight.rows[seq][1])
        self._counters.prompt_tokens += flight.num_prompt_tokens
        self._counters.num_cached_tokens += sum(flight.batch.hits[seq] for seq in flight.batch.new)

    def _request_of(self, seq: Sequence) -> Request | None:
        """Its request while that runs or waits; another one may have its id by now."""
        request = self._requests.get(seq.request_id)
        return request if request is not None and request.seq is seq else None

    def _receive_prompts(self, flight: Flight, prompts: abc.Iterable[tuple[Sequence, int, TokenLogprobs]]) -> None:
        """Give requests what a step says of their prompts' tokens."""
        for seq, place, logprobs in prompts:
            request = self._request_of(seq)
            if request is not None and seq not in flight.discarded:
                request.receive_prompt(place, logprobs)

    def _receive(self, seq: Sequence, logprobs: Several[TokenLogprobs | None]) -> None:
        """Give the sequence's new tokens to the request, if that runs or waits; most steps have one."""
        request = self._request_of(seq)
        if request is None:
            return
        for row in logprobs[: seq.num_output_tokens - request.num_received]:
            token = seq.token_ids[seq.num_prompt_tokens + request.num_received]
            self._counters.generation_tokens += 1
            is_stopped = request.receive(token, row)
            if is_stopped:  # a stop string came up
                request.forget_unreceived()
                self.scheduler.finish(seq.request_id, "stop")
                seq.finish_reason = "stop"  # also where its length has ended it
            if request.mask is not None and request.mask.error is not None:
                self._fail(seq, f"its output cannot be constrained any further: {request.mask.error}")
                return
            if request.on_token is not None:
                self._updates.append((request, request.update(token)))
            if is_stopped:
                break
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
                    self._postprocess()
            finally:
                self.scheduler.blocks.distrust(own_blocks(list(batch.num_tokens), self.scheduler.running))
                for seq in batch.num_tokens:
                    self._fail(seq, f"the step failed: {error!r:.200}")
            raise

    def _contain(self, flight: Flight, bad: list[Sequence]) -> None:
        """End the sequences of a step whose logits are no numbers, and let their nan spread to nobody.

        Whoever shares or has taken over a block that they wrote, in this step or in a batch launched since, begins
        again, and what was sampled for it is forgotten.
        """
        damage = Damage.of(bad, flight, tuple(self._in_flight), self.scheduler.running)
        self.scheduler.blocks.distrust(damage.blocks)
        for seq in damage.failed:
            num_tokens = flight.num_tokens_of(seq)
            self._fail(seq, f"its logits are not numbers after {num_tokens} tokens; check the weights and the dtype")
        for seq in damage.touched:
            self.scheduler.preempt(seq.request_id)
        for later in self._in_flight:
            later.discarded.update(damage.failed, damage.touched)
            later.forget_samples(damage.touched)
        flight.forget_samples(damage.victims)  # the others' logits are as good as ever
        self.runner.scrub(sorted(damage.blocks))

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

    def draft_stats(self) -> SpeculationStats | None:
        """Drafts checked since the start, and how many of them held; None without speculation."""
        drafting = self.scheduler.extension(Drafting)
        return None if drafting is None else drafting.stats

    def stats(self) -> Stats:
        """Counts since the start, and what is running and used now; see Stats for units."""
        return self._counters.stats(self.scheduler)
