"""Which chunks are in files, and which of them goes first: the one that was used longest ago."""

from collections import OrderedDict
from threading import Lock

from engine.block_manager import BlockKey


class FileOrder:
    """Keys of files, the least recently used first; safe between the threads that read and write them."""

    def __init__(self, num_files: int) -> None:
        """num_files  at most"""
        self.num_files = num_files
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self._guard = Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def use(self, key: BlockKey) -> None:
        """A file has been read; no effect on one that is gone."""
        with self._guard:
            if key in self._keys:
                self._keys.move_to_end(key)

    def keep(self, key: BlockKey) -> None:
        """A file has been written."""
        with self._guard:
            self._keys[key] = None
            self._keys.move_to_end(key)

    def drop(self, key: BlockKey) -> None:
        """A file is gone, or has to go."""
        with self._guard:
            self._keys.pop(key, None)

    def surplus(self) -> list[BlockKey]:
        """Take out, and return, the files that are too many: the caller deletes them."""
        with self._guard:
            return [self._keys.popitem(last=False)[0] for _ in range(max(0, len(self._keys) - self.num_files))]
