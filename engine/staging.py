"""Host buffers for copies to and from the device, pinned for a GPU so that copies are asynchronous.

A step's arrays lie one behind the other, so that one copy takes them all. There are two buffers each way, used in
turn: what one step's copy still reads or writes, the next step leaves alone. On a CPU the same happens in plain memory,
and nothing travels.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

NUM_BUFFERS = 2  # steps in flight
ALIGNMENT = 16  # bytes: what Triton's kernels are compiled for
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class Field(NamedTuple):
    """One array of a layout: its shape, its dtype's name in numpy, and its bytes."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays packed into num_bytes of memory, each at a multiple of ALIGNMENT."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, *arrays: tuple[tuple[int, ...], str]) -> "Layout":
        """The layout of arrays with these shapes and dtypes, in this order."""
        fields, start = list[Field](), 0
        for shape, dtype in arrays:
            end = start + DTYPES[dtype].itemsize * prod(shape)
            fields.append(Field(shape, dtype, start, end))
            start = _aligned(end)
        return cls(tuple(fields), start)

    def arrays(self, memory: Bytes) -> list[np.ndarray[Any, Any]]:
        """Views of such memory."""
        return [memory[start:end].view(dtype).reshape(shape) for shape, dtype, start, end in self.fields]

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Views of such memory [num_bytes] uint8, on any device."""
        wide = {dtype: memory.view(DTYPES[dtype]) for dtype in {field.dtype for field in self.fields}}
        views = list[torch.Tensor]()
        for shape, dtype, start, end in self.fields:
            size = DTYPES[dtype].itemsize
            view = wide[dtype][start // size : end // size]
            views.append(view if len(shape) == 1 else view.view(shape))
        return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class UploadRing:
    """Host buffers that hold a step's arrays until the device has copied them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [_Buffer(device) for _ in range(NUM_BUFFERS)]

    def next_step(self) -> None:
        """Begin a step, reusing the buffer of two steps ago, which the device has copied by now."""
        self._buffers[0].copied = _event_now(self.device)
        self._buffers.append(self._buffers.pop(0))
        self._buffers[0].clear()

    def stage(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Put an array into this step's buffer, valid until the step after the next one."""
        return self._buffers[0].stage(array)

    def reserve(self, layout: Layout) -> tuple[torch.Tensor, list[np.ndarray[Any, Any]]]:
        """Memory in this step's buffer [num_bytes] uint8, and the arrays in it, still to be filled."""
        memory, content = self._buffers[0].reserve(layout.num_bytes)
        return memory, layout.arrays(content)

    def upload(self, arrays: list[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """The arrays on the device, by one copy; on a CPU they stay in this step's buffer."""
        layout = Layout.of(*((array.shape, array.dtype.name) for array in arrays))
        memory, places = self.reserve(layout)
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        return layout.tensors(memory.to(self.device, non_blocking=True))


class _Buffer:
    """One step's memory; it grows to the largest step seen."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._memory.numpy()  # the same memory
        self._used = 0
        self.copied: torch.cuda.Event | None = None  # the device is past this step's copies

    def clear(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self._used = 0

    def stage(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        memory, content = self.reserve(array.nbytes)
        content.view(array.dtype).reshape(array.shape)[...] = array
        return memory.view(DTYPES[array.dtype.name]).view(array.shape)

    def reserve(self, size: int) -> tuple[torch.Tensor, Bytes]:
        """Reserve bytes, as a tensor and as an array."""
        start, self._used = self._used, self._used + _aligned(size)
        if self._used > len(self._memory):  # tensors of this step keep the old memory alive
            self._memory = torch.empty(2 * self._used, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._bytes = self._memory.numpy()
        return self._memory[start : start + size], self._bytes[start : start + size]


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """A tensor being copied to the host."""

    on_host: torch.Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return the tensor."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host


class DownloadRing:
    """Host buffers for a step's results; read a copy before the one after the next is begun."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(NUM_BUFFERS)]

    def download(self, words: torch.Tensor) -> AsyncCopy:
        """Start copying words [n] int32 to the host."""
        self._buffers.append(self._buffers.pop(0))
        if len(self._buffers[0]) < len(words):
            is_pinned = self.device.type == "cuda"
            self._buffers[0] = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=is_pinned)
        on_host = self._buffers[0][: len(words)]
        on_host.copy_(words, non_blocking=True)
        return AsyncCopy(on_host, _event_now(self.device))


def _event_now(device: torch.device) -> torch.cuda.Event | None:
    """An event after all work launched so far; None if it is already done (on a CPU)."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
