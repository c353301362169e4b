"""KV beyond the device, put together: the connector that decides, and whatever copies what it orders."""

from collections import deque
from typing import Generic, Protocol, TypeVar

from engine.block_manager import BlockKey, Group
from engine.chunk_pool import chunk_pool
from engine.connector import Transfers
from engine.drafting import scheduler_of
from engine.loading import LoadingScheduler
from engine.offload import Files, OffloadConnector
from engine.scheduler import PrefixCacheStats, Scheduler, SchedulerConfig

REST_S = 0.005  # how long a step with nothing to run waits for a copy


class Copies(Protocol):
    """Copies to and from tiers: a HostTier makes them, a simulation lets their time go by.

    copies  (store or load, bytes, seconds) of those that are done, until somebody takes them away
    """

    copies: deque[tuple[str, int, float]]

    def begin(self, transfers: Transfers) -> None:
        """Start what the step before has stored and what this one loads; what it writes over has been read."""

    def finished(self) -> tuple[list[int], set[BlockKey]]:
        """The jobs that are done since the last call, and the chunks that a file did not give."""

    def rest(self, seconds: float) -> None:
        """Wait until a job is done, but no longer than so many seconds."""

    def close(self) -> None:
        """Wait for all copies."""


class DeviceOnly:
    """The engine's side of tiers where there are none: all KV is on the device, and nothing is copied."""

    is_busy = False

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self._groups = groups

    def scheduler(self, config: SchedulerConfig, num_blocks: int) -> Scheduler:
        return scheduler_of(config, num_blocks, self._groups)

    def begin(self, transfers: Transfers) -> None: ...

    def take_in(self, *, is_idle: bool) -> None: ...

    def close(self) -> None: ...


HostCopies = TypeVar("HostCopies", bound=Copies)


class Tiers(Generic[HostCopies]):
    """Memory, and perhaps files, that prompts' blocks are kept in.

    size  bytes of the memory
    """

    def __init__(
        self, groups: tuple[Group, ...], host: HostCopies, num_chunks: int, chunk_bytes: int, *,
        blocks_per_chunk: int = 1, enable_prefix_caching: bool = True, files: Files | None = None,
    ) -> None:  # fmt: skip
        """files  which chunks are in files below the memory; None: there are none"""
        self.groups, self.host, self.files, self.size = groups, host, files, num_chunks * chunk_bytes
        self.connector = OffloadConnector(
            groups,
            chunk_pool(num_chunks),
            blocks_per_chunk=blocks_per_chunk,
            enable_prefix_caching=enable_prefix_caching,
            files=files,
        )

    def scheduler(self, config: SchedulerConfig, num_blocks: int) -> LoadingScheduler:
        """The scheduler that uses the connector; take_in() tells it about finished copies."""
        self._scheduler = LoadingScheduler(config, num_blocks, self.groups, self.connector)
        return self._scheduler

    @property
    def is_busy(self) -> bool:
        """True if a copy is in flight or ordered."""
        return self.connector.is_busy

    def begin(self, transfers: Transfers) -> None:
        """Start the copies that a step orders."""
        self.host.begin(transfers)

    def take_in(self, *, is_idle: bool) -> None:
        """Tell the scheduler about finished copies; if there is nothing to run, wait briefly for one."""
        if is_idle:
            self.host.rest(REST_S)
        self._scheduler.complete(*self.host.finished())

    @property
    def scheduler_stats(self) -> PrefixCacheStats:
        """Tokens looked up in the tiers, and tokens found."""
        return self._scheduler.external_cache_stats

    @property
    def usage(self) -> float:
        """Share of the memory's chunks that are being copied, 0 to 1, as vLLM counts it."""
        pool = self.connector.pool
        return (pool.num_resident - pool.num_evictable) / pool.num_chunks

    def close(self) -> None:
        """Finish all copies, also to files."""
        while self.connector.has_jobs:
            self.host.begin(self.connector.take_orders())
            self.take_in(is_idle=True)
        self.host.close()
