"""How much of its files a module reads: the same on every machine, however busy."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


def reads_of(monkeypatch: pytest.MonkeyPatch, module: str) -> list[int]:
    """A list that grows by the length of each read from the files that the module opens by `open_regular`."""
    lengths: list[int] = []
    original = import_module(module).open_regular

    class Counted:
        def __init__(self, path: Path) -> None:
            self.file: Any = original(path)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def read(self, size: int = -1) -> bytes:
            data: bytes = self.file.read(size)
            lengths.append(len(data))
            return data

    monkeypatch.setattr(f"{module}.open_regular", Counted)
    return lengths
