"""Copies KV blocks between device and host memory, and host memory and files, while steps run.

On a GPU the memory is pinned and the copies have a stream of their own; on a CPU they run in a thread. No GPU has run
this yet.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from engine.block_manager import NULL_BLOCK, BlockKey
from engine.connector import FileCopy, Transfer, Transfers
from engine.disk_tier import DiskTier
from kvplan.core.errors import EnvironmentProblem

MOST_COPIES = 4_096  # that are remembered for who asks how long they took
PAGE = 4096  # a chunk is rounded up to pages of memory, as in vLLM


def chunk_bytes(block_bytes: int, blocks_per_chunk: int = 1) -> int:
    """Bytes of a chunk: some blocks of all layers, rounded up to whole pages."""
    return -(-block_bytes * blocks_per_chunk // PAGE) * PAGE


class HostTier:
    """Host memory of num_chunks chunks, and the copies to and from it in flight."""

    def __init__(
        self, tensors: list[torch.Tensor], num_chunks: int, blocks_per_chunk: int = 1, disk: DiskTier | None = None
    ) -> None:
        """tensors  [num_blocks, ...] of the device's pool, any dtype: block n of all of them is copied together

        Raises EnvironmentProblem where the host lacks the memory.
        """
        self.device, self.disk = tensors[0].device, disk
        self._rows = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]
        self.block_bytes = sum(rows.shape[1] for rows in self._rows)
        self.chunk_bytes = chunk_bytes(self.block_bytes, blocks_per_chunk)
        is_gpu = self.device.type == "cuda"
        try:
            self.memory = torch.empty(num_chunks, self.chunk_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        except RuntimeError as error:
            raise EnvironmentProblem(
                f"kv_offloading_size: the host did not give {num_chunks * self.chunk_bytes:,} bytes; lower it"
            ) from error
        self._stream = torch.cuda.Stream(self.device) if is_gpu else None
        self._copies = ThreadPoolExecutor(1, "kv-copies")
        self._files = ThreadPoolExecutor(1, "kv-files")
        self._unsubmitted: dict[int, Transfer] = {}
        self._jobs: dict[int, Future[set[BlockKey]]] = {}
        self.copies: deque[tuple[str, int, float]] = deque(maxlen=MOST_COPIES)  # store or load, bytes, seconds
        self.num_bytes = {"store": 0, "load": 0, "save": 0, "fetch": 0}  # copied since the start

    def begin(self, transfers: Transfers) -> None:
        """Start copying what the last step stored and this one loads; wait for blocks that this step overwrites."""
        flushed = {number: transfers.stores[number] for number in transfers.stores if number in transfers.flush}
        self._submit({**self._unsubmitted, **flushed}, self._store, "store")
        self._submit(transfers.loads, self._load, "load")
        self._unsubmitted = {number: copy for number, copy in transfers.stores.items() if number not in flushed}
        for number, copy in transfers.saves.items():
            self._jobs[number] = self._files.submit(self._save, copy)
            self.num_bytes["save"] += len(copy) * self.chunk_bytes
        for number, copy in transfers.fetches.items():
            self._jobs[number] = self._files.submit(self._fetch, copy)
            self.num_bytes["fetch"] += len(copy) * self.chunk_bytes
        wait([self._jobs[number] for number in transfers.flush if number in self._jobs])

    def finished(self) -> tuple[list[int], set[BlockKey]]:
        """Jobs finished since the last call, and chunks that could not be read from files."""
        done = [number for number, job in self._jobs.items() if job.done()]
        unread = set[BlockKey]().union(*(self._jobs.pop(number).result() for number in done))
        return done, unread

    def pause(self, seconds: float) -> None:
        """Wait until a job is done, at most this many seconds."""
        if self._jobs:
            wait(list(self._jobs.values()), timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Wait for all copies and unlock the files."""
        self.begin(Transfers())
        self._copies.shutdown()
        self._files.shutdown()
        if self.disk is not None:
            self.disk.close()

    def _submit(self, transfers: Mapping[int, Transfer], copy: Callable[[Transfer], None], kind: str) -> None:
        if not transfers:
            return
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        for number, transfer in transfers.items():
            self._jobs[number] = self._copies.submit(self._run, copy, transfer, ready, kind)
            self.num_bytes[kind] += transfer.num_blocks * self.block_bytes

    @torch.inference_mode()
    def _run(
        self, copy: Callable[[Transfer], None], transfer: Transfer, ready: torch.cuda.Event | None, kind: str
    ) -> set[BlockKey]:
        """Run a copy; on a GPU on its own stream, after the steps launched before."""
        start = time.perf_counter()
        if self._stream is None or ready is None:
            copy(transfer)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                copy(transfer)
                self._stream.record_event().synchronize()
        self.copies.append((kind, transfer.num_blocks * self.block_bytes, time.perf_counter() - start))
        return set()

    def _store(self, transfer: Transfer) -> None:
        if self._stream is None:
            places, starts, blocks = self._indices(transfer)
            for rows, views in zip(self._rows, self._views(), strict=True):
                views[places, starts] = rows[blocks]
            return
        for row, block, part in self._parts(transfer):
            part.copy_(row[block], non_blocking=True)

    def _load(self, transfer: Transfer) -> None:
        if self._stream is None:
            places, starts, blocks = self._indices(transfer)
            for rows, views in zip(self._rows, self._views(), strict=True):
                rows[blocks] = views[places, starts]
            return
        for row, block, part in self._parts(transfer):
            row[block].copy_(part, non_blocking=True)

    def _views(self) -> list[torch.Tensor]:
        """Of each of the device's tensors, [num_chunks, blocks_per_chunk, bytes] of the host's memory."""
        blocks = self.chunk_bytes // self.block_bytes
        by_block = self.memory[:, : blocks * self.block_bytes].unflatten(1, (blocks, self.block_bytes))
        return list(by_block.split([rows.shape[1] for rows in self._rows], dim=2))

    @staticmethod
    def _indices(transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        entries = [
            (place, i, block)
            for place, blocks in transfer.chunks
            for i, block in enumerate(blocks)
            if block != NULL_BLOCK
        ]
        places, starts, blocks = torch.tensor(entries, dtype=torch.int64).T
        return places, starts, blocks

    def _parts(self, transfer: Transfer) -> Iterable[tuple[torch.Tensor, int, torch.Tensor]]:
        """(device rows, block, host bytes) of each copy."""
        views = self._views()
        for place, start, block in zip(*(index.tolist() for index in self._indices(transfer)), strict=True):
            for rows, view in zip(self._rows, views, strict=True):
                yield rows, block, view[place, start]

    # --- files --------------------------------------------------------------------------------------------------

    def _save(self, copies: FileCopy) -> set[BlockKey]:
        assert self.disk is not None
        for key, place in copies:
            self.disk.write(key, self.memory[place].numpy().data)
        return set()

    def _fetch(self, copies: FileCopy) -> set[BlockKey]:
        """Read chunks from files; returns those that could not be read."""
        assert self.disk is not None
        unread = set()
        for key, place in copies:
            payload = self.disk.read(key)
            if payload is None:
                unread.add(key)
            else:
                self.memory[place] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return unread
