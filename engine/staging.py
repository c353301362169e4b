"""Host memory between a step and its device: pinned for a GPU, so that copies travel while both sides go on.

There are two parts each way, used in turn: what one step's copy still reads or writes, the next step leaves alone. On a
CPU the same happens in plain memory, and nothing travels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUM_PARTS = 2  # steps in flight
ALIGNMENT = 16  # bytes: what Triton's kernels are compiled for
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


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
        start, self._used = self._used, self._used + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self._used > len(self._memory):  # tensors of this step keep the old memory alive
            self._memory = torch.empty(2 * self._used, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._bytes = self._memory.numpy()
        end = start + array.nbytes
        self._bytes[start:end].view(array.dtype).reshape(array.shape)[...] = array
        return self._memory[start:end].view(DTYPES[array.dtype.name]).view(array.shape)


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
