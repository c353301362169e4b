"""Chunks of KV in files: there again after a restart, checked by hash when read; the least recently used goes first.

A file is written under another name and renamed, so that a process killed while it writes leaves nothing that looks
whole. Nothing is synced: what a failing power supply damages is found by its hash, and dropped.
"""

import fcntl
import hashlib
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from engine.block_manager import BlockKey
from kvplan.core.errors import EnvironmentProblem, UsageError

MAGIC = b"KVCHUNK1"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size


class DiskTier:
    """A directory of one model's chunks, all of one size; one process at a time has it."""

    def __init__(self, directory: Path, capacity: int, chunk_bytes: int) -> None:
        """Raises EnvironmentProblem for a directory that cannot be written or is another process's."""
        self.directory, self.chunk_bytes = directory, chunk_bytes
        self.num_chunks = capacity // (chunk_bytes + HEADER_BYTES)
        if not self.num_chunks:
            raise UsageError(
                f"kv_offloading_disk_size: {capacity:,} bytes hold no chunk of {chunk_bytes + HEADER_BYTES:,}; raise it"
            )
        self.num_damaged = 0
        self._guard = Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise EnvironmentProblem(
                f"kv_offloading_dir: {directory} cannot be written ({error.strerror}); name another one"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise EnvironmentProblem(
                f"kv_offloading_dir: {directory} is in use by another process; name another one"
            ) from error
        self.close = weakref.finalize(self, os.close, lock)  # lets others have the directory
        self._files: OrderedDict[BlockKey, None] = OrderedDict.fromkeys(self._scan())
        self._evict()

    @property
    def num_files(self) -> int:
        """Chunks that can be read."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files together."""
        return len(self._files) * (self.chunk_bytes + HEADER_BYTES)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._files

    def read(self, key: BlockKey) -> bytes | None:
        """A chunk; None for one that is gone, or damaged: that is dropped with a warning."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            self._drop(key)
            return None
        payload = memoryview(content)[HEADER_BYTES:]
        if content[:HEADER_BYTES] != _header(payload) or len(payload) != self.chunk_bytes:
            self.num_damaged += 1
            self._drop(key)
            warnings.warn(f"{path}: is damaged and was dropped; its tokens are computed again", stacklevel=2)
            return None
        with self._guard:
            if key in self._files:
                self._files.move_to_end(key)
        with suppress(OSError):
            os.utime(path)  # the order of use is found again after a restart
        return bytes(payload)

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        """Keep a chunk; False, with a warning, when the disk does not take it."""
        path = self._path(key)
        draft = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            with draft.open("wb") as file:
                file.write(_header(payload))
                file.write(payload)
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            warnings.warn(f"{path}: was not written ({error.strerror}); the chunk stays in memory only", stacklevel=2)
            return False
        with self._guard:
            self._files[key] = None
            self._files.move_to_end(key)
        self._evict()
        return True

    def drop(self, key: BlockKey) -> None:
        """Forget a chunk whose content is wrong."""
        self._drop(key)

    def _evict(self) -> None:
        while len(self._files) > self.num_chunks:
            self._drop(next(iter(self._files)))

    def _drop(self, key: BlockKey) -> None:
        with self._guard:
            self._files.pop(key, None)
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: BlockKey) -> Path:
        name = key[0].hex()
        return self.directory / name[:2] / f"{name}.g{key[1]}"

    def _scan(self) -> list[BlockKey]:
        """The chunks that are there, the least recently used first; what a killed process left half written goes."""
        entries = []
        for path in self._paths():
            if path.name.startswith("."):
                with suppress(OSError):
                    path.unlink()
                continue
            key = _key(path.name)
            with suppress(OSError):
                stat = path.stat()
                if key is not None and stat.st_size == self.chunk_bytes + HEADER_BYTES:
                    entries.append((stat.st_mtime_ns, key))
        return [key for _, key in sorted(entries)]

    def _paths(self) -> Iterator[Path]:
        for folder in self.directory.iterdir():
            if folder.is_dir():
                yield from folder.iterdir()


def _header(payload: memoryview) -> bytes:
    return MAGIC + hashlib.sha256(payload).digest()


def _key(name: str) -> BlockKey | None:
    """The key that a file is called by; None for a file that is none of ours."""
    content, _, group = name.partition(".g")
    try:
        return bytes.fromhex(content), int(group)
    except ValueError:
        return None
