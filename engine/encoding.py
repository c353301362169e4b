"""Scheduling of prompts with images: an encoder's budget in a step, and the cache of what it computed.

Rules as in vLLM 0.33.0 (`v1/core/encoder_cache_manager.py`, `v1/core/sched/scheduler.py` _try_schedule_encoder_inputs),
checked step by step against its scheduler. Scheduling alone: no engine here runs a vision tower.
"""

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass

from engine.block_manager import Group, PrefixHit
from engine.drafting import DraftingScheduler, scheduler_of
from engine.encoder_rules import EncoderRules
from engine.scheduler import Batch, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError


class EncoderCache:
    """What an encoder computed, by content: entries that sequences need, and those that go first when room is short."""

    def __init__(self, size: int) -> None:
        self.num_free = size  # in embeddings; without evicting anything
        self.num_freeable = size  # with
        self.users: dict[str, set[Sequence]] = {}
        self.sizes: dict[str, int] = {}
        self.unused: OrderedDict[str, int] = OrderedDict()  # the first to be evicted first
        self.evicted: list[str] = []
        self._inputs: dict[Sequence, set[int]] = {}  # numbers of each sequence's inputs that it holds

    def use(self, seq: Sequence, number: int) -> bool:
        """Hold the entry of a sequence's input; False where there is none."""
        content = seq.encoder_inputs[number].content
        if content not in self.users:
            return False
        if not self.users[content]:
            self.num_freeable -= self.unused.pop(content)
        self._hold(seq, number)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Evict until num_embeds embeddings fit; False, and nothing evicted, where they cannot."""
        if num_embeds > self.num_freeable:
            return False
        while num_embeds > self.num_free:
            content, size = self.unused.popitem(last=False)
            del self.users[content], self.sizes[content]
            self.evicted.append(content)
            self.num_free += size
        return True

    def add(self, seq: Sequence, number: int) -> None:
        """Give the output of a sequence's input, about to be computed, its room."""
        item = seq.encoder_inputs[number]
        self.users.setdefault(item.content, set())
        self.sizes[item.content] = item.num_embeds
        self.num_free -= item.num_embeds
        self.num_freeable -= item.num_embeds
        self._hold(seq, number)

    def _hold(self, seq: Sequence, number: int) -> None:
        self.users[seq.encoder_inputs[number].content].add(seq)
        self._inputs.setdefault(seq, set()).add(number)

    def numbers_of(self, seq: Sequence) -> list[int]:
        """Inputs that a sequence holds the outputs of."""
        return sorted(self._inputs.get(seq, ()))

    def leave(self, seq: Sequence, number: int) -> None:
        """Let go of an input's output, unless another of the sequence is the same; it stays until room is short."""
        numbers, content = self._inputs[seq], seq.encoder_inputs[number].content
        numbers.discard(number)
        if not numbers:
            del self._inputs[seq]
        if any(seq.encoder_inputs[other].content == content for other in numbers):
            return
        users = self.users[content]
        users.discard(seq)
        if not users:
            self.unused[content] = self.sizes[content]
            self.num_freeable += self.sizes[content]

    def release(self, seq: Sequence) -> None:
        """Let go of all that a sequence holds."""
        for number in self.numbers_of(seq):
            self.leave(seq, number)

    def take_evicted(self) -> list[str]:
        """Entries evicted since the last call; those that came back are not among them."""
        evicted, self.evicted = [content for content in self.evicted if content not in self.users], []
        return evicted

    def check_invariants(self) -> None:
        """Raise AssertionError unless the room adds up."""
        assert self.sizes.keys() == self.users.keys(), "sizes and users differ"
        assert {content for content, users in self.users.items() if not users} == self.unused.keys(), "unused differs"
        assert self.num_freeable == self.num_free + sum(self.unused.values()), "free and freeable differ"
        assert self.num_free >= 0, f"{self.num_free} embeddings free"


@dataclass(slots=True)
class EncoderPlan:
    """What a sequence's tokens of a step need of the encoder."""

    new: list[int]  # inputs to compute
    repeated: list[int]  # inputs that are the same as one of those
    budget: int  # left after them


class EncodingScheduler(Scheduler):
    """Lets a step compute what the encoder's budget and cache allow, and stops prompts before what they lack."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...]) -> None:
        super().__init__(config, num_blocks, groups)
        assert config.encoder is not None
        self.encoder: EncoderRules = config.encoder
        self.encoder_cache = EncoderCache(config.encoder.cache_size)
        self._encoder_budget = config.encoder.compute_budget  # of this step, what is left
        self._plan: EncoderPlan | None = None  # of the sequence that is being scheduled
        self._mismatched: dict[Sequence, str] = {}
        self._num_read_ahead = config.drafts.prefill_lookahead

    def add(self, seq: Sequence) -> None:
        """As a Scheduler's; an image that no step could compute is refused."""
        limit = min(self.encoder.compute_budget, self.encoder.cache_size)
        for item in seq.encoder_inputs:
            if item.num_embeds > limit:
                raise InvalidInputError(
                    f"{seq.request_id}: an image of {item.num_embeds} embeddings is larger than the encoder's budget "
                    f"or cache ({limit}); send a smaller one"
                )
            if not self.encoder.chunks_inputs and item.length > self.config.max_num_batched_tokens:
                raise InvalidInputError(
                    f"{seq.request_id}: an image of {item.length} tokens does not fit into a step "
                    f"({self.config.max_num_batched_tokens}) and must not be cut; raise max_num_batched_tokens"
                )
        super().add(seq)

    def schedule(self) -> Batch:
        self._encoder_budget = self.encoder.compute_budget
        return super().schedule()

    def _launch(self, batch: Batch) -> None:
        batch.encoder_evicted = self.encoder_cache.take_evicted()
        super()._launch(batch)
        for seq, error in self._mismatched.items():
            self.fail(seq.request_id, error)
        self._mismatched.clear()

    def _with_inputs(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        self._plan = None
        if not n or not seq.encoder_inputs:
            return n
        plan, n = self._plan_inputs(seq, start, n)
        self._plan = plan
        return n

    def _plan_inputs(self, seq: Sequence, start: int, n: int) -> tuple[EncoderPlan, int]:
        """(inputs for n tokens from `start` on, of those tokens the ones that can be computed)."""
        plan, cache = EncoderPlan([], [], self._encoder_budget), self.encoder_cache
        window_end, num_embeds = start + n + self._num_read_ahead, 0
        sizes: dict[str, int] = {}  # of what this plan computes
        for number, item in enumerate(seq.encoder_inputs):
            if item.end <= start:
                continue
            if item.offset >= window_end:
                break
            if not self.encoder.chunks_inputs and start <= item.offset and start + n < item.end:
                n = max(0, item.offset - start - self._num_read_ahead)
                break
            size = sizes.get(item.content, cache.sizes.get(item.content, item.num_embeds))
            if size != item.num_embeds:
                self._mismatched[seq] = (
                    f"{seq.request_id}: image {number} is called {item.content!r} and has {item.num_embeds} "
                    f"embeddings, another of that name {size}; name images by their content"
                )
                return EncoderPlan([], [], self._encoder_budget), 0
            if item.content in sizes:
                plan.repeated.append(number)
                continue
            if cache.use(seq, number):
                continue
            if item.num_embeds > plan.budget or not cache.make_room(num_embeds + item.num_embeds):
                n = min(n, item.offset - start) if start < item.offset else 0
                break
            if not item.embeds_in(max(0, start - item.offset), min(item.length, window_end - item.offset)):
                continue
            num_embeds += item.num_embeds
            plan.budget -= item.num_embeds
            sizes[item.content] = item.num_embeds
            plan.new.append(number)
        return plan, n

    def _put(self, seq: Sequence, n: int, batch: Batch) -> None:
        super()._put(seq, n, batch)
        plan, self._plan = self._plan, None
        if plan is None or not plan.new:
            return
        batch.encoder_inputs[seq] = plan.new
        self._encoder_budget = plan.budget
        for number in plan.new:
            self.encoder_cache.add(seq, number)
        for number in plan.repeated:
            self.encoder_cache.use(seq, number)

    def _fits(self, seq: Sequence, hit: PrefixHit, n: int) -> bool:
        fits = super()._fits(seq, hit, n)
        if not fits:
            self.encoder_cache.release(seq)
        return fits

    def _preempt(self, seq: Sequence, batch: Batch) -> None:
        for number in batch.encoder_inputs.pop(seq, ()):
            self._encoder_budget += seq.encoder_inputs[number].num_embeds
        super()._preempt(seq, batch)
        self.encoder_cache.release(seq)

    def _retire(self, seqs: list[Sequence]) -> None:
        super()._retire(seqs)
        for seq in seqs:
            self.encoder_cache.release(seq)

    def update(self, batch: Batch, sampled: Mapping[str, int]) -> list[Sequence]:
        """As a Scheduler's; what the batch's prompts have passed is needed no more."""
        self._leave_passed(batch)
        return super().update(batch, sampled)

    def _leave_passed(self, batch: Batch) -> None:
        for seq in batch.num_tokens:
            if seq.is_finished:
                continue
            passed = seq.num_computed_tokens - (seq.num_placeholders if self.config.is_async else 0)
            for number in self.encoder_cache.numbers_of(seq):
                if seq.encoder_inputs[number].end <= passed:
                    self.encoder_cache.leave(seq, number)

    def check_invariants(self) -> None:
        """As a Scheduler's, and those of the encoder's cache."""
        super().check_invariants()
        self.encoder_cache.check_invariants()


class DraftingEncodingScheduler(DraftingScheduler, EncodingScheduler):
    """Drafts behind prompts with images."""

    def update_several(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> list[Sequence]:
        self._leave_passed(batch)
        return super().update_several(batch, sampled)


def encoding_scheduler_of(config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...]) -> Scheduler:
    """The scheduler that a config asks for, with an encoder's rules or without."""
    if config.encoder is None:
        return scheduler_of(config, num_blocks, groups)
    if not config.drafts.num_drafts:
        return EncodingScheduler(config, num_blocks, groups)
    return DraftingEncodingScheduler(config, config.drafts, num_blocks, groups)
