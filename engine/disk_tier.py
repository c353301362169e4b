"""KV chunks in files: kept across restarts, checked by hash when read, evicted least recently used first.

A file is written under another name and renamed, so that a process killed while it writes leaves nothing that looks
whole. Nothing is synced: what a failing power supply damages is found by its hash, and dropped.
"""

import errno
import fcntl
import hashlib
import os
import stat
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.block_manager import BlockKey
from engine.file_order import FileOrder
from kvplan.core.errors import EnvironmentProblem, KvplanWarning, SettingError

MAGIC = b"KVCHUNK1"
OWN = os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, no FIFO waited for
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
        lock = _locked(directory)
        self.close = weakref.finalize(self, os.close, lock)  # lets others have the directory
        self._files = FileOrder(self.num_chunks)
        try:
            keys = self._scan()
        except OSError as error:
            self.close()
            problem = f"{error.filename} cannot be read ({error.strerror})"
            raise EnvironmentProblem(f"KV offloading directory {directory}", problem, "name another one") from error
        for key in keys:
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
            content = self._content(path)
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
            self._make_folder(path.parent)
            with suppress(FileNotFoundError):
                draft.unlink()  # what lies there may lead elsewhere
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OWN, 0o600), "wb") as file:
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
            if key is None or self._path(key) != path:
                continue
            with suppress(OSError):
                status = path.lstat()
                if self._is_chunk(status):
                    entries.append((status.st_mtime_ns, key))
                else:
                    self._drop_damaged(key)
        return [key for _, key in sorted(entries)]

    def _paths(self) -> Iterator[Path]:
        for folder in self.directory.iterdir():
            if stat.S_ISDIR(folder.lstat().st_mode):
                yield from folder.iterdir()

    def _is_chunk(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_size == self.chunk_bytes + HEADER_BYTES

    def _content(self, path: Path) -> bytes:
        """A chunk's file; nothing of one that is of another size, a link or no file: the directory may be shared."""
        with os.fdopen(os.open(path, os.O_RDONLY | OWN), "rb") as file:
            return file.read(self.chunk_bytes + HEADER_BYTES) if self._is_chunk(os.fstat(file.fileno())) else b""

    @staticmethod
    def _make_folder(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise OSError(errno.ELOOP, "its folder is a symbolic link")


def _locked(directory: Path) -> int:
    """The open lock of a directory, which is made if it is missing."""
    subject, remedy = f"KV offloading directory {directory}", "name another one"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | OWN, 0o600)
    except OSError as error:
        raise EnvironmentProblem(subject, f"cannot be written ({error.strerror})", remedy) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise EnvironmentProblem(subject, "is in use by another process", remedy) from error
    return lock


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
