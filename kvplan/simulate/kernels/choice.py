"""Which measured kernels stand for those of a server on a GPU."""

from collections.abc import Mapping
from math import log
from typing import Final, NamedTuple

from kvplan.hardware import gpu as gpus
from kvplan.hardware.gpu import GpuSpec
from kvplan.servers.releases import Version

# Measured systems, by the GPU in them.
MEASURED: Final = {
    "a100-80g": "a100_sxm",
    "h100-80g": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
# Whose all-reduces a GPU that borrows this one's kernels takes where they are faster. Among 8 L40S they reach 2 GB/s, a
# thirtieth of the link, which is that machine's board: 8 RTX A6000 and 8 RTX 4090 serve several times as fast as that.
LINKS: Final[Mapping[str, tuple[str, ...]]] = {"l40s": ("rtx-pro-6000",)}
SERVERS: Final = ("vllm", "sglang", "trtllm")


class Choice(NamedTuple):
    """A server whose kernels of a format are not those in its own table; sm: CUDA architectures, all if empty."""

    kind: str
    server: str
    form: str
    sm: tuple[int, ...]
    parts: tuple[str, ...]
    why: str


CHOICES: Final = (
    Choice(
        "gemm",
        "vllm",
        "fp8_block",
        (),
        ("gemm/fp8_block/sglang", "gemm/fp8_block/trtllm"),
        "vLLM's own rows hold launches: 60 to 800 us from 1 to 1,024 tokens, where the same kernel takes 10",
    ),
    Choice(
        "moe",
        "vllm",
        "fp8",
        (90,),
        ("moe/fp8_block/{law}/vllm",),
        "vLLM's own rows are of a kernel that it takes only if asked to: 3 times as slow as 16 bits",
    ),
    Choice(
        "moe",
        "vllm",
        "mxfp4_mxfp8",
        (),
        ("moe/mxfp4_mxfp8/{law}/sglang",),
        "vLLM serves these experts with the kernel of FlashInfer that was measured under SGLang",
    ),
)


class Blocks(NamedTuple):
    """Releases whose experts in fp8 blocks are multiplied in whole blocks of tokens, filled or not.

    since, until  the first such release, and the first after it
    sm            CUDA architectures
    ranks         ranks that share each expert, from which on another kernel is taken
    """

    server: str
    since: tuple[int, int]
    until: tuple[int, int]
    sm: tuple[int, ...]
    ranks: int


# DeepGEMM's contiguous layout, in steps of any size. Until 0.11.0, on Hopper from 128 tokens on, and Triton below
# (0.11.1 and 0.11.2 are not told apart here); from 0.15 on FlashInfer's kernels first, from 0.18 on Triton's on Hopper.
# Source: vLLM 0.11.0, 0.11.1, 0.12 to 0.16 and 0.18, fused_moe/triton_deep_gemm_moe.py, deep_gemm_utils.py,
# oracle/fp8.py and quantization/fp8.py. From 0.13 on empty blocks are marked to be skipped; vllm-project/vllm#17934
# saw no difference, and vllm-project/llm-compressor#2292 has 0.14 as slow as 0.12.
IN_BLOCKS: Final = (Blocks("vllm", (0, 12), (0, 15), (90, 100), 8),)
# Formats whose kernels are the most alike, where a format was not measured.
INSTEAD: Final = {
    "mxfp4": ("int4",),
    "mxfp4_mxfp8": ("mxfp4",),
    "fp8_block": ("fp8",),
    "fp8": ("fp8_block",),
    "int8": ("fp8", "fp8_block"),
    "nvfp4": ("mxfp4_mxfp8", "fp8"),
    "int4": ("mxfp4",),
}


class Source(NamedTuple):
    """The measured system whose efficiencies a GPU takes, and whether it is that GPU's own."""

    system: str
    base: GpuSpec
    is_own: bool


def source_of(gpu: GpuSpec) -> Source:
    """The GPU's own tables; else those of the same CUDA architecture, or the nearest, with the most similar ratio of
    arithmetic to bandwidth; for other vendors those of the same narrowest format.
    """
    if gpu.name in MEASURED:
        return Source(MEASURED[gpu.name], gpu, True)
    others = [gpus.gpu(name) for name in MEASURED]
    if gpu.sm:
        least = min(abs(other.sm - gpu.sm) for other in others)
        others = [other for other in others if abs(other.sm - gpu.sm) == least]
    else:
        others = [other for other in others if formats(other) == formats(gpu)] or others
    base = min(others, key=lambda other: abs(log(balance(other) / balance(gpu))))
    return Source(MEASURED[base.name], base, False)


def others(base: GpuSpec) -> list[tuple[GpuSpec, str]]:
    """The other measured GPUs and their systems, the most similar first."""
    measured = [(gpus.gpu(name), system) for name, system in MEASURED.items() if name != base.name]
    return sorted(measured, key=lambda row: (abs(row[0].sm - base.sm), abs(log(balance(row[0]) / balance(base)))))


def formats(gpu: GpuSpec) -> tuple[bool, bool]:
    return gpu.fp8_flops is not None, gpu.fp4_flops is not None


def balance(gpu: GpuSpec) -> float:
    """FLOPs that a GPU does while it reads a byte."""
    return (gpu.bf16_flops or gpu.fp16_flops or 1) / (gpu.memory_bandwidth or 1)


def multiplies_blocks(release: Version, gpu: GpuSpec, ranks: int) -> bool:
    """Whether experts in fp8 blocks, each shared by so many ranks, are multiplied in whole blocks of tokens."""
    return any(
        (release.engine, release.is_within(row.since, row.until), gpu.sm in row.sm) == (row.server, True, True)
        and ranks < row.ranks
        for row in IN_BLOCKS
    )


def parts_of(kind: str, form: str, server: str, base: GpuSpec, law: str = "") -> tuple[str, ...]:
    """Names of the parts that hold a server's kernels of one format, the best first."""
    for row in CHOICES:
        if (row.kind, row.server, row.form) == (kind, server, form) and (not row.sm or base.sm in row.sm):
            return tuple(name.format(law=law) for name in row.parts)
    order = (server, *(other for other in SERVERS if other != server))
    middle = f"{form}/{law}" if law else form
    return tuple(f"{kind}/{middle}/{other}" for other in order)
