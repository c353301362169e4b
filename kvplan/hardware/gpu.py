"""GPUs: what CUDA reports as their memory, how fast they are, and where each figure comes from.

Total memory is what `cudaMemGetInfo` and torch's `total_memory` report, which is below the vendor's figure: the driver
reserves 1 to 3.4%, and GDDR6 boards with ECC on lose another sixteenth. If a server's log or a device query gives
that total, gpus.yaml has it (`logged`) with the lowest and highest reading. Otherwise it is `nominal`: the published
size read as GiB, less what logged cards of its kind keep back, their least and most as the range. Small cards keep
back the same amount whatever their size, so there the rule counts MiB; the others keep a share:

    kind                                          least   likely  most    logged totals
    GDDR6 with ECC kept in the same memory        7.2%    7.9%    9.1%    T4, A10G, A40, L4, L40S
    HBM of 24 GB (A30), as V100 to RTX A6000      0.7%    1.8%    3.4%    14 boards of up to 48 GB
    80 GB and more                                0.8%    1.0%    1.6%    13 boards, A100 to GB300
    Ampere, no ECC in the same memory, MiB        244     430     465     RTX 3060, 3090, 3090 Ti, A5000
    Ada, MiB                                      335     388     502     RTX 4070, 4070 Ti SUPER, 4080, 4090
    Blackwell, MiB                                543     603     667     RTX 5060 Ti, 5090

Under Windows and WSL2 a GeForce keeps back 7 MiB (RTX 4070 SUPER), so that is its least.

FLOP/s are dense. Entries are parsed individually on demand (kvplan.core.entries); names that no entry lists are read by
kvplan.hardware.names, loaded for them alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final, Literal, TypeVar

from kvplan.core import entries
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.records import dataclass

TotalKind = Literal["logged", "nominal", "given"]
KINDS: Final[tuple[TotalKind, ...]] = ("logged", "nominal")
VENDORS = ("nvidia", "amd", "intel")
NODE_GPUS: Final = 8  # the most that one machine is taken to have
INTERCONNECTS = ("nvlink", "infinity-fabric", "pcie", "none")
GIVEN: Final = "given"
Choice = TypeVar("Choice", bound=str)
LOG_PRECISION = 2**30 // 200  # half of the last digit of "139.81 GiB"
PAGE: Final = 4096  # no device has a part of one, so a total that is none is a rounded text


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU as its runtime lists it: bytes, bytes/s and dense FLOP/s; None if a figure is not published.

    total_memory_kind  logged | nominal (gpus.yaml), given (by the user)
    compute_capability CUDA's, such as '9.0'; None for other vendors, whose `architecture` is a name: gfx942, xe2
    sm_count           multiprocessors, or compute units on AMD
    unified            the CPU and the GPU share one memory, so less than the total is free for a model
    interconnect       between GPUs of one server: nvlink, infinity-fabric, pcie, none; None for a custom GPU
    interconnect_bandwidth  bytes per second of one GPU, both directions together, as the vendor states it
    offered            a remedy may name it: not a laptop's, nor one that is sold no more
    """

    name: str
    vendor: str
    device_name: str
    total_memory: int
    total_memory_low: int
    total_memory_high: int
    total_memory_kind: TotalKind
    total_memory_source: str
    nominal_memory: int | None
    memory_bandwidth: int | None
    bf16_flops: int | None
    fp16_flops: int | None
    fp8_flops: int | None
    int8_flops: int | None
    fp4_flops: int | None
    compute_capability: str | None
    architecture: str | None
    sm_count: int | None
    unified: bool
    source: str
    interconnect: str | None = None
    interconnect_bandwidth: int | None = None
    interconnect_source: str = ""
    offered: bool = True

    @property
    def sm(self) -> int:
        """CUDA's architecture number: 90 for compute capability 9.0, 120 for 12.0, or 0 if there is none."""
        return _sm(self.compute_capability)

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, (9, 0); None for AMD and for a GPU of which only the memory is known."""
        if self.compute_capability is None:
            return None
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    @property
    def lacks_peer_access(self) -> bool:
        """True if GPUs of one server cannot write to each other's memory, so that NCCL sends through the host's.

        Source: NVIDIA's driver supports it on no GeForce RTX 40 and 50 (NVIDIA/nccl#1127;
        tinygrad/open-gpu-kernel-modules is a driver that adds it); other GeForce cards are assumed to be the same.
        """
        return self.interconnect == "pcie" and "geforce" in self.device_name.lower()

    @property
    def has_own_limit(self) -> bool:
        """True if the driver lends the GPU a fixed part of a shared memory: GTT of Strix Halo, Metal's working set.

        What other programs use lies in the rest and does not lessen it; on GB10 and Jetson it does.
        """
        return self.unified and (self.vendor == "apple" or self.architecture == "gfx1151")

    @property
    def node_gpus(self) -> int:
        """Most GPUs of one machine: where host and GPU are one chip with one memory, there is no second."""
        return 1 if self.unified and self.interconnect == "none" else NODE_GPUS

    @property
    def shared_memory(self) -> int:
        """Bytes of the one memory that a GPU shares with the host, 0 if it has its own."""
        if not self.unified:
            return 0
        return self.total_memory if self.nominal_memory is None or not self.has_own_limit else self.nominal_memory

    @property
    def is_a100(self) -> bool:
        """True for an A100 by device name, which vLLM's scheduler defaults treat as a small GPU."""
        return "a100" in self.device_name.lower()

    @property
    def is_gb10(self) -> bool:
        """True for GB10 (DGX Spark), likewise treated as a small GPU by vLLM's scheduler defaults."""
        return "gb10" in self.device_name.lower()


@cache  # a plan looks it up eight times
def _sm(compute_capability: str | None) -> int:
    if compute_capability is None:
        return 0
    major, minor = compute_capability.split(".")
    return 10 * int(major) + int(minor)


@cache
def gpu(name: str) -> GpuSpec:
    """Look up a GPU by any name of one (kvplan.hardware.names). Raise UsageError with suggestions if there is none."""
    path = entries.locate("gpus.yaml")
    known = entries.resolve(path, name.strip())
    if known is not None:
        return read_entry(known, entries.entry(path, known))
    from kvplan.hardware import names  # only for a name that is not listed

    spec = names.find(name)
    if spec is None:
        raise names.unknown(name)
    return spec


def of_device(device_name: str, total_memory: int) -> GpuSpec | None:
    """The GPU with a name as the driver says it, of several the one whose memory is nearest; None: it is not known."""
    if " MIG " in device_name:
        from kvplan.hardware import slices  # only for one

        return slices.of_device(device_name)
    texts = entries.sections(entries.locate("gpus.yaml")).items()
    known = [gpu(name) for name, text in texts if f'device_name: "{device_name}"\n' in text]
    return min(known, key=lambda spec: abs(spec.total_memory - total_memory), default=None)


def split_count(text: str) -> tuple[int | None, str]:
    """Split "8xh100", "l40s:2", "h100x8", "8*h100" or a cloud instance into (count, GPU name); None: no count."""
    if entries.resolve(entries.locate("gpus.yaml"), text.strip()) is not None:
        return None, text
    from kvplan.hardware import names  # only for a name that is not listed

    return names.counted(text)


@cache
def _names() -> tuple[str, ...]:
    return tuple(entries.sections(entries.locate("gpus.yaml")))


def gpu_names() -> list[str]:
    """Every GPU's own name, in the file's order (by vendor and generation)."""
    return list(_names())


@cache
def offered_names() -> tuple[str, ...]:
    """Those that a remedy may name; the others are not parsed."""
    texts = entries.sections(entries.locate("gpus.yaml")).items()
    return tuple(name for name, text in texts if "\n  offered: false\n" not in text)


def of_total(reports: Callable[[GpuSpec], bool]) -> list[GpuSpec]:
    """GPUs that a total alone may mean: those on offer, else other logged ones; none whose total its owner sets."""
    reporting = [spec for spec in map(gpu, gpu_names()) if not spec.has_own_limit and reports(spec)]
    offered = [spec for spec in reporting if spec.offered]
    return offered or [spec for spec in reporting if spec.total_memory_kind == "logged"]


def custom_gpu(total_memory: int) -> GpuSpec:
    """A GPU of which only the memory is known, as given by `--gpu-memory 24GiB`."""
    return GpuSpec(
        name="custom",
        vendor="unknown",
        device_name="custom",
        total_memory=_given(total_memory),
        total_memory_low=total_memory,
        total_memory_high=total_memory,
        total_memory_kind=GIVEN,
        total_memory_source="--gpu-memory",
        nominal_memory=None,
        memory_bandwidth=None,
        bf16_flops=None,
        fp16_flops=None,
        fp8_flops=None,
        int8_flops=None,
        fp4_flops=None,
        compute_capability=None,
        architecture=None,
        sm_count=None,
        unified=False,
        source="--gpu-memory",
    )


def with_memory(spec: GpuSpec, total_memory: int) -> GpuSpec:
    """The same GPU with a total given by the user, as in `--gpu h100 --gpu-memory 78GiB`."""
    return replace(
        spec,
        total_memory=_given(total_memory),
        total_memory_low=total_memory,
        total_memory_high=total_memory,
        total_memory_kind=GIVEN,
        total_memory_source="--gpu-memory",
    )


def _given(total_memory: int) -> int:
    if total_memory <= 0:
        raise UsageError("--gpu-memory", f"must be greater than 0 ({total_memory} bytes)", "write, for example, 24GiB")
    return total_memory


def read_entry(name: str, facts: Mapping[str, Any]) -> GpuSpec:
    """Parse one entry of gpus.yaml. Raise InvalidInputError naming a fact that is missing or impossible."""
    low, high = _range(name, facts)
    spec = GpuSpec(
        name=name,
        vendor=_one_of(name, facts, "vendor", VENDORS),
        device_name=_text(name, facts, "device_name"),
        total_memory=_count(name, facts, "total_memory"),
        total_memory_low=low,
        total_memory_high=high,
        total_memory_kind=_one_of(name, facts, "total_memory_kind", KINDS),
        total_memory_source=_text(name, facts, "total_memory_source"),
        nominal_memory=_count(name, facts, "nominal_memory"),
        memory_bandwidth=_count(name, facts, "memory_bandwidth"),
        bf16_flops=_maybe_count(name, facts, "bf16_flops"),
        fp16_flops=_maybe_count(name, facts, "fp16_flops"),
        fp8_flops=_maybe_count(name, facts, "fp8_flops"),
        int8_flops=_maybe_count(name, facts, "int8_flops"),
        fp4_flops=_maybe_count(name, facts, "fp4_flops"),
        compute_capability=_capability(name, facts),
        architecture=_maybe_text(name, facts, "architecture"),
        sm_count=_maybe_count(name, facts, "sm_count"),
        unified=_flag(name, facts, "unified"),
        source=_text(name, facts, "source"),
        interconnect=_one_of(name, facts, "interconnect", INTERCONNECTS),
        interconnect_bandwidth=_maybe_count(name, facts, "interconnect_bandwidth"),
        interconnect_source=_text(name, facts, "interconnect_source"),
        offered=_flag(name, facts, "offered", True),
    )
    _check(spec)
    if spec.total_memory_kind != "logged" or spec.total_memory % PAGE == 0:
        return spec
    # A log has two decimals of a GiB, so the reading itself is a range.
    low = min(spec.total_memory_low, spec.total_memory - LOG_PRECISION)
    return replace(
        spec, total_memory_low=low, total_memory_high=max(spec.total_memory_high, spec.total_memory + LOG_PRECISION)
    )


def _check(spec: GpuSpec) -> None:
    if not spec.total_memory_low <= spec.total_memory <= spec.total_memory_high:
        raise _invalid(spec.name, "total_memory", "is outside total_memory_range", spec.total_memory)
    if spec.nominal_memory is not None and spec.total_memory_high > spec.nominal_memory:
        raise _invalid(spec.name, "total_memory_range", "exceeds nominal_memory", spec.total_memory_high)
    if (spec.interconnect == "none") != (spec.interconnect_bandwidth is None):
        raise _invalid(spec.name, "interconnect_bandwidth", "stands beside an interconnect, and only there", None)
    if (spec.compute_capability is None) == (spec.architecture is None):
        raise _invalid(spec.name, "compute_capability", "and architecture: exactly one is needed", None)


def _invalid(name: str, fact: str, what: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"gpus.yaml: {name}", f"{fact} {what} ({value!r})", "correct the entry")


def _range(name: str, facts: Mapping[str, Any]) -> tuple[int, int]:
    match facts.get("total_memory_range"):
        case [int(low), int(high)] if 0 < low <= high:
            return low, high
        case value:
            raise _invalid(name, "total_memory_range", "is not [low, high] in bytes", value)


def _maybe_count(name: str, facts: Mapping[str, Any], fact: str) -> int | None:
    return None if facts.get(fact) is None else _count(name, facts, fact)


def _count(name: str, facts: Mapping[str, Any], fact: str) -> int:
    value = facts.get(fact)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _invalid(name, fact, "is not a positive integer", value)
    return value


def _maybe_text(name: str, facts: Mapping[str, Any], fact: str) -> str | None:
    return None if facts.get(fact) is None else _text(name, facts, fact)


def _text(name: str, facts: Mapping[str, Any], fact: str) -> str:
    value = facts.get(fact)
    if not isinstance(value, str) or not value.strip():
        raise _invalid(name, fact, "is not text", value)
    return value


def _one_of(name: str, facts: Mapping[str, Any], fact: str, known: tuple[Choice, ...]) -> Choice:
    value = _text(name, facts, fact)
    for choice in known:
        if value == choice:
            return choice
    raise _invalid(name, fact, f"is none of {', '.join(known)}", value)


def _capability(name: str, facts: Mapping[str, Any]) -> str | None:
    value = _maybe_text(name, facts, "compute_capability")
    if value is not None and not re.fullmatch(r"[0-9]+\.[0-9]", value):
        raise _invalid(name, "compute_capability", "is not of the form '9.0'", value)
    return value


def _flag(name: str, facts: Mapping[str, Any], fact: str, usual: bool = False) -> bool:
    value = facts.get(fact, usual)
    if not isinstance(value, bool):
        raise _invalid(name, fact, "is neither true nor false", value)
    return value
