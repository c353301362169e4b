"""Steps of the twin in which every running sequence decodes one token and nothing else happens, done at little cost.

The scheduler would choose the same batch again and again. So sequences are brought up to date only where the block
manager is asked for blocks, which happens at the same steps and in the same order as otherwise, and at the end.
"""

from collections.abc import Callable
from typing import Final

from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.simulate.loop import DecodeLoad
from kvplan.simulate.work import Reach, StepWork

SHORTEST: Final = 3  # steps for which a stretch pays off


def quiet_steps(scheduler: Scheduler, batch: Batch, num_left: Callable[[Sequence], int]) -> int:
    """Return how many of the next steps decode one token of every running sequence and end none.

    batch     the last one
    num_left  tokens of a sequence before the one that ends it
    """
    config, hooks, running = scheduler.config, scheduler.hooks, scheduler.running
    if hooks.begin_step or hooks.want or hooks.limit or hooks.end_step or hooks.update or hooks.accept:
        return 0
    if scheduler.waiting and len(running) < config.max_num_seqs:
        return 0
    if config.batch_queue_depth > 2 or not 0 < len(running) <= config.max_num_batched_tokens:
        return 0
    ahead = config.batch_queue_depth - 1
    if len(batch.num_tokens) != len(running) or batch.samples != running:
        return 0
    for seq in running:
        if (
            seq.num_computed_tokens - seq.num_in_flight_tokens != len(seq.token_ids) - 1
            or seq.num_placeholders != ahead
        ):
            return 0
    return min(map(num_left, running))


class Stretch:
    """Such steps: `num_left` of them, unless it ends before."""

    def __init__(
        self, scheduler: Scheduler, reaches: tuple[Reach, ...], num_steps: int, output: Callable[[Sequence, int], None]
    ) -> None:
        """output  extends a sequence's tokens to so many"""
        self.num_left, self.done = num_steps, 0
        self._scheduler, self._output, self._seqs = scheduler, output, list(scheduler.running)
        self._computed = [seq.num_computed_tokens for seq in self._seqs]
        self._known = [len(seq.token_ids) for seq in self._seqs]
        self._load = DecodeLoad(reaches, [computed + 1 for computed in self._computed])
        self._changes: dict[int, list[int]] = {}  # step -> places of the sequences whose blocks may change at it
        for place in range(len(self._seqs)):
            self._plan(place, 0)

    def _plan(self, place: int, first: int) -> None:
        step = max(first, self._seqs[place].num_tokens_until_change - self._computed[place])
        self._changes.setdefault(step, []).append(place)

    def schedule(self) -> StepWork | None:
        """Choose the next batch and return its work; None, with nothing done, if blocks run out."""
        places = self._changes.pop(self.done, [])
        if len(places) > 1:
            places.sort()
        blocks, depth = self._scheduler.blocks, len(self._scheduler.blocks.groups)
        if places and blocks.num_free_blocks < len(places) * depth:
            return None
        for place in places:
            seq, num_tokens = self._seqs[place], self._computed[place] + self.done + 1
            self._set(place)
            has_room = blocks.grow(seq, num_tokens, min(num_tokens, self._scheduler.config.max_model_len))
            assert has_room, "enough blocks are free"
            self._plan(place, self.done + 1)
        return self._load.step(len(self._seqs))

    def _set(self, place: int) -> None:
        seq = self._seqs[place]
        seq.num_computed_tokens = self._computed[place] + self.done
        self._output(seq, self._known[place] + self.done)

    def update(self) -> None:
        """Count a batch's tokens."""
        self.done += 1
        self.num_left -= 1

    def settle(self) -> Batch:
        """Bring every sequence up to date; return a batch like the last."""
        for place in range(len(self._seqs)):
            self._set(place)
        budget = self._scheduler.config.max_num_batched_tokens - len(self._seqs)
        return Batch(budget, dict.fromkeys(self._seqs, 1), list(self._seqs))
