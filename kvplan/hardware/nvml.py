"""The only interface to NVML, the driver's monitoring library: plain values, and errors that include the remedy.

Sizes are bytes, power is watts, clocks are MHz, temperatures are degrees Celsius, utilizations are fractions from 0 to
1. A value that a device does not report is None; `warnings` has a line for what the user should know, once each.

NVIDIA's Python package (nvidia-ml-py, imported as `pynvml`) is loaded only by `open_nvml`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from kvplan.core.errors import EnvironmentProblem, sentence
from kvplan.core.files import printable
from kvplan.core.records import dataclass

Reason = Literal["absent", "mismatch", "not_loaded", "package", "permission", "lost", "other"]
T = TypeVar("T")

PROC = Path("/proc")

# nvmlReturn_t of nvml.h
NO_PERMISSION = 4
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25

_LOST = (GPU_IS_LOST, RESET_REQUIRED)
_CURE_PERMISSION = "give this user access to /dev/nvidia*, in a container run with `--gpus all`"
_CURE_LOST = "`dmesg | grep Xid` says why; reset the GPU (`nvidia-smi -r`) or reboot"
_INIT_FAULTS: dict[int, tuple[Reason, str, str]] = {
    LIBRARY_NOT_FOUND: (
        "absent", "not found (no libnvidia-ml.so.1)", "install it, in a container run with `--gpus all`"
    ),
    LIB_RM_VERSION_MISMATCH: (
        "mismatch", "its library and its kernel module are of different versions (as after an update)",
        "reload the kernel module or reboot",
    ),
    DRIVER_NOT_LOADED: (
        "not_loaded", "installed, but its kernel module is not loaded", "run `sudo modprobe nvidia` or reboot"
    ),
    NO_PERMISSION: ("permission", "permission denied", _CURE_PERMISSION),
    OPERATING_SYSTEM: ("permission", "the operating system blocks it", _CURE_PERMISSION),
    FUNCTION_NOT_FOUND: ("other", "too old, it lacks what NVML starts with", "update the driver"),
    GPU_IS_LOST: ("lost", "a GPU is lost", _CURE_LOST),
    RESET_REQUIRED: ("lost", "a GPU needs a reset", _CURE_LOST),
}  # fmt: skip
# Drivers 535.43 to 535.85 fill a longer record per process than any later library reads: pids and sizes come out
# shifted (wookayin/gpustat#161).
_BROKEN_PROCESSES = ((535, 43), (535, 86))


class DeviceError(EnvironmentProblem):
    """A GPU or driver that cannot be queried; `reason` identifies the fault, so that a caller can do without."""

    def __init__(self, subject: str, problem: str | None = None, remedy: str = "", *, reason: Reason = "other") -> None:
        super().__init__(subject, problem, remedy)
        self.reason: Reason = reason


# --- what comes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device; total = reserved + used + free.

    reserved  reserved by the driver; None if an old driver counts it as used
    is_host   the device has no memory of its own (GB10, Jetson): these are the host's total and available bytes
    """

    total: int
    reserved: int | None
    used: int
    free: int
    is_host: bool = False


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes a process uses on a device; None if the driver does not report them."""

    pid: int
    used: int | None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device at one moment.

    process_used          bytes of the given process; None if it is not listed (another PID namespace, hidden processes,
    no context yet) or listed without a size
    process_is_estimated  process_used is not from the driver: a caller set its own estimate
    others_used           bytes of all other listed processes; None unless the driver reports each of them
    """

    memory: DeviceMemory
    process_used: int | None
    process_is_estimated: bool
    others_used: int | None
    gpu_utilization: float | None
    memory_utilization: float | None
    power_w: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the host's memory: the total, and what is available without swapping."""

    total: int
    available: int


def host_memory() -> HostMemory | None:
    """The host's memory from /proc/meminfo (MemTotal, MemAvailable), or None if there is no such file."""
    try:
        lines = (PROC / "meminfo").read_text(encoding="ascii", errors="replace").splitlines()
        kib = {
            name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if value.strip()
        }
        return HostMemory(total=kib["MemTotal"] * 1024, available=kib["MemAvailable"] * 1024)
    except (OSError, KeyError, ValueError):
        return None


# --- the library ------------------------------------------------------------------------------------------------------


def open_nvml() -> "Nvml":
    """Initialize NVML for use in a `with`. Raise DeviceError, with the cause and its remedy, if it is not available."""
    library = _library()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise _init_problem(error) from error
    try:
        return Nvml(library)
    except BaseException:
        library.nvmlShutdown()
        raise


def _library() -> Any:
    """Import NVIDIA's own pynvml. Raise DeviceError if it is missing or is another package of the same name."""
    try:
        import pynvml
    except (ImportError, SyntaxError) as error:
        raise DeviceError(
            "pynvml",
            f"cannot be imported ({printable(str(error))})",
            "run `pip install nvidia-ml-py`",
            reason="package",
        ) from error
    # Lookalikes export neither, very old releases lack the second.
    if not (hasattr(pynvml, "_nvmlGetFunctionPointer") and hasattr(pynvml, "nvmlMemory_v2")):
        where = printable(str(getattr(pynvml, "__file__", "unknown")), 400)
        raise DeviceError(
            "pynvml",
            f"not NVIDIA's package, or too old ({where})",
            "run `pip uninstall pynvml nvidia-ml-py3`, then `pip install --force-reinstall nvidia-ml-py`",
            reason="package",
        )
    return pynvml


def _init_problem(error: Any) -> DeviceError:
    if error.value in _INIT_FAULTS:
        reason, problem, remedy = _INIT_FAULTS[error.value]
        return DeviceError("NVIDIA driver", problem, remedy, reason=reason)
    return DeviceError("NVIDIA driver", f"NVML failed to start ({error})", "see what `nvidia-smi` says, or reboot")


def _text(value: str | bytes) -> str:
    """Decode a name from the driver; old releases of the package return bytes."""
    return printable(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _is_wsl() -> bool:
    try:
        return "microsoft" in (PROC / "sys/kernel/osrelease").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


class Nvml:
    """An open NVML: its versions and its devices. Closed by `close` or at the end of a `with`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._warned: dict[str, None] = {}
        self._is_open = True
        self.driver_version: str = self._asked("driver version", library.nvmlSystemGetDriverVersion, _text)
        self.cuda_version: str | None = self._cuda_version()
        if _is_wsl():
            self._warn(
                "WSL: the driver does not say what a process holds, and less is usable than it calls free; "
                "compare totals only"
            )

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down; a second call does nothing, and errors from the driver are ignored."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError:  # a lost GPU; nothing can be done
            return

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, one line each, in the order of occurrence."""
        return tuple(self._warned)

    def devices(self) -> tuple["Device", ...]:
        """Every device CUDA could use, in NVML's order (by PCI bus): GPUs, and the instances of those split by MIG.

        A GPU that does not respond is left out, with a warning.
        """
        return tuple(device for gpu in self._gpus() for device in self._parts(gpu))

    def device(self, which: int | str) -> "Device":
        """Return the device with an index, as `nvidia-smi` counts, or with a UUID (a GPU's may be abbreviated)."""
        return self._by_uuid(which) if isinstance(which, str) else self._gpu(which)

    def visible_device(self, ordinal: int) -> "Device":
        """Return the device that is CUDA's `ordinal` in this process, following CUDA_VISIBLE_DEVICES.

        If GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, CUDA may count them in another order: a warning.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = self.visible_devices(visible)
        if ordinal < len(devices):
            return devices[ordinal]
        if not self._count():
            raise self._no_gpu()
        if visible is not None and not devices:
            raise DeviceError(
                f"cuda:{ordinal}",
                f"CUDA_VISIBLE_DEVICES hides every GPU ({printable(visible)!r})",
                "unset it or name a GPU",
                reason="absent",
            )
        raise DeviceError(
            f"cuda:{ordinal}", f"there are {len(devices)} devices", "count from 0, `nvidia-smi -L` lists them"
        )

    def visible_devices(self, visible: str | None) -> "tuple[Device, ...]":
        """Return the devices that CUDA uses with this CUDA_VISIBLE_DEVICES, in its order; None: it is not set."""
        devices = self.devices() if visible is None else tuple(self._named(visible))
        self._check_order(visible)
        return devices

    # --- finding devices ---

    def _count(self) -> int:
        return self._asked("number of GPUs", self._library.nvmlDeviceGetCount, int)

    def _no_gpu(self) -> DeviceError:
        return DeviceError("GPU", "the NVIDIA driver finds none", "check `nvidia-smi -L`", reason="absent")

    def _gpus(self) -> Iterator["Device"]:
        for index in range(self._count()):
            try:
                yield self._gpu(index)
            except DeviceError as error:
                self._warn(f"{error} (left out)")

    def _gpu(self, index: int) -> "Device":
        count = self._count()
        if not count:
            raise self._no_gpu()
        if not 0 <= index < count:
            raise DeviceError(f"GPU {index}", f"there is no such GPU ({count} found)", "`nvidia-smi -L` lists them")
        label = f"GPU {index}"
        handle = _ask(self._library, label, lambda: self._library.nvmlDeviceGetHandleByIndex(index))
        return self._made(handle, index, label, is_mig=False)

    def _made(self, handle: Any, index: int, label: str, *, is_mig: bool) -> "Device":
        library = self._library
        return Device(
            index=index,
            uuid=_ask(library, label, lambda: _text(library.nvmlDeviceGetUUID(handle))),
            name=_ask(library, label, lambda: _text(library.nvmlDeviceGetName(handle))),
            is_mig=is_mig,
            _library=library,
            _handle=handle,
            _lists_processes=not _BROKEN_PROCESSES[0] <= _version(self.driver_version) < _BROKEN_PROCESSES[1],
        )

    def _parts(self, gpu: "Device") -> "tuple[Device, ...]":
        """The MIG instances of a GPU, or the GPU itself if there are none."""
        library = self._library
        try:
            if not library.nvmlDeviceGetMigMode(gpu._handle)[0]:
                return (gpu,)
            slots = range(library.nvmlDeviceGetMaxMigDeviceCount(gpu._handle))
        except library.NVMLError:  # a GPU or driver without MIG
            return (gpu,)
        return tuple(part for slot in slots if (part := self._part(gpu, slot)) is not None) or (gpu,)

    def _part(self, gpu: "Device", slot: int) -> "Device | None":
        try:
            handle = self._library.nvmlDeviceGetMigDeviceHandleByIndex(gpu._handle, slot)
        except self._library.NVMLError:  # an empty slot
            return None
        return self._made(handle, gpu.index, f"MIG device {slot} of GPU {gpu.index}", is_mig=True)

    def _by_uuid(self, uuid: str) -> "Device":
        if uuid.startswith("MIG-"):
            return self._mig_by_uuid(uuid)
        matches = [gpu for gpu in self._gpus() if uuid and gpu.uuid.startswith(uuid)]
        if len(matches) != 1:
            what = "several GPUs begin so" if matches else "there is no such GPU"
            raise DeviceError(f"GPU {printable(uuid)!r}", what, "`nvidia-smi -L` lists their UUIDs")
        return matches[0]

    def _mig_by_uuid(self, uuid: str) -> "Device":
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            parent = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return self._made(handle, library.nvmlDeviceGetIndex(parent), f"MIG device {uuid}", is_mig=True)
        except library.NVMLError as error:
            raise DeviceError(
                f"MIG device {printable(uuid)!r}", f"cannot be used ({error})", "`nvidia-smi -L` lists their UUIDs"
            ) from error

    def _named(self, visible: str) -> Iterator["Device"]:
        """The devices named in CUDA_VISIBLE_DEVICES; as in CUDA, an invalid entry ends the list."""
        for entry in visible.split(","):
            word = entry.strip()
            try:
                if word.isdecimal():
                    yield self._parts(self._gpu(int(word)))[0]  # for a split GPU, CUDA uses the first instance
                elif word.startswith(("GPU-", "MIG-")):
                    yield self._by_uuid(word)
                else:
                    return
            except DeviceError as error:
                self._warn(f"CUDA_VISIBLE_DEVICES: {error}")
                return

    def _check_order(self, visible: str | None) -> None:
        counted = visible is None or any(word.strip().isdecimal() for word in visible.split(","))
        if not counted or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return
        if len({gpu.name for gpu in self._gpus()}) > 1:
            self._warn(
                "GPUs: they differ, and CUDA counts the fastest first, NVML by bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )

    # --- asking ---

    def _cuda_version(self) -> str | None:
        try:
            number = self._library.nvmlSystemGetCudaDriverVersion()
        except self._library.NVMLError:
            return None
        return f"{number // 1000}.{number % 1000 // 10}"

    def _asked(self, what: str, ask: Callable[[], Any], read: Callable[[Any], T]) -> T:
        return read(_ask(self._library, f"NVIDIA driver: {what}", ask))

    def _warn(self, text: str) -> None:
        self._warned[text] = None


def _ask(library: Any, label: str, ask: Callable[[], T]) -> T:
    """Call NVML; turn its error into a DeviceError about `label`."""
    try:
        return ask()
    except library.NVMLError as error:
        raise _problem(label, error) from error


def _problem(label: str, error: Any) -> DeviceError:
    """Return a device error with its meaning and what to do."""
    if error.value in _LOST:
        return DeviceError(label, f"lost, the driver no longer reaches it ({error})", f"{_CURE_LOST}", reason="lost")
    if error.value == NO_PERMISSION:
        return DeviceError(
            label,
            f"permission denied; {_CURE_PERMISSION}",
            "where MIG splits the GPU, name an instance by its UUID",
            reason="permission",
        )
    return DeviceError(label, f"cannot be read ({error})", "see what `nvidia-smi` says")


# --- a device ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG instance of the GPU with that index. Every call queries the driver anew; DeviceError on
    failure.
    """

    index: int
    uuid: str
    name: str
    is_mig: bool
    _library: Any = field(repr=False, compare=False)
    _handle: Any = field(repr=False, compare=False)
    _lists_processes: bool = field(default=True, repr=False, compare=False)
    _warned: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Name in messages: "GPU 0"."""
        return f"GPU {self.index}" + (f" {self.uuid}" if self.is_mig else "")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the results so far, one line each, in the order of occurrence."""
        return tuple(self._warned)

    def memory(self) -> DeviceMemory:
        """Memory used and free now."""
        try:
            return self._own_memory()
        except self._library.NVMLError as error:
            if error.value != NOT_SUPPORTED:
                raise _problem(self.label, error) from error
        return self._shared_memory()

    def capability(self) -> str | None:
        """CUDA's compute capability, "9.0"."""
        return self._metric(
            "compute capability",
            lambda: ".".join(map(str, self._library.nvmlDeviceGetCudaComputeCapability(self._handle))),
        )

    def processes(self) -> tuple[ProcessMemory, ...]:
        """Memory of each process, by pid; empty if the driver lists none or does not report them (then with a
        warning).
        """
        if not self._lists_processes:
            self._warn("this driver misreports processes (535.43 to 535.85); update it to 535.104.05 or newer")
            return ()
        used_by_pid: dict[int, int | None] = {}
        for pid, used in (*self._running("Compute"), *self._running("Graphics")):
            used_by_pid[pid] = (
                max(used_by_pid.get(pid) or 0, used or 0) or None
            )  # a pid may be listed as both, with the same size
        if used_by_pid and not any(used_by_pid.values()):
            self._warn("the driver lists processes without what they hold (Windows, WSL, containers)")
        return tuple(ProcessMemory(pid, used) for pid, used in sorted(used_by_pid.items()))

    def sample(self, pid: int | None = None) -> DeviceSample:
        """Sample everything now; `pid` is the process to report separately, in the driver's PID namespace."""
        library = self._library
        memory = self.memory()
        process_used, others_used = _shares(self.processes(), pid)
        used = self._metric("utilization", lambda: library.nvmlDeviceGetUtilizationRates(self._handle))
        milliwatts = self._metric("power", lambda: library.nvmlDeviceGetPowerUsage(self._handle))
        return DeviceSample(
            memory=memory,
            process_used=process_used,
            process_is_estimated=False,
            others_used=others_used,
            gpu_utilization=None if used is None else used.gpu / 100,
            memory_utilization=None if used is None else used.memory / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            sm_clock_mhz=self._clock("SM clock", library.NVML_CLOCK_SM),
            memory_clock_mhz=self._clock("memory clock", library.NVML_CLOCK_MEM),
            temperature_c=self._metric(
                "temperature", lambda: library.nvmlDeviceGetTemperature(self._handle, library.NVML_TEMPERATURE_GPU)
            ),
        )

    # --- parts of it ---

    def _own_memory(self) -> DeviceMemory:
        library = self._library
        try:
            now = library.nvmlDeviceGetMemoryInfo(self._handle, version=library.nvmlMemory_v2)
        except library.NVMLError as error:
            if error.value not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH):
                raise
        else:
            return DeviceMemory(total=now.total, reserved=now.reserved, used=now.used, free=now.free)
        now = library.nvmlDeviceGetMemoryInfo(self._handle)
        self._warn("an old driver (before 510.39) counts its own memory as used; update it")
        return DeviceMemory(total=now.total, reserved=None, used=now.used, free=now.free)

    def _shared_memory(self) -> DeviceMemory:
        host = host_memory()
        if host is None:
            raise DeviceError(self.label, "does not report its memory, and there is no /proc/meminfo", "run on Linux")
        self._warn("has no memory of its own; totals are the machine's (/proc/meminfo)")
        return DeviceMemory(host.total, None, host.total - host.available, host.available, is_host=True)

    def _running(self, kind: str) -> Sequence[tuple[int, int | None]]:
        """(pid, bytes or None) of the processes of a kind; version 2 of the call on drivers before 510.39."""
        try:
            return self._running_by(kind, "_v3")
        except self._library.NVMLError as error:
            if error.value in _LOST:
                raise _problem(self.label, error) from error
            self._warn(f"processes are not shown ({_hidden(error)}); totals are kept")
        return ()

    def _running_by(self, kind: str, version: str) -> Sequence[tuple[int, int | None]]:
        library = self._library
        try:
            running = getattr(library, f"nvmlDeviceGet{kind}RunningProcesses{version}")(self._handle)
        except library.NVMLError as error:
            if error.value == FUNCTION_NOT_FOUND and version == "_v3":
                return self._running_by(kind, "_v2")
            if error.value == NOT_SUPPORTED and kind == "Graphics":  # boards without a display, MIG
                return ()
            raise
        return [(process.pid, process.usedGpuMemory) for process in running]

    def _clock(self, what: str, kind: int) -> int | None:
        return self._metric(what, lambda: int(self._library.nvmlDeviceGetClockInfo(self._handle, kind)))

    def _metric(self, what: str, ask: Callable[[], T]) -> T | None:
        """Query an optional figure."""
        try:
            return ask()
        except self._library.NVMLError as error:
            if error.value in _LOST:
                raise _problem(self.label, error) from error
            if error.value not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION):
                self._warn(f"{what} cannot be read ({error})")
            return None

    def _warn(self, text: str) -> None:
        self._warned[sentence(self.label, text)] = None


def _hidden(error: Any) -> str:
    return "permission denied" if error.value == NO_PERMISSION else str(error)


def _shares(processes: Sequence[ProcessMemory], pid: int | None) -> tuple[int | None, int | None]:
    """(bytes of `pid`, bytes of all others); None for what the list does not report."""
    others = [process.used for process in processes if process.pid != pid]
    if pid is None:
        return None, _sum(others) if others else None
    mine = next((process.used for process in processes if process.pid == pid), None)
    # If our process is not in the list, it may be there under the pid of another namespace.
    return mine, _sum(others) if mine is not None else None


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
