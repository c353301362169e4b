"""Launch parameters: how large a tile each kernel works on, with how many warps and pipeline stages.

Nothing tunes itself at run time. The lines come from compiling for sm_80, 89, 90 and 100, where they fit the shared
memory and spill no register (tests/compile_kernels.py prints the table); none has been timed on a GPU yet.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from engine.kernels.numerics import INTERPRETED
from kvplan.errors import EnvironmentProblem

PROGRAMS_PER_PROCESSOR = 3  # decode programs that run at once on one multiprocessor, by their shared memory
ROW_ELEMENTS = 2048  # elements of a row-wise kernel's tile, where rows are shorter

# Shared memory that one program may have, in bytes, by compute capability in tenths (CUDA programming guide, compute
# capabilities): 99, 163 or 227 KiB. The compile check covers 80, 89, 90 and 100.
SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}
MAX_HEAD_DIM = 256
SIZES = (101_376, 166_912, 232_448)  # the columns of the tables below


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """block_n tokens of KV at a time.

    block_m   rows of queries times heads; decode has as many as its heads need
    mask_all  prefill: one loop that masks every tile, where a second one for whole tiles would spill registers
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16
    mask_all: bool = False


@dataclass(frozen=True, slots=True)
class GemmTile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


A, G = AttentionTile, GemmTile

# (dtype of KV, head_dim padded to a power of two) -> tile for 99, 163 and 227 KiB of shared memory
DECODE = {
    ("float32", 64): (A(32, 4, 2), A(32, 4, 2), A(32, 4, 2)),
    ("float32", 128): (A(16, 4, 2), A(16, 4, 2), A(16, 4, 2)),
    ("float32", 256): (A(16, 4, 2), A(16, 4, 2), A(16, 4, 2)),
    ("16-bit", 64): (A(64, 4, 3), A(64, 4, 3), A(64, 4, 3)),
    ("16-bit", 128): (A(32, 4, 3), A(64, 4, 3), A(64, 4, 3)),
    ("16-bit", 256): (A(32, 4, 2), A(32, 4, 3), A(32, 4, 3)),
    ("float8", 64): (A(64, 4, 3), A(64, 4, 3), A(64, 4, 3)),
    ("float8", 128): (A(64, 4, 3), A(64, 4, 3), A(64, 4, 3)),
    ("float8", 256): (A(32, 4, 3), A(32, 4, 3), A(32, 4, 3)),
}
PREFILL = {
    ("float32", 64): (A(32, 8, 1, 32, True), A(32, 8, 1, 32, True), A(32, 8, 1, 32, True)),
    ("float32", 128): (A(16, 8, 1, 16, True), A(16, 8, 1, 16, True), A(16, 8, 1, 16, True)),
    ("float32", 256): (A(16, 4, 1, 16, True), A(16, 4, 1, 16, True), A(16, 4, 1, 16, True)),
    ("16-bit", 64): (A(64, 8, 2, 128), A(64, 8, 3, 128), A(64, 8, 3, 128)),
    ("16-bit", 128): (A(32, 8, 3, 128), A(32, 8, 3, 128), A(64, 8, 3, 128)),
    ("16-bit", 256): (A(32, 8, 2, 64), A(32, 8, 2, 64), A(32, 8, 2, 128)),
    ("float8", 64): (A(64, 8, 2, 128), A(64, 8, 3, 128), A(64, 8, 3, 128)),
    ("float8", 128): (A(32, 8, 3, 128), A(32, 8, 3, 128), A(64, 8, 3, 128)),
    ("float8", 256): (A(32, 8, 2, 64), A(32, 8, 2, 64), A(32, 8, 3, 64, True)),
}
# (dtype, heads of one program) -> as above. Few heads fill no larger tile; many share what each program loads.
LATENT = {
    ("float32", 16): (A(16, 8, 1, 16), A(16, 8, 1, 16), A(16, 8, 1, 16)),
    ("float32", 64): (A(16, 8, 1, 16), A(16, 8, 1, 16), A(16, 8, 1, 16)),
    ("16-bit", 16): (A(32, 8, 2, 16), A(32, 8, 3, 16), A(32, 8, 3, 16)),
    ("16-bit", 64): (A(16, 8, 2, 32), A(32, 8, 2, 32), A(32, 8, 2, 64)),
}
# (dtype, most rows per expert) -> as above
GEMM = {
    ("float32", 16): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("float32", 64): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("float32", 128): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("16-bit", 16): (G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3)),
    ("16-bit", 64): (G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3)),
    ("16-bit", 128): (G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3), G(128, 128, 64, 8, 3)),
}


def decode_tile(arch: int, head_dim: int, stored: torch.dtype, compute: torch.dtype) -> AttentionTile:
    return DECODE[_kind(stored, compute), _padded(head_dim)][_column(arch)]


def prefill_tile(arch: int, head_dim: int, stored: torch.dtype, compute: torch.dtype, rows: int) -> AttentionTile:
    """rows: queries of the longest chunk, times the heads that share a KV head."""
    tile = PREFILL[_kind(stored, compute), _padded(head_dim)][_column(arch)]
    return replace(tile, block_m=64) if rows <= 64 < tile.block_m else tile


def max_heads_per_kv(arch: int, head_dim: int, stored: torch.dtype, compute: torch.dtype) -> int:
    """Query heads that may share a KV head: prefill's largest tile holds one query of them all."""
    return PREFILL[_kind(stored, compute), _padded(head_dim)][_column(arch)].block_m


def latent_tile(arch: int, num_heads: int, dtype: torch.dtype) -> AttentionTile:
    return LATENT[_kind(dtype, dtype), 16 if num_heads <= 16 else 64][_column(arch)]


def gemm_tile(arch: int, rows_per_expert: int, dtype: torch.dtype) -> GemmTile:
    most = next((most for most in (16, 64) if rows_per_expert <= most), 128)
    return GEMM[_kind(dtype, dtype), most][_column(arch)]


def _kind(stored: torch.dtype, compute: torch.dtype) -> str:
    """Products of float32 take no tensor cores and most registers, whatever is stored."""
    if compute == torch.float32:
        return "float32"
    return "float8" if stored == torch.float8_e4m3fn else "16-bit"


def _padded(head_dim: int) -> int:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: the kernels have no tile above {MAX_HEAD_DIM} ({head_dim}); add one to configs.py")
    return max(64, 1 << (head_dim - 1).bit_length())


def _column(arch: int) -> int:
    if arch not in SHARED_MEMORY:
        known = ", ".join(f"sm_{known}" for known in SHARED_MEMORY)
        raise EnvironmentProblem(
            f"sm_{arch}: the Triton kernels have no tiles for it (they have {known}); use the torch backend"
        )
    return SIZES.index(SHARED_MEMORY[arch])


def row_warps(elements: int) -> int:
    """Warps for a tile of so many elements: 16 elements or fewer to a thread."""
    return min(16, 1 << (max(elements - 1, 0) // 512).bit_length())


def arch() -> int:
    """The current GPU's compute capability in tenths: 90 for 9.0. The interpreter takes the tiles of 9.0."""
    if INTERPRETED:
        return 90
    driver = triton.runtime.driver.active
    return _arch_of(driver, driver.get_current_device())


@lru_cache(maxsize=64)
def _arch_of(driver: object, device: int) -> int:
    return int(driver.get_current_target().arch)  # type: ignore[attr-defined]  # a Triton driver, untyped


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
