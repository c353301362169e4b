"""Memory of the engine's parts, measured on its tensors and the allocator, never computed from a formula."""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvplan.core.errors import EnvironmentProblem

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on this rank's device after start-up.

    weights        parameters; buffers: made at load (rotary tables, a scale for each row of fp8 per tensor)
    activations    most that the profile run's step held beside those
    kv_cache       the pool: num_blocks of block_bytes each, and slots of recurrent states beside it
    cuda_graphs    what capturing took, and the tensors that all graphs share; 0 without graphs
    non_torch      used on the device by none of these (CUDA context, libraries, workspaces); 0 on a CPU
    workspaces     of non_torch, what libraries hold in torch's own pool (cuBLAS); 0 on a CPU
    graph_tensors  of cuda_graphs, what lies in torch's own pool; the rest is the driver's
    lora           slots for adapters, and the tensors that say whose tokens are whose; 0 without them
    total, budget  of the device, or memory_limit; the share of it that gpu_memory_utilization grants
    fallbacks      kernel functions that plain torch stands for, and "CUDA graphs" if none are captured: each with why
    """

    weights: int
    buffers: int
    activations: int
    kv_cache: int
    cuda_graphs: int
    non_torch: int
    workspaces: int
    graph_tensors: int
    total: int
    budget: int
    num_blocks: int
    block_bytes: int
    lora: int = 0
    fallbacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What the pool of a rank on a CPU may take of the host's memory, which all that runs there shares.

    free   bytes before the pool is allocated
    ranks  of this engine on the host, which take equal parts
    """

    free: int
    ranks: int

    @property
    def size(self) -> int:
        """Half of what is free, in equal parts: the pool is resident from the start, and others need memory too."""
        return self.free // 2 // self.ranks


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Total bytes of the tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def size_text(num_bytes: int) -> str:
    """Bytes for a message, in the largest binary unit that gives at least 1: "488.28 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 2**10:,.2f} KiB"


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device; for a CPU, available and total host memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    return host_memory()


def host_memory() -> tuple[int, int]:
    """(available, total) bytes of the host, from /proc on Linux and psutil elsewhere.

    Raises EnvironmentProblem where neither is there.
    """
    if MEMINFO.exists():
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"], sizes["MemTotal"]
    try:
        import psutil
    except ImportError as error:
        raise EnvironmentProblem(
            f"psutil: not installed, and there is no {MEMINFO} to read the host's memory from; run `pip install psutil`"
        ) from error
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def reserved(device: torch.device) -> int:
    """Bytes that torch's allocator has reserved on a GPU; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def requested(device: torch.device, when: Literal["current", "peak"] = "current") -> int:
    """Bytes requested from torch's allocator on a GPU for tensors and workspaces.

    The blocks it gives are rounded up, by as much as 1 MiB each: a CPU has nothing like it, and no formula tells.
    """
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"])


class PeakMeter:
    """Peak tensor bytes inside `with`, minus those allocated before.

    On a GPU torch's allocator knows; on a CPU every operator's new storages are counted until they are freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages = _StorageCounter()
        self._stack = ExitStack()
        self._before = 0
        self.peak = 0

    def __enter__(self) -> "PeakMeter":
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = requested(self._device)
        else:
            self._stack.enter_context(self._storages)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak = requested(self._device, "peak") - self._before
        else:
            self._stack.close()
            self.peak = self._storages.peak


class _StorageCounter(TorchDispatchMode):
    """Counts the bytes of storages that operators create, and notices when they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or storage.nbytes() == 0:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size: int) -> None:
        self.live -= size
