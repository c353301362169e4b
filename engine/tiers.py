"""KV beyond the device, put together: the connector that decides, and whatever copies what it orders."""

from collections import deque
from typing import Generic, Protocol, TypeVar

from engine.block_manager import BlockKey, Group
from engine.chunk_pool import chunk_pool
from engine.connector import Transfers
from engine.loading import Loading
from engine.offload import Files, OffloadConnector
from engine.scheduler import Batch

PAUSE_S = 0.005  # how long a step with nothing to run waits for a copy


class Copies(Protocol):
    """Copies to and from tiers: a HostTier makes them, a simulation lets their time go by.

    copies  (store or load, bytes, seconds) of those that are done, until somebody takes them away
    """

    copies: deque[tuple[str, int, float]]

    def begin(self, transfers: Transfers) -> None:
        """Start what the step before has stored and what this one loads; what it writes over has been read."""

    def finished(self) -> tuple[list[int], set[BlockKey]]:
        """The jobs that are done since the last call, and the chunks that a file did not give."""

    def pause(self, seconds: float) -> None:
        """Wait until a job is done, but no longer than so many seconds."""

    def close(self) -> None:
        """Wait for all copies."""


HostCopies = TypeVar("HostCopies", bound=Copies)


class Tiers(Loading, Generic[HostCopies]):
    """Memory, and perhaps files, that prompts' blocks are kept in.

    size  bytes of the memory
    """

    connector: OffloadConnector

    def __init__(
        self, groups: tuple[Group, ...], host: HostCopies, num_chunks: int, chunk_bytes: int, *,
        blocks_per_chunk: int = 1, enable_prefix_caching: bool = True, files: Files | None = None,
    ) -> None:  # fmt: skip
        """files  which chunks are in files below the memory; None: there are none"""
        self.host, self.files, self.size = host, files, num_chunks * chunk_bytes
        connector = OffloadConnector(
            groups,
            chunk_pool(num_chunks),
            blocks_per_chunk=blocks_per_chunk,
            enable_prefix_caching=enable_prefix_caching,
            files=files,
        )
        super().__init__(connector)

    @property
    def is_busy(self) -> bool:
        """True if a copy is in flight or ordered."""
        return self.connector.is_busy

    def launch(self, batch: Batch) -> None:
        """Start the copies that a step orders."""
        self.host.begin(batch.extra(Transfers))

    def poll(self, is_idle: bool) -> None:
        """Tell the scheduler about finished copies; if there is nothing to run, wait briefly for one."""
        if is_idle:
            self.host.pause(PAUSE_S)
        self.complete(*self.host.finished())

    @property
    def usage(self) -> float:
        """Share of the memory's chunks that are being copied, 0 to 1, as vLLM counts it."""
        pool = self.connector.pool
        return (pool.num_resident - pool.num_evictable) / pool.num_chunks

    def close(self) -> None:
        """Finish all copies, also to files, and let others have the files."""
        while self.connector.has_jobs:
            self.host.begin(self.connector.take_orders())
            self.poll(is_idle=True)
        self.host.close()
