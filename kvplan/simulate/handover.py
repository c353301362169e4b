"""KV handed from a prefill server to a decode server: who waits for it, who keeps blocks for it, and how long it takes.

Rules as in vLLM 0.33.0's scheduler with its NIXL connector in pull mode (kv_connector/v1/nixl/pull_scheduler.py),
compared step by step with it. Bytes / the link's bandwidth, one prompt after the other, and a latency.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import field
from typing import Any

from engine.block_manager import BlockKey, FullGroup, Group, WindowGroup, cdiv
from engine.connector import Transfers
from engine.loading import Loading
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Link from prefill to decode replicas: bytes per second of each prefill replica, and a delay in seconds."""

    bandwidth: float
    latency: float = 0.0

    def send(self, free_at: float, now: float, num_bytes: int) -> tuple[float, float]:
        """Return (when a link that is busy until `free_at` is free again, when the bytes have arrived)."""
        free_at = max(free_at, now) + num_bytes / self.bandwidth
        return free_at, free_at + self.latency


@dataclass(frozen=True, slots=True)
class Pull:
    """A prompt's blocks that a step orders from another server; no blocks: they are not needed, and it may free them.

    number  of the job that brings them; None without blocks
    """

    seq: Sequence
    source: Any
    num_blocks: int
    number: int | None = None


@dataclass(slots=True)
class Remote:
    """What a scheduler can load from other servers: the prompts that they have computed."""

    groups: tuple[Group, ...]
    sources: dict[Sequence, Any] = field(default_factory=dict)  # where the prompts of sequences are that have not begun
    pulls: list[Pull] = field(default_factory=list)  # ordered since the last step
    loading: dict[int, Sequence] = field(default_factory=dict)
    starts: dict[Sequence, int] = field(default_factory=dict)  # tokens that loading sequences had before
    num_jobs: int = 0

    def most_blocks(self, g: int, num_blocks: int) -> int:
        """Return how many of a group's last blocks are of use to another server: those of its window, and one."""
        group = self.groups[g]
        if not isinstance(group, WindowGroup):
            return num_blocks
        return min(num_blocks, cdiv(group.window, group.block_size) + 1)

    def add(self, seq: Sequence) -> None: ...

    def distrust(self, seq: Sequence) -> None: ...

    def match(self, seq: Sequence, num_tokens: int) -> int | None:
        return max(0, seq.num_prompt_tokens - num_tokens) if seq in self.sources else 0

    def load(self, seq: Sequence, num_tokens: int, num_loaded: int) -> None:
        num_blocks = 0
        for g, (group, table) in enumerate(zip(self.groups, seq.block_table, strict=True)):
            fresh = table[num_tokens // group.block_size : cdiv(num_tokens + num_loaded, group.block_size)]
            num_blocks += self.most_blocks(g, sum(map(bool, fresh)))
        self.num_jobs += 1
        self.loading[self.num_jobs], self.starts[seq] = seq, num_tokens
        self.pulls.append(Pull(seq, self.sources.pop(seq), num_blocks, self.num_jobs))

    def forgo(self, seq: Sequence) -> None:
        """Let another server free a prompt that is not loaded from it."""
        source = self.sources.pop(seq, None)
        if source is not None:
            self.pulls.append(Pull(seq, source, 0))

    finish = forgo

    def plan(
        self, num_tokens: Mapping[Sequence, int], new: Iterable[Sequence], preempted: Iterable[Sequence],
        states: Iterable[Any] = (),
    ) -> Transfers:  # fmt: skip
        return Transfers()

    def complete(self, jobs: Iterable[int], unread: Container[BlockKey] = ()) -> list[Sequence]:
        seqs = [self.loading.pop(number) for number in jobs]
        for seq in seqs:
            del self.starts[seq]
        return seqs


class Handover(Loading):
    """A scheduler's part in handing prompts over.

    pinned    sequences that have ended, whose blocks another server is to read, by request id
    defers    blocks that a batch in flight may write are not given to loads: vLLM's for consumers
    """

    def __init__(self, groups: tuple[Group, ...], *, defers: bool = True) -> None:
        for group in groups:
            if not isinstance(group, FullGroup | WindowGroup):
                kind = type(group).__name__[:-5].lower()
                raise UnsupportedModelError("--kv-transfer-config", f"{kind} layers are not simulated", "remove it")
        self.remote = Remote(groups)
        super().__init__(self.remote)
        self.pinned: dict[str, Sequence] = {}
        self.hits: dict[Sequence, int] = {}  # of sequences to keep: cached tokens of their prompt
        self._defers = defers

    def keep(self, seq: Sequence) -> None:
        """Keep a sequence's blocks when it has ended."""
        self.hits[seq] = 0

    def release(self, request_id: str) -> bool:
        """Free the blocks of an ended sequence; False if they are not kept (any more)."""
        seq = self.pinned.pop(request_id, None)
        if seq is not None:
            self.blocks.release(seq)
        return seq is not None

    def block_ids(self, seq: Sequence) -> list[list[int]]:
        """Blocks of a kept sequence that another server reads, by group."""
        ids = []
        for g, (group, table) in enumerate(zip(self.remote.groups, seq.block_table, strict=True)):
            table = table[: cdiv(seq.num_computed_tokens, group.block_size)]
            ids.append(table[len(table) - self.remote.most_blocks(g, len(table)) :])
        return ids

    def give_up(self, number: int) -> None:
        """Compute a prompt here after all, of which nothing has come."""
        seq = self.remote.loading[number]
        seq.num_computed_tokens, seq.num_loaded_tokens = self.remote.starts[seq], 0
        self.complete([number])

    def holders(self) -> tuple[list[Sequence], list[int]]:
        seqs, blocks = super().holders()
        return [*seqs, *self.pinned.values()], blocks

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        super().put(seq, n, batch)
        if seq in batch.hits:
            self.remote.forgo(seq)
            if seq in self.hits and not seq.num_preemptions:
                self.hits[seq] = batch.hits[seq]

    def frees_at_once(self, seq: Sequence) -> bool:
        return not self._defers or super().frees_at_once(seq)

    def detain(self, seq: Sequence) -> bool:
        if not seq.is_finished or self.hits.pop(seq, None) is None or seq.finish_reason not in ("length", "stop"):
            return super().detain(seq)
        self.blocks.drop_unread(seq)
        self.pinned[seq.request_id] = seq
        return True
