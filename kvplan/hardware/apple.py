"""Macs: chips of Apple, whose GPU and CPU share one memory.

What a model may use is Metal's recommendedMaxWorkingSetSize, which macOS decides. llama.cpp logs it: 5461 MiB of
8 GiB (M1), 18186 of 24 (M5), 28753 of 36 (M4 Max), 49152 of 64 (M3 Max), 53084 of 64 (M1 Max). These sizes are logged,
each for the chip that showed it; others are nominal: three quarters of the memory, two thirds at the low end (M1) and
0.81 at the high end (M1 Max). `iogpu.wired_limit_mb` raises it: --gpu-memory says to what. Memory sizes, bandwidth and
GPU cores: Apple's technical specifications of each Mac.
"""

import re
from functools import cache
from typing import Final, NamedTuple

from kvplan.core.units import GIB, MIB
from kvplan.hardware.gpu import GpuSpec

_TYPED: Final = re.compile(
    r"(?:apple|mac ?book(?: (?:air|pro))?|mac ?mini|mac ?studio|imac)?\s*(m[1-9])\s*(pro|max|ultra)?"
    r"\s*(?:([0-9]{1,3})\s*(?:g|gb|gib))?"
)
LOW, LIKELY, HIGH = 2 / 3, 3 / 4, 0.81
LOGGED: Final = {"m1-8g": 5461, "m5-24g": 18186, "m4-max-36g": 28753, "m3-max-64g": 49152, "m1-max-64g": 53084}


class Chip(NamedTuple):
    """A chip: GB/s of its memory, the most GPU cores, and the sizes of memory that it is sold with."""

    bandwidth: int
    cores: int
    sizes: tuple[int, ...]


CHIPS: Final = {
    "m1": Chip(68, 8, (8, 16)),
    "m1-pro": Chip(200, 16, (16, 32)),
    "m1-max": Chip(400, 32, (32, 64)),
    "m1-ultra": Chip(800, 64, (64, 128)),
    "m2": Chip(100, 10, (8, 16, 24)),
    "m2-pro": Chip(200, 19, (16, 32)),
    "m2-max": Chip(400, 38, (32, 64, 96)),
    "m2-ultra": Chip(800, 76, (64, 128, 192)),
    "m3": Chip(100, 10, (8, 16, 24)),
    "m3-pro": Chip(150, 18, (18, 36)),
    "m3-max": Chip(400, 40, (36, 48, 64, 96, 128)),
    "m3-ultra": Chip(819, 80, (96, 256, 512)),
    "m4": Chip(120, 10, (16, 24, 32)),
    "m4-pro": Chip(273, 20, (24, 48, 64)),
    "m4-max": Chip(546, 40, (36, 48, 64, 128)),
    "m5": Chip(153, 10, (16, 24, 32)),
    "m5-pro": Chip(307, 20, (24, 48, 64)),
    "m5-max": Chip(614, 40, (36, 48, 64, 128)),
}


def names() -> list[str]:
    """Every Mac by its chip and its memory: m4-max-64g."""
    return [f"{chip}-{size}g" for chip, row in CHIPS.items() for size in row.sizes]


def split(text: str) -> tuple[str, int | None] | None:
    """(chip, GiB of memory or None) of "M4 Max 64GB", "apple m1-8g", "MacBook Pro M3 Pro"; None: it names no chip."""
    match = _TYPED.fullmatch(re.sub(r"[\s_(),-]+", " ", text.lower()).strip())
    if match is None:
        return None
    return "-".join(filter(None, match.group(1, 2))), int(match[3]) if match[3] else None


@cache
def mac(chip: str, size: int) -> GpuSpec:
    """A Mac as a GPU; its chip is of `CHIPS`, its memory one of the chip's sizes."""
    row, name, memory = CHIPS[chip], f"{chip}-{size}g", size * GIB
    logged = LOGGED.get(name)
    total = round(memory * LIKELY) if logged is None else logged * MIB
    nominal = f"three quarters of {size} GiB; 0.67 to 0.81 are logged on other Macs"
    source = nominal if logged is None else f"llama.cpp logged {logged} MiB of {size} GiB"
    return GpuSpec(
        name=name, vendor="apple", device_name=f"Apple {chip.replace('-', ' ').title()}", total_memory=total,
        total_memory_low=min(total, round(memory * LOW)), total_memory_high=max(total, round(memory * HIGH)),
        total_memory_kind="nominal" if logged is None else "logged",
        total_memory_source=f"recommendedMaxWorkingSetSize: {source}; raised by iogpu.wired_limit_mb",
        nominal_memory=memory, memory_bandwidth=row.bandwidth * 10**9, bf16_flops=None, fp16_flops=None, fp8_flops=None,
        int8_flops=None, fp4_flops=None, compute_capability=None, architecture=f"apple-{chip.partition('-')[0]}",
        sm_count=row.cores, unified=True,
        source=f"Apple's technical specifications of Macs with {chip} ({row.bandwidth} GB/s)",
        interconnect="none", interconnect_source="one GPU to a machine",
    )  # fmt: skip
