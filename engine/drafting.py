"""Scheduling with drafts: the model verifies all of a sequence's drafts in one step; rejected ones are undone.

Rules as in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `config/speculative.py`), checked step by step against it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

from engine.block_manager import Group, MambaGroup, PrefixHit
from engine.draft_rules import DraftRules, SpeculationStats
from engine.scheduler import Batch, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from kvplan.core.errors import UsageError

UNKNOWN = -1  # stands for a draft that only the device knows yet


def scheduler_of(config: SchedulerConfig, num_blocks: int, groups: tuple[Group, ...]) -> Scheduler:
    """The scheduler that a config asks for."""
    if not config.drafts.num_drafts:
        return Scheduler(config, num_blocks, groups)
    return DraftingScheduler(config, config.drafts, num_blocks, groups)


class DraftingScheduler(Scheduler):
    """Schedules draft tokens after the known ones, and takes back those that the model rejects.

    Between batches a sequence's `draft_ids` are what `propose` gave it (with async scheduling: as many unknown ones as
    the device is about to guess). A batch that has drafts of a sequence yields 1 to 1 + drafts tokens for it.
    """

    def __init__(self, config: SchedulerConfig, rules: DraftRules, num_blocks: int, groups: tuple[Group, ...]) -> None:
        """Raises UsageError for layers whose recurrent state a rejected draft would have changed."""
        states = [group for group in groups if isinstance(group, MambaGroup)]
        if any(group.num_speculative_blocks < rules.num_drafts for group in states):
            raise UsageError("speculation: layers with a recurrent state cannot take a draft back; serve without it")
        super().__init__(config, num_blocks, groups)
        self.rules = rules
        self._counts = self.draft_stats = SpeculationStats(accepted_per_position=[0] * rules.num_drafts)
        self._num_stale: dict[Sequence, int] = {}  # tokens in flight of a preempted sequence, when it was preempted

    # --- a batch ------------------------------------------------------------------------------------------------

    def _new_batch(self) -> Batch:
        slots = self.rules.extra_slots
        return Batch(
            self.config.max_num_batched_tokens - slots,  # what one more sequence may have
            overhead=slots,
            skips_drafts=self.rules.lookahead > 0,
            num_next_drafts=self.rules.num_drafts,
        )

    def _launch(self, batch: Batch) -> None:
        for seq, n in batch.num_tokens.items():
            self._note_use(seq, n, batch)
            num_drafts = n + seq.num_computed_tokens - len(seq.token_ids) - seq.num_placeholders
            if num_drafts > 0 and seq in batch.hits:
                batch.padded.append(seq)
                batch.drafts[seq] = (UNKNOWN,) * num_drafts
            elif num_drafts > 0:
                batch.drafts[seq] = seq.draft_ids[:num_drafts]
            seq.draft_ids = ()
        if batch.num_tokens and self.rules.num_by_batch_size:
            batch.num_next_drafts = self.rules.num_by_batch_size[len(batch.num_tokens)]
        super()._launch(batch)
        for seq in batch.samples:
            seq.num_placeholders += len(batch.drafts.get(seq, ()))
            if self.config.is_async:
                seq.draft_ids = (UNKNOWN,) * batch.num_next_drafts

    def _note_use(self, seq: Sequence, n: int, batch: Batch) -> None:
        """Whether what is guessed for it after this batch can be of use; a single one that can is enough."""
        if seq.num_computed_tokens + n < len(seq.token_ids):  # a chunk of a prompt, after which nothing is guessed
            return
        least_output = seq.num_output_tokens + (2 if seq.num_placeholders else 1)
        if least_output < seq.max_tokens:
            batch.skips_drafts = False

    def update(self, batch: Batch, sampled: Mapping[str, int]) -> list[Sequence]:
        """Apply a batch in which every sequence yields one token."""
        return self.update_several(batch, {request_id: (token,) for request_id, token in sampled.items()})

    def update_several(self, batch: Batch, sampled: Mapping[str, Several[int]]) -> list[Sequence]:
        """Apply a batch's tokens by request id: accepted drafts, then one more; returns the finished sequences."""
        stale = self._settle(batch)
        done: list[Sequence] = []
        for seq in batch.samples:
            num_drafts = len(batch.drafts.get(seq, ()))
            seq.num_placeholders -= 1 + num_drafts
            if seq.is_finished:
                continue
            tokens = sampled[seq.request_id]
            if num_drafts:
                self._counts.count(num_drafts, len(tokens) - 1)
            num_taken = self._append_several(seq, tokens)
            if seq not in stale:
                seq.num_computed_tokens -= num_drafts + 1 - num_taken
                if seq.status == "running" or seq.is_finished:
                    self.blocks.cache_full_blocks(seq, seq.num_settled_tokens)
            if seq.is_finished:
                done.append(seq)
        if done:
            self._retire(done)
        return done

    def propose(self, drafts: Mapping[Sequence, Several[int]]) -> None:
        """Set the drafts to verify next, by sequence, after a batch was applied and before the next is scheduled."""
        for seq, token_ids in drafts.items():
            if seq.status == "running":
                seq.draft_ids = () if seq.is_prefill_chunk else tuple(token_ids)

    def _settle(self, batch: Batch) -> set[Sequence]:
        """Count a batch as no longer in flight; who was preempted meanwhile, so that its positions mean nothing."""
        stale: set[Sequence] = set()
        for seq, n in batch.num_tokens.items():
            seq.num_in_flight_tokens -= n
            left = self._num_stale.get(seq, 0)
            if left:
                stale.add(seq)
                self._num_stale[seq] = left - n
                if left == n:
                    del self._num_stale[seq]
        return stale

    def _append_several(self, seq: Sequence, tokens: Iterable[int]) -> int:
        """Append tokens until one ends the sequence; returns how many."""
        num_taken = 0
        for token in tokens:
            seq.append(token, self.config.max_model_len)
            num_taken += 1
            if seq.is_finished:
                break
        return num_taken

    # --- who runs -----------------------------------------------------------------------------------------------

    def _num_tokens_to_run(self, seq: Sequence, batch: Batch) -> int:
        n = super()._num_tokens_to_run(seq, batch)
        return self._clear_of_end(seq, seq.num_computed_tokens, n)

    def _first_chunk(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> int | None:
        if not self._is_padded(seq, hit, batch):
            n = super()._first_chunk(seq, hit, batch)
            return None if n is None else self._clear_of_end(seq, hit.num_tokens, n)
        size = 1 + self.rules.num_drafts
        if self._holds_prefills or size > batch.budget:
            return None
        n = self._capped(size)
        if self.blocks.cuts_chunks and self._chunk(seq, hit.num_tokens, n, batch) < size:
            n = 1  # a block's end cuts fillers off
        return self._with_inputs(seq, hit.num_tokens, n, batch)

    def _is_padded(self, seq: Sequence, hit: PrefixHit, batch: Batch) -> bool:
        """A sequence that lacks one token gets fillers for drafts beside others' decodes: a batch of one shape."""
        if seq.num_tokens - hit.num_tokens != 1 or batch.has_prefill or self.rules.num_by_batch_size:
            return False
        ends = hit.num_tokens + 2 + self.rules.num_drafts
        return (bool(batch.num_tokens) or hit.num_tokens > 0) and ends <= self.config.max_model_len

    def _clear_of_end(self, seq: Sequence, num_computed: int, n: int) -> int:
        """Never end a prefill where the drafter would read past it: finish it, or leave it enough to read."""
        left = seq.num_tokens - num_computed - n
        if 0 < left < self.rules.prefill_lookahead:
            return max(0, n - self.rules.prefill_lookahead + left)
        return n

    def _preempt(self, seq: Sequence, batch: Batch) -> None:
        if seq in batch.num_tokens:
            self._note_use(seq, batch.num_tokens[seq], batch)
        seq.draft_ids = ()
        super()._preempt(seq, batch)
        if seq.num_in_flight_tokens:
            self._num_stale[seq] = seq.num_in_flight_tokens

    def _retire(self, seqs: list[Sequence]) -> None:
        super()._retire(seqs)
        for seq in seqs:
            self._num_stale.pop(seq, None)
