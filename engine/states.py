"""Blocks of recurrent states that prefixes can be found in: where states are stored, copied and given back.

Rules as in vLLM 0.33.0 with `mamba_cache_mode="align"` (`v1/core/single_type_kv_cache_manager.py` MambaManager,
`v1/core/sched/scheduler.py` _mamba_block_aligned_split), checked step by step against its scheduler. A sequence's table
has an entry for each block of its tokens, of which only few are blocks: the running state, those of drafts behind it,
and what was just passed. A state is kept for others where a prompt's last block ends, or where what two share ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from engine.block_manager import (
    NULL_BLOCK,
    BlockKey,
    BlockManager,
    BlockPool,
    FullGroup,
    Group,
    PrefixHit,
    block_hashes,
    cdiv,
)
from engine.scheduler import Batch, Extension, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class MambaGroup(Group):
    """Layers with a recurrent state, a block being the state after its last token.

    num_speculative_blocks  states behind the running one, after each draft that is checked
    checkpoint_alignment    a chunk of a prompt can store the state after a multiple of so many of its tokens on its
                            way; None: only the one it ends in
    """

    num_speculative_blocks: int = 0
    checkpoint_alignment: int | None = None

    def num_skipped_tokens(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)

    def next_drop(self, num_tokens: int) -> int | None:
        """None: one state, overwritten in place; of several a StateBlockManager knows."""
        return None

    def num_tail_blocks(self) -> int | None:
        return 1

    def max_blocks_held(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 1 + self.num_speculative_blocks

    def table_len(self, num_tokens: int) -> int:
        return 1 + self.num_speculative_blocks


@dataclass(frozen=True, slots=True)
class StoredState:
    """A block that holds the state of a group after the sequence's first num_tokens tokens, once the step has run."""

    seq: Sequence
    group: int
    block: int
    num_tokens: int


@dataclass(slots=True)
class StateStep:
    """A batch's part in states: blocks to copy before it runs, (from, to) each, and the states that it stores."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    stored: list[StoredState] = field(default_factory=list)


@dataclass(slots=True)
class StateTable:
    """What a sequence's table of a group needs to be known beside its blocks."""

    is_allocated: bool = False  # by itself: a hit alone opens it
    last_state: int | None = None  # place of the state before the running one
    num_retired: int = 0  # leading places that hold no state any more
    checkpoint: tuple[int, int] | None = None  # (tokens, place) of a state that a prompt's last chunk stores on its way
    shared_tail: tuple[int, int] | None = None  # (place, block) found within, to be copied before it is written


class PrefixPool(BlockPool):
    """A block pool in which a block may be found by several prefixes that end within it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_tokens_of: dict[int, int] = {}  # cached block -> length of the first prefix it was offered for
        self.more_keys: dict[int, list[BlockKey]] = {}

    def offer(self, block: int, key: BlockKey, num_tokens: int) -> None:
        """Make a block findable by one more prefix."""
        if block in self.cached.get(key, ()):
            return
        if block in self.key_of:
            self.more_keys.setdefault(block, []).append(key)
            self.cached.setdefault(key, {})[block] = None
        else:
            self.remember(block, key)
            self.num_tokens_of[block] = num_tokens

    def keys(self, block: int) -> list[BlockKey]:
        """All prefixes that a block is found by, the first offered first."""
        return [self.key_of[block], *self.more_keys.get(block, ())] if block in self.key_of else []

    def forget(self, block: int) -> None:
        for key in self.more_keys.pop(block, ()):
            del self.cached[key][block]
            if not self.cached[key]:
                del self.cached[key]
        self.num_tokens_of.pop(block, None)
        super().forget(block)

    @property
    def is_consistent(self) -> bool:
        pairs = {(block, key) for key, blocks in self.cached.items() for block in blocks}
        return pairs == {(block, key) for block in self.key_of for key in self.keys(block)}

    def move_keys(self, source: int, target: int) -> None:
        """Let another block be found in a block's stead."""
        keys, num_tokens = self.keys(source), self.num_tokens_of.get(source, 0)
        self.forget(source)
        for key in keys:
            self.offer(target, key, num_tokens)


class StateBlockManager(BlockManager):
    """A block manager some of whose groups are recurrent states, with prefix caching.

    prefix_match_unit  tokens that prefixes are compared in; a hit may then end within a block, which is copied
    """

    pool: PrefixPool

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Group, ...],
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        max_step_tokens: int | None = None,
        hash_lookahead: int = 0,
        prefix_match_unit: int | None = None,
    ) -> None:
        """Raises UsageError for blocks of several sizes, and for a prefix_match_unit that does not divide theirs."""
        super().__init__(
            num_blocks,
            groups,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            max_step_tokens=max_step_tokens,
            hash_lookahead=hash_lookahead,
        )
        self.pool = PrefixPool(num_blocks)
        sizes = sorted({group.block_size for group in groups})
        self.block_size = sizes[0]
        if len(sizes) > 1:
            raise UsageError(f"recurrent states: share blocks of one size with attention, not of {sizes}; choose one")
        unit = prefix_match_unit or self.block_size
        if self.block_size % unit:
            raise UsageError(
                f"prefix_match_unit: must divide the block size {self.block_size} ({unit}); choose a divisor"
            )
        self.is_fine = unit < self.block_size and all(isinstance(group, FullGroup | MambaGroup) for group in groups)
        self.unit = unit if self.is_fine else self.block_size
        if self.is_fine:
            self.hit_alignment = unit
        kinds = enumerate(groups)
        self.dropping = tuple(g for g, group in kinds if g in self.dropping or isinstance(group, MambaGroup))
        states = [group for group in groups if isinstance(group, MambaGroup)]
        self._keeps_checkpoints = all(group.checkpoint_alignment is not None for group in states)
        self._first_state = states[0]
        self._tables: dict[Sequence, tuple[StateTable, ...]] = {}
        self._fresh: set[BlockKey] = set()  # of states that this step computes: nobody can go on from them in it
        self._copies: list[tuple[int, int]] = []  # (from, to), to be made before the next step runs
        self._stored: list[StoredState] = []  # since the last step

    # --- a step -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """States that the step before was to compute are computed when this one runs."""
        self._fresh.clear()

    def end_step(self) -> StateStep:
        """What the step has to copy and stores; blocks to copy were kept from others until now."""
        step = StateStep(self._copies, self._stored)
        self._copies, self._stored = [], []
        self.pool.give_back(block for pair in step.copies for block in pair)
        return step

    def cut(self, seq: Sequence, start: int, n: int, max_tokens: int) -> int:
        """Of n tokens from `start` on those up to where a state has to be stored.

        max_tokens  that a sequence may ever have in a step: less than a block, and chunks end within blocks
        """
        prefill_end = max(seq.num_prompt_tokens, seq.num_tokens - 1)
        if start >= prefill_end:
            return n
        size, end = self.block_size, start + n
        last = self._checkpoint_position(seq.num_tokens, size)
        position = self._checkpoint_position(prefill_end, self.unit)
        stores_within = (
            self._keeps_checkpoints
            and end >= prefill_end
            and self._can_store(self._first_state, start, end, position)
        )  # fmt: skip
        if end < prefill_end:
            whole = end // size * size
            if whole > start or size <= max_tokens:
                end = whole
        stops = [0 if stores_within else last]
        if not stores_within and start % size:
            stops.append((start // size + 1) * size)
        if not stores_within and self.is_fine:
            tail = self._checkpoint_position(seq.num_prompt_tokens, self.unit)
            if last < tail < seq.num_prompt_tokens:
                stops.append(tail)
        junction = seq.full_attention_hit_len
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(0, end - start)

    def _checkpoint_position(self, num_tokens: int, unit: int) -> int:
        """The last end of a unit from which a prompt of num_tokens tokens can go on."""
        return max(0, (num_tokens - max(1, self.hash_lookahead)) // unit * unit)

    def _can_store(self, group: MambaGroup, start: int, end: int, position: int) -> bool:
        """Whether a chunk from `start` to `end` can store the state at `position` on its way."""
        if group.checkpoint_alignment is None:
            return False
        size = group.block_size
        return (
            start % self.unit == 0
            and cdiv(end, size) - 2 > (start - 1) // size
            and start + self.unit <= position < end
            and (position - start) % group.checkpoint_alignment == 0
        )

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def lookup(self, seq: Sequence) -> PrefixHit:
        return self._lookup_fine(seq) if self.is_fine else super().lookup(seq)

    def _lookup_fine(self, seq: Sequence) -> PrefixHit:
        """As the base's, where hits may end within blocks: all full groups agree on the longest, then states."""
        hashes = block_hashes(seq, self.unit, self.hash_lookahead)
        limit = min((seq.num_tokens - 1) // self.unit, len(hashes))
        full = [g for g, group in enumerate(self.groups) if isinstance(group, FullGroup)]
        states = [g for g, group in enumerate(self.groups) if isinstance(group, MambaGroup)]
        places, num_units = self._longest_full(hashes, full, limit) if full else ([], limit)
        longest = num_units if full else 0
        num_units = next((i for i in range(num_units, 0, -1) if self._are_cached(hashes[i - 1], states)), 0)
        num_tokens = num_units * self.unit
        seq.full_attention_hit_len = longest * self.unit if longest > num_units else 0
        num_blocks = cdiv(num_tokens, self.block_size)
        blocks: list[tuple[int, ...]] = [()] * len(self.groups)
        for g in full:
            blocks[g] = tuple(self._cached(hash_, g) for hash_ in places[:num_blocks])
        if num_units:
            for g in states:
                blocks[g] = (NULL_BLOCK,) * (num_blocks - 1) + (self._cached(hashes[num_units - 1], g),)
        return PrefixHit(num_tokens, tuple(blocks))

    def _longest_full(self, hashes: list[bytes], full: list[int], limit: int) -> tuple[list[bytes], int]:
        """(hash of each block of the longest prefix that full groups hold, its length in units)."""
        scale = self.block_size // self.unit
        places: list[bytes] = []
        while (len(places) + 1) * scale <= limit and self._are_cached(hashes[(len(places) + 1) * scale - 1], full):
            places.append(hashes[(len(places) + 1) * scale - 1])
        first = len(places) * scale
        for i in range(min(first + scale - 1, limit), first, -1):
            if self._are_cached(hashes[i - 1], full):
                return [*places, hashes[i - 1]], i
        return places, first

    def _are_cached(self, hash_: bytes, groups: Iterable[int]) -> bool:
        return all(self.pool.find((hash_, g)) is not None for g in groups)

    def _cached(self, hash_: bytes, g: int) -> int:
        block = self.pool.find((hash_, g))
        assert block is not None, "a block of a hit is cached"
        return block

    def _hashes(self, seq: Sequence, group: Group) -> list[bytes]:
        if not self.is_fine:
            return super()._hashes(seq, group)
        scale = group.block_size // self.unit
        return block_hashes(seq, self.unit, self.hash_lookahead)[scale - 1 :: scale]

    def _cache_group(self, seq: Sequence, g: int, num_tokens: int) -> None:
        if not self.is_fine:
            num_tokens = self._aligned(num_tokens)
        first = seq.num_cached_blocks[g]
        super()._cache_group(seq, g, num_tokens)
        if isinstance(self.groups[g], MambaGroup):
            end, table = seq.num_cached_blocks[g], seq.block_table[g]
            key = self._cache_state(seq, g, num_tokens)
            self._fresh.update(() if key is None else (key,))
            for block in table[first:end]:
                if block in self.pool.key_of:
                    self._fresh.add(self.pool.key_of[block])
                    self._stored.append(StoredState(seq, g, block, self.pool.num_tokens_of[block]))
        elif self.is_fine:
            self._cache_prompt_tail(seq, g, num_tokens)

    def _cache_blocks(self, seq: Sequence, g: int, numbers: range) -> None:
        group = self.groups[g]
        hashes = self._hashes(seq, group)
        for i in numbers:
            block = seq.block_table[g][i]
            if block != NULL_BLOCK and self._is_kept(seq, group, i):
                self.pool.forget(block)  # what it was found by while it was not full
                self.pool.offer(block, (hashes[i], g), (i + 1) * group.block_size)

    def _cache_prompt_tail(self, seq: Sequence, g: int, num_tokens: int) -> None:
        """Of a full group, the block in which a prompt ends, up to its last whole unit."""
        end = min(seq.num_prompt_tokens - 1, seq.num_tokens - self.hash_lookahead) // self.unit * self.unit
        place = end // self.block_size
        if 0 < end <= num_tokens and end % self.block_size and place < len(seq.block_table[g]):
            self._offer(seq, g, seq.block_table[g][place], end)

    def _cache_state(self, seq: Sequence, g: int, num_tokens: int) -> BlockKey | None:
        """Offer the state that a chunk stores on its way, or that after the prompt's last whole unit."""
        table, known = seq.block_table[g], self._tables[seq][g]
        if known.checkpoint is not None:
            position, place = known.checkpoint
            block = table[place]
            is_wanted_again = position in (
                self._checkpoint_position(seq.num_prompt_tokens, self.hit_alignment),
                seq.full_attention_hit_len,
            )
            if not is_wanted_again:
                self.pool.forget(block)
                return None
            if self.pool.num_tokens_of.get(block) == position:
                return None
            self.pool.forget(block)
            return self._offer(seq, g, block, position)
        if not num_tokens or num_tokens != self._checkpoint_position(seq.num_prompt_tokens, self.unit):
            return None
        place = cdiv(num_tokens, self.block_size) - 1
        block = table[place] if place < len(table) else NULL_BLOCK
        if block == NULL_BLOCK or self.pool.num_tokens_of.get(block) == num_tokens:
            return None
        key = self._offer(seq, g, block, num_tokens)
        if num_tokens % self.block_size:  # the next step goes on in this block: what is offered is copied before
            known.shared_tail = (place, block)
            seq.num_cached_blocks[g] = place
        return key

    def _offer(self, seq: Sequence, g: int, block: int, num_tokens: int) -> BlockKey | None:
        """Make a block findable by the first num_tokens tokens."""
        if block == NULL_BLOCK:
            return None
        key = (block_hashes(seq, self.unit, self.hash_lookahead)[num_tokens // self.unit - 1], g)
        if block not in self.pool.cached.get(key, ()) and self.pool.num_tokens_of.get(block, num_tokens) < num_tokens:
            self.pool.forget(block)
        self.pool.offer(block, key, num_tokens)
        return key

    # --- tables -------------------------------------------------------------------------------------------------

    def num_needed(self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None) -> int:
        return self._num_wanted(seq, hit, num_tokens, num_slots or num_tokens, self.max_step_only)

    def num_reserved(self, seq: Sequence, hit: PrefixHit, num_tokens: int, *, alone: bool = False) -> int:
        bounds = self.max_held_alone if alone else self.max_held
        return self._num_wanted(seq, hit, num_tokens, num_tokens, bounds)

    @property
    def max_step_only(self) -> tuple[int | None, ...]:
        """No bound on what a group takes: it is asked for one chunk."""
        return (None,) * len(self.groups)

    def _num_wanted(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int, bounds: tuple[int | None, ...]
    ) -> int:
        needed = self._num_revived(hit)
        is_partial = hit.num_tokens % self.block_size != 0
        for g, (group, blocks) in enumerate(zip(self.groups, hit.blocks, strict=True)):
            if isinstance(group, MambaGroup):
                if any(self.pool.key_of.get(block) in self._fresh for block in (*blocks[-1:], *hit.passed)):
                    return self.pool.num_blocks + 1  # more than there are: not in the step that computes it
                known = StateTable()
                known.checkpoint = self._checkpoint(seq, g, known, list(blocks), hit.num_tokens, num_tokens)
                needed += self._num_new_states(group, known, len(blocks), num_tokens, has_copy=is_partial)
                continue
            new, bound = self._num_new(group, len(blocks), num_slots), bounds[g]
            needed += new if bound is None else max(0, min(new, bound - len(blocks)))
            needed += is_partial
        return needed

    def _num_new_states(
        self, group: MambaGroup, known: StateTable, num_places: int, num_tokens: int, *, has_copy: bool
    ) -> int:
        """Blocks to take for the states of num_tokens tokens; fewer than none where drafts left some over."""
        new = cdiv(num_tokens, group.block_size) + group.num_speculative_blocks - num_places
        if has_copy:
            new = max(0, new) + 1
        bound = 1 + has_copy + (known.checkpoint is not None)
        if not known.is_allocated:
            bound += group.num_speculative_blocks
        return min(new, bound)

    def _checkpoint(
        self, seq: Sequence, g: int, known: StateTable, table: list[int], start: int, end: int
    ) -> tuple[int, int] | None:
        """(tokens, place) of the state that a prompt's last chunk, from `start` to `end`, stores on its way."""
        group = self.groups[g]
        assert isinstance(group, MambaGroup)
        position = self._checkpoint_position(end, self.hit_alignment)
        place = cdiv(end, group.block_size) - 2
        if end < max(seq.num_prompt_tokens, seq.num_tokens - 1) or place < 0:
            return None
        is_free = (
            place >= len(table)
            or table[place] == NULL_BLOCK
            or (known.is_allocated and place >= len(table) - group.num_speculative_blocks)
        )
        return (position, place) if is_free and self._can_store(group, start, end, position) and position else None

    def admit(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, num_slots: int | None = None, *, are_computed: bool = True
    ) -> None:
        for blocks in hit.blocks:
            self.pool.share(block for block in blocks if block != NULL_BLOCK)
        seq.block_table = [list(blocks) for blocks in hit.blocks]
        seq.num_cached_blocks = [len(blocks) for blocks in hit.blocks]
        self._tables[seq] = tuple(StateTable() for _ in self.groups)
        if hit.num_tokens % self.block_size:
            place = hit.num_tokens // self.block_size
            for g, known in enumerate(self._tables[seq]):
                known.shared_tail = (place, seq.block_table[g][place])
                seq.num_cached_blocks[g] = place
        self._note_checkpoints(seq, hit.num_tokens, num_tokens)
        self._extend_all(seq, num_tokens, num_slots or num_tokens)
        if are_computed:
            self.publish(seq, num_tokens)

    def grow(self, seq: Sequence, num_tokens: int, num_slots: int | None = None, *, num_kept: int = 0) -> bool:
        num_slots = num_slots or num_tokens
        if num_slots <= seq.num_tokens_until_change:
            return True
        self.drop_unread(seq)
        self._note_checkpoints(seq, seq.num_computed_tokens, num_tokens)
        if self._num_missing_now(seq, num_tokens, num_slots) > self.num_free_blocks - num_kept:
            return False
        self._extend_all(seq, num_tokens, num_slots)
        self.cache_full_blocks(seq, min(num_tokens, seq.num_tokens))
        seq.num_tokens_until_change = self._num_tokens_until_change(seq)
        return True

    def checkpoints(self, seq: Sequence) -> list[tuple[int, int] | None]:
        """Of each group, (tokens, place) of a state that the sequence's last scheduled chunk stores on its way."""
        return [known.checkpoint for known in self._tables[seq]]

    def _note_checkpoints(self, seq: Sequence, start: int, end: int) -> None:
        for g, known in enumerate(self._tables[seq]):
            if isinstance(self.groups[g], MambaGroup):
                known.checkpoint = self._checkpoint(seq, g, known, seq.block_table[g], start, end)

    def _num_missing(self, seq: Sequence, num_tokens: int) -> int:
        return self._num_missing_now(seq, num_tokens, num_tokens)

    def _num_missing_now(self, seq: Sequence, num_tokens: int, num_slots: int) -> int:
        missing = 0
        for group, table, known in zip(self.groups, seq.block_table, self._tables[seq], strict=True):
            has_copy = known.shared_tail is not None
            if isinstance(group, MambaGroup):
                missing += self._num_new_states(group, known, len(table), num_tokens, has_copy=has_copy)
            else:
                missing += self._num_new(group, len(table), num_slots)
        return missing

    def _num_to_finish(self, seq: Sequence, g: int) -> int:
        group, table, known = self.groups[g], seq.block_table[g], replace(self._tables[seq][g])
        if not isinstance(group, MambaGroup):
            return super()._num_to_finish(seq, g)
        known.checkpoint = self._checkpoint(seq, g, known, table, seq.num_computed_tokens, seq.num_tokens)
        return self._num_new_states(group, known, len(table), seq.num_tokens, has_copy=known.shared_tail is not None)

    def _extend_all(self, seq: Sequence, num_tokens: int, num_slots: int) -> None:
        for g, group in enumerate(self.groups):
            if isinstance(group, MambaGroup):
                self._extend_states(seq, g, group, num_tokens)
                continue
            table, known = seq.block_table[g], self._tables[seq][g]
            if known.shared_tail is not None:
                (copy,) = self.pool.take(1)
                self._copy_tail(table, known, copy)
            table += self.pool.take(self._num_new(group, len(table), num_slots))

    def _copy_tail(self, table: list[int], known: StateTable, copy: int) -> None:
        """Go on in a copy of the block that others are found in."""
        assert known.shared_tail is not None
        place, source = known.shared_tail
        table[place], known.shared_tail = copy, None
        self._copies.append((source, copy))
        self.pool.share((copy,))  # until the step has copied it; the source keeps the reference of the hit

    def _extend_states(self, seq: Sequence, g: int, group: MambaGroup, num_tokens: int) -> None:
        table, known, ahead = seq.block_table[g], self._tables[seq][g], group.num_speculative_blocks
        num_places = cdiv(num_tokens, group.block_size) + ahead
        was_allocated, known.is_allocated = known.is_allocated, True
        if num_places <= len(table) and known.shared_tail is None and known.checkpoint is None:
            return
        length = len(table)
        if was_allocated:
            known.last_state = length - 1 - ahead
        elif length:
            known.last_state = length - 1
        running = num_places - ahead - 1  # place of the state after these tokens
        end = running - (known.checkpoint is not None)
        table += [NULL_BLOCK] * (end - length)
        if was_allocated:  # drafts' states go on behind the new one
            for place in range(length - ahead, length):
                if place >= end:
                    break
                table.append(table[place])
                table[place] = NULL_BLOCK
        has_copy = known.shared_tail is not None
        blocks = self.pool.take(max(0, num_places - len(table)) + has_copy)
        if has_copy and was_allocated:
            self._keep_copy(known, blocks.pop(0))
        elif has_copy:
            self._copy_tail(table, known, blocks.pop(0))
        table += blocks

    def _keep_copy(self, known: StateTable, copy: int) -> None:
        """Let others be found in a copy: the sequence goes on where it is."""
        assert known.shared_tail is not None
        _, source = known.shared_tail
        known.shared_tail = None
        self.pool.move_keys(source, copy)
        self._copies.append((source, copy))
        self.pool.share((source,))
        self._fresh.update(self.pool.keys(copy)[:1])

    def _close(self, seq: Sequence) -> None:
        self._tables.pop(seq, None)
        self._stored = [stored for stored in self._stored if stored.seq is not seq]
        super()._close(seq)

    def _num_tokens_until_change(self, seq: Sequence) -> int:
        known = self._tables[seq]
        if any(table.checkpoint is not None or table.shared_tail is not None for table in known):
            return 0
        if seq.num_computed_tokens < max(seq.num_prompt_tokens, seq.num_tokens - 1):  # a chunk of a prompt
            return 0
        until = super()._num_tokens_until_change(seq)
        for group, table in zip(self.groups, seq.block_table, strict=True):
            if isinstance(group, MambaGroup):
                next_drop = (max(0, seq.num_settled_tokens - 1) // group.block_size + 1) * group.block_size + 1
                until = min(until, next_drop, (len(table) - group.num_speculative_blocks) * group.block_size)
        return until

    def _drop(self, seq: Sequence, g: int) -> None:
        group = self.groups[g]
        if not isinstance(group, MambaGroup):
            super()._drop(seq, g)
            return
        table, known, settled = seq.block_table[g], self._tables[seq][g], seq.num_settled_tokens
        end = min((settled - 1) // group.block_size, len(table))
        if known.num_retired < end:
            places = [place for place in reversed(range(known.num_retired, end)) if table[place] != NULL_BLOCK]
            self._give_back_places(table, places)
            known.num_retired = end
        last = known.last_state
        if last is not None and last < cdiv(settled, group.block_size) - 1 and table[last] != NULL_BLOCK:
            self._give_back_places(table, [last])

    def _give_back_places(self, table: list[int], places: list[int]) -> None:
        blocks = [table[place] for place in places]
        for place in places:
            table[place] = NULL_BLOCK
        self.pool.give_back(blocks)


class KeptStates(Extension):
    """The steps of a StateBlockManager: chunks end where states are stored, and batches say what is copied."""

    def attach(self, scheduler: Scheduler) -> None:
        super().attach(scheduler)
        assert isinstance(scheduler.blocks, StateBlockManager), "states are kept in blocks of their own"
        self._blocks, config = scheduler.blocks, scheduler.config
        self._max_chunk = config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            self._max_chunk = min(self._max_chunk, config.long_prefill_token_threshold)

    def begin_step(self, batch: Batch) -> None:
        self._blocks.begin_step()

    def limit(self, seq: Sequence, start: int, n: int, batch: Batch) -> int | None:
        """Nobody overtakes a sequence for whose next state the step has too few tokens left."""
        return self._blocks.cut(seq, start, n, self._max_chunk) or None

    def end_step(self, batch: Batch) -> None:
        batch.extras[StateStep] = self._blocks.end_step()
