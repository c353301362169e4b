"""`kvplan doctor`: report on the machine as kvplan sees it."""

import json
from collections.abc import Iterator

from kvplan.cli import output
from kvplan.cli.run_options import DoctorOptions
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.documents.doctor import document
from kvplan.measure.doctor import Advice, Checkup, Disk, Driver, Gpu, Host, Package, Torch, checkup
from kvplan.report.lines import Line, line, write

WIDTH = 22


def doctor(options: DoctorOptions) -> int:
    """Print the checkup; a missing GPU or package is not an error, so return 0."""
    report = checkup()
    if options.format == "json":
        output.write(json.dumps(document(report), indent=2, allow_nan=False))
    else:
        with output.standard_output():
            write(doctor_lines(report), output.console(options.color))
    return 0


def doctor_lines(report: Checkup) -> list[Line]:
    sections = (machine(report), gpus(report), packages(report), files(report), settings(report), advice(report))
    return [styled for number, section in enumerate(sections) for styled in ([line()] if number else []) + section]


def section(title: str, rows: Iterator[tuple[str, str]]) -> list[Line]:
    return [
        line(title, "bold"),
        *((("  " + f"{name:<{WIDTH}}", ""), (printable(text, 2000), "")) for name, text in rows),
    ]


def machine(report: Checkup) -> list[Line]:
    def rows() -> Iterator[tuple[str, str]]:
        yield "kvplan", f"{report.kvplan or 'not installed'} ({report.kvplan_path})"
        yield "Python", f"{report.python} ({report.python_path})"
        yield "platform", report.platform
        yield "CPU", cores_text(report.host)
        yield "memory", memory_text(report.host)
        for disk in report.disks:
            yield f"disk, {disk.use}", disk_text(disk)

    return section("machine", rows())


def cores_text(host: Host) -> str:
    if host.num_cores == host.num_usable_cores:
        return f"{host.num_cores} cores"
    return f"{host.num_cores} cores, {host.num_usable_cores} of them usable"


def memory_text(host: Host) -> str:
    if host.memory_total is None or host.memory_available is None:
        return "unknown (no /proc/meminfo)"
    text = f"{format_gib(host.memory_total)}, {format_gib(host.memory_available)} available"
    return (
        text if host.memory_limit is None else f"{text}; this container is limited to {format_gib(host.memory_limit)}"
    )


def disk_text(disk: Disk) -> str:
    if disk.total is None or disk.free is None:
        return f"unknown ({disk.path})"
    return f"{format_gib(disk.free)} of {format_gib(disk.total)} free ({disk.path})"


def gpus(report: Checkup) -> list[Line]:
    def rows() -> Iterator[tuple[str, str]]:
        yield "NVML", nvml_text(report.nvml)
        for gpu in report.nvml.gpus:
            yield f"GPU {gpu.index}" + (" (MIG)" if gpu.is_mig else ""), gpu_text(gpu)
        for warning in report.nvml.warnings:
            yield "warning", warning
        yield "torch", torch_text(report.torch)

    return section("GPU", rows())


def nvml_text(driver: Driver) -> str:
    if driver.problem is not None:
        return driver.problem
    cuda = "" if driver.cuda_version is None else f", CUDA up to {driver.cuda_version}"
    return f"ok, driver {driver.driver_version}{cuda}" + ("" if driver.gpus else "; no GPU")


def gpu_text(gpu: Gpu) -> str:
    if gpu.memory is None:
        return f"{gpu.name}, {gpu.uuid}: {gpu.problem}"
    memory = gpu.memory
    reserved = "" if memory.reserved is None else f", {format_gib(memory.reserved)} kept by the driver"
    whose = " of the machine's memory" if memory.is_host else ""
    return f"{gpu.name}, {format_gib(memory.free)} of {format_gib(memory.total)} free{whose}{reserved}, {gpu.uuid}"


def torch_text(torch: Torch | None) -> str:
    if torch is None:
        return "not installed"
    if torch.cuda_build is None:
        return f"{torch.version}, built without CUDA: runs on the CPU"
    built = f"{torch.version}, built for CUDA {torch.cuda_build}"
    if torch.problem is not None:
        return f"{built}: {torch.problem}"
    return f"{built}: {f'finds {torch.num_gpus}' if torch.cuda_available else 'finds no GPU'}"


def packages(report: Checkup) -> list[Line]:
    return section("packages", ((package.name, package_text(package)) for package in report.packages))


def package_text(package: Package) -> str:
    if package.version is not None:
        return package.version + (f" (outside {package.bounds})" if package.fits is False else "")
    return "missing" if package.extra is None else f"missing (extra: {package.extra})"


def files(report: Checkup) -> list[Line]:
    return section(
        "facts",
        ((file.name, f"{file.problem or f'{file.num_entries:,} entries'} ({file.path})") for file in report.facts),
    )


def settings(report: Checkup) -> list[Line]:
    def rows() -> Iterator[tuple[str, str]]:
        for setting in report.settings:
            yield setting.name, f"{setting.value or '(empty)'}  [{setting.origin}] {setting.meaning}"

    return section("settings", rows())


def advice(report: Checkup) -> list[Line]:
    if not report.advice:
        return [line(nothing_missing(report), "green")]
    return section("to do", ((step.missing, advice_text(step)) for step in report.advice))


def advice_text(advice: Advice) -> str:
    problem = "missing for" if advice.problem is None else f"{advice.problem}; needed for"
    return f"{problem} {advice.needed_for}: {advice.cure}"


def nothing_missing(report: Checkup) -> str:
    """Say that nothing is missing, and for which tasks: a machine without a GPU is complete except for GPU work."""
    idle = [package.name for package in report.packages if package.version is None]
    but = f" but {', '.join(idle)}, for kvplan's own tests" if idle else ""
    if report.nvml.gpus:
        return f"nothing is missing{but}"
    lacks = "the driver finds no GPU" if report.nvml.status == "ok" else "a GPU would need its driver"
    return f"nothing is missing for the CPU{but}; {lacks} (see NVML above)"
