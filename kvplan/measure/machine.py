"""The machine that a server is about to start on: its GPUs, memory, limits and driver, all read now."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.hardware import nvml
from kvplan.hardware.gpu import GpuSpec, custom_gpu, of_device, with_memory
from kvplan.hardware.nvml import Device, DeviceError, DeviceMemory, HostMemory, host_memory, open_nvml

CGROUP: Final = Path("/sys/fs/cgroup")
SHM: Final = Path("/dev/shm")
# Files of Docker, of Podman and of a pod: in these the driver's process numbers are not the container's.
CONTAINED: Final = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))
UNLIMITED: Final = 2**62  # version 1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU; its name is None if this process may not see it, its bytes if the driver does not say."""

    pid: int
    name: str | None
    used: int | None


@dataclass(frozen=True, slots=True)
class LiveGpu:
    """A GPU that CUDA would use, or a MIG instance of one."""

    index: int
    name: str
    is_mig: bool
    capability: str | None
    memory: DeviceMemory
    processes: tuple[Process, ...] = ()

    @property
    def total(self) -> int | None:
        """Bytes that CUDA reports: without what the driver reserves, which an old driver does not say."""
        if self.memory.is_host:
            return self.memory.total
        return None if self.memory.reserved is None else self.memory.total - self.memory.reserved

    def spec(self) -> GpuSpec:
        """The GPU as plans take it, with the memory that the driver reports."""
        name = re.sub(r" MIG \S+$", "", self.name)
        known = of_device(self.name, self.memory.total) or of_device(name, self.memory.total)
        if known is None:
            known = replace(custom_gpu(self.memory.total), name=name, device_name=name, vendor="nvidia")
        known = replace(known, compute_capability=self.capability or known.compute_capability)
        if self.total is None and not self.is_mig:
            return known
        source = "/proc/meminfo" if self.memory.is_host else "the driver (NVML), less what it reserves"
        measured = with_memory(known, self.total or self.memory.total)
        return replace(measured, total_memory_source=source, unified=known.unified or self.memory.is_host)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has at this moment, in bytes; None: it does not say.

    gpus     in CUDA's order; empty if there is no driver, and `problem` says why
    limit    of the container's memory, and what of it is in use besides files that can be dropped
    shm      size of /dev/shm
    """

    gpus: tuple[LiveGpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    problem: str | None = None
    host: HostMemory | None = None
    limit: int | None = None
    limit_used: int = 0
    shm: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def available(self) -> int | None:
        """Host memory that a new process may take."""
        sizes = [] if self.host is None else [self.host.available]
        sizes += [] if self.limit is None else [max(0, self.limit - self.limit_used)]
        return min(sizes, default=None)


def live_machine(visible: str | None = None) -> Machine:
    """Read everything; a missing driver is a problem in the result, not an error.

    visible  CUDA_VISIBLE_DEVICES of the server, if its command sets it
    """
    limit, used = container_limit()
    machine = Machine(host=host_memory(), limit=limit, limit_used=used, shm=shm_size())
    try:
        with open_nvml() as library:
            devices = library.visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
            gpus = tuple(live_gpu(device) for device in devices)
            warnings = (*library.warnings, *(text for device in devices for text in device.warnings))
            return replace(
                machine, gpus=gpus, driver=library.driver_version, cuda=library.cuda_version, warnings=warnings
            )
    except DeviceError as error:
        return replace(machine, problem=str(error))


def live_gpu(device: Device) -> LiveGpu:
    listed = device.processes()
    processes = tuple(Process(process.pid, process_name(process.pid), process.used) for process in listed)
    return LiveGpu(device.index, device.name, device.is_mig, device.capability(), device.memory(), processes)


def process_name(pid: int) -> str | None:
    """A process's own name, or None: a container sees only its own processes, and the driver counts the machine's."""
    if any(map(Path.exists, CONTAINED)):
        return None
    try:
        return printable((nvml.PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip(), 40)
    except OSError:
        return None


def shm_size() -> int | None:
    try:
        size = os.statvfs(SHM)
    except (OSError, AttributeError):
        return None
    return size.f_frsize * size.f_blocks


# --- limits of a container --------------------------------------------------------------------------------------------


def container_limit() -> tuple[int | None, int]:
    """(bytes of the tightest limit of this process's control groups, its use without droppable files)."""
    groups = [(limit, used) for folder in group_folders() if (limit := limit_of(folder)) for used in [used_in(folder)]]
    return min(groups, key=lambda group: group[0] - group[1], default=(None, 0))


def group_folders() -> Iterator[Path]:
    """Folders of this process's memory groups, of version 2 and of version 1, each with those above it."""
    try:
        lines = (nvml.PROC / "self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = ["0::/"]
    for text in lines:
        number, controllers, path = [*text.split(":", 2), "", ""][:3]
        if number == "0" or "memory" in controllers.split(","):
            root = CGROUP if number == "0" else CGROUP / "memory"
            own = root / path.strip("/")
            yield from dict.fromkeys([own, *(folder for folder in own.parents if folder.is_relative_to(root))])


def limit_of(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = number_in(folder / name)
        if limit is not None:
            return limit if limit < UNLIMITED else None
    return None


def used_in(folder: Path) -> int:
    used = next(filter(None, (number_in(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))), 0)
    try:
        stat = (folder / "memory.stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return used
    files = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return max(0, used - int(files[1])) if files else used


def number_in(file: Path) -> int | None:
    """The number in a file, or None if there is no such file or it says "max"."""
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
