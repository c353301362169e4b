"""What the one door to NVML answers, under NVIDIA's own Python package and a fake driver."""

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.hardware import nvml
from kvplan.hardware.nvml import Device, DeviceError, DeviceMemory, DeviceSample, ProcessMemory, open_nvml
from tests.support.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    SIZE_UNKNOWN,
    UNKNOWN,
    FakeDriver,
    FakeGpu,
    Install,
    install,
    no_driver,
)

__all__ = ["install", "no_driver"]  # fixtures

OWN, OTHER = 4711, 815


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of our own."""
    monkeypatch.setattr(nvml, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:       16384 kB\nMemFree:  10 kB\nMemAvailable:    4096 kB\n")
    return tmp_path


def first_sample(pid: int | None = OWN) -> tuple[DeviceSample, tuple[str, ...]]:
    with open_nvml() as library:
        device = library.device(0)
        return device.sample(pid), device.warnings


def problem(ask: Callable[[], Any]) -> tuple[str, str]:
    """(reason, line) of the DeviceError that `ask` raises."""
    with pytest.raises(DeviceError) as caught:
        ask()
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    return caught.value.reason, str(caught.value)


def of_first(ask: Callable[[Device], Any]) -> Callable[[], Any]:
    def opened() -> Any:
        with open_nvml() as library:
            return ask(library.device(0))

    return opened


# --- a machine where all is well --------------------------------------------------------------------------------------


def test_versions_are_the_drivers(install: Install) -> None:
    install(FakeGpu(), driver=b"570.124.06", cuda=12080)
    with open_nvml() as library:
        assert (library.driver_version, library.cuda_version, library.warnings) == ("570.124.06", "12.8", ())


def test_a_sample_has_every_figure_in_its_unit(install: Install) -> None:
    install(FakeGpu(used=10 * GIB, compute=[(OWN, 7 * GIB), (OTHER, 2 * GIB)], graphics=[(99, GIB // 2)]))
    sample, warnings = first_sample()
    assert sample == DeviceSample(
        memory=DeviceMemory(total=80 * GIB, reserved=600 * MIB, used=10 * GIB, free=70 * GIB - 600 * MIB),
        process_used=7 * GIB,
        process_is_estimated=False,
        others_used=2 * GIB + GIB // 2,
        gpu_utilization=0.37,
        memory_utilization=0.21,
        power_w=312.5,
        sm_clock_mhz=1410,
        memory_clock_mhz=1593,
        temperature_c=56,
    )
    assert warnings == ()


def test_a_process_listed_for_compute_and_graphics_counts_once(install: Install) -> None:
    install(FakeGpu(compute=[(OWN, GIB)], graphics=[(OWN, GIB)]))
    assert of_first(Device.processes)() == (ProcessMemory(OWN, GIB),)


def test_without_a_pid_all_processes_are_others(install: Install) -> None:
    install(FakeGpu(compute=[(OWN, GIB), (OTHER, 2 * GIB)]))
    sample, _ = first_sample(None)
    assert (sample.process_used, sample.others_used) == (None, 3 * GIB)


def test_what_is_opened_is_closed_once(install: Install) -> None:
    driver = install(FakeGpu())
    library = open_nvml()
    assert driver.open_count == 1
    library.close()
    library.close()
    assert driver.open_count == 0


def test_a_driver_that_fails_after_its_start_is_closed_too(install: Install) -> None:
    install(FakeGpu(), errors={"nvmlSystemGetDriverVersion": UNKNOWN})
    assert problem(open_nvml) == (
        "other",
        "NVIDIA driver: driver version cannot be read (Unknown Error); see what `nvidia-smi` says",
    )


@pytest.mark.parametrize("raw", [b"NVIDIA H100", "NVIDIA H100"])
def test_names_may_come_as_bytes(install: Install, monkeypatch: pytest.MonkeyPatch, raw: str | bytes) -> None:
    import pynvml

    install(FakeGpu())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: raw)  # as releases before 11.515 did
    assert of_first(lambda device: device.name)() == "NVIDIA H100"


# --- 31-33: no NVML ---------------------------------------------------------------------------------------------------


def test_31_no_driver(no_driver: None) -> None:
    reason, line = problem(open_nvml)
    assert reason == "absent"
    assert line.startswith("NVIDIA driver: not found (no libnvidia-ml.so.1); install it")


@pytest.mark.parametrize(
    ("code", "reason", "cure"),
    [
        (LIB_RM_VERSION_MISMATCH, "mismatch", "reload the kernel module or reboot"),
        (DRIVER_NOT_LOADED, "not_loaded", "run `sudo modprobe nvidia` or reboot"),
        (NO_PERMISSION, "permission", "give this user access to /dev/nvidia*"),
        (OPERATING_SYSTEM, "permission", "give this user access to /dev/nvidia*"),
        (GPU_IS_LOST, "lost", "reset the GPU"),
        (UNKNOWN, "other", "NVML failed to start (Unknown Error)"),
        (4242, "other", "NVML failed to start (error of a driver newer than the package)"),
    ],
    ids=["mismatch", "not loaded", "permission", "cgroup", "lost", "unknown", "newer"],
)
def test_32_a_driver_that_does_not_start_has_its_own_cure(install: Install, code: int, reason: str, cure: str) -> None:
    install(FakeGpu(), errors={"nvmlInitWithFlags": code})
    message, line = problem(open_nvml)
    assert message == reason
    assert cure in line


def test_33_a_driver_too_old_to_start(install: Install) -> None:
    install(FakeGpu(), missing=frozenset({"nvmlInitWithFlags"}))
    assert problem(open_nvml) == ("other", "NVIDIA driver: too old, it lacks what NVML starts with; update the driver")


def test_33_another_package_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lookalike = types.ModuleType("pynvml")
    lookalike.__file__ = "/opt/lookalike/pynvml/__init__.py"
    monkeypatch.setitem(sys.modules, "pynvml", lookalike)
    reason, line = problem(open_nvml)
    assert reason == "package"
    assert "not NVIDIA's package, or too old (/opt/lookalike/pynvml/__init__.py)" in line
    assert "pip install --force-reinstall nvidia-ml-py" in line


def test_33_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import then raises ImportError
    reason, line = problem(open_nvml)
    assert reason == "package"
    assert line.endswith("run `pip install nvidia-ml-py`")


def test_33_an_old_driver_counts_its_reserve_as_used(install: Install) -> None:
    old = {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"}
    install(FakeGpu(compute=[(OWN, 7 * GIB)]), driver=b"470.57.02", missing=frozenset(old))
    sample, warnings = first_sample()
    assert sample.memory == DeviceMemory(
        total=80 * GIB, reserved=None, used=10 * GIB + 600 * MIB, free=70 * GIB - 600 * MIB
    )
    assert sample.process_used == 7 * GIB
    assert warnings == ("GPU 0: an old driver (before 510.39) counts its own memory as used; update it",)


def test_33_figures_a_driver_lacks_are_none(install: Install) -> None:
    lacking = {
        "nvmlSystemGetCudaDriverVersion",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v2",
    }
    install(FakeGpu(), missing=frozenset(lacking))
    with open_nvml() as library:
        assert library.cuda_version is None
        (device,) = library.devices()
        sample = device.sample()
    assert (sample.gpu_utilization, sample.memory_utilization, sample.temperature_c) == (None, None, None)
    assert sample.power_w == 312.5


@pytest.mark.parametrize(
    ("driver", "is_wrong"),
    [(b"535.42.01", False), (b"535.43.02", True), (b"535.54.03", True), (b"535.86.05", False), (b"580.65", False)],
)
def test_drivers_known_to_misreport_processes_are_not_believed(install: Install, driver: bytes, is_wrong: bool) -> None:
    install(FakeGpu(compute=[(OWN, 7 * GIB)]), driver=driver)
    sample, warnings = first_sample()
    assert sample.process_used == (None if is_wrong else 7 * GIB)
    assert bool(warnings) == is_wrong


# --- 34-36: what is hidden --------------------------------------------------------------------------------------------


def test_34_without_permission_for_processes_the_totals_are_kept(install: Install) -> None:
    errors = {
        f"nvmlDeviceGet{kind}RunningProcesses_{version}": NO_PERMISSION
        for kind in ("Compute", "Graphics")
        for version in ("v2", "v3")
    }
    install(FakeGpu(compute=[(OWN, 7 * GIB)], errors=errors))
    with open_nvml() as library:
        device = library.device(0)
        first, second = device.sample(OWN), device.sample(OWN)
        assert device.warnings == ("GPU 0: processes are not shown (permission denied); totals are kept",)
    assert first == second
    assert (first.memory.used, first.process_used, first.others_used) == (10 * GIB, None, None)


def test_34_the_instances_of_a_split_gpu_are_its_devices(install: Install) -> None:
    parts = [FakeGpu(uuid=f"MIG-{i}", name="MIG 3g.40gb", total=40 * GIB, is_mig=True) for i in range(2)]
    denied = {"nvmlDeviceGetMemoryInfo_v2": NO_PERMISSION, "nvmlDeviceGetMemoryInfo": NO_PERMISSION}
    install(FakeGpu(mig=parts, errors=denied), FakeGpu(uuid="GPU-b"))
    with open_nvml() as library:
        assert [(device.index, device.uuid, device.is_mig) for device in library.devices()] == [
            (0, "MIG-0", True),
            (0, "MIG-1", True),
            (1, "GPU-b", False),
        ]
        assert library.device("MIG-1").memory().total == 40 * GIB
        assert library.visible_device(0).uuid == "MIG-0"
        assert not library.device(0).is_mig
        reason, line = problem(library.device(0).memory)
    assert reason == "permission"
    assert line.endswith("where MIG splits the GPU, name an instance by its UUID")


@pytest.mark.parametrize("metric", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"])
@pytest.mark.parametrize(("code", "num_warnings"), [(NOT_SUPPORTED, 0), (NO_PERMISSION, 0), (UNKNOWN, 1)])
def test_34_a_figure_that_is_not_given_is_none(install: Install, metric: str, code: int, num_warnings: int) -> None:
    install(FakeGpu(errors={metric: code}))
    sample, warnings = first_sample()
    assert (sample.gpu_utilization, sample.power_w) == ((None, 312.5) if "Util" in metric else (0.37, None))
    assert len(warnings) == num_warnings


@pytest.mark.parametrize(
    ("listed", "mine", "others"),
    [
        ([], None, None),  # a container that shows none
        ([(31_337, 7 * GIB)], None, None),  # ours under the host's pid
        ([(OWN, 0)], None, None),
        ([(OWN, SIZE_UNKNOWN)], None, None),
        ([(OWN, 7 * GIB), (OTHER, SIZE_UNKNOWN)], 7 * GIB, None),
        ([(OWN, 7 * GIB)], 7 * GIB, 0),
    ],
    ids=["empty", "host pid", "zero", "not available", "other unknown", "alone"],
)
def test_35_a_process_that_is_not_listed_with_a_size_is_unknown_never_zero(
    install: Install, listed: list[tuple[int, int]], mine: int | None, others: int | None
) -> None:
    install(FakeGpu(compute=listed))
    sample, _ = first_sample()
    assert (sample.process_used, sample.others_used) == (mine, others)
    assert not sample.process_is_estimated
    assert replace(sample, process_used=GIB, process_is_estimated=True).process_used == GIB


def test_36_a_driver_that_lists_processes_without_sizes_is_told_once(install: Install) -> None:
    install(FakeGpu(compute=[(OWN, SIZE_UNKNOWN), (OTHER, SIZE_UNKNOWN)]))
    _, warnings = first_sample()
    (line,) = warnings
    assert "the driver lists processes without what they hold" in line


def test_36_wsl_is_told(install: Install, proc: Path) -> None:
    (proc / "sys/kernel").mkdir(parents=True)
    (proc / "sys/kernel/osrelease").write_text("5.15.167.4-microsoft-standard-WSL2\n")
    install(FakeGpu())
    with open_nvml() as library:
        (line,) = library.warnings
    assert line.startswith("WSL: ")


# --- 37: memory shared with the host ----------------------------------------------------------------------------------


def test_37_unified_memory_is_the_machines(install: Install, proc: Path) -> None:
    install(FakeGpu(name="NVIDIA GB10", errors={"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}))
    sample, warnings = first_sample()
    assert sample.memory == DeviceMemory(total=16 * MIB, reserved=None, used=12 * MIB, free=4 * MIB, is_host=True)
    assert warnings == ("GPU 0 has no memory of its own; totals are the machine's (/proc/meminfo)",)


def test_37_unified_memory_without_meminfo_is_refused(install: Install, proc: Path) -> None:
    (proc / "meminfo").unlink()
    install(FakeGpu(errors={"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}))
    reason, line = problem(of_first(Device.memory))
    assert reason == "other"
    assert "does not report its memory" in line


@pytest.mark.parametrize("text", ["", "MemTotal: much kB\n", "MemTotal: 5 kB\n", "MemTotal\n"])
def test_a_meminfo_that_cannot_be_read_is_no_crash(proc: Path, text: str) -> None:
    (proc / "meminfo").write_text(text)
    assert nvml.host_memory() is None


# --- 38, 39: others, and a lost GPU -----------------------------------------------------------------------------------


def test_38_what_other_processes_hold_is_seen_as_it_changes(install: Install) -> None:
    gpu = FakeGpu(compute=[(OWN, 7 * GIB), (OTHER, 2 * GIB)])
    install(gpu)
    with open_nvml() as library:
        device = library.device(0)
        before = device.sample(OWN)
        gpu.compute[1] = (OTHER, 5 * GIB)
        assert (before.others_used, device.sample(OWN).others_used) == (2 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetName",
    ],
)
def test_39_a_lost_gpu_is_an_error_wherever_it_shows(install: Install, call: str) -> None:
    install(FakeGpu(errors={call: GPU_IS_LOST}))
    reason, line = problem(of_first(Device.sample))
    assert reason == "lost"
    assert line.startswith("GPU 0: lost, the driver no longer reaches it (GPU is lost); ")


def test_39_the_other_gpus_are_still_listed(install: Install) -> None:
    lost = {"nvmlDeviceGetHandleByIndex_v2": GPU_IS_LOST}
    install(FakeGpu(errors=lost), FakeGpu(uuid="GPU-b"))
    with open_nvml() as library:
        assert [device.uuid for device in library.devices()] == ["GPU-b"]
        (line,) = library.warnings
    assert line.startswith("GPU 0: lost")


def test_a_failing_goodbye_is_no_error(install: Install) -> None:
    driver = install(FakeGpu(), errors={"nvmlShutdown": GPU_IS_LOST})
    open_nvml().close()
    driver.open_count = 0  # nothing could close it


# --- finding a device -------------------------------------------------------------------------------------------------

TWO = [FakeGpu(uuid="GPU-aaaa1111"), FakeGpu(uuid="GPU-aabb2222")]


def test_a_device_is_found_by_index_and_by_the_beginning_of_its_uuid(install: Install) -> None:
    install(*TWO)
    with open_nvml() as library:
        assert library.device(1).uuid == library.device("GPU-aab").uuid == "GPU-aabb2222"
        assert library.device(1) == library.device("GPU-aabb2222")


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        (2, "GPU 2: there is no such GPU (2 found)"),
        (-1, "GPU -1: there is no such GPU (2 found)"),
        ("GPU-aa", "GPU 'GPU-aa': several GPUs begin so"),
        ("GPU-c", "GPU 'GPU-c': there is no such GPU"),
        ("", "GPU '': there is no such GPU"),
        ("MIG-c", "MIG device 'MIG-c' cannot be used (Not Found)"),
    ],
)
def test_a_device_that_is_not_there_is_refused(install: Install, which: int | str, fault: str) -> None:
    install(*TWO)
    with open_nvml() as library:
        reason, line = problem(lambda: library.device(which))
    assert reason == "other"
    assert line.startswith(fault)


def test_a_driver_without_gpus_is_as_none(install: Install) -> None:
    install()
    with open_nvml() as library:
        assert library.devices() == ()
        for ask in (lambda: library.device(0), lambda: library.visible_device(0)):
            assert problem(ask) == ("absent", "GPU: the NVIDIA driver finds none; check `nvidia-smi -L`")


@pytest.mark.parametrize(
    ("visible_devices", "seen"),
    [
        (None, ["GPU-aaaa1111", "GPU-aabb2222"]),
        ("1,0", ["GPU-aabb2222", "GPU-aaaa1111"]),
        ("1", ["GPU-aabb2222"]),
        (" 1 , GPU-aaaa", ["GPU-aabb2222", "GPU-aaaa1111"]),
        ("1,-1,0", ["GPU-aabb2222"]),  # CUDA stops at the first entry that names nothing
        ("0,7,1", ["GPU-aaaa1111"]),
        ("", []),
        ("-1", []),
        ("none", []),
    ],
)
def test_a_cuda_ordinal_is_a_place_in_cuda_visible_devices(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible_devices: str | None, seen: list[str]
) -> None:
    install(*TWO)
    if visible_devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    with open_nvml() as library:
        assert [library.visible_device(i).uuid for i in range(len(seen))] == seen
        reason, _ = problem(lambda: library.visible_device(len(seen)))
    assert reason == ("other" if seen else "absent")


@pytest.mark.parametrize(
    ("order", "visible_devices", "num_warnings"),
    [(None, None, 1), (None, "0", 1), ("PCI_BUS_ID", None, 0), (None, "GPU-a", 0)],
)
def test_an_order_that_cuda_may_not_share_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, order: str | None, visible_devices: str | None, num_warnings: int
) -> None:
    install(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", name="NVIDIA L4"))
    for name, value in (("CUDA_DEVICE_ORDER", order), ("CUDA_VISIBLE_DEVICES", visible_devices)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with open_nvml() as library:
        library.visible_device(0)
        assert len(library.warnings) == num_warnings


def test_only_the_door_imports_pynvml() -> None:
    root = Path(nvml.__file__).parent
    users = [path.name for path in root.rglob("*.py") if "import pynvml" in path.read_text(encoding="utf-8")]
    assert users == ["nvml.py"]


def test_the_fake_drivers_memory_adds_up() -> None:
    (gpu,) = FakeDriver([FakeGpu()]).gpus
    assert gpu.reserved + gpu.used + gpu.free == gpu.total
