"""Scheduling of prompts with images: an encoder's budget per step, and the cache of its outputs.

Rules as in vLLM 0.33.0 (`v1/core/encoder_cache_manager.py`, `v1/core/sched/scheduler.py` _try_schedule_encoder_inputs),
compared step by step with its scheduler. Scheduling only: the bundled engine runs no vision tower.
"""

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import field

from engine.scheduler import Batch, Extension
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An image: a run of a prompt's positions whose embeddings an encoder computes.

    content  what tells images apart: equal ones are computed once
    ranges   of its positions, from its first on, the half-open ones that take an embedding; (): all
    """

    offset: int
    length: int
    content: str
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings that the encoder computes for it."""
        return self.embeds_in(0, self.length)

    def embeds_in(self, start: int, end: int) -> int:
        """Embeddings that its positions from `start` to `end` take."""
        ranges = self.ranges or ((0, self.length),)
        return sum(max(0, min(end, last) - max(start, first)) for first, last in ranges)


@dataclass(frozen=True, slots=True)
class EncoderRules:
    """What a step may ask of the encoder.

    compute_budget  embeddings computed in a step, at most
    cache_size      embeddings kept for prompts that are not past their image, or for the next that has it
    chunks_inputs   False: a step has all of an image's positions or none (vLLM's disable_chunked_mm_input)
    """

    compute_budget: int
    cache_size: int
    chunks_inputs: bool = True


@dataclass(eq=False, slots=True)
class ImageSequence(Sequence):
    """A sequence with images in its prompt, in order."""

    encoder_inputs: tuple[EncoderInput, ...] = ()


def inputs_of(seq: Sequence) -> tuple[EncoderInput, ...]:
    return seq.encoder_inputs if isinstance(seq, ImageSequence) else ()


@dataclass(slots=True)
class EncoderStep:
    """A batch's images to encode, by sequence, and the images whose outputs are evicted for them."""

    inputs: dict[Sequence, list[int]] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)


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
        content = inputs_of(seq)[number].content
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
        item = inputs_of(seq)[number]
        self.users.setdefault(item.content, set())
        self.sizes[item.content] = item.num_embeds
        self.num_free -= item.num_embeds
        self.num_freeable -= item.num_embeds
        self._hold(seq, number)

    def _hold(self, seq: Sequence, number: int) -> None:
        self.users[inputs_of(seq)[number].content].add(seq)
        self._inputs.setdefault(seq, set()).add(number)

    def numbers_of(self, seq: Sequence) -> list[int]:
        """Inputs that a sequence holds the outputs of."""
        return sorted(self._inputs.get(seq, ()))

    def leave(self, seq: Sequence, number: int) -> None:
        """Let go of an input's output, unless another of the sequence is the same; it stays until room is short."""
        numbers, content = self._inputs[seq], inputs_of(seq)[number].content
        numbers.discard(number)
        if not numbers:
            del self._inputs[seq]
        if any(inputs_of(seq)[other].content == content for other in numbers):
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


class Encoding(Extension):
    """Limits a step to the encoder's budget and cache, and ends chunks before images that do not fit.

    read_ahead  tokens that a drafter reads after a chunk
    is_async    steps are scheduled before the tokens of the previous step are known
    """

    def __init__(self, rules: EncoderRules, *, read_ahead: int = 0, is_async: bool = False) -> None:
        self.rules, self.read_ahead, self.is_async = rules, read_ahead, is_async
        self.cache = EncoderCache(rules.cache_size)
        self._budget = rules.compute_budget  # left in this step
        self._plan: EncoderPlan | None = None  # of the sequence that is being scheduled
        self._mismatched: dict[Sequence, str] = {}

    def check(self, seq: Sequence) -> None:
        """Raise InvalidInputError for an image that no step can compute."""
        limit = min(self.rules.compute_budget, self.rules.cache_size)
        most_tokens = self.scheduler.config.max_num_batched_tokens
        for item in inputs_of(seq):
            if item.num_embeds > limit:
                problem = (
                    f"an image of {item.num_embeds} embeddings is larger than the encoder's budget or cache ({limit})"
                )
                raise InvalidInputError(seq.request_id, problem, "send a smaller one")
            if not self.rules.chunks_inputs and item.length > most_tokens:
                problem = (
                    f"an image of {item.length} tokens does not fit into a step ({most_tokens}) and must not be cut"
                )
                raise InvalidInputError(seq.request_id, problem, "raise max_num_batched_tokens")

    def begin_step(self, batch: Batch) -> None:
        self._budget = self.rules.compute_budget
        batch.extras[EncoderStep] = EncoderStep()

    def end_step(self, batch: Batch) -> None:
        batch.extra(EncoderStep).evicted = self.cache.take_evicted()
        for seq, error in self._mismatched.items():
            self.scheduler.fail(seq.request_id, error)
        self._mismatched.clear()

    def limit(self, seq: Sequence, start: int, n: int, batch: Batch) -> int | None:
        self._plan = None
        if inputs_of(seq):
            self._plan, n = self._plan_inputs(seq, start, n)
        return n

    def _plan_inputs(self, seq: Sequence, start: int, n: int) -> tuple[EncoderPlan, int]:
        """(inputs for n tokens from `start` on, of those tokens the ones that can be computed)."""
        plan, cache = EncoderPlan([], [], self._budget), self.cache
        window_end, num_embeds = start + n + self.read_ahead, 0
        sizes: dict[str, int] = {}  # of what this plan computes
        for number, item in enumerate(inputs_of(seq)):
            if item.end <= start:
                continue
            if item.offset >= window_end:
                break
            if not self.rules.chunks_inputs and start <= item.offset and start + n < item.end:
                n = max(0, item.offset - start - self.read_ahead)
                break
            size = sizes.get(item.content, cache.sizes.get(item.content, item.num_embeds))
            if size != item.num_embeds:
                self._mismatched[seq] = (
                    f"{seq.request_id}: image {number} is called {item.content!r} and has {item.num_embeds} "
                    f"embeddings, another of that name {size}; name images by their content"
                )
                return EncoderPlan([], [], self._budget), 0
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

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        plan, self._plan = self._plan, None
        if plan is None or not plan.new:
            return
        batch.extra(EncoderStep).inputs[seq] = plan.new
        self._budget = plan.budget
        for number in plan.new:
            self.cache.add(seq, number)
        for number in plan.repeated:
            self.cache.use(seq, number)

    def turn_away(self, seq: Sequence) -> None:
        self.cache.release(seq)

    def preempt(self, seq: Sequence, batch: Batch) -> None:
        for number in batch.extra(EncoderStep).inputs.pop(seq, ()):
            self._budget += inputs_of(seq)[number].num_embeds
        self.cache.release(seq)

    def retire(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.cache.release(seq)

    def update(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> None:
        """Release the outputs of images that the batch's prompts have passed."""
        for seq in batch.num_tokens:
            if seq.is_finished:
                continue
            passed = seq.num_computed_tokens - (seq.num_placeholders if self.is_async else 0)
            for number in self.cache.numbers_of(seq):
                if inputs_of(seq)[number].end <= passed:
                    self.cache.leave(seq, number)
