"""What is installed, found and missing on this machine, for `kvplan doctor`; no check raises.

Nothing heavy is imported: versions come from package metadata. Only a torch built for CUDA is run to see if it finds a
GPU, in a subprocess, because a broken driver may hang or kill the caller.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvplan.core import entries
from kvplan.core.errors import KvplanError, sentence
from kvplan.core.files import printable
from kvplan.hardware.gpu import gpu_names
from kvplan.hardware.nvml import DeviceError, DeviceMemory, Nvml, Reason, host_memory, open_nvml
from kvplan.measure.machine import container_limit
from kvplan.models import catalog

_REQUIRED_FOR = "kvplan itself"
# Extra -> the distributions that it installs, and what for.
EXTRAS: Mapping[str, tuple[str, str]] = {
    "engine": ("torch triton safetensors tokenizers psutil", "kvplan profile, kvplan watch --pid"),
    "report": ("pandas matplotlib jinja2 markdown-it-py", "kvplan report"),
    "metrics": ("prometheus_client", "kvplan watch --metrics"),
    "client": ("httpx2", "kvplan profile --server"),
    "serve": ("starlette uvicorn", "kvplan serve"),
    "kv-events": ("pyzmq msgspec", "kvplan serve --kv-events-config"),
    "structured": ("llguidance", "structured output of kvplan serve's engine"),
    "parquet": ("pyarrow", "kvplan simulate --requests FILE.parquet"),
    "trace": ("perfetto", "kvplan simulate and profile --trace-events FILE.pftrace"),
    "hub": ("huggingface_hub", "models from the Hugging Face Hub"),
    "ray": ("ray", "kvplan sweep, tune and simulate --ray"),
    "mcp": ("mcp", "kvplan mcp"),
}
NEEDED_FOR: Mapping[str, str] = {extra: use for extra, (_, use) in EXTRAS.items()}
# Distribution -> the extra that installs it; None: required by kvplan itself; "dev": used only by its tests.
PACKAGES: Mapping[str, str | None] = {
    **dict.fromkeys(("typer", "rich", "PyYAML", "nvidia-ml-py", "google-re2")),
    **{name: extra for extra, (names, _) in EXTRAS.items() for name in names.split()},
    "transformers": "dev",
}

# Environment variable -> (the default if it is not set, what it controls).
SETTINGS: Mapping[str, tuple[str, str]] = {
    "KVPLAN_DEBUG": ("0", "1: show a traceback with every error"),
    "KVPLAN_API_KEY": ("", "key that clients of `kvplan serve` must send, unless --api-key states others"),
    "OPENAI_API_KEY": ("", "key that `kvplan profile --server` sends"),
    "NO_COLOR": ("", "if set: no colors"),
    "FORCE_COLOR": ("", "if set: colors in pipes, too"),
    "TTY_COMPATIBLE": ("", "1: treat the output pipe as a terminal"),
    "TERM": ("", "dumb: no live view"),
    "COLUMNS": ("", "terminal width to use instead of the detected one"),
    "HF_TOKEN": ("", "opens gated models on the Hub"),
    "HF_ENDPOINT": ("https://huggingface.co", "the Hub"),
    "HF_HOME": ("~/.cache/huggingface", "the Hub's cache and token"),
    "HF_HUB_CACHE": ("$HF_HOME/hub", "the Hub's cache"),
    "HF_HUB_OFFLINE": ("0", "1: use only the Hub cache"),
    "GITHUB_WORKSPACE": ("", "root of the paths in annotations of `check --format github`"),
    "GITHUB_STEP_SUMMARY": ("", "file to which `check --format github` appends its table"),
    "CUDA_VISIBLE_DEVICES": ("every GPU", "GPUs that CUDA uses, in this order"),
    "CUDA_DEVICE_ORDER": ("FASTEST_FIRST", "PCI_BUS_ID: number GPUs as nvidia-smi does"),
    "TRITON_INTERPRET": ("0", "1: the engine's Triton kernels run in Python, on any device"),
    "WORLD_SIZE": ("", "number of processes that torchrun started"),
    "LOCAL_RANK": ("", "GPU of this process under torchrun"),
    "LOCAL_WORLD_SIZE": ("", "number of processes that torchrun started on this machine"),
    "RANK": ("", "rank of this process under torchrun"),
    "TMPDIR": (tempfile.gettempdir(), "crash logs and temporary files"),
}
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")

_CUDA_TIMEOUT_S = 60
_ASK_CUDA = """
import json, torch
print(json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]))
"""


# --- the facts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Package:
    """A package that kvplan uses: `version` is None if it is missing; `extra` installs it.

    bounds  the versions that kvplan's own metadata allows, such as ">=2.11,<2.14", or None if it does not say
    fits    True if the version is one of them, or None if either is unknown
    """

    name: str
    version: str | None
    extra: str | None
    bounds: str | None = None
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class Torch:
    """How torch was built and what it finds. cuda_available is None if it is unknown; `problem` says why."""

    version: str
    cuda_build: str | None
    cuda_available: bool | None
    num_gpus: int | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or MIG instance; memory in bytes, or None with the reason in `problem`."""

    index: int
    uuid: str
    name: str
    is_mig: bool
    memory: DeviceMemory | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Driver:
    """NVML's status: "ok", or why it is not available, with the remedy in `problem`."""

    status: Literal["ok"] | Reason
    problem: str | None
    driver_version: str | None
    cuda_version: str | None
    gpus: tuple[Gpu, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that kvplan or one of its libraries reads; secret values are hidden."""

    name: str
    value: str
    origin: Literal["environment", "default"]
    meaning: str


@dataclass(frozen=True, slots=True)
class FactsFile:
    """A data file and its number of entries."""

    name: str
    path: str
    num_entries: int | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of the file system that contains a folder."""

    use: str
    path: str
    total: int | None
    free: int | None


@dataclass(frozen=True, slots=True)
class Host:
    """CPU cores, cores available to this process, and bytes of memory; memory_limit is the container's."""

    num_cores: int | None
    num_usable_cores: int | None
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None


@dataclass(frozen=True, slots=True)
class Advice:
    """What does not work and how to fix it; `problem` is None if it is missing."""

    missing: str
    needed_for: str
    cure: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that `kvplan doctor` reports."""

    kvplan: str | None
    kvplan_path: str
    python: str
    python_path: str
    platform: str
    packages: tuple[Package, ...]
    torch: Torch | None
    nvml: Driver
    host: Host
    disks: tuple[Disk, ...]
    facts: tuple[FactsFile, ...]
    settings: tuple[Setting, ...]
    advice: tuple[Advice, ...]


def checkup() -> Checkup:
    """Run all checks; a check that fails reports its reason."""
    packages = package_facts()
    torch, driver = torch_facts(), driver_facts()
    facts = (
        facts_file("models.yaml", lambda: len(catalog.model_names())),
        facts_file("gpus.yaml", lambda: len(gpu_names())),
    )
    return Checkup(
        kvplan=installed("kvplan"),
        kvplan_path=str(Path(__file__).resolve().parents[1]),
        python=platform.python_version(),
        python_path=sys.executable,
        platform=platform.platform(),
        packages=packages,
        torch=torch,
        nvml=driver,
        host=host_facts(),
        disks=(disk("temporary files", tempfile.gettempdir()), disk("current folder", ".")),
        facts=facts,
        settings=tuple(setting(name) for name in SETTINGS),
        advice=(*missing_packages(packages), *misfits(packages), *broken_files(facts), *gpu_advice(torch, driver)),
    )


# --- gathering them -------------------------------------------------------------------------------------------------


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_facts() -> tuple[Package, ...]:
    bounds = own_bounds()
    packages = []
    for name, extra in PACKAGES.items():
        number, admitted = installed(name), bounds.get((canonical(name), extra))
        fits = None if number is None or admitted is None else within(number, admitted)
        packages.append(Package(name, number, extra, admitted, fits))
    return tuple(packages)


_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_EXTRA = re.compile(r"""extra == ['"]([\w.-]+)['"]""")
_RELEASE = re.compile(r"\d{1,9}(?:\.\d{1,9})*")
_BOUND = re.compile(rf"\s*(>=|==|<)\s*({_RELEASE.pattern})\s*")


def own_bounds() -> dict[tuple[str, str | None], str]:
    """(package, extra) -> the versions that kvplan's metadata allows; empty if kvplan is not installed."""
    try:
        requirements = requires("kvplan") or []
    except PackageNotFoundError:
        return {}
    bounds = {}
    for requirement in requirements:
        if (parts := _REQUIREMENT.fullmatch(requirement)) is None:
            continue
        name, specifiers, marker = parts.groups()
        extra = _EXTRA.search(marker or "")
        if specifiers.strip():
            ordered = sorted((bound.strip() for bound in specifiers.split(",")), reverse=True)  # ">=" before "<"
            bounds[canonical(name), extra and extra[1]] = ",".join(ordered)
    return bounds


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def within(number: str, bounds: str) -> bool | None:
    """True if a release satisfies bounds of the forms >=, == and <, or None if one has another form.

    A pre-release or local build counts as its release, because `packaging` is not a dependency of kvplan.
    """
    admitted = True
    for bound in bounds.split(","):
        parts = _BOUND.fullmatch(bound)
        release = _RELEASE.match(number)
        if parts is None or release is None:
            return None
        has, limit = release_key(release[0]), release_key(parts[2])
        match parts[1]:
            case ">=":
                admitted &= has >= limit
            case "==":
                admitted &= has == limit
            case _:
                admitted &= has < limit
    return admitted


def release_key(release: str) -> tuple[int, ...]:
    """A release's numbers without trailing zeros: 2.14 equals 2.14.0."""
    return tuple(int(digits) for digits in re.sub(r"(\.0+)*$", "", release).split("."))


def torch_facts() -> Torch | None:
    """Read what torch's version file states; torch itself runs only if it is built for CUDA."""
    spec, number = find_spec("torch"), installed("torch")
    if spec is None or number is None:
        return None
    build = cuda_build(Path(spec.origin or "").parent / "version.py")
    if build is None:
        return Torch(number, None, False, 0, None)
    return ask_torch(number, build)


def cuda_build(version_file: Path) -> str | None:
    """CUDA version that torch was built with: `cuda: Optional[str] = '12.8'`."""
    try:
        match = re.search(r"^cuda\b[^=\n]*= *'([^'\n]+)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return match.group(1) if match else None


def ask_torch(number: str, build: str) -> Torch:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_CUDA], capture_output=True, text=True, timeout=_CUDA_TIMEOUT_S, check=False
        )
        available, count = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Torch(number, build, None, None, f"no answer in {_CUDA_TIMEOUT_S} s; see what `nvidia-smi` says")
    except (OSError, ValueError, IndexError):
        last = printable((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], 200)
        return Torch(number, build, None, None, f"cannot be loaded ({last}); reinstall it")
    return Torch(number, build, available, count, None)


def driver_facts() -> Driver:
    try:
        with open_nvml() as nvml:
            return open_driver_facts(nvml)
    except DeviceError as error:
        return Driver(error.reason, str(error), None, None, (), ())


def open_driver_facts(nvml: Nvml) -> Driver:
    gpus: list[Gpu] = []
    warnings: list[str] = []
    for device in nvml.devices():
        memory, problem = None, None
        try:
            memory = device.memory()
        except DeviceError as error:
            problem = str(error)
        gpus.append(Gpu(device.index, device.uuid, device.name, device.is_mig, memory, problem))
        warnings += device.warnings
    return Driver("ok", None, nvml.driver_version, nvml.cuda_version, tuple(gpus), (*nvml.warnings, *warnings))


def setting(name: str) -> Setting:
    default, meaning = SETTINGS[name]
    value = os.environ.get(name)
    if value is None:
        return Setting(name, default, "default", meaning)
    text = "(set, not shown)" if _SECRET.search(name) else _CREDENTIALS.sub("//***@", printable(value, 200))
    return Setting(name, text, "environment", meaning)


def facts_file(name: str, count: Callable[[], int]) -> FactsFile:
    path = printable(str(entries.locate(name)), 400)
    try:
        return FactsFile(name, path, count(), None)
    except (OSError, UnicodeDecodeError, KvplanError) as error:
        return FactsFile(name, path, None, printable(str(error), 200))


def disk(use: str, folder: str) -> Disk:
    path = printable(str(Path(folder).absolute()), 400)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Disk(use, path, None, None)
    return Disk(use, path, usage.total, usage.free)


def host_facts() -> Host:
    memory = host_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Host(
        num_cores=os.cpu_count(),
        num_usable_cores=usable,
        memory_total=None if memory is None else memory.total,
        memory_available=None if memory is None else memory.available,
        memory_limit=container_limit()[0],
    )


# --- what to do about it --------------------------------------------------------------------------------------------


def missing_packages(packages: tuple[Package, ...]) -> list[Advice]:
    """List missing packages of kvplan itself and of each incomplete extra: the command affected, how to install."""
    advice = []
    needs: list[tuple[str | None, str]] = [(None, _REQUIRED_FOR), *NEEDED_FOR.items()]
    for extra, needed_for in needs:
        missing = [package.name for package in packages if package.extra == extra and package.version is None]
        if missing:
            # kvplan is installed from source: an index may have another package of this name.
            what = "." if extra is None else f"'.[{extra}]'"
            advice.append(Advice(", ".join(missing), needed_for, f"pip install {what} in kvplan's sources"))
    return advice


def misfits(packages: tuple[Package, ...]) -> list[Advice]:
    """List each package whose version kvplan's own metadata does not allow."""
    return [
        Advice(
            package.name,
            _REQUIRED_FOR if package.extra is None else NEEDED_FOR.get(package.extra, "kvplan's own tests"),
            f"pip install '{package.name}{package.bounds}'",
            f"{package.version} is outside kvplan's bounds ({package.bounds})",
        )
        for package in packages
        if package.fits is False
    ]


def broken_files(facts: tuple[FactsFile, ...]) -> list[Advice]:
    """List each data file that cannot be read."""
    what = {"models.yaml": "models by name", "gpus.yaml": "GPUs by name"}
    return [Advice(file.name, what.get(file.name, file.name), file.problem) for file in facts if file.problem]


def gpu_advice(torch: Torch | None, driver: Driver) -> list[Advice]:
    """List what keeps a GPU from being used; a machine without a driver has no GPU and needs no advice."""
    if driver.problem is not None and driver.status != "absent":
        return [Advice("NVML", "kvplan profile, kvplan watch", driver.problem)]
    silent = [
        Advice(f"GPU {gpu.index}", "kvplan profile and kvplan watch on it", gpu.problem)
        for gpu in driver.gpus
        if gpu.problem is not None
    ]
    return silent + torch_advice(torch, driver)


def torch_advice(torch: Torch | None, driver: Driver) -> list[Advice]:
    """List what is wrong with torch itself, or keeps it from using the GPUs."""
    if torch is None:
        return []  # reported as a missing extra
    if torch.problem is not None:
        return [Advice("torch", "kvplan profile", sentence("torch", torch.problem))]
    if not driver.gpus:
        return []
    if torch.cuda_build is None:
        return [Advice("CUDA in torch", "kvplan profile on the GPU", "install torch built for CUDA (pytorch.org)")]
    if not torch.cuda_available:
        cure = f"a driver for CUDA {torch.cuda_build}, or a torch built for CUDA {driver.cuda_version}"
        return [Advice("a GPU that torch can use", "kvplan profile on the GPU", cure)]
    return []
