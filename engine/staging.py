"""Host memory between a step and its device: pinned for a GPU, so that copies travel while both sides go on.

A step's arrays lie one behind the other, so that one copy takes them all. There are two parts each way, used in turn:
what one step's copy still reads or writes, the next step leaves alone. On a CPU the same happens in plain memory, and
nothing travels.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

NUM_PARTS = 2  # steps in flight
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
    """Arrays one behind the other in num_bytes of memory, each at a multiple of ALIGNMENT."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, *arrays: tuple[tuple[int, ...], str]) -> "Layout":
        """For arrays of these shapes and dtypes, in this order."""
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
        wide = {dtype: memory.view(DTYPES[dtype]) for dtype in {each.dtype for each in self.fields}}
        views = list[torch.Tensor]()
        for shape, dtype, start, end in self.fields:
            size = DTYPES[dtype].itemsize
            view = wide[dtype][start // size : end // size]
            views.append(view if len(shape) == 1 else view.view(shape))
        return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Outbox:
    """Where a step's arrays lie until the device has copied them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts = [_Part(device) for _ in range(NUM_PARTS)]

    def turn(self) -> None:
        """Begin a step: its arrays go where the step before the last one's lay, which are with the device by now."""
        self._parts[0].left = _event_now(self.device)
        self._parts.append(self._parts.pop(0))
        self._parts[0].clear()

    def put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """The array in this step's part, to be copied from until the step after the next one."""
        return self._parts[0].put(array)

    def reserve(self, layout: Layout) -> tuple[torch.Tensor, list[np.ndarray[Any, Any]]]:
        """Memory in this step's part [num_bytes] uint8, and the arrays in it, still to be filled."""
        memory, content = self._parts[0].reserve(layout.num_bytes)
        return memory, layout.arrays(content)

    def send(self, arrays: list[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """The arrays on the device, by one copy; on a CPU they stay in this step's part."""
        layout = Layout.of(*((array.shape, array.dtype.name) for array in arrays))
        memory, places = self.reserve(layout)
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        return layout.tensors(memory.to(self.device, non_blocking=True))


class _Part:
    """One step's memory; it grows to the largest step seen."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._memory.numpy()  # the same memory
        self._used = 0
        self.left: torch.cuda.Event | None = None  # the device is past this step's copies

    def clear(self) -> None:
        if self.left is not None:
            self.left.synchronize()
        self._used = 0

    def put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        memory, content = self.reserve(array.nbytes)
        content.view(array.dtype).reshape(array.shape)[...] = array
        return memory.view(DTYPES[array.dtype.name]).view(array.shape)

    def reserve(self, size: int) -> tuple[torch.Tensor, Bytes]:
        """So many bytes, as a tensor and as an array."""
        start, self._used = self._used, self._used + _aligned(size)
        if self._used > len(self._memory):  # tensors of this step keep the old memory alive
            self._memory = torch.empty(2 * self._used, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._bytes = self._memory.numpy()
        return self._memory[start : start + size], self._bytes[start : start + size]


@dataclass(frozen=True, slots=True)
class Letter:
    """A tensor on its way to the host."""

    content: torch.Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> torch.Tensor:
        """Wait until it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.content


class Inbox:
    """Where what a step sends to the host arrives; a letter is to be read before the one after the next is sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts = [torch.empty(0, dtype=torch.int32) for _ in range(NUM_PARTS)]

    def send(self, words: torch.Tensor) -> Letter:
        """Copy words [n] int32 to the host, which goes on meanwhile."""
        self._parts.append(self._parts.pop(0))
        if len(self._parts[0]) < len(words):
            is_pinned = self.device.type == "cuda"
            self._parts[0] = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=is_pinned)
        content = self._parts[0][: len(words)]
        content.copy_(words, non_blocking=True)
        return Letter(content, _event_now(self.device))


def _event_now(device: torch.device) -> torch.cuda.Event | None:
    """What the device reaches when all it was given until now is done; None: it has done it already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
