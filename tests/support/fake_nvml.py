"""A fake NVIDIA driver under the real `pynvml`: NVIDIA's Python code loads it in place of libnvidia-ml.so.1.

Only what lies below Python is replaced: each function takes ctypes arguments, fills the caller's structures and returns
an nvmlReturn_t, as nvml.h says. So the package's own loading, error classes and structures are run by every test.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
OPERATING_SYSTEM = 17
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999
SIZE_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE

GIB = 1 << 30
MIB = 1 << 20


@dataclass
class FakeGpu:
    """One device as the driver sees it; `errors` maps a function's name to the code it answers with."""

    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA A100-SXM4-80GB"
    total: int = 80 * GIB
    reserved: int = 600 * MIB
    used: int = 10 * GIB
    compute: list[tuple[int, int]] = field(default_factory=list)  # (pid, bytes)
    graphics: list[tuple[int, int]] = field(default_factory=list)
    mig: list["FakeGpu"] = field(default_factory=list)
    is_mig: bool = False
    gpu_percent: int = 37
    memory_percent: int = 21
    milliwatts: int = 312_500
    clocks: dict[int, int] = field(default_factory=lambda: {1: 1410, 2: 1593})  # NVML_CLOCK_SM, NVML_CLOCK_MEM
    celsius: int = 56
    capability: tuple[int, int] = (8, 0)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.used


class _Function:
    """A foreign function: callable, and takes attributes such as restype as those of ctypes do."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.restype: Any = ctypes.c_int

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


@dataclass
class FakeDriver:
    """The shared library. `missing` are functions an old driver lacks; `errors` codes of calls that name no device."""

    gpus: list[FakeGpu] = field(default_factory=list)
    driver: bytes = b"580.95.05"
    cuda: int = 13000
    missing: frozenset[str] = frozenset()
    errors: dict[str, int] = field(default_factory=dict)
    open_count: int = 0

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("__") or name in self.missing:
            raise AttributeError(name)
        call = getattr(type(self), f"_{name}", None)
        if call is None:
            raise AttributeError(name)

        def answer(*args: Any) -> Any:
            if name in self.errors:
                return self.errors[name]
            if args and (gpu := self._gpu_of(args[0])) is not None:
                return gpu.errors[name] if name in gpu.errors else call(self, gpu, *args[1:])
            return call(self, *args)

        return _Function(answer)

    # --- handles: 1 + place in the list of all devices, as a pointer ---

    @property
    def _all(self) -> list[FakeGpu]:
        return [device for gpu in self.gpus for device in (gpu, *gpu.mig)]

    def _gpu_of(self, argument: Any) -> FakeGpu | None:
        if not isinstance(argument, ctypes._Pointer):
            return None
        return self._all[(ctypes.cast(argument, ctypes.c_void_p).value or 0) - 1]

    def _give_handle(self, gpu: FakeGpu, reference: Any) -> int:
        address = next(i for i, device in enumerate(self._all, 1) if device is gpu)
        _put(reference, ctypes.c_void_p(address))
        return SUCCESS

    # --- the library ---

    def _nvmlInitWithFlags(self, flags: int) -> int:
        self.open_count += 1
        return SUCCESS

    def _nvmlShutdown(self) -> int:
        self.open_count -= 1
        return SUCCESS

    def _nvmlErrorString(self, code: int) -> bytes:
        return b"error of a driver newer than the package"

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = self.driver
        return SUCCESS

    def _nvmlSystemGetCudaDriverVersion(self, number: Any) -> int:
        number._obj.value = self.cuda
        return SUCCESS

    # --- devices ---

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return SUCCESS

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value >= len(self.gpus):
            return INVALID_ARGUMENT
        gpu = self.gpus[index.value]
        return gpu.errors.get("nvmlDeviceGetHandleByIndex_v2", SUCCESS) or self._give_handle(gpu, handle)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        gpus = [gpu for gpu in self._all if gpu.uuid.encode() == uuid.value]
        return self._give_handle(gpus[0], handle) if gpus else NOT_FOUND

    def _nvmlDeviceGetIndex(self, gpu: FakeGpu, index: Any) -> int:
        index._obj.value = self.gpus.index(gpu)
        return SUCCESS

    def _nvmlDeviceGetUUID(self, gpu: FakeGpu, text: Any, size: Any) -> int:
        text.value = gpu.uuid.encode()
        return SUCCESS

    def _nvmlDeviceGetName(self, gpu: FakeGpu, text: Any, size: Any) -> int:
        text.value = gpu.name.encode()
        return SUCCESS

    def _nvmlDeviceGetMigMode(self, gpu: FakeGpu, current: Any, pending: Any) -> int:
        if gpu.is_mig:
            return NOT_SUPPORTED
        current._obj.value = pending._obj.value = bool(gpu.mig)
        return SUCCESS

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu, count: Any) -> int:
        count._obj.value = 7
        return SUCCESS

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: Any, handle: Any) -> int:
        return self._give_handle(gpu.mig[index.value], handle) if index.value < len(gpu.mig) else NOT_FOUND

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: FakeGpu, handle: Any) -> int:
        return self._give_handle(next(gpu for gpu in self.gpus if part in gpu.mig), handle)

    # --- what they hold and do ---

    def _nvmlDeviceGetMemoryInfo_v2(self, gpu: FakeGpu, memory: Any) -> int:
        now = memory._obj
        now.total, now.reserved, now.used, now.free = gpu.total, gpu.reserved, gpu.used, gpu.free
        return SUCCESS

    def _nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, memory: Any) -> int:
        now = memory._obj
        now.total, now.used, now.free = gpu.total, gpu.used + gpu.reserved, gpu.free
        return SUCCESS

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: FakeGpu, count: Any, processes: Any) -> int:
        return _give_processes(gpu.compute, count, processes)

    def _nvmlDeviceGetComputeRunningProcesses_v2(self, gpu: FakeGpu, count: Any, processes: Any) -> int:
        return _give_processes(gpu.compute, count, processes)

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: FakeGpu, count: Any, processes: Any) -> int:
        return _give_processes(gpu.graphics, count, processes)

    def _nvmlDeviceGetGraphicsRunningProcesses_v2(self, gpu: FakeGpu, count: Any, processes: Any) -> int:
        return _give_processes(gpu.graphics, count, processes)

    def _nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = gpu.capability
        return SUCCESS

    def _nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = gpu.gpu_percent, gpu.memory_percent
        return SUCCESS

    def _nvmlDeviceGetPowerUsage(self, gpu: FakeGpu, milliwatts: Any) -> int:
        milliwatts._obj.value = gpu.milliwatts
        return SUCCESS

    def _nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: Any, mhz: Any) -> int:
        mhz._obj.value = gpu.clocks[kind.value]
        return SUCCESS

    def _nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: Any, celsius: Any) -> int:
        celsius._obj.value = gpu.celsius
        return SUCCESS


def _put(reference: Any, value: Any) -> None:
    ctypes.memmove(ctypes.addressof(reference._obj), ctypes.addressof(value), ctypes.sizeof(value))


def _give_processes(listed: list[tuple[int, int]], count: Any, processes: Any) -> int:
    """As nvml.h says: too small an array is refused with the number there is."""
    room, count._obj.value = count._obj.value, len(listed)
    if room < len(listed):
        return INSUFFICIENT_SIZE
    for place, (pid, used) in enumerate(listed):
        processes[place].pid, processes[place].usedGpuMemory = pid, used
    return SUCCESS


# --- installing it ----------------------------------------------------------------------------------------------------

Install = Callable[..., FakeDriver]


def no_library(name: str) -> Any:
    """What the dynamic linker says on a machine without a driver."""
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def load_instead(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]) -> None:
    """Make `pynvml` load `load(name)` when it next looks for the library."""
    import pynvml

    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(FakeGpu(...), ..., driver=...)`: a driver with these GPUs; it must be closed at the test's end."""
    installed: list[FakeDriver] = []

    def put_in(*gpus: FakeGpu, **options: Any) -> FakeDriver:
        driver = FakeDriver(list(gpus), **options)
        load_instead(monkeypatch, lambda name: driver)
        installed.append(driver)
        return driver

    yield put_in
    assert [driver.open_count for driver in installed if driver.open_count] == []


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVIDIA's library, whatever this machine has."""
    load_instead(monkeypatch, no_library)
