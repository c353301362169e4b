"""The scheduler's batch as arrays: token ids, positions, block tables and slots (numpy; no torch, no model)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import NULL_BLOCK, Group
from engine.drafting import DraftStep
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.states import MambaGroup

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """One step's inputs; engine/step.py says the shapes. Sequences are ordered: decodes first, then prefills."""

    seqs: list[Sequence]
    num_decodes: int
    token_ids: Longs  # ~row: the token that this row of the step before samples, which only the device knows yet
    positions: Longs
    context_lens: Ints
    query_start: Ints
    last_tokens: Longs
    block_tables: tuple[Ints, ...]  # per KV group
    slot_mapping: tuple[Longs, ...]

    block_sizes: tuple[int, ...] = ()  # per KV group
    # Where recurrent states are read and written: [groups of such layers, 2, num_seqs], by slot or by block.
    state_slots: Longs | None = None
    logit_tokens: Longs | None = None  # whose logits are wanted; None: each sequence's last_tokens

    @property
    def prefill_lens(self) -> NDArray[np.int32]:
        return np.diff(self.query_start)

    def written_blocks(self, seq: Sequence) -> set[int]:
        """Blocks that a sequence writes its tokens of this step to; none if it is not in the batch."""
        if seq not in self.seqs:
            return set()
        row = self.seqs.index(seq)
        start = int(self.last_tokens[row - 1]) + 1 if row else 0
        own = slice(start, int(self.last_tokens[row]) + 1)
        sized = zip(self.slot_mapping, self.block_sizes, strict=True)
        return {block for slots, block_size in sized for block in (slots[own] // block_size).tolist()}


class BatchBuilder:
    """Keeps the running sequences' block tables in one array per group, so that a step copies only changes."""

    def __init__(
        self, groups: tuple[Group, ...], max_num_seqs: int, max_model_len: int, *, has_states: bool = False
    ) -> None:
        """has_states: a sequence's row here is its slot of recurrent states too, unless groups hold them in blocks."""
        self._has_states = has_states
        self._state_groups = [g for g, group in enumerate(groups) if isinstance(group, MambaGroup)]
        self.block_sizes = [group.block_size for group in groups]
        self._tables = [
            np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32) for block_size in self.block_sizes
        ]
        self._written = np.zeros((len(groups), max_num_seqs), np.int64)  # leading entries of each row that are there
        self._first = np.zeros_like(self._written)  # entries of each row before its first real block
        self._until_change = np.zeros(max_num_seqs, np.int64)  # tokens up to which a row's tables stay as they are
        self._row_of: dict[Sequence, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._last_seqs: list[Sequence] = []  # of the last arrays, in order
        self._last_place: dict[Sequence, int] = {}  # the same by sequence
        self._last_rows: Longs = np.zeros(0, np.int64)  # their rows here

    def build(self, batch: Batch) -> BatchArrays:
        """Arrays for a batch as schedule() returned it: num_computed_tokens includes the step's tokens."""
        self._forget_the_gone(batch)
        seqs = list(batch.num_tokens)
        lens = list(batch.num_tokens.values())
        if max(lens) > 1:
            seqs.sort(key=lambda seq: batch.num_tokens[seq] > 1)  # stable: decodes first
            lens = [batch.num_tokens[seq] for seq in seqs]
        query_lens = np.array(lens, np.int64)
        context_lens = np.array([seq.num_computed_tokens for seq in seqs], np.int64)
        token_ids = self._token_ids(seqs, lens, batch.extra(DraftStep).drafts)
        rows = self._rows(seqs, context_lens)
        num_decodes = int((query_lens == 1).sum())
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        row_of_token = np.repeat(rows, query_lens)
        positions = np.arange(starts[-1]) - np.repeat(starts[1:] - context_lens, query_lens)
        return BatchArrays(
            seqs=seqs,
            num_decodes=num_decodes,
            token_ids=token_ids,
            positions=positions,
            context_lens=context_lens.astype(np.int32),
            query_start=(starts[num_decodes:] - starts[num_decodes]).astype(np.int32),
            last_tokens=starts[1:] - 1,
            block_tables=tuple(self._table(g, rows, context_lens) for g in range(len(self._tables))),
            slot_mapping=tuple(self._slots(g, row_of_token, positions) for g in range(len(self._tables))),
            block_sizes=tuple(self.block_sizes),
            state_slots=self._state_slots(rows, context_lens, query_lens) if self._has_states else None,
        )

    def _state_slots(self, rows: Longs, context_lens: Longs, query_lens: Longs) -> Longs:
        """A block holds the state after its tokens: that before the step's tokens is read, that after them written."""
        slots = [[rows, rows]] if not self._state_groups else []
        for g in self._state_groups:
            last = (context_lens - query_lens - 1, context_lens - 1)
            slots.append([self._tables[g][rows, np.maximum(i, 0) // self.block_sizes[g]] for i in last])
        return np.array(slots, np.int64)

    def _token_ids(self, seqs: list[Sequence], query_lens: list[int], drafts: dict[Sequence, tuple[int, ...]]) -> Longs:
        """All sequences' tokens of this step, concatenated; called before the rows of the last step change."""
        ids: list[int] = []
        for seq, n in zip(seqs, query_lens, strict=True):
            end = seq.num_computed_tokens
            if n > 1:
                ids += seq.token_ids[end - n : end]
                ids += drafts.get(seq, ())
            elif end <= len(seq.token_ids):
                ids.append(seq.token_ids[end - 1])
            else:
                ids.append(~self._last_place[seq])
        return np.array(ids, np.int64)

    def _table(self, g: int, rows: Longs, context_lens: Longs) -> Ints:
        width = -(-int(context_lens.max()) // self.block_sizes[g])
        return self._tables[g][rows, :width]

    def _slots(self, g: int, rows: Longs, positions: Longs) -> Longs:
        block_size = self.block_sizes[g]
        blocks: Longs = self._tables[g][rows, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size

    def _rows(self, seqs: list[Sequence], context_lens: Longs) -> Longs:
        """The sequences' rows, updated with the blocks allocated since the last step."""
        if seqs != self._last_seqs:
            self._last_seqs, self._last_place = seqs, {seq: place for place, seq in enumerate(seqs)}
            self._last_rows = np.array([self._row(seq) for seq in seqs], np.int64)
        rows = self._last_rows
        for i in np.flatnonzero(context_lens > self._until_change[rows]).tolist():
            self._write(seqs[i], rows[i])
        return rows

    def _row(self, seq: Sequence) -> int:
        row = self._row_of.get(seq)
        if row is None:
            row = self._row_of[seq] = self._free_rows.pop()
            self._written[:, row] = self._first[:, row] = self._until_change[row] = 0
        return row

    def _write(self, seq: Sequence, row: int) -> None:
        """Update a row from its sequence's block tables."""
        self._until_change[row] = seq.num_tokens_until_change
        for g, table in enumerate(seq.block_table):
            start, end = self._written[g, row], len(table)
            if start < end:
                self._tables[g][row, start:end] = table[start:]
                self._written[g, row] = end
            # Blocks that a window gave back have new owners: a row must not name them, even where it is masked.
            first = self._first[g, row]
            while first < end and table[first] == NULL_BLOCK:
                self._tables[g][row, first] = NULL_BLOCK
                first += 1
            self._first[g, row] = first

    def _forget_the_gone(self, batch: Batch) -> None:
        """Free the rows of sequences that lost their blocks since the last step, resumed ones included."""
        resumed = set(batch.resumed)
        gone = [seq for seq in self._row_of if seq in resumed or seq.status != "running"]
        if gone:
            self._last_seqs = []  # one that comes back gets another row
        for seq in gone:
            row = self._row_of.pop(seq)
            for table in self._tables:
                table[row] = 0
            self._free_rows.append(row)
