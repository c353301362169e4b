"""MIG slices: parts of one NVIDIA GPU that a server sees as a GPU of their own.

One rule makes every profile: a GPU's memory has eight parts (four on A30 and RTX PRO 6000), a slice of 1, 2, 3, 4 or
7 compute slices has 1, 2, 4, 4 or 8 of them, `1g` also two, and its name rounds the vendor's gigabytes: 7g.141gb,
3g.71gb, 1g.18gb of an H200. SMs and sizes are those of NVIDIA's MIG User Guide (`nvidia-smi mig -lgip`), where this
table has them. A size that it lacks is nominal: the part of the whole GPU's total, of which known slices show 0.91 to
1.0 (1g.18gb of an H200 16.00 of 17.48 GiB, those of A100 and H100 0.96 to 1.0). MIG has no peer-to-peer access between
slices.
"""

import re
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

from kvplan.core.units import GIB
from kvplan.hardware.gpu import GpuSpec, gpu
from kvplan.hardware.gpu import of_device as device_of

GUIDE: Final = "NVIDIA MIG User Guide, `nvidia-smi mig -lgip`"
LOW, LIKELY = 0.91, 0.96
EIGHTHS: Final = {"1g": (1, 2), "2g": (2,), "3g": (4,), "4g": (4,), "7g": (8,)}
QUARTERS: Final = {"1g": (1,), "2g": (2,), "4g": (4,)}
_PROFILE: Final = re.compile(
    r"(?P<gpu>.*?)[\s_-]*(?:mig[\s_-]*)?(?P<profile>[1-7]g\.[0-9]{1,3}gb)(?P<media>\+\S+|\.me\S*)?$", re.I
)


class Whole(NamedTuple):
    """A GPU that can be divided.

    gigabytes  the vendor's, of which profiles' names are made; parts: of its memory
    sms        SMs of its profiles in order of compute slices (1g twice where it has two sizes); empty: not known
    gib        their sizes
    """

    gigabytes: int
    parts: int = 8
    sms: tuple[int, ...] = ()
    gib: tuple[float, ...] = ()


A100_SMS: Final = (14, 14, 28, 42, 56, 98)
HOPPER_SMS: Final = (16, 26, 32, 60, 64, 132)
A100_80G: Final = Whole(80, 8, A100_SMS, (9.5, 19.5, 19.5, 39.25, 39.25, 78.75))
WHOLE: Final = {
    "a30": Whole(24, 4, (14, 28, 56), (5.81, 11.68, 23.44)),
    "a100-40g": Whole(40, 8, A100_SMS, (4.75, 9.75, 9.75, 19.62, 19.62, 39.25)),
    "a100-80g": A100_80G,
    "a100-pcie-80g": A100_80G,
    "h100-80g": Whole(80, 8, HOPPER_SMS, (9.75, 19.62, 19.62, 39.5, 39.5, 79.18)),
    "h100-pcie-80g": Whole(80),
    "h100-nvl-94g": Whole(94),
    "h200": Whole(141, 8, HOPPER_SMS),
    "h200-nvl-141g": Whole(141, 8, HOPPER_SMS),
    "h20": Whole(96),
    "gh200-96g": Whole(96, 8, HOPPER_SMS),
    "gh200-144g": Whole(144, 8, HOPPER_SMS),
    "b200": Whole(180),
    "b300": Whole(269),
    "gb200": Whole(186),
    "gb300": Whole(279),
    "rtx-pro-6000": Whole(96, 4),
}


class Profile(NamedTuple):
    """A slice of a GPU: compute slices, parts of the memory, SMs and GiB (None: the table lacks them)."""

    name: str
    compute: int
    parts: int
    sms: int | None
    gib: float | None


@cache
def profiles(name: str) -> dict[str, Profile]:
    """The slices of a GPU by their names, smallest first; none if it cannot be divided."""
    whole = WHOLE.get(name)
    if whole is None:
        return {}
    sizes = EIGHTHS if whole.parts == 8 else QUARTERS
    pairs = [(compute, parts) for compute, several in sizes.items() for parts in several]
    named = {}
    for number, (compute, parts) in enumerate(pairs):
        gigabytes = (2 * whole.gigabytes * parts + whole.parts) // (2 * whole.parts)  # half is rounded up
        profile = f"{compute}.{gigabytes}gb"
        sms, gib = (row[number] if row else None for row in (whole.sms, whole.gib))
        named[profile] = Profile(profile, int(compute[0]), parts, None if sms is None else int(sms), gib)
    return named


def split(text: str) -> tuple[str, str] | None:
    """(the GPU as it is written, the profile) of a slice's name: h100-1g.10gb, "NVIDIA A30 MIG 1g.6gb"."""
    match = _PROFILE.fullmatch(text.strip())
    return None if match is None else (match["gpu"].strip(" -_"), match["profile"].lower())


def slice_of(name: str, profile: str) -> GpuSpec:
    """A slice as a GPU; `name` is the whole one's own name."""
    whole, part, parts = gpu(name), profiles(name)[profile], WHOLE[name].parts
    share = part.parts / parts
    slice_share = part.compute / (7 if parts == 8 else 4)
    speed = part.sms / whole.sm_count if part.sms and whole.sm_count else slice_share
    rates: dict[str, Any] = {
        rate: None if (value := getattr(whole, rate)) is None else round(value * speed)
        for rate in ("bf16_flops", "fp16_flops", "fp8_flops", "int8_flops", "fp4_flops")
    }
    return with_size(
        replace(
            whole, name=f"{name}-{profile}", device_name=f"{whole.device_name} MIG {profile}",
            nominal_memory=None if whole.nominal_memory is None else round(whole.nominal_memory * share),
            memory_bandwidth=None if whole.memory_bandwidth is None else round(whole.memory_bandwidth * share),
            sm_count=part.sms, interconnect="none", interconnect_bandwidth=None,
            interconnect_source="NVIDIA MIG User Guide: no peer-to-peer access between slices",
            source=f"{profile} of {name}: {part.parts}/{parts} of its bandwidth, {part.compute} compute slices; "
            f"{whole.source}", **rates,
        ),
        part, share,
    )  # fmt: skip


def with_size(spec: GpuSpec, part: Profile, share: float) -> GpuSpec:
    """A slice with its memory in place of the whole GPU's: the guide's, else the part of it as nominal size."""
    high = round(spec.total_memory_high * share)
    if part.gib is not None:
        total = round(part.gib * GIB)
        source = f"{GUIDE}: {part.name} {part.gib:.2f} GiB; other drivers show up to the part of the whole"
        return replace(
            spec, total_memory=total, total_memory_low=total, total_memory_high=max(high, total),
            total_memory_kind="logged", total_memory_source=source,
        )  # fmt: skip
    source = f"{share:.4g} of the whole GPU's total x {LIKELY} ({LOW} to 1.0, as slices of A100, H100 and H200 show)"
    return replace(
        spec, total_memory=round(spec.total_memory * share * LIKELY), total_memory_high=high,
        total_memory_low=round(spec.total_memory_low * share * LOW), total_memory_kind="nominal",
        total_memory_source=source,
    )  # fmt: skip


def of_device(device_name: str) -> GpuSpec | None:
    """The slice with a name as the driver says it: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"; None: it is not known."""
    whole, profile = split(device_name) or ("", "")
    spec = device_of(whole, 0)
    return None if spec is None or profile not in profiles(spec.name) else slice_of(spec.name, profile)
