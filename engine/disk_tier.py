"""KV chunks in files: kept across restarts, checked by hash when read, evicted least recently used first.

A file is written under another name and renamed, so that a process killed while it writes leaves nothing that looks
whole. Nothing is synced: what a failing power supply damages is found by its hash, and dropped.
"""

import fcntl
import hashlib
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.block_manager import BlockKey
from engine.file_order import FileOrder
from kvplan.core.errors import EnvironmentProblem, KvplanWarning, SettingError

MAGIC = b"KVCHUNK1"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size


class DiskTier:
    """A directory of one model's chunks, all of one size, locked by one process."""

    def __init__(self, directory: Path, capacity: int, chunk_bytes: int) -> None:
        """Raises EnvironmentProblem for a directory that cannot be written or is another process's."""
        self.directory, self.chunk_bytes = directory, chunk_bytes
        self.num_chunks = capacity // (chunk_bytes + HEADER_BYTES)
        if not self.num_chunks:
            problem = f"of {capacity:,} bytes holds no chunk of {chunk_bytes + HEADER_BYTES:,}"
            raise SettingError("", ("kv_offloading_disk_size",), problem, "raise it")
        self.num_damaged = self.num_unwritten = 0  # since the start
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise EnvironmentProblem(f"KV offloading directory {directory}", problem, "name another one") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            problem = "is in use by another process"
            raise EnvironmentProblem(f"KV offloading directory {directory}", problem, "name another one") from error
        self.close = weakref.finalize(self, os.close, lock)  # lets others have the directory
        self._files = FileOrder(self.num_chunks)
        for key in self._scan():
            self._files.keep(key)
        self._evict()

    @property
    def num_files(self) -> int:
        """Number of readable chunks."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Total bytes of the files."""
        return len(self._files) * (self.chunk_bytes + HEADER_BYTES)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._files

    def read(self, key: BlockKey) -> bytes | None:
        """Read a chunk; None if it is missing, or damaged (then it is dropped with a warning)."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            self._drop(key)
            return None
        payload = memoryview(content)[HEADER_BYTES:]
        if content[:HEADER_BYTES] != _header(payload) or len(payload) != self.chunk_bytes:
            self._drop_damaged(key)
            return None
        self._files.use(key)
        with suppress(OSError):
            os.utime(path)  # the order of use is found again after a restart
        return bytes(payload)

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        """Write a chunk; False, with a warning, if the disk fails."""
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
            self.num_unwritten += 1
            _warn(f"{path} was not written ({error.strerror}); the chunk stays in memory only")
            return False
        self._files.keep(key)
        self._evict()
        return True

    def drop(self, key: BlockKey) -> None:
        """Drop a chunk with bad contents."""
        self._drop(key)

    def _evict(self) -> None:
        for key in self._files.surplus():
            self._drop(key)

    def _drop(self, key: BlockKey) -> None:
        self._files.drop(key)
        with suppress(OSError):
            self._path(key).unlink()

    def _drop_damaged(self, key: BlockKey) -> None:
        self.num_damaged += 1
        self._drop(key)
        _warn(f"{self._path(key)} is damaged and was dropped; its tokens are computed again")

    def _path(self, key: BlockKey) -> Path:
        name = key[0].hex()
        return self.directory / name[:2] / f"{name}.g{key[1]}"

    def _scan(self) -> list[BlockKey]:
        """The chunks on disk, least recently used first; drops files of another size, and a killed process's drafts."""
        entries = []
        for path in self._paths():
            if path.name.startswith("."):
                with suppress(OSError):
                    path.unlink()
                continue
            key = _key(path.name)
            if key is None:
                continue
            with suppress(OSError):
                stat = path.stat()
                if stat.st_size == self.chunk_bytes + HEADER_BYTES:
                    entries.append((stat.st_mtime_ns, key))
                else:
                    self._drop_damaged(key)
        return [key for _, key in sorted(entries)]

    def _paths(self) -> Iterator[Path]:
        for folder in self.directory.iterdir():
            if folder.is_dir():
                yield from folder.iterdir()


def _warn(text: str) -> None:
    warnings.warn(text, KvplanWarning, stacklevel=3)


def _header(payload: memoryview) -> bytes:
    return MAGIC + hashlib.sha256(payload).digest()


def _key(name: str) -> BlockKey | None:
    """The key that a file is called by; None for a file that is none of ours."""
    content, _, group = name.partition(".g")
    try:
        return bytes.fromhex(content), int(group)
    except ValueError:
        return None
