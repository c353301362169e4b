"""A prefill-first scheduler under a server: real tokens, stop tokens, aborts, and a cache that can be emptied."""

import hashlib
from array import array
from collections.abc import Mapping
from typing import Any

from engine.scheduler import Batch
from engine.sequence import FinishReason, Sequence
from kvplan.simulate.prompts_first import Limits, Live, PromptsFirst
from kvplan.simulate.prompts_first_run import config_of
from kvplan.simulate.radix import Radix

KEY_BITS = 24  # above a token id: what else its KV depends on


class ServedPromptsFirst(PromptsFirst):
    """A PromptsFirst with what a server calls of a scheduler."""

    num_deferred = 0

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.config = config_of(limits)
        self._by_id: dict[str, Live] = {}
        self._keys: dict[Sequence, int] = {}

    def extension(self, kind: type[Any]) -> None:
        """There are no extensions."""

    def add(self, seq: Sequence, tokens: "array[int] | None" = None) -> None:
        digest = hashlib.sha256(repr(seq.extra_keys).encode()).digest()
        key = int.from_bytes(digest[:4], "big") << KEY_BITS if seq.extra_keys else 0
        super().add(seq, array("q", [token + key for token in seq.token_ids]))
        self._keys[seq], self._by_id[seq.request_id] = key, self._unfinished[seq]

    def schedule(self) -> Batch:
        batch = super().schedule()
        for seq in batch.num_tokens:
            seq.status = "running" if seq.status == "waiting" else seq.status
        lost = [live.seq for live in self._by_id.values() if live.seq.is_finished]  # too large for the whole pool
        batch.failed += [seq for seq in lost if seq not in batch.failed]
        for seq in lost:
            self._forget(seq)
        return batch

    def _append(self, live: Live, sampled: Mapping[str, Any]) -> None:
        seq = live.seq
        seq.most_tokens = min(seq.num_prompt_tokens + seq.max_tokens, self.limits.context_len)
        seq.extend(sampled[seq.request_id][:1])
        live.tokens.append(seq.token_ids[-1] + self._keys[seq])
        live.is_done = seq.is_finished

    def update(self, batch: Batch, sampled: Mapping[str, Any]) -> list[Sequence]:
        while self._in_flight and self._in_flight[0].batch is not batch:  # its requests were all aborted
            self._in_flight.popleft()
        done = super().update(batch, sampled)
        for seq in done:
            self._forget(seq)
        return done

    def _forget(self, seq: Sequence) -> None:
        self._keys.pop(seq, None)
        self._by_id.pop(seq.request_id, None)

    def abort(self, request_id: str) -> None:
        self.finish(request_id, "abort")

    def fail(self, request_id: str, error: str) -> None:
        self.finish(request_id, "error", error)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request now, wherever it is; no effect on a finished one."""
        live = self._by_id.get(request_id)
        if live is None:
            return
        if live in self.waiting:
            self.waiting.remove(live)
        if live is self._goes_on:
            self._goes_on = None
        if live.has_row:
            self.blocks.keep(live, min(live.stored, len(live.tokens)))
            self._let_go(live)
        live.is_done = True
        del self._unfinished[live.seq]
        live.seq.finish(reason, error)
        self._forget(live.seq)

    def flush(self) -> bool:
        """Empty the prefix cache; False while a request is unfinished."""
        if self._unfinished:
            return False
        self.blocks.free, self.blocks.tree = self.limits.num_tokens, Radix(self.limits.page_size)
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError unless the pool adds up."""
        assert {live.seq for live in self._rows} <= set(self._unfinished), "a finished request has a row"
        own = sum(self.blocks.paged(live.stored) - live.cached for live in self._rows)
        assert self.blocks.free + own + self.blocks.tree.num_tokens == self.limits.num_tokens, "tokens do not add up"
