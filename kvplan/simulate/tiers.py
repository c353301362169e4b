"""Simulated KV offloading: the engine's connector, pool and file order, with copies that only take time.

Which chunks are stored, found, loaded and dropped is decided by engine/offload.py, chunk_pool.py and file_order.py, as
in the engine: vLLM 0.33's rules for its offloading connector. This module adds the time of copies: bytes / the tier's
bandwidth, sequential in each direction (vLLM 0.33, kv_offload/cpu/gpu_worker.py: one stream each), concurrent with the
steps. A step waits only for a copy that reads blocks the step overwrites. Copies do not slow down the steps.
"""

from collections import deque
from typing import Final, Literal

from engine.block_manager import BlockKey, Group
from engine.connector import FileCopy, Transfer, Transfers
from engine.file_order import FileOrder
from engine.scheduler import Batch
from engine.tiers import Tiers
from kvplan.core.records import dataclass

MOST_TIERS: Final = 2  # memory, and files below it
MOST_COPIES: Final = 4_096
Kind = Literal["store", "load", "save", "fetch"]


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier: name, capacity in bytes over all ranks, and bytes per second that a replica copies to or from it."""

    name: str
    capacity: int
    bandwidth: int


@dataclass(slots=True)
class Copy:
    """A copy in progress, with its end time."""

    kind: Kind
    num_bytes: int
    seconds: float
    end: float
    files: FileCopy = ()


class TimedCopies:
    """Simulated copies: each is done when its transfer time has passed.

    now            current time in seconds; set by the caller before each call
    blocked_until  time at which the last step's writes may begin
    """

    def __init__(
        self, specs: tuple[TierSpec, ...], block_bytes: int, chunk_bytes: int, order: FileOrder | None
    ) -> None:
        self.now = self.blocked_until = 0.0
        self.copies: deque[tuple[str, int, float]] = deque(maxlen=MOST_COPIES)
        self._specs, self._order = specs, order
        self._block_bytes, self._chunk_bytes = block_bytes, chunk_bytes
        self._unsubmitted: dict[int, Transfer] = {}
        self._under_way: dict[int, Copy] = {}
        self._free_at: dict[str, float] = {}  # load, store or files -> time at which its next copy can begin
        self._fetched: set[int] = set()  # slots with chunks read from a file, until they are loaded

    def begin(self, transfers: Transfers) -> None:
        flushed = {number: transfers.stores[number] for number in transfers.stores if number in transfers.flush}
        for number, transfer in {**self._unsubmitted, **flushed}.items():
            self._fetched.difference_update(place for place, _ in transfer.chunks)
            self._submit(number, "store", transfer.num_blocks * self._block_bytes)
        for number, transfer in transfers.loads.items():
            self._submit(number, "load", transfer.num_blocks * self._block_bytes)
        self._unsubmitted = {number: copy for number, copy in transfers.stores.items() if number not in flushed}
        for number, files in transfers.saves.items():
            self._submit(number, "save", len(files) * self._chunk_bytes, files)
        for number, files in transfers.fetches.items():
            self._submit(number, "fetch", len(files) * self._chunk_bytes, files)
        ends = [self._under_way[number].end for number in transfers.flush if number in self._under_way]
        self.blocked_until = max(ends, default=self.now)

    def _submit(self, number: int, kind: Kind, num_bytes: int, files: FileCopy = ()) -> None:
        way, spec = ("files", self._specs[-1]) if kind in ("save", "fetch") else (kind, self._specs[0])
        seconds = num_bytes / spec.bandwidth
        end = self._free_at[way] = max(self.now, self._free_at.get(way, 0.0)) + seconds
        self._under_way[number] = Copy(kind, num_bytes, seconds, end, files)

    def finished(self) -> tuple[list[int], set[BlockKey]]:
        done = [number for number, copy in self._under_way.items() if copy.end <= self.now]
        unread = set[BlockKey]()
        for number in done:
            copy = self._under_way.pop(number)
            if copy.kind in ("store", "load"):
                self.copies.append((copy.kind, copy.num_bytes, copy.seconds))
            elif copy.kind == "save":
                self._save(copy.files)
            else:
                unread |= self._fetch(copy.files)
        return done, unread

    def _save(self, files: FileCopy) -> None:
        assert self._order is not None
        for key, _ in files:
            self._order.keep(key)
        self._order.surplus()

    def _fetch(self, files: FileCopy) -> set[BlockKey]:
        """Mark fetched chunks; return those whose file was evicted in the meantime."""
        assert self._order is not None
        for key, place in files:
            if key in self._order:
                self._order.use(key)
                self._fetched.add(place)
        return {key for key, _ in files if key not in self._order}

    @property
    def next_end(self) -> float | None:
        """End time of the next copy to finish, or None if none is in progress."""
        return min((copy.end for copy in self._under_way.values()), default=None)

    def take_fetched(self, transfer: Transfer) -> int:
        """Return how many chunks of a load were fetched from a file, and forget them."""
        places = {place for place, _ in transfer.chunks} & self._fetched
        self._fetched -= places
        return len(places)

    def pause(self, seconds: float) -> None:
        """Do nothing: the simulation advances the clock."""

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


class TimedTiers(Tiers[TimedCopies]):
    """Simulated host memory, optionally with a file tier below it.

    hit_tokens  tokens served by each tier at first admissions; looked_up: prompt tokens of these requests
    """

    def __init__(
        self, specs: tuple[TierSpec, ...], groups: tuple[Group, ...], block_bytes: int, chunk_bytes: int, *,
        blocks_per_chunk: int = 1, enable_prefix_caching: bool = True,
    ) -> None:  # fmt: skip
        """Make tiers of as many whole chunks as fit; block_bytes: bytes of a block over all ranks."""
        self.order = order = FileOrder(specs[1].capacity // chunk_bytes) if len(specs) > 1 else None
        super().__init__(
            groups,
            TimedCopies(specs, block_bytes, chunk_bytes, order),
            specs[0].capacity // chunk_bytes,
            chunk_bytes,
            blocks_per_chunk=blocks_per_chunk,
            enable_prefix_caching=enable_prefix_caching,
            files=order,
        )
        self.specs = specs
        self.hit_tokens = [0] * len(specs)
        self.looked_up = 0

    def begin_at(self, now: float, batch: Batch) -> float:
        """Begin a batch's copies; return the time at which the step's own writes may begin."""
        self.host.now = now
        self.launch(batch)
        for transfer in batch.extra(Transfers).loads.values():
            self._count(transfer)
        return self.host.blocked_until

    def _count(self, transfer: Transfer) -> None:
        """Count a load's tokens, split between the tiers by their share of the chunks."""
        fetched = self.host.take_fetched(transfer)
        seq = next(seq for seq in self.loading if seq.request_id == transfer.request_id)
        if seq.num_preemptions:
            return
        from_files = seq.num_loaded_tokens * fetched // len(transfer.chunks)
        self.hit_tokens[0] += seq.num_loaded_tokens - from_files
        self.hit_tokens[-1] += from_files

    @property
    def next_end(self) -> float | None:
        """End time of the next copy to finish, or None if none is in progress."""
        return self.host.next_end

    def take_in_at(self, now: float) -> None:
        """Report the copies that are done by `now` to the scheduler."""
        self.host.now = now
        self.poll(is_idle=False)
