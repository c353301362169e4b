"""Scheduling with drafts: the model verifies all of a sequence's drafts in one step; rejected ones are undone.

Rules as in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `config/speculative.py`), checked step by step against it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from engine.block_manager import PrefixHit
from engine.draft_rules import DraftRules, SpeculationStats
from engine.scheduler import Batch, Extension, Outcome, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup, StateBlockManager
from kvplan.core.errors import UsageError

UNKNOWN = -1  # stands for a draft that only the device knows yet


@dataclass(slots=True)
class DraftStep:
    """A batch's part in speculation.

    drafts     of each sequence, the last ones of its tokens, which are guesses
    padded     sequences whose drafts are fillers
    is_last    nobody can use what would be guessed after the batch
    num_next   drafts to guess after it
    """

    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    padded: list[Sequence] = field(default_factory=list)
    is_last: bool = False
    num_next: int = 0


class Drafting(Extension):
    """Schedules draft tokens after the known ones, and takes back those that the model rejects.

    Between batches a sequence's `draft_ids` are what `propose` gave it (with async scheduling: as many unknown ones as
    the device is about to guess). A batch that has drafts of a sequence yields 1 to 1 + drafts tokens for it.
    """

    def __init__(self, rules: DraftRules, *, is_async: bool) -> None:
        """is_async: drafts are guessed on the device, before the tokens in front of them are known here."""
        self.rules, self.is_async = rules, is_async
        self.num_ahead = rules.lookahead
        self.stats = SpeculationStats(accepted_per_position=[0] * rules.num_drafts)
        self.step = DraftStep()
        self._has_prefill = False  # a chunk of a prompt is in the batch
        self._padded: Sequence | None = None  # the sequence that is being admitted, if it gets fillers

    def attach(self, scheduler: Scheduler) -> None:
        """Raises UsageError for layers whose recurrent state a rejected draft would have changed."""
        super().attach(scheduler)
        states = [group for group in scheduler.blocks.groups if isinstance(group, MambaGroup)]
        if any(group.num_speculative_blocks < self.rules.num_drafts for group in states):
            raise UsageError("speculation: layers with a recurrent state cannot take a draft back; serve without it")
        self._cuts_fillers = isinstance(scheduler.blocks, StateBlockManager)

    # --- a batch ------------------------------------------------------------------------------------------------

    def begin_step(self, batch: Batch) -> None:
        batch.budget -= self.rules.extra_slots  # what is left is what one more sequence may have
        self.step = DraftStep(is_last=self.rules.lookahead > 0, num_next=self.rules.num_drafts)
        batch.extras[DraftStep] = self.step
        self._has_prefill = False

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        batch.budget -= self.rules.extra_slots
        hit_len = batch.hits.get(seq)
        self._has_prefill |= seq.is_prefill_chunk if hit_len is None else hit_len < seq.num_tokens - 1

    def end_step(self, batch: Batch) -> None:
        step, num_by_batch_size = self.step, self.rules.num_by_batch_size
        for seq, n in batch.num_tokens.items():
            start, num_placeholders = seq.num_computed_tokens - n, seq.num_placeholders - (not seq.is_prefill_chunk)
            self._note_use(seq, start + n, num_placeholders, step)
            num_drafts = start + n - len(seq.token_ids) - num_placeholders
            if num_drafts > 0 and seq in batch.hits:
                step.padded.append(seq)
                step.drafts[seq] = (UNKNOWN,) * num_drafts
            elif num_drafts > 0:
                step.drafts[seq] = seq.draft_ids[:num_drafts]
            seq.draft_ids = ()
        if batch.num_tokens and num_by_batch_size:
            step.num_next = num_by_batch_size[len(batch.num_tokens)]
        for seq in batch.samples:
            seq.num_placeholders += len(step.drafts.get(seq, ()))
            if self.is_async:
                seq.draft_ids = (UNKNOWN,) * step.num_next

    def _note_use(self, seq: Sequence, end: int, num_placeholders: int, step: DraftStep) -> None:
        """Whether what is guessed for it after this batch can be of use; a single one that can is enough."""
        if end < len(seq.token_ids):  # a chunk of a prompt, after which nothing is guessed
            return
        least_output = seq.num_output_tokens + (2 if num_placeholders else 1)
        if least_output < seq.max_tokens:
            step.is_last = False

    def update(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> None:
        """Count the drafts that held: each token but the last is one."""
        drafts = batch.extra(DraftStep).drafts
        for seq in batch.samples:
            num_drafts = len(drafts.get(seq, ()))
            seq.num_placeholders -= num_drafts
            if num_drafts and not seq.is_finished:
                self.stats.count(num_drafts, len(sampled[seq.request_id]) - 1)

    def accept(self, seq: Sequence, num_taken: int, batch: Batch) -> None:
        """Take back the drafts that did not hold; of a sequence preempted meanwhile nothing is computed."""
        if seq.block_table:
            seq.num_computed_tokens -= len(batch.extra(DraftStep).drafts.get(seq, ())) + 1 - num_taken

    def propose(self, drafts: Mapping[Sequence, Several[int]]) -> None:
        """Set the drafts to verify next, by sequence, after a batch was applied and before the next is scheduled."""
        for seq, token_ids in drafts.items():
            if seq.status == "running":
                seq.draft_ids = () if seq.is_prefill_chunk else tuple(token_ids)

    # --- who runs -----------------------------------------------------------------------------------------------

    def want(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        self._padded = None
        if seq.status == "running":
            return min(n + len(seq.draft_ids), self.scheduler.config.max_model_len - 1 - start)
        if not self._is_padded(seq, start, batch):
            return n
        self._padded = seq
        return 1 + self.rules.num_drafts

    def decide(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> Outcome | None:
        return "full" if seq is self._padded and n > batch.budget else None

    def limit(self, seq: Sequence, start: int, n: int, batch: Batch) -> int | None:
        if seq is self._padded:
            return 1 if self._cuts_fillers and n < 1 + self.rules.num_drafts else n  # a block's end cuts fillers off
        return self._clear_of_end(seq, start, n)

    def _is_padded(self, seq: Sequence, start: int, batch: Batch) -> bool:
        """A sequence that lacks one token gets fillers for drafts beside others' decodes: a batch of one shape."""
        if seq.num_tokens - start != 1 or self._has_prefill or self.rules.num_by_batch_size:
            return False
        ends = start + 2 + self.rules.num_drafts
        return (bool(batch.num_tokens) or start > 0) and ends <= self.scheduler.config.max_model_len

    def _clear_of_end(self, seq: Sequence, start: int, n: int) -> int:
        """Never end a prefill where the drafter would read past it: finish it, or leave it enough to read."""
        left = seq.num_tokens - start - n
        if 0 < left < self.rules.prefill_lookahead:
            return max(0, n - self.rules.prefill_lookahead + left)
        return n

    def preempt(self, seq: Sequence, batch: Batch) -> None:
        n = batch.num_tokens.get(seq)
        if n is not None:
            self._note_use(seq, seq.num_computed_tokens + n, seq.num_placeholders, batch.extra(DraftStep))
            batch.budget += self.rules.extra_slots
        seq.draft_ids = ()
